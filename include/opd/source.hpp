// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What a source of rows is: a struct that hands out logits, which need not lie in memory as one matrix
// (docs/concepts/source.md). `student::logits`, `teacher::dense` and hidden states are sources. A struct of yours with
// the same members stands in their place.
#pragma once

#include <concepts>
#include <cstddef>

#include "opd/config.hpp"

namespace opd {

/// A row that a source of rows (docs/concepts/source.md) is asked about, and memory that is the asking thread's until
/// it asks about another row: as many bytes as the source says it needs (`scratch_bytes()`), none if it says nothing.
struct row_place {
    index_t row;
    std::byte* scratch = nullptr;
};

/// The student's side of a call, wherever its logits lie.
template <class S>
concept student_source = requires {
    typename S::logit_type;
    typename S::gradient_type;
    S::sparse_gradient;
};
/// What a source of rows answers: N, V, ids a tile, and the logits of a row by tile and one by one
/// (docs/concepts/source.md).
template <class S>
concept row_source = requires(const S s, row_place at, index_t i) {
    { s.rows() } -> std::convertible_to<index_t>;
    { s.vocab() } -> std::convertible_to<index_t>;
    { s.tile_size() } -> std::convertible_to<index_t>;
    { s.tile(at, i) } -> std::convertible_to<const typename S::logit_type*>;
    { s.logit(at, i) } -> std::convertible_to<typename S::logit_type>;
    { S::one_tile } -> std::convertible_to<bool>;
    { s.temperature } -> std::convertible_to<double>;
};
/// What a student answers beside: whether a gradient is asked for, and where dz goes.
template <class S>
concept gradient_sink = requires(const S s, row_place at, index_t i) {
    { s.has_gradient() } -> std::convertible_to<bool>;
    { s.gradient_tile(at, i) } -> std::convertible_to<typename S::gradient_type*>;
    { s.gradient_at(at, i) } -> std::same_as<typename S::gradient_type&>;
};

/// Rows that the backend makes from a description (hidden.hpp).
template <class S>
concept made_source = requires(const S s) {
    S::in_blocks;
    { s.rows() } -> std::convertible_to<index_t>;
    { s.vocab() } -> std::convertible_to<index_t>;
    { s.temperature } -> std::convertible_to<double>;
};

/// Rows of logits, in memory or made.
template <class S>
concept readable_source = row_source<S> || made_source<S>;

namespace detail {
/// Whether a source's rows are views of memory, z and dz or y, whose spans `evaluate` checks; another source sees to
/// itself.
template <class Source>
inline constexpr bool materialised = false;
/// Whether the backend makes a source's logits, for a block of rows at a time (hidden.hpp).
template <class Source>
inline constexpr bool in_blocks = requires {
    Source::in_blocks;
};
/// Whether it fills them itself, whole rows alone (logits/own_rows.hpp).
template <class Source>
concept fills_rows = requires {
    Source::fills_rows;
};
/// Whether it makes them a tile of the vocabulary at a time too, and what a tile held is gone when the next one comes.
template <class Source>
inline constexpr bool made_in_tiles = requires {
    Source::made_in_tiles;
};
/// Whether it makes the logits of the ids that a row asks for, and takes back their gradient
/// (logits/gathered_logits.hpp): make(row, ids, z), clear(row, ids), take_back(row, ids, dz, z).
template <class Source>
inline constexpr bool makes_ids = requires {
    Source::makes_ids;
};
/// Whether all of a row's logits, and of its gradient, lie side by side until the row is done: rows may go by without
/// tiles.
template <class Source>
inline constexpr bool whole_rows = materialised<Source> || requires {
    Source::whole_rows;
};

/// Whether its tiles are made in the asking thread's scratch.
template <class Source>
concept has_scratch = requires(const Source& s) {
    s.scratch_bytes();
};
template <class Source>
std::size_t scratch_of_source(const Source& s) {
    if constexpr (has_scratch<Source>)
        return (s.scratch_bytes() + 63) / 64 * 64;
    else
        return 0;
}
} // namespace detail

} // namespace opd
