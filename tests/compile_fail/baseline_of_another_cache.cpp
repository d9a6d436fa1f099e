// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// A baseline over the other draws, for entries that are no i.i.d. draws.
// expect: opd: this baseline does not read this cache: leave_one_out, self_normalised and minimum_variance need
// i\.i\.d\. teacher::samples errors: 1
// control: OPD_CONTROL
#include <opd/backends/cpu.hpp>
#include <opd/opd.hpp>

#ifdef OPD_CONTROL
using chosen = opd::baseline::exact_entries;
#else
using chosen = opd::baseline::leave_one_out;
#endif

void call(opd::cpu_backend& be, opd::student::logits<float> s, opd::teacher::weighted<int> t) {
    opd::evaluate(be, s, t, opd::mc{.baseline = chosen{}});
}
