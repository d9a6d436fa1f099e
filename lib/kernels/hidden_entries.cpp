// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Supports and drawn tokens of a student in hidden states.
#include "hidden.hpp"
#include "sampled.hpp"

opd::result opd_c::kernel::hidden_entries(const call& c) {
    return with_state_type("student.x", c.student.x, [&]<class X>(X) {
        const auto s = hidden_of<X>(c.student);
        if (c.what == form::mc || c.what == form::sampled_forward_kl) return sampled_of_student<float>(c, s);
        return support_of_student<float>(c, s);
    });
}
