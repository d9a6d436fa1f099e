// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What more sequences at once would do to a rollout worker's pace, learnt from how long its quanta take.
//
//   seconds of a quantum = a + b·drawn + c·again              cost_fit.hpp
//
// drawn: rows of new tokens; again: rows of prefixes that were computed before, and are again under new weights. Let
// n sequences run. A batch takes in proportion to 1/n quanta, each with its fixed part a (on a GPU the read of the
// weights), and while it is drawn n prefixes are rebuilt. So with T the seconds of some quanta,
//
//   elasticity = d log(tokens a second)/d log n = (a·quanta - c·again)/T
//
// which is near 1 where a step costs the same for one sequence and for many, and below 0 where new weights cost more
// than fuller steps save: then fewer sequences at once are faster. Rows that do not depend on n (prompts) belong to
// `drawn`.
//
// Source: lemma 3 of outstanding.hpp.
#pragma once

#include <algorithm>

#include "opd/sched/cost_fit.hpp"
#include "opd/sched/types.hpp"

namespace opd::sched {

/// A worker's own; what stages.hpp's `elasticity()` returns.
class rollout_cost {
public:
    /// A quantum. Throws as cost_fit::add().
    void add(double drawn, double again, double seconds) {
        fit_.add({drawn, again}, seconds);
        quanta_ += 1, again_ += again, seconds_ += seconds;
    }
    /// Of the quanta since it was asked for last; `untold` if there were none.
    double elasticity() {
        double e = untold;
        if (seconds_ > 0) {
            const auto [a, b, c] = fit_.cost();
            e = (a * quanta_ - c * again_) / seconds_;
            e = std::clamp(e, -1.0, 1.0); // a fit may be off
        }
        quanta_ = again_ = seconds_ = 0;
        return e;
    }
    const cost_fit<2>& fit() const { return fit_; }

    template <class A>
    void fields(A& a) {
        a(fit_, quanta_, again_, seconds_);
    }

private:
    cost_fit<2> fit_;
    double quanta_ = 0, again_ = 0, seconds_ = 0; // since it was asked
};

} // namespace opd::sched
