// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Random worlds for schedulers in virtual time. Who watches them is in witness.hpp.
//
//   world_of(seed)   settings, workers, durations, faults and outside events, all a function of the seed
//   driver_of(world) what plays it
//   run_to_end       lets it; throws `violation` for a deadlock or a livelock
#pragma once

#include <cmath>
#include <cstdlib>
#include <map>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "opd/sched/scheduler_checks.hpp"
#include "opd/sched/simulated_cluster.hpp"
#include "opd/sched/virtual_driver.hpp"
#include "support/dice.hpp"
#include "support/witness.hpp"

namespace opd::test {

using namespace opd::sched;

/// How often things go wrong.
struct fault_rates {
    double fail = 0, hang = 0, late = 0, twice = 0, partial = 0, death = 0, silence = 0, gone = 0;
    double lost = 0;    ///< of what a learner has published
    bool moved = false; ///< that comes when most have it, not while they install it
    double scale = 1;   ///< of their times, seconds
    bool any() const { return fail + hang + late + twice + partial + death + silence + gone > 0; }

    fault draw(std::uint64_t seed, stage s, std::uint64_t number, std::uint32_t attempt) const {
        fault f;
        if (!any()) return f;
        const auto what = static_cast<draw_of>(2000 + 10 * static_cast<int>(s));
        double u = keyed_uniform(seed, what, number, attempt);
        const auto more = [&](int i) {
            return keyed_uniform(seed, static_cast<draw_of>(static_cast<int>(what) + i), number, attempt);
        };
        using kind = fault::kind;
        for (const auto& [k, p] :
             {std::pair{kind::fail, fail}, std::pair{kind::hang, hang}, std::pair{kind::late, late},
              std::pair{kind::twice, twice}, std::pair{kind::partial, partial}, std::pair{kind::death, death},
              std::pair{kind::silence, silence}, std::pair{kind::gone, gone}}) {
            if (u < p) {
                f.what = k;
                f.after = more(1) < 0.2 ? 0 : scale * 2 * more(2);
                f.back = more(3) < 0.2 ? 0 : scale * 5 * more(4);
                f.which = static_cast<std::uint64_t>(more(5) * 0x1p52);
                return f;
            }
            u -= p;
        }
        return f;
    }
};

/// simulated_cluster with faults.
struct faulty_cluster : simulated_cluster {
    fault_rates faults;
    fault rollout_fault(const ticket& t) const { return faults.draw(seed, stage::rollout, t.sample, t.attempt); }
    fault teacher_fault(std::uint64_t job, std::int32_t) const { return faults.draw(seed, stage::teacher, job, 0); }
    fault learner_fault(std::uint64_t job) const { return faults.draw(seed, stage::learner, job, 0); }
    fault sync_fault(std::int32_t worker, const weights& w, std::uint32_t life) const {
        return faults.draw(seed, static_cast<stage>(stage_count), static_cast<std::uint64_t>(worker) << 32 | w.job,
                           life);
    }
    double publication(std::uint64_t job) const {
        if (keyed_uniform(seed, static_cast<draw_of>(4000), job) >= faults.lost) return forever;
        return faults.scale * (faults.moved ? 10 : 0.5) * keyed_uniform(seed, static_cast<draw_of>(4001), job);
    }
    double recovery(stage s, std::int32_t worker, std::uint32_t life) const {
        return 5 * faults.scale *
               keyed_uniform(seed, static_cast<draw_of>(3000 + static_cast<int>(s)), static_cast<std::uint64_t>(worker),
                             life);
    }
};

struct outside_event {
    double time = 0;
    sched::event what;
};

struct world {
    std::uint64_t seed = 0;
    sched::settings settings;
    faulty_cluster cluster;
    std::int32_t rollout_workers = 1, lanes = 1, teachers = 1, teacher_slots = 1;
    std::vector<outside_event> outside;
};

/// What kind of schedule a world has; `any` draws it.
struct world_options {
    std::optional<sched::schedule> schedule; ///< its numbers are drawn all the same, but for policy and update
    bool faults = true;
    bool large = false; ///< tens of workers, hundreds of sequences
};

inline distribution any_duration(dice& d, double mean) {
    switch (d.of(0, 4)) {
    case 0:
        return {constant{mean}};
    case 1:
        return {uniform{0, 2 * mean}};
    case 2:
        return {exponential{mean}, 0, 40 * mean};
    case 3:
        return {lognormal{mean, 0.8}, 0, 60 * mean};
    default:
        return {pareto{1.1, mean / 3, 200 * mean}};
    }
}

inline world world_of(std::uint64_t seed, const world_options& options = {}) {
    dice d{seed};
    world w;
    w.seed = seed;
    sched::settings& s = w.settings;
    s.batch = d.of(1, options.large ? 48 : 6);
    s.group = d(0.7) ? 1 : d.of(2, 3);

    // the schedule
    const index_t kind = options.schedule ? static_cast<index_t>(options.schedule->index()) : d.of(0, 11);
    const index_t depth = d.of(0, 4);
    const bool whole = kind < 3;
    if (whole && s.batch % s.group != 0) s.batch = s.group * d.of(1, 2);
    if (kind == 0) {
        s.schedule = sched::sync{};
    } else if (kind == 1) {
        s.schedule = step_off{depth};
    } else if (kind == 2) {
        s.schedule = controlled{depth};
    } else {
        async a;
        a.tau = depth;
        a.policy = static_cast<staleness_policy>(d.of(0, 6));
        a.update = static_cast<weight_update>(d.of(0, 2));
        if (const auto* given = options.schedule ? std::get_if<async>(&*options.schedule) : nullptr) {
            a.policy = given->policy;
            a.update = given->update;
            a.negative_control = given->negative_control;
        }
        const bool gives_up = a.policy == staleness_policy::drop || a.policy == staleness_policy::retry;
        if (a.policy == staleness_policy::areal) {
            if (d(0.5)) a.concurrency = d.of(s.group, 12);
        } else if (d(0.6)) {
            a.outstanding = d.of(s.batch, (a.tau + 1) * s.batch + (gives_up ? s.batch : 0));
        } else if (seed % 2 == 0) { // no further draw: the worlds stay what they were
            a.outstanding = widest;
        }
        s.schedule = a;
        const auto accepted = [&] {
            try {
                plan_of(s);
                return true;
            } catch (const invalid_input&) {
                return false;
            }
        };
        if (!accepted()) { // a group that no permits fit
            s.group = 1;
            plan_of(s);
        }
    }
    s.sequences = s.group * d.of(1, (options.large ? 600 : 60) / s.group);
    s.teacher_batch = d.of(1, 5);
    s.teacher_flush = d.one({0.0, 0.05, 0.5, 5.0});

    // times
    w.rollout_workers = static_cast<std::int32_t>(d.of(1, options.large ? 30 : 4));
    w.lanes = static_cast<std::int32_t>(d.of(1, 4));
    w.teachers = static_cast<std::int32_t>(d.of(1, options.large ? 6 : 2));
    w.teacher_slots = static_cast<std::int32_t>(d.of(1, 2));
    faulty_cluster& c = w.cluster;
    c.seed = seed;
    c.lanes = 6;
    c.lengths.seed = seed;
    c.lengths.group = s.group;
    c.lengths.by_attempt = d(0.5);
    c.lengths.response = any_duration(d, d.one({1.0, 4.0, 20.0}));
    c.lengths.prompt = {constant{d.one({0.0, 3.0})}};
    c.speed.step = d.one({0.05, 0.25, 1.0});
    c.speed.step_per_sequence = d.one({0.0, 0.1});
    c.speed.prefill = d.one({0.0, 0.02});
    c.speed.rebuild = d.one({0.0, 0.01});
    if (d(0.3)) c.factor = {uniform{0.5, 3}};
    if (seed % 3 == 1) c.budget = 1 + static_cast<std::int64_t>(seed / 3 % 7); // parks; no draw, as below
    const auto job = [&](draw_of what, double scale) {
        simulated_job j;
        j.fixed = d(0.1) ? 0 : d.in(0.05, scale);
        j.per_item = d(0.5) ? 0 : 0.1;
        j.noise = any_duration(d, 1);
        j.what = what, j.seed = seed;
        return j;
    };
    c.teacher_time = job(draw_of::teacher_time, 2);
    c.learner_time = job(draw_of::learner_time, 4);
    c.sync_time = job(draw_of::sync_time, 1);

    // what goes wrong
    s.rollout_attempts = static_cast<int>(d.of(1, 4));
    s.teacher_attempts = static_cast<int>(d.of(1, 4));
    s.learner_attempts = static_cast<int>(d.of(1, 3));
    s.payload_attempts = static_cast<int>(d.of(1, 4));
    s.fruitless_steps = 0; // they end all the same: what fails, fails now and then
    if (options.faults && d(0.6)) {
        fault_rates& f = c.faults;
        const double much = d.one({0.01, 0.05, 0.15});
        for (double* rate : {&f.fail, &f.hang, &f.late, &f.twice, &f.partial, &f.death, &f.silence, &f.gone})
            if (d(0.4)) *rate = much * d();
        f.scale = d.one({0.3, 2.0, 10.0});
        if (d(0.3)) f.lost = 0.2 * d();
        f.moved = seed % 2 == 1; // no draw, as above
        if (f.moved) f.lost *= 4;
    }
    // Deadlines, wherever somebody may never answer. Above all durations the run ends by itself; tighter ones give up
    // sequences that are merely slow, so the source must be one that ends. A transfer is tried until it succeeds.
    if (c.faults.hang + c.faults.silence > 0 || d(0.2)) {
        const bool tight = d(0.5);
        if (tight) s.available = s.group * d.of(1, 60 / s.group);
        const auto deadline = [&] { return tight ? d.in(1, 100) : 1e5; };
        s.rollout_deadline = deadline();
        s.abort_deadline = deadline();
        s.teacher_deadline = deadline();
        s.learner_deadline = deadline();
        s.sync_deadline = 1e4;
    }
    if (s.available == 0 && d(0.2)) s.available = s.group * d.of(1, 60 / s.group);

    // what comes from outside
    const auto outside = [&](double t, const event& e) { w.outside.push_back({t, e}); };
    if (options.faults) {
        if (d(0.2))
            for (index_t n = d.of(1, 3); n > 0; --n) {
                const double t = d.in(0.5, 200);
                outside(t, event::of(event::kind::pause));
                outside(t + d.in(0.1, 50), event::of(event::kind::resume));
            }
        if (d(0.2))
            for (index_t n = d.of(1, 4); n > 0; --n)
                outside(d.in(0.5, 200), event::up(stage::rollout, static_cast<std::int32_t>(d.of(0, w.rollout_workers)),
                                                  static_cast<std::int32_t>(d.of(1, 6))));
        if (d(0.2)) { // drained, and back
            const auto number = static_cast<std::int32_t>(d.of(0, w.rollout_workers - 1));
            const double t = d.in(0.5, 200);
            outside(t, event::up(stage::rollout, number, 0));
            outside(t + d.in(0.1, 30), event::up(stage::rollout, number, w.lanes));
        }
        if (d(0.2))
            for (index_t n = d.of(1, 4); n > 0; --n) {
                const stage who = static_cast<stage>(d.of(0, 2));
                const auto number = static_cast<std::int32_t>(d.of(0, who == stage::rollout   ? w.rollout_workers - 1
                                                                      : who == stage::teacher ? w.teachers - 1
                                                                                              : 0));
                const double t = d.in(0.5, 200);
                outside(t, event::down(who, number));
                outside(t + d.in(0.1, 30), event::up(who, number, who == stage::rollout ? w.lanes : 1));
            }
        if (auto* a = std::get_if<async>(&s.schedule);
            a && a->policy != staleness_policy::areal && d(0.25) && !plan_of(s).automatic)
            for (index_t n = d.of(1, 4); n > 0; --n) {
                sched::settings changed = s;
                std::get<async>(changed.schedule).outstanding = d.of(s.batch, (a->tau + 1) * s.batch);
                try {
                    plan_of(changed);
                } catch (const invalid_input&) {
                    continue;
                }
                event e = event::of(event::kind::resize, std::get<async>(changed.schedule).outstanding);
                outside(d.in(0.5, 200), e);
            }
        if (s.available == 0 && d(0.1)) { // a run without end, but for this
            s.sequences = 0;
            outside(d.in(5, 100), event::of(event::kind::close));
        } else if (d(0.1)) {
            outside(d.in(0.5, 200), event::of(event::kind::close));
        }
        if (d(0.05)) outside(d.in(0.5, 200), event::of(event::kind::stop));
    }
    return w;
}

template <class Observer, class Scheduler = scheduler>
virtual_driver<faulty_cluster, Observer, Scheduler> driver_of(const world& w, Observer* o) {
    virtual_driver<faulty_cluster, Observer, Scheduler> d(w.settings, w.cluster, o);
    d.bring_up(stage::rollout, w.rollout_workers, w.lanes);
    d.bring_up(stage::teacher, w.teachers, w.teacher_slots);
    d.bring_up(stage::learner, 1);
    for (const outside_event& e : w.outside) d.at(e.time, e.what);
    return d;
}

/// Lets it run to its end.
template <class Driver>
void run_to_end(Driver& d, std::uint64_t most_events = 200000) {
    if (d.run(most_events)) return;
    throw violation(d.next() == forever ? "deadlock" : "livelock");
}

} // namespace opd::test
