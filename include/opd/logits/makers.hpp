// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What makes the logits of a call on the CPU: a maker for each side that is hidden states. It has a block of rows in
// hand.
//
//   move_to(begin, end)     the block: rows [begin, end)
//   begin_back(beta, mask)  dx = beta dx of rows that are not another call's; before the first block also the head's
//                           gradients, by beta_head
//   ready(wanted, back)     which of the block's rows are meant from here on; `back`: their gradient goes back too
//   make(first, count)      logits of ids [first, first + count); those of the last call are gone
//   back(first, count)      the gradient of these ids goes back to states and head
//   make_all()              the same of every id
//   back_all(mask)          and of those of its rows that have a gradient
//   finish()                what no tile has written: the head's rows without a gradient
//
// Rows see a side as a block, of which each row is one tile (block_sides.hpp), or as tiles in order (tile_by_tile),
// of as many ids as memory holds.
#pragma once

#include <algorithm>
#include <cstddef>
#include <type_traits>
#include <utility>

#include "opd/batch.hpp"
#include "opd/config.hpp"
#include "opd/logits/block_sides.hpp"
#include "opd/logits/logit_blocks.hpp"
#include "opd/rows/rows.hpp"
#include "opd/source.hpp"
#include "opd/teacher.hpp"
#include "opd/threads.hpp"

namespace opd::detail {
inline namespace OPD_ISA {

/// One side: `ids` numbers a row from id `from` on, of rows from `begin` on.
template <class Side>
struct maker {
    Side side;
    index_t ids;
    block_memory<Side> memory;
    row_list rows = {};
    index_t begin = 0, from = 0;
    maker(const Side& s, index_t count, index_t tile, carver& memory_of_all)
        : side(s), ids(block_memory<Side>::ids_of(s, tile)),
          memory(s, count, tile, memory_of_all.base ? memory_of_all.base + memory_of_all.used : nullptr) {
        (void)memory_of_all.take<std::byte>(static_cast<index_t>(memory.bytes));
    }
};

/// A side as a source of what a dense divergence asks for: tiles in order.
template <class Side>
struct tile_by_tile {
    using logit_type = typename Side::logit_type;
    static constexpr space memory_space = Side::memory_space;
    static constexpr bool one_tile = false, made_in_tiles = true;
    const maker<Side>* of;
    float temperature;

    index_t tile_size() const { return of->ids; }
    index_t place(row_place at, index_t id) const { return (at.row - of->begin) * of->ids + (id - of->from); }
    const float* tile(row_place at, index_t first) const { return of->memory.logits + place(at, first); }
};
template <class Side>
struct student_by_tile : tile_by_tile<Side> {
    using gradient_type = float;
    static constexpr bool sparse_gradient = false;
    bool has_gradient() const { return this->of->side.has_gradient(); }
    float* gradient_tile(row_place at, index_t first) const {
        return this->of->memory.gradient + this->place(at, first);
    }
};
template <class Side>
struct teacher_by_tile : tile_by_tile<Side> {
    static constexpr cache_kind kind = Side::kind;
};

template <bool Tiles, class Side>
auto rows_of_maker(const maker<Side>& of) {
    if constexpr (!Tiles)
        return block_of<typename block_rows<Side, float>::type>(of.side, of.ids, of.begin, of.memory.logits,
                                                                of.memory.gradient);
    else if constexpr (trains_states<Side>)
        return student_by_tile<Side>{{&of, of.side.temperature}};
    else
        return teacher_by_tile<Side>{{&of, of.side.temperature}};
}

/// Of a side in memory, or none.
struct no_maker {
    template <class Side>
    no_maker(const Side&, index_t, index_t, carver&) {}
};
template <class Side>
struct maker_of {
    using type = no_maker;
};
template <class Side>
    requires(in_blocks<Side>)
struct maker_of<Side> {
    using type = maker<Side>;
};

/// The sides of a call, the student's first; of one that reads rows alone, its source.
template <class Job>
const auto& first_side(const Job& job) {
    if constexpr (requires { job.student; })
        return job.student;
    else
        return job.z.source;
}
template <class Job>
const auto& second_side(const Job& job) {
    if constexpr (requires { job.teacher; })
        return job.teacher;
    else
        return job;
}
/// Ids whose logits are read, and which have a gradient: those of the softmax, and of a bucket also those beyond.
template <class Job>
index_t ids_read(const Job& job) {
    if constexpr (!requires { job.student; })
        return first_side(job).vocab();
    else if constexpr (is_lumped<std::remove_cvref_t<decltype(job.teacher)>>)
        return std::max(job.student.vocab(), job.teacher.vocab());
    else
        return job.vocab;
}

template <class Job>
class makers {
    using first_type = typename maker_of<std::remove_cvref_t<decltype(first_side(std::declval<const Job&>()))>>::type;
    using second_type = typename maker_of<std::remove_cvref_t<decltype(second_side(std::declval<const Job&>()))>>::type;

public:
    /// `tile`: ids that are there at a time; 0: all of the vocabulary.
    makers(const Job& job, index_t rows, index_t tile, carver& memory, thread_team* team, worker_floats workers)
        : team_(team), workers_(workers), read_(ids_read(job)), first_(first_side(job), rows, tile, memory),
          second_(second_side(job), rows, tile, memory) {}

    /// The call with what is made here as rows see it, of the block in hand.
    template <bool Tiles>
    auto job_of_rows(const Job& job) const {
        return with_made(job,
                         [this]<class Side>(const Side&) { return rows_of_maker<Tiles>(this->template of<Side>()); });
    }
    bool drains() {
        bool any = false;
        if_drains([&](auto&) { any = true; });
        return any;
    }
    void move_to(index_t begin, index_t end) {
        begin_ = begin, end_ = end;
        each([&](auto& of) { of.begin = begin; });
    }
    /// Before a gradient goes back: what was there before, dx = beta dx.
    void begin_back(float beta, const row_mask<>& mask = {}) {
        written_ = false;
        if_drains([&](auto& of) { begin_drain(of.side, begin_, end_, beta, first_block(), mask, *team_); });
    }
    template <class Wanted>
    void ready(Wanted&& wanted, bool back = false) {
        each([&](auto& of) {
            of.rows = list_of(begin_, end_, of.memory.wanted, wanted);
            ready_states(of.side, of.memory, of.rows, begin_, *team_, workers_);
        });
        written_ = back;
        if (back) if_drains([&](auto& of) { ready_back(of.side, of.memory, of.rows, begin_, *team_); });
    }
    void make(index_t first, index_t count) {
        each([&](auto& of) { make_of(of, first, first + count); });
    }
    void make_all() {
        each([&](auto& of) { make_of(of, 0, std::min(read_, of.ids)); });
    }
    void back(index_t first, index_t count) {
        if_drains([&](auto& of) {
            drain(of.side, of.memory, of.rows, begin_, of.ids, first, first + count, ids_back(of), first_block(),
                  *team_, workers_);
        });
    }
    /// Of rows that are done: those whose every entry is 0 have no gradient.
    void back_all(const row_mask<>& mask = {}) {
        if_drains([&](auto& of) {
            of.rows = rows_with_gradient(of.memory, begin_, end_, of.ids, ids_back(of), mask, *team_);
            ready_back(of.side, of.memory, of.rows, begin_, *team_);
            written_ = true;
            back(0, ids_back(of));
        });
    }
    void finish() {
        if_drains([&](auto& of) {
            drain(of.side, of.memory, row_list{}, begin_, of.ids, written_ ? ids_back(of) : 0, of.side.vocab(),
                  ids_back(of), first_block(), *team_, workers_);
        });
    }

private:
    thread_team* team_;
    worker_floats workers_;
    index_t read_;
    first_type first_;
    second_type second_;
    index_t begin_ = 0, end_ = 0;
    bool written_ = false;

    template <class Side>
    const maker<Side>& of() const {
        if constexpr (std::is_same_v<first_type, maker<Side>>)
            return first_;
        else
            return second_;
    }
    bool first_block() const { return begin_ == 0; }
    template <class Side>
    index_t ids_back(const maker<Side>& of) const {
        return std::min(read_, of.side.vocab());
    }
    template <class Side>
    void make_of(maker<Side>& of, index_t first, index_t last) {
        of.from = first;
        if (first == last) return;
        fill(of.side, of.memory, of.rows, begin_, of.ids, first, last, *team_, workers_);
    }
    template <class Function>
    void each(Function&& f) {
        if constexpr (requires { first_.side; }) f(first_);
        if constexpr (requires { second_.side; }) f(second_);
    }
    template <class Function>
    void if_drains(Function&& f) {
        if constexpr (requires { first_.side.dx; })
            if (first_.side.has_gradient()) f(first_);
    }
};

} // namespace OPD_ISA
} // namespace opd::detail
