// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// drop: the B that were scored first; what would exceed tau is given up.
//
// Theorem: start lag <= tau. When v becomes v + 1, every sequence of version < v + 1 - tau that is not in training
// leaves. The version moves only when B sequences were consumed, so progress is kept. M may be above (tau + 1)·B.
#pragma once

#include "opd/sched/policies/completion_order.hpp"

namespace opd::sched::policies {

/// Start lag at most tau, at the price of sequences that were drawn for nothing.
struct drop {
    static constexpr policy_traits traits{.name = "drop", .stale = stale_end::given_up, .automatic = true};
    using order = completion_order;
};

} // namespace opd::sched::policies
