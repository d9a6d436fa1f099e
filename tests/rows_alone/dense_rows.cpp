// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Dense rows: of two numbers of passes, with a selector, in tiles, in a shard.
#include <opd/rows/dense_rows.hpp>

#include "fake.hpp"

using namespace opd::detail;

namespace fake {
template <class Frame, class Student, class Program>
void walk_dense() {
    walk(dense_rows<engine, Frame, Student, dense, Program>({}, {}, {}, {}, 1));
}
void all() {
    walk_dense<frame, logits, divergence>();
    walk_dense<frame, logits, whole_divergence>();
    walk_dense<frame, logits, selected_divergence>();
    walk_dense<frame, logits, mixed_divergence>();
    walk_dense<frame, made_in_tiles, whole_divergence>();
    walk_dense<frame_of_shard, logits, divergence>();
}
} // namespace fake
