// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The virtual cluster of the C interface: opd::sched::simulated_cluster under a virtual_driver, measured by a recorder
// and a token ledger.
//
// Its tokens are those of a token_ledger; what runs at the end is outstanding there.
#include <algorithm>
#include <cmath>
#include <memory>
#include <mutex>

#include "handles.hpp"
#include "json.hpp"
#include "opd/sched/meters/token_ledger.hpp"
#include "opd/sched/observer.hpp"
#include "opd/sched/recorder.hpp"
#include "opd/sched/simulated_cluster.hpp"
#include "opd/sched/virtual_driver.hpp"
#include "sched.hpp"

struct opd_report {
    std::string json;
};

namespace {

using namespace opd_c;

sched::distribution distribution_of(const std::string& name, const opd_distribution* from, int depth = 0) {
    if (depth > 16) refuse(name, "is a mixture within more than 16 others");
    const opd_distribution d = read(name.c_str(), from);
    const auto list = [&](const char* member, const double* x) {
        if (x == nullptr || d.n == 0) refuse(name + "." + member, "has no values");
        return std::vector<double>(x, x + d.n);
    };
    if (d.law == nullptr) refuse(name + ".law", "is a null pointer");
    const law_kind law = choose(name + ".law", d.law, laws, law_kind::constant);
    const int numbers = law <= law_kind::exponential ? (law == law_kind::uniform ? 2 : 1)
                        : law == law_kind::lognormal ? 2
                        : law == law_kind::pareto    ? 3
                                                     : 0;
    const std::string others = "another law";
    unread(numbers < 1 && d.a != 0, name + ".a", others), unread(numbers < 2 && d.b != 0, name + ".b", others);
    unread(numbers < 3 && d.c != 0, name + ".c", others);
    const bool quantiles = law == law_kind::quantile_table, mixed = law == law_kind::mixture;
    unread(!quantiles && law != law_kind::empirical && d.x != nullptr, name + ".x", others);
    unread(!quantiles && d.u != nullptr, name + ".u", others);
    unread(!mixed && d.weights != nullptr, name + ".weights", others);
    unread(!mixed && d.parts != nullptr, name + ".parts", others);
    sched::distribution r;
    auto& [of, at_least, at_most] = r;
    at_least = d.at_least, at_most = or_default(d.at_most, at_most);
    switch (law) {
    case law_kind::constant:
        of = sched::constant{d.a};
        break;
    case law_kind::uniform:
        of = sched::uniform{d.a, d.b};
        break;
    case law_kind::exponential:
        of = sched::exponential{d.a};
        break;
    case law_kind::lognormal:
        of = sched::lognormal{d.a, d.b};
        break;
    case law_kind::pareto:
        of = sched::pareto{d.a, d.b, or_default(d.c, sched::forever)};
        break;
    case law_kind::empirical: {
        std::vector<double> x = list("x", d.x);
        if (std::any_of(x.begin(), x.end(), [](double v) { return std::isnan(v); })) refuse(name + ".x", "has a NaN");
        of = sched::empirical_of(std::move(x));
        break;
    }
    case law_kind::quantile_table:
        of = sched::quantile_table{list("u", d.u), list("x", d.x)};
        break;
    case law_kind::mixture: {
        sched::mixture m;
        m.weights = list("weights", d.weights);
        const strided parts((name + ".parts").c_str(), d.parts, d.n);
        for (std::size_t i = 0; i < d.n; ++i)
            m.parts.push_back(distribution_of(name + ".parts[" + std::to_string(i) + "]", parts[i], depth + 1));
        of = std::move(m);
        break;
    }
    }
    validate(r, name);
    return r;
}
sched::distribution distribution_or(const char* name, const opd_distribution* from, sched::distribution otherwise) {
    return from == nullptr ? otherwise : distribution_of(name, from);
}

sched::simulated_job job_of(const char* name, const opd_job* from, sched::draw_of draws, std::uint64_t stream) {
    const opd_job j = read(name, from, true);
    sched::simulated_job r;
    auto& [fixed, per_item, per_token, noise, what, seed] = r;
    fixed = j.fixed, per_item = j.per_item, per_token = j.per_token, what = draws, seed = stream;
    if (j.noise != nullptr) noise = distribution_of(std::string(name) + ".noise", j.noise);
    validate(r, name);
    return r;
}

struct plan {
    sched::simulated_cluster model;
    std::int32_t rollout_workers = 1, teachers = 1, teacher_slots = 1;
    std::vector<std::pair<double, sched::event>> events;
    std::int64_t steps = 0;
    double seconds = sched::forever;
    std::uint64_t most_events = std::numeric_limits<std::uint64_t>::max();
};

plan plan_of(const opd_cluster& c, const sched::settings& s) {
    plan r;
    sched::simulated_cluster& m = r.model;
    const auto count = [](const char* name, std::int32_t n, std::int32_t by_default, std::int32_t most) {
        n = or_default(n, by_default);
        if (n < 1 || n > most)
            refuse(std::string("cluster.") + name,
                   "is " + std::to_string(n) + "; it must lie in [1, " + std::to_string(most) + "]");
        return n;
    };
    struct as_here { // a member that simulated_cluster gets changes its size, and wants its line below
        sched::simulated_lengths lengths;
        sched::engine_speed speed;
        opd::index_t lanes;
        std::int64_t budget;
        sched::distribution factor;
        sched::simulated_job teacher_time, learner_time, sync_time;
        std::uint64_t seed;
        std::vector<std::pair<sched::sample_t, sched::token_versions>> parked;
    };
    static_assert(sizeof(sched::simulated_cluster) == sizeof(as_here));
    const std::uint64_t seed = m.seed = or_default(c.seed, m.seed);
    m.lanes = count("lanes", c.lanes, 64, s.most_slots);
    r.rollout_workers = count("rollout_workers", c.rollout_workers, 1, s.most_workers);
    r.teachers = count("teachers", c.teachers, 1, s.most_workers);
    r.teacher_slots = count("teacher_slots", c.teacher_slots, 1, s.most_slots);
    if (c.reserved != 0) refuse("cluster.reserved", "is " + std::to_string(c.reserved) + "; it must be 0");
    m.budget = c.park_after;
    if (m.budget < 0) refuse("cluster.park_after", "is " + std::to_string(m.budget) + ", a negative number");
    {
        auto& [response, prompt, stream, group, by_attempt] = m.lengths;
        response = distribution_or("cluster.response", c.response, response);
        prompt = distribution_or("cluster.prompt", c.prompt, prompt);
        stream = seed, group = s.group, by_attempt = flag("cluster.redraw", c.redraw);
    }
    {
        auto& [step, step_per_sequence, prefill, rebuild, of_all] = m.speed;
        step = or_zero(c.step, step), step_per_sequence = c.step_per_sequence;
        prefill = c.prefill, rebuild = c.rebuild, of_all = or_default(c.speed_factor, of_all);
        if (!(of_all > 0 && of_all < sched::forever))
            refuse("cluster.speed_factor", "must be finite and positive, not " + std::to_string(of_all));
        validate(m.speed, "cluster");
    }
    m.factor = distribution_or("cluster.worker_factor", c.worker_factor, m.factor);
    m.teacher_time = job_of("cluster.teacher", c.teacher, sched::draw_of::teacher_time, seed);
    m.learner_time = job_of("cluster.learner", c.learner, sched::draw_of::learner_time, seed);
    m.sync_time = job_of("cluster.sync", c.sync, sched::draw_of::sync_time, seed);

    const strided events("cluster.events", c.events, c.event_count);
    if (c.event_count != 0 && c.times == nullptr) refuse("cluster.times", "is a null pointer");
    for (std::size_t i = 0; i < c.event_count; ++i) {
        const auto row = static_cast<opd::index_t>(i);
        std::vector<sched::ticket> none;
        const sched::event e = event_of("cluster.events", read("cluster.events", events[i]), none);
        using kind = sched::event::kind;
        if ((e.from_worker() && e.what > kind::worker_down) || e.what == kind::park || e.what == kind::weights_lost ||
            e.what == kind::payload_lost)
            throw opd::invalid_input("cluster.events.kind",
                                     "is of what the cluster itself says: workers come and go from outside, and wishes",
                                     row);
        if (e.from_worker() && e.incarnation != 0)
            throw opd::invalid_input("cluster.events.incarnation",
                                     "is " + std::to_string(e.incarnation) + "; the driver numbers lives", row);
        if (!(c.times[i] >= 0 && c.times[i] < sched::forever))
            throw opd::invalid_input("cluster.times",
                                     "is " + std::to_string(c.times[i]) + "; a time is finite and at least 0", row);
        r.events.emplace_back(c.times[i], e);
    }
    if (c.steps < 0) refuse("cluster.steps", "is " + std::to_string(c.steps) + ", a negative number");
    if (!(c.seconds >= 0)) refuse("cluster.seconds", "are " + std::to_string(c.seconds) + "; it must be at least 0");
    r.steps = c.steps;
    r.seconds = or_default(c.seconds, r.seconds), r.most_events = or_default(c.most_events, r.most_events);
    const bool ends = s.sequences > 0 || s.available > 0 || r.steps > 0 || r.seconds < sched::forever ||
                      c.most_events > 0 || std::any_of(r.events.begin(), r.events.end(), [](const auto& e) {
                          return e.second.what >= sched::event::kind::close;
                      });
    if (!ends)
        refuse("cluster.steps",
               "is 0, and nothing else ends the run: say steps, seconds, most_events or settings.sequences");
    return r;
}

std::string json_of(const opd_ledger& l) {
    using sched::stage, sched::lag;
    json_visitor v;
    const auto by = [](auto of, int n, const auto* x) {
        json_visitor group;
        for (int i = 0; i < n; ++i) group(name_of(static_cast<decltype(of)>(i)), x[i]);
        return group.object();
    };
    v("steps", l.steps), v("sequences", l.sequences), v("version", l.version), v("permits", l.permits);
    v("seconds", l.seconds);
    json_visitor tokens;
    tokens("generated", l.generated_tokens), tokens("consumed", l.consumed_tokens);
    tokens("discarded", l.discarded_tokens), tokens("lost", l.lost_tokens), tokens("outstanding", l.outstanding_tokens);
    v.raw("tokens", tokens.object());
    v.raw("lag_mean", by(lag{}, sched::lag_count, l.lag_mean)),
        v.raw("lag_max", by(lag{}, sched::lag_count, l.lag_max));
    v.raw("busy_seconds", by(stage{}, sched::stage_count, l.busy_seconds));
    v.raw("idle", by(stage{}, sched::stage_count, l.idle));
    v("overlap", l.overlap), v("throughput", l.throughput), v("held_seconds", l.held_seconds);
    const opd_scheduler_counters& c = l.counters;
    json_visitor n;
    n("admitted", c.admitted), n("consumed", c.consumed), n("failed", c.failed);
    n.raw("failed_by", by(sched::failure{}, OPD_FAILURES, c.failed_by));
    n("retries", c.retries), n("preempted", c.preempted), n("restarts", c.restarts), n("parked", c.parked);
    n("late", c.late), n("duplicates", c.duplicates), n("lost_workers", c.lost_workers);
    n("lost_weights", c.lost_weights), n("updates", c.updates), n("short_batches", c.short_batches);
    n("empty_batches", c.empty_batches), n("lost_payloads", c.lost_payloads);
    v.raw("counters", n.object());
    v("events", l.events), v("finished", l.finished != 0), v("stuck", l.stuck != 0);
    v.raw("failed_stage",
          l.failed_stage < 0 ? "null" : std::string("\"") + name_of(static_cast<stage>(l.failed_stage)) + "\"");
    return v.object();
}

} // namespace

extern "C" {

int opd_simulate(const opd_cluster* cluster, const opd_scheduler_settings* settings, opd_ledger* ledger,
                 opd_report** report) {
    return guarded([&] {
        const opd_scheduler_settings o = read("settings", settings);
        const sched::settings s = settings_of("settings", o, true);
        plan p = plan_of(read("cluster", cluster), s);
        check_size("ledger", ledger);

        sched::run_metrics metrics(metrics_of("settings", o));
        sched::token_ledger tokens;
        sched::recorder recorder(metrics);
        sched::observers all(recorder, tokens);
        const auto lengths = p.model.lengths;
        recorder.prompt_tokens = [&lengths](sched::sample_t n) {
            return static_cast<std::int64_t>(lengths.of({.sample = n}).prompt);
        };
        metrics.start(0);
        opd_ledger r = {};
        {
            sched::virtual_driver<sched::simulated_cluster, decltype(all)> driver(s, std::move(p.model), &all);
            driver.bring_up(sched::stage::learner, 1);
            driver.bring_up(sched::stage::teacher, p.teachers, p.teacher_slots);
            driver.bring_up(sched::stage::rollout, p.rollout_workers, driver.model().lanes);
            for (const auto& [time, e] : p.events) driver.at(time, e);

            const auto enough = [&] { return p.steps > 0 && metrics.tokens.steps() >= p.steps; };
            bool limited = false;
            while (!driver.finished() && !enough() && !limited) {
                if (driver.events() >= p.most_events || driver.next() > p.seconds)
                    limited = driver.next() < sched::forever;
                if (!limited && !driver.step()) break;
            }
            const bool timed = limited && driver.events() < p.most_events;
            r.seconds = timed ? p.seconds : driver.now();
            r.finished = driver.finished();
            r.stuck = !driver.finished() && driver.next() == sched::forever && !enough();
            const sched::scheduler& core = driver.scheduler();
            r.version = core.version(), r.permits = core.resolved().permits;
            r.counters = to_c(core.totals());
            r.failed_stage = core.failed() ? static_cast<int>(*core.failed()) : -1;
            r.events = driver.events();
            driver.running(r.seconds,
                           [&](const sched::ticket& t, std::int64_t drawn) { tokens.under_way(t, drawn, r.seconds); });
        }
        metrics.observe(r.seconds);
        r.steps = metrics.tokens.steps(), r.sequences = metrics.sequences();
        const sched::token_totals n = tokens.totals();
        const auto count = [](std::int64_t x) { return static_cast<double>(x); };
        r.generated_tokens = count(n.generated), r.consumed_tokens = count(n.learnt);
        r.discarded_tokens = count(n.discarded), r.lost_tokens = count(n.lost);
        r.outstanding_tokens = count(n.outstanding);
        for (int i = 0; i < sched::lag_count; ++i) {
            const auto& lags = metrics.lags(static_cast<sched::lag>(i));
            r.lag_mean[i] = lags.mean(), r.lag_max[i] = lags.max();
        }
        for (int i = 0; i < sched::stage_count; ++i) {
            r.busy_seconds[i] = metrics.stages.stage_time(static_cast<sched::stage>(i));
            r.idle[i] = r.seconds > 0 ? 1 - r.busy_seconds[i] / r.seconds : 0;
        }
        r.overlap = metrics.stages.overlap().value_or(0);
        r.throughput = metrics.tokens.throughput().value_or(0);
        r.held_seconds = metrics.depths.held_time();
        r.counters.struct_size = sizeof r.counters;
        if (report != nullptr) {
            json_visitor figures, all;
            metrics.describe(figures);
            all.raw("ledger", json_of(r)), all.raw("metrics", figures.object());
            auto made = std::make_shared<opd_report>();
            made->json = all.object();
            *report = handles<opd_report>().add(std::move(made));
        }
        write("ledger", ledger, r);
    });
}

const char* opd_report_json(const opd_report* report) {
    const char* text = nullptr;
    (void)guarded([&] { text = handles<opd_report>().of("report", report)->json.c_str(); });
    return text;
}
void opd_report_destroy(opd_report* report) { handles<opd_report>().remove(report); }

} // extern "C"
