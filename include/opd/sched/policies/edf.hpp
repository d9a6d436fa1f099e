// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// edf, earliest deadline first: the B of lowest version, if every deadline of the others stays feasible.
//
// The deadline of a sequence of version u is the step at version u + tau. A batch is accepted if for every j >= 1 at
// most B·(j - 1) others have their deadline within the next j steps.
//
// Theorem: start lag <= tau, and no deadlock. Call a state feasible if for every j >= 1 at most B·j sequences have
// version <= v + j - 1 - tau. An accepted batch leaves a feasible state at v + 1. Admissions have version v; they count
// from j = tau + 1 on only, where at most M <= (tau + 1)·B are outstanding. Failures and retries shrink the counts. So
// states stay feasible, and j = 1 says that everything due now fits the batch. Once all outstanding sequences are
// scored, taking the B of lowest version leaves max(0, B·j - B) in every count: accepted.
//
// Source: the feasibility test is that of earliest-deadline-first scheduling (Liu and Layland 1973) for jobs of one
// batch slot each.
#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "opd/sched/policies/cohorts.hpp"

namespace opd::sched::policies {

/// Start lag at most tau, with nothing given up; waits only where a deadline would be missed otherwise.
class edf : public cohorts {
public:
    static constexpr policy_traits traits{.name = "edf", .automatic = true, .table_by_version = true};
    using order = edf;
    explicit edf(const policy_settings& s) : batch_(s.batch), tau_(s.tau) {}

    bool pick(index_t n, version_t now, std::vector<slot_t>& out) {
        if (ready_count_ < n) return false;
        index_t need = n, others = 0, slack = std::numeric_limits<index_t>::max();
        version_t u = base_;
        for (const cohort& c : list_) {
            const index_t taken = std::min(need, c.ready.size());
            need -= taken;
            others += c.unready + c.ready.size() - taken;
            // those of version <= u are due within the next u + tau - now steps after this one
            slack = std::min(slack, batch_ * std::max<version_t>(0, u + tau_ - now) - others);
            ++u;
        }
        if (slack < 0) return false;
        slack_ = slack;
        take(n, out);
        return true;
    }
    /// Of the last batch: how many more sequences could have shared the tightest deadline.
    index_t slack() const { return slack_; }
    template <class A>
    void fields(A& a) {
        a(slack_);
    }

private:
    index_t batch_, tau_, slack_ = 0;
};

} // namespace opd::sched::policies
