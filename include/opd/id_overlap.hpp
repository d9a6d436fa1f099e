// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// How much of a support another list of ids knows: share[r] = |S_r ∩ T_r| / |S_r|, as the share of a stale student's
// or a teacher's best ids that are among the current student's (top_k of score.hpp gives those).
//
//   opd::id_overlaps o = opd::id_overlap(support, opd::view(top_ids, N, k), opd::view(share, N));
//
//   support, others   (N,k) ids as a view, a teacher::support or a teacher::ragged_support, whose ids alone are read;
//                     -1: an unused slot
//   share             (N) out; may be left out
//   o                 rows, those that are bad, and the mean over the rest
//
//   opd::drop_repeats(ids)    in place: of an id that stands twice in a row, all but the first become -1. Servers that
//                             add the sampled token to their best k give it twice, and a support with an id twice is
//                             bad
//
// A row whose S has no used slot, an id twice or one below -1 is bad: share 0, counted, not in the mean. T may hold
// anything. Masked rows are left as they are. On the host alone, O(k log k) a row: bring a device's ids over. It
// allocates; a figure to look at, not a step.
// Throws invalid_input, before anything is written, for shapes, offsets and spans that overlap.
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <utility>
#include <vector>

#include "opd/batch.hpp"
#include "opd/checks/shapes.hpp"
#include "opd/checks/spans.hpp"
#include "opd/config.hpp"
#include "opd/reduction.hpp"
#include "opd/teacher.hpp"
#include "opd/view.hpp"

namespace opd {

/// What id_overlap found.
struct id_overlaps {
    index_t rows = 0; ///< kept
    index_t bad_rows = 0, first_bad_row = -1;
    double sum = 0; ///< of the shares
    double mean() const { return rows > bad_rows ? sum / double(rows - bad_rows) : 0; }
};

namespace detail {
inline namespace OPD_ISA {

template <class Id>
index_t check_id_lists(const char* name, const matrix_view<Id>& ids, index_t rows, call_spans& spans) {
    const index_t n = rows < 0 ? ids.rows : rows;
    check_matrix(name, ids, n, ids.cols);
    spans.reads(name, ids);
    return n;
}
template <class Id, class L>
index_t check_id_lists(const char* name, const teacher::support<Id, L>& cache, index_t rows, call_spans& spans) {
    return check_id_lists(name, cache.ids, rows, spans);
}
template <class Id, class L>
index_t check_id_lists(const char* name, const teacher::ragged_support<Id, L>& cache, index_t rows, call_spans& spans) {
    const index_t n = rows < 0 ? std::max<index_t>(cache.offsets.size - 1, 0) : rows;
    check_vector(name, cache.ids, -1);
    if (cache.offsets.empty() && n > 0) throw invalid_input(name, "has no offsets");
    check_vector(name, cache.offsets, n > 0 ? n + 1 : -1);
    for (index_t r = 0; r < n; ++r) ids_of_row(name, cache.offsets, r, cache.ids.size);
    spans.reads(name, cache.ids), spans.reads(name, cache.offsets);
    return n;
}

template <class Id>
void append_ids(std::vector<index_t>& to, const Id* ids, index_t count) {
    for (index_t j = 0; j < count; ++j)
        if (static_cast<index_t>(ids[j]) != -1) to.push_back(static_cast<index_t>(ids[j]));
}
template <class Id>
void append_row(std::vector<index_t>& to, const matrix_view<Id>& ids, index_t r) {
    append_ids(to, ids.row(r), ids.cols);
}
template <class Id, class L>
void append_row(std::vector<index_t>& to, const teacher::support<Id, L>& cache, index_t r) {
    append_row(to, cache.ids, r);
}
template <class Id, class L>
void append_row(std::vector<index_t>& to, const teacher::ragged_support<Id, L>& cache, index_t r) {
    append_ids(to, cache.ids.data + cache.offsets[r], cache.offsets[r + 1] - cache.offsets[r]);
}

/// Of a row's n ids.
template <class Id>
index_t drop_repeats_of(Id* ids, index_t n, std::vector<std::pair<index_t, index_t>>& sorted) {
    sorted.clear();
    for (index_t j = 0; j < n; ++j)
        if (static_cast<index_t>(ids[j]) != -1) sorted.emplace_back(static_cast<index_t>(ids[j]), j);
    std::sort(sorted.begin(), sorted.end());
    index_t dropped = 0;
    for (std::size_t i = 1; i < sorted.size(); ++i)
        if (sorted[i].first == sorted[i - 1].first) ids[sorted[i].second] = static_cast<Id>(-1), ++dropped;
    return dropped;
}

} // namespace OPD_ISA
} // namespace detail

inline namespace OPD_ISA {

/// (N,k) ids of a support, or the line of a ragged one with its offsets (N+1). Returns how many slots became unused.
/// Throws invalid_input, before anything is written, for shapes and offsets.
template <std::integral Id>
index_t drop_repeats(matrix_view<Id> ids) {
    detail::check_matrix("ids", ids, ids.rows, ids.cols);
    std::vector<std::pair<index_t, index_t>> sorted;
    index_t dropped = 0;
    for (index_t r = 0; r < ids.rows; ++r) dropped += detail::drop_repeats_of(ids.row(r), ids.cols, sorted);
    return dropped;
}
template <std::integral Id>
index_t drop_repeats(vector_view<Id> ids, row_offsets<> offsets) {
    detail::check_vector("ids", ids, -1);
    detail::check_vector("offsets", offsets, -1);
    const index_t rows = offsets.size > 0 ? offsets.size - 1 : 0;
    for (index_t r = 0; r < rows; ++r) detail::ids_of_row("ids", offsets, r, ids.size);
    std::vector<std::pair<index_t, index_t>> sorted;
    index_t dropped = 0;
    for (index_t r = 0; r < rows; ++r)
        dropped += detail::drop_repeats_of(ids.data + offsets[r], offsets[r + 1] - offsets[r], sorted);
    return dropped;
}

/// Share of each row's support that stands among the others' ids: `share` (N) in [0, 1], and the mean over good rows
/// that `mask` keeps.
template <class Support, class Others>
id_overlaps id_overlap(const Support& support, const Others& others, vector_view<double> share = {},
                       row_mask<> mask = {}) {
    detail::call_spans spans;
    spans.writes("share", share);
    const index_t n = detail::check_id_lists("support", support, -1, spans);
    detail::check_id_lists("others", others, n, spans);
    detail::check_vector("share", share, n);
    detail::check_vector("mask", mask, n);
    spans.reads("mask", mask);
    spans.check();
    id_overlaps out;
    std::vector<index_t> mine, theirs;
    for (index_t r = 0; r < n; ++r) {
        if (!mask.kept(r)) continue;
        ++out.rows;
        mine.clear(), theirs.clear();
        detail::append_row(mine, support, r), detail::append_row(theirs, others, r);
        std::sort(mine.begin(), mine.end()), std::sort(theirs.begin(), theirs.end());
        const bool bad = mine.empty() || mine.front() < 0 || std::adjacent_find(mine.begin(), mine.end()) != mine.end();
        if (bad && out.bad_rows++ == 0) out.first_bad_row = r;
        const auto known = std::count_if(
            mine.begin(), mine.end(), [&](index_t id) { return std::binary_search(theirs.begin(), theirs.end(), id); });
        const double of_row = bad ? 0 : double(known) / double(mine.size());
        out.sum += of_row;
        if (!share.empty()) share[r] = of_row;
    }
    return out;
}

} // namespace OPD_ISA

} // namespace opd
