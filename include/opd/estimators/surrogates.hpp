// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Surrogates: scalar functions that turn the log-probs of one sampled action into its loss and c = dL/dlog p. A
// surrogate is one function, `token_out operator()(const token_in&) const`, for host and device. The sampled estimators
// weight its results and do the pullback. rho = p/mu; sg: held constant; clip(r) = r within [1-low, 1+high].
//
//                    loss                                          c
//   unclipped_is     -rho A                                        -rho A
//   score_function   -A log p                                      -A
//   truncated_is     -sg(min(rho, cap)) A log p                    -min(rho, cap) A              CISPO of TRL and Liger
//   cispo            -sg(clip(rho)) A log p                        -clip(rho) A                  CISPO of verl
//   ppo_clip         -min(rho A, clip(rho) A)                      0 where clipped, else -rho A  Schulman et al. 2017
//     dual d > 0     where A < 0: -max(that min, d A)              0 where rho > d, too          Ye et al. 2020
//   decoupled_ppo    -sg(w) min(u A, clip(u) A)                    0 where clipped, else -w u A  AReaL; TIS: .cap
//                    u = p/p_prox, w = p_prox/mu
//   a3po             the same, log p_prox = log mu / s + (1 - 1/s) log p                         A-3PO
//                    s: the token's staleness, at least 1
//   gspo             -min(s A, clip(s) A)                          0 where clipped, else -s A    GSPO
//                    s = exp(sequence_log_ratio)
//   estr{τ, ε, S}    S where δ²/(H_mu + ε) ≤ τ, else 0             likewise; δ = log p - log mu
//   differentiated<k, ratio>   k(q/p), times sg(rho) if `ratio`    its slope: k_forms.hpp; it has no advantage
//
// In every clip the inequality is strict: at a ratio exactly on a bound the gradient flows. Ratios saturate at e^±80,
// counted.
//
// What they descend: unclipped_is with advantage::theta descends KL(p‖q) at the visited prefix, for any mu (AsyncOPD
// eq. 6-7, 15). Surrogates that cut or clip descend the same less what they cut. score_function is Lightning OPD's
// objective (eq. 4): right on the student's own tokens; on stale tokens it descends something else and needs
// accept_bias. The paper of ESTR (arXiv 2607.22186) was not read: the formula comes from a summary, and so ESTR has no
// defaults.
//
// gspo: an earlier pass computes the ratio of a sequence (env.frozen.sequence_log_ratio, gspo_fit), and
// reduce::sequence_mean applies 1/length, once. With env.frozen.advantage = the sequence's mean advantage this is GSPO;
// with each token's own advantage, the default here, it is GSPO's token form.
#pragma once

#include <cmath>

#include "opd/config.hpp"
#include "opd/element.hpp"
#include "opd/entries.hpp"
#include "opd/error.hpp"
#include "opd/estimators/k_forms.hpp"
#include "opd/token.hpp"
#include "opd/traits.hpp"

namespace opd {

namespace detail {

/// A ratio from its logarithm, which saturates at ±80.
struct saturated_ratio {
    double value;
    unsigned flags;
    OPD_HD OPD_INLINE explicit saturated_ratio(double log_ratio)
        : value(::exp(within_80(log_ratio))), flags(log_ratio == within_80(log_ratio) ? 0 : token_flag::saturated) {}
};

/// -min(r A, clip(r) A); with dual > 0 and A < 0 no less than dual A.
OPD_HD OPD_INLINE token_out clipped_surrogate(double r, double a, double low, double high, double dual = 0) {
    if (a > 0 && r > 1 + high) return {-(1 + high) * a, 0, token_flag::clipped};
    if (a < 0 && r < 1 - low) return {-(1 - low) * a, 0, token_flag::clipped};
    if (a < 0 && dual > 0 && r > dual) return {-dual * a, 0, token_flag::clipped};
    return {-r * a, -r * a};
}

OPD_INLINE void check_clip(const char* name, double low, double high) {
    if (!is_finite(low) || !(low >= 0 && low <= 1)) throw invalid_input(name, "low must lie in [0, 1]");
    if (!is_finite(high) || !(high >= 0)) throw invalid_input(name, "high must be finite and at least 0");
}

/// Traits of what follows the direction of its advantage less what it cuts.
inline constexpr estimator_traits cut_traits{bias::biased, meaning::surrogate, true, descent::divergence};

} // namespace detail

/// -rho A
struct unclipped_is {
    static constexpr estimator_traits traits(law) { return {}; }
    OPD_HD OPD_INLINE token_out operator()(const token_in& x) const {
        const double rho = ::exp(x.log_ratio);
        return {-rho * x.advantage, -rho * x.advantage};
    }
};

/// -A log p
struct score_function {
    static constexpr estimator_traits traits(law drawn) {
        if (drawn == law::on_policy) return {.value = meaning::surrogate};
        return {bias::biased, meaning::surrogate, true, descent::other};
    }
    OPD_HD OPD_INLINE token_out operator()(const token_in& x) const { return {-x.advantage * x.log_p, -x.advantage}; }
};

/// -min(rho, cap) A log p
struct truncated_is {
    double cap = 2; ///< on rho, a raw ratio
    static constexpr estimator_traits traits(law) { return detail::cut_traits; }
    OPD_HD OPD_INLINE token_out operator()(const token_in& x) const {
        const double rho = ::exp(x.log_ratio);
        const bool cut = rho > cap;
        const double k = -(cut ? cap : rho) * x.advantage;
        return {k * x.log_p, k, cut ? token_flag::truncated : 0};
    }
    OPD_INLINE void validate() const {
        if (!detail::is_finite(cap) || !(cap > 0))
            throw invalid_input("truncated_is.cap", "must be positive and finite");
    }
};

/// -clip(rho) A log p
struct cispo {
    double low = 0.2;  ///< rho is held at 1 - low at least
    double high = 0.2; ///< and at 1 + high at most
    static constexpr estimator_traits traits(law) { return detail::cut_traits; }
    OPD_HD OPD_INLINE token_out operator()(const token_in& x) const {
        const double rho = ::exp(x.log_ratio), k = rho < 1 - low ? 1 - low : (rho > 1 + high ? 1 + high : rho);
        return {-k * x.advantage * x.log_p, -k * x.advantage, k == rho ? 0 : token_flag::truncated};
    }
    OPD_INLINE void validate() const { detail::check_clip("cispo", low, high); }
};

/// -min(rho A, clip(rho) A)
struct ppo_clip {
    double low = 0.2;  ///< clips at 1 - low
    double high = 0.2; ///< and at 1 + high
    double dual = 0;   ///< 0: none, else above 1 + high
    static constexpr estimator_traits traits(law) { return detail::cut_traits; }
    OPD_HD OPD_INLINE token_out operator()(const token_in& x) const {
        return detail::clipped_surrogate(::exp(x.log_ratio), x.advantage, low, high, dual);
    }
    OPD_INLINE void validate() const {
        detail::check_clip("ppo_clip", low, high);
        if (!detail::is_finite(dual) || (dual != 0 && !(dual > 1 + high)))
            throw invalid_input("ppo_clip.dual", "must be above 1 + high, or 0 for none");
    }
};

/// What happens to a token whose weight p_prox/mu exceeds its cap: min(w, cap) for w, or the token adds nothing.
enum class over_cap { truncate, mask };

/// -w min(u A, clip(u) A), u = p/p_prox, w = p_prox/mu held constant. Reads the cache's log_prox.
struct decoupled_ppo {
    double low = 0.2;  ///< clips u = p/p_prox at 1 - low
    double high = 0.2; ///< and at 1 + high
    double cap = 0;    ///< on w; 0: none
    over_cap over = over_cap::truncate;
    static constexpr estimator_traits traits(law) { return detail::cut_traits; }
    OPD_HD static constexpr unsigned reads_columns() { return column::log_prox; }
    OPD_HD OPD_INLINE token_out operator()(const token_in& x) const {
        return of(x, x.log_p - x.log_prox, x.log_prox - x.log_mu);
    }
    OPD_HD OPD_INLINE token_out of(const token_in& x, double log_u, double log_w) const {
        const detail::saturated_ratio u(log_u), w(log_w);
        const bool beyond = cap > 0 && w.value > cap;
        if (beyond && over == over_cap::mask) return {0, 0, token_flag::masked | u.flags | w.flags};
        const double weight = beyond ? cap : w.value;
        token_out out = detail::clipped_surrogate(u.value, x.advantage, low, high);
        out.loss *= weight, out.c *= weight;
        out.flags |= u.flags | w.flags | (beyond ? token_flag::truncated : 0);
        return out;
    }
    OPD_INLINE void validate() const {
        detail::check_clip("decoupled_ppo", low, high);
        if (!detail::is_finite(cap) || !(cap >= 0))
            throw invalid_input("decoupled_ppo.cap", "must be positive and finite, or 0 for none");
    }
};

/// decoupled_ppo with a proximal policy between mu and p by the token's age (env.versions): no forward pass for it.
struct a3po {
    double low = 0.2; ///< as of decoupled_ppo, as are the others
    double high = 0.2;
    double cap = 0; ///< on w = p_prox/mu; 0: none
    over_cap over = over_cap::truncate;
    static constexpr estimator_traits traits(law) { return detail::cut_traits; }
    OPD_HD OPD_INLINE token_out operator()(const token_in& x) const {
        const double share = x.age > 1 ? 1 / x.age : 1; // of mu in log p_prox
        const double d = x.log_p - x.log_mu;
        return decoupled_ppo{low, high, cap, over}.of(x, share * d, (1 - share) * d);
    }
    OPD_INLINE void validate() const { decoupled_ppo{low, high, cap, over}.validate(); }
};

/// -min(s A, clip(s) A) with the sequence's ratio s.
struct gspo {
    double low = 3e-4;  ///< clips s at 1 - low: of a sequence, so far tighter than of a token
    double high = 4e-4; ///< and at 1 + high; both from GSPO
    static constexpr estimator_traits traits(law) { return detail::cut_traits; }
    OPD_HD static constexpr unsigned reads_columns() { return column::sequence_log_ratio; }
    OPD_HD OPD_INLINE token_out operator()(const token_in& x) const {
        const detail::saturated_ratio s(x.sequence_log_ratio);
        token_out out = detail::clipped_surrogate(s.value, x.advantage, low, high);
        out.flags |= s.flags;
        return out;
    }
    OPD_INLINE void validate() const { detail::check_clip("gspo", low, high); }
};

/// A surrogate on the tokens with (log p - log mu)²/(H_mu + ε) ≤ τ. Reads the cache's mu_entropy.
template <class Surrogate = unclipped_is>
struct estr {
    double tau;     ///< bound of δ² over the entropy; no default
    double epsilon; ///< nats, added to the entropy; no default
    Surrogate surrogate = {};
    static constexpr estimator_traits traits(law drawn) {
        return traits_of<Surrogate>(drawn).descends == descent::other ? traits_of<Surrogate>(drawn)
                                                                      : detail::cut_traits;
    }
    OPD_HD constexpr unsigned reads_columns() const { return column::mu_entropy | detail::columns_of(surrogate); }
    OPD_HD OPD_INLINE token_out operator()(const token_in& x) const {
        const double d = x.log_p - x.log_mu;
        if (d * d > tau * (x.mu_entropy + epsilon)) return {0, 0, token_flag::masked};
        return surrogate(x);
    }
    OPD_INLINE void validate() const {
        if (!detail::is_finite(tau) || !(tau > 0))
            throw invalid_input("estr.tau", "must be given, positive and finite");
        if (!detail::is_finite(epsilon) || !(epsilon > 0))
            throw invalid_input("estr.epsilon", "must be given, positive and finite");
        if constexpr (requires { surrogate.validate(); }) surrogate.validate();
    }
};
template <class S>
estr(double, double, S) -> estr<S>;
estr(double, double)->estr<>;

/// k(q/p) itself as the loss; `Ratio`: times rho, held constant, for tokens that are not the student's own.
template <class K, bool Ratio = false>
struct differentiated {
    static constexpr bool has_advantage = false;
    static constexpr estimator_traits traits(law drawn) {
        const bool own = Ratio || drawn == law::on_policy;
        return {own ? bias::unbiased : bias::biased, meaning::surrogate, true,
                own ? K::differentiated : descent::other};
    }
    OPD_HD OPD_INLINE token_out operator()(const token_in& x) const {
        const double log_r = x.log_q - x.log_p, k = Ratio ? ::exp(x.log_ratio) : 1;
        return {k * K::value(log_r), k * K::slope(log_r)};
    }
};

} // namespace opd
