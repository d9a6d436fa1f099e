// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Rows of drawn tokens:
//
//   sweep (or the given log-sum-exp) · gather · the estimator · pullback       2 reads (1), 1 write
//
// Repeated ids are summed. Id -1 in a weighted cache is an unused slot.
#pragma once

#include <type_traits>

#include "opd/config.hpp"
#include "opd/element.hpp"
#include "opd/entries.hpp"
#include "opd/ratio_sketch.hpp"
#include "opd/rows/entry_rows.hpp"
#include "opd/rows/rows.hpp"
#include "opd/rows/sparse_math.hpp"
#include "opd/source.hpp"

namespace opd::detail {
inline namespace OPD_ISA {

/// Whether a row's n entries say nothing of mass that mu has outside the exact ones. On the host the call has thrown.
template <class Teacher>
OPD_HD bool misses_tail(const Teacher& t, index_t row, const sampled_entry* e, index_t n) {
    if constexpr (Teacher::kind == cache_kind::weighted) {
        if (t.log_tail_mu.empty() || is_neg_inf(t.log_tail_mu[row])) return false;
        for (index_t j = 0; j < n; ++j)
            if (!e[j].exact) return false;
        return true;
    } else {
        return false;
    }
}

/// What the estimator says of a row's gathered entries, which move up over unused slots. How many there are; 0 where
/// the row has no gradient.
OPD_HD index_t decide_drawn(const auto& k, selecting_state& st, sampled_entry* e) {
    index_t n = 0;
    for (index_t j = 0; j < k.slots(); ++j) {
        if (e[j].id == -1) continue;
        if (e[j].id < 0) {
            st.report.bad = true;
            return 0;
        }
        if (n != j) e[n] = e[j];
        ++n;
    }
    st.report.bad = n == 0 || misses_tail(k.teacher, st.row, e, n);
    if (st.report.bad) return 0;
    using cache = std::remove_cvref_t<decltype(k.teacher)>;
    if constexpr (may_miss_mu<cache>)
        for (index_t j = 0; j < n; ++j)
            st.partial.diagnostics.missing_mu +=
                is_nan(double(element<typename cache::log_type>::load(k.teacher.log_mu(st.row, e[j].slot))));
    entry_facts facts = facts_of(k.frame.env, st.row);
    take_columns(facts, k.teacher);
    const entry_row o = k.estimator.row(e, static_cast<int>(n), facts, st.partial.diagnostics);
    st.report.bad = o.bad;
    if (o.bad) return 0;
    st.report.loss = o.loss, st.report.infinite = o.infinite;
    if constexpr (has_selector<std::remove_cvref_t<decltype(k.estimator)>>) {
        double all = 0;
        st.log_ratio = st.gap = 0;
        for (index_t j = 0; j < n; ++j) {
            all += e[j].weight;
            st.log_ratio += e[j].weight * (e[j].log_p - e[j].log_mu);
            st.gap += e[j].weight * (e[j].log_p - e[j].log_q);
        }
        st.log_ratio /= all, st.gap /= all;
    }
    if (const auto& ratios = k.frame.env.measure.ratios; !ratios.empty())
        for (index_t j = 0; j < n; ++j) count_one(ratios[ratio_sketch::bin_of(e[j].log_p - e[j].log_mu)]);
    st.report.clamped = clamps(k.frame.env, o.loss);
    st.live = !st.report.clamped;
    return st.live ? n : 0;
}

/// A team's scratch in a row of m drawn tokens.
struct sampled_arrays {
    sampled_entry* entries;
    entry_c* c;
    OPD_HD sampled_arrays(carver& scratch, index_t m)
        : entries(scratch.take<sampled_entry>(m)), c(scratch.take<entry_c>(m)) {}
};
template <class Engine, class Frame, class Student, class Teacher, class Estimator>
struct sampled_rows : rows_of_entries<Engine, Frame, Student, Teacher, Estimator, sampled_arrays> {
    using arrays = sampled_arrays;
    using base = rows_of_entries<Engine, Frame, Student, Teacher, Estimator, arrays>;
    using base::base;
    using typename base::G;
    using typename base::Z;
    using state_type = entry_state;
    using F = typename Engine::template number<Z>;
    using sweep = student_sweep<Engine, sampled_rows, false>;
    using measure = measure_entropies<Engine, F, false>;
    static constexpr bool spreads = true;
    OPD_HD OPD_OF_KERNEL void row(auto& team) const {
        team.template each<take_given>(*this);
        fold_sweep<Engine, sweep>(*this, team);
        team.template each<gather>(*this);
        team.template each<decide>(*this);
        team.template fold<measure>(*this);
        select_row(*this, team);
        team.template each<merge_repeats>(*this);
        team.template each<sum>(*this);
        team.template each<with_softmax>(*this);
        pullback<Engine, sampled_rows>::run(*this, team);
    }
    OPD_HD bool sweeps(const state_type& st) const { return st.good() && !this->given_lse(st.row); }

    /// A finite log-sum-exp vouches for the row's contents.
    struct take_given : by_one<take_given> {
        OPD_HD static bool due(const sampled_rows& k, const state_type& st) { return st.good() && k.given_lse(st.row); }
        OPD_HD static void once(const sampled_rows& k, state_type& st) {
            const double lse = *k.given_lse(st.row);
            st.report.bad = !is_finite(lse);
            if (st.report.bad) return;
            st.swept = {};
            anchor_at<typename F::value_type>(st.swept.sums, lse, k.inv_s);
            st.report.lse = lse;
        }
    };

    /// Slots of the cache into entries; id -1: unused, -2: out of range.
    struct gather : if_good {
        static constexpr bool reads_slots = true;
        OPD_HD static void run(const sampled_rows& k, const state_type& st, auto at) {
            sampled_entry* e = k.at(st).entries;
            for (index_t j = at.id; j < k.slots(); j += at.count)
                e[j] = gathered(k.student_at(st, j), k.of_student(st), k.teacher, k.frame.env.frozen, j,
                                whole_vocab(k.frame, k.vocab), k.inv_s, st.report.lse);
        }
    };

    struct decide : if_good, by_one<decide> {
        OPD_HD static void once(const sampled_rows& k, state_type& st) {
            const arrays a = k.at(st);
            st.entries = decide_drawn(k, st, a.entries);
            for (index_t j = 0; j < st.entries; ++j) a.c[j] = {a.entries[j].id, j, a.entries[j].c};
        }
    };

    /// The first slot of an id takes the c of those that repeat it.
    struct merge_repeats : if_live {
        OPD_HD OPD_INLINE static void run(const sampled_rows& k, state_type& st, auto at) {
            Engine::merge_repeats(k.filled(st), st.entries, at);
        }
    };
    struct sum : if_live, by_one<sum> {
        OPD_HD static void once(const sampled_rows& k, state_type& st) {
            entry_c* c = k.filled(st);
            index_t n = 0;
            st.sum_c = 0;
            for (index_t j = 0; j < st.entries; ++j) {
                if (c[j].slot < 0) continue; // merged into another
                if (n != j) c[n] = c[j];
                st.sum_c += c[n++].c;
            }
            st.entries = n;
            st.share = -st.sum_c / (1 + st.swept.sums.student_mass);
        }
    };
    /// c to c - p Σc
    struct with_softmax : if_live {
        OPD_HD static void run(const sampled_rows& k, const state_type& st, auto at) {
            const arrays a = k.at(st);
            for (index_t j = at.id; j < st.entries; j += at.count) {
                const auto& student = k.student_at(st, a.entries[a.c[j].slot].slot);
                a.c[j].c -= p_of(student.logit(k.of_student(st), a.c[j].id), st.swept.sums) * st.sum_c;
            }
        }
    };
};

} // namespace OPD_ISA
} // namespace opd::detail
