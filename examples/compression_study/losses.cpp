// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "losses.hpp"

#include "opd/hidden.hpp"
#include "opd/opd.hpp"

namespace compression_study {

template <class Teacher, class Estimator>
double loss_of(opd::cpu_backend& backend, const world& w, const Teacher& teacher, const Estimator& estimator,
               std::vector<float>& gradient) {
    const opd::student::logits student{opd::view(w.student.data(), w.n, w.v), opd::view(gradient.data(), w.n, w.v)};
    return opd::evaluate(backend, student, teacher, estimator, {.reduction = opd::reduce::sum}).loss;
}

namespace {
using matrix = opd::matrix_view<const float>;
using ids = opd::matrix_view<const std::int32_t>;
using flags = opd::matrix_view<const std::uint8_t>;
using hidden = decltype(opd::teacher::hidden{matrix(), matrix()});
using support = decltype(opd::teacher::support{ids(), matrix(), opd::vector_view<const float>()});
using weighted = decltype(opd::teacher::weighted{ids(), matrix(), matrix(), matrix(), flags()});
} // namespace

#define OPD_LOSS(Teacher, Estimator)                                                                                   \
    template double loss_of(opd::cpu_backend&, const world&, const Teacher&, const Estimator&, std::vector<float>&)
OPD_LOSS(hidden, opd::reverse_kl);
OPD_LOSS(support, opd::renormalised<opd::reverse_kl>);
OPD_LOSS(support, opd::tail_bucket<opd::reverse_kl>);
OPD_LOSS(weighted, opd::mc<opd::reverse_kl>);
#undef OPD_LOSS

} // namespace compression_study
