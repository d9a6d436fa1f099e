// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What the programs that compare runs share: whole runs of opd-train within one process, and their reports.
#pragma once

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <unistd.h>

#include "files.hpp"
#include "run.hpp"

namespace trainer {

using arguments = std::vector<std::string>;

inline arguments operator+(arguments a, const arguments& b) {
    a.insert(a.end(), b.begin(), b.end());
    return a;
}

// A run whose own table is not shown.
inline void train(const arguments& a) {
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

} // namespace trainer
