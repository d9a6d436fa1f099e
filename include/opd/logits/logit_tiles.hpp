// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Dense divergences whose logits are made here, a tile of the vocabulary at a time for a block of rows (hidden.hpp):
// where memory does not hold a row of logits each. A phase that reads logits has the tiles of the rows that it is due
// for made, all rows see a tile, then the next one comes; the phase that writes sends each tile's gradient back. So
// every such phase costs the products again, and a phase for which no row is due costs nothing. What the rows compute
// is what they compute anywhere (tiles.hpp): no bit depends on the tile.
#pragma once

#include <algorithm>
#include <cstddef>
#include <new>
#include <type_traits>

#include "opd/batch.hpp"
#include "opd/config.hpp"
#include "opd/logits/logit_blocks.hpp"
#include "opd/rows/fit_rows.hpp"
#include "opd/rows/rows.hpp"
#include "opd/rows/tiles.hpp"
#include "opd/source.hpp"
#include "opd/threads.hpp"
#include "opd/view.hpp"

namespace opd::detail {
inline namespace OPD_ISA {

/// Rows of a block of tiles: as many as the products want together.
inline constexpr index_t rows_of_tiles = head_cuts::rows;

/// A team with a block's rows in hand: of each tile, every due row's part, over the threads. The rows' scratch is
/// empty. `tiles`: makers.hpp.
template <class State, class Makers>
struct team_of_block {
    State* states;
    index_t count;
    Makers& tiles;
    thread_team& threads;
    bool due[rows_of_tiles];

    template <class Phase, class Rows>
    bool find_due(const Rows& k) {
        bool some = false;
        for (index_t i = 0; i < count; ++i) some |= due[i] = is_due<Phase>(k, states[i]);
        return some;
    }
    void ready(bool back) {
        tiles.ready([&](index_t r) { return due[r - states[0].row]; }, back);
    }
    template <class Body>
    void each_due(Body&& body) {
        threads.run(count, [&](index_t i, int) {
            if (due[i]) body(i);
        });
    }
    template <class Phase, class Rows>
    void fold(const Rows& k) {
        if (!find_due<Phase>(k)) return;
        if constexpr (requires { Phase::backwards; }) {
            decltype(Phase::start(k, states[0])) parts[rows_of_tiles];
            for (index_t i = 0; i < count; ++i)
                if (due[i]) parts[i] = Phase::start(k, states[i]);
            ready(false);
            each_tile<Phase::backwards>(k, [&](index_t begin, index_t n) {
                tiles.make(begin, n);
                each_due([&](index_t i) { Phase::tile(k, states[i], parts[i], k.tile(states[i], begin, n), alone{}); });
            });
            each_due([&](index_t i) { Phase::finish(k, states[i], parts[i]); });
        } else if constexpr (!comes_too_late<Phase, Rows>) {
            each_due([&](index_t i) { Phase::finish(k, states[i], Phase::part(k, states[i], alone{})); });
        }
    }
    template <class Phase, class Rows>
    void each(const Rows& k) {
        if constexpr (requires { Phase::backwards; }) { // the gradient
            if (!find_due<Phase>(k)) return;
            if constexpr (stores_gradient<Rows> && gradient_in_tiles<Rows>) look_ahead<Phase>(k);
            ready(true);
            each_tile<false>(k, [&](index_t begin, index_t n) {
                tiles.make(begin, n);
                each_due([&](index_t i) {
                    const auto tile = k.tile(states[i], begin, n);
                    Phase::tile(k, states[i], tile, alone{});
                    if constexpr (gradient_in_tiles<Rows>)
                        if (states[i].report.unfit) saturate_entries(tile.dz, n, 0, alone{});
                });
                tiles.back(begin, n);
            });
        } else if constexpr (!comes_too_late<Phase, Rows>) {
            // a gradient that lies in tiles is gone with them: of rows without one nothing goes back
            constexpr bool nothing_to_clear = writes_gradient<Phase> && gradient_in_tiles<Rows>;
            if constexpr (!nothing_to_clear)
                if (find_due<Phase>(k)) each_due([&](index_t i) { Phase::run(k, states[i], alone{}); });
        }
    }

private:
    template <class Rows>
    static constexpr bool gradient_in_tiles = made_in_tiles<decltype(Rows::student)>;
    /// A phase that looks at a gradient when its tiles are gone; look_ahead() has done so.
    template <class Phase, class Rows>
    static constexpr bool comes_too_late = gradient_in_tiles<Rows>&& requires {
        Phase::reads_gradient;
    };
    /// Finds the rows whose gradient float does not hold before a tile of it goes back: one pass more over those that
    /// may be such a row.
    template <class Phase, class Rows>
    void look_ahead(const Rows& k) {
        int found[rows_of_tiles] = {};
        bool some = false;
        for (index_t i = 0; i < count; ++i) some |= due[i] = due[i] && may_be_unfit(k, states[i]);
        if (some) {
            ready(false);
            each_tile<false>(k, [&](index_t begin, index_t n) {
                tiles.make(begin, n);
                each_due([&](index_t i) {
                    const auto tile = k.tile(states[i], begin, n);
                    Phase::tile(k, states[i], tile, alone{});
                    found[i] |= holds_unfit(tile.dz, n, 0, alone{});
                });
            });
            each_due([&](index_t i) { find_unfit<Rows>::finish(k, states[i], found[i]); });
        }
        find_due<Phase>(k);
        for (index_t i = 0; i < count; ++i) due[i] = due[i] && (!states[i].report.unfit || saturates(k));
    }
};

/// Rows [begin, end) from phase to phase.
template <class Rows, class State, class Makers>
void run_block(const Rows& k, index_t begin, index_t end, State* states, Makers& tiles, thread_team& team) {
    if (begin == end) return;
    team_of_block<State, Makers> block{states, end - begin, tiles, team, {}};
    for (index_t i = 0; i < end - begin; ++i) {
        new (states + i) State{};
        states[i].row = begin + i;
    }
    block.template each<begin_row<Rows>>(k);
    k.row(block);
    fit_gradient(k, block);
    block.template each<end_row<Rows>>(k);
}

} // namespace OPD_ISA
} // namespace opd::detail
