// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Number types that a row program runs on: `lanes` (a SIMD register of floats, as wide as the instruction set) and
// `scalar<T>` (one float or double, on the host or a device). Both have the same operators and, found by argument-
// dependent lookup, the same functions:
//
//   exp log log1p expm1 expm1_near expm1_rest exp_less log_sum exp2 abs min max select fma pin in_double
//
// so that one program text serves the CPU's lanes, the float64 reference and a GPU thread. A program holds no `if`
// over numbers and no naked literal: it writes F(2) and select(mask, a, b).
//
// Accuracy of the lane functions (maximum relative error over their range, in units of 2^-24): exp2 and exp 2, log and
// log1p 2.2, expm1 3. exp2 of anything below -150 is 0, also of -infinity; expm1 and exp saturate at ±87.
//
// Above 600 lines: each function stands once for both number types, side by side.
#pragma once

#include <bit>
#include <cmath>
#include <concepts>
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
    static constexpr int width = 1, alignment = alignof(T);
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
#if defined(__CUDA_ARCH__) // one instruction each; of a NaN the other
    OPD_HD friend scalar max(scalar a, scalar b) { return raw(::fmax(a.v, b.v)); }
    OPD_HD friend scalar min(scalar a, scalar b) { return raw(::fmin(a.v, b.v)); }
    OPD_HD friend scalar abs(scalar a) { return raw(::fabs(a.v)); }
#else
    OPD_HD friend constexpr scalar max(scalar a, scalar b) { return a.v < b.v ? b : a; }
    OPD_HD friend constexpr scalar min(scalar a, scalar b) { return b.v < a.v ? b : a; }
    OPD_HD friend constexpr scalar abs(scalar a) { return a.v < T(0) ? -a : a; }
#endif
    OPD_HD friend scalar exp(scalar a) { return raw(::exp(a.v)); }
    OPD_HD friend scalar exp2(scalar a) { return raw(::exp2(a.v)); }
    OPD_HD friend scalar exp2_scaled(scalar x, scalar hi, scalar lo) {
        const T t = x.v * hi.v; // -infinity times a lo of 0 would be no number
        return raw(t < T(-1100) ? T(0) : ::exp2(t + x.v * lo.v));
    }
    OPD_HD friend scalar exp2_scaled(scalar x, scalar hi, scalar lo, scalar) { return exp2_scaled(x, hi, lo); }
    OPD_HD friend scalar log(scalar a) { return raw(::log(a.v)); }
    OPD_HD friend scalar log1p(scalar a) { return raw(::log1p(a.v)); }
    OPD_HD friend scalar log_sum(scalar a, scalar b) { return raw(a.v == T(1) ? ::log1p(b.v) : ::log(a.v + b.v)); }
    OPD_HD friend scalar expm1(scalar a) { return raw(::expm1(a.v)); }
    OPD_HD friend scalar expm1_near(scalar a) { return expm1(a); }
    OPD_HD friend scalar exp_less(scalar a, scalar b) { return b.v == T(0) ? exp(a) : expm1(a); }
    /// e^x - 1 - x: never negative, with small relative error near 0.
    OPD_HD friend scalar expm1_rest(scalar x) {
        if constexpr (sizeof(T) == 8)
            if (x.v > T(-0.5) && x.v < T(0.5)) { // x²/2 (1 + x/3 (1 + x/4 (...)))
                T q = 1;
                for (int k = 15; k > 2; --k) q = ::fma(q, x.v * (T(1) / T(k)), T(1));
                return raw(T(0.5) * x.v * x.v * q);
            }
        if constexpr (sizeof(T) == 4)
            if (x.v > T(-1) && x.v < T(1)) {
                T q = T(2.47602965e-5);
                q = ::fma(q, x.v, T(2.03702828e-4));
                q = ::fma(q, x.v, T(1.38955076e-3));
                q = ::fma(q, x.v, T(8.33030963e-3));
                q = ::fma(q, x.v, T(4.16662614e-2));
                q = ::fma(q, x.v, T(1.66667153e-1));
                q = ::fma(q, x.v, T(5.00000049e-1));
                return raw(x.v * x.v * q);
            }
        return max(expm1(x) - x, raw(T(0)));
    }
    OPD_HD friend scalar fma(scalar a, scalar b, scalar c) { return raw(::fma(a.v, b.v, c.v)); }
    OPD_HD friend scalar pin(scalar a) { return raw(detail::pin(a.v)); }
    /// a x - b y + c in double, rounded once; c where x = y and a = b.
    OPD_HD friend scalar in_double(scalar x, double a, scalar y, double b, double c) {
        return raw(static_cast<T>((double(x.v) - double(y.v)) * a + double(y.v) * (a - b) + c));
    }
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
    static constexpr int alignment = 4 * width; // bytes, for `stream`
    using value_type = float;
    using lane_type = lanes;
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
    template <brain_float T>
    OPD_INLINE static lanes load(const T* p) {
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
    template <brain_float T>
    OPD_INLINE void store(T* p) const {
#if defined(__AVX512BF16__)
        const auto r = std::bit_cast<__m256i>(_mm512_cvtneps_pbh(std::bit_cast<__m512>(v))); // denormals become 0
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), r);
#elif defined(OPD_AVX512)
        const __m512i r = _mm512_maskz_srli_epi32(every, rounded_to_bfloat16(), 16);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_maskz_cvtepi32_epi16(every, r));
#else
        const ivec u = std::bit_cast<ivec>(v);
        const ivec nan = (u & 0x7fffffff) > 0x7f800000;
        const ivec rounded = ((u + 0x7fff + ((u >> 16) & 1)) & ~nan) | ((u | 0x400000) & nan);
        typedef std::uint16_t hvec __attribute__((vector_size(2 * width)));
        typedef std::uint32_t uvec __attribute__((vector_size(4 * width)));
        const hvec h = __builtin_convertvector(std::bit_cast<uvec>(rounded) >> 16, hvec);
        std::memcpy(static_cast<void*>(p), &h, sizeof h);
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
    template <brain_float T>
    OPD_INLINE void stream(T* p) const {
        store(p);
    }
#if defined(OPD_AVX512)
    /// The bfloat16 of each lane in its upper half, to nearest even; NaN stays one. Below are bits to drop.
    OPD_INLINE __m512i rounded_to_bfloat16() const {
        const __m512i u = std::bit_cast<__m512i>(v);
        const __m512i odd = _mm512_and_si512(_mm512_maskz_srli_epi32(every, u, 16), _mm512_set1_epi32(1));
        const __m512i r = _mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), odd);
        const __mmask16 nan = _mm512_fpclass_ps_mask(reg(*this), 0x81); // quiet or signalling, also under -Ofast
        return _mm512_mask_or_epi32(r, nan, u, _mm512_set1_epi32(0x400000));
    }
    /// Two registers as one of bfloat16.
    OPD_INLINE static __m512i bfloat16_pair(lanes a, lanes b) {
#if defined(__AVX512BF16__)
        return std::bit_cast<__m512i>(_mm512_cvtne2ps_pbh(reg(b), reg(a)));
#else
        alignas(64) static constexpr std::uint16_t upper_halves[32] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21,
                                                                       23, 25, 27, 29, 31, 33, 35, 37, 39, 41, 43,
                                                                       45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
        return _mm512_maskz_permutex2var_epi16(~__mmask32{0}, a.rounded_to_bfloat16(), _mm512_load_si512(upper_halves),
                                               b.rounded_to_bfloat16());
#endif
    }
    template <brain_float T>
    OPD_INLINE static void store_pair(lanes a, lanes b, T* p) {
        _mm512_storeu_si512(p, bfloat16_pair(a, b));
    }
    template <brain_float T>
    OPD_INLINE static void stream_pair(lanes a, lanes b, T* p) {
        _mm512_stream_si512(reinterpret_cast<__m512i*>(p), bfloat16_pair(a, b));
    }
#endif

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
    /// a x - b y + c in double, rounded once; c where x = y and a = b.
    OPD_INLINE friend lanes in_double(lanes x, double a, lanes y, double b, double c) {
        const double d = a - b;
        return joined((x.lower() - y.lower()) * a + y.lower() * d + c, (x.upper() - y.upper()) * a + y.upper() * d + c);
    }

    /// Lanes holding whole numbers, as integers.
    OPD_INLINE ivec as_int() const { return __builtin_convertvector(v, ivec); }

    /// a·b + c: fused where the instruction set has it, else two roundings. One or the other, never both in one build.
    OPD_INLINE friend lanes fma(lanes a, lanes b, lanes c) {
#if defined(OPD_AVX512)
        return raw(std::bit_cast<vec>(
            _mm512_fmadd_ps(std::bit_cast<__m512>(a.v), std::bit_cast<__m512>(b.v), std::bit_cast<__m512>(c.v))));
#elif defined(__FMA__) && defined(__AVX2__) && defined(__GNUC__) && !defined(__clang__) && !defined(__CUDACC__)
        return raw(__builtin_ia32_vfmaddps256(a.v, b.v, c.v)); // g++ takes some loops apart, one lane at a time
#elif defined(__FMA__)
        vec r;
        for (int i = 0; i < width; ++i) r[i] = __builtin_fmaf(a.v[i], b.v[i], c.v[i]);
        return raw(r);
#else
        return raw(a.v * b.v + c.v);
#endif
    }

    /// The sum of all lanes, by halves: lane i and lane i + width/2, and so on.
    OPD_INLINE friend float sum(lanes a) {
        const quad q = quarter(a, [](auto x, auto y) { return x + y; });
        return (q[0] + q[2]) + (q[1] + q[3]);
    }
    OPD_INLINE friend float max_lane(lanes a) {
        const quad q = quarter(a, [](auto x, auto y) { return x < y ? y : x; });
        const float m = q[0] < q[2] ? q[2] : q[0], n = q[1] < q[3] ? q[3] : q[1];
        return m < n ? n : m;
    }

    // --- what the functions below are made of ------------------------------------------------------------------------
    /// The nearest whole number, |x| < 2^22 (AVX-512: any x).
    OPD_INLINE friend lanes nearest(lanes x) {
#if defined(OPD_AVX512)
        return raw(_mm512_maskz_roundscale_ps(every, reg(x), 8));
#else
        return raw(detail::pin(x.v + 0x1.8p23f) - 0x1.8p23f);
#endif
    }
    /// q 2^n, n whole, q in [1/2, 2]: 0 below the normal range (AVX-512: below the denormal range).
    OPD_INLINE friend lanes scaled(lanes q, lanes n) {
#if defined(OPD_AVX512)
        return raw(_mm512_maskz_scalef_ps(every, reg(q), reg(n)));
#else
        const ivec e = (max(n, lanes(-127)).as_int() + 127) << 23; // 2^-127 and below: 0
        return q * raw(std::bit_cast<vec>(e));
#endif
    }
    /// The same with denormal results, n >= -150.
    OPD_INLINE friend lanes scaled_gradually(lanes q, lanes n) {
#if defined(OPD_AVX512)
        return scaled(q, n);
#else
        const ivec h = n.as_int(), h1 = h >> 1, h2 = h - h1;
        return q * raw(std::bit_cast<vec>((h1 + 127) << 23)) * raw(std::bit_cast<vec>((h2 + 127) << 23));
#endif
    }
    /// 2^n, n whole, -126 <= n <= 127.
    OPD_INLINE friend lanes power_of_two(lanes n) {
#if defined(OPD_AVX512)
        return raw(_mm512_maskz_scalef_ps(every, reg(lanes(1)), reg(n)));
#else
        return raw(std::bit_cast<vec>((n.as_int() + 127) << 23));
#endif
    }
    /// u = 2^k m with m in [sqrt(1/2), sqrt(2)), u positive and normal; `unscale` = 2^-k.
    OPD_INLINE friend void split(lanes u, lanes& m, lanes& k, lanes& unscale) {
        const ivec bits = std::bit_cast<ivec>(u.v);
        const ivec e = (bits - 0x3f3504f3) >> 23, up = e << 23;
        m = raw(std::bit_cast<vec>(bits - up));
        k = raw(__builtin_convertvector(e, vec));
        unscale = raw(std::bit_cast<vec>((127 << 23) - up));
    }

private:
    typedef float half_vec __attribute__((vector_size(2 * width)));
    typedef double dvec __attribute__((vector_size(4 * width))); // half of the lanes
#if defined(OPD_AVX512)
    OPD_INLINE dvec lower() const {
        return __builtin_convertvector(__builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7), dvec);
    }
    OPD_INLINE dvec upper() const {
        return __builtin_convertvector(__builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15), dvec);
    }
#elif defined(__AVX2__)
    OPD_INLINE dvec lower() const { return __builtin_convertvector(__builtin_shufflevector(v, v, 0, 1, 2, 3), dvec); }
    OPD_INLINE dvec upper() const { return __builtin_convertvector(__builtin_shufflevector(v, v, 4, 5, 6, 7), dvec); }
#else
    OPD_INLINE dvec lower() const { return __builtin_convertvector(__builtin_shufflevector(v, v, 0, 1), dvec); }
    OPD_INLINE dvec upper() const { return __builtin_convertvector(__builtin_shufflevector(v, v, 2, 3), dvec); }
#endif
    OPD_INLINE static lanes joined(dvec a, dvec b) {
        const half_vec x = __builtin_convertvector(a, half_vec), y = __builtin_convertvector(b, half_vec);
        vec r;
        std::memcpy(&r, &x, sizeof x);
        std::memcpy(reinterpret_cast<char*>(&r) + sizeof x, &y, sizeof y);
        return raw(r);
    }
    typedef float quad __attribute__((vector_size(16)));
    /// Halves folded onto each other until four lanes are left.
    template <class Fold>
    OPD_INLINE static quad quarter(lanes a, Fold fold) {
#if defined(OPD_AVX512)
        typedef float half __attribute__((vector_size(32)));
        const half h = fold(__builtin_shufflevector(a.v, a.v, 0, 1, 2, 3, 4, 5, 6, 7),
                            __builtin_shufflevector(a.v, a.v, 8, 9, 10, 11, 12, 13, 14, 15));
#else
        const vec h = a.v;
#endif
#if defined(__AVX2__)
        return fold(__builtin_shufflevector(h, h, 0, 1, 2, 3), __builtin_shufflevector(h, h, 4, 5, 6, 7));
#else
        (void)fold;
        return h;
#endif
    }
};

/// Whether any lane of a mask is set.
OPD_INLINE bool any(lanes::mask m) {
#if defined(OPD_AVX512)
    return m != 0;
#elif defined(__AVX2__) // as `width`
    return __builtin_ia32_movmskps256(std::bit_cast<lanes::vec>(m)) != 0;
#else
    std::int32_t r = 0;
    for (int i = 0; i < lanes::width; ++i) r |= m[i];
    return r != 0;
#endif
}

/// Two registers as one number type: every operation is done on both. A row kernel is one long chain of dependent
/// operations a register; a second chain beside it fills the units while the first waits.
template <class L>
struct twin {
    static constexpr int width = 2 * L::width, alignment = L::alignment;
    using value_type = typename L::value_type;
    using lane_type = typename L::lane_type;
    struct mask {
        typename L::mask a, b;
        OPD_INLINE friend mask operator&(mask x, mask y) { return {narrow(x.a & y.a), narrow(x.b & y.b)}; }
        OPD_INLINE friend mask operator|(mask x, mask y) { return {narrow(x.a | y.a), narrow(x.b | y.b)}; }
        template <class M>
        OPD_INLINE static typename L::mask narrow(M m) { // small integers were promoted
            return static_cast<typename L::mask>(m);
        }
        OPD_INLINE friend bool any(mask m) { return any(narrow(m.a | m.b)); }
    };
    L a, b;

    twin() = default;
    OPD_INLINE explicit twin(double x) : a(x), b(x) {}
    OPD_INLINE twin(L a_, L b_) : a(a_), b(b_) {}

    template <class T>
    OPD_INLINE static twin load(const T* p) {
        return {L::load(p), L::load(p + L::width)};
    }
    template <class T>
    OPD_INLINE void store(T* p) const {
        if constexpr (requires { L::store_pair(a, b, p); })
            L::store_pair(a, b, p);
        else
            a.store(p), b.store(p + L::width);
    }
    template <class T>
    OPD_INLINE void stream(T* p) const {
        if constexpr (requires { L::stream_pair(a, b, p); })
            L::stream_pair(a, b, p);
        else
            a.stream(p), b.stream(p + L::width);
    }

    OPD_INLINE friend twin operator+(twin x, twin y) { return {x.a + y.a, x.b + y.b}; }
    OPD_INLINE friend twin operator-(twin x, twin y) { return {x.a - y.a, x.b - y.b}; }
    OPD_INLINE friend twin operator*(twin x, twin y) { return {x.a * y.a, x.b * y.b}; }
    OPD_INLINE friend twin operator/(twin x, twin y) { return {x.a / y.a, x.b / y.b}; }
    OPD_INLINE friend twin operator-(twin x) { return {-x.a, -x.b}; }
    OPD_INLINE twin& operator+=(twin y) { return *this = *this + y; }
    OPD_INLINE twin& operator-=(twin y) { return *this = *this - y; }
    OPD_INLINE twin& operator*=(twin y) { return *this = *this * y; }
    OPD_INLINE friend mask operator<(twin x, twin y) { return {x.a < y.a, x.b < y.b}; }
    OPD_INLINE friend mask operator>(twin x, twin y) { return {x.a > y.a, x.b > y.b}; }
    OPD_INLINE friend mask operator<=(twin x, twin y) { return {x.a <= y.a, x.b <= y.b}; }
    OPD_INLINE friend mask operator>=(twin x, twin y) { return {x.a >= y.a, x.b >= y.b}; }
    OPD_INLINE friend twin select(mask m, twin x, twin y) { return {select(m.a, x.a, y.a), select(m.b, x.b, y.b)}; }
    OPD_INLINE friend twin max(twin x, twin y) { return {max(x.a, y.a), max(x.b, y.b)}; }
    OPD_INLINE friend twin min(twin x, twin y) { return {min(x.a, y.a), min(x.b, y.b)}; }
    OPD_INLINE friend twin abs(twin x) { return {abs(x.a), abs(x.b)}; }
    OPD_INLINE friend twin pin(twin x) { return {pin(x.a), pin(x.b)}; }
    OPD_INLINE friend twin in_double(twin x, double s, twin y, double t, double c) {
        return {in_double(x.a, s, y.a, t, c), in_double(x.b, s, y.b, t, c)};
    }
    OPD_INLINE friend twin fma(twin x, twin y, twin z) { return {fma(x.a, y.a, z.a), fma(x.b, y.b, z.b)}; }
    OPD_INLINE friend float sum(twin x) { return sum(x.a + x.b); }
    OPD_INLINE friend float max_lane(twin x) { return max_lane(max(x.a, x.b)); }
    OPD_INLINE friend twin nearest(twin x) { return {nearest(x.a), nearest(x.b)}; }
    OPD_INLINE friend twin scaled(twin q, twin n) { return {scaled(q.a, n.a), scaled(q.b, n.b)}; }
    OPD_INLINE friend twin scaled_gradually(twin q, twin n) {
        return {scaled_gradually(q.a, n.a), scaled_gradually(q.b, n.b)};
    }
    OPD_INLINE friend twin power_of_two(twin n) { return {power_of_two(n.a), power_of_two(n.b)}; }
    OPD_INLINE friend void split(twin u, twin& m, twin& k, twin& unscale) {
        split(u.a, m.a, k.a, unscale.a), split(u.b, m.b, k.b, unscale.b);
    }
};

/// `lanes`, or several of them side by side.
template <class L>
concept lane_pack = std::same_as<typename L::lane_type, lanes>;

#if defined(OPD_AVX512)
/// What a row kernel computes in: with the 16 registers of older instruction sets a second chain would only spill.
using pack = twin<lanes>;
#else
/// What a row kernel computes in.
using pack = lanes;
#endif

namespace lane_math {

/// x - n ln2, ln2 in two parts.
template <lane_pack L>
OPD_INLINE L less_ln2(L x, L n) {
    return fma(n, L(-0x1.7f7d1cp-20), pin(fma(n, L(-0x1.62e4p-1), x)));
}
/// 2^f, |f| <= 1/2: minimax of degree 6, 1.9e-9.
template <lane_pack L>
OPD_INLINE L exp2_fraction(L f) {
    L r = L(1.53458078e-4);
    r = fma(r, f, L(1.33999317e-3));
    r = fma(r, f, L(9.61848894e-3));
    r = fma(r, f, L(5.55032876e-2));
    r = fma(r, f, L(2.40226469e-1));
    r = fma(r, f, L(6.93147206e-1));
    return fma(r, f, L(1));
}
/// e^r - 1, |r| <= ln2/2, as r + r² Q(r): 1.4e-8.
template <lane_pack L>
OPD_INLINE L expm1_core(L r) {
    L q = L(1.38825192e-3);
    q = fma(q, r, L(8.36652095e-3));
    q = fma(q, r, L(4.16671999e-2));
    q = fma(q, r, L(1.66665436e-1));
    q = fma(q, r, L(4.99999982e-1));
    return fma(r * r, q, r);
}
/// log(2^k (1 + f)), 1 + f in [sqrt(1/2), sqrt(2)).
template <lane_pack L>
OPD_INLINE L log_of_parts(L f, L k) {
    L q = L(-7.63443792e-2);
    q = fma(q, f, L(1.27615629e-1));
    q = fma(q, f, L(-1.31601980e-1));
    q = fma(q, f, L(1.42017610e-1));
    q = fma(q, f, L(-1.66233560e-1));
    q = fma(q, f, L(2.00012267e-1));
    q = fma(q, f, L(-2.50008211e-1));
    q = fma(q, f, L(3.33333317e-1));
    const L f2 = f * f;
    const L tail = fma(f2 * f, q, f2 * L(-0.5));
    return fma(k, L(0x1.62e4p-1), f + fma(k, L(0x1.7f7d1cp-20), tail));
}

} // namespace lane_math

/// 2^x for x in [-2^22, 127]; 0 for anything below the normal range (AVX-512: below the denormal range), also
/// -infinity.
template <lane_pack L>
OPD_INLINE L exp2(L x) {
    const L a = max(x, L(-160)), n = nearest(a); // the order matters: a NaN in x stays
    return scaled(lane_math::exp2_fraction(a - n), n);
}
/// 2^(x (hi + lo)) for |x hi| <= 2^40, below 128: with hi + lo = log2(e)/T to more than float's digits, e^(x/T). The
/// product is reduced before it is rounded: its error does not grow with |x|, nor do equal logits share a bias.
template <lane_pack L>
OPD_INLINE L exp2_scaled(L x, L hi, L lo) {
    const L n = nearest(x * hi);
    const L f = fma(x, lo, pin(fma(x, hi, -n)));
    return scaled(lane_math::exp2_fraction(f), n);
}
/// The same, where anything below floor = -160/hi counts as floor: the result is 0 there; NaN stays NaN.
template <lane_pack L>
OPD_INLINE L exp2_scaled(L x, L hi, L lo, L floor) {
    return exp2_scaled(max(x, floor), hi, lo);
}
/// e^x, saturated at x = 88; below -87 through subnormal numbers to 0.
template <lane_pack L>
OPD_INLINE L exp(L x) {
    const L a = min(max(x, L(-104)), L(88));
    const L n = nearest(a * L(0x1.715476p0)), q = lane_math::expm1_core(lane_math::less_ln2(a, n)) + L(1);
    return scaled_gradually(q, n);
}
/// e^x - b for b = 0 or 1, saturated at x = ±87.
template <lane_pack L>
OPD_INLINE L exp_less(L x, L b) {
    const L a = min(max(x, L(-87)), L(87));
    const L n = nearest(a * L(0x1.715476p0));
    const L s = power_of_two(n);
    return fma(s, lane_math::expm1_core(lane_math::less_ln2(a, n)), s - b);
}
/// e^x - 1, saturated at x = ±87, with small relative error near 0.
template <lane_pack L>
OPD_INLINE L expm1(L x) {
    return exp_less(x, L(1));
}
namespace lane_math {
/// (e^x - 1 - x) / x², |x| <= 1.
template <lane_pack L>
OPD_INLINE L expm1_quotient(L x) {
    L q = L(2.47602965e-5);
    q = fma(q, x, L(2.03702828e-4));
    q = fma(q, x, L(1.38955076e-3));
    q = fma(q, x, L(8.33030963e-3));
    q = fma(q, x, L(4.16662614e-2));
    q = fma(q, x, L(1.66667153e-1));
    return fma(q, x, L(5.00000049e-1));
}
} // namespace lane_math
/// e^x - 1 for |x| <= 1, by one polynomial: 2.4e-8; anything elsewhere.
template <lane_pack L>
OPD_INLINE L expm1_near(L x) {
    return fma(x * x, lane_math::expm1_quotient(x), x);
}
/// e^x - 1 - x, saturated as expm1: never negative, with small relative error near 0.
template <lane_pack L>
OPD_INLINE L expm1_rest(L x) {
    return select(abs(x) < L(1), x * x * lane_math::expm1_quotient(x), max(expm1(x) - x, L(0)));
}
/// log(a + b), a positive, a + b positive and below 2^126, of small relative error also near 0 where a = 1.
template <lane_pack L>
OPD_INLINE L log_sum(L a, L b) {
    L m, k, unscale;
    split(a + b, m, k, unscale);
    return lane_math::log_of_parts(fma(b, unscale, pin(fma(a, unscale, L(-1)))), k); // what a + b loses is in it
}
/// log(1 + y), -1 < y < 2^126, with small relative error near 0.
template <lane_pack L>
OPD_INLINE L log1p(L y) {
    return log_sum(L(1), y);
}
/// log(u), u positive, normal and finite.
template <lane_pack L>
OPD_INLINE L log(L u) {
    L m, k, unscale;
    split(u, m, k, unscale);
    return lane_math::log_of_parts(m - L(1), k);
}
} // namespace OPD_ISA

#endif

} // namespace opd
