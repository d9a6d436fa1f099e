// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Divergences of dense rows of which one side, or both, are hidden states. Logits in memory beside them are float.
#include "hidden.hpp"

#include "dense.hpp"

opd::result opd_c::kernel::hidden_dense(const call& c) {
    if (c.student.kind == OPD_LOGITS)
        return with_state_type("teacher.x", c.teacher.x, [&]<class X>(X) {
            return divergence_of_sides(c, logits_of<float, float>(c.student), hidden_of<X>(c.teacher));
        });
    return with_state_type("student.x", c.student.x, [&]<class X>(X) {
        const auto s = hidden_of<X>(c.student);
        if (c.teacher.kind == OPD_DENSE) return divergence_of_sides(c, s, dense_teacher<float>(c.teacher));
        return divergence_of_sides(c, s, hidden_of<X>(c.teacher));
    });
}
