// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Which drafter drafts: of those that exist the one with the largest predicted tokens a second a sequence,
//
//   (accepted + 1) / seconds
//
// accepted: of the drafter's steps at any batch, seconds: of those at batches of this size (1, 2 and 3, 4 to 7, …);
// old steps fade, `memory` of them count. Ties go to the first; so number 0 should be what always exists and costs
// nothing, retrieval.
//
// A drafter that has not been heard of at batches of this size drafts `tries` steps of them. One that was passed over
// again·min(16, (best/its)²) times in a row drafts once, so that it is noticed when it has become better: the fewer
// tokens a second are predicted of it, the more such a step costs and the less likely it is the best. Neither is left
// to chance: equal steps give equal choices.
//
// Source: this project (retrieval until the learned drafter exists, and whenever its predicted tokens a second are
// more).
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <vector>

#include "opd/config.hpp"
#include "opd/element.hpp"
#include "opd/error.hpp"
#include "opd/spec/tuner.hpp"

namespace opd::spec {

/// How long steps are remembered, and how often drafters that look worse are tried again.
struct drafter_selector_options {
    index_t drafters = 2;     ///< at least 1
    double memory = 100;      ///< steps that count; at least 1
    std::int32_t tries = 3;   ///< at least 1
    std::int32_t again = 200; ///< of one nearly as good as the best; at least 1
};

/// Chooses among drafters 0 … drafters - 1. No random numbers.
class drafter_selector {
public:
    explicit drafter_selector(const drafter_selector_options& o = {}) : options_(o) {
        if (o.drafters < 1) throw invalid_input("drafters", "must be at least 1");
        if (!(o.memory >= 1) || !opd::detail::is_finite(o.memory))
            throw invalid_input("memory", "must be finite and at least 1");
        if (o.tries < 1) throw invalid_input("tries", "must be at least 1");
        if (o.again < 1) throw invalid_input("again", "must be at least 1");
        drafters_.resize(static_cast<std::size_t>(o.drafters));
        drafters_[0].exists = true;
    }

    /// Number 0 exists from the beginning. What was known of one that comes anew (trained again from nothing) is
    /// forgotten.
    void exists(index_t drafter, bool now) {
        known& d = at(drafter);
        if (now && !d.exists) d = {};
        d.exists = now;
    }
    bool exists(index_t drafter) const { return const_cast<drafter_selector*>(this)->at(drafter).exists; }

    /// For a step of `batch` sequences; the drafter's number. At least one must exist.
    index_t choose(index_t batch) {
        const std::size_t size = size_of(batch);
        predicted_.clear();
        std::size_t due = drafters_.size();
        for (std::size_t d = 0; d < drafters_.size(); ++d) {
            if (drafters_[d].exists && due == drafters_.size() && drafters_[d].at[size].heard < options_.tries) due = d;
            predicted_.push_back(predicted(static_cast<index_t>(d), batch));
        }
        return chosen(predicted_, due);
    }
    /// By predictions of the caller's own, (drafters): tokens a second of each, positive; of one that does not exist it
    /// is not looked at. Nothing need be heard, and none is tried but as one that was passed over. Throws invalid_input
    /// that names `rates` and the drafter.
    index_t choose(std::span<const double> rates) {
        if (rates.size() != drafters_.size()) throw invalid_input("rates", "must be one of each drafter");
        for (std::size_t d = 0; d < rates.size(); ++d)
            if (drafters_[d].exists && !(rates[d] > 0 && opd::detail::is_finite(rates[d])))
                throw invalid_input("rates", "must be finite and positive", static_cast<index_t>(d));
        return chosen(rates, drafters_.size());
    }
    /// What a step with that drafter came to.
    void heard(index_t drafter, index_t batch, double accepted, double seconds) {
        detail::check_step(batch, accepted, seconds);
        known& d = at(drafter);
        const double kept = 1 - 1 / options_.memory;
        d.steps = d.steps * kept + 1, d.accepted = d.accepted * kept + accepted;
        timing& t = d.at[size_of(batch)];
        t.steps = t.steps * kept + 1, t.seconds = t.seconds * kept + seconds;
        t.heard = std::min(t.heard + 1, options_.tries);
    }
    /// Tokens a second that a sequence gets; 0: it was not heard of at such batches.
    double predicted(index_t drafter, index_t batch) const {
        const known& d = const_cast<drafter_selector*>(this)->at(drafter);
        const timing& t = d.at[size_of(batch)];
        return t.steps > 0 ? (d.accepted / d.steps + 1) / (t.seconds / t.steps) : 0;
    }
    const drafter_selector_options& options() const { return options_; }

    template <class A>
    void fields(A& a) {
        a(drafters_);
        bool ours = drafters_.size() == static_cast<std::size_t>(options_.drafters);
        for (const known& d : drafters_) {
            ours = ours && d.at.size() == sizes && d.steps >= 0 && d.accepted >= 0 && d.passed_over >= 0 &&
                   d.passed_over <= most_passed_over();
            for (const timing& t : d.at)
                ours = ours && t.steps >= 0 && t.seconds >= 0 && t.heard >= 0 && t.heard <= options_.tries &&
                       (t.steps == 0 || (t.seconds > 0 && d.steps > 0));
        }
        if (!ours) throw invalid_input("snapshot", "is of other drafters");
    }

private:
    static constexpr std::size_t sizes = 16; // of batches; the last one from 2^15 on
    struct timing {
        double steps = 0, seconds = 0;
        std::int32_t heard = 0;
        template <class A>
        void fields(A& a) {
            a(steps, seconds, heard);
        }
    };
    struct known {
        bool exists = false;
        double steps = 0, accepted = 0;
        std::int32_t passed_over = 0; // times in a row
        std::vector<timing> at = std::vector<timing>(sizes);
        template <class A>
        void fields(A& a) {
            a(exists, steps, accepted, passed_over, at);
        }
    };
    static constexpr std::int32_t most_longer = 16;
    std::int32_t most_passed_over() const {
        return std::min(options_.again, std::numeric_limits<std::int32_t>::max() / most_longer) * most_longer;
    }
    // The drafter `due`, if there is such a number, else one that is to be looked at again, else the best.
    index_t chosen(std::span<const double> rates, std::size_t due) {
        std::size_t best = drafters_.size();
        for (std::size_t d = 0; d < drafters_.size(); ++d)
            if (drafters_[d].exists && (best == drafters_.size() || rates[d] > rates[best])) best = d;
        if (best == drafters_.size()) throw invalid_input("drafters", "none exists");
        for (std::size_t d = 0; d < drafters_.size() && due == drafters_.size(); ++d)
            if (drafters_[d].exists && looks_again(drafters_[d], rates[best] / rates[d])) due = d;
        if (due != drafters_.size()) best = due;
        for (std::size_t d = 0; d < drafters_.size(); ++d)
            drafters_[d].passed_over =
                d == best || !drafters_[d].exists ? 0 : std::min(drafters_[d].passed_over + 1, most_passed_over());
        return static_cast<index_t>(best);
    }
    /// Of one that is not the best: `ratio` of the best's predicted tokens a second to its own.
    bool looks_again(const known& d, double ratio) const {
        const double after = options_.again * std::min<double>(most_longer, ratio * ratio);
        return d.passed_over >= std::min<double>(after, most_passed_over());
    }
    static std::size_t size_of(index_t batch) {
        if (batch < 1) throw invalid_input("batch", "must be at least 1, not " + std::to_string(batch));
        return std::min(static_cast<std::size_t>(std::bit_width(static_cast<std::uint64_t>(batch))) - 1, sizes - 1);
    }
    known& at(index_t drafter) {
        if (drafter < 0 || drafter >= options_.drafters)
            throw invalid_input("drafter", "there is no drafter " + std::to_string(drafter));
        return drafters_[static_cast<std::size_t>(drafter)];
    }

    drafter_selector_options options_;
    std::vector<known> drafters_;
    std::vector<double> predicted_;
};

} // namespace opd::spec
