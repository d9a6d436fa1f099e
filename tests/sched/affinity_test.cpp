// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Answers to one prompt go to one worker, where that keeps no lane vacant.
#include "script.hpp"

#include <map>
#include <set>
#include <string>
#include <vector>

#include "opd/sched/simulated_cluster.hpp"
#include "opd/sched/virtual_driver.hpp"

namespace {

using namespace opd::test;
using opd::index_t;
using policy = staleness_policy;

settings groups_of(index_t group, index_t batch, index_t permits, index_t sequences = 0) {
    settings s = stream(batch, {.tau = 8, .outstanding = permits, .policy = policy::capacity}, sequences);
    s.group = group;
    return s;
}
// So many workers with so many lanes, which all have the first weights before the last of them can start anything.
void staff(script& t, int workers, std::int32_t lanes) {
    t.of(event::kind::pause);
    t.up(stage::teacher), t.up(stage::learner);
    for (int w = 0; w < workers; ++w) t.up(stage::rollout, w, lanes), t.synced(w, 0);
}

} // namespace

TEST_CASE("each prompt has a worker; who finds no lane there waits for it while others can be admitted") {
    script t(groups_of(4, 8, 16));
    staff(t, 2, 2);
    // 2 and 3 wait for worker 0, 6 and 7 for worker 1
    CHECK(t.of(event::kind::resume) == "start 0@0 | start 1@0 | start 4@1 | start 5@1");
    CHECK(t.s.where().waiting == 4);
    CHECK(t.rolled(4).find("start 6@1") == 0);
    CHECK(t.rolled(0).find("start 2@0") == 0);
    CHECK(t.rolled(1).find("start 3@0") == 0);
    CHECK(t.rolled(2).find("start 8@0") == 0); // nobody waits for worker 0 but the next prompt
    CHECK(t.rolled(5).find("start 7@1") == 0);
    CHECK(t.rolled(6).find("start 12@1") == 0);
}

TEST_CASE("no lane stays vacant for it") {
    script few(groups_of(4, 4, 4)); // permits for one prompt
    staff(few, 2, 2);
    CHECK(few.of(event::kind::resume) == "start 0@0 | start 1@0 | start 2@1 | start 3@1");
    script last(groups_of(4, 4, 16, 8)); // prompts run out
    staff(last, 4, 2);
    CHECK(last.of(event::kind::resume) ==
          "start 0@0 | start 1@0 | start 4@1 | start 5@1 | start 2@2 | start 3@2 | start 6@3 | start 7@3");
    settings whole = {.batch = 4, .schedule = opd::sched::sync{}, .group = 2, .teacher_batch = 1};
    script t(whole); // all of a batch is there at once
    staff(t, 2, 2);
    CHECK(t.of(event::kind::resume) == "start 0@0 | start 1@0 | start 2@1 | start 3@1");
}

TEST_CASE("a batch of groups goes to workers by prompts, not by turns") {
    script t({.batch = 8, .schedule = opd::sched::sync{}, .group = 4, .teacher_batch = 1});
    staff(t, 2, 8);
    CHECK(t.of(event::kind::resume) ==
          "start 0@0 | start 1@0 | start 2@0 | start 3@0 | start 4@1 | start 5@1 | start 6@1 | start 7@1");
}

TEST_CASE("the worker of a prompt dies, or drains: who waits for it goes elsewhere, together") {
    for (const bool dies : {true, false}) {
        script t(groups_of(3, 3, 9));
        staff(t, 3, 1);
        CHECK(t.of(event::kind::resume) == "start 0@0 | start 3@1 | start 6@2");
        CHECK(t.s.where().waiting == 6);
        if (dies) {
            t.down(stage::rollout, 0);
            CHECK(t.rolled(3).find("start 0#2@1") == 0); // it failed, so it is the first
            CHECK(t.rolled(0).find("start 1@1") == 0);   // and they are with it
        } else {
            t.up(stage::rollout, 0, 0);
            CHECK(t.rolled(6).find("start 1@2") == 0);
            CHECK(t.rolled(3).find("start 4@1") == 0); // not 2, which goes where 1 went
            CHECK(t.rolled(1).find("start 2@2") == 0);
            CHECK(t.rolled(2).find("start 7@2") == 0);
        }
    }
}

TEST_CASE("a group of one is the same as ever: first come, first started, by turns") {
    script t(groups_of(1, 4, 8));
    staff(t, 2, 2);
    CHECK(t.of(event::kind::resume) == "start 0@0 | start 1@1 | start 2@0 | start 3@1");
    CHECK(t.s.where().waiting == 0); // nobody is admitted to wait
}

TEST_CASE("a snapshot in the middle of a group knows whom its sequences wait for; a crash forgets it") {
    script t(groups_of(4, 8, 16));
    staff(t, 2, 2);
    t.of(event::kind::resume);
    scheduler again = scheduler::restore(t.s.options(), t.s.snapshot());
    CHECK(again.snapshot() == t.s.snapshot());
    actions out;
    again.on(event::rolled_out(t.begun.at(4), {0, 0, 0, 10}), t.now, out);
    CHECK(line_of(out).find("start 6@1") == 0);
    scheduler after = scheduler::restore(t.s.options(), t.s.snapshot());
    after.abandon_workers();
    after.check_invariants();
    out.clear();
    for (const event& e : {event::up(stage::rollout, 5, 8).of_life(1), event::synced(5, 0).of_life(1)})
        after.on(e, 0, out);
    std::set<std::int32_t> workers;
    for (const action& a : out.items)
        if (a.what == action::kind::start) workers.insert(a.worker);
    CHECK(workers == std::set<std::int32_t>{5});
}

namespace {
// On how many workers each prompt was answered, and whether a lane was vacant while something waited.
struct placement {
    index_t group = 1, lanes = 0;
    bool vacant = false;
    std::map<sample_t, std::set<std::int32_t>> workers;
    void event(double, const opd::sched::event&, const actions& out, const scheduler& s) {
        for (const action& a : out.items)
            if (a.what == action::kind::start) workers[a.ticket.sample / static_cast<sample_t>(group)].insert(a.worker);
        vacant |= s.gate_open() && s.where().waiting > 0 && s.where().rollout < lanes && s.version() > 0;
    }
    double on_one_worker() const {
        double n = 0;
        for (const auto& [prompt, where] : workers) n += where.size() == 1;
        return n / static_cast<double>(workers.size());
    }
};
} // namespace

TEST_CASE("most prompts are answered by one worker, and every lane is used") {
    for (const auto& [what, schedule, least] :
         {std::tuple{"edf", opd::sched::schedule(async{.tau = 4, .policy = policy::edf}), 0.9},
          std::tuple{"capacity", opd::sched::schedule(async{.tau = 4, .policy = policy::capacity}), 0.75},
          std::tuple{"step-off", opd::sched::schedule(step_off{1}), 0.9}}) {
        settings s{.batch = 64, .schedule = schedule, .group = 4, .sequences = 64 * 60};
        simulated_cluster c;
        c.lengths.response = {lognormal{.median = 200, .sigma = 0.8}};
        c.lengths.group = 4;
        c.lanes = 16;
        c.speed = {.step = 0.01, .step_per_sequence = 1e-4};
        c.teacher_time.fixed = 0.1, c.learner_time.fixed = 2;
        placement seen;
        seen.group = 4, seen.lanes = 8 * 16;
        virtual_driver<simulated_cluster, placement> d(s, c, &seen);
        d.bring_up(stage::rollout, 8, 16);
        d.bring_up(stage::teacher, 1);
        d.bring_up(stage::learner, 1);
        CHECK(d.run());
        INFO(std::string(what) << ": " << seen.on_one_worker());
        CHECK(seen.on_one_worker() >= least);
        CHECK(!seen.vacant);
    }
}
