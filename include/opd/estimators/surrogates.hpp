// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Surrogates: token-level scalar functions from one sampled action's log-probs to its loss and c = dL/dlog p. A surrogate is
// one function, `token_out operator()(const token_in&) const`, host and device; the sampled estimators weight its results
// and do the rest.
//
//   unclipped_is     loss -rho A          c -rho A      rho = p/mu
//   score_function   loss -A log p        c -A          no importance correction
//
// With A = A_theta = log q - log p held constant, unclipped_is descends KL(p‖q) at the visited prefix whatever mu
// (AsyncOPD eq. 6-7, 15); with A_old = log q - log mu it descends KL(p‖q) - KL(p‖mu), which rewards drifting from mu.
// score_function is Lightning OPD's objective (eq. 4) and biased once mu != p.
//
// log rho arrives saturated at ±80 (counted), so rho never overflows.
#pragma once

#include <cmath>

#include "opd/config.hpp"
#include "opd/token.hpp"

namespace opd {

/// -rho A
struct unclipped_is {
    OPD_HD OPD_INLINE token_out operator()(const token_in& x) const {
        const double rho = ::exp(x.log_ratio);
        return {-rho * x.advantage, -rho * x.advantage};
    }
};

/// -A log p
struct score_function {
    OPD_HD OPD_INLINE token_out operator()(const token_in& x) const { return {-x.advantage * x.log_p, -x.advantage}; }
};

} // namespace opd
