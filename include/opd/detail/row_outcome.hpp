// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What a row kernel tells the batch.
#pragma once

namespace opd::detail {

/// What one row reports to the batch.
struct row_outcome {
    double loss = 0; ///< L_r, before weight and clamp
    double lse = 0;  ///< the student's log-sum-exp
    bool bad = false, infinite = false, careful = false, clamped = false;
};

} // namespace opd::detail
