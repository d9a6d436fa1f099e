// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A row's entries as a dense program sees them (row_program.hpp: dense_entry), from its normalisers and anchors, in
// lanes or in one thread's numbers. `Anchors` forms e^((z - z*)/T), e^((y - y*)/T) and delta; what is made of them is
// the same text.
#pragma once

#include <cmath>
#include <cstdint>

#include "opd/config.hpp"
#include "opd/element.hpp"
#include "opd/lanes.hpp"
#include "opd/row_program.hpp"

namespace opd::detail {
inline namespace OPD_ISA {

inline constexpr double lowest_logit = -1e30; // stands for a mask

/// e^(x·(hi + lo)) for x <= 0, the product's rounding made good: its error does not grow with |x|.
template <class F>
OPD_HD OPD_INLINE F exp_scaled(F x, F hi, F lo) {
    const F t = x * hi;
    const F lost = fma(x, hi, -t) + x * lo;
    const F e = exp(t);
    return select(t < F(-800), F(0), fma(e, lost, e)); // 0 also where t or lost is beyond the number type
}

/// x -> e^(x/T) for x <= 0, of one T.
template <class F>
struct exp_over {
    F hi, lo; // 1/T in two parts
    OPD_HD explicit exp_over(double inv) : hi(inv), lo(inv - double(typename F::value_type(inv))) {}
    OPD_HD OPD_INLINE F operator()(F x) const { return exp_scaled(x, hi, lo); }
};
/// By powers of two, as a GPU has them: the whole part of x/(T log 2) goes into the exponent's bits, the product's
/// rounding into the rest. 0 below 2^-126.
template <>
struct exp_over<scalar<float>> {
    using F = scalar<float>;
    float hi, lo, least; // 1/(T log 2) in two parts; what is below is 0
    OPD_HD explicit exp_over(double inv) {
        const double by = inv * 1.4426950408889634074;
        hi = float(by), lo = float(by - double(hi)), least = float(-150 / by);
    }
    OPD_HD OPD_INLINE F operator()(F x) const {
        constexpr float whole_numbers = 0x1.8p23f; // floats of its size are whole, and their last bits count
        const float u = max(x, F::raw(least)).v;
        const float m = pin(::fmaf(u, hi, whole_numbers)), whole = m - whole_numbers;
        const float rest = ::fmaf(u, lo, pin(::fmaf(u, hi, -whole)));
        const float low = whole_numbers - 127; // 2^-127 as bits: 0
        const std::uint32_t bits = (bit_cast<std::uint32_t>(m < low ? low : m) << 23) + 0x3f800000u;
        return F::raw(two_to(rest) * bit_cast<float>(bits));
    }

private:
    /// 2^x for |x| <= 1/2.
    OPD_HD OPD_INLINE static float two_to(float x) {
#if defined(__CUDA_ARCH__)
        float y;
        asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
        return y;
#else
        return ::exp2f(x);
#endif
    }
};

/// Anchors (row_program.hpp) as one thread's numbers.
template <class F>
struct thread_anchors {
    F z_s, y_s, y_t, d0, inv_s, inv_t;
    exp_over<F> exp_s, exp_t;
    bool near; // how delta is grouped: each form alone loses digits on some rows

    OPD_HD explicit thread_anchors(const raw_sums& s)
        : z_s(s.z_s), y_s(s.y_s), y_t(s.y_t), d0(s.z_s - s.y_s), inv_s(s.inv_s), inv_t(s.inv_t), exp_s(s.inv_s),
          exp_t(s.inv_t), near(s.inv_s == s.inv_t && s.z_s - s.y_s <= 16 && s.z_s - s.y_s >= -16) {}

    OPD_HD OPD_INLINE F student(F z) const { return exp_s(pin(z - z_s)); }
    OPD_HD OPD_INLINE F teacher(F y) const { return exp_t(pin(y - y_t)); }
    /// Near: `near`, where a loop knows it.
    template <bool Near>
    OPD_HD OPD_INLINE F delta(F z, F y) const {
        if (Near || near) return within(pin(pin(z - y) - d0) * inv_s);
        return within(within(pin(z - z_s) * inv_s) - within(pin(y - y_s) * inv_t));
    }
    OPD_HD OPD_INLINE static F within(F x) { return min(max(x, F(-1e30)), F(1e30)); }
};

template <class F, class Anchors, class Program>
struct row_numbers {
    Anchors anchor;
    row_constants<F> row;
    F inv_sum_s, inv_sum_t, log_sum_s, log_sum_t;

    OPD_HD row_numbers(const raw_sums& s, const Program& program) : row_numbers(s, program, s.d_star()) {}
    OPD_HD row_numbers(const raw_sums& s, const Program& program, double d)
        : anchor(s), row{F(1 / (1 + s.student_mass)), F(::exp(-d) / (1 + s.student_mass)), F(d), F(raw_sums::ratio(d))},
          inv_sum_s(1 / (1 + s.student_mass)), inv_sum_t(1 / (1 + s.teacher_mass)), log_sum_s(::log1p(s.student_mass)),
          log_sum_t(::log1p(s.teacher_mass)) {
        const double from = s.from_anchor(d);
        row.anchored = d - from >= -1 && d - from <= 1;
        row.from_anchor = F(from);
        if constexpr (reads_overlap<Program>)
            row.log_overlap = F(s.log_overlap), row.inv_overlap = F(::exp(-s.log_overlap));
        if constexpr (requires { program.slope_star(row); }) row.slope_star = program.slope_star(row);
    }

    /// Near: `anchor.near`, where it is known at compile time.
    template <bool Near>
    OPD_HD OPD_INLINE dense_entry<F> entry(F z, F y) const {
        return entry<Near>(z, y, anchor.student(z), anchor.teacher(y));
    }
    /// Of exponentials that are known: `anchor.student(z)`, `anchor.teacher(y)`.
    template <bool Near>
    OPD_HD OPD_INLINE dense_entry<F> entry(F z, F y, F exp_z, F exp_y) const {
        dense_entry<F> e;
        e.p = exp_z * inv_sum_s;
        e.q = exp_y * inv_sum_t;
        e.delta = anchor.template delta<Near>(z, y);
        e.log_p = pin(z - anchor.z_s) * anchor.inv_s - log_sum_s;
        e.log_q = pin(y - anchor.y_t) * anchor.inv_t - log_sum_t;
        return e;
    }
};

/// Which log-probs of an infinite row are raised inside the logarithms, and to what.
struct raised_logs {
    bool q = false, p = false; ///< the teacher's, the student's
    double floor = 0;
};

/// Numbers of a row that is looked at entry by entry: infinite rows under `floor`, rows whose raw sums lost their
/// digits on the way to their anchor. Differences are taken in double. Logits come within ±1e30.
template <class F, class Anchors, class Program>
struct entrywise_numbers : row_numbers<F, Anchors, Program> {
    static constexpr double none = 3e38; // beyond every log-prob
    double inv_s, inv_t, shift;
    F floor_p, raised_p, floor_q, above_floor, k, d_star;
    bool floored;

    OPD_HD entrywise_numbers(const raw_sums& s, const Program& program, raised_logs up, double exponent)
        : row_numbers<F, Anchors, Program>(s, program), inv_s(s.inv_s), inv_t(s.inv_t), shift(s.shift()),
          floor_p(up.p ? up.floor : -none), raised_p(up.p ? ::exp(up.floor) : 0), floor_q(up.q ? up.floor : -none),
          above_floor(up.q ? up.floor + s.d_star() : -none), k(exponent), d_star(s.d_star()), floored(up.q) {}

    /// As c sees it: with the teacher's floor, without the student's (the gradient of forward KL is p - q).
    OPD_HD OPD_INLINE dense_entry<F> entry(F z, F y) const {
        const bool below_floor = floored && !any(y > F(-1e30)); // no difference of theirs is below the floor's
        dense_entry<F> e;
        e.p = this->anchor.student(z) * this->inv_sum_s;
        e.q = this->anchor.teacher(y) * this->inv_sum_t;
        e.log_p = pin(z - this->anchor.z_s) * this->anchor.inv_s - this->log_sum_s;
        e.log_q = max(pin(y - this->anchor.y_t) * this->anchor.inv_t - this->log_sum_t, floor_q);
        e.delta = e.log_p - above_floor;
        if (!below_floor) e.delta = min(in_double(z, inv_s, y, inv_t, shift), e.delta);
        return e;
    }
    /// As the value sees it: p itself raised too, where q > 0, for not every program has a logarithm.
    OPD_HD OPD_INLINE dense_entry<F> for_value(dense_entry<F> e) const {
        if constexpr (requires(const Program& p) { p.infinite_where_student_zero(); }) {
            const auto low = e.log_p < floor_p;
            const typename F::mask lifted = low & (e.q > F(0));
            e.p = select(lifted, raised_p, e.p);
            e.log_p = max(e.log_p, floor_p);
            e.delta = max(e.delta, floor_p - e.log_q - d_star);
        }
        return e;
    }
    /// Whether float cannot carry e^(-k delta), if the program forms it, at this entry.
    OPD_HD OPD_INLINE typename F::mask wide(const dense_entry<F>& e) const {
        const F x = max(-k * e.delta, -k * (e.delta + d_star));
        const typename F::mask alive = e.log_p > F(-1e20), has_mass = (e.p + e.q) > F(0);
        const typename F::mask far = reach_of(x, -e.log_p) > F(steepest), steep = x > F(steepest);
        return (far & alive) | (steep & has_mass);
    }
};

/// Σ min(p, q) and ½ Σ |p - q|, which is 1 less that, from the entries themselves and from their log-ratios:
/// whichever is small has its digits. Far apart: float may have lost it.
struct overlap_sums {
    double min_sum = 0, distance = 0;
    OPD_HD static overlap_sums merge(overlap_sums x, overlap_sums y) {
        return {x.min_sum + y.min_sum, x.distance + y.distance};
    }
    OPD_HD bool far_apart() const { return !(min_sum > 1e-28); }
    OPD_HD double log() const { return min_sum < 0.5 ? ::log(min_sum) : ::log1p(-distance); }
};
template <class F>
OPD_HD OPD_INLINE F distance_term(const row_constants<F>& r, const dense_entry<F>& e) {
    const F d = e.delta + r.d_star, near = e.p * abs(expm1_near(select(abs(d) < F(1), -d, F(0))));
    return F(0.5) * select(abs(d) < F(1), near, abs(e.p - e.q));
}

/// Σ e^x of numbers of any size: the largest, and the sum relative to it.
struct log_sum_of_any {
    double top = neg_inf<double>(), sum = 0;
    OPD_HD void add(double x) { *this = merge(*this, {x, 1}); }
    OPD_HD static log_sum_of_any merge(log_sum_of_any a, log_sum_of_any b) {
        if (is_neg_inf(b.top)) return a;
        if (is_neg_inf(a.top)) return b;
        if (a.top >= b.top) return {a.top, a.sum + b.sum * ::exp(b.top - a.top)};
        return {b.top, b.sum + a.sum * ::exp(a.top - b.top)};
    }
    OPD_HD bool none() const { return is_neg_inf(top); }
    OPD_HD double log() const { return top + ::log(sum); }
};
/// Into a row that is far apart: Σ min(p, q), or what stands for it where there is none.
OPD_HD inline void set_overlap(row_constants<scalar<double>>& row, const log_sum_of_any& overlap, double floor) {
    using F = scalar<double>;
    const double log = overlap.none() ? floor : overlap.log();
    row.log_overlap = F(log < 0 ? log : 0), row.far_apart = true;
    row.overlap_top = F(overlap.none() ? floor : overlap.top),
    row.inv_overlap = F(overlap.none() ? 1 : 1 / overlap.sum);
}

/// For a value near 0: p, q and the whole log p - log q in delta, in double but for the normalisers.
template <class F, class Numbers>
OPD_HD OPD_INLINE dense_entry<F> entry_in_double(const Numbers& k, F z, F y, const raw_sums& s, double shift) {
    dense_entry<F> e;
    e.p = k.anchor.student(z) * k.inv_sum_s;
    e.q = k.anchor.teacher(y) * k.inv_sum_t;
    e.delta = in_double(z, s.inv_s, y, s.inv_t, shift);
    return e;
}

} // namespace OPD_ISA
} // namespace opd::detail
