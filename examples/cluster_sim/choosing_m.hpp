// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What an automatic number of permits is worth: beside every fixed one, over loads, tails of the lengths, bounds and
// policies.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "config.hpp"

namespace cluster_sim {

/// One load, and what automatic M came to there. Throughput is a share of that of the fastest fixed M; lags are means
/// of the start lag after the warm-up.
struct choosing_row {
    std::string lengths;
    double learner = 1, teacher = 1; ///< factors on their times
    index_t tau = 4;
    std::string policy;
    std::string bottleneck;         ///< at the widest M: learner, teacher, or else rollout
    double fixed = 0;               ///< the least M, in batches, that reaches 98 % of the fastest
    double fixed_lag = 0;           ///< its lag
    double share = 0, lag = 0;      ///< of automatic M
    double whole_lag = 0;           ///< warm-up included: capacity's bound is of the first steps
    double permits = 0, spread = 0; ///< mean and standard deviation of automatic M, in batches
    /// 97 % at 1.2 times the fixed lag + 0.1, where learner or teacher limits; where rollout does, 94 % and, over the
    /// whole run, a lag within tau.
    bool good() const;
};

/// B = 256 on the node of 8 GPUs, `steps` steps of which the first fifth is warm-up, lengths and times of each of
/// `seeds` seeds. `quick`: the learner at ×1 and ×4, tau 4 alone. Runs on all cores; `progress` gets the share that is
/// done.
std::vector<choosing_row> choosing_m(const config& node, index_t steps, int seeds, bool quick,
                                     const std::function<void(double)>& progress);

/// The learner four times as slow for a third of the run: how many steps until automatic M has settled, down and up.
struct jump_row {
    std::string policy;
    double low = 0, high = 0;  ///< M, in batches, settled under the heavy load; under the light one before it
    index_t down = 0, up = 0;  ///< steps until a mean of 8 of them is within a tenth of that
    double share = 0, lag = 0; ///< of the run, beside (tau + 1) B
    double spread = 0;         ///< largest standard deviation of M once it has settled, in batches
};
std::vector<jump_row> load_jumps(const config& node, index_t steps, int seeds);

/// A load that is drawn by its seed alone: one of four laws of lengths, tau 1 to 8, B 8 to 64, 1 to 8 rollout workers
/// with few lanes or many, speeds of all stages; some change while the run goes on (L: the learner's, T: the teacher's,
/// W: workers leave, and may come back).
struct random_row {
    std::uint64_t seed = 0;
    std::string lengths, policy, changes;
    index_t tau = 1, batch = 1, lanes = 1;
    int workers = 1;
    double share = 0, lag = 0, permits = 0; ///< of automatic M; permits in batches
    double fixed = 0, fixed_lag = 0;        ///< the least M, in batches, that reaches 98 % of the fastest
    double widest_share = 0, widest_lag = 0;
};
/// Loads of seeds 1 to `loads`, each beside every fixed M in steps of half a batch. All begin with 2 B permits, the
/// fixed ones have theirs from the tenth step on. Of `steps` steps the first 200 are warm-up.
std::vector<random_row> random_loads(index_t loads, index_t steps, const std::function<void(double)>& progress);

std::string table(const std::vector<choosing_row>& rows);
std::string table(const std::vector<random_row>& rows);
std::string table(const std::vector<jump_row>& rows);

} // namespace cluster_sim
