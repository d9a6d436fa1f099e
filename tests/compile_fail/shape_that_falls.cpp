// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// A mask of large log-ratios is no derivative of a divergence.
// first: opd: on these tokens this estimator descends something else than its divergence
// errors: 1
// control: FIXED
#include <opd/backends/cpu.hpp>
#include <opd/opd.hpp>

void call(opd::cpu_backend& be, opd::student::logits<float> s, opd::teacher::samples<int> t) {
#ifdef FIXED
    opd::evaluate(be, s, t, opd::accept_bias{opd::mc{opd::shape::band{5}}});
#else
    opd::evaluate(be, s, t, opd::mc{opd::shape::band{5}});
#endif
}
