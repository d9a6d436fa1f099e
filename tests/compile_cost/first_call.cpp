// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// README's first call: what a caller with one estimator compiles.
#include "opd/opd.hpp"

opd::result first(opd::cpu_backend& be, opd::matrix_view<float> z, opd::matrix_view<const float> y) {
    return opd::evaluate(be, opd::student::logits{z, z}, opd::teacher::dense{y}, opd::reverse_kl{});
}
