// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What async pays for and sync does not: weights that cross links, a teacher's cache with an end, workers that come
// late. Async over the fastest synchronous row without each, with each, and with all.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "config.hpp"

namespace cluster_sim {

struct cost_row {
    std::string what;
    double sync = 0; ///< tokens a second of the fastest synchronous row
    /// By streaming schedule (cost_study::schedules): over that; and the share of the time for which a full cache keeps
    /// rollout from starting. 0: it came to a standstill.
    std::vector<double> gains, blocked;
};
struct cost_study {
    std::vector<std::string> schedules;
    std::vector<cost_row> rows;
};

/// The configuration's first streaming schedule, its first of policy edf and of in_order; `progress` gets the share
/// that is done. Weights are the configuration's bytes, or 16 GB.
cost_study costs_of_async(const config& c, const std::function<void(double)>& progress);

std::string table(const config& c, const cost_study& s);

} // namespace cluster_sim
