// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Renormalised supports of a student in hidden states: the logits of the support's ids alone are made.
#include "hidden.hpp"
#include "renormalised.hpp"

opd::result opd_c::kernel::hidden_renormalised(const call& c) {
    const opd::renormalised of{divergence_of(c.estimator)};
    return with_state_type("student.x", c.student.x, [&]<class X>(X) {
        const auto s = hidden_of<X>(c.student);
        const auto t = ragged_of<float>(c.teacher, s.x.rows);
        return with_selector(c.estimator, of, [&](const auto& e) { return c.run(s, t, e); });
    });
}
