// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Divergences of dense logits of one set of types.
#pragma once

#include "call.hpp"
#include "formulas.hpp"

namespace opd_c::kernel {

template <class Y>
opd::teacher::dense<Y, where> dense_teacher(const opd_teacher& t) {
    return {matrix<const Y>("teacher.y", t.y), temperature_of(t.temperature)};
}

/// The caller's divergence of these sides.
template <class Student, class Teacher>
opd::result divergence_of_sides(const call& c, const Student& s, const Teacher& t) {
    const opd::any_dense d = divergence_of(c.estimator);
    if (named("estimator.selector", opd::choice::selectors, c.estimator.selector, "all") ==
        opd::choice::selector::eopd) {
        if (d.which != opd::choice::objective::reverse_kl)
            refuse("estimator.of", "is of eopd, which is reverse KL with forward KL beside it: leave it out");
        return c.run(s, t, opd::eopd(c.estimator.selector_a, c.estimator.selector_b));
    }
    const auto run = [&](const auto& e) { return c.run(s, t, e); };
    const auto select = [&](const auto& divergence) { return with_selector(c.estimator, divergence, run); };
    if constexpr (opd::is_lumped<Teacher>) { // rows of a bucket name their divergence
        d.validate();
        return d.visit(select);
    } else {
        return with_divergence(d, select);
    }
}

/// Of logits, gradient and teacher of one type. A device's are compiled in a unit for each type, cuda/dense_<type>.cu.
template <class Z>
opd::result dense_of(const call& c) {
    return divergence_of_sides(c, logits_of<Z, Z>(c.student), dense_teacher<Z>(c.teacher));
}
#if defined(OPD_KERNELS_CUDA)
extern template opd::result dense_of<float>(const call&);
extern template opd::result dense_of<opd::bfloat16>(const call&);
extern template opd::result dense_of<opd::half>(const call&);
#endif

} // namespace opd_c::kernel
