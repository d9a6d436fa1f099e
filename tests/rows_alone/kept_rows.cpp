// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The ids at or above a cut.
#include <opd/rows/kept_rows.hpp>

#include "fake.hpp"

using namespace opd::detail;

namespace fake {
struct of_leaf {
    using limits = leaf_limits;
    using type = edge_split;
    using best = scored;
};
using leaves = leaves_with<of_leaf>;

void all() { walk(kept_rows<leaves, frame, opd::kept_job<float, int>>({}, {})); }
} // namespace fake
