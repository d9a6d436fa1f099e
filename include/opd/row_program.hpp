// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Row programs: what happens at one prefix. Every loss reaches the logits through log p, so an objective says two
// things, its value and c[v] = dL/dlog p[v]; the pullback through log-softmax is always
//
//   dL/dz[v] = (c[v] - p[v] Σ_u c[u]) / T                                                                          (1)
//
// A dense program is a small struct with two functions over one entry, `term` and `c`. They see
//
//   p[v], q[v]      student and teacher probabilities, at their temperatures
//   delta[v]        (log p - log q)[v] - (log p - log q)[s*], from raw logit differences; s* the student's top token
//   row             p*, q* and d* = log p* - log q* at s*, and ratio = q*/p*, or 0 in a row that had better not be
//                   anchored
//
// Differences anchored at s* are what keeps a gradient near p = q right to float precision: log p[v] and log q[v]
// share the error of their normalisers, delta has none. (1) is unchanged when k·p[v] is added to c for any k, so a
// program is free to return c anchored, c[v] - p[v]·slope[s*], or not; constants in the slope are dropped. Anchoring
// is for rows whose p* and q* are close. Where they are not, slope[s*] is unlike the others' and would cancel between
// c[v] and p[v] Σ c: an untrained student under a teacher that is sure of s* has q*/p* = V. Then the gradient at s*
// is as large as p* and q* themselves, so the normalisers' rounding does not show, and c is anchored not at all;
// where the sums tell a log-ratio of which the slope is the mean slope, there (`raw_sums::by_mean`); or at the rest
// of the row (`raw_sums::by_rest`).
//
// A program that can do so declares `raw`, the sums over raw logits from which value and Σ c follow in closed form.
// Then one sweep serves for normalisers and value at once (reverse and forward KL, the alpha family):
//
//   student_mass  = Σ_{v≠s*} e^(z-z*)                      teacher_mass  = Σ_{v≠t*} e^(y-y*)            normalisers
//   student_delta = Σ_{v≠s*} e^(z-z*) delta                teacher_delta = Σ_{v≠t*} e^(y-y*) delta, or φ(delta)
//   student_power = Σ_{v≠s*} e^(z-z*) expm1(-k delta)
//
// z student and y teacher logits over T; the innermost loops call them S, T, U, X and W. where φ(x) = expm1(a x)/a
// with a = 1-k, whose limit at a = 0 is x: what keeps the alpha family's value as a goes to 0.
//
// A program may also read one number of the whole row, the overlap Σ min(p, q) (`reads_overlap`): a pass before the
// terms finds it.
//
// Every sum excludes its anchor's 1, is folded in float over leaves of 1,024 entries and in double above, and moves
// to a new anchor exactly (`rebase`). Source: on-policy distillation objectives as in AsyncOPD (eq. 1-7); the
// anchored sums are this project's.
#pragma once

#include <cmath>
#include <concepts>

#include "opd/config.hpp"
#include "opd/lanes.hpp"

namespace opd {

/// Constants of a row, in the program's number type.
template <class F>
struct row_constants {
    F p_star;             ///< p[s*]
    F q_star;             ///< q[s*]
    F d_star;             ///< log p[s*] - log q[s*]
    F ratio;              ///< q[s*] / p[s*]; 0 where they differ by more than a factor e: do not anchor there
    F slope_star = F(0);  ///< what the program's slope_star(row) returned; 0 if it has none, or the driver does not ask
    bool anchored = true; ///< the anchor's log-ratio is within 1; a branch on it is the same for a whole row
    F from_anchor = F(0); ///< d* less the anchor's log-ratio: 0 where the anchor is s*
    F log_overlap = F(0); ///< log Σ min(p, q), of programs that say `reads_overlap`
    F overlap_top = F(0); ///< of rows that are `far_apart` log max min(p, q), else 0
    F inv_overlap = F(1); ///< e^overlap_top / Σ min(p, q)
    bool far_apart = false; ///< F may not carry 1/Σ min(p, q) nor every p: by logarithms; the same for a whole row

    /// The log-ratio at which c is anchored: that of s*, of the mean slope, or of the rest.
    OPD_HD OPD_INLINE F d_anchor() const { return d_star - from_anchor; }
};

/// One vocabulary entry as a dense program sees it. Fields that a program does not read cost nothing.
template <class F>
struct dense_entry {
    F p, q;
    F delta;        ///< (log p - log q)[v] - d*, clamped to ±1e30
    F log_p, log_q; ///< accurate to float's error in the normaliser: for values, not for differences
};

/// `term` and `c` of one entry.
template <class F>
struct term_and_c {
    F term, c;
};

/// Which raw sums a program needs beside the normalisers.
struct raw_sums_needed {
    bool student_delta = false, student_power = false, teacher_delta = false;
    bool k_is_one = false;  ///< the exponent of student_power is 1 in every row: cheaper
    bool phi_power = false; ///< teacher_delta takes φ(delta)
    bool entropy = false;   ///< student_fall, for the student's entropy
    friend constexpr bool operator==(raw_sums_needed, raw_sums_needed) = default;
};

namespace detail {
/// Float carries -k delta = x up to 80, and a mass down to e^-87, below which it is lost though its term e^(x -
/// fall), `fall` nats below the anchor, may not be. So x counts 20 more from a fall of 60 on (the anchor may yet rise
/// by `anchor_slack`), and not at all where the term is below e^-40.
inline constexpr double steepest = 80, least_term = -40, anchor_slack = 20;
inline namespace OPD_ISA {
template <class F>
OPD_HD OPD_INLINE F reach_of(F x, F fall) {
    return select(x - fall > F(least_term), select(fall > F(60), x + F(20), x), F(-1e30));
}
} // namespace OPD_ISA
} // namespace detail

/// Normalisers and raw sums of one row, in double, relative to the anchors. The sums exclude their anchor's own term.
/// Products that are subtracted are pinned: else which of two is fused would follow from the code around them.
struct raw_sums {
    double student_mass = 0, teacher_mass = 0;
    double student_delta = 0, student_power = 0, teacher_delta = 0;
    double student_fall = 0;     ///< Σ e^((z - z*)/T) (z - z*)/T, never positive
    index_t s = -1, t = -1;      ///< ids of the anchors: student's and teacher's top token, lowest id first
    double z_s = 0, y_s = 0;     ///< student and teacher logits at s, not yet divided by temperature
    double z_t = 0, y_t = 0;     ///< the same at t
    double own_s = 1, own_t = 1; ///< 0: sums of a part of the row that the anchor does not lie in
    double inv_s = 1, inv_t = 1; ///< 1/temperature of the student and of the teacher
    double k = 1;                ///< exponent of student_power
    double phi_power = 0;        ///< a of φ in teacher_delta; 0: teacher_delta takes delta
    bool unlike = false;         ///< set by a driver that found s* unlike the rest
    bool by_mean = false;        ///< set by a driver that knows the log-ratio with the mean slope: the anchor then
    double from_mean = 0;        ///< d* less that log-ratio
    double least_rest = 4e-18;   ///< the least that 1 - q* counts as, e^-40; a driver that floors log q raises it
    double log_overlap = 0;      ///< log Σ min(p, q), set by a driver whose program reads it

    /// φ
    OPD_HD OPD_INLINE double phi(double x) const { return phi_power == 0 ? x : ::expm1(phi_power * x) / phi_power; }
    /// a of φ for programs with this exponent: 0 where teacher_delta does not serve (a >= 0.8, where student_power
    /// does) or is linear as it is.
    OPD_HD OPD_INLINE static double power_for(double k) {
        const double a = 1 - k;
        return a >= 0.8 || (a < 1e-9 && a > -1e-9) ? 0 : a;
    }

    /// What both sides have outside their top tokens, in units of those; at most 1.
    OPD_HD OPD_INLINE double mass_outside() const {
        const double mass = student_mass + teacher_mass;
        return mass < 1 ? mass : 1;
    }
    /// log p - log q at the student's anchor, from the normalisers.
    OPD_HD OPD_INLINE double d_star() const {
        return ::log1p(teacher_mass) - ::log1p(student_mass) + detail::pin((y_t - y_s) * inv_t);
    }
    /// q/p at the student's anchor, 0 where the two are more than a nat apart: `row_constants::ratio`.
    OPD_HD OPD_INLINE double ratio() const { return ratio(d_star()); }
    OPD_HD OPD_INLINE static double ratio(double d) { return d >= -1 && d <= 1 ? ::exp(-d) : 0; }
    /// Whether p* is small and p* and q* are more than a nat apart.
    OPD_HD OPD_INLINE bool s_may_be_unlike() const { return s_may_be_unlike(d_star()); }
    OPD_HD OPD_INLINE bool s_may_be_unlike(double d) const { return ratio(d) == 0 && student_mass > 15; }
    /// Whether the anchor is not s*, but the rest of the row: where s* is unlike the rest. What a slope relative to
    /// s*'s has in common in all other entries would cancel by 1/p*. A small p* under a larger q* is unlike the rest;
    /// a smaller q* may be common to all, of a teacher that is sure elsewhere.
    OPD_HD OPD_INLINE bool by_rest() const { return by_rest(d_star()); }
    OPD_HD OPD_INLINE bool by_rest(double d) const { return s_may_be_unlike(d) && (unlike || d < 0); }
    /// log (1 - p*)/(1 - q*), the log-ratio of the rest; at most 40, for programs raise it to powers, and where log q
    /// is floored that of a rest which lies at the floor.
    OPD_HD OPD_INLINE double d_rest() const { return d_rest(d_star()); }
    OPD_HD OPD_INLINE double d_rest(double d) const {
        const double q = ::exp(-d) / (1 + student_mass);
        const double rest = t == s ? teacher_mass / (1 + teacher_mass) : 1 - q;
        return ::log(student_mass / (1 + student_mass)) - ::log(rest > least_rest ? rest : least_rest);
    }
    /// d* less the log-ratio at which c is anchored. Drivers ask with the d* that they have: its logarithms cost as
    /// much as a short row.
    OPD_HD OPD_INLINE double from_anchor(double d) const {
        return by_mean ? from_mean : by_rest(d) ? d - d_rest(d) : 0;
    }
    /// What delta adds to z inv_s - y inv_t: exactly 0 where the anchor's logits and the temperatures are equal.
    OPD_HD OPD_INLINE double shift() const {
        return detail::pin((y_s - z_s) * inv_s) + detail::pin(y_s * (inv_t - inv_s));
    }
    /// delta at the teacher's anchor.
    OPD_HD OPD_INLINE double delta_at_t() const {
        return detail::pin((z_t - z_s) * inv_s) - detail::pin((y_t - y_s) * inv_t);
    }
    /// log-sum-exp of the student's scaled logits.
    OPD_HD OPD_INLINE double lse() const { return detail::pin(z_s * inv_s) + ::log1p(student_mass); }
    /// -Σ p log p, where student_fall was summed.
    OPD_HD OPD_INLINE double entropy() const { return ::log1p(student_mass) - student_fall / (1 + student_mass); }

    /// student_fall after the anchor rose by -a. Of numbers that are pinned: were they shared with the masses'
    /// expressions, fast-math would reassociate the student's and not the teacher's, and equal rows would not be
    /// equal.
    OPD_HD OPD_INLINE static double moved_fall(double fall, double e, double a, double full) {
        return e > 0 ? e * (fall + a * full) : 0; // a may be beyond every number
    }
    /// Before the student's first token with mass, of logits z2, y2: p = 0 < q so far, and every delta is that of z =
    /// -1e30.
    OPD_HD OPD_INLINE void begin_student(double z2, double y2) {
        if (teacher_mass > 0) teacher_delta = phi((z_s - z2) * inv_s - (y_s - y2) * inv_t) * teacher_mass;
    }
    /// Moves the student's anchor to token `s2` with logits z2, y2 (z2 > z_s): student_mass, student_delta,
    /// student_power lose s2's term, gain the old one's. The caller must not have added s2 yet.
    OPD_HD OPD_INLINE void rebase_student(index_t s2, double z2, double y2) {
        if (z_s <= -1e30) { // nothing had mass so far
            begin_student(z2, y2);
            student_mass = student_delta = student_power = student_fall = 0;
            s = s2, z_s = z2, y_s = y2;
            return;
        }
        const double a = (z_s - z2) * inv_s, b = (y_s - y2) * inv_t, g = a - b;
        const double e = ::exp(a), full = own_s + student_mass;
        teacher_delta +=
            phi(g) *
            (teacher_mass + phi_power * teacher_delta); // delta grows by g everywhere; t's own term is added at the end
        student_delta = e * (student_delta + g * full);
        student_fall = moved_fall(student_fall, detail::pin(e), detail::pin(a), own_s + detail::pin(student_mass));
        const double f = ::exp(a - k * g);
        student_power = f * student_power + (k * g > -1 && k * g < 1 ? e * ::expm1(-k * g) : f - e) * full;
        student_mass = detail::pin(e) * detail::pin(full);
        s = s2, z_s = z2, y_s = y2;
    }
    /// Moves the teacher's anchor to token `t2`.
    OPD_HD OPD_INLINE void rebase_teacher(index_t t2, double z2, double y2) {
        const double f = ::exp((y_t - y2) * inv_t);
        teacher_delta = f * (teacher_delta + own_t * phi(delta_at_t()));
        teacher_mass = detail::pin(f) * detail::pin(own_t + teacher_mass); // as the student's, to the bit
        t = t2, z_t = z2, y_t = y2;
    }
};

// clang-format off
/// A divergence: two functions of a row's constants and one entry.
///   term(row, entry)  summed over v, is the value
///   c(row, entry)     is dL/dlog p[v], up to any multiple of p[v]
/// both templates on the number type F, made of the operators and functions in lanes.hpp. See
/// docs/concepts/divergence.md.
template <class D>
concept divergence = requires(const D d, row_constants<scalar<double>> r, dense_entry<scalar<double>> e) {
    { d.term(r, e) } -> std::same_as<scalar<double>>;
    { d.c(r, e) } -> std::same_as<scalar<double>>;
};

/// A divergence whose value and Σ c follow from raw sums: one sweep over the logits.
///   static constexpr raw_sums_needed raw;  double exponent() const;
///   double value(raw_sums) const;          double sum_c(raw_sums) const;   (Σ over v of c as `c` returns it)
template <class D>
concept single_sweep_divergence = divergence<D> && requires(const D d, raw_sums s) {
    { D::raw } -> std::convertible_to<raw_sums_needed>;
    { d.exponent() } -> std::convertible_to<double>;
    { d.value(s) } -> std::convertible_to<double>;
    { d.sum_c(s) } -> std::convertible_to<double>;
};
/// One whose c, where the anchor is s*, is p times a function of expm1(-k delta), which the sweep has formed.
///   bool keeps_power() const; F c_of_power(row, p, F power) const;   (to the bit what `c` forms of them)
template <class D>
concept power_divergence = single_sweep_divergence<D> && requires(const D d, row_constants<scalar<double>> r,
                                                                  scalar<double> x) {
    { d.keeps_power() } -> std::same_as<bool>;
    { d.c_of_power(r, x, x) } -> std::same_as<scalar<double>>;
};
// clang-format on

/// Whether a program reads row.log_overlap, a sum over the whole row: drivers then find it in a pass before the
/// terms. Says so by
///   static constexpr bool reads_overlap = true;
/// Its value is no sum of functions of one entry, so it is no f-divergence: neither of drawn tokens nor of a part of
/// the row.
template <class D>
inline constexpr bool reads_overlap = [] {
    if constexpr (requires { D::reads_overlap; })
        return bool(D::reads_overlap);
    else
        return false;
}();

/// Whether a divergence names another one at run time (any_dense): rows then ask for that one, once a call.
template <class D>
inline constexpr bool chosen_at_run_time = requires {
    requires D::chosen_at_run_time;
};

/// A divergence whose value is also Σ of terms of which none is negative: `term` plus a multiple of p - q, which sums
/// to 0, chosen so that the term is of second order in log p - log q near equality. A small value keeps its digits
/// that way, and an error of the normalisers enters squared. `nonnegative_term(entry)` finds the whole log p - log q
/// in entry.delta.
template <class D>
concept refinable_divergence = divergence<D> && requires(const D d, dense_entry<scalar<double>> e) {
    { d.nonnegative_term(e) } -> std::same_as<scalar<double>>;
};

namespace detail {

/// Both functions of an entry: at once, by a program's `both`, where they have more than p and q in common.
template <class D, class F>
OPD_HD OPD_INLINE_ALWAYS term_and_c<F> both_of(const D& program, const row_constants<F>& r, const dense_entry<F>& e) {
    if constexpr (requires { program.both(r, e); })
        return program.both(r, e);
    else
        return {program.term(r, e), program.c(r, e)};
}

/// Whether a gradient's log-ratios are so small that F, where it rounds two scaled differences before it takes one
/// from the other, leaves less of them than of a row of one temperature. In double the inputs have no more.
template <class F>
OPD_HD constexpr bool rounds_differences(double value, const raw_sums& s) {
    return sizeof(typename F::value_type) == 4 && s.inv_s != s.inv_t && value < 0x1p-6 * s.mass_outside();
}
/// Whether a value is so small, beside the mass outside the top token that it was summed from, that rounding in F may
/// be a thousandth of it. A sum in float is off by some 1e-7 of that mass; programs whose `value` enlarges that say
/// by how much (`cancellation`: the size of the numbers whose sum it is, where that is more than 1).
template <class F, class D>
OPD_HD constexpr bool loses_digits(const D& program, double value, const raw_sums& s) {
    double mass = s.mass_outside();
    if constexpr (requires { program.cancellation(s); }) mass *= program.cancellation(s);
    return value < (sizeof(typename F::value_type) == 4 ? 0x1p-11 : 0x1p-40) * mass;
}

/// Whether p - q of the two normalised sides keeps the digits of a row's gradient in all entries that are not among
/// its largest: p* and q* differ by more than the normalisers may be off, and so does the rest. Of a value that has
/// its digits; both are seen from the mass outside the top token.
OPD_HD OPD_INLINE bool far_apart(double value, const raw_sums& s) {
    const double d = s.d_star(), mass = s.mass_outside();
    return value >= 0x1p-5 * mass && (d < 0 ? -d : d) >= 0x1p-4 * mass;
}
/// Four times the largest |p - q| among the two anchors of such a row: in entries with a larger p the difference is
/// that of logarithms.
OPD_HD OPD_INLINE double largest_plain(const raw_sums& s) {
    const double p_s = 1 / (1 + s.student_mass), q_t = 1 / (1 + s.teacher_mass);
    const double at_s = p_s * ::expm1(-s.d_star()), at_t = q_t - ::exp((s.z_t - s.z_s) * s.inv_s) * p_s;
    const double a = at_s < 0 ? -at_s : at_s, b = at_t < 0 ? -at_t : at_t;
    return 4 * (a < b ? b : a);
}

/// Whether sums relative to s* do not say what the rest of the row holds, s* being unlike it.
template <class F, class D>
OPD_HD constexpr bool hides_rest(const D& program, double value, const raw_sums& s) {
    if constexpr (requires { program.dwarfed(s, value); })
        if (program.dwarfed(s, value)) return true;
    return loses_digits<F>(program, value, s);
}

/// Where a program's value is infinite: needed to floor, skip or raise. Programs say so by two optional members.
template <class D>
OPD_HD constexpr bool infinite_where_teacher_zero(const D& d) {
    if constexpr (requires { d.infinite_where_teacher_zero(); })
        return d.infinite_where_teacher_zero();
    else
        return false;
}
template <class D>
OPD_HD constexpr bool infinite_where_student_zero(const D& d) {
    if constexpr (requires { d.infinite_where_student_zero(); })
        return d.infinite_where_student_zero();
    else
        return false;
}

/// Both at once, of a program that is chosen at run time.
struct infinite_zeros {
    bool teacher_zero, student_zero;
};

/// Where no token has mass on both sides.
template <class D>
OPD_HD constexpr bool infinite_where_disjoint(const D& d) {
    if constexpr (requires { d.infinite_where_disjoint(); })
        return d.infinite_where_disjoint();
    else
        return false;
}

/// Whether a row in double may be anchored at a log-ratio d: no power of e^d that its program forms leaves double.
/// `k`: the program's exponent.
OPD_HD OPD_INLINE bool holds_anchor(double d, double k) {
    const double size = d < 0 ? -d : d, power = k < 0 ? -k : k, most = 300;
    return size <= most && size * power <= most;
}
/// A program's exponent; 1 if it has none.
template <class D>
OPD_HD OPD_INLINE double exponent_of(const D& program) {
    if constexpr (requires { program.exponent(); })
        return program.exponent();
    else
        return 1;
}

/// Constants of a row that is computed entry by entry in double, from its entry at s* with the whole log-ratio in
/// delta. The anchor keeps a gradient whose slopes are all near slope*, or dwarfed by it; where a power of q*/p*
/// leaves double there is none: d* = 0 and ratio 1 make delta the whole log-ratio. `k`: the program's exponent, 1 if
/// it has none.
template <class D>
OPD_HD OPD_INLINE row_constants<scalar<double>> careful_constants(const D& program,
                                                                  const dense_entry<scalar<double>>& top, double k) {
    using F = scalar<double>;
    const double d = top.delta.v;
    if (!holds_anchor(d, k)) return {F(1), F(1), F(0), F(1)};
    row_constants<F> row{top.p, top.q, F(d), F(raw_sums::ratio(d))};
    row.anchored = d >= -1 && d <= 1;
    if constexpr (requires { program.slope_star(row); }) row.slope_star = program.slope_star(row);
    return row;
}

} // namespace detail

} // namespace opd
