// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A head as the products read it (head_products.hpp): pieces of its rows as floats. Columns come in parts that lie
// side by side:
//
//   in_place                                    whether rows are floats in memory, at(id, d) and `stride` from row to
//                                               row
//   width                                       columns
//   copy(first, ids, d, depth, to, to_stride)   W[first + i, d + j]
//   fetch(id, d, count)                         has W[id, d … d + count) come
//   parts(f)                                    f(part, left) for each part, whose first column is `left`
#pragma once

#include <algorithm>
#include <cstddef>
#include <type_traits>

#include "opd/config.hpp"
#include "opd/element.hpp"
#include "opd/head.hpp"
#include "opd/view.hpp"

namespace opd::detail {
inline namespace OPD_ISA {

/// As it lies in memory: what is not float is converted a piece at a time.
template <class E>
struct stored_head {
    const E* data;
    index_t stride, width;
    static constexpr bool in_place = std::is_same_v<E, float>;
    const E* at(index_t id, index_t d) const { return data + id * stride + d; }
    OPD_INLINE void copy(index_t first, index_t ids, index_t d, index_t depth, float* to, index_t to_stride) const {
        for (index_t i = 0; i < ids; ++i) {
            const E* from = at(first + i, d);
            float* const row = to + i * to_stride;
            if constexpr (in_place)
                std::copy_n(from, depth, row);
            else
                for (index_t j = 0; j < depth; ++j) row[j] = element<E>::load(from[j]);
        }
    }
    OPD_INLINE void fetch(index_t id, index_t d, index_t count) const {
        const auto* p = reinterpret_cast<const char*>(at(id, d));
        const index_t bytes = count * index_t{sizeof(E)};
        for (index_t b = 0; b < bytes; b += 64) __builtin_prefetch(p + b, 0, 2);
    }
    template <class Function>
    OPD_INLINE void parts(Function&& f) const {
        f(*this, index_t{0});
    }
};

/// One of the caller's (opd::own_head).
template <class H>
struct copied_head {
    const H* head;
    index_t width;
    static constexpr bool in_place = false;
    void copy(index_t first, index_t ids, index_t d, index_t depth, float* to, index_t to_stride) const {
        for (index_t i = 0; i < ids; ++i) head->copy(first + i, d, depth, to + i * to_stride);
    }
    void fetch(index_t, index_t, index_t) const {}
    template <class Function>
    OPD_INLINE void parts(Function&& f) const {
        f(*this, index_t{0});
    }
};

/// [W, B]: a head and the one half of its update, side by side.
template <class W, class B>
struct wide_head {
    W w;
    B b;
    index_t width = w.width + b.width;
    static constexpr bool in_place = false;
    OPD_INLINE void copy(index_t first, index_t ids, index_t d, index_t depth, float* to, index_t to_stride) const {
        const index_t of_w = std::clamp<index_t>(w.width - d, 0, depth);
        if (of_w > 0) w.copy(first, ids, d, of_w, to, to_stride);
        if (of_w < depth) b.copy(first, ids, d + of_w - w.width, depth - of_w, to + of_w, to_stride);
    }
    OPD_INLINE void fetch(index_t id, index_t d, index_t count) const {
        const index_t of_w = std::clamp<index_t>(w.width - d, 0, count);
        if (of_w > 0) w.fetch(id, d, of_w);
        if (of_w < count) b.fetch(id, d + of_w - w.width, count - of_w);
    }
    template <class Function>
    OPD_INLINE void parts(Function&& f) const {
        f(w, index_t{0}), f(b, w.width);
    }
};

template <class E>
stored_head<std::remove_const_t<E>> head_of(const matrix_view<E>& w) {
    return {w.data, w.stride, w.cols};
}
template <own_head H>
copied_head<H> head_of(const H& head) {
    return {&head, head.width()};
}
template <tiled_head H>
auto head_of(const H& head) {
    return head_of(head.w);
}
template <class Base, class B, class A>
auto head_of(const lora_head<Base, B, A, space::host>& head) {
    return wide_head<decltype(head_of(head.w)), decltype(head_of(head.b))>{head_of(head.w), head_of(head.b)};
}

} // namespace OPD_ISA
} // namespace opd::detail
