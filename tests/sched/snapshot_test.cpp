// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// build: sanitize
// optimise: always
//
// Snapshots of the scheduler. In random runs with random faults a scheduler that is saved and restored after every
// event does what the one does that never was. Damaged, cut and foreign bytes are refused. After a crash at any event
// (the snapshot is restored, everybody is gone and new workers come) nothing is lost, nothing consumed twice, and the
// staleness bounds hold.
#include <array>

#include "script.hpp"
#include "stepwise_world.hpp"
#include "support/property.hpp"

namespace {

using namespace opd::test;
using opd::index_t;

stepwise_options random_options() {
    stepwise_options o;
    settings& s = o.s;
    s.batch = *rc::gen::inRange<index_t>(1, 5);
    s.teacher_batch = *rc::gen::inRange<index_t>(1, 4);
    s.teacher_flush = *rc::gen::element(0.0, 0.05);
    s.rollout_attempts = s.teacher_attempts = s.learner_attempts = *rc::gen::inRange(1, 5);
    for (double* const d :
         {&s.rollout_deadline, &s.abort_deadline, &s.teacher_deadline, &s.learner_deadline, &s.sync_deadline})
        *d = *rc::gen::element(0.0, 1.0, 2.0, 3.0, 4.0);
    const index_t depth = *rc::gen::inRange<index_t>(0, 4);
    const int kind = *rc::gen::inRange(0, 8);
    async a{.tau = depth,
            .policy = *rc::gen::element(policy::capacity, policy::cohort_fifo, policy::edf, policy::drop, policy::retry,
                                        policy::in_order, policy::areal),
            .update = *rc::gen::element(weight_update::keep, weight_update::abort, weight_update::finish_first)};
    const bool gives_up = a.policy == policy::drop || a.policy == policy::retry;
    if (a.policy != policy::areal)
        a.outstanding = *rc::gen::inRange<index_t>(s.batch, (depth + 1) * s.batch + 1) + (gives_up ? 3 : 0);
    if (kind == 0)
        s.schedule = opd::sched::sync{};
    else if (kind == 1)
        s.schedule = step_off{depth};
    else if (kind == 2)
        s.schedule = controlled{depth};
    else
        s.schedule = a;
    if (a.policy != policy::areal || kind <= 2) s.group = s.batch % 2 == 0 && a.outstanding % 2 == 0 ? 2 : 1;
    if (kind > 2 && a.policy == policy::areal)
        std::get<async>(s.schedule).concurrency = *rc::gen::inRange<index_t>(0, 6);
    o.resizes = kind > 2 && a.policy != policy::areal;
    s.sequences = s.group * *rc::gen::inRange<index_t>(1, 20 / s.group);
    o.slots = *rc::gen::container<std::vector<std::int32_t>>(static_cast<std::size_t>(*rc::gen::inRange(1, 4)),
                                                             rc::gen::inRange(1, 4));
    o.faults = *rc::gen::inRange(0, 12);
    o.keep_prefixes = *rc::gen::arbitrary<bool>();
    o.several_at_once = true;
    return o;
}

/// The next choice: any that is possible, faults now and then.
choice draw(const std::vector<choice>& all) {
    const auto faults =
        std::find_if(all.begin(), all.end(), [](const choice& c) { return c.what >= choice::first_fault; });
    const auto plain = static_cast<std::size_t>(faults - all.begin());
    RC_ASSERT(plain > 0u); // else it is a deadlock
    const bool fault = plain < all.size() && *rc::gen::inRange(0, 8) == 0;
    const std::size_t i = fault ? *rc::gen::inRange(plain, all.size()) : *rc::gen::inRange<std::size_t>(0, plain);
    return all[i];
}

std::string refusal(const settings& s, std::string_view bytes) {
    try {
        scheduler::restore(s, bytes);
    } catch (const opd::invalid_input& e) {
        return e.what();
    }
    return "accepted";
}
bool refused(const settings& s, std::string_view bytes, const std::string& words) {
    const std::string said = refusal(s, bytes);
    INFO(said);
    return said.find(words) != std::string::npos;
}

} // namespace

TEST_CASE("saved and restored after every event it does what it would have done") {
    property("restore(snapshot()) is the same scheduler",
             [] {
                 const stepwise_options o = random_options();
                 stepwise_world plain(o), saved(o);
                 for (int step = 0; !plain.s.finished() && step < 2000; ++step) {
                     const choice c = draw(plain.choices(o));
                     const std::string bytes = saved.s.snapshot();
                     saved.s = scheduler::restore(o.s, bytes);
                     RC_ASSERT(saved.s.snapshot() == bytes);
                     RC_ASSERT(saved.s.next_deadline() == plain.s.next_deadline());
                     plain.take(o, c);
                     saved.take(o, c);
                     RC_ASSERT(plain.s.snapshot() == saved.s.snapshot());
                     RC_ASSERT(plain.hash(o) == saved.hash(o)); // of what it did to the world too
                 }
                 RC_ASSERT(plain.s.finished() && saved.s.finished());
             },
             {.cases = 4000});
}

TEST_CASE("the same is due at the same times after a restore") {
    settings o = stream(1, {.tau = 5, .outstanding = 6});
    o.teacher_batch = 2;
    o.teacher_flush = 1, o.rollout_deadline = 4, o.abort_deadline = 5, o.teacher_deadline = 6, o.learner_deadline = 7;
    o.sync_deadline = 8;
    script t(o);
    t.staff(6);
    const auto at = [&](double now) { t.now = now; };
    at(0.125), t.rolled(0), t.rolled(1);
    at(0.25), t.scored(); // in training
    at(0.375), t.rolled(2), t.rolled(3);
    at(0.5), t.rolled(4); // waits for the teacher
    at(0.625), t.up(stage::rollout, 1);
    at(0.75), t.roll_failed(5);
    script u = t;
    u.s = scheduler::restore(o, t.s.snapshot());
    CHECK(u.s.snapshot() == t.s.snapshot());
    std::vector<double> due;
    for (int i = 0; i < 40 && t.s.next_deadline() < 30; ++i) {
        CHECK(u.wait() == t.wait());
        CHECK(u.now == t.now);
        due.push_back(t.now);
    }
    // the flush, 5's second attempt, the teacher, the learner, the worker that never answered, 5's third attempt, and
    // the abort of its second
    CHECK(due == std::vector{1.375, 4.75, 6.25, 7.25, 8.625, 8.75, 9.75});
    CHECK(u.s.snapshot() == t.s.snapshot());
}

TEST_CASE("a crash after every event loses nothing") {
    property("crash at any event",
             [] {
                 stepwise_options o = random_options();
                 // a reference run up to any of its events, then the crash, then on to the end; the world keeps the
                 // books
                 const int before = *rc::gen::inRange(0, 60);
                 o.faults = 1 + *rc::gen::inRange(0, 3);
                 stepwise_world w(o);
                 bool crashed = false;
                 for (int step = 0; !w.s.finished() && step < 3000; ++step) {
                     const auto all = w.choices(o);
                     if (!crashed && step >= before && all.back().what == choice::crash) {
                         const auto outstanding = w.s.where().outstanding();
                         const version_t v = w.s.version();
                         const counters totals = w.s.totals();
                         scheduler again = scheduler::restore(o.s, w.s.snapshot());
                         again.abandon_workers(o.keep_prefixes);
                         RC_ASSERT(again.where().outstanding() == outstanding);
                         RC_ASSERT(again.where().rollout + again.where().scoring + again.where().training == 0);
                         RC_ASSERT(again.version() == v);
                         RC_ASSERT(again.gate_open());
                         RC_ASSERT(again.totals().admitted == totals.admitted);
                         RC_ASSERT(again.totals().consumed == totals.consumed);
                         RC_ASSERT(again.totals().updates == totals.updates);
                         again.for_each([&](const outstanding_sequence& q) { RC_ASSERT(q.start <= v); });
                         w.take(o, all.back());
                         crashed = true;
                     } else {
                         w.take(o, draw(all));
                     }
                 }
                 RC_ASSERT(w.s.finished());
             },
             {.cases = 6000});
}

TEST_CASE("damage is found") {
    property("one changed byte, one bit, a cut, an end",
             [] {
                 const stepwise_options o = random_options();
                 stepwise_world w(o);
                 for (int step = *rc::gen::inRange(0, 40); step > 0 && !w.s.finished(); --step)
                     w.take(o, draw(w.choices(o)));
                 const std::string bytes = w.s.snapshot();
                 RC_ASSERT(refusal(o.s, bytes) == "accepted");
                 for (std::size_t i = 0; i < bytes.size(); i += 1 + bytes.size() / 97) {
                     std::string other = bytes;
                     other[i] = static_cast<char>(other[i] ^ (1 << *rc::gen::inRange(0, 8)));
                     RC_ASSERT(refused(o.s, other, "opd: snapshot: "));
                     RC_ASSERT(refused(o.s, std::string_view(bytes).substr(0, i), "opd: snapshot: "));
                 }
                 RC_ASSERT(refused(o.s, bytes + '\0', "damaged"));
                 RC_ASSERT(refused(o.s, bytes + bytes, "damaged"));
             },
             {.cases = 100});
    CHECK(refused(settings{}, "", "ends too early"));
    CHECK(refused(settings{}, "some text that is no snapshot at all", "none of this library"));
    CHECK(refused(settings{}, seal(""), "ends too early"));
    const std::string good = scheduler(settings{}).snapshot();
    const std::string body(unseal(good));
    CHECK(refused(settings{}, seal(body + "x"), "longer than the state"));
    CHECK(refused(settings{}, seal(body.substr(0, body.size() - 1)), "ends too early"));
}

TEST_CASE("a snapshot of another schedule is refused by the name of what differs") {
    const settings s = stream(4, {.tau = 3});
    const std::string bytes = scheduler(s).snapshot();
    CHECK(refused(stream(2, {.tau = 3}), bytes, "another batch"));
    CHECK(refused(stream(4, {.tau = 2}), bytes, "another schedule.k or schedule.tau"));
    CHECK(refused(stream(4, {.tau = 3, .policy = policy::edf}), bytes, "another schedule.policy"));
    CHECK(refused(stream(4, {.tau = 3, .update = weight_update::abort}), bytes, "another schedule.update"));
    CHECK(refused({.batch = 4, .schedule = step_off{3}}, bytes, "another kind of schedule"));
    settings other = s;
    other.group = 2;
    CHECK(refused(other, bytes, "another group"));
    other = s;
    other.sequences = 100, other.available = 200, other.teacher_batch = 3, other.rollout_attempts = 7;
    other.sync_deadline = 9;
    CHECK(refusal(other, bytes) == "accepted"); // limits may change
}

TEST_CASE("fewer attempts than were used already: a lost worker still gives nothing up") {
    settings o = stream(1, {.tau = 1});
    o.learner_attempts = 3;
    script t(o);
    t.staff(2);
    t.roll_failed(0);
    t.rolled(1);
    t.on(event::score_failed(t.score_job, 0));
    t.scored();
    t.on(event::learn_failed(t.train_job));
    o.rollout_attempts = o.teacher_attempts = o.learner_attempts = 1;
    t.s = scheduler::restore(o, t.s.snapshot());
    t.down(stage::learner);
    t.down(stage::rollout);
    t.up(stage::rollout, 0, 2);
    t.synced(0, 0);
    t.rolled(0);
    t.down(stage::teacher);
    CHECK(t.s.totals().failed == 0);
    CHECK(t.s.totals().preempted == 3);
}

TEST_CASE("what may differ at a restore takes effect") {
    settings o = stream(2, {.tau = 4, .outstanding = 10});
    script t(o);
    t.staff(10);
    REQUIRE(t.s.where().rollout == 10);
    const auto restored = [&](const settings& s) { t.s = scheduler::restore(s, t.s.snapshot()); };
    const auto with = [&](auto change) {
        settings s = o;
        change(s);
        return s;
    };
    const auto permits = [&](index_t m) {
        return with([&](settings& s) { std::get<async>(s.schedule).outstanding = m; });
    };
    SUBCASE("fewer permits: what is out stays out, and nothing is admitted until they have returned") {
        restored(permits(2));
        CHECK(t.s.resolved().permits == 2);
        for (sample_t n : {0, 1}) t.rolled(n), t.scored();
        t.learned();
        CHECK(t.synced(0, 1) == "step v1:0,1");
        CHECK(t.s.where().rollout == 8);
    }
    SUBCASE("more permits") {
        script little(permits(2));
        little.staff(10);
        REQUIRE(little.s.where().rollout == 2);
        little.s = scheduler::restore(o, little.s.snapshot());
        CHECK(little.s.resolved().permits == 10);
        little.of(event::kind::resume); // any event
        CHECK(little.s.where().rollout == 10);
    }
    SUBCASE("a resize outlives a restore under the same settings, and resolved() tells of it") {
        t.of(event::kind::resize, 4);
        CHECK(t.s.resolved().permits == 4);
        restored(o);
        CHECK(t.s.resolved().permits == 4);
        restored(permits(6));
        CHECK(t.s.resolved().permits == 6);
    }
    SUBCASE("sequences") {
        restored(with([](settings& s) { s.sequences = 10; }));
        t.rolled(0), t.scored();
        t.rolled(1), t.scored();
        t.learned();
        CHECK(t.synced(0, 1) == "step v1:0,1"); // the other eight are all that is wanted
    }
    SUBCASE("available") {
        restored(with([](settings& s) { s.available = 11; }));
        t.rolled(0), t.scored();
        t.rolled(1), t.scored();
        t.learned();
        CHECK(t.synced(0, 1) == "step v1:0,1 | start 10@0 v1");
    }
    SUBCASE("teacher_batch and teacher_flush") {
        restored(with([](settings& s) { s.teacher_batch = 3, s.teacher_flush = 7; }));
        t.now = 1;
        t.rolled(0);
        CHECK(t.s.where().queued == 1);
        CHECK(t.s.next_deadline() == 8);
        CHECK(t.wait() == "score j1@0:0");
    }
    SUBCASE("teacher_flush, for what is queued") {
        const auto flush = [&](double seconds) {
            restored(with([&](settings& s) { s.teacher_batch = 3, s.teacher_flush = seconds; }));
        };
        flush(7);
        t.now = 1;
        t.rolled(0);
        flush(2);
        CHECK(t.s.next_deadline() == 3);
        flush(0); // at once
        CHECK(t.of(event::kind::tick) == "score j1@0:0");
    }
    SUBCASE("rollout_attempts") {
        restored(with([](settings& s) { s.rollout_attempts = 1; }));
        CHECK(t.roll_failed(0).find("fail 0 rollout") == 0);
    }
    SUBCASE("teacher_attempts") {
        restored(with([](settings& s) { s.teacher_attempts = 1; }));
        t.rolled(0);
        CHECK(t.on(event::score_failed(t.score_job, 0)).find("fail 0 teacher") == 0);
    }
    SUBCASE("learner_attempts") {
        restored(with([](settings& s) { s.learner_attempts = 2; }));
        t.rolled(0), t.scored();
        t.rolled(1), t.scored();
        CHECK(t.on(event::learn_failed(t.train_job)) == "train j4 v0:0,1");
    }
    const auto deadline = [&](double settings::*which, double seconds) {
        restored(with([&](settings& s) { s.*which = seconds; }));
        CHECK(t.s.next_deadline() == (seconds > 0 ? t.now + seconds : forever));
    };
    SUBCASE("rollout_deadline, for what begins") {
        restored(with([](settings& s) { s.rollout_deadline = 3; }));
        t.now = 1;
        t.roll_failed(0); // begins again
        t.now = 3;
        t.of(event::kind::tick); // the others are aborted
        CHECK(t.s.where().rollout == 1);
        CHECK(t.s.next_deadline() == 4);
    }
    SUBCASE("rollout_deadline, for what runs") {
        deadline(&settings::rollout_deadline, 3);
        CHECK(t.wait().find("abort 0 | ") == 0);
        CHECK(t.now == 3);
        CHECK(t.s.where().rollout == 0); // all of them, and their lanes are still taken
    }
    SUBCASE("abort_deadline, for what was aborted before") {
        o.rollout_deadline = 1;
        script u(o);
        u.staff(10);
        u.rolled(9); // of another time than the rest
        CHECK(u.wait() != "");
        CHECK(u.s.next_deadline() == 2); // of the tenth's next attempt
        u.now = 1.5;
        u.s = scheduler::restore(with([](settings& s) { s.rollout_deadline = 1, s.abort_deadline = 0.75; }),
                                 u.s.snapshot());
        CHECK(u.s.next_deadline() == 1 + 0.75);
        CHECK(u.wait().find("lost rollout 0") == 0);
    }
    SUBCASE("rollout_deadline, for what began while there was none") {
        o.rollout_deadline = 4;
        script u(o);
        u.staff(10);
        u.s = scheduler::restore(with([](settings& s) { s.rollout_deadline = 0; }), u.s.snapshot());
        u.now = 1;
        u.roll_failed(0); // begins again
        u.s = scheduler::restore(o, u.s.snapshot());
        CHECK(u.s.next_deadline() == 4);
        for (sample_t n = 1; n < 10; ++n) u.rolled(n), u.scored();
        CHECK(u.s.next_deadline() == 5);
    }
    SUBCASE("teacher_deadline, for what is scored") {
        t.now = 2;
        t.rolled(0);
        t.now = 3;
        t.of(event::kind::tick);
        restored(with([](settings& s) { s.teacher_deadline = 3; }));
        CHECK(t.s.next_deadline() == 5); // of its beginning
        CHECK(t.wait() == "lost teacher 0");
    }
    SUBCASE("learner_deadline, for what is trained") {
        t.rolled(0), t.scored();
        t.now = 2;
        t.rolled(1), t.scored();
        t.now = 3;
        t.of(event::kind::tick);
        restored(with([](settings& s) { s.learner_deadline = 4; }));
        CHECK(t.s.next_deadline() == 6);
        CHECK(t.wait().find("lost learner 0") == 0);
    }
    SUBCASE("sync_deadline, for what is installed") {
        t.rolled(0), t.scored();
        t.rolled(1), t.scored();
        t.now = 2;
        t.learned();
        t.now = 3;
        t.up(stage::rollout, 1); // its first weights
        restored(with([](settings& s) { s.sync_deadline = 5; }));
        CHECK(t.s.next_deadline() == 7);
        CHECK(t.wait().find("lost rollout 0 | step v1:0,1") == 0);
        CHECK(t.s.next_deadline() == 8);
        CHECK(t.wait() == "lost rollout 1");
    }
    SUBCASE("a deadline that is taken away, or moved, on what runs") {
        for (double settings::*const d : {&settings::rollout_deadline, &settings::teacher_deadline,
                                          &settings::learner_deadline, &settings::sync_deadline}) {
            settings limited = o;
            limited.*d = 4;
            script u(limited);
            if (d == &settings::sync_deadline) {
                u.up(stage::rollout); // it does not answer
            } else {
                u.staff(10);
                if (d != &settings::rollout_deadline) u.rolled(0);
                if (d == &settings::learner_deadline) u.scored(), u.rolled(1), u.scored();
            }
            u.now = 1;
            u.of(event::kind::tick);
            CHECK(u.s.next_deadline() == 4);
            settings other = limited;
            other.*d = 0;
            CHECK(scheduler::restore(other, u.s.snapshot()).next_deadline() == forever);
            other.*d = 2;
            CHECK(scheduler::restore(other, u.s.snapshot()).next_deadline() == 2);
            // and given again
            CHECK(scheduler::restore(limited, scheduler::restore(other, u.s.snapshot()).snapshot()).next_deadline() ==
                  4);
        }
    }
}

TEST_CASE(
    "after a crash: who ran waits in the order of admission, who was scored is queued, who was trained is ready") {
    for (const bool keep : {false, true}) {
        script t(stream(1, {.tau = 4}));
        t.staff(5);
        t.rolled(1);
        t.scored(); // in training
        t.rolled(3);
        t.scored();  // ready
        t.rolled(2); // in scoring
        const counters before = t.s.totals();
        t.s = scheduler::restore(t.s.options(), t.s.snapshot());
        t.s.abandon_workers(keep);
        t.s.check_invariants();
        CHECK(t.s.where() == census{.waiting = 2, .queued = 1, .ready = 2});
        CHECK(t.s.totals().admitted == before.admitted);
        t.s.for_each([&](const outstanding_sequence& q) {
            if (q.where == outstanding_sequence::place::waiting) CHECK(q.start == (keep ? 0 : -1));
        });
        CHECK(t.up(stage::teacher, 0) == "score j5@0:2");
        CHECK(t.up(stage::learner) == "train j6 v0:1");
        CHECK(t.up(stage::rollout, 0, 2) == "sync 0 v0");
        CHECK(t.synced(0, 0) == "start 0#2@0 | start 4#2@0");
        t.learned();
        CHECK(t.synced(0, 1) == "step v1:1 | train j7 v1:3");
        t.rolled(0, 0, 1);
        t.learned();
        CHECK(t.synced(0, 2).find("step v2:3") == 0);
    }
}

TEST_CASE("after a crash nothing is left of the dead process's clock") {
    std::vector<std::string> snapshots;
    for (const double begin : {0.0, 1e6}) {
        script t(stream(1, {.tau = 4}));
        t.now = begin;
        t.staff(5);
        t.rolled(1);
        t.scored(); // in training
        t.rolled(3), t.rolled(2);
        t.learned(); // in a synchronisation, one in scoring, one queued
        CHECK(t.s.where().queued == 1);
        t.s.abandon_workers();
        snapshots.push_back(t.s.snapshot());
    }
    CHECK(snapshots[0] == snapshots[1]);
}

TEST_CASE("after a crash in a synchronisation: tokens of the version that never came are thrown away") {
    for (const int stage_of_it : {0, 1, 2}) { // queued, in scoring, scored
        CAPTURE(stage_of_it);
        script t(stream(1, {.tau = 2}));
        t.staff(2);
        t.up(stage::rollout, 1);
        t.synced(1, 0);
        t.rolled(0);
        t.scored();
        CHECK(t.learned() == "sync v1");
        t.synced(0, 1);
        const auto at = t.begun.at(1).worker == 0 ? 1u : 2u;
        if (stage_of_it == 0) t.down(stage::teacher);
        t.rolled(at, 0, 1); // its end was drawn by version 1
        if (stage_of_it == 2) t.scored();
        CHECK(t.s.where().waiting == 0);
        t.s = scheduler::restore(t.s.options(), t.s.snapshot());
        t.s.abandon_workers(true);
        t.s.check_invariants();
        CHECK(t.s.version() == 0);
        CHECK(t.s.where() == census{.waiting = 2, .ready = 1});
        t.staff(3);
        CHECK(t.s.where() == census{.rollout = 2, .training = 1});
        CHECK((t.begun.at(at).attempt & 0xffff) == 2);
    }
}

TEST_CASE("after a crash in a synchronisation: the update is counted once") {
    script t(stream(1, {.tau = 1}));
    t.staff(2);
    t.rolled(0);
    t.scored();
    t.on(event::learned(t.train_job, 3));
    const std::uint64_t job = t.train_job;
    t.s = scheduler::restore(t.s.options(), t.s.snapshot());
    t.s.abandon_workers();
    t.staff(2);
    CHECK(t.train_job != job);
    t.learned(job); // of the former life
    CHECK(t.s.totals().late == 1);
    t.on(event::learned(t.train_job, 3));
    t.synced(0, 1);
    CHECK(t.s.totals().updates == 3);
    CHECK(t.s.totals().consumed == 1);
}

TEST_CASE("after a crash: answers to what the dead process asked for after its snapshot count for nothing") {
    script t(stream(1, {.tau = 3}));
    t.staff(4);
    const std::string bytes = t.s.snapshot();
    t.roll_failed(1); // from here on nobody will know
    t.rolled(3);
    const ticket again = t.begun.at(1);
    const std::uint64_t scored_there = t.score_job;
    for (const bool restored_twice : {false, true}) {
        t.s = scheduler::restore(t.s.options(), bytes);
        t.s.abandon_workers();
        if (restored_twice) {
            t.s = scheduler::restore(t.s.options(), t.s.snapshot());
            t.s.abandon_workers();
        }
        t.staff(4);
        CHECK(t.begun.at(1).worker == again.worker);
        CHECK((t.begun.at(1).attempt & 0xffff) == again.attempt); // the same but for the life
        t.rolled(0);
        CHECK(t.on(event::rolled_out(again, {})) == "");
        CHECK(t.on(event::scored(scored_there, 0)) == "");
        CHECK(t.s.where() == census{.rollout = 3, .scoring = 1});
        CHECK(t.s.totals().late + t.s.totals().duplicates == 2);
    }
}

TEST_CASE("after a crash: a kept prefix that becomes stale while it waits starts again, once") {
    for (const policy p : {policy::retry, policy::drop}) {
        script t(stream(1, {.tau = 0, .outstanding = 2, .policy = p}));
        t.staff(2);
        t.rolled(0);
        t.scored();
        t.s = scheduler::restore(t.s.options(), t.s.snapshot());
        t.s.abandon_workers(true);
        t.up(stage::learner);
        CHECK(t.learned() ==
              (p == policy::retry ? "sync v1 | step v1:0" : "sync v1 | step v1:0 | fail 1 stale")); // nobody is there
        CHECK(t.s.where().waiting == (p == policy::retry ? 1 : 0));
        t.up(stage::rollout, 0, 3);
        CHECK(t.synced(0, 1) == (p == policy::retry ? "start 1#2@0 v1 | start 2@0 v1" : "start 2@0 v1 | start 3@0 v1"));
    }
}

TEST_CASE("after a crash: abort and finish_first mix no versions in a sequence whose prefix was kept") {
    for (const weight_update u : {weight_update::keep, weight_update::abort, weight_update::finish_first}) {
        script t(stream(1, {.tau = 2, .update = u}));
        t.staff(3);
        t.rolled(0);
        t.scored(); // trained
        t.s = scheduler::restore(t.s.options(), t.s.snapshot());
        t.s.abandon_workers(true); // 1 and 2 wait, with tokens of version 0
        t.up(stage::learner);
        t.learned(); // before any rollout worker is back
        CHECK(t.s.version() == 1);
        t.s.for_each([&](const outstanding_sequence& q) { CHECK(q.start == (u == weight_update::keep ? 0 : -1)); });
        CHECK(t.s.totals().restarts == (u == weight_update::keep ? 0 : 2));
        t.up(stage::rollout, 0, 3);
        CHECK(t.synced(0, 1) == "start 1#2@0 v1 | start 2#2@0 v1 | start 3@0 v1");
    }
}

TEST_CASE("after a crash AReaL's rule goes on from its counts: no burst of admissions") {
    script t(stream(2, {.tau = 1, .policy = policy::areal}));
    t.staff(16);
    for (version_t v = 0; v < 5; ++v) {
        for (sample_t n = 2 * static_cast<sample_t>(v); n < 2 * static_cast<sample_t>(v) + 2; ++n) {
            t.rolled(n, v > 0 ? v - 1 : 0, v);
            t.scored();
        }
        t.learned();
        t.synced(0, v + 1);
        CHECK(t.s.where().outstanding() == 4);
    }
    for (const bool keep : {true, false}) {
        t.s = scheduler::restore(t.s.options(), t.s.snapshot());
        t.s.abandon_workers(keep);
        t.staff(16);
        CHECK(t.s.where().outstanding() == 4);
        CHECK(t.s.where().rollout == 4);
    }
}

TEST_CASE("after a crash in a synchronisation AReaL's rule counts what starts again as in rollout") {
    script t(stream(1, {.tau = 2, .policy = policy::areal, .concurrency = 2}));
    t.staff(1);
    t.up(stage::rollout, 1);
    t.synced(1, 0); // 0 and 1 run
    t.rolled(0);    // and 2
    t.scored();
    t.learned();
    t.synced(t.begun.at(1).worker, 1);
    t.rolled(1, 0, 1); // with tokens of version 1
    t.s = scheduler::restore(t.s.options(), t.s.snapshot());
    t.s.abandon_workers();
    t.staff(4);
    CHECK(t.s.where() == census{.rollout = 2, .training = 1});
    t.learned();
    t.synced(0, 1);
    CHECK(t.s.where() == census{.rollout = 2});
    t.rolled(1, 0, 1);
    CHECK(t.s.where() == census{.rollout = 2, .scoring = 1});
}

namespace {

/// Everybody answers sooner or later, in some order; with `faults` one answer in fifty is never heard, one in fifty
/// says that it failed, and who was lost comes back. Returns the largest snapshot after a step, of the first
/// thousand sequences and of all that follow.
std::array<std::size_t, 2> snapshot_sizes(settings o, index_t sequences, bool faults) {
    o.sequences = sequences;
    std::array<std::size_t, 2> largest{};
    scheduler s(o);
    actions out;
    std::vector<event> owed;
    double now = 0;
    std::uint64_t random = 1;
    const auto draw = [&](std::uint64_t n) {
        random = random * 6364136223846793005u + 1442695040888963407u;
        return (random >> 33) % n;
    };
    const auto tell = [&](const event& e) {
        out.clear();
        s.on(e, now, out);
        for (const action& a : out.items) {
            const bool failed = faults && draw(50) == 0, silent = faults && draw(50) == 0;
            event answer;
            if (a.what == action::kind::start)
                answer = failed ? event::rollout_failed(a.ticket)
                                : event::rolled_out(a.ticket, {a.version, a.version, 0, 1});
            if (a.what == action::kind::abort) answer = event::aborted(a.ticket);
            if (a.what == action::kind::score)
                answer = (failed ? event::score_failed(a.job, a.worker) : event::scored(a.job, a.worker))
                             .of_life(a.incarnation);
            if (a.what == action::kind::train)
                answer = (failed ? event::learn_failed(a.job) : event::learned(a.job)).of_life(a.incarnation);
            if (a.what == action::kind::lost) answer = event::up(a.stage, a.worker, 3).of_life(a.incarnation + 1);
            if (a.what == action::kind::lost && a.stage == stage::learner) answer.slots = 1;
            if (a.what == action::kind::sync)
                for (std::int32_t w = 0; w < 3; ++w)
                    if ((a.worker < 0 || a.worker == w) && s.is_up(stage::rollout, w))
                        owed.push_back(event::synced(w, a.job).of_life(s.incarnation_of(stage::rollout, w)));
            if (answer.from_worker() && (!silent || a.what == action::kind::lost)) owed.push_back(answer);
            if (a.what == action::kind::step) {
                std::size_t& most = largest[s.totals().consumed > 1000];
                most = std::max(most, s.snapshot().size());
            }
        }
    };
    tell(event::up(stage::learner, 0).of_life(1));
    for (std::int32_t w = 0; w < 2; ++w) tell(event::up(stage::teacher, w, 3).of_life(1));
    for (std::int32_t w = 0; w < 3; ++w) tell(event::up(stage::rollout, w, 3).of_life(1));
    while (!s.finished()) {
        now += 1.0 / 1024;
        if (owed.empty()) {
            now = std::max(now, s.next_deadline());
            REQUIRE(now < forever);
            tell(event::of(event::kind::tick));
            continue;
        }
        std::swap(owed[draw(owed.size())], owed.back());
        const event e = owed.back();
        owed.pop_back();
        tell(e);
    }
    CHECK(s.totals().consumed >= sequences);
    return largest;
}

} // namespace

TEST_CASE("state does not grow with the run") {
    for (const bool faults : {false, true})
        for (const schedule& how : {schedule(async{.tau = 2}), schedule(async{.tau = 2, .policy = policy::edf}),
                                    schedule(async{.tau = 2, .policy = policy::retry, .update = weight_update::abort}),
                                    schedule(step_off{2})}) {
            if (!faults && !std::holds_alternative<step_off>(how)) continue; // faults are the harder case
            settings o{.batch = 4, .schedule = how, .teacher_batch = 2, .teacher_flush = 0.0625};
            o.rollout_attempts = o.teacher_attempts = o.learner_attempts = 1 << 20;
            o.rollout_deadline = 0.5, o.abort_deadline = 0.25, o.teacher_deadline = 0.75, o.learner_deadline = 1;
            o.sync_deadline = 1.25;
            const auto sizes = snapshot_sizes(o, 100'000, faults);
            INFO("faults " << faults << ": " << sizes[0] << " bytes, then " << sizes[1]);
            CHECK(sizes[1] <= sizes[0] + 128);
        }
}

TEST_CASE("after the end there is nothing to abandon") {
    script t(stream(1, {.tau = 1}));
    t.of(event::kind::close);
    const std::string bytes = t.s.snapshot();
    t.s.abandon_workers();
    CHECK(t.s.snapshot() == bytes);
    CHECK(scheduler::restore(t.s.options(), bytes).finished());
}
