// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Rows of a support: k ids, or each row's own number, and all others as one tail.
//
//   gather · sweep of v not in S · the estimator · pullback                    2 reads, 1 write
//
// Id -1 is an unused slot.
#pragma once

#include "opd/caches.hpp"
#include "opd/config.hpp"
#include "opd/element.hpp"
#include "opd/entries.hpp"
#include "opd/rows/entry_rows.hpp"
#include "opd/rows/rows.hpp"
#include "opd/rows/sparse_math.hpp"

namespace opd::detail {
inline namespace OPD_ISA {

/// A team's scratch in a row of a support of k slots.
template <class Engine>
struct support_arrays {
    entry_c* c;
    double *log_p, *log_q, *h, *log_mu; // log_p: at first the logits
    std::byte* set;                     // the engine's
    OPD_HD support_arrays(carver& scratch, index_t k)
        : c(scratch.take<entry_c>(k)), log_p(scratch.take<double>(k)), log_q(scratch.take<double>(k)),
          h(scratch.take<double>(k)), log_mu(scratch.take<double>(k)),
          set(scratch.take<std::byte>(Engine::id_set::bytes(k))) {}
};

template <class Engine, class Frame, class Student, class Teacher, class Estimator>
struct support_rows : rows_of_entries<Engine, Frame, Student, Teacher, Estimator, support_arrays<Engine>> {
    using arrays = support_arrays<Engine>;
    using base = rows_of_entries<Engine, Frame, Student, Teacher, Estimator, arrays>;
    using base::base;
    using typename base::G;
    using typename base::L;
    using typename base::Z;
    struct state_type : entry_state {
        typename Engine::id_set excluded = {};
    };
    using sweep = student_sweep<Engine, support_rows, true>;
    OPD_HD OPD_OF_KERNEL void row(auto& team) const {
        team.template fold<gather>(*this);
        team.template fold<exclude>(*this);
        fold_sweep<Engine, sweep>(*this, team);
        team.template each<decide>(*this);
        select_row(*this, team);
        pullback<Engine, support_rows>::run(*this, team);
    }
    OPD_HD bool sweeps(const state_type& st) const { return st.good(); }

    /// The cache's slots, and whether one of them is bad.
    struct gather : finds_bad {
        OPD_HD static int part(const support_rows& k, const state_type& st, auto at) {
            const arrays a = k.at(st);
            const auto row = slots_of(k.teacher, st.row);
            int bad = 0;
            for (index_t j = at.id; j < row.count; j += at.count) {
                const auto id = static_cast<index_t>(row.ids[j]);
                a.c[j].id = id;
                a.log_p[j] = neg_inf<double>(); // where another rank has the id, or nobody
                if (id == -1) continue;
                const bool in = id >= 0 && id < whole_vocab(k.frame, k.vocab);
                const double log_q = load_log(row.log_q[j]);
                bad |= !in || is_nan(log_q) || log_q > 1e-3;
                if (const index_t own = in ? own_id(k.frame, id, k.vocab) : -1; own >= 0)
                    a.log_p[j] = load_log(k.student.logit(k.of_student(st), own));
                a.log_q[j] = log_q;
                if (row.log_mu) {
                    a.log_mu[j] = double(element<L>::load(row.log_mu[j]));
                    bad |= is_nan(a.log_mu[j]) || a.log_mu[j] > 1e-3;
                }
            }
            return bad;
        }
    };
    /// The set of used ids, and whether one of them repeats.
    struct exclude : finds_bad {
        OPD_HD OPD_INLINE static int part(const support_rows& k, state_type& st, auto at) {
            const arrays a = k.at(st);
            return st.excluded.take(a.c, slots_of(k.teacher, st.row).count, a.set, at);
        }
    };

    struct decide : if_good, by_one<decide> {
        OPD_HD static void once(const support_rows& k, state_type& st) {
            st.report.bad = true; // until the end
            const arrays a = k.at(st);
            const index_t slots = slots_of(k.teacher, st.row).count;
            int n = 0; // used ones
            for (index_t j = 0; j < slots; ++j) {
                if (a.c[j].id == -1) continue;
                a.c[n].id = a.c[j].id, a.log_p[n] = a.log_p[j], a.log_q[n] = a.log_q[j], a.log_mu[n] = a.log_mu[j];
                ++n;
            }
            if (n == 0) return;
            const L* stated = k.teacher.log_tail.empty() ? nullptr : &k.teacher.log_tail[cache_row(k.teacher, st.row)];
            const raw_sums& tail = st.swept.sums;
            const support_answer all =
                answer_support(k.estimator, tail, a.log_p, a.log_q, k.teacher.log_mu.empty() ? nullptr : a.log_mu, a.h,
                               n, whole_vocab(k.frame, k.vocab) - n, k.inv_s, k.given_lse(st.row), stated,
                               facts_of(k.frame.env, st.row), st.partial.diagnostics);
            st.report.lse = all.student.lse;
            if (!all.good) return;
            st.report.bad = false;
            st.report.loss = all.row.loss, st.report.infinite = all.row.infinite;
            st.report.clamped = clamps(k.frame.env, all.row.loss);
            if (st.report.clamped) return;
            for (int j = 0; j < n; ++j) a.c[j].c = a.h[j];
            const bool none = is_neg_inf(all.student.log_tail);
            st.share = none ? 0 : all.h_rest / (1 + tail.student_mass);
            if (none) st.swept.sums = all.student.sums; // an anchor with mass
            st.entries = n;
            st.live = true;
        }
    };
};

} // namespace OPD_ISA
} // namespace opd::detail
