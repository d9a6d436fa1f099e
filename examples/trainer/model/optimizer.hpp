// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// AdamW with clipping of the global gradient norm, and the schedule of its rate.
//
//   g <- g min(1, clip / |g|)
//   m <- b1 m + (1 - b1) g        v <- b2 v + (1 - b2) g²
//   w <- w - rate (m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + decay w)      decay on matrices only
//
// Source: Loshchilov and Hutter, "Decoupled weight decay regularization", 2019. Everything in float and in a fixed
// order: a resumed run repeats the bits of an uninterrupted one.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "model/model.hpp"

namespace trainer {

struct adamw {
    double beta1 = 0.9;
    double beta2 = 0.99;
    double epsilon = 1e-8;
    double decay = 0.01;
    double clip = 1;
};

struct adamw_state {
    std::vector<float> m, v; // flat, as the weights
    std::int64_t step = 0;
};

/// Weights that lie together, and whether they decay.
struct weight_range {
    index_t offset = 0, size = 0;
    bool decays = true;
};

/// The update above, of flat weights; what is in no range stays as it is. Returns the gradient's norm before clipping.
/// A norm that is not finite changes nothing.
double adamw_step(const adamw& options, double rate, const std::vector<float>& gradient, adamw_state& state,
                  std::vector<float>& weights, std::span<const weight_range> ranges);

/// The same of a model, whose matrices decay.
double adamw_step(const adamw& options, double rate, std::vector<float>& gradient, adamw_state& state,
                  transformer<float>& model);

/// Linear warm-up over `warmup` steps, then half a cosine from `rate` down to rate * floor at `steps`.
double cosine_rate(double rate, double floor, std::int64_t warmup, std::int64_t step, std::int64_t steps);

/// Where the plan of a rate was last changed, and the rate there; step < 0: nowhere.
struct rate_change {
    std::int64_t step = -1;
    double rate = 0;
};

/// As cosine_rate; after a change, half a cosine from the rate there down to the same floor at `steps`.
double planned_rate(const rate_change& from, double rate, double floor, std::int64_t warmup, std::int64_t step,
                    std::int64_t steps);

} // namespace trainer
