// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The divergences between student p and teacher q at one prefix, each a small struct of two functions: `term`, summed over
// the vocabulary, is the value; `c` is dL/dlog p[v]. With slope = d(value)/dp[v] and c = p·slope:
//
//   forward_kl        Σ q (log q - log p)                 slope -q/p                    AsyncOPD eq. 1
//   reverse_kl        Σ p (log p - log q)                 log p - log q                 AsyncOPD eq. 2-3
//   jsd{w, o}         o KL(q‖m) + (1-o) KL(p‖m)           see below; m = w q + (1-w) p  GKD (Agarwal et al. 2024)
//   skew_forward_kl   KL(q ‖ a q + (1-a) p)               jsd{w=a, o=1}                 DistiLLM (Ko et al. 2024)
//   skew_reverse_kl   KL(p ‖ (1-a) q + a p)               jsd{w=1-a, o=0}               DistiLLM
//   total_variation   ½ Σ |p - q|                         ½ sign(p - q), 0 where equal
//   alpha_divergence  (Σ p^a q^(1-a) - 1)/(a(a-1))        (p/q)^(a-1)/(a-1); a = 0, 1: forward, reverse KL   Amari
//   chi_squared       Σ p²/q - 1                          2 p/q                         Lightning OPD thm 3.5
//
// Shapes: logits (N,V) and (N,V); one value a row. Additive constants in the slope are dropped: (1) of row_program.hpp
// removes them. Every c is returned anchored at the student's top token s*, as p·(slope - slope*), from delta by expm1 and
// log1p, so that it is exact to float precision near p = q. No T² factor is applied.
//
// Exact: all of them. A float row whose probabilities differ by more than e^80 at some token that matters is redone in
// float64 by the driver (counted in diagnostics.careful_rows).
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
OPD_HD OPD_INLINE F bounded(F x) {
    return min(max(x, F(-widest<F>())), F(widest<F>()));
}

} // namespace detail

/// Σ p (log p - log q)
struct reverse_kl {
    template <class F>
    OPD_HD OPD_INLINE F term(const row_constants<F>& r, const dense_entry<F>& e) const {
        return e.p * (e.delta + r.d_star);
    }
    template <class F>
    OPD_HD OPD_INLINE F c(const row_constants<F>&, const dense_entry<F>& e) const {
        return e.p * e.delta;
    }

    OPD_HD static constexpr bool infinite_where_teacher_zero() { return true; }
    static constexpr raw_sums_needed raw{.u = true};
    OPD_HD double exponent() const { return 1; }
    OPD_HD double value(const raw_sums& s) const { return s.U / (1 + s.S) + s.d_star(); }
    OPD_HD double sum_c(const raw_sums& s) const { return s.U / (1 + s.S); }
};

/// Σ q (log q - log p)
struct forward_kl {
    template <class F>
    OPD_HD OPD_INLINE F term(const row_constants<F>& r, const dense_entry<F>& e) const {
        return -e.q * (e.delta + r.d_star);
    }
    /// -(q - ratio·p): by expm1 where p and q are close, from q itself where they are not. Unanchored rows (ratio 0): -q.
    template <class F>
    OPD_HD OPD_INLINE F c(const row_constants<F>& r, const dense_entry<F>& e) const {
        const F rp = r.ratio * e.p, near = select(r.ratio > F(0), F(1), F(0));
        return select(abs(e.delta) < near, rp * -expm1_near(-e.delta), rp - e.q);
    }

    OPD_HD static constexpr bool infinite_where_student_zero() { return true; }
    static constexpr raw_sums_needed raw{.w = true, .x = true, .k_is_one = true};
    static constexpr raw_sums_needed raw_for_value{.x = true};
    OPD_HD double exponent() const { return 1; }
    OPD_HD double value(const raw_sums& s) const { return -(s.X + s.delta_t()) / (1 + s.T) - s.d_star(); }
    /// ratio - 1. Σ q = 1 makes q*/p* = (1+S)/(1+S+W): in anchored rows the teacher's normaliser, and its rounding, drop out.
    OPD_HD double sum_c(const raw_sums& s) const { return s.ratio() > 0 ? -s.W / (1 + s.S + s.W) : -1; }
};

/// Generalised Jensen-Shannon divergence: o KL(q‖m) + (1-o) KL(p‖m), m = w q + (1-w) p, 0 < w < 1.
/// Libraries disagree about the two weights, hence both are named: TRL and Liger w = o = b; KDFlow and DistiLLM
/// w = o = 1-b; ms-swift w = b, o = 1-b. Up to a constant, with B = log p - log m and κ = o(1-w)/w - (1-o) (0 for o = w),
/// slope = (1-o) B + (1-w) κ (p/m - 1).
struct jsd {
    double w = 0.5;
    double o = 0.5;

    template <class F>
    OPD_HD OPD_INLINE F term(const row_constants<F>& r, const dense_entry<F>& e) const {
        const F d = detail::bounded(e.delta + r.d_star);
        const F b = against_mixture(d).log_ratio;
        return F(o) * e.q * (b - d) + F(1 - o) * e.p * b;
    }
    template <class F>
    OPD_HD OPD_INLINE F c(const row_constants<F>& r, const dense_entry<F>& e) const {
        const F d = detail::bounded(e.delta + r.d_star), d_star = detail::bounded(r.d_star);
        const F anchored = slope(d) - r.slope_star;
        if (w > 0.75) // the student's own share is small: where p* >> q*, slope* nears log 1/(1-w) and would cancel
            return e.p * select(d_star > F(1), slope_from_limit(d), anchored);
        return e.p * anchored;
    }
    /// Constant in a row; drivers that do not ask for it leave c unanchored, which (1) of row_program.hpp allows.
    template <class F>
    OPD_HD OPD_INLINE F slope_star(const row_constants<F>& r) const {
        return slope(detail::bounded(r.d_star));
    }
    OPD_INLINE void validate() const {
        if (!detail::is_finite(w) || !(w > 0 && w < 1))
            throw invalid_input("jsd.w", "must lie strictly between 0 and 1; the ends are forward_kl and reverse_kl");
        if (!detail::is_finite(o) || !(o >= 0 && o <= 1)) throw invalid_input("jsd.o", "must lie in [0, 1]");
    }

private:
    template <class F>
    struct mixture {
        F log_ratio; // log p - log m
        F excess;    // p/m - 1
    };
    /// From d = log p - log q, through the smaller of p/q and q/p, so that nothing overflows or cancels.
    template <class F>
    OPD_HD OPD_INLINE mixture<F> against_mixture(F d) const {
        const F x = expm1(-abs(d));
        const auto p_larger = d >= F(0);
        const F u = select(p_larger, F(w), F(1 - w)) * x; // m = max(p, q) (1 + u)
        const F from_larger = -log1p(u);
        const F excess = o == w ? F(0) : select(p_larger, -u, F(w) * x) / (F(1) + u);
        return {select(p_larger, from_larger, from_larger + d), excess};
    }
    /// slope(d) - slope(∞), whose terms are small where d is large. x = min(p/q, q/p), m = max(p, q)·den.
    template <class F>
    OPD_HD OPD_INLINE F slope_from_limit(F d) const {
        const F x = exp(-abs(d));
        const auto p_larger = d >= F(0);
        const F b = select(p_larger, F(0), d - F(::log(w / (1 - w)))) -
                    log1p(select(p_larger, F(w / (1 - w)), F((1 - w) / w)) * x);
        if (o == w) return F(1 - o) * b;
        const F num = select(p_larger, F(w) * x, F(w)),
                den = select(p_larger, F(1 - w) + F(w) * x, F(1 - w) * x + F(w));
        return F(1 - o) * b - F(o * (1 - w) / w - (1 - o)) * num / den;
    }
    template <class F>
    OPD_HD OPD_INLINE F slope(F d) const {
        const mixture<F> m = against_mixture(d);
        if (o == w) // parameters, not numbers: the same way for every entry
            return F(1 - o) * m.log_ratio;
        return F(1 - o) * m.log_ratio + F((1 - w) * (o * (1 - w) / w - (1 - o))) * m.excess;
    }
};

/// KL(q ‖ a q + (1-a) p), 0 < a < 1.
struct skew_forward_kl {
    double a = 0.1;
    template <class F>
    OPD_HD OPD_INLINE F term(const row_constants<F>& r, const dense_entry<F>& e) const {
        return jsd{a, 1}.term(r, e);
    }
    template <class F>
    OPD_HD OPD_INLINE F c(const row_constants<F>& r, const dense_entry<F>& e) const {
        return jsd{a, 1}.c(r, e);
    }
    template <class F>
    OPD_HD OPD_INLINE F slope_star(const row_constants<F>& r) const {
        return jsd{a, 1}.slope_star(r);
    }
    OPD_INLINE void validate() const {
        if (!detail::is_finite(a) || !(a > 0 && a < 1))
            throw invalid_input("skew_forward_kl.a", "must lie strictly between 0 and 1");
    }
};

/// KL(p ‖ (1-a) q + a p), 0 < a < 1.
struct skew_reverse_kl {
    double a = 0.1;
    template <class F>
    OPD_HD OPD_INLINE F term(const row_constants<F>& r, const dense_entry<F>& e) const {
        return jsd{1 - a, 0}.term(r, e);
    }
    template <class F>
    OPD_HD OPD_INLINE F c(const row_constants<F>& r, const dense_entry<F>& e) const {
        return jsd{1 - a, 0}.c(r, e);
    }
    template <class F>
    OPD_HD OPD_INLINE F slope_star(const row_constants<F>& r) const {
        return jsd{1 - a, 0}.slope_star(r);
    }
    OPD_INLINE void validate() const {
        if (!detail::is_finite(a) || !(a > 0 && a < 1))
            throw invalid_input("skew_reverse_kl.a", "must lie strictly between 0 and 1");
    }
};

/// ½ Σ |p - q|
struct total_variation {
    template <class F>
    OPD_HD OPD_INLINE F term(const row_constants<F>&, const dense_entry<F>& e) const {
        return F(0.5) * abs(e.p - e.q);
    }
    template <class F>
    OPD_HD OPD_INLINE F c(const row_constants<F>& r, const dense_entry<F>& e) const {
        // the sign of d is that of p - q, also where both underflow; anchored, it is exactly 0 on the top token's side
        return e.p * (half_sign(e.delta + r.d_star) - half_sign(r.d_star));
    }

private:
    template <class F>
    OPD_HD OPD_INLINE static F half_sign(F d) {
        return select(d > F(0), F(0.5), select(d < F(0), F(-0.5), F(0)));
    }
};

/// (Σ p^a q^(1-a) - 1) / (a(a-1)). a = 1 is reverse KL, a = 0 forward KL.
struct alpha_divergence {
    double a = 0.5;

    template <class F>
    OPD_HD OPD_INLINE F term(const row_constants<F>& r, const dense_entry<F>& e) const {
        if (a == 0) return forward_kl{}.term(r, e);
        if (a == 1) return reverse_kl{}.term(r, e);
        return F(1 / (a * (a - 1))) * e.p * expm1(detail::bounded(F(a - 1) * (e.delta + r.d_star)));
    }
    template <class F>
    OPD_HD OPD_INLINE F c(const row_constants<F>& r, const dense_entry<F>& e) const {
        if (a == 0) return forward_kl{}.c(r, e);
        if (a == 1) return reverse_kl{}.c(r, e);
        const F slope_star = exp(detail::bounded(F(a - 1) * r.d_star)) * F(1 / (a - 1));
        return slope_star * e.p * expm1(detail::bounded(F(a - 1) * e.delta));
    }

    OPD_HD bool infinite_where_teacher_zero() const { return a >= 1; }
    OPD_HD bool infinite_where_student_zero() const { return a <= 0; }
    static constexpr raw_sums_needed raw{.u = true, .w = true, .x = true}; // a is known at run time only
    OPD_HD double exponent() const { return a == 0 ? 1 : 1 - a; }
    OPD_HD double value(const raw_sums& s) const {
        if (a == 0) return forward_kl{}.value(s);
        if (a == 1) return reverse_kl{}.value(s);
        // Σ p^a q^(1-a) - 1 = (e^((a-1)d*) - 1) + e^((a-1)d*) W/(1+S)
        const double g = (a - 1) * s.d_star();
        return (::expm1(g) + ::exp(g) * s.W / (1 + s.S)) / (a * (a - 1));
    }
    OPD_HD double sum_c(const raw_sums& s) const {
        if (a == 0) return forward_kl{}.sum_c(s);
        if (a == 1) return reverse_kl{}.sum_c(s);
        return ::exp((a - 1) * s.d_star()) / (a - 1) * s.W / (1 + s.S);
    }
    OPD_INLINE void validate() const {
        if (!detail::is_finite(a) || a < -1000 || a > 1000)
            throw invalid_input("alpha_divergence.a", "must lie between -1000 and 1000");
    }
};

/// Σ p²/q - 1, twice the alpha-divergence at a = 2.
struct chi_squared {
    template <class F>
    OPD_HD OPD_INLINE F term(const row_constants<F>& r, const dense_entry<F>& e) const {
        return F(2) * alpha_divergence{2}.term(r, e);
    }
    template <class F>
    OPD_HD OPD_INLINE F c(const row_constants<F>& r, const dense_entry<F>& e) const {
        return F(2) * alpha_divergence{2}.c(r, e);
    }

    OPD_HD static constexpr bool infinite_where_teacher_zero() { return true; }
    static constexpr raw_sums_needed raw{.w = true};
    OPD_HD double exponent() const { return -1; }
    OPD_HD double value(const raw_sums& s) const { return 2 * alpha_divergence{2}.value(s); }
    OPD_HD double sum_c(const raw_sums& s) const { return 2 * alpha_divergence{2}.sum_c(s); }
};

} // namespace opd
