// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// The score function on tokens that an earlier student drew.
// first: opd: on these tokens this estimator descends something else than its divergence
// errors: 1
// control: FIXED
#include <opd/backends/cpu.hpp>
#include <opd/opd.hpp>

void call(opd::cpu_backend& be, opd::student::logits<float> s, opd::teacher::samples<int> t) {
#ifdef FIXED
    opd::evaluate(be, s, opd::teacher::on_policy{t}, opd::mc{opd::reverse_kl{}, opd::score_function{}});
#else
    opd::evaluate(be, s, t, opd::mc{opd::reverse_kl{}, opd::score_function{}});
#endif
}
