// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "studies/compare_rollouts.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "gnuplot.hpp"
#include "pipeline/rollout.hpp"
#include "studies/rollout_profile.hpp"
#include "studies/speculation_ways.hpp"

namespace trainer {

namespace {

namespace spec = opd::spec;

arguments strategy_of(const spec::strategy& s) {
    return {"--speculate=learned", fmt::format("--draft-depth={}", s.depth),
            fmt::format("--draft-children={}", s.top_k), fmt::format("--draft-verify={}", s.verify)};
}

std::string name_of(const spec::strategy& s) { return fmt::format("{}/{}/{}", s.depth, s.top_k, s.verify); }

// A student whose responses may be longer than all that it has learnt from: those that go wrong end late.
const arguments unbounded = moving + arguments{"--max-task-steps=100"};

// This student, its drafter, and prompts.
struct ground {
    const std::string student, drafter;
    const config settings;
    const std::unique_ptr<const any_task> task;
    const transformer<float> model;

    explicit ground(const std::string& directory)
        : student(student_in(directory + "/unbounded", unbounded)),
          drafter(drafter_in(directory + "/unbounded", unbounded + small_drafter)), settings(config_of(unbounded)),
          task(task_of(settings)), model(model_in(settings, student)) {}

    config plain(const priced& p) const { return config_of(unbounded + arguments{"--driver=virtual"} + p.target); }
    config drafting(const priced& p, const arguments& how) const {
        return config_of(unbounded + arguments{"--driver=virtual", "--draft-from=" + drafter} + p.target + p.drafter +
                         how);
    }
    std::vector<request> prompts(std::uint64_t first, std::size_t count) const {
        std::vector<request> r;
        for (std::uint64_t i = 0; i < count; ++i)
            r.push_back(request_of(*task, settings.run.seed, (std::uint64_t{9} << 56) + first + i));
        return r;
    }
};

// Takes of the prompts as many whose responses are about as long as a Pareto law has them: as many are longer than x as
// fall with 1/x, and none is longer than the longest.
std::vector<request> long_tailed(std::vector<std::pair<double, request>>& pool, std::size_t count, double shortest) {
    const auto shorter = [](const auto& a, const auto& b) { return a.first < b.first; };
    const double longest = std::max_element(pool.begin(), pool.end(), shorter)->first;
    std::vector<request> r;
    for (std::size_t i = count; i-- > 0;) {
        const double above = 1 - (static_cast<double>(i) + 0.5) / static_cast<double>(count),
                     wanted = std::min(longest, shortest / above);
        const auto nearest = std::min_element(pool.begin(), pool.end(), [&](const auto& a, const auto& b) {
            return std::abs(a.first - wanted) < std::abs(b.first - wanted);
        });
        r.push_back(std::move(nearest->second));
        pool.erase(nearest);
    }
    std::sort(r.begin(), r.end(), [](const request& a, const request& b) { return a.sample < b.sample; });
    return r;
}

// A picture of one of them: requests that run, over time.
void draw(const std::string& directory, const std::string& name, const std::vector<std::string>& ways,
          const std::vector<rollout_profile>& made) {
    std::string data, lines;
    for (std::size_t w = 0; w < ways.size(); ++w) {
        data += fmt::format("$way{} << EOD\n", w);
        for (const auto& x : made[w].running) data += fmt::format("{:.4f} {}\n", x.seconds, x.running);
        data += "EOD\n";
        lines += fmt::format("{}$way{} with steps lw 2 {} title '{}'", w == 0 ? "" : ", ", w,
                             ways[w] == "auto" ? "lc rgb '#d02090'" : "", ways[w]);
    }
    write_file(directory + "/running.gp",
               fmt::format("set terminal svg size 800,480 background rgb 'white'\nset output 'running.svg'\n"
                           "set title 'Requests that run, in virtual time: {}'\nset grid\nset xlabel 'seconds'\n"
                           "set ylabel 'requests'\nset xrange [0:*]\nset yrange [0:*]\n{}plot {}\n",
                           name, data, lines));
    if (const std::string problem = examples::run_gnuplot(directory, "running.gp"); !problem.empty())
        fmt::print(stderr, "no plot: {}\n", problem);
}

} // namespace

// --- a rollout's course ----------------------------------------------------------------------------------------------

void compare_running(const std::string& directory) {
    constexpr std::size_t count = 128, before = 4; // rollouts that tuners have seen
    const ground g(directory);
    std::vector<std::vector<request>> rollouts;
    {
        opd::thread_team threads(threads_of(g.settings));
        sampling o = sampling_of(g.settings, *g.task);
        o.plan = {};
        auto prompts = g.prompts(0, 3072);
        const auto responses = roll_out(g.model, threads, prompts, o);
        std::vector<std::pair<double, request>> pool;
        for (std::size_t i = 0; i < prompts.size(); ++i)
            pool.emplace_back(static_cast<double>(responses[i].response().size()), std::move(prompts[i]));
        for (std::size_t i = 0; i <= before; ++i) rollouts.push_back(long_tailed(pool, count, 16));
    }
    const std::vector<way> drafted = {{"chain 8/1/8", strategy_of({8, 1, 8})},
                                      {"tree 8/4/32", strategy_of({8, 4, 32})},
                                      {"auto", {"--speculate=auto"}},
                                      {"auto, from 32", {"--speculate=auto", "--draft-running=32"}}};
    for (const priced& p : {node, on_four}) {
        std::vector<std::string> names = {"off"};
        std::vector<rollout_profile> made = {
            profiled_rollout(g.plain(p), *g.task, g.model, count).run(rollouts.front())};
        for (const way& w : drafted) {
            profiled_rollout rollout(g.drafting(p, w.settings), *g.task, g.model, count);
            if (w.name.starts_with("auto"))
                for (std::size_t i = 1; i <= before; ++i) rollout.run(rollouts[i]);
            names.push_back(w.name), made.push_back(rollout.run(rollouts.front()));
            if (made.back().responses != made.front().responses)
                throw failure(exit_numeric, w.name + " draws other responses than off");
        }
        std::vector<std::size_t> lengths;
        for (const trajectory& t : made.front().responses) lengths.push_back(t.response().size());
        std::sort(lengths.begin(), lengths.end());
        const double whole = made.front().seconds;
        fmt::print("one rollout of {} requests, all at once, with modelled costs of {}: responses of {} tokens in the "
                   "median, {} at the 90th percentile, {} at most\n{:<16}{:>10}{:>9}   requests that run after tenths "
                   "of the seconds of off\n",
                   count, p.name, lengths[count / 2], lengths[count * 9 / 10], lengths.back(), "", "seconds",
                   "speedup");
        for (std::size_t w = 0; w < names.size(); ++w) {
            fmt::print("{:<16}{:>10.3f}{:>9.2f}   ", names[w], made[w].seconds, whole / made[w].seconds);
            for (int tenth = 0; tenth <= 10; ++tenth) fmt::print("{:>5}", made[w].running_at(whole * tenth / 10.0));
            fmt::print("\n");
        }
        std::fflush(stdout);
        if (p.name == node.name) draw(directory, p.name, names, made);
        std::vector<double> others, automatic;
        for (std::size_t w = 0; w < names.size(); ++w)
            (names[w].starts_with("auto") ? automatic : others).push_back(made[w].seconds);
        const double best = of(others).least, chosen = of(automatic).least;
        fmt::print("auto takes {:.3f} of the seconds of the best of the others\n", chosen / best);
        if (chosen > 1.1 * best) throw failure(exit_numeric, "auto takes over 10 % longer than the best of the others");
    }
}

// --- strategies by batch ---------------------------------------------------------------------------------------------

void compare_strategies(const std::string& directory) {
    const ground g(directory);
    const auto published = spec::tuner_options().arms; // of BEG-MAB
    // chains, TLT's trees, the deepest of them with other numbers of tokens to verify, and two narrower ones of auto's
    std::vector<spec::strategy> all = {{1, 1, 1},  {2, 1, 2}, {4, 1, 4},  {8, 1, 8}, {5, 2, 8},
                                       {8, 2, 12}, {8, 4, 8}, {8, 4, 16}, {8, 4, 64}};
    all.insert(all.end(), published.begin(), published.end());
    std::sort(all.begin(), all.end(), [](const auto& a, const auto& b) {
        return std::tuple(a.verify, a.depth, a.top_k) < std::tuple(b.verify, b.depth, b.top_k);
    });
    all.erase(std::unique(all.begin(), all.end()), all.end());
    constexpr std::array<index_t, 7> batches = {1, 2, 4, 8, 16, 32, 64};
    struct row {
        double off = 0;
        std::vector<rollout_profile> fixed;
        rollout_profile automatic;
    };
    std::vector<row> rows(batches.size());
    for (row& r : rows) r.fixed.resize(all.size());
    const config plain = g.plain(on_four), adaptive = g.drafting(on_four, {"--speculate=auto"});
    // cells are independent of each other; the dearest go first
    opd::thread_team threads(threads_of(g.settings));
    const std::size_t columns = all.size() + 2;
    threads.run(static_cast<index_t>(batches.size() * columns), [&](index_t cell, int) {
        const std::size_t b = batches.size() - 1 - static_cast<std::size_t>(cell) / columns,
                          s = columns - 1 - static_cast<std::size_t>(cell) % columns;
        const index_t batch = batches[b];
        const auto prompts = g.prompts(0, std::max<std::size_t>(40, 6 * static_cast<std::size_t>(batch)));
        if (s == all.size()) {
            rows[b].off = profiled_rollout(plain, *g.task, g.model, batch).run(prompts).full_rate();
        } else if (s > all.size()) {
            profiled_rollout rollout(adaptive, *g.task, g.model, batch);
            for (std::uint64_t before = 1; before <= 3; ++before) rollout.run(g.prompts(4096 * before, prompts.size()));
            rows[b].automatic = rollout.run(prompts);
        } else {
            rows[b].fixed[s] =
                profiled_rollout(g.drafting(on_four, strategy_of(all[s])), *g.task, g.model, batch).run(prompts);
            rows[b].fixed[s].responses.clear();
        }
    });
    fmt::print(
        "strategies (depth/children/tokens to verify) by how many sequences run, with modelled costs of {}: tokens/s "
        "of off, times that\n{:>5}{:>8}",
        on_four.name, "batch", "off");
    for (const auto& s : all) fmt::print("{:>8}", name_of(s));
    fmt::print("\n");
    for (std::size_t b = 0; b < batches.size(); ++b) {
        fmt::print("{:>5}{:>8.0f}", batches[b], rows[b].off);
        for (const auto& p : rows[b].fixed) fmt::print("{:>8.2f}", p.full_rate() / rows[b].off);
        fmt::print("\n");
    }
    fmt::print("{:>5}{:>10}{:>7}   {:<40}{}\n", "batch", "best", "", "auto: times off, its choice, steps",
               "BEG-MAB with TLT's buckets");
    const speculation_options how = speculation_of(adaptive);
    for (std::size_t b = 0; b < batches.size(); ++b) {
        const row& r = rows[b];
        const auto faster = [](const rollout_profile& x, const rollout_profile& y) {
            return x.full_rate() < y.full_rate();
        };
        const auto best =
            static_cast<std::size_t>(std::max_element(r.fixed.begin(), r.fixed.end(), faster) - r.fixed.begin());
        const bool none = r.fixed[best].full_rate() < r.off;
        const auto& chosen = r.automatic.chosen;
        const auto most = static_cast<std::size_t>(std::max_element(chosen.begin(), chosen.end()) - chosen.begin());
        std::int64_t steps = 0;
        for (const std::int64_t n : chosen) steps += n;
        measured_turns turns;
        for (std::size_t s = 0; s < all.size(); ++s) turns.emplace_back(all[s], r.fixed[s].turns);
        const tuned_rate mab = tuned(spec::beg_mab(), turns, batches[b], 4000, g.settings.run.seed);
        fmt::print("{:>5}{:>10}{:>7.2f}   {:<40}{}\n", batches[b], none ? "none" : name_of(all[best]),
                   none ? 1 : r.fixed[best].full_rate() / r.off,
                   fmt::format("{:.2f}, {}, {:.0f} %", r.automatic.full_rate() / r.off, choice_name(how, most),
                               100 * static_cast<double>(chosen[most]) / static_cast<double>(steps)),
                   fmt::format("{:.2f}, {}, {:.0f} %", mab.rate() / r.off, name_of(mab.most), 100 * mab.share));
    }
}

// --- whole steps -----------------------------------------------------------------------------------------------------

void compare_whole_steps(const std::string& directory, int steps) {
    const std::string base = directory + "/moving", student = student_in(base, moving),
                      drafter = drafter_in(base, moving + small_drafter);
    const arguments common = moving + arguments{"--driver=virtual",
                                                "--rollout-workers=4",
                                                "--slots=32",
                                                "--eval-prompts=64",
                                                "--log-every=1",
                                                "--checkpoint-every=1000",
                                                "--start-from=" + student,
                                                fmt::format("--steps={}", steps)},
                    from = {"--draft-from=" + drafter};
    std::string ends;
    for (const priced& c : {node, on_one, on_four}) {
        const arguments learned = c.drafter + from;
        const std::vector<way> ways = {{"off", {}},
                                       {"fixed 6/1/6", learned + strategy_of({6, 1, 6})},
                                       {"auto", learned + arguments{"--speculate=auto"}},
                                       {"auto, adapted", learned + c.spot +
                                                             arguments{"--speculate=auto", "--adapt-drafter",
                                                                       "--adapt-slices=8", "--adapt-rows=256"}}};
        fmt::print(
            "{} whole steps with modelled costs of {}: milliseconds a step\n{:<16}{:>8}{:>9}{:>9}{:>9}{:>10}{:>9}"
            "{:>15}{:>11}\n",
            steps, c.name, "", "step", "rollout", "teacher", "learner", "tokens/s", "times", "tokens a pass",
            "idle used");
        double first = 0;
        for (const way& w : ways) {
            const auto s = report_of(directory + "/whole", common + c.target + w.settings)["schedule"];
            const double seconds = s["wall_seconds"], rate = s["response_tokens"].get<double>() / seconds;
            if (first == 0) first = rate;
            const auto ms = [&](const char* stage) { return 1e3 * s["busy_seconds"][stage].get<double>() / steps; };
            const bool adapts = s.contains("speculation") && s["speculation"].contains("drafter");
            fmt::print("{:<16}{:>8.0f}{:>9.0f}{:>9.0f}{:>9.0f}{:>10.0f}{:>9.2f}{:>15.2f}{:>11}\n", w.name,
                       1e3 * seconds / steps, ms("rollout"), ms("teacher"), ms("learner"), rate, rate / first,
                       s.contains("speculation") ? s["speculation"]["tokens_per_step"].get<double>() : 1,
                       adapts ? fmt::format("{:.2f}", s["speculation"]["drafter"]["idle_used"].get<double>()) : "");
            std::fflush(stdout);
            const std::string made = digest(state_in(directory + "/whole/checkpoints/distill.ckpt").student_weights);
            if (ends.empty()) ends = made;
            if (made != ends) throw failure(exit_numeric, w.name + " ends in other weights than off");
        }
    }
}

} // namespace trainer
