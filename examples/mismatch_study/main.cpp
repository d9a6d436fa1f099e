// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// opd-mismatch-study: what becomes of distillation where rollout computes otherwise than the learner, and what each
// correction does about it.
#include <chrono>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include <fmt/ranges.h>

#include "studies/comparisons.hpp"
#include "study.hpp"

namespace {

using trainer::arguments;
using trainer::operator+;

struct options {
    std::string directory = "runs/mismatch_study";
    int threads = 2, windows = 8;
    int steps = 120, prompts = 32;
    double rate = 1e-3;
    bool tiny = false, full = false;
    std::vector<std::uint64_t> seeds;
    std::vector<std::string> engines, treatments;
};

// Models, prompts and steps of all cells.
arguments base_of(const options& o) {
    const arguments common = {"--preset=quick", "--quiet",         "--eval-every=0",     "--estimator=mc",
                              "--m=1",          "--baseline=none", "--log-every=1000000"};
    if (o.tiny)
        return common + arguments{"--max-operand=30",
                                  "--max-task-steps=6",
                                  "--teacher-width=12",
                                  "--teacher-layers=1",
                                  "--teacher-heads=2",
                                  "--teacher-kv-heads=1",
                                  "--teacher-head-dim=6",
                                  "--teacher-ffn=12",
                                  "--student-width=12",
                                  "--student-layers=1",
                                  "--student-heads=2",
                                  "--student-kv-heads=1",
                                  "--student-head-dim=6",
                                  "--student-ffn=12",
                                  "--teacher-steps=60",
                                  "--teacher-batch=8",
                                  "--student-max-steps=10",
                                  "--student-batch=4",
                                  "--student-check-every=5",
                                  "--student-check-prompts=8",
                                  "--eval-prompts=16",
                                  "--prompts=4",
                                  "--warmup=1",
                                  "--steps=4"};
    return common + arguments{fmt::format("--prompts={}", o.prompts), fmt::format("--steps={}", o.steps),
                              fmt::format("--rate={}", o.rate), "--warmup=10", "--eval-prompts=200"};
}

std::vector<mismatch_study::choice> chosen(const char* flag, const std::vector<mismatch_study::choice>& all,
                                           const std::vector<std::string>& names) {
    if (names.empty()) return all;
    std::vector<mismatch_study::choice> r;
    std::vector<std::string> known;
    for (const auto& c : all) {
        known.push_back(c.name);
        if (std::ranges::count(names, c.name) > 0) r.push_back(c);
    }
    for (const std::string& name : names)
        if (std::ranges::count(known, name) == 0)
            throw trainer::failure(trainer::exit_usage,
                                   fmt::format("{}: '{}' is not one of {}", flag, name, fmt::join(known, ", ")));
    return r;
}

void run(const options& o) {
    const auto begin = std::chrono::steady_clock::now();
    mismatch_study::grid grid{.engines = chosen("--engines", mismatch_study::engines(), o.engines),
                              .treatments = chosen("--treatments", mismatch_study::treatments(), o.treatments),
                              .seeds = o.seeds,
                              .windows = o.windows};
    trainer::make_directory(o.directory);
    const trainer::directory_lock lock(o.directory);
    const arguments base = base_of(o) + arguments{fmt::format("--threads={}", o.threads)};
    const std::string student = trainer::student_in(o.directory + "/base", base);
    const mismatch_study::world world(student, base);
    const auto& d = world.settings.distill;
    if (o.windows > d.steps)
        throw trainer::failure(trainer::exit_usage,
                               fmt::format("--windows must be at most the {} steps, not {}", d.steps, o.windows));
    fmt::print("# Distillation with an engine that computes otherwise\n\n{} engines, {} treatments, seeds {}; {} steps "
               "of {} sequences, one warm student.\n\n",
               grid.engines.size(), grid.treatments.size(), fmt::join(o.seeds, ", "), d.steps,
               trainer::batch_of(world.settings));
    std::fflush(stdout);
    const mismatch_study::study done(world, std::move(grid), o.directory, o.threads);
    const std::string tables = done.tables();
    fmt::print("{}\n", tables);
    trainer::write_file(o.directory + "/tables.md", tables);
    const std::string why = done.plot(o.directory);
    if (!why.empty()) fmt::print(stderr, "no plots: {}\n", why);
    fmt::print("{} seconds. {}/windows.csv, tables.md{}\n",
               std::chrono::duration_cast<std::chrono::seconds>(std::chrono::steady_clock::now() - begin).count(),
               o.directory, why.empty() ? ", figure2.svg to figure6.svg" : "");
}

} // namespace

int main(int argc, char** argv) {
    options o;
    CLI::App app(
        "A student distilled while rollout computes otherwise than the learner (bfloat16, split products, another\n"
        "temperature, noise, an unreported filter), with each correction. Cells that the directory holds are not\n"
        "made again.",
        "opd-mismatch-study");
    app.add_option("--out", o.directory, "Folder to write to")->capture_default_str();
    app.add_option("--threads", o.threads, "Cells at a time. Results do not depend on it")
        ->check(CLI::Range(1, 1024))
        ->capture_default_str();
    app.add_flag("--tiny", o.tiny, "Tiny models, some seconds: to see that it runs");
    app.add_flag("--full", o.full, "More seeds and steps: hours")->excludes("--tiny");
    app.add_option("--steps", o.steps, "Of a cell; --full 800")->check(CLI::PositiveNumber)->capture_default_str();
    app.add_option("--prompts", o.prompts, "A step, an even number")->check(CLI::Range(2, 4096))->capture_default_str();
    app.add_option("--rate", o.rate, "Largest learning rate")->check(CLI::PositiveNumber)->capture_default_str();
    app.add_option("--windows", o.windows, "That a cell's steps are told in")
        ->check(CLI::Range(1, 1000))
        ->capture_default_str();
    app.add_option("--seeds", o.seeds, "Separated by commas")->delimiter(',');
    app.add_option("--engines", o.engines, "By their names in windows.csv, separated by commas")->delimiter(',');
    app.add_option("--treatments", o.treatments, "Likewise")->delimiter(',');
    return trainer::comparison_main(app, argc, argv, [&] {
        if (o.full && app.count("--steps") == 0) o.steps = 800;
        if (o.tiny && app.count("--windows") == 0) o.windows = 2;
        if (o.seeds.empty())
            o.seeds = o.full ? std::vector<std::uint64_t>{1, 2, 3, 4, 5} : std::vector<std::uint64_t>{1, 2};
        run(o);
    });
}
