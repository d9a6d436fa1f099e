// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// EOPD's selector weighs the two parts of a sum.
// first: opd: a selector with mix.. chooses the weights of a weighted_sum
// errors: 1
// control: FIXED
#include <opd/backends/cpu.hpp>
#include <opd/opd.hpp>

void call(opd::cpu_backend& be, opd::student::logits<float> s, opd::teacher::dense<float> t) {
#ifdef FIXED
    opd::evaluate(be, s, t,
                  opd::selected{opd::weighted_sum{opd::reverse_kl{}, opd::forward_kl{}}, opd::selector::eopd{1}});
#else
    opd::evaluate(be, s, t, opd::selected{opd::reverse_kl{}, opd::selector::eopd{1}});
#endif
}
