// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// opd-train from its arguments to its exit code.
#pragma once

#include <functional>
#include <string>

#include "settings/command_line.hpp"
#include "settings/config.hpp"

namespace trainer {

/// What is printed of a failure: settings under the names that they were given, and where an output failed, how the run
/// goes on.
std::string told(const command& arguments, const failure& e);

/// A program's work, and the exit code that it, or what it threw, leads to; `said` words failures for stderr.
int run_program(const char* name, const std::function<std::string(const failure&)>& said,
                const std::function<int()>& work);

/// SIGINT and SIGTERM set `interrupted` (run.hpp); the second time the program ends.
void listen_to_signals();

/// `every_flag` as parse_command_line has it.
int app_main(int argc, const char* const* argv, bool every_flag = false);

} // namespace trainer
