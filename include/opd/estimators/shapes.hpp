// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Shapes: a shape is the function that turns the log-ratio x = log q - log p of a drawn token into its advantage.
//
// For every divergence D = Σ q f(r), r = p/q:   ∇D = E_p[f'(r) ∇log p] = E_mu[rho f'(r) ∇log p]. So an advantage that
// is a function of q/p alone and does not fall as q/p grows is exactly -f' of a divergence (f is then convex):
//
//   shape          A(x)                            the divergence it descends
//   log_ratio      x                               KL(p‖q)
//   clipped{a}     x within ±a                     KL(p‖q), linear in r beyond e^±a                Lightning, REOPOLD
//   mixed{α}       log(α q/p + 1 - α), 0 < α < 1   KL(p‖q) - KL(m‖q)/(1-α), m = α q + (1-α) p              TROPD, TOP-D
//   box_cox{α}     ((q/p)^α - 1)/α                 (Σ p^(1-α) q^α - 1)/(α(α-1)); α → 0: KL(p‖q),          PowerOPD
//                                                  α = 1: KL(q‖p)
//   sign           ½ sign(q - p)                   ½ Σ |p - q|                                             TV-OPD
//   scaled{s}      s x, s > 0                      s KL(p‖q)
//   band{a}        x where |x| ≤ a, else 0         none: it falls at ±a, so no f has it; needs accept_bias
//
// x holds the current p (advantage::theta). With log mu in place of log p, the advantage is no such derivative. Theorem
// and proof: docs/estimators/divergences-from-samples.md.
//
// A shape is two functions of x and a promise:
//   operator()(x)      A
//   value(x)           what a draw adds to the divergence, over rho: f(r)/r with f(1) = 0 and, where f(0) is finite,
//                      f(0) = 0. A multiple of r - 1 gives f that form and changes no divergence; so tokens that the
//                      student never draws add nothing
//   monotone           A never falls as x grows, for all parameters that validate() accepts
#pragma once

#include <cmath>
#include <concepts>

#include "opd/config.hpp"
#include "opd/element.hpp"
#include "opd/error.hpp"

namespace opd {

namespace detail {

/// ±700: e^x is a double.
OPD_HD OPD_INLINE double exp_within(double x) { return ::exp(x < -700 ? -700 : (x > 700 ? 700 : x)); }

} // namespace detail

namespace shape {

/// A(x) = x: descends KL(p‖q).
struct log_ratio {
    static constexpr bool monotone = true;
    OPD_HD OPD_INLINE double operator()(double x) const { return x; }
    OPD_HD OPD_INLINE double value(double x) const { return -x; }
};

/// A(x) = x within ±a, a in nats. Lightning OPD, REOPOLD.
struct clipped {
    static constexpr bool monotone = true;
    double a = 5; ///< nats
    OPD_HD OPD_INLINE double operator()(double x) const { return x > a ? a : (x < -a ? -a : x); }
    OPD_HD OPD_INLINE double value(double x) const {
        const double least = ::exp(-a);
        if (x > a) return 1 - a - least; // f = (1 - a - e^-a) r
        const double q_over_p = detail::exp_within(x), rest = least * (1 - q_over_p);
        return (x < -a ? a + 1 - detail::exp_within(a + x) : -x) - rest;
    }
    OPD_INLINE void validate() const {
        if (!detail::is_finite(a) || !(a > 0 && a <= 600))
            throw invalid_input("shape::clipped.a", "must lie in (0, 600] nats");
    }
};

/// A(x) = log(α e^x + 1 - α), 0 < α < 1: bounded below by log(1 - α). TROPD, TOP-D.
struct mixed {
    static constexpr bool monotone = true;
    double alpha = 0.5;                                   ///< in (0, 1); near 1 it is log_ratio
    OPD_HD OPD_INLINE double operator()(double x) const { // log(α e^x + 1-α), from the larger of the two
        return x > 0 ? x + ::log(alpha + (1 - alpha) * detail::exp_within(-x))
                     : ::log1p(alpha * ::expm1(x < -700 ? -700 : x));
    }
    OPD_HD OPD_INLINE double value(double x) const {
        const double keep = 1 - alpha;
        // m/q = α + (1-α) r, and m/q over α: its logarithm times e^x stays finite as r goes to 0
        const double r = detail::exp_within(-x), log_m = ::log(alpha + keep * r), k = keep / alpha;
        const double left = x > 30 ? k : detail::exp_within(x) * ::log1p(k * r);
        return -x - (alpha * left + keep * log_m + alpha * ::log(alpha)) / keep;
    }
    OPD_INLINE void validate() const {
        if (!detail::is_finite(alpha) || !(alpha > 0 && alpha < 1))
            throw invalid_input("shape::mixed.alpha", "must lie strictly between 0 and 1; 1 is shape::log_ratio");
    }
};

/// A(x) = (e^(αx) - 1)/α: from KL(p‖q) at α → 0 to KL(q‖p) at α = 1. PowerOPD.
struct box_cox {
    static constexpr bool monotone = true;
    double alpha = 0.5;
    OPD_HD OPD_INLINE double operator()(double x) const { return alpha == 0 ? x : ::expm1(within(x)) / alpha; }
    OPD_HD OPD_INLINE double value(double x) const {
        if (alpha == 0) return -x;
        if (alpha == 1) return (x < 700 ? x : 700) * detail::exp_within(x);
        return -::expm1(within(x)) / (alpha * (1 - alpha));
    }
    OPD_HD constexpr bool infinite_where_teacher_zero() const { return alpha <= 0; }
    OPD_HD constexpr bool infinite_where_student_zero() const { return alpha >= 1; }
    OPD_INLINE void validate() const {
        if (!detail::is_finite(alpha) || !(alpha >= -10 && alpha <= 10) || (alpha != 0 && ::fabs(alpha) < 1e-6) ||
            (alpha != 1 && ::fabs(alpha - 1) < 1e-6))
            throw invalid_input("shape::box_cox.alpha",
                                "must lie between -10 and 10, and be 0 or 1 or at least 1e-6 away from both");
    }

private:
    OPD_HD OPD_INLINE double within(double x) const {
        const double y = alpha * x;
        return y < -700 ? -700 : (y > 700 ? 700 : y);
    }
};

/// A(x) = ½ sign(x): descends total variation. TV-OPD.
struct sign {
    static constexpr bool monotone = true;
    OPD_HD OPD_INLINE double operator()(double x) const { return x > 0 ? 0.5 : (x < 0 ? -0.5 : 0); }
    OPD_HD OPD_INLINE double value(double x) const { return x < 0 ? -::expm1(x < -700 ? -700 : x) : 0; }
};

/// A(x) = s x, s > 0: KL(p‖q) times s, beside other terms of a loss.
struct scaled {
    static constexpr bool monotone = true;
    double by = 1; ///< s, positive
    OPD_HD OPD_INLINE double operator()(double x) const { return by * x; }
    OPD_HD OPD_INLINE double value(double x) const { return -by * x; }
    OPD_INLINE void validate() const {
        if (!detail::is_finite(by) || !(by > 0))
            throw invalid_input("shape::scaled.by", "must be positive and finite: below 0 it descends -KL(p‖q)");
    }
};

/// A(x) = x where |x| ≤ a nats, else 0: no divergence descends so; needs accept_bias.
struct band {
    static constexpr bool monotone = false;
    double a = 5; ///< nats
    OPD_HD OPD_INLINE double operator()(double x) const { return x > a || x < -a ? 0 : x; }
    OPD_INLINE void validate() const {
        if (!detail::is_finite(a) || !(a > 0)) throw invalid_input("shape::band.a", "must be positive and finite");
    }
};

} // namespace shape

// clang-format off
/// A function of log q - log p. See the head of this file.
template <class S>
concept shape_policy = requires(const S s, double x) {
    { s(x) } -> std::convertible_to<double>;
    { S::monotone } -> std::convertible_to<bool>;
};
// clang-format on

} // namespace opd
