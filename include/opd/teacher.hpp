// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Teacher caches: what is known of the teacher at each row, and so which objectives are available.
//
//   teacher::dense     V logits a row                                 every divergence
//   teacher::support   k ids, teacher log-probs, (log tail mass)      divergences on a support
//   teacher::samples   m ids drawn i.i.d. from mu, log mu, log q      sampled reverse KL, weights 1/m
//   teacher::weighted  ids with entry weights w, log mu, log q        sampled reverse KL, any design with
//                                                                     E[Σ w f(a)] = E_mu[f]
//
// ids may be any integer type; they are checked against the vocabulary. In `support` and `weighted` an id of -1 marks an unused
// slot, whose other fields are not read; any other negative id, and a row without a used slot, are bad.
// Log-probs are those of the full distribution at the temperature that the loss is meant at ("processed"); log-probs recorded
// raw while sampling at another temperature bias every importance ratio, which diagnostics::mu_mismatch() shows.
#pragma once

#include <concepts>
#include <cstdint>
#include <type_traits>

#include "opd/config.hpp"
#include "opd/detail/misfit.hpp"
#include "opd/element.hpp"
#include "opd/view.hpp"

namespace opd {

/// The kinds of cache. An estimator that does not read dense logits declares which it `takes`.
enum class cache_kind { dense, support, samples, weighted };

namespace detail {
/// Id, or why a cache's columns of weights W and log-probs A and B fit no cache.
template <class Id, class W, class A, class B>
using checked_id =
    std::conditional_t<!std::floating_point<std::remove_const_t<W>>, misfit<weights_not_float>,
                       std::conditional_t<!std::is_same_v<std::remove_const_t<A>, std::remove_const_t<B>>,
                                          misfit<two_log_types>, std::remove_const_t<Id>>>;
} // namespace detail

namespace teacher {

template <class Y, space Space = space::host>
struct dense {
    static_assert(detail::stored<Y>,
                  "opd: unknown element type: specialise opd::element for it, in one line where it holds "
                  "the bits of a known type; see docs/concepts/element.md");
    static constexpr cache_kind kind = cache_kind::dense;
    using logit_type = Y;
    static constexpr space memory_space = Space;
    matrix_view<const Y, Space> y; ///< (N,V)
    float temperature = 1;         ///< q = softmax(y / temperature)

    // as a source of rows (docs/concepts/source.md)
    static constexpr bool one_tile = true;
    OPD_HD index_t rows() const { return y.rows; }
    OPD_HD index_t vocab() const { return y.cols; }
    OPD_HD index_t tile_size() const { return y.cols; }
    OPD_HD const Y* tile(row_place at, index_t begin) const { return y.row(at.row) + begin; }
    OPD_HD const Y& logit(row_place at, index_t id) const { return y(at.row, id); }
};
template <class Y, space S>
dense(matrix_view<Y, S>) -> dense<std::remove_const_t<Y>, S>;
template <class Y, space S>
dense(matrix_view<Y, S>, float) -> dense<std::remove_const_t<Y>, S>;
template <class... A>
    requires(!detail::are_views<A...>())
dense(A...)
->dense<detail::misfit<A...>>;
template <class... Why, space S>
struct dense<detail::misfit<Why...>, S> : detail::misfit_source<Why...> {
    template <class... A>
    constexpr dense(A&&...) {}
};

template <class Id, class L = float, space Space = space::host>
struct support {
    static_assert(std::integral<Id>, "opd: ids are integers, of any type");
    static_assert(detail::stored<L>,
                  "opd: unknown element type: specialise opd::element for it, in one line where it holds "
                  "the bits of a known type; see docs/concepts/element.md");
    static constexpr cache_kind kind = cache_kind::support;
    using id_type = Id;
    using log_type = L;
    static constexpr space memory_space = Space;
    matrix_view<const Id, Space> ids;          ///< (N,k) distinct; -1: unused slot
    matrix_view<const L, Space> log_q;         ///< (N,k)
    vector_view<const L, Space> log_tail = {}; ///< (N) log of the teacher's mass outside the support; empty: from log_q
};
template <class Id, class L, space S>
support(matrix_view<Id, S>, matrix_view<L, S>) -> support<std::remove_const_t<Id>, std::remove_const_t<L>, S>;
template <class Id, class L, class T, space S>
support(matrix_view<Id, S>, matrix_view<L, S>, vector_view<T, S>)
    -> support<std::remove_const_t<Id>, std::remove_const_t<L>, S>;
template <class... A>
    requires(!detail::are_views<A...>())
support(A...)
->support<detail::misfit<A...>>;
template <class... Why, class L, space S>
struct support<detail::misfit<Why...>, L, S> : detail::misfit_source<Why...> {
    template <class... A>
    constexpr support(A&&...) {}
};

template <class Id, class L = float, space Space = space::host>
struct samples {
    static_assert(std::integral<Id>, "opd: ids are integers, of any type");
    static_assert(detail::stored<L>,
                  "opd: unknown element type: specialise opd::element for it, in one line where it holds "
                  "the bits of a known type; see docs/concepts/element.md");
    static constexpr cache_kind kind = cache_kind::samples;
    using id_type = Id;
    using log_type = L;
    static constexpr space memory_space = Space;
    matrix_view<const Id, Space> ids;          ///< (N,m) drawn i.i.d. from mu; repeats are legal
    matrix_view<const L, Space> log_mu;        ///< (N,m)
    matrix_view<const L, Space> log_q;         ///< (N,m)
    matrix_view<const L, Space> log_prox = {}; ///< (N,m) proximal policy; empty: log_mu
    matrix_view<const L, Space> log_ref = {};  ///< (N,m) reference policy; empty: log_mu
};
template <class Id, class L, space S>
samples(matrix_view<Id, S>, matrix_view<L, S>, matrix_view<L, S>)
    -> samples<std::remove_const_t<Id>, std::remove_const_t<L>, S>;
template <class Id, class A, class B, space S>
samples(matrix_view<Id, S>, matrix_view<A, S>, matrix_view<B, S>)
    -> samples<detail::checked_id<Id, float, A, B>, std::remove_const_t<A>, S>;
template <class... A>
    requires(!detail::are_views<A...>())
samples(A...)
->samples<detail::misfit<A...>>;
template <class... Why, class L, space S>
struct samples<detail::misfit<Why...>, L, S> : detail::misfit_source<Why...> {
    template <class... A>
    constexpr samples(A&&...) {}
};

template <class Id, class L = float, space Space = space::host, class W = arithmetic_t<L>>
struct weighted {
    static_assert(std::integral<Id>, "opd: ids are integers, of any type");
    static_assert(detail::stored<L>,
                  "opd: unknown element type: specialise opd::element for it, in one line where it holds "
                  "the bits of a known type; see docs/concepts/element.md");
    static constexpr cache_kind kind = cache_kind::weighted;
    using id_type = Id;
    using log_type = L;
    static constexpr space memory_space = Space;
    matrix_view<const Id, Space> ids;   ///< (N,B); -1: unused slot
    matrix_view<const W, Space> weight; ///< (N,B) w with E[Σ w f(a)] = E_mu[f]: mu/inclusion for threshold(B)
    matrix_view<const L, Space> log_mu; ///< (N,B)
    matrix_view<const L, Space> log_q;  ///< (N,B)
    matrix_view<const std::uint8_t, Space> exact = {}; ///< (N,B) 1 where the inclusion is certain; carries the baseline
    matrix_view<const L, Space> log_prox = {};
    matrix_view<const L, Space> log_ref = {};
};
template <class Id, class W, class A, class B, space S>
weighted(matrix_view<Id, S>, matrix_view<W, S>, matrix_view<A, S>, matrix_view<B, S>)
    -> weighted<detail::checked_id<Id, W, A, B>, std::remove_const_t<A>, S, std::remove_const_t<W>>;
template <class Id, class W, class A, class B, class E, space S>
weighted(matrix_view<Id, S>, matrix_view<W, S>, matrix_view<A, S>, matrix_view<B, S>, matrix_view<E, S>)
    -> weighted<detail::checked_id<Id, W, A, B>, std::remove_const_t<A>, S, std::remove_const_t<W>>;
template <class... A>
    requires(!detail::are_views<A...>())
weighted(A...)
->weighted<detail::misfit<A...>>;
template <class... Why, class L, space S, class W>
struct weighted<detail::misfit<Why...>, L, S, W> : detail::misfit_source<Why...> {
    template <class... A>
    constexpr weighted(A&&...) {}
};

} // namespace teacher

namespace detail {
template <class Y, space S>
inline constexpr bool materialised<teacher::dense<Y, S>> = true;
} // namespace detail

} // namespace opd
