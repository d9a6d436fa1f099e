// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A selector's part of a row (estimators/selectors.hpp): the facts that it chooses by, of which env.measure asks for
// some too, and the weight that it gives.
#pragma once

#include "opd/batch.hpp"
#include "opd/config.hpp"
#include "opd/diagnostics.hpp"
#include "opd/element.hpp"
#include "opd/row_facts.hpp"
#include "opd/rows/row_sweep.hpp"
#include "opd/rows/rows.hpp"
#include "opd/rows/tiles.hpp"

namespace opd::detail {
inline namespace OPD_ISA {

/// What is not known of a row.
OPD_HD OPD_INLINE double unknown() { return quiet_nan<double>(); }

/// What rows with a selector have found out.
struct selecting_state : row_state {
    sum_weights mixed = {};
    double entropy_p = unknown(), entropy_q = unknown(), overlap = unknown();
    double position = unknown(), log_ratio = unknown(), gap = unknown();
};

/// Whether a selector reads an entropy, of the facts that it reads.
OPD_HD OPD_INLINE bool reads_entropies(unsigned facts) {
    return (facts & (fact::student_entropy | fact::teacher_entropy)) != 0;
}

/// The facts that the selector of some rows reads.
OPD_HD unsigned facts_of_rows(const auto& k) {
    if constexpr (requires { k.facts; })
        return k.facts;
    else if constexpr (requires { k.program; })
        return facts_read(k.program);
    else
        return facts_read(k.estimator);
}

/// A row's position, where a selector reads it: the kept rows before it in its sequence.
struct find_position {
    OPD_HD static bool due(const auto& k, const selecting_state& st) {
        return st.good() && (facts_of_rows(k) & fact::position) != 0;
    }
    OPD_HD static index_t part(const auto& k, const selecting_state& st, auto at) {
        const auto& e = k.frame.env;
        const index_t first = e.offsets[sequence_of(e.offsets, e.offsets.size - 1, st.row)];
        return e.mask.kept_of((first < 0 ? 0 : first) + at.id, st.row,
                              at.count); // a device's offsets are whatever they are
    }
    OPD_HD static index_t merge(index_t a, index_t b) { return a + b; }
    OPD_HD static void finish(const auto&, selecting_state& st, index_t before) { st.position = double(before); }
};

/// The student's entropy of a row that has been swept, and, of a dense teacher, the teacher's entropy and the overlap,
/// where env.measure or a selector asks.
template <class Engine, class F, bool Teacher>
struct measure_entropies : sums_over_tiles<measure_entropies<Engine, F, Teacher>, entropy_sums, true> {
    template <class Rows>
    OPD_HD static bool due(const Rows& k, const typename Rows::state_type& st) {
        return (k.frame.env.measure.entropy || reads_entropies(facts_of_rows(k))) && st.good();
    }
    template <class Rows, class Tile, class At>
    OPD_HD OPD_INLINE static void tile(const Rows&, const typename Rows::state_type& st, entropy_sums& p, const Tile& t,
                                       At at) {
        Engine::template entropies<F, Teacher>(st.swept, p, t, at);
    }
    template <class Rows>
    OPD_HD static void finish(const Rows& k, typename Rows::state_type& st, const entropy_sums& all) {
        st.entropy_p = -all.student;
        if constexpr (Teacher) st.entropy_q = -all.teacher, st.overlap = all.overlap;
        if (!k.frame.env.measure.entropy) return;
        diagnostics& d = st.partial.diagnostics;
        ++d.student_entropy_rows, d.student_entropy_sum -= all.student;
        if constexpr (!Teacher) return;
        ++d.teacher_entropy_rows, d.teacher_entropy_sum -= all.teacher;
        ++d.overlap_rows, d.overlap_sum += all.overlap;
    }
};

template <space S>
OPD_HD row_facts facts_before(const basic_env<S>& e, const selecting_state& st) {
    return {.row = st.row,
            .value = unknown(),
            .student_entropy = st.entropy_p,
            .teacher_entropy = st.entropy_q,
            .overlap = st.overlap,
            .position = st.position,
            .log_ratio = st.log_ratio,
            .gap = st.gap,
            .age = e.versions.empty() ? 0 : double(e.version) - double(e.versions[st.row])};
}

OPD_CALLS_EITHER
OPD_HD sum_weights mixed_by(const auto& e, const row_facts& facts) { return e.selector.mix(facts); }

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

/// The weight that a selector gives a row of entries; 0: no gradient.
template <class Rows>
struct select_entries : if_good, by_one<select_entries<Rows>> {
    OPD_HD static void once(const Rows& k, typename Rows::state_type& st) {
        if (!weigh(k.estimator, k.frame.env, st)) st.live = false;
    }
};
/// A selector's phases of a row of entries, if its estimator has one.
template <class Rows, class Team>
OPD_HD void select_row(const Rows& k, Team& team) {
    if constexpr (has_selector<std::remove_cvref_t<decltype(k.estimator)>>) {
        team.template fold<find_position>(k);
        team.template each<select_entries<Rows>>(k);
    }
}

} // namespace OPD_ISA
} // namespace opd::detail
