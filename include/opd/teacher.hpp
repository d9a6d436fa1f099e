// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Teacher caches: what is known of the teacher at each row. The cache decides which objectives are available.
//
//   teacher::dense            V logits a row                                every divergence
//   teacher::support          k ids, teacher log-probs, (log tail mass)     divergences on a support
//   teacher::ragged_support   the same, with offsets: each row has its own number of ids
//   teacher::samples          m ids drawn i.i.d. from mu, log mu, log q     losses of drawn tokens, weights 1/m
//   teacher::weighted         ids with entry weights w, log mu, log q       losses of drawn tokens, any sampling design
//                                                                           with E[Σ w f(a)] = E_mu[f]
//
//   teacher::lumped{dense}         student and teacher have vocabularies of different size: a bucket holds the rest of
//                                  either one
//   teacher::at_rows{cache, map}   row r of the student has row map[r] of the cache
//   teacher::on_policy{cache}      the current student drew the tokens; without this the tokens count as stale
//   teacher::of_teacher{cache}     the teacher drew the tokens
//   teacher::on_kept_sets{cache, kept_ids, kept_offsets}   the tokens were drawn under a filter, which kept these ids
//
// ids may be of any integer type; the call checks them against the vocabulary. In supports and `weighted` the id -1
// marks an unused slot, whose other fields are not read. Any other negative id makes the row bad, and so does a row
// without a used slot. Log-probs are those of the full distribution at the temperature that the loss is meant at.
// Log-probs that were recorded raw while sampling ran at another temperature bias every importance ratio;
// diagnostics::mu_mismatch() shows it.
#pragma once

#include <concepts>
#include <cstdint>
#include <type_traits>

#include "opd/batch.hpp"
#include "opd/checks/misfit.hpp"
#include "opd/config.hpp"
#include "opd/element.hpp"
#include "opd/filter.hpp"
#include "opd/source.hpp"
#include "opd/view.hpp"

namespace opd {

/// The kinds of cache. An estimator that does not read dense logits declares which it `takes`.
enum class cache_kind { dense, support, samples, weighted };

/// What log mu is: of the law that tokens were drawn from (temperature and filter applied), or of the model's own
/// logits.
enum class logprob_mode { processed, raw };

/// How rollout drew a cache's tokens and recorded them. Raw log-probs under a temperature or a filter need log_norm,
/// the row's log of Σ mu^(1/T) over what the filter kept.
template <class L, space Space>
struct rollout_record {
    filter drawn_with = {};
    logprob_mode mode = logprob_mode::processed;
    vector_view<const L, Space> log_norm = {}; ///< (N)
};

/// The law that a cache's tokens were drawn under. Estimators differ in which they are right for: see opd/traits.hpp.
enum class law {
    stale,     ///< mu: an earlier student, or the same weights on another engine
    on_policy, ///< the student whose logits the call is given
    teacher    ///< q
};

namespace detail {
/// Id, or why a cache's columns of weights W and log-probs A and B fit no cache.
template <class Id, class W, class A, class B>
using checked_id =
    std::conditional_t<!std::floating_point<std::remove_const_t<W>>, misfit<weights_not_float>,
                       std::conditional_t<!std::is_same_v<std::remove_const_t<A>, std::remove_const_t<B>>,
                                          misfit<two_log_types>, std::remove_const_t<Id>>>;
} // namespace detail

namespace teacher {

/// All V logits of the teacher at each row.
template <class Y, space Space = space::host>
struct dense {
    static_assert(detail::known_elements<Y>());
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
template <class Y, space S, detail::option... Options>
dense(matrix_view<Y, S>, Options...) -> dense<std::remove_const_t<Y>, S>;
OPD_MISFIT(dense, (space S), S);

/// Whose best ids a support holds.
enum class chosen_by { teacher, stale_student, student };

/// k ids a row with the teacher's log-probs over the whole vocabulary.
template <class Id, class L = float, space Space = space::host>
struct support {
    static_assert(std::integral<Id>, "opd: ids are integers, of any type");
    static_assert(detail::known_elements<L>());
    static constexpr cache_kind kind = cache_kind::support;
    using id_type = Id;
    using log_type = L;
    static constexpr space memory_space = Space;
    matrix_view<const Id, Space> ids;          ///< (N,k) distinct; -1: unused slot
    matrix_view<const L, Space> log_q;         ///< (N,k)
    vector_view<const L, Space> log_tail = {}; ///< (N) log of the teacher's mass outside the support; empty: from log_q
    matrix_view<const L, Space> log_mu = {};   ///< (N,k) behaviour policy, for `reweighted`
    teacher::chosen_by chosen_by = teacher::chosen_by::teacher;
};
template <class Id, class L, space S, class... Tail>
support(matrix_view<Id, S>, matrix_view<L, S>, vector_view<Tail, S>...)
    -> support<std::remove_const_t<Id>, std::remove_const_t<L>, S>;
OPD_MISFIT(support, (class L, space S), L, S);

/// Supports that differ in length from row to row, as servers and top-p give them: row r's ids are ids[offsets[r]] to
/// ids[offsets[r+1]]. Whatever takes a `support` takes these, with the bits of a `support` filled up with -1. A row
/// without an id is bad.
template <class Id, class L = float, space Space = space::host>
struct ragged_support {
    static_assert(std::integral<Id>, "opd: ids are integers, of any type");
    static_assert(detail::known_elements<L>());
    static constexpr cache_kind kind = cache_kind::support;
    static constexpr bool is_ragged = true;
    using id_type = Id;
    using log_type = L;
    static constexpr space memory_space = Space;
    vector_view<const Id, Space> ids;          ///< (total) distinct in a row; -1: unused slot
    vector_view<const L, Space> log_q;         ///< (total)
    row_offsets<Space> offsets;                ///< (N+1) int32 or int64, ascending
    vector_view<const L, Space> log_tail = {}; ///< (N) as in `support`
    vector_view<const L, Space> log_mu = {};   ///< (total) behaviour policy, for `reweighted`
    teacher::chosen_by chosen_by = teacher::chosen_by::teacher;
    index_t widest =
        0; ///< most ids of a row; on the host 0 will do: the offsets say it, which a device's call cannot read
};
template <class Id, class L, space S, class Offsets, class... Tail>
ragged_support(vector_view<Id, S>, vector_view<L, S>, Offsets, vector_view<Tail, S>...)
    -> ragged_support<std::remove_const_t<Id>, std::remove_const_t<L>, S>;
OPD_MISFIT(ragged_support, (class L, space S), L, S);

/// m tokens a row that mu drew with replacement, each of weight 1/m.
template <class Id, class L = float, space Space = space::host>
struct samples {
    static_assert(std::integral<Id>, "opd: ids are integers, of any type");
    static_assert(detail::known_elements<L>());
    static constexpr cache_kind kind = cache_kind::samples;
    using id_type = Id;
    using log_type = L;
    static constexpr space memory_space = Space;
    matrix_view<const Id, Space> ids;            ///< (N,m) drawn i.i.d. from mu; repeats are legal
    matrix_view<const L, Space> log_mu;          ///< (N,m)
    matrix_view<const L, Space> log_q;           ///< (N,m)
    matrix_view<const L, Space> log_prox = {};   ///< (N,m) proximal policy; empty: log_mu
    matrix_view<const L, Space> log_ref = {};    ///< (N,m) reference policy; empty: log_mu
    matrix_view<const L, Space> advantage = {};  ///< (N,m) or (N,1): from outside, as of a task's reward
    vector_view<const L, Space> baseline = {};   ///< (N) for baseline::given
    vector_view<const L, Space> mu_entropy = {}; ///< (N) entropy of mu, nats: for estr
    rollout_record<L, Space> rollout = {};
};
template <class Id, class A, class B, space S>
samples(matrix_view<Id, S>, matrix_view<A, S>, matrix_view<B, S>)
    -> samples<detail::checked_id<Id, float, A, B>, std::remove_const_t<A>, S>;
OPD_MISFIT(samples, (class L, space S), L, S);

/// B ids a row by any sampling design, each with the weight that makes Σ w f(a) unbiased for E_mu[f].
template <class Id, class L = float, space Space = space::host, class W = arithmetic_t<L>>
struct weighted {
    static_assert(std::integral<Id>, "opd: ids are integers, of any type");
    static_assert(detail::known_elements<L>());
    static constexpr cache_kind kind = cache_kind::weighted;
    using id_type = Id;
    using log_type = L;
    static constexpr space memory_space = Space;
    matrix_view<const Id, Space> ids;                  ///< (N,B); -1: unused slot
    matrix_view<const W, Space> weight;                ///< (N,B) w with E[Σ w f(a)] = E_mu[f], as draw writes them
    matrix_view<const L, Space> log_mu;                ///< (N,B)
    matrix_view<const L, Space> log_q;                 ///< (N,B)
    matrix_view<const std::uint8_t, Space> exact = {}; ///< (N,B) 1 where the inclusion is certain; carries the baseline
    matrix_view<const L, Space> log_prox = {};         ///< this and the next ones as of samples
    matrix_view<const L, Space> log_ref = {};
    matrix_view<const L, Space> advantage = {};
    vector_view<const L, Space> baseline = {};
    vector_view<const L, Space> mu_entropy = {};
    /// (N) log of mu's mass outside the exact entries, as draw's `log_tail`; -inf: none. Where it is given, a row
    /// that has some and no drawn entry is an error: its weights say nothing of that mass.
    vector_view<const double, Space> log_tail_mu = {};
    rollout_record<L, Space> rollout = {};
};
template <class Id, class W, class A, class B, space S>
weighted(matrix_view<Id, S>, matrix_view<W, S>, matrix_view<A, S>, matrix_view<B, S>)
    -> weighted<detail::checked_id<Id, W, A, B>, std::remove_const_t<A>, S, std::remove_const_t<W>>;
template <class Id, class W, class A, class B, class E, space S>
weighted(matrix_view<Id, S>, matrix_view<W, S>, matrix_view<A, S>, matrix_view<B, S>, matrix_view<E, S>)
    -> weighted<detail::checked_id<Id, W, A, B>, std::remove_const_t<A>, S, std::remove_const_t<W>>;
OPD_MISFIT(weighted, (class L, space S, class W), L, S, W);

/// A dense cache over another vocabulary than the student's: D over the ids that both have and one bucket for all
/// beyond them, on either side, each side normalised over its own vocabulary. See docs/estimators/divergences.md.
template <class Cache>
struct lumped : Cache {
    static_assert(Cache::kind == cache_kind::dense,
                  "opd: teacher::lumped is of a teacher::dense; a support has its tail");
    static constexpr bool is_lumped = true;
    index_t common = 0; ///< ids [0, common) are the same for both; 0: as many as the smaller vocabulary has
};
template <class Cache>
lumped(Cache) -> lumped<Cache>;
template <class Cache, std::integral I>
lumped(Cache, I) -> lumped<Cache>;

/// A cache whose rows are not the student's: row r of the student has row map[r] of the cache, which may have fewer
/// rows or more, and one may serve several. For a teacher that read other prefixes (a hint, a solution: privileged or
/// self-distillation), that scored some of the rows alone (routes.hpp), or once for a whole group. Logits, hidden
/// states and supports; of drawn tokens the cache is by the student's rows anyway. The map of a masked row is not read.
/// On the host.
template <class Cache>
struct at_rows : Cache {
    static_assert(Cache::memory_space == space::host, "opd: teacher::at_rows is of caches in the host's memory");
    static_assert(Cache::kind == cache_kind::dense || Cache::kind == cache_kind::support,
                  "opd: teacher::at_rows is of logits, hidden states or supports: drawn tokens are the student's, so "
                  "their cache has its rows; give log_q of the rows that are this teacher's");
    static constexpr bool has_row_map = true;
    using cache_type = Cache;
    static constexpr bool whole_rows = opd::detail::whole_rows<Cache>;
    row_offsets<> map; ///< (N) int32 or int64

    index_t rows() const { return map.size; }
    index_t cache_row(index_t row) const { return map[row]; }
    auto tile(row_place at, index_t begin) const requires row_source<Cache> {
        return Cache::tile({map[at.row], at.scratch}, begin);
    }
    auto logit(row_place at, index_t id) const requires row_source<Cache> {
        return Cache::logit({map[at.row], at.scratch}, id);
    }
};
template <class Cache, class Map>
at_rows(Cache, Map) -> at_rows<Cache>;

/// A cache of tokens that the student of the call drew itself, with the weights that it has now.
template <class Cache>
struct on_policy : Cache {
    static constexpr law drawn_under = law::on_policy;
};
template <class Cache>
on_policy(Cache) -> on_policy<Cache>;

/// A cache of tokens that the teacher drew: log_mu is log_q, or whatever law of the teacher's they came from.
template <class Cache>
struct of_teacher : Cache {
    static constexpr law drawn_under = law::teacher;
};
template <class Cache>
of_teacher(Cache) -> of_teacher<Cache>;

/// A cache of drawn tokens of which some have no log mu, NaN: their ratio is 1, held constant, as if the student had
/// drawn them now. Biased by as much as they are stale; counted in diagnostics.missing_mu. Without it such a row is
/// bad.
template <class Cache>
struct missing_mu : Cache {
    static constexpr bool may_miss_mu = true;
};
template <class Cache>
missing_mu(Cache) -> missing_mu<Cache>;

/// A cache of tokens that were drawn under top-k, top-p or min-p, with the ids that the filter kept of each row, as
/// kept_ids of draw.hpp writes them: row r's are ids[offsets[r]] to ids[offsets[r+1]], ascending. On them p is
/// renormalised, and the gradient lies on them alone; log mu is of the filtered law. log_kept_q (N): log of the
/// teacher's mass on the set, where log q is to be renormalised as well (the same gradient for reverse KL, another
/// loss for other shapes). A token outside its row's set makes the row bad; counted.
template <class Cache, class Id>
struct on_kept_sets : Cache {
    using L = typename Cache::log_type;
    static constexpr bool has_kept_sets = true;
    static constexpr space Space = Cache::memory_space;
    vector_view<const Id, Space> kept_ids;
    row_offsets<Space> kept_offsets;             ///< (N+1)
    vector_view<const L, Space> log_kept_q = {}; ///< (N); empty: log q is the teacher's over the vocabulary
    index_t widest = 0; ///< most ids of a row; 0: found from the offsets, which a device cannot
};
template <class Cache, class Id, space S, class Offsets, class... L>
on_kept_sets(Cache, vector_view<Id, S>, Offsets, vector_view<L, S>...) -> on_kept_sets<Cache, std::remove_const_t<Id>>;

} // namespace teacher

/// Whether a cache's tokens come with the sets that a filter kept.
template <class Cache>
inline constexpr bool has_kept_sets = requires {
    Cache::has_kept_sets;
};

/// Whether a token without log mu has the ratio 1.
template <class Cache>
inline constexpr bool may_miss_mu = requires {
    Cache::may_miss_mu;
};

/// Whether what lies beyond the common vocabulary is one bucket.
template <class Cache>
inline constexpr bool is_lumped = requires {
    Cache::is_lumped;
};

/// Whether a cache's rows differ in length.
template <class Cache>
inline constexpr bool is_ragged = requires {
    Cache::is_ragged;
};

/// Whether a cache's rows are found by a map.
template <class Cache>
inline constexpr bool has_row_map = requires {
    Cache::has_row_map;
};

/// The law of a cache's tokens; stale unless it says otherwise.
template <class Cache>
constexpr law law_of() {
    if constexpr (requires { Cache::drawn_under; })
        return Cache::drawn_under;
    else
        return law::stale;
}

namespace detail {
template <class Y, space S>
inline constexpr bool materialised<teacher::dense<Y, S>> = true;
template <class Cache>
inline constexpr bool materialised<teacher::lumped<Cache>> = materialised<Cache>;

/// The cache's row that belongs to a row of the student.
template <class Cache>
OPD_HD OPD_INLINE index_t cache_row(const Cache& t, index_t row) {
    if constexpr (has_row_map<Cache>)
        return t.cache_row(row);
    else
        return row;
}
} // namespace detail

} // namespace opd
