// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The divergences between student p and teacher q at one prefix:
//
//   opd::evaluate(be, student::logits{z, dz}, teacher::dense{y}, jsd{.w = .3, .o = .3});
//
// Each is a small struct of two functions: the sum of `term` over the vocabulary is the value; `c` is dL/dlog p[v].
// With slope = d(value)/dp[v] and c = p·slope:
//
//   forward_kl        Σ q (log q - log p)                 slope -q/p                    AsyncOPD eq. 1
//   reverse_kl        Σ p (log p - log q)                 log p - log q                 AsyncOPD eq. 2-3
//   jsd{w, o}         o KL(q‖m) + (1-o) KL(p‖m)           see below; m = w q + (1-w) p  GKD (Agarwal et al. 2024)
//   skew_forward_kl   KL(q ‖ a q + (1-a) p)               jsd{w=a, o=1}                 DistiLLM (Ko et al. 2024)
//   skew_reverse_kl   KL(p ‖ (1-a) q + a p)               jsd{w=1-a, o=0}               DistiLLM
//   total_variation   ½ Σ |p - q|                         ½ sign(p - q), 0 where equal
//   alpha_divergence  (Σ p^a q^(1-a) - 1)/(a(a-1))        (p/q)^(a-1)/(a-1); a = 0, 1: forward, reverse KL   Amari
//   chi_squared       Σ p²/q - 1                          2 p/q                         Lightning OPD thm 3.5
//   acceptance        -log Σ min(p, q)                    -[p < q]/Σ min(p, q), half that where equal
//                                                         LK (arXiv 2602.23881)
//
// Shapes: logits (N,V) and (N,V); one value a row. Additive constants in the slope are dropped, since (1) of
// row_program.hpp removes them. Every c is returned relative to the student's top token s* (the reference token), as
// p·(slope - slope*), from delta by expm1 and log1p; so it is exact to float precision near p = q. Where p* and q* are
// far apart, alpha's c is relative to the mean slope, and then sums to 0; forward KL's c is -q, without a reference.
// Where s* is unlike the rest of the row, the reference is the rest (`by_rest`). No T² factor is applied.
//
// Exact: all of them. If a float row's probabilities differ by more than e^80 at a token that matters, the backend
// computes the row again in float64 (counted in diagnostics.careful_rows).
#pragma once

#include <cmath>

#include "opd/config.hpp"
#include "opd/error.hpp"
#include "opd/lanes.hpp"
#include "opd/row_program.hpp"

namespace opd {

namespace detail {

/// Largest |x| for which e^x is used inside a product: beyond it float and double saturate alike in every program.
template <class F>
OPD_HD constexpr double widest() {
    return sizeof(typename F::value_type) == 4 ? 80 : 700;
}
template <class F>
OPD_HD OPD_INLINE_ALWAYS F bounded(F x) {
    return min(max(x, F(-widest<F>())), F(widest<F>()));
}

/// w (e^x - 1 - x) with w e^x = other: from `other` where x is large, for w may have underflowed.
template <class F>
OPD_HD OPD_INLINE_ALWAYS F above_tangent(F w, F other, F x) {
    return select(x < F(1), w * expm1_rest(x), other - w * (F(1) + x));
}

/// |x|, or 1 if that is more
OPD_HD OPD_INLINE_ALWAYS double at_least_one(double x) { return x > 1 ? x : x < -1 ? -x : 1; }

} // namespace detail

/// Σ p (log p - log q)
struct reverse_kl {
    static constexpr bool f_divergence = true;
    template <class F>
    OPD_HD OPD_INLINE_ALWAYS F term(const row_constants<F>& r, const dense_entry<F>& e) const {
        return e.p * (e.delta + r.d_star);
    }
    template <class F>
    OPD_HD OPD_INLINE_ALWAYS F c(const row_constants<F>&, const dense_entry<F>& e) const {
        return e.p * e.delta;
    }

    template <class F>
    OPD_HD OPD_INLINE_ALWAYS F nonnegative_term(const dense_entry<F>& e) const {
        return detail::above_tangent(e.p, e.q, -e.delta); // p (d + e^-d - 1)
    }

    OPD_HD static constexpr bool infinite_where_teacher_zero() { return true; }
    static constexpr raw_sums_needed raw{.student_delta = true};
    OPD_HD double exponent() const { return 1; }
    OPD_HD double value(const raw_sums& s) const { return s.student_delta / (1 + s.student_mass) + s.d_star(); }
    OPD_HD double sum_c(const raw_sums& s) const { return s.student_delta / (1 + s.student_mass); }
    OPD_HD static double cancellation(const raw_sums& s) { return detail::at_least_one(s.d_star()); }
};

/// Σ q (log q - log p)
struct forward_kl {
    static constexpr bool f_divergence = true;
    template <class F>
    OPD_HD OPD_INLINE_ALWAYS F term(const row_constants<F>& r, const dense_entry<F>& e) const {
        return -e.q * (e.delta + r.d_star);
    }
    /// -(q - ratio·p): by expm1 where p and q are close, from q itself where they are not. Unanchored rows (ratio 0):
    /// -q.
    template <class F>
    OPD_HD OPD_INLINE_ALWAYS F c(const row_constants<F>& r, const dense_entry<F>& e) const {
        const F rp = r.ratio * e.p, near = select(r.ratio > F(0), F(1), F(0));
        return select(abs(e.delta) < near, rp * -expm1_near(-e.delta), rp - e.q);
    }

    template <class F>
    OPD_HD OPD_INLINE_ALWAYS F nonnegative_term(const dense_entry<F>& e) const {
        return detail::above_tangent(e.q, e.p, e.delta); // q (e^d - 1 - d)
    }

    OPD_HD static constexpr bool infinite_where_student_zero() { return true; }
    static constexpr raw_sums_needed raw{.student_power = true, .teacher_delta = true, .k_is_one = true};
    static constexpr raw_sums_needed raw_for_value{.teacher_delta = true, .k_is_one = true};
    static constexpr bool gradient_is_difference = true; ///< p - q: far apart, `raw_for_value` serves it too
    OPD_HD double exponent() const { return 1; }
    OPD_HD double value(const raw_sums& s) const {
        return -(s.teacher_delta + s.delta_at_t()) / (1 + s.teacher_mass) - s.d_star();
    }
    /// ratio - 1. Σ q = 1 makes q*/p* = (1+S)/(1+S+W): in anchored rows the teacher's normaliser, and its rounding,
    /// drop out.
    OPD_HD double sum_c(const raw_sums& s) const {
        return s.ratio() > 0 ? -s.student_power / (1 + s.student_mass + s.student_power) : -1;
    }
    OPD_HD static double cancellation(const raw_sums& s) { return detail::at_least_one(s.d_star()); }
};

/// Generalised Jensen-Shannon divergence: o KL(q‖m) + (1-o) KL(p‖m), m = w q + (1-w) p, 0 < w < 1.
/// Libraries disagree about the two weights, hence both are named: TRL and Liger w = o = b; KDFlow and DistiLLM
/// w = o = 1-b; ms-swift w = b, o = 1-b. With L = log m - log p, R = 1 - p/m and h = L - R, up to a constant,
///
///   slope = -(1-o) h - ((1-o) w + o (1-w)²/w) R          -(1-o) L where o = w
///
/// which is 0 at p = q. In rows that are not anchored the constant is the slope at p/q = ∞, so that digits are kept
/// where all of it is near there: L = log1p(v), R = v/(1+v), v = w q/((1-w) p), and o (1-w)/w before R.
struct jsd {
    static constexpr bool f_divergence = true;
    double w = 0.5;
    double o = 0.5;

    template <class F>
    OPD_HD OPD_INLINE_ALWAYS F term(const row_constants<F>& r, const dense_entry<F>& e) const {
        const F d = e.delta + r.d_star;
        return term_of(e, middling() ? against_middling(d) : against_mixture<false>(detail::bounded(d)));
    }
    template <class F>
    OPD_HD OPD_INLINE_ALWAYS F c(const row_constants<F>& r, const dense_entry<F>& e) const {
        if (r.anchored) return e.p * (slope(e.delta + r.d_star) - r.slope_star);
        // of two ways to the log-ratio the one that rounds smaller numbers; exactly d* at s*
        const F d = select(abs(e.delta) < F(4), e.delta + r.d_star, e.log_p - e.log_q);
        return e.p * (slope_from_limit(r, d) - r.slope_star);
    }
    template <class F>
    OPD_HD OPD_INLINE_ALWAYS term_and_c<F> both(const row_constants<F>& r, const dense_entry<F>& e) const {
        if (!r.anchored) return {term(r, e), c(r, e)};
        const mixture<F> m = for_slope(e.delta + r.d_star);
        return {term_of(e, m), e.p * (slope_of(m) - r.slope_star)};
    }
    /// Both KLs to the mixture by the form of reverse_kl's, Σ m being 1 too.
    template <class F>
    OPD_HD OPD_INLINE_ALWAYS F nonnegative_term(const dense_entry<F>& e) const {
        const F d = detail::bounded(e.delta);
        const F m_over_p = log1p(F(w) * expm1(-d)), m_over_q = log1p(F(1 - w) * expm1(d));
        const F m = F(w) * e.q + F(1 - w) * e.p;
        return F(o) * detail::above_tangent(e.q, m, m_over_q) + F(1 - o) * detail::above_tangent(e.p, m, m_over_p);
    }
    /// Constant in a row; drivers that do not ask for it leave c unanchored, which (1) of row_program.hpp allows.
    template <class F>
    OPD_HD OPD_INLINE_ALWAYS F slope_star(const row_constants<F>& r) const {
        return r.anchored ? slope(r.d_anchor()) : slope_from_limit(r, r.d_anchor());
    }
    OPD_INLINE_ALWAYS void validate() const {
        if (!detail::is_finite(w) || !(w > 0 && w < 1))
            throw invalid_input("jsd.w", "must lie strictly between 0 and 1; the ends are forward_kl and reverse_kl");
        if (!detail::is_finite(o) || !(o >= 0 && o <= 1)) throw invalid_input("jsd.o", "must lie in [0, 1]");
    }

private:
    template <class F>
    struct mixture {
        F log_p_ratio, log_q_ratio; // log p - log m, log q - log m
        F R, t;                     // 1 - p/m, (m - p)/(m + p)
    };
    template <class F>
    OPD_HD OPD_INLINE_ALWAYS F term_of(const dense_entry<F>& e, const mixture<F>& m) const {
        return F(o) * e.q * m.log_q_ratio + F(1 - o) * e.p * m.log_p_ratio;
    }
    /// Where one form of log m serves every d: it does not come near log 0.
    OPD_HD bool middling() const { return o == w && w >= 0.25 && w <= 0.75; }
    /// From d = log p - log q, of the larger of p and q: m over it is 1 + u expm1(-|d|), u the other's weight.
    template <class F>
    OPD_HD OPD_INLINE_ALWAYS mixture<F> against_middling(F d) const {
        const F log_m = log1p(select(d > F(0), F(w), F(1 - w)) * expm1(-abs(d)));
        return {min(d, F(0)) - log_m, min(-d, F(0)) - log_m, F(0), F(0)};
    }
    template <class F>
    OPD_HD OPD_INLINE_ALWAYS mixture<F> for_slope(F d) const {
        return middling() ? against_middling(d) : against_mixture<true>(detail::bounded(d));
    }
    /// From d = log p - log q: m/p as 1 + w expm1(-d) near d = 0, as (1-w) + w e^-d above, and m/q as w + (1-w) e^d
    /// below, so that nothing overflows. `of_slope`: 1 + w (e^-d - 1) or 1 + (1-w) (e^d - 1) wherever w or 1-w keeps
    /// that near 1: log p - log m has all its digits then, however small w or 1-w, which a sum of values does not
    /// need.
    template <bool of_slope, class F>
    OPD_HD OPD_INLINE_ALWAYS mixture<F> against_mixture(F d) const {
        const auto by_p = d > (of_slope ? log(max(F(w / (1 - w)), F(1e-30))) : F(-1));
        const F wide = !of_slope ? F(0) : w <= 0.5 ? select(by_p, F(1), F(0)) : select(by_p, F(0), F(1));
        const F one = select(abs(d) < F(1), F(1), wide);
        const auto less_one = one > F(0);
        const F e = exp_less(select(by_p, -d, d), one);
        const F a = select(less_one, F(1), select(by_p, F(1 - w), F(w)));
        const F b = select(by_p, F(w), F(1 - w)) * e;
        const F log_m = log_sum(a, b);
        mixture<F> m{select(by_p, -log_m, d - log_m), select(by_p, -log_m - d, -log_m), F(0), F(0)};
        if (o != w) { // parameters, not numbers: the same way for every entry
            const F n = select(by_p, F(w), F(-w)) * select(less_one, e, e - F(1));
            m.R = n / (a + b);
            m.t = n / (a + b + select(by_p, F(1), select(less_one, e + F(1), e)));
        }
        return m;
    }
    template <class F>
    OPD_HD OPD_INLINE_ALWAYS F slope(F d) const {
        return slope_of(for_slope(d));
    }
    template <class F>
    OPD_HD OPD_INLINE_ALWAYS F slope_of(const mixture<F>& m) const {
        if (o == w) return F(1 - o) * m.log_p_ratio;
        const F near =
            F(-(1 - o)) * log_excess(-m.log_p_ratio, m.R, m.t) - F((1 - o) * w + o * (1 - w) * (1 - w) / w) * m.R;
        const F far = F(1 - o) * m.log_p_ratio + F((1 - w) * (w - o) / w) * m.R; // the same: R may be 1/(1-w)
        return select(abs(m.t) < F(0.15), near, far);
    }
    template <class F>
    OPD_HD OPD_INLINE_ALWAYS F slope_from_limit(const row_constants<F>& r, F d) const {
        const F log_odds = log(F(w / (1 - w)));
        d = min(max(d, F(-detail::widest<F>()) + max(log_odds, F(0))), F(detail::widest<F>()));
        const F v = F(w / (1 - w)) * exp(-d), l = log1p(v);
        if (o == w) return F(-(1 - o)) * l;
        const F den = F(1) / (F(1) + v), big = v * den;
        // R itself where v is small at the anchor, R - 1 where it is large
        const F rest = select(r.d_anchor() > log_odds, big, -den);
        return F(-(1 - o)) * log_excess(l, big, v / (F(2) + v)) - F(o * (1 - w) / w) * rest;
    }
    /// L - R, where L = 2 artanh(t) and R = 2t/(1+t): by t's series where they are close.
    template <class F>
    OPD_HD OPD_INLINE_ALWAYS static F log_excess(F l, F big_r, F t) {
        const F s = t * t;
        F sum = F(2. / 9);
        if constexpr (sizeof(typename F::value_type) == 8) // of t^11 to t^19, which float does not see
            sum =
                fma(fma(fma(fma(fma(F(2. / 19), s, F(2. / 17)), s, F(2. / 15)), s, F(2. / 13)), s, F(2. / 11)), s, sum);
        const F series = fma(fma(fma(fma(sum, s, F(2. / 7)), s, F(2. / 5)), s, F(2. / 3)), s * t, t * big_r);
        return select(abs(t) < F(0.15), series, l - big_r);
    }
};

/// KL(q ‖ a q + (1-a) p), 0 < a < 1.
struct skew_forward_kl {
    static constexpr bool f_divergence = true;
    double a = 0.1;
    template <class F>
    OPD_HD OPD_INLINE_ALWAYS F term(const row_constants<F>& r, const dense_entry<F>& e) const {
        return jsd{a, 1}.term(r, e);
    }
    template <class F>
    OPD_HD OPD_INLINE_ALWAYS F c(const row_constants<F>& r, const dense_entry<F>& e) const {
        return jsd{a, 1}.c(r, e);
    }
    template <class F>
    OPD_HD OPD_INLINE_ALWAYS term_and_c<F> both(const row_constants<F>& r, const dense_entry<F>& e) const {
        return jsd{a, 1}.both(r, e);
    }
    template <class F>
    OPD_HD OPD_INLINE_ALWAYS F nonnegative_term(const dense_entry<F>& e) const {
        return jsd{a, 1}.nonnegative_term(e);
    }
    template <class F>
    OPD_HD OPD_INLINE_ALWAYS F slope_star(const row_constants<F>& r) const {
        return jsd{a, 1}.slope_star(r);
    }
    OPD_INLINE_ALWAYS void validate() const {
        if (!detail::is_finite(a) || !(a > 0 && a < 1))
            throw invalid_input("skew_forward_kl.a", "must lie strictly between 0 and 1");
    }
};

/// KL(p ‖ (1-a) q + a p), 0 < a < 1.
struct skew_reverse_kl {
    static constexpr bool f_divergence = true;
    double a = 0.1;
    template <class F>
    OPD_HD OPD_INLINE_ALWAYS F term(const row_constants<F>& r, const dense_entry<F>& e) const {
        return jsd{1 - a, 0}.term(r, e);
    }
    template <class F>
    OPD_HD OPD_INLINE_ALWAYS F c(const row_constants<F>& r, const dense_entry<F>& e) const {
        return jsd{1 - a, 0}.c(r, e);
    }
    template <class F>
    OPD_HD OPD_INLINE_ALWAYS term_and_c<F> both(const row_constants<F>& r, const dense_entry<F>& e) const {
        return jsd{1 - a, 0}.both(r, e);
    }
    template <class F>
    OPD_HD OPD_INLINE_ALWAYS F nonnegative_term(const dense_entry<F>& e) const {
        return jsd{1 - a, 0}.nonnegative_term(e);
    }
    template <class F>
    OPD_HD OPD_INLINE_ALWAYS F slope_star(const row_constants<F>& r) const {
        return jsd{1 - a, 0}.slope_star(r);
    }
    OPD_INLINE_ALWAYS void validate() const {
        if (!detail::is_finite(a) || !(a > 0 && a < 1))
            throw invalid_input("skew_reverse_kl.a", "must lie strictly between 0 and 1");
    }
};

/// ½ Σ |p - q|
struct total_variation {
    static constexpr bool f_divergence = true;
    template <class F>
    OPD_HD OPD_INLINE_ALWAYS F term(const row_constants<F>&, const dense_entry<F>& e) const {
        return F(0.5) * abs(e.p - e.q);
    }
    template <class F>
    OPD_HD OPD_INLINE_ALWAYS F c(const row_constants<F>& r, const dense_entry<F>& e) const {
        // the sign of d is that of p - q, also where both underflow; anchored, it is exactly 0 on the top token's side
        return e.p * (half_sign(e.delta + r.d_star) - half_sign(r.d_anchor()));
    }

private:
    template <class F>
    OPD_HD OPD_INLINE_ALWAYS static F half_sign(F d) {
        return select(d > F(0), F(0.5), select(d < F(0), F(-0.5), F(0)));
    }
};

/// -log Σ min(p, q): of the probability that a token drafted from p is accepted by a target q (Leviathan et al.
/// 2023), so the student is the drafter and the teacher the target. total_variation's gradient over the overlap: as
/// strong where the two hardly meet as where they nearly agree. Infinite where no token has mass on both sides, and
/// without gradient there; anything else is exact, by logarithms where the teacher denies the student's first choice
/// by 40 nats. Mixed with a KL by weighted_sum, as LK does early in training.
struct acceptance {
    static constexpr bool reads_overlap = true;
    OPD_HD static constexpr bool infinite_where_disjoint() { return true; }
    template <class F>
    OPD_HD OPD_INLINE_ALWAYS F term(const row_constants<F>& r, const dense_entry<F>& e) const {
        return -r.log_overlap * e.p; // Σ p = 1
    }
    /// Relative to the top token's side. That side is p > q where the overlap is tiny, and then p/overlap, which may
    /// be beyond every number there, counts for nothing.
    template <class F>
    OPD_HD OPD_INLINE_ALWAYS F c(const row_constants<F>& r, const dense_entry<F>& e) const {
        F top = half_sign(r.d_anchor());
        if (r.far_apart) { // p* 1: there is no anchor, or there are no others
            const typename F::mask anchored = r.p_star < F(1), below = r.d_anchor() < F(0);
            top = select(anchored | below, top, F(0.5));
        }
        const F side = half_sign(e.delta + r.d_star) - top;
        return r.inv_overlap * ((r.far_apart ? exp(detail::bounded(e.log_p - r.overlap_top)) : e.p) * side);
    }

private:
    template <class F>
    OPD_HD OPD_INLINE_ALWAYS static F half_sign(F d) {
        return select(d > F(0), F(0.5), select(d < F(0), F(-0.5), F(0)));
    }
};

/// (Σ p^a q^(1-a) - 1) / (a(a-1)). a = 1 is reverse KL, a = 0 (below 1e-9 in size) forward KL. The value is summed as
/// Σ q expm1(a (log p - log q)) for a < 0.25, so that it does not cancel as a goes to 0, and where p vanishes q does
/// not.
struct alpha_divergence {
    static constexpr bool f_divergence = true;
    double a = 0.5;

    template <class F>
    OPD_HD OPD_INLINE_ALWAYS F term(const row_constants<F>& r, const dense_entry<F>& e) const {
        if (is_forward()) return forward_kl{}.term(r, e);
        if (a == 1) return reverse_kl{}.term(r, e);
        const F scale(1 / (a * (a - 1))), d = e.delta + r.d_star;
        if (a < 0.25) return scale * e.q * expm1(detail::bounded(F(a) * d)); // Σ p = Σ q
        return scale * e.p * expm1(detail::bounded(F(a - 1) * d));
    }
    template <class F>
    OPD_HD OPD_INLINE_ALWAYS F c(const row_constants<F>& r, const dense_entry<F>& e) const {
        if (is_forward()) return forward_kl{}.c(r, e);
        if (a == 1) return reverse_kl{}.c(r, e);
        const F star = exp(detail::bounded(F(a - 1) * r.d_anchor())), scale(1 / (a - 1));
        const F x =
            select(e.log_p > F(-1e20), fma(F(a - 1), e.delta, F(a - 1) * r.from_anchor), F(0)); // p = 0 has no gradient
        // pinned: star * expm1 or scale * expm1 may be beyond float while p is 0
        const F near = pin(pin(star * e.p) * expm1(detail::bounded(x)));
        if (a >= 0.5) return scale * near; // `c_of_power`
        // p^a q^(1-a) from q where they are far apart: p may underflow while its power does not
        return scale *
               select(abs(x) < F(1), near, e.q * exp(detail::bounded(F(a) * (e.delta + r.d_star))) - star * e.p);
    }

    OPD_HD bool keeps_power() const { return a >= 0.5 && a != 1; }
    template <class F>
    OPD_HD OPD_INLINE_ALWAYS F c_of_power(const row_constants<F>& r, F p, F power) const {
        return F(1 / (a - 1)) * pin(pin(exp(detail::bounded(F(a - 1) * r.d_anchor())) * p) * power);
    }

    /// Around p for a of at least a half, around q below: neither divides by what vanishes with a or a - 1.
    template <class F>
    OPD_HD OPD_INLINE_ALWAYS F nonnegative_term(const dense_entry<F>& e) const {
        if (a == 0) return forward_kl{}.nonnegative_term(e);
        if (a == 1) return reverse_kl{}.nonnegative_term(e);
        // beyond the reach one power has vanished, and what is left of the two parts cancels in floats of that size
        const F d = min(max(e.delta, F(-80 / (a < 0 ? -a : a))), F(80 / (a < 1 ? 1 - a : a - 1))), most(80);
        if (a >= 0.5)
            return F(1 / a) *
                   (detail::above_tangent(e.p, e.q, -d) + F(1 / (a - 1)) * e.p * expm1_rest(min(F(a - 1) * d, most)));
        return F(1 / (1 - a)) * (detail::above_tangent(e.q, e.p, d) - F(1 / a) * e.q * expm1_rest(min(F(a) * d, most)));
    }
    /// `value` divides what cancels by a; and its two parts are as large as the power of p*/q*.
    OPD_HD double cancellation(const raw_sums& s) const {
        if (is_forward() || a == 1) return reverse_kl::cancellation(s);
        const double size = detail::at_least_one(1 / a), d = s.d_star();
        const double part = detail::at_least_one(x_serves(d) ? s.phi(d) : ::expm1((a - 1) * d) / (a * (a - 1)));
        return size > part ? size : part;
    }

    /// Whether the slope at s* is so much larger than the mean slope, Σ p^a q^(1-a), that neither sums nor c should
    /// be relative to it.
    OPD_HD bool dwarfed(const raw_sums& s, double value) const {
        return a > 1 && ::exp((a - 1) * s.d_star()) > 8 * (1 + a * (a - 1) * value);
    }

    OPD_HD bool infinite_where_teacher_zero() const { return a >= 1; }
    OPD_HD bool infinite_where_student_zero() const { return a <= 0; }
    // a is known at run time only
    static constexpr raw_sums_needed raw{
        .student_delta = true, .student_power = true, .teacher_delta = true, .phi_power = true};
    OPD_HD double exponent() const { return is_forward() ? 1 : 1 - a; }
    OPD_HD double value(const raw_sums& s) const {
        if (is_forward()) return forward_kl{}.value(s);
        if (a == 1) return reverse_kl{}.value(s);
        // Σ p^a q^(1-a) - 1 = expm1(a d*) + e^(a d*) Σ q expm1(a delta) = (e^((a-1)d*) - 1) + e^((a-1)d*)
        // student_power/(1+student_mass)
        const double d = s.d_star(), g = (a - 1) * d;
        if (x_serves(d))
            return (s.phi(d) + ::exp(a * d) * (s.teacher_delta + s.phi(s.delta_at_t())) / (1 + s.teacher_mass)) /
                   (a - 1);
        return (::expm1(g) + ::exp(g) * s.student_power / (1 + s.student_mass)) / (a * (a - 1));
    }
    /// d* less the d of the mean slope: Σ p^a q^(1-a) = e^((a-1) d) = e^(a d*) (1 + x) = e^((a-1) d*) (1 + w), by the
    /// one of the two that cancels less. Not from d, in which a student that is sure of s* would lose all that the
    /// others have.
    OPD_HD double from_mean(const raw_sums& s) const {
        if (is_forward() || a == 1) return 0; // they have anchors of their own
        const double w = s.student_power / (1 + s.student_mass);
        const double x = by_teacher() ? a * (s.teacher_delta + s.phi(s.delta_at_t())) / (1 + s.teacher_mass) : -1;
        return (x > w ? s.d_star() + ::log1p(x) : ::log1p(w)) / (1 - a);
    }
    OPD_HD double sum_c(const raw_sums& s) const {
        if (is_forward()) return forward_kl{}.sum_c(s);
        if (a == 1) return reverse_kl{}.sum_c(s);
        if (s.by_mean) return 0;
        if (s.by_rest()) return a * value(s) - ::expm1((a - 1) * s.d_rest()) / (a - 1);
        return ::exp((a - 1) * s.d_star()) / (a - 1) * s.student_power / (1 + s.student_mass);
    }
    OPD_INLINE_ALWAYS void validate() const {
        if (!detail::is_finite(a) || a < -1000 || a > 1000)
            throw invalid_input("alpha_divergence.a", "must lie between -1000 and 1000");
    }

private:
    OPD_HD bool is_forward() const { return a < 1e-9 && a > -1e-9; }
    OPD_HD bool by_teacher() const { return raw_sums::power_for(1 - a) != 0; }
    /// student_power's terms cancel where p* is far below q*, teacher_delta's where it is far above, and the former
    /// is divided by a.
    OPD_HD bool x_serves(double d) const { return by_teacher() && (d < 0 || a < 0.03); }
};

/// Σ p²/q - 1, twice the alpha-divergence at a = 2.
struct chi_squared {
    static constexpr bool f_divergence = true;
    template <class F>
    OPD_HD OPD_INLINE_ALWAYS F term(const row_constants<F>& r, const dense_entry<F>& e) const {
        return F(2) * alpha_divergence{2}.term(r, e);
    }
    template <class F>
    OPD_HD OPD_INLINE_ALWAYS F c(const row_constants<F>& r, const dense_entry<F>& e) const {
        return F(2) * alpha_divergence{2}.c(r, e);
    }
    OPD_HD static bool keeps_power() { return true; }
    template <class F>
    OPD_HD OPD_INLINE_ALWAYS F c_of_power(const row_constants<F>& r, F p, F power) const {
        return F(2) * alpha_divergence{2}.c_of_power(r, p, power);
    }

    template <class F>
    OPD_HD OPD_INLINE_ALWAYS F nonnegative_term(const dense_entry<F>& e) const {
        return F(2) * alpha_divergence{2}.nonnegative_term(e);
    }

    OPD_HD static constexpr bool infinite_where_teacher_zero() { return true; }
    static constexpr raw_sums_needed raw{.student_power = true};
    OPD_HD double exponent() const { return -1; }
    OPD_HD double value(const raw_sums& s) const { return 2 * alpha_divergence{2}.value(s); }
    OPD_HD static double cancellation(const raw_sums& s) { return 2 * alpha_divergence{2}.cancellation(s); }
    OPD_HD static double from_mean(const raw_sums& s) { return alpha_divergence{2}.from_mean(s); }
    OPD_HD static bool dwarfed(const raw_sums& s, double value) { return alpha_divergence{2}.dwarfed(s, value / 2); }
    OPD_HD double sum_c(const raw_sums& s) const { return 2 * alpha_divergence{2}.sum_c(s); }
};

} // namespace opd
