// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Mean staleness in closed form beside simulations, where its assumptions hold and where they do not; weights that
// cross links, the teacher's cache, workers that come late: what they cost where that can be written down; ledgers.
#include <doctest/doctest.h>

#include <cmath>
#include <deque>
#include <string>

#include "cluster_sim/closed_forms.hpp"
#include "cluster_sim/costs.hpp"
#include "cluster_sim/simulate.hpp"

namespace {

using namespace cluster_sim;
namespace sched = opd::sched;

constexpr int workers = 8;

// Rollout slots that are never idle and do not slow each other; a teacher and transfers that take no time.
config slots(double learner_seconds, const sched::distribution& lengths) {
    config c;
    c.batch = 32, c.steps = 220, c.warmup = 20;
    c.lengths.response = lengths, c.lengths.prompt = {sched::constant{0}};
    c.rollout.lanes = 8;
    c.rollout.speed = {.step = 0.01, .step_per_sequence = 0, .prefill = 0, .rebuild = 0, .factor = 1};
    c.teacher.batch = 1;
    c.learner.job = {.fixed = learner_seconds};
    c.sync = {};
    c.schedules = {{"async", sched::async{.tau = 20, .outstanding = 600}, workers, 1}};
    return c;
}
constexpr double concurrency = workers * 8;

/// A queue of q B that drops its oldest, fed at rho B sequences a step: how many updates the B oldest have seen at each
/// take.
double naive_in_queue(double rho, int q) {
    constexpr int batch = 40, steps = 4000, warm = 200;
    std::deque<double> queue;
    double seen = 0, taken = 0;
    index_t arrived = 0;
    for (int now = 1; now <= steps; ++now) {
        for (double at; (at = static_cast<double>(arrived) / (rho * batch)) < now; ++arrived) {
            queue.push_back(at);
            if (static_cast<int>(queue.size()) > q * batch) queue.pop_front();
        }
        for (int i = 0; i < batch && now > warm; ++i, queue.pop_front()) {
            REQUIRE_FALSE(queue.empty());
            seen += now - std::floor(queue.front()); // updates at floor + 1 … now
            ++taken;
        }
    }
    return seen / taken;
}

std::string refusal_of(const std::string& text) {
    try {
        validate(config_of_text(text, "c.json"));
    } catch (const failure& e) {
        return e.what();
    }
    return "";
}

} // namespace

TEST_CASE("mean staleness: the closed form where rollout limits") {
    for (const double rho : {0.2, 0.5, 0.8}) {
        CAPTURE(rho);
        // 100 tokens of 10 ms on 64 slots: 32 sequences in half a second
        const config c = slots(0.5 * rho, {sched::lognormal{100 * std::exp(-0.125), 0.5}});
        const outcome o = simulate(c, c.schedules[0]);
        const staleness_load load{.concurrency = concurrency, .batch = 32, .utilisation = rho};
        CHECK(o.stuck == "");
        CHECK(o.running == doctest::Approx(concurrency).epsilon(0.01));
        CHECK(1 - o.waits == doctest::Approx(rho).epsilon(0.1));
        CHECK(mean_staleness(load) == doctest::Approx(2 + rho));
        CHECK(o.settled_lag == doctest::Approx(mean_staleness(load)).epsilon(0.05));
        // equal lengths: of 64 that end at one moment the second half waits for the update of the first, whatever rho
        // is
        const config lockstep = slots(0.5 * rho, {sched::constant{100}});
        const outcome l = simulate(lockstep, lockstep.schedules[0]);
        CHECK(l.settled_lag == doctest::Approx(pre_queue_staleness(load) + 0.5));
    }
    // the tail of a group, as they count it: opd consumes the answers to one prompt singly
    CHECK(pre_queue_staleness({.concurrency = 120, .batch = 240, .utilisation = 0.63, .tail = 1.42}) ==
          doctest::Approx(0.71));
    CHECK(mean_staleness({.concurrency = 120, .batch = 240, .utilisation = 0.63, .queue = 2, .tail = 1.42}) ==
          doctest::Approx(1.34)); // a row of their table
}

TEST_CASE("mean staleness: where the trainer limits their queue drops, and opd's permits hold back") {
    for (const int q : {1, 2, 3})
        for (const double rho : {1.0, 1.25, 1.6, 2.0, 3.0}) {
            CAPTURE(q);
            CAPTURE(rho);
            const double naive = naive_in_queue(rho, q);
            const double form = in_queue_staleness({.batch = 1, .utilisation = rho, .queue = static_cast<double>(q)});
            CHECK(std::abs(naive - form) < 0.5);
            if (rho == 1) CHECK(naive == doctest::Approx(form).epsilon(0.05));
        }
    for (const index_t permits : {96, 160}) {
        CAPTURE(permits);
        config c = slots(1, {sched::lognormal{100 * std::exp(-0.125), 0.5}});
        c.schedules[0].schedule = sched::async{.tau = 20, .outstanding = permits};
        const outcome o = simulate(c, c.schedules[0]);
        CHECK(o.waits < 0.05);
        CHECK(o.settled_lag == doctest::Approx(permits_staleness(static_cast<double>(permits), 32)).epsilon(0.02));
        CHECK(o.wasted == 0);
        const auto text = stalenesses(c, {o});
        CHECK(text.find("async") != std::string::npos);
    }
    CHECK(stalenesses(slots(1, {sched::constant{1}}), {}) == "");
}

TEST_CASE("weights cross links: by each worker's place, and meanwhile rollout goes on") {
    config c = slots(0.1, {sched::constant{100}});
    c.weights.bytes = 10, c.weights.bandwidth = 5;
    const entry& e = c.schedules[0];
    CHECK(transfer_seconds(c, e, 0) == 2);
    CHECK(transfer_seconds(c, e, 7) == 16);
    c.weights.fan_out = 2; // node 1 after one copy, 2 after two, 3 and 4 from 1, …, 8 from 3
    CHECK(transfer_seconds(c, e, 0) == 2);
    CHECK(transfer_seconds(c, e, 1) == 4);
    CHECK(transfer_seconds(c, e, 2) == 2 + 2);
    CHECK(transfer_seconds(c, e, 3) == 2 + 4);
    CHECK(transfer_seconds(c, e, 7) == 2 + 2 + 4); // 0 to 1, 1 to 3, 3 to 8
    c.weights.fan_out = 1;                         // a chain
    CHECK(transfer_seconds(c, e, 7) == 16);
    entry shared = e;
    shared.sharing = sharing::all;
    CHECK(transfer_seconds(c, shared, 7) == 0);

    // sync, equal lengths: rollout, learner, and the last copy, one after the other
    c = slots(0.1, {sched::constant{100}});
    c.batch = 64, c.steps = 12, c.warmup = 2;
    c.teacher.batch = 8;
    c.schedules = {{"sync", sched::sync{}, workers, 1}};
    const double plain = 64 * 100 / simulate(c, c.schedules[0]).throughput;
    CHECK(plain == doctest::Approx(1 + 0.1));
    c.weights.bytes = 10, c.weights.bandwidth = 100;
    for (const bool meanwhile : {false, true}) { // nothing runs meanwhile
        c.weights.meanwhile = meanwhile;
        CHECK(64 * 100 / simulate(c, c.schedules[0]).throughput == doctest::Approx(plain + workers * 0.1));
    }
    // async, where rollout limits: 32 sequences in 0.5 s, and each worker loses its own transfer or nothing
    config a = slots(0.1, {sched::lognormal{100 * std::exp(-0.125), 0.5}});
    const double free = simulate(a, a.schedules[0]).throughput;
    a.weights.bytes = 10, a.weights.bandwidth = 400; // 0.025 to 0.2 s
    const double stands = simulate(a, a.schedules[0]).throughput;
    a.weights.meanwhile = true;
    const double goes_on = simulate(a, a.schedules[0]).throughput;
    CHECK(free == doctest::Approx(64 * 100).epsilon(0.02));
    CHECK(stands < 0.9 * free);
    CHECK(goes_on > 0.95 * free); // nothing starts before all have them
}

TEST_CASE("a full cache keeps rollout from starting, and nothing is lost by it") {
    config c = slots(1, {sched::constant{100}}); // the learner limits
    c.steps = 40, c.warmup = 4;
    c.schedules[0].schedule = sched::async{.tau = 20, .outstanding = 320};
    const outcome wide = simulate(c, c.schedules[0]);
    CHECK(wide.blocked == 0);
    c.teacher.cache = 2 * 32 * 100;
    const outcome bounded = simulate(c, c.schedules[0]);
    CHECK(bounded.stuck == "");
    CHECK(bounded.blocked > 0.5);
    CHECK(bounded.wasted == 0);
    CHECK(bounded.settled_lag < wide.settled_lag); // less is drawn ahead
    CHECK(bounded.throughput == doctest::Approx(wide.throughput).epsilon(0.02));
    c.teacher.cache = 100; // less than a batch, and what runs is not enough for one
    c.rollout.lanes = 1;
    const outcome never = simulate(c, c.schedules[0]);
    CHECK(never.stuck.find("the teacher's cache is full") != std::string::npos);
}

TEST_CASE("workers that come late are missed until they have installed") {
    config c = slots(0.05, {sched::constant{100}});
    c.steps = 0, c.seconds = 40;
    const auto all = static_cast<double>(simulate(c, c.schedules[0]).ledger.generated);
    c.rollout.joiners = {4, 10, 2, 5}; // there after 10, 12, 14, 16 s, at work 5 s later
    const outcome o = simulate(c, c.schedules[0]);
    const double missed = (15 + 17 + 19 + 21) / (8.0 * 40);
    CHECK(static_cast<double>(o.ledger.generated) == doctest::Approx((1 - missed) * all).epsilon(0.02));
    CHECK(o.ledger.idle_seconds == doctest::Approx(4 * 5).epsilon(0.05)); // up, and without weights
    CHECK(o.stuck == "");
}

TEST_CASE("ledgers of simulations: every token, beside the published ones") {
    config c = preset("node");
    c.steps = 20;
    c.sensitivity = {};
    std::vector<outcome> all;
    for (const entry& e : c.schedules) all.push_back(simulate(c, e));
    for (const outcome& o : all) {
        CAPTURE(o.what.name);
        const auto& l = o.ledger;
        CHECK(l.brought == 0);
        CHECK(l.unreported == 0);
        CHECK(l.generated == l.learnt + l.discarded + l.lost + l.outstanding);
        CHECK(l.lost == 0);
        const auto* a = std::get_if<sched::async>(&o.what.schedule);
        const bool throws_away =
            a && (a->update == sched::weight_update::abort || a->policy == sched::staleness_policy::drop ||
                  a->policy == sched::staleness_policy::retry);
        CHECK((l.discarded > 0) == throws_away);
        CHECK(report(c, {o}, {})["schedules"][0]["ledger"]["learnt"] == l.learnt);
    }
    const std::string text = ledgers(all);
    CHECK(text.find("marin#8936 (published) ") != std::string::npos);
    CHECK(text.find(" 5807538    62.5%      32.9%     0.0%         4.6%") != std::string::npos);
    const std::size_t sync = text.find("\nsync ");
    REQUIRE(sync != std::string::npos);
    CAPTURE(text);
    CHECK(text.substr(sync, text.find('\n', sync + 1) - sync).ends_with(" -")); // whose GPUs others have, too
}

TEST_CASE("costs of async: each row beside the same sync, and what cannot be is refused") {
    config c = preset("node");
    c.steps = 12;
    const cost_study s = costs_of_async(c, [](double) {});
    REQUIRE(s.schedules == std::vector<std::string>{"async", "async edf", "async in_order"});
    REQUIRE(s.rows.size() == 9);
    CHECK(s.rows[0].gains[0] ==
          doctest::Approx(simulate(c, c.schedules[4]).throughput / simulate(c, c.schedules[1]).throughput));
    CHECK(s.rows[2].gains[0] < s.rows[0].gains[0]); // the learner sends four copies
    CHECK(s.rows[4].gains[0] > s.rows[3].gains[0]); // rollout goes on
    CHECK(s.rows[1].sync == s.rows[0].sync);        // who shares its GPUs has the weights
    CHECK(s.rows[0].blocked[0] == 0);
    CHECK(table(c, s).find("tree of 2, rollout goes on") != std::string::npos);

    CHECK(refusal_of(R"({"weights": {"bytes": -1}})") == "weights.bytes must be finite and at least 0");
    CHECK(refusal_of(R"({"weights": {"bandwidth": 0}})") == "weights.bandwidth must be finite and positive");
    CHECK(refusal_of(R"({"weights": {"fanout": 2}})").find("did you mean 'fan_out'?") != std::string::npos);
    CHECK(refusal_of(R"({"teacher": {"cache": -1}})") == "teacher.cache must be finite and at least 0");
    CHECK(refusal_of(R"({"rollout": {"joiners": {"count": 4}}})").find("joiners.count must lie in [0, 3], not 4") !=
          std::string::npos);
    CHECK(refusal_of(R"({"rollout": {"joiners": {"count": 1, "after": 10, "every": 1, "install": 3}}})") == "");
    c.weights = {1, 2, 3, true}, c.rollout.joiners = {1, 2, 3, 4}, c.teacher.cache = 5;
    CHECK(to_json(config_of_text(to_json(c).dump(), "again.json")) == to_json(c));
    c.schedules.resize(2);
    c.sensitivity = {};
    CHECK_THROWS_WITH(costs_of_async(c, [](double) {}), "--costs: the configuration has no async schedule");
}
