// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What passes over a whole batch have in common: drawn tokens as their estimator will see them, from a cache and a
// table of log p (token_logp, in double), on the host.
//
//   for_each_token(log_p, cache, mask, visit)            visit(row, slot, sampled_entry) for the used tokens of kept
//                                                        rows
//   advantages(log_p, cache, mask, out, advantage)       A of each token; 0 elsewhere
//
// The table is token_logp's of the cache itself: token_logp(backend, z, cache, log_p). On kept sets log p is then
// that of the set; one over the vocabulary would be off by the set's mass, which nothing shows.
//
// log p is rounded to the cache's type, as evaluate does, so that a pass and the estimator see the same ratio and the
// same A, to the bit; a student or a teacher without mass at the token counts as it does there (env.on_infinite at
// its default). Tokens that are none, whose row the estimator will call bad, are passed over. Shapes: log_p and out
// (N,m) as the cache's columns.
#pragma once

#include <type_traits>

#include "opd/batch.hpp"
#include "opd/checks/shapes.hpp"
#include "opd/config.hpp"
#include "opd/element.hpp"
#include "opd/entries.hpp"
#include "opd/error.hpp"
#include "opd/estimators/advantages.hpp"
#include "opd/estimators/sampled.hpp"
#include "opd/rows/kept_sets.hpp"
#include "opd/rows/sparse_math.hpp"
#include "opd/source.hpp"
#include "opd/teacher.hpp"
#include "opd/view.hpp"

namespace opd {

namespace detail {

/// log p of a table as a student of which each id's logit is its log-prob.
struct tabled_log_p {
    matrix_view<const double> log_p;
    index_t slot = 0;
    OPD_INLINE double logit(row_place at, index_t) const { return log_p(at.row, slot); }
};

} // namespace detail

/// Calls visit(row, slot, sampled_entry) in the order of the table. log_p (N,m); throws invalid_input for a table,
/// cache or mask of other sizes.
template <class Cache, class Visit>
void for_each_token(matrix_view<const double> log_p, const Cache& cache, row_mask<> mask, Visit visit) {
    static_assert(Cache::kind == cache_kind::samples || Cache::kind == cache_kind::weighted,
                  "opd: a pass over drawn tokens needs teacher::samples or teacher::weighted");
    const index_t n = log_p.rows, m = log_p.cols;
    if (cache.ids.rows != n || cache.ids.cols != m)
        throw invalid_input("log_p", "is of " + std::to_string(n) + " by " + std::to_string(m) +
                                         " tokens, the cache of " + std::to_string(cache.ids.rows) + " by " +
                                         std::to_string(cache.ids.cols));
    detail::check_vector("mask", mask, n);
    if constexpr (has_kept_sets<Cache>) detail::check_kept_sets(cache, n);
    const frozen_batch<> nothing;
    for (index_t r = 0; r < n; ++r) {
        if (!mask.kept(r)) continue;
        for (index_t j = 0; j < m; ++j) {
            sampled_entry x =
                detail::gathered(detail::tabled_log_p{log_p, j}, {r}, cache, nothing, j, index_t(1) << 62, 1, 0);
            if constexpr (has_kept_sets<Cache>) detail::put_on_set(x, cache, r);
            if (x.id < 0 || detail::is_nan(x.log_p) || !detail::is_drawn(x)) continue;
            if (detail::is_neg_inf(x.log_p)) x.log_p = x.log_mu - detail::no_mass;
            if (detail::is_neg_inf(x.log_q)) x.log_q = infinite{}.floor_at;
            visit(r, j, x);
        }
    }
}

/// A of each token into `out` (N,m); 0 for unused tokens and for rows that the mask leaves out.
template <class Cache, class Advantage = advantage::theta>
void advantages(matrix_view<const double> log_p, const Cache& cache, row_mask<> mask, matrix_view<double> out,
                const Advantage& advantage = {}) {
    detail::check_matrix("out", out, log_p.rows, log_p.cols);
    for (index_t r = 0; r < out.rows; ++r)
        for (index_t j = 0; j < out.cols; ++j) out(r, j) = 0;
    for_each_token(log_p, cache, mask, [&](index_t r, index_t j, const sampled_entry& x) { out(r, j) = advantage(x); });
}

} // namespace opd
