// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// cohort_fifo: the B of lowest version, once no unscored one is of lower version than any of them.
//
// Theorem: start lag <= ceil(M/B) - 1. When v becomes v + 1, at most M - B sequences of version <= v are left, no
// later one goes before them and none joins them: they are gone after ceil(M/B) - 1 more steps.
#pragma once

#include <vector>

#include "opd/sched/policies/cohorts.hpp"

namespace opd::sched::policies {

/// Start lag at most ceil(M/B) - 1, at the price of waiting for the slowest of a version.
struct cohort_fifo : cohorts {
    static constexpr policy_traits traits{.name = "cohort_fifo", .table_by_version = true};
    using order = cohort_fifo;
    explicit cohort_fifo(const policy_settings& = {}) {}

    bool pick(index_t n, version_t, std::vector<slot_t>& out) {
        if (ready_count_ < n) return false;
        index_t need = n;
        for (const cohort& c : list_) {
            if (c.ready.size() >= need) break;
            if (c.unready > 0) return false;
            need -= c.ready.size();
        }
        take(n, out);
        return true;
    }
};

} // namespace opd::sched::policies
