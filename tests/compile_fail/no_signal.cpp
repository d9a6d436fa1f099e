// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// k1 as a differentiated loss: E_p[∇log p] = 0.
// first: opd: this estimator descends nothing: the mean of its gradient over these tokens is 0
// errors: 1
// control: FIXED
#include <opd/backends/cpu.hpp>
#include <opd/opd.hpp>

void call(opd::cpu_backend& be, opd::student::logits<float> s, opd::teacher::samples<int> t) {
#ifdef FIXED
    opd::evaluate(be, s, opd::teacher::on_policy{t},
                  opd::mc{opd::reverse_kl{}, opd::differentiated<opd::k2>{}, opd::baseline::none{}});
#else
    opd::evaluate(be, s, opd::teacher::on_policy{t},
                  opd::mc{opd::reverse_kl{}, opd::differentiated<opd::k1>{}, opd::baseline::none{}});
#endif
}
