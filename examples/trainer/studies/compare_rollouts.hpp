// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The worlds of opd-compare-speculation that ask for a rollout's course, for strategies by batch, and for whole steps.
#pragma once

#include <string>

namespace trainer {

/// One rollout whose lengths have a long tail: how many requests run, over time (figure 14 of TLT in form).
void compare_running(const std::string& directory);

/// Strategies by how many sequences run, and what is chosen among them (table 4 in form).
void compare_strategies(const std::string& directory);

/// Whole steps of a student that moves, without drafts and with (figures 11 and 13, table 1 in form).
void compare_whole_steps(const std::string& directory, int steps);

} // namespace trainer
