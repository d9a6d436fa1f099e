// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Logits kept as what they are made of: hidden states, the very input of the head, and the head.
//
//   student::hidden{view(x,N,D), view(w,V,D), view(dx,N,D), view(dw,V,D)}     z = x Wᵀ + b; out dx = dz W, dw = dzᵀ x,
//                                                                             db = Σ_r dz
//   student::hidden{view(x,N,D), view(w,V,D), view(dx,N,D)}                   the head is not trained
//   student::hidden{view(x,N,D), view(w,V,D)}                                 value only
//   teacher::hidden{view(x,N,D), view(w,V,D)}                                 a cache as small as D numbers a row, for
//                                                                             every divergence
//
// Each stands where student::logits and teacher::dense do, with the same result: logits are made for a block of rows
// at a time, in memory of at most `.budget` bytes, and nothing V-sized is kept. Rows that the mask leaves out cost
// nothing; bad ones have gradient 0 and add nothing to dw. Named members: .bias (V), .soft_cap (z = cap·tanh((x Wᵀ +
// b)/cap), 0: none), .temperature, and of a student .db (V), .beta_head (dw = beta_head·dw + …, db likewise, for a
// head whose gradient is collected over calls; dx goes by env.beta).
//
// Products have a fixed order (product.hpp), but for dx, whose sum over the vocabulary is cut every 8,192 ids: so no
// bit depends on the budget, on threads, or on which other rows are there.
//
// Memory: within `.budget`, a side's own beside the views: V·4 bytes a row of logits, twice that for a student with a
// soft-cap and a gradient, or as much of tiles of the vocabulary; workspace_bytes() says all of it exactly.
// Operations: 2NVD for each side's logits, in tiles once a pass over the rows; 2NVD each for dx and dw.
//
// A row whose dz float does not hold is an infinite row, as with logits in memory (env.on_overflow). dx, dw and db
// are sums of products in float: what is beyond float there is infinite.
//
// Heads: w may also be an opd::lora_head, whose update has gradients of its own, or a type of yours, say a quantised
// head (head.hpp).
//
// States, heads and biases: float or bfloat16; gradients float. CUDA by backends/cuda_hidden.cuh and device views;
// the order of its products is cuBLAS's. Under -Ofast that of the CPU's is the compiler's.
//
// Throws invalid_input, before anything is written, that names x, w (of an update w.b, w.a, w.db, w.da, w.scale), dx,
// dw, bias, db, soft_cap, beta_head, temperature or budget of either side; check::contents and infinite::raise are
// refused, for there are no logits to look at before the call.
//
// Source: Nitrobrew (fused divergences from hidden states).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <type_traits>

#include "opd/checks/misfit.hpp"
#include "opd/config.hpp"
#include "opd/element.hpp"
#include "opd/error.hpp"
#include "opd/head.hpp"
#include "opd/source.hpp"
#include "opd/student.hpp"
#include "opd/teacher.hpp"
#include "opd/view.hpp"

namespace opd {

namespace detail {

/// Of a student: whether its head's gradient is made of x itself, that of W or of A; and whether dz is multiplied
/// with the head, for dx or for A.
template <class Hidden>
bool needs_states(const Hidden& h) {
    if constexpr (is_lora<decltype(h.w)>)
        if (!h.w.da.empty()) return true;
    return !h.dw.empty();
}
template <class Hidden>
bool sums_states(const Hidden& h) {
    if constexpr (is_lora<decltype(h.w)>)
        if (!h.w.da.empty()) return true;
    return !h.dx.empty();
}

/// Ids whose products with dz are summed in one chain; the sums of such stretches are then added. One chain over a
/// whole vocabulary would lose a digit.
inline constexpr index_t stretch_of_ids = 8192;

/// Padding lies between a row's last column and the next row.
template <class View>
void check_padding(const std::string& name, const View& v) {
    if (v.padding < 0 || (v.padding > 0 && v.padding > v.stride - v.cols))
        throw invalid_input(name, "has " + std::to_string(v.padding) + " columns of padding after " +
                                      std::to_string(v.cols) + ", its rows are " + std::to_string(v.stride) + " apart");
}

/// Where head and states must agree; both sides' checks. `name`: "student" or "teacher".
template <class Hidden>
void check_head(const char* name, const Hidden& h) {
    const auto member = [name](const char* m) { return std::string(name) + m; };
    const auto matrix = [&](const char* m, const auto& v, index_t rows, index_t cols) {
        if (v.rows != rows || v.cols != cols)
            throw invalid_input(member(m), "is (" + std::to_string(v.rows) + ", " + std::to_string(v.cols) +
                                               "), not (" + std::to_string(rows) + ", " + std::to_string(cols) + ")");
        if (v.rows < 0 || v.cols < 0) throw invalid_input(member(m), "has a negative size");
        if (v.rows > 0 && v.cols > 0 && v.data == nullptr) throw invalid_input(member(m), "is a null pointer");
        if (v.rows > 1 && v.stride < v.cols) throw invalid_input(member(m), "has a row stride below its columns");
        check_padding(member(m), v);
    };
    const auto& w = base_of(h.w);
    const index_t v = vocab_of(h.w), d = h.x.cols;
    matrix(".x", h.x, h.x.rows, d);
    if constexpr (is_matrix<decltype(w)>) {
        matrix(is_lora<decltype(h.w)> ? ".w.w" : ".w", w, v, d);
    } else if (v < 0 || w.width() != d) {
        throw invalid_input(member(".w"), "is (" + std::to_string(v) + ", " + std::to_string(w.width()) +
                                              ") beside hidden states of " + std::to_string(d) + " columns");
    }
    if constexpr (is_lora<decltype(h.w)>) {
        const index_t rank = rank_of(h.w);
        matrix(".w.a", h.w.a, rank, d), matrix(".w.b", h.w.b, v, rank);
        if (rank < 1) throw invalid_input(member(".w.a"), "has no rows");
        if (!h.w.da.empty()) matrix(".w.da", h.w.da, rank, d);
        if (!h.w.db.empty()) matrix(".w.db", h.w.db, v, rank);
        if (!(std::abs(h.w.scale) <= 1e30f)) throw invalid_input(member(".w.scale"), "must be finite");
    }
    if (d < 1 && h.x.rows > 0) throw invalid_input(member(".x"), "has no columns");
    if (h.bias.data != nullptr && h.bias.size != v)
        throw invalid_input(member(".bias"),
                            "has " + std::to_string(h.bias.size) + " entries for a vocabulary of " + std::to_string(v));
    if (!(h.soft_cap >= 0) || !(h.soft_cap <= 1e30f))
        throw invalid_input(member(".soft_cap"), "must be finite and at least 0");
}

} // namespace detail

namespace student {

/// The student's logits as z = cap·tanh((x Wᵀ + b)/cap), (N,V) from x (N,D) and w (V,D); gradients go to dx, dw, db.
template <class X, class G = float, space Space = space::host, class Head = matrix_view<const X, Space>>
struct hidden {
    static_assert(detail::head_lies<Head, X, Space>(),
                  "opd: a head of your own is asked where the states lie: on a device it has `static constexpr "
                  "opd::space memory_space = opd::space::device` and can be copied by its bytes");
    static_assert(detail::one_type_on_device<Head, X, Space>(),
                  "opd: on a device hidden states, their head and its update are of one type");
    static_assert(detail::number_of_head<X> && std::is_same_v<std::remove_const_t<G>, float>,
                  "opd: hidden states are float or bfloat16, gradients float");
    static_assert(!std::is_const_v<G>, "opd: the gradient is written: its view must not be of const elements");
    using logit_type = float;
    using gradient_type = float;
    static constexpr space memory_space = Space;
    static constexpr bool sparse_gradient = false;
    static constexpr bool in_blocks = true;
    matrix_view<const X, Space> x; ///< (N,D)
    Head w;                        ///< (V,D)
    matrix_view<G, Space> dx = {}; ///< (N,D); empty: not wanted
    matrix_view<G, Space> dw = {}; ///< (V,D); empty: not wanted
    float temperature = 1;         ///< p = softmax(z / temperature)
    detail::by_name_only named = {};
    vector_view<const X, Space> bias = {}; ///< (V)
    vector_view<G, Space> db = {};         ///< (V)
    float soft_cap = 0;
    float beta_head = 0;
    std::size_t budget = std::size_t{256} << 20; ///< bytes

    index_t rows() const { return x.rows; }
    index_t vocab() const { return detail::vocab_of(w); }
    bool trains_head() const { return !dw.empty() || db.data != nullptr || detail::trains_update(w); }
    bool has_gradient() const { return !dx.empty() || trains_head(); }

    void validate() const {
        detail::check_head("student", *this);
        const auto same = [](const char* name, const auto& v, index_t rows, index_t cols) {
            if (v.data != nullptr && (v.rows != rows || v.cols != cols || (v.rows > 1 && v.stride < v.cols)))
                throw invalid_input(name, "is not of the shape of what it is the gradient of");
            detail::check_padding(name, v);
        };
        same("student.dx", dx, x.rows, x.cols);
        same("student.dw", dw, vocab(), x.cols);
        if (db.data != nullptr && db.size != vocab())
            throw invalid_input("student.db", "has " + std::to_string(db.size) + " entries for a vocabulary of " +
                                                  std::to_string(vocab()));
        if (!(beta_head >= -1e30f && beta_head <= 1e30f)) throw invalid_input("student.beta_head", "must be finite");
    }
};
template <class X, space S>
hidden(matrix_view<X, S>, matrix_view<X, S>) -> hidden<std::remove_const_t<X>, float, S>;
template <class X, class W, space S>
    requires std::same_as<std::remove_const_t<X>, std::remove_const_t<W>> hidden(matrix_view<X, S>, matrix_view<W, S>)
->hidden<std::remove_const_t<X>, float, S>;
template <class X, class W, class G, space S>
    requires std::same_as<std::remove_const_t<X>, std::remove_const_t<W>> hidden(matrix_view<X, S>, matrix_view<W, S>,
                                                                                 matrix_view<G, S>)
->hidden<std::remove_const_t<X>, G, S>;
template <class X, class W, class G, space S>
    requires std::same_as<std::remove_const_t<X>, std::remove_const_t<W>> hidden(matrix_view<X, S>, matrix_view<W, S>,
                                                                                 matrix_view<G, S>, matrix_view<G, S>)
->hidden<std::remove_const_t<X>, G, S>;
template <class X, opd::detail::made_head Head, space S>
hidden(matrix_view<X, S>, Head) -> hidden<std::remove_const_t<X>, float, S, Head>;
template <class X, opd::detail::made_head Head, class G, space S>
hidden(matrix_view<X, S>, Head, matrix_view<G, S>) -> hidden<std::remove_const_t<X>, G, S, Head>;
template <class X, opd::detail::made_head Head, class G, space S>
hidden(matrix_view<X, S>, Head, matrix_view<G, S>, matrix_view<G, S>) -> hidden<std::remove_const_t<X>, G, S, Head>;

} // namespace student

namespace teacher {

/// The teacher's logits as y = cap·tanh((x Wᵀ + b)/cap), (N,V) from x (N,D) and w (V,D). A cache of kind dense: for
/// every divergence.
template <class X, space Space = space::host, class Head = matrix_view<const X, Space>>
struct hidden {
    static_assert(opd::detail::head_lies<Head, X, Space>(),
                  "opd: a head of your own is asked where the states lie: on a device it has `static constexpr "
                  "opd::space memory_space = opd::space::device` and can be copied by its bytes");
    static_assert(opd::detail::one_type_on_device<Head, X, Space>(),
                  "opd: on a device hidden states, their head and its update are of one type");
    static_assert(opd::detail::number_of_head<X>, "opd: hidden states are float or bfloat16");
    static constexpr cache_kind kind = cache_kind::dense;
    using logit_type = float;
    static constexpr space memory_space = Space;
    static constexpr bool in_blocks = true;
    matrix_view<const X, Space> x; ///< (N,D)
    Head w;                        ///< (V,D)
    float temperature = 1;         ///< q = softmax(y / temperature)
    opd::detail::by_name_only named = {};
    vector_view<const X, Space> bias = {}; ///< (V)
    float soft_cap = 0;
    std::size_t budget = std::size_t{256} << 20; ///< bytes

    index_t rows() const { return x.rows; }
    index_t vocab() const { return opd::detail::vocab_of(w); }

    void validate() const {
        opd::detail::check_head("teacher", *this);
        if constexpr (opd::detail::is_lora<Head>)
            if (opd::detail::trains_update(w))
                throw invalid_input("teacher.w", "has .da or .db: a teacher has no gradient");
    }
};
template <class X, class W, space S>
    requires std::same_as<std::remove_const_t<X>, std::remove_const_t<W>> hidden(matrix_view<X, S>, matrix_view<W, S>)
->hidden<std::remove_const_t<X>, S>;
template <class X, class W, space S>
    requires std::same_as<std::remove_const_t<X>, std::remove_const_t<W>> hidden(matrix_view<X, S>, matrix_view<W, S>,
                                                                                 float)
->hidden<std::remove_const_t<X>, S>;
template <class X, opd::detail::made_head Head, space S>
hidden(matrix_view<X, S>, Head) -> hidden<std::remove_const_t<X>, S, Head>;
template <class X, opd::detail::made_head Head, space S>
hidden(matrix_view<X, S>, Head, float) -> hidden<std::remove_const_t<X>, S, Head>;

} // namespace teacher

} // namespace opd
