// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Diagnostics and results on their way between C and C++: the same bytes, member by member.
#pragma once

#include <cstddef>
#include <cstring>

#include "opd/c/evaluate.h"
#include "opd/diagnostics.hpp"

namespace opd_c {

// clang-format off
#define OPD_C_SAME(member) static_assert(offsetof(opd::diagnostics, member) == offsetof(opd_diagnostics, member));
OPD_C_SAME(rows) OPD_C_SAME(kept) OPD_C_SAME(bad_rows) OPD_C_SAME(first_bad_row) OPD_C_SAME(infinite_rows)
OPD_C_SAME(first_infinite_row) OPD_C_SAME(clamped_rows) OPD_C_SAME(careful_rows) OPD_C_SAME(kept_loss)
OPD_C_SAME(tokens) OPD_C_SAME(ratio_sum) OPD_C_SAME(ratio_square_sum) OPD_C_SAME(ratio_max) OPD_C_SAME(k1_sum)
OPD_C_SAME(k2_sum) OPD_C_SAME(k3_sum) OPD_C_SAME(teacher_kl_sum) OPD_C_SAME(positive_advantage)
OPD_C_SAME(negative_advantage) OPD_C_SAME(zero_advantage) OPD_C_SAME(clipped_positive) OPD_C_SAME(clipped_negative)
OPD_C_SAME(truncated) OPD_C_SAME(masked) OPD_C_SAME(saturated) OPD_C_SAME(baseline_missing) OPD_C_SAME(outside_kept)
OPD_C_SAME(dropped) OPD_C_SAME(certain_mu) OPD_C_SAME(missing_mu) OPD_C_SAME(variance_rows)
OPD_C_SAME(loss_variance_sum) OPD_C_SAME(support_rows) OPD_C_SAME(student_mass_sum) OPD_C_SAME(teacher_mass_sum)
OPD_C_SAME(student_mass_min) OPD_C_SAME(teacher_mass_min) OPD_C_SAME(tail_floored) OPD_C_SAME(student_entropy_rows)
OPD_C_SAME(teacher_entropy_rows) OPD_C_SAME(overlap_rows) OPD_C_SAME(student_entropy_sum)
OPD_C_SAME(teacher_entropy_sum) OPD_C_SAME(overlap_sum) OPD_C_SAME(selector_rows) OPD_C_SAME(selector_left_out)
OPD_C_SAME(selector_weight_sum) OPD_C_SAME(staleness) OPD_C_SAME(staleness_max) OPD_C_SAME(future_versions)
#undef OPD_C_SAME
    // clang-format on
    static_assert(sizeof(opd::diagnostics) == sizeof(opd_diagnostics));

inline opd::diagnostics of_c(const opd_diagnostics& d) {
    opd::diagnostics to;
    std::memcpy(static_cast<void*>(&to), &d, sizeof to);
    return to;
}
inline opd_diagnostics to_c(const opd::diagnostics& d) {
    opd_diagnostics to;
    std::memcpy(&to, static_cast<const void*>(&d), sizeof to);
    return to;
}
inline void store(const opd::result& from, opd_result& to) {
    to.loss = from.loss, to.diagnostics = to_c(from.diagnostics);
}

} // namespace opd_c
