// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Element types: what the caller's memory holds, and what arithmetic is done in.
//
//   storage                             arithmetic   path
//   float, bfloat16 and its likes       float        lanes, straight from the caller's memory
//   half and its likes, user types      float        converted one leaf (1,024 entries) at a time into an L1 buffer
//   double                              double       the generic path with double as number type
//
// `bfloat16` and `half` here are bare storage: 16 bits that convert to and from float, explicitly, round to nearest
// even. Their likes are the types of other libraries that hold the same bits: c10::BFloat16 and c10::Half (PyTorch),
// __nv_bfloat16 and __half (CUDA), _Float16 and std::bfloat16_t where the compiler has them, Eigen's
// (backends/eigen.hpp). Another one joins by
//
//   template <> struct opd::element<my_bfloat16> : opd::same_bits<my_bfloat16, opd::bfloat16> {};
//
// and a type with bits of its own by
//
//   template <> struct opd::element<my_number> {
//       using arithmetic = float;
//       static float load(my_number x);
//       static my_number store(float x);
//   };
#pragma once

#include <concepts>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "opd/config.hpp"

namespace c10 {
struct BFloat16;
struct Half;
} // namespace c10
struct __nv_bfloat16;
struct __half;

namespace opd {

namespace detail {

OPD_HD OPD_INLINE constexpr float bfloat16_to_float(std::uint16_t bits) {
    return detail::bit_cast<float>(std::uint32_t{bits} << 16);
}
OPD_HD OPD_INLINE constexpr std::uint16_t float_to_bfloat16(float x) {
    const auto u = detail::bit_cast<std::uint32_t>(x);
    if ((u & 0x7fffffffu) > 0x7f800000u) // NaN: keep it one
        return static_cast<std::uint16_t>((u >> 16) | 0x40u);
    return static_cast<std::uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}
OPD_HD OPD_INLINE constexpr float half_to_float(std::uint16_t bits) {
    const std::uint32_t sign = (bits & 0x8000u) << 16, exponent = (bits >> 10) & 31u, m = bits & 1023u;
    if (exponent == 31) return detail::bit_cast<float>(sign | 0x7f800000u | (m << 13));
    if (exponent == 0) { // zero or subnormal: m * 2^-24 is exact in float
        const float v = static_cast<float>(m) * 0x1p-24f;
        return sign ? -v : v;
    }
    return detail::bit_cast<float>(sign | ((exponent + 112u) << 23) | (m << 13));
}
OPD_HD OPD_INLINE constexpr std::uint16_t float_to_half(float x) {
    const auto u = detail::bit_cast<std::uint32_t>(x);
    const auto sign = static_cast<std::uint16_t>((u >> 16) & 0x8000u);
    const std::uint32_t a = u & 0x7fffffffu;
    if (a > 0x7f800000u) return static_cast<std::uint16_t>(sign | 0x7e00u);
    if (a >= 0x477ff000u) // rounds to 2^16 or more
        return static_cast<std::uint16_t>(sign | 0x7c00u);
    if (a < 0x38800000u) { // below 2^-14: count of 2^-24, rounded by the float adder (2^-1 + k·2^-24 has that ulp)
        const float k = detail::bit_cast<float>(a) + 0.5f;
        return static_cast<std::uint16_t>(sign | (detail::bit_cast<std::uint32_t>(k) - 0x3f000000u));
    }
    const std::uint32_t r = a + 0xfffu + ((a >> 13) & 1u);
    return static_cast<std::uint16_t>(sign | ((r - 0x38000000u) >> 13));
}

} // namespace detail

/// The upper half of a float: 8 exponent bits, 8 significant bits. Equal means the same bits.
struct bfloat16 {
    std::uint16_t bits;

    bfloat16() = default;
    OPD_HD OPD_INLINE explicit constexpr bfloat16(float x) : bits(detail::float_to_bfloat16(x)) {}
    /// Sixteen bits are a number or a pattern: `from_bits` for the pattern.
    template <std::same_as<std::uint16_t> Bits>
    explicit bfloat16(Bits) = delete;
    OPD_HD OPD_INLINE static constexpr bfloat16 from_bits(std::uint16_t bits) {
        bfloat16 x{0.f};
        x.bits = bits;
        return x;
    }
    OPD_HD OPD_INLINE explicit constexpr operator float() const { return detail::bfloat16_to_float(bits); }
    friend bool operator==(bfloat16, bfloat16) = default;
};

/// IEEE binary16: 5 exponent bits, 11 significant bits. Equal means the same bits.
struct half {
    std::uint16_t bits;

    half() = default;
    OPD_HD OPD_INLINE explicit constexpr half(float x) : bits(detail::float_to_half(x)) {}
    /// Sixteen bits are a number or a pattern: `from_bits` for the pattern.
    template <std::same_as<std::uint16_t> Bits>
    explicit half(Bits) = delete;
    OPD_HD OPD_INLINE static constexpr half from_bits(std::uint16_t bits) {
        half x{0.f};
        x.bits = bits;
        return x;
    }
    OPD_HD OPD_INLINE explicit constexpr operator float() const { return detail::half_to_float(bits); }
    friend bool operator==(half, half) = default;
};

/// How a storage type is read, written and computed with. Specialise for your own; the primary template has no members.
template <class T>
struct element {};

template <>
struct element<float> {
    using arithmetic = float;
    OPD_HD OPD_INLINE static constexpr float load(float x) { return x; }
    OPD_HD OPD_INLINE static constexpr float store(float x) { return x; }
};

template <>
struct element<double> {
    using arithmetic = double;
    OPD_HD OPD_INLINE static constexpr double load(double x) { return x; }
    OPD_HD OPD_INLINE static constexpr double store(double x) { return x; }
};

template <>
struct element<bfloat16> {
    using arithmetic = float;
    OPD_HD OPD_INLINE static constexpr float load(bfloat16 x) { return static_cast<float>(x); }
    OPD_HD OPD_INLINE static constexpr bfloat16 store(float x) { return bfloat16(x); }
};

template <>
struct element<half> {
    using arithmetic = float;
    OPD_HD OPD_INLINE static constexpr float load(half x) { return static_cast<float>(x); }
    OPD_HD OPD_INLINE static constexpr half store(float x) { return half(x); }
};

/// What `element` is for a type T that holds the bits of `As`: T is then read and written as fast as `As` is.
template <class T, class As>
struct same_bits {
    using arithmetic = typename element<As>::arithmetic;
    using same_bits_as = As;
    OPD_HD OPD_INLINE static constexpr arithmetic load(T x) { return element<As>::load(detail::bit_cast<As>(x)); }
    OPD_HD OPD_INLINE static constexpr T store(arithmetic x) { return detail::bit_cast<T>(element<As>::store(x)); }
};

template <>
struct element<c10::BFloat16> : same_bits<c10::BFloat16, bfloat16> {};
template <>
struct element<c10::Half> : same_bits<c10::Half, half> {};
template <>
struct element<__nv_bfloat16> : same_bits<__nv_bfloat16, bfloat16> {};
template <>
struct element<__half> : same_bits<__half, half> {};
#if defined(__FLT16_MANT_DIG__)
template <>
struct element<_Float16> : same_bits<_Float16, half> {}; // std::float16_t is this type
#endif
#if defined(__BFLT16_MANT_DIG__)
template <>
struct element<__bf16> : same_bits<__bf16, bfloat16> {}; // std::bfloat16_t is this type
#endif

/// A type that can stand in the caller's memory.
template <class T>
concept storage = requires(T t, typename element<T>::arithmetic a) {
    {element<T>::load(t)};
    {element<T>::store(a)};
};

/// What numbers of a storage type are computed in: float, or double for double.
template <class T>
using arithmetic_t = typename element<std::remove_const_t<T>>::arithmetic;

namespace detail {

template <class T>
struct stored_as {
    using type = T;
};
template <class T>
    requires requires { typename element<T>::same_bits_as; }
struct stored_as<T> {
    using type = typename element<T>::same_bits_as;
};

} // namespace detail

/// The type whose bits T holds: As for a T that joined by same_bits<T, As>, otherwise T.
template <class T>
using stored_as = typename detail::stored_as<std::remove_const_t<T>>::type;

/// bfloat16 under any name: loaded and stored by lanes.
template <class T>
concept brain_float = std::same_as<stored_as<T>, bfloat16>;

/// Floats classified by their bits: right under -ffast-math, where isinf and isnan are folded to false. By reference
/// and inlined: clang takes a float argument or result to be finite there.
namespace detail {

template <class F>
struct float_bits;
template <>
struct float_bits<float> {
    using word = std::uint32_t;
    static constexpr word magnitude = 0x7fffffffu, infinity = 0x7f800000u;
};
template <>
struct float_bits<double> {
    using word = std::uint64_t;
    static constexpr word magnitude = 0x7fffffffffffffffull, infinity = 0x7ff0000000000000ull;
};

template <class F>
OPD_HD OPD_INLINE constexpr bool is_nan(const F& x) {
    using b = float_bits<F>;
    return (detail::bit_cast<typename b::word>(x) & b::magnitude) > b::infinity;
}
template <class F>
OPD_HD OPD_INLINE constexpr bool is_inf(const F& x) {
    using b = float_bits<F>;
    return (detail::bit_cast<typename b::word>(x) & b::magnitude) == b::infinity;
}
template <class F>
OPD_HD OPD_INLINE constexpr bool is_neg_inf(const F& x) {
    using b = float_bits<F>;
    return detail::bit_cast<typename b::word>(x) == (b::infinity | ~b::magnitude);
}
template <class F>
OPD_HD OPD_INLINE constexpr bool is_finite(const F& x) {
    using b = float_bits<F>;
    return (detail::bit_cast<typename b::word>(x) & b::magnitude) < b::infinity;
}
/// -inf as bits: the literal is undefined behaviour under -ffinite-math-only.
template <class F>
OPD_HD OPD_INLINE constexpr F neg_inf() {
    using b = float_bits<F>;
    return detail::bit_cast<F>(static_cast<typename b::word>(b::infinity | ~b::magnitude));
}
/// NaN likewise.
template <class F>
OPD_HD OPD_INLINE constexpr F quiet_nan() {
    using b = float_bits<F>;
    return detail::bit_cast<F>(static_cast<typename b::word>(b::infinity | (b::infinity >> 1)));
}

/// Whether a logit or log-prob is no number but a mask: -inf, or at or below -1e30, as the least float, double and
/// bfloat16 are.
template <class F>
OPD_HD OPD_INLINE constexpr bool is_mask(const F& x) {
    using b = float_bits<F>;
    const auto w = detail::bit_cast<typename b::word>(x);
    return w > b::magnitude && (w & b::magnitude) <= b::infinity &&
           (w & b::magnitude) >= detail::bit_cast<typename b::word>(F(1e30));
}
/// A logit or log-prob as it is stored; the least half, -65504, is a mask, too.
template <class T>
OPD_HD OPD_INLINE constexpr auto load_maskable(const T& x) {
    if constexpr (std::same_as<opd::stored_as<T>, half>) {
        const auto bits = detail::bit_cast<std::uint16_t>(x);
        return half_to_float(bits == 0xfbffu ? std::uint16_t(0xfc00u) : bits);
    } else {
        return element<std::remove_const_t<T>>::load(x);
    }
}
/// The same in double, a mask as -inf.
template <class T>
OPD_HD OPD_INLINE constexpr double load_log(const T& stored) {
    const auto x = load_maskable(stored);
    return is_mask(x) ? neg_inf<double>() : double(x);
}
/// The largest finite number of a storage type; of one that opd does not know, of its arithmetic.
template <class T>
inline constexpr arithmetic_t<T> largest_stored = std::is_same_v<opd::stored_as<T>, half> ? arithmetic_t<T>(65504)
                                                  : brain_float<T>                        ? arithmetic_t<T>(0x1.fep127)
                                                                   : std::numeric_limits<arithmetic_t<T>>::max();
/// x as T holds it: what is finite stays so.
template <class T>
OPD_HD OPD_INLINE constexpr T store_finite(double x) {
    constexpr double most = double(largest_stored<T>);
    return element<T>::store(static_cast<arithmetic_t<T>>(x > most ? most : (x < -most ? -most : x)));
}

} // namespace detail

} // namespace opd
