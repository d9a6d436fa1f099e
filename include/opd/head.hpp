// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Heads: what may stand for the weights W (V,D) in student::hidden and teacher::hidden (hidden.hpp).
//
//   view(w,V,D)                                      as it lies in memory, float or bfloat16
//   lora_head{view(w,V,D), view(b,V,R), view(a,R,D)} W + scale·B A, an update of low rank R (LoRA): never multiplied
//                                                    out
//   amx_head{view(w,V,D)}                            through the processor's matrix tiles (backends/amx.hpp)
//   bf16_head(view(w,V,D))                           logits by its dot products of bfloat16 (backends/bf16.hpp)
//   a type of your own                               whatever gives rows of W as floats: a quantised head, with or
//                                                    without an update
//
// Of an update x (W + scale·B A)ᵀ = [x, u] [W, B]ᵀ with u = scale·x Aᵀ: a head of D + R columns. So it costs R/D more
// than W alone, and
//
//   dB = dzᵀ u,   t = scale·dz B,   dA = tᵀ x,   dx = dz W + t A.
//
// On a device states, W, B and A are of one type, and a head of your own says that it is there (own_head).
//
// Throws with the call that it is given to: invalid_input, which names student.w or teacher.w and the member.
// Source: LoRA (Hu et al. 2021), eq. 3; scale is its alpha/R.
#pragma once

#include <concepts>
#include <type_traits>

#include "opd/config.hpp"
#include "opd/element.hpp"
#include "opd/student.hpp"
#include "opd/view.hpp"

namespace opd {

namespace detail {
/// What hidden states, heads and updates are stored as.
template <class X>
inline constexpr bool number_of_head =
    std::is_same_v<std::remove_const_t<X>, float> || brain_float<std::remove_const_t<X>>;
template <class X, space S>
inline constexpr bool number_of_head<matrix_view<X, S>> = number_of_head<X>;
} // namespace detail

/// A head of your own. copy(id, d, count, to) writes to[j] = W[id, d + j], j < count. Any thread may ask for any part
/// at any time; each part is asked for once or a few times a block of rows, in pieces of up to 512 numbers. A head
/// for a device has `static constexpr opd::space memory_space = opd::space::device`, pointers into the device's
/// memory, and a copy() that is OPD_HD and asked for up to 32 numbers; kernels get the head by its bytes.
template <class H>
concept own_head = requires(const H& head, index_t i, float* to) {
    { head.vocab() } -> std::convertible_to<index_t>;
    { head.width() } -> std::convertible_to<index_t>;
    head.copy(i, i, i, to);
};

/// W + scale·B A. Base: a view of W, or a head of your own, of which dW would be that of W.
template <class Base, class B = const float, class A = B, space Space = space::host>
struct lora_head {
    static_assert((own_head<Base> || detail::number_of_head<Base>)&&detail::number_of_head<B> &&
                      detail::number_of_head<A>,
                  "opd: a head and its update are float or bfloat16");
    static_assert(Space == space::host ||
                      (std::is_same_v<A, B> && (own_head<Base> || std::is_same_v<Base, matrix_view<B, Space>>)),
                  "opd: on a device a head and its update are views of one type");
    static_assert(std::is_const_v<B> && std::is_const_v<A>,
                  "opd: a head's matrices are read: their views are of const elements");
    Base w;                  ///< (V,D)
    matrix_view<B, Space> b; ///< (V,R)
    matrix_view<A, Space> a; ///< (R,D)
    detail::by_name_only named = {};
    float scale = 1;
    matrix_view<float, Space> db = {}; ///< (V,R); empty: not wanted. Added, as da is, to what student.beta_head leaves
    matrix_view<float, Space> da = {}; ///< (R,D)
};
template <class W, class B, class A, space S>
lora_head(matrix_view<W, S>, matrix_view<B, S>, matrix_view<A, S>)
    -> lora_head<matrix_view<const W, S>, const B, const A, S>;
template <own_head W, class B, class A, space S>
lora_head(W, matrix_view<B, S>, matrix_view<A, S>) -> lora_head<W, const B, const A, S>;

namespace detail {

template <class Head>
inline constexpr bool is_lora = false;
template <class Base, class B, class A, space S>
inline constexpr bool is_lora<lora_head<Base, B, A, S>> = true;
template <class Head>
inline constexpr bool is_lora<const Head> = is_lora<Head>;
template <class Head>
inline constexpr bool is_matrix = false;
template <class T, space S>
inline constexpr bool is_matrix<matrix_view<T, S>> = true;
template <class Head>
inline constexpr bool is_matrix<const Head> = is_matrix<Head>;
template <class Head>
inline constexpr bool is_matrix<Head&> = is_matrix<Head>;

/// Where a head may be asked for its numbers; of a view, where it lies.
template <class Head>
constexpr space space_of_head() {
    if constexpr (requires { Head::memory_space; })
        return Head::memory_space;
    else
        return space::host;
}
template <class Head, class X, space S>
constexpr bool head_lies() {
    if constexpr (is_lora<Head>)
        return head_lies<decltype(Head::w), X, S>();
    else if constexpr (own_head<Head>)
        return space_of_head<Head>() == S && (S == space::host || std::is_trivially_copyable_v<Head>);
    else
        return true;
}
/// A device's products are of operands of one type.
template <class Head, class X, space S>
constexpr bool one_type_on_device() {
    if constexpr (S == space::host)
        return true;
    else if constexpr (is_lora<Head>)
        return std::is_same_v<typename decltype(Head::b)::element_type, const X> &&
               one_type_on_device<decltype(Head::w), X, S>();
    else if constexpr (own_head<Head>)
        return true;
    else
        return std::is_same_v<typename Head::element_type, const X>;
}

/// A head whose products are made by matrix tiles (backends/amx.hpp): a view w of numbers, and what runs the tiles.
template <class Head>
concept tiled_head = own_head<Head> && requires(const Head& head) {
    typename Head::number;
    typename Head::tiles;
    head.w;
};

/// One whose tiles make logits of bfloat16 states and nothing else (backends/bf16.hpp).
template <class Head>
inline constexpr bool logits_alone = requires {
    Head::tiles::logits_alone;
};

/// What is not a view of all of W.
template <class Head>
concept made_head = own_head<Head> || is_lora<Head>;

/// W without its update.
template <class Head>
const auto& base_of(const Head& head) {
    if constexpr (is_lora<Head>)
        return head.w;
    else
        return head;
}
template <class Head>
index_t vocab_of(const Head& head) {
    const auto& w = base_of(head);
    if constexpr (is_matrix<decltype(w)>)
        return w.rows;
    else
        return w.vocab();
}
/// R; 0 without an update.
template <class Head>
index_t rank_of(const Head& head) {
    if constexpr (is_lora<Head>)
        return head.a.rows;
    else
        return 0;
}
/// Whether the update has a gradient.
template <class Head>
bool trains_update(const Head& head) {
    if constexpr (is_lora<Head>)
        return !head.db.empty() || !head.da.empty();
    else
        return false;
}

} // namespace detail

} // namespace opd
