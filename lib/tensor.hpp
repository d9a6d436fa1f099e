// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// From a DLTensor to the library's views. Shapes that belong together are checked by the C++ call; here each tensor
// is checked alone: its type, where it lies, and that its rows are rows.
#pragma once

#include <cstdint>
#include <string>
#include <type_traits>

#include "errors.hpp"
#include "opd/batch.hpp"
#include "opd/c/dlpack.h"
#include "opd/element.hpp"
#include "opd/view.hpp"

namespace opd_c {

using opd::index_t;

enum class dtype { float32, float64, bfloat16, half, int8, uint8, int16, int32, int64, boolean, other };

inline dtype type_of(const DLTensor& t) {
    if (t.dtype.lanes != 1) return dtype::other;
    const int bits = t.dtype.bits;
    switch (t.dtype.code) {
    case kDLFloat:
        return bits == 32 ? dtype::float32 : bits == 64 ? dtype::float64 : bits == 16 ? dtype::half : dtype::other;
    case kDLBfloat:
        return bits == 16 ? dtype::bfloat16 : dtype::other;
    case kDLInt:
        return bits == 32   ? dtype::int32
               : bits == 64 ? dtype::int64
               : bits == 16 ? dtype::int16
               : bits == 8  ? dtype::int8
                            : dtype::other;
    case kDLUInt:
        return bits == 8 ? dtype::uint8 : dtype::other;
    case kDLBool:
        return bits == 8 ? dtype::boolean : dtype::other;
    default:
        return dtype::other;
    }
}
inline std::string name_of(const DLTensor& t) {
    static constexpr const char* codes[] = {"int", "uint", "float", "handle", "bfloat", "complex", "bool"};
    return (t.dtype.code < 7 ? codes[t.dtype.code] : "type " + std::to_string(t.dtype.code) + ", ") +
           std::to_string(t.dtype.bits) + (t.dtype.lanes == 1 ? "" : "x" + std::to_string(t.dtype.lanes));
}

template <class T>
constexpr dtype type_for() {
    using U = std::remove_const_t<T>;
    if constexpr (std::is_same_v<U, float>)
        return dtype::float32;
    else if constexpr (std::is_same_v<U, double>)
        return dtype::float64;
    else if constexpr (std::is_same_v<U, opd::bfloat16>)
        return dtype::bfloat16;
    else if constexpr (std::is_same_v<U, opd::half>)
        return dtype::half;
    else if constexpr (std::is_same_v<U, std::int32_t>)
        return dtype::int32;
    else
        return dtype::int64;
}

/// Where tensors of a call lie: a DLDeviceType and which of them.
struct place {
    std::int32_t type = kDLCPU, id = 0;
};

namespace detail {

inline void check_place(const char* name, const DLTensor& t, place at) {
    const auto type = t.device.device_type;
    const bool host = type == kDLCPU || type == kDLCUDAHost;
    if (at.type == kDLCPU && !host)
        throw opd::unsupported(std::string("opd: ") + name + ": lies on a device of type " + std::to_string(type) +
                               (type == kDLCUDA ? "; a call over it takes an engine of that device"
                                                : "; this library has kernels for the CPU and for CUDA"));
    if (at.type != kDLCPU && type != at.type && type != kDLCUDAManaged)
        refuse(name, host ? "lies in the CPU's memory, and the engine is of a device"
                          : "lies on a device of type " + std::to_string(type) + ", and the engine is of another");
    if (type == at.type && type == kDLCUDA && t.device.device_id != at.id)
        refuse(name, "lies on device " + std::to_string(t.device.device_id) + ", and the engine is of device " +
                         std::to_string(at.id));
    if (t.ndim < 0 || t.ndim > 64) refuse(name, "has " + std::to_string(t.ndim) + " dimensions");
    if (t.ndim > 0 && t.shape == nullptr) refuse(name, "has no shape");
    index_t numbers = 1;
    for (int i = 0; i < t.ndim; ++i) {
        if (t.shape[i] < 0) refuse(name, "has a negative size of " + std::to_string(t.shape[i]));
        if (__builtin_mul_overflow(numbers, t.shape[i], &numbers)) refuse(name, "is larger than any memory");
    }
    if (t.data == nullptr && numbers > 0) refuse(name, "is a null pointer");
}
inline void* begin_of(const DLTensor& t) {
    return t.data == nullptr ? nullptr : static_cast<char*>(t.data) + t.byte_offset;
}
/// Elements from one to the next along dimension i.
inline index_t step_of(const DLTensor& t, int i) {
    if (t.strides != nullptr) return t.strides[i];
    index_t step = 1;
    for (int j = i + 1; j < t.ndim; ++j) step *= t.shape[j];
    return step;
}
/// Whether dimensions [first, last) lie one after the other, in order; `step`: of the last of them.
inline bool in_order(const DLTensor& t, int first, int last, index_t& step) {
    index_t next = -1; // what the dimension before must have as its step
    step = 0;
    for (int i = last - 1; i >= first; --i) {
        if (t.shape[i] == 1) continue;
        const index_t own = step_of(t, i);
        if (next < 0)
            step = own;
        else if (own != next)
            return false;
        if (__builtin_mul_overflow(own, t.shape[i], &next)) return false;
    }
    return true;
}
[[noreturn]] inline void refuse_type(const char* name, const DLTensor& t, const char* wanted) {
    refuse(name, "is of " + name_of(t) + ", not " + wanted);
}

} // namespace detail

/// A matrix's numbers, of whatever type: all dimensions but the last are rows.
struct any_matrix {
    void* data = nullptr;
    index_t rows = 0, cols = 0, stride = 0;
};
inline any_matrix matrix_of(const char* name, const DLTensor& t, place at = {}) {
    detail::check_place(name, t, at);
    if (t.ndim < 2) refuse(name, "has " + std::to_string(t.ndim) + " dimension(s); a matrix has at least 2");
    any_matrix m{detail::begin_of(t), 1, t.shape[t.ndim - 1], 0};
    for (int i = 0; i + 1 < t.ndim; ++i) m.rows *= t.shape[i];
    m.stride = m.cols;
    if (m.cols == 0 && m.rows > (index_t{1} << 32)) // takes no memory, but time to go through
        refuse(name, "has " + std::to_string(m.rows) + " rows without a number");
    if (m.rows == 0 || m.cols == 0) return m;
    if (m.cols > 1 && detail::step_of(t, t.ndim - 1) != 1)
        refuse(name, "has a stride of " + std::to_string(detail::step_of(t, t.ndim - 1)) +
                         " along its last dimension; it must be 1");
    index_t step = 0;
    if (t.ndim == 2)
        step = detail::step_of(t, 0);
    else if (!detail::in_order(t, 0, t.ndim - 1, step))
        refuse(name, "is not contiguous over its leading dimensions, which are its rows");
    if (m.rows > 1) {
        if (step < m.cols)
            refuse(name, "has rows that overlap: " + std::to_string(step) + " elements apart, " +
                             std::to_string(m.cols) + " long");
        m.stride = step;
    }
    index_t reach = 0; // bytes, at most 16 a number
    if (__builtin_mul_overflow(m.rows - 1, m.stride, &reach) || __builtin_add_overflow(reach, m.cols, &reach) ||
        __builtin_mul_overflow(reach, index_t{16}, &reach))
        refuse(name, "is larger than any memory");
    return m;
}
/// A vector's numbers, of any shape without gaps.
struct any_vector {
    void* data = nullptr;
    index_t size = 0;
};
inline any_vector vector_of(const char* name, const DLTensor& t, place at = {}) {
    detail::check_place(name, t, at);
    any_vector v{detail::begin_of(t), 1};
    for (int i = 0; i < t.ndim; ++i) v.size *= t.shape[i];
    if (v.size > (index_t{1} << 59)) refuse(name, "is larger than any memory"); // at most 16 bytes a number
    index_t step = 0;
    if (v.size > 1 && !(detail::in_order(t, 0, t.ndim, step) && step == 1))
        refuse(name, "has gaps: it must be contiguous");
    return v;
}

inline const char* wanted_name(dtype t) {
    switch (t) {
    case dtype::float32:
        return "float32";
    case dtype::float64:
        return "float64";
    case dtype::bfloat16:
        return "bfloat16";
    case dtype::half:
        return "float16";
    case dtype::int32:
        return "int32";
    case dtype::int64:
        return "int64";
    default:
        return "uint8 or bool";
    }
}

/// A matrix of T; empty for NULL.
template <class T, opd::space S = opd::space::host>
opd::matrix_view<T, S> matrix(const char* name, const DLTensor* t, place at = {}) {
    if (t == nullptr) return {};
    if (type_of(*t) != type_for<T>()) detail::refuse_type(name, *t, wanted_name(type_for<T>()));
    const any_matrix m = matrix_of(name, *t, at);
    if (reinterpret_cast<std::uintptr_t>(m.data) % alignof(T) != 0) refuse(name, "is not aligned to its element type");
    return {static_cast<T*>(m.data), m.rows, m.cols, m.stride};
}
template <class T, opd::space S = opd::space::host>
opd::vector_view<T, S> vector(const char* name, const DLTensor* t, place at = {}) {
    if (t == nullptr) return {};
    if (type_of(*t) != type_for<T>()) detail::refuse_type(name, *t, wanted_name(type_for<T>()));
    const any_vector v = vector_of(name, *t, at);
    if (reinterpret_cast<std::uintptr_t>(v.data) % alignof(T) != 0) refuse(name, "is not aligned to its element type");
    return {static_cast<T*>(v.data), v.size};
}
/// Bytes that say yes or no.
template <opd::space S = opd::space::host>
opd::matrix_view<const std::uint8_t, S> flags(const char* name, const DLTensor* t, place at = {}) {
    if (t == nullptr) return {};
    if (const dtype d = type_of(*t); d != dtype::uint8 && d != dtype::boolean && d != dtype::int8)
        detail::refuse_type(name, *t, "uint8 or bool");
    const any_matrix m = matrix_of(name, *t, at);
    return {static_cast<const std::uint8_t*>(m.data), m.rows, m.cols, m.stride};
}

template <opd::space S = opd::space::host>
opd::row_offsets<S> offsets(const char* name, const DLTensor* t, place at = {}) {
    opd::row_offsets<S> to;
    if (t == nullptr) return to;
    const dtype d = type_of(*t);
    if (d != dtype::int32 && d != dtype::int64) detail::refuse_type(name, *t, "int32 or int64");
    const any_vector v = vector_of(name, *t, at);
    to.data = v.data, to.size = v.size, to.bytes = t->dtype.bits / 8;
    return to;
}
template <opd::space S = opd::space::host>
opd::row_mask<S> mask(const char* name, const DLTensor* t, bool has_ignore, std::int64_t ignore, place at = {}) {
    opd::row_mask<S> to;
    if (t == nullptr) return to;
    if (t->dtype.lanes != 1 || !(t->dtype.code == kDLInt || t->dtype.code == kDLUInt || t->dtype.code == kDLBool) ||
        !(t->dtype.bits == 8 || t->dtype.bits == 16 || t->dtype.bits == 32 || t->dtype.bits == 64))
        detail::refuse_type(name, *t, "bool or an integer of 8, 16, 32 or 64 bits");
    const any_vector v = vector_of(name, *t, at);
    to.data = v.data, to.size = v.size, to.bytes = t->dtype.bits / 8;
    const int unused = 64 - t->dtype.bits; // a row_mask reads every type as a signed one
    if (has_ignore) to.ignore = static_cast<std::int64_t>(static_cast<std::uint64_t>(ignore) << unused) >> unused;
    return to;
}
template <opd::space S = opd::space::host>
opd::row_weights<S> weights(const char* name, const DLTensor* t, place at = {}) {
    opd::row_weights<S> to;
    if (t == nullptr) return to;
    const dtype d = type_of(*t);
    if (d != dtype::float32 && d != dtype::float64) detail::refuse_type(name, *t, "float32 or float64");
    const any_vector v = vector_of(name, *t, at);
    to.data = v.data, to.size = v.size, to.bytes = t->dtype.bits / 8;
    return to;
}

} // namespace opd_c
