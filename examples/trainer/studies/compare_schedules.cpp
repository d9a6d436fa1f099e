// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// opd-compare-schedules DIRECTORY [--worlds=threads,virtual,fixed,outstanding,seeds] [--seeds=3] [--steps=400]:
// two-step-off and asynchronous distillation beside synchronous, from one teacher and one warm student, on the task
// with long responses (operands to 999, at most 40 steps).
//
//   threads   this machine's cores: sync with all of them in every stage; the others with a thread a stage, the learner
//             on one or on as many as sync has
//   virtual   eight cores in virtual time, with the stage times of one core of such a machine (--cost-* of opd-train).
//             Sync takes turns on all eight, in every stage; or, beside it, on seven, the teacher on the eighth. The
//             others split them. Teacher and learner on n cores take 1/n of the time
//   fixed     the same with other fixed parts of a decoding step (--cost-step), which on a GPU is the read of the
//             weights: sync on all eight, and async on the best of six splits with 32 or 96 slots (30 steps, first
//             seed)
//
// and, on opd-train's own task,
//
//   outstanding   automatic M beside fixed ones in virtual time, where the learner, the teacher or rollout limits (120
//                 steps, first seed)
//   seeds         sync and async (tau = 4) as opd-train has them, on this machine's cores, to the end: accuracy and
//                 throughput by seed
//
// The first row of each is the sync that uses every core in every stage; speed-ups are over that. Teacher and student
// are trained once and kept in DIRECTORY/base. Schedules take turns within a seed. Speed-ups are ratios of throughput
// (response tokens of updates 6 … J over the time from update 5 to J) within a seed: median, smallest, largest.
#include <algorithm>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "studies/comparisons.hpp"

namespace {

using namespace trainer;
struct contender {
    std::string name;
    arguments settings;
    std::vector<nlohmann::json> reports = {}; // by seed
};

// Cores of each stage.
struct split {
    int rollout, learner, teacher;
};

// In virtual time; from the defaults, which are for one core.
arguments on(const split& s, int slots) {
    const auto c = config{}.schedule;
    return {"--driver=virtual",
            fmt::format("--rollout-workers={}", s.rollout),
            fmt::format("--slots={}", slots),
            fmt::format("--cost-train={}", c.cost_train / s.learner),
            fmt::format("--cost-train-row={}", c.cost_train_row / s.learner),
            fmt::format("--cost-score={}", c.cost_score / s.teacher),
            fmt::format("--cost-score-row={}", c.cost_score_row / s.teacher)};
}

void print(const std::string& title, const std::vector<contender>& all) {
    fmt::print("{:<34}{:>10}{:>22}{:>9}{:>22}{:>16}{:>12}{:>10}\n", title, "tokens/s", "speed-up", "overlap",
               "accuracy (range)", "start lag, max", "token lag", "newest");
    for (const contender& c : all) {
        std::vector<double> rate, ratio, accuracy, overlap, start, most, token, newest;
        for (std::size_t i = 0; i < c.reports.size(); ++i) {
            const auto& s = c.reports[i]["schedule"];
            const auto lag = [&](const char* which, const char* what) {
                return s["lag"][which]["versions"][what].get<double>();
            };
            rate.push_back(s["throughput"].get<double>());
            ratio.push_back(rate.back() / all[0].reports[i]["schedule"]["throughput"].get<double>());
            overlap.push_back(s["overlap"].get<double>());
            accuracy.push_back(c.reports[i]["accuracy"]["after"].get<double>());
            start.push_back(lag("start", "mean"));
            most.push_back(lag("start", "max"));
            token.push_back(lag("mean_token", "mean"));
            newest.push_back(lag("newest_token", "mean"));
        }
        fmt::print("{:<34}{:>10.0f}{:>22}{:>9.2f}{:>22}{:>16}{:>12.2f}{:>10.2f}\n", "  " + c.name, of(rate).median,
                   fmt::format("{:.2f} ({:.2f}-{:.2f})", of(ratio).median, of(ratio).least, of(ratio).most),
                   of(overlap).median,
                   fmt::format("{:.3f} ({:.3f}-{:.3f})", of(accuracy).median, of(accuracy).least, of(accuracy).most),
                   fmt::format("{:.2f}, {:.0f}", of(start).median, of(most).most), of(token).median, of(newest).median);
    }
    std::fflush(stdout);
}

const arguments task = {"--max-operand=999", "--max-task-steps=40", "--quiet"};
const arguments async = {"--schedule=async", "--tau=4"};
const arguments asyncopd = async + arguments{"--staleness-policy=capacity", "--outstanding=widest"}; // AsyncOPD's rule
constexpr int cores = 8;

void compare_fixed_parts(const std::string& directory, const std::string& student) {
    const double row = config{}.schedule.cost_step_row;
    fmt::print("virtual, {} cores, by the fixed part of a decoding step (and {:g} us a token)\n"
               "{:>10}{:>7}{:>13}{:>6}{:>14}{:>6}{:>22}   {}\n",
               cores, 1e6 * row, "fixed, us", "share", "sync, tok/s", "idle", "async, tok/s", "gain",
               "without an idle core", "split: rollout + learner + teacher, slots");
    for (const double part : {0.0, config{}.schedule.cost_step, 9e-6, 3e-5, 2.4e-4}) {
        const auto run_with = [&](const arguments& settings) {
            return report_of(directory + "/fixed",
                             task + settings +
                                 arguments{fmt::format("--cost-step={}", part), "--steps=30", "--prefill-chunk=256",
                                           "--eval-prompts=32", "--start-from=" + student})["schedule"];
        };
        const auto sync = run_with(on({cores, cores, cores}, 32));
        double best = 0;
        std::string which;
        for (const split s :
             {split{5, 2, 1}, split{4, 3, 1}, split{3, 4, 1}, split{2, 5, 1}, split{3, 3, 2}, split{2, 4, 2}})
            for (const int slots : {32, 96}) {
                const double async_rate = run_with(asyncopd + on(s, slots))["throughput"];
                if (async_rate <= best) continue;
                best = async_rate;
                which = fmt::format("{}+{}+{}, {}", s.rollout, s.learner, s.teacher, slots);
            }
        const double rate = sync["throughput"], busy = sync["overlap"];
        fmt::print("{:>10g}{:>7.2f}{:>13.0f}{:>6.2f}{:>14.0f}{:>6.2f}{:>22.2f}   {}\n", 1e6 * part,
                   part / (part + row * 32 / cores), rate, 1 - busy, best, best / rate, best / rate * busy, which);
        std::fflush(stdout);
    }
}

// Four rollout workers and one teacher; --cost-* such that one stage limits, the others to two thirds of it at most.
void compare_outstanding(const std::string& directory, const std::string& student) {
    struct load {
        const char* name;
        double step, score, train;
    };
    const auto c = config{}.schedule;
    constexpr int batch = 32;
    fmt::print("virtual, automatic M: as good as the best fixed M of B, 1.5B, ... (tau + "
               "1)B?\n{:<14}{:>10}{:>5}{:>12}{:>8}{:>8}"
               "{:>12}{:>10}{:>12}{:>14}\n",
               "limits", "policy", "tau", "tokens/s", "lag", "M/B", "of best", "best M/B", "least lag", "(M/B) at .98");
    for (const load& l : {load{"learner", 1, 1, 1}, load{"learner, x2", 1, 1, 2}, load{"learner, x4", 1, 1, 4},
                          load{"teacher, x6", 1, 6, 0.5}, load{"rollout, x4", 4, 0.5, 0.5}})
        for (const char* policy : {"edf", "capacity"})
            for (const int tau : {2, 4}) {
                const auto outcome = [&](const std::string& outstanding) {
                    return report_of(directory + "/outstanding",
                                     {"--quiet", "--start-from=" + student, "--steps=120", "--eval-prompts=32",
                                      "--schedule=async", "--driver=virtual", fmt::format("--tau={}", tau),
                                      fmt::format("--staleness-policy={}", policy), "--outstanding=" + outstanding,
                                      fmt::format("--cost-step={}", l.step * c.cost_step),
                                      fmt::format("--cost-step-row={}", l.step * c.cost_step_row),
                                      fmt::format("--cost-score={}", l.score * c.cost_score),
                                      fmt::format("--cost-score-row={}", l.score * c.cost_score_row),
                                      fmt::format("--cost-train={}", l.train * c.cost_train),
                                      fmt::format("--cost-train-row={}", l.train * c.cost_train_row)})["schedule"];
                };
                const auto lag = [](const nlohmann::json& s) {
                    return s["lag"]["start"]["versions"]["mean"].get<double>();
                };
                std::vector<std::pair<int, nlohmann::json>> fixed;
                for (int m = batch; m <= (tau + 1) * batch; m += batch / 2)
                    fixed.emplace_back(m, outcome(std::to_string(m)));
                double best = 0, best_m = 0, least = 1e9, least_m = 0;
                for (const auto& [m, s] : fixed)
                    if (s["throughput"].get<double>() > best) best = s["throughput"], best_m = m;
                for (const auto& [m, s] : fixed)
                    if (s["throughput"].get<double>() >= 0.98 * best && lag(s) < least) least = lag(s), least_m = m;
                const auto own = outcome("automatic");
                fmt::print("{:<14}{:>10}{:>5}{:>12.0f}{:>8.2f}{:>8.2f}{:>12.3f}{:>10.1f}{:>12.2f}{:>14.1f}\n", l.name,
                           policy, tau, own["throughput"].get<double>(), lag(own), lag(own) + 1,
                           own["throughput"].get<double>() / best, best_m / batch, least, least_m / batch);
                std::fflush(stdout);
            }
}

// opd-train as it comes, from one teacher and one warm student.
void compare_seeds(const std::string& directory, const std::string& student, int seeds) {
    fmt::print("{:<6}{:>12}{:>12}{:>14}{:>14}{:>8}{:>12}{:>12}\n", "seed", "sync", "async", "sync, tok/s",
               "async, tok/s", "ratio", "start lag", "gap closed");
    std::vector<double> all[2];
    for (int seed = 1; seed <= seeds; ++seed) {
        nlohmann::json runs[2];
        for (const int stale : {0, 1})
            runs[stale] =
                report_of(fmt::format("{}/seeds-{}-{}", directory, stale, seed),
                          (stale ? arguments{"--schedule=async", "--tau=4"} : arguments{}) +
                              arguments{"--quiet", "--start-from=" + student, fmt::format("--seed={}", seed)});
        const auto accuracy = [&](int i) { return runs[i]["accuracy"]["after"].get<double>(); };
        const auto rate = [&](int i) { return runs[i]["schedule"]["throughput"].get<double>(); };
        for (const int i : {0, 1}) all[i].push_back(accuracy(i));
        fmt::print("{:<6}{:>12.4f}{:>12.4f}{:>14.0f}{:>14.0f}{:>8.2f}{:>12.2f}{:>12.3f}\n", seed, accuracy(0),
                   accuracy(1), rate(0), rate(1), rate(1) / rate(0),
                   runs[1]["schedule"]["lag"]["start"]["versions"]["mean"].get<double>(),
                   runs[1]["gap_closed"].is_number() ? runs[1]["gap_closed"].get<double>() : 0.0);
        std::fflush(stdout);
    }
    for (const int i : {0, 1})
        fmt::print("{}: median {:.4f}, {:.4f} to {:.4f}\n", i ? "async" : "sync", of(all[i]).median, of(all[i]).least,
                   of(all[i]).most);
}

// The contenders of the worlds that are compared by schedule.
std::vector<std::pair<std::string, std::vector<contender>>> contenders_of(const std::set<std::string>& worlds) {
    const arguments off = {"--schedule=step-off", "--schedule-k=2"}, one = {"--learner-threads=1"};
    const arguments apart = on({3, 4, 1}, 32);
    std::vector<std::pair<std::string, std::vector<contender>>> r;
    if (worlds.contains("threads"))
        r.push_back({"threads",
                     {{"sync", {}},
                      {"two-step-off, learner on one", off + one},
                      {"async, learner on one", asyncopd + one},
                      {"async, learner on all", asyncopd},
                      {"async edf, learner on one", async + one}}});
    if (worlds.contains("virtual"))
        r.push_back({"virtual, 8 cores",
                     {{"sync, every stage on 8", on({cores, cores, cores}, 32)},
                      {"sync, teacher on 1, others 7", on({7, 7, 1}, 35)},
                      {"two-step-off", off + apart},
                      {"async, tau = 4", asyncopd + apart},
                      {"async, tau = 4, edf, M = 3B",
                       async + arguments{"--staleness-policy=edf", "--outstanding=96"} + apart}}});
    return r;
}

void compare(const std::string& directory, const std::set<std::string>& worlds, int seeds, int steps) {
    auto compared = contenders_of(worlds);
    const bool fixed = worlds.contains("fixed"), outstanding = worlds.contains("outstanding"),
               by_seed = worlds.contains("seeds");
    const std::string student = compared.empty() && !fixed
                                    ? std::string()
                                    : student_in(directory + "/base", task + arguments{"--teacher-steps=2500"});
    for (int seed = 1; seed <= seeds; ++seed)
        for (auto& [world, contenders] : compared)
            for (std::size_t i = 0; i < contenders.size(); ++i)
                contenders[i].reports.push_back(
                    report_of(fmt::format("{}/{}{}-{}", directory, world[0], i, seed),
                              task + contenders[i].settings +
                                  arguments{"--start-from=" + student, fmt::format("--seed={}", seed),
                                            fmt::format("--steps={}", steps)}));
    for (const auto& [world, contenders] : compared) print(world, contenders);
    if (fixed) compare_fixed_parts(directory, student);
    if (!outstanding && !by_seed) return;
    const std::string usual = student_in(directory + "/usual", {"--quiet"});
    if (outstanding) compare_outstanding(directory, usual);
    if (by_seed) compare_seeds(directory, usual, seeds);
}

} // namespace

int main(int argc, char** argv) {
    CLI::App app("Schedules of opd-train beside each other, from one teacher and one warm student.");
    std::string directory;
    std::set<std::string> worlds = {"threads", "virtual", "fixed"};
    int seeds = 3, steps = 400;
    comparison_options(app, directory, worlds, {"threads", "virtual", "fixed", "outstanding", "seeds"});
    app.add_option("--seeds", seeds)->check(CLI::PositiveNumber)->capture_default_str();
    app.add_option("--steps", steps)->check(CLI::PositiveNumber)->capture_default_str();
    return comparison_main(app, argc, argv, [&] { compare(directory, worlds, seeds, steps); });
}
