// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Rows come in tiles. A source of rows (student.hpp, teacher.hpp) hands out stretches of whole leaves of 1,024 ids; materialised
// logits are one tile. A phase that walks over the vocabulary says what it does with one tile,
//
//   start(rows, state) -> partial
//   tile(rows, state, partial&, row_tile, at)     goes on from where the tile before left off
//
// so that it may be run row by row, tile after tile (`over_tiles`), or for a block of rows tile by tile, where making a tile for
// many rows at once is what costs little (hidden states times an unembedding).
#pragma once

#include "opd/config.hpp"
#include "opd/detail/rows.hpp"

namespace opd::detail {
inline namespace OPD_ISA {

/// Ids [begin, begin + count) of one row. y: null where there is no dense teacher; dz: null where no gradient is asked for.
template <class Z, class Y, class G>
struct row_tile {
    const Z* z;
    const Y* y;
    G* dz;
    index_t begin, count;
};

/// Where the tile of `a` and `b` that begins at `begin` ends, and where the one that ends at `end` begins: at the next border of
/// either. Sizes are multiples of a leaf or no less than the row.
OPD_HD inline index_t tile_end(index_t begin, index_t a, index_t b, index_t n) {
    const index_t at_a = (begin / a + 1) * a, at_b = (begin / b + 1) * b, first = at_a < at_b ? at_a : at_b;
    return first < n ? first : n;
}
OPD_HD inline index_t tile_begin(index_t end, index_t a, index_t b) {
    const index_t at_a = (end - 1) / a * a, at_b = (end - 1) / b * b;
    return at_a < at_b ? at_b : at_a;
}

/// What a phase makes of every tile of a row, from its first or from its last.
template <bool Backwards, class Phase, class Rows, class Partial, class At>
OPD_HD OPD_INLINE void each_tile(const Rows& k, const typename Rows::state_type& st, Partial& p, At at) {
    if constexpr (Rows::one_tile) {
        Phase::tile(k, st, p, k.tile(st.row, 0, k.vocab), at);
    } else if constexpr (Backwards) {
        for (index_t begin, end = k.vocab; end > 0; end = begin) {
            begin = tile_begin(end, k.tile_size(), k.tile_size_t());
            Phase::tile(k, st, p, k.tile(st.row, begin, end - begin), at);
        }
    } else {
        for (index_t begin = 0, end; begin < k.vocab; begin = end) {
            end = tile_end(begin, k.tile_size(), k.tile_size_t(), k.vocab);
            Phase::tile(k, st, p, k.tile(st.row, begin, end - begin), at);
        }
    }
}

/// The `part` of a phase over tiles.
template <class Phase, bool Backwards>
struct over_tiles {
    static constexpr bool backwards = Backwards;
    template <class Rows, class At>
    OPD_HD OPD_INLINE static auto part(const Rows& k, const typename Rows::state_type& st, At at) {
        auto p = Phase::start(k, st);
        each_tile<Backwards, Phase>(k, st, p, at);
        return p;
    }
};

} // namespace OPD_ISA
} // namespace opd::detail
