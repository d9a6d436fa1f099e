// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// One sampled action as a surrogate sees it. A surrogate is one function, token_in -> {loss, c, flags}, on host and
// device; c = dL/dlog p.
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
    double mu_entropy = 0;                 ///< of mu at this prefix, where the cache has it
};

/// What a surrogate did to a token, counted in the diagnostics; to be joined by |.
namespace token_flag {
inline constexpr unsigned clipped = 1;   ///< its gradient was cut
inline constexpr unsigned truncated = 2; ///< its importance ratio was
inline constexpr unsigned masked = 4;    ///< it adds nothing
inline constexpr unsigned saturated = 8; ///< a ratio other than p/mu was, at e^±80
} // namespace token_flag

/// What a surrogate says of a token: its loss, dL/dlog p, and what it did to it.
struct token_out {
    double loss;
    double c;           ///< dL/dlog p
    unsigned flags = 0; ///< of token_flag
};

// clang-format off
/// A surrogate: one token's scalars to its loss and c. See docs/concepts/surrogate.md.
template <class S>
concept surrogate = requires(const S s, token_in x) {
    { s(x) } -> std::same_as<token_out>;
};
// clang-format on

} // namespace opd
