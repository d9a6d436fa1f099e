// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What a driver tells the scheduler (events) and what the scheduler asks of it (actions). Both are plain values: a driver
// in another process sends them as messages, a test records and replays them.
//
// A driver carries out every action and reports what became of it; it may report late, twice or never.
//
//   action                                        answered by
//   start{t, version}    roll t.sample out         rolled_out{t, versions}, rollout_failed{t}
//   abort{t}             let go of it              aborted{t} (or one of the above)
//   score{job, worker, tickets}                   scored{job, worker, tickets; none named: all}, score_failed{job, worker}
//   train{job, version, tickets by sample}        learned{job}: the weights of version + 1 are published; learn_failed{job}.
//                                                 No tickets: all of a whole batch failed, and the weights stay what they are
//   sync{worker, version} install these weights   synced{worker, version}
//   set_timer{timer, seconds}                     timer{timer}, once
//   lost{stage, worker}  it missed a deadline     worker_up when it is back
//   step{version, consumed}    for information: these were consumed, the version is now this, the gate is open again
//   fail{ticket, why}          for information: this sequence was given up
//   finished                   nothing is outstanding and nothing will come
#pragma once

#include <array>
#include <span>
#include <vector>

#include "opd/sched/types.hpp"

namespace opd::sched {

/// What a timer is for; the driver hands it back unchanged.
struct timer {
    enum class kind : std::uint8_t { flush, rollout, abort, teacher, learner, sync };
    friend constexpr kind last_of(kind) { return kind::sync; }
    kind what = kind::flush;
    ticket attempt = {};      ///< rollout, abort; sync: .attempt counts the comings of the worker
    std::uint64_t number = 0; ///< flush: which one; teacher, learner: the job; sync: the version
    std::int32_t worker = -1; ///< sync
    bool operator==(const timer&) const = default;
};

struct event {
    enum class kind : std::uint8_t {
        worker_up,   ///< stage, worker, slots: it is there (again), or has another number of slots
        worker_down, ///< stage, worker: it is gone, and with it what ran there
        rolled_out,
        rollout_failed,
        aborted,
        scored,
        score_failed,
        learned,
        learn_failed,
        synced,
        timer,
        pause, ///< nothing new starts
        resume,
        resize, ///< count: permits M, from batch to what the settings allow
        close,  ///< nothing new is admitted; what is outstanding is finished, the last batch may be short
        stop    ///< everything outstanding is given up
    };
    friend constexpr kind last_of(kind) { return kind::stop; }
    kind what = kind::close;
    sched::stage stage = sched::stage::rollout;
    std::int32_t worker = -1;
    std::int32_t slots = 1;
    sched::ticket ticket = {};
    token_versions versions = {};
    std::uint64_t job = 0;
    version_t version = 0;
    index_t count = 0;
    sched::timer timer = {};
    std::span<const sched::ticket> tickets = {}; ///< not owned

    static event up(sched::stage s, std::int32_t worker, std::int32_t slots = 1) {
        event e;
        e.what = kind::worker_up, e.stage = s, e.worker = worker, e.slots = slots;
        return e;
    }
    static event down(sched::stage s, std::int32_t worker) {
        event e;
        e.what = kind::worker_down, e.stage = s, e.worker = worker;
        return e;
    }
    static event rolled_out(const sched::ticket& t, const token_versions& v) {
        event e = about(kind::rolled_out, t);
        e.versions = v;
        return e;
    }
    static event rollout_failed(const sched::ticket& t) { return about(kind::rollout_failed, t); }
    static event aborted(const sched::ticket& t) { return about(kind::aborted, t); }
    static event scored(std::uint64_t job, std::int32_t worker, std::span<const sched::ticket> which = {}) {
        event e = about(kind::scored, job, worker);
        e.tickets = which;
        return e;
    }
    static event score_failed(std::uint64_t job, std::int32_t worker) { return about(kind::score_failed, job, worker); }
    static event learned(std::uint64_t job, index_t updates = 1) {
        event e = about(kind::learned, job, 0);
        e.count = updates;
        return e;
    }
    static event learn_failed(std::uint64_t job) { return about(kind::learn_failed, job, 0); }
    static event synced(std::int32_t worker, version_t v) {
        event e = about(kind::synced, 0, worker);
        e.version = v;
        return e;
    }
    static event fired(const sched::timer& t) {
        event e;
        e.what = kind::timer, e.timer = t;
        return e;
    }
    static event of(kind k, index_t count = 0) {
        event e;
        e.what = k, e.count = count;
        return e;
    }

private:
    static event about(kind k, const sched::ticket& t) {
        event e;
        e.what = k, e.ticket = t, e.worker = t.worker;
        return e;
    }
    static event about(kind k, std::uint64_t job, std::int32_t worker) {
        event e;
        e.what = k, e.job = job, e.worker = worker;
        return e;
    }
};

/// Why a sequence was given up.
enum class failure : std::uint8_t {
    rollout, ///< too many failed attempts
    teacher,
    learner,
    stale,  ///< policy drop
    stopped ///< event stop
};
constexpr const char* name_of(failure f) {
    constexpr const char* names[] = {"rollout", "teacher", "learner", "stale", "stopped"};
    return names[static_cast<int>(f)];
}

struct action {
    enum class kind : std::uint8_t { start, abort, score, train, sync, step, fail, set_timer, lost, finished };
    kind what = kind::finished;
    sched::stage stage = sched::stage::rollout; ///< lost
    failure why = failure::stopped;             ///< fail
    std::int32_t worker = -1;
    sched::ticket ticket = {}; ///< start, abort, fail
    version_t version = 0;     ///< start, train, sync, step
    std::uint64_t job = 0;     ///< score, train
    double seconds = 0;        ///< set_timer
    sched::timer timer = {};   ///< set_timer
    std::uint32_t first = 0;   ///< score, train: actions::tickets[first, first + count); step: likewise of consumed
    std::uint32_t count = 0;
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
