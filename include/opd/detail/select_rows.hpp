// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A selector's part of a row (estimators/selectors.hpp): the facts that it chooses by, and the weight that it gives.
#pragma once

#include "opd/batch.hpp"
#include "opd/config.hpp"
#include "opd/detail/rows.hpp"
#include "opd/diagnostics.hpp"
#include "opd/element.hpp"
#include "opd/row_facts.hpp"

namespace opd::detail {
inline namespace OPD_ISA {

/// NaN as bits: fast-math leaves it alone.
OPD_HD OPD_INLINE double unknown() { return bit_cast<double>(0x7ff8000000000000ull); }

/// What rows with a selector have found out.
struct selecting_state : row_state {
    sum_weights mixed = {};
    double entropy_p = unknown(), entropy_q = unknown(), overlap = unknown();
    double log_ratio = unknown(), gap = unknown();
};

/// Whether a selector reads an entropy.
template <class E>
OPD_HD OPD_INLINE bool reads_entropies(const E& e) {
    return (facts_read(e) & (fact::student_entropy | fact::teacher_entropy)) != 0;
}

/// Place of a row in its sequence.
template <space S>
OPD_HD double position_of(const row_offsets<S>& offsets, index_t row) {
    if (offsets.empty()) return unknown();
    index_t low = 0, high = offsets.size; // the last sequence that begins at or before the row
    while (high - low > 1) {
        const index_t middle = low + (high - low) / 2;
        (offsets[middle] <= row ? low : high) = middle;
    }
    return double(row - offsets[low]);
}

template <space S>
OPD_HD row_facts facts_before(const basic_env<S>& e, const selecting_state& st) {
    return {.row = st.row,
            .value = unknown(),
            .student_entropy = st.entropy_p,
            .teacher_entropy = st.entropy_q,
            .overlap = st.overlap,
            .position = position_of(e.offsets, st.row),
            .log_ratio = st.log_ratio,
            .gap = st.gap,
            .age = e.versions.empty() ? 0 : double(e.version) - double(e.versions[st.row])};
}

OPD_CALLS_EITHER
template <class E>
OPD_HD sum_weights mixed_by(const E& e, const row_facts& facts) {
    return e.selector.mix(facts);
}

/// The weight of a row whose value is known goes into its factor. Whether a gradient is left.
OPD_CALLS_EITHER
template <class E, space S>
OPD_HD bool weigh(const E& estimator, const basic_env<S>& e, selecting_state& st) {
    row_facts facts = facts_before(e, st);
    facts.value = st.report.loss;
    const double w = estimator.selector(facts);
    st.report.bad = !is_finite(w);
    if (st.report.bad) return false;
    st.factor *= w;
    st.report.weight = w;
    diagnostics& d = st.partial.diagnostics;
    ++d.selector_rows, d.selector_weight_sum += w, d.selector_left_out += w == 0;
    return w != 0;
}

} // namespace OPD_ISA
} // namespace opd::detail
