// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What a driver tells the scheduler (events) and what the scheduler asks of it (actions). Both are plain values: a
// driver in another process sends them as messages, a test records and replays them.
//
// A driver carries out every action and reports what became of it; it may report late, twice, in another order, or
// never.
//
//   action                                        answered by
//   start{t, version}      roll t.sample out       rolled_out{t, versions}, rollout_failed{t}
//   abort{t}               let go of it            aborted{t} (or one of the above)
//   park{t}                stop it, keep what it has drawn            parked{t, versions} (or one of the above)
//   score{job, worker, tickets}                    scored{job, worker, tickets; none named: all},
//                                                  score_failed{job, worker}
//   train{job, from, tickets by sample}            learned{job}: the weights of version + 1 are published under the
//                                                  job's name; learn_failed{job}. No tickets: nothing to learn from,
//                                                  the weights of `from` are those of version + 1 too
//   sync{worker, weights}  install these weights   synced{worker, job, elasticity}. Worker -1: every rollout worker
//                                                  that is up. A worker never goes back to weights of a lower job
//   lost{stage, worker}    it missed a deadline    worker_up of its next life, when it is back
//   step{version, consumed}    for information: these were consumed, the version is now this, the gate is open again
//   fail{ticket, why}          for information: this sequence was given up
//   (of its own accord, or before the answer to score or train)      payload_lost{tickets}: they are drawn again
//   finished                   nothing is outstanding and nothing will come; scheduler.failed() says whether a stage is
//                              why
//
// Every message of a worker, and every action for one, says of which of its lives (incarnations) it is; tickets say
// it themselves. A higher one than the present implies the end of the present life; what a life that is over had to
// say is late, and counts for nothing.
#pragma once

#include <array>
#include <span>
#include <vector>

#include "opd/sched/types.hpp"

namespace opd::sched {

/// One message to the scheduler. `what` says which of the other members count; the rest keep their defaults.
struct event {
    enum class kind : std::uint8_t {
        worker_up, ///< stage, worker, slots: a new life; or of the present one, another number of slots (0: it drains)
        worker_down, ///< stage, worker: this life is over, and with it what ran there
        rolled_out,  ///< ticket, versions
        rollout_failed,
        aborted,
        parked, ///< ticket, versions of the tokens that it has, which the driver keeps: it goes on later, on any
                ///< worker. Asked for or not
        scored, ///< job, worker, tickets
        score_failed,
        learned, ///< job; count: optimizer updates
        learn_failed,
        synced,       ///< worker, job; elasticity, where it is known
        weights_lost, ///< job: what it published cannot be had any more, as its source died while others were to
                      ///< install it, or later
        tick,         ///< nothing but time passes
        pause,        ///< nothing new starts
        resume,
        park,   ///< ticket: it is to be parked. Nothing happens if that attempt does not run, or is to let go already
        resize, ///< count: permits M, from batch to what the settings allow
        close,  ///< nothing new is admitted; what is outstanding is finished, the last batch may be short
        stop,   ///< everything outstanding is given up; an update that was made is still consumed
        payload_lost ///< tickets, or ticket if there are none: what those attempts drew, or its score, cannot be had
                     ///< any more; job: of the call that found so, if one did. To a train call it is the answer
    };
    friend constexpr kind last_of(kind) { return kind::payload_lost; }
    kind what = kind::tick;
    sched::stage stage = sched::stage::rollout; ///< of the worker
    std::int32_t worker = -1;
    incarnation_t incarnation = 0; ///< of the worker
    std::int32_t slots = 1;
    sched::ticket ticket = {};
    token_versions versions = {};
    std::uint64_t job = 0;
    index_t count = 0;
    double elasticity = untold;                  ///< of the worker's pace since it said so last (rollout_cost.hpp)
    std::span<const sched::ticket> tickets = {}; ///< not owned; a message carries them beside it

    /// The same of this life of its worker.
    event of_life(incarnation_t n) const {
        event e = *this;
        e.incarnation = n;
        return e;
    }
    /// Whether a worker says it.
    bool from_worker() const { return what < kind::weights_lost; }

    static event up(sched::stage s, std::int32_t worker, std::int32_t slots = 1) {
        event e = by(kind::worker_up, s, worker);
        e.slots = slots;
        return e;
    }
    static event down(sched::stage s, std::int32_t worker) { return by(kind::worker_down, s, worker); }
    static event rolled_out(const sched::ticket& t, const token_versions& v) {
        event e = about(kind::rolled_out, t);
        e.versions = v;
        return e;
    }
    static event rollout_failed(const sched::ticket& t) { return about(kind::rollout_failed, t); }
    static event aborted(const sched::ticket& t) { return about(kind::aborted, t); }
    static event parked(const sched::ticket& t, const token_versions& v) {
        event e = about(kind::parked, t);
        e.versions = v;
        return e;
    }
    static event park(const sched::ticket& t) {
        event e = of(kind::park);
        e.ticket = t;
        return e;
    }
    static event scored(std::uint64_t job, std::int32_t worker, std::span<const sched::ticket> which = {}) {
        event e = by(kind::scored, sched::stage::teacher, worker, job);
        e.tickets = which;
        return e;
    }
    static event score_failed(std::uint64_t job, std::int32_t worker) {
        return by(kind::score_failed, sched::stage::teacher, worker, job);
    }
    static event learned(std::uint64_t job, index_t updates = 1) {
        event e = by(kind::learned, sched::stage::learner, 0, job);
        e.count = updates;
        return e;
    }
    static event learn_failed(std::uint64_t job) { return by(kind::learn_failed, sched::stage::learner, 0, job); }
    static event synced(std::int32_t worker, std::uint64_t job) {
        return by(kind::synced, sched::stage::rollout, worker, job);
    }
    static event weights_lost(std::uint64_t job) { return by(kind::weights_lost, sched::stage::learner, -1, job); }
    static event payload_lost(const sched::ticket& t, std::uint64_t job = 0) {
        event e = of(kind::payload_lost);
        e.ticket = t, e.job = job;
        return e;
    }
    static event payload_lost(std::span<const sched::ticket> which, std::uint64_t job = 0) {
        event e = of(kind::payload_lost);
        e.tickets = which, e.job = job;
        return e;
    }
    static event of(kind k, index_t count = 0) {
        event e;
        e.what = k, e.count = count;
        return e;
    }
    /// All but `tickets`.
    template <class A>
    void fields(A& a) {
        a(what, stage, worker, incarnation, slots, ticket, versions, job, count, elasticity);
    }

private:
    static event about(kind k, const sched::ticket& t) {
        event e = by(k, sched::stage::rollout, t.worker);
        e.ticket = t, e.incarnation = t.incarnation;
        return e;
    }
    static event by(kind k, sched::stage s, std::int32_t worker, std::uint64_t job = 0) {
        event e;
        e.what = k, e.stage = s, e.worker = worker, e.job = job;
        return e;
    }
};

/// Why a sequence was given up. The first are numbered as the stages.
enum class failure : std::uint8_t {
    rollout, ///< too many failed attempts
    teacher,
    learner,
    stale,  ///< policy drop
    stopped ///< event stop
};
constexpr failure last_of(failure) { return failure::stopped; }
constexpr const char* name_of(failure f) {
    constexpr const char* names[] = {"rollout", "teacher", "learner", "stale", "stopped"};
    return names[static_cast<int>(f)];
}

/// One request of the scheduler. Its tickets lie in the `actions` that on() has filled, at [first, first + count).
struct action {
    enum class kind : std::uint8_t { start, abort, park, score, train, sync, lost, step, fail, finished };
    friend constexpr kind last_of(kind) { return kind::finished; }
    kind what = kind::finished;
    sched::stage stage = sched::stage::rollout; ///< lost
    failure why = failure::stopped;             ///< fail
    place where = place::none;                  ///< fail: where it was
    std::int32_t worker = -1;                   ///< start, abort, park, score, train, sync, lost
    incarnation_t incarnation = 0;              ///< of the worker
    sched::ticket ticket = {};                  ///< start, abort, park, fail
    version_t version = 0;                      ///< start, train, sync, step
    std::uint64_t job = 0;                      ///< score, train: the call; sync: what made the weights
    std::uint64_t from = 0;                     ///< train: what made the weights to go on from, which are of `version`
    std::uint32_t first = 0; ///< score, train: actions::tickets[first, first + count); step: likewise of consumed
    std::uint32_t count = 0;
    /// All of it: a message carries the tickets of score and train beside it.
    template <class A>
    void fields(A& a) {
        a(what, stage, why, where, worker, incarnation, ticket, version, job, from, first, count);
    }
};

/// A sequence that an update consumed.
struct consumed_sequence {
    sched::ticket ticket;
    version_t start = 0; ///< of its start
    token_versions versions;

    /// By `lag`, for an update that was made at `version`.
    std::array<double, lag_count> lags(version_t version) const {
        const auto now = static_cast<double>(version);
        return {now - static_cast<double>(start), now - static_cast<double>(versions.oldest), now - versions.mean,
                now - static_cast<double>(versions.newest)};
    }
};

/// What one event led to, in order.
struct actions {
    std::vector<action> items;
    std::vector<ticket> tickets;
    std::vector<consumed_sequence> consumed;

    /// The tickets of a call to the teacher or the learner.
    std::span<const ticket> of(const action& a) const { return std::span(tickets).subspan(a.first, a.count); }
    /// What a step consumed. Its update was made at version a.version - 1.
    std::span<const consumed_sequence> consumed_by(const action& a) const {
        return std::span(consumed).subspan(a.first, a.count);
    }
    void clear() {
        items.clear();
        tickets.clear();
        consumed.clear();
    }
};

} // namespace opd::sched
