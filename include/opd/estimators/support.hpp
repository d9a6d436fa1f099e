// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Divergences on a support S of k ids a row, from a teacher::support cache. Z_p = Σ_S p, Z_q = Σ_S q.
//
//   opd::evaluate(be, student::logits{z, dz}, teacher::support{ids, log_q, log_tail}, tail_bucket{reverse_kl{}});
//
//   renormalised{D}   D(p/Z_p, q/Z_q) on S                                   AsyncOPD eq. 8-10
//     reads z[S] alone: O(k) a row, with a sparse gradient through student::on_support; blind to the mass outside S
//   tail_bucket{D}    D over S and one bucket that holds the rest
//     c[v] = p[v] (slope_v - slope_rest) on S, 0 elsewhere; dense gradient. A lower bound of D, exact for k = V.
//     The student's tail mass is summed over v not in S, relative to the largest logit there, so it never underflows.
//     The teacher's tail comes with the cache; else it is log1p(-Z_q), at least k·eps of its type (counted).
//     If every student logit of the tail is -inf, the bucket has p = 0: reverse KL gets 0 from it, forward KL is
//     infinite if the teacher has mass there (env.on_infinite), the others get their finite term. The bucket's c then
//     moves no logit and is left out.
//   generalised{D}    Σ_S of D's Bregman terms, q (f(r) - f'(1)(r - 1)), r = p/q; for KL p log(p/q) - p + q
//     a divergence on S of the unnormalised p and q: never negative, 0 only at p = q on S. c[v] = p (slope - slope at
//     p = q) on S, 0 elsewhere. Teacher mass outside S pulls nothing; student mass there is not pushed away.
//   reweighted{}      c[v] = sg(p/mu) p̃ log(p̃/q̃) on a stale student's support, p̃ = p/Z_p     AsyncOPD fig. 6
//     biased ("Top-k + RW"): it shows that reweighting does not repair a stale support.
//     Reads the cache's log_mu, and wants chosen_by::stale_student
//   truncated_biased{D}  Σ_S p log(p/q), or Σ_S q log(q/p), as several trainers ship it
//     no divergence: it can be negative and has a gradient at p = q. c = p (log(p/q) + 1), or -q, on S
//
// Shapes: ids, log_q (N,k), log_tail (N); a teacher::ragged_support has its own k in each row. Ids are distinct and in
// range, or -1 for an unused slot. Another id, a log-prob above 0 (by more than 1e-3), or a row without a used slot
// makes the row bad. D is any divergence of divergences.hpp or your own. Z_p, Z_q and the overlap on S go to the
// diagnostics; renormalised knows Z_p where env.given_lse is set.
#pragma once

#include <cmath>

#include "opd/batch.hpp"
#include "opd/config.hpp"
#include "opd/diagnostics.hpp"
#include "opd/element.hpp"
#include "opd/entries.hpp"
#include "opd/error.hpp"
#include "opd/estimators/divergences.hpp"
#include "opd/estimators/k_forms.hpp"
#include "opd/lanes.hpp"
#include "opd/row_program.hpp"
#include "opd/rows/row_numbers.hpp"
#include "opd/teacher.hpp"
#include "opd/token.hpp"
#include "opd/traits.hpp"

namespace opd {

namespace detail {
inline namespace OPD_ISA {

inline constexpr double no_log = -1e30; ///< stands for -inf in differences

/// One bucketed row: log p and log q of k ids and of the rest in; loss, and h = c - p Σc on the ids and of the rest,
/// out. The rest's h belongs to the ids outside S in proportion to their p. A rest without student mass has no logit
/// to move: its term counts, its c does not. Log-probs may be of any size: where the teacher's of the largest bucket
/// is so low that no double holds a slope relative to it, slopes are relative to none.
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
    out.bad = top < 0; // a student without mass
    if (out.bad) return out;
    log_sum_of_any overlap;
    if constexpr (reads_overlap<D>) {
        for (int j = 0; j <= k; ++j) overlap.add(log_p_of(j) < log_q_of(j) ? log_p_of(j) : log_q_of(j));
        out.infinite |= overlap.none() && infinite_where_disjoint(program);
    }
    if (out.infinite && on_infinite.act != infinite::action::floor) return out;
    const bool floor_q = out.infinite && infinite_where_teacher_zero(program);
    const bool floor_p = out.infinite && infinite_where_student_zero(program);
    const auto teacher = [&](int j) {
        const double lq = is_neg_inf(log_q_of(j)) ? no_log : log_q_of(j);
        return floor_q && lq < on_infinite.floor_at ? on_infinite.floor_at : lq;
    };
    double lp_star = log_p_of(top), lq_star = teacher(top), d_star = lp_star - lq_star;
    row_constants<F> row{F(::exp(lp_star)), F(::exp(lq_star)), F(d_star), F(::exp(-d_star))};
    if (!holds_anchor(d_star, exponent_of(program))) lp_star = lq_star = d_star = 0, row = {F(1), F(1), F(0), F(1)};
    if constexpr (requires { program.slope_star(row); }) row.slope_star = program.slope_star(row);
    if constexpr (reads_overlap<D>) set_overlap(row, overlap, on_infinite.floor_at);
    const auto entry = [&](int j, bool for_value) {
        double lp = is_neg_inf(log_p_of(j)) ? no_log : log_p_of(j);
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

/// D(p/Z_p, q/Z_q) on S: O(k) a row, blind to the mass outside S. AsyncOPD eq. 8-10.
template <class D>
struct renormalised {
    static_assert(divergence<D>,
                  "opd: renormalised takes a divergence: a struct with `F term(row_constants<F>, dense_entry<F>) "
                  "const` and `F c(row_constants<F>, dense_entry<F>) const`, templates on F; see "
                  "docs/concepts/divergence.md");
    static constexpr bool well_formed = divergence<D>;
    static constexpr cache_kind takes = cache_kind::support;
    static constexpr bool sparse_gradient = true; ///< student::on_support or student::logits
    static constexpr estimator_traits traits(law) { return {.mean = bias::biased}; }
    D on_support = {};
    OPD_HD OPD_INLINE constexpr bool infinite_where_teacher_zero() const {
        return detail::infinite_where_teacher_zero(on_support);
    }
    OPD_HD OPD_INLINE constexpr bool infinite_where_student_zero() const {
        return detail::infinite_where_student_zero(on_support);
    }
    OPD_HD OPD_INLINE constexpr bool infinite_where_disjoint() const {
        return detail::infinite_where_disjoint(on_support);
    }
    OPD_INLINE void validate() const {
        if constexpr (requires { on_support.validate(); }) on_support.validate();
    }
};
template <class D>
renormalised(D) -> renormalised<D>;

/// D over S and one bucket for the rest: a lower bound of D over the vocabulary, exact for k = V. Dense gradient.
template <class D>
struct tail_bucket {
    static_assert(divergence<D>,
                  "opd: tail_bucket takes a divergence: a struct with `F term(row_constants<F>, dense_entry<F>) "
                  "const` and `F c(row_constants<F>, dense_entry<F>) const`, templates on F; see "
                  "docs/concepts/divergence.md");
    static constexpr bool well_formed = divergence<D>;
    static constexpr cache_kind takes = cache_kind::support;
    static constexpr bool reads_tail = true;
    static constexpr estimator_traits traits(law) { return {.mean = bias::biased}; }
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
    OPD_HD OPD_INLINE constexpr bool infinite_where_disjoint() const {
        return detail::infinite_where_disjoint(on_buckets);
    }
    OPD_INLINE void validate() const {
        if constexpr (requires { on_buckets.validate(); }) on_buckets.validate();
    }
};
template <class D>
tail_bucket(D) -> tail_bucket<D>;

namespace detail {
inline namespace OPD_ISA {

/// A row of a sum over S alone, in terms of p and q of the whole vocabulary. at(p, q, delta) -> {value, c}; delta is
/// log p - log q.
template <class At>
OPD_HD entry_row partial_sum(support_entries& s, infinite on_infinite, bool teacher_zero, bool student_zero, At at) {
    entry_row out;
    for (int j = 0; j < s.k; ++j)
        out.infinite |= (teacher_zero && is_neg_inf(s.log_q[j]) && !is_neg_inf(s.log_p[j])) ||
                        (student_zero && is_neg_inf(s.log_p[j]) && !is_neg_inf(s.log_q[j]));
    if (out.infinite && on_infinite.act != infinite::action::floor) return out;
    const auto raised = [&](double x, bool zero) {
        return out.infinite && zero && x < on_infinite.floor_at ? on_infinite.floor_at : (is_neg_inf(x) ? no_log : x);
    };
    for (int j = 0; j < s.k; ++j) {
        const bool none = is_neg_inf(s.log_p[j]);
        const double lq = raised(s.log_q[j], teacher_zero), q = mass_of(s.log_q[j]);
        if (none && is_neg_inf(s.log_q[j])) continue;
        const double lp = raised(s.log_p[j], student_zero);
        out.loss += at(mass_of(lp), q, lp - lq).loss;
        if (!none) s.h[j] = at(mass_of(s.log_p[j]), q, s.log_p[j] - lq).c;
    }
    through_softmax(s);
    if (!(out.loss > -1e30 && out.loss < 1e30)) { // beyond float: no finite number to report or store
        out.infinite = true, out.loss = s.h_rest = 0;
        for (int j = 0; j < s.k; ++j) s.h[j] = 0;
    }
    return out;
}

} // namespace OPD_ISA
} // namespace detail

/// Σ_S of D's Bregman terms of the unnormalised p and q: never negative, 0 at p = q on S alone. Pulls nothing outside
/// S.
template <class D>
struct generalised {
    static_assert(refinable_divergence<D> || std::is_same_v<D, total_variation>,
                  "opd: generalised takes a divergence that has nonnegative_term(entry), as all of divergences.hpp but "
                  "total_variation do, which needs none; see docs/concepts/divergence.md");
    static constexpr bool well_formed = refinable_divergence<D> || std::is_same_v<D, total_variation>;
    static constexpr cache_kind takes = cache_kind::support;
    static constexpr estimator_traits traits(law) { return {.mean = bias::biased}; }
    D of = {};

    OPD_HD OPD_INLINE entry_row row(support_entries& s, entry_facts facts, diagnostics&) const {
        using F = scalar<double>;
        return detail::partial_sum(
            s, facts.on_infinite, infinite_where_teacher_zero(), infinite_where_student_zero(),
            [&](double p, double q, double delta) -> token_out {
                const row_constants<F> at_equality{F(1), F(1), F(0), F(1)};
                const dense_entry<F> e{F(p), F(q), F(delta), F(p > 0 ? ::log(p) : -1e6), F(q > 0 ? ::log(q) : -1e6)};
                const double c = of.c(at_equality, e).v;
                if constexpr (refinable_divergence<D>)
                    return {of.nonnegative_term(e).v, c};
                else
                    return {of.term(at_equality, e).v, c};
            });
    }
    OPD_HD constexpr bool infinite_where_teacher_zero() const { return detail::infinite_where_teacher_zero(of); }
    OPD_HD constexpr bool infinite_where_student_zero() const { return detail::infinite_where_student_zero(of); }
    OPD_INLINE void validate() const {
        if constexpr (requires { of.validate(); }) of.validate();
    }
};
template <class D>
generalised(D) -> generalised<D>;

/// Σ_S p log(p/q) or Σ_S q log(q/p) as some trainers ship it: no divergence, and its gradient at p = q is not 0.
template <class D>
struct truncated_biased {
    static constexpr bool forward = std::is_same_v<D, forward_kl>;
    static_assert(forward || std::is_same_v<D, reverse_kl>,
                  "opd: truncated_biased is of reverse_kl or forward_kl, the two that trainers ship");
    static constexpr bool well_formed = forward || std::is_same_v<D, reverse_kl>;
    static constexpr cache_kind takes = cache_kind::support;
    static constexpr estimator_traits traits(law) { return {bias::biased, meaning::surrogate, false}; }
    D of = {};

    OPD_HD OPD_INLINE entry_row row(support_entries& s, entry_facts facts, diagnostics&) const {
        return detail::partial_sum(s, facts.on_infinite, !forward, forward,
                                   [](double p, double q, double delta) -> token_out {
                                       if (forward) return {-q * delta, -q};
                                       return {p * delta, p * (delta + 1)};
                                   });
    }
    OPD_HD static constexpr bool infinite_where_teacher_zero() { return !forward; }
    OPD_HD static constexpr bool infinite_where_student_zero() { return forward; }
};
template <class D>
truncated_biased(D) -> truncated_biased<D>;

/// Top-k with importance weights on a stale student's support, AsyncOPD figure 6: biased; for comparisons.
struct reweighted {
    static constexpr cache_kind takes = cache_kind::support;
    static constexpr estimator_traits traits(law) { return {bias::biased, meaning::surrogate, true}; }
    OPD_HD static constexpr unsigned reads_columns() { return column::log_mu; }
    OPD_HD static constexpr bool infinite_where_teacher_zero() { return true; }

    OPD_HD OPD_INLINE entry_row row(support_entries& s, entry_facts facts, diagnostics& d) const {
        entry_row out;
        detail::log_sum_of_any of_p, of_q; // so that a mass below every double is one
        double sum_c = 0, largest = 0;     // of |c|
        for (int j = 0; j < s.k; ++j) {
            const bool none = detail::is_neg_inf(s.log_p[j]);
            out.infinite |= detail::is_neg_inf(s.log_q[j]) && !none;
            out.bad |= s.log_mu[j] < -9000 && !none; // not of mu's best, or a server's number for none
            of_p.add(s.log_p[j]), of_q.add(s.log_q[j]);
        }
        if (out.infinite && facts.on_infinite.act != infinite::action::floor) return out;
        out.bad |= of_p.none() || of_q.none();
        if (out.bad) return out;
        // relative to the largest, so that log-probs of any size differ by what they do
        const double sum_p = ::log(of_p.sum), sum_q = ::log(of_q.sum), floor_at = facts.on_infinite.floor_at;
        const auto log_share = [&](int j) { return (s.log_p[j] - of_p.top) - sum_p; };
        for (int j = 0; j < s.k; ++j) {
            if (detail::is_neg_inf(s.log_p[j])) continue;
            double lq = (s.log_q[j] - of_q.top) - sum_q;
            if (out.infinite && !(lq > floor_at)) lq = floor_at;
            const double l = s.log_p[j] - s.log_mu[j];
            d.saturated += l != detail::within_80(l);
            const double lp = log_share(j);
            s.h[j] = ::exp(detail::within_80(l)) * detail::mass_of(lp) * (lp - lq);
            out.loss += s.h[j], sum_c += s.h[j];
            const double size = s.h[j] < 0 ? -s.h[j] : s.h[j];
            if (!(size <= largest)) largest = size;
        }
        for (int j = 0; j < s.k; ++j) s.h[j] -= detail::mass_of(log_share(j)) * sum_c;
        s.h_rest = 0;
        if (!(largest < 1e37)) { // beyond float: no finite number to report or store
            out.infinite = true, out.loss = 0;
            for (int j = 0; j < s.k; ++j) s.h[j] = 0;
        }
        return out;
    }
    template <class Teacher>
    void validate_cache(const Teacher& t) const {
        if (t.chosen_by != teacher::chosen_by::stale_student)
            throw invalid_input("teacher.chosen_by",
                                "must be stale_student: reweighting is of a support that mu chose");
    }
};

} // namespace opd
