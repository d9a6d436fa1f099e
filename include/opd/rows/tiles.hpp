// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Rows come in tiles. A source of rows (student.hpp, teacher.hpp) hands out stretches of whole leaves of 1,024 ids; materialised
// logits are one tile. A phase that walks over the vocabulary says what it does with one tile,
//
//   start(rows, state) -> partial
//   tile(rows, state, partial&, row_tile, at)     goes on from where the tile before left off
//
// so that it may be run row by row, tile after tile, or for a block of rows tile by tile (`team_of_rows`), where what costs is to
// have a tile at all: hidden states times an unembedding, a shard that is read from afar.
#pragma once

#include <algorithm>
#include <cstddef>
#include <new>
#include <type_traits>

#include "opd/config.hpp"
#include "opd/rows/rows.hpp"

namespace opd::detail {
inline namespace OPD_ISA {

/// What a source of rows may leave out.
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
/// Whether a source's tiles are visited for a block of rows in turn: the tile first, then the rows.
template <class Source>
constexpr index_t rows_at_once() {
    if constexpr (requires { Source::rows_at_once; })
        return Source::rows_at_once;
    else
        return 1;
}

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

/// A tile of a row; shorter where the student's source has fewer ids of this row than of others (renormalised_rows.hpp).
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

/// A team of one with several rows in hand: of each tile, every row's part; then the next tile.
template <class State>
struct team_of_rows {
    State* states;
    index_t count;

    template <class Phase, class Rows>
    void fold(const Rows& k) {
        if constexpr (requires { Phase::backwards; }) {
            using partial = decltype(Phase::start(k, states[0]));
            partial parts[most];
            bool due[most];
            for (index_t i = 0; i < count; ++i)
                if ((due[i] = is_due<Phase>(k, states[i]))) parts[i] = Phase::start(k, states[i]);
            each_tile<Phase::backwards>(k, [&](index_t begin, index_t n) {
                for (index_t i = 0; i < count; ++i)
                    if (due[i]) Phase::tile(k, states[i], parts[i], k.tile(states[i], begin, n), alone{});
            });
            for (index_t i = 0; i < count; ++i)
                if (due[i]) Phase::finish(k, states[i], parts[i]);
        } else {
            for (index_t i = 0; i < count; ++i)
                if (is_due<Phase>(k, states[i])) Phase::finish(k, states[i], Phase::part(k, states[i], alone{}));
        }
    }
    template <class Phase, class Rows>
    void each(const Rows& k) {
        if constexpr (requires { Phase::backwards; })
            each_tile<Phase::backwards>(k, [&](index_t begin, index_t n) {
                for (index_t i = 0; i < count; ++i)
                    if (is_due<Phase>(k, states[i])) Phase::tile(k, states[i], k.tile(states[i], begin, n), alone{});
            });
        else
            for (index_t i = 0; i < count; ++i)
                if (is_due<Phase>(k, states[i])) Phase::run(k, states[i], alone{});
    }
    static constexpr index_t most = 64;
};

/// Rows [first, last), `at_once` of them together, each with `scratch_of_row` bytes. The groups' results are as if each group had
/// been run by itself: first is the first row of one.
template <class Rows>
void run_rows_together(const Rows& k, index_t first, index_t last, typename Rows::state_type* states, index_t at_once,
                       std::byte* scratch, std::size_t scratch_of_row) {
    for (index_t begin = first; begin < last; begin += at_once) {
        team_of_rows<typename Rows::state_type> team{states, std::min(at_once, last - begin)};
        for (index_t i = 0; i < team.count; ++i) {
            new (states + i) typename Rows::state_type{};
            states[i].row = begin + i;
            states[i].scratch = scratch + scratch_of_row * static_cast<std::size_t>(i);
        }
        team.template each<begin_row<Rows>>(k);
        k.row(team);
        fit_gradient(k, team);
        team.template each<end_row<Rows>>(k);
        for (index_t i = 0; i < team.count; ++i) {
            result& of_group = k.frame.partials[states[i].row / k.frame.group];
            if (states[i].row % k.frame.group == 0) of_group = {};
            of_group.loss += states[i].partial.loss;
            of_group.diagnostics.merge(states[i].partial.diagnostics);
        }
    }
}

/// What is done to a gradient that is none: dz = beta·dz over the tiles of a row that is not `live`. No logits are asked for: they
/// may cost a product, and a masked row may have none.
template <class Rows>
struct zero_tiles {
    static constexpr bool writes_gradient = true;
    OPD_HD static bool due(const Rows& k, const typename Rows::state_type& st) {
        return k.student.has_gradient() && !k.live(st);
    }
    template <class At>
    OPD_HD static void run(const Rows& k, const typename Rows::state_type& st, At at) {
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
    template <class At>
    OPD_HD static void run(const Rows& k, const typename Rows::state_type& st, At at) {
        if constexpr (materialised<std::remove_cvref_t<decltype(k.student)>>)
            clear_columns(k.student, st.row, k.vocab, k.frame.env.beta, at);
    }
};

} // namespace OPD_ISA
} // namespace opd::detail
