// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What workers and the coordinator of spot training say to each other (spot_coordinator.hpp has the protocol). Both are
// plain values that list their fields, so a message between processes is the bytes of an archive. Each says all that
// its sender knows, so of two the one of the higher number counts and the other is forgotten: a message may be lost,
// late, doubled or overtaken.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "opd/error.hpp"
#include "opd/sched/archive.hpp"
#include "opd/sched/drafter_stream.hpp"
#include "opd/sched/types.hpp"

namespace opd::sched {

/// The same at the coordinator and at each worker: the bounds hold for one set of numbers.
struct spot_options {
    std::int32_t workers = 1;      ///< their numbers are 0 … workers - 1
    std::int32_t threshold = 1;    ///< a session begins with so many idle workers of one group
    std::int32_t most_members = 0; ///< of a round; 0: all of the group
    double lease =
        10;           ///< seconds that a worker trains without word from the coordinator; forever: nothing is ever lost
    double slice = 1; ///< seconds that a slice of training, or applying an update, takes at most
    double resend = 1;             ///< seconds after which a worker reports again; forever: nothing is ever lost
    std::int64_t every = 10;       ///< sessions begin at policy versions at least so far apart (TLT: 10)
    std::int64_t most_updates = 0; ///< of the sessions of one policy version; 0: no limit

    /// From halt() to the last worker's release at most, whatever the channel does.
    double bound() const { return lease + slice; }
    void check() const {
        if (workers < 1 || workers > (std::int32_t{1} << 20))
            throw invalid_input("workers", "must lie in [1, 2^20], not " + std::to_string(workers));
        if (threshold < 1 || threshold > workers)
            throw invalid_input("threshold", "must lie between 1 and the workers, not " + std::to_string(threshold));
        if (most_members < 0) throw invalid_input("most_members", "must be at least 0");
        if (!(lease > 0)) throw invalid_input("lease", "must be positive");
        if (!(slice >= 0 && slice < forever)) throw invalid_input("slice", "must be finite and at least 0");
        if (!(resend > 0 && (resend < lease || lease == forever)))
            throw invalid_input("resend", "must be positive, and less than the lease, or a lease runs out unasked");
        if (every < 1) throw invalid_input("every", "must be at least 1");
        if (most_updates < 0) throw invalid_input("most_updates", "must be at least 0");
    }
    template <class A>
    void fields(A& a) {
        a(workers, threshold, most_members, lease, slice, resend, every, most_updates);
    }
    bool operator==(const spot_options&) const = default;
};

/// Busy: rollout has it. Idle: nobody. Training: the drafter's session has it.
enum class spot_state : std::uint8_t { busy, idle, training };
constexpr spot_state last_of(spot_state) { return spot_state::training; }
constexpr const char* name_of(spot_state s) {
    constexpr const char* names[] = {"busy", "idle", "training"};
    return names[static_cast<int>(s)];
}

/// How far a worker is with its part of a round.
enum class spot_part : std::uint8_t {
    none,
    contributed, ///< its part is there for the leader
    applied,     ///< leader: the new weights are published under {epoch, round}
    failed       ///< it cannot be done
};
constexpr spot_part last_of(spot_part) { return spot_part::failed; }

/// A worker's word: all that there is to know of it.
struct spot_report {
    std::int32_t worker = -1;
    incarnation_t life = 1;
    std::int32_t group = 0;   ///< data-parallel group: one session is of one group
    std::uint64_t number = 0; ///< of this report, from 1 in each life
    std::uint64_t since = 0;  ///< what answers a report before this one starts no training any more
    std::uint64_t order = 0;  ///< the last order that it obeyed, of the highest number
    double sent = 0;          ///< by the worker's clock
    spot_state state = spot_state::busy;
    std::uint64_t epoch = 0, round = 0; ///< of the last part
    spot_part part = spot_part::none;
    drafter_weights has = {};
    template <class A>
    void fields(A& a) {
        a(worker, life, group, number, since, order, sent, state, epoch, round, part, has);
    }
    bool operator==(const spot_report&) const = default;
};

/// The coordinator's: all that the worker is to do.
struct spot_order {
    enum class kind : std::uint8_t {
        rest,  ///< train nothing
        train, ///< its part of this round
        apply  ///< leader: make one update of the parts of `members`, publish it
    };
    friend constexpr kind last_of(kind) { return kind::apply; }
    std::int32_t worker = -1;
    incarnation_t life = 1;
    std::uint64_t number = 0;  ///< of this order; never twice, in any life of the coordinator
    std::uint64_t answers = 0; ///< the last report that had come
    double sent = 0;           ///< which was sent then, by the worker's clock: its lease runs from there
    kind what = kind::rest;
    std::uint64_t beyond = 0; ///< rest: whoever may train by an answer to a report up to this one lets go, and says so
    std::uint64_t epoch = 0, round = 0;
    std::int32_t leader = -1;
    std::vector<std::int32_t> members = {}; ///< train: of the round, rising; apply: whose parts it is made of
    drafter_weights drafter = {}; ///< the last that were committed: what drafts, and what a round goes on from
    template <class A>
    void fields(A& a) {
        a(worker, life, number, answers, sent, what, beyond, epoch, round, leader, members, drafter);
    }
    bool operator==(const spot_order&) const = default;
};

} // namespace opd::sched
