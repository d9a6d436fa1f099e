// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Corrections for training-inference mismatch, as wrappers of any surrogate S. Three policies: mu drew the tokens
// (log_mu); p_old is the trainer's own policy before this batch's updates (log_prox); p is the student now.
//
//   delta = log p_old - log mu    r_corr = e^delta    r_train = p/p_old    r_rollout = p/mu          VeXact eq. 1, 3
//
//                            loss, and c likewise                             source
//   bypass<S>                S of r_rollout: S itself, by its name            VeXact eq. 4, verl bypass_mode
//   recompute<S>             S of r_train                                     VeXact eq. 4
//   tis<S>{cap, low}         sg(min(max(r_corr, low), cap)) S                 VeXact eq. 6; low > 0: clamped on both
//                                                                             sides (slime, NeMo-RL)
//   mis<S>{low, high}        sg(r_corr) S where low <= r_corr <= high, else 0 IcePop, masked importance sampling
//   banded<K, S>{low, high}  S where low <= K(r_corr) <= high, else 0         token rejection (verl token_k1, k2, k3):
//                                                                             no weight
//   within_tv<S>{low, high}  S, but 0 where A > 0 and p - mu > high, or A <= 0 and mu - p > low          DPPO; prime-rl
//   anchored<S>{tau}         S + tau log² r_rollout, differentiated           prime-rl's kl_tau
//
// They nest, the outermost first: tis{2, 0, recompute{ppo_clip{}}} is VeXact's TIS, bit for bit
// decoupled_ppo{.cap = 2}. Decisions over whole sequences are correction_fit's (correction_fit.hpp). Each bound is a
// bound of the named statistic, and the bound itself lies inside the band; K1 = -log r, K2 and K3 are k1, k2, k3 of
// k_forms.hpp. Ratios saturate at e^±80, counted.
//
// What they descend (traits): mu drew the tokens, so S of r_train needs the weight r_corr, and S of r_rollout has it
// already. recompute alone, and tis or mis around a surrogate of p/mu, descend something else on stale tokens and need
// accept_bias; tis and mis of recompute descend what S does, less what they cut. A rejection does not change that.
#pragma once

#include <cmath>
#include <limits>

#include "opd/config.hpp"
#include "opd/element.hpp"
#include "opd/entries.hpp"
#include "opd/error.hpp"
#include "opd/estimators/k_forms.hpp"
#include "opd/estimators/surrogates.hpp"
#include "opd/token.hpp"
#include "opd/traits.hpp"

namespace opd {

namespace detail {

/// The token as a surrogate of p/p_old sees it: p_old in mu's place.
OPD_HD OPD_INLINE token_in against_old(const token_in& x) {
    token_in y = x;
    y.log_mu = x.log_prox, y.log_ratio = within_80(x.log_p - x.log_prox);
    return y;
}
/// Whether that ratio saturates.
OPD_HD OPD_INLINE unsigned old_flags(const token_in& x) { return saturated_ratio(x.log_p - x.log_prox).flags; }
OPD_HD OPD_INLINE double log_corr(const token_in& x) { return x.log_prox - x.log_mu; }

/// An importance weight within [low, high]: at the bound, or 0 beyond it.
OPD_HD OPD_INLINE double bounded_ratio(double r, double low, double high, bool zero_beyond) {
    if (r < low) return zero_beyond ? 0 : low;
    if (r > high) return zero_beyond ? 0 : high;
    return r;
}
/// A token's loss times a weight that is held constant, r within [low, high].
OPD_HD OPD_INLINE token_out weighted_token(token_out out, double log_r, double low, double high, bool zero_beyond) {
    const saturated_ratio r(log_r);
    const double w = bounded_ratio(r.value, low, high, zero_beyond);
    if (w == 0) return {0, 0, token_flag::masked | r.flags};
    out.loss *= w, out.c *= w;
    out.flags |= r.flags | (w == r.value ? 0 : token_flag::truncated);
    return out;
}
/// Whether the binary total variation of a token leaves it in: p - mu within [-low, high], on the side of its
/// advantage.
OPD_HD OPD_INLINE bool inside_tv(const token_in& x, double low, double high) {
    const double apart = ::exp(x.log_p) - ::exp(x.log_mu);
    return x.advantage > 0 ? !(apart > high) : !(apart < -low);
}
/// tau log²(p/mu) beside a loss.
OPD_HD OPD_INLINE token_out anchored_token(token_out out, double log_ratio, double tau) {
    out.loss += tau * log_ratio * log_ratio, out.c += 2 * tau * log_ratio;
    return out;
}

inline constexpr estimator_traits other_traits{bias::biased, meaning::surrogate, true, descent::other};

/// A surrogate of p/p_old.
template <class S>
constexpr bool is_against_old() {
    if constexpr (requires { S::against_old; })
        return S::against_old;
    else
        return false;
}
template <class S>
constexpr bool reads_log_prox() {
    return (columns_of(S{}) & column::log_prox) != 0;
}
/// Traits of a surrogate of which some tokens are left out.
template <class S>
constexpr estimator_traits left_out(law drawn) {
    const estimator_traits t = traits_of<S>(drawn);
    return t.descends == descent::other || t.descends == descent::none ? t : cut_traits;
}
/// Traits of a surrogate times r_corr.
template <class S>
constexpr estimator_traits reweighted_traits(law drawn) {
    if (is_against_old<S>()) return cut_traits;
    return drawn == law::on_policy ? traits_of<S>(drawn) : other_traits;
}

OPD_INLINE void check_band(const char* name, double low, double high) {
    if (is_nan(low) || is_nan(high) || !(low <= high)) throw invalid_input(name, "low must be at most high");
}
OPD_INLINE void check_ratio_band(const char* name, double low, double high) {
    check_band(name, low, high);
    if (!(low >= 0) || !(high > 0)) throw invalid_input(name, "bounds of a ratio are at least 0, the upper above it");
}

} // namespace detail

/// S of p/mu.
template <class S = ppo_clip>
struct bypass {
    S surrogate = {};
    static constexpr estimator_traits traits(law drawn) { return traits_of<S>(drawn); }
    OPD_HD constexpr unsigned reads_columns() const { return detail::columns_of(surrogate); }
    OPD_HD OPD_INLINE token_out operator()(const token_in& x) const { return surrogate(x); }
    OPD_INLINE void validate() const {
        if constexpr (requires { surrogate.validate(); }) surrogate.validate();
    }
};
template <class S>
bypass(S) -> bypass<S>;

/// S of p/p_old. Reads the cache's log_prox.
template <class S = ppo_clip>
struct recompute {
    static_assert(!detail::reads_log_prox<S>(), "opd: recompute is of a surrogate of p/mu; a weight goes outside it: "
                                                "tis{2, 0, recompute{ppo_clip{}}}");
    static constexpr bool against_old = true;
    S surrogate = {};
    static constexpr estimator_traits traits(law drawn) {
        return drawn == law::on_policy ? traits_of<S>(drawn) : detail::other_traits;
    }
    OPD_HD constexpr unsigned reads_columns() const { return column::log_prox | detail::columns_of(surrogate); }
    OPD_HD OPD_INLINE token_out operator()(const token_in& x) const {
        token_out out = surrogate(detail::against_old(x));
        out.flags |= detail::old_flags(x);
        return out;
    }
    OPD_INLINE void validate() const {
        if constexpr (requires { surrogate.validate(); }) surrogate.validate();
    }
};
template <class S>
recompute(S) -> recompute<S>;

/// sg(r_corr within [low, cap]) S. Reads the cache's log_prox.
template <class S = recompute<>>
struct tis {
    double cap = 2; ///< on r_corr, a raw ratio
    double low = 0; ///< likewise; 0: none
    S surrogate = {};
    static constexpr estimator_traits traits(law drawn) { return detail::reweighted_traits<S>(drawn); }
    OPD_HD constexpr unsigned reads_columns() const { return column::log_prox | detail::columns_of(surrogate); }
    OPD_HD OPD_INLINE token_out operator()(const token_in& x) const {
        return detail::weighted_token(surrogate(x), detail::log_corr(x), low, cap, false);
    }
    OPD_INLINE void validate() const {
        detail::check_ratio_band("tis", low, cap);
        if constexpr (requires { surrogate.validate(); }) surrogate.validate();
    }
};
template <class S>
tis(double, double, S) -> tis<S>;
tis(double)->tis<>;
tis(double, double)->tis<>;

/// sg(r_corr) S where r_corr lies in [low, high], else 0. Reads the cache's log_prox.
template <class S = recompute<>>
struct mis {
    double low = 0.5; ///< raw ratios, kept at the bounds
    double high = 5;  ///< IcePop's
    S surrogate = {};
    static constexpr estimator_traits traits(law drawn) { return detail::reweighted_traits<S>(drawn); }
    OPD_HD constexpr unsigned reads_columns() const { return column::log_prox | detail::columns_of(surrogate); }
    OPD_HD OPD_INLINE token_out operator()(const token_in& x) const {
        return detail::weighted_token(surrogate(x), detail::log_corr(x), low, high, true);
    }
    OPD_INLINE void validate() const {
        detail::check_ratio_band("mis", low, high);
        if constexpr (requires { surrogate.validate(); }) surrogate.validate();
    }
};
template <class S>
mis(double, double, S) -> mis<S>;
mis(double, double)->mis<>;

/// S where K(r_corr) lies in [low, high], K one of k1, k2, k3; else 0. Reads the cache's log_prox.
template <class K, class S = recompute<>>
struct banded {
    static constexpr bool against_old = detail::is_against_old<S>();
    double low; ///< in the unit of K, ratios or nats; no default
    double high;
    S surrogate = {};
    static constexpr estimator_traits traits(law drawn) { return detail::left_out<S>(drawn); }
    OPD_HD constexpr unsigned reads_columns() const { return column::log_prox | detail::columns_of(surrogate); }
    OPD_HD OPD_INLINE token_out operator()(const token_in& x) const {
        const double k = K::value(detail::within_80(detail::log_corr(x)));
        return k >= low && k <= high ? surrogate(x) : token_out{0, 0, token_flag::masked};
    }
    OPD_INLINE void validate() const {
        detail::check_band("banded", low, high);
        if constexpr (requires { surrogate.validate(); }) surrogate.validate();
    }
};

/// S where p has not left mu by more than the bound on the side that the token's advantage pushes to; else 0.
template <class S = unclipped_is>
struct within_tv {
    static constexpr bool against_old = detail::is_against_old<S>();
    double low = 0.2;  ///< probability that p may have lost
    double high = 0.2; ///< and may have gained
    S surrogate = {};
    static constexpr estimator_traits traits(law drawn) { return detail::left_out<S>(drawn); }
    OPD_HD constexpr unsigned reads_columns() const { return detail::columns_of(surrogate); }
    OPD_HD OPD_INLINE token_out operator()(const token_in& x) const {
        return detail::inside_tv(x, low, high) ? surrogate(x) : token_out{0, 0, token_flag::masked};
    }
    OPD_INLINE void validate() const {
        detail::check_band("within_tv", -low, high);
        if constexpr (requires { surrogate.validate(); }) surrogate.validate();
    }
};
template <class S>
within_tv(double, double, S) -> within_tv<S>;
within_tv(double, double)->within_tv<>;

/// S + tau log²(p/mu), whose gradient flows: it holds p at mu, and so is no divergence's.
template <class S = unclipped_is>
struct anchored {
    static constexpr bool against_old = detail::is_against_old<S>();
    double tau; ///< loss for each nat²; no default
    S surrogate = {};
    static constexpr estimator_traits traits(law) { return {bias::biased, meaning::surrogate, false, descent::other}; }
    OPD_HD constexpr unsigned reads_columns() const { return detail::columns_of(surrogate); }
    OPD_HD OPD_INLINE token_out operator()(const token_in& x) const {
        return detail::anchored_token(surrogate(x), x.log_ratio, tau);
    }
    OPD_INLINE void validate() const {
        if (!detail::is_finite(tau) || !(tau >= 0))
            throw invalid_input("anchored.tau", "must be finite and at least 0");
        if constexpr (requires { surrogate.validate(); }) surrogate.validate();
    }
};
template <class S>
anchored(double, S) -> anchored<S>;
anchored(double)->anchored<>;

} // namespace opd
