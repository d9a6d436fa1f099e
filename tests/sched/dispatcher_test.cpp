// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// build: sanitize
// optimise: no
//
// Between scheduler and workers: each command has the payloads that it needs, and nothing is kept of a worker whose
// life is over, or of what the scheduler refuses. (Ten thousand runs over an unreliable channel: channel_test.cpp.)
#include <doctest/doctest.h>
#include <memory>
#include <string>
#include <vector>

#include "opd/sched/dispatcher.hpp"

namespace {

using namespace opd::sched;
using opd::invalid_input;
using belt = conveyor<std::string, int>;
using command = worker_command<std::string, int>;
using reply = worker_reply<std::string, int>;
using kind = command::kind;

auto text(const char* s) { return std::make_shared<const std::string>(s); }

/// A driver without workers: commands are kept, the test replies.
struct driver {
    dispatcher<belt> work;
    std::vector<command> told; // since the last event
    std::vector<std::string> calls;
    std::vector<std::string> trained; // of the last step, as its payloads were
    std::vector<std::string> refusals;
    double now = 0;

    explicit driver(opd::index_t sequences = 1, async how = {.tau = 0})
        : work(scheduler({.batch = 1, .schedule = how, .sequences = sequences, .teacher_batch = 1})) {
        staff();
    }
    void staff(incarnation_t life = 1) {
        on(event::up(stage::rollout, 0).of_life(life));
        on(event::up(stage::teacher, 0).of_life(life));
        on(event::up(stage::learner, 0).of_life(life));
        on(event::synced(0, work.scheduler().weights().job).of_life(life));
    }
    void on(const event& e) {
        told.clear(), calls.clear();
        work.on(e, ++now, *this);
    }
    void hear(reply r) {
        told.clear(), calls.clear();
        work.hear(r, ++now, *this);
    }
    const command& last() const { return told.back(); }

    void took(const event&, double, const actions& a) {
        CHECK(&a == &work.actions());
        calls.push_back("took");
    }
    void carry_out(const action& a) {
        calls.push_back("action");
        switch (a.what) {
        case action::kind::step:
            trained.clear();
            for (const consumed_sequence& c : work.actions().consumed_by(a))
                trained.push_back(*work.payloads().view(c.ticket).rolled);
            [[fallthrough]];
        case action::kind::fail:
        case action::kind::lost:
        case action::kind::finished:
            CHECK_THROWS_AS(work.command(a), invalid_input);
            break;
        default:
            told.push_back(work.command(a));
        }
    }
    void carried_out() { calls.push_back("carried out"); }
    void refused(std::exception_ptr e) {
        try {
            std::rethrow_exception(e);
        } catch (const invalid_input& x) {
            refusals.emplace_back(x.what());
        }
    }
    ticket started() {
        REQUIRE(told.size() == 1);
        REQUIRE(last().what == kind::start);
        return last().ticket;
    }
};

} // namespace

TEST_CASE("a sequence's payloads go from stage to stage, and are forgotten once it is consumed") {
    driver d;
    const ticket t = d.started();
    CHECK(d.last().prefix == nullptr);
    CHECK(d.last().life == 1);
    CHECK(d.calls == std::vector<std::string>{"took", "action", "carried out"});

    d.hear({.what = event::rolled_out(t, {0, 0, 0, 3}), .sequence = text("abc")});
    REQUIRE(d.last().what == kind::score);
    REQUIRE(d.last().tickets.size() == 1);
    CHECK(d.last().tickets[0].sample == t.sample);
    CHECK(*d.last().sequences.at(0) == "abc");

    reply scored{.what = event::scored(d.last().job, 0).of_life(1), .tickets = {t}};
    scored.scores = {std::make_shared<const int>(7)};
    d.hear(std::move(scored));
    REQUIRE(d.last().what == kind::train);
    REQUIRE(d.last().batch.size() == 1);
    CHECK(*d.last().batch[0].rolled == "abc");
    CHECK(*d.last().batch[0].scored == 7);
    CHECK(d.last().batch[0].versions.tokens == 3);
    CHECK(d.last().call.from == weights{0, 0});

    const std::uint64_t job = d.last().call.job;
    d.hear({.what = event::learned(job).of_life(1)});
    REQUIRE(d.last().what == kind::install);
    CHECK(d.last().weights == weights{1, job});
    d.hear({.what = event::synced(0, job).of_life(1)});
    CHECK(d.trained == std::vector<std::string>{"abc"});
    CHECK(d.work.payloads().view(t).rolled == nullptr);
    CHECK(d.work.scheduler().finished());
    CHECK(d.refusals.empty());
}

TEST_CASE("nothing is kept of a worker whose life is over") {
    driver d;
    const ticket t = d.started();
    d.on(event::down(stage::rollout, 0).of_life(1));
    d.hear({.what = event::rolled_out(t, {0, 0, 0, 3}), .sequence = text("late")});
    CHECK(d.work.payloads().view(t).rolled == nullptr);
    CHECK(d.work.scheduler().totals().late == 1);
    CHECK(d.told.empty());
}

TEST_CASE("what the scheduler refuses is an attempt that has failed, and its payload is replaced") {
    driver d;
    const ticket t = d.started();
    d.hear({.what = event::rolled_out(t, {0, 5, 2, 3}), .sequence = text("of the future")});
    REQUIRE(d.refusals.size() == 1);
    CHECK(d.refusals[0].find("the worker was sent version 0") != std::string::npos);
    const ticket again = d.started();
    CHECK(again.attempt == t.attempt + 1);
    CHECK(d.work.payloads().view(again).rolled == nullptr);
}

TEST_CASE("a parked sequence goes on from its tokens, and from those of before if later ones are refused") {
    driver d;
    const ticket t = d.started();
    d.hear({.what = event::parked(t, {0, 0, 0, 2}), .sequence = text("ab")});
    const ticket second = d.started();
    CHECK(*d.last().prefix == "ab");
    d.hear({.what = event::parked(second, {0, 9, 3, 4}), .sequence = text("abcd")}); // of weights that it never had
    CHECK(d.refusals.size() == 1);
    const ticket third = d.started();
    CHECK(third.attempt == second.attempt + 1);
    REQUIRE(d.last().prefix);
    CHECK(*d.last().prefix == "ab");
}

TEST_CASE("what is in rollout on a worker, the oldest first") {
    driver d(3, {.tau = 2, .outstanding = 3});
    d.on(event::up(stage::rollout, 0, 3).of_life(1));
    std::vector<sample_t> running;
    for (const ticket& t : d.work.running(0)) running.push_back(t.sample);
    CHECK(running == std::vector<sample_t>{0, 1, 2});
    CHECK(d.work.running(1).empty());
}

TEST_CASE("a run goes on from a snapshot with its payloads") {
    driver d;
    d.hear({.what = event::rolled_out(d.started(), {0, 0, 0, 3}), .sequence = text("abc")});
    const auto saved = d.work.snapshot();
    driver after;
    after.work = dispatcher<belt>(scheduler::restore(d.work.scheduler().options(), saved.scheduler));
    after.work.scheduler().abandon_workers();
    after.work.resume(saved);
    after.now = 0;
    after.on(event::up(stage::teacher, 0).of_life(2));
    REQUIRE(after.last().what == kind::score);
    CHECK(*after.last().sequences.at(0) == "abc");
}
