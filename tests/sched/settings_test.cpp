// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// optimise: no
//
// Which settings are refused, by name and with the reason, and what the others resolve to.
#include <cmath>
#include <doctest/doctest.h>
#include <limits>

#include "opd/sched/scheduler_checks.hpp"
#include "support/property.hpp"

namespace {

using namespace opd::sched;
using opd::index_t;
using opd::invalid_input;
using policy = staleness_policy;

constexpr index_t two31 = index_t{1} << 31;

void refused(const settings& s, const std::string& name, const std::string& why) {
    CAPTURE(name);
    try {
        plan_of(s);
        FAIL_CHECK("accepted, but should say: " << why);
    } catch (const invalid_input& e) {
        CHECK(e.argument == name);
        CHECK_MESSAGE(std::string(e.what()).find(why) != std::string::npos, e.what());
    }
    CHECK_THROWS_AS(scheduler{s}, invalid_input); // the constructor asks
}

settings with(auto&& change) {
    settings s;
    s.batch = 8;
    change(s);
    return s;
}
settings streaming(const async& a, index_t batch = 8, index_t group = 1) {
    return {.batch = batch, .schedule = a, .group = group};
}

} // namespace

TEST_CASE("every plain setting has a range") {
    refused(with([](auto& s) { s.batch = 0; }), "batch", "at least 1, not 0");
    refused(with([](auto& s) { s.batch = -5; }), "batch", "at least 1, not -5");
    refused(with([](auto& s) { s.batch = two31; }), "batch", "below 2^31");
    refused(with([](auto& s) { s.group = 0; }), "group", "at least 1");
    refused(with([](auto& s) { s.group = two31; }), "group", "below 2^31");
    refused(with([](auto& s) { s.sequences = -1; }), "sequences", "at least 0");
    refused(with([](auto& s) { s.available = -1; }), "available", "at least 0");
    refused(with([](auto& s) { s.teacher_batch = 0; }), "teacher_batch", "at least 1");
    refused(with([](auto& s) { s.rollout_attempts = 0; }), "rollout_attempts", "at least 1");
    refused(with([](auto& s) { s.teacher_attempts = 0; }), "teacher_attempts", "at least 1");
    refused(with([](auto& s) { s.learner_attempts = -1; }), "learner_attempts", "at least 1, not -1");
    refused(with([](auto& s) { s.first_version = -1; }), "first_version", "at least 0, not -1");
    refused(with([](auto& s) { s.fruitless_steps = -1; }), "fruitless_steps", "at least 0, not -1");
    refused(with([](auto& s) { s.most_workers = 0; }), "most_workers", "at least 1");
    refused(with([](auto& s) { s.most_slots = (1 << 24) + 1; }), "most_slots", "at most 2^24");
    refused(with([](auto& s) { s.sequences = (index_t{1} << 59) + 1; }), "sequences", "2^59");
    refused(with([](auto& s) { s.available = (index_t{1} << 59) + 1; }), "available", "2^59");
    refused(with([](auto& s) { s.first_version = version_t{1} << 57; }), "first_version", "2^59 / batch");
    refused(with([](auto& s) { s.first_sample = sample_t{1} << 60; }), "first_sample", "2^59");
    refused(with([](auto& s) { s.group = 4, s.first_sample = 6; }), "first_sample", "multiple of group, 4");
}

TEST_CASE("the largest numbers that are accepted run, and their snapshots are read") {
    settings s = streaming({.tau = 1}, 8, 3);
    s.first_version = (version_t{1} << 59) / 8, s.first_sample = (sample_t{1} << 59) / 3 * 3;
    s.sequences = (index_t{1} << 59) / 3 * 3;
    scheduler run(s);
    actions out;
    run.on(event::up(stage::rollout, 0, 4).of_life(1), 0, out);
    run.on(event::synced(0, 0).of_life(1), 0, out);
    CHECK(run.totals().admitted > 0);
    CHECK(scheduler::restore(s, run.snapshot()).snapshot() == run.snapshot());
}

TEST_CASE("times are finite and not negative") {
    const std::pair<const char*, double settings::*> times[] = {
        {"teacher_flush", &settings::teacher_flush},       {"rollout_deadline", &settings::rollout_deadline},
        {"abort_deadline", &settings::abort_deadline},     {"teacher_deadline", &settings::teacher_deadline},
        {"learner_deadline", &settings::learner_deadline}, {"sync_deadline", &settings::sync_deadline}};
    for (const auto& [name, member] : times) {
        const auto set = [&, m = member](double x) { return with([&](settings& s) { s.*m = x; }); };
        refused(set(-1e-9), name, "at least 0");
        refused(set(std::numeric_limits<double>::quiet_NaN()), name, "at least 0");
        refused(set(std::numeric_limits<double>::infinity()), name, "at most 1e9 seconds");
        CHECK_NOTHROW(plan_of(set(0)));
        CHECK_NOTHROW(plan_of(set(1e9)));
    }
}

TEST_CASE("whole batches") {
    for (const index_t k : {-1, -100}) {
        refused({.batch = 4, .schedule = step_off{k}}, "schedule.k", "at least 0");
        refused({.batch = 4, .schedule = controlled{k}}, "schedule.k", "at least 0");
    }
    refused({.batch = 4, .schedule = step_off{two31 / 4}}, "schedule.k", "below 2^31 sequences");
    refused({.batch = 4, .schedule = step_off{std::numeric_limits<index_t>::max()}}, "schedule.k", "below 2^31");
    CHECK(plan_of({.batch = 4, .schedule = step_off{two31 / 4 - 2}}).permits == two31 - 4);
    CHECK(plan_of({.batch = two31 - 1, .schedule = opd::sched::sync{}}).permits == two31 - 1);
    refused({.batch = 5, .schedule = opd::sched::sync{}, .group = 2}, "batch", "multiple of group, 2");
    refused({.batch = 2, .schedule = step_off{1}, .group = 4}, "batch", "multiple of group, 4");

    const plan p = plan_of({.batch = 6, .schedule = step_off{2}, .group = 3});
    CHECK_FALSE(p.streaming);
    CHECK(p.overlap);
    CHECK(p.depth == 2);
    CHECK(p.permits == 18);
    CHECK(p.update == weight_update::finish_first);
    CHECK_FALSE(plan_of({.batch = 6, .schedule = controlled{2}}).overlap);
    CHECK(plan_of({.batch = 1, .schedule = opd::sched::sync{}}).permits == 1);
    CHECK(plan_of({.batch = 1, .schedule = controlled{0}}).permits == 1);
}

TEST_CASE("async: tau and permits") {
    refused(streaming({.tau = -1}), "schedule.tau", "at least 0");
    refused(streaming({.tau = two31 / 8}), "schedule.tau", "below 2^31");
    refused(streaming({.outstanding = -3}), "schedule.outstanding", "automatic or widest, not -3");
    refused(streaming({.outstanding = 7}), "schedule.outstanding", "no batch would ever fill");
    for (const policy p : {policy::capacity, policy::cohort_fifo, policy::edf, policy::in_order})
        refused(streaming({.tau = 1, .outstanding = 17, .policy = p}), "schedule.outstanding",
                "at most (tau + 1)·batch = 16, not 17");
    for (const policy p : {policy::drop, policy::retry}) {
        CHECK(plan_of(streaming({.tau = 1, .outstanding = 17, .policy = p})).permits == 17);
        refused(streaming({.tau = 1, .outstanding = two31, .policy = p}), "schedule.outstanding", "below 2^31");
    }
    CHECK(plan_of(streaming({.tau = 4, .outstanding = widest})).permits == 40);
    CHECK_FALSE(plan_of(streaming({.tau = 4, .outstanding = widest})).automatic);
    for (const policy p : {policy::capacity, policy::edf, policy::drop, policy::retry})
        for (const index_t m : {by_policy, automatic}) {
            const plan chosen = plan_of(streaming({.tau = 4, .outstanding = m, .policy = p}));
            CHECK(chosen.automatic);
            CHECK(chosen.permits == 16); // at first
            CHECK(chosen.least == 8);
            CHECK(chosen.most == 40);
        }
    for (const policy p : {policy::cohort_fifo, policy::in_order, policy::areal}) {
        CHECK_FALSE(plan_of(streaming({.tau = 4, .policy = p})).automatic);
        CHECK(plan_of(streaming({.tau = 4, .policy = p})).permits == 40);
        refused(streaming({.tau = 4, .outstanding = automatic, .policy = p}), "schedule.outstanding",
                p == policy::areal ? "must be widest under areal" : "cannot be automatic");
    }
    CHECK(plan_of(streaming({.tau = 4, .outstanding = 8})).permits == 8); // M = B
    CHECK(plan_of(streaming({.tau = 4, .outstanding = 40})).permits == 40);
    CHECK(plan_of(streaming({.tau = 0})).permits == 8);
    CHECK(plan_of(streaming({.tau = 0}, 1)).permits == 1);
    CHECK(plan_of(settings{}).permits == 2 * 256);
    CHECK(plan_of(settings{}).automatic);
    CHECK(plan_of(settings{}).policy == policy::capacity);
    CHECK(plan_of(settings{}).update == weight_update::keep);
}

TEST_CASE("async: policies with settings of their own") {
    refused(streaming({.policy = policy::naive_wait}), "schedule.policy", "deadlocks");
    CHECK_NOTHROW(plan_of(streaming({.policy = policy::naive_wait, .negative_control = true})));
    refused(streaming({.outstanding = 16, .policy = policy::areal}), "schedule.outstanding", "areal");
    refused(streaming({.concurrency = 4}), "schedule.concurrency", "belongs to the policy areal");
    refused(streaming({.policy = policy::areal, .concurrency = -1}), "schedule.concurrency", "at least 0");
    refused(streaming({.policy = policy::areal, .concurrency = 3}, 8, 4), "schedule.concurrency", "at least group, 4");
    CHECK(plan_of(streaming({.policy = policy::areal, .concurrency = 4}, 8, 4)).concurrency == 4);
    CHECK(plan_of(streaming({.policy = policy::areal})).concurrency == 0);
}

TEST_CASE("groups") {
    refused(with([](auto& s) { s.group = 3, s.sequences = 10; }), "sequences", "multiple of group, 3");
    refused(with([](auto& s) { s.group = 3, s.available = 10; }), "available", "multiple of group, 3");
    refused(streaming({.tau = 0}, 8, 3), "group", "must divide batch and outstanding");
    refused(streaming({.tau = 1, .outstanding = 9}, 8, 4), "group", "at least batch + group - 1");
    refused(streaming({.tau = 0}, 2, 4), "group", "too few for a group");
    CHECK_NOTHROW(plan_of(streaming({.tau = 0}, 8, 4)));
    CHECK_NOTHROW(plan_of(streaming({.tau = 1, .outstanding = 10}, 8, 3))); // 8 + 3 - 1
    CHECK_NOTHROW(plan_of(streaming({.tau = 3, .outstanding = 5}, 2, 4)));
    CHECK_NOTHROW(plan_of(streaming({.tau = 1, .outstanding = 12}, 8, 4)));
    CHECK(plan_of(streaming({.tau = 1}, 8, 3)).least == 10);
    CHECK(plan_of(streaming({.tau = 1}, 8, 4)).least == 8);
}

TEST_CASE("names") {
    const policy by_number[] = {policy::capacity, policy::cohort_fifo, policy::edf,   policy::drop,
                                policy::retry,    policy::in_order,    policy::areal, policy::naive_wait};
    const char* names[] = {"capacity", "cohort_fifo", "edf", "drop", "retry", "in_order", "areal", "naive_wait"};
    for (std::size_t i = 0; i < 8; ++i) { // as snapshots have them
        CHECK(static_cast<std::size_t>(by_number[i]) == i);
        CHECK(std::string(name_of(by_number[i])) == names[i]);
    }
    const std::vector<policy> chosen = staleness_policies(); // those that came later stand behind
    CHECK(std::vector<policy>(chosen.begin(), chosen.begin() + 7) == std::vector<policy>(by_number, by_number + 7));
    CHECK(chosen.size() == static_cast<std::size_t>(last_of(policy{})));
    CHECK(std::string(name_of(weight_update::keep)) == "keep");
    CHECK(std::string(name_of(weight_update::finish_first)) == "finish_first");
    CHECK(std::string(name_of(stage::learner)) == "learner");
    CHECK(std::string(name_of(failure::stopped)) == "stopped");
    CHECK(std::string(name_of(lag::newest_token)) == "newest_token");
}

namespace {

/// Everybody answers at once: the fewest steps that a run can take. True when it ends by itself.
bool runs_to_its_end(const settings& s) {
    scheduler machine(s);
    actions out;
    const auto tell = [&](const event& e) { machine.on(e.of_life(1), 0, out); };
    tell(event::up(stage::learner, 0));
    tell(event::up(stage::teacher, 0));
    tell(event::up(stage::rollout, 0, 3));
    for (std::size_t i = 0; i < out.items.size() && i < 100'000; ++i) {
        const action a = out.items[i];
        const version_t now = machine.version();
        if (a.what == action::kind::finished) return machine.totals().consumed >= s.sequences;
        if (a.what == action::kind::start) tell(event::rolled_out(a.ticket, {a.version, now, 0, 1}));
        if (a.what == action::kind::score) tell(event::scored(a.job, a.worker));
        if (a.what == action::kind::train) tell(event::learned(a.job));
        if (a.what == action::kind::sync) tell(event::synced(0, a.job));
        if (a.what == action::kind::abort) tell(event::aborted(a.ticket));
        machine.check_invariants();
    }
    return false;
}

} // namespace

TEST_CASE("what is accepted runs to its end") {
    property("no accepted setting deadlocks by itself",
             [] {
                 settings s;
                 s.batch = *rc::gen::inRange<index_t>(1, 7);
                 s.group = *rc::gen::inRange<index_t>(1, 5);
                 s.sequences = s.group * *rc::gen::inRange<index_t>(1, 12);
                 s.teacher_batch = *rc::gen::inRange<index_t>(1, 5);
                 s.teacher_flush = *rc::gen::element(0.0, 0.05);
                 const index_t depth = *rc::gen::inRange<index_t>(0, 4);
                 switch (*rc::gen::inRange(0, 5)) {
                 case 0:
                     s.schedule = opd::sched::sync{};
                     break;
                 case 1:
                     s.schedule = step_off{depth};
                     break;
                 case 2:
                     s.schedule = controlled{depth};
                     break;
                 default:
                     s.schedule = async{
                         .tau = depth,
                         .outstanding = *rc::gen::inRange<index_t>(0, 30),
                         .policy = *rc::gen::element(policy::capacity, policy::cohort_fifo, policy::edf, policy::drop,
                                                     policy::retry, policy::in_order, policy::areal),
                         .update =
                             *rc::gen::element(weight_update::keep, weight_update::abort, weight_update::finish_first),
                         .concurrency = *rc::gen::element<index_t>(0, 0, 0, 4)};
                 }
                 bool accepted = true;
                 try {
                     plan_of(s);
                 } catch (const invalid_input&) {
                     accepted = false;
                 }
                 RC_CLASSIFY(accepted, "accepted");
                 if (accepted) RC_ASSERT(runs_to_its_end(s)); // the macro evaluates both sides of an ||
             },
             {.cases = 3000});
}
