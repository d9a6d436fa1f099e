// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Losses over a vocabulary in shards as kernels in stream order, for any launcher, launch(kernel, blocks), and any
// all-gather, gather(from, to, bytes of a rank). No CUDA header: tests run the kernels in a host loop.
//
// A kernel cannot ask other ranks in its middle, so a row is cut where its phases sum over the vocabulary, as
// shard_team.hpp cuts a CPU's. A kernel (`shard_round`) takes every row on to its next cut:
//
//   round 0      begins the row; its team adds up the part of the cut's sum that lies in this shard; thread 0 writes
//                that part as the row's item into `own`, and the row's state goes to memory
//   gather       `own` of every rank, one behind the other, into `all`: items of fixed size, one a row
//   round i      state back from memory; thread 0 merges the ranks' items in the order of ranks, whatever moved them,
//                and finishes the phase; on to the next cut, or to the gradient and the row's end
//
// Rows of few ids send the logits of their slots along, and keep their scratch from round to round.
//
// Nothing waits to see how far rows have come, so a call can be captured: it enqueues as many rounds as the longest
// way through a row has cuts. A round in which no row is left costs a launch and a gather of small items. Ranks that
// are not in the same call, or whose shards do not make up the vocabulary, make the rows bad, on every rank alike.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "opd/config.hpp"
#include "opd/cuda/jobs.hpp"
#include "opd/diagnostics.hpp"
#include "opd/evaluate.hpp"
#include "opd/rows/dense_rows.hpp"
#include "opd/rows/fit_rows.hpp"
#include "opd/rows/row_kinds.hpp"
#include "opd/rows/rows.hpp"
#include "opd/shards/shard_checks.hpp"
#include "opd/shards/shard_team.hpp"
#include "opd/teacher.hpp"
#include "opd/vocab_parallel.hpp"

namespace opd::detail {
inline namespace OPD_ISA {

template <space S>
struct shard_row_frame : shard_frame<row_frame<S>> {
    std::size_t logits_from = 0; ///< in a row's scratch, where rows have no place of their own for them
};

/// A row's state, and the cut that it waits at: the phase's place in the row.
template <class State>
struct cut_state : State {
    int cut = -1;
    int logits = 0;                   ///< that go along
    bool waits = false, told = false; ///< told: the logits have been on their way
};

/// What went round last, and what goes next. The ranks' items are `bytes` apart in `all`.
struct shard_gather {
    std::byte* own = nullptr;
    const std::byte* all = nullptr;
    std::size_t bytes = 0;
    int ranks = 1;
    index_t first = 0;                     ///< row of the launch: items and states count from it
    partials_head sent = {}, next = {};    ///< this rank's heads of these rounds
    std::uint64_t ids = 0, sum_of_ids = 0; ///< of all shards together

    OPD_HD std::byte* item_to_send(index_t row) const {
        return own + sizeof(partials_head) + static_cast<std::size_t>(row - first) * next.stride;
    }
    OPD_HD const std::byte* item_of(int rank, index_t row) const {
        return all + static_cast<std::size_t>(rank) * bytes + sizeof(partials_head) +
               static_cast<std::size_t>(row - first) * sent.stride;
    }
    /// Whether every rank's item is of this cut, and their shards hold every id once.
    OPD_HD bool agree(const partial_item& item) const {
        std::uint64_t ids_found = 0, sum_found = 0;
        for (int i = 0; i < ranks; ++i) {
            const auto& head = *reinterpret_cast<const partials_head*>(all + static_cast<std::size_t>(i) * bytes);
            const auto& theirs = *reinterpret_cast<const partial_item*>(item_of(i, item.row));
            if (head.round != sent.round || head.items != sent.items || head.stride != sent.stride ||
                theirs.row != item.row || theirs.phase != item.phase || theirs.kind != item.kind ||
                theirs.logits != item.logits)
                return false;
            ids_found += head.ids, sum_found += head.sum_of_ids;
        }
        return ids_found == ids && sum_found == sum_of_ids;
    }
    template <class Partial>
    OPD_HD const Partial& payload(int rank, index_t row) const {
        return *reinterpret_cast<const Partial*>(item_of(rank, row) + sizeof(partial_item));
    }
    /// A slot's logit: its shard's; elsewhere -inf. `at`: in the item.
    OPD_HD double logit(index_t row, std::size_t at, index_t slot) const {
        double z = neg_inf<double>();
        for (int i = 0; i < ranks && is_neg_inf(z); ++i)
            z = reinterpret_cast<const double*>(item_of(i, row) + at)[slot];
        return z;
    }
};

template <class Phase, class Rows>
using part_of = decltype(Phase::start(std::declval<const Rows&>(), std::declval<const typename Rows::state_type&>()));

/// A phase at its place in the row, with what the kernel knows: the phases below, each run by the block's team.
template <class Rows>
struct cut_phase {
    const Rows& rows;
    const shard_gather& exchange;
    int here;

    template <class State>
    OPD_HD partial_item item(const State& st, partial_kind kind) const {
        return {st.row, static_cast<std::int16_t>(here), kind, st.logits};
    }
    template <class State>
    OPD_HD bool at_cut(const State& st) const {
        return st.waits && here == st.cut;
    }
    template <class State>
    OPD_HD void wait(State& st, partial_kind kind) const {
        *reinterpret_cast<partial_item*>(exchange.item_to_send(st.row)) = item(st, kind);
        st.cut = here, st.waits = true;
    }
    /// Whether the walk has come to a phase that is still to be done.
    template <class Phase, class State>
    OPD_HD bool reaches(const State& st) const {
        return !st.waits && here > st.cut && is_due<Phase>(rows, st);
    }
};
/// At the cut that the row waits at: the sum over all ids.
template <class Phase>
struct merge_parts : by_one<merge_parts<Phase>> {
    OPD_HD static bool due(const auto& p, const auto& st) { return p.at_cut(st); }
    OPD_HD static void once(const auto& p, auto& st) {
        using partial = decltype(Phase::start(p.rows, st));
        const bool agreed = p.exchange.agree(p.item(st, kind_of<partial>()));
        st.waits = false, st.logits = 0;
        if (!agreed) {
            st.report.bad = true;
            return;
        }
        partial all = p.exchange.template payload<partial>(0, st.row);
        for (int i = 1; i < p.exchange.ranks; ++i)
            all = Phase::merge(all, p.exchange.template payload<partial>(i, st.row));
        Phase::finish(p.rows, st, all);
    }
};
/// The part of a shard, which the row then waits to see merged.
template <class Phase>
struct send_part : Phase {
    OPD_HD static bool due(const auto& p, const auto& st) { return p.template reaches<Phase>(st); }
    template <class At>
    OPD_HD OPD_INLINE static auto part(const auto& p, auto& st, At at) {
        return part_of_shard<Phase>(p.rows, st, at);
    }
    template <class Partial>
    OPD_HD static void finish(const auto& p, auto& st, const Partial& mine) {
        *reinterpret_cast<Partial*>(p.exchange.item_to_send(st.row) + sizeof(partial_item)) = mine;
        p.wait(st, kind_of<Partial>());
    }
};
/// Logits of slots, on their way behind the part of a cut, or by themselves where no sum came before the phase that
/// reads them. `Bytes`: of the part.
template <class Phase, std::size_t Bytes>
struct send_logits {
    static constexpr std::size_t at_byte = sizeof(partial_item) + Bytes;
    OPD_HD static bool due(const auto& p, const auto& st) {
        if (st.told) return false;
        if constexpr (Bytes > 0)
            return p.template reaches<Phase>(st);
        else
            return !st.waits && p.here > st.cut && st.good();
    }
    OPD_HD static void run(const auto& p, const auto& st, auto at) {
        auto* const to = reinterpret_cast<double*>(p.exchange.item_to_send(st.row) + at_byte);
        const index_t count = count_exchanged(p.rows, st);
        for (index_t j = at.id; j < count; j += at.count) to[j] = own_logit(p.rows, st, j);
    }
};
template <class Phase, std::size_t Bytes>
struct tell_logits : by_one<tell_logits<Phase, Bytes>> {
    OPD_HD static bool due(const auto& p, const auto& st) { return send_logits<Phase, Bytes>::due(p, st); }
    OPD_HD static void once(const auto& p, auto& st) {
        st.told = true, st.logits = static_cast<int>(count_exchanged(p.rows, st));
        if (Bytes == 0) p.wait(st, partial_kind::none);
    }
};
template <std::size_t Bytes>
struct take_logits {
    OPD_HD static bool due(const auto& p, const auto& st) { return p.at_cut(st) && st.logits > 0; }
    OPD_HD static void run(const auto& p, const auto& st, auto at) {
        double* const to = exchanged(p.rows, st);
        for (index_t j = at.id; j < st.logits; j += at.count)
            to[j] = p.exchange.logit(st.row, sizeof(partial_item) + Bytes, j);
    }
};
/// After them: the row goes on with the phase that it waited before.
struct end_of_logits : by_one<end_of_logits> {
    OPD_HD static bool due(const auto& p, const auto& st) { return p.at_cut(st); }
    OPD_HD static void once(const auto& p, auto& st) {
        st.report.bad |= !p.exchange.agree(p.item(st, partial_kind::none));
        st.waits = false, st.logits = 0, --st.cut;
    }
};
/// A sum over what every rank has.
template <class Phase>
struct own_part : Phase {
    OPD_HD static bool due(const auto& p, const auto& st) { return p.template reaches<Phase>(st); }
    template <class At>
    OPD_HD OPD_INLINE static auto part(const auto& p, auto& st, At at) {
        return Phase::part(p.rows, st, at);
    }
    template <class Partial>
    OPD_HD static void finish(const auto& p, auto& st, const Partial& all) {
        Phase::finish(p.rows, st, all);
    }
};
template <class Phase>
struct own_step {
    OPD_HD static bool due(const auto& p, const auto& st) { return p.template reaches<Phase>(st); }
    template <class At>
    OPD_HD OPD_INLINE static void run(const auto& p, auto& st, At at) {
        if constexpr (writes_gradient<Phase> && requires { Phase::backwards; })
            if (p.rows.vocab == 0) return;
        Phase::run(p.rows, st, at);
    }
};

/// A block's team on its way through a row from cut to cut.
template <class Team>
struct cut_walk {
    Team& team;
    const shard_gather& exchange;
    int here = 0;

    template <class Phase, class Rows>
    OPD_HD OPD_INLINE void fold(const Rows& k) {
        const cut_phase<Rows> p{k, exchange, here++};
        if constexpr (sums_over_shards<Phase, Rows>) {
            constexpr std::size_t bytes = sizeof(part_of<Phase, Rows>);
            if constexpr (exchanges_logits<Rows>) team.template each<take_logits<bytes>>(p);
            team.template each<merge_parts<Phase>>(p);
            if constexpr (exchanges_logits<Rows>) send<Phase, bytes>(p);
            team.template fold<send_part<Phase>>(p);
        } else {
            wait_for_slots<Phase>(p);
            team.template fold<own_part<Phase>>(p);
        }
    }
    template <class Phase, class Rows>
    OPD_HD OPD_INLINE void each(const Rows& k) {
        const cut_phase<Rows> p{k, exchange, here++};
        wait_for_slots<Phase>(p);
        team.template each<own_step<Phase>>(p);
    }

private:
    template <class Phase, std::size_t Bytes>
    OPD_HD OPD_INLINE void send(const auto& p) {
        team.template each<send_logits<Phase, Bytes>>(p);
        team.template each<tell_logits<Phase, Bytes>>(p);
    }
    template <class Phase>
    OPD_HD OPD_INLINE void wait_for_slots(const auto& p) {
        if constexpr (reads_slots_of_row<Phase>) {
            team.template each<take_logits<0>>(p);
            team.template each<end_of_logits>(p);
            send<Phase, 0>(p);
        }
    }
};

/// Whether some row may need a phase: of a kept one, wherever it may be.
template <class Phase, class Rows>
OPD_HD bool may_be_due(const Rows& k) {
    typename Rows::state_type st{};
    st.kept = true;
    if constexpr (requires { st.next; }) {
        for (int step = 0; step <= static_cast<int>(row_step::write_careful); ++step) {
            st.next = static_cast<row_step>(step);
            if (is_due<Phase>(k, st)) return true;
        }
        return false;
    } else {
        return is_due<Phase>(k, st);
    }
}
/// A team that counts the cuts of a row that may come, and finds the largest part from cut `from` on. Logits of slots
/// go along with the first, for no good row passes it by.
struct cut_counter {
    int from = 0, count = 0;
    std::size_t largest = 0; ///< bytes
    template <class Phase, class Rows>
    OPD_HD void fold(const Rows& k) {
        if constexpr (sums_over_shards<Phase, Rows>) {
            using partial = part_of<Phase, Rows>;
            static_assert(std::is_trivially_copyable_v<partial> && sizeof(partial) % 8 == 0);
            if (may_be_due<Phase>(k)) add(k, sizeof(partial));
        } else {
            each<Phase>(k);
        }
    }
    template <class Phase, class Rows>
    OPD_HD void each(const Rows& k) {
        if constexpr (reads_slots_of_row<Phase> && exchanges_logits<Rows>)
            if (count == 0) add(k, 0);
    }

private:
    template <class Rows>
    OPD_HD void add(const Rows& k, std::size_t bytes) {
        if constexpr (exchanges_logits<Rows>)
            if (count == 0) bytes += sizeof(double) * most_exchanged(k);
        if (count++ >= from && bytes > largest) largest = bytes;
    }
};

/// A thread's share of copying bytes, which are whole words.
OPD_HD OPD_INLINE void copy_words(void* to, const void* from, std::size_t bytes, auto at) {
    auto* const a = static_cast<unsigned char*>(to);
    const auto* const b = static_cast<const unsigned char*>(from);
    for (std::size_t i = 8 * static_cast<std::size_t>(at.id); i < bytes; i += 8 * static_cast<std::size_t>(at.count))
        std::memcpy(a + i, b + i, 8);
}

/// One round of all rows, in the groups of a call on one device.
template <class Rows>
struct shard_round : row_groups<Rows> {
    using state_type = cut_state<typename Rows::state_type>;
    static_assert(std::is_trivially_copyable_v<state_type> && sizeof(state_type) % 8 == 0);
    state_type* states = nullptr; ///< of the rows [begin, end)
    std::byte* kept = nullptr;    ///< scratch of each of them
    std::size_t kept_of_row = 0;
    shard_gather exchange = {};
    bool first = false; ///< of the rounds
    OPD_HD state_type* state(index_t row) const { return states + (row - this->begin); }

    struct write_head : by_one<write_head> {
        OPD_HD static void once(const shard_round& k, const state_type&) {
            *reinterpret_cast<partials_head*>(k.exchange.own) = k.exchange.next;
        }
    };
    struct load {
        OPD_HD static void run(const shard_round& k, state_type& st, auto at, index_t row) {
            copy_words(&st, k.state(row), sizeof st, at);
        }
    };
    struct store {
        OPD_HD static void run(const shard_round& k, const state_type& st, auto at, index_t row) {
            copy_words(k.state(row), &st, sizeof st, at);
        }
    };
    /// Entries that their type does not hold saturate: the loss is the same on every rank, and this is one's gradient.
    struct find_cut_off {
        OPD_HD static bool due(const shard_round& k, const state_type& st) {
            return !st.waits && may_be_unfit(k.rows, st);
        }
        OPD_HD static int part(const shard_round& k, const state_type& st, auto at) {
            return find_unfit<Rows>::part(k.rows, st, at);
        }
        OPD_HD static int merge(int a, int b) { return a | b; }
        OPD_HD static void finish(const shard_round&, state_type& st, int found) { st.report.unfit = found != 0; }
    };
    struct saturate {
        OPD_HD static bool due(const shard_round&, const state_type& st) { return st.report.unfit; }
        OPD_HD static void run(const shard_round& k, const state_type& st, auto at) {
            each_stretch(k.rows, st, [&](auto* dz, index_t n) { saturate_entries(dz, n, k.rows.frame.env.beta, at); });
        }
    };
    struct end_of_row : by_one<end_of_row> {
        OPD_HD static bool due(const shard_round&, const state_type& st) { return !st.waits; }
        OPD_HD static void once(const shard_round& k, state_type& st) { end_row<Rows>::once(k.rows, st); }
    };

    template <class Team>
    OPD_HD void run(index_t group, Team& team) const {
        const Rows& k = this->rows;
        const index_t from = this->begin + group * k.frame.group;
        if (group == 0) {
            team.begin(0, nullptr);
            team.template each<write_head>(*this);
        }
        for (index_t r = from; r < from + k.frame.group && r < this->end; ++r) {
            if (!first && !state(r)->waits) continue;
            team.begin(r, kept + kept_of_row * static_cast<std::size_t>(r - this->begin));
            if (first)
                team.template each<begin_row<Rows>>(k);
            else
                team.template each<load>(*this, r);
            cut_walk<Team> walk{team, exchange};
            k.row(walk);
            if constexpr (stores_gradient<Rows>) {
                team.template fold<find_cut_off>(*this);
                team.template each<saturate>(*this);
            }
            team.template each<end_of_row>(*this);
            team.template each<store>(*this, r);
        }
    }
};

/// What the rows of a group have left in their states.
template <class State>
struct sum_of_states {
    using state_type = row_state;
    const State* states = nullptr;
    index_t rows = 0, group = 1;
    result* partials = nullptr;

    struct add : by_one<add> {
        OPD_HD static void once(const sum_of_states& k, const row_state& st) {
            const index_t first = st.row * k.group;
            result all = k.states[first].partial;
            for (index_t r = first + 1; r < first + k.group && r < k.rows; ++r) {
                all.loss += k.states[r].partial.loss;
                all.diagnostics.merge(k.states[r].partial.diagnostics);
            }
            k.partials[st.row] = all;
        }
    };
    template <class Team>
    OPD_HD void run(index_t group_, Team& team) const {
        team.begin(group_, nullptr);
        team.template each<add>(*this);
    }
};
/// In how many rows entries were cut off. One block.
template <class State>
struct count_cut_off {
    using state_type = row_state;
    const State* states = nullptr;
    index_t rows = 0;
    index_t* out = nullptr;
    bool more = false; ///< to what `out` holds

    struct phase {
        OPD_HD static index_t part(const count_cut_off& k, const row_state&, auto at) {
            index_t n = 0;
            for (index_t r = at.id; r < k.rows; r += at.count) n += k.states[r].report.unfit;
            return n;
        }
        OPD_HD static index_t merge(index_t a, index_t b) { return a + b; }
        OPD_HD static void finish(const count_cut_off& k, const row_state&, index_t n) {
            *k.out = k.more ? *k.out + n : n;
        }
    };
    template <class Team>
    OPD_HD void run(index_t, Team& team) const {
        team.begin(0, nullptr);
        team.template fold<phase>(*this);
    }
};

/// What rows on a shard need beside their batch's workspace: how it lies there, in bytes from its beginning.
template <class Job>
struct shard_plan {
    using frame_type = shard_row_frame<decltype(Job::student)::memory_space>;
    using rows_type = std::remove_const_t<decltype(rows_of<thread_engine>(std::declval<const Job&>(),
                                                                          std::declval<const frame_type&>()))>;
    using state_type = typename shard_round<rows_type>::state_type;
    rows_type kind; ///< as rows of the call are, of which it counts the cuts alone
    index_t rows;   ///< of a launch
    int cuts;
    std::size_t of_row;                        ///< scratch, which a row has from round to round
    std::size_t states, kept, own, all, bytes; ///< at 0 the count of rows that are cut off

    shard_plan(const Job& job, const vocab_shard& shard, int ranks, index_t rows_)
        : shard_plan(rows_of<thread_engine>(job, frame_on(job, shard, with_env(job))), ranks, rows_) {}
    shard_plan(const rows_type& k, int ranks, index_t rows_)
        : kind(k), rows(rows_), cuts(cuts_from(0).count), of_row((shard_scratch_bytes(k) + 63) / 64 * 64),
          states(device_plan::aligned(sizeof(index_t))),
          kept(states + device_plan::aligned(sizeof(state_type) * static_cast<std::size_t>(rows))),
          own(kept + device_plan::aligned(of_row * static_cast<std::size_t>(rows))), all(own + gathered(0)),
          bytes(all + gathered(0) * static_cast<std::size_t>(ranks)) {}

    cut_counter cuts_from(int first) const {
        cut_counter counter{first};
        kind.row(counter);
        return counter;
    }
    /// Bytes of an item in a round: whichever of the cuts that can be left by then.
    std::size_t stride(int round) const { return sizeof(partial_item) + cuts_from(round).largest; }
    /// Bytes that a rank sends in a round.
    std::size_t gathered(int round) const {
        return device_plan::aligned(sizeof(partials_head) + stride(round) * static_cast<std::size_t>(rows));
    }
    static frame_type frame_on(const Job& job, const vocab_shard& shard, const typename frame_type::whole& batch) {
        frame_type f{{batch, shard}, 0};
        if constexpr (is_lumped<decltype(Job::teacher)>) f.shard.total = job.teacher.common; // of the entries
        return f;
    }
    /// As a plan knows the batch: which rows are measured.
    static typename frame_type::whole with_env(const Job& job) {
        typename frame_type::whole batch;
        batch.env = job.env;
        return batch;
    }
};

/// Rows [begin, end) of a job on logits, as many as the plans are for or fewer, and their result into `out`; `more`:
/// added to what it holds. `memory`: the plan's bytes.
template <class Job, space S, class Launch, class Gather>
void launch_rounds(const Job& job, const vocab_shard& shard, int ranks, const device_plan& batch,
                   const row_frame<S>& frame, const shard_plan<Job>& plan, index_t begin, index_t end,
                   std::byte* memory, result* out, bool more, Launch&& launch, Gather&& gather) {
    using round_type = shard_round<typename shard_plan<Job>::rows_type>;
    using state_type = typename shard_plan<Job>::state_type;
    auto* const states = reinterpret_cast<state_type*>(memory + plan.states);
    const index_t rows = end - begin, groups = (rows + batch.group - 1) / batch.group;
    shard_gather exchange;
    exchange.own = memory + plan.own, exchange.all = memory + plan.all, exchange.ranks = ranks, exchange.first = begin;
    exchange.ids = static_cast<std::uint64_t>(shard.total);
    exchange.sum_of_ids = sum_of_ids(job.teacher, 0, shard.total);
    auto k = rows_of<thread_engine>(job, shard_plan<Job>::frame_on(job, shard, frame));
    if constexpr (exchanges_logits<decltype(k)>) k.frame.logits_from = k.scratch_bytes();
    if (groups > 0) {
        for (int i = 0; i <= plan.cuts; ++i) {
            exchange.next = head_of_shard(job, shard.first, static_cast<std::uint64_t>(i), rows, plan.stride(i));
            launch(round_type{{k, begin, end}, states, memory + plan.kept, plan.of_row, exchange, i == 0}, groups);
            if (i == plan.cuts) break;
            exchange.sent = exchange.next, exchange.bytes = plan.gathered(i);
            gather(memory + plan.own, memory + plan.all, exchange.bytes);
        }
        launch(sum_of_states<state_type>{states, rows, batch.group, frame.partials}, groups);
    }
    launch(merge_results{frame.partials, groups, out, more}, index_t{1});
    launch(count_cut_off<state_type>{states, rows, reinterpret_cast<index_t*>(memory), more}, index_t{1});
}

/// A batch whose rows have their scratch elsewhere.
template <class Job>
device_plan plan_of_batch(const Job& job) {
    return {job.rows, sequences_of(job.env), 0};
}
/// Bytes of a call on logits.
template <class Job>
std::size_t shard_bytes(const Job& job, const vocab_shard& shard, int ranks) {
    return plan_of_batch(job).bytes + shard_plan<Job>(job, shard, ranks, job.rows).bytes;
}
/// The kernels of one call on a shard, and its all-gathers between them. `memory` holds shard_bytes. Returns where it
/// will stand in how many rows this rank's gradient was cut off.
template <class Job, class Launch, class Gather>
const index_t* run_shard(const Job& job, const vocab_shard& shard, int ranks, std::byte* memory, result* out,
                         Launch&& launch, Gather&& gather) {
    const device_plan batch = plan_of_batch(job);
    const auto frame = frame_of(batch, job.env, memory);
    std::byte* const of_shard = memory + batch.bytes;
    launch_counts(batch, frame, launch);
    launch_rounds(job, shard, ranks, batch, frame, shard_plan<Job>(job, shard, ranks, job.rows), 0, job.rows, of_shard,
                  out, false, launch, gather);
    return reinterpret_cast<const index_t*>(of_shard);
}

} // namespace OPD_ISA
} // namespace opd::detail
