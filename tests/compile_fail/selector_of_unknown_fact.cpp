// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// The teacher's entropy is not known of drawn tokens.
// first: opd: this selector reads what these rows do not know
// errors: 1
// control: FIXED
#include <opd/backends/cpu.hpp>
#include <opd/opd.hpp>

void call(opd::cpu_backend& be, opd::student::logits<float> s, opd::teacher::samples<int> t) {
#ifdef FIXED
    opd::evaluate(be, s, t, opd::selected{opd::mc{}, opd::selector::band{2}});
#else
    opd::evaluate(be, s, t, opd::selected{opd::mc{}, opd::selector::agreed{0.5}});
#endif
}
