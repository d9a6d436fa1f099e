// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Renormalised supports of a student in hidden states: the logits of the support's ids alone are made.
#include "hidden.hpp"
#include "renormalised.hpp"

opd::result opd_c::kernel::hidden_renormalised(const call& c) {
    return with_state_type("student.x", c.student.x, [&]<class X>(X) {
        const auto s = hidden_of<X>(c.student);
        return with_renormalised_support<float>(c.teacher, s.x.rows, s.w.rows, [&](const auto& t) {
            return with_divergence(divergence_of(c.estimator), [&](const auto& of) {
                return with_selector(c.estimator, opd::renormalised{of}, [&](const auto& e) { return c.run(s, t, e); });
            });
        });
    });
}
