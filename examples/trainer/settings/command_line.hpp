// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// opd-train's command line: settings, and what is to be done with them.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "settings/config.hpp"

namespace trainer {

/// What the command line asks for.
struct command {
    config settings;
    bool resume = false;
    bool overwrite = false;
    bool quiet = false;
    bool print_config = false;
    bool train_drafter = false;
    std::string write_offline;                  ///< folder of the data set that is to be written; empty: none
    int offline_sequences = 0;                  ///< that it is to have
    std::string text;                           ///< what to print instead of running: --help, --version, --print-config
    std::vector<std::string> warnings;          ///< of what was given and does not count
    std::string file;                           ///< the configuration that was read; empty: none
    std::map<std::string, std::string> in_file; ///< "--rate" to "distill.rate": what a file decides, or could alone
};

/// `text` with settings under the names that the user gave them: "my.json: distill.rate must be …" for "--rate must be
/// …".
std::string as_given(const command& c, const std::string& text);

/// Parses the command line; usage failures carry the message to print. `every_flag`: those of all settings are taken,
/// not of flags_of_train alone.
command parse_command_line(int argc, const char* const* argv, bool every_flag = false);
/// The same of `opd-train` and these, for a run that a program makes itself: the flags are those of all settings.
command parse_command_line(const std::vector<std::string>& arguments);

} // namespace trainer
