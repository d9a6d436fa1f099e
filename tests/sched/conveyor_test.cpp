// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// optimise: no
//
// The payloads between the stages: an attempt's are its own, and a snapshot's go on where the scheduler says so.
#include <memory>
#include <optional>

#include "opd/sched/conveyor.hpp"
#include "script.hpp"

namespace {

using namespace opd::sched;
using opd::test::script;
using belt = opd::sched::conveyor<std::string, int>;

auto text(const char* s) { return std::make_shared<const std::string>(s); }

settings how(const async& a) { return {.batch = 1, .schedule = a, .teacher_batch = 1}; }

ticket attempt(std::uint32_t slot, sample_t sample, std::uint32_t number) {
    return {.sample = sample, .slot = slot, .attempt = number, .worker = 0, .incarnation = 1, .lane = 0};
}

// A run whose two sequences were started; its process dies at once or later, and another goes on from the snapshot.
struct cut {
    settings options;
    script before;
    belt payloads;
    std::optional<script> after;
    std::optional<belt> resumed;

    explicit cut(const async& a) : options(how(a)), before(options) {
        before.staff(2);
        for (const sample_t n : {0, 1}) CHECK(payloads.start(before.begun.at(n), 0) == nullptr);
    }
    void kill(bool keep_prefixes = true) {
        const auto saved = payloads.snapshot(before.s);
        after.emplace(options);
        after->s = scheduler::restore(options, saved.scheduler);
        after->s.abandon_workers(keep_prefixes);
        resumed.emplace();
        resumed->resume(after->s, saved);
    }
    // What the sequence is given at its start in the new process.
    auto prefix(sample_t n) { return resumed->start(after->begun.at(n), after->s.start_of(after->begun.at(n))); }
};

} // namespace

TEST_CASE("what an attempt makes that was given up is dropped") {
    belt c;
    const ticket first = attempt(0, 7, 1), second = attempt(0, 7, 2);
    c.start(first, 0);
    c.exported(first, text("to"));
    CHECK(c.start(second, 0) == nullptr); // a failed attempt starts from the prompt
    c.rolled(first, {0, 0, 0, 1}, text("too late"));
    CHECK(c.view(second).rolled == nullptr);
    c.rolled(second, {0, 1, 0.5, 2}, text("two"));
    c.rolled(second, {0, 0, 0, 1}, text("twice"));
    c.scored(first, std::make_shared<const int>(1));
    CHECK(*c.view(second).rolled == "two");
    CHECK(c.view(second).versions.newest == 1);
    CHECK(c.view(second).scored == nullptr);
    c.forget(attempt(0, 8, 1)); // another's
    CHECK(c.view(second).rolled != nullptr);
    c.forget(second);
    CHECK(c.view(second).rolled == nullptr);
}

TEST_CASE("what was parked is gone on from until a later answer is taken, not until one comes") {
    belt c;
    c.start(attempt(0, 7, 1), 0);
    c.parked(attempt(0, 7, 1), text("half"));
    CHECK(*c.start(attempt(0, 7, 2), 0) == "half");
    c.rolled(attempt(0, 7, 2), {0, 0, 0, 9}, text("whole")); // after its deadline, which the belt does not know
    const auto again = c.start(attempt(0, 7, 3), 0);
    REQUIRE(again);
    CHECK(*again == "half");
    CHECK(c.view(attempt(0, 7, 3)).rolled == nullptr);
    c.rolled(attempt(0, 7, 3), {0, 0, 0, 9}, text("whole"));
    CHECK(*c.view(attempt(0, 7, 3)).rolled == "whole");
    c.forget(attempt(0, 7, 3));
    CHECK(c.start(attempt(0, 7, 4), 0) == nullptr);
}

TEST_CASE("a prefix outlives its process, and the next one as well, until it is longer") {
    cut run({.tau = 1});
    run.payloads.exported(run.before.begun.at(1), text("onc"));
    run.kill();
    run.after->staff(2);
    CHECK(run.prefix(0) == nullptr);
    const auto goes_on = run.prefix(1);
    REQUIRE(goes_on);
    CHECK(*goes_on == "onc");
    const auto again = run.resumed->snapshot(run.after->s); // before the worker has exported anything
    REQUIRE(again.sequences.at(1).sequence);
    CHECK(*again.sequences.at(1).sequence == "onc");
    // its attempt fails: from the prompt
    run.after->roll_failed(1);
    CHECK(run.prefix(1) == nullptr);
}

TEST_CASE("a sequence that has to start again while it waits does not get its old prefix") {
    cut run({.tau = 0, .outstanding = 2, .policy = staleness_policy::retry});
    run.payloads.exported(run.before.begun.at(1), text("onc"));
    run.kill();
    script& t = *run.after;
    t.staff(1);
    t.of(event::kind::pause); // one of them runs, the other waits
    t.rolled(0), t.scored(), t.learned();
    CHECK(run.resumed->snapshot(t.s).sequences.at(1).sequence);
    CHECK(t.synced(0, 1) == "step v1:0"); // the other is stale now
    CHECK_FALSE(run.resumed->snapshot(t.s).sequences.at(0).sequence);
    t.of(event::kind::resume);
    CHECK(run.prefix(1) == nullptr);
}

TEST_CASE("a sequence that starts from the prompt has no prefix, even if the snapshot has one") {
    cut run({.tau = 1});
    run.payloads.exported(run.before.begun.at(1), text("onc"));
    run.kill(false);
    CHECK_FALSE(run.resumed->snapshot(run.after->s).sequences.at(1).sequence);
    run.after->staff(2);
    CHECK(run.prefix(1) == nullptr);
}

TEST_CASE("what is rolled out and scored goes on as such, with its versions and its score") {
    cut run({.tau = 1});
    script& t = run.before;
    t.down(stage::learner);
    for (const sample_t n : {0, 1}) {
        run.payloads.rolled(t.begun.at(n), {0, 0, 0, 10}, text(n == 0 ? "one" : "two"));
        t.rolled(n);
    }
    run.payloads.scored(t.begun.at(0), std::make_shared<const int>(5));
    t.scored();
    CHECK(t.s.where() == census{.scoring = 1, .ready = 1});
    run.kill();
    CHECK(run.after->s.where().ready == 1);
    const auto& one = run.resumed->view(t.begun.at(0));
    REQUIRE(one.rolled);
    REQUIRE(one.scored);
    CHECK(*one.rolled == "one");
    CHECK(*one.scored == 5);
    CHECK(one.versions.tokens == 10);
    CHECK(*run.resumed->view(t.begun.at(1)).rolled == "two");
    CHECK(run.resumed->view(t.begun.at(1)).scored == nullptr);
}
