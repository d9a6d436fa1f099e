// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Rows of a dense divergence where student and teacher have vocabularies of different size: D over the ids that both have, and one bucket
// for all that either has beyond them. Both sides are normalised over their own vocabulary, p = softmax(z[0:V_s]/T), q = softmax(y[0:V_t]/T):
//
//   D(p, q) = Σ_{v<V_c} term(p[v], q[v]) + term(p_rest, q_rest)                V_c = teacher.common, p_rest = Σ_{v>=V_c} p[v]
//   c[v] = c_rest p[v]/p_rest                                                  on the student's ids beyond
//
// The common ids are dense_rows' as they are. What lies beyond is swept first, on its own; the bucket is one more entry, in double, of every
// sum over entries: of the sweep, the terms, the row in float64. It is no anchor but of a row in float64, as which a row is taken where it
// outweighs the common ids by far.
//
//   rests · [sweep · terms · … · write] of dense_rows, each with the bucket · pullback of the student's rest
#pragma once

#include <cmath>
#include <cstddef>

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

struct lumped_state : dense_state {
    row_sweep beyond = {};                               ///< the student's sums over its ids beyond the common ones
    double z = neg_inf<double>(), y = neg_inf<double>(); ///< each side's rest as one logit; -inf: no mass there
    double share = 0;                                    ///< c - p Σ c of the bucket
    double lse = 0;                                      ///< the student's, without overflow
    bool outweighs = false;                              ///< by most_rise

    OPD_HD bool student_has() const { return !is_neg_inf(z); }
    OPD_HD bool has_rest() const { return !is_neg_inf(z) || !is_neg_inf(y); }
};

template <class Engine, class Frame, class Student, class Teacher, class Program>
struct lumped_rows {
    using common_rows = dense_rows<Engine, Frame, Student, Teacher, Program>;
    using Z = typename Student::logit_type;
    using Y = typename Teacher::logit_type;
    using G = typename Student::gradient_type;
    using D = scalar<double>;
    using numbers = row_numbers<D, thread_anchors<D>, Program>;
    using entry_numbers = entrywise_numbers<D, thread_anchors<D>, Program>;
    using state_type = lumped_state;

    Frame frame;
    Student student;
    Teacher teacher;
    common_rows common;

    lumped_rows(const Frame& frame_, const Student& student_, const Teacher& teacher_, const Program& program,
                index_t vocab)
        : frame(frame_), student(student_), teacher(teacher_), common(frame_, student_, teacher_, program, vocab) {}

    std::size_t scratch_bytes() const { return common.scratch_bytes(); }

    template <class Team>
    OPD_HD void row(Team& team) const {
        team.template fold<students_rest>(*this);
        team.template fold<teachers_rest>(*this);
        team.template fold<sweep>(*this);
        if constexpr (has_selector<Program>) team.template fold<find_position>(common);
        if constexpr (common_rows::mixes) {
            team.template fold<measure>(*this);
            team.template each<mix>(*this);
        }
        if constexpr (common_rows::overlaps) team.template fold<overlap>(*this);
        if constexpr (!common_rows::single_sweep) team.template fold<terms>(*this);
        team.template fold<entrywise_terms>(*this);
        if constexpr (refinable_divergence<Program>) team.template fold<refine>(*this);
        team.template fold<careful_normalisers>(*this);
        if constexpr (common_rows::overlaps) team.template fold<careful_overlap>(*this);
        team.template fold<careful_terms>(*this);
        if constexpr (!common_rows::mixes) team.template fold<measure>(*this);
        if constexpr (has_selector<Program>) team.template each<typename common_rows::select>(common);
        team.template each<settle>(*this);
        team.template each<typename common_rows::write>(common);
        team.template each<pull_back>(*this);
        team.template each<zero_tiles<common_rows>>(common);
        team.template each<clear>(*this);
    }

    // --- what lies beyond the common ids --------------------------------------------------------------------------------

    struct rest_sweep {
        OPD_HD static bool due(const lumped_rows&, const state_type& st) { return st.good(); }
        OPD_HD static row_sweep merge(const row_sweep& a, const row_sweep& b) { return row_sweep::merge(a, b); }
        /// The rest as one logit.
        OPD_HD static double logit(state_type& st, row_sweep& all) {
            all.template close<false, raw_sums_needed{}>(true);
            st.report.bad |= all.contents.bad;
            const raw_sums& s = all.sums;
            return s.s < 0 || s.z_s <= lowest_logit ? neg_inf<double>() : s.z_s + ::log1p(s.student_mass) / s.inv_s;
        }
    };
    struct students_rest : rest_sweep {
        template <class At>
        OPD_HD OPD_INLINE static row_sweep part(const lumped_rows& k, const state_type& st, At at) {
            row_sweep p = row_sweep::begin(k.common.inv_s, 1, 1, false);
            const auto t = k.beyond(st);
            if (t.count > 0)
                Engine::template sweep<typename Engine::template number<Z>, false, raw_sums_needed{}>(p, t, at);
            return p;
        }
        OPD_HD static void finish(const lumped_rows&, state_type& st, row_sweep all) {
            st.z = rest_sweep::logit(st, all), st.beyond = all;
        }
    };
    struct teachers_rest : rest_sweep {
        template <class At>
        OPD_HD OPD_INLINE static row_sweep part(const lumped_rows& k, const state_type& st, At at) {
            row_sweep p = row_sweep::begin(k.common.inv_t, 1, 1, false);
            const index_t from = k.common.vocab, count = k.teacher.vocab() - from;
            const row_tile<Y, Y, G> t{k.teacher.tile({st.row}, 0) + from, nullptr, nullptr, 0, count};
            if (count > 0)
                Engine::template sweep<typename Engine::template number<Y>, false, raw_sums_needed{}>(p, t, at);
            return p;
        }
        OPD_HD static void finish(const lumped_rows&, state_type& st, row_sweep all) {
            st.y = rest_sweep::logit(st, all);
        }
    };
    OPD_HD row_tile<Z, Z, G> beyond(const state_type& st) const {
        const index_t from = common.vocab;
        return {student.tile({st.row}, 0) + from, nullptr,
                student.has_gradient() ? student.gradient_tile({st.row}, 0) + from : nullptr, 0,
                student.vocab() - from};
    }

    // --- the bucket as an entry -----------------------------------------------------------------------------------------

    /// Nats that the bucket may stand above the common ids' largest: raw sums rest on an anchor that is about as large as any entry.
    static constexpr double most_rise = 8;

    /// As the lanes see an entry: -inf is -1e30.
    OPD_HD static D number_of(double logit) { return D(is_neg_inf(logit) ? lowest_logit : logit); }

    /// Into the sums of a sweep that has anchors.
    OPD_HD void add_to(row_sweep& all, state_type& st) const {
        raw_sums& s = all.sums;
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
        if constexpr (common_rows::need.student_power)
            if (!none_s && !none_t) all.felt(reach_of(x, D(-rise_s)).v);
        const double phi = s.phi_power, bent = phi * delta.v;
        s.teacher_delta += f * (phi == 0 ? delta.v : ::expm1(bent < 80 ? bent : 80) / phi);
    }

    /// log(e^a + e^b); b may be -inf.
    OPD_HD static double log_add(double a, double b) {
        if (is_neg_inf(b)) return a;
        return a > b ? a + ::log1p(::exp(b - a)) : b + ::log1p(::exp(a - b));
    }

    /// A phase of the common ids, to whose sums the bucket's are added.
    template <class Phase>
    struct with_bucket {
        OPD_HD static bool due(const lumped_rows& k, const state_type& st) { return Phase::due(k.common, st); }
        template <class At>
        OPD_HD OPD_INLINE static auto part(const lumped_rows& k, const state_type& st, At at) {
            return Phase::part(k.common, st, at);
        }
        template <class Sums>
        OPD_HD static Sums merge(const Sums& a, const Sums& b) {
            return Phase::merge(a, b);
        }
    };

    struct sweep : with_bucket<typename common_rows::sweep> {
        OPD_HD static void finish(const lumped_rows& k, state_type& st, row_sweep all) {
            st.lse = log_add(all.sums.lse(), st.z * k.common.inv_s);
            k.add_to(all, st);
            common_rows::sweep::finish(k.common, st, all);
            if constexpr (!common_rows::mixes) k.after_sweep(st);
        }
    };
    struct mix {
        OPD_HD static bool due(const lumped_rows&, const state_type& st) { return st.good(); }
        template <class At>
        OPD_HD static void run(const lumped_rows& k, state_type& st, At at) {
            common_rows::mix::run(k.common, st, at);
            if (at.id == 0) k.after_sweep(st);
        }
    };
    OPD_HD void after_sweep(state_type& st) const {
        if (st.report.bad || !st.outweighs) return;
        if (frame.env.given_lse.empty()) st.report.lse = st.lse;
        if (st.report.infinite && frame.env.on_infinite.act != infinite::action::floor) return;
        st.next = row_step::careful;
        st.report.clamped = false;
    }
    struct overlap : with_bucket<typename common_rows::overlap> {
        OPD_HD static void finish(const lumped_rows& k, state_type& st, overlap_sums all) {
            if (st.has_rest()) {
                const numbers n(st.swept.sums, k.common.program_of(st));
                const dense_entry<D> e = n.template entry<false>(number_of(st.z), number_of(st.y));
                all.min_sum += min(e.p, e.q).v, all.distance += distance_term(n.row, e).v;
            }
            common_rows::overlap::finish(k.common, st, all);
        }
    };
    struct terms : with_bucket<typename common_rows::terms> {
        OPD_HD static void finish(const lumped_rows& k, state_type& st, two_sums all) {
            if (st.has_rest()) {
                const numbers n(st.swept.sums, k.common.program_of(st));
                const dense_entry<D> e = n.template entry<false>(number_of(st.z), number_of(st.y));
                all.a += k.common.program_of(st).term(n.row, e).v, all.b += k.common.program_of(st).c(n.row, e).v;
            }
            common_rows::terms::finish(k.common, st, all);
        }
    };
    struct entrywise_terms : with_bucket<typename common_rows::entrywise_terms> {
        OPD_HD static void finish(const lumped_rows& k, state_type& st, entrywise_sums all) {
            if (st.has_rest()) {
                const entry_numbers n = k.entrywise(st);
                const dense_entry<D> e = n.entry(number_of(st.z), number_of(st.y));
                all.loss += k.common.program_of(st).term(n.row, n.for_value(e)).v;
                all.c += k.common.program_of(st).c(n.row, e).v;
            }
            common_rows::entrywise_terms::finish(k.common, st, all);
        }
    };
    struct refine : with_bucket<typename common_rows::refine> {
        OPD_HD static void finish(const lumped_rows& k, state_type& st, double all) {
            if (st.has_rest()) {
                const raw_sums& s = st.swept.sums;
                const numbers n(s, k.common.program_of(st));
                const D z = number_of(st.z), y = number_of(st.y);
                all += k.common.program_of(st).nonnegative_term(entry_in_double(n, z, y, s, s.shift() + s.d_star())).v;
            }
            common_rows::refine::finish(k.common, st, all);
        }
    };
    struct careful_normalisers : with_bucket<typename common_rows::careful_normalisers> {
        OPD_HD static void finish(const lumped_rows& k, state_type& st, two_sums all) {
            common_rows::careful_normalisers::finish(k.common, st, all);
            const raw_sums& s = st.swept.sums;
            const auto& given = k.frame.env.given_lse;
            if (given.empty())
                st.log_z = log_add(st.log_z, (st.z - s.z_s) * s.inv_s);
            else if (st.outweighs)
                st.log_z = given[st.row] - s.z_s * s.inv_s; // the mass may be beyond double
            st.log_y = log_add(st.log_y, (st.y - s.y_t) * s.inv_t);
            k.common.find_careful_constants(st);
            if (st.student_has() && st.z > s.z_s)
                st.careful = careful_constants(k.common.program_of(st),
                                               k.common.careful_entry(st, st.z, st.y, false, 0), k.common.exponent());
        }
    };
    struct careful_overlap : with_bucket<typename common_rows::careful_overlap> {
        OPD_HD static void finish(const lumped_rows& k, state_type& st, log_sum_of_any all) {
            all.add(k.common.careful_log_min(st, st.z, st.y));
            common_rows::careful_overlap::finish(k.common, st, all);
        }
    };
    struct careful_terms : with_bucket<typename common_rows::careful_terms> {
        OPD_HD static void finish(const lumped_rows& k, state_type& st, two_sums all) {
            if (st.has_rest()) {
                const row_constants<D> row = st.careful;
                all.a +=
                    k.common.program_of(st).term(row, k.common.careful_entry(st, st.z, st.y, true, row.d_star.v)).v;
                all.b += k.common.program_of(st).c(row, k.common.careful_entry(st, st.z, st.y, false, row.d_star.v)).v;
            }
            common_rows::careful_terms::finish(k.common, st, all);
        }
    };
    struct measure : with_bucket<typename common_rows::measure> {
        OPD_HD static void finish(const lumped_rows& k, state_type& st, entropy_sums all) {
            const raw_sums& s = st.swept.sums;
            const auto log_of = [](double rise, double mass) {
                const double l = rise - ::log1p(mass);
                return l < 0 ? l : 0;
            };
            double p = 0, q = 0;
            if (!is_neg_inf(st.z)) {
                const double l = log_of((st.z - s.z_s) * s.inv_s, s.student_mass);
                p = ::exp(l), all.student += p * (p > 0 ? l : 0);
            }
            if (!is_neg_inf(st.y)) {
                const double l = log_of((st.y - s.y_t) * s.inv_t, s.teacher_mass);
                q = ::exp(l), all.teacher += q * (q > 0 ? l : 0);
            }
            all.overlap += p < q ? p : q;
            common_rows::measure::finish(k.common, st, all);
        }
    };
    OPD_HD entry_numbers entrywise(const state_type& st) const {
        return {st.swept.sums, common.program_of(st), st.raised, common.exponent()};
    }

    // --- its gradient ---------------------------------------------------------------------------------------------------

    /// What falls to the student's ids beyond. Where they have no mass the bucket has no logit to move, and its c is left out.
    struct settle {
        OPD_HD static bool due(const lumped_rows& k, const state_type& st) {
            return k.student.has_gradient() && k.common.live(st) && st.has_rest();
        }
        template <class At>
        OPD_HD static void run(const lumped_rows& k, state_type& st, At at) {
            if (at.id != 0) return;
            const auto& program = k.common.program_of(st);
            double p, c;
            if (st.next == row_step::write) {
                const numbers n(st.swept.sums, program);
                const dense_entry<D> e = n.template entry<false>(number_of(st.z), number_of(st.y));
                p = e.p.v, c = program.c(n.row, e).v;
            } else if (st.next == row_step::write_entrywise) {
                const entry_numbers n = k.entrywise(st);
                const dense_entry<D> e = n.entry(number_of(st.z), number_of(st.y));
                p = e.p.v, c = program.c(n.row, e).v;
            } else {
                const dense_entry<D> e = k.common.careful_entry(st, st.z, st.y, false, st.careful.d_star.v);
                p = e.p.v, c = program.c(st.careful, e).v;
            }
            if (st.student_has())
                st.share = c - p * st.sum_c;
            else
                st.sum_c -= c;
        }
    };
    struct pull_back {
        OPD_HD static bool due(const lumped_rows& k, const state_type& st) {
            return k.student.has_gradient() && k.common.live(st) && st.student_has();
        }
        template <class At>
        OPD_HD OPD_INLINE static void run(const lumped_rows& k, const state_type& st, At at) {
            const raw_sums& s = st.beyond.sums;
            const double g = st.factor * k.common.inv_s;
            Engine::pull_back(k.beyond(st), s, g * st.share / (1 + s.student_mass), k.frame.env.beta, at);
        }
    };
    /// Columns that no gradient went to.
    struct clear {
        template <class At>
        OPD_HD static void run(const lumped_rows& k, const state_type& st, At at) {
            const bool pulled = k.common.live(st) && st.student_has();
            clear_columns(k.student, st.row, pulled ? k.student.vocab() : k.common.vocab, k.frame.env.beta, at);
        }
    };
};

} // namespace OPD_ISA
} // namespace opd::detail
