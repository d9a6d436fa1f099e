// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Rows of a support and a tail, even and ragged, in a shard as well.
#include <opd/rows/support_rows.hpp>

#include "fake.hpp"

using namespace opd::detail;

namespace fake {
template <class Frame, class Student, class Cache, class Estimator>
void walk_support() {
    walk(support_rows<engine, Frame, Student, Cache, Estimator>({}, {}, {}, {}, 1));
}
void all() {
    walk_support<frame, logits, support, of_entries>();
    walk_support<frame, made_in_tiles, ragged, selected_entries>();
    walk_support<frame_of_shard, logits, support, of_entries>();
}
} // namespace fake
