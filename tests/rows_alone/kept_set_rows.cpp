// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Rows of tokens drawn under a filter, and their log-probs.
#include <opd/rows/kept_set_rows.hpp>

#include "fake.hpp"

using namespace opd::detail;

namespace fake {
using cache = opd::teacher::on_kept_sets<samples, int>;
template <class Student, class Estimator, class Frame = frame>
void walk_kept_sets() {
    walk(kept_set_rows<Frame, Student, cache, Estimator>({}, {}, {}, {}, 1, 1));
}
void all() {
    walk_kept_sets<logits, of_entries>(), walk_kept_sets<logits, of_entries, frame_of_shard>();
    walk_kept_sets<made_by_id, of_entries, frame_of_shard>(), walk_kept_sets<made_by_id, selected_entries>();
    walk(kept_logp_rows<frame, opd::kept_logp_job<float, cache, float>>({}, {}));
}
} // namespace fake
