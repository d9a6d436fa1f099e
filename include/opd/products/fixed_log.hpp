// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A logarithm whose bits are the same everywhere: one sequence of double operations, each rounded by itself, whatever
// compiler, instruction set or device runs it. Keyed draws rest on it: where two tokens nearly tie, lanes, scalars
// and GPU threads must agree, and libraries' logarithms do not.
//
//   x = 2^k m, m in [sqrt(1/2), sqrt(2));  log m = 2 artanh((m-1)/(m+1)) by its series to the 21st power
//
// Relative error at most 2^-51, near x = 1 as well. Positive normal numbers only.
#pragma once

#include <cstdint>

#include "opd/config.hpp"

namespace opd::detail {

/// a·b and a + b, rounded each by itself: never one half of a fused operation, never reassociated.
OPD_HD OPD_INLINE double times(double a, double b) {
#if defined(__CUDA_ARCH__)
    return __dmul_rn(a, b);
#else
    return pin(pin(a) * b);
#endif
}
OPD_HD OPD_INLINE double plus(double a, double b) {
#if defined(__CUDA_ARCH__)
    return __dadd_rn(a, b);
#else
    return pin(pin(a) + b);
#endif
}
OPD_HD OPD_INLINE double over(double a, double b) {
#if defined(__CUDA_ARCH__)
    return __ddiv_rn(a, b);
#else
    return pin(pin(a) / pin(b));
#endif
}

OPD_HD inline double fixed_log(double x) {
    constexpr std::uint64_t root_half = 0x3fe6a09e667f3bcdull;
    const auto word = bit_cast<std::uint64_t>(x);
    const std::int64_t k = static_cast<std::int64_t>(word - root_half) >> 52;
    const double m = bit_cast<double>(word - (static_cast<std::uint64_t>(k) << 52));
    const double f = plus(m, -1), s = over(f, plus(m, 1)), s2 = times(s, s);
    double r = 1. / 21;
    r = plus(times(r, s2), 1. / 19);
    r = plus(times(r, s2), 1. / 17);
    r = plus(times(r, s2), 1. / 15);
    r = plus(times(r, s2), 1. / 13);
    r = plus(times(r, s2), 1. / 11);
    r = plus(times(r, s2), 1. / 9);
    r = plus(times(r, s2), 1. / 7);
    r = plus(times(r, s2), 1. / 5);
    r = plus(times(r, s2), 1. / 3);
    // 2 s (1 + s² r) as f - s (f - 2 s² r): the leading term f is exact
    const double rest = times(s, plus(f, -times(times(2, s2), r)));
    const double log_m = plus(f, -rest);
    const double high = 0x1.62e42fefa38p-1, low = 0x1.ef35793c7673p-45; // ln 2; high·k is exact
    return plus(times(static_cast<double>(k), high), plus(log_m, times(static_cast<double>(k), low)));
}

} // namespace opd::detail
