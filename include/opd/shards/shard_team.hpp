// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A team (rows.hpp) whose ids lie in shards on several ranks. It walks through a row's phases as any team does, but
// stops at each that sums over the vocabulary: the part of its own ids goes out, and the next walk goes on behind it
// with the part of all. What a phase does is written once; which round it falls into follows from the order of
// phases. Phases that write the gradient come last, in a walk of their own (`shard_writer`).
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "opd/caches.hpp"
#include "opd/config.hpp"
#include "opd/element.hpp"
#include "opd/rows/rows.hpp"
#include "opd/rows/sparse_math.hpp"
#include "opd/source.hpp"
#include "opd/vocab_parallel.hpp"

namespace opd::detail {
inline namespace OPD_ISA {

/// How far a row has come.
struct shard_progress {
    enum class stage : std::uint8_t {
        running,
        wants_tiles, ///< at a phase that is about to read logits
        waiting,     ///< for the part of all
        done         ///< but for its gradient
    } now = stage::running;
    bool logits_sent = false;
    std::int16_t next = 0; ///< the phase, by its place in the row
    index_t item = 0;      ///< waiting: where the row's partial lies among the others
};

/// Rows of few ids exchange the logits of their slots beside their sums.
template <class Rows>
concept exchanges_logits = requires(const Rows& k) {
    k.slots();
};
/// Rows that gather these logits into a place of their own; of others it lies behind their scratch.
template <class Rows>
concept gathers_log_p = requires(const Rows& k, const typename Rows::state_type& st) {
    k.at(st).log_p;
};
template <class Rows>
concept gathers_logits = gathers_log_p<Rows> || requires(const Rows& k, const typename Rows::state_type& st) {
    k.at(st).z;
};
/// The most logits that a row exchanges.
template <class Rows>
OPD_HD std::size_t most_exchanged(const Rows& k) {
    if constexpr (requires { k.width(); })
        return static_cast<std::size_t>(k.width());
    else
        return static_cast<std::size_t>(k.slots());
}
/// Scratch of a row, with a place for these logits if the row has none of its own.
template <class Rows>
std::size_t shard_scratch_bytes(const Rows& k) {
    std::size_t bytes = k.scratch_bytes();
    if constexpr (exchanges_logits<Rows> && !gathers_logits<Rows>) bytes += sizeof(double) * most_exchanged(k);
    return bytes;
}
/// Where they lie, one a slot, and how many a row has.
template <class Rows, class State>
OPD_HD double* exchanged(const Rows& k, const State& st) {
    if constexpr (gathers_log_p<Rows>)
        return k.at(st).log_p;
    else if constexpr (gathers_logits<Rows>)
        return k.at(st).z;
    else if constexpr (requires { k.frame.logits_from; })
        return reinterpret_cast<double*>(st.scratch + k.frame.logits_from);
    else
        return reinterpret_cast<double*>(st.scratch + k.scratch_bytes());
}
template <class Rows, class State>
OPD_HD index_t count_exchanged(const Rows& k, const State& st) {
    if constexpr (gathers_log_p<Rows>)
        return slots_of(k.teacher, st.row).count;
    else if constexpr (gathers_logits<Rows>)
        return k.slots_at(st.row).count;
    else
        return k.slots();
}
/// One of them as this rank has it; -inf where the id is another's.
template <class Rows, class State>
OPD_HD double own_logit(const Rows& k, const State& st, index_t slot) {
    if constexpr (gathers_logits<Rows>) {
        return exchanged(k, st)[slot];
    } else {
        const index_t id = own_id(k.frame, static_cast<index_t>(k.teacher.ids(st.row, slot)), k.vocab);
        return id < 0 ? neg_inf<double>() : load_log(k.student.logit(k.of_student(st), id));
    }
}
/// A student of one token.
struct known_logit {
    double z;
    OPD_HD double logit(row_place, index_t) const { return z; }
};

/// What rows of a shard know of their batch, `Whole`, and of the shard.
template <class Whole>
struct shard_frame : Whole {
    using whole = Whole;
    vocab_shard shard = {};
    /// The ranks have told each other the logits of a row's slots.
    template <class Rows>
    OPD_HD known_logit student_at(const Rows& k, const row_state& st, index_t slot) const {
        return {exchanged(k, st)[slot]};
    }
};

/// Phases that read logits of a row's slots.
template <class Phase>
concept reads_slots_of_row = requires {
    Phase::reads_slots;
};
/// Phases that add up what either side has beyond the common ids. A rank may have such ids and no common one.
template <class Phase>
concept sums_beyond_common = requires {
    Phase::beyond_common;
};
/// Phases that add up over the vocabulary, but not those of rows over slots, of which every rank has all.
template <class Phase, class Rows>
concept sums_over_shards = in_shards<decltype(Rows::frame)> && !reads_slots_of_row<Phase> &&
                           (sums_beyond_common<Phase> || requires { Phase::backwards; });
/// The shard's part of such a sum.
template <class Phase>
OPD_HD OPD_INLINE auto part_of_shard(const auto& k, auto& st, auto at) {
    if constexpr (!sums_beyond_common<Phase>)
        if (k.vocab == 0) return Phase::start(k, st);
    return Phase::part(k, st, at);
}

template <class State>
struct shard_team {
    using stage = shard_progress::stage;
    State& st;
    shard_progress& progress;
    const std::byte* merged; ///< the row's item, if it waits for one
    std::byte* own;          ///< where its next one goes
    bool may_read;           ///< whether its logits are there
    int here = 0;
    bool stopped = false;

    template <class Phase, class Rows>
    void fold(const Rows& k) {
        if (!reaches()) return;
        if constexpr (sums_over_shards<Phase, Rows>) {
            using partial = decltype(Phase::start(k, st));
            if (progress.now == stage::waiting) {
                const auto all = read_as<partial>(merged + sizeof(partial_item));
                take_logits(k, kind_of<partial>());
                Phase::finish(k, st, all);
            } else if (is_due<Phase>(k, st)) {
                if (!may_read) return stop(stage::wants_tiles);
                const partial mine = part_of_shard<Phase>(k, st, alone{});
                write_as(own + sizeof(partial_item), mine);
                return send(k, kind_of<partial>());
            }
        } else { // of what every rank has
            if (waits_for_slots<Phase>(k)) return;
            if (is_due<Phase>(k, st)) Phase::finish(k, st, Phase::part(k, st, alone{}));
        }
        pass();
    }
    template <class Phase, class Rows>
    void each(const Rows& k) {
        if (!reaches()) return;
        if constexpr (writes_gradient<Phase>) {
            return stop(stage::done);
        } else {
            if (waits_for_slots<Phase>(k)) return;
            if (is_due<Phase>(k, st)) Phase::run(k, st, alone{});
        }
        pass();
    }

private:
    /// Whether the walk has come to a phase that is still to be done.
    bool reaches() { return !stopped && here++ == progress.next; }
    void pass() { ++progress.next, progress.now = stage::running; }
    void stop(stage at) { progress.now = at, stopped = true; }
    /// Whether a phase reads logits of slots that are still to be exchanged, since no sum took them along.
    template <class Phase, class Rows>
    bool waits_for_slots(const Rows& k) {
        if constexpr (reads_slots_of_row<Phase>) {
            if (progress.now == stage::waiting)
                take_logits(k, partial_kind::none);
            else if (st.good() && !progress.logits_sent)
                return send(k, partial_kind::none), true;
        }
        return false;
    }
    template <class Rows>
    void send(const Rows& k, partial_kind kind) {
        partial_item item{st.row, progress.next, kind, 0};
        if constexpr (exchanges_logits<Rows>)
            if (!progress.logits_sent) {
                item.logits = static_cast<std::int32_t>(count_exchanged(k, st));
                std::byte* to = own + sizeof item + bytes_of(kind);
                for (std::int32_t j = 0; j < item.logits; ++j, to += 8) write_as(to, own_logit(k, st, j));
                progress.logits_sent = true;
            }
        write_as(own, item);
        stop(stage::waiting);
    }
    template <class Rows>
    void take_logits(const Rows& k, partial_kind kind) {
        if constexpr (exchanges_logits<Rows>) {
            const auto item = read_as<partial_item>(merged);
            if (item.logits == 0) return;
            std::memcpy(exchanged(k, st), merged + sizeof item + bytes_of(kind),
                        sizeof(double) * static_cast<std::size_t>(item.logits));
        }
    }
};

/// Of a row that is done: its gradient alone.
template <class State>
struct shard_writer {
    State& st;
    template <class Phase, class Rows>
    void fold(const Rows&) {}
    template <class Phase, class Rows>
    void each(const Rows& k) {
        if constexpr (writes_gradient<Phase>) {
            if (!is_due<Phase>(k, st)) return;
            if constexpr (requires { Phase::backwards; })
                if (k.vocab == 0) return;
            if constexpr (requires { Phase::restore(k, st, alone{}); }) Phase::restore(k, st, alone{});
            Phase::run(k, st, alone{});
        }
    }
};

} // namespace OPD_ISA
} // namespace opd::detail
