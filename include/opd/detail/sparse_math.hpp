// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The scalar part of sparse and sampled rows, shared by the CPU driver and the CUDA kernels: entries in, loss and c out, in
// double. A row here is a handful of entries; the V-sized part (normaliser, pullback) is the driver's.
#pragma once

#include <cmath>

#include "opd/batch.hpp"
#include "opd/config.hpp"
#include "opd/diagnostics.hpp"
#include "opd/element.hpp"
#include "opd/lanes.hpp"
#include "opd/row_program.hpp"
#include "opd/token.hpp"

namespace opd::detail {

inline constexpr double ratio_saturation = 80; ///< log rho stays within ±this

/// log p of one id from its logit and the log-sum-exp, and from nothing else: whoever is handed the log-sum-exp gets the
/// same bits as who swept the row.
template <class Z>
OPD_HD double log_p_of(const Z* z, index_t id, double inv_t, double lse) {
    const double x = double(element<Z>::load(z[id]));
    return is_neg_inf(x) ? neg_inf<double>() : pin(x * inv_t) - lse;
}
/// p of one id, from the row's sums: right in 1 - p, too.
template <class Z>
OPD_HD double p_of(const Z* z, index_t id, const raw_sums& s) {
    const double x = double(element<Z>::load(z[id]));
    return is_neg_inf(x) ? 0 : ::exp((x - s.z_s) * s.inv_s) / (1 + s.S);
}
/// Sums that stand for a given log-sum-exp. The anchor is a number that the row's arithmetic can hold; S takes what is left.
template <class Value>
OPD_HD void anchor_at(raw_sums& s, double lse, double inv_t) {
    s.inv_s = inv_t;
    s.z_s = double(static_cast<Value>(lse / inv_t));
    s.S = ::expm1(lse - s.z_s * inv_t);
    s.s = 0;
}

/// What a sparse row yields beside its c.
struct sparse_outcome {
    double loss = 0;
    bool bad = false;
    bool infinite = false;
};

/// An action of a sampled row. In: id, weight, exact, the log-probs. Out: c.
struct sampled_entry {
    index_t id;
    double weight;
    double log_p, log_mu, log_prox, log_ref, log_q;
    bool exact;
    double c;
};

/// Loss and c of one sampled row of m entries (unused slots removed). `iid`: weights are 1/m and leave-one-out applies.
template <class Surrogate>
OPD_HD sparse_outcome sampled_row(sampled_entry* e, int m, const Surrogate& s, baseline base, advantage which,
                                  double clip, infinite on_infinite, double age, diagnostics& d) {
    sparse_outcome out;
    double exact_pa = 0, exact_p = 0, rho_a = 0, rho_sum = 0;
    const auto ratio = [](const sampled_entry& x, bool& saturated) {
        const double l = x.log_p - x.log_mu, bound = ratio_saturation;
        saturated = !(l >= -bound && l <= bound);
        return l < -bound ? -bound : (l > bound ? bound : l);
    };
    const auto gain = [&](const sampled_entry& x) {
        const double a = x.log_q - (which == advantage::theta ? x.log_p : x.log_mu);
        return clip > 0 ? (a > clip ? clip : (a < -clip ? -clip : a)) : a;
    };
    for (int j = 0; j < m; ++j) {
        sampled_entry& x = e[j];
        if (is_nan(x.log_mu) || is_nan(x.log_q) || is_nan(x.log_prox) || is_nan(x.log_ref) || is_nan(x.weight) ||
            x.log_mu > 1e-3 || x.log_q > 1e-3 || (x.log_mu < -9000 && !is_neg_inf(x.log_mu)) || is_neg_inf(x.log_mu) ||
            (x.log_q < -9000 && !is_neg_inf(x.log_q))) {
            out.bad = true; // placeholders: a drawn token cannot have had probability 0
            return out;
        }
        if (is_neg_inf(x.log_p)) x.log_p = -745; // p = 0: log p enters products with rho = e^-80 alone
        out.infinite |= is_neg_inf(x.log_q);
    }
    if (out.infinite && on_infinite.act != infinite::action::floor) {
        for (int j = 0; j < m; ++j) e[j].c = 0;
        return out;
    }
    for (int j = 0; j < m; ++j) {
        sampled_entry& x = e[j];
        if (out.infinite && (is_neg_inf(x.log_q) || x.log_q < on_infinite.floor_at)) x.log_q = on_infinite.floor_at;
        bool saturated;
        const double rho = ::exp(ratio(x, saturated)), a = gain(x), p = ::exp(x.log_p);
        rho_a += rho * a, rho_sum += rho;
        if (x.exact) exact_pa += p * a, exact_p += p;
    }
    if ((base == baseline::leave_one_out || base == baseline::self_normalised) && m == 1) ++d.baseline_missing;
    for (int j = 0; j < m; ++j) {
        sampled_entry& x = e[j];
        bool saturated;
        const double l = ratio(x, saturated), rho = ::exp(l), a = gain(x);
        double b = 0;
        if (base == baseline::leave_one_out && m > 1)
            b = (rho_a - rho * a) / (m - 1);
        else if (base == baseline::self_normalised && m > 1)
            b = rho_sum - rho > 0 ? (rho_a - rho * a) / (rho_sum - rho) : 0;
        else if (base == baseline::exact_entries)
            b = exact_p > 0 ? exact_pa / exact_p : 0;
        token_in t{x.log_p, x.log_mu, x.log_prox, x.log_ref, x.log_q, l, a, age};
        const token_out plain = s(t);
        t.advantage = a - b;
        const token_out with = b == 0 ? plain : s(t);
        out.loss += x.weight * plain.loss;
        x.c = x.weight * with.c;

        const double w = x.weight * m; // 1 for i.i.d. samples
        ++d.tokens;
        d.certain_mu += x.log_mu == 0;
        d.ratio_sum += w * rho, d.ratio_square_sum += w * rho * rho;
        d.ratio_max = d.ratio_max < rho ? rho : d.ratio_max;
        d.k1_sum += -w * l, d.k2_sum += w * 0.5 * l * l, d.k3_sum += w * (rho - 1 - l);
        (a >= 0 ? d.positive_advantage : d.negative_advantage) += 1;
        if (plain.clipped) (a >= 0 ? d.clipped_positive : d.clipped_negative) += 1;
        d.saturated += saturated;
    }
    if (!is_finite(out.loss)) out.bad = true;
    return out;
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

/// log of the teacher's mass outside a support of k ids, from the mass inside where the cache does not state it: 1 - Z_q, not
/// below k·eps of the cache's type (counted). `outside`: ids that are not in the support. Where the student has no mass on
/// them either, a floor would stand for nothing.
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
/// `tail`: sums over v not in S, relative to the largest logit there, so that nothing underflows. z (k): logits of S in,
/// log p out. `given_lse` may be null.
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
    s.S = top < 0 ? tail.S : (has_tail ? ::exp((tail.z_s - s.z_s) * inv_t) * (1 + tail.S) : 0);
    for (int j = 0; j < k; ++j) s.S += j == top || is_neg_inf(z[j]) ? 0 : ::exp((z[j] - s.z_s) * inv_t);
    if (given_lse) {
        if (!is_finite(*given_lse)) return out;
        out.lse = *given_lse;
        s.S = ::expm1(out.lse - s.z_s * inv_t);
    } else {
        out.lse = s.lse();
    }
    const double log_sum = ::log1p(s.S);
    out.log_tail = has_tail ? (tail.z_s - s.z_s) * inv_t + ::log1p(tail.S) - log_sum : neg_inf<double>();
    for (int j = 0; j < k; ++j) z[j] = is_neg_inf(z[j]) ? neg_inf<double>() : (z[j] - s.z_s) * inv_t - log_sum;
    out.good = true;
    return out;
}

/// One bucketed row: log p and log q of k ids and of the rest in; loss, and h = c - p Σc on the ids and of the rest, out. The
/// rest's h belongs to the ids outside S in proportion to their p. A rest without student mass has no logit to move: its term
/// counts, its c does not.
template <class D>
OPD_HD sparse_outcome bucket_row(const double* log_p, const double* log_q, double* h, int k, double log_p_rest,
                                 double log_q_rest, const D& program, infinite on_infinite, double& h_rest) {
    using F = scalar<double>;
    sparse_outcome out;
    int top = -1; // the student's largest bucket
    const auto log_p_of = [&](int j) { return j < k ? log_p[j] : log_p_rest; };
    const auto log_q_of = [&](int j) { return j < k ? log_q[j] : log_q_rest; };
    for (int j = 0; j <= k; ++j) {
        const double lp = log_p_of(j), lq = log_q_of(j);
        out.infinite |= (is_neg_inf(lq) && !is_neg_inf(lp) && infinite_where_teacher_zero(program)) ||
                        (is_neg_inf(lp) && !is_neg_inf(lq) && infinite_where_student_zero(program));
        if (!is_neg_inf(lp) && (top < 0 || lp > log_p_of(top))) top = j;
    }
    h_rest = 0;
    for (int j = 0; j < k; ++j) h[j] = 0;
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
    double sum_c = 0, others = 0;
    for (int j = 0; j <= k; ++j) {
        out.loss += program.term(row, entry(j, true)).v;
        if (j == k && is_neg_inf(log_p_rest)) break;
        const double c = program.c(row, entry(j, false)).v;
        sum_c += c;
        (j < k ? h[j] : h_rest) = c;
    }
    // On a peaked row c and p Σc cancel at the top, which has what the others leave: Σ h = 0.
    for (int j = 0; j <= k; ++j) {
        if (j == top || (j == k && is_neg_inf(log_p_rest))) continue;
        double& to = j < k ? h[j] : h_rest;
        to -= entry(j, false).p.v * sum_c;
        others += to;
    }
    (top < k ? h[top] : h_rest) = -others;
    const double most = 1e30; // beyond float: no finite number to report or store
    if (!is_finite(out.loss) || !is_finite(sum_c) || out.loss > most || out.loss < -most || sum_c > most ||
        sum_c < -most) {
        out.infinite = true;
        out.loss = h_rest = 0;
        for (int j = 0; j < k; ++j) h[j] = 0;
    }
    return out;
}

} // namespace opd::detail
