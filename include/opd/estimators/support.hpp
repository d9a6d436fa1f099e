// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Divergences on a support S of k ids a row, from a teacher::support cache. Z_p = Σ_S p, Z_q = Σ_S q.
//
//   renormalised{D}   D(p/Z_p, q/Z_q) on S                                   AsyncOPD eq. 8-10
//     needs z[S] alone: O(k) a row, with a sparse gradient through student::on_support; blind to the mass outside S
//   tail_bucket{D}    D over S and one bucket holding the rest
//     c[v] = p[v] (slope_v - slope_rest) on S, 0 elsewhere; dense gradient. The student's tail mass is summed directly over
//     v not in S, relative to its own largest logit, so that it never underflows; the teacher's comes with the cache, else
//     log1p(-Z_q) floored at k·eps of its type (counted). A lower bound of D, exact for k = V. A tail where every student logit
//     is -inf has p = 0 as any bucket: reverse KL gets 0 from it, forward KL is infinite if the teacher has mass there (policy
//     of env.on_infinite), the others get their own finite term. Its c moves no logit and is left out.
//
// Shapes: ids, log_q (N,k), log_tail (N). Ids are distinct and in range, or -1 for an unused slot, else the row is bad; so it is
// with a log-prob above 0 (by more than 1e-3) and without a used slot. The divergence is any of
// divergences.hpp or your own. Z_p and Z_q go to the diagnostics where known (Z_p: tail_bucket only).
#pragma once

#include <cmath>

#include "opd/batch.hpp"
#include "opd/config.hpp"
#include "opd/diagnostics.hpp"
#include "opd/element.hpp"
#include "opd/entries.hpp"
#include "opd/lanes.hpp"
#include "opd/row_program.hpp"
#include "opd/teacher.hpp"

namespace opd {

namespace detail {
inline namespace OPD_ISA {

/// One bucketed row: log p and log q of k ids and of the rest in; loss, and h = c - p Σc on the ids and of the rest, out. The
/// rest's h belongs to the ids outside S in proportion to their p. A rest without student mass has no logit to move: its term
/// counts, its c does not.
template <class D>
OPD_HD entry_row bucket_row(const D& program, support_entries& s, infinite on_infinite) {
    using F = scalar<double>;
    const int k = s.k;
    const double *log_p = s.log_p, *log_q = s.log_q, log_p_rest = s.log_p_rest, log_q_rest = s.log_q_rest;
    double *h = s.h, &h_rest = s.h_rest;
    entry_row out;
    int top = -1; // the student's largest bucket
    const auto log_p_of = [&](int j) { return j < k ? log_p[j] : log_p_rest; };
    const auto log_q_of = [&](int j) { return j < k ? log_q[j] : log_q_rest; };
    for (int j = 0; j <= k; ++j) {
        const double lp = log_p_of(j), lq = log_q_of(j);
        out.infinite |= (is_neg_inf(lq) && !is_neg_inf(lp) && infinite_where_teacher_zero(program)) ||
                        (is_neg_inf(lp) && !is_neg_inf(lq) && infinite_where_student_zero(program));
        if (!is_neg_inf(lp) && (top < 0 || lp > log_p_of(top))) top = j;
    }
    if (out.infinite && on_infinite.act != infinite::action::floor) return out;
    const bool floor_q = out.infinite && infinite_where_teacher_zero(program);
    const bool floor_p = out.infinite && infinite_where_student_zero(program);
    const double nothing =
        -1e6; // stands for -inf in differences: e^nothing is 0 by far, and a double still holds d* beside it
    const auto teacher = [&](int j) {
        const double lq = is_neg_inf(log_q_of(j)) ? nothing : log_q_of(j);
        return floor_q && lq < on_infinite.floor_at ? on_infinite.floor_at : lq;
    };
    const double lp_star = log_p_of(top), lq_star = teacher(top), d_star = lp_star - lq_star;
    row_constants<F> row{F(::exp(lp_star)), F(::exp(lq_star)), F(d_star), F(::exp(-d_star))};
    if constexpr (requires { program.slope_star(row); }) row.slope_star = program.slope_star(row);
    const auto entry = [&](int j, bool for_value) {
        double lp = is_neg_inf(log_p_of(j)) ? nothing : log_p_of(j);
        const double lq = teacher(j);
        dense_entry<F> e;
        e.p = F(lp < -745 ? 0 : ::exp(lp));
        e.q = F(is_neg_inf(log_q_of(j)) || log_q_of(j) < -745 ? 0 : ::exp(log_q_of(j)));
        if (floor_p && for_value && lp < on_infinite.floor_at) { // p, too: not every program has a logarithm
            lp = on_infinite.floor_at;
            if (e.q.v > 0) e.p = F(::exp(lp));
        }
        e.log_p = F(lp), e.log_q = F(lq), e.delta = F((lp - lp_star) - (lq - lq_star));
        return e;
    };
    double sum_c = 0;
    for (int j = 0; j <= k; ++j) {
        out.loss += program.term(row, entry(j, true)).v;
        if (j == k && is_neg_inf(log_p_rest)) break;
        const double c = program.c(row, entry(j, false)).v;
        sum_c += c;
        (j < k ? h[j] : h_rest) = c;
    }
    through_softmax(s, top, sum_c);
    const double most = 1e30; // beyond float: no finite number to report or store
    if (!is_finite(out.loss) || !is_finite(sum_c) || out.loss > most || out.loss < -most || sum_c > most ||
        sum_c < -most) {
        out.infinite = true;
        out.loss = h_rest = 0;
        for (int j = 0; j < k; ++j) h[j] = 0;
    }
    return out;
}

} // namespace OPD_ISA
} // namespace detail

template <class D>
struct renormalised {
    static_assert(divergence<D>,
                  "opd: renormalised takes a divergence: a struct with `F term(row_constants<F>, dense_entry<F>) "
                  "const` and `F c(row_constants<F>, dense_entry<F>) const`, templates on F; see "
                  "docs/concepts/divergence.md");
    static constexpr bool well_formed = divergence<D>;
    static constexpr cache_kind takes = cache_kind::support;
    static constexpr bool sparse_gradient = true; ///< student::on_support or student::logits
    D on_support = {};
    OPD_HD OPD_INLINE constexpr bool infinite_where_teacher_zero() const {
        return detail::infinite_where_teacher_zero(on_support);
    }
    OPD_HD OPD_INLINE constexpr bool infinite_where_student_zero() const {
        return detail::infinite_where_student_zero(on_support);
    }
    OPD_INLINE void validate() const {
        if constexpr (requires { on_support.validate(); }) on_support.validate();
    }
};
template <class D>
renormalised(D) -> renormalised<D>;

template <class D>
struct tail_bucket {
    static_assert(divergence<D>,
                  "opd: tail_bucket takes a divergence: a struct with `F term(row_constants<F>, dense_entry<F>) "
                  "const` and `F c(row_constants<F>, dense_entry<F>) const`, templates on F; see "
                  "docs/concepts/divergence.md");
    static constexpr bool well_formed = divergence<D>;
    static constexpr cache_kind takes = cache_kind::support;
    static constexpr bool reads_tail = true;
    D on_buckets = {};

    OPD_HD OPD_INLINE entry_row row(support_entries& s, entry_facts facts, diagnostics&) const {
        return detail::bucket_row(on_buckets, s, facts.on_infinite);
    }
    OPD_HD OPD_INLINE constexpr bool infinite_where_teacher_zero() const {
        return detail::infinite_where_teacher_zero(on_buckets);
    }
    OPD_HD OPD_INLINE constexpr bool infinite_where_student_zero() const {
        return detail::infinite_where_student_zero(on_buckets);
    }
    OPD_INLINE void validate() const {
        if constexpr (requires { on_buckets.validate(); }) on_buckets.validate();
    }
};
template <class D>
tail_bucket(D) -> tail_bucket<D>;

} // namespace opd
