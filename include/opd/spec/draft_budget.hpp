// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// How many drafted tokens each running sequence gets in a step. Sequences s = 1 … R offer nodes with gains g_s1 >=
// g_s2 >= …, the probability that a node is followed (draft_builder::gains()); each node is one row more for the
// target, and what rows cost is measured. Chosen are the K_s that maximise
//
//   Σ_s w_s (1 + Σ_{k <= K_s} g_sk) / (seconds(R + Σ K_s) + drafting),        w_s = r_s^tail / mean of r^tail
//
// r_s: the tokens that the sequence is expected to write yet. Few long sequences decide when a rollout ends, so a
// token of theirs is worth more. Nothing pays: all K are 0.
//
// Exact: for each number of rows the nodes of largest w g are the best, and all numbers are tried, so costs may have
// steps. Ties go to fewer rows, then to the earlier sequence. Pure: no clock, no chance. Time n log n in the number
// of nodes; allocates only as that grows.
//
// Source: this project (strategies by cost); TLT section 2 (the long tail is where a rollout's time is).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "opd/config.hpp"
#include "opd/element.hpp"
#include "opd/error.hpp"

namespace opd::spec {

/// Seconds of a step by how many rows the target computes: straight lines between points that were measured, before
/// the first its value, beyond the last the slope of the last line, if it rises.
class step_cost {
public:
    struct point {
        index_t rows = 0;
        double seconds = 0;
        template <class A>
        void fields(A& a) {
            a(rows, seconds);
        }
    };
    explicit step_cost(std::vector<point> points) : points_(std::move(points)) { check(); }
    /// a + b·rows
    static step_cost line(double a, double b) { return step_cost({{0, a}, {1, a + b}}); }

    double seconds(index_t rows) const {
        const auto above = std::upper_bound(points_.begin(), points_.end(), rows,
                                            [](index_t r, const point& p) { return r < p.rows; });
        if (above == points_.begin()) return points_.front().seconds;
        if (points_.size() == 1) return points_.front().seconds;
        const bool beyond = above == points_.end();
        const point &a = beyond ? above[-2] : above[-1], &b = beyond ? above[-1] : above[0];
        const double slope = (b.seconds - a.seconds) / static_cast<double>(b.rows - a.rows);
        if (beyond) return b.seconds + std::max(slope, 0.0) * static_cast<double>(rows - b.rows);
        return a.seconds + slope * static_cast<double>(rows - a.rows);
    }
    std::span<const point> points() const { return points_; }

    template <class A>
    void fields(A& a) {
        a(points_);
        check();
    }

private:
    void check() const {
        if (points_.empty()) throw invalid_input("points", "there is none");
        for (std::size_t i = 0; i < points_.size(); ++i) {
            if (points_[i].rows < 0 || (i > 0 && points_[i].rows <= points_[i - 1].rows))
                throw invalid_input("points", "rows are at least 0 and rise", static_cast<index_t>(i));
            if (!(points_[i].seconds > 0) || !opd::detail::is_finite(points_[i].seconds))
                throw invalid_input("points", "seconds are finite and positive", static_cast<index_t>(i));
        }
    }
    std::vector<point> points_;
};

/// One running sequence: what its drafts promise, and how much it still has to write.
struct draft_candidate {
    std::span<const double> gains; ///< of its nodes, falling; none: it drafts nothing
    double remaining = 1;          ///< tokens that it is expected to write yet; positive
};

/// Weights and costs of the choice; seconds as those of `step_cost`.
struct budget_options {
    double tail = 1;             ///< how much long sequences count for; 0: all alike
    index_t most_rows = 0;       ///< of the target in a step, sequences and drafts; 0: no limit
    double draft_seconds = 0;    ///< what drafting costs a step where anything is drafted
    double seconds_per_node = 0; ///< and for each node that is verified
};

/// Keeps the memory of its last call; results do not depend on earlier ones.
class draft_budget {
public:
    /// K of each sequence, (R). Valid until the next call.
    std::span<const index_t> share(std::span<const draft_candidate> sequences, const step_cost& cost,
                                   const budget_options& o = {});

    /// Of the last call: tokens, weighted, a second.
    double value() const { return value_; }

private:
    struct offer {
        double gain; // weighted
        index_t sequence;
    };
    std::vector<double> weight_;
    std::vector<offer> offers_;
    std::vector<index_t> shares_;
    double value_ = 0;
};

// --- implementation -------------------------------------------------------------------------------------------------

inline std::span<const index_t> draft_budget::share(std::span<const draft_candidate> sequences, const step_cost& cost,
                                                    const budget_options& o) {
    const auto finite = [](double x) { return opd::detail::is_finite(x); };
    if (!(o.tail >= 0) || !finite(o.tail)) throw invalid_input("tail", "must be finite and at least 0");
    if (o.most_rows < 0) throw invalid_input("most_rows", "must be at least 0");
    if (!(o.draft_seconds >= 0) || !finite(o.draft_seconds))
        throw invalid_input("draft_seconds", "must be finite and at least 0");
    if (!(o.seconds_per_node >= 0) || !finite(o.seconds_per_node))
        throw invalid_input("seconds_per_node", "must be finite and at least 0");
    double longest = 0;
    for (std::size_t s = 0; s < sequences.size(); ++s) {
        const draft_candidate& c = sequences[s];
        if (!(c.remaining > 0) || !finite(c.remaining))
            throw invalid_input("remaining", "must be finite and positive", static_cast<index_t>(s));
        longest = std::max(longest, c.remaining);
        for (std::size_t k = 0; k < c.gains.size(); ++k)
            if (!finite(c.gains[k]) || !(c.gains[k] >= 0 && c.gains[k] <= (k > 0 ? c.gains[k - 1] : 1)))
                throw invalid_input("gains", "must lie in [0, 1] and fall", static_cast<index_t>(s));
    }
    const std::size_t n = sequences.size();
    shares_.assign(n, 0), weight_.clear(), offers_.clear();
    value_ = 0;
    if (n == 0) return shares_;
    double sum = 0;
    for (const draft_candidate& c : sequences) {
        weight_.push_back(std::pow(c.remaining / longest, o.tail));
        sum += weight_.back();
    }
    for (std::size_t s = 0; s < n; ++s) {
        weight_[s] *= static_cast<double>(n) / sum;
        for (const double g : sequences[s].gains) offers_.push_back({weight_[s] * g, static_cast<index_t>(s)});
    }
    // a sequence's own offers fall and stand together, so the first k of them are its best k nodes
    std::sort(offers_.begin(), offers_.end(), [](const offer& a, const offer& b) {
        return a.gain > b.gain || (a.gain == b.gain && a.sequence < b.sequence);
    });
    const auto rows = static_cast<index_t>(n);
    auto most = static_cast<index_t>(offers_.size());
    if (o.most_rows > 0) most = std::clamp(o.most_rows - rows, index_t{0}, most);
    double tokens = static_cast<double>(n);
    value_ = tokens / cost.seconds(rows);
    index_t best = 0;
    for (index_t k = 1; k <= most; ++k) {
        tokens += offers_[static_cast<std::size_t>(k - 1)].gain;
        const double seconds = cost.seconds(rows + k) + o.draft_seconds + o.seconds_per_node * static_cast<double>(k);
        if (const double v = tokens / seconds; v > value_) value_ = v, best = k;
    }
    for (index_t k = 0; k < best; ++k)
        ++shares_[static_cast<std::size_t>(offers_[static_cast<std::size_t>(k)].sequence)];
    return shares_;
}

} // namespace opd::spec
