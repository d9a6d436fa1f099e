// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "choosing_m.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstddef>
#include <map>
#include <thread>
#include <utility>
#include <variant>

#include <fmt/format.h>

#include "opd/sched/simulated_cluster.hpp"
#include "opd/sched/virtual_driver.hpp"
#include "opd/threads.hpp"
#include "simulate.hpp"

namespace cluster_sim {

using namespace opd::sched;

namespace {

// Of numbers [first, last).
std::pair<double, double> mean_and_spread(const std::vector<index_t>& x, std::size_t first, std::size_t last) {
    double sum = 0, squares = 0;
    for (std::size_t i = first; i < last; ++i) sum += static_cast<double>(x[i]);
    const auto n = static_cast<double>(last - first);
    for (std::size_t i = first; i < last; ++i) squares += std::pow(static_cast<double>(x[i]) - sum / n, 2);
    return {sum / n, std::sqrt(squares / n)};
}

void slower(config& c, double learner, double teacher) {
    for (double* t : {&c.learner.job.fixed, &c.learner.job.per_item, &c.learner.job.per_token}) *t *= learner;
    for (double* t : {&c.teacher.job.fixed, &c.teacher.job.per_item, &c.teacher.job.per_token}) *t *= teacher;
}

// On the workers and GPUs of the configuration's first async schedule.
outcome run_with(config c, const async& how, std::uint64_t seed) {
    c.seed = seed;
    for (entry e : c.schedules)
        if (std::holds_alternative<async>(e.schedule)) {
            e.schedule = how;
            return simulate(c, e);
        }
    throw failure(exit_usage, "--choosing-m: the configuration has no async schedule, whose workers it would take");
}

// --- random loads ----------------------------------------------------------------------------------------------------

constexpr index_t settled_from = 200; // steps of warm-up; loads change from 250 on

struct random_cluster : simulated_cluster {
    double learner_factor = 1, teacher_factor = 1; // between steps 250 and 400
    version_t version = 0;

    bool changed() const { return version >= 250 && version < 400; }
    double learner(std::uint64_t job, const weights& w, std::span<const ticket> batch) {
        version = w.version;
        return (changed() ? learner_factor : 1) * simulated_cluster::learner(job, w, batch);
    }
    double teacher(std::uint64_t job, std::int32_t worker, std::span<const ticket> tickets) const {
        return (changed() ? teacher_factor : 1) * simulated_cluster::teacher(job, worker, tickets);
    }
};

struct random_load {
    random_cluster cluster;
    settings s;
    random_row what;
    int teachers = 1;
    std::vector<std::pair<double, event>> outside;
};

random_load load_of(std::uint64_t seed) {
    std::uint64_t drawn = 0;
    const auto uniform01 = [&] { return keyed_uniform(seed * 7919 + 13, draw_of::own, drawn++); };
    const auto chance = [&](double p) { return uniform01() < p; };
    const auto whole = [&](index_t low, index_t high) {
        return std::min(high, low + static_cast<index_t>(uniform01() * static_cast<double>(high - low + 1)));
    };
    const auto between = [&](double low, double high) { return low * std::pow(high / low, uniform01()); };

    random_load r;
    random_cluster& c = r.cluster;
    random_row& w = r.what;
    w.seed = c.seed = c.lengths.seed = seed;
    const double mean = between(30, 600);
    switch (whole(0, 3)) {
    case 0:
        w.lengths = "equal", c.lengths.response = {constant{mean}};
        break;
    case 1:
        w.lengths = "uniform", c.lengths.response = {uniform{0.2 * mean, 1.8 * mean}};
        break;
    case 2: {
        const double sigma = between(0.4, 1.2);
        w.lengths = "lognormal",
        c.lengths.response = {lognormal{mean * std::exp(-sigma * sigma / 2), sigma}, 1, 30 * mean};
        break;
    }
    default:
        w.lengths = "Pareto", c.lengths.response = {pareto{1.5, mean / 3, 40 * mean}};
    }
    c.lengths.prompt = {constant{chance(0.5) ? 0. : std::round(mean / 4)}};
    w.tau = whole(1, 8);
    w.batch = std::llround(between(8, 64));
    const auto batch = static_cast<double>(w.batch);
    w.workers = static_cast<int>(whole(1, 8));
    w.lanes = chance(0.5) ? std::max<index_t>(1, std::llround(between(0.25, 3) * batch / w.workers))
                          : std::llround(between(4, 128));
    c.lanes = w.lanes;
    const staleness_policy policy = chance(0.5) ? staleness_policy::capacity : staleness_policy::edf;
    w.policy = name_of(policy);
    c.speed.step = 1e-3;
    c.speed.step_per_sequence = chance(0.3) ? 0 : 1e-3 * between(0.002, 0.3);
    c.speed.rebuild = chance(0.3) ? 0 : 1e-3 * between(1e-4, 0.05);
    c.speed.prefill = chance(0.5) ? 0 : c.speed.rebuild;
    if (chance(0.25)) c.factor = {uniform{0.7, 2}};

    // in units of what rollout takes for a batch where 2 B run
    const double running = std::min(static_cast<double>(w.lanes), 2 * batch / w.workers);
    const double rollout = batch * mean * (1e-3 + c.speed.step_per_sequence * running) / (running * w.workers);
    r.teachers = static_cast<int>(whole(1, 2));
    r.s.teacher_batch = whole(1, std::min<index_t>(16, w.batch));
    r.s.teacher_flush = chance(0.5) ? 0 : between(0.01, 0.3) * rollout;
    const double teacher = rollout * between(0.05, 1.5) * r.teachers, fixed_part = uniform01();
    c.teacher_time.fixed = fixed_part * teacher / std::ceil(batch / static_cast<double>(r.s.teacher_batch));
    c.teacher_time.per_item = (1 - fixed_part) * teacher / batch;
    c.learner_time.fixed = rollout * between(0.1, 3);
    if (chance(0.3)) c.learner_time.noise = {lognormal{1, 0.3}};
    c.sync_time.fixed = chance(0.4) ? 0 : rollout * between(0.005, 0.2);
    c.teacher_time.what = draw_of::teacher_time, c.learner_time.what = draw_of::learner_time;
    c.sync_time.what = draw_of::sync_time;
    c.teacher_time.seed = c.learner_time.seed = c.sync_time.seed = seed;
    const double pace = std::max({rollout, teacher / r.teachers, c.learner_time.fixed});
    if (chance(0.2)) w.changes += "L", c.learner_factor = between(0.3, 4);
    if (chance(0.1)) w.changes += "T", c.teacher_factor = between(0.5, 4);
    if (w.workers > 1 && chance(0.2)) {
        w.changes += "W";
        for (auto i = static_cast<std::int32_t>(whole(1, w.workers - 1)); i > 0; --i) {
            r.outside.emplace_back(pace * between(200, 400), event::down(stage::rollout, i));
            if (chance(0.5))
                r.outside.emplace_back(pace * between(401, 500),
                                       event::up(stage::rollout, i, static_cast<std::int32_t>(w.lanes)));
        }
    }
    r.s.batch = w.batch;
    r.s.schedule = async{.tau = w.tau, .policy = policy};
    return r;
}

struct random_outcome {
    double pace = 0, lag = 0, permits = 0; // steps a second, mean start lag, mean M: once settled
};

struct random_observer {
    index_t steps = 0;
    double from = 0, until = 0, lag = 0, consumed = 0, permits = 0;
    void event(double t, const opd::sched::event&, const actions& list, const scheduler& s) {
        for (const action& a : list.items) {
            if (a.what != action::kind::step) continue;
            ++steps, until = t;
            if (steps == settled_from) from = t;
            if (steps <= settled_from) continue;
            for (const consumed_sequence& c : list.consumed_by(a)) lag += static_cast<double>(a.version - 1 - c.start);
            consumed += static_cast<double>(list.consumed_by(a).size());
            permits += static_cast<double>(s.resolved().permits);
        }
    }
};

random_outcome run_load(const random_load& l, index_t outstanding, index_t steps) {
    settings s = l.s;
    auto& how = std::get<async>(s.schedule);
    how.outstanding = outstanding == automatic ? automatic : std::min(outstanding, 2 * s.batch);
    random_observer seen;
    virtual_driver<random_cluster, random_observer> run(s, l.cluster, &seen);
    run.bring_up(stage::learner, 1);
    run.bring_up(stage::teacher, l.teachers);
    run.bring_up(stage::rollout, l.what.workers, static_cast<std::int32_t>(l.what.lanes));
    for (const auto& [t, e] : l.outside) run.at(t, e);
    bool resized = outstanding == how.outstanding;
    while (seen.steps < steps && run.step())
        if (!resized && seen.steps == 10)
            resized = true, run.at(run.now(), event::of(event::kind::resize, outstanding));
    if (seen.steps < steps)
        throw failure(exit_stuck, fmt::format("load {} came to a standstill after {} steps", l.what.seed, seen.steps));
    const auto n = static_cast<double>(steps - settled_from);
    return {n / (seen.until - seen.from), seen.lag / seen.consumed, seen.permits / n};
}

} // namespace

bool choosing_row::good() const {
    if (bottleneck == "rollout") return share >= 0.94 && whole_lag <= static_cast<double>(tau);
    return share >= 0.97 && lag <= 1.2 * fixed_lag + 0.1;
}

std::vector<choosing_row> choosing_m(const config& node, index_t steps, int seeds, bool quick,
                                     const std::function<void(double)>& progress) {
    struct job {
        std::size_t row;
        config c;
        async how;
        std::uint64_t seed;
        outcome result = {};
    };
    std::vector<choosing_row> rows;
    std::vector<job> jobs;
    const std::pair<const char*, distribution> lengths[] = {{"lognormal", node.lengths.response},
                                                            {"Pareto", {pareto{1.3, 900, 32768}}},
                                                            {"constant", {constant{mean(node.lengths.response)}}}};
    const std::vector<double> learners = quick ? std::vector<double>{1, 4} : std::vector<double>{1, 1.5, 2, 3, 4};
    const std::vector<index_t> bounds = quick ? std::vector<index_t>{4} : std::vector<index_t>{2, 4, 8};
    for (const auto& [name, law] : lengths)
        for (const double learner : learners)
            for (const double teacher : {1., 3.})
                for (const index_t tau : bounds)
                    for (const staleness_policy policy : {staleness_policy::capacity, staleness_policy::edf}) {
                        choosing_row row;
                        row.lengths = name, row.learner = learner, row.teacher = teacher;
                        row.tau = tau, row.policy = name_of(policy);
                        config c = node;
                        c.lengths.response = law, c.steps = steps, c.warmup = steps / 5;
                        slower(c, learner, teacher);
                        for (int s = 1; s <= seeds; ++s)
                            for (index_t m = 2; m <= 2 * (tau + 1); ++m) // 2: automatic; else in half batches
                                jobs.push_back({rows.size(), c,
                                                async{.tau = tau,
                                                      .outstanding = m == 2 ? automatic : m * c.batch / 2,
                                                      .policy = policy},
                                                static_cast<std::uint64_t>(s)});
                        rows.push_back(std::move(row));
                    }
    std::atomic<std::size_t> done{0};
    opd::thread_team team(static_cast<int>(std::max(1U, std::thread::hardware_concurrency())));
    team.run(static_cast<index_t>(jobs.size()), [&](index_t i, int worker) {
        job& j = jobs[static_cast<std::size_t>(i)];
        j.result = run_with(j.c, j.how, j.seed);
        const std::size_t n = ++done;
        if (worker == 0) progress(static_cast<double>(n) / static_cast<double>(jobs.size()));
    });
    struct sums {
        double throughput = 0, lag = 0, whole_lag = 0, waits = 0, teacher = 0, permits = 0, spread = 0;
    };
    std::vector<std::map<index_t, sums>> by_m(rows.size());
    for (const job& j : jobs) {
        sums& x = by_m[j.row][j.how.outstanding];
        const outcome& o = j.result;
        const auto [mean, spread] = mean_and_spread(o.permits, static_cast<std::size_t>(j.c.warmup), o.permits.size());
        const double each = 1.0 / seeds, batch = static_cast<double>(node.batch);
        x.throughput += each * o.throughput, x.lag += each * o.settled_lag;
        x.whole_lag += each * o.lags[static_cast<int>(opd::sched::lag::start)].mean, x.waits += each * o.waits;
        x.teacher += each * o.busy[1], x.permits += each * mean / batch, x.spread += each * spread / batch;
    }
    for (std::size_t i = 0; i < rows.size(); ++i) {
        choosing_row& row = rows[i];
        std::map<index_t, sums>& all = by_m[i];
        const sums own = all.extract(automatic).mapped();
        double fastest = 0;
        for (const auto& [m, x] : all) fastest = std::max(fastest, x.throughput);
        for (const auto& [m, x] : all)
            if (x.throughput >= 0.98 * fastest) {
                row.fixed = static_cast<double>(m) / static_cast<double>(node.batch), row.fixed_lag = x.lag;
                break;
            }
        const sums& widest_one = all.rbegin()->second;
        row.bottleneck = widest_one.waits < 0.02 ? "learner" : widest_one.teacher > 0.97 ? "teacher" : "rollout";
        row.share = own.throughput / fastest, row.lag = own.lag, row.whole_lag = own.whole_lag;
        row.permits = own.permits, row.spread = own.spread;
    }
    return rows;
}

std::vector<jump_row> load_jumps(const config& node, index_t steps, int seeds) {
    std::vector<jump_row> rows;
    const auto third = static_cast<std::size_t>(steps / 3);
    for (const staleness_policy policy : {staleness_policy::capacity, staleness_policy::edf}) {
        jump_row row;
        row.policy = name_of(policy);
        for (int seed = 1; seed <= seeds; ++seed) {
            config c = node;
            c.steps = steps;
            c.learner.load = {{0, 1}, {steps / 3, 4}, {2 * (steps / 3), 1}};
            const outcome own = run_with(c, async{.tau = 4, .policy = policy}, static_cast<std::uint64_t>(seed));
            const outcome wide =
                run_with(c, async{.tau = 4, .outstanding = widest, .policy = policy}, static_cast<std::uint64_t>(seed));
            const auto& m = own.permits;
            const double batch = static_cast<double>(node.batch);
            const auto [high, high_spread] = mean_and_spread(m, third / 2, third);
            const auto [low, low_spread] = mean_and_spread(m, third + third / 2, 2 * third);
            const auto [again, again_spread] = mean_and_spread(m, 2 * third + third / 2, m.size());
            const auto settled = [&](std::size_t from, double level) { // the first mean of 8 that is near
                for (std::size_t i = from; i + 8 <= m.size(); ++i)
                    if (std::abs(mean_and_spread(m, i, i + 8).first - level) <= level / 10)
                        return static_cast<index_t>(i - from);
                return static_cast<index_t>(m.size());
            };
            row.high += high / batch / seeds, row.low += low / batch / seeds;
            row.down = std::max(row.down, settled(third, low)), row.up = std::max(row.up, settled(2 * third, again));
            row.share += own.throughput / wide.throughput / seeds, row.lag += own.settled_lag / seeds;
            row.spread = std::max({row.spread, high_spread / batch, low_spread / batch, again_spread / batch});
        }
        rows.push_back(row);
    }
    return rows;
}

std::vector<random_row> random_loads(index_t loads, index_t steps, const std::function<void(double)>& progress) {
    std::vector<random_row> rows(static_cast<std::size_t>(loads));
    std::atomic<index_t> done{0};
    opd::thread_team team(static_cast<int>(std::max(1U, std::thread::hardware_concurrency())));
    team.run(loads, [&](index_t i, int worker) {
        const random_load load = load_of(static_cast<std::uint64_t>(i) + 1);
        random_row& row = rows[static_cast<std::size_t>(i)];
        row = load.what;
        const auto batch = static_cast<double>(row.batch);
        const random_outcome own = run_load(load, automatic, steps);
        std::vector<random_outcome> fixed;
        double fastest = 0;
        for (index_t half = 2; half <= 2 * (row.tau + 1); ++half) {
            fixed.push_back(run_load(load, half * row.batch / 2, steps));
            fastest = std::max(fastest, fixed.back().pace);
        }
        const auto best =
            std::find_if(fixed.begin(), fixed.end(), [&](const random_outcome& o) { return o.pace >= 0.98 * fastest; });
        row.share = own.pace / fastest, row.lag = own.lag, row.permits = own.permits / batch;
        row.fixed = best->permits / batch, row.fixed_lag = best->lag;
        row.widest_share = fixed.back().pace / fastest, row.widest_lag = fixed.back().lag;
        const index_t n = ++done;
        if (worker == 0) progress(static_cast<double>(n) / static_cast<double>(loads));
    });
    return rows;
}

std::string table(const std::vector<random_row>& rows) {
    std::string out = "seed lengths   policy   tau  B workers lanes changes | fixed M  lag | automatic M  share  lag | "
                      "(tau + 1) B: share  lag\n";
    std::vector<double> shares;
    double lag = 0, fixed_lag = 0, widest_lag = 0;
    for (const random_row& r : rows) {
        out += fmt::format("{:<4} {:<9} {:<8} {:>3} {:>2} {:>7} {:>5} {:<7} | {:>6.1f}B {:>4.2f} | {:>10.2f}B {:>6.3f} "
                           "{:>4.2f} | {:>18.3f} {:>4.2f}\n",
                           r.seed, r.lengths, r.policy, r.tau, r.batch, r.workers, r.lanes, r.changes, r.fixed,
                           r.fixed_lag, r.permits, r.share, r.lag, r.widest_share, r.widest_lag);
        shares.push_back(r.share);
        lag += r.lag, fixed_lag += r.fixed_lag, widest_lag += r.widest_lag;
    }
    std::sort(shares.begin(), shares.end());
    const auto n = static_cast<double>(rows.size());
    const auto below = [&](double x) { return std::lower_bound(shares.begin(), shares.end(), x) - shares.begin(); };
    return out + fmt::format("{} loads: share of the fastest fixed M: least {:.3f}, twentieth {:.3f}, median {:.4f}; "
                             "below 0.9: {}, below 0.95: {}\n"
                             "mean lag: automatic M {:.2f}, best fixed M {:.2f}, (tau + 1) B {:.2f}\n",
                             rows.size(), shares.front(), shares[shares.size() / 20], shares[shares.size() / 2],
                             below(0.9), below(0.95), lag / n, fixed_lag / n, widest_lag / n);
}

std::string table(const std::vector<choosing_row>& rows) {
    std::string out =
        "lengths    learner teacher tau policy    limits   | fixed M  lag  | automatic M      share  lag\n";
    std::map<std::string, std::pair<int, int>> good;
    double least = 1;
    for (const choosing_row& r : rows) {
        out += fmt::format(
            "{:<10} x{:<6} x{:<6} {:<3} {:<9} {:<8} | {:>4.1f}B {:>6.2f} | {:>4.2f}B +- {:.2f}B {:>8.3f} {:>5.2f}{}\n",
            r.lengths, r.learner, r.teacher, r.tau, r.policy, r.bottleneck, r.fixed, r.fixed_lag, r.permits, r.spread,
            r.share, r.lag, r.good() ? "" : "  *");
        auto& [held, all] = good[r.bottleneck];
        held += r.good(), ++all;
        least = std::min(least, r.share);
    }
    for (const auto& [who, n] : good) out += fmt::format("{}-bound: {} of {} within bounds\n", who, n.first, n.second);
    return out + fmt::format("least share {:.3f}\n", least);
}

std::string table(const std::vector<jump_row>& rows) {
    std::string out = "learner x1, x4, x1: settled M    steps down  up   spread   share of (tau + 1) B   lag\n";
    for (const jump_row& r : rows)
        out += fmt::format("{:<9} {:.2f}B, {:.2f}B {:>18} {:>4} {:>7.2f}B {:>13.3f} {:>14.2f}\n", r.policy, r.high,
                           r.low, r.down, r.up, r.spread, r.share, r.lag);
    return out;
}

} // namespace cluster_sim
