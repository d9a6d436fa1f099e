// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Rows that are scored.
#include <opd/rows/score_rows.hpp>

#include "fake.hpp"

using namespace opd::detail;

namespace fake {
struct of_leaf {
    using limits = leaf_limits;
    using type = edge_split;
    using best = scored;
};
using leaves = leaves_with<of_leaf>;

void all() { walk(score_rows<leaves, frame, opd::score_job<float, int, float>>({}, {})); }
} // namespace fake
