// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// From sequences to rows and back, on range-v3: for the code around a loss, on the host. opd.hpp does not include it,
// and no header that a .cu reaches may: range-v3 does not compile under nvcc.
//
//   offsets_of(lengths)                first row of each sequence, from 0 to N: env.offsets
//   packed(sequences, column)          the columns of all sequences, one after the other, as a view
//   unpacked(column, offsets, width)   what was packed, a span a sequence; of rows `width` numbers wide
//   behind_prompt(rows, fill, column)  a response's column behind the rows of its prompt
//   kept_rows(mask, n)                 the rows that count
//   columns(a, b, …)                   rows of several columns side by side: for (auto [id, log_p] : columns(ids,
//                                      log_p))
//   entries(cache, row)                the used slots of a row of a cache, {slot, id, log_q}
//   micro_batches(env, n, most)        the parts of a batch of n rows, each with an env of its own
//
// A part's env has its rows of everything, and the whole batch's count as normaliser: gradients and losses of the
// parts add up to those of the batch, but for rounding. Reductions over sequences are cut between sequences.
#pragma once

#include <range/v3/range/conversion.hpp>
#include <range/v3/view/concat.hpp>
#include <range/v3/view/filter.hpp>
#include <range/v3/view/iota.hpp>
#include <range/v3/view/join.hpp>
#include <range/v3/view/repeat_n.hpp>
#include <range/v3/view/transform.hpp>
#include <range/v3/view/zip.hpp>

#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "opd/batch.hpp"
#include "opd/caches.hpp"
#include "opd/config.hpp"
#include "opd/element.hpp"
#include "opd/error.hpp"
#include "opd/reduction.hpp"
#include "opd/teacher.hpp"
#include "opd/view.hpp"

namespace opd {

/// (S+1) first rows of sequences of these lengths.
template <::ranges::input_range Lengths>
std::vector<std::int64_t> offsets_of(Lengths&& lengths) {
    std::vector<std::int64_t> offsets{0};
    for (const auto length : lengths) offsets.push_back(offsets.back() + static_cast<std::int64_t>(length));
    return offsets;
}

/// The columns of all sequences, one after the other. `column(sequence)`: a range of one number a row, which must
/// outlive the view.
template <::ranges::viewable_range Sequences, class Column>
auto packed(Sequences&& sequences, Column column) {
    return ::ranges::views::transform(std::forward<Sequences>(sequences), std::move(column)) | ::ranges::views::join;
}

/// A packed column again as one span a sequence. `width` numbers a row: of a matrix without padding, (N,width).
template <class T>
auto unpacked(std::span<T> column, row_offsets<> offsets, index_t width = 1) {
    for (index_t s = 0; s < offsets.size; ++s)
        if (s == 0 ? offsets[0] != 0 : offsets[s] < offsets[s - 1])
            throw invalid_input("offsets", "must ascend from 0", s);
    const index_t rows = offsets.size > 0 ? offsets[offsets.size - 1] : 0;
    if (width < 0 || static_cast<index_t>(column.size()) != rows * width)
        throw invalid_input("column", "has " + std::to_string(column.size()) + " numbers for " + std::to_string(rows) +
                                          " rows of " + std::to_string(width));
    return ::ranges::views::iota(index_t{0}, offsets.size > 0 ? offsets.size - 1 : 0) |
           ::ranges::views::transform([column, offsets, width](index_t s) {
               return column.subspan(static_cast<std::size_t>(offsets[s] * width),
                                     static_cast<std::size_t>((offsets[s + 1] - offsets[s]) * width));
           });
}
template <class T>
auto unpacked(const std::vector<T>& column, row_offsets<> offsets, index_t width = 1) {
    return unpacked(std::span<const T>(column), offsets, width);
}

/// A column that knows the response alone, such as log mu, over all rows of its sequence: `fill` in the `rows` of the
/// prompt.
template <::ranges::viewable_range Column, class T>
auto behind_prompt(index_t rows, T fill, Column&& column) {
    return ::ranges::views::concat(::ranges::views::repeat_n(static_cast<::ranges::range_value_t<Column>>(fill), rows),
                                   std::forward<Column>(column));
}

/// Rows 0 to n-1 that a mask keeps.
inline auto kept_rows(row_mask<> mask, index_t n) {
    return ::ranges::views::iota(index_t{0}, n) | ::ranges::views::filter([mask](index_t r) { return mask.kept(r); });
}

/// Several columns of the same length, row by row: tuples of references.
template <class... T>
auto columns(vector_view<T>... of) {
    const index_t size[] = {of.size...};
    for (const index_t n : size)
        if (n != size[0])
            throw invalid_input("columns", "have " + std::to_string(size[0]) + " and " + std::to_string(n) + " rows");
    return ::ranges::views::zip(std::span<T>(of.data, static_cast<std::size_t>(of.size))...);
}

/// A used slot of a row of a cache.
struct cache_entry {
    int slot;
    index_t id;
    double log_q;
};
/// The used slots of a row of a cache with entries, as a range of cache_entry; unused slots are passed over.
template <class Cache>
auto entries(const Cache& cache, index_t row) {
    static_assert(Cache::kind != cache_kind::dense, "opd: a dense cache has logits, not entries");
    auto of_row = cache;
    if constexpr (is_ragged<Cache>) of_row.widest = cache.ids.size; // a call finds it
    const auto slots = detail::slots_of(of_row, row);
    return ::ranges::views::iota(index_t{0}, slots.count) |
           ::ranges::views::filter([slots](index_t j) { return static_cast<index_t>(slots.ids[j]) != -1; }) |
           ::ranges::views::transform([slots](index_t j) {
               using L = typename Cache::log_type;
               return cache_entry{static_cast<int>(j), static_cast<index_t>(slots.ids[j]),
                                  double(element<L>::load(slots.log_q[j]))};
           });
}

/// Rows first to first + rows - 1 of a batch.
struct micro_batch {
    index_t first = 0, rows = 0;
    opd::env env = {}; ///< of these rows alone; refers to the batch's memory and to `offsets`
    std::vector<std::int64_t> offsets = {};

    template <class T>
    matrix_view<T> of(const matrix_view<T>& m) const {
        return m.data == nullptr ? m : matrix_view<T>(m.row(first), rows, m.cols, m.stride, m.padding);
    }
    template <class T>
    vector_view<T> of(const vector_view<T>& v) const {
        return v.data == nullptr ? v : vector_view<T>(v.data + first, rows);
    }
};

namespace detail {
inline namespace OPD_ISA {

template <class View>
View rows_of_untyped(View v, index_t first, index_t rows) {
    if (v.data == nullptr) return v;
    v.data = static_cast<const std::byte*>(v.data) + first * v.bytes, v.size = rows;
    return v;
}

} // namespace OPD_ISA
} // namespace detail

/// Parts of at most `most` rows (and at least a sequence, where the reduction is over sequences) of a batch of n.
inline std::vector<micro_batch> micro_batches(const env& whole, index_t n, index_t most) {
    if (most < 1) throw invalid_input("most", "a part has at least one row");
    detail::check_env(whole, n);
    detail::check_env_contents(whole, n);
    const bool by_sequence = detail::reduces_sequences(whole.reduction);
    std::vector<micro_batch> parts;
    index_t sequence = 0;
    for (index_t first = 0; first < n;) {
        micro_batch p;
        p.first = first;
        if (by_sequence) { // whole sequences, as many as fit
            p.offsets.push_back(0);
            index_t end = first;
            while (sequence + 1 < whole.offsets.size) {
                const index_t next = whole.offsets[sequence + 1];
                if (next - first > most && end > first) break;
                end = next, ++sequence;
                p.offsets.push_back(end - first);
                if (end - first >= most) break;
            }
            p.rows = end - first;
        } else {
            p.rows = n - first < most ? n - first : most;
        }
        env& e = p.env = whole;
        e.mask = detail::rows_of_untyped(whole.mask, first, p.rows);
        e.weights = detail::rows_of_untyped(whole.weights, first, p.rows);
        e.versions = p.of(whole.versions), e.losses = p.of(whole.losses);
        e.lse = p.of(whole.lse), e.given_lse = p.of(whole.given_lse);
        e.frozen = {p.of(whole.frozen.keep), p.of(whole.frozen.weight), p.of(whole.frozen.sequence_log_ratio),
                    p.of(whole.frozen.advantage)};
        e.offsets = {};
        if (whole.reduction != reduce::sum) e.normaliser = detail::count_of(whole, n);
        first += p.rows;
        parts.push_back(std::move(p));
    }
    if (by_sequence)
        for (micro_batch& p : parts) p.env.offsets = row_offsets<>(p.offsets); // where they stay
    return parts;
}

} // namespace opd
