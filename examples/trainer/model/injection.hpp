// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Training-inference mismatch on purpose (--inject-mismatch): rollout computes otherwise than the learner, which stays
// exact. mu is what rollout then draws from, and log mu is reported truly, so that delta = log p_old - log mu is the
// whole of the mismatch and r_corr = e^delta repairs it. docs/estimators/mismatch-study.md compares what corrections
// do.
//
//   bf16            weights and logits are rounded to bfloat16, to nearest, ties to even
//   split=n         every product with a weight matrix sums n runs of its inputs apart, then the n sums in order
//   temperature=f   rollout draws at f times --temperature
//   noise=s         s times Student's t of two degrees of freedom on every logit: |x| > a at about a^-2, no variance
//   filter          what rollout's filter kept is not reported: the learner compares on the whole row
//
// A token stays a pure function of (weights, seed, sample, position): noise is keyed by these and the id, and a split
// product is as indifferent to the other rows of its batch as a whole one. temperature=1, split=1 and noise=0 are none.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "model/model.hpp"

namespace trainer {

struct config;

struct injection {
    bool bf16 = false;
    int split = 1;
    double temperature = 1;
    double noise = 0;
    bool filter = false;

    bool changes_model() const { return bf16 || split > 1; }
    bool changes_logits() const { return bf16 || noise > 0; }
    bool any() const { return changes_model() || changes_logits() || temperature != 1 || filter; }
};

/// What --inject-mismatch says; a usage failure where it says something else. In settings/validate.cpp.
injection injection_of(const config& c);

/// What rollout computes with in the model's place: the model itself where nothing of it is changed.
std::shared_ptr<const transformer<float>> injected(const injection& what,
                                                   std::shared_ptr<const transformer<float>> model);

/// What becomes of a row of logits (V) of a sample's position.
void inject(const injection& what, std::uint64_t seed, std::uint64_t sample, std::uint32_t position,
            std::span<float> z);

} // namespace trainer
