// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What the programs that compare runs share: whole runs of opd-train within one process, and their reports.
#pragma once

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <CLI/CLI.hpp>
#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include "app/app.hpp"
#include "run/run.hpp"
#include "settings/command_line.hpp"
#include "settings/files.hpp"

namespace trainer {

using arguments = std::vector<std::string>;

inline arguments operator+(arguments a, const arguments& b) {
    a.insert(a.end(), b.begin(), b.end());
    return a;
}

// A run whose own table is not shown; it leaves after so many steps, if that is more than 0.
inline void train(const arguments& a, std::int64_t stop_after = 0) {
    run work(parse_command_line(a));
    if (stop_after > 0) work.stop_after(stop_after);
    std::fflush(stdout);
    const int shown = ::dup(STDOUT_FILENO);
    const bool hidden = std::freopen("/dev/null", "w", stdout) != nullptr;
    const exit_code code = work.go();
    std::fflush(stdout);
    if (hidden) ::dup2(shown, STDOUT_FILENO);
    ::close(shown);
    if (code == exit_interrupted && stop_after > 0)
        interrupted = false;
    else if (code != exit_ok)
        throw failure(code, "a run was interrupted");
}

struct spread {
    double median, least, most;
};
inline spread of(std::vector<double> x) {
    std::sort(x.begin(), x.end());
    const std::size_t n = x.size();
    return {(x[(n - 1) / 2] + x[n / 2]) / 2, x.front(), x.back()};
}

inline nlohmann::json report_of(const std::string& where, const arguments& settings) {
    train(settings + arguments{"--run-dir=" + where, "--overwrite", "--eval-every=0", "--eval-samples=0"});
    return nlohmann::json::parse(read_file(where + "/report.json"));
}

// The warm student's checkpoint, of a teacher and a student that are trained where they are not there yet.
inline std::string student_in(const std::string& where, const arguments& settings) {
    const std::string student = where + "/checkpoints/student.ckpt";
    if (std::filesystem::exists(student)) return student;
    fmt::print("training a teacher and warming a student up, once: {}\n", where);
    std::fflush(stdout);
    train(settings + arguments{"--run-dir=" + where, "--overwrite", "--steps=1"});
    return student;
}

/// DIRECTORY and --worlds=a,b of those that there are.
inline void comparison_options(CLI::App& app, std::string& directory, std::set<std::string>& worlds,
                               const std::set<std::string>& known) {
    app.add_option("directory", directory, "where runs are kept")->required();
    app.add_option("--worlds", worlds, "what to compare")
        ->delimiter(',')
        ->check(CLI::IsMember(known))
        ->capture_default_str();
}

/// main(), with opd-train's exit codes.
template <class Body>
int comparison_main(CLI::App& app, int argc, char** argv, Body&& body) {
    try {
        app.parse(argc, argv);
    } catch (const CLI::ParseError& e) {
        return app.exit(e) == 0 ? exit_ok : exit_usage;
    }
    return run_program(
        app.get_name().c_str(), [](const failure& e) { return std::string(e.what()); },
        [&] {
            spdlog::set_level(spdlog::level::warn);
            body();
            return exit_ok;
        });
}

} // namespace trainer
