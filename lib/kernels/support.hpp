// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Caches of a support, as C++ has them.
#pragma once

#include <string>
#include <type_traits>

#include "call.hpp"
#include "ids.hpp"

namespace opd_c::kernel {

/// What log-probs beside logits of Z are stored as.
template <class Z>
using log_of = std::conditional_t<std::is_same_v<Z, double>, double, float>;

inline opd::teacher::chosen_by chosen_by_of(const opd_teacher& t) {
    using by = opd::teacher::chosen_by;
    return one_of("teacher.chosen_by", t.chosen_by, {by::teacher, by::stale_student, by::student});
}

/// Most ids of a row: what the caller says, or all. The processor reads the offsets instead.
inline index_t widest_of(const opd_teacher& t, index_t vocab) {
    if (t.widest < 0) refuse("teacher.widest", "is negative");
    if (t.widest > vocab) refuse("teacher.widest", "is " + std::to_string(t.widest) + ", more than the vocabulary");
    return !on_device ? 0 : t.widest == 0 ? vocab : t.widest;
}

/// body(cache) with the caller's support, ragged or not.
template <class L, class Body>
opd::result with_support(const opd_teacher& t, index_t vocab, Body&& body) {
    if (t.kind == OPD_RAGGED_SUPPORT) {
        opd::teacher::ragged_support<std::int64_t, L, where> to;
        to.ids = id_vector(0, "teacher.ids", t.ids), to.log_q = vector<const L>("teacher.log_q", t.log_q);
        to.offsets = offsets("teacher.offsets", t.offsets);
        to.log_tail = vector<const L>("teacher.log_tail", t.log_tail);
        to.log_mu = vector<const L>("teacher.log_mu", t.log_mu);
        to.chosen_by = chosen_by_of(t);
        to.widest = widest_of(t, vocab);
        return body(to);
    }
    opd::teacher::support<std::int64_t, L, where> to;
    to.ids = id_matrix(0, "teacher.ids", t.ids), to.log_q = matrix<const L>("teacher.log_q", t.log_q);
    to.log_tail = vector<const L>("teacher.log_tail", t.log_tail);
    to.log_mu = matrix<const L>("teacher.log_mu", t.log_mu);
    to.chosen_by = chosen_by_of(t);
    return body(to);
}

/// The caller's estimator of a support that reads the student's normaliser over the vocabulary.
template <class L, class Student>
opd::result support_of_student(const call& c, const Student& s) {
    const opd::any_dense of = divergence_of(c.estimator);
    return with_support<L>(c.teacher, vocab_of(c.student), [&](const auto& t) {
        const auto run = [&](const auto& e) {
            return with_selector(c.estimator, e, [&](const auto& chosen) { return c.run(s, t, chosen); });
        };
        if (c.what == form::tail_bucket) return run(opd::any_tail_bucket{of});
        using opd::choice::partial;
        return run(opd::any_partial{c.what == form::generalised        ? partial::generalised
                                    : c.what == form::truncated_biased ? partial::truncated_biased
                                                                       : partial::reweighted,
                                    of});
    });
}

} // namespace opd_c::kernel
