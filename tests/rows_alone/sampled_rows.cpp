// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Rows of drawn tokens, in a shard as well.
#include <opd/rows/sampled_rows.hpp>

#include "fake.hpp"

using namespace opd::detail;

namespace fake {
template <class Frame, class Student, class Cache, class Estimator>
void walk_sampled() {
    walk(sampled_rows<engine, Frame, Student, Cache, Estimator>({}, {}, {}, {}, 1));
}
void all() {
    walk_sampled<frame, logits, samples, of_entries>();
    walk_sampled<frame, made_in_tiles, weighted, of_entries>();
    walk_sampled<frame, logits, opd::teacher::missing_mu<samples>, selected_entries>();
    walk_sampled<frame_of_shard, logits, samples, of_entries>();
}
} // namespace fake
