// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "costs.hpp"

#include <algorithm>
#include <atomic>
#include <thread>
#include <utility>

#include <fmt/format.h>

#include "opd/threads.hpp"
#include "simulate.hpp"

namespace cluster_sim {

using namespace opd::sched;

namespace {

std::vector<std::pair<std::string, config>> scenarios(const config& base) {
    std::vector<std::pair<std::string, config>> all;
    const auto add = [&](std::string what, auto&& change) {
        config c = base;
        change(c);
        validate(c);
        all.emplace_back(std::move(what), std::move(c));
    };
    const double bytes = base.weights.bytes > 0 ? base.weights.bytes : 16e9;
    const double batch_tokens = static_cast<double>(base.batch) * mean(base.lengths.response);
    const auto weights = [&](config& c, double bandwidth, int fan_out, bool meanwhile) {
        c.weights = {bytes, bandwidth, fan_out, meanwhile};
    };
    const auto cache = [&](config& c, double batches) { c.teacher.cache = batches * batch_tokens; };
    const auto joiner = [](config& c) { c.rollout.joiners = {1, 600, 0, 60}; };
    const std::string gb = fmt::format("{:g} GB", bytes / 1e9);
    add("as configured", [](config&) {});
    add(gb + " over 25 GB/s, learner to each", [&](config& c) { weights(c, 25e9, 0, false); });
    add(gb + " over 3 GB/s, learner to each", [&](config& c) { weights(c, 3e9, 0, false); });
    add(gb + " over 3 GB/s, tree of 2", [&](config& c) { weights(c, 3e9, 2, false); });
    add(gb + " over 3 GB/s, tree of 2, rollout goes on", [&](config& c) { weights(c, 3e9, 2, true); });
    add("teacher's cache of 2 B", [&](config& c) { cache(c, 2); });
    add("teacher's cache of 1.25 B", [&](config& c) { cache(c, 1.25); });
    add("a worker comes after 600 s, installs 60 s", joiner);
    add("3 GB/s to each, cache of 2 B, late worker", [&](config& c) {
        weights(c, 3e9, 0, false);
        cache(c, 2);
        joiner(c);
    });
    return all;
}

} // namespace

cost_study costs_of_async(const config& c, const std::function<void(double)>& progress) {
    std::vector<entry> synchronous, streaming;
    for (const entry& e : c.schedules) {
        if (is_synchronous(e)) synchronous.push_back(e);
        const auto* s = std::get_if<async>(&e.schedule);
        if (!s) continue;
        const bool wanted = s->policy == staleness_policy::edf || s->policy == staleness_policy::in_order;
        const bool had = std::any_of(streaming.begin(), streaming.end(),
                                     [&](const entry& x) { return std::get<async>(x.schedule).policy == s->policy; });
        if (streaming.empty() || (wanted && !had)) streaming.push_back(e);
    }
    if (synchronous.empty()) throw failure(exit_usage, "--costs: the configuration has no synchronous schedule");
    if (streaming.empty()) throw failure(exit_usage, "--costs: the configuration has no async schedule");

    cost_study study;
    for (const entry& e : streaming) study.schedules.push_back(e.name);
    const auto all = scenarios(c);
    std::vector<entry> entries = synchronous;
    entries.insert(entries.end(), streaming.begin(), streaming.end());
    std::vector<outcome> results(all.size() * entries.size());
    std::atomic<std::size_t> done{0};
    opd::thread_team team(static_cast<int>(std::max(1U, std::thread::hardware_concurrency())));
    team.run(static_cast<index_t>(results.size()), [&](index_t i, int worker) {
        const auto n = static_cast<std::size_t>(i);
        results[n] = simulate(all[n / entries.size()].second, entries[n % entries.size()]);
        const std::size_t ready = ++done;
        if (worker == 0) progress(static_cast<double>(ready) / static_cast<double>(results.size()));
    });
    for (std::size_t s = 0; s < all.size(); ++s) {
        cost_row row;
        row.what = all[s].first;
        const auto of = [&](std::size_t i) -> const outcome& { return results[s * entries.size() + i]; };
        const auto rate = [&](std::size_t i) { return of(i).stuck.empty() ? of(i).throughput : 0; };
        for (std::size_t i = 0; i < synchronous.size(); ++i) row.sync = std::max(row.sync, rate(i));
        for (std::size_t i = synchronous.size(); i < entries.size(); ++i) {
            row.gains.push_back(row.sync > 0 ? rate(i) / row.sync : 0);
            row.blocked.push_back(of(i).blocked);
        }
        study.rows.push_back(std::move(row));
    }
    return study;
}

std::string table(const config& c, const cost_study& s) {
    std::size_t width = 0;
    for (const cost_row& r : s.rows) width = std::max(width, r.what.size());
    std::string out =
        fmt::format("Async over the fastest synchronous row; in brackets, for how much of the time a full "
                    "cache keeps rollout from\nstarting. {} steps, seed {}.\n\n{:<{}}  {:>13}",
                    c.steps, c.seed, "", width, "sync tokens/s");
    for (const std::string& name : s.schedules) out += fmt::format("  {:>18}", name);
    for (const cost_row& r : s.rows) {
        out += fmt::format("\n{:<{}}  {:>13.0f}", r.what, width, r.sync);
        for (std::size_t i = 0; i < r.gains.size(); ++i) {
            const std::string blocked = r.blocked[i] > 0 ? fmt::format(" [{:.0f}%]", 100 * r.blocked[i]) : "";
            out += fmt::format("  {:>18}", (r.gains[i] > 0 ? fmt::format("{:.2f}", r.gains[i]) : "stuck") + blocked);
        }
    }
    return out + "\n";
}

} // namespace cluster_sim
