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

#include "opd/config.hpp"
#include "opd/row_program.hpp"
#include "opd/teacher.hpp"

namespace opd {

template <class D>
struct renormalised {
    static_assert(divergence<D>,
                  "opd: renormalised takes a divergence: a struct with `F term(row_constants<F>, dense_entry<F>) "
                  "const` and `F c(row_constants<F>, dense_entry<F>) const`, templates on F; see "
                  "docs/concepts/divergence.md");
    static constexpr cache_kind takes = cache_kind::support;
    static constexpr bool sparse_gradient = true; ///< student::on_support or student::logits
    D on_support = {};
    OPD_HD constexpr bool infinite_where_teacher_zero() const {
        return detail::infinite_where_teacher_zero(on_support);
    }
    OPD_HD constexpr bool infinite_where_student_zero() const {
        return detail::infinite_where_student_zero(on_support);
    }
    void validate() const {
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
    static constexpr cache_kind takes = cache_kind::support;
    D on_buckets = {};
    OPD_HD constexpr bool infinite_where_teacher_zero() const {
        return detail::infinite_where_teacher_zero(on_buckets);
    }
    OPD_HD constexpr bool infinite_where_student_zero() const {
        return detail::infinite_where_student_zero(on_buckets);
    }
    void validate() const {
        if constexpr (requires { on_buckets.validate(); }) on_buckets.validate();
    }
};
template <class D>
tail_bucket(D) -> tail_bucket<D>;

} // namespace opd
