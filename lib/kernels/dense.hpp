// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Divergences of dense logits of one set of types.
#pragma once

#include "call.hpp"
#include "formulas.hpp"

namespace opd_c::kernel {

template <class Y>
opd::teacher::dense<Y> dense_teacher(const opd_teacher& t) {
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
    if constexpr (opd::is_lumped<Teacher>) { // rows of a bucket name their divergence
        d.validate();
        return d.visit([&](const auto& divergence) { return with_selector(c.estimator, divergence, run); });
    } else {
        return with_selector(c.estimator, d, run);
    }
}

template <class Z, class G, class Y>
opd::result dense_of(const call& c) {
    return divergence_of_sides(c, logits_of<Z, G>(c.student), dense_teacher<Y>(c.teacher));
}

} // namespace opd_c::kernel
