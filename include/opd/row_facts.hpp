// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What a call knows of a row before its gradient is scaled: what selectors (estimators/selectors.hpp) choose by.
#pragma once

#include "opd/config.hpp"

namespace opd {

/// Numbers of a row; NaN: not known here.
struct row_facts {
    index_t row = 0;
    double value; ///< L_r, before any weight: the divergence, or its estimate from draws. NaN while a mixture is chosen
    double
        student_entropy; ///< H(p), nats, at the student's temperature; on a renormalised support or a kept set: of p there
    double teacher_entropy; ///< H(q), likewise
    double overlap;         ///< Σ min(p, q)
    double position;        ///< in its sequence, from 0
    double log_ratio;       ///< of drawn tokens: Σ w (log p - log mu) / Σ w
    double gap;             ///< of drawn tokens: Σ w (log p - log q) / Σ w
    double age;             ///< staleness in versions; 0 if unknown
};

/// Facts that cost something, or need something of the call: a selector says which it reads, `reads()`, joined by |.
namespace fact {
inline constexpr unsigned student_entropy = 1; ///< one more read of the logits
inline constexpr unsigned teacher_entropy = 2; ///< with overlap; dense rows and renormalised supports
inline constexpr unsigned position = 4;        ///< env.offsets
inline constexpr unsigned drawn = 8;           ///< log_ratio, gap: caches of drawn tokens

// what is known of rows
inline constexpr unsigned of_dense = student_entropy | teacher_entropy | position; ///< and of renormalised supports
inline constexpr unsigned of_tokens = student_entropy | drawn | position;          ///< drawn ones
inline constexpr unsigned of_buckets = position; ///< supports that are not renormalised
} // namespace fact

} // namespace opd
