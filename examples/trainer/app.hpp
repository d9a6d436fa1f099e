// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// opd-train from its arguments to its exit code.
#pragma once

#include <string>

#include "config.hpp"

namespace trainer {

/// What is printed of a failure: settings under the names that they were given, and where an output failed, how the run goes on.
std::string told(const command& arguments, const failure& e);

int app_main(int argc, const char* const* argv);

} // namespace trainer
