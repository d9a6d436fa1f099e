// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Views over the caller's memory: pointer, shape, row stride. Nothing here owns or allocates.
//
//   view(p, n)                 (n)        vector_view
//   view(p, rows, cols)        (rows,cols) row-major, unit inner stride
//   view(p, rows, cols, stride) the same with padded rows: stride >= cols elements from row to row
//   device_view(...)           the same, in device memory
//
// The memory space is part of the type: a host view cannot be passed where a device view is meant. Element (r,c) lies at
// data[r*stride + c]; the arithmetic is 64-bit, whatever integer type the caller counts in.
#pragma once

#include <concepts>
#include <cstddef>
#include <ranges>
#include <type_traits>

#include "opd/config.hpp"

namespace opd {

enum class space { host, device };

/// (rows, cols) elements of T, row-major, unit inner stride, `stride` elements from row to row.
template <class T, space Space = space::host>
struct matrix_view {
    using element_type = T;
    static constexpr space memory_space = Space;
    T* data = nullptr;
    index_t rows = 0;
    index_t cols = 0;
    index_t stride = 0;

    matrix_view() = default;
    OPD_HD constexpr matrix_view(T* data_, index_t rows_, index_t cols_, index_t stride_)
        : data(data_), rows(rows_), cols(cols_), stride(stride_) {}
    /// A view of mutable elements is a view of const ones.
    template <class U>
    requires std::same_as<const U, T> OPD_HD constexpr matrix_view(matrix_view<U, Space> o)
        : data(o.data), rows(o.rows), cols(o.cols), stride(o.stride) {}

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
    template <std::ranges::contiguous_range R>
        requires(Space == space::host && std::ranges::sized_range<R> &&
                 std::is_convertible_v<std::remove_reference_t<std::ranges::range_reference_t<R>> (*)[], T (*)[]>)
    constexpr vector_view(R&& r) : data(std::ranges::data(r)), size(static_cast<index_t>(std::ranges::size(r))) {}

    OPD_HD constexpr T& operator[](index_t i) const { return data[i]; }
    OPD_HD constexpr bool empty() const { return data == nullptr; }
};

template <class T>
constexpr matrix_view<T> view(T* data, std::integral auto rows, std::integral auto cols) {
    return {data, static_cast<index_t>(rows), static_cast<index_t>(cols), static_cast<index_t>(cols)};
}
template <class T>
constexpr matrix_view<T> view(T* data, std::integral auto rows, std::integral auto cols, std::integral auto stride) {
    return {data, static_cast<index_t>(rows), static_cast<index_t>(cols), static_cast<index_t>(stride)};
}
template <class T>
constexpr vector_view<T> view(T* data, std::integral auto size) {
    return {data, static_cast<index_t>(size)};
}

template <class T>
constexpr matrix_view<T, space::device> device_view(T* data, std::integral auto rows, std::integral auto cols) {
    return {data, static_cast<index_t>(rows), static_cast<index_t>(cols), static_cast<index_t>(cols)};
}
template <class T>
constexpr matrix_view<T, space::device> device_view(T* data, std::integral auto rows, std::integral auto cols,
                                                    std::integral auto stride) {
    return {data, static_cast<index_t>(rows), static_cast<index_t>(cols), static_cast<index_t>(stride)};
}
template <class T>
constexpr vector_view<T, space::device> device_view(T* data, std::integral auto size) {
    return {data, static_cast<index_t>(size)};
}

} // namespace opd
