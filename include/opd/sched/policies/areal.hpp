// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// areal: the B that were scored first, under the admission rule of AReaL: while running + accepted < (eta + v + 1)·B
// and running < concurrency. `accepted`: rolled out in the whole run, and not given up.
//
// Theorem: with full batches accepted = v·B + what is not consumed, so it is capacity with M = (eta + 1)·B. Short
// batches loosen it: the version counts B for each.
//
// Source: AReaL (arXiv 2505.24298) section 5, its staleness_manager.
#pragma once

#include <algorithm>

#include "opd/sched/policies/completion_order.hpp"

namespace opd::sched::policies {

/// Admission by AReaL's rule; `tau` is its eta. Mean start lag at most tau while batches are full.
class areal : public completion_order {
public:
    static constexpr policy_traits traits{.name = "areal", .own_admission = true};
    using order = areal;
    explicit areal(const policy_settings& s) : settings_(s) {}
    index_t admissible(const admission_state& a) const {
        const index_t room = (settings_.tau + a.version + 1) * settings_.batch - (a.consumed + a.outstanding);
        return settings_.concurrency > 0 ? std::min(room, settings_.concurrency - a.in_rollout) : room;
    }

private:
    policy_settings settings_;
};

} // namespace opd::sched::policies
