// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The three estimates of KL(p‖q) that trainers take from one token, r = q/p, x = log r. As values all three have mean
// KL(p‖q) over y ~ p (k2 near equality alone); as losses they descend different things, and one of them nothing:
//
//                 value        d/dlog p     differentiated (y ~ p, or with the ratio)   as detached reward -k
//   k1  -log r        -x           1            nothing: E_p[∇log p] = 0                    KL(p‖q)
//   k2  ½ log² r      ½ x²         -x           KL(p‖q)                                     another function
//   k3  r - 1 - log r e^x - 1 - x  1 - e^x      KL(q‖p)                                     KL(p‖q) - KL(q‖p)
//
// Source: Schulman, "Approximating KL divergence" (2020) for the values; what they descend is shown by enumeration in
// tests/estimators/surrogates_test.cpp. As losses: `differentiated<k>` (surrogates.hpp); as rewards:
// `advantage::reward<k>`. x is taken within ±80, so that e^x is finite.
#pragma once

#include <cmath>

#include "opd/config.hpp"
#include "opd/traits.hpp"

namespace opd {

namespace detail {
OPD_HD OPD_INLINE double within_80(double x) { return x < -80 ? -80 : (x > 80 ? 80 : x); }
} // namespace detail

/// x ↦ -x, x = log q - log p. Unbiased as a value; as a loss its gradient is 0 in the mean.
struct k1 {
    static constexpr descent differentiated = descent::none, as_reward = descent::reverse;
    OPD_HD OPD_INLINE static double value(double x) { return -x; }
    OPD_HD OPD_INLINE static double slope(double) { return 1; }
};
/// x ↦ ½ x². A biased value of low variance; as a loss it descends KL(p‖q).
struct k2 {
    static constexpr descent differentiated = descent::reverse, as_reward = descent::other;
    OPD_HD OPD_INLINE static double value(double x) { return 0.5 * x * x; }
    OPD_HD OPD_INLINE static double slope(double x) { return -x; }
};
/// x ↦ e^x - 1 - x, never negative. Unbiased as a value; as a loss it descends KL(q‖p), the other one.
struct k3 {
    static constexpr descent differentiated = descent::forward, as_reward = descent::reverse_minus_forward;
    OPD_HD OPD_INLINE static double value(double x) {
        x = detail::within_80(x);
        return ::expm1(x) - x;
    }
    OPD_HD OPD_INLINE static double slope(double x) { return -::expm1(detail::within_80(x)); }
};

} // namespace opd
