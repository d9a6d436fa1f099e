// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A chooser of strategies (tuner.hpp) whose arms learn from each other: how often nodes are followed, by depth and by
// rank (follow_rates), says of every arm what it would bring. At a batch of B it takes the arm with the largest
//
//   r · max_k (1 + G_k) / seconds(B (1 + k), arm),         k = 1 … verify
//
// G_k      the sum of the k largest reaches of the tree that draft_builder::imagine(depth, top_k) has
// seconds  of a step by the target's rows and what the drafter computes for the arm: the caller's, measured
// r        what turns of the arm at batches of this size (1, 2 and 3, 4 to 7, …) came to over that prediction: their
//          mean, in which the mean over all arms at such batches is worth `doubt` turns, and in that 1 one turn. Old
//          turns fade, `memory` of any arm count
//
// An arm that was not heard of at all is tried where it is predicted at least `near` times the best; every `again`
// choices the one of these that was heard of longest ago. No chance: equal turns give equal choices.
//
// Why: with one sequence, what eight steps keep varies by a sixth. A bandit whose arms know of their own rewards alone
// needs hundreds of turns to tell arms apart that differ by a tenth, and leaves the better one for a long time where
// its first turns were poor. Here every turn of a chain of 8 counts for a chain of 5.
//
// Among arms: whether any node pays says draft_budget, and whether to draft at all elastic_switch.
// Source: this project (strategies by measured costs).
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "opd/config.hpp"
#include "opd/element.hpp"
#include "opd/error.hpp"
#include "opd/spec/draft_tree.hpp"
#include "opd/spec/tuner.hpp"

namespace opd::spec {

/// What rate_tuner chooses among, and how long it remembers.
struct rate_tuner_options {
    std::vector<strategy> arms = {{8, 1, 8}, {5, 1, 5}, {3, 1, 3},  {2, 1, 2},
                                  {1, 1, 1}, {5, 2, 8}, {8, 2, 12}, {8, 4, 16}};
    double memory = 64;      ///< turns that count; at least 1
    double doubt = 8;        ///< turns that the mean over all arms is worth to one; positive
    double near = 0.8;       ///< in (0, 1]
    std::int32_t again = 32; ///< at least 1
};

/// Chooses a strategy for each turn by the rates of nodes and the caller's costs (formula: above). Throws invalid_input
/// that names the option which is out of its range. One thread's.
class rate_tuner {
public:
    explicit rate_tuner(rate_tuner_options o = {}) : options_(std::move(o)) {
        detail::check_arms(options_.arms);
        const auto positive = [](double x) { return x > 0 && opd::detail::is_finite(x); };
        if (!(options_.memory >= 1) || !opd::detail::is_finite(options_.memory))
            throw invalid_input("memory", "must be finite and at least 1");
        if (!positive(options_.doubt)) throw invalid_input("doubt", "must be finite and positive");
        if (!(options_.near > 0 && options_.near <= 1)) throw invalid_input("near", "must lie in (0, 1]");
        if (options_.again < 1) throw invalid_input("again", "must be at least 1");
        seen_.resize(options_.arms.size());
        values_.reserve(options_.arms.size());
    }

    /// For a turn at `batch` sequences. seconds(rows, strategy): of a step, positive. Ties go to the first arm as
    /// configured.
    template <class Seconds>
    strategy choose(index_t batch, const follow_rates& rates, Seconds&& seconds) {
        values_.clear();
        for (const strategy& s : options_.arms) values_.push_back(tokens_per_second(s, batch, rates, seconds));
        const auto best = static_cast<std::size_t>(std::max_element(values_.begin(), values_.end()) - values_.begin());
        ++choices_;
        std::size_t look = best;
        const bool due = choices_ % options_.again == 0;
        for (std::size_t i = 0; i < seen_.size(); ++i) {
            if (i == best || values_[i] < options_.near * values_[best]) continue;
            if (seen_[i].last == 0 ? seen_[best].last > 0 : due && (look == best || seen_[i].last < seen_[look].last)) {
                look = i;
                if (seen_[i].last == 0) break;
            }
        }
        return options_.arms[look];
    }
    /// What a turn of the strategy came to: drafted tokens that a sequence kept of a step in the mean, and seconds of a
    /// step. Of a strategy that is no arm: nothing.
    template <class Seconds>
    void heard(const strategy& s, index_t batch, double accepted, double seconds, const follow_rates& rates,
               Seconds&& predicted) {
        detail::check_step(batch, accepted, seconds);
        const std::size_t at = find(s);
        if (at == options_.arms.size()) return;
        const double ratio = (accepted + 1) / seconds / by_rates(s, batch, rates, predicted),
                     kept = 1 - 1 / options_.memory;
        for (seen& x : seen_)
            for (sums& y : x.at) y.turns *= kept, y.ratios *= kept;
        sums& x = seen_[at].at[size_of(batch)];
        x.turns += 1, x.ratios += ratio;
        seen_[at].last = choices_ + 1;
    }
    /// Tokens a second that a sequence gets, as it is predicted.
    template <class Seconds>
    double tokens_per_second(const strategy& s, index_t batch, const follow_rates& rates, Seconds&& seconds) {
        const std::size_t size = size_of(batch), at = find(s);
        sums all{1, 1};
        for (const seen& x : seen_) all.turns += x.at[size].turns, all.ratios += x.at[size].ratios;
        const double usual = all.ratios / all.turns;
        const sums own = at < seen_.size() ? seen_[at].at[size] : sums{};
        return (own.ratios + options_.doubt * usual) / (own.turns + options_.doubt) *
               by_rates(s, batch, rates, seconds);
    }
    /// The same of the arm of which most is predicted: what drafter_selector compares.
    template <class Seconds>
    double best_rate(index_t batch, const follow_rates& rates, Seconds&& seconds) {
        double most = 0;
        for (const strategy& s : options_.arms) most = std::max(most, tokens_per_second(s, batch, rates, seconds));
        return most;
    }
    const rate_tuner_options& options() const { return options_; }

    template <class A>
    void fields(A& a) {
        const std::size_t arms = seen_.size();
        a(seen_, choices_);
        bool ours = seen_.size() == arms && choices_ >= 0;
        for (const seen& x : seen_) {
            ours = ours && x.at.size() == sizes && x.last >= 0 && x.last <= choices_ + 1;
            for (const sums& y : x.at) ours = ours && y.turns >= 0 && y.ratios >= 0;
        }
        if (!ours) throw invalid_input("snapshot", "is of other arms");
    }

private:
    static constexpr std::size_t sizes = 16; // of batches; the last one from 2^15 on
    struct sums {
        double turns = 0, ratios = 0;
        template <class A>
        void fields(A& a) {
            a(turns, ratios);
        }
    };
    struct seen {
        std::vector<sums> at = std::vector<sums>(sizes);
        std::int64_t last = 0; // choice after which it was heard of, from 1; 0: never
        template <class A>
        void fields(A& a) {
            a(at, last);
        }
    };
    static std::size_t size_of(index_t batch) {
        if (batch < 1) throw invalid_input("batch", "must be at least 1, not " + std::to_string(batch));
        return std::min(static_cast<std::size_t>(std::bit_width(static_cast<std::uint64_t>(batch))) - 1, sizes - 1);
    }
    std::size_t find(const strategy& s) const {
        return static_cast<std::size_t>(std::find(options_.arms.begin(), options_.arms.end(), s) -
                                        options_.arms.begin());
    }
    template <class Seconds>
    double by_rates(const strategy& s, index_t batch, const follow_rates& rates, Seconds& seconds) {
        tree_.begin(rates);
        tree_.imagine(s.depth, s.top_k);
        double tokens = 1, most = 0;
        index_t k = 0;
        for (const double gain : tree_.gains()) {
            if (++k > s.verify) break;
            tokens += gain;
            most = std::max(most, tokens / static_cast<double>(seconds(batch * (1 + k), s)));
        }
        return most;
    }

    rate_tuner_options options_;
    std::vector<seen> seen_; // by arm
    std::int64_t choices_ = 0;
    draft_builder tree_;
    std::vector<double> values_;
};

} // namespace opd::spec
