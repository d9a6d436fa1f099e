// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Estimators of a support that read the student's normaliser over the vocabulary: tail_bucket, generalised,
// truncated_biased, reweighted.
#include "support.hpp"

opd::result opd_c::kernel::support(const call& c) {
    return with_logits_type(c.student,
                            [&]<class Z>(Z) { return support_of_student<log_of<Z>>(c, logits_of<Z, Z>(c.student)); });
}
