// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Sides that are hidden states, as C++ has them.
#pragma once

#include <cstddef>

#include "call.hpp"
#include "opd/hidden.hpp"

namespace opd_c::kernel {

inline std::size_t budget_of(std::uint64_t bytes) {
    return or_default(static_cast<std::size_t>(bytes), std::size_t{256} << 20);
}
template <class X>
opd::student::hidden<X, float, where> hidden_of(const opd_student& s) {
    opd::student::hidden<X, float, where> to{matrix<const X>("student.x", s.x), matrix<const X>("student.w", s.w)};
    to.dx = matrix<float>("student.dx", s.dx), to.dw = matrix<float>("student.dw", s.dw);
    to.bias = vector<const X>("student.bias", s.bias), to.db = vector<float>("student.db", s.db);
    to.temperature = temperature_of(s.temperature);
    to.soft_cap = static_cast<float>(s.soft_cap), to.beta_head = static_cast<float>(s.beta_head);
    to.budget = budget_of(s.budget_bytes);
    return to;
}
template <class X>
opd::teacher::hidden<X, where> hidden_of(const opd_teacher& t) {
    opd::teacher::hidden<X, where> to{matrix<const X>("teacher.x", t.x), matrix<const X>("teacher.w", t.w)};
    to.bias = vector<const X>("teacher.bias", t.bias);
    to.temperature = temperature_of(t.temperature), to.soft_cap = static_cast<float>(t.soft_cap);
    to.budget = budget_of(t.budget_bytes);
    return to;
}
/// body(X{}) with the type of hidden states.
template <class Body>
opd::result with_state_type(const char* name, const DLTensor* x, Body&& body) {
    const dtype d = kernel::type_of(name, x);
    if (d == dtype::float32) return body(float{});
    if (d == dtype::bfloat16) return body(opd::bfloat16{});
    throw opd::unsupported(std::string("opd: ") + name + " is of " + name_of(*x) +
                           "; hidden states are float32 or bfloat16");
}

} // namespace opd_c::kernel
