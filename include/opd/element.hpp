// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Element types: what the caller's memory holds, and what arithmetic is done in.
//
//   storage            arithmetic   path
//   float, bfloat16    float        lanes, straight from the caller's memory
//   half, user types   float        converted one leaf (1,024 entries) at a time into an L1 buffer
//   double             double       the generic path with double as number type
//
// `bfloat16` and `half` here are bare storage: 16 bits that convert to and from float, round to nearest even. A type of
// one's own (Eigen::bfloat16, __nv_bfloat16, a tag over uint16_t) joins by specialising `opd::element`:
//
//   template <> struct opd::element<my_half> {
//       using arithmetic = float;
//       static float load(my_half x);
//       static my_half store(float x);
//   };
#pragma once

#include <cstdint>
#include <type_traits>

#include "opd/config.hpp"

namespace opd {

/// The upper half of a float: 8 exponent bits, 8 significant bits.
struct bfloat16 {
    std::uint16_t bits;
    friend bool operator==(bfloat16, bfloat16) = default;
};

/// IEEE binary16: 5 exponent bits, 11 significant bits.
struct half {
    std::uint16_t bits;
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
    OPD_HD OPD_INLINE static constexpr float load(bfloat16 x) {
        return detail::bit_cast<float>(std::uint32_t{x.bits} << 16);
    }
    OPD_HD OPD_INLINE static constexpr bfloat16 store(float x) {
        const auto u = detail::bit_cast<std::uint32_t>(x);
        if ((u & 0x7fffffffu) > 0x7f800000u) // NaN: keep it one
            return {static_cast<std::uint16_t>((u >> 16) | 0x40u)};
        return {static_cast<std::uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16)};
    }
};

template <>
struct element<half> {
    using arithmetic = float;
    OPD_HD OPD_INLINE static constexpr float load(half x) {
        const std::uint32_t sign = (x.bits & 0x8000u) << 16, exponent = (x.bits >> 10) & 31u, m = x.bits & 1023u;
        if (exponent == 31) return detail::bit_cast<float>(sign | 0x7f800000u | (m << 13));
        if (exponent == 0) { // zero or subnormal: m * 2^-24 is exact in float
            const float v = static_cast<float>(m) * 0x1p-24f;
            return sign ? -v : v;
        }
        return detail::bit_cast<float>(sign | ((exponent + 112u) << 23) | (m << 13));
    }
    OPD_HD OPD_INLINE static constexpr half store(float x) {
        const auto u = detail::bit_cast<std::uint32_t>(x);
        const auto sign = static_cast<std::uint16_t>((u >> 16) & 0x8000u);
        const std::uint32_t a = u & 0x7fffffffu;
        if (a > 0x7f800000u) return {static_cast<std::uint16_t>(sign | 0x7e00u)};
        if (a >= 0x477ff000u) // rounds to 2^16 or more
            return {static_cast<std::uint16_t>(sign | 0x7c00u)};
        if (a < 0x38800000u) { // below 2^-14: count of 2^-24, rounded by the float adder (2^-1 + k·2^-24 has that ulp)
            const float k = detail::bit_cast<float>(a) + 0.5f;
            return {static_cast<std::uint16_t>(sign | (detail::bit_cast<std::uint32_t>(k) - 0x3f000000u))};
        }
        const std::uint32_t r = a + 0xfffu + ((a >> 13) & 1u);
        return {static_cast<std::uint16_t>(sign | ((r - 0x38000000u) >> 13))};
    }
};

/// A type that can stand in the caller's memory.
template <class T>
concept storage = requires(T t, typename element<T>::arithmetic a) {
    {element<T>::load(t)};
    {element<T>::store(a)};
};

template <class T>
using arithmetic_t = typename element<std::remove_const_t<T>>::arithmetic;

/// Floats classified by their bits: right under -ffast-math, where isinf and isnan are folded to false. By reference and
/// inlined: clang takes a float argument or result to be finite there.
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

} // namespace detail

} // namespace opd
