// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What async gains over the fairest sync: by the fixed part of a decode step, the tail of the lengths, and the loads of
// learner and teacher.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "config.hpp"

namespace cluster_sim {

/// One load under one fixed part. Async has the best of all splits of its GPUs; sync is the fastest synchronous row.
struct gain_cell {
    double step = 0;  ///< seconds, fixed, of a decode step
    double gain = 0;  ///< throughput of async over that of sync
    double whole = 0; ///< share of its GPUs' time for which sync is busy: overlap, where all take turns
    int rollout = 0, learner = 0, teacher = 0; ///< GPUs of the best split
    /// Over a sync that would do the same work and leave no GPU idle.
    double over_work_conserving() const { return gain * whole; }
};
struct gain_row {
    config::tail tail;
    double longest = 0;              ///< of a batch over the mean length: the quantile at 1 - 1/B
    double learner = 1, teacher = 1; ///< factors on their times
    std::vector<gain_cell> cells;    ///< by fixed part
};

/// Tails of the configuration's sensitivity study × learner ×1/4, ×1, ×4 and teacher ×4 × fixed parts from none to
/// twice the configured one. Runs on all cores; `progress` gets the share that is done.
std::vector<gain_row> gain_of_async(const config& c, const std::function<void(double)>& progress);

std::string table(const config& c, const std::vector<gain_row>& rows);

} // namespace cluster_sim
