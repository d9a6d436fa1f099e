// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// One sampled action as a surrogate sees it, and what the sampled estimators may be asked for. A surrogate is one function,
// token_in -> {loss, c}, on host and device; c = dL/dlog p.
#pragma once

#include <concepts>

#include "opd/config.hpp"

namespace opd {

/// One sampled action. All log-probs at the same prefix.
struct token_in {
    double log_p;     ///< current student, rounded to the cache's type: unchanged weights give a ratio of exactly 1
    double log_mu;    ///< behaviour policy
    double log_prox;  ///< proximal policy; log_mu if the cache has none
    double log_ref;   ///< reference policy; log_mu if the cache has none
    double log_q;     ///< teacher
    double log_ratio; ///< log p - log mu, saturated at ±80
    double advantage; ///< a constant: no gradient flows through it
    double age;       ///< staleness in versions, 0 if unknown
    double sequence_log_ratio = log_ratio; ///< of the row's sequence (env.frozen); the token's own if none is given
    index_t row = 0;                       ///< of the batch
    int slot = 0;                          ///< of the row's cache
};

struct token_out {
    double loss;
    double c;             ///< dL/dlog p
    bool clipped = false; ///< the surrogate cut this token's gradient
};

// clang-format off
/// A surrogate: one token's scalars to its loss and c. See docs/concepts/surrogate.md.
template <class S>
concept surrogate = requires(const S s, token_in x) {
    { s(x) } -> std::same_as<token_out>;
};
// clang-format on

/// What is subtracted from the advantage in the gradient, never in the value.
enum class baseline {
    none,
    leave_one_out,   ///< b_i = mean_{j≠i} rho_j A_j
    self_normalised, ///< b_i = Σ_{j≠i} rho_j A_j / Σ_{j≠i} rho_j
    exact_entries    ///< b = Σ_exact p A / Σ_exact p
};

/// Which advantage: theta = log q - log p with the current student, old = log q - log mu as at rollout time.
enum class advantage { theta, old };

} // namespace opd
