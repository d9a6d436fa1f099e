// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What lies between the V-sized phases of a row of few entries (sweep, pullback) and its estimator (entries.hpp), in
// double, on the CPU and on the GPU: gathering what the cache says, the student's side of a support, the teacher's
// tail.
#pragma once

#include <cmath>

#include "opd/batch.hpp"
#include "opd/config.hpp"
#include "opd/diagnostics.hpp"
#include "opd/element.hpp"
#include "opd/entries.hpp"
#include "opd/lanes.hpp"
#include "opd/row_program.hpp"
#include "opd/source.hpp"
#include "opd/teacher.hpp"

namespace opd::detail {
inline namespace OPD_ISA {

/// An entry's c; later its gradient.
struct entry_c {
    index_t id;
    index_t slot; ///< keeps equal ids in their order; -1: merged into an earlier one
    double c;
};

/// The first of ascending numbers that is at least x; `last` if none is.
template <class T>
OPD_HD const T* first_from(const T* first, const T* last, index_t x) {
    while (first < last) {
        const T* const middle = first + (last - first) / 2;
        if (static_cast<index_t>(*middle) < x)
            first = middle + 1;
        else
            last = middle;
    }
    return first;
}

/// log p of one id from its logit and the log-sum-exp, and from nothing else: whoever is handed the log-sum-exp gets
/// the same bits as who swept the row.
OPD_HD double log_p_of(const auto& z, double inv_t, double lse) {
    const double x = load_log(z);
    return is_neg_inf(x) ? neg_inf<double>() : pin(x * inv_t) - lse;
}
/// p of one id, from the row's sums: right in 1 - p, too.
OPD_HD double p_of(const auto& z, const raw_sums& s) {
    const double x = load_log(z);
    return is_neg_inf(x) ? 0 : ::exp((x - s.z_s) * s.inv_s) / (1 + s.student_mass);
}
/// Sums that stand for a given log-sum-exp. The anchor is a number that the row's arithmetic can hold; S takes what
/// is left.
template <class Value>
OPD_HD void anchor_at(raw_sums& s, double lse, double inv_t) {
    s.inv_s = inv_t;
    s.z_s = double(static_cast<Value>(lse / inv_t));
    s.student_mass = ::expm1(lse - s.z_s * inv_t);
    s.s = 0;
}

/// The least eps with 1 + eps > 1 in the numbers that a storage type holds.
template <class L>
OPD_HD double storage_epsilon() {
    double eps = 1;
    while (eps > 0x1p-60) {
        const auto next = static_cast<arithmetic_t<L>>(1 + eps / 2);
        if (!(pin(double(element<L>::load(element<L>::store(next)))) > 1)) break;
        eps /= 2;
    }
    return eps;
}

/// log of the teacher's mass outside a support of k ids, from the mass inside where the cache does not state it: 1 -
/// Z_q, not below k·eps of the cache's type (counted). `outside`: ids that are not in the support. Where the student
/// has no mass on them either, a floor would stand for nothing.
template <class L>
OPD_HD double inferred_log_tail(double z_q, int k, index_t outside, bool student_has_none, diagnostics& d) {
    const double least = double(k) * storage_epsilon<L>(), rest = 1 - z_q;
    const bool floored = !(rest >= least);
    if (outside == 0 || (floored && student_has_none)) return neg_inf<double>();
    d.tail_floored += floored;
    return ::log(floored ? least : rest);
}

/// The student's row as the sums over v not in S and the logits in S make it.
struct joined_row {
    raw_sums sums; ///< over every v but the anchor
    double lse = 0;
    double log_tail = 0; ///< log p of the rest; -inf: no logit outside S has mass
    bool good = false;
};
/// `tail`: sums over v not in S, relative to the largest logit there, so that nothing underflows. z (k): logits of S
/// in, log p out. `given_lse` may be null.
OPD_HD inline joined_row join_support(const raw_sums& tail, double* z, int k, double inv_t, const double* given_lse) {
    joined_row out;
    raw_sums& s = out.sums;
    const bool has_tail = tail.s >= 0 && tail.z_s > -1e30;
    int top = -1;
    for (int j = 0; j < k; ++j)
        if (!is_neg_inf(z[j]) && (top < 0 ? !has_tail || z[j] > tail.z_s : z[j] > z[top])) top = j;
    if (top < 0 && !has_tail) return out;
    s.inv_s = inv_t, s.s = 0;
    s.z_s = top < 0 ? tail.z_s : z[top];
    s.student_mass =
        top < 0 ? tail.student_mass : (has_tail ? ::exp((tail.z_s - s.z_s) * inv_t) * (1 + tail.student_mass) : 0);
    for (int j = 0; j < k; ++j) s.student_mass += j == top || is_neg_inf(z[j]) ? 0 : ::exp((z[j] - s.z_s) * inv_t);
    double log_sum = ::log1p(s.student_mass);
    if (given_lse) {
        if (!is_finite(*given_lse)) return out;
        out.lse = *given_lse;
        log_sum = out.lse - pin(s.z_s * inv_t); // the mass may be beyond double
        s.student_mass = ::expm1(log_sum);
    } else {
        out.lse = s.lse();
    }
    out.log_tail = has_tail ? (tail.z_s - s.z_s) * inv_t + ::log1p(tail.student_mass) - log_sum : neg_inf<double>();
    for (int j = 0; j < k; ++j) z[j] = is_neg_inf(z[j]) ? neg_inf<double>() : (z[j] - s.z_s) * inv_t - log_sum;
    out.good = true;
    return out;
}

/// log p as a cache of L would have stored it.
template <class L>
OPD_HD double rounded(double x) {
    if (is_neg_inf(x)) return x;
    return double(element<L>::load(element<L>::store(static_cast<arithmetic_t<L>>(x))));
}

/// Slot j of a row of drawn tokens; id -1: unused, -2: out of range, and then nothing else is set. `lse`: the
/// student's.
template <class Student, class Teacher, space S>
OPD_HD sampled_entry gathered(const Student& student, row_place at, const Teacher& t, const frozen_batch<S>& frozen,
                              index_t j, index_t vocab, double inv_t, double lse) {
    using L = typename Teacher::log_type;
    constexpr bool weighted = Teacher::kind == cache_kind::weighted;
    const index_t row = at.row;
    sampled_entry x{};
    x.id = static_cast<index_t>(t.ids(row, j));
    if (x.id < 0 || x.id >= vocab) {
        x.id = weighted && x.id == -1 ? -1 : -2;
        return x;
    }
    x.log_p = rounded<L>(log_p_of(student.logit(at, x.id), inv_t, lse));
    x.log_mu = double(element<L>::load(t.log_mu(row, j)));
    if (t.rollout.mode == logprob_mode::raw) {
        x.log_mu /= double(t.rollout.drawn_with.temperature);
        if (!t.rollout.log_norm.empty()) x.log_mu -= double(element<L>::load(t.rollout.log_norm[row]));
    }
    if constexpr (may_miss_mu<Teacher>)
        if (is_nan(x.log_mu)) x.log_mu = x.log_p;
    x.log_q = load_log(t.log_q(row, j));
    x.log_prox = t.log_prox.empty() ? x.log_mu : double(element<L>::load(t.log_prox(row, j)));
    x.log_ref = t.log_ref.empty() ? x.log_mu : double(element<L>::load(t.log_ref(row, j)));
    if constexpr (weighted) {
        x.weight = double(t.weight(row, j));
        x.exact = !t.exact.empty() && t.exact(row, j) != 0;
    } else {
        x.weight = 1 / double(t.ids.cols);
    }
    x.slot = static_cast<int>(j);
    x.keep = frozen.keep.empty() || frozen.keep(row, j) != 0;
    x.factor = !x.keep ? 0 : (frozen.weight.empty() ? 1 : frozen.weight(row, j));
    x.advantage = frozen.advantage.empty() ? 0 : frozen.advantage(row, j);
    x.outside = t.advantage.empty() ? 0 : double(element<L>::load(t.advantage(row, t.advantage.cols == 1 ? 0 : j)));
    return x;
}

/// What a row's cache of drawn tokens says of it as a whole.
template <class Teacher>
OPD_HD void take_columns(entry_facts& facts, const Teacher& t) {
    using L = typename Teacher::log_type;
    facts.iid = Teacher::kind == cache_kind::samples;
    if (!t.baseline.empty()) facts.baseline = double(element<L>::load(t.baseline[facts.row]));
    if (!t.mu_entropy.empty()) facts.mu_entropy = double(element<L>::load(t.mu_entropy[facts.row]));
}

OPD_HD entry_facts facts_of(const auto& e, index_t row) {
    const auto& f = e.frozen;
    return {.on_infinite = e.on_infinite,
            .age = e.versions.empty() ? 0 : double(e.version) - double(e.versions[row]),
            .row = row,
            .has_sequence = !f.sequence_log_ratio.empty(),
            .sequence_log_ratio = f.sequence_log_ratio.empty() ? 0 : f.sequence_log_ratio[row],
            .has_advantage = !f.advantage.empty()};
}

/// The masses of a support of n ids and the overlap on it, from the log-probs of each, into the diagnostics.
OPD_HD void count_masses(diagnostics& d, index_t n, auto log_p, auto log_q) {
    double z_p = 0, z_q = 0, overlap = 0;
    for (index_t j = 0; j < n; ++j) {
        const double lp = log_p(j), lq = log_q(j);
        const double p = is_neg_inf(lp) ? 0 : ::exp(lp), q = is_neg_inf(lq) ? 0 : ::exp(lq);
        z_p += p, z_q += q, overlap += p < q ? p : q;
    }
    ++d.overlap_rows, d.overlap_sum += overlap;
    d.student_mass_sum += z_p, d.teacher_mass_sum += z_q;
    d.student_mass_min = z_p < d.student_mass_min ? z_p : d.student_mass_min;
    d.teacher_mass_min = z_q < d.teacher_mass_min ? z_q : d.teacher_mass_min;
}

/// A row of a support between its sweep and its pullback.
struct support_answer {
    joined_row student;
    entry_row row;
    double h_rest = 0;
    bool good = false;
};
/// `tail`: the student's sums over v not in S. n used slots: log_p (logits in, log p out), log_q, log_mu (or null), h
/// (out). `outside`: ids not in S. given_lse and stated_tail, the cache's, may be null.
template <class Estimator, class L>
OPD_HD support_answer answer_support(const Estimator& estimator, const raw_sums& tail, double* log_p,
                                     const double* log_q, const double* log_mu, double* h, int n, index_t outside,
                                     double inv_t, const double* given_lse, const L* stated_tail, entry_facts facts,
                                     diagnostics& d) {
    support_answer out;
    out.student = join_support(tail, log_p, n, inv_t, given_lse);
    if (!out.student.good) return out;
    double z_q = 0;
    for (int j = 0; j < n; ++j) z_q += is_neg_inf(log_q[j]) ? 0 : ::exp(log_q[j]);
    const double log_p_rest = out.student.log_tail;
    double log_q_rest = neg_inf<double>();
    if constexpr (reads_tail<Estimator>()) {
        if (stated_tail) {
            log_q_rest = load_log(*stated_tail);
            if (is_nan(log_q_rest) || log_q_rest > 1e-3) return out;
        } else {
            log_q_rest = inferred_log_tail<L>(z_q, n, outside, is_neg_inf(log_p_rest), d);
        }
    }
    for (int j = 0; j < n; ++j) h[j] = 0;
    support_entries entries{n, log_p, log_q, log_p_rest, log_q_rest, h, 0, log_mu};
    out.row = estimator.row(entries, facts, d);
    out.h_rest = entries.h_rest;
    out.good = !out.row.bad;
    ++d.support_rows;
    count_masses(
        d, n, [=](index_t j) { return log_p[j]; }, [=](index_t j) { return log_q[j]; });
    return out;
}

} // namespace OPD_ISA
} // namespace opd::detail
