// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Temperature, top-k, top-p and min-p: which ids of a row a rollout may draw, under one definition for drawing, for the recorded
// log mu, for kept sets and for verification.
//
//   1. temperature    p = softmax(z / T)
//   2. min_p          keeps ids with p >= min_p · max p
//      top_k          keeps the k most probable ids
//   3. top_p          of what 2 leaves, the fewest most probable ids whose share of its mass is at least top_p
//
// Each keeps a row's best ids, ties going to the lower id; so what a filter keeps is told by its last id: a `filter_cut`. Ids of
// logit -inf are never kept; at least one id is. The order is vLLM's: top_p takes its share of what 2 left.
#pragma once

#include "opd/config.hpp"

namespace opd {

struct filter {
    float temperature = 1;
    index_t top_k = 0; ///< 0: all
    float top_p = 1;   ///< in (0, 1]; 1: all
    float min_p = 0;   ///< in [0, 1]; 0: all

    OPD_HD constexpr bool cuts() const { return top_k > 0 || top_p < 1 || min_p > 0; }
};

/// The last id that a filter keeps of a row, and its logit. z is the logit as it is, not divided by T.
struct filter_cut {
    double z = -1e30; ///< every finite logit is above; -inf, which counts as -1e30, is not
    index_t id = -1;

    OPD_HD bool keeps(double z_of, index_t id_of) const { return z_of > z || (z_of == z && id_of <= id); }
    OPD_HD static filter_cut tighter(filter_cut a, filter_cut b) {
        return a.z > b.z || (a.z == b.z && a.id < b.id) ? a : b;
    }
};

} // namespace opd
