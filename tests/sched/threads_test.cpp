// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// build: tsan, whole-sanitize
// optimise: always
//
// The scheduler on real threads with toy stages that check what they are given: every schedule runs to its end and
// consumes every sequence once, on the weights that the scheduler says; sync, k = 0 and tau = 0 are the same run; every
// fault has its outcome; a shutdown is bounded even where a stage hangs; a run that is cut anywhere and resumed loses
// nothing.
#include <array>
#include <atomic>
#include <chrono>
#include <doctest/doctest.h>
#include <random>
#include <thread>

#include "opd/sched/recorder.hpp"
#include "opd/sched/virtual_driver.hpp"
#include "toy_stages.hpp"

namespace {

using namespace opd::sched;
using opd::index_t;
using wrong = toy::world::wrong;

settings how(const schedule& s, index_t batch = 8, index_t sequences = 96) {
    settings r;
    r.batch = batch;
    r.schedule = s;
    r.sequences = sequences;
    r.teacher_batch = 3;
    r.teacher_flush = 0.0005;
    return r;
}
async streaming(index_t tau, staleness_policy p = staleness_policy::capacity, weight_update u = weight_update::keep) {
    async a;
    a.tau = tau, a.policy = p, a.update = u, a.outstanding = widest; // automatic M: outstanding_test.cpp
    return a;
}
const schedule serial = opd::sched::sync{};

std::vector<std::pair<std::string, schedule>> all_schedules() {
    std::vector<std::pair<std::string, schedule>> r{{"sync", serial}};
    for (const index_t k : {0, 1, 2, 5}) {
        r.emplace_back("step_off " + std::to_string(k), step_off{k});
        r.emplace_back("controlled " + std::to_string(k), controlled{k});
    }
    for (const auto p :
         {staleness_policy::capacity, staleness_policy::cohort_fifo, staleness_policy::edf, staleness_policy::drop,
          staleness_policy::retry, staleness_policy::in_order, staleness_policy::areal})
        for (const auto u : {weight_update::keep, weight_update::abort, weight_update::finish_first})
            for (const index_t tau : {0, 1, 4})
                r.emplace_back(std::string("async ") + name_of(p) + " " + name_of(u) + " " + std::to_string(tau),
                               streaming(tau, p, u));
    return r;
}

void check_clean(const toy::run& r) {
    CHECK(r.complaints() == "");
    CHECK(r.report.left_behind.empty());
    CHECK(r.report.observer_exceptions == 0); // the scheduler's invariants among them
    CHECK(r.report.totals.admitted == r.report.totals.consumed + r.report.totals.failed);
}
void check_complete(const toy::run& r, sample_t n) {
    check_clean(r);
    CHECK(r.first_exception() == "");
    CHECK(r.report.completed);
    CHECK(r.report.totals.consumed == static_cast<std::int64_t>(n));
    CHECK(r.report.discarded.empty());
    CHECK(static_cast<std::size_t>(r.report.version) == r.steps.size());
}

/// A fault for the n-th call of this name, and for that alone.
auto once(const std::string& call, std::function<wrong()> what, int n = 1) {
    auto left = std::make_shared<std::atomic<int>>(n);
    return [=](const std::string& c, int, sample_t, std::stop_token) {
        return c == call && left->fetch_sub(1) == 1 ? what() : wrong::nothing;
    };
}
std::function<wrong()> throwing(const std::string& text) {
    return [text]() -> wrong { throw toy::failed(text); };
}
std::function<wrong()> doing(wrong w) {
    return [w] { return w; };
}
void wait_for(std::stop_token stop) {
    std::mutex m;
    std::condition_variable_any never;
    std::unique_lock lock(m);
    never.wait(lock, stop, [] { return false; });
}

} // namespace

TEST_CASE("every schedule runs to its end and keeps its bound") {
    for (const auto& [name, schedule] : all_schedules()) {
        CAPTURE(name);
        toy::run r;
        r.how = how(schedule);
        r.go();
        check_complete(r, 96);
        const bool drops = name.find("drop") != std::string::npos;
        if (!drops) CHECK(r.consumed_all(96));
        CHECK(std::set<sample_t>(r.consumed.begin(), r.consumed.end()).size() == 96);
        const plan p = plan_of(r.how);
        if (p.streaming && p.policy != staleness_policy::capacity && p.policy != staleness_policy::areal)
            CHECK(r.worst_start_lag <= static_cast<double>(p.depth));
        if (p.update == weight_update::abort || p.update == weight_update::finish_first)
            for (const toy::step& s : r.steps)
                for (const auto& c : s.consumed) CHECK(c.versions.oldest == c.versions.newest);
        CHECK(r.report.totals.updates == 2 * static_cast<std::int64_t>(r.steps.size()));
    }
}

TEST_CASE("any number of workers, groups and short last batches") {
    for (const int rollouts : {1, 5})
        for (const int teachers : {1, 3})
            for (const index_t group : {1, 4}) {
                CAPTURE(rollouts);
                CAPTURE(teachers);
                CAPTURE(group);
                toy::run r;
                r.how = how(streaming(2), 8, 52);
                r.how.group = group;
                r.rollouts = rollouts;
                r.lanes = rollouts == 1 ? 1 : 3;
                r.teachers = teachers;
                r.go();
                check_complete(r, 52);
                CHECK(r.consumed_all(52));
                CHECK(r.batches.back().size() == 4);
            }
}

TEST_CASE("sync, k = 0 and tau = 0 consume the same sequences at the same versions, from the same weights") {
    const auto versions_of = [](const toy::run& r) {
        std::vector<std::pair<sample_t, std::vector<version_t>>> all;
        for (const toy::step& s : r.steps)
            for (const auto& c : s.consumed) all.emplace_back(c.ticket.sample, c.rolled->versions);
        return all;
    };
    toy::run reference;
    reference.how = how(serial);
    reference.go();
    check_complete(reference, 96);
    for (std::size_t b = 0; b < reference.batches.size(); ++b)
        for (sample_t i = 0; i < 8; ++i) CHECK(reference.batches[b].count(8 * b + i) == 1);
    for (const schedule& s : {schedule(step_off{0}), schedule(controlled{0}), schedule(streaming(0))})
        for (const int rollouts : {1, 3}) {
            toy::run r;
            r.how = how(s);
            r.rollouts = rollouts;
            r.go();
            check_complete(r, 96);
            CHECK(r.batches == reference.batches);
            CHECK(versions_of(r) == versions_of(reference));
        }
}

TEST_CASE("k steps off: batch b is drawn by version b - k") {
    for (const index_t k : {1, 2, 3})
        for (const schedule& s : {schedule(step_off{k}), schedule(controlled{k})}) {
            toy::run r;
            r.how = how(s);
            r.go();
            check_complete(r, 96);
            for (std::size_t b = 0; b < r.steps.size(); ++b)
                for (const auto& c : r.steps[b].consumed) {
                    CHECK(c.ticket.sample / 8 == b);
                    CHECK(c.start == std::max<version_t>(0, static_cast<version_t>(b) - k));
                    CHECK(c.versions.oldest == c.start);
                    CHECK(c.versions.newest == c.start);
                }
        }
}

namespace {
/// The toy's work in virtual time.
struct timed_model {
    simulated_rollout rollout(std::int32_t) { return simulated_rollout({.step = 0.01}, 4); }
    void start(simulated_rollout& w, const ticket& t) { w.start(t, static_cast<double>(toy::length_of(t.sample)), 1); }
    double teacher(std::uint64_t, std::int32_t, std::span<const ticket> t) { return 0.01 * double(t.size()); }
    double learner(std::uint64_t, const weights&, std::span<const ticket>) { return 0.1; }
    double sync(std::int32_t, const weights&) { return 0.005; }
};
struct consumed_log {
    std::vector<std::set<sample_t>> batches;
    std::multiset<sample_t> consumed;
    void event(double, const opd::sched::event&, const actions& out, const scheduler&) {
        for (const action& a : out.items)
            if (a.what == action::kind::step) {
                batches.emplace_back();
                for (const auto& c : out.consumed_by(a)) {
                    batches.back().insert(c.ticket.sample);
                    consumed.insert(c.ticket.sample);
                }
            }
    }
};
} // namespace

TEST_CASE("threads consume what virtual time consumes") {
    for (const auto& [name, schedule] : all_schedules()) {
        if (name.find("drop") != std::string::npos) continue; // what is dropped depends on timing
        CAPTURE(name);
        const settings s = how(schedule);
        consumed_log log;
        virtual_driver<timed_model, consumed_log> v(s, {}, &log);
        v.bring_up(stage::rollout, 2, 4);
        v.bring_up(stage::teacher, 1);
        v.bring_up(stage::learner, 1);
        REQUIRE(v.run());
        toy::run r;
        r.how = s;
        r.go();
        CHECK(std::multiset<sample_t>(r.consumed.begin(), r.consumed.end()) == log.consumed);
        const plan p = plan_of(s);
        if (!p.streaming || p.depth == 0 || p.policy == staleness_policy::in_order) CHECK(r.batches == log.batches);
    }
}

TEST_CASE("groups of what is drawn by two versions: keep mode records both") {
    toy::run r;
    r.how = how(streaming(4), 4, 400);
    r.rollouts = 1;
    r.shared->held = {3}; // so that an update falls into it
    r.shared->fault = [&](const std::string& call, int, sample_t version, std::stop_token) {
        if (call == "train" && version == 0) r.shared->await_token(3, 0);
        return wrong::nothing;
    };
    r.on_step = [&](toy::driver&, const toy::step& s) {
        if (s.version == 2) r.shared->await_token(3, 1), r.shared->release(3);
    };
    r.go();
    check_complete(r, 400);
    std::int64_t mixed = 0;
    for (const toy::step& s : r.steps)
        for (const auto& c : s.consumed) {
            CHECK(std::is_sorted(c.rolled->versions.begin(), c.rolled->versions.end()));
            CHECK(c.versions.newest <= s.version - 1);
            mixed += c.versions.oldest < c.versions.newest;
        }
    CHECK(mixed > 0);
}

// --- faults ---------------------------------------------------------------------------------------------------------

TEST_CASE("a train step that fails for good costs its whole batch, and the run goes on") {
    for (const schedule& s : {serial, schedule(step_off{2}), schedule(controlled{1})}) {
        toy::run r;
        r.how = how(s, 4, 16);
        r.shared->fault = once("train", throwing("out of memory"), 2);
        r.go();
        check_clean(r);
        CHECK(r.report.completed);
        CHECK(r.report.totals.consumed == 16);
        CHECK(r.report.totals.failed_by[static_cast<std::size_t>(failure::learner)] == 4);
        CHECK(r.report.totals.empty_batches == 1);
    }
}

TEST_CASE("a stage that throws once: the work is done again") {
    for (const std::string call : {"start", "step", "install", "score", "train"}) {
        for (const int n : {1, 2, 7}) {
            CAPTURE(call);
            CAPTURE(n);
            toy::run r;
            r.how = how(streaming(2));
            r.how.learner_attempts = 2;
            if (call == "install") r.rollouts = 1; // another that joins may be past it: then it is nobody's fault
            r.shared->fault = once(call, throwing("broken " + call), n);
            r.go();
            check_clean(r);
            CHECK(r.report.completed);
            CHECK(r.consumed_all(96));
            CHECK(r.report.exceptions == 1);
            CHECK(r.first_exception() == "broken " + call);
            REQUIRE(r.report.first_exception_at.has_value());
            CHECK(r.report.first_exception_at->stage == (call == "score"   ? stage::teacher
                                                         : call == "train" ? stage::learner
                                                                           : stage::rollout));
            if (call != "install") CHECK(r.report.totals.retries >= 1);
        }
    }
}

TEST_CASE("a failure of abort() leaves the sequence aborted") {
    toy::run r;
    // rollout is the slow stage, so that at every update some sequence runs
    r.how = how(streaming(8, staleness_policy::capacity, weight_update::abort), 1, 200);
    const auto broken = once("abort", throwing("broken abort"));
    r.shared->fault = [=, fired = std::make_shared<std::atomic<bool>>(false)](const std::string& call, int worker,
                                                                              sample_t sample, std::stop_token stop) {
        if (call == "abort") *fired = true;
        if (call == "step" && !*fired) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        return broken(call, worker, sample, stop);
    };
    r.rollouts = 1;
    r.lanes = 2;
    r.go();
    check_clean(r);
    CHECK(r.report.exceptions == 1);
    CHECK(r.first_exception() == "broken abort");
    CHECK(r.report.completed);
    CHECK(r.consumed_all(200));
}

TEST_CASE("a sequence that fails too often fails for good, alone") {
    for (const std::string call : {"start", "step", "score"}) {
        CAPTURE(call);
        toy::run r;
        r.how = how(streaming(2));
        r.how.rollout_attempts = r.how.teacher_attempts = 3;
        r.how.teacher_batch = 1;
        r.rollouts = 4;
        r.lanes = 1;
        r.shared->fault = [&](const std::string& c, int, sample_t s, std::stop_token) {
            if (c == call && s == 21) throw toy::failed("no 21");
            return wrong::nothing;
        };
        r.go();
        check_clean(r);
        CHECK(r.report.completed);
        CHECK(r.report.exceptions == 3);
        REQUIRE(r.report.discarded.size() == 1);
        CHECK(r.report.discarded[0].ticket.sample == 21);
        CHECK(r.report.discarded[0].why == (call == "score" ? failure::teacher : failure::rollout));
        CHECK(r.consumed.size() == 96); // another is drawn in its place
        CHECK(std::count(r.consumed.begin(), r.consumed.end(), 21) == 0);
    }
}

TEST_CASE("a train step that fails for good takes its batch with it") {
    toy::run r;
    r.how = how(streaming(1));
    r.shared->fault = once("train", throwing("diverged"), 3);
    r.go();
    check_clean(r);
    CHECK(r.report.completed);
    CHECK(r.report.totals.failed_by[static_cast<std::size_t>(failure::learner)] == 8);
    CHECK(r.report.discarded.size() == 8);
    CHECK(r.report.totals.consumed == 96);
}

TEST_CASE("stop_on_error stops at the first exception") {
    toy::run r;
    r.how = how(streaming(2), 8, 0);
    r.options.stop_on_error = true;
    r.shared->fault = once("score", throwing("first"), 5);
    r.go();
    check_clean(r);
    CHECK(!r.report.completed);
    CHECK(r.first_exception() == "first");
}

TEST_CASE("wrong answers: double, a stranger's, versions from the future, partial, miscounted, forgotten") {
    const auto with = [](wrong w, const std::string& call) {
        toy::run r;
        r.how = how(streaming(2));
        r.shared->fault = once(call, doing(w), 4);
        r.go();
        CHECK(r.report.completed);
        CHECK(r.report.totals.consumed == 96);
        CHECK(r.consumed_all(96));
        check_clean(r);
        return r;
    };
    // the fault must hit a step that finishes a sequence: sample 0 has one token
    const auto at_end = [&](wrong w) {
        toy::run r;
        r.how = how(streaming(2));
        r.shared->forgetful = w == wrong::forgets;
        r.shared->fault = [w, done = std::make_shared<std::atomic<bool>>(false)](const std::string& c, int, sample_t s,
                                                                                 std::stop_token) {
            return c == "step" && s == 17 && !done->exchange(true) ? w : wrong::nothing;
        };
        r.go();
        CHECK(r.report.completed);
        CHECK(r.consumed_all(96));
        check_clean(r);
        return r;
    };
    const toy::run twice = at_end(wrong::twice);
    CHECK(twice.report.totals.duplicates == 1);
    CHECK(twice.report.exceptions == 0);
    const toy::run stranger = at_end(wrong::stranger);
    CHECK(stranger.report.exceptions == 1);
    const toy::run future = at_end(wrong::future);
    CHECK(future.report.exceptions == 1);
    CHECK(future.report.totals.retries == 1);
    const toy::run forgotten = at_end(wrong::forgets);
    CHECK(forgotten.report.exceptions == 1);
    CHECK(forgotten.report.totals.retries >= 1);
    const toy::run partly = with(wrong::partly, "score");
    CHECK(partly.report.exceptions == 0);
    CHECK(partly.report.totals.retries == 1);
    const toy::run miscounted = with(wrong::miscounts, "score");
    CHECK(miscounted.report.exceptions == 1);
}

TEST_CASE("a call past its deadline: its worker is lost, others do the work, and it comes back with its late answer") {
    for (const std::string call : {"step", "install", "score", "train"}) {
        CAPTURE(call);
        toy::world::gate hung;
        std::atomic<int> hangs = -1; // which worker
        toy::run r;
        r.how = how(streaming(2), 8, 0);
        r.how.abort_deadline = r.how.sync_deadline = r.how.teacher_deadline = r.how.learner_deadline = 0.05;
        r.how.rollout_deadline = call == "score" ? 0 : 0.05; // its late answers are counted
        r.how.learner_attempts = 100;
        r.how.fruitless_steps = 0; // on a busy machine nobody may be in time for long
        r.teachers = 2;
        r.shared->fault = [&, n = std::make_shared<std::atomic<int>>(call == "install" ? 5 : 9)](
                              const std::string& c, int worker, sample_t, std::stop_token stop) {
            if (c != call || n->fetch_sub(1) != 1) return wrong::nothing;
            hangs = worker;
            if (call == "train") // no steps without a learner: it notices that it is not wanted any more
                wait_for(stop);
            else
                hung.wait();
            return wrong::nothing;
        };
        const stage at = call == "score" ? stage::teacher : call == "train" ? stage::learner : stage::rollout;
        std::atomic<unsigned> gone = 0; // a bit for each worker of the stage
        bool back = false;
        int after = 0;
        r.on_event = [&](const event& e, const actions& out, const scheduler&) {
            if (e.what == event::kind::worker_up && e.stage == at && e.worker != hangs) gone &= ~(1u << e.worker);
            for (const action& a : out.items)
                if (a.what == action::kind::lost && a.stage == at) gone |= 1u << a.worker;
        };
        r.on_step = [&](toy::driver& d, const toy::step&) {
            // on a busy machine others are lost, too, perhaps before they begin what they were given
            if (hangs < 0 || !(gone >> hangs & 1u)) return;
            if (++after == 3) hung.open();
            if (after < 3 || back || d.workers(stage::rollout) < 2 || d.workers(stage::teacher) < 2) return;
            back = true;
            d.close();
        };
        r.go();
        CHECK(back);
        CHECK(r.report.totals.lost_workers >= 1);
        CHECK(r.report.completed);
        CHECK(r.report.exceptions == 0); // of the late calls none counts
        check_clean(r);
        std::set<sample_t> distinct(r.consumed.begin(), r.consumed.end());
        CHECK(distinct.size() == r.consumed.size());
        if (call == "score") CHECK(r.report.totals.late >= 1);
        if (call == "score" && r.report.totals.lost_workers == 1)
            CHECK(r.report.totals.late == 1); // a slow machine: more
    }
}

TEST_CASE("workers that die and return") {
    for (const stage s : {stage::rollout, stage::teacher, stage::learner}) {
        CAPTURE(name_of(s));
        toy::run r;
        r.how = how(streaming(2), 8, 240);
        r.how.learner_attempts = r.how.teacher_attempts = r.how.rollout_attempts = 1000;
        r.rollouts = 2;
        r.on_step = [&](toy::driver& d, const toy::step& at) {
            if (at.version % 4 == 1) d.kill(s, 0);
            if (at.version % 4 == 1 && s != stage::rollout) d.revive(s, 0); // nothing would go on
            if (at.version % 4 == 3) d.revive(s, 0);
        };
        r.go();
        check_clean(r);
        CHECK(r.report.completed);
        CHECK(r.report.exceptions == 0);
        CHECK(r.consumed_all(240));
    }
}

TEST_CASE("nothing is heard of a worker that was killed, not even that it is late") {
    for (const std::string call : {"step", "score"}) {
        CAPTURE(call);
        const stage s = call == "step" ? stage::rollout : stage::teacher;
        toy::world::gate busy, killed; // without the latter the other may do all
        toy::run r;
        r.how = how(streaming(2), 8, 400);
        r.teachers = 2;
        r.shared->fault = [&](const std::string& c, int worker, sample_t, std::stop_token) {
            if (c == call) (worker == 0 ? busy : killed).wait();
            return wrong::nothing;
        };
        std::jthread killer;
        r.prepare = [&](toy::driver& d) {
            killer = std::jthread([&] {
                busy.await_waiting();
                d.kill(s, 0);
                busy.open();
                killed.open();
            });
        };
        r.go();
        check_clean(r);
        CHECK(r.report.completed);
        CHECK(r.consumed_all(400));
        CHECK(r.report.totals.late + r.report.totals.duplicates == 0);
    }
}

TEST_CASE("a worker that returns during a train step gets the weights after it, a late answer is nobody's") {
    toy::run r;
    r.how = how(streaming(2), 8, 160);
    toy::driver* self = nullptr;
    r.prepare = [&](toy::driver& d) { self = &d; };
    r.shared->fault = [&](const std::string& call, int, sample_t, std::stop_token) {
        if (call != "train") return wrong::nothing;
        self->kill(stage::rollout, 0);
        self->revive(stage::rollout, 0);
        for (int i = 0; i < 100; ++i) std::this_thread::yield(); // time to do it wrong
        return wrong::nothing;
    };
    r.how.rollout_attempts = 1000;
    r.go();
    check_clean(r);
    CHECK(r.report.completed);
    CHECK(r.report.exceptions == 0); // nobody was told to install what was not the newest
    CHECK(r.consumed_all(160));
}

TEST_CASE("an attempt past its deadline answers late: its successor's payload is not its") {
    toy::world::gate hung, again;
    toy::run r;
    r.how = how(serial, 4, 0);
    r.how.rollout_attempts = 1000;
    r.how.rollout_deadline = 0.03; // and no abort_deadline: the worker is not given up
    r.lanes = 1;
    std::atomic<int> attempts = 0;
    std::atomic<bool> worked[2] = {false, false};
    std::atomic<sample_t> hangs = 0; // of one token; the first that is drawn when both workers work
    r.shared->fault = [&](const std::string& call, int worker, sample_t s, std::stop_token) {
        if (call != "step") return wrong::nothing;
        worked[worker] = true;
        sample_t none = 0;
        if (s > 0 && s % 17 == 0 && worked[0] && worked[1]) hangs.compare_exchange_strong(none, s);
        if (s == 0 || s != hangs) return wrong::nothing;
        const int n = ++attempts;
        if (n == 1) hung.wait(); // until its successor runs
        if (n == 2) {
            hung.open();
            again.wait(); // until the late answer was taken
        }
        return wrong::nothing;
    };
    r.on_event = [&](const event& e, const actions&, const scheduler& s) {
        if (e.what == event::kind::rolled_out && e.ticket.sample == hangs && s.totals().late > 0) again.open();
    };
    r.on_step = [&](toy::driver& d, const toy::step& s) {
        for (const auto& c : s.consumed)
            if (hangs > 0 && c.ticket.sample == hangs) d.close();
    };
    r.go();
    check_clean(r);
    CHECK(r.report.completed);
    CHECK(attempts >= 2);
    CHECK(r.report.totals.late >= 1);
    CHECK(r.consumed_all(static_cast<sample_t>(r.report.totals.admitted)));
}

TEST_CASE("a worker whose install() always fails stays away") {
    toy::world::gate gone; // the other begins when it is
    toy::run r;
    r.how = how(streaming(2));
    r.shared->fault = [&](const std::string& call, int worker, sample_t, std::stop_token) {
        if (call == "install" && worker == 0) throw toy::failed("no room");
        if (call == "install") gone.wait();
        return wrong::nothing;
    };
    r.on_event = [&, downs = 0](const event& e, const actions&, const scheduler&) mutable {
        downs += e.what == event::kind::worker_down && e.worker == 0;
        if (downs == 3) gone.open();
    };
    std::int32_t left = 0;
    r.on_step = [&](toy::driver& d, const toy::step&) { left = d.workers(stage::rollout); };
    r.go();
    check_clean(r);
    CHECK(r.report.completed);
    CHECK(r.consumed_all(96));
    CHECK(r.report.exceptions == 3);
    CHECK(left == 1);
}

TEST_CASE("a worker whose install() fails now and then stays") {
    toy::run r;
    r.how = how(streaming(2));
    r.options.stranded_seconds = 30;
    r.rollouts = 1; // without it nothing goes on
    std::atomic<incarnation_t> life = 0;
    r.on_event = [&](const event& e, const actions&, const scheduler&) {
        if (e.what == event::kind::worker_up && e.stage == stage::rollout) life = e.incarnation;
    };
    // every other life fails at once, the others five versions later: of the three that there can be without it none
    // counts
    r.shared->fault = [&, first = version_t{0}](const std::string& call, int, sample_t about, std::stop_token) mutable {
        if (call != "install") return wrong::nothing;
        const auto version = static_cast<version_t>(about);
        if (life % 2 != 0) first = version;
        if (life % 2 != 0 || version >= first + 5) throw toy::failed("no room");
        return wrong::nothing;
    };
    r.go();
    check_clean(r);
    CHECK(r.report.completed);
    CHECK(r.consumed_all(96));
    CHECK(r.report.exceptions > 3);
}

TEST_CASE("a stage without workers stops the run, if that is wished") {
    toy::run r;
    r.how = how(streaming(2), 8, 0);
    r.options.stranded_seconds = 0.02;
    r.on_step = [&](toy::driver& d, const toy::step& s) {
        if (s.version == 3) d.kill(stage::teacher, 0);
    };
    r.go();
    check_clean(r);
    CHECK(!r.report.completed);
    CHECK(r.first_exception() == "opd: no teacher worker is left");
    CHECK(r.report.totals.failed_by[static_cast<std::size_t>(failure::stopped)] ==
          static_cast<std::int64_t>(r.report.discarded.size()));
}

TEST_CASE("a stage whose only worker came back in time has workers") {
    toy::run r;
    r.how = how(streaming(2));
    r.how.teacher_attempts = 1000;
    r.options.stranded_seconds = 0.5;
    r.on_step = [&](toy::driver& d, const toy::step& s) {
        if (s.version == 1) d.kill(stage::teacher, 0), d.revive(stage::teacher, 0);
        if (s.version == 3) std::this_thread::sleep_for(std::chrono::milliseconds(700));
    };
    r.go();
    check_clean(r);
    CHECK(r.report.completed);
    CHECK(r.consumed_all(96));
}

TEST_CASE("a hook that throws stops the run") {
    toy::run r;
    r.how = how(streaming(2), 8, 0);
    r.on_step = [&](toy::driver&, const toy::step& s) {
        if (s.version == 2) throw toy::failed("disk full");
    };
    r.go();
    check_clean(r);
    CHECK(!r.report.completed);
    CHECK(r.first_exception() == "disk full");
    CHECK(!r.report.first_exception_at);
}

// --- the end --------------------------------------------------------------------------------------------------------

TEST_CASE("a request to stop drains: everything that was admitted is consumed") {
    for (const schedule& s : {serial, schedule(step_off{2}), schedule(streaming(4))}) {
        toy::run r;
        r.how = how(s, 8, 0);
        std::stop_source stop;
        r.stop = stop.get_token();
        r.on_step = [&](toy::driver&, const toy::step& at) {
            if (at.version == 5) stop.request_stop();
        };
        r.go();
        check_clean(r);
        CHECK(!r.report.completed);
        CHECK(r.report.discarded.empty());
        CHECK(r.consumed_all(static_cast<sample_t>(r.report.totals.admitted)));
    }
}

TEST_CASE("stop_now gives up what is outstanding and says what and where") {
    toy::run r;
    r.how = how(streaming(4), 8, 0);
    r.on_step = [&](toy::driver& d, const toy::step& at) {
        if (at.version == 5) d.stop_now();
    };
    r.go();
    check_clean(r);
    CHECK(!r.report.completed);
    CHECK(r.report.totals.failed == static_cast<std::int64_t>(r.report.discarded.size()));
    std::set<sample_t> seen(r.consumed.begin(), r.consumed.end());
    for (const discarded_sequence& d : r.report.discarded) {
        CHECK(d.why == failure::stopped);
        CHECK(seen.insert(d.ticket.sample).second);
    }
    CHECK(static_cast<std::int64_t>(seen.size()) == r.report.totals.admitted);
}

TEST_CASE("a stage that hangs bounds nobody: the drain ends, the thread is left behind and named") {
    for (const std::string call : {"step", "score", "train", "install"}) {
        CAPTURE(call);
        toy::world::gate hung;
        toy::run r;
        r.how = how(streaming(2), 8, 0);
        r.options.drain_seconds = 0.1;
        r.options.shutdown_seconds = 0.1;
        if (call == "install") r.rollouts = 1; // nobody waits for another that joins
        r.shared->fault = once(
            call,
            [&] {
                hung.wait();
                return wrong::nothing;
            },
            call == "train" ? 2 : 5);
        std::stop_source stop;
        r.stop = stop.get_token();
        std::jthread asker;
        r.prepare = [&](toy::driver&) {
            asker = std::jthread([&] {
                hung.await_waiting();
                stop.request_stop();
            });
        };
        r.go(); // which would never return if it waited for that thread
        CHECK(r.complaints() == "");
        CHECK(!r.report.completed);
        const stage at = call == "score" ? stage::teacher : call == "train" ? stage::learner : stage::rollout;
        CHECK(std::any_of(r.report.left_behind.begin(), r.report.left_behind.end(), // on a busy machine others, too
                          [&](const worker_name& w) { return w.stage == at; }));
        CHECK(r.report.totals.admitted == r.report.totals.consumed + r.report.totals.failed);
        CHECK(r.report.totals.failed == static_cast<std::int64_t>(r.report.discarded.size()));
        CHECK(r.report.discarded.size() > 0);
        hung.open(); // the thread still has its stage and the driver's state
        r.shared->await_stages_gone();
        CHECK(r.complaints() == "");
    }
}

TEST_CASE("a stage that heeds its stop token is not left behind") {
    for (const std::string call : {"step", "score", "train"}) {
        CAPTURE(call);
        toy::run r;
        r.how = how(streaming(2), 8, 0);
        r.options.drain_seconds = 0.02;
        toy::world::gate started;
        std::stop_source stop;
        r.stop = stop.get_token();
        r.shared->fault = [&, hung = std::make_shared<std::atomic<bool>>(false)](const std::string& c, int, sample_t,
                                                                                 std::stop_token token) {
            if (c != call || hung->exchange(true)) return wrong::nothing;
            stop.request_stop();
            wait_for(token);
            throw toy::failed("stopped");
        };
        r.go();
        check_clean(r);
        CHECK(r.report.exceptions == 0); // it was asked to stop
        CHECK(!r.report.completed);
    }
}

TEST_CASE("close: what is outstanding is finished, the run is complete") {
    toy::run r;
    r.how = how(streaming(4), 8, 0);
    r.on_step = [&](toy::driver& d, const toy::step& at) {
        if (at.version == 7) d.close();
    };
    r.go();
    check_complete(r, static_cast<sample_t>(r.report.totals.admitted));
    CHECK(r.consumed_all(static_cast<sample_t>(r.report.totals.admitted)));
}

TEST_CASE("pause, resume and resize") {
    toy::run r;
    r.how = how(streaming(4), 8, 160);
    std::int64_t at_pause = -1;
    std::atomic<bool> paused = false;
    std::jthread patience; // resumes once what ran at the pause is done; how many that are is the threads' affair
    r.prepare = [&](toy::driver& d) {
        patience = std::jthread([&](std::stop_token end) {
            while (!end.stop_requested() && !(paused && d.where().rollout == 0))
                std::this_thread::sleep_for(std::chrono::milliseconds(1));
            d.resume();
        });
    };
    r.finished = [&] { patience = {}; };
    r.on_event = [&](const event& e, const actions& out, const scheduler& s) {
        if (e.what == event::kind::pause) paused = true, at_pause = s.totals().admitted;
        if (e.what == event::kind::resume) paused = false;
        for (const action& a : out.items) CHECK(!(paused && a.what == action::kind::start));
        if (paused) CHECK(s.totals().admitted == at_pause);
    };
    r.on_step = [&](toy::driver& d, const toy::step& at) {
        if (at.version == 3) d.pause();
        if (at.version == 8) d.resize(8);
        if (at.version == 7) CHECK_THROWS_AS(d.resize(1000), opd::invalid_input);
        if (at.version >= 16) CHECK(d.where().outstanding() <= 8);
    };
    r.go();
    check_complete(r, 160);
    CHECK(at_pause > 0);
}

// --- snapshots ------------------------------------------------------------------------------------------------------

TEST_CASE("a run that is cut at random steps and resumed consumes everything once") {
    std::mt19937 random(7);
    for (const auto& [name, schedule] : all_schedules()) {
        if (name.find("drop") != std::string::npos) continue;
        CAPTURE(name);
        constexpr sample_t n = 160;
        std::vector<sample_t> consumed;
        std::optional<toy::snapshot> saved;
        bool done = false;
        std::int64_t steps = 0;
        for (int life = 0; life < 40 && !done; ++life) {
            toy::run r;
            r.how = how(schedule, 8, static_cast<index_t>(n));
            r.from = saved ? &*saved : nullptr;
            r.options.checkpoint_every = 1 + static_cast<index_t>(random() % 2);
            const version_t first = saved ? saved->weights.version : 0;
            const auto cut = first + static_cast<version_t>(random() % 5);
            std::optional<toy::snapshot> next = saved;
            r.on_step = [&](toy::driver& d, const toy::step& s) {
                if (s.version >= cut) d.stop_now(); // as good as a kill: what is outstanding is lost with the process
            };
            r.on_checkpoint = [&](toy::driver&, toy::snapshot s) { next = std::move(s); };
            r.go();
            CHECK(r.complaints() == "");
            done = r.report.completed;
            // what the next life does not know of did not happen
            for (const toy::step& s : r.steps)
                if (done || (next && s.version <= next->weights.version)) {
                    ++steps;
                    for (const auto& c : s.consumed) consumed.push_back(c.ticket.sample);
                }
            saved = std::move(next);
        }
        CHECK(done);
        std::sort(consumed.begin(), consumed.end());
        REQUIRE(consumed.size() == n);
        for (sample_t i = 0; i < n; ++i) CHECK(consumed[i] == i);
        CHECK(steps == static_cast<std::int64_t>(n) / 8);
    }
}

TEST_CASE("a snapshot holds every outstanding sequence, and prefixes go on where they were") {
    constexpr sample_t n = 400;
    std::map<sample_t, std::vector<version_t>> prefixes;
    std::map<sample_t, version_t> starts;
    std::optional<toy::snapshot> saved;
    toy::run first;
    first.how = how(streaming(4), 4, n);
    first.rollouts = 3;
    first.shared->held = {100, 103}; // so that some run at every checkpoint after their start
    first.on_checkpoint = [&](toy::driver& d, toy::snapshot s) {
        using place = outstanding_sequence::place;
        for (const auto& e : s.sequences) {
            if (e.where >= place::queued)
                CHECK((e.sequence && e.sequence->versions.size() >= toy::length_of(e.ticket.sample)));
            if (e.where >= place::ready) CHECK(e.scored);
            if (e.where == place::rollout)
                CHECK((e.start == s.weights.version || e.sequence)); // started since, or exported
        }
        if (s.weights.version < 60) return;
        if (!saved) saved = std::move(s);
        d.stop_now();
    };
    first.on_step = [&](toy::driver&, const toy::step& s) { // two versions draw of both, however long that takes
        for (const sample_t held : first.shared->held)
            if (s.version == 45 || s.version == 50) first.shared->await_token(held, s.version == 45 ? 0 : 50);
    };
    first.go();
    CHECK(first.complaints() == "");
    REQUIRE(saved);
    for (const auto& e : saved->sequences)
        if (e.where == outstanding_sequence::place::rollout && e.sequence) {
            prefixes[e.ticket.sample] = e.sequence->versions;
            starts[e.ticket.sample] = e.start;
        }
    REQUIRE(prefixes.count(100) == 1);
    REQUIRE(prefixes.count(103) == 1);
    CHECK(prefixes[100].back() > prefixes[100].front());

    toy::run second;
    second.how = first.how;
    second.from = &*saved;
    second.shared->was_held = first.shared->held;
    second.rollouts = 1; // other workers than before
    second.go();
    CHECK(second.complaints() == "");
    CHECK(second.report.completed);
    CHECK(second.shared->resumed == static_cast<std::int64_t>(prefixes.size()));
    std::size_t found = 0;
    for (const toy::step& s : second.steps)
        for (const auto& c : s.consumed)
            if (const auto p = prefixes.find(c.ticket.sample); p != prefixes.end()) {
                ++found;
                CHECK(std::equal(p->second.begin(), p->second.end(), c.rolled->versions.begin()));
                CHECK(c.start == starts[c.ticket.sample]);
            }
    CHECK(found == prefixes.size());

    auto damaged = *saved;
    damaged.sequences.pop_back();
    second.from = &damaged;
    CHECK_THROWS_AS(second.go(), opd::invalid_input);
}

TEST_CASE("after a drained or completed run the snapshot of its last step can be gone on from") {
    std::optional<toy::snapshot> saved;
    toy::run first;
    first.how = how(streaming(2), 8, 80);
    first.on_checkpoint = [&](toy::driver&, toy::snapshot s) { saved = std::move(s); };
    first.go();
    check_complete(first, 80);
    REQUIRE(saved);
    CHECK(saved->weights.version == 10);

    toy::run same; // nothing is left to do
    same.how = first.how;
    same.from = &*saved;
    same.go();
    CHECK(same.report.completed);
    CHECK(same.consumed.empty());

    toy::run more;
    more.how = how(streaming(2), 8, 120);
    more.from = &*saved;
    more.go();
    CHECK(more.complaints() == "");
    CHECK(more.report.completed);
    CHECK(std::multiset<sample_t>(more.consumed.begin(), more.consumed.end()).size() == 40);
    CHECK(*std::min_element(more.consumed.begin(), more.consumed.end()) == 80);
}

TEST_CASE("checkpoints: every so many versions, and on request") {
    std::vector<version_t> at;
    toy::run r;
    r.how = how(streaming(2));
    r.options.checkpoint_every = 5;
    r.on_step = [&](toy::driver& d, const toy::step& s) {
        if (s.version == 6) d.request_checkpoint();
    };
    r.on_checkpoint = [&](toy::driver& d, toy::snapshot s) {
        CHECK(s.weights.version == d.version());
        at.push_back(s.weights.version);
    };
    r.go();
    check_complete(r, 96);
    CHECK(at.size() == 3);
    CHECK(at.front() == 5);
    CHECK((at.size() < 2 || (at[1] > 6 && at[1] <= 8)));
    CHECK(at.back() == 10);
}

// --- metrics --------------------------------------------------------------------------------------------------------

TEST_CASE("the recorder's figures are those of the run") {
    for (const schedule& s : {serial, schedule(step_off{2}), schedule(streaming(4))}) {
        run_metrics metrics(recorded());
        trace timeline;
        recorder rec(metrics, &timeline);
        rec.trace_sequences = true;
        std::int64_t lines = 0;
        rec.after_step = [&](version_t v, double) {
            ++lines;
            CHECK(metrics.lags.version() == v);
        };
        toy::driver d(how(s));
        auto world = std::make_shared<toy::world>();
        // the toy's stages compare starts with what the scheduler says; here nobody tells them
        d.add_rollout(std::make_shared<toy::rollout>(world, 0, 4), 4);
        const bool alone =
            std::holds_alternative<opd::sched::sync>(s); // who joins while others work overlaps with them
        if (!alone) d.add_rollout(std::make_shared<toy::rollout>(world, 1, 4), 4);
        d.add_teacher(std::make_shared<toy::teacher>(world, 0));
        d.set_learner(std::make_shared<toy::learner>(world));
        d.observe(rec);
        const run_report report = d.run();
        if (report.first_exception) std::rethrow_exception(report.first_exception);
        CHECK(report.completed);
        CHECK(lines == report.version);
        CHECK(metrics.sequences() == report.totals.consumed);
        CHECK(metrics.tokens.response_tokens() == report.totals.consumed_tokens);
        CHECK(metrics.tokens.steps() == report.version);
        CHECK(metrics.lags.updates() == report.totals.updates);
        REQUIRE(metrics.stages.overlap());
        CHECK(*metrics.stages.overlap() > 0);
        CHECK(*metrics.stages.overlap() <= 3);
        if (alone) CHECK(*metrics.stages.overlap() <= 1.05);
        CHECK(metrics.stages.wall_time() <= report.seconds);
        CHECK(timeline.spans() >= static_cast<std::size_t>(report.totals.consumed));
    }
}

TEST_CASE("a scheduler's state may be read by several threads at once") {
    scheduler s(how(streaming(2), 4, 0));
    actions out;
    s.on(event::up(stage::rollout, 0, 3).of_life(1), 0, out);
    s.on(event::synced(0, 0).of_life(1), 0, out);
    s.on(event::up(stage::rollout, 1, 2).of_life(1), 0, out);
    s.on(event::synced(1, 0).of_life(1), 0, out);
    s.on(event::down(stage::rollout, 0).of_life(1), 0, out); // some wait now, behind a gap
    s.on(event::up(stage::rollout, 2, 1).of_life(1), 0, out);
    s.on(event::synced(2, 0).of_life(1), 0, out);
    const scheduler& read_only = s;
    std::string bytes[4];
    {
        std::vector<std::jthread> readers;
        for (std::string& b : bytes)
            readers.emplace_back([&] {
                for (int i = 0; i < 50; ++i) b = read_only.snapshot();
            });
    }
    for (const std::string& b : bytes) CHECK(b == bytes[0]);
}

TEST_CASE("a recorder may join a resumed run") {
    std::optional<toy::snapshot> saved;
    toy::run first;
    first.how = how(streaming(2), 8, 160);
    first.on_checkpoint = [&](toy::driver& d, toy::snapshot s) {
        if (s.weights.version < 4) return;
        if (!saved) saved = std::move(s);
        d.stop_now();
    };
    first.go();
    REQUIRE(saved);
    run_metrics metrics(recorded());
    recorder rec(metrics);
    toy::run second;
    second.how = first.how;
    second.from = &*saved;
    second.on_event = [&](const event& e, const actions& out, const scheduler& s) {
        rec.event(steady_seconds(), e, out, s);
    };
    second.go();
    check_clean(second);
    CHECK(second.report.completed);
    CHECK(metrics.lags.version() == second.report.version);
    CHECK(metrics.sequences() == static_cast<std::int64_t>(second.consumed.size()));
}

TEST_CASE("an observer that throws stops nothing") {
    toy::run r;
    r.how = how(streaming(2), 8, 80);
    std::int64_t seen = 0;
    r.on_event = [&](const event&, const actions&, const scheduler&) {
        throw toy::failed("no room on the dashboard " + std::to_string(seen++));
    };
    r.go();
    CHECK(r.complaints() == "");
    CHECK(r.report.completed);
    CHECK(r.consumed_all(80));
    CHECK(r.report.exceptions == 0);
    CHECK(r.report.observer_exceptions == seen);
    CHECK_THROWS_WITH_AS(std::rethrow_exception(r.report.first_observer_exception), "no room on the dashboard 0",
                         toy::failed);
}

TEST_CASE("misuse is refused") {
    toy::driver d(how(serial));
    auto world = std::make_shared<toy::world>();
    CHECK_THROWS_AS(d.run(), opd::invalid_input);
    CHECK_THROWS_AS(d.add_rollout(nullptr, 1), opd::invalid_input);
    CHECK_THROWS_AS(d.add_rollout(std::make_shared<toy::rollout>(world, 0, 1), 0), opd::invalid_input);
    d.add_rollout(std::make_shared<toy::rollout>(world, 0, 4), 4);
    d.add_teacher(std::make_shared<toy::teacher>(world, 0));
    d.set_learner(std::make_shared<toy::learner>(world));
    CHECK_THROWS_AS(d.kill(stage::teacher, 1), opd::invalid_input);
    CHECK(d.run().completed);
    CHECK_THROWS_AS(d.run(), std::logic_error);
    CHECK_THROWS_AS(d.add_teacher(std::make_shared<toy::teacher>(world, 0)), std::logic_error);
    CHECK_THROWS_AS(toy::driver(how(serial), thread_options{.drain_seconds = -1}), opd::invalid_input);
}

TEST_CASE("workers join a run, drain and leave, and nothing is lost") {
    toy::run r;
    r.how = how(streaming(2), 8, 400);
    r.options.checkpoint_every = 0;
    std::atomic<int> joined = 0, drained = 0;
    r.on_step = [&](toy::driver& d, const toy::step& s) {
        if (s.version == 5) {
            CHECK(d.add_rollout(std::make_shared<toy::rollout>(r.shared, 2, 3), 3) == 2);
            CHECK(d.add_teacher(std::make_shared<toy::teacher>(r.shared, 1)) == 1);
            ++joined;
        }
        if (s.version == 12) {
            d.set_slots(stage::rollout, 0, 0);
            d.set_slots(stage::rollout, 1, 0); // all is the third's
            d.set_slots(stage::teacher, 0, 0);
            CHECK_THROWS_AS(d.set_slots(stage::rollout, 0, 5), opd::invalid_input);
            CHECK_THROWS_AS(d.set_slots(stage::learner, 0, 0), opd::invalid_input);
            ++drained;
        }
        if (s.version == 25) d.set_slots(stage::rollout, 0, 2), d.set_slots(stage::rollout, 1, 4);
        if (s.version <= 16 || s.version > 25) return;
        for (const auto& c : s.consumed) // what was started three versions after it
            if (c.start >= 16) CHECK(c.ticket.worker == 2);
    };
    r.go();
    check_complete(r, 400);
    CHECK(joined == 1);
    CHECK(drained == 1);
    CHECK(r.report.totals.preempted == 0);
    bool third = false;
    for (const toy::step& s : r.steps)
        for (const auto& c : s.consumed) third |= c.ticket.worker == 2;
    CHECK(third);
}

TEST_CASE("a budget of tokens: sequences go round the workers, and no token is drawn twice") {
    for (const auto& [name, schedule] : all_schedules()) {
        CAPTURE(name);
        toy::run r;
        r.how = how(schedule, 8, 96);
        r.shared->budget = 3;
        r.go();
        check_complete(r, 96);
        CHECK(r.report.totals.parked > 0);
        const plan p = plan_of(r.how);
        const bool again = p.streaming && (p.update != weight_update::keep || p.policy == staleness_policy::drop ||
                                           p.policy == staleness_policy::retry);
        std::int64_t consumed = 0;
        bool moved = false;
        for (const toy::step& s : r.steps)
            for (const auto& c : s.consumed) {
                consumed += c.versions.tokens;
                CHECK(c.versions.tokens == static_cast<std::int64_t>(toy::length_of(c.ticket.sample)));
                moved |= c.ticket.attempt > 1;
            }
        CHECK(moved);
        if (!again) CHECK(r.shared->drawn == consumed);
        if (p.streaming && p.policy == staleness_policy::edf) CHECK(r.worst_start_lag <= static_cast<double>(p.depth));
    }
}

TEST_CASE("a worker is emptied at once: what it runs is parked and goes on elsewhere") {
    toy::run r;
    r.how = how(streaming(2), 8, 400);
    std::atomic<std::int64_t> asked = 0;
    r.on_step = [&](toy::driver& d, const toy::step& s) {
        if (s.version % 5 == 2) d.set_slots(stage::rollout, 0, 0), d.park(0), ++asked;
        if (s.version % 5 == 4) d.set_slots(stage::rollout, 0, 2);
        if (s.version == 3) {
            CHECK_THROWS_AS(d.park(9), opd::invalid_input);
            CHECK_THROWS_AS(d.park(0, -1), opd::invalid_input);
        }
    };
    r.go();
    check_complete(r, 400);
    CHECK(asked > 5);
    CHECK(r.report.totals.preempted + r.report.totals.restarts + r.report.totals.retries == 0);
    std::int64_t consumed = 0;
    for (const toy::step& s : r.steps)
        for (const auto& c : s.consumed) consumed += c.versions.tokens;
    CHECK(r.shared->drawn == consumed);
}

TEST_CASE("a worker that hangs over its first weights keeps nobody waiting") {
    toy::run r;
    r.how = how(streaming(2), 8, 160);
    r.options.shutdown_seconds = 0.2;
    toy::world::gate gate;
    r.shared->fault = [&](const std::string& call, int worker, sample_t, std::stop_token) {
        if (call == "install" && worker == 1) gate.wait();
        return toy::world::wrong::nothing;
    };
    r.on_step = [&](toy::driver&, const toy::step& s) {
        if (s.version == 1) gate.await_waiting(); // else the run could be over before that thread begins
    };
    r.finished = [&] { gate.open(); };
    r.go();
    CHECK(r.consumed_all(160));
    CHECK(r.report.completed);
    const auto& left = r.report.left_behind; // on a busy machine others, too
    CHECK(std::count(left.begin(), left.end(), worker_name{stage::rollout, 1}) == 1);
    r.shared->await_stages_gone();
}

TEST_CASE("a worker that is slow to install its first weights goes on to the latest, whatever became of those") {
    toy::run r;
    r.how = how(streaming(2), 8, 160);
    r.options.stop_on_error = true;
    toy::world::gate gate;
    r.shared->fault = [&](const std::string& call, int worker, sample_t, std::stop_token) {
        if (call == "install" && worker == 1) gate.wait();
        return toy::world::wrong::nothing;
    };
    r.on_step = [&](toy::driver& d, const toy::step& s) {
        if (s.version != 5) return;
        gate.await_waiting(); // with weights that are not published any more
        gate.open();
        d.set_slots(stage::rollout, 0, 0); // the rest is its
    };
    r.go();
    check_complete(r, 160);
}

TEST_CASE("a worker that joins and is overtaken while it installs does not work off what is superseded") {
    toy::run r;
    r.how = how(streaming(2), 8, 400);
    toy::world::gate slow;
    std::vector<sample_t> installed; // by the one thread of worker 2
    bool served = false;
    r.shared->fault = [&](const std::string& call, int worker, sample_t what, std::stop_token) {
        if (worker != 2) return toy::world::wrong::nothing;
        served = served || call == "start";
        if (call != "install") return toy::world::wrong::nothing;
        installed.push_back(what); // a version
        if (installed.size() == 1) slow.wait();
        return toy::world::wrong::nothing;
    };
    r.on_step = [&](toy::driver& d, const toy::step& s) {
        if (s.version == 2) d.add_rollout(std::make_shared<toy::rollout>(r.shared, 2, 4), 4);
        if (s.version == 3) slow.await_waiting();
        if (s.version == 20) {
            slow.open();
            d.set_slots(stage::rollout, 0, 0), d.set_slots(stage::rollout, 1, 0); // the rest is its
        }
    };
    r.go();
    check_complete(r, 400);
    CHECK(served);
    REQUIRE(installed.size() >= 2);
    CHECK(installed[0] < 20);
    CHECK(std::is_sorted(installed.begin(), installed.end()));
    CHECK(std::adjacent_find(installed.begin(), installed.end()) == installed.end()); // none twice
    CHECK(installed[1] >= 20);                                                        // nothing that was superseded
}

TEST_CASE("a stage that always throws ends the run, under every schedule, and its last checkpoint loses nothing") {
    constexpr std::array calls = {"start", "step", "install", "score", "nothing", "train"};
    const auto schedules = all_schedules();
    for (const auto& one : schedules)
        for (const std::string call : calls) {
            const auto& [name, schedule] = one;
            // most async schedules take one call each, in turns: sched.faults has every pair, in virtual time
            const bool all = name.find("keep 4") != std::string::npos || name.find("async") == std::string::npos;
            if (!all && call != calls[static_cast<std::size_t>(&one - schedules.data()) % calls.size()]) continue;
            const bool drops = name.find("drop") != std::string::npos;
            CAPTURE(name);
            CAPTURE(call);
            const stage bad = call == "train"                        ? stage::learner
                              : call == "score" || call == "nothing" ? stage::teacher
                                                                     : stage::rollout;
            std::optional<toy::snapshot> saved;
            std::atomic<bool> broken = false;
            toy::run r;
            r.how = how(schedule, 4, 400);
            r.how.teacher_batch = 1;
            r.shared->fault = [&](const std::string& c, int, sample_t, std::stop_token) {
                if (broken && c == "score" && call == "nothing")
                    return wrong::partly; // it scores none, and says nothing
                if (broken && c == call) throw toy::failed("broken " + call);
                return wrong::nothing;
            };
            r.on_step = [&](toy::driver&, const toy::step& s) {
                if (s.version == 6) broken = true;
            };
            r.on_checkpoint = [&](toy::driver&, toy::snapshot s) { saved = std::move(s); };
            r.go();
            check_clean(r);
            CHECK(!r.report.completed);
            REQUIRE(r.report.failed == bad);
            if (call != "nothing") {
                REQUIRE(r.report.last_exception_of_failed);
                CHECK_THROWS_WITH_AS(std::rethrow_exception(r.report.last_exception_of_failed),
                                     ("broken " + call).c_str(), toy::failed);
            }
            REQUIRE(r.report.first_exception);
            // what the last checkpoint does not know of did not happen
            REQUIRE(saved);
            std::multiset<sample_t> consumed;
            for (const toy::step& s : r.steps)
                if (s.version <= saved->weights.version)
                    for (const auto& c : s.consumed) consumed.insert(c.ticket.sample);
            toy::run again;
            again.how = r.how;
            again.from = &*saved;
            again.go();
            check_clean(again);
            CHECK(again.report.completed);
            consumed.insert(again.consumed.begin(), again.consumed.end());
            CHECK(consumed.size() == 400);
            CHECK(std::set<sample_t>(consumed.begin(), consumed.end()).size() == 400);
            // in whose place others are: those that were given up while steps still learnt from some
            std::set<sample_t> missing;
            for (sample_t n = 0; n < *consumed.rbegin(); ++n)
                if (consumed.count(n) == 0) missing.insert(n);
            for (const discarded_sequence& d : r.report.discarded)
                if (d.why != failure::stopped) missing.erase(d.ticket.sample);
            if (!drops) CHECK(missing.empty());
        }
}

TEST_CASE("what a driver must keep of what was published") {
    toy::run r;
    r.how = how(streaming(2));
    r.options.checkpoint_every = 0;
    r.rollouts = 1; // of two, one may be at its first weights until the end
    r.on_step = [&](toy::driver& d, const toy::step&) { CHECK(d.needed_from() <= r.shared->published.job); };
    std::uint64_t last = 0;
    r.finished = [&] { last = r.shared->published.job; };
    std::uint64_t needed = 0;
    bool fell = false;
    r.on_event = [&](const event&, const actions&, const scheduler& s) {
        fell |= s.needed_from() < needed;
        needed = s.needed_from();
    };
    r.go();
    check_complete(r, 96);
    CHECK_FALSE(fell);
    CHECK(needed > 0); // the worker has newer weights than its first, or no step could have been made of what it drew
    CHECK(needed <= last); // and may be installing the last
}

TEST_CASE("workers are added from another thread while run() begins") {
    for (int i = 0; i < 50; ++i) {
        const auto world = std::make_shared<toy::world>();
        toy::driver d(how(serial, 8, 8));
        const auto add = [&](int w) { d.add_rollout(std::make_shared<toy::rollout>(world, w, 4), 4); };
        d.add_teacher(std::make_shared<toy::teacher>(world, 0));
        d.set_learner(std::make_shared<toy::learner>(world));
        add(0);
        std::jthread other([&] {
            try {
                for (int w = 1; w < 4; ++w) add(w);
            } catch (const std::logic_error&) { // the run is over
            }
        });
        CHECK(d.run().completed);
    }
}
