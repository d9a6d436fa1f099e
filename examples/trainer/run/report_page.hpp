// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// report.html, a finished run on one page that needs no other file: what was run, the final table and its terms, the
// plots, and commands to go on with.
#pragma once

#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "settings/config.hpp"

namespace trainer {

/// A line of "what to try next": why, and the arguments of opd-train.
struct next_try {
    std::string why;
    std::vector<std::string> arguments;
};
/// From a run's settings and its report.json.
std::vector<next_try> what_to_try(const config& c, const nlohmann::ordered_json& report);

/// The page; `table` is the text that the run printed. Plots are those of the run directory's plots/, as far as there
/// are any.
std::string report_page(const config& c, const nlohmann::ordered_json& report, const std::string& table);

} // namespace trainer
