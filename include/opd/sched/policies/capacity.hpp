// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// capacity: the B that were scored first (AsyncOPD).
//
// Theorem: over the first J full steps of a run the mean start lag is at most M/B - 1. A sequence with lag l is
// outstanding at l + 1 steps, so the sum of (lag + 1) over consumed sequences is at most M·J, and they are B·J. Where
// M changes: at most the mean of what was outstanding at these steps over B, less 1. Over any other J steps the at
// most M sequences that were there before add their earlier steps: at most M·L/(B·J), L the largest lag. Nothing
// holds for one sequence: others can overtake it for ever.
#pragma once

#include "opd/sched/policies/completion_order.hpp"

namespace opd::sched::policies {

/// Mean start lag at most M/B - 1; nothing holds for one sequence. The default.
struct capacity {
    static constexpr policy_traits traits{.name = "capacity", .automatic = true};
    using order = completion_order;
};

} // namespace opd::sched::policies
