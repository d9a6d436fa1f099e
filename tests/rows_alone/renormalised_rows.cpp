// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Rows of a support alone: gradients of V entries, of k, in one line, by id.
#include <opd/rows/renormalised_rows.hpp>

#include "fake.hpp"

using namespace opd::detail;

namespace fake {
struct on_ids {
    static constexpr auto kind = opd::cache_kind::support;
    divergence on_support;
};
template <class Student, class Cache, class Frame = frame>
void walk_renormalised() {
    walk(renormalised_rows<engine, Frame, Student, Cache, on_ids>({}, {}, {}, {}, 1));
}
void all() {
    walk_renormalised<logits, support>(), walk_renormalised<logits, ragged>();
    walk_renormalised<on_support, support>(), walk_renormalised<on_support, ragged>();
    walk_renormalised<made_by_id, support>(), walk_renormalised<made_by_id, support, frame_of_shard>();
    walk_renormalised<logits, support, frame_of_shard>();
}
} // namespace fake
