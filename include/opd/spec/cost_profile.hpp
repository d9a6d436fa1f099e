// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A chooser of strategies (tuner.hpp) that knows what steps cost, and learns what drafts bring: at a batch it takes,
// of all arms and of none, the one with the largest
//
//   (E + 1) / seconds,     seconds = ratio · (target(batch · (1 + verify)) + depth · drafter(batch · top_k))
//
// E       of an arm: the mean number of drafted tokens that a sequence kept, over its steps at any batch; old steps
//         fade, `memory` of them count. An arm that was not tried, or not of late, is believed to keep all that its
//         depth allows, as if it had been seen `doubt` times: so it is tried where it could be the best, and nowhere
//         else, and again when the rest has changed
// ratio   of an arm: what steps took over what the profile says, faded likewise; 1 at first
//
// No chance: equal steps give equal choices. Where a bandit has to try every arm at every range of batches, this one
// carries what it knows from one batch to another; the price is a profile that has the right shape.
//
// Source: this project (a measured cost profile maximising E[accepted + 1]/cost).
#pragma once

#include <algorithm>
#include <cstddef>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "opd/config.hpp"
#include "opd/element.hpp"
#include "opd/error.hpp"
#include "opd/spec/draft_budget.hpp"
#include "opd/spec/tuner.hpp"

namespace opd::spec {

/// Arms, costs and memory of the chooser. By default the target costs 1 + 0.01·rows seconds and drafting nothing:
/// measure both.
struct cost_profile_options {
    std::vector<strategy> arms = tuner_options{}.arms;
    step_cost target = step_cost::line(1, 0.01); ///< seconds by rows
    std::optional<step_cost> drafter = {};       ///< likewise of one of its passes; none: it costs nothing
    index_t most_tokens = 0;                     ///< verify * batch; 0: no limit
    double memory = 100;                         ///< steps that count; at least 1
    double doubt = 0.05;                         ///< steps that the belief in what was not tried is worth; positive
};

/// A tuner by predicted tokens a second. One for all batches; no random numbers.
class cost_profile {
public:
    explicit cost_profile(cost_profile_options o) : options_(std::move(o)) {
        detail::check_arms(options_.arms);
        if (options_.most_tokens < 0) throw invalid_input("most_tokens", "must be at least 0");
        if (!(options_.memory >= 1) || !opd::detail::is_finite(options_.memory))
            throw invalid_input("memory", "must be finite and at least 1");
        if (!(options_.doubt > 0) || !opd::detail::is_finite(options_.doubt))
            throw invalid_input("doubt", "must be finite and positive");
        seen_.resize(options_.arms.size() + 1);
    }

    /// For a step of `batch` sequences; {}: no speculation. Ties go to none, then to the first as configured.
    strategy choose(index_t batch) const {
        if (batch < 1) throw invalid_input("batch", "must be at least 1, not " + std::to_string(batch));
        strategy best;
        double most = tokens_per_second(best, batch);
        for (const strategy& s : options_.arms) {
            if (options_.most_tokens > 0 && s.verify > options_.most_tokens / batch) continue;
            if (const double v = tokens_per_second(s, batch); v > most) most = v, best = s;
        }
        return best;
    }
    /// What a step with that strategy, or with none, came to. Of a strategy that is no arm: nothing.
    void heard(const strategy& s, index_t batch, double accepted, double seconds) {
        detail::check_step(batch, accepted, seconds);
        const std::size_t at = find(s);
        if (at > options_.arms.size()) return;
        const double kept = 1 - 1 / options_.memory;
        for (seen& x : seen_) x.steps *= kept, x.accepted *= kept;
        seen& x = seen_[at];
        x.steps += 1, x.accepted += accepted;
        // a ratio is of the arm's own last steps, however long ago
        x.timed = x.timed * kept + 1, x.ratios = x.ratios * kept + seconds / profiled(s, batch);
    }
    /// Tokens a sequence gets a second, as it is predicted.
    double tokens_per_second(const strategy& s, index_t batch) const { return (accepted(s) + 1) / seconds(s, batch); }
    /// Drafted tokens that a sequence keeps, as it is predicted.
    double accepted(const strategy& s) const {
        const std::size_t at = find(s);
        if (at >= options_.arms.size()) return 0;
        const seen& x = seen_[at];
        const double all = std::min(s.depth, s.verify);
        return (x.accepted + options_.doubt * all) / (x.steps + options_.doubt);
    }
    /// Of a step, as it is predicted.
    double seconds(const strategy& s, index_t batch) const {
        const std::size_t at = find(s);
        const double ratio = at < seen_.size() && seen_[at].timed > 0 ? seen_[at].ratios / seen_[at].timed : 1;
        return ratio * profiled(s, batch);
    }
    const cost_profile_options& options() const { return options_; }

    template <class A>
    void fields(A& a) {
        const std::size_t arms = seen_.size();
        a(seen_);
        bool ours = seen_.size() == arms;
        for (const seen& x : seen_)
            ours = ours && x.steps >= 0 && x.accepted >= 0 && x.timed >= 0 && x.ratios >= 0 &&
                   (x.timed == 0 || x.ratios > 0);
        if (!ours) throw invalid_input("snapshot", "is of another profile");
    }

private:
    struct seen {
        double steps = 0, accepted = 0, timed = 0, ratios = 0;
        template <class A>
        void fields(A& a) {
            a(steps, accepted, timed, ratios);
        }
    };
    /// The arm's number; that of all arms: none; beyond: no arm.
    std::size_t find(const strategy& s) const {
        if (s.none()) return options_.arms.size();
        const auto at = std::find(options_.arms.begin(), options_.arms.end(), s);
        return at == options_.arms.end() ? options_.arms.size() + 1
                                         : static_cast<std::size_t>(at - options_.arms.begin());
    }
    double profiled(const strategy& s, index_t batch) const {
        double t = options_.target.seconds(batch * (1 + s.verify));
        if (options_.drafter && !s.none()) t += s.depth * options_.drafter->seconds(batch * s.top_k);
        return t;
    }

    cost_profile_options options_;
    std::vector<seen> seen_; // of each arm, then of none
};

} // namespace opd::spec
