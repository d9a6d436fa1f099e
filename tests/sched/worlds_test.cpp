// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// build: whole-sanitize
// optimise: always
//
// Tens of thousands of random virtual worlds: every schedule, policy and weight update under constant to heavy-tailed
// durations, faults of every kind, pauses, resizes, deaths, closes, stops, cuts with resumption and crashes. After
// every event the scheduler's own invariants hold, and so do those of a witness that keeps its own account; every world
// ends. The harness is itself tested: a rule that deadlocks, schedulers that leak or hurry and forged streams are all
// caught.
//
// A failure names its world's seed; OPD_WORLD=<seed> runs that one alone, OPD_WORLDS=<n> runs n of them.
#include <cstdlib>
#include <doctest/doctest.h>
#include <functional>
#include <set>
#include <string>

#include "support/world.hpp"

namespace {

using namespace opd::test;

struct range {
    std::uint64_t first, last; // last: not included
};
range worlds(std::uint64_t count) {
    if (std::getenv("OPD_WORLD")) {
        const std::uint64_t seed = number_from("OPD_WORLD", 0);
        return {seed, seed + 1};
    }
    return {0, number_from("OPD_WORLDS", count / worlds_share)};
}

/// What all worlds together have met.
struct coverage {
    std::map<std::string, int> worlds, moved; // moved: weights lost after their version had come
    int ended = 0;                            // as failed, since nobody had them any more
    opd::sched::counters totals;
    std::uint64_t events = 0;
    std::set<event::kind> kinds;
    void add(const world& w, const counters& c, std::uint64_t n, int gone) {
        const plan p = plan_of(w.settings);
        const char* whole[] = {"sync", "step_off", "controlled"};
        const std::string name = p.streaming ? std::string(name_of(p.policy)) + " " + name_of(p.update)
                                             : std::string(whole[w.settings.schedule.index()]);
        ++worlds[name];
        moved[name] += gone;
        totals.consumed += c.consumed, totals.failed += c.failed, totals.retries += c.retries;
        totals.restarts += c.restarts, totals.late += c.late, totals.duplicates += c.duplicates;
        totals.lost_workers += c.lost_workers, totals.lost_weights += c.lost_weights,
            totals.short_batches += c.short_batches;
        totals.empty_batches += c.empty_batches, totals.lost_payloads += c.lost_payloads;
        for (std::size_t i = 0; i < c.failed_by.size(); ++i) totals.failed_by[i] += c.failed_by[i];
        events += n;
    }
};

/// A witness that also counts what kinds of events it has seen.
struct counting_witness : witness {
    std::set<opd::sched::event::kind> kinds = {};
    int gone = 0; // publications of the version
    using witness::witness;
    template <class S>
    void event(double t, const opd::sched::event& e, const actions& out, const S& s) {
        kinds.insert(e.what);
        gone += e.what == opd::sched::event::kind::weights_lost && e.job == s.weights().job && !s.finished();
        witness::event(t, e, out, s);
    }
};

TEST_CASE("random worlds end, and keep every promise after every event") {
    coverage met;
    const range all = worlds(30000);
    for (std::uint64_t seed = all.first; seed < all.last; ++seed) {
        const world w = world_of(seed);
        counting_witness o(w.settings);
        auto d = driver_of(w, &o);
        const std::string wrong = outcome([&] {
            run_to_end(d);
            while (d.step()) {} // what is late comes too late, and does no harm
        });
        INFO("OPD_WORLD=" << seed);
        REQUIRE(wrong == "");
        met.add(w, d.scheduler().totals(), d.events(), o.gone);
        met.ended += d.scheduler().failed().has_value();
        met.kinds.insert(o.kinds.begin(), o.kinds.end());
    }
    if (all.last - all.first < 30000) return;
    MESSAGE((all.last - all.first) << " worlds, " << met.events << " events, " << met.totals.consumed << " consumed, "
                                   << met.totals.failed << " failed");
    CHECK(met.worlds.size() == 3 + 7 * 3);
    for (const auto& [name, count] : met.worlds) {
        INFO(name << ": " << count);
        CHECK(count > 300);
    }
    MESSAGE(met.ended << " ended without weights");
    for (const auto& [name, count] : met.moved) {
        INFO(name << ": " << count << " publications lost after their version had come");
        CHECK(count > 50);
    }
    CHECK(met.kinds.size() == 19);
    CHECK(met.totals.consumed > 500000);
    for (const std::int64_t n : met.totals.failed_by) CHECK(n > 300);
    for (const std::int64_t n :
         {met.totals.retries, met.totals.restarts, met.totals.late, met.totals.duplicates, met.totals.lost_workers,
          met.totals.lost_weights, met.totals.short_batches, met.totals.empty_batches, met.totals.lost_payloads})
        CHECK(n > 300);
}

TEST_CASE("larger worlds end too") {
    const range all = worlds(500);
    std::int64_t consumed = 0;
    for (std::uint64_t seed = all.first; seed < all.last; ++seed) {
        const world w = world_of(seed, {.schedule = {}, .faults = true, .large = true});
        witness o(w.settings);
        auto d = driver_of(w, &o);
        const std::string wrong = outcome([&] { run_to_end(d); });
        INFO("OPD_WORLD=" << seed << ", large");
        REQUIRE(wrong == "");
        consumed += o.consumed();
    }
    if (all.last - all.first >= 500) CHECK(consumed > 60000);
}

TEST_CASE("a run that is cut at any event and resumed is the uninterrupted run bit for bit") {
    const range all = worlds(3000);
    for (std::uint64_t seed = all.first; seed < all.last; ++seed) {
        const world w = world_of(seed);
        INFO("OPD_WORLD=" << seed);
        witness o(w.settings);
        auto d = driver_of(w, &o);
        REQUIRE(outcome([&] { run_to_end(d); }) == "");

        dice cut{seed ^ 0x637574};
        witness o2(w.settings);
        auto d2 = driver_of(w, &o2);
        for (int cuts = 0; cuts < 3; ++cuts) {
            d2.run(static_cast<std::uint64_t>(cut.of(0, static_cast<opd::index_t>(d.events()) / 2)));
            const std::string bytes = d2.snapshot();
            d2 = decltype(d2)::restore(w.settings, w.cluster, bytes, &o2);
            REQUIRE(d2.snapshot() == bytes);
        }
        REQUIRE(outcome([&] { run_to_end(d2); }) == "");
        REQUIRE(o2.hash() == o.hash());
        REQUIRE(d2.now() == d.now());
        REQUIRE(d2.events() == d.events());
        REQUIRE(d2.snapshot() == d.snapshot());
    }
}

TEST_CASE("a process that is killed at any event resumes from its last snapshot without loss") {
    const range all = worlds(4000);
    for (std::uint64_t seed = all.first; seed < all.last; ++seed) {
        const world w = world_of(seed);
        INFO("OPD_WORLD=" << seed);
        witness o(w.settings);
        auto d = driver_of(w, &o);
        dice kill{seed ^ 0x6b696c6c};
        const bool every_event = kill(0.5); // a snapshot after every event, or after every step
        std::string saved = d.snapshot();
        witness then = o;
        version_t version = 0;
        const std::string wrong = outcome([&] {
            for (int kills = 0; kills < 3 && !d.finished(); ++kills) {
                for (opd::index_t n = kill.of(0, 150); n > 0 && !d.finished(); --n) {
                    if (!d.step()) throw violation("deadlock");
                    if (d.finished() || (!every_event && o.version() == version)) continue;
                    if (every_event && n > 1) continue; // only the last one counts
                    version = o.version();
                    saved = d.snapshot();
                    then = o;
                }
                if (d.finished()) break;
                o = then;
                d = decltype(d)::restore(w.settings, w.cluster, saved, &o);
                d.crash(kill(0.5) ? 0 : 3);
                o.crash();
            }
            run_to_end(d);
        });
        REQUIRE(wrong == "");
    }
}

TEST_CASE("the naive rule is caught deadlocking") {
    // the same worlds under edf all end
    int deadlocks = 0;
    const std::uint64_t count = 2000;
    for (std::uint64_t seed = 0; seed < count; ++seed) {
        async a;
        a.policy = staleness_policy::naive_wait;
        a.negative_control = true;
        const world w = world_of(seed, {.schedule = a, .faults = false, .large = false});
        witness o(w.settings);
        auto d = driver_of(w, &o);
        const std::string wrong = outcome([&] { run_to_end(d); });
        INFO("seed " << seed);
        REQUIRE((wrong == "" || wrong == "deadlock"));
        deadlocks += wrong == "deadlock";
        a.policy = staleness_policy::edf;
        a.negative_control = false;
        const world same = world_of(seed, {.schedule = a, .faults = false, .large = false});
        witness o2(same.settings);
        auto d2 = driver_of(same, &o2);
        REQUIRE(outcome([&] { run_to_end(d2); }) == "");
    }
    MESSAGE(deadlocks << " of " << count << " worlds deadlock under naive_wait");
    CHECK(deadlocks > 10);
}

// --- the harness can fail --------------------------------------------------------------------------------------------

/// Worlds without faults in which the harness finds something wrong, of `count`.
template <class Witness, class Scheduler>
std::map<std::string, int> findings(std::uint64_t count, const std::function<void(Witness&)>& prepare = {},
                                    const world_options& options = {.schedule = {}, .faults = false, .large = false}) {
    std::map<std::string, int> found;
    for (std::uint64_t seed = 0; seed < count; ++seed) {
        const world w = world_of(seed, options);
        Witness o(w.settings);
        if (prepare) prepare(o);
        auto d = driver_of<Witness, Scheduler>(w, &o);
        const std::string wrong = outcome([&] { run_to_end(d, 20000); });
        if (!wrong.empty()) ++found[wrong];
    }
    return found;
}
int count_of(const std::map<std::string, int>& found) {
    int n = 0;
    for (const auto& f : found) n += f.second;
    return n;
}

/// Never hears of a failed attempt: its permit and its lane leak.
struct deaf_scheduler : scheduler {
    using scheduler::scheduler;
    void on(const event& e, double now, actions& out) {
        if (e.what != event::kind::rollout_failed) scheduler::on(e, now, out);
    }
};
/// Believes that weights are installed as soon as they are sent, so that the gate opens too early.
struct hasty_scheduler : scheduler {
    using scheduler::scheduler;
    void on(const event& e, double now, actions& out) {
        const std::size_t before = out.items.size();
        scheduler::on(e, now, out);
        for (std::size_t i = before; i < out.items.size(); ++i) {
            const action a = out.items[i];
            if (a.what != action::kind::sync) continue;
            for (std::int32_t w = 0; w < 64; ++w)
                if ((a.worker < 0 || a.worker == w) && is_up(stage::rollout, w))
                    scheduler::on(event::synced(w, a.job).of_life(incarnation_of(stage::rollout, w)), now, out);
        }
    }
};
/// Takes a failed scoring call for a good one.
struct greedy_scheduler : scheduler {
    using scheduler::scheduler;
    void on(const event& e, double now, actions& out) {
        if (e.what == event::kind::score_failed)
            scheduler::on(event::scored(e.job, e.worker).of_life(e.incarnation), now, out);
        else
            scheduler::on(e, now, out);
    }
};

TEST_CASE("schedulers that leak, hurry or cheat are caught") {
    CHECK(findings<witness, scheduler>(500).empty());

    const auto hasty = findings<witness, hasty_scheduler>(500);
    CHECK(count_of(hasty) > 300);

    int deaf = 0, greedy = 0, right = 0;
    for (std::uint64_t seed = 0; seed < 500; ++seed) {
        world w = world_of(seed, {.schedule = {}, .faults = false, .large = false});
        w.cluster.faults.fail = 0.1;
        witness o(w.settings), o2(w.settings), o3(w.settings);
        auto d = driver_of<witness, deaf_scheduler>(w, &o);
        deaf += outcome([&] { run_to_end(d, 20000); }) != "";
        auto d2 = driver_of<witness, greedy_scheduler>(w, &o2);
        greedy += outcome([&] { run_to_end(d2, 20000); }) != "";
        auto d3 = driver_of(w, &o3);
        right += outcome([&] { run_to_end(d3, 20000); }) == "";
    }
    MESSAGE("of 500: hasty " << count_of(hasty) << ", deaf " << deaf << ", greedy " << greedy);
    CHECK(deaf > 300);
    CHECK(greedy > 200);
    CHECK(right == 500);
}

TEST_CASE("a witness that expects one permit or one version more or less objects") {
    CHECK(count_of(findings<witness, scheduler>(500, [](witness& o) { o.permits_believed_less = 1; })) > 200);
    for (const staleness_policy p :
         {staleness_policy::capacity, staleness_policy::cohort_fifo, staleness_policy::edf, staleness_policy::drop,
          staleness_policy::retry, staleness_policy::in_order, staleness_policy::areal}) {
        async a;
        a.policy = p;
        INFO(name_of(p));
        CHECK(count_of(findings<witness, scheduler>(500, [](witness& o) { o.lag_believed_less = 1; },
                                                    {.schedule = a, .faults = false, .large = false})) > 50);
    }
}

/// Shows the witness a stream in which one thing is changed.
struct forger : witness {
    enum class change {
        none,
        twice_consumed,
        unsorted,
        other_version,
        lane,
        silent_failure,
        lost_step,
        worker
    } what = {};
    bool done = false;
    using witness::witness;
    template <class S>
    void event(double t, const opd::sched::event& e, const actions& out, const S& s) {
        using kind = action::kind;
        actions forged = out;
        for (std::size_t i = 0; i < forged.items.size() && !done; ++i) {
            action& a = forged.items[i];
            switch (what) {
            case change::none:
                break;
            case change::twice_consumed:
                if (a.what != kind::step || a.count < 2) break;
                forged.consumed[a.first + 1] = forged.consumed[a.first];
                done = true;
                break;
            case change::unsorted:
                if (a.what != kind::train || a.count < 2) break;
                std::swap(forged.tickets[a.first], forged.tickets[a.first + 1]);
                done = true;
                break;
            case change::other_version:
                if (a.what != kind::start || a.version == 0) break;
                --a.version;
                done = true;
                break;
            case change::lane:
                if (a.what != kind::start || a.ticket.lane == 0) break;
                a.ticket.lane = 0; // taken, or vacant now and taken wrongly later
                done = true;
                break;
            case change::silent_failure:
                if (a.what != kind::fail) break;
                forged.items.erase(forged.items.begin() + static_cast<std::ptrdiff_t>(i));
                done = true;
                break;
            case change::lost_step:
                if (a.what != kind::step) break;
                forged.items.erase(forged.items.begin() + static_cast<std::ptrdiff_t>(i));
                done = true;
                break;
            case change::worker:
                if (a.what != kind::sync || a.version == 0) break;
                forged.items.erase(forged.items.begin() + static_cast<std::ptrdiff_t>(i));
                done = true;
                break;
            }
        }
        witness::event(t, e, forged, s);
    }
};

TEST_CASE("forged streams are caught wherever they are forged") {
    using change = forger::change;
    for (const change c : {change::none, change::twice_consumed, change::unsorted, change::other_version, change::lane,
                           change::silent_failure, change::lost_step, change::worker}) {
        int forged = 0, caught = 0, false_alarms = 0;
        for (std::uint64_t seed = 0; seed < 400; ++seed) {
            world w = world_of(seed, {.schedule = {}, .faults = false, .large = false});
            if (c == change::silent_failure) w.cluster.faults.fail = 0.3;
            forger o(w.settings);
            o.what = c;
            auto d = driver_of(w, &o);
            const bool wrong = outcome([&] { run_to_end(d, 20000); }) != "";
            forged += o.done;
            caught += o.done && wrong;
            false_alarms += !o.done && wrong;
        }
        INFO("change " << static_cast<int>(c) << ": " << forged);
        CHECK(caught == forged);
        CHECK(false_alarms == 0);
        CHECK((c == change::none ? forged == 0 : forged > 50));
    }
}

} // namespace
