// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A scheduler driven by hand: every event returns the actions it led to as one line of text, and the invariants are
// checked after it, and that a snapshot has the deadlines. Sequences are named by their number; replies carry the
// ticket of their latest start.
#pragma once

#include <doctest/doctest.h>
#include <map>
#include <string>
#include <vector>

#include "opd/sched/scheduler_checks.hpp"

namespace opd::test {

using namespace opd::sched;

/// One line: `start 0@1` sequence 0 on worker 1 (`start 0#2@1` its second attempt), `score j1@0:0,1`, `train j2
/// v0:0,1`, `sync 0 v1` (`sync v1` to all), `step v1:0,1`, `fail 0 rollout`, `abort 0`, `park 0`, `lost teacher 0`,
/// `finished`.
inline std::string line_of(const actions& out) {
    std::string text;
    const auto add = [&](const std::string& word) { text += (text.empty() ? "" : " | ") + word; };
    const auto numbers = [&](const auto& list, auto&& number) {
        std::string s = ":";
        for (const auto& x : list) s += (s.size() > 1 ? "," : "") + std::to_string(number(x));
        return s;
    };
    const auto name = [](const ticket& t) {
        const auto n = t.attempt & 0xffff; // of which life is not shown
        return std::to_string(t.sample) + (n == 1 ? "" : "#" + std::to_string(n));
    };
    const auto n = [](auto x) { return std::to_string(x); };
    for (const action& a : out.items) switch (a.what) {
        case action::kind::start:
            add("start " + name(a.ticket) + "@" + n(a.worker) + (a.version > 0 ? " v" + n(a.version) : ""));
            break;
        case action::kind::abort:
            add("abort " + name(a.ticket));
            break;
        case action::kind::park:
            add("park " + name(a.ticket));
            break;
        case action::kind::score:
            add("score j" + n(a.job & 0xffffffff) + "@" + n(a.worker) +
                numbers(out.of(a), [](const ticket& t) { return t.sample; }));
            break;
        case action::kind::train:
            add("train j" + n(a.job & 0xffffffff) + " v" + n(a.version) +
                numbers(out.of(a), [](const ticket& t) { return t.sample; }));
            break;
        case action::kind::sync:
            add("sync " + (a.worker < 0 ? "" : n(a.worker) + " ") + "v" + n(a.version));
            break;
        case action::kind::step:
            add("step v" + n(a.version) +
                numbers(out.consumed_by(a), [](const consumed_sequence& c) { return c.ticket.sample; }));
            break;
        case action::kind::fail:
            add("fail " + n(a.ticket.sample) + " " + name_of(a.why));
            break;
        case action::kind::lost:
            add(std::string("lost ") + name_of(a.stage) + " " + n(a.worker));
            break;
        case action::kind::finished:
            add("finished");
            break;
        }
    return text;
}

/// An async schedule with all permits, unless it says how many (automatic M: outstanding_test.cpp, and random worlds),
/// and calls of one.
inline settings stream(index_t batch, async a, index_t sequences = 0) {
    if (a.outstanding == by_policy) a.outstanding = widest;
    return {.batch = batch, .schedule = a, .sequences = sequences, .teacher_batch = 1};
}

/// The event as the present life of its worker says it; a worker that comes begins its next life.
inline event stamped(const scheduler& s, event e) {
    if (!e.from_worker() || e.incarnation != 0 || e.worker < 0) return e;
    const bool comes = e.what == event::kind::worker_up && !s.is_up(e.stage, e.worker);
    e.incarnation = std::max<incarnation_t>(1, s.incarnation_of(e.stage, e.worker) + comes);
    return e;
}

class script {
public:
    sched::scheduler s;
    double now = 0;
    actions out;                                        // of the last event
    std::map<sample_t, ticket> begun;                   // latest start of each
    std::map<version_t, std::uint64_t> made = {{0, 0}}; // what made the weights that were to be installed
    std::uint64_t score_job = 0, train_job = 0;
    std::int32_t score_worker = 0;
    std::vector<std::vector<double>> lags; // start lags of every step

    explicit script(const settings& o) : s(o) {}

    std::string on(const event& e) {
        out.clear();
        s.on(stamped(s, e), now, out);
        s.check_invariants();
        CHECK(scheduler::restore(s.options(), s.snapshot()).next_deadline() == s.next_deadline());
        for (const action& a : out.items) {
            if (a.what == action::kind::start) begun[a.ticket.sample] = a.ticket;
            if (a.what == action::kind::sync) made[a.version] = a.job;
            if (a.what == action::kind::score) score_job = a.job, score_worker = a.worker;
            if (a.what == action::kind::train) train_job = a.job;
            if (a.what == action::kind::step) {
                lags.emplace_back();
                for (const auto& c : out.consumed_by(a)) lags.back().push_back(c.lags(a.version - 1)[0]);
            }
        }
        return line_of(out);
    }
    std::string up(stage g, std::int32_t w = 0, std::int32_t slots = 1) { return on(event::up(g, w, slots)); }
    std::string down(stage g, std::int32_t w = 0) { return on(event::down(g, w)); }
    std::string synced(std::int32_t w, version_t v) { return on(event::synced(w, made.at(v))); }
    std::string rolled(sample_t n, version_t oldest = 0, version_t newest = -1) {
        if (newest < oldest) newest = oldest;
        return on(event::rolled_out(begun.at(n), {oldest, newest, 0.5 * static_cast<double>(oldest + newest), 10}));
    }
    std::string roll_failed(sample_t n) { return on(event::rollout_failed(begun.at(n))); }
    std::string park(sample_t n) { return on(event::park(begun.at(n))); }
    std::string parked(sample_t n, version_t oldest, version_t newest, std::int64_t tokens = 4) {
        return on(event::parked(begun.at(n), {oldest, newest, 0.5 * static_cast<double>(oldest + newest), tokens}));
    }
    std::string aborted(const ticket& t) { return on(event::aborted(t)); }
    std::string scored(std::uint64_t job, std::int32_t w = 0) { return on(event::scored(job, w)); }
    std::string scored() { return scored(score_job, score_worker); }
    std::string learned(std::uint64_t job) { return on(event::learned(job)); }
    std::string learned() { return learned(train_job); }
    std::string of(event::kind k, index_t count = 0) { return on(event::of(k, count)); }
    /// Nothing happens until the next deadline.
    std::string wait() {
        if (s.next_deadline() == forever) return "for ever";
        now = s.next_deadline();
        return of(event::kind::tick);
    }
    /// One rollout worker with so many slots, one teacher, the learner; all have the first weights.
    script& staff(std::int32_t slots = 1) {
        up(stage::learner);
        up(stage::teacher);
        up(stage::rollout, 0, slots);
        synced(0, s.version());
        return *this;
    }
};

/// The event throws invalid_input and nothing of the state has changed.
inline void check_refused(script& t, const event& e, const std::string& words) {
    const std::string before = t.s.snapshot();
    actions out;
    try {
        t.s.on(stamped(t.s, e), t.now, out);
        FAIL_CHECK("was taken, but expected: " << words);
    } catch (const invalid_input& x) {
        CHECK_MESSAGE(std::string(x.what()).find(words) != std::string::npos, x.what());
    }
    CHECK(t.s.snapshot() == before);
    CHECK(out.items.empty());
}

} // namespace opd::test
