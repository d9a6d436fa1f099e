// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Lines of floats as half and back, bit for bit what `half` makes of each.
//
// On x86-64, eight at a time where the processor converts them itself (F16C), asked for at run time. The processor
// keeps a NaN's payload and quiets it, `half` does neither: eight that have one are converted one by one.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "opd/config.hpp"
#include "opd/element.hpp"

namespace opd::data::detail {
inline namespace OPD_ISA {

#if defined(__x86_64__)
inline bool has_f16c() {
    static const bool has = __builtin_cpu_supports("avx2") != 0 && __builtin_cpu_supports("f16c") != 0;
    return has;
}

using floats_of_8 __attribute__((vector_size(32))) = float;
using ints_of_8 __attribute__((vector_size(32))) = std::int32_t;
using shorts_of_8 __attribute__((vector_size(16))) = std::int16_t;
using chars_of_16 __attribute__((vector_size(16))) = char;

/// Eight after eight, up to the first that have a NaN; how many numbers.
__attribute__((target("avx2,f16c"))) inline index_t halves_by_eight(const float* from, index_t n, std::byte* to) {
    index_t i = 0;
    for (; i + 8 <= n; i += 8) {
        floats_of_8 x;
        std::memcpy(&x, from + i, sizeof x);
        const auto nan = (reinterpret_cast<ints_of_8>(x) & 0x7fffffff) > 0x7f800000;
        if (__builtin_ia32_movmskps256(reinterpret_cast<floats_of_8>(nan)) != 0) break;
        const auto h = __builtin_ia32_vcvtps2ph256(x, 0); // 0: to nearest even, whatever the rounding mode
        std::memcpy(to + 2 * i, &h, 16);
    }
    return i;
}
__attribute__((target("avx2,f16c"))) inline index_t floats_by_eight(const std::byte* from, index_t n, float* to) {
    index_t i = 0;
    for (; i + 8 <= n; i += 8) {
        shorts_of_8 h;
        std::memcpy(&h, from + 2 * i, sizeof h);
        const auto nan = (h & 0x7fff) > 0x7c00;
        if (__builtin_ia32_pmovmskb128(reinterpret_cast<chars_of_16>(nan)) != 0) break;
        const floats_of_8 x = __builtin_ia32_vcvtph2ps256(h);
        std::memcpy(to + i, &x, sizeof x);
    }
    return i;
}
#else
inline bool has_f16c() { return false; }
inline index_t halves_by_eight(const float*, index_t, std::byte*) { return 0; }
inline index_t floats_by_eight(const std::byte*, index_t, float*) { return 0; }
#endif

/// n floats as half, rounded to nearest even, to 2·n bytes that need not be aligned.
inline void floats_to_halves(const float* from, index_t n, std::byte* to, bool by_eight = has_f16c()) {
    for (index_t i = 0; i < n;) {
        if (by_eight) i += halves_by_eight(from + i, n - i, to + 2 * i);
        for (const index_t last = std::min(n, i + 8); i < last; ++i) {
            const half h(from[i]);
            std::memcpy(to + 2 * i, &h, 2);
        }
    }
}
/// The way back, which is exact.
inline void halves_to_floats(const std::byte* from, index_t n, float* to, bool by_eight = has_f16c()) {
    for (index_t i = 0; i < n;) {
        if (by_eight) i += floats_by_eight(from + 2 * i, n - i, to + i);
        for (const index_t last = std::min(n, i + 8); i < last; ++i) {
            half h;
            std::memcpy(&h, from + 2 * i, 2);
            to[i] = static_cast<float>(h);
        }
    }
}

} // namespace OPD_ISA
} // namespace opd::data::detail
