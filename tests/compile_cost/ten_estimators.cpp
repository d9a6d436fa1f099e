// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A trainer with ten estimators in one unit: six divergences, two losses on a support, two of drawn tokens.
#include <cstdint>

#include "opd/opd.hpp"

namespace {
template <class Teacher, class Estimator>
opd::result of(opd::cpu_backend& be, opd::matrix_view<float> z, const Teacher& teacher, const Estimator& estimator) {
    return opd::evaluate(be, opd::student::logits{z, z}, teacher, estimator);
}
} // namespace

opd::result chosen(int which, opd::cpu_backend& be, opd::matrix_view<float> z, opd::matrix_view<const float> y,
                   opd::matrix_view<const std::int32_t> ids, opd::matrix_view<const float> log_mu,
                   opd::matrix_view<const float> log_q, opd::vector_view<const float> log_tail) {
    const opd::teacher::dense whole{y};
    const opd::teacher::support support{ids, log_q, log_tail};
    const opd::teacher::samples samples{ids, log_mu, log_q};
    switch (which) {
    case 0:
        return of(be, z, whole, opd::reverse_kl{});
    case 1:
        return of(be, z, whole, opd::forward_kl{});
    case 2:
        return of(be, z, whole, opd::jsd{.w = .3, .o = .3});
    case 3:
        return of(be, z, whole, opd::skew_reverse_kl{.a = .1});
    case 4:
        return of(be, z, whole, opd::total_variation{});
    case 5:
        return of(be, z, whole, opd::alpha_divergence{.a = .5});
    case 6:
        return of(be, z, support, opd::renormalised{opd::reverse_kl{}});
    case 7:
        return of(be, z, support, opd::tail_bucket{opd::reverse_kl{}});
    case 8:
        return of(be, z, samples, opd::mc{});
    default:
        return of(be, z, samples, opd::mc{.baseline = opd::baseline::leave_one_out{}});
    }
}
