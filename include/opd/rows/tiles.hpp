// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Rows come in tiles. A source of rows (student.hpp, teacher.hpp) hands out stretches of whole leaves of 1,024 ids;
// materialised logits are one tile. A phase that walks over the vocabulary says what it does with one tile,
//
//   start(rows, state) -> partial
//   tile(rows, state, partial&, row_tile, at)     goes on from where the tile before left off
//
// so that it may be run row by row, tile after tile, or for a block of rows tile by tile (logits/logit_tiles.hpp),
// where what costs is to have a tile at all: hidden states times an unembedding.
#pragma once

#include <cstddef>
#include <type_traits>

#include "opd/config.hpp"
#include "opd/rows/rows.hpp"
#include "opd/source.hpp"

namespace opd::detail {
inline namespace OPD_ISA {

/// Ids [begin, begin + count) of one row. y: null where there is no dense teacher; dz: null where no gradient is
/// asked for.
template <class Z, class Y, class G>
struct row_tile {
    const Z* z;
    const Y* y;
    G* dz;
    index_t begin, count;
};

/// Where the tile of `a` and `b` that begins at `begin` ends, and where the one that ends at `end` begins: at the
/// next border of either. Sizes are multiples of a leaf or no less than the row.
OPD_HD inline index_t tile_end(index_t begin, index_t a, index_t b, index_t n) {
    const index_t at_a = (begin / a + 1) * a, at_b = (begin / b + 1) * b, first = at_a < at_b ? at_a : at_b;
    return first < n ? first : n;
}
OPD_HD inline index_t tile_begin(index_t end, index_t a, index_t b) {
    const index_t at_a = (end - 1) / a * a, at_b = (end - 1) / b * b;
    return at_a < at_b ? at_b : at_a;
}

/// visit(begin, count) for every tile of a row, from the first or from the last.
template <bool Backwards, class Rows, class Visit>
OPD_HD OPD_INLINE void each_tile(const Rows& k, Visit visit) {
    if constexpr (Rows::one_tile) {
        visit(index_t{0}, k.vocab);
    } else if constexpr (Backwards) {
        for (index_t begin, end = k.vocab; end > 0; end = begin) {
            begin = tile_begin(end, k.tile_size(), k.tile_size_t());
            visit(begin, end - begin);
        }
    } else {
        for (index_t begin = 0, end; begin < k.vocab; begin = end) {
            end = tile_end(begin, k.tile_size(), k.tile_size_t(), k.vocab);
            visit(begin, end - begin);
        }
    }
}

/// A tile of a row; shorter where the student's source has fewer ids of this row than of others
/// (renormalised_rows.hpp).
template <class Rows>
OPD_HD OPD_INLINE auto tile_of(const Rows& k, const typename Rows::state_type& st, index_t begin, index_t count) {
    if constexpr (requires { k.student.ids_of(k.of_student(st)); }) count = k.student.ids_of(k.of_student(st));
    return k.tile(st, begin, count);
}

/// A phase over tiles that adds up: its `part`.
template <class Phase, bool Backwards>
struct over_tiles {
    static constexpr bool backwards = Backwards;
    template <class Rows, class At>
    OPD_HD OPD_INLINE static auto part(const Rows& k, const typename Rows::state_type& st, At at) {
        auto p = Phase::start(k, st);
        each_tile<Backwards>(
            k, [&](index_t begin, index_t count) { Phase::tile(k, st, p, tile_of(k, st, begin, count), at); });
        return p;
    }
};
/// A phase that sweeps a row, after what the engine does before one: a GPU's looks for anchors.
template <class Engine, class Sweep>
OPD_HD OPD_INLINE void fold_sweep(const auto& k, auto& team) {
    if constexpr (requires { Engine::template before<Sweep>(k, team); }) Engine::template before<Sweep>(k, team);
    team.template fold<Sweep>(k);
}
/// Its sums before the first tile, with the anchors that the engine has found.
template <class Engine>
OPD_HD OPD_INLINE auto begun_sweep(auto sums, const auto& st) {
    if constexpr (requires { Engine::begin_sweep(sums, st.swept); }) Engine::begin_sweep(sums, st.swept);
    return sums;
}
/// The same where the sums begin with nothing and merge as they do.
template <class Phase, class Sums, bool Backwards>
struct sums_over_tiles : over_tiles<Phase, Backwards> {
    OPD_HD static Sums start(const auto&, const auto&) { return {}; }
    OPD_HD static Sums merge(const Sums& a, const Sums& b) {
        if constexpr (std::is_arithmetic_v<Sums>)
            return a + b;
        else
            return Sums::merge(a, b);
    }
};
/// A phase over tiles that adds up nothing: its `run`. What it does with a tile: tile(rows, state, row_tile, at)
template <class Phase>
struct writes_tiles {
    static constexpr bool backwards = true; // the end of the row is still in cache
    static constexpr bool writes_gradient = true;
    template <class Rows, class At>
    OPD_HD OPD_INLINE static void run(const Rows& k, const typename Rows::state_type& st, At at) {
        each_tile<true>(k, [&](index_t begin, index_t count) { Phase::tile(k, st, tile_of(k, st, begin, count), at); });
    }
};

/// What is done to a gradient that is none: dz = beta·dz over the tiles of a row that is not `live`. No logits are
/// asked for: they may cost a product, and a masked row may have none.
template <class Rows>
struct zero_tiles {
    static constexpr bool writes_gradient = true;
    OPD_HD static bool due(const Rows& k, const typename Rows::state_type& st) {
        return k.student.has_gradient() && !k.live(st) && !st.foreign;
    }
    OPD_HD static void run(const Rows& k, const typename Rows::state_type& st, auto at) {
        each_tile<true>(k, [&](index_t begin, index_t count) {
            auto* dz = k.student.gradient_tile(k.of_student(st), begin);
            for (index_t i = at.id; i < count; i += at.count) scale_gradient(dz[i], k.frame.env.beta);
        });
    }
};
/// Columns of a materialised gradient beyond the softmax's ids.
template <class Rows>
struct clear_rest {
    static constexpr bool writes_gradient = true;
    OPD_HD static bool due(const Rows&, const typename Rows::state_type& st) { return !st.foreign; }
    OPD_HD static void run(const Rows& k, const typename Rows::state_type& st, auto at) {
        if constexpr (materialised<std::remove_cvref_t<decltype(k.student)>>)
            clear_columns(k.student, st.row, k.vocab, k.frame.env.beta, at);
    }
};

} // namespace OPD_ISA
} // namespace opd::detail
