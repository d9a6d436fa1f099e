// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// SVG plots of a run, drawn by gnuplot in a process of its own.
#pragma once

#include <string>

#include <nlohmann/json.hpp>

namespace trainer {

/// Writes plots/loss.svg, accuracy.svg and lengths.svg from the run directory's log.jsonl and the evaluations;
/// running.svg from its schedule.json, and speculation.svg where it drafted. `run`, what was run and with which result,
/// stands under each title. Returns what kept it from drawing (gnuplot is not installed, say); empty if nothing did.
std::string draw_plots(const std::string& run_directory, const nlohmann::json& evaluations, const std::string& run);

} // namespace trainer
