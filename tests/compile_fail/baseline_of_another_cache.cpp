// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// A baseline over certain entries, for i.i.d. samples, which have none.
// expect: opd: this baseline does not read this cache: leave_one_out and self_normalised need i\.i\.d\. teacher::samples
// errors: 1
// control: OPD_CONTROL
#include <opd/backends/cpu.hpp>
#include <opd/opd.hpp>

#ifdef OPD_CONTROL
using chosen = opd::baseline::leave_one_out;
#else
using chosen = opd::baseline::exact_entries;
#endif

void call(opd::cpu_backend& be, opd::student::logits<float> s, opd::teacher::samples<int> t) {
    opd::evaluate(be, s, t, opd::mc_reverse_kl<opd::unclipped_is, chosen>{});
}
