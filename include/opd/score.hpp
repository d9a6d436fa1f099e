// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Scoring: what a teacher, or a learner of its own rollouts, says of given ids, from one pass over each row of logits.
//
//   opd::score(be, y, opd::scores<>{.ids = view(ids, N, m), .log_p = view(log_q, N, m), .log_tail = view(tail, N)},
//              temperature);
//
//   log_p[r,j]       log p[r, ids[r,j]]
//   log_tail[r]      log of the mass outside the row's ids, each counted once: summed, not 1 minus what was listed
//   top_ids, top_log_p, top_log_tail        the same of the row's most probable ids, best first, ties to the lower id
//   lse[r]           log Σ_v e^(z[r,v]/T)
//   entropy[r]       -Σ_v p[r,v] log p[r,v], a by-product of the pass; 0 for a bad row
//
// Every part may be left out. p is the softmax of z/T. All of it is a function of the row's bits, T and the ids asked
// for: the same in every batch, and log_p has the same bits whatever else is asked. It is the log p that the sampled
// estimators use.
//
// An id of -1 is an unused slot: log_p -inf, counted nowhere. Other ids outside [0, V) get -inf and make the row bad;
// a row with NaN, +inf or no mass is bad, with -inf throughout and top ids of -1. Where fewer than k ids have mass,
// the top's last slots are -1. Bad rows are counted; so is a ragged list longer than V whose tail is asked for.
// Masked rows are left as they are.
//
// Instead of a view and a temperature every call takes a source that has its own: teacher::hidden{x, w},
// student::hidden, … (hidden.hpp). Logits of hidden states are made a block at a time, within `.budget`, with the
// same bits.
//
// token_logp, top_k and log_sum_exp are this call with one part of it. token_logp of a cache instead of ids is log p
// as an estimator sees its tokens: with kept sets (teacher::on_kept_sets) that of softmax(z[K]/T).
#pragma once

#include <concepts>
#include <cstdint>
#include <string>
#include <type_traits>

#include "opd/batch.hpp"
#include "opd/checks/shapes.hpp"
#include "opd/checks/spans.hpp"
#include "opd/config.hpp"
#include "opd/error.hpp"
#include "opd/evaluate.hpp"
#include "opd/filter.hpp"
#include "opd/logits/logit_rows.hpp"
#include "opd/source.hpp"
#include "opd/teacher.hpp"
#include "opd/view.hpp"

namespace opd {

/// What `score` reads and writes; each part may be left out.
template <class Id = std::int32_t, class L = float, space Space = space::host>
struct scores {
    matrix_view<const Id, Space> ids = {};   ///< (N,m)
    matrix_view<L, Space> log_p = {};        ///< (N,m)
    vector_view<L, Space> log_tail = {};     ///< (N)
    matrix_view<Id, Space> top_ids = {};     ///< (N,k)
    matrix_view<L, Space> top_log_p = {};    ///< (N,k)
    vector_view<L, Space> top_log_tail = {}; ///< (N)
    vector_view<double, Space> lse = {};     ///< (N)
    vector_view<double, Space> entropy = {}; ///< (N)
    row_offsets<Space> offsets =
        {}; ///< (N+1) ragged lists: ids and log_p are (1,total), row r's from offsets[r] to offsets[r+1]
};

/// A checked call of score. Rows: a view, or a source read as one.
template <class Z, class Id, class L, space Space = space::host, class Rows = matrix_view<const Z, Space>>
struct score_job {
    using logit_type = Z;
    using id_type = Id;
    using log_type = L;
    static constexpr space memory_space = Space;
    Rows z;
    scores<Id, L, Space> what;
    float temperature;
    row_mask<Space> mask;

    index_t row_count() const { return z.rows; }
    basic_env<Space> as_env() const { return {.reduction = reduce::sum, .mask = mask, .lse = what.lse}; }
};

/// A checked call of token_logp on kept sets.
template <class Z, class Cache, class L, space Space = space::host, class Rows = matrix_view<const Z, Space>>
struct kept_logp_job {
    using logit_type = Z;
    using log_type = L;
    static constexpr space memory_space = Space;
    Rows z;
    Cache cache;
    matrix_view<L, Space> log_p;
    float temperature;
    row_mask<Space> mask;
    vector_view<double, Space> lse;

    index_t row_count() const { return z.rows; }
    basic_env<Space> as_env() const { return {.reduction = reduce::sum, .mask = mask, .lse = lse}; }
};

namespace detail {
inline namespace OPD_ISA {
/// A checked call of score from a view or a source.
template <class Rows, class Id, class L, space Space>
auto checked_scores(const Rows& z, const scores<Id, L, Space>& what, float temperature, const row_mask<Space>& mask) {
    static_assert(std::integral<Id>, "opd: token ids are integers");
    const index_t n = z.rows;
    const bool ragged = !what.offsets.empty(), lists = !left_out(what.ids), tops = !left_out(what.top_ids);
    check_rows(z);
    check_temperature("temperature", temperature);
    call_spans spans;
    if (lists) spans.reads("ids", what.ids, ragged ? 1 : n, what.ids.cols);
    if (!lists && (ragged || !left_out(what.log_p) || !what.log_tail.empty()))
        throw invalid_input("ids", "are left out; log_p, log_tail and offsets speak of them");
    spans.may_write("log_p", what.log_p, ragged ? 1 : n, what.ids.cols);
    spans.writes("log_tail", what.log_tail, n);
    if (tops) spans.writes("top_ids", what.top_ids, n, what.top_ids.cols);
    if (!tops && (!left_out(what.top_log_p) || !what.top_log_tail.empty()))
        throw invalid_input("top_ids", "are left out; top_log_p and top_log_tail speak of them");
    if (tops && (what.top_ids.cols < 1 || what.top_ids.cols > z.cols) && n > 0)
        throw invalid_input("top_ids", "has " + std::to_string(what.top_ids.cols) +
                                           " columns; a row has between 1 and " + std::to_string(z.cols) + " best ids");
    spans.may_write("top_log_p", what.top_log_p, n, what.top_ids.cols);
    spans.writes("top_log_tail", what.top_log_tail, n);
    spans.writes("lse", what.lse, n);
    spans.writes("entropy", what.entropy, n);
    spans.reads("mask", mask, n);
    if (ragged) {
        spans.reads("offsets", what.offsets, n + 1);
        if constexpr (Space == space::host)
            for (index_t r = 0; r < n; ++r) ids_of_row("offsets", what.offsets, r, what.ids.cols);
    }
    read_rows(spans, z);
    spans.check();
    return score_job<typename logit_of_rows<Rows>::type, Id, L, Space, Rows>{z, what, temperature, mask};
}
} // namespace OPD_ISA
} // namespace detail

inline namespace OPD_ISA {

/// Scores every row that is kept. See the head of this file. Returns the backend's result: its diagnostics count rows
/// and bad rows. Throws invalid_input, before anything is written, for shapes and numbers outside their range.
template <class Backend, readable_source Source, class Id, class L, space Space>
auto score(Backend&& be, const Source& source, const scores<Id, L, Space>& what,
           std::type_identity_t<row_mask<Space>> mask = {}) {
    detail::check_spaces<Backend, Source, Space>();
    if constexpr (detail::reads_whole<Source>())
        return be.for_rows(detail::checked_scores(detail::job_rows(source), what, source.temperature, mask));
}
template <class Backend, class Z, class Id, class L, space Space>
auto score(Backend&& be, matrix_view<Z, Space> z, const scores<Id, L, Space>& what, float temperature = 1,
           std::type_identity_t<row_mask<Space>> mask = {}) {
    return score(be, detail::as_source(z, temperature), what, mask);
}

/// Bytes of arena that scoring rows of z for these parts needs, for callers who own all memory.
template <class Backend, class Z, class Id, class L, space Space>
std::size_t score_workspace_bytes(const Backend& be, matrix_view<Z, Space> z, const scores<Id, L, Space>& what) {
    return be.workspace_bytes(score_job<std::remove_const_t<Z>, Id, L, Space>{z, what, 1, {}});
}
template <class Backend, readable_source Source, class Id, class L, space Space>
std::size_t score_workspace_bytes(const Backend& be, const Source& source, const scores<Id, L, Space>& what) {
    return be.workspace_bytes(detail::checked_scores(detail::rows_of_source(source), what, source.temperature, {}));
}

/// log_p[r,j] = log p[r, ids[r,j]] at `temperature`, and optionally each row's log-sum-exp and log tail mass. (N,V),
/// (N,m) -> (N,m)
template <class Backend, readable_source Source, class Id, class L, space Space>
auto token_logp(Backend&& be, const Source& source, matrix_view<Id, Space> ids, matrix_view<L, Space> log_p,
                std::type_identity_t<row_mask<Space>> mask = {},
                std::type_identity_t<vector_view<double, Space>> lse = {},
                std::type_identity_t<vector_view<L, Space>> log_tail = {}) {
    detail::check_matrix("ids", ids, source.rows(), ids.cols);
    detail::check_matrix("log_p", log_p, source.rows(), ids.cols);
    return score(
        be, source,
        scores<std::remove_const_t<Id>, L, Space>{.ids = ids, .log_p = log_p, .log_tail = log_tail, .lse = lse}, mask);
}
template <class Backend, class Z, class Id, class L, space Space>
auto token_logp(Backend&& be, matrix_view<Z, Space> z, matrix_view<Id, Space> ids, matrix_view<L, Space> log_p,
                float temperature = 1, std::type_identity_t<row_mask<Space>> mask = {},
                std::type_identity_t<vector_view<double, Space>> lse = {},
                std::type_identity_t<vector_view<L, Space>> log_tail = {}) {
    return token_logp(be, detail::as_source(z, temperature), ids, log_p, mask, lse, log_tail);
}

} // namespace OPD_ISA

namespace detail {
inline namespace OPD_ISA {
/// A checked call of token_logp on kept sets, from a view or a source.
template <class Rows, class Cache, class L, space Space>
auto checked_kept_logp(const Rows& z, const Cache& cache, matrix_view<L, Space> log_p, float temperature,
                       const row_mask<Space>& mask, vector_view<double, Space> lse) {
    const index_t n = z.rows;
    check_rows(z);
    check_temperature("temperature", temperature);
    call_spans spans;
    spans.reads("teacher.ids", cache.ids, n, cache.ids.cols);
    spans.writes("log_p", log_p, n, cache.ids.cols);
    check_kept_sets(cache, n);
    spans.reads("mask", mask, n);
    spans.writes("lse", lse, n);
    read_rows(spans, z);
    spans.reads("teacher.kept_ids", cache.kept_ids);
    spans.reads("teacher.kept_offsets", cache.kept_offsets);
    spans.check();
    return kept_logp_job<typename logit_of_rows<Rows>::type, Cache, L, Space, Rows>{z,           cache, log_p,
                                                                                    temperature, mask,  lse};
}
} // namespace OPD_ISA
} // namespace detail

inline namespace OPD_ISA {

/// log p of a cache's tokens as its estimators see them, which passes over a whole batch (m2po.hpp, sequences.hpp)
/// read: at its ids, on its kept sets where it has some, `lse` likewise. Those rows read the logits of their sets
/// alone; a token outside its set, or of a bad row, gets NaN and makes the row bad, counted in `outside_kept`. (N,V),
/// (N,m) -> (N,m)
template <class Backend, readable_source Source, class Cache, class L, space Space>
    requires requires(const Cache& c) { c.log_mu; }
auto token_logp(Backend&& be, const Source& source, const Cache& cache, matrix_view<L, Space> log_p,
                std::type_identity_t<row_mask<Space>> mask = {},
                std::type_identity_t<vector_view<double, Space>> lse = {}) {
    if constexpr (!has_kept_sets<Cache>) {
        return token_logp(be, source, cache.ids, log_p, mask, lse);
    } else {
        detail::check_spaces<Backend, Cache, Space>();
        if constexpr (detail::reads_whole<Source>())
            return be.for_rows(
                detail::checked_kept_logp(detail::job_rows(source), cache, log_p, source.temperature, mask, lse));
    }
}
template <class Backend, class Z, class Cache, class L, space Space>
    requires requires(const Cache& c) { c.log_mu; }
auto token_logp(Backend&& be, matrix_view<Z, Space> z, const Cache& cache, matrix_view<L, Space> log_p,
                float temperature = 1, std::type_identity_t<row_mask<Space>> mask = {},
                std::type_identity_t<vector_view<double, Space>> lse = {}) {
    return token_logp(be, detail::as_source(z, temperature), cache, log_p, mask, lse);
}

/// The k = top_ids.cols most probable ids of each row, best first, ties to the lower id, with their log p and
/// optionally the log of the mass outside them: a teacher::support. (N,V) -> (N,k), (N,k), (N)
template <class Backend, class Z, class Id, class L, space Space>
auto top_k(Backend&& be, matrix_view<Z, Space> z, matrix_view<Id, Space> top_ids, matrix_view<L, Space> top_log_p,
           float temperature = 1, std::type_identity_t<row_mask<Space>> mask = {},
           std::type_identity_t<vector_view<L, Space>> top_log_tail = {}) {
    return top_k(be, detail::as_source(z, temperature), top_ids, top_log_p, mask, top_log_tail);
}
template <class Backend, readable_source Source, class Id, class L, space Space>
auto top_k(Backend&& be, const Source& source, matrix_view<Id, Space> top_ids, matrix_view<L, Space> top_log_p,
           std::type_identity_t<row_mask<Space>> mask = {},
           std::type_identity_t<vector_view<L, Space>> top_log_tail = {}) {
    return score(be, source,
                 scores<Id, L, Space>{.top_ids = top_ids, .top_log_p = top_log_p, .top_log_tail = top_log_tail}, mask);
}

/// lse[r] = log Σ_v e^(z[r,v]/temperature). (N,V) -> (N)
template <class Backend, class Z, space Space>
auto log_sum_exp(Backend&& be, matrix_view<Z, Space> z, std::type_identity_t<vector_view<double, Space>> lse,
                 float temperature = 1, std::type_identity_t<row_mask<Space>> mask = {}) {
    return score(be, z, scores<std::int32_t, float, Space>{.lse = lse}, temperature, mask);
}
template <class Backend, readable_source Source>
auto log_sum_exp(Backend&& be, const Source& source, vector_view<double, Source::memory_space> lse,
                 row_mask<Source::memory_space> mask = {}) {
    return score(be, source, scores<std::int32_t, float, Source::memory_space>{.lse = lse}, mask);
}

} // namespace OPD_ISA

} // namespace opd
