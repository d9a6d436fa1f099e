// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Dense divergences whose logits are made here, a tile of the vocabulary at a time for a block of rows (hidden.hpp): where memory does not
// hold a row of logits each. A phase that reads logits has the tiles of the rows that it is due for made, all rows see a tile, then the next
// one comes; the phase that writes sends each tile's gradient back. So every such phase costs the products again, and a phase for which no
// row is due costs nothing. What the rows compute is what they compute anywhere (tiles.hpp): no bit depends on the tile.
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

/// One side whose logits are made here, and what of them is there: `ids` numbers a row from id `from` on, of rows from `begin` on.
template <class Source>
struct made_side {
    Source source;
    index_t ids;
    block_memory<Source> memory;
    row_list rows = {};
    index_t begin = 0, from = 0;
    made_side(const Source& s, index_t count, index_t tile, carver& from_memory)
        : source(s), ids(block_memory<Source>::ids_of(s, tile)),
          memory(s, count, tile, from_memory.base + from_memory.used) {
        (void)from_memory.take<std::byte>(static_cast<index_t>(memory.bytes));
    }
};
/// It as a source of what a dense divergence asks for: tiles in order.
template <class Source>
struct tile_by_tile {
    using logit_type = typename Source::logit_type;
    static constexpr space memory_space = Source::memory_space;
    static constexpr bool one_tile = false, made_in_tiles = true;
    const made_side<Source>* side;
    float temperature;

    index_t tile_size() const { return side->ids; }
    index_t place(row_place at, index_t id) const { return (at.row - side->begin) * side->ids + (id - side->from); }
    const float* tile(row_place at, index_t first) const { return side->memory.logits + place(at, first); }
};
template <class Source>
struct student_by_tile : tile_by_tile<Source> {
    using gradient_type = typename Source::gradient_type;
    static constexpr bool sparse_gradient = false;
    bool has_gradient() const { return this->side->source.has_gradient(); }
    float* gradient_tile(row_place at, index_t first) const {
        return this->side->memory.gradient + this->place(at, first);
    }
};
template <class Source>
struct teacher_by_tile : tile_by_tile<Source> {
    static constexpr cache_kind kind = Source::kind;
};

/// A team with a block's rows in hand: of each tile, every due row's part, over the threads. The rows' scratch is empty.
/// `tiles`: ready(wanted rows) before a phase's first tile, make(begin, count), and for what is written also back(begin, count).
template <class State, class Tiles>
struct team_of_block {
    State* states;
    index_t count;
    Tiles& tiles;
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
    /// Finds rows whose gradient float may not hold before a tile of it goes back: one pass more over those that may have one.
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
template <class Rows, class State, class Tiles>
void run_block(const Rows& k, index_t begin, index_t end, State* states, Tiles& tiles, thread_team& team) {
    if (begin == end) return;
    team_of_block<State, Tiles> block{states, end - begin, tiles, team, {}};
    for (index_t i = 0; i < end - begin; ++i) {
        new (states + i) State{};
        states[i].row = begin + i;
    }
    block.template each<begin_row<Rows>>(k);
    k.row(block);
    fit_gradient(k, block);
    block.template each<end_row<Rows>>(k);
}

/// f(side) if it is made here.
template <class Side, class Function>
void if_made(Side& side, Function&& f) {
    if constexpr (requires { side.memory; }) f(side);
}
template <class Source>
auto side_of(const Source& source, index_t rows, index_t tile, carver& memory) {
    if constexpr (in_blocks<Source>)
        return made_side<Source>(source, rows, tile, memory);
    else
        return source;
}
template <class Side>
auto student_of(const Side& side) {
    if constexpr (requires { side.memory; })
        return student_by_tile<decltype(side.source)>{{&side, side.source.temperature}};
    else
        return side;
}
template <class Side>
auto teacher_of(const Side& side) {
    if constexpr (requires { side.memory; })
        return teacher_by_tile<decltype(side.source)>{{&side, side.source.temperature}};
    else
        return side;
}

/// The tiles of a block of rows, of both sides.
template <class Student, class Teacher>
struct block_tiles {
    Student student;
    Teacher teacher;
    index_t common; ///< ids that have a gradient
    thread_team& team;
    worker_floats workers;
    index_t begin = 0, end = 0;
    bool first_block = true, written = false;

    void move_to(index_t begin_, index_t end_, float beta) {
        begin = begin_, end = end_, first_block = begin == 0, written = false;
        each([&](auto& side) { side.begin = begin; });
        if_drains([&](auto& side) { begin_drain(side.source, begin, end, beta, first_block, team); });
    }
    template <class Wanted>
    void ready(Wanted&& wanted, bool back) {
        each([&](auto& side) {
            side.rows = list_of(begin, end, side.memory.wanted, wanted);
            ready_states(side.source, side.memory, side.rows, begin, team, workers);
        });
        written = back;
        if (back) if_drains([&](auto& side) { ready_back(side.source, side.memory, side.rows, begin, team); });
    }
    void make(index_t first, index_t count) {
        each([&](auto& side) {
            side.from = first;
            fill(side.source, side.memory, side.rows, begin, side.ids, first, first + count, team, workers);
        });
    }
    void back(index_t first, index_t count) {
        if_drains([&](auto& side) {
            drain(side.source, side.memory, side.rows, begin, side.ids, first, first + count, common, first_block, team,
                  workers);
        });
    }
    /// Of whole rows, once they are done: those whose every entry is 0 have no gradient.
    void back_all() {
        if_drains([&](auto& side) {
            side.rows = rows_with_gradient(side.memory, begin, end, side.ids, common, team);
            ready_back(side.source, side.memory, side.rows, begin, team);
            written = true;
        });
        back(0, common);
    }
    /// What no tile has written: the head's rows that have no gradient here.
    void finish() {
        if_drains([&](auto& side) {
            drain(side.source, side.memory, row_list{}, begin, side.ids, written ? common : 0, side.source.vocab(),
                  common, first_block, team, workers);
        });
    }

private:
    template <class Function>
    void each(Function&& f) {
        if_made(student, f), if_made(teacher, f);
    }
    template <class Function>
    void if_drains(Function&& f) {
        if_made(student, [&](auto& side) {
            if (side.source.has_gradient()) f(side);
        });
    }
};

} // namespace OPD_ISA
} // namespace opd::detail
