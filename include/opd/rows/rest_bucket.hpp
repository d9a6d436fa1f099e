// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The rest-of-vocabulary bucket of dense_rows.hpp, where student and teacher have vocabularies of different size: D
// over the ids that both have, and one entry for all that either has beyond them. Both sides are normalised over
// their own vocabulary, p = softmax(z[0:V_s]/T), q = softmax(y[0:V_t]/T):
//
//   D(p, q) = Σ_{v<V_c} term(p[v], q[v]) + term(p_rest, q_rest)      V_c = teacher.common, p_rest = Σ_{v>=V_c} p[v]
//   c[v] = c_rest p[v]/p_rest                                        on the student's ids beyond
//
// What lies beyond is swept before the common ids. The bucket is one more entry, in double, of every sum over entries.
// The bucket is never the anchor of the float sums. If it holds far more mass than the common ids, the row is computed
// in float64 instead, where the bucket may be the anchor.
#pragma once

#include <cmath>
#include <type_traits>

#include "opd/config.hpp"
#include "opd/element.hpp"
#include "opd/lanes.hpp"
#include "opd/row_program.hpp"
#include "opd/rows/dense_rows.hpp"
#include "opd/rows/row_numbers.hpp"
#include "opd/rows/row_sweep.hpp"
#include "opd/rows/rows.hpp"
#include "opd/rows/tiles.hpp"

namespace opd::detail {
inline namespace OPD_ISA {

struct bucket_state : dense_state {
    row_sweep beyond = {};                               ///< the student's sums over its ids beyond the common ones
    double z = neg_inf<double>(), y = neg_inf<double>(); ///< each side's rest as one logit; -inf: no mass there
    double share = 0;                                    ///< c - p Σ c of the bucket
    double lse = 0;                                      ///< the student's, without overflow
    bool outweighs = false;                              ///< by most_rise

    OPD_HD bool student_has() const { return !is_neg_inf(z); }
    OPD_HD bool has_rest() const { return !is_neg_inf(z) || !is_neg_inf(y); }
};

struct rest_bucket {
    using state_type = bucket_state;
    using D = scalar<double>;

    // --- what lies beyond the common ids -----------------------------------------------------------------------------

    /// Of one side: what lies beyond as one logit.
    template <bool Students>
    struct sweep_beyond : if_good {
        static constexpr bool beyond_common = true;
        OPD_HD static const auto& side_of(const auto& k) {
            if constexpr (Students)
                return k.student;
            else
                return k.teacher;
        }
        OPD_HD static row_sweep start(const auto& k, const bucket_state&) {
            return row_sweep::begin(Students ? k.inv_s : k.inv_t, 1, 1, false);
        }
        template <class Rows, class At>
        OPD_HD OPD_INLINE static row_sweep part(const Rows& k, const bucket_state& st, At at) {
            const auto& side = side_of(k);
            using T = typename std::remove_cvref_t<decltype(side)>::logit_type;
            const row_tile<T, T, T> t{side.tile({st.row}, 0) + k.vocab, nullptr, nullptr, first_id(k.frame),
                                      side.vocab() - k.vocab};
            row_sweep p = start(k, st);
            using F = typename Rows::Engine::template number<T>;
            if (t.count > 0) Rows::Engine::template sweep<F, false, raw_sums_needed{}>(p, t, at);
            return p;
        }
        OPD_HD static row_sweep merge(const row_sweep& a, const row_sweep& b) { return row_sweep::merge(a, b); }
        OPD_HD static void finish(const auto&, bucket_state& st, row_sweep all) {
            all.template close<false, raw_sums_needed{}>(true);
            st.report.bad |= all.contents.bad;
            const raw_sums& s = all.sums;
            const bool none = s.s < 0 || s.z_s <= lowest_logit;
            (Students ? st.z : st.y) = none ? neg_inf<double>() : s.z_s + ::log1p(s.student_mass) / s.inv_s;
            if (Students) st.beyond = all;
        }
    };
    OPD_HD OPD_INLINE static void sweep(const auto& k, auto& team) {
        team.template fold<sweep_beyond<true>>(k);
        team.template fold<sweep_beyond<false>>(k);
    }

    // --- the bucket as an entry --------------------------------------------------------------------------------------

    /// Nats that the bucket may stand above the common ids' largest: raw sums rest on an anchor that is about as large
    /// as any entry.
    static constexpr double most_rise = 8;

    /// As the lanes see an entry: -inf is -1e30.
    OPD_HD static D number_of(double logit) { return D(is_neg_inf(logit) ? lowest_logit : logit); }

    /// log(e^a + e^b); b may be -inf.
    OPD_HD static double log_add(double a, double b) {
        if (is_neg_inf(b)) return a;
        return a > b ? a + ::log1p(::exp(b - a)) : b + ::log1p(::exp(a - b));
    }

    OPD_HD static bool outweighs(const bucket_state& st) { return st.outweighs; }
    OPD_HD static double lse(const bucket_state& st) { return st.outweighs ? st.lse : st.swept.sums.lse(); }

    template <class Rows>
    using numbers = row_numbers<D, thread_anchors<D>, typename Rows::Program>;

    /// The bucket at the step that its row is at.
    struct bucket_entry {
        double p, term, c;
    };
    template <class Rows>
    OPD_HD static bucket_entry entry(const Rows& k, const bucket_state& st) {
        const auto& program = k.program_of(st);
        if (st.next == row_step::careful || st.next == row_step::write_careful) {
            const row_constants<D> row = st.careful;
            const dense_entry<D> e = k.careful_entry(st, st.z, st.y, false, row.d_star.v);
            return {e.p.v, program.term(row, k.careful_entry(st, st.z, st.y, true, row.d_star.v)).v,
                    program.c(row, e).v};
        }
        const D z = number_of(st.z), y = number_of(st.y);
        if (st.next == row_step::entrywise || st.next == row_step::write_entrywise) {
            const entrywise_numbers<D, thread_anchors<D>, typename Rows::Program> n(st.swept.sums, program, st.raised,
                                                                                    k.exponent());
            const dense_entry<D> e = n.entry(z, y);
            return {e.p.v, program.term(n.row, n.for_value(e)).v, program.c(n.row, e).v};
        }
        const numbers<Rows> n(st.swept.sums, program);
        const dense_entry<D> e = n.template entry<false>(z, y);
        return {e.p.v, program.term(n.row, e).v, program.c(n.row, e).v};
    }

    /// Into the sums of a sweep that has anchors.
    template <class Rows>
    OPD_HD static void add(const Rows&, bucket_state& st, row_sweep& all) {
        raw_sums& s = all.sums;
        st.lse = log_add(s.lse(), st.z * s.inv_s);
        const bool none_s = is_neg_inf(st.z), none_t = is_neg_inf(st.y);
        st.outweighs = false;
        if (!st.has_rest() || s.s < 0 || s.t < 0 || s.z_s <= lowest_logit || s.y_t <= lowest_logit) return;
        all.contents.teacher_zero |= none_t && !none_s;
        all.contents.student_zero |= none_s && !none_t;
        const double z = number_of(st.z).v, y = number_of(st.y).v;
        const double rise_s = (z - s.z_s) * s.inv_s, rise_t = (y - s.y_t) * s.inv_t;
        st.outweighs = rise_s > most_rise || rise_t > most_rise;
        const double e = none_s ? 0 : ::exp(rise_s < 600 ? rise_s : 600),
                     f = none_t ? 0 : ::exp(rise_t < 600 ? rise_t : 600);
        const D edge(1e30), delta = min(max(D(rise_s - (y - s.y_s) * s.inv_t), -edge), edge);
        s.student_mass += e, s.teacher_mass += f;
        s.student_delta += e * delta.v;
        const D x = -D(s.k) * delta, steep(steepest);
        s.student_power += e * expm1(min(max(x, -steep), steep)).v;
        if constexpr (Rows::need.student_power)
            if (!none_s && !none_t) all.felt(reach_of(x, D(-rise_s)).v);
        const double phi = s.phi_power, bent = phi * delta.v;
        s.teacher_delta += f * (phi == 0 ? delta.v : ::expm1(bent < 80 ? bent : 80) / phi);
    }
    template <class Rows>
    OPD_HD static void add(const Rows& k, const bucket_state& st, overlap_sums& all) {
        if (!st.has_rest()) return;
        const numbers<Rows> n(st.swept.sums, k.program_of(st));
        const dense_entry<D> e = n.template entry<false>(number_of(st.z), number_of(st.y));
        all.min_sum += min(e.p, e.q).v, all.distance += distance_term(n.row, e).v;
    }
    OPD_HD static void add(const auto& k, const bucket_state& st, two_sums& all) {
        if (!st.has_rest()) return;
        const bucket_entry e = entry(k, st);
        all.a += e.term, all.b += e.c;
    }
    OPD_HD static void add(const auto& k, const bucket_state& st, entrywise_sums& all) {
        if (!st.has_rest()) return;
        const bucket_entry e = entry(k, st);
        all.loss += e.term, all.c += e.c;
    }
    /// Into a refined value.
    template <class Rows>
    OPD_HD static void add(const Rows& k, const bucket_state& st, double& all) {
        if (!st.has_rest()) return;
        const raw_sums& s = st.swept.sums;
        const auto& program = k.program_of(st);
        const numbers<Rows> n(s, program);
        all +=
            program.nonnegative_term(entry_in_double(n, number_of(st.z), number_of(st.y), s, s.shift() + s.d_star())).v;
    }
    OPD_HD static void add(const auto& k, const bucket_state& st, log_sum_of_any& all) {
        all.add(k.careful_log_min(st, st.z, st.y));
    }
    OPD_HD static void add(const auto&, const bucket_state& st, entropy_sums& all) {
        const raw_sums& s = st.swept.sums;
        const auto mass_of = [](double logit, double rise, double mass, double& entropy) {
            if (is_neg_inf(logit)) return 0.0;
            double l = rise - ::log1p(mass);
            l = l < 0 ? l : 0;
            const double p = ::exp(l);
            entropy += p * (p > 0 ? l : 0);
            return p;
        };
        const double p = mass_of(st.z, (st.z - s.z_s) * s.inv_s, s.student_mass, all.student);
        const double q = mass_of(st.y, (st.y - s.y_t) * s.inv_t, s.teacher_mass, all.teacher);
        all.overlap += p < q ? p : q;
    }
    OPD_HD static void add_to_normalisers(const auto& k, bucket_state& st) {
        const raw_sums& s = st.swept.sums;
        const auto& given = k.frame.env.given_lse;
        if (given.empty())
            st.log_z = log_add(st.log_z, (st.z - s.z_s) * s.inv_s);
        else if (st.outweighs)
            st.log_z = given[st.row] - s.z_s * s.inv_s; // the mass may be beyond double
        st.log_y = log_add(st.log_y, (st.y - s.y_t) * s.inv_t);
    }
    /// The student's top of a row in float64 may be the bucket.
    OPD_HD static void raise_top(const bucket_state& st, double& z, double& y) {
        if (st.z > z) z = st.z, y = st.y;
    }

    // --- its gradient ------------------------------------------------------------------------------------------------

    /// What falls to the student's ids beyond. Where they have no mass, the bucket has no logit to move, and its c is
    /// left out.
    struct share_out : by_one<share_out> {
        OPD_HD static bool due(const auto& k, const bucket_state& st) {
            return k.student.has_gradient() && k.live(st) && st.has_rest();
        }
        OPD_HD static void once(const auto& k, bucket_state& st) {
            const bucket_entry e = entry(k, st);
            if (st.student_has())
                st.share = e.c - e.p * st.sum_c;
            else
                st.sum_c -= e.c;
        }
    };
    struct write_beyond {
        static constexpr bool writes_gradient = true;
        template <class Rows, class At>
        OPD_HD OPD_INLINE static void run(const Rows& k, const bucket_state& st, At at) {
            const bool pulled = k.live(st) && st.student_has();
            if (pulled && k.student.has_gradient() && k.student.vocab() > k.vocab) {
                using tile = row_tile<typename Rows::Z, typename Rows::Z, typename Rows::G>;
                const tile t{k.student.tile({st.row}, 0) + k.vocab, nullptr,
                             k.student.gradient_tile({st.row}, 0) + k.vocab, 0, k.student.vocab() - k.vocab};
                const raw_sums& s = st.beyond.sums;
                const double g = st.factor * k.inv_s;
                Rows::Engine::pull_back(t, s, g * st.share / (1 + s.student_mass), k.frame.env.beta, at);
            }
            clear_columns(k.student, st.row, pulled ? k.student.vocab() : k.vocab, k.frame.env.beta, at);
        }
    };
    OPD_HD OPD_INLINE static void settle(const auto& k, auto& team) { team.template each<share_out>(k); }
    OPD_HD OPD_INLINE static void pull_back(const auto& k, auto& team) { team.template each<write_beyond>(k); }
};

} // namespace OPD_ISA
} // namespace opd::detail
