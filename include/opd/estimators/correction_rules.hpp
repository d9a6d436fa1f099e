// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Corrections as data: what a trainer does about the mismatch of its rollout, as one aggregate of numbers and names
// that runs, prints itself and says what it descends. The static wrappers, their formulas and notation are
// corrections.hpp's; the trainers' presets are correction_presets.hpp's.
//
//   c_s = w · 1[every rejection passes] · S(r) (+ tau log² r_rollout)
//
//     r   by .old:         r_train (recompute) or r_rollout (bypass)
//     w   by .weight:      1, or a ratio within [low, high]: at the bound beyond it, or 0 (beyond::zero)
//     .reject:             low <= statistic <= high, or the token, or its whole sequence, adds nothing
//
// Levels (correction_level):
//
//   token            of the token itself
//   sum              Σ_t over the sequence's kept tokens; of statistic::ratio their product, e^Σ log r
//   mean             Σ_t / length; of statistic::ratio the geometric mean
//   greatest, least  over the sequence's tokens; a veto on one token is {.at = correction_level::least, .low = 1e-4}
//
// Where tokens alone decide, `corrected{c, S}` is a surrogate and the call one pass. Where a sequence decides
// (c.needs_pass()) or rejected tokens leave the count (c.shrinks), a pass over the whole batch, correction_fit.hpp,
// comes first, and c.passed = true says so.
//
// Sequences are of one drawn token a row. Source: VeXact eq. 6-7, 8-11; verl, TRL, slime: correction_presets.hpp.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <type_traits>

#include "opd/config.hpp"
#include "opd/element.hpp"
#include "opd/error.hpp"
#include "opd/estimators/corrections.hpp"
#include "opd/estimators/k_forms.hpp"
#include "opd/estimators/surrogates.hpp"
#include "opd/token.hpp"
#include "opd/traits.hpp"

namespace opd {

/// Whose probability the surrogate's ratio is over. VeXact eq. 4.
enum class old_policy { bypass, recompute };
/// p_old/mu, p/mu, p/p_old.
enum class ratio_of { corr, rollout, train };
/// Over what r is taken: each token alone; its sequence's Σ log r, the mean of log r (length-normalised), its greatest
/// or its least token.
enum class correction_level { none, token, sum, mean, greatest, least };
/// r itself, -log r, ½ log² r, r - 1 - log r.
enum class statistic { ratio, k1, k2, k3 };
/// What a weight beyond its bounds becomes: the bound, or 0.
enum class beyond { clamp, zero };
/// The surrogate that a trainer's preset is of.
enum class correction_loss { ppo_clip, score_function, unclipped_is };

namespace detail {
inline constexpr double no_bound = std::numeric_limits<double>::max();

OPD_HD OPD_INLINE double log_ratio_of_token(const token_in& x, ratio_of of) {
    const double d = of == ratio_of::corr      ? x.log_prox - x.log_mu
                     : of == ratio_of::rollout ? x.log_p - x.log_mu
                                               : x.log_p - x.log_prox;
    return within_80(d);
}
/// A statistic of one ratio from its logarithm; of statistic::ratio the logarithm, which is what sequences add up.
OPD_HD OPD_INLINE double summand(statistic s, double log_r) {
    switch (s) {
    case statistic::k1:
        return k1::value(log_r);
    case statistic::k2:
        return k2::value(log_r);
    case statistic::k3:
        return k3::value(log_r);
    default:
        return log_r;
    }
}
/// The statistic from what was added up.
OPD_HD OPD_INLINE double of_summand(statistic s, double sum) {
    return s == statistic::ratio ? ::exp(within_80(sum)) : sum;
}
} // namespace detail

/// An importance weight, held constant. correction_level::none: 1.
struct correction_weight {
    correction_level at = correction_level::none; ///< token, sum or mean
    ratio_of of = ratio_of::corr;
    double low = 0, high = detail::no_bound; ///< bounds of the ratio
    beyond outside = beyond::clamp;
};

/// What a token or sequence must pass to count. correction_level::none: nothing.
struct rejection {
    correction_level at = correction_level::none;
    statistic by = statistic::ratio;
    ratio_of of = ratio_of::corr;
    double low = -detail::no_bound, high = detail::no_bound; ///< of the statistic: a ratio, or nats
};

/// A correction: an aggregate of plain numbers. See the head of this file.
struct correction {
    bool active = false; ///< false: the surrogate as it is
    old_policy old = old_policy::bypass;
    correction_weight weight = {};
    rejection reject[2] = {};
    bool shrinks = false; ///< what is rejected leaves the count that the loss is divided by, too
    double tv_low = detail::no_bound, tv_high = detail::no_bound; ///< within_tv
    double anchor = 0;                                            ///< anchored: tau
    bool passed = false;                                          ///< set by who filled env.frozen from correction_fit

    OPD_HD constexpr bool of_sequences() const {
        const bool w = weight.at != correction_level::none && weight.at != correction_level::token;
        return w || whole(reject[0]) || whole(reject[1]);
    }
    /// Whether a pass over the whole batch must come first.
    OPD_HD constexpr bool needs_pass() const { return active && (of_sequences() || (shrinks && rejects())); }
    OPD_HD constexpr bool rejects() const {
        return reject[0].at != correction_level::none || reject[1].at != correction_level::none;
    }
    OPD_HD constexpr unsigned reads_columns() const {
        bool prox =
            old == old_policy::recompute || (weight.at != correction_level::none && weight.of != ratio_of::rollout);
        for (const rejection& r : reject) prox = prox || (r.at != correction_level::none && r.of != ratio_of::rollout);
        return active && prox ? column::log_prox : 0;
    }

    /// Loss and c of a token under a surrogate: the formula of the head, but for what sequences decide.
    OPD_CALLS_EITHER
    template <class S>
    OPD_HD token_out apply(const token_in& x, const S& surrogate) const {
        if (!active) return surrogate(x);
        return finish(x, surrogate(old == old_policy::recompute ? detail::against_old(x) : x));
    }
    /// `apply` where the surrogate's loss is known, of the token as it sees it.
    OPD_HD token_out finish(const token_in& x, token_out out) const {
        if (old == old_policy::recompute) out.flags |= detail::old_flags(x);
        if (weight.at == correction_level::token)
            out = detail::weighted_token(out, raw_log_ratio(x, weight.of), weight.low, weight.high,
                                         weight.outside == beyond::zero);
        if (!keeps(x, reject[0]) || !keeps(x, reject[1]) || (limits_tv() && !detail::inside_tv(x, tv_low, tv_high)))
            out = {0, 0, token_flag::masked};
        return anchor > 0 ? detail::anchored_token(out, x.log_ratio, anchor) : out;
    }
    /// Whether a token passes a rejection that is about tokens.
    OPD_HD static bool keeps(const token_in& x, const rejection& r) {
        if (r.at != correction_level::token) return true;
        const double k = detail::of_summand(r.by, detail::summand(r.by, detail::log_ratio_of_token(x, r.of)));
        return k >= r.low && k <= r.high;
    }
    OPD_HD constexpr bool limits_tv() const { return tv_low < detail::no_bound || tv_high < detail::no_bound; }

    /// What becomes of a surrogate's traits: `has_ratio`, it weights by p over the old policy itself.
    constexpr estimator_traits traits_under(law drawn, estimator_traits s, bool has_ratio) const {
        if (!active) return s;
        if (anchor > 0) return {bias::biased, meaning::surrogate, false, descent::other};
        const bool weighted = weight.at != correction_level::none;
        if (drawn == law::on_policy || s.descends == descent::none)
            return weighted || rejects() || limits_tv() ? cut(s) : s;
        // the measure that the draws have, times w, times the surrogate's own ratio, is p's
        const bool by_old = weighted && weight.of == ratio_of::corr, by_p = weighted && weight.of == ratio_of::rollout;
        const bool right = has_ratio ? (old == old_policy::recompute ? by_old : !weighted) : by_p;
        return right ? cut({bias::biased, meaning::surrogate, true, descent::divergence}) : detail::other_traits;
    }

    /// Throws invalid_input for bounds that are none, a level that a weight or rejection does not have, and for a
    /// correction of sequences whose pass was not made.
    void validate() const {
        if (!active) return;
        if (weight.at == correction_level::greatest || weight.at == correction_level::least)
            throw invalid_input("correction.weight", "is of a token, or of a sequence's sum or mean");
        if (weight.at != correction_level::none) detail::check_ratio_band("correction.weight", weight.low, weight.high);
        for (const rejection& r : reject)
            if (r.at != correction_level::none) detail::check_band("correction.reject", r.low, r.high);
        if (limits_tv()) detail::check_band("correction.tv", -tv_low, tv_high);
        if (!detail::is_finite(anchor) || !(anchor >= 0))
            throw invalid_input("correction.anchor", "must be finite and at least 0");
        if (needs_pass() && !passed)
            throw invalid_input("correction", "decides over sequences or the count: fill env.frozen from "
                                              "correction_fit and set .passed");
    }

private:
    OPD_HD static constexpr bool whole(const rejection& r) {
        return r.at != correction_level::none && r.at != correction_level::token;
    }
    OPD_HD static double raw_log_ratio(const token_in& x, ratio_of of) {
        return of == ratio_of::corr      ? x.log_prox - x.log_mu
               : of == ratio_of::rollout ? x.log_p - x.log_mu
                                         : x.log_p - x.log_prox;
    }
    static constexpr estimator_traits cut(estimator_traits s) {
        s.mean = bias::biased, s.value = meaning::surrogate;
        return s;
    }
};

/// A surrogate under a correction that is chosen at run time. What it descends the type cannot say: `validate`
/// refuses what descends something else than the surrogate on stale tokens, unless accept_bias.
template <class S = ppo_clip>
struct corrected {
    correction by = {};
    S surrogate = {};
    bool accept_bias = false;
    static constexpr bool has_ratio = !std::is_same_v<S, score_function>;
    static constexpr estimator_traits traits(law) { return detail::cut_traits; }
    OPD_HD constexpr unsigned reads_columns() const { return by.reads_columns() | detail::columns_of(surrogate); }
    OPD_HD token_out operator()(const token_in& x) const { return by.apply(x, surrogate); }
    void validate() const {
        by.validate();
        if constexpr (requires { surrogate.validate(); }) surrogate.validate();
        if (!accept_bias && by.traits_under(law::stale, traits_of<S>(law::stale), has_ratio).descends == descent::other)
            throw invalid_input("corrected", "this correction leaves its tokens without the ratio of p to the policy "
                                             "that drew them, or has it twice, so that it descends something else; "
                                             "set accept_bias");
    }
};
template <class S>
corrected(correction, S) -> corrected<S>;
template <class S>
corrected(correction, S, bool) -> corrected<S>;

} // namespace opd
