// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// opd-variance-study: what each estimator does with 64 teacher-scored ids a row: variance and bias of its gradient.
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <string>

#include <CLI/CLI.hpp>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "study.hpp"

namespace {

using namespace variance_study;

int run(int argc, char** argv) {
    std::string directory = "runs/variance_study";
    std::uint64_t seed = 1;
    int threads = 2;
    bool quick = false, full = false;
    study_settings s;
    CLI::App app(
        "Gradient variance and bias of every sampled estimator at 64 teacher-scored ids a row, over entropies and "
        "ages of the rollout; and what m draws leave of one's variance. Tables, CSV and plots.",
        "opd-variance-study");
    app.add_option("--out", directory, "Folder to write to")->capture_default_str();
    app.add_option("--seed", seed, "Of policies and draws")->capture_default_str();
    app.add_option("--threads", threads, "Results do not depend on it")
        ->check(CLI::Range(1, 1024))
        ->capture_default_str();
    app.add_flag("--quick", quick, "Few small policies, some seconds: to see that it runs");
    app.add_flag("--full", full, "More policies, trials, entropies and ages: half an hour and more")
        ->excludes("--quick");
    app.add_option("--policies", s.policies, "Of each family at each entropy")->check(CLI::Range(1, 1000));
    app.add_option("--trials", s.trials.trials, "Of each estimator at each prefix; a multiple of 24")
        ->check(CLI::Range(24, 1000000));
    app.add_option("--vocab", s.world.vocab)->check(CLI::Range(200, 1000000));
    app.add_option("--drift", s.world.drift, "Of a logit by a version")
        ->check(CLI::Range(0.0, 10.0))
        ->capture_default_str();
    try {
        app.parse(argc, argv);
    } catch (const CLI::ParseError& e) {
        return app.exit(e) == 0 ? 0 : 2;
    }
    const auto unless_given = [&](const char* option, auto& value, auto to) {
        if (app.count(option) == 0) value = to;
    };
    unless_given("--trials", s.trials.trials, quick ? 48 : full ? 408 : 72);
    unless_given("--policies", s.policies, quick ? 2 : full ? 40 : 20);
    if (quick) {
        unless_given("--vocab", s.world.vocab, 1000);
        s.entropies = {1, 3, 5}, s.staleness = {0, 64};
        s.ratios.repeats = 80, s.ratios.paths = 4, s.ratios.sequences = 120, s.ratios.length = 32;
    } else if (full) {
        s.entropies = {0.1, 0.5, 1, 2, 3, 4, 5, 5.8, 6.5}, s.staleness = {0, 1, 4, 16, 64};
        s.ratios.repeats = 2000, s.ratios.paths = 40, s.ratios.sequences = 4000;
    }
    s.trials.trials = (s.trials.trials + 23) / 24 * 24;
    s.trials.seed = s.ratios.seed = seed;
    s.ratios.staleness = s.staleness.back();
    std::filesystem::create_directories(directory);

    fmt::print(
        "# Variance and bias at {} scored ids\n\nSeed {}. V = {}; {} policies of each of 4 families at {} nats; "
        "rollouts {} versions old, each of which moves a logit by {}; {} trials of {} estimators at each prefix.\n\n",
        s.trials.budget, seed, s.world.vocab, s.policies, fmt::join(s.entropies, ", "), fmt::join(s.staleness, ", "),
        s.world.drift, s.trials.trials, contenders().size());
    std::fflush(stdout);
    const auto begin = std::chrono::steady_clock::now();
    opd::thread_team team(threads);
    const study done(s, team);
    const std::string tables = done.tables();
    fmt::print("{}\n", tables);
    write_file(directory + "/tables.md", tables);
    write_file(directory + "/cells.csv", done.cells_csv());
    write_file(directory + "/prefixes.csv", done.prefixes_csv());
    write_file(directory + "/ratios.csv", done.ratios_csv());
    const std::string why = done.plots(directory);
    if (!why.empty()) fmt::print(stderr, "no plots: {}\n", why);
    fmt::print("{} seconds. {}/tables.md, cells.csv, prefixes.csv, ratios.csv{}\n",
               std::chrono::duration_cast<std::chrono::seconds>(std::chrono::steady_clock::now() - begin).count(),
               directory, why.empty() ? ", variance-budget.svg, variance-bias.svg" : "");
    return 0;
}

} // namespace

int main(int argc, char** argv) {
    try {
        return run(argc, argv);
    } catch (const std::exception& e) {
        std::fprintf(stderr, "opd-variance-study: %s\n", e.what());
        return 1;
    }
}
