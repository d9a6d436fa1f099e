// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Runs of opd-train within a test: small ones, silent ones, and their exit codes.
#pragma once

#include <cstdio>
#include <doctest/doctest.h>
#include <string>
#include <vector>

#include <unistd.h>

#include "app/app.hpp"
#include "run/run.hpp"
#include "trainer/no_plots.hpp"

namespace opd::test {

using flags = std::vector<std::string>;

inline flags with(flags a, const flags& more) {
    a.insert(a.end(), more.begin(), more.end());
    return a;
}

/// A task and models whose runs take milliseconds.
inline flags small_models() {
    return {"--max-operand=30",     "--max-task-steps=6",   "--teacher-width=12",   "--teacher-layers=1",
            "--teacher-heads=2",    "--teacher-kv-heads=1", "--teacher-head-dim=6", "--teacher-ffn=12",
            "--student-width=12",   "--student-layers=1",   "--student-heads=2",    "--student-kv-heads=1",
            "--student-head-dim=6", "--student-ffn=12",     "--teacher-steps=5",    "--student-max-steps=0"};
}

/// Without the table, which says nothing of a tiny run.
inline trainer::exit_code go(trainer::run& r) {
    struct silence {
        int keep = ::dup(STDOUT_FILENO);
        bool silent = (std::fflush(stdout), std::freopen("/dev/null", "w", stdout)) != nullptr;
        ~silence() {
            std::fflush(stdout);
            if (silent) ::dup2(keep, STDOUT_FILENO);
            ::close(keep);
            trainer::interrupted = false;
        }
    } silence;
    trainer::interrupted = false;
    return r.go();
}

/// What a run that ends with a failure of this kind says.
inline std::string refusal(const flags& arguments, trainer::exit_code code) {
    try {
        trainer::run r(trainer::parse_command_line(arguments));
        go(r);
    } catch (const trainer::failure& e) {
        CHECK(e.code == code);
        return e.what();
    }
    FAIL_CHECK("it was not refused");
    return {};
}

/// Of the whole program, with flags for all settings; the first argument is its name.
inline int exit_of(const flags& arguments) {
    std::vector<const char*> argv;
    for (const std::string& a : arguments) argv.push_back(a.c_str());
    return trainer::app_main(static_cast<int>(argv.size()), argv.data(), true);
}

} // namespace opd::test
