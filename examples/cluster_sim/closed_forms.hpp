// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Mean staleness in closed form, in versions: rollout slots that are never idle, a queue, a trainer that takes B
// sequences a step.
//
//   pre-queue   C·M / (B·max(1, rho))                         updates while a response is drawn
//   in-queue    rho                           rho < 1         updates while it waits: rollout limits, the queue is
//                                                             emptied each step
//               (2q + rho - 1) / (2·rho)      rho >= 1        the trainer limits; the queue is full and drops its
//                                                             oldest
//
//   C: rollout slots; M = E[longest of a group] / E[length]; rho = rollout's rate / the trainer's; q = queue's capacity
//   / B
//
// Source: C. Dong, A. Goel, D. Yu, "Predicting and Controlling Staleness in Fully Asynchronous RL Training", Applied
// Compute, 2026 (appliedcompute.com/research/staleness-in-fully-async-rl), by a public summary of its formulas; of the
// page itself only the first part could be read. The same by counting: if C slots run at each update, B sequences a
// step have crossed C updates together, whatever their lengths. Approximate: arrivals are uniform over a step. Of n·B
// equal lengths in lockstep batch i waits for i updates, so that in-queue is (n - 1)/2 whatever rho is; and in a queue
// that drops the exact figure is the mean of ceil(age), less than 1/2 away.
//
// Where opd differs: nothing is dropped under its bounds. M permits hold rollout back, so that a trainer that limits
// sees a mean start lag of M/B - 1 whatever rho is (docs/sched/outstanding.md); what waits for the teacher adds its
// number over B; answers to one prompt are consumed singly, so M is 1.
#pragma once

#include <algorithm>

namespace cluster_sim {

struct staleness_load {
    double concurrency = 0; ///< C
    double batch = 1;       ///< B
    double utilisation = 0; ///< rho
    double queue = 1;       ///< q
    double tail = 1;        ///< M
};

inline double pre_queue_staleness(const staleness_load& l) {
    return l.concurrency * l.tail / (l.batch * std::max(1.0, l.utilisation));
}
inline double in_queue_staleness(const staleness_load& l) {
    return l.utilisation < 1 ? l.utilisation : (2 * l.queue + l.utilisation - 1) / (2 * l.utilisation);
}
inline double mean_staleness(const staleness_load& l) { return pre_queue_staleness(l) + in_queue_staleness(l); }

/// opd's, where M permits are in use all the time and the learner limits.
inline double permits_staleness(double permits, double batch) { return permits / batch - 1; }

} // namespace cluster_sim
