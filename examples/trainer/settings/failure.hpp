// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// How the trainer's programs fail: a sentence, and an exit code.
#pragma once

#include <stdexcept>
#include <string>

namespace trainer {

/// Exit codes of opd-train.
enum exit_code : int {
    exit_ok = 0,
    exit_other = 1,        ///< any other failure
    exit_usage = 2,        ///< command line or configuration
    exit_input = 3,        ///< an input file cannot be read or is damaged
    exit_numeric = 4,      ///< not a number, or divergence
    exit_io = 5,           ///< an output cannot be written
    exit_peer = 6,         ///< a served teacher stays away, or is refused by its probe
    exit_resources = 7,    ///< the system refuses memory or threads
    exit_interrupted = 130 ///< SIGINT or SIGTERM: a checkpoint was written, --resume goes on
};

/// An error with the exit code that it leads to.
struct failure : std::runtime_error {
    exit_code code;
    failure(exit_code c, const std::string& what) : std::runtime_error(what), code(c) {}
};

} // namespace trainer
