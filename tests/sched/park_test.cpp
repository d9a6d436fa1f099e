// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Parking: a sequence stops, keeps its permit, its start and its tokens, and goes on later, on whoever has a lane.
#include "script.hpp"

#include <string>

#include "opd/sched/conveyor.hpp"

namespace {

using namespace opd::test;
using opd::index_t;
using policy = staleness_policy;

settings two_permits(async a = {.tau = 1, .policy = policy::edf}) { return stream(1, a, 8); }

} // namespace

TEST_CASE("a sequence that is asked to park goes on later, from its start, elsewhere") {
    script t(two_permits());
    t.staff(1);
    t.up(stage::rollout, 1, 1);
    CHECK(t.synced(1, 0) == "start 1@1");
    CHECK(t.park(0) == "park 0");
    CHECK(t.park(0) == ""); // it is at it
    CHECK(t.s.where().rollout == 2);
    t.up(stage::rollout, 0, 0); // its worker is to leave
    CHECK(t.parked(0, 0, 0) == "");
    CHECK(t.s.where().waiting == 1);
    CHECK(t.s.totals().parked == 1);
    CHECK(t.s.start_of(t.begun.at(0)) == 0);
    CHECK(t.rolled(1) == "start 0#2@1 | score j1@0:1");
    CHECK(t.scored() == "train j2 v0:1");
    t.learned();
    t.synced(0, 1);
    CHECK(t.synced(1, 1) == "step v1:1"); // the other worker drains
    CHECK(t.s.start_of(t.begun.at(0)) == 0);
    CHECK(t.rolled(0, 0, 1) == "start 2@1 v1 | score j3@0:0");
    CHECK(t.s.totals().retries + t.s.totals().restarts + t.s.totals().preempted == 0);
    CHECK(t.s.totals().late + t.s.totals().duplicates == 0);
    CHECK(t.scored() == "train j4 v1:0");
    t.learned();
    t.synced(0, 2);
    CHECK(t.synced(1, 2) == "step v2:0");
    CHECK(t.lags == std::vector<std::vector<double>>{{0}, {1}});
}

TEST_CASE("a worker parks on its own; who waits already comes first") {
    script t(stream(1, {.tau = 2, .policy = policy::capacity}, 8));
    t.staff(2);
    CHECK(t.s.where().rollout == 2);
    t.up(stage::rollout, 0, 1);
    CHECK(t.parked(1, 0, 0) == ""); // its lane is gone
    CHECK(t.parked(0, 0, 0) == "start 1#2@0");
    CHECK(t.parked(1, 0, 0, 6) == "start 0#2@0");
    CHECK(t.s.totals().parked == 3);
}

TEST_CASE("what is not drawn yet starts anew") {
    script t(two_permits());
    t.staff(1);
    t.up(stage::rollout, 0, 0);
    CHECK(t.parked(0, 0, 0, 0) == "");
    CHECK(t.s.start_of(t.begun.at(0)) == -1);
    CHECK(t.up(stage::rollout, 0, 1) == "start 0#2@0");
    t.rolled(0), t.scored(), t.learned(), t.synced(0, 1);
    t.rolled(1, 0, 1);
    REQUIRE(t.s.start_of(t.begun.at(2)) == 1);
    CHECK(t.parked(2, 0, 0, 0).find("start 2#2@0 v1") == 0); // of no tokens nobody asks the versions
}

TEST_CASE("an attempt that fails goes back to what was parked last") {
    settings o = two_permits();
    o.rollout_attempts = 2;
    script t(o);
    t.staff(1);
    t.up(stage::rollout, 1, 1), t.synced(1, 0);
    t.parked(0, 0, 0);
    const std::string last = t.rolled(1); // a version passes
    CHECK(last == "score j1@0:1");
    t.scored(), t.learned(), t.synced(0, 1), t.synced(1, 1);
    REQUIRE(t.s.version() == 1);
    CHECK(t.down(stage::rollout, 0).find("start 0#3@") == std::string::npos); // both lanes are taken: it waits
    CHECK(t.s.start_of(t.begun.at(0)) == 0);
    CHECK(t.s.totals().preempted == 1);
    CHECK(t.rolled(2, 1) == "start 0#3@1 v1 | score j3@0:2");
    CHECK(t.s.start_of(t.begun.at(0)) == 0);
    CHECK(t.roll_failed(0) == "start 0#4@1 v1"); // charged
    CHECK(t.s.start_of(t.begun.at(0)) == 0);
    CHECK(t.roll_failed(0).find("fail 0 rollout") == 0);
}

TEST_CASE("the last streamed prefix of a worker that dies: its driver parks for it") {
    script t(two_permits());
    t.staff(1);
    const ticket gone = t.begun.at(0);
    t.parked(0, 0, 0, 5);
    t.down(stage::rollout, 0);
    CHECK(t.s.totals().parked == 1);
    CHECK(t.s.where().waiting == 1);
    t.up(stage::rollout, 0, 1);
    CHECK(t.synced(0, 0) == "start 0#3@0"); // #2 died with it
    CHECK(t.s.start_of(t.begun.at(0)) == 0);
    CHECK(t.on(event::parked(gone, {0, 0, 0, 7})) == ""); // late
    CHECK(t.s.totals().duplicates + t.s.totals().late == 1);
}

TEST_CASE("who is asked to park and does not answer is lost; the sequence is not to blame") {
    settings o = two_permits();
    o.rollout_attempts = 1;
    o.abort_deadline = 2;
    script t(o);
    t.staff(1);
    t.park(0);
    CHECK(t.s.next_deadline() == 2);
    CHECK(t.wait() == "lost rollout 0");
    CHECK(t.s.where().waiting == 1);
    CHECK(t.s.totals().preempted == 1);
    t.up(stage::rollout, 0, 1);
    t.synced(0, 0);
    t.park(0);
    t.parked(0, 0, 0);
    CHECK(t.s.next_deadline() == forever);
}

TEST_CASE("asking for what does not run leads to nothing; it may finish instead") {
    script t(two_permits());
    t.staff(1);
    const ticket first = t.begun.at(0);
    t.park(0);
    CHECK(t.rolled(0).find("score") != std::string::npos);
    CHECK(t.on(event::park(first)) == "");
    CHECK(t.on(event::parked(first, {0, 0, 0, 3})) == ""); // it crossed
    CHECK(t.s.totals().duplicates == 1);
    CHECK(t.on(event::park({.sample = 99, .slot = 70, .worker = 5, .lane = 3})) == "");
    CHECK(t.s.totals().parked == 0);
}

TEST_CASE("lies are refused") {
    script t(two_permits());
    t.staff(1);
    const auto says = [&](version_t oldest, version_t newest, std::int64_t tokens) {
        return event::parked(t.begun.at(0), {oldest, newest, double(oldest), tokens});
    };
    check_refused(t, says(0, 1, 4), "the worker was sent version 0");
    check_refused(t, says(-1, 0, 4), "it was started at version 0");
    check_refused(t, says(0, 0, -4), "-4 tokens");
    t.on(says(0, 0, 4));
    check_refused(t, says(0, 0, 3), "has 3 tokens, but went on from 4");
    check_refused(t, event::rolled_out(t.begun.at(0), {0, 0, 0, 3}), "has 3 tokens, but went on from 4");
    t.on(says(0, 0, 4));
    CHECK(t.s.totals().parked == 2);
}

TEST_CASE("an update that lets responses be of one version forgets what is parked") {
    for (const weight_update u : {weight_update::keep, weight_update::abort, weight_update::finish_first}) {
        CAPTURE(name_of(u));
        script t(two_permits({.tau = 1, .policy = policy::capacity, .update = u}));
        t.staff(2);
        t.rolled(0);
        t.scored();
        t.up(stage::rollout, 0, 0);
        t.parked(1, 0, 0);
        t.learned();
        t.synced(0, 1);
        CHECK(t.s.version() == 1);
        CHECK(t.s.start_of(t.begun.at(1)) == (u == weight_update::keep ? 0 : -1));
        t.up(stage::rollout, 0, 1);
        CHECK(t.s.start_of(t.begun.at(1)) == (u == weight_update::keep ? 0 : 1));
        if (u == weight_update::keep)
            check_refused(t, event::parked(t.begun.at(1), {0, 0, 0, 3}), "has 3 tokens, but went on from 4");
        else
            t.parked(1, 1, 1, 3); // of the new response
        CHECK(t.s.totals().parked == (u == weight_update::keep ? 1 : 2));
    }
}

TEST_CASE("what is parked grows stale like all else") {
    for (const policy p : {policy::drop, policy::retry}) {
        CAPTURE(name_of(p));
        script t(stream(1, {.tau = 0, .outstanding = 2, .policy = p}, 8));
        t.staff(2);
        t.rolled(0);
        t.scored();
        t.up(stage::rollout, 0, 1);
        t.parked(1, 0, 0);
        REQUIRE(t.s.where().waiting + t.s.where().rollout == 1);
        t.learned();
        const std::string after = t.synced(0, 1);
        if (p == policy::drop)
            CHECK(after.find("fail 1 stale") != std::string::npos);
        else
            CHECK(t.s.totals().restarts == 1);
    }
}

TEST_CASE("a whole batch waits for what is parked") {
    script t({.batch = 2, .schedule = opd::sched::sync{}, .sequences = 4, .teacher_batch = 2});
    t.staff(2);
    CHECK(t.rolled(0) == "");
    t.up(stage::rollout, 0, 0);
    CHECK(t.parked(1, 0, 0) == "");
    CHECK(t.up(stage::rollout, 0, 2) == "start 1#2@0");
    CHECK(t.rolled(1) == "score j1@0:0,1");
    CHECK(t.scored() == "train j2 v0:0,1");
}

TEST_CASE("a new process: what is parked is kept with the tokens, if somebody has them and their weights came") {
    for (const bool keeps : {false, true})
        for (const bool ahead : {false, true}) { // its latest tokens are of weights that never came
            CAPTURE(keeps);
            CAPTURE(ahead);
            const settings o = two_permits({.tau = 2, .policy = policy::capacity});
            script t(o);
            t.staff(3);
            t.rolled(0);
            t.scored();
            t.learned(); // being installed
            t.up(stage::rollout, 0, 2);
            if (ahead) t.on(event::synced(0, t.made.at(1))), t.up(stage::rollout, 1, 1);
            t.parked(1, 0, ahead ? t.s.version() : 0);
            scheduler s = scheduler::restore(o, t.s.snapshot());
            s.abandon_workers(keeps);
            s.check_invariants();
            CHECK(s.start_of(t.begun.at(1)) == (keeps ? 0 : -1));
        }
    // newer than the version that the process had reached
    const settings o = two_permits({.tau = 2, .policy = policy::capacity});
    script t(o);
    t.staff(3);
    t.up(stage::rollout, 1, 1), t.synced(1, 0); // keeps the synchronisation waiting
    t.rolled(0);
    t.scored();
    t.learned();
    t.synced(0, 1);
    REQUIRE(t.s.version() == 0);
    t.parked(1, 0, 1);
    scheduler s = scheduler::restore(o, t.s.snapshot());
    s.abandon_workers(true);
    s.check_invariants();
    CHECK(s.start_of(t.begun.at(1)) == -1);
}

TEST_CASE("payloads: each attempt gets what was parked, until the sequence starts again") {
    conveyor<std::string, int> payloads;
    const auto text = [](const char* s) { return std::make_shared<const std::string>(s); };
    const auto attempt = [](std::uint32_t n) { return ticket{.sample = 3, .slot = 1, .attempt = n, .worker = 0}; };
    CHECK(payloads.start(attempt(1), 5) == nullptr);
    CHECK(payloads.parked(attempt(1), text("ab")) == nullptr);
    CHECK(payloads.parked(attempt(0), text("late")) == nullptr);
    CHECK(*payloads.start(attempt(2), 5) == "ab");
    CHECK(*payloads.start(attempt(3), 5) == "ab"); // the second failed
    CHECK(*payloads.parked(attempt(3), text("abcd")) == "ab");
    CHECK(*payloads.start(attempt(4), 5) == "abcd");
    CHECK(payloads.start(attempt(5), 6) == nullptr); // made to start again
    CHECK(payloads.start(attempt(6), 6) == nullptr);
    payloads.parked(attempt(6), text("x"));
    CHECK(payloads.start({.sample = 4, .slot = 1, .attempt = 1, .worker = 0}, 6) == nullptr); // another's slot
}
