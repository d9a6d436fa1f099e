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
