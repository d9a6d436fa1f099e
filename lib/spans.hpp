// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Arguments of functions that take their tensors one by one.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "structs.hpp"
#include "tensor.hpp"

namespace opd_c {

/// Refuses a struct of results that has no size, and writes nothing.
template <class Struct>
void check_out(const char* name, const Struct* to) {
    if (to == nullptr) return;
    Struct copy = {};
    copy.struct_size = to->struct_size;
    write(name, &copy, Struct{});
}
/// A tensor of doubles that must be there.
template <class T>
opd::matrix_view<T> needed_matrix(const char* name, const DLTensor* t) {
    if (t == nullptr) refuse(name, "is a null pointer");
    return matrix<T>(name, t);
}
template <class T>
opd::vector_view<T> needed_vector(const char* name, const DLTensor* t) {
    if (t == nullptr) refuse(name, "is a null pointer");
    return vector<T>(name, t);
}
/// body(view) of a matrix or a vector of float or double.
template <class Body>
void of_floats(const char* name, const DLTensor* t, Body&& body) {
    if (t == nullptr) refuse(name, "is a null pointer");
    if (type_of(*t) == dtype::float32) return body(float{});
    if (type_of(*t) == dtype::float64) return body(double{});
    detail::refuse_type(name, *t, "float32 or float64");
}
/// No output of a pass over anything else of it.
inline void check_apart(const char* name, const DLTensor* out, const char* other, const DLTensor* in) {
    if (out == nullptr || in == nullptr) return;
    const auto bytes = [](const DLTensor& t) {
        std::uintptr_t first = reinterpret_cast<std::uintptr_t>(detail::begin_of(t)), last = 0;
        for (int i = 0; i < t.ndim; ++i) {
            if (t.shape[i] == 0) return std::pair(first, first);
            last += std::uintptr_t(t.shape[i] - 1) * std::uintptr_t(detail::step_of(t, i));
        }
        return std::pair(first, first + (last + 1) * t.dtype.bits / 8);
    };
    const auto [a, a_end] = bytes(*out);
    const auto [b, b_end] = bytes(*in);
    if (a < b_end && b < a_end) refuse(name, std::string("overlaps ") + other);
}

inline void check_shape(const char* name, index_t rows, index_t cols, index_t n, index_t m) {
    if (rows != n || cols != m)
        refuse(name, "has shape " + opd::detail::shape(rows, cols) + ", expected " + opd::detail::shape(n, m));
}

} // namespace opd_c
