// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// optimise: no
//
// Schedules in virtual time: the rates of AsyncOPD's appendix G, where times are constant; k = 0 and tau = 0 against
// sync; what each staleness policy bounds under heavy tails and what it costs; the same seed gives the same run; real
// stages in virtual time consume what they consume on threads; what the executor refuses.
#include <algorithm>
#include <doctest/doctest.h>
#include <map>
#include <set>

#include "opd/sched/metrics.hpp"
#include "opd/sched/timed_stages.hpp"
#include "sched/toy_stages.hpp"
#include "support/world.hpp"

namespace {

using namespace opd::test;
using opd::index_t;

/// Rollout of a whole batch r seconds, scoring it t, learning l; all constant and exact in binary.
struct constant_times {
    double r = 1, t = 1, l = 1, s = 0;
    simulated_rollout rollout(std::int32_t) const { return {engine_speed{.step = 0.25}, 64}; }
    void start(simulated_rollout& w, const ticket& k) const { w.start(k, 4 * r, 0); }
    double teacher(std::uint64_t, std::int32_t, std::span<const ticket>) const { return t; }
    double learner(std::uint64_t, const weights&, std::span<const ticket>) const { return l; }
    double sync(std::int32_t, const weights&) const { return s; }
};

struct step_times : stage_meter {
    void begin(stage s, std::int32_t w, double t, activity) { stage_meter::begin(s, w, t); }
    void end(stage s, std::int32_t w, double t, activity) { stage_meter::end(s, w, t); }
    std::vector<double> steps;
    template <class S>
    void event(double t, const opd::sched::event&, const actions& out, const S&) {
        for (const action& a : out.items)
            if (a.what == action::kind::step) steps.push_back(t);
    }
};

struct steady {
    double period = 0;
    double overlap = 0;
};
steady steady_state(const schedule& s, const constant_times& times, index_t updates = 60) {
    settings how;
    how.batch = 4;
    how.teacher_batch = 4;
    how.schedule = s;
    how.sequences = how.batch * updates;
    step_times seen;
    virtual_driver<constant_times, step_times> d(how, times, &seen);
    d.bring_up(stage::rollout, 2, 2);
    d.bring_up(stage::teacher, 1);
    d.bring_up(stage::learner, 1);
    REQUIRE(d.run());
    REQUIRE(static_cast<index_t>(seen.steps.size()) == updates);
    const auto n = seen.steps.size();
    return {(seen.steps[n - 12] - seen.steps[n - 42]) / 30, *seen.overlap()};
}

TEST_CASE("with constant times the rates are exact, and at least those of the paper") {
    for (const auto& [r, t, l] : {std::array{8.0, 4.0, 2.0}, std::array{2.0, 4.0, 8.0}, std::array{2.0, 8.0, 4.0},
                                  std::array{4.0, 4.0, 4.0}, std::array{1.0, 0.5, 16.0}, std::array{5.0, 3.0, 4.0}}) {
        const constant_times times{r, t, l};
        INFO("r " << r << " t " << t << " l " << l);
        CHECK(steady_state(opd::sched::sync{}, times).period == r + t + l);
        CHECK(steady_state(controlled{0}, times).period == r + t + l);
        // Batch b is started with the version of b - k, so k + 1 steps take at least r + t + l.
        for (const index_t k : {0, 1, 2, 5}) {
            INFO("k " << k);
            CHECK(steady_state(step_off{k}, times).period ==
                  doctest::Approx(std::max({r, t, l, (r + t + l) / static_cast<double>(k + 1)})).epsilon(1e-12));
        }
        CHECK(steady_state(step_off{1}, times).period <= std::max(r, t + l)); // the paper's: scoring waits for training
        CHECK(steady_state(step_off{2}, times).period == std::max({r, t, l}));
        CHECK(steady_state(controlled{2}, times).period == r + t + l); // staleness without overlap
        for (const staleness_policy p :
             {staleness_policy::capacity, staleness_policy::cohort_fifo, staleness_policy::edf, staleness_policy::drop,
              staleness_policy::retry, staleness_policy::in_order, staleness_policy::areal}) {
            INFO(name_of(p));
            async a;
            a.policy = p;
            a.tau = 0;
            CHECK(steady_state(a, times).period == r + t + l);
            a.tau = 4;
            CHECK(steady_state(a, times).period == std::max({r, t, l}));
        }
    }
}

TEST_CASE("a transfer of weights stops rollout and adds to the step") {
    const constant_times times{4, 2, 2, 1};
    CHECK(steady_state(opd::sched::sync{}, times).period == 9);
    CHECK(steady_state(step_off{2}, times).period == 5); // rollout stands still meanwhile
}

TEST_CASE("overlap is 1 in sync and near 3 in balanced two-step-off") {
    CHECK(steady_state(opd::sched::sync{}, {4, 4, 4}).overlap == doctest::Approx(1));
    CHECK(steady_state(step_off{1}, {4, 2, 2}, 300).overlap == doctest::Approx(2).epsilon(0.02));
    const double three = steady_state(step_off{2}, {4, 4, 4}, 300).overlap;
    CHECK(three > 2.95);
    CHECK(three <= 3);
}

// --- the same run ----------------------------------------------------------------------------------------------------

struct result {
    std::uint64_t hash = 0;
    std::vector<std::vector<sample_t>> batches;
    version_t largest_lag = 0;
    double end = 0;
};
result result_of(const world& w) {
    witness o(w.settings);
    auto d = driver_of(w, &o);
    run_to_end(d);
    return {o.hash(), o.batches(), o.largest_lag(), d.now()};
}

namespace {
/// Two workers, and from time 10.3 on others whose weights take long to come.
struct joined {
    double longest = 0;                    // step, from time 5 on
    std::map<std::int32_t, double> served; // when each had its first sequence
};
struct slow_to_install : constant_times {
    double slow = 0;
    double sync(std::int32_t w, const weights&) const { return w < 2 ? 0.0625 : slow; }
};
struct join_log {
    joined seen;
    double last = forever;
    void event(double t, const opd::sched::event&, const actions& out, const scheduler&) {
        for (const action& a : out.items) {
            if (a.what == action::kind::start) seen.served.try_emplace(a.worker, t);
            if (a.what != action::kind::step) continue;
            seen.longest = std::max(seen.longest, t - last);
            last = t < 5 ? forever : t;
        }
    }
};
joined join(const schedule& how, double slow, std::int32_t joiners, double until) {
    settings s;
    s.batch = 16, s.teacher_batch = 16, s.schedule = how;
    join_log log;
    slow_to_install times;
    times.slow = slow;
    virtual_driver<slow_to_install, join_log> d(s, times, &log);
    d.bring_up(stage::rollout, 2, 2);
    d.bring_up(stage::teacher, 1);
    d.bring_up(stage::learner, 1);
    for (std::int32_t w = 2; w < 2 + joiners; ++w) d.at(10.3 + 0.37 * (w - 2), event::up(stage::rollout, w, 2));
    d.run_until(until);
    return log.seen;
}
} // namespace

TEST_CASE("who joins and installs slowly makes no step longer than by one install, and serves as soon as it can") {
    async update_by_finish{.tau = 2, .update = weight_update::finish_first};
    for (const schedule& how : {schedule(opd::sched::sync{}), schedule(step_off{2}), schedule(controlled{1}),
                                schedule(async{.tau = 2, .outstanding = widest}), schedule(update_by_finish)})
        for (const double slow : {0.0, 0.1, 0.7, 0.95, 1.0, 1.3, 2.9, 3.1, 7.0, 60.0}) {
            INFO("schedule " << how.index() << " install " << slow);
            // a step of which nothing overlaps: what waited for an install begins anew
            const double alone = join(opd::sched::sync{}, slow, 0, 120).longest;
            const joined one = join(how, slow, 1, 300), three = join(how, slow, 3, 300);
            CHECK(one.longest <= alone + slow + 1e-9);
            CHECK(three.longest <= alone + slow + 1e-9);
            CHECK(one.served.count(2) == 1);
            // its first install, a second if one version overtook it, and a third that a step waits for
            if (one.served.count(2) == 1) CHECK(one.served.at(2) <= 10.3 + 3 * slow + 2 * alone + 1e-9);
            for (std::int32_t w = 2; w < 5; ++w) CHECK(three.served.count(w) == 1);
        }
}

TEST_CASE("k = 0 is sync, event by event") {
    for (std::uint64_t seed = 0; seed < 300; ++seed) {
        world w = world_of(seed, {.schedule = opd::sched::sync{}, .faults = seed % 2 == 0, .large = false});
        INFO("seed " << seed);
        const result serial = result_of(w);
        w.settings.schedule = step_off{0};
        CHECK(result_of(w).hash == serial.hash);
        w.settings.schedule = controlled{0};
        CHECK(result_of(w).hash == serial.hash);
        CHECK(serial.largest_lag == 0);
    }
}

TEST_CASE("tau = 0 consumes what sync consumes, at the same versions, under every policy and update") {
    for (std::uint64_t seed = 0; seed < 100; ++seed) {
        world w = world_of(seed, {.schedule = opd::sched::sync{}, .faults = false, .large = false});
        w.settings.rollout_deadline = w.settings.teacher_deadline = w.settings.learner_deadline = 0;
        INFO("seed " << seed);
        const result serial = result_of(w);
        for (int p = 0; p < 7; ++p)
            for (int u = 0; u < 3; ++u) {
                async a;
                a.tau = 0;
                a.policy = static_cast<staleness_policy>(p);
                a.update = static_cast<weight_update>(u);
                w.settings.schedule = a;
                const result streamed = result_of(w);
                INFO(name_of(a.policy) << " " << name_of(a.update));
                CHECK(streamed.batches == serial.batches);
                CHECK(streamed.largest_lag == 0);
            }
    }
}

TEST_CASE("the same seed gives the same run, another seed another") {
    std::set<std::uint64_t> hashes;
    for (std::uint64_t seed = 0; seed < 200; ++seed) {
        const result once = result_of(world_of(seed)), again = result_of(world_of(seed));
        CHECK(once.hash == again.hash);
        CHECK(once.end == again.end);
        hashes.insert(once.hash);
    }
    CHECK(hashes.size() == 200);
}

// --- what the policies bound, and what that costs --------------------------------------------------------------------

struct policy_run {
    double mean_lag = 0, rate = 0, lost = 0;
    version_t largest_lag = 0;
};
policy_run under_tail(const distribution& seconds, const async& a) {
    faulty_cluster c;
    c.lanes = 64;
    c.speed.step = 1e-3; // a duration is a length in milliseconds
    c.lengths.response = seconds;
    c.lengths.prompt = {constant{0}};
    c.learner_time.fixed = 1;
    settings s;
    s.batch = 8;
    s.teacher_batch = 1;
    s.schedule = a;
    s.sequences = 8 * 3000;
    struct light { // the account of starts and consumption alone
        version_t version = 0, largest = 0;
        std::int64_t sum = 0, n = 0;
        void event(double, const opd::sched::event&, const actions& out, const scheduler&) {
            for (const action& x : out.items)
                if (x.what == action::kind::step) {
                    for (const consumed_sequence& q : out.consumed_by(x)) {
                        const version_t lag = x.version - 1 - q.start;
                        largest = std::max(largest, lag);
                        sum += lag;
                        ++n;
                    }
                }
        }
    } seen;
    virtual_driver<faulty_cluster, light> run(s, c, &seen);
    run.bring_up(stage::rollout, 1, 64);
    run.bring_up(stage::teacher, 1, 64);
    run.bring_up(stage::learner, 1);
    REQUIRE(run.run());
    const counters& t = run.scheduler().totals();
    return {static_cast<double>(seen.sum) / static_cast<double>(seen.n),
            static_cast<double>(run.scheduler().version()) / run.now(),
            static_cast<double>(t.failed + t.restarts) / static_cast<double>(t.admitted + t.restarts), seen.largest};
}

TEST_CASE("a capacity rule bounds the mean lag and not the largest; hard bounds cost throughput or data") {
    const distribution pareto_tail = {pareto{1.1, 1000, 200000}};
    const distribution lognormal_tail = {lognormal{1000 * std::exp(1.0), 0.8}, 0, 60000};
    const auto with = [](staleness_policy p, index_t m = 0) {
        async a;
        a.tau = 4, a.policy = p, a.outstanding = m > 0 ? m : widest;
        return a;
    };
    for (const bool heavy : {true, false}) {
        INFO(std::string(heavy ? "Pareto 1.1" : "lognormal"));
        const distribution& tail = heavy ? pareto_tail : lognormal_tail;
        const policy_run capacity = under_tail(tail, with(staleness_policy::capacity));
        CHECK(capacity.mean_lag > 3.9); // it saturates at M/B - 1 = tau
        CHECK(capacity.mean_lag <= 4);
        CHECK(capacity.largest_lag > (heavy ? 100 : 30));
        CHECK(capacity.lost == 0);

        const policy_run edf = under_tail(tail, with(staleness_policy::edf));
        const policy_run cohort = under_tail(tail, with(staleness_policy::cohort_fifo));
        const policy_run in_order = under_tail(tail, with(staleness_policy::in_order));
        for (const policy_run& hard : {edf, cohort, in_order}) {
            CHECK(hard.largest_lag == 4);
            CHECK(hard.lost == 0);
            CHECK(hard.rate < (heavy ? 0.2 : 0.6) * capacity.rate); // the slowest is waited for
        }
        CHECK(edf.rate >= 0.99 * cohort.rate);

        const policy_run half = under_tail(tail, with(staleness_policy::edf, 24)),
                         low = under_tail(tail, with(staleness_policy::edf, 16));
        CHECK(half.mean_lag == doctest::Approx(2).epsilon(0.05)); // M = (tau/2 + 1)·B: half the lag,
        CHECK(half.rate > 0.95 * edf.rate);                       // nearly the same rate
        CHECK(low.mean_lag == doctest::Approx(1).epsilon(0.05));

        const policy_run drop = under_tail(tail, with(staleness_policy::drop)),
                         retry = under_tail(tail, with(staleness_policy::retry));
        CHECK(drop.largest_lag <= 4);
        CHECK(retry.largest_lag <= 4);
        CHECK(drop.lost > 0.05); // of the data: the longest responses
        CHECK(drop.rate > 2 * edf.rate);

        const policy_run areal = under_tail(tail, with(staleness_policy::areal));
        CHECK(areal.mean_lag <= 4);
        CHECK(areal.largest_lag > (heavy ? 100 : 30));
        MESSAGE(std::string(heavy ? "Pareto 1.1" : "lognormal")
                << ": mean lag/largest/updates per second/lost: capacity " << capacity.mean_lag << "/"
                << capacity.largest_lag << "/" << capacity.rate << ", edf " << edf.mean_lag << "/" << edf.largest_lag
                << "/" << edf.rate << ", edf M=16 " << low.mean_lag << "/" << low.largest_lag << "/" << low.rate
                << ", drop " << drop.mean_lag << "/" << drop.largest_lag << "/" << drop.rate << "/" << drop.lost
                << ", retry " << retry.mean_lag << "/" << retry.largest_lag << "/" << retry.rate << "/" << retry.lost);
    }
}

// --- real stages -----------------------------------------------------------------------------------------------------

using toy_model = timed_stages<toy::rollout, toy::teacher, toy::learner>;

/// The stages of the thread tests in virtual time.
struct virtual_toys {
    settings how;
    std::shared_ptr<toy::world> shared = std::make_shared<toy::world>();
    std::function<double(std::int32_t, index_t)> step = [](std::int32_t w, index_t n) {
        return 0.5 + 0.25 * w + 0.125 * static_cast<double>(n);
    };
    std::vector<std::set<sample_t>> batches;
    std::vector<sample_t> consumed;
    counters totals;
    double end = 0;
    bool finished = false;

    void event(double, const opd::sched::event&, const actions& out, const scheduler& s) {
        s.check_invariants();
        for (const action& a : out.items) {
            if (a.what == action::kind::start) shared->starts[{a.ticket.sample, a.ticket.attempt}] = a.version;
            if (a.what != action::kind::step) continue;
            batches.emplace_back();
            for (const consumed_sequence& c : out.consumed_by(a)) {
                batches.back().insert(c.ticket.sample);
                consumed.push_back(c.ticket.sample);
            }
        }
    }
    virtual_toys& go() {
        stage_costs<toy::sequence> costs;
        costs.step = step;
        costs.install = [](std::int32_t, version_t) { return 0.375; };
        costs.train = [](auto) { return 4.0; };
        toy_model m([this](std::int32_t w) { return std::make_shared<toy::rollout>(shared, w, 4); },
                    {std::make_shared<toy::teacher>(shared, 0)}, std::make_shared<toy::learner>(shared), costs);
        virtual_driver<toy_model, virtual_toys> d(how, std::move(m), this);
        d.bring_up(stage::rollout, 3, 4);
        d.bring_up(stage::teacher, 1);
        d.bring_up(stage::learner, 1);
        finished = d.run(1000000);
        totals = d.scheduler().totals();
        end = d.now();
        return *this;
    }
};

std::vector<sample_t> sorted(std::vector<sample_t> v) {
    std::sort(v.begin(), v.end());
    return v;
}

TEST_CASE("real stages in virtual time consume what they consume on threads") {
    for (int kind = 0; kind < 3 + 21; ++kind) {
        settings how;
        how.batch = 8;
        how.sequences = 96;
        how.teacher_batch = 3;
        how.teacher_flush = 0.01;
        bool same_batches = true;
        if (kind == 0) {
            how.schedule = opd::sched::sync{};
        } else if (kind < 3) {
            how.schedule = kind == 1 ? schedule(step_off{2}) : schedule(controlled{2});
        } else {
            async a;
            a.tau = 2;
            a.policy = static_cast<staleness_policy>((kind - 3) / 3);
            a.update = static_cast<weight_update>((kind - 3) % 3);
            same_batches = a.policy == staleness_policy::in_order;
            if (a.policy == staleness_policy::drop) a.tau = 50; // who is dropped is a matter of timing
            how.schedule = a;
        }
        INFO("kind " << kind);
        virtual_toys v;
        v.how = how;
        v.go();
        CHECK(v.finished);
        CHECK(v.shared->complaints.empty());
        toy::run r;
        r.how = how;
        r.go();
        CHECK(r.complaints() == "");
        CHECK(sorted(v.consumed) == sorted(r.consumed));
        if (same_batches) CHECK(v.batches == r.batches);

        virtual_toys again;
        again.how = how;
        again.go();
        CHECK(again.consumed == v.consumed);
        CHECK(again.end == v.end);
    }
}

TEST_CASE("what a real stage throws in virtual time has its outcome") {
    for (const std::string call : {"score", "train"})
        for (const bool always : {false, true}) {
            virtual_toys v;
            v.how.batch = 8;
            v.how.sequences = 40;
            v.how.available = 80;
            v.how.learner_attempts = 2;
            v.how.schedule = async{};
            int left = 1;
            v.shared->fault = [&](const std::string& c, int, sample_t about, std::stop_token) {
                if (c == call && (always ? about % 3 == 0 : left-- > 0)) throw toy::failed("no");
                return toy::world::wrong::nothing;
            };
            v.go();
            INFO(call << " " << always);
            CHECK(v.finished);
            CHECK(v.shared->complaints.empty());
            CHECK(v.totals.admitted == v.totals.consumed + v.totals.failed);
            CHECK(v.totals.retries > 0);
            CHECK((v.totals.failed > 0) == always);
            if (always)
                CHECK(v.totals
                          .failed_by[static_cast<std::size_t>(call == "score" ? failure::teacher : failure::learner)] >
                      0);
        }
}

TEST_CASE("partial answers of a real teacher") {
    virtual_toys v;
    v.how.batch = 8;
    v.how.sequences = 40;
    v.how.schedule = async{};
    int n = 0;
    v.shared->fault = [&](const std::string& c, int, sample_t, std::stop_token) {
        return c == "score" && ++n % 5 == 0 ? toy::world::wrong::partly : toy::world::wrong::nothing;
    };
    v.go();
    CHECK(v.finished);
    CHECK(v.shared->complaints.empty());
    CHECK(v.totals.retries > 0);
    CHECK(v.totals.consumed == 40);
}

// --- what is refused -------------------------------------------------------------------------------------------------

TEST_CASE("the executor refuses what cannot be") {
    const world w = world_of(3);
    auto d = driver_of<witness>(w, nullptr);
    CHECK_THROWS_AS(d.at(-1, event::of(event::kind::pause)), opd::invalid_input);
    CHECK_THROWS_AS(d.at(forever, event::of(event::kind::pause)), opd::invalid_input);
    const ticket t;
    CHECK_THROWS_AS(d.at(0, event::scored(1, 0, std::span(&t, 1))), opd::invalid_input);
    CHECK_THROWS_AS(d.run_until(std::nan("")), opd::invalid_input);
    CHECK_THROWS_AS(d.at(0, event::up(stage::rollout, 1 << 16)), opd::invalid_input);
    CHECK_THROWS_AS(d.at(0, event::up(stage::rollout, 0, (1 << 16) + 1)), opd::invalid_input);
    d.run(50);
    CHECK_THROWS_AS(d.at(d.now() / 2, event::of(event::kind::pause)), opd::invalid_input);

    constant_times late{1, forever, 1};
    settings s;
    s.batch = 1;
    s.sequences = 1;
    virtual_driver<constant_times> never(s, late);
    never.bring_up(stage::rollout, 1);
    never.bring_up(stage::teacher, 1);
    never.bring_up(stage::learner, 1);
    CHECK_THROWS_AS(never.run(), opd::invalid_input);
}

TEST_CASE("a run that had finished goes on when more is wanted") {
    settings s;
    s.batch = 4;
    s.sequences = 40;
    for (const schedule& how : {schedule{async{}}, schedule{step_off{2}}}) {
        s.schedule = how;
        virtual_driver<constant_times> first(s, {3, 1, 1});
        first.bring_up(stage::rollout, 2, 2);
        first.bring_up(stage::teacher, 1);
        first.bring_up(stage::learner, 1);
        REQUIRE(first.run());
        settings more = s;
        more.sequences = 60;
        auto again = virtual_driver<constant_times>::restore(more, {3, 1, 1}, first.snapshot());
        again.crash();
        CHECK(again.finished()); // nobody has said that it should not be
        again.crash(0, true);
        CHECK_FALSE(again.finished());
        REQUIRE(again.run());
        CHECK(again.scheduler().version() == 15);
        CHECK(again.scheduler().totals().consumed == 60);
        CHECK(again.scheduler().totals().admitted == 60);
        CHECK(again.now() > first.now());
    }
}

TEST_CASE("who is busy does not depend on who looks") {
    struct looks {
        int begun = 0, ended = 0;
        void begin(stage, std::int32_t, double, activity) { ++begun; }
        void end(stage, std::int32_t, double, activity) { ++ended; }
    };
    settings s;
    s.batch = 4;
    s.sequences = 40;
    const auto bring_up = [](auto& d) {
        d.bring_up(stage::rollout, 2, 2);
        d.bring_up(stage::teacher, 1);
        d.bring_up(stage::learner, 1);
    };
    looks there;
    virtual_driver<constant_times> blind(s, {3, 1, 1});
    virtual_driver<constant_times, looks> watched(s, {3, 1, 1}, &there);
    bring_up(blind);
    bring_up(watched);
    for (int event = 0; event < 60; ++event) {
        REQUIRE(blind.step());
        REQUIRE(watched.step());
        CHECK(blind.snapshot() == watched.snapshot());
        looks late; // comes to a driver that nobody watched
        auto again = virtual_driver<constant_times, looks>::restore(s, {3, 1, 1}, blind.snapshot(), &late);
        again.introduce();
        CHECK(late.begun == there.begun - there.ended);
    }
}

} // namespace
