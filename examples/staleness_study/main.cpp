// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// opd-staleness-study: what each estimator closes of the gap to the teacher from responses that are k versions old.
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
    std::string directory = "runs/staleness_study";
    int threads = 2, budget = 16;
    int steps = 160, prompts = 8;
    double rate = 5e-4;
    bool tiny = false, full = false;
    std::vector<int> ks;
    std::vector<std::uint64_t> seeds;
    std::vector<std::string> only;
};

// Models, prompts and steps of all cells.
arguments base_of(const options& o) {
    const arguments common = {"--task=grammar", "--preset=quick", "--quiet", "--eval-every=0"};
    if (o.tiny)
        return common + arguments{"--max-words=12",
                                  "--teacher-width=8",
                                  "--teacher-layers=1",
                                  "--teacher-heads=2",
                                  "--teacher-kv-heads=1",
                                  "--teacher-head-dim=4",
                                  "--teacher-ffn=8",
                                  "--student-width=8",
                                  "--student-layers=1",
                                  "--student-heads=2",
                                  "--student-kv-heads=1",
                                  "--student-head-dim=4",
                                  "--student-ffn=8",
                                  "--teacher-steps=8",
                                  "--teacher-batch=8",
                                  "--student-max-steps=1",
                                  "--student-batch=4",
                                  "--student-check-prompts=8",
                                  "--eval-prompts=8",
                                  "--prompts=2",
                                  "--mini-batches=2",
                                  "--warmup=1",
                                  "--steps=5"};
    return common + arguments{fmt::format("--prompts={}", o.prompts), fmt::format("--steps={}", o.steps),
                              fmt::format("--rate={}", o.rate), "--mini-batches=2", "--warmup=10"};
}

void run(const options& o) {
    const auto begin = std::chrono::steady_clock::now();
    trainer::make_directory(o.directory);
    const trainer::directory_lock lock(o.directory);
    const arguments base = base_of(o) + arguments{fmt::format("--threads={}", o.threads)};
    const std::string student = trainer::student_in(o.directory + "/base", base);
    const staleness_study::world world(student, base);

    staleness_study::grid grid{.contenders = {}, .ks = o.ks, .seeds = o.seeds};
    const std::set<std::string> only(o.only.begin(), o.only.end());
    std::set<std::string> known;
    for (const auto& c : staleness_study::contenders(o.budget)) {
        known.insert(c.name);
        if (only.empty() ? !c.full || o.full : only.contains(c.name)) grid.contenders.push_back(c);
    }
    for (const std::string& name : only)
        if (!known.contains(name))
            throw trainer::failure(trainer::exit_usage,
                                   fmt::format("--only: '{}' is not one of {}", name, fmt::join(known, ", ")));
    const auto& d = world.settings.distill;
    fmt::print("# Distillation from stale responses\n\nk = {}; seeds {}; {} contenders; {} steps of {} sequences in {} "
               "updates, one warm student; {} ids a token.\n\n",
               fmt::join(o.ks, ", "), fmt::join(o.seeds, ", "), grid.contenders.size(), d.steps,
               trainer::batch_of(world.settings), d.mini_batches, o.budget);
    std::fflush(stdout);
    const staleness_study::study done(world, std::move(grid), o.directory, o.threads);
    const std::string tables = done.tables();
    fmt::print("{}\n", tables);
    trainer::write_file(o.directory + "/tables.md", tables);
    const std::string why = done.plot(o.directory);
    if (!why.empty()) fmt::print(stderr, "no plot: {}\n", why);
    fmt::print("{} seconds. {}/cells.csv, tables.md{}\n",
               std::chrono::duration_cast<std::chrono::seconds>(std::chrono::steady_clock::now() - begin).count(),
               o.directory, why.empty() ? ", staleness.svg" : "");
}

} // namespace

int main(int argc, char** argv) {
    options o;
    CLI::App app(
        "What each estimator closes of the gap to the teacher from responses that are k versions old, on a task\n"
        "of 2,278 words. Cells that the directory holds are not made again.",
        "opd-staleness-study");
    app.add_option("--out", o.directory, "Folder to write to")->capture_default_str();
    app.add_option("--threads", o.threads, "Cells at a time. Results do not depend on it")
        ->check(CLI::Range(1, 1024))
        ->capture_default_str();
    app.add_flag("--tiny", o.tiny, "Tiny models, some seconds: to see that it runs");
    app.add_flag("--full", o.full, "More k, seeds, steps and contenders: hours")->excludes("--tiny");
    app.add_option("--steps", o.steps, "Of a cell; --full 400")->check(CLI::PositiveNumber)->capture_default_str();
    app.add_option("--prompts", o.prompts, "A step")->check(CLI::Range(2, 4096))->capture_default_str();
    app.add_option("--rate", o.rate, "Largest learning rate")->check(CLI::PositiveNumber)->capture_default_str();
    app.add_option("--k", o.ks, "Versions, separated by commas; at least two")
        ->delimiter(',')
        ->check(CLI::Range(0, 100000));
    app.add_option("--seeds", o.seeds, "Separated by commas")->delimiter(',');
    app.add_option("--only", o.only, "Contenders, by their names in cells.csv, separated by commas")->delimiter(',');
    return trainer::comparison_main(app, argc, argv, [&] {
        if (o.full && app.count("--steps") == 0) o.steps = 400;
        if (o.ks.empty())
            o.ks = o.tiny   ? std::vector{0, 2}
                   : o.full ? std::vector{0, 1, 2, 4, 8, 16, 32, 64}
                            : std::vector{0, 4, 16, 64};
        if (o.seeds.empty())
            o.seeds = o.tiny   ? std::vector<std::uint64_t>{1, 2}
                      : o.full ? std::vector<std::uint64_t>{1, 2, 3, 4, 5}
                               : std::vector<std::uint64_t>{1, 2, 3};
        if (std::set(o.ks.begin(), o.ks.end()).size() != o.ks.size() || o.ks.size() < 2)
            throw trainer::failure(trainer::exit_usage,
                                   "--k: needs two different numbers at least, none of them twice");
        run(o);
    });
}
