// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// opd-compare-schedules DIRECTORY [--seeds=3] [--steps=400]: two-step-off and asynchronous distillation beside synchronous,
// from one teacher and one warm student, on the task with long responses (operands to 999, at most 40 steps).
//
//   threads   this machine's cores: sync with all of them in every stage; the others with a thread a stage
//   virtual   eight cores in virtual time, one of them the teacher's, with the stage times of one core of such a machine
//             (--cost-* of opd-train): sync takes turns on the other seven, the others split them, three for rollout and
//             four for the learner. A learner on n cores takes 1/n of the time
//
// Teacher and student are trained once and kept in DIRECTORY/base. Schedules take turns within a seed. Speed-ups are ratios
// of throughput (response tokens of updates 6 … J over the time from update 5 to J) within a seed: median, smallest, largest.
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include "files.hpp"
#include "run.hpp"

namespace {

using namespace trainer;
using arguments = std::vector<std::string>;

arguments operator+(arguments a, const arguments& b) {
    a.insert(a.end(), b.begin(), b.end());
    return a;
}

// A run whose own table is not shown.
void train(const arguments& a) {
    std::vector<const char*> argv{"opd-train"};
    for (const std::string& s : a) argv.push_back(s.c_str());
    run work(parse_command_line(static_cast<int>(argv.size()), argv.data()));
    std::fflush(stdout);
    const int shown = ::dup(STDOUT_FILENO);
    const bool hidden = std::freopen("/dev/null", "w", stdout) != nullptr;
    const exit_code code = work.go();
    std::fflush(stdout);
    if (hidden) ::dup2(shown, STDOUT_FILENO);
    ::close(shown);
    if (code != exit_ok) throw failure(code, "a run was interrupted");
}

struct contender {
    std::string name;
    arguments settings;
    std::vector<nlohmann::json> reports = {}; // by seed
};

struct spread {
    double median, least, most;
};
spread of(std::vector<double> x) {
    std::sort(x.begin(), x.end());
    const std::size_t n = x.size();
    return {(x[(n - 1) / 2] + x[n / 2]) / 2, x.front(), x.back()};
}

// On n cores, from the defaults for one.
arguments learner_on(int cores) {
    const config c;
    return {fmt::format("--cost-train={}", c.schedule.cost_train / cores),
            fmt::format("--cost-train-row={}", c.schedule.cost_train_row / cores)};
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

} // namespace

int main(int argc, char** argv) try {
    std::string directory, seeds = "3", steps = "400";
    for (const std::string& a : std::vector<std::string>(argv + 1, argv + argc)) {
        if (a.starts_with("--seeds="))
            seeds = a.substr(8);
        else if (a.starts_with("--steps="))
            steps = a.substr(8);
        else if (!a.starts_with("-") && directory.empty())
            directory = a;
        else
            throw failure(exit_usage,
                          fmt::format("'{}'; usage: opd-compare-schedules DIRECTORY [--seeds=3] [--steps=400]", a));
    }
    if (directory.empty())
        throw failure(exit_usage, "usage: opd-compare-schedules DIRECTORY [--seeds=3] [--steps=400]");
    spdlog::set_level(spdlog::level::warn);

    const arguments task = {"--max-operand=999", "--max-task-steps=40", "--quiet"};
    const std::string student = directory + "/base/checkpoints/student.ckpt";
    if (!std::filesystem::exists(student)) {
        fmt::print("training a teacher and warming a student up, once: {}/base\n", directory);
        std::fflush(stdout);
        train(task + arguments{"--run-dir=" + directory + "/base", "--overwrite", "--teacher-steps=2500", "--steps=1"});
    }

    const arguments eight = {"--driver=virtual"};
    const arguments split = eight + arguments{"--rollout-workers=3"} + learner_on(4);
    const arguments off = {"--schedule=step-off", "--schedule-k=2"}, async = {"--schedule=async", "--tau=4"};
    const arguments full = async + arguments{"--staleness-policy=capacity", "--outstanding=widest"}; // AsyncOPD's rule
    std::vector<std::pair<std::string, std::vector<contender>>> worlds = {
        {"threads", {{"sync", {}}, {"two-step-off", off}, {"async, tau = 4", full}}},
        {"virtual, 8 cores",
         {{"sync", eight + arguments{"--schedule=step-off", "--schedule-k=0", "--rollout-workers=7", "--slots=35"} +
                       learner_on(7)},
          {"two-step-off", split + off},
          {"async, tau = 4", split + full},
          {"async, tau = 4, edf, M = 3B", split + async + arguments{"--staleness-policy=edf", "--outstanding=96"}}}}};
    for (int seed = 1; seed <= std::stoi(seeds); ++seed)
        for (auto& [world, contenders] : worlds)
            for (std::size_t i = 0; i < contenders.size(); ++i) {
                const std::string where = fmt::format("{}/{}{}-{}", directory, world[0], i, seed);
                train(task + contenders[i].settings +
                      arguments{"--run-dir=" + where, "--overwrite", "--start-from=" + student,
                                fmt::format("--seed={}", seed), "--steps=" + steps, "--eval-every=0",
                                "--eval-samples=0"});
                contenders[i].reports.push_back(nlohmann::json::parse(read_file(where + "/report.json")));
            }
    for (const auto& [world, contenders] : worlds) print(world, contenders);
    return 0;
} catch (const trainer::failure& e) {
    fmt::print(stderr, "error: {}\n", e.what());
    return e.code;
} catch (const std::exception& e) {
    fmt::print(stderr, "error: {}\n", e.what());
    return 1;
}
