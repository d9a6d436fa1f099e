// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Log-probabilities of one row of logits. Rollout and learner ask the same function, so that the same logits give the
// same bits on both sides and an importance ratio at unchanged weights is exactly 1.
#pragma once

#include "model.hpp"

namespace trainer {

/// log sum_v exp(z[v] / temperature)
float log_normaliser(const float* z, index_t vocabulary, double temperature);

/// log p[v] of softmax(z / temperature), given its log-normaliser.
inline float log_prob(const float* z, index_t v, double temperature, float normaliser) {
    return z[v] / static_cast<float>(temperature) - normaliser;
}

} // namespace trainer
