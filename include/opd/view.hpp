// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Views over the caller's memory: pointer, shape, row stride. A view owns and allocates nothing.
//
//   view(p, n)                   (n)         vector_view
//   view(p, rows, cols)          (rows,cols) row-major, unit inner stride
//   view(p, rows, cols, stride)  the same, stride >= cols elements from row to row; columns between are others'
//   view(p, rows, cols, {.stride = P, .padding = n})  the same, and n columns after the last belong to each row
//   padded_view(p, rows, cols, P)                     rows of P columns, of which cols are real: .padding = P - cols
//   device_view(...), padded_device_view(...)         the same, in device memory
//
// No call reads padding. A call sets a gradient's padding to zero (student.hpp), and touches no column beyond it.
//
// The memory space is part of the type, so a host view does not compile where a device view is meant. Element (r,c) is
// data[r*stride + c]; the arithmetic is 64-bit, whatever integer type the caller counts in.
#pragma once

#include <concepts>
#include <cstddef>
#include <span>
#include <type_traits>

#include "opd/config.hpp"

namespace opd {

/// Where memory lies: the host's, or a device's that the host must not read.
enum class space { host, device };

/// (rows, cols) elements of T, row-major, unit inner stride, `stride` elements from row to row, of which the
/// `padding` that follow the columns belong to the view too.
template <class T, space Space = space::host>
struct matrix_view {
    using element_type = T;
    static constexpr space memory_space = Space;
    T* data = nullptr;
    index_t rows = 0;
    index_t cols = 0;
    index_t stride = 0;
    index_t padding = 0;

    matrix_view() = default;
    OPD_HD constexpr matrix_view(T* data_, index_t rows_, index_t cols_, index_t stride_, index_t padding_ = 0)
        : data(data_), rows(rows_), cols(cols_), stride(stride_), padding(padding_) {}
    /// A view of mutable elements is a view of const ones.
    template <class U>
    requires std::same_as<const U, T> OPD_HD constexpr matrix_view(matrix_view<U, Space> o)
        : data(o.data), rows(o.rows), cols(o.cols), stride(o.stride), padding(o.padding) {}

    OPD_HD constexpr T* row(index_t r) const { return data + r * stride; }
    OPD_HD constexpr T& operator()(index_t r, index_t c) const { return data[r * stride + c]; }
    OPD_HD constexpr bool empty() const { return data == nullptr; }
};

/// (size) elements of T, contiguous.
template <class T, space Space = space::host>
struct vector_view {
    using element_type = T;
    static constexpr space memory_space = Space;
    T* data = nullptr;
    index_t size = 0;

    vector_view() = default;
    OPD_HD constexpr vector_view(T* data_, index_t size_) : data(data_), size(size_) {}
    template <class U>
    requires std::same_as<const U, T> OPD_HD constexpr vector_view(vector_view<U, Space> o)
        : data(o.data), size(o.size) {}
    /// From a span, a vector, an array: anything contiguous on the host.
    template <class R>
        requires(Space == space::host && std::constructible_from<std::span<T>, R&>)
    constexpr vector_view(R&& r) : vector_view(std::span<T>(r).data(), static_cast<index_t>(std::span<T>(r).size())) {}

    OPD_HD constexpr T& operator[](index_t i) const { return data[i]; }
    OPD_HD constexpr bool empty() const { return data == nullptr; }
};

/// A count, from any integer type.
struct count {
    index_t value;
    template <std::integral I>
    constexpr count(I i) : value(static_cast<index_t>(i)) {}
};
/// How rows lie, by name: `view(p, N, V, {.stride = P, .padding = P - V})`.
struct row_layout {
    count stride;
    count padding = 0;
};

/// (rows,cols), row-major without gaps. Throws nothing and looks at nothing: shapes are checked by the call that reads.
template <class T>
constexpr matrix_view<T> view(T* data, count rows, count cols) {
    return {data, rows.value, cols.value, cols.value};
}
template <class T>
constexpr matrix_view<T> view(T* data, count rows, count cols, count stride) {
    return {data, rows.value, cols.value, stride.value};
}
template <class T>
constexpr matrix_view<T> view(T* data, count rows, count cols, row_layout rows_lie) {
    return {data, rows.value, cols.value, rows_lie.stride.value, rows_lie.padding.value};
}
/// Rows of `stride` elements of which `cols` are real; the rest is padding.
template <class T>
constexpr matrix_view<T> padded_view(T* data, count rows, count cols, count stride) {
    return {data, rows.value, cols.value, stride.value, stride.value - cols.value};
}
template <class T>
constexpr vector_view<T> view(T* data, count size) {
    return {data, size.value};
}

/// The same of device memory, which a call on a device takes.
template <class T>
constexpr matrix_view<T, space::device> device_view(T* data, count rows, count cols) {
    return {data, rows.value, cols.value, cols.value};
}
template <class T>
constexpr matrix_view<T, space::device> device_view(T* data, count rows, count cols, count stride) {
    return {data, rows.value, cols.value, stride.value};
}
template <class T>
constexpr matrix_view<T, space::device> device_view(T* data, count rows, count cols, row_layout rows_lie) {
    return {data, rows.value, cols.value, rows_lie.stride.value, rows_lie.padding.value};
}
/// Rows of `stride` elements of which `cols` are real; the rest is padding.
template <class T>
constexpr matrix_view<T, space::device> padded_device_view(T* data, count rows, count cols, count stride) {
    return {data, rows.value, cols.value, stride.value, stride.value - cols.value};
}
template <class T>
constexpr vector_view<T, space::device> device_view(T* data, count size) {
    return {data, size.value};
}

} // namespace opd
