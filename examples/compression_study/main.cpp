// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// opd-compression-study: what compressed teacher states lose, beside top k and threshold at the same numbers a row.
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <functional>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>
#include <fmt/format.h>

#include "settings/files.hpp"
#include "study.hpp"
#include "synthetic.hpp"
#include "words.hpp"

namespace {

using namespace compression_study;

int run(int argc, char** argv) {
    std::string directory = "runs/compression_study", only;
    std::uint64_t seed = 1;
    int threads = 2;
    bool quick = false;
    synthetic_size large;
    CLI::App app(
        "Compressed teacher states beside top k and threshold, on student rollouts: a table, its numbers and a plot "
        "of each world.",
        "opd-compression-study");
    app.add_option("--out", directory, "Folder to write to")->capture_default_str();
    app.add_option("--seed", seed, "Of models, texts and states")->capture_default_str();
    app.add_option("--threads", threads)->check(CLI::Range(1, 1024))->capture_default_str();
    app.add_option("--only", only, "One of the worlds")->check(CLI::IsMember({"words", "synthetic"}));
    app.add_flag("--quick", quick, "Small sizes, some seconds: to see that it runs");
    app.add_option("--vocab", large.vocab, "Of the synthetic head")
        ->check(CLI::Range(2000, 1000000))
        ->capture_default_str();
    app.add_option("--width", large.width, "A power of two")->check(CLI::Range(128, 8192))->capture_default_str();
    app.add_option("--rows", large.rows, "Of synthetic rollouts")->check(CLI::Range(8, 100000))->capture_default_str();
    app.add_option("--calibration", large.calibration, "Rows")->check(CLI::Range(8, 10000000))->capture_default_str();
    try {
        app.parse(argc, argv);
    } catch (const CLI::ParseError& e) {
        return app.exit(e) == 0 ? 0 : 2;
    }
    words_size small;
    if (quick) {
        small = {.teacher_steps = 30, .student_steps = 10, .batch = 8, .rollouts = 4, .calibration = 8};
        if (app.count("--vocab") == 0) large.vocab = 4000;
        if (app.count("--width") == 0) large.width = 256;
        if (app.count("--rows") == 0) large.rows = 32;
        if (app.count("--calibration") == 0) large.calibration = 300;
    }
    trainer::make_directory(directory);

    struct study_of {
        std::string name;
        std::function<world()> make;
    };
    const std::vector<study_of> studies{{"words", [&] { return words(small, threads, seed); }},
                                        {"synthetic", [&] { return synthetic(large, threads, seed); }}};
    std::string tables;
    bool drawn = true;
    for (const study_of& s : studies) {
        if (!only.empty() && only != s.name) continue;
        const auto begin = std::chrono::steady_clock::now();
        const auto seconds = [&] {
            return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
        };
        const world w = s.make();
        const double made = seconds();
        const outcome o = study(w, threads, seed);
        const std::string text = table(w, o);
        fmt::print("{}\n{:.0f} seconds to make, {:.0f} to study.\n\n", text, made, seconds() - made);
        std::fflush(stdout);
        tables += (tables.empty() ? "" : "\n") + text;
        trainer::write_file(fmt::format("{}/{}.tsv", directory, w.name), tsv(o));
        if (const std::string why = plot(directory, w, o); !why.empty()) {
            fmt::print(stderr, "no plot of {}: {}\n", w.name, why);
            drawn = false;
        }
    }
    trainer::write_file(directory + "/table.md", tables);
    fmt::print("{}/table.md, and of each world its .tsv{}\n", directory, drawn ? " and .svg" : "");
    return 0;
}

} // namespace

int main(int argc, char** argv) {
    try {
        return run(argc, argv);
    } catch (const std::exception& e) {
        std::fprintf(stderr, "opd-compression-study: %s\n", e.what());
        return 1;
    }
}
