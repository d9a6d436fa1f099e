// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// A differentiated loss has nothing that a baseline could be subtracted from.
// first: opd: this surrogate is a loss of log p and log q alone
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
                  opd::mc{opd::reverse_kl{}, opd::differentiated<opd::k2>{}, opd::baseline::leave_one_out{}});
#endif
}
