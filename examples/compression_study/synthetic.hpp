// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A head as large as a language model's, and states that make of it what a language model's make: most rows sure of a
// token, tokens of a Zipf-like marginal. In coordinates j = 0 … D-1, which a rotation (random signs, then Hadamard's
// matrix) mixes at the end:
//
//   head     w_v = (log prior(v) / 4, σ_j (c_j + e_j)/√2), prior(v) ∝ 1/(v + 2.7), σ_j ∝ (j + 8)^-0.4 with Σσ² = 1; c
//            normal, of the token's cluster (one in 76 tokens is a cluster's), e normal, its own
//   state    h = (4, κ Σ_k a_k w_tk + noise): tokens t drawn from the prior, one with probability 0.65 in calibration
//            and 0.45 on the student's rollouts, else 2 to 16 with weights a falling geometrically; noise in a spectrum
//            as σ's but in another order, of 0.7 nats in a logit; the last 8 coordinates, the head's smallest, have 30
//            ± 3, as the few large entries of real states
//   rollouts 60 % of the tokens are of a tenth of the clusters, and noise has a mean: another mixture than
//   calibration's
//   student  the same head on κ/1.25, a wrong candidate beside the right ones, noise drawn anew
//
// κ is such that the median entropy of calibration's rows is 0.3 nats.
#pragma once

#include <cstdint>

#include "study.hpp"

namespace compression_study {

struct synthetic_size {
    index_t vocab = 151936, width = 4096; ///< width a power of two
    index_t rows = 256, calibration = 4096;
};
world synthetic(const synthetic_size& s, int threads, std::uint64_t seed);

} // namespace compression_study
