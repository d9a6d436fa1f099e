// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// build: whole-sanitize
// optimise: always
//
// Processes and an unreliable channel between them (support/channel_world.hpp): ten thousand worlds end, and nothing is
// lost, learnt from twice, or started on weights that are not there. Schedulers from which a cure is taken are caught.
//
// A failure names its world's seed; OPD_WORLD=<seed> runs that one alone, OPD_WORLDS=<n> runs n of them.
#include <cstdlib>
#include <doctest/doctest.h>
#include <map>
#include <string>

#include "support/channel_world.hpp"

namespace {

using namespace opd::test;

TEST_CASE("worlds of processes end, and nothing is lost or learnt from twice") {
    const bool one = std::getenv("OPD_WORLD") != nullptr;
    const std::uint64_t first = number_from("OPD_WORLD", 0),
                        last = one ? first + 1 : number_from("OPD_WORLDS", 10000 / worlds_share);
    opd::sched::counters met;
    std::map<std::string, int> moved; // of each policy
    int ended = 0;
    std::uint64_t crashes = 0, messages = 0;
    for (std::uint64_t seed = first; seed < last; ++seed) {
        channel_world<> w(seed);
        const std::string wrong = outcome([&] { w.run(); });
        INFO("OPD_WORLD=" << seed);
        REQUIRE(wrong == "");
        const counters& c = w.state().totals();
        met.consumed += c.consumed, met.late += c.late, met.duplicates += c.duplicates, met.preempted += c.preempted;
        met.lost_workers += c.lost_workers, met.lost_weights += c.lost_weights, met.parked += c.parked;
        met.lost_payloads += c.lost_payloads;
        crashes += w.crashes(), messages += w.messages();
        const plan p = w.state().resolved();
        moved[p.streaming ? std::string(name_of(p.policy)) : "in batches"] += w.moved();
        ended += w.state().failed().has_value();
    }
    if (last - first < 10000) return;
    MESSAGE(messages << " messages, " << met.consumed << " consumed, " << crashes << " deaths of the scheduler, "
                     << met.late << " late, " << met.duplicates << " double, " << met.preempted << " preempted, "
                     << met.lost_workers << " workers and " << met.lost_weights << " publications lost, " << met.parked
                     << " parked, " << met.lost_payloads << " payloads lost");
    CHECK(moved.size() == 1 + 7);
    for (const auto& [name, n] : moved) {
        INFO(name << ": " << n << " publications lost after their version had come");
        CHECK(n > 100);
    }
    MESSAGE(ended << " worlds ended without weights");
    CHECK(ended > 10);
    for (const std::int64_t n : {met.consumed, met.late, met.duplicates, met.preempted, met.lost_workers,
                                 met.lost_weights, met.parked, met.lost_payloads, static_cast<std::int64_t>(crashes)})
        CHECK(n > 300);
}

// --- cures taken out -----------------------------------------------------------------------------------------------

/// Takes whatever a worker says for a word of its present life.
struct forgets_lives : scheduler {
    using scheduler::scheduler;
    forgets_lives(scheduler&& s) : scheduler(std::move(s)) {}
    static forgets_lives restore(const settings& s, std::string_view bytes) { return scheduler::restore(s, bytes); }
    void on(event e, double now, actions& out) {
        if (e.what == event::kind::synced && is_up(e.stage, e.worker))
            e.incarnation = incarnation_of(e.stage, e.worker);
        scheduler::on(e, now, out);
    }
};
/// Names weights by their version alone: whatever is installed is taken for what was to be.
struct forgets_makers : scheduler {
    using scheduler::scheduler;
    forgets_makers(scheduler&& s) : scheduler(std::move(s)) {}
    static forgets_makers restore(const settings& s, std::string_view bytes) { return scheduler::restore(s, bytes); }
    std::uint64_t latest = 0;
    void on(event e, double now, actions& out) {
        if (e.what == event::kind::synced) e.job = std::max(e.job, latest);
        scheduler::on(e, now, out);
        for (const action& a : out.items)
            if (a.what == action::kind::sync) latest = a.job;
    }
};
/// Does not hear of lost weights.
struct deaf_to_losses : scheduler {
    using scheduler::scheduler;
    deaf_to_losses(scheduler&& s) : scheduler(std::move(s)) {}
    static deaf_to_losses restore(const settings& s, std::string_view bytes) { return scheduler::restore(s, bytes); }
    void on(const event& e, double now, actions& out) {
        if (e.what != event::kind::weights_lost) scheduler::on(e, now, out);
    }
};

/// Does not hear of lost payloads.
struct deaf_to_payloads : scheduler {
    using scheduler::scheduler;
    deaf_to_payloads(scheduler&& s) : scheduler(std::move(s)) {}
    static deaf_to_payloads restore(const settings& s, std::string_view bytes) { return scheduler::restore(s, bytes); }
    void on(const event& e, double now, actions& out) {
        if (e.what != event::kind::payload_lost) scheduler::on(e, now, out);
    }
};

template <class Scheduler>
int caught(std::uint64_t count) {
    int n = 0;
    for (std::uint64_t seed = 0; seed < count; ++seed)
        n += outcome([&] { channel_world<Scheduler>(seed).run(20000); }) != "";
    return n;
}

TEST_CASE("schedulers from which a cure is taken are caught") {
    const int lives = caught<forgets_lives>(500), makers = caught<forgets_makers>(500),
              losses = caught<deaf_to_losses>(500), payloads = caught<deaf_to_payloads>(500);
    MESSAGE("of 500: lives " << lives << ", makers " << makers << ", losses " << losses << ", payloads " << payloads);
    CHECK(lives > 3);
    CHECK(makers > 3);
    CHECK(losses > 3);
    CHECK(payloads > 3);
}

} // namespace
