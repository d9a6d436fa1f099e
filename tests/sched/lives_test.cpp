// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// optimise: no
//
// Workers with several lives, weights with several makers, workers that join, leave and drain: what messages mean that
// come late, in another order, from the dead, or from a process that nobody knows any more.
#include "script.hpp"

namespace {

using namespace opd::sched;
using opd::test::script;
using opd::test::stream;
using kind = event::kind;

} // namespace

TEST_CASE("what a former life installed says nothing of the present one") {
    script t(stream(1, {.tau = 1}));
    CHECK(t.up(stage::rollout) == "sync 0 v0");
    t.down(stage::rollout);
    CHECK(t.up(stage::rollout) == "sync 0 v0");
    CHECK(t.on(event::synced(0, 0).of_life(1)) == ""); // the late answer of the first
    CHECK(t.s.totals().late == 1);
    CHECK(t.on(event::synced(0, 0).of_life(2)) == "start 0@0");
}

TEST_CASE("a worker that reconnects unnoticed: a new life is the end of the old, and its work starts again") {
    script t(stream(1, {.tau = 1}));
    t.staff(2);
    CHECK(t.s.where() == census{.rollout = 2});
    CHECK(t.on(event::up(stage::rollout, 0, 2).of_life(2)) == "sync 0 v0");
    CHECK(t.out.items.at(0).incarnation == 2);
    CHECK(t.s.where() == census{.waiting = 2});
    CHECK(t.s.totals().preempted == 2);
    CHECK(t.synced(0, 0) == "start 0#2@0 | start 1#2@0");
    // likewise a teacher and a learner
    t.rolled(0);
    CHECK(t.on(event::up(stage::teacher, 0).of_life(7)) == "score j2@0:0");
    CHECK(t.s.incarnation_of(stage::teacher, 0) == 7);
    CHECK(t.scored() == "train j3 v0:0");
    CHECK(t.on(event::up(stage::learner, 0).of_life(2)) == "train j4 v0:0");
    CHECK(t.learned(4) == "sync v1");
}

TEST_CASE("a late word of the end of a former life does not end the present one") {
    script t(stream(1, {.tau = 1}));
    t.staff(1);
    t.on(event::up(stage::rollout, 0, 1).of_life(2));
    t.synced(0, 0);
    CHECK(t.on(event::down(stage::rollout, 0).of_life(1)) == "");
    CHECK(t.s.is_up(stage::rollout, 0));
    CHECK(t.s.where().rollout == 1);
    CHECK(t.on(event::up(stage::rollout, 0, 1).of_life(1)) == ""); // nor does it come again
    CHECK(t.s.totals().late == 2);
}

TEST_CASE("the end of a life overtakes its beginning: the beginning comes late") {
    script t(stream(1, {.tau = 1}));
    CHECK(t.on(event::down(stage::rollout, 0).of_life(3)) == "");
    CHECK(t.on(event::up(stage::rollout, 0).of_life(3)) == "");
    CHECK_FALSE(t.s.is_up(stage::rollout, 0));
    CHECK(t.on(event::up(stage::rollout, 0).of_life(4)) == "sync 0 v0");
    // one that says something before it says that it is there
    CHECK(t.synced(0, 0) == "start 0@0");
    CHECK(t.on(event::synced(0, 0).of_life(5)) == "");
    CHECK_FALSE(t.s.is_up(stage::rollout, 0));
    CHECK(t.s.where().waiting == 1);
    CHECK(t.on(event::up(stage::rollout, 0).of_life(5)) == "sync 0 v0");
    CHECK(t.synced(0, 0) == "start 0#2@0");
}

TEST_CASE("one that was lost comes back in a new life only") {
    settings o = stream(1, {.tau = 1});
    o.sync_deadline = 5;
    script t(o);
    t.up(stage::rollout);
    CHECK(t.wait() == "lost rollout 0");
    CHECK(t.out.items.at(0).incarnation == 1);
    CHECK(t.on(event::up(stage::rollout, 0).of_life(1)) == ""); // said twice
    CHECK(t.on(event::synced(0, 0).of_life(1)) == "");
    CHECK(t.on(event::up(stage::rollout, 0).of_life(2)) == "sync 0 v0");
}

TEST_CASE("replies of workers that nobody knows are late, as after a restore from before they came") {
    script t(stream(1, {.tau = 1}));
    t.staff(1);
    ticket other = t.begun.at(0);
    other.worker = 5;
    CHECK(t.on(event::rolled_out(other, {0, 0, 0, 3})) == "");
    CHECK(t.on(event::scored(9, 3).of_life(4)) == "");
    CHECK(t.on(event::synced(8, 0).of_life(1)) == "");
    CHECK(t.s.totals().late == 3);
    CHECK(t.s.where().rollout == 1);
}

TEST_CASE("after a restore the answers to the process that died are late, and the lives of before are over") {
    script t(stream(2, {.tau = 0}));
    t.staff(2);
    t.rolled(0);
    const std::string saved = t.s.snapshot();
    t.rolled(1);
    CHECK(t.scored() == "score j2@0:1"); // after the snapshot, to be forgotten
    const ticket old = t.begun.at(0);

    script n(stream(2, {.tau = 0}));
    n.s = scheduler::restore(stream(2, {.tau = 0}), saved);
    n.s.abandon_workers();
    CHECK(n.on(event::up(stage::teacher, 0).of_life(1)) == ""); // the life of before
    CHECK(n.up(stage::teacher) == "score j2@0:0");              // in its own life
    n.up(stage::learner);
    n.up(stage::rollout, 0, 2);
    CHECK(n.synced(0, 0) == "start 1#2@0");
    CHECK(n.on(event::scored(2, 0).of_life(2)) == ""); // a surviving teacher answers the old process
    CHECK(n.s.where().ready == 0);
    CHECK(n.on(event::rolled_out(old, {0, 0, 0, 3})) == "");
    CHECK(n.s.totals().late + n.s.totals().duplicates == 3);
}

TEST_CASE("after a restore nothing is due that the process that died had set, and its clock is forgotten") {
    settings o = stream(1, {.tau = 1});
    o.rollout_deadline = 3, o.abort_deadline = 2, o.sync_deadline = 5;
    script t(o);
    t.now = 100;
    t.staff(2);
    t.now = 102, t.up(stage::rollout, 1); // has yet to install
    t.now = 103, t.of(kind::tick);        // both attempts are to be aborted
    t.now = 104, t.aborted({.sample = 0, .slot = 0, .attempt = 1, .worker = 0, .incarnation = 1, .lane = 0});
    CHECK(t.s.where() == census{.waiting = 1, .rollout = 1});
    CHECK(t.s.next_deadline() == 105);
    t.s = scheduler::restore(o, t.s.snapshot());
    t.s.abandon_workers(true);
    CHECK(t.s.next_deadline() == forever);
    t.now = 1; // another machine's clock
    CHECK(t.of(kind::tick) == "");
    t.staff(1);
    CHECK(t.s.next_deadline() == 4);
}

TEST_CASE("weights are those of the job that made them: a zombie's are none") {
    settings o = stream(1, {.tau = 1});
    o.learner_deadline = 5;
    o.learner_attempts = 2;
    script t(o);
    t.staff(2);
    t.rolled(0);
    CHECK(t.scored() == "train j2 v0:0");
    CHECK(t.out.items.at(0).from == 0);
    CHECK(t.wait() == "lost learner 0"); // but it goes on, and publishes under the name of job 2
    CHECK(t.on(event::up(stage::learner, 0).of_life(2)) == "train j3 v0:0");
    CHECK(t.on(event::learned(2).of_life(1)) == "");
    CHECK(t.on(event::learned(2).of_life(2)) == ""); // nor in its new life
    CHECK(t.learned(3) == "sync v1");
    CHECK(t.out.items.at(0).job == 3);
    CHECK(t.s.weights() == weights{0, 0});
    CHECK(t.on(event::synced(0, 2)) == "sync 0 v1"); // it has the zombie's
    CHECK_FALSE(t.s.gate_open());
    CHECK(t.on(event::synced(0, 3)) == "step v1:0 | start 2@0 v1");
    CHECK(t.s.weights() == weights{1, 3});
    t.rolled(1, 0, 1);
    t.scored();
    CHECK(t.out.items.at(0).from == 3);
}

TEST_CASE("answers about weights in another order: the highest job counts") {
    script t(stream(1, {.tau = 1}));
    t.staff(2);
    t.rolled(0);
    t.scored();
    t.learned();
    CHECK(t.synced(0, 1) != "");
    const auto before = t.s.totals().duplicates;
    CHECK(t.on(event::synced(0, 0)) == "");
    CHECK(t.synced(0, 1) == "");
    CHECK(t.s.totals().duplicates == before + 2);
}

TEST_CASE(
    "the source of the weights dies while they are installed: the same batch is trained again, and all install that") {
    for (const bool streaming : {true, false}) {
        settings o = stream(1, {.tau = 1});
        if (!streaming) o.schedule = opd::sched::sync{};
        script t(o);
        t.staff(2);
        t.up(stage::rollout, 1);
        t.synced(1, 0);
        t.rolled(0);
        t.scored();
        const std::uint64_t first = t.train_job;
        CHECK(t.learned() == "sync v1");
        CHECK(t.synced(0, 1) == "");
        t.down(stage::learner); // that alone means nothing: what is published may outlive it
        CHECK_FALSE(t.s.gate_open());
        CHECK(t.on(event::weights_lost(first)) == "");
        CHECK(t.s.totals().lost_weights == 1);
        CHECK(t.on(event::weights_lost(first)) == ""); // said twice
        CHECK(t.s.totals().late == 1);
        CHECK(t.synced(1, 1) == ""); // it had got them: they are not the ones
        CHECK_FALSE(t.s.gate_open());
        CHECK(t.up(stage::rollout, 2) == "sync 2 v0"); // there are no others now
        const std::string said = t.up(stage::learner);
        CHECK(said == "train j" + std::to_string(t.train_job) + " v0:0");
        CHECK(t.train_job != first);
        CHECK(t.on(event::learned(first)) == "");
        CHECK(t.learned() == "sync v1");
        CHECK(t.on(event::weights_lost(first)) == ""); // nobody installs those any more
        CHECK(t.s.totals().lost_weights == 1);
        CHECK(t.synced(0, 1) == "");
        CHECK(t.synced(1, 1).substr(0, 9) == "step v1:0");
        CHECK(t.s.totals().consumed == 1);
        CHECK(t.s.totals().updates == 1);
        CHECK(t.s.weights().job == t.train_job);
    }
}

TEST_CASE("weights that are lost while they wait for running sequences are made again") {
    script t(stream(1, {.tau = 1, .update = weight_update::finish_first}));
    t.staff(2);
    t.rolled(0), t.scored();
    CHECK(t.learned() == "");
    CHECK(t.on(event::weights_lost(t.train_job)) == "train j3 v0:0");
    CHECK(t.rolled(1) == "score j4@0:1");
    CHECK(t.learned(3) == "sync v1");
    CHECK(t.synced(0, 1) == "step v1:0 | start 2@0 v1");
}

TEST_CASE("tokens of weights that were lost meanwhile are tokens of the version that comes") {
    script t(stream(1, {.tau = 1}));
    t.staff(2);
    t.up(stage::rollout, 1);
    t.synced(1, 0);
    t.rolled(0), t.scored(), t.learned();
    t.synced(0, 1);
    t.on(event::weights_lost(t.train_job));
    CHECK(t.rolled(1, 0, 1) == "score j4@0:1");
    CHECK(t.s.totals().late == 0);
}

TEST_CASE("who joins before the weights are lost is told others, and has its time for those") {
    settings o = stream(1, {.tau = 1});
    o.sync_deadline = 5;
    script t(o);
    t.staff(2);
    t.rolled(0);
    t.scored();
    t.now = 10;
    t.learned();
    t.now = 11;
    CHECK(t.up(stage::rollout, 1) == "sync 1 v1");
    CHECK(t.up(stage::rollout, 2) == "sync 2 v1");
    CHECK(t.synced(2, 1) == "");
    t.now = 12;
    CHECK(t.on(event::weights_lost(t.train_job)) == "sync 1 v0 | train j3 v0:0");
    CHECK(t.s.next_deadline() == 17); // of worker 1; worker 2 has answered, so the next synchronisation waits for it
    t.now = 13;
    CHECK(t.synced(1, 0) == "");
    CHECK(t.s.next_deadline() == opd::sched::forever);
    CHECK(t.learned() == "sync v1");
    CHECK(t.s.next_deadline() == 18);
    t.synced(0, 1), t.synced(1, 1);
    CHECK(t.synced(2, 1).substr(0, 9) == "step v1:0");
}

TEST_CASE("weights that are lost and cannot be made again: the version comes without them, and its sequences fail") {
    script t(stream(1, {.tau = 1}));
    t.staff(2);
    t.rolled(0);
    t.scored();
    t.learned();
    t.on(event::weights_lost(t.train_job));
    CHECK(t.on(event::learn_failed(t.train_job)) == "fail 0 learner | train j4 v0:"); // one attempt; now without them
    CHECK(t.down(stage::learner) == "");
    CHECK(t.up(stage::learner) == "train j5 v0:"); // its death is nobody's fault
    CHECK(t.on(event::learned(5, 0)) == "sync v1");
    CHECK(t.synced(0, 1) == "step v1: | start 2@0 v1");
    CHECK(t.s.totals().consumed == 0);
    CHECK(t.s.totals().empty_batches == 1);
}

TEST_CASE("weights that nobody waits for any more are not lost") {
    script t(stream(1, {.tau = 1}));
    t.staff(2);
    t.rolled(0);
    t.scored();
    t.learned();
    t.synced(0, 1);
    CHECK(t.on(event::weights_lost(t.train_job)) == "");
    CHECK(t.s.totals().late == 1);
    CHECK(t.s.gate_open());
}

TEST_CASE("stop while lost weights are made again: there is no update, so nothing is consumed") {
    script t(stream(1, {.tau = 1}));
    t.staff(2);
    t.rolled(0);
    t.scored();
    t.learned();
    t.on(event::weights_lost(t.train_job));
    CHECK(t.of(kind::stop) == "fail 0 stopped | abort 1 | fail 1 stopped | finished");
    CHECK(t.s.version() == 0);
}

TEST_CASE("stop while the weights wait for running sequences: the update was made, so it counts") {
    script t(stream(1, {.tau = 1, .update = weight_update::finish_first}));
    t.staff(2);
    t.rolled(0), t.scored();
    CHECK(t.learned() == "");
    CHECK(t.of(kind::stop) == "step v1:0 | abort 1 | fail 1 stopped | finished");
    CHECK(t.s.weights() == weights{1, t.train_job});
}

TEST_CASE("a payload that is lost before it is scored: the sequence is drawn again, uncharged, and the call scores the "
          "rest") {
    settings o = stream(2, {.tau = 0, .policy = staleness_policy::in_order});
    o.teacher_batch = 2, o.rollout_attempts = o.teacher_attempts = 1;
    script t(o);
    t.staff(2);
    t.rolled(0);
    CHECK(t.rolled(1) == "score j1@0:0,1");
    const ticket first = t.begun.at(0), second = t.begun.at(1);
    CHECK(t.on(event::payload_lost(first, 1)) == "start 0#2@0");
    CHECK(t.on(event::scored(1, 0, std::span(&second, 1))) == "");
    CHECK(t.s.where() == census{.rollout = 1, .ready = 1});
    CHECK(t.on(event::payload_lost(first, 1)) == "");      // said twice: of an attempt that is over
    CHECK(t.on(event::payload_lost(t.begun.at(0))) == ""); // and of one that has nothing yet
    CHECK(t.s.totals().late == 2);
    CHECK(t.on(event::payload_lost(second)) == "start 1#2@0"); // its score, maybe, as the store says
    CHECK(t.s.totals().lost_payloads == 2);
    t.rolled(0);
    t.rolled(1);
    CHECK(t.scored() == "train j3 v0:0,1");
    CHECK(t.s.totals().failed == 0);
    check_refused(t, event::payload_lost(first, 99), "call 99 is none");
}

TEST_CASE("a learner without a payload: what is left is ready again, in front; what another says of its batch is not "
          "believed") {
    script t(stream(2, {.tau = 1, .policy = staleness_policy::in_order, .update = weight_update::keep}));
    t.staff(4);
    t.rolled(0), t.scored(), t.rolled(1);
    CHECK(t.scored() == "train j3 v0:0,1");
    t.rolled(2), t.scored();
    CHECK(t.on(event::payload_lost(t.begun.at(1))) == ""); // the learner has it, or says so itself
    CHECK(t.s.totals().late == 1);
    const std::vector<ticket> both{t.begun.at(0), t.begun.at(0)};
    CHECK(t.on(event::payload_lost(both, t.train_job)) == "start 0#2@0");
    CHECK(t.s.totals().lost_payloads == 1);
    CHECK(t.on(event::learned(3)) == ""); // it was given up
    CHECK(t.rolled(0) == "score j5@0:0"); // in order: 1 and 2 have waited for it
    CHECK(t.scored() == "train j6 v0:0,1");
    t.learned();
    CHECK(t.synced(0, 1).substr(0, 11) == "step v1:0,1");
    CHECK(t.s.totals().late == 2);
}

TEST_CASE("a payload that is lost again and again gives its sequence up") {
    settings o = stream(1, {.tau = 0});
    o.payload_attempts = 2;
    script t(o);
    t.staff(1);
    t.rolled(0);
    CHECK(t.on(event::payload_lost(t.begun.at(0))) == "start 0#2@0");
    t.rolled(0);
    CHECK(t.on(event::payload_lost(t.begun.at(0))) == "fail 0 rollout | start 1@0");
    CHECK(t.s.totals().lost_payloads == 2);
}

namespace {

/// A batch of two is trained and its weights are lost; so is what sequence 0 drew, as the learner says when it is asked
/// again. What the scheduler then asks for.
std::string lose_weights_and_payload(script& t) {
    t.staff(2);
    t.rolled(0), t.rolled(1);
    t.scored();
    t.learned();
    t.on(event::weights_lost(t.train_job));
    return t.on(event::payload_lost(t.begun.at(0), t.train_job));
}

} // namespace

TEST_CASE(
    "payload and weights of an update are lost: the version comes of the rest, and the sequence with a later one") {
    for (const bool streaming : {true, false}) {
        settings o = stream(2, {.tau = 1, .policy = staleness_policy::in_order, .update = weight_update::keep}, 4);
        if (!streaming) o.schedule = opd::sched::sync{};
        o.teacher_batch = 2;
        script t(o);
        const std::string rest = lose_weights_and_payload(t);
        CHECK(rest.find("train j" + std::to_string(t.train_job) + " v0:1") != std::string::npos);
        CHECK(t.s.where().waiting >= 1);
        CHECK(t.learned().find("sync v1") != std::string::npos);
        CHECK(t.synced(0, 1).substr(0, 9) == "step v1:1");
        CHECK(t.s.totals().short_batches == 1);
        for (int i = 0; i < 20 && !t.s.finished(); ++i) {
            std::vector<ticket> running;
            t.s.for_each([&](const outstanding_sequence& q) {
                if (q.where == place::rollout) running.push_back(q.ticket);
            });
            for (const ticket& r : running) t.on(event::rolled_out(r, {t.s.start_of(r), t.s.version(), 0, 10}));
            if (t.s.where().scoring > 0) t.scored();
            if (t.s.where().training > 0 && t.s.gate_open()) t.learned();
            if (!t.s.gate_open()) t.synced(0, t.s.version() + 1);
        }
        CHECK(t.s.finished());
        CHECK(t.s.totals().consumed == 4);
        CHECK(t.s.totals().failed == 0);
    }
}

TEST_CASE("the scheduler dies while an update is made again without a lost sequence: its own batch has it back") {
    settings o = stream(2, {.tau = 1}, 4);
    o.schedule = opd::sched::sync{};
    o.teacher_batch = 2;
    script t(o);
    lose_weights_and_payload(t);
    script n(o);
    n.s = scheduler::restore(o, t.s.snapshot());
    n.s.abandon_workers();
    n.s.check_invariants();
    for (const stage s : {stage::rollout, stage::teacher, stage::learner})
        n.on(event::up(s, 0, s == stage::learner ? 1 : 2).of_life(9));
    n.on(event::synced(0, 0).of_life(9));
    std::vector<ticket> running;
    n.s.for_each([&](const outstanding_sequence& q) {
        if (q.where == place::rollout) running.push_back(q.ticket);
    });
    REQUIRE(running.size() == 1);
    CHECK(running[0].sample == 0);
    CHECK(n.s.where().training == 0); // nothing goes without it
    n.on(event::rolled_out(running[0], {0, 0, 0, 3}).of_life(9));
    for (int i = 0; i < 3 && n.s.where().training == 0; ++i)
        for (const action& a : std::vector<action>(n.out.items))
            if (a.what == action::kind::score) n.on(event::scored(a.job, 0).of_life(9));
    CHECK(n.s.where().training == 2);
}

TEST_CASE("tokens that were parked are lost: the sequence begins anew") {
    for (const bool runs : {false, true}) {
        script t(stream(1, {.tau = 1, .update = weight_update::keep}));
        t.staff(1);
        t.park(0);
        if (!runs) t.of(kind::pause);
        CHECK(t.parked(0, 0, 0) == (runs ? "start 0#2@0" : ""));
        CHECK(t.on(event::payload_lost(t.begun.at(0))) == "");
        CHECK(t.s.totals().lost_payloads == 1);
        CHECK(t.s.versions_of(t.begun.at(0)).tokens == 0);
        CHECK((runs ? t.roll_failed(0) : t.of(kind::resume)) == (runs ? "start 0#3@0" : "start 0#2@0"));
    }
}

TEST_CASE("a worker that hangs over its first weights keeps nobody waiting, and is lost at its deadline") {
    settings o = stream(1, {.tau = 1});
    o.sync_deadline = 5;
    script t(o);
    t.staff(2);
    t.now = 1;
    t.up(stage::rollout, 1); // never answers
    t.now = 2;
    t.rolled(0);
    t.scored();
    t.learned();
    CHECK(t.synced(0, 1) == "step v1:0 | start 2@0 v1");
    CHECK(t.wait() == "lost rollout 1");
    CHECK(t.now == 6); // from its coming
}

TEST_CASE("who joins is waited for once it holds what others hold, or when versions keep coming before it is ready") {
    script t(stream(1, {.tau = 8}));
    t.staff(2);
    sample_t next = 0;
    const auto publish = [&] { // worker 0 does all the work
        const version_t v = t.s.version();
        t.rolled(next, t.s.start_of(t.begun.at(next)), v), ++next;
        t.scored();
        return t.learned();
    };
    CHECK(t.up(stage::rollout, 1, 4) == "sync 1 v0");
    CHECK(publish() == "sync v1");
    CHECK(t.synced(0, 1).substr(0, 9) == "step v1:0"); // nobody waits for worker 1
    CHECK(t.synced(1, 0) == "sync 1 v1");              // overtaken once: the newest
    CHECK(publish() == "sync v2");
    CHECK(t.synced(0, 2).substr(0, 9) == "step v2:1");
    CHECK(t.synced(1, 1) == ""); // overtaken again: it rests, so that the next publication finds it ready
    CHECK(t.s.totals().duplicates == 0);
    CHECK(t.synced(1, 0) == ""); // said before
    CHECK(t.s.totals().duplicates == 1);
    CHECK(t.synced(1, 1) == ""); // told twice, of v1 and to install it: it may say so twice
    CHECK(t.s.totals().duplicates == 1);
    CHECK(t.synced(1, 1) == "");
    CHECK(t.s.totals().duplicates == 2);
    CHECK(publish() == "sync v3");
    CHECK(t.synced(0, 3) == ""); // which waits for it
    CHECK(t.synced(1, 2) == "sync 1 v3");
    CHECK(t.synced(1, 3).substr(0, 9) == "step v3:2");
    CHECK(t.synced(1, 3) == "");
    CHECK(t.s.totals().duplicates == 2);
    CHECK(t.synced(1, 3) == "");
    CHECK(t.s.totals().duplicates == 3);
    CHECK(t.begun.at(5).worker == 1);
}

namespace {
// Worker 1 is overtaken by two versions while it installs its first weights: it waits for the next publication.
void joins_too_late(script& t) {
    t.staff(2);
    t.up(stage::rollout, 1, 4);
    for (sample_t n = 0; n < 2; ++n) {
        t.now += 1;
        t.rolled(n, t.s.start_of(t.begun.at(n)), t.s.version()), t.scored(), t.learned();
        t.synced(0, t.s.version() + 1);
    }
    CHECK(t.synced(1, 0) == "");
}
} // namespace

TEST_CASE("who waits for a publication that nobody is left to bring about is told the weights of the version") {
    for (const bool drains : {false, true}) {
        script t(stream(1, {.tau = 8}));
        joins_too_late(t);
        CHECK((drains ? t.up(stage::rollout, 0, 0) : t.down(stage::rollout, 0)) == "sync 1 v2");
        CHECK(t.synced(1, 2).substr(0, 5) == "start");
    }
}

TEST_CASE("who waits for a publication is told the weights of the version where given-up attempts hold all lanes") {
    settings o = stream(1, {.tau = 8});
    o.rollout_deadline = 5; // and no abort_deadline: worker 0 is not lost
    script t(o);
    joins_too_late(t);
    CHECK(t.wait() == "abort 2"); // 3 is drawn yet
    CHECK(t.wait() == "abort 3 | sync 1 v2");
    CHECK(t.synced(1, 2).substr(0, 5) == "start");
}

TEST_CASE("a worker drains: what runs there is finished, nothing new starts, and it leaves") {
    script t(stream(4, {.tau = 1}));
    t.staff(2);
    CHECK(t.up(stage::rollout, 0, 0) == "");
    CHECK(t.rolled(0) == "score j1@0:0");
    CHECK(t.rolled(1) == "");
    CHECK(t.s.where().rollout == 0);
    CHECK(t.up(stage::rollout, 1, 1) == "sync 1 v0"); // another joins
    CHECK(t.synced(1, 0) == "start 2@1");
    CHECK(t.down(stage::rollout, 0) == "");
    CHECK(t.s.totals().preempted == 0);
    // likewise a teacher
    t.up(stage::teacher, 0, 0);
    t.scored(1);
    CHECK(t.rolled(2) == "start 3@1");
    CHECK(t.up(stage::teacher, 4) == "score j2@4:1");
    // and a worker that comes with none takes nothing until it has some
    CHECK(t.up(stage::rollout, 2, 0) == "sync 2 v0");
    CHECK(t.synced(2, 0) == "");
    CHECK(t.up(stage::rollout, 2, 1) == "start 4@2");
}

TEST_CASE("placement is by share: a worker with twice the lanes takes twice as much") {
    script t(stream(8, {.tau = 0, .outstanding = 8}));
    t.of(kind::pause);
    t.up(stage::rollout, 0, 8);
    t.up(stage::rollout, 1, 4);
    t.synced(0, 0);
    t.synced(1, 0);
    CHECK(t.of(kind::resume) ==
          "start 0@0 | start 1@1 | start 2@0 | start 3@0 | start 4@1 | start 5@0 | start 6@0 | start 7@1");
}

TEST_CASE("after a restore attempts have numbers of the new process, and what was being scored goes first") {
    const settings o = stream(3, {.tau = 0});
    script t(o);
    t.staff(3);
    CHECK(t.rolled(0) == "score j1@0:0");
    CHECK(t.rolled(1) == ""); // the teacher is busy
    script n(o);
    n.s = scheduler::restore(o, t.s.snapshot());
    n.s.abandon_workers();
    CHECK(n.up(stage::teacher) == "score j2@0:0");
    n.up(stage::rollout, 0, 3);
    CHECK(n.synced(0, 0) == "start 2#2@0");
    CHECK((t.begun.at(2).attempt >> 16) == 0);
    CHECK((n.begun.at(2).attempt >> 16) == 1);
}
