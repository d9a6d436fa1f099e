// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// optimise: no
//
// The scheduler by hand-written scripts: what each schedule does in small cases, action by action, and what becomes of
// each fault in each phase.
#include <cmath>
#include <deque>

#include "script.hpp"

namespace {

using namespace opd::sched;
using opd::test::check_refused;
using opd::test::script;
using opd::test::stream;
using kind = event::kind;

settings whole(schedule how, opd::index_t batch, opd::index_t sequences = 0) {
    return {.batch = batch, .schedule = how, .sequences = sequences, .teacher_batch = 8};
}

} // namespace

TEST_CASE("sync: rollout, score, train, synchronise, one after the other") {
    script t(whole(opd::sched::sync{}, 2, 4));
    CHECK(t.up(stage::learner) == "");
    CHECK(t.up(stage::teacher) == "");
    CHECK(t.up(stage::rollout, 0, 2) == "sync 0 v0"); // nothing starts on weights that are not there
    CHECK(t.synced(0, 0) == "start 0@0 | start 1@0");
    CHECK(t.rolled(1) == ""); // a batch is scored when all of it is there
    CHECK(t.rolled(0) == "score j1@0:0,1");
    CHECK(t.scored(1) == "train j2 v0:0,1");
    CHECK(t.learned(2) == "sync v1");
    CHECK_FALSE(t.s.gate_open());
    CHECK(t.synced(0, 1) == "step v1:0,1 | start 2@0 v1 | start 3@0 v1");
    CHECK(t.s.gate_open());
    CHECK(t.rolled(2, 1) == "");
    CHECK(t.rolled(3, 1) == "score j3@0:2,3");
    CHECK(t.scored(3) == "train j4 v1:2,3");
    CHECK(t.learned(4) == "sync v2");
    CHECK(t.synced(0, 2) == "step v2:2,3 | finished");
    CHECK(t.lags == std::vector<std::vector<double>>{{0, 0}, {0, 0}});
    CHECK(t.s.totals().consumed_tokens == 40);
    CHECK(t.s.totals().updates == 2);
}

TEST_CASE("step_off{0} and async with tau = 0 act as sync does") {
    for (const schedule& how : {schedule{step_off{0}}, schedule{controlled{0}}, schedule{async{.tau = 0}}}) {
        script t(whole(how, 2, 4));
        t.staff(2);
        t.rolled(0);
        t.rolled(1);
        t.scored();
        CHECK(t.learned() == "sync v1");
        CHECK(t.synced(0, 1) == "step v1:0,1 | start 2@0 v1 | start 3@0 v1");
    }
}

TEST_CASE(
    "step_off{1}: the next batch is rolled out while this one is scored and trained, and the weights wait for it") {
    script t(whole(step_off{1}, 1, 3));
    t.staff();
    CHECK(t.begun.size() == 1);
    CHECK(t.rolled(0) == "start 1@0 | score j1@0:0");
    CHECK(t.scored() == "train j2 v0:0");
    CHECK(t.learned() == ""); // 1 is in rollout
    CHECK_FALSE(t.s.gate_open());
    CHECK(t.rolled(1) == "sync v1 | score j3@0:1"); // nothing starts: the gate is closed
    CHECK(t.synced(0, 1) == "step v1:0 | start 2@0 v1");
    CHECK(t.scored() == "train j4 v1:1");
    CHECK(t.rolled(2, 1) == "score j5@0:2");
    CHECK(t.learned() == "sync v2");
    CHECK(t.scored(5) == "");
    CHECK(t.synced(0, 2) == "step v2:1 | train j6 v2:2");
    CHECK(t.learned() == "sync v3");
    CHECK(t.synced(0, 3) == "step v3:2 | finished");
    CHECK(t.lags == std::vector<std::vector<double>>{{0}, {1}, {1}});
}

TEST_CASE("step_off{2} trains when the batch after the next has started") {
    script t(whole(step_off{2}, 1, 4));
    t.staff();
    CHECK(t.rolled(0) == "start 1@0 | score j1@0:0");
    CHECK(t.scored() == ""); // 2 has not started
    CHECK(t.rolled(1) == "start 2@0 | score j2@0:1 | train j3 v0:0");
    CHECK(t.scored(2) == "");
    CHECK(t.rolled(2) == "score j4@0:2"); // 3 belongs to version 1
    CHECK(t.learned(3) == "sync v1");
    CHECK(t.synced(0, 1) == "step v1:0 | start 3@0 v1 | train j5 v1:1");
}

TEST_CASE("controlled{1}: no overlap") {
    script t(whole(controlled{1}, 1, 3));
    t.staff();
    CHECK(t.rolled(0) == "score j1@0:0");
    CHECK(t.scored() == "start 1@0"); // not before batch 0 is scored
    CHECK(t.rolled(1) == "score j2@0:1");
    CHECK(t.scored() == "train j3 v0:0"); // not before batch 1 is scored
    CHECK(t.learned() == "sync v1");
    CHECK(t.synced(0, 1) == "step v1:0 | start 2@0 v1");
    CHECK(t.rolled(2, 1) == "score j4@0:2");
    CHECK(t.scored() == "train j5 v1:1");
    CHECK(t.learned() == "sync v2");
    CHECK(t.synced(0, 2) == "step v2:1 | train j6 v2:2");
    CHECK(t.learned() == "sync v3");
    CHECK(t.synced(0, 3) == "step v3:2 | finished");
    CHECK(t.lags == std::vector<std::vector<double>>{{0}, {1}, {1}});
}

TEST_CASE("async keeps a permit from the start to the end of the synchronisation") {
    script t(stream(1, {.tau = 1}));
    t.staff(3); // two permits, three lanes
    CHECK(t.begun.size() == 2);
    CHECK(t.rolled(0) == "score j1@0:0");
    CHECK(t.scored() == "train j2 v0:0");
    CHECK(t.learned() == "sync v1"); // its permit is not yet free
    CHECK(t.s.where().outstanding() == 2);
    CHECK(t.synced(0, 1) == "step v1:0 | start 2@0 v1");
    CHECK(t.rolled(1, 0, 1) == "score j3@0:1"); // kept: its tokens are of both versions
    CHECK(t.scored() == "train j4 v1:1");
    t.learned();
    CHECK(t.synced(0, 2) == "step v2:1 | start 3@0 v2");
    CHECK(t.lags == std::vector<std::vector<double>>{{0}, {1}});
    const auto lags = t.out.consumed[0].lags(1);
    CHECK(lags[1] == 1.0);
    CHECK(lags[2] == 0.5);
    CHECK(lags[3] == 0.0);
}

TEST_CASE(
    "nothing starts on a worker that has not installed the version, and every worker that had a version must have it") {
    script t(stream(1, {.tau = 1}));
    t.staff(1);
    CHECK(t.up(stage::rollout, 1, 2) == "sync 1 v0");
    CHECK(t.begun.size() == 1);
    CHECK(t.synced(1, 0) == "start 1@1");
    t.rolled(0);
    t.scored();
    CHECK(t.learned() == "sync v1");
    CHECK(t.synced(0, 1) == "");
    CHECK(t.up(stage::rollout, 2) ==
          "sync 2 v1"); // it comes in the middle: it gets the new weights, but nobody waits for it
    CHECK_FALSE(t.s.gate_open());
    CHECK(t.synced(1, 1) == "step v1:0 | start 2@0 v1");
    CHECK(t.rolled(1, 0, 1) == "score j3@0:1");
    t.scored();
    CHECK(t.learned() == "sync v2"); // it still has not answered
    t.synced(0, 2);
    CHECK(t.synced(1, 2) == "step v2:1 | start 3@1 v2");
    CHECK(t.synced(2, 1) == "sync 2 v2"); // it answers late, and still nobody waits for it
    t.rolled(2, 1, 2), t.scored();
    CHECK(t.learned() == "sync v3");
    t.synced(0, 3);
    CHECK(t.synced(1, 3) == "step v3:2 | start 4@0 v3");
    CHECK(t.synced(2, 2) == ""); // late again: from the next publication on it is waited for
    t.rolled(3, 2, 3), t.scored();
    CHECK(t.learned() == "sync v4");
    t.synced(0, 4);
    CHECK(t.synced(1, 4) == "");
    CHECK(t.synced(2, 4).substr(0, 9) == "step v4:3");
}

TEST_CASE("sequences go to the least busy worker") {
    script t(stream(2, {.tau = 1}));
    t.up(stage::rollout, 0, 2);
    t.up(stage::rollout, 1, 2);
    CHECK(t.synced(0, 0) == "start 0@0 | start 1@0");
    CHECK(t.synced(1, 0) == "start 2@1 | start 3@1");
    script u(stream(2, {.tau = 1, .outstanding = 2}));
    u.up(stage::rollout, 0, 1);
    u.up(stage::rollout, 1, 2);
    u.up(stage::learner);
    u.up(stage::teacher);
    u.synced(0, 0);
    CHECK(u.synced(1, 0) == "start 1@1");
}

TEST_CASE("weight update: abort starts what is running again, under the new weights") {
    script t(stream(1, {.tau = 1, .update = weight_update::abort}));
    t.staff(2);
    const ticket one = t.begun.at(1);
    t.rolled(0);
    t.scored();
    CHECK(t.learned() == "abort 1 | sync v1");
    CHECK(t.synced(0, 1) == "step v1:0 | start 1#2@0 v1"); // the other lane is not yet free
    CHECK(t.aborted(one) == "start 2@0 v1");
    CHECK(t.s.totals().restarts == 1);
    CHECK(t.s.totals().retries == 0);
    t.rolled(1, 1);
    t.scored();
    t.learned();
    t.synced(0, 2);
    CHECK(t.lags == std::vector<std::vector<double>>{{0}, {0}});
}

TEST_CASE("weight update: an answer that crosses its abort is late") {
    script t(stream(1, {.tau = 1, .update = weight_update::abort}));
    t.staff(2);
    t.rolled(0);
    t.scored();
    t.learned();
    CHECK(t.rolled(1) == "");
    CHECK(t.s.totals().late == 1);
    CHECK(t.synced(0, 1) == "step v1:0 | start 1#2@0 v1 | start 2@0 v1");
}

TEST_CASE("weight update: finish_first waits until nothing runs") {
    script t(stream(1, {.tau = 1, .update = weight_update::finish_first}));
    t.staff(2);
    t.rolled(0);
    t.scored();
    CHECK(t.learned() == "");
    CHECK(t.roll_failed(1) == "sync v1"); // it waits for the new weights
    CHECK(t.synced(0, 1) == "step v1:0 | start 1#2@0 v1 | start 2@0 v1");
}

TEST_CASE("whole batches: a sequence that fails while the weights wait starts again on the old ones") {
    script t(whole(step_off{1}, 1, 3));
    t.staff();
    t.rolled(0);
    t.scored();
    CHECK(t.learned() == "");
    CHECK(t.roll_failed(1) == "start 1#2@0"); // version 0 still: its lag must be 1
    CHECK(t.rolled(1) == "sync v1 | score j3@0:1");
}

TEST_CASE("a failed rollout is tried again in front, and fails for good after its attempts") {
    settings o = stream(2, {.tau = 1});
    o.rollout_attempts = 2;
    script t(o);
    t.staff(2);
    CHECK(t.roll_failed(0) == "start 0#2@0");
    CHECK(t.s.totals().retries == 1);
    CHECK(t.roll_failed(0) == "fail 0 rollout | start 2@0");
    CHECK(t.s.totals().failed_by[static_cast<int>(failure::rollout)] == 1);
    CHECK(t.s.where().rollout == 2);
}

TEST_CASE("late, double and unknown replies do nothing") {
    script t(stream(1, {.tau = 1}));
    t.staff(2);
    const ticket first = t.begun.at(0);
    t.roll_failed(0);
    const std::string before = t.s.snapshot();
    CHECK(t.on(event::rolled_out(first, {})) == ""); // the attempt is over
    CHECK(t.on(event::rollout_failed(first)) == "");
    CHECK(t.on(event::aborted(first)) == "");
    ticket nobody = t.begun.at(0);
    nobody.sample = 77;
    CHECK(t.on(event::rolled_out(nobody, {})) == "");
    nobody = t.begun.at(0);
    nobody.slot = 1; // of somebody else
    CHECK(t.on(event::rolled_out(nobody, {})) == "");
    nobody = t.begun.at(0);
    nobody.lane = 99;
    CHECK(t.on(event::rolled_out(nobody, {})) == "");
    CHECK(t.s.totals().duplicates == 6);
    CHECK(t.s.where().rollout == 2);
    CHECK(t.rolled(0) == "score j1@0:0");
    CHECK(t.rolled(0) == "");
    CHECK(t.scored(99) == "");
    CHECK(t.scored(1) == "train j2 v0:0");
    CHECK(t.scored(1) == "");
    CHECK(t.on(event::score_failed(1, 0)) == "");
    CHECK(t.learned(1) == "");
    CHECK(t.on(event::learn_failed(1)) == "");
    CHECK(t.learned(2) == "sync v1");
    CHECK(t.learned(2) == "");
    CHECK(t.on(event::learn_failed(2)) == "");
    CHECK(t.synced(0, 0) == "");
    CHECK(t.synced(0, 1) == "step v1:0 | start 2@0 v1");
    CHECK(t.synced(0, 1) == "");
    CHECK(t.s.totals().consumed == 1);
    CHECK(before != t.s.snapshot());
}

TEST_CASE("scoring: a partial answer leaves the rest to be asked again, in front") {
    settings o = stream(3, {.tau = 0});
    o.teacher_batch = 3;
    o.teacher_attempts = 2;
    script t(o);
    t.staff(3);
    t.rolled(2), t.rolled(0);
    CHECK(t.rolled(1) == "score j1@0:2,0,1");
    const std::vector<ticket> two = {t.begun.at(2), t.begun.at(1)}; // in any order
    CHECK(t.on(event::scored(1, 0, two)) == "score j2@0:0");
    CHECK(t.s.where().ready == 2);
    CHECK(t.on(event::score_failed(2, 0)) == "fail 0 teacher | start 3@0");
    CHECK(t.s.totals().retries == 1);
}

TEST_CASE("scoring: a ticket is known by its sequence, not by its slot alone") {
    settings o = stream(2, {.tau = 0});
    o.teacher_batch = 2;
    script t(o);
    t.staff(2);
    t.rolled(0);
    CHECK(t.rolled(1) == "score j1@0:0,1");
    std::vector<ticket> some = {t.begun.at(0), t.begun.at(1)};
    some[1].sample = 7; // who had the slot before
    CHECK(t.on(event::scored(1, 0, some)) == "score j2@0:1");
    CHECK(t.s.where().ready == 1);
}

TEST_CASE("a failed scoring call is made again with its sequences in their order") {
    settings o = stream(2, {.tau = 1});
    o.teacher_batch = 2;
    script t(o);
    t.staff(4);
    t.rolled(3);
    CHECK(t.rolled(2) == "score j1@0:3,2");
    t.rolled(1);
    CHECK(t.on(event::score_failed(1, 0)) == "score j2@0:3,2");
}

TEST_CASE("a rollout worker that dies: what ran there runs elsewhere, first admitted first") {
    script t(stream(2, {.tau = 1}));
    t.staff(4);
    const ticket zero = t.begun.at(0);
    t.up(stage::rollout, 1, 3);
    t.synced(1, 0);
    CHECK(t.down(stage::rollout, 0) == "start 0#2@1 | start 1#2@1 | start 2#2@1");
    CHECK(t.s.where().waiting == 1);
    CHECK(t.down(stage::rollout, 0) == "");
    CHECK(t.on(event::rolled_out(zero, {})) == ""); // from the dead
    CHECK(t.up(stage::rollout, 0, 1) == "sync 0 v0");
    CHECK(t.on(event::rolled_out(zero, {})) == "");
    CHECK(t.synced(0, 0) == "start 3#2@0");
    CHECK(t.s.totals().retries == 4);
    CHECK(t.s.totals().preempted == 4);
}

TEST_CASE("workers that are lost cost no sequence its attempts, however often") {
    settings o = stream(1, {.tau = 0});
    o.rollout_attempts = o.teacher_attempts = 2;
    script t(o);
    t.staff();
    for (int i = 2; i < 7; ++i) {
        CHECK(t.down(stage::rollout) == "");
        t.up(stage::rollout);
        CHECK(t.synced(0, 0) == "start 0#" + std::to_string(i) + "@0");
    }
    t.rolled(0);
    for (int i = 2; i < 7; ++i) {
        CHECK(t.down(stage::teacher) == "");
        CHECK(t.up(stage::teacher) == "score j" + std::to_string(i) + "@0:0");
    }
    CHECK(t.scored() == "train j7 v0:0");
    for (int i = 8; i < 13; ++i) { // learner_attempts = 1
        CHECK(t.down(stage::learner) == "");
        CHECK(t.up(stage::learner) == "train j" + std::to_string(i) + " v0:0");
    }
    t.learned();
    CHECK(t.synced(0, 1) == "step v1:0 | start 1@0 v1");
    CHECK(t.s.totals().preempted == 15);
    CHECK(t.s.totals().failed == 0);
}

TEST_CASE("an answer of a worker's former life may have tokens of weights that it has no more") {
    script t(stream(1, {.tau = 2, .outstanding = 3}));
    t.staff(2);
    t.up(stage::rollout, 1);
    t.synced(1, 0);
    const ticket two = t.begun.at(2);
    t.rolled(0);
    t.scored();
    CHECK(t.learned() == "sync v1");
    t.synced(1, 1);
    t.down(stage::rollout, 1);
    t.up(stage::rollout, 1);
    CHECK(t.on(event::rolled_out(two, {0, 1, 0.5, 3})) == ""); // no reason to throw
    CHECK(t.s.totals().late == 1);
    CHECK(t.synced(0, 1) == "step v1:0 | start 2#2@0 v1");
    CHECK(t.synced(1, 1) == "start 3@1 v1");
}

TEST_CASE("nobody waits for the answer of a worker that died in the synchronisation") {
    script t(stream(1, {.tau = 1}));
    t.staff(2);
    t.up(stage::rollout, 1);
    t.synced(1, 0);
    t.rolled(0);
    t.scored();
    t.learned();
    CHECK(t.synced(0, 1) == "");
    CHECK(t.down(stage::rollout, 1) == "step v1:0 | start 2@0 v1");
    CHECK(t.synced(1, 1) == ""); // the answer of the dead
    CHECK(t.s.totals().late == 1);
    // the last one dies: the version moves with nobody there
    t.rolled(1, 1);
    t.scored();
    CHECK(t.learned() == "sync v2");
    CHECK(t.down(stage::rollout, 0) == "step v2:1");
    CHECK(t.up(stage::rollout, 0, 2) == "sync 0 v2");
    CHECK(t.synced(0, 2) == "start 2#2@0 v2 | start 3@0 v2");
}

TEST_CASE("nobody waits for a worker that dies and comes back in the synchronisation") {
    script t(stream(1, {.tau = 1}));
    t.staff(2);
    t.up(stage::rollout, 1);
    t.synced(1, 0);
    t.rolled(0);
    t.scored();
    t.learned();
    CHECK(t.synced(1, 1) == "");
    CHECK(t.down(stage::rollout, 1) == "");
    CHECK(t.up(stage::rollout, 1) == "sync 1 v1");
    CHECK(t.synced(0, 1) == "step v1:0 | start 2@0 v1");
    CHECK(t.synced(1, 1) == "");
}

TEST_CASE("a worker that comes while the weights wait for running sequences gets first the old, then the new ones") {
    script t(whole(step_off{1}, 1, 3));
    t.staff();
    t.rolled(0);
    t.scored();
    CHECK(t.learned() == "");
    CHECK(t.up(stage::rollout, 1) == "sync 1 v0");
    CHECK(t.down(stage::rollout, 0) == ""); // sequence 1 waits for worker 1
    CHECK(t.synced(1, 0) == "start 1#2@1");
    CHECK(t.rolled(1) == "sync v1 | score j3@0:1");
    CHECK(t.synced(1, 1) == "step v1:0 | start 2@1 v1");
}

TEST_CASE("a teacher that dies gives its calls back; another takes them") {
    settings o = stream(2, {.tau = 0});
    o.teacher_batch = 2;
    o.teacher_attempts = 2;
    script t(o);
    t.staff(2);
    t.rolled(0);
    CHECK(t.rolled(1) == "score j1@0:0,1");
    CHECK(t.down(stage::teacher, 0) == "");
    CHECK(t.s.where().queued == 2);
    CHECK(t.scored(1, 0) == "");
    CHECK(t.s.totals().late == 1);
    CHECK(t.up(stage::teacher, 1) == "score j2@1:0,1");
    CHECK(t.on(event::score_failed(2, 1)) == "score j3@1:0,1");
    CHECK(t.down(stage::teacher, 1) == ""); // charged to nobody
    CHECK(t.up(stage::teacher, 1) == "score j4@1:0,1");
    CHECK(t.on(event::score_failed(4, 1)) == "fail 1 teacher | fail 0 teacher | start 2@0 | start 3@0");
}

TEST_CASE("a teacher past the deadline of one call loses both, and one is charged") {
    settings o = stream(2, {.tau = 0});
    o.teacher_deadline = 1;
    o.teacher_attempts = 1;
    script t(o);
    t.up(stage::learner);
    t.up(stage::teacher, 0, 2);
    t.up(stage::rollout, 0, 2);
    t.synced(0, 0);
    t.rolled(0);
    t.rolled(1);
    CHECK(t.wait() == "lost teacher 0 | fail 0 teacher | start 2@0"); // of the first call
    CHECK(t.s.where() == census{.rollout = 1, .queued = 1});
    CHECK(t.s.totals().preempted == 1);
}

TEST_CASE("a teacher with two slots takes two calls") {
    script t(stream(2, {.tau = 0}));
    t.up(stage::learner);
    t.up(stage::teacher, 3, 2);
    t.up(stage::rollout, 0, 2);
    t.synced(0, 0);
    CHECK(t.rolled(0) == "score j1@3:0");
    CHECK(t.rolled(1) == "score j2@3:1");
    CHECK(t.scored(2, 3) == "");
    CHECK(t.scored(1, 3) == "train j3 v0:0,1");
}

TEST_CASE("a learner that fails or dies: the same batch again, in front of what came since") {
    settings o = stream(1, {.tau = 2});
    o.learner_attempts = 3;
    script t(o);
    t.staff(3);
    t.rolled(1);
    CHECK(t.scored() == "train j2 v0:1");
    t.rolled(0);
    t.scored();
    CHECK(t.on(event::learn_failed(2)) == "train j4 v0:1");
    CHECK(t.down(stage::learner) == "");
    CHECK(t.learned(4) == "");
    CHECK(t.s.totals().late == 1);
    CHECK(t.up(stage::learner) == "train j5 v0:1");
    CHECK(t.on(event::learn_failed(5)) == "train j6 v0:1");
    CHECK(t.on(event::learn_failed(6)) == "fail 1 learner | start 3@0 | train j7 v0:0");
    CHECK(t.s.totals().failed_by[static_cast<int>(failure::learner)] == 1);
    CHECK(t.learned(7) == "sync v1");
    CHECK(t.down(stage::learner) == ""); // the update is done
    CHECK(t.synced(0, 1) == "step v1:0 | start 4@0 v1");
}

TEST_CASE("a learner that fails or dies: the same batch again, also where what has come since would go first") {
    settings o = stream(1, {.tau = 2, .outstanding = 2, .policy = staleness_policy::edf});
    o.learner_attempts = 3;
    script t(o);
    t.staff(2);
    CHECK(t.rolled(1) == "score j1@0:1");
    CHECK(t.scored() == "train j2 v0:1");
    t.learned(2);
    CHECK(t.synced(0, 1) == "step v1:1 | start 2@0 v1");
    t.rolled(2, 1);
    CHECK(t.scored() == "train j4 v1:2");
    t.rolled(0); // of a lower version than 2
    t.scored();
    CHECK(t.on(event::learn_failed(4)) == "train j6 v1:2");
    CHECK(t.down(stage::learner) == "");
    CHECK(t.s.where().training == 1);
    CHECK(t.learned(0) == ""); // no job at all
    CHECK(t.on(event::learn_failed(6)) == "");
    CHECK(t.up(stage::learner) == "train j7 v1:2");
    CHECK(t.learned(7) == "sync v2");
    CHECK(t.synced(0, 2) == "step v2:2 | start 3@0 v2 | train j8 v2:0");
    CHECK(t.on(event::learn_failed(8)) == "train j9 v2:0");
    CHECK(t.on(event::learn_failed(9)) == "train j10 v2:0");
    CHECK(t.on(event::learn_failed(10)) == "fail 0 learner | start 4@0 v2"); // and nothing else is ready
}

TEST_CASE("a batch has its own attempts, whatever became of the one before") {
    settings o = stream(1, {.tau = 2});
    o.learner_attempts = 2;
    script t(o);
    t.staff(3);
    t.rolled(0), t.scored();
    t.on(event::learn_failed(t.train_job));
    CHECK(t.on(event::learn_failed(t.train_job)) == "fail 0 learner | start 3@0"); // given up
    t.rolled(1), t.scored();
    CHECK(t.on(event::learn_failed(t.train_job)) == "train j6 v0:1"); // the first of the next one
    t.learned();                                                      // made, at the second attempt
    t.synced(0, 1);
    t.rolled(2, 0, 1), t.scored();
    CHECK(t.on(event::learn_failed(t.train_job)) == "train j9 v1:2");
}

TEST_CASE("whole batches: one whose sequences all fail is a step without an update") {
    settings o = whole(step_off{1}, 1, 2);
    o.rollout_attempts = 1;
    o.teacher_attempts = 1;
    script t(o);
    t.staff();
    CHECK(t.roll_failed(0) == "fail 0 rollout | start 1@0 | train j1 v0:");
    CHECK(t.on(event::learn_failed(1)) == "train j2 v0:"); // somebody must publish version 1
    CHECK(t.on(event::learned(2, 0)) == "");               // the weights change once nothing runs
    CHECK(t.roll_failed(1) == "fail 1 rollout | sync v1");
    CHECK(t.synced(0, 1) == "step v1: | start 2@0 v1 | train j3 v1:"); // two are still wanted
    CHECK(t.s.totals().empty_batches == 1);
    CHECK(t.on(event::learned(3, 0)) == "");
    CHECK(t.rolled(2, 1) == "sync v2 | score j4@0:2");
    t.scored(4);
    CHECK(t.synced(0, 2) == "step v2: | start 3@0 v2 | train j5 v2:2");
    CHECK(t.s.totals().empty_batches == 2);
    CHECK(t.s.totals().updates == 0);
}

TEST_CASE("whole batches: what fails for good makes its batch smaller") {
    settings o = whole(opd::sched::sync{}, 3, 3);
    o.rollout_attempts = o.teacher_attempts = 1;
    script t(o);
    t.staff(3);
    t.rolled(0), t.rolled(2);
    CHECK(t.roll_failed(1) == "fail 1 rollout | score j1@0:0,2");
    const std::vector<ticket> some = {t.begun.at(2)};
    CHECK(t.on(event::scored(1, 0, some)) == "fail 0 teacher | train j2 v0:2");
    t.learned();
    CHECK(t.synced(0, 1) == "step v1:2 | start 3@0 v1 | start 4@0 v1"); // two are still wanted
    CHECK(t.s.totals().short_batches == 1);
}

TEST_CASE("deadlines: an attempt is aborted, and its worker lost if it does not let go") {
    settings o = stream(1, {.tau = 0});
    o.rollout_deadline = 5;
    o.abort_deadline = 1;
    script t(o);
    t.staff();
    const ticket first = t.begun.at(0);
    CHECK(t.s.next_deadline() == 5);
    CHECK(t.wait() == "abort 0"); // the lane is taken by the one that hangs
    CHECK(t.s.where().waiting == 1);
    CHECK(t.s.next_deadline() == 6);
    t.now = 5.5;
    CHECK(t.aborted(first) == "start 0#2@0"); // it did let go
    CHECK(t.wait() == "abort 0#2");
    CHECK(t.now == 10.5);
    CHECK(t.wait() == "lost rollout 0");
    CHECK(t.now == 11.5);
    CHECK(t.s.totals().lost_workers == 1);
    CHECK(t.up(stage::rollout, 0) == "sync 0 v0");
    CHECK(t.synced(0, 0) == "start 0#3@0");
    CHECK(t.wait() == "abort 0#3 | fail 0 rollout");
    CHECK(t.s.where().outstanding() == 0);
}

TEST_CASE("deadlines: an attempt that was answered is not aborted, and an answer that comes just then is in time") {
    settings o = stream(1, {.tau = 0});
    o.rollout_deadline = 5;
    for (const double when : {4.0, 5.0}) {
        script t(o);
        t.staff();
        t.now = when;
        CHECK(t.rolled(0) == "score j1@0:0");
        CHECK(t.wait() == "for ever");
    }
}

TEST_CASE("deadlines: teacher and learner") {
    settings o = stream(1, {.tau = 0});
    o.teacher_deadline = o.learner_deadline = 5;
    o.learner_attempts = 2;
    script t(o);
    t.staff();
    CHECK(t.rolled(0) == "score j1@0:0");
    CHECK(t.wait() == "lost teacher 0");
    CHECK(t.up(stage::teacher) == "score j2@0:0");
    CHECK(t.scored() == "train j3 v0:0");
    CHECK(t.wait() == "lost learner 0");
    CHECK(t.learned(3) == "");
    CHECK(t.s.totals().late == 1);
    CHECK(t.up(stage::learner) == "train j4 v0:0");
    CHECK(t.wait() == "lost learner 0 | fail 0 learner | start 1@0"); // a missed deadline is an attempt
    t.up(stage::learner);
    t.rolled(1), t.scored();
    CHECK(t.learned() == "sync v1");
    CHECK(t.wait() == "for ever");
}

TEST_CASE("deadlines: a worker that comes has its time for the weights, from then on") {
    settings o = stream(1, {.tau = 0});
    o.sync_deadline = 5;
    script t(o);
    t.up(stage::rollout);
    t.now = 3;
    t.down(stage::rollout);
    CHECK(t.up(stage::rollout) == "sync 0 v0");
    CHECK(t.wait() == "lost rollout 0");
    CHECK(t.now == 8);
    CHECK(t.up(stage::rollout) == "sync 0 v0");
    CHECK(t.synced(0, 0) == "start 0@0");
    CHECK(t.wait() == "for ever");
}

TEST_CASE("deadlines: a worker that hangs in the synchronisation is lost, and the step is made without it") {
    settings o = stream(1, {.tau = 1});
    o.sync_deadline = 5;
    script t(o);
    t.staff(2);
    t.up(stage::rollout, 1);
    t.synced(1, 0);
    t.rolled(0);
    t.scored();
    t.learned();
    t.synced(1, 1);
    CHECK(t.wait() == "lost rollout 0 | step v1:0 | start 1#2@1 v1"); // and no other
    CHECK(t.s.where() == census{.rollout = 1});
}

TEST_CASE("deadlines: who installs other weights than the version's still has to install those") {
    settings o = stream(1, {.tau = 1});
    o.sync_deadline = 5;
    script t(o);
    t.staff(2);
    t.now = 1;
    t.up(stage::rollout, 1);
    t.now = 2;
    t.rolled(0), t.scored(), t.learned(), t.synced(0, 1);
    t.now = 3;
    CHECK(t.synced(1, 0) == "sync 1 v1"); // a version too late
    CHECK(t.wait() == "lost rollout 1");
    CHECK(t.now == 8);
}

TEST_CASE("deadlines: a state that is saved has the time of each") { // the script restores it after every event
    settings o = stream(1, {.tau = 2});
    o.teacher_batch = 2;
    o.teacher_flush = 2;
    o.rollout_deadline = 100, o.abort_deadline = 1, o.teacher_deadline = 3, o.learner_deadline = 4, o.sync_deadline = 5;
    script t(o);
    const auto due = [&] { return t.s.next_deadline() - t.now; };
    t.now = 1, t.staff(3);
    t.now = 2, t.up(stage::rollout, 1);
    CHECK(due() == 5);
    t.now = 3, t.synced(1, 0);
    CHECK(due() == 98); // of what was started at 1
    t.now = 4, t.rolled(0);
    CHECK(due() == 3); // it is scored at once: the idle learner waits for it
    t.now = 5, t.scored();
    CHECK(due() == 4);
    t.now = 6, t.rolled(1);
    CHECK(due() == 2); // until it is scored alone
    t.now = 7, t.learned();
    CHECK(due() == 1);
    CHECK(t.wait() == "score j3@0:1");
    CHECK(due() == 3);
    t.now = 9, t.scored();
    CHECK(due() == 3); // of the synchronisation, which began at 7
    t.synced(0, 1);
    CHECK(t.synced(1, 1) == "step v1:0 | start 3@1 v1 | train j4 v1:1");
    t.now = 100, t.learned();
    t.synced(0, 2), t.synced(1, 2);
    CHECK(t.wait() == "abort 2 | start 2#2@0 v2"); // begun at 1
    CHECK(due() == 1);
}

TEST_CASE("deadlines that a restore brings hold for what runs already") {
    settings o = stream(1, {.tau = 1});
    script t(o);
    t.staff(2);
    CHECK(t.wait() == "for ever");
    o.rollout_deadline = 3;
    t.s = scheduler::restore(o, t.s.snapshot());
    t.now = 1, t.of(event::kind::tick);
    CHECK(t.wait() == "abort 0 | abort 1");
    CHECK(t.now == 3);
}

TEST_CASE("teacher calls: by size, by time, when nothing else comes, when the learner waits for it") {
    settings o = stream(4, {.tau = 1});
    o.teacher_batch = 2;
    script t(o);
    t.staff(8);
    CHECK(t.rolled(0) == "");
    CHECK(t.s.next_deadline() < opd::sched::forever);
    CHECK(t.wait() == "score j1@0:0");
    t.scored();
    t.rolled(1);
    CHECK(t.rolled(2) == "score j2@0:1,2");
    CHECK(t.wait() == "for ever"); // those have gone
    t.scored();
    CHECK(t.rolled(3) == "score j3@0:3"); // with it the idle learner has a batch
    CHECK(t.scored() == "train j4 v0:0,1,2,3");
    CHECK(t.rolled(4) == ""); // the learner is busy
    CHECK(t.rolled(5) == "score j5@0:4,5");
    t.scored();
    CHECK(t.rolled(6) == "");
    CHECK(t.rolled(7) == "score j6@0:6,7");
}

TEST_CASE("teacher calls: when nothing is in rollout a smaller one is made") {
    settings o = stream(4, {.tau = 0}, 3);
    o.teacher_batch = 8;
    script t(o);
    t.staff(8);
    t.rolled(0), t.rolled(1);
    CHECK(t.rolled(2) == "score j1@0:0,1,2");
    CHECK(t.scored() == "train j2 v0:0,1,2"); // and no more than three are wanted
}

TEST_CASE("teacher calls: teacher_flush = 0 makes them at once") {
    settings o = stream(4, {.tau = 0});
    o.teacher_batch = 4;
    o.teacher_flush = 0;
    script t(o);
    t.staff(8);
    CHECK(t.rolled(0) == "score j1@0:0");
    CHECK(t.s.next_deadline() == opd::sched::forever);
    CHECK(t.rolled(1) == ""); // the teacher is busy
    CHECK(t.rolled(2) == "");
    CHECK(t.scored() == "score j2@0:1,2");
}

TEST_CASE("teacher calls: what was dropped for staleness does not hurry what comes after it") {
    settings o = stream(2, {.tau = 0, .outstanding = 4, .policy = staleness_policy::drop});
    o.teacher_batch = 2;
    script t(o);
    t.staff(4);
    t.rolled(0);
    CHECK(t.rolled(1) == "score j1@0:0,1");
    t.scored();
    CHECK(t.rolled(2) == ""); // waits for the flush timer
    t.down(stage::teacher);
    CHECK(t.wait() == ""); // due, but nobody is there
    t.learned();
    CHECK(t.synced(0, 1) == "step v1:0,1 | fail 2 stale | abort 3 | fail 3 stale | "
                            "start 4@0 v1 | start 5@0 v1 | start 6@0 v1");
    t.up(stage::teacher);
    CHECK(t.aborted(t.begun.at(3)) == "start 7@0 v1");
    CHECK(t.rolled(4, 1) == ""); // waits for its own timer
    CHECK(t.wait() == "score j3@0:4");
}

TEST_CASE("drop gives up what would exceed tau, retry starts it again") {
    for (const auto policy : {staleness_policy::drop, staleness_policy::retry}) {
        CAPTURE(name_of(policy));
        script t(stream(1, {.tau = 1, .outstanding = 4, .policy = policy}));
        t.staff(4);
        for (version_t v = 0; v < 2; ++v) {
            const auto next = v == 0 ? 0u : 4u;
            t.rolled(next, v); // 1, 2, 3 are overtaken
            t.scored();
            if (v == 1) {
                t.rolled(2, 0, 1); // scored
                t.scored();
                t.down(stage::teacher);
                t.rolled(3, 0, 1); // queued
            }
            t.learned();
            const bool drop = policy == staleness_policy::drop;
            CHECK(t.synced(0, v + 1) ==
                  (v == 0 ? "step v1:0 | start 4@0 v1"
                   : drop ? "step v2:4 | abort 1 | fail 1 stale | fail 2 stale | fail 3 stale | "
                            "start 5@0 v2 | start 6@0 v2 | start 7@0 v2"
                          : "step v2:4 | abort 1 | start 3#2@0 v2 | start 2#2@0 v2 | start 1#2@0 v2"));
        }
        CHECK(t.s.totals().failed == (policy == staleness_policy::drop ? 3 : 0));
        CHECK(t.s.totals().restarts == (policy == staleness_policy::retry ? 3 : 0));
    }
}

TEST_CASE("retry: a sequence that is being scored starts again, and the answer no longer concerns it") {
    script t(stream(1, {.tau = 0, .outstanding = 2, .policy = staleness_policy::retry}));
    t.staff(2);
    t.up(stage::teacher, 1);
    t.rolled(0);
    t.rolled(1); // in scoring when the version moves
    CHECK(t.scored(1, 0) == "train j3 v0:0");
    t.learned();
    CHECK(t.synced(0, 1) == "step v1:0 | start 1#2@0 v1 | start 2@0 v1");
    CHECK(t.scored(2, 1) == "");
    CHECK(t.s.where().ready == 0);
    CHECK(t.rolled(1, 1) == "score j4@0:1");
}

TEST_CASE("edf holds back what would let a deadline be missed, and says how much room is left") {
    script t(stream(1, {.tau = 1, .policy = staleness_policy::edf}));
    t.staff(2);
    t.rolled(0);
    t.scored();
    CHECK(t.s.slack() == 0); // the other must be in the very next batch
    t.learned();
    CHECK(t.synced(0, 1) == "step v1:0 | start 2@0 v1");
    t.rolled(2, 1);
    CHECK(t.scored() == "");
    CHECK(t.s.held_back());
    t.rolled(1, 0, 1);
    CHECK(t.scored() == "train j5 v1:1");
    CHECK_FALSE(t.s.held_back());
    script u(stream(1, {.tau = 1}));
    CHECK(u.s.slack() == -1);
    script w(stream(1, {.tau = 2, .outstanding = 2, .policy = staleness_policy::edf}));
    w.staff(2);
    w.rolled(0);
    w.scored();
    CHECK(w.s.slack() == 1); // two steps for one other
}

TEST_CASE("in_order takes sequences as they were admitted, cohort_fifo by the version of their start") {
    for (const auto policy : {staleness_policy::in_order, staleness_policy::cohort_fifo}) {
        script t(stream(1, {.tau = 2, .policy = policy}));
        t.staff(3);
        t.rolled(1);
        CHECK(t.scored() == (policy == staleness_policy::in_order ? "" : "train j2 v0:1"));
        CHECK(t.s.held_back() == (policy == staleness_policy::in_order));
        t.rolled(0);
        CHECK(t.scored() == (policy == staleness_policy::in_order ? "train j3 v0:0" : ""));
    }
}

TEST_CASE("each deadline is that of its own setting") {
    settings o = stream(2, {.tau = 1});
    o.teacher_batch = 2;
    o.teacher_flush = 1, o.rollout_deadline = 20, o.abort_deadline = 3;
    o.teacher_deadline = 4, o.learner_deadline = 5, o.sync_deadline = 6;
    script t(o);
    t.up(stage::teacher);
    t.up(stage::rollout, 0, 2);
    CHECK(t.s.next_deadline() == 6); // to install
    t.now = 5;
    t.synced(0, 0);
    CHECK(t.s.next_deadline() == 25); // to roll out
    t.of(kind::pause);
    t.rolled(0);
    CHECK(t.s.next_deadline() == 6); // to wait for a fuller call
    CHECK(t.wait() == "score j1@0:0");
    CHECK(t.s.next_deadline() == 10); // to score
    t.scored();
    CHECK(t.s.next_deadline() == 25);
    t.of(kind::resume);
    t.rolled(1);
    t.scored();
    CHECK(t.up(stage::learner) == "train j3 v0:0,1");
    CHECK(t.s.next_deadline() == 11); // to train
    t.now = 10;
    CHECK(t.learned() == "sync v1");
    CHECK(t.s.next_deadline() == 16); // to install
    t.synced(0, 1);
    CHECK(t.wait() == "abort 2 | abort 3");
    CHECK(t.now == 26);
    CHECK(t.s.next_deadline() == 29); // to let go
}

TEST_CASE("time never runs backwards") {
    script t(stream(1, {.tau = 0}));
    t.now = 2;
    t.staff();
    for (const double wrong : {1.0, std::nan(""), opd::sched::forever}) {
        t.now = wrong;
        check_refused(t, event::of(kind::tick), "time is finite and never decreases");
    }
}

TEST_CASE("naive_wait: two sequences share a deadline, one step can take only one, and it waits for ever") {
    script t(stream(1, {.tau = 2, .policy = staleness_policy::naive_wait, .negative_control = true}));
    t.staff(3);
    t.rolled(0);
    t.scored();
    t.learned();
    t.synced(0, 1);
    t.rolled(3, 1);
    t.scored();
    t.learned();
    t.synced(0, 2); // 1 and 2 are of version 0, their last step is this one
    t.rolled(4, 2);
    CHECK(t.scored() == "");
    t.rolled(1, 0, 2);
    CHECK(t.scored() == "");
    t.rolled(2, 0, 2);
    CHECK(t.scored() == "");
    CHECK(t.s.where() == census{.ready = 3}); // all that is outstanding is scored
    CHECK(t.s.held_back());
}

TEST_CASE("areal: admission by its own rule") {
    script t(stream(2, {.tau = 1, .policy = staleness_policy::areal, .concurrency = 3}));
    t.staff(8);
    CHECK(t.begun.size() == 3); // of at most (1 + 0 + 1)·2 = 4, three at a time
    CHECK(t.rolled(0) == "start 3@0 | score j1@0:0");
    CHECK(t.rolled(1) == "");
    CHECK(t.scored() == "score j2@0:1");
    CHECK(t.scored() == "train j3 v0:0,1");
    t.learned();
    CHECK(t.synced(0, 1) == "step v1:0,1 | start 4@0 v1"); // 6 in all now, three at a time
}

TEST_CASE("groups are started all or none, and whole again after a failure") {
    settings o = stream(2, {.tau = 1, .outstanding = 4}, 4);
    o.group = 2;
    o.rollout_attempts = 1;
    script t(o);
    t.staff(1);
    CHECK(t.s.where() == census{.waiting = 1, .rollout = 1}); // a lane for one, permits for both
    CHECK(t.roll_failed(0) == "fail 0 rollout | start 1@0");
    CHECK(t.s.cursor() == 2);
    CHECK(t.rolled(1) == "start 2@0 | score j1@0:1");
    CHECK(t.s.cursor() == 4); // three of four: one is missing, so one more prompt will come
    t.scored();
    CHECK(t.rolled(2) == "start 3@0 | score j2@0:2");
    t.scored();
    t.rolled(3);
    CHECK(t.s.cursor() == 4); // one permit was free, a group takes two
    t.learned();
    CHECK(t.synced(0, 1) == "step v1:1,2 | start 4@0 v1");
    CHECK(t.s.cursor() == 6);
}

TEST_CASE("whole batches of groups: a failure is made up for by a whole group") {
    settings o = whole(opd::sched::sync{}, 4, 4);
    o.group = 2;
    o.rollout_attempts = 1;
    script t(o);
    t.staff(4);
    t.rolled(0), t.rolled(1), t.rolled(2);
    CHECK(t.roll_failed(3) == "fail 3 rollout | score j1@0:0,1,2");
    t.scored();
    t.learned();
    CHECK(t.synced(0, 1) == "step v1:0,1,2 | start 4@0 v1 | start 5@0 v1");
}

TEST_CASE("a group of which one failed, with too few permits left for another: the rest makes a smaller batch") {
    settings o = stream(2, {.tau = 0});
    o.group = 2;
    o.rollout_attempts = 1;
    script t(o);
    t.staff(2);
    t.roll_failed(0);
    t.rolled(1);
    CHECK(t.scored() == "train j2 v0:1");
    CHECK(t.s.totals().short_batches == 0);
    t.learned();
    CHECK(t.synced(0, 1) == "step v1:1 | start 2@0 v1 | start 3@0 v1");
    CHECK(t.s.totals().short_batches == 1);
}

TEST_CASE("resize: more permits at once, fewer as they return") {
    script t(stream(1, {.tau = 3, .outstanding = 2}));
    t.staff(8);
    CHECK(t.of(kind::resize, 4) == "start 2@0 | start 3@0");
    CHECK(t.of(kind::resize, 1) == "");
    CHECK(t.s.where().outstanding() == 4);
    t.rolled(0);
    t.scored();
    t.learned();
    CHECK(t.synced(0, 1) == "step v1:0");
    check_refused(t, event::of(kind::resize, 5), "at most (tau + 1)");
    check_refused(t, event::of(kind::resize, 0), "at least");
    check_refused(t, event::of(kind::resize, -3), "at least");
    script u(whole(opd::sched::sync{}, 2));
    check_refused(u, event::of(kind::resize, 4), "only async");
    script v(stream(1, {.tau = 1, .policy = staleness_policy::areal}));
    check_refused(v, event::of(kind::resize, 2), "only async");
}

TEST_CASE("pause: nothing new starts, what runs goes on") {
    script t(stream(1, {.tau = 1}));
    t.staff(1);
    CHECK(t.of(kind::pause) == "");
    CHECK(t.rolled(0) == "score j1@0:0");
    CHECK(t.scored() == "train j2 v0:0");
    CHECK(t.learned() == "sync v1");
    CHECK(t.synced(0, 1) == "step v1:0");
    CHECK(t.of(kind::resume) == "start 1@0 v1");
    CHECK(t.of(kind::pause) == "");
    CHECK(t.roll_failed(1) == "");
    CHECK(t.of(kind::resume) == "start 1#2@0 v1");
}

TEST_CASE("close: what is outstanding is finished, with its retries, and the last batch may be short") {
    script t(stream(2, {.tau = 1}));
    t.staff(3);
    CHECK(t.of(kind::close) == "");
    t.rolled(0);
    t.scored();
    t.rolled(1);
    CHECK(t.scored() == "train j3 v0:0,1");
    CHECK(t.roll_failed(2) == "start 2#2@0"); // it was admitted
    t.learned();
    CHECK(t.synced(0, 1) == "step v1:0,1");
    t.rolled(2, 0, 1);
    CHECK(t.scored() == "train j5 v1:2");
    t.learned();
    CHECK(t.synced(0, 2) == "step v2:2 | finished");
    CHECK(t.s.finished());
    CHECK(t.s.totals().short_batches == 1);
}

TEST_CASE("close: what was admitted and waits for a lane is started, under every schedule") {
    for (const schedule& how :
         {schedule{opd::sched::sync{}}, schedule{step_off{1}}, schedule{controlled{1}}, schedule{async{.tau = 1}}}) {
        script t(whole(how, 1));
        t.staff();
        t.down(stage::rollout); // what ran there waits
        t.of(kind::close);
        t.up(stage::rollout);
        CHECK(t.synced(0, 0) == "start 0#2@0");
        CHECK(t.rolled(0) == "score j1@0:0");
        CHECK(t.scored() == "train j2 v0:0");
        CHECK(t.learned() == "sync v1");
        CHECK(t.synced(0, 1) == "step v1:0 | finished");
    }
}

TEST_CASE("close before anything began, and after the end") {
    script t(stream(2, {.tau = 1}));
    CHECK(t.of(kind::close) == "finished");
    CHECK(t.of(kind::close) == "");
    CHECK(t.of(kind::stop) == "");
    CHECK(t.of(kind::resume) == "");
}

TEST_CASE("stop: everything outstanding is given up and reported, wherever it is") {
    for (const schedule& how : {schedule{step_off{1}}, schedule{async{.tau = 3}}}) {
        settings o = whole(how, 2);
        o.teacher_batch = 1;
        script t(o);
        t.staff(2);
        t.rolled(0);
        if (t.begun.size() < 4) t.rolled(1);
        while (t.s.where().training == 0) t.scored();
        const auto outstanding = t.s.where().outstanding();
        const std::string said = t.of(kind::stop);
        CHECK(said.find("finished") != std::string::npos);
        CHECK(t.s.where().outstanding() == 0);
        CHECK(t.s.totals().failed_by[static_cast<int>(failure::stopped)] == outstanding);
        const std::string state = said.substr(said.size() - 8);
        CHECK(state == "finished");
        t.learned();
        t.scored();
        for (const auto& [n, ticket] : t.begun) CHECK(t.on(event::rolled_out(ticket, {})) == "");
        CHECK(t.s.totals().consumed == 0);
    }
}

TEST_CASE("stop in the middle of a synchronisation: what was trained is consumed") {
    script t(stream(1, {.tau = 1}));
    t.staff(2);
    t.rolled(0);
    t.scored();
    t.learned();
    CHECK(t.of(kind::stop) == "step v1:0 | abort 1 | fail 1 stopped | finished"); // the update was made
    CHECK(t.synced(0, 1) == "");
    CHECK(t.s.version() == 1);
    CHECK(t.s.totals().updates == 1);
}

TEST_CASE("the source ends: what it gave is consumed, and the run ends") {
    settings o = stream(2, {.tau = 1});
    o.available = 3;
    script t(o);
    t.staff(4);
    CHECK(t.begun.size() == 3);
    for (const sample_t n : {0, 1, 2}) {
        t.rolled(n);
        t.scored();
    }
    t.learned();
    CHECK(t.synced(0, 1) == "step v1:0,1 | train j5 v1:2");
    t.learned();
    CHECK(t.synced(0, 2) == "step v2:2 | finished");
}

TEST_CASE("sequences that failed are made up for until enough are consumed") {
    settings o = stream(2, {.tau = 0}, 2);
    o.rollout_attempts = 1;
    script t(o);
    t.staff(2);
    CHECK(t.roll_failed(1) == "fail 1 rollout | start 2@0");
    t.rolled(0);
    t.scored();
    t.rolled(2);
    CHECK(t.scored() == "train j3 v0:0,2");
    t.learned();
    CHECK(t.synced(0, 1) == "step v1:0,2 | finished");
}

TEST_CASE("a worker with another number of slots") {
    script t(stream(4, {.tau = 1}));
    t.staff(2);
    CHECK(t.up(stage::rollout, 0, 3) == "start 2@0");
    CHECK(t.up(stage::rollout, 0, 1) == "");
    CHECK(t.rolled(2) == "score j1@0:2"); // that lane is no more
    CHECK(t.rolled(1) == "");
    CHECK(t.rolled(0) == "start 3@0");
    CHECK(t.up(stage::rollout, 0, 3) == "start 4@0 | start 5@0");
}

TEST_CASE("events that no driver can mean are refused and change nothing") {
    script t(stream(2, {.tau = 1}));
    t.staff(2);
    check_refused(t, event::down(stage::teacher, -1), "teacher worker -1");
    check_refused(t, event::up(stage::rollout, -1), "rollout worker -1");
    check_refused(t, event::up(stage::rollout, 1 << 16), "settings.most_workers = 65536");
    check_refused(t, event::up(stage::teacher, 0, (1 << 16) + 1), "settings.most_slots = 65536");
    check_refused(t, event::up(stage::teacher, 0, -1), "with -1 slots");
    check_refused(t, event::up(stage::learner, 1), "one learner");
    check_refused(t, event::up(stage::learner, 0, 2), "with 2 slots");
    check_refused(t, event::synced(0, 99), "weights of job 99, which is none");
    CHECK_THROWS_AS(t.s.on(event::down(stage::rollout, 0), t.now, t.out), opd::invalid_input); // of no life
    check_refused(t, event::rolled_out(t.begun.at(0), {0, 1, 0.5, 10}), "versions 0 to 1");
    check_refused(t, event::rolled_out(t.begun.at(0), {-1, 0, 0, 10}), "started at version 0");
    check_refused(t, event::rolled_out(t.begun.at(0), {0, 0, 0, -1}), "-1 tokens");
    CHECK(t.rolled(0) != "");
    t.rolled(1);
    t.scored(1), t.scored(2);
    check_refused(t, event::learned(t.train_job, -1), "-1 updates");
}

TEST_CASE("tokens older than a sequence's start are refused: it was started again since") {
    script t(stream(1, {.tau = 1, .update = weight_update::abort}));
    t.staff(2);
    t.rolled(0);
    t.scored();
    t.learned();
    t.synced(0, 1);
    check_refused(t, event::rolled_out(t.begun.at(1), {0, 1, 0.5, 10}), "started at version 1");
}

TEST_CASE("updates are counted with the step that they belong to") {
    script t(stream(1, {.tau = 0}, 1));
    t.staff();
    t.rolled(0);
    t.scored();
    t.on(event::learned(t.train_job, 4));
    CHECK(t.s.totals().updates == 0);
    t.synced(0, 1);
    CHECK(t.s.totals().updates == 4);
}

TEST_CASE("an empty batch adds no updates, and a batch's failures are not the next one's") {
    settings o = whole(opd::sched::sync{}, 1, 2);
    o.rollout_attempts = 1;
    o.learner_attempts = 2;
    script t(o);
    t.staff();
    t.rolled(0);
    t.scored();
    CHECK(t.on(event::learn_failed(t.train_job)) == "train j3 v0:0");
    t.on(event::learned(t.train_job, 4));
    CHECK(t.synced(0, 1) == "step v1:0 | start 1@0 v1");
    CHECK(t.roll_failed(1) == "fail 1 rollout | train j4 v1:");
    CHECK(t.on(event::learned(4, 0)) == "sync v2");
    CHECK(t.synced(0, 2) == "step v2: | start 2@0 v2");
    CHECK(t.s.totals().updates == 4);
    t.rolled(2, 2);
    t.scored();
    CHECK(t.on(event::learn_failed(t.train_job)) == "train j7 v2:2"); // its first
    t.on(event::learned(t.train_job, 1));
    CHECK(t.synced(0, 3) == "step v3:2 | finished");
    CHECK(t.s.totals().updates == 5);
}

TEST_CASE("areal: what failed after its rollout leaves room for one more in all, not for one more at a time") {
    settings o = stream(2, {.tau = 0, .policy = staleness_policy::areal, .concurrency = 1});
    o.teacher_attempts = 1;
    script t(o);
    t.staff(4);
    CHECK(t.rolled(0) == "start 1@0 | score j1@0:0");
    CHECK(t.on(event::score_failed(1, 0)) == "fail 0 teacher"); // 1 runs
    CHECK(t.rolled(1) == "start 2@0 | score j2@0:1");
    CHECK(t.s.where().rollout == 1);
}

TEST_CASE("a run that begins where another left its weights does as one from 0, with its numbers moved") {
    const version_t v = 7;
    const sample_t n = 30;
    // every answer at once, in the order of the questions
    const auto told = [](settings s, version_t less_v, sample_t less_n) {
        s.first_version = less_v, s.first_sample = less_n;
        scheduler x(s);
        CHECK(x.version() == less_v);
        CHECK(x.weights() == weights{less_v, 0});
        std::deque<event> mail = {event::up(stage::learner, 0), event::up(stage::teacher, 0),
                                  event::up(stage::rollout, 0, 3), event::up(stage::rollout, 1, 2)};
        std::string log;
        actions out;
        for (double now = 0; !mail.empty() && !x.finished(); ++now) {
            const event e = mail.front();
            mail.pop_front();
            out.clear();
            x.on(opd::test::stamped(x, e), now, out);
            x.check_invariants();
            CHECK(scheduler::restore(s, x.snapshot()).snapshot() == x.snapshot());
            for (action& a : out.items) {
                using what = action::kind;
                if (a.what == what::start) {
                    const version_t drawn = x.version();
                    mail.push_back(event::rolled_out(a.ticket, {drawn, drawn, static_cast<double>(drawn), 5}));
                }
                if (a.what == what::abort) mail.push_back(event::aborted(a.ticket));
                if (a.what == what::score) mail.push_back(event::scored(a.job, a.worker));
                if (a.what == what::train) mail.push_back(event::learned(a.job));
                if (a.what == what::sync)
                    for (std::int32_t w = 0; w < 2; ++w)
                        if (a.worker < 0 || a.worker == w) mail.push_back(event::synced(w, a.job));
                const bool counts =
                    a.what == what::start || a.what == what::train || a.what == what::sync || a.what == what::step;
                if (counts) a.version -= less_v;
                if (a.what == what::start || a.what == what::abort) a.ticket.sample -= less_n;
            }
            for (ticket& t : out.tickets) t.sample -= less_n;
            for (auto& c : out.consumed) c.ticket.sample -= less_n, c.start -= less_v;
            log += opd::test::line_of(out) + "\n";
        }
        CHECK(x.finished());
        CHECK(x.totals().consumed == s.sequences);
        CHECK(x.version() == less_v + 6);
        CHECK(x.cursor() == less_n + static_cast<sample_t>(x.totals().admitted));
        return log;
    };
    using policy = staleness_policy;
    std::vector<settings> all = {whole(opd::sched::sync{}, 6, 36), whole(step_off{2}, 6, 36),
                                 whole(controlled{1}, 6, 36)};
    for (const policy p :
         {policy::capacity, policy::cohort_fifo, policy::edf, policy::drop, policy::retry, policy::in_order})
        all.push_back(whole(async{.tau = 2, .policy = p}, 6, 36));
    all.push_back(whole(async{.tau = 1, .policy = policy::areal, .concurrency = 4}, 6, 36));
    all.push_back(whole(async{.tau = 1, .update = weight_update::abort}, 6, 36));
    for (settings& s : all)
        for (const opd::index_t group : {1, 3}) {
            s.group = group;
            CHECK(told(s, v, n) == told(s, 0, 0));
        }
}

TEST_CASE("a flush that is due while others still install is made") {
    settings o = stream(1, {.tau = 2});
    o.teacher_batch = 4, o.teacher_flush = 5;
    script t(o);
    t.staff(2);
    t.up(stage::rollout, 1);
    t.synced(1, 0);
    CHECK(t.rolled(0) == "score j1@0:0"); // all that the idle learner waits for
    t.scored();
    CHECK(t.learned() == "sync v1");
    t.now = 1;
    CHECK(t.rolled(1) == ""); // it waits for three more, or until 6
    t.now = 6;
    CHECK(t.synced(0, 1) == "score j3@0:1");
}

TEST_CASE("attempts of one sequence count on beyond 65,535, and so does a snapshot of them") {
    const settings o = stream(1, {.tau = 0});
    scheduler s(o);
    actions out;
    std::vector<std::uint32_t> attempts;
    const auto on = [&](scheduler& to, const event& e) {
        out.clear();
        to.on(e, 0, out);
        for (const action& a : out.items)
            if (a.what == action::kind::start) attempts.push_back(a.ticket.attempt);
    };
    on(s, event::up(stage::rollout, 0).of_life(1));
    on(s, event::synced(0, 0).of_life(1));
    for (int i = 0; i < 66000; ++i) on(s, event::parked(out.items.at(0).ticket, {0, 0, 0, 1}));
    CHECK(attempts.size() == 66001);
    s.check_invariants();
    scheduler again = scheduler::restore(o, s.snapshot());
    again.abandon_workers();
    on(again, event::up(stage::rollout, 0).of_life(2));
    on(again, event::synced(0, 0).of_life(2));
    CHECK(attempts.size() == 66002);
    CHECK(std::adjacent_find(attempts.begin(), attempts.end(), std::greater_equal<>()) == attempts.end());
}

TEST_CASE("what a message names takes no memory before it is there") {
    script t(stream(1, {.tau = 1}));
    t.staff(1);
    const std::size_t before = t.s.snapshot().size();
    CHECK(t.on(event::synced((1 << 16) - 1, 0).of_life(1)) == "");
    CHECK(t.on(event::scored(1, (1 << 16) - 1).of_life(7)) == "");
    CHECK(t.s.totals().late == 2);
    CHECK(t.s.snapshot().size() == before);
    check_refused(t, event::synced(1 << 16, 0).of_life(1), "most_workers");
    settings o = stream(1, {.tau = 1});
    o.most_workers = 1, o.most_slots = 2;
    script few(o);
    few.staff(2);
    check_refused(few, event::up(stage::rollout, 1), "most_workers = 1");
    check_refused(few, event::up(stage::rollout, 0, 3), "most_slots = 2");
}

// --- runs in which nothing is learnt from any more -------------------------------------------------------------------

TEST_CASE("a run ends as failed after as many sequences in a row as make the steps, none learnt from in between") {
    settings o = stream(2, {.tau = 1});
    o.fruitless_steps = 2, o.rollout_attempts = 2;
    script t(o);
    t.staff(4);
    CHECK(t.roll_failed(0) == "start 0#2@0"); // an attempt is no sequence
    CHECK(t.roll_failed(0) == "fail 0 rollout | start 4@0");
    for (sample_t n : {1, 2}) t.roll_failed(n), t.roll_failed(n);
    t.rolled(3);
    CHECK_FALSE(t.s.failed());
    t.scored(), t.rolled(4), t.scored(), t.learned();
    CHECK(t.synced(0, 1).substr(0, 11) == "step v1:3,4"); // that counts from the beginning
    for (sample_t n : {5, 6, 7}) t.roll_failed(n), t.roll_failed(n);
    CHECK_FALSE(t.s.failed());
    CHECK(t.roll_failed(8) == "start 8#2@0 v1");
    CHECK(t.roll_failed(8).substr(0, 17) == "fail 8 rollout | ");
    CHECK(t.s.finished());
    CHECK(t.s.failed() == stage::rollout);
    CHECK(t.out.items.back().what == action::kind::finished);
    CHECK(scheduler::restore(o, t.s.snapshot()).failed() == stage::rollout);
    scheduler again = scheduler::restore(o, t.s.snapshot());
    again.abandon_workers(false, true);
    CHECK_FALSE(again.failed());
    CHECK_FALSE(again.finished());
}

TEST_CASE("whole batches that fail are steps, and so is the learner's failure to publish without sequences") {
    settings o = whole(opd::sched::sync{}, 2);
    o.fruitless_steps = 2, o.rollout_attempts = 1;
    script t(o);
    t.staff(2);
    t.roll_failed(0);
    CHECK(t.roll_failed(1) == "fail 1 rollout | train j1 v0:");
    t.learned();
    t.synced(0, 1);
    t.roll_failed(2);
    CHECK(t.roll_failed(3).substr(0, 25) == "fail 3 rollout | finished");
    CHECK(t.s.failed() == stage::rollout);

    script l(o);
    l.staff(2);
    l.rolled(0), l.rolled(1), l.scored();
    CHECK(l.on(event::learn_failed(l.train_job)) == "fail 0 learner | fail 1 learner | train j3 v0:");
    CHECK(l.on(event::learn_failed(l.train_job)) == "finished");
    CHECK(l.s.failed() == stage::learner);
}

TEST_CASE("0 steps: a run in which everything fails goes on") {
    settings o = stream(1, {.tau = 1});
    o.fruitless_steps = 0, o.rollout_attempts = 1;
    script t(o);
    t.staff(1);
    for (sample_t n = 0; n < 100; ++n) t.roll_failed(n);
    CHECK_FALSE(t.s.finished());
}

// --- weights that are lost after they came ---------------------------------------------------------------------------

TEST_CASE("weights that are lost after the version has moved: who has them goes on, who joins waits for the next") {
    script t(stream(1, {.tau = 1}));
    t.staff(2);
    t.rolled(0), t.scored();
    const std::uint64_t first = t.train_job;
    t.learned();
    CHECK(t.s.needed_from() == 0);
    t.synced(0, 1);
    CHECK(t.s.needed_from() == first);
    CHECK(t.on(event::weights_lost(first)) == "");
    CHECK(t.up(stage::rollout, 1, 1) == ""); // there is nothing to install
    t.rolled(1, 0, 1), t.scored();
    CHECK(t.learned() == "sync v2");
    CHECK(t.synced(1, 2) == "");
    CHECK(t.synced(0, 2).substr(0, 9) == "step v2:1");
    CHECK(t.up(stage::rollout, 2, 1) == "sync 2 v2");
}

TEST_CASE("weights that are lost with all who had them end the run, unless others are on their way") {
    for (const bool more : {false, true}) {
        script t(stream(1, {.tau = 1}));
        t.staff(2);
        t.rolled(0), t.scored(), t.learned(), t.synced(0, 1);
        if (more) t.rolled(1, 0, 1);
        CHECK(t.on(event::weights_lost(t.s.weights().job)) == "");
        const std::string said = t.down(stage::rollout, 0);
        CHECK(t.s.finished() == !more);
        if (!more) {
            CHECK(t.s.failed() == stage::rollout);
            CHECK(said.find("finished") != std::string::npos);
            continue;
        }
        CHECK(t.up(stage::rollout, 0, 2) == "");
        CHECK(t.scored().substr(0, 5) == "train");
        CHECK(t.learned().substr(0, 7) == "sync v2");
        CHECK(t.s.version() == 2); // nobody else to wait for
        CHECK(t.synced(0, 2).substr(0, 5) == "start");
    }
}

TEST_CASE("who installs still needs what it was told, and so does nobody else") {
    script t(stream(1, {.tau = 8}));
    t.staff(2);
    t.up(stage::rollout, 1);
    for (sample_t n = 0; n < 3; ++n) {
        t.rolled(n, t.s.start_of(t.begun.at(n)), t.s.version()), t.scored(), t.learned();
        t.synced(0, t.s.version() + 1);
    }
    CHECK(t.s.needed_from() == 0); // worker 1 is at it
    t.down(stage::rollout, 1);
    CHECK(t.s.needed_from() == t.s.weights().job);
}
