// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A leaf: 1,024 entries of a row, the stretch that is summed in float before anything is folded into double. Here is
// what is done to one leaf: reading it in place or through an L1 buffer, telling numbers beyond ±1e30 by their bits,
// its raw sums relative to given anchors (row_program.hpp), and finding its largest entry. sweep.hpp strings leaves
// together.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "opd/config.hpp"
#include "opd/element.hpp"
#include "opd/lanes.hpp"
#include "opd/row_program.hpp"
#include "opd/rows/row_sweep.hpp"
#include "opd/rows/tuning.hpp"

namespace opd::detail {

inline constexpr int leaf_size = 1024;

inline namespace OPD_ISA {

/// The number type that rows of these storage types are computed in.
template <class... T>
using pack_for = std::conditional_t<(std::is_same_v<arithmetic_t<T>, double> || ...), scalar<double>, pack>;

/// Whether F loads T straight from memory.
template <class F, class T>
inline constexpr bool loads_directly = std::is_same_v<std::remove_const_t<T>, typename F::value_type> ||
                                       (lane_pack<F> && brain_float<T>);

/// Running maximum of |x| as integers: shows NaN, infinities and values beyond 1e30, also under -Ofast.
template <class F>
struct magnitude;
template <>
struct magnitude<lanes> {
    lanes::ivec seen{};
    OPD_INLINE void see(lanes x) {
        const lanes::ivec a = std::bit_cast<lanes::ivec>(x.v) & 0x7fffffff;
#if defined(OPD_AVX512)
        seen = std::bit_cast<lanes::ivec>(
            _mm512_maskz_max_epi32(lanes::every, std::bit_cast<__m512i>(a), std::bit_cast<__m512i>(seen)));
#else
        seen = a > seen ? a : seen;
#endif
    }
    OPD_INLINE bool beyond() const {
        constexpr int limit = 0x7149f2ca; // 1e30f
#if defined(OPD_AVX512)
        return _mm512_cmpge_epi32_mask(std::bit_cast<__m512i>(seen), _mm512_set1_epi32(limit)) != 0;
#else
        return any(seen >= limit);
#endif
    }
};
template <>
struct magnitude<twin<lanes>> : magnitude<lanes> {
    OPD_INLINE void see(twin<lanes> x) {
        magnitude<lanes>::see(x.a);
        magnitude<lanes>::see(x.b);
    }
};
template <>
struct magnitude<scalar<double>> {
    std::uint64_t seen = 0;
    OPD_INLINE void see(scalar<double> x) {
        const auto a = std::bit_cast<std::uint64_t>(x.v) & 0x7fffffffffffffffull;
        seen = a > seen ? a : seen;
    }
    OPD_INLINE bool beyond() const { return seen >= 0x46293e5939a08ceaull; } // 1e30
};

/// Whether F writes G past the caches: whole cache lines at a time.
template <class F, class G>
inline constexpr bool streams = std::is_same_v<G, float>&& F::width > 1;
template <class G>
inline constexpr bool streams<twin<lanes>, G> = std::is_same_v<G, float> || brain_float<G>;

/// How far the entries lie below their anchor: the largest bits of (anchor - x), as unsigned. A number above the anchor
/// has the sign bit, NaN and infinity lie above every finite one: one comparison finds them all, also under -Ofast.
template <class F>
struct fall;
template <>
struct fall<lanes> {
    typedef std::uint32_t uvec __attribute__((vector_size(4 * lanes::width)));
    uvec most{};
    OPD_INLINE void see(lanes x) {
        const uvec b = std::bit_cast<uvec>(x.v);
#if defined(OPD_AVX512)
        most = std::bit_cast<uvec>(
            _mm512_maskz_max_epu32(lanes::every, std::bit_cast<__m512i>(b), std::bit_cast<__m512i>(most)));
#else
        most = b > most ? b : most;
#endif
    }
    /// Whether some entry is not within [anchor - limit, anchor].
    OPD_INLINE bool beyond(float limit) const {
        const auto l = std::bit_cast<std::uint32_t>(limit);
#if defined(OPD_AVX512)
        return _mm512_cmpgt_epu32_mask(std::bit_cast<__m512i>(most), _mm512_set1_epi32(static_cast<int>(l))) != 0;
#else
        return any(std::bit_cast<lanes::ivec>(most > l));
#endif
    }
};
template <>
struct fall<twin<lanes>> : fall<lanes> {
    OPD_INLINE void see(twin<lanes> x) {
        fall<lanes>::see(x.a);
        fall<lanes>::see(x.b);
    }
};
template <>
struct fall<scalar<double>> {
    std::uint64_t most = 0;
    OPD_INLINE void see(scalar<double> x) {
        const auto b = std::bit_cast<std::uint64_t>(x.v);
        most = b > most ? b : most;
    }
    OPD_INLINE bool beyond(double limit) const { return most > std::bit_cast<std::uint64_t>(limit); }
};

/// What staging found in a leaf, by bits.
struct leaf_contents {
    row_contents row;
    bool out_of_range = false; ///< something of magnitude 1e30 or more
};

/// Fetches the cache lines of one F of storage T, some way ahead.
template <class F, class T>
OPD_INLINE void prefetch(const T* p) {
    for (std::size_t byte = 0; byte < F::width * sizeof(T); byte += 64)
        __builtin_prefetch(reinterpret_cast<const char*>(p) + byte);
}

/// One leaf of a row: where to read it, `n` a multiple of the lane width.
template <class F>
struct staged_leaf {
    using value = typename F::value_type;
    alignas(64) value z[leaf_size];
    alignas(64) value y[leaf_size];
    alignas(64) value z_masked[leaf_size]; // as z, with excluded ids at lowest
    alignas(64) value y_masked[leaf_size];
    static constexpr value lowest = value(-1e30);

    template <class T>
    static int load(value* to, const T* from, int n) {
        for (int i = 0; i < n; ++i) to[i] = static_cast<value>(load_maskable(from[i]));
        const int full = (n + F::width - 1) / F::width * F::width;
        for (int i = n; i < full; ++i) to[i] = lowest;
        return full;
    }
    /// Whether something among the n entries has a magnitude of 1e30 or more.
    template <bool Teacher>
    bool holds_out_of_range(int n) const {
        magnitude<F> size;
        int i = 0;
        for (; i + F::width <= n; i += F::width) {
            size.see(F::load(z + i));
            if constexpr (Teacher) size.see(F::load(y + i));
        }
        for (; i < n; ++i) { // not the padding, which is at lowest
            size.see(F(double(z[i])));
            if constexpr (Teacher) size.see(F(double(y[i])));
        }
        return size.beyond();
    }
    /// Masks become -1e30, what is above 1e30 that; reports NaN, +inf, and where one side alone has a mask.
    template <bool Teacher>
    leaf_contents cut(int n) {
        word bad = 0, teacher_zero = 0, student_zero = 0,
             out_of_range = 0; // not bool, and no branch: the loop becomes lanes
        for (int i = 0; i < n; ++i) {
            const word a = std::bit_cast<word>(z[i]), z_zero = is_masked(a);
            bad |= word{(a & bits::magnitude) >= bits::infinity} & ~z_zero;
            out_of_range |= word{(a & bits::magnitude) >= std::bit_cast<word>(-lowest)};
            z[i] = within_range(z[i]);
            if constexpr (Teacher) {
                const word b = std::bit_cast<word>(y[i]), y_zero = is_masked(b);
                bad |= word{(b & bits::magnitude) >= bits::infinity} & ~y_zero;
                out_of_range |= word{(b & bits::magnitude) >= std::bit_cast<word>(-lowest)};
                teacher_zero |= y_zero & ~z_zero;
                student_zero |= z_zero & ~y_zero;
                y[i] = within_range(y[i]);
            }
        }
        return {{bad != 0, teacher_zero != 0, student_zero != 0}, out_of_range != 0};
    }
    static value within_range(value x) {
        const word w = std::bit_cast<word>(x);
        const word most = w > bits::magnitude ? std::bit_cast<word>(lowest) : std::bit_cast<word>(-lowest);
        return std::bit_cast<value>((w & bits::magnitude) < std::bit_cast<word>(-lowest) ? w : most);
    }

private:
    using bits = float_bits<value>;
    using word = typename bits::word;
    /// is_mask without a branch: negative numbers' bits ascend with their size.
    static word is_masked(word w) {
        constexpr word sign = static_cast<word>(~bits::magnitude);
        return word{w >= std::bit_cast<word>(lowest)} & word{w <= (sign | bits::infinity)};
    }
};

/// The anchors as the lanes see them.
template <class F>
struct anchor_lanes {
    using value = typename F::value_type;
    F z_s, y_s, y_t, d0;
    F inv_s, inv_t, k;
    F phi_power, x_scale;                       // a and 1/a of φ
    F hi_s, lo_s, floor_s, hi_t, lo_t, floor_t; // log2(e)/T in two parts
    F share;                                    // e^((y* - y[s*])/T): the teacher's anchor in units of its y[s*]
    value limit_s, limit_t;                     // how far below the anchor exp2_scaled needs no floor
    bool linear;                                // X takes delta itself
    bool near;                                  // how delta is grouped: each form alone loses digits on some rows

    static constexpr double log2e = 1.4426950408889634;
    static double low(double x) { return x - double(value(x)); }

    explicit anchor_lanes(const raw_sums& s)
        : z_s(s.z_s), y_s(s.y_s), y_t(s.y_t), d0(s.z_s - s.y_s), inv_s(s.inv_s), inv_t(s.inv_t), k(s.k),
          phi_power(s.phi_power), x_scale(s.phi_power == 0 ? 1 : 1 / s.phi_power), hi_s(s.inv_s * log2e),
          lo_s(low(s.inv_s * log2e)), floor_s(-160 / (s.inv_s * log2e)), hi_t(s.inv_t * log2e),
          lo_t(low(s.inv_t * log2e)), floor_t(-160 / (s.inv_t * log2e)), share(std::exp((s.y_t - s.y_s) * s.inv_t)),
          limit_s(value(std::min(1e30, 0x1p40 / (s.inv_s * log2e)))),
          limit_t(value(std::min(1e30, 0x1p40 / (s.inv_t * log2e)))), linear(s.phi_power == 0),
          near(s.inv_s == s.inv_t && std::abs(s.z_s - s.y_s) <= 16) {}

    /// Near is `near`, known at compile time so that the loops hold no branch. Before the factor `unit`.
    template <bool Near>
    OPD_INLINE F unscaled_delta(F z, F y) const {
        if constexpr (Near)
            return pin(pin(z - y) - d0);
        else
            return pin(z - z_s) * inv_s - pin(y - y_s) * inv_t;
    }
    template <bool Near>
    OPD_INLINE F unit() const {
        if constexpr (Near)
            return inv_s;
        else
            return F(1);
    }
    template <bool Near>
    OPD_INLINE F delta(F z, F y) const {
        if constexpr (Near)
            return unscaled_delta<true>(z, y) * inv_s;
        else
            return unscaled_delta<false>(z, y);
    }
    /// φ of raw_sums
    template <raw_sums_needed Need>
    OPD_INLINE F phi(F x) const {
        if constexpr (Need.phi_power)
            return linear ? x : expm1(phi_power * x) * x_scale;
        else
            return x;
    }
    OPD_INLINE F student(F z) const { return exp2_scaled(pin(z - z_s), hi_s, lo_s, floor_s); } // e^((z - z*)/T)
    OPD_INLINE F teacher(F y) const { return exp2_scaled(pin(y - y_t), hi_t, lo_t, floor_t); }
};

template <class F>
struct leaf_sums {
    F student_mass{0.}, teacher_mass{0.}, student_delta{0.}, student_power{0.}, teacher_delta{0.};
    F student_fall{0.}; // of e (z* - z), not yet in units of T
    F reach{-1e30};     ///< the largest `reach_of`
    fall<F> fall_z, fall_y;
};

/// Entries whose terms are added up before they join the leaf's sum: chains of additions must stay short, or the sum
/// drifts by several units in its last place.
template <class F>
inline constexpr int sum_chain = F::width == 1 ? 32 : 8 * F::width;
/// In a sweep, which leaves out the anchors' terms, no term outweighs the others: chains of wide registers are short
/// as they are.
template <class F>
inline constexpr int sweep_chain = F::width <= 8 ? sum_chain<F> : leaf_size;

/// What a sweep does with a leaf's e^((z - z*)/T), e^((y - y*)/T) and expm1(-k delta): nothing, or it keeps some.
enum class kept { exponentials, student_and_power, student };
struct nowhere {
    OPD_INLINE void student(int, const auto&) const {}
    OPD_INLINE void teacher(int, const auto&) const {}
    OPD_INLINE void power(int, const auto&) const {}
};
template <class Value, kept What>
struct kept_leaf {
    Value *s, *t;
    OPD_INLINE void student(int i, const auto& e) const { e.store(s + i); }
    OPD_INLINE void teacher(int i, const auto& f) const {
        if constexpr (What == kept::exponentials) f.store(t + i);
    }
    OPD_INLINE void power(int i, const auto& x) const {
        if constexpr (What == kept::student_and_power) x.store(t + i);
    }
};

/// Sums of a leaf in memory, on the speculation that nothing lies above the anchors or absurdly far below: fall_z and
/// fall_y tell whether that was so.
template <class F, bool Teacher, raw_sums_needed Need, bool Near, class Z, class Y, class Keep = nowhere>
leaf_sums<F> fold_leaf(const Z* z, const Y* y, int n, const anchor_lanes<F>& a, Keep keep = {}) {
    leaf_sums<F> s;
    using held = std::conditional_t<std::is_same_v<Keep, nowhere>, const F&, const F>; // stores might alias `a`
    held z_s = a.z_s, y_t = a.y_t;
    const F unit = a.template unit<Near>(), minus_k = -(a.k * unit), hi_s = -a.hi_s, lo_s = -a.lo_s;
    const F hi_t = -a.hi_t, lo_t = -a.lo_t;
    for (int block = 0; block < n; block += sweep_chain<F>) {
        F S{0.}, T{0.}, U{0.}, W{0.}, X{0.}, V{0.};
        for (int i = block, end = std::min(n, block + sweep_chain<F>); i < end; i += F::width) {
            const F zi = F::load(z + i), below_z = pin(z_s - zi);
            prefetch<F>(z + i + cpu_tuning::prefetch_ahead);
            s.fall_z.see(below_z);
            const F e = exp2_scaled(below_z, hi_s, lo_s);
            keep.student(i, e);
            S += e;
            if constexpr (Need.entropy) V = fma(e, below_z, V);
            if constexpr (Teacher) {
                const F yi = F::load(y + i), below_y = pin(y_t - yi);
                prefetch<F>(y + i + cpu_tuning::prefetch_ahead);
                s.fall_y.see(below_y);
                const F f = exp2_scaled(below_y, hi_t, lo_t);
                keep.teacher(i, f);
                T += f;
                if constexpr (Need.student_delta || Need.student_power || Need.teacher_delta) {
                    const F delta = a.template unscaled_delta<Near>(zi, yi);
                    if constexpr (Need.student_delta) U = fma(e, delta, U);
                    if constexpr (Need.student_power) {
                        const F x = minus_k * delta;
                        if constexpr (Need.k_is_one) { // e e^-delta is f in other units
                            W += select(abs(x) < F(1), e * expm1_near(x), fma(f, a.share, -e));
                        } else {
                            const F power = expm1(x);
                            keep.power(i, power);
                            W = fma(e, power, W);
                            s.reach = max(s.reach, reach_of(x, below_z * a.inv_s));
                        }
                    }
                    if constexpr (Need.teacher_delta)
                        X = fma(f, Need.phi_power ? a.template phi<Need>(unit * delta) : delta, X);
                }
            }
        }
        s.student_mass += S;
        if constexpr (Need.entropy) s.student_fall += V;
        if constexpr (Teacher) s.teacher_mass += T;
        if constexpr (Need.student_delta) s.student_delta += U;
        if constexpr (Need.student_power) s.student_power += W;
        if constexpr (Need.teacher_delta) s.teacher_delta += X;
    }
    if constexpr (Need.student_delta) s.student_delta *= unit;
    if constexpr (Need.teacher_delta && !Need.phi_power) s.teacher_delta *= unit;
    return s;
}

template <class F, bool Teacher, raw_sums_needed Need, class Z, class Y, class Keep>
leaf_sums<F> fold_in_place(const Z* z, const Y* y, int n, const anchor_lanes<F>& a, Keep keep) {
    return a.near ? fold_leaf<F, Teacher, Need, true>(z, y, n, a, keep)
                  : fold_leaf<F, Teacher, Need, false>(z, y, n, a, keep);
}

/// Sums of a staged leaf: the exponentials are taken of mass_z and mass_y, which are the leaf's z and y or masked
/// copies of them, the differences of z and y.
template <class F, bool Teacher, raw_sums_needed Need, class Keep = nowhere>
leaf_sums<F> fold_staged(const staged_leaf<F>& leaf, const typename F::value_type* mass_z,
                         const typename F::value_type* mass_y, int n, const anchor_lanes<F>& a, Keep keep = {}) {
    leaf_sums<F> s;
    const F lowest(-1e30);
    for (int block = 0; block < n; block += sweep_chain<F>) {
        F S{0.}, T{0.}, U{0.}, W{0.}, X{0.}, V{0.};
        for (int i = block, end = std::min(n, block + sweep_chain<F>); i < end; i += F::width) {
            const F e = a.student(F::load(mass_z + i));
            keep.student(i, e);
            S += e;
            if constexpr (Need.entropy) V = fma(e, pin(a.z_s - F::load(mass_z + i)), V);
            if constexpr (Teacher) {
                const F yi_mass = F::load(mass_y + i);
                F f(0.);
                if (any(yi_mass > lowest)) f = a.teacher(yi_mass); // a filtered teacher has mass in few registers
                keep.teacher(i, f);
                T += f;
                if constexpr (Need.student_delta || Need.student_power || Need.teacher_delta) {
                    const F zi = F::load(leaf.z + i), yi = F::load(leaf.y + i);
                    const F delta = a.near ? a.template delta<true>(zi, yi) : a.template delta<false>(zi, yi);
                    if constexpr (Need.student_delta) U = fma(e, delta, U);
                    if constexpr (Need.student_power) {
                        const F x = -a.k * delta;
                        if constexpr (Need.k_is_one) // as in fold_leaf, with the teacher's anchor
                            W += select(abs(x) < F(1), e * expm1_near(x), fma(a.teacher(yi), a.share, -e));
                        else {
                            const F power = expm1(x);
                            keep.power(i, select(zi > lowest, power, F(0.))); // p = 0 has no gradient
                            W = fma(e, power, W);
                            const F fall = pin(a.z_s - F::load(mass_z + i)) * a.inv_s;
                            const typename F::mask alive = fall < F(1e20);
                            s.reach = max(s.reach, select(alive, reach_of(x, fall), s.reach));
                        }
                    }
                    if constexpr (Need.teacher_delta) X = fma(f, a.template phi<Need>(delta), X);
                }
            }
        }
        s.student_mass += S;
        if constexpr (Need.entropy) s.student_fall += V;
        if constexpr (Teacher) s.teacher_mass += T;
        if constexpr (Need.student_delta) s.student_delta += U;
        if constexpr (Need.student_power) s.student_power += W;
        if constexpr (Need.teacher_delta) s.teacher_delta += X;
    }
    return s;
}

template <class F>
OPD_INLINE typename F::value_type largest(F x) {
    if constexpr (F::width == 1)
        return x.v;
    else
        return max_lane(x);
}

/// Adds a leaf's sums to the row's, in double, and returns its student mass.
template <bool Teacher, raw_sums_needed Need, class F>
OPD_INLINE double add_leaf(row_sweep& to, const leaf_sums<F>& l) {
    raw_sums& s = to.sums;
    const double mass = double(sum(l.student_mass));
    s.student_mass += mass;
    if constexpr (Need.entropy) s.student_fall -= double(sum(l.student_fall)) * s.inv_s;
    if constexpr (Teacher) s.teacher_mass += double(sum(l.teacher_mass));
    if constexpr (Need.student_delta) s.student_delta += double(sum(l.student_delta));
    if constexpr (Need.student_power) s.student_power += double(sum(l.student_power));
    if constexpr (Need.student_power && !Need.k_is_one) to.felt(double(largest(l.reach)));
    if constexpr (Need.teacher_delta) s.teacher_delta += double(sum(l.teacher_delta));
    return mass;
}

/// The lowest position that holds the largest entry of a leaf in memory or L1; -1 if no entry lies above `than`.
template <class F, class T>
int top_of_leaf(const T* x, int n, double than) {
    F m(-1e30);
    for (int i = 0; i < n; i += F::width) m = max(m, F::load(x + i));
    const typename F::value_type top = largest(m);
    if (!(double(top) > than)) return -1;
    const F t{double(top)};
    for (int i = 0; i < n; i += F::width)
        if (any(F::load(x + i) >= t))
            for (int j = i; j < i + F::width; ++j)
                if (static_cast<typename F::value_type>(element<std::remove_const_t<T>>::load(x[j])) >= top) return j;
    return 0;
}

} // namespace OPD_ISA

} // namespace opd::detail
