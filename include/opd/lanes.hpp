// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Number types that a row program runs on: `lanes` (a SIMD register of floats, as wide as the instruction set) and
// `scalar<T>` (one float or double, on the host or a device). Both have the same operators and, found by argument-
// dependent lookup, the same functions:
//
//   exp log log1p expm1 exp2 abs min max select fma pin
//
// so that one program text serves the CPU's lanes, the float64 reference and a GPU thread. A program holds no `if`
// over numbers and no naked literal: it writes F(2) and select(mask, a, b).
//
// Accuracy of the lane functions (maximum relative error over their range, in units of 2^-24): exp2 and exp 1.5, log and
// log1p 2, expm1 3. exp2 of anything below -150 is 0, also of -infinity; expm1 and exp saturate at ±87.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__AVX512F__) && !defined(__CUDACC__)
#include <immintrin.h>
#endif

#include "opd/config.hpp"
#include "opd/element.hpp"

namespace opd {

/// A mask of one lane.
OPD_HD constexpr bool any(bool m) { return m; }

/// One number, with the interface of `lanes`. `scalar<double>` is the number type of the float64 reference and of rows
/// that float cannot carry; `scalar<float>` that of a GPU thread.
template <class T>
struct scalar {
    using value_type = T;
    using mask = bool;
    static constexpr int width = 1;
    T v;

    scalar() = default;
    OPD_HD constexpr explicit scalar(double x) : v(static_cast<T>(x)) {}

    OPD_HD friend constexpr scalar operator+(scalar a, scalar b) { return raw(a.v + b.v); }
    OPD_HD friend constexpr scalar operator-(scalar a, scalar b) { return raw(a.v - b.v); }
    OPD_HD friend constexpr scalar operator*(scalar a, scalar b) { return raw(a.v * b.v); }
    OPD_HD friend constexpr scalar operator/(scalar a, scalar b) { return raw(a.v / b.v); }
    OPD_HD friend constexpr scalar operator-(scalar a) { return raw(-a.v); }
    OPD_HD constexpr scalar& operator+=(scalar b) { return *this = *this + b; }
    OPD_HD constexpr scalar& operator-=(scalar b) { return *this = *this - b; }
    OPD_HD constexpr scalar& operator*=(scalar b) { return *this = *this * b; }
    OPD_HD friend constexpr mask operator<(scalar a, scalar b) { return a.v < b.v; }
    OPD_HD friend constexpr mask operator>(scalar a, scalar b) { return a.v > b.v; }
    OPD_HD friend constexpr mask operator<=(scalar a, scalar b) { return a.v <= b.v; }
    OPD_HD friend constexpr mask operator>=(scalar a, scalar b) { return a.v >= b.v; }

    OPD_HD static constexpr scalar raw(T x) {
        scalar s;
        s.v = x;
        return s;
    }
    OPD_HD static scalar load(const T* p) { return raw(*p); }
    OPD_HD void store(T* p) const { *p = v; }

    OPD_HD friend constexpr scalar select(mask m, scalar a, scalar b) { return m ? a : b; }
    OPD_HD friend constexpr scalar max(scalar a, scalar b) { return a.v < b.v ? b : a; }
    OPD_HD friend constexpr scalar min(scalar a, scalar b) { return b.v < a.v ? b : a; }
    OPD_HD friend constexpr scalar abs(scalar a) { return a.v < T(0) ? -a : a; }
    OPD_HD friend scalar exp(scalar a) { return raw(::exp(a.v)); }
    OPD_HD friend scalar exp2(scalar a) { return raw(::exp2(a.v)); }
    OPD_HD friend scalar exp2_scaled(scalar x, scalar hi, scalar lo, scalar) {
        return raw(::exp2(x.v * hi.v + x.v * lo.v));
    }
    OPD_HD friend scalar log(scalar a) { return raw(::log(a.v)); }
    OPD_HD friend scalar log1p(scalar a) { return raw(::log1p(a.v)); }
    OPD_HD friend scalar expm1(scalar a) { return raw(::expm1(a.v)); }
    OPD_HD friend scalar fma(scalar a, scalar b, scalar c) { return raw(::fma(a.v, b.v, c.v)); }
    OPD_HD friend scalar pin(scalar a) { return raw(detail::pin(a.v)); }
    OPD_HD friend constexpr T sum(scalar a) { return a.v; }
};

#if !defined(__CUDACC__)

inline namespace OPD_ISA {

/// A register of floats.
struct lanes {
#if defined(OPD_AVX512)
    static constexpr int width = 16;
#elif defined(__AVX2__)
    static constexpr int width = 8;
#else
    static constexpr int width = 4;
#endif
    using value_type = float;
    typedef float vec __attribute__((vector_size(4 * width)));
    typedef std::int32_t ivec __attribute__((vector_size(4 * width)));
#if defined(OPD_AVX512)
    using mask = std::uint16_t;                // a bit a lane
    static constexpr __mmask16 every = 0xffff; // the unmasked intrinsics warn in g++ 12
    static OPD_INLINE __m512 reg(lanes a) { return std::bit_cast<__m512>(a.v); }
#else
    using mask = ivec; // all ones or all zeros in each lane
#endif
    vec v;

    lanes() = default;
    OPD_INLINE explicit lanes(double x) : v(static_cast<float>(x) - vec{}) {}
    OPD_INLINE static lanes raw(vec x) {
        lanes r;
        r.v = x;
        return r;
    }

    /// Unaligned load of `width` floats.
    OPD_INLINE static lanes load(const float* p) {
        vec x;
        std::memcpy(&x, p, sizeof x);
        return raw(x);
    }
    OPD_INLINE static lanes load(const bfloat16* p) {
#if defined(OPD_AVX512)
        const __m256i h = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
        return raw(std::bit_cast<vec>(_mm512_maskz_slli_epi32(0xffff, _mm512_maskz_cvtepu16_epi32(0xffff, h), 16)));
#else
        typedef std::uint16_t hvec __attribute__((vector_size(2 * width)));
        typedef std::uint32_t uvec __attribute__((vector_size(4 * width)));
        hvec h;
        std::memcpy(&h, p, sizeof h);
        return raw(std::bit_cast<vec>(__builtin_convertvector(h, uvec) << 16));
#endif
    }
    OPD_INLINE void store(float* p) const { std::memcpy(p, &v, sizeof v); }
    OPD_INLINE void store(bfloat16* p) const {
        const ivec u = std::bit_cast<ivec>(v);
        const ivec nan = (u & 0x7fffffff) > 0x7f800000;
        const ivec rounded = ((u + 0x7fff + ((u >> 16) & 1)) & ~nan) | ((u | 0x400000) & nan);
#if defined(OPD_AVX512)
        const __m512i r = _mm512_maskz_srli_epi32(0xffff, std::bit_cast<__m512i>(rounded), 16);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_maskz_cvtepi32_epi16(0xffff, r));
#else
        typedef std::uint16_t hvec __attribute__((vector_size(2 * width)));
        typedef std::uint32_t uvec __attribute__((vector_size(4 * width)));
        const hvec h = __builtin_convertvector(std::bit_cast<uvec>(rounded) >> 16, hvec);
        std::memcpy(p, &h, sizeof h);
#endif
    }
    /// Store past the caches; p is aligned to the register's bytes.
    OPD_INLINE void stream(float* p) const {
#if defined(OPD_AVX512)
        _mm512_stream_ps(p, std::bit_cast<__m512>(v));
#elif defined(__clang__)
        __builtin_nontemporal_store(v, reinterpret_cast<vec*>(p));
#else
        store(p);
#endif
    }
    OPD_INLINE void stream(bfloat16* p) const { store(p); }

    OPD_INLINE friend lanes operator+(lanes a, lanes b) { return raw(a.v + b.v); }
    OPD_INLINE friend lanes operator-(lanes a, lanes b) { return raw(a.v - b.v); }
    OPD_INLINE friend lanes operator*(lanes a, lanes b) { return raw(a.v * b.v); }
    OPD_INLINE friend lanes operator/(lanes a, lanes b) { return raw(a.v / b.v); }
    OPD_INLINE friend lanes operator-(lanes a) { return raw(-a.v); }
    OPD_INLINE lanes& operator+=(lanes b) { return *this = *this + b; }
    OPD_INLINE lanes& operator-=(lanes b) { return *this = *this - b; }
    OPD_INLINE lanes& operator*=(lanes b) { return *this = *this * b; }
#if defined(OPD_AVX512)
    OPD_INLINE friend mask operator<(lanes a, lanes b) { return _mm512_cmp_ps_mask(reg(a), reg(b), _CMP_LT_OQ); }
    OPD_INLINE friend mask operator>(lanes a, lanes b) { return _mm512_cmp_ps_mask(reg(a), reg(b), _CMP_GT_OQ); }
    OPD_INLINE friend mask operator<=(lanes a, lanes b) { return _mm512_cmp_ps_mask(reg(a), reg(b), _CMP_LE_OQ); }
    OPD_INLINE friend mask operator>=(lanes a, lanes b) { return _mm512_cmp_ps_mask(reg(a), reg(b), _CMP_GE_OQ); }
    OPD_INLINE friend lanes select(mask m, lanes a, lanes b) { return raw(_mm512_mask_blend_ps(m, reg(b), reg(a))); }
    // a NaN in `a` stays: the instruction returns its second operand then
    OPD_INLINE friend lanes max(lanes a, lanes b) { return raw(_mm512_maskz_max_ps(every, reg(b), reg(a))); }
    OPD_INLINE friend lanes min(lanes a, lanes b) { return raw(_mm512_maskz_min_ps(every, reg(b), reg(a))); }
#else
    OPD_INLINE friend mask operator<(lanes a, lanes b) { return a.v < b.v; }
    OPD_INLINE friend mask operator>(lanes a, lanes b) { return a.v > b.v; }
    OPD_INLINE friend mask operator<=(lanes a, lanes b) { return a.v <= b.v; }
    OPD_INLINE friend mask operator>=(lanes a, lanes b) { return a.v >= b.v; }
    OPD_INLINE friend lanes select(mask m, lanes a, lanes b) { return raw(m ? a.v : b.v); }
    OPD_INLINE friend lanes max(lanes a, lanes b) { return raw(a.v < b.v ? b.v : a.v); }
    OPD_INLINE friend lanes min(lanes a, lanes b) { return raw(b.v < a.v ? b.v : a.v); }
#endif
    OPD_INLINE friend lanes abs(lanes a) { return raw(std::bit_cast<vec>(std::bit_cast<ivec>(a.v) & 0x7fffffff)); }
    OPD_INLINE friend lanes pin(lanes a) { return raw(detail::pin(a.v)); }

    /// Lanes holding whole numbers, as integers.
    OPD_INLINE ivec as_int() const { return __builtin_convertvector(v, ivec); }

    /// a·b + c: fused where the instruction set has it, else two roundings. One or the other, never both in one build.
    OPD_INLINE friend lanes fma(lanes a, lanes b, lanes c) {
#if defined(OPD_AVX512)
        return raw(std::bit_cast<vec>(
            _mm512_fmadd_ps(std::bit_cast<__m512>(a.v), std::bit_cast<__m512>(b.v), std::bit_cast<__m512>(c.v))));
#elif defined(__FMA__)
        vec r;
        for (int i = 0; i < width; ++i) r[i] = __builtin_fmaf(a.v[i], b.v[i], c.v[i]);
        return raw(r);
#else
        return raw(a.v * b.v + c.v);
#endif
    }

    OPD_INLINE friend float sum(lanes a) {
        float t[width];
        a.store(t);
        for (int step = width / 2; step > 0; step /= 2)
            for (int i = 0; i < step; ++i) t[i] += t[i + step];
        return t[0];
    }
    OPD_INLINE friend float max_lane(lanes a) {
        float t[width];
        a.store(t);
        for (int step = width / 2; step > 0; step /= 2)
            for (int i = 0; i < step; ++i) t[i] = t[i] < t[i + step] ? t[i + step] : t[i];
        return t[0];
    }

    /// 2^x for x <= 127; 0 for anything below the normal range (AVX-512: below the denormal range), also for -infinity.
    OPD_INLINE friend lanes exp2(lanes x) {
#if defined(OPD_AVX512)
        const __m512 f = _mm512_maskz_reduce_ps(every, reg(x), 0); // x - nearest integer; 0 for ±infinity
        return raw(_mm512_maskz_scalef_ps(every, reg(exp2_fraction(raw(f))), reg(x) - f));
#else
        const lanes a = max(x, lanes(-127)); // the order matters: a NaN in x stays
        const vec n = detail::pin(a.v + 0x1.8p23f) - 0x1.8p23f;
        const ivec e = (__builtin_convertvector(n, ivec) + 127) << 23;
        return exp2_fraction(raw(a.v - n)) * raw(std::bit_cast<vec>(e));
#endif
    }
    /// 2^(x (hi + lo)) for x in [floor, 127/hi], with hi + lo = log2(e)/T to more than float's digits: e^(x/T). The
    /// product is reduced before it is rounded: its error does not grow with |x|, nor do equal logits share a bias.
    /// Anything below floor = -160/hi counts as floor, where the result is 0; NaN stays NaN.
    OPD_INLINE friend lanes exp2_scaled(lanes x, lanes hi, lanes lo, lanes floor) {
        const lanes a = max(x, floor);
#if defined(OPD_AVX512)
        const __m512 n = _mm512_maskz_roundscale_ps(every, reg(a * hi), 8);
        const lanes f = fma(a, lo, fma(a, hi, -raw(n)));
        return raw(_mm512_maskz_scalef_ps(every, reg(exp2_fraction(f)), n));
#else
        const lanes n = nearest(a * hi);
        const lanes f = fma(a, lo, pin(fma(a, hi, -n)));
        const ivec h = max(n, lanes(-127)).as_int() + 127; // 2^-127 and below: 0
        return exp2_fraction(f) * raw(std::bit_cast<vec>(h << 23));
#endif
    }
    OPD_INLINE friend lanes exp(lanes x) {
        const lanes a = min(max(x, lanes(-104)), lanes(88));
        const lanes n = nearest(a * lanes(0x1.715476p0)), q = expm1_core(less_ln2(a, n)) + lanes(1);
#if defined(OPD_AVX512)
        return raw(_mm512_maskz_scalef_ps(every, reg(q), reg(n)));
#else
        const ivec h = n.as_int(), h1 = h >> 1, h2 = h - h1; // two factors: n reaches -150
        return q * raw(std::bit_cast<vec>((h1 + 127) << 23)) * raw(std::bit_cast<vec>((h2 + 127) << 23));
#endif
    }
    /// e^x - 1, saturated at x = ±87, with small relative error near 0.
    OPD_INLINE friend lanes expm1(lanes x) {
        const lanes a = min(max(x, lanes(-87)), lanes(87));
        const lanes n = nearest(a * lanes(0x1.715476p0));
        const lanes s = raw(std::bit_cast<vec>((n.as_int() + 127) << 23));
        return fma(s, expm1_core(less_ln2(a, n)), s - lanes(1));
    }
    /// log(1 + y), y > -1 and finite, with small relative error near 0.
    OPD_INLINE friend lanes log1p(lanes y) {
        const lanes u = pin(y + lanes(1));
        return log_of(u, y - pin(u - lanes(1))); // what the addition lost
    }
    /// log(u), u positive, normal and finite.
    OPD_INLINE friend lanes log(lanes u) { return log_of(u, lanes(0)); }

private:
    OPD_INLINE static lanes nearest(lanes x) { // |x| < 2^22
#if defined(OPD_AVX512)
        return raw(_mm512_maskz_roundscale_ps(every, reg(x), 8));
#else
        return raw(detail::pin(x.v + 0x1.8p23f) - 0x1.8p23f);
#endif
    }
    OPD_INLINE static lanes less_ln2(lanes x, lanes n) { // x - n ln2, ln2 in two parts
        return fma(n, lanes(-0x1.7f7d1cp-20), fma(n, lanes(-0x1.62e4p-1), x));
    }
    OPD_INLINE static lanes exp2_fraction(lanes f) { // 2^f, |f| <= 1/2: minimax of degree 6, 1.9e-9
        lanes r = lanes(1.53458078e-4);
        r = fma(r, f, lanes(1.33999317e-3));
        r = fma(r, f, lanes(9.61848894e-3));
        r = fma(r, f, lanes(5.55032876e-2));
        r = fma(r, f, lanes(2.40226469e-1));
        r = fma(r, f, lanes(6.93147206e-1));
        return fma(r, f, lanes(1));
    }
    OPD_INLINE static lanes expm1_core(lanes r) { // e^r - 1, |r| <= ln2/2, as r + r² Q(r): 1.4e-8
        lanes q = lanes(1.38825192e-3);
        q = fma(q, r, lanes(8.36652095e-3));
        q = fma(q, r, lanes(4.16671999e-2));
        q = fma(q, r, lanes(1.66665436e-1));
        q = fma(q, r, lanes(4.99999982e-1));
        return fma(r * r, q, r);
    }
    OPD_INLINE static lanes log_of(lanes u, lanes lost) { // log(u + lost), u = 2^k m, m in [sqrt(1/2), sqrt(2))
        const ivec bits = std::bit_cast<ivec>(u.v);
        const ivec k = (bits - 0x3f3504f3) >> 23, up = k << 23;
        const lanes m = raw(std::bit_cast<vec>(bits - up));
        const lanes unscale = raw(std::bit_cast<vec>((127 << 23) - up));
        const lanes f = pin(m - lanes(1)) + pin(lost * unscale);
        lanes q = lanes(-7.63443792e-2);
        q = fma(q, f, lanes(1.27615629e-1));
        q = fma(q, f, lanes(-1.31601980e-1));
        q = fma(q, f, lanes(1.42017610e-1));
        q = fma(q, f, lanes(-1.66233560e-1));
        q = fma(q, f, lanes(2.00012267e-1));
        q = fma(q, f, lanes(-2.50008211e-1));
        q = fma(q, f, lanes(3.33333317e-1));
        const lanes f2 = f * f;
        const lanes tail = fma(f2 * f, q, f2 * lanes(-0.5));
        const lanes kf = raw(__builtin_convertvector(k, vec));
        return fma(kf, lanes(0x1.62e4p-1), f + fma(kf, lanes(0x1.7f7d1cp-20), tail));
    }
};

/// Whether any lane of a mask is set.
OPD_INLINE bool any(lanes::mask m) {
#if defined(OPD_AVX512)
    return m != 0;
#else
    std::int32_t r = 0;
    for (int i = 0; i < lanes::width; ++i) r |= m[i];
    return r != 0;
#endif
}
} // namespace OPD_ISA

#endif

} // namespace opd
