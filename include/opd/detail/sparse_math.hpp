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
            (x.log_q < -9000 && !is_neg_inf(x.log_q)) || (x.log_mu == 0 && x.log_p < -0.01 && !x.exact)) {
            out.bad = true; // placeholders: a drawn token cannot have had probability 0, nor 1 beside others
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

/// One bucketed row: log p and log q of k ids and of the rest, c out on the ids. log_p_rest = -inf: empty bucket.
template <class D>
OPD_HD sparse_outcome bucket_row(const double* log_p, const double* log_q, double* c, int k, double log_p_rest,
                                 double log_q_rest, const D& program, infinite on_infinite) {
    using F = scalar<double>;
    sparse_outcome out;
    const row_constants<F> row{F(1), F(1), F(0), F(1)};
    const bool empty = is_neg_inf(log_p_rest);
    for (int j = 0; j <= k; ++j) {
        if (j == k && empty) break;
        const double lp = j < k ? log_p[j] : log_p_rest, lq = j < k ? log_q[j] : log_q_rest;
        out.infinite |= (is_neg_inf(lq) && !is_neg_inf(lp) && infinite_where_teacher_zero(program)) ||
                        (is_neg_inf(lp) && !is_neg_inf(lq) && infinite_where_student_zero(program));
    }
    for (int j = 0; j < k; ++j) c[j] = 0;
    if (out.infinite && on_infinite.act != infinite::action::floor) return out;
    const bool floor_q = out.infinite && infinite_where_teacher_zero(program);
    const bool floor_p = out.infinite && infinite_where_student_zero(program);
    const auto entry = [&](double lp, double lq, bool with_p) {
        lp = is_neg_inf(lp) ? -1e30 : lp, lq = is_neg_inf(lq) ? -1e30 : lq;
        dense_entry<F> e;
        e.p = F(lp < -745 ? 0 : ::exp(lp)), e.q = F(lq < -745 ? 0 : ::exp(lq));
        if (floor_q) lq = lq < on_infinite.floor_at ? on_infinite.floor_at : lq;
        if (floor_p && with_p) lp = lp < on_infinite.floor_at ? on_infinite.floor_at : lp;
        e.log_p = F(lp), e.log_q = F(lq), e.delta = F(lp - lq);
        return e;
    };
    double slope_rest = 0;
    if (!empty) {
        out.loss = program.term(row, entry(log_p_rest, log_q_rest, true)).v;
        const dense_entry<F> rest = entry(log_p_rest, log_q_rest, false);
        if (rest.p.v > 0) slope_rest = program.c(row, rest).v / rest.p.v;
    }
    for (int j = 0; j < k; ++j) {
        out.loss += program.term(row, entry(log_p[j], log_q[j], true)).v;
        const dense_entry<F> e = entry(log_p[j], log_q[j], false);
        c[j] = program.c(row, e).v - e.p.v * slope_rest;
    }
    if (!is_finite(out.loss) || !is_finite(slope_rest)) {
        out.infinite = true;
        out.loss = 0;
        for (int j = 0; j < k; ++j) c[j] = 0;
    }
    return out;
}

} // namespace opd::detail
