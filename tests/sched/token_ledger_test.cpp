// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// optimise: no
//
// Where tokens end: by hand, each way that there is; in random worlds with faults, where the sums hold after every
// event and the engines' own count is met; on threads, where workers die and calls throw.
#include <cmath>
#include <cstdint>
#include <doctest/doctest.h>
#include <map>
#include <memory>
#include <vector>

#include "describe_json.hpp"
#include "opd/sched/meters/token_ledger.hpp"
#include "sched/script.hpp"
#include "sched/toy_stages.hpp"
#include "support/world.hpp"

namespace {

using namespace opd::sched;
using opd::test::stamped;
using opd::test::stream;

bool balanced(const token_totals& t) {
    return t.brought + t.generated == t.learnt + t.discarded + t.lost + t.outstanding && t.outstanding >= 0 &&
           t.regenerated <= t.discarded + t.lost;
}

/// A scheduler driven by hand and its ledger; replies carry the ticket of the sequence's latest start.
struct hand {
    scheduler s;
    token_ledger ledger;
    double t = 0;
    std::map<sample_t, ticket> tickets;

    explicit hand(const settings& how) : s(how) {}
    void on(const event& what) {
        actions out;
        const event e = stamped(s, what);
        s.on(e, t, out);
        for (const action& a : out.items) {
            if (a.what == action::kind::start) tickets[a.ticket.sample] = a.ticket;
            if (a.what == action::kind::sync) sync = a.job;
            if (a.what == action::kind::train) train = a.job;
            if (a.what == action::kind::score) scores.push_back(a.job);
        }
        ledger.event(t, e, out, s);
        CHECK(balanced(ledger.totals()));
    }
    void begin(std::int32_t lanes) {
        on(event::up(stage::teacher, 0, 8));
        on(event::up(stage::learner, 0));
        on(event::up(stage::rollout, 0, lanes));
        on(event::synced(0, sync));
    }
    static token_versions drawn_by(version_t v, std::int64_t tokens) { return {v, v, double(v), tokens}; }
    void rolled(sample_t n, std::int64_t tokens, version_t by = 0) {
        on(event::rolled_out(tickets.at(n), drawn_by(by, tokens)));
    }
    void parked(sample_t n, std::int64_t tokens) { on(event::parked(tickets.at(n), drawn_by(0, tokens))); }
    void drawn(sample_t n, std::int64_t tokens) {
        ledger.drawn(tickets.at(n), tokens, t);
        CHECK(balanced(ledger.totals()));
    }
    void score() {
        for (const std::uint64_t j : std::exchange(scores, {})) on(event::scored(j, 0));
    }
    void learn() {
        on(event::learned(train));
        on(event::synced(0, sync));
    }
    std::vector<std::int64_t> figures() const {
        const token_totals r = ledger.totals();
        return {r.generated, r.learnt, r.discarded, r.lost, r.outstanding, r.regenerated, r.unreported};
    }
    std::uint64_t sync = 0, train = 0;
    std::vector<std::uint64_t> scores;
};
using is = std::vector<std::int64_t>;

} // namespace

TEST_CASE("weights that change abort what runs; a worker dies; the sequences are drawn again") {
    hand h(stream(2, {.tau = 4, .update = weight_update::abort}, 6));
    h.begin(4);
    h.rolled(0, 10);
    h.rolled(1, 20);
    CHECK(h.figures() == is{30, 0, 0, 0, 30, 0, 0});
    h.rolled(1, 20); // once more
    CHECK(h.figures() == is{30, 0, 0, 0, 30, 0, 0});
    h.score();
    h.on(event::learned(h.train)); // 2 to 5 are aborted
    h.drawn(2, 7), h.drawn(3, 5), h.drawn(5, 0);
    h.drawn(2, 9); // it was told of
    for (const sample_t n : {2, 3, 4, 5}) h.on(event::aborted(h.tickets.at(n)));
    CHECK(h.figures() == is{42, 0, 12, 0, 30, 0, 1}); // nobody said what 4 had
    h.on(event::synced(0, h.sync));
    CHECK(h.figures() == is{42, 30, 12, 0, 0, 12, 1});
    for (const sample_t n : {2, 3, 4, 5}) h.drawn(n, 3);
    h.on(event::down(stage::rollout, 0));
    CHECK(h.figures() == is{54, 30, 12, 12, 0, 12, 1});
    h.on(event::up(stage::rollout, 0, 4));
    h.on(event::synced(0, h.sync));
    CHECK(h.figures() == is{54, 30, 12, 12, 0, 24, 1});
    for (const sample_t n : {2, 3, 4, 5}) h.rolled(n, 8, 1);
    h.score();
    h.learn();
    h.score();
    h.learn();
    CHECK(h.figures() == is{86, 62, 12, 12, 0, 24, 1});
    CHECK(h.s.totals().consumed_tokens == 62);
}

TEST_CASE("what comes after its deadline is lost, and so is what fails too often") {
    settings how = stream(1, {.tau = 4}, 2);
    how.rollout_deadline = 10, how.rollout_attempts = 2;
    hand h(how);
    h.begin(2);
    const ticket first = h.tickets.at(0);
    h.t = 10;
    h.on(event::of(event::kind::tick)); // both are aborted, and wait for a lane
    h.drawn(1, 4);
    h.on(event::aborted(h.tickets.at(1)));
    CHECK(h.figures() == is{4, 0, 0, 4, 0, 4, 0}); // 1 starts again; 0 waits
    h.on(event::rolled_out(first, hand::drawn_by(0, 30)));
    CHECK(h.figures() == is{34, 0, 0, 34, 0, 34, 0});
    h.drawn(0, 2);
    h.on(event::rollout_failed(h.tickets.at(0))); // for good
    CHECK(h.figures() == is{36, 0, 0, 36, 0, 34, 0});
    h.rolled(1, 5);
    h.score();
    h.learn();
    CHECK(h.figures() == is{41, 5, 0, 36, 0, 34, 0});
}

TEST_CASE("a prefix is counted once, wherever it goes on, until the rules forget it") {
    for (const weight_update u : {weight_update::keep, weight_update::abort}) {
        hand h(stream(1, {.tau = 4, .update = u}, 2));
        h.begin(2);
        h.parked(0, 4); // and goes on
        CHECK(h.figures() == is{4, 0, 0, 0, 4, 0, 0});
        h.drawn(0, 6), h.drawn(1, 0);
        h.on(event::down(stage::rollout, 0));
        h.on(event::up(stage::rollout, 0, 2));
        h.on(event::synced(0, h.sync));
        CHECK(h.figures() == is{6, 0, 0, 2, 4, 2, 0}); // from the prefix
        h.parked(0, 9);
        CHECK(h.figures() == is{11, 0, 0, 2, 9, 2, 0});
        h.rolled(0, 12);
        CHECK(h.figures() == is{14, 0, 0, 2, 12, 2, 0});
        h.parked(1, 3);
        h.score();
        h.on(event::learned(h.train));
        const bool forgets = u == weight_update::abort; // 1 has tokens of the old weights
        h.drawn(1, 5);
        if (forgets) h.on(event::aborted(h.tickets.at(1)));
        h.on(event::synced(0, h.sync));
        CHECK(h.figures() == (forgets ? is{19, 12, 5, 2, 0, 7, 0} : is{19, 12, 0, 4, 3, 2, 0}));
    }
}

TEST_CASE("too old, stopped, or there before the ledger") {
    for (const staleness_policy p : {staleness_policy::drop, staleness_policy::retry}) {
        hand h(stream(1, {.tau = 0, .outstanding = 2, .policy = p}, 4));
        h.begin(2);
        h.rolled(0, 10);
        h.rolled(1, 20);
        h.score();
        h.learn(); // one is consumed, the other is too old
        const std::int64_t learnt = h.ledger.totals().learnt;
        CHECK((learnt == 10 || learnt == 20));
        CHECK(h.figures() == is{30, learnt, 30 - learnt, 0, 0, p == staleness_policy::retry ? 30 - learnt : 0, 0});
    }
    hand h(stream(2, {.tau = 4}, 6));
    h.begin(3);
    h.rolled(0, 10);
    token_ledger late; // begins when 0 is there
    {
        actions none;
        late.event(h.t, event::of(event::kind::tick), none, h.s);
    }
    CHECK(late.totals().brought == 10);
    CHECK(balanced(late.totals()));
    h.on(event::of(event::kind::stop));
    h.drawn(1, 3), h.drawn(2, 2);
    CHECK(h.figures() == is{15, 0, 0, 0, 15, 0, 0});
}

TEST_CASE("a run that goes on in another process: one ledger of both") {
    const token_totals first{
        .generated = 10, .learnt = 4, .discarded = 1, .lost = 2, .outstanding = 3, .busy_seconds = 5};
    const token_totals second{
        .generated = 6, .brought = 2, .learnt = 7, .outstanding = 1, .regenerated = 0, .busy_seconds = 1};
    CHECK(balanced(first));
    CHECK(balanced(second));
    const token_totals both = first.then(second);
    CHECK(balanced(both));
    CHECK(both.generated == 16);
    CHECK(both.brought == 0);
    CHECK(both.learnt == 11);
    CHECK(both.lost == 3); // one of three was not there any more
    CHECK(both.outstanding == 1);
    CHECK(both.busy_seconds == 6);
}

TEST_CASE("idle time in tokens") {
    token_ledger l;
    CHECK_FALSE(l.totals().idle_tokens());
    l.up(stage::rollout, 3, 100);
    l.up(stage::teacher, 0, 100);
    l.begin(stage::teacher, 0, 100, activity::work); // not of rollout
    l.begin(stage::rollout, 3, 102, activity::work);
    l.up(stage::rollout, 4, 103);
    l.begin(stage::rollout, 4, 103, activity::spare); // idle time
    l.end(stage::rollout, 3, 106, activity::work);
    l.begin(stage::rollout, 3, 106, activity::work);
    l.end(stage::rollout, 4, 107, activity::spare);
    l.down(stage::rollout, 3, 108); // in the middle of something
    l.observe(110);
    const token_totals t = l.totals();
    CHECK(t.busy_seconds == 6);
    CHECK(t.idle_seconds == 2 + 7);
    CHECK(t.rate() == 0);
    const auto j = opd::sched::token_totals{.generated = 12, .learnt = 6, .busy_seconds = 6, .idle_seconds = 9};
    const auto told = examples::described(j);
    CHECK(told["idle_tokens"] == 18.0);
    CHECK(told["learnt_share"] == 0.5);
    CHECK(examples::described(l)["learnt_share"].is_null());
}

namespace {

/// Adds up what engines decode, also of those that are gone.
struct decoded_tokens {
    double all = 0;
    std::int64_t attempts = 0;
};
struct counting_engine {
    simulated_rollout sim;
    decoded_tokens* to;
    bool abort(const ticket& t) { return sim.abort(t); }
    void install(const weights& w) { sim.install(w); }
    double elasticity() { return sim.elasticity(); }
    double next() const { return sim.next(); }
    opd::index_t running() const { return sim.running(); }
    template <class Parked>
    void park(const ticket& t, Parked&& parked) {
        sim.park(t, parked);
    }
    template <class Out, class Parked>
    void advance(double dt, Out&& finished, Parked&& parked) {
        const double before = sim.done().decoded;
        sim.advance(dt, finished, parked);
        to->all += sim.done().decoded - before;
    }
    template <class Out>
    void advance(double dt, Out&& finished) {
        advance(dt, finished, [](const ticket&, const token_versions&) {});
    }
    template <class F>
    void drawn(double dt, F&& f) const {
        if (dt > 0) { // it is gone after this
            simulated_rollout then = sim;
            then.advance(dt, [](const ticket&, const token_versions&) {}); // one that ends now is gone, too
            to->all += then.done().decoded - sim.done().decoded;
        }
        sim.drawn(dt, f);
    }
};
struct counting_cluster : opd::test::faulty_cluster {
    decoded_tokens* to;
    counting_engine rollout(std::int32_t worker) const { return {faulty_cluster::rollout(worker), to}; }
    void start(counting_engine& e, const ticket& t, version_t from, bool keeps) {
        ++to->attempts;
        faulty_cluster::start(e.sim, t, from, keeps);
    }
};

/// Its sums hold after every event.
struct audited : token_ledger {
    bool broken = false;
    template <class S>
    void event(double t, const opd::sched::event& e, const actions& out, const S& s) {
        token_ledger::event(t, e, out, s);
        broken |= !balanced(totals()) || totals().learnt != s.totals().consumed_tokens;
    }
};

} // namespace

TEST_CASE("random worlds: every token that an engine has drawn ends somewhere, and where it may") {
    std::int64_t lost = 0, discarded = 0, regenerated = 0, stopped = 0;
    for (std::uint64_t seed = 0; seed < 3000; ++seed) {
        INFO("OPD_WORLD=" << seed);
        const opd::test::world w = opd::test::world_of(seed, {.schedule = {}, .faults = seed % 4 != 0});
        decoded_tokens decoded;
        counting_cluster model{w.cluster, &decoded};
        audited ledger;
        virtual_driver<counting_cluster, audited> d(w.settings, model, &ledger);
        d.bring_up(stage::rollout, w.rollout_workers, w.lanes);
        d.bring_up(stage::teacher, w.teachers, w.teacher_slots);
        d.bring_up(stage::learner, 1);
        for (const auto& e : w.outside) d.at(e.time, e.what);
        opd::test::run_to_end(d);
        while (d.step()) {} // what comes late
        ledger.observe(d.now());
        const token_totals t = ledger.totals();
        REQUIRE_FALSE(ledger.broken);
        REQUIRE(t.unreported == 0);
        REQUIRE(t.brought == 0);
        REQUIRE(t.learnt == d.scheduler().totals().consumed_tokens);
        // of an attempt that was cut off, whole tokens
        REQUIRE(double(t.generated) <= decoded.all + 1e-3 * double(decoded.attempts) + 1e-6);
        REQUIRE(double(t.generated) > decoded.all - 1.001 * double(decoded.attempts) - 1e-6);
        const bool stops = d.scheduler().totals().failed_by[static_cast<std::size_t>(failure::stopped)] > 0;
        if (!stops) REQUIRE(t.outstanding == 0);
        const plan p = plan_of(w.settings);
        const bool throws_away =
            p.streaming && (p.update != weight_update::keep || traits_of(p.policy).stale != stale_end::none);
        if (!throws_away) REQUIRE(t.discarded == 0);
        if (!w.cluster.faults.any() && w.outside.empty() && w.settings.rollout_deadline == 0) REQUIRE(t.lost == 0);
        REQUIRE(t.busy_seconds >= 0);
        REQUIRE(t.idle_seconds >= 0);
        lost += t.lost, discarded += t.discarded, regenerated += t.regenerated, stopped += t.outstanding;
    }
    CHECK(lost > 3000);
    CHECK(discarded > 3000);
    CHECK(regenerated > 3000);
    CHECK(stopped > 300);
}

TEST_CASE("threads: workers die and come back, calls throw, and no token is forgotten") {
    for (const weight_update u : {weight_update::keep, weight_update::abort}) {
        settings how{.batch = 8, .schedule = async{.tau = 2, .outstanding = 24, .update = u}, .sequences = 240};
        how.rollout_attempts = 1000;
        const auto world = std::make_shared<toy::world>();
        std::atomic<int> calls = 0;
        world->budget = 5;
        world->fault = [&](const std::string& call, int, sample_t, std::stop_token) {
            if (call == "step" && ++calls % 97 == 0) throw toy::failed("now and then");
            return toy::world::wrong::nothing;
        };
        audited ledger;
        toy::driver* self = nullptr;
        toy::driver::hooks_type hooks;
        hooks.on_step = [&](const toy::step& s) {
            if (s.version % 4 == 1 && s.version < 25) self->kill(stage::rollout, 0);
            if (s.version % 4 == 3) self->revive(stage::rollout, 0);
        };
        toy::driver d(how, {}, hooks);
        self = &d;
        for (int i = 0; i < 2; ++i) d.add_rollout(std::make_shared<toy::rollout>(world, i, 4), 4);
        d.add_teacher(std::make_shared<toy::teacher>(world, 0));
        d.set_learner(std::make_shared<toy::learner>(world));
        d.observe(ledger);
        const run_report report = d.run();
        CHECK(report.completed);
        CHECK(report.observer_exceptions == 0);
        CHECK_FALSE(ledger.broken);
        const token_totals t = ledger.totals();
        CHECK(balanced(t));
        CHECK(t.generated == world->drawn.load());
        CHECK(t.learnt == report.totals.consumed_tokens);
        CHECK(t.unreported == 0);
        CHECK(t.outstanding == 0);
        CHECK(t.lost > 0);
        CHECK((t.discarded > 0) == (u == weight_update::abort));
        CHECK(t.idle_seconds >= 0);
    }
}
