// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// retry: the B that were scored first; what would exceed tau starts again under its permit.
//
// Theorem: start lag <= tau, as of drop: every sequence of version < v + 1 - tau that is not in training takes a new
// version.
#pragma once

#include "opd/sched/policies/completion_order.hpp"

namespace opd::sched::policies {

/// Start lag at most tau, at the price of sequences that are drawn again.
struct retry {
    static constexpr policy_traits traits{.name = "retry", .stale = stale_end::started_again, .automatic = true};
    using order = completion_order;
};

} // namespace opd::sched::policies
