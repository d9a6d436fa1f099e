// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What a sweep adds to and merges.
#include <opd/rows/row_sweep.hpp>

#include "fake.hpp"

using namespace opd::detail;

namespace fake {
void all(row_sweep& p, entropy_sums e) {
    p = row_sweep::merge(p, row_sweep::begin(1, 1, 1, true));
    p.student_to(0, 0, 0);
    p.close<true, opd::raw_sums_needed{.student_delta = true, .student_power = true, .teacher_delta = true}>();
    (void)entropy_sums::merge(e, e);
}
} // namespace fake
