// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Rows that are drawn from, by each design.
#include <opd/rows/draw_rows.hpp>

#include "fake.hpp"

using namespace opd::detail;

namespace fake {
struct of_leaf {
    using limits = leaf_limits;
    using type = edge_split;
    using best = scored;
};
using leaves = leaves_with<of_leaf>;

template <class Design>
void walk_draw() {
    walk(draw_rows<leaves, frame, opd::draw_job<float, Design, int, float, float>>({}, {}));
}
void all() {
    walk_draw<opd::design::iid>(), walk_draw<opd::design::greedy>(), walk_draw<opd::design::gumbel>();
    walk_draw<opd::design::threshold>(), walk_draw<opd::design::head_tail>(), walk_draw<opd::design::gumbel_top>();
}
} // namespace fake
