// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Logits of bfloat16 hidden states and a bfloat16 head by the processor's dot products of pairs (AVX512-BF16: AMD since
// Zen 4, Intel's Cooper Lake and its Xeons since Sapphire Rapids), which have up to twice the multiply-adds a second of
// float's.
//
//   opd::bf16_head(view(w,V,D))        throws `unsupported` where the processor has none; has_avx512_bf16() asks
//   teacher::hidden{view(x,N,D), opd::bf16_head(view(w,V,D))}     in place of view(w,V,D); a student's as well
//
//   z[r, v] = Σ_k x[r, k] w[v, k]      one sum in float, over columns 1, 0, 3, 2, 5, 4, …
//
// A product is exact, and each sum is rounded to nearest. Numbers and sums below 2^-126 are 0, whatever the thread's
// own mode says. So a logit lies within
//
//   (D + 1) 2^-24 Σ_k |x w| + 2 D 2^-126
//
// of the exact sum over the numbers that are not below 2^-126, as one of view(w,V,D) does, with other last bits. No bit
// depends on budget, threads or the other rows.
//
// Computed as those of view(w,V,D) are: dx, dw and db, for dz is a float, three of whose parts take longer than it
// does; logits of float states, and of few ids (supports, samples, scores); a head with an update.
//
// Throws unsupported, and invalid_input that names bf16_head.w. CPU.
// Source: Intel 64 and IA-32 Architectures Software Developer's Manual, VDPBF16PS.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "opd/backends/amx.hpp"
#include "opd/config.hpp"
#include "opd/element.hpp"
#include "opd/error.hpp"
#include "opd/products/tile_products.hpp"
#include "opd/view.hpp"

#if defined(__x86_64__) && !defined(__CUDACC__)
#define OPD_BF16_DOTS 1
#include <immintrin.h>
#endif

namespace opd {
inline namespace OPD_ISA {

/// Whether processor and system have dot products of bfloat16 pairs.
inline bool has_avx512_bf16() {
#if defined(OPD_BF16_DOTS)
    return __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512bf16") != 0;
#else
    return false;
#endif
}

} // namespace OPD_ISA

namespace detail {
inline namespace OPD_ISA {

/// Blocks of tile_products.hpp by dot products: 8 rows of a and all of b at a time, in 16 sums. A sum waits 6 cycles
/// for the one before, and each cycle begins two (Zen 5): 12 would do.
struct bf16_dots {
    static constexpr bool logits_alone = true;
    static constexpr const char* argument = "bf16_head.w";

    bf16_dots() {
        if (!has_avx512_bf16())
            throw unsupported("opd::bf16_head: this processor has no dot products of bfloat16 (AVX512-BF16)");
    }
#if defined(OPD_BF16_DOTS)
    template <int A, int B>
    [[gnu::target("avx512f,avx512bf16"), gnu::noinline]] void run(const tile_block& t) const {
        static_assert(A == 1 && B == 1);
        for (index_t i = 0; i < 32; i += rows) some_rows(t, i, std::make_integer_sequence<int, rows>{});
    }

private:
    static constexpr int rows = 8;
    template <int... R>
    [[gnu::target("avx512f,avx512bf16"), gnu::always_inline]] static inline void
    some_rows(const tile_block& t, index_t i, std::integer_sequence<int, R...>) {
        __m512 left[] = {start(t, i + R, 0)...}, right[] = {start(t, i + R, 16)...};
        const std::uint16_t *a = t.a + i * t.a_row, *b = t.b;
        for (index_t s = 0; s < t.steps; ++s) {
            if (s % (32 / rows) == i / rows) t.next(s); // each of the passes has its share of them
            for (int k = 0; k < 16; ++k, a += 2, b += 32) {
                const __m512i x = _mm512_loadu_si512(b), y = _mm512_loadu_si512(b + t.b_half);
                (add(left[R], right[R], a + R * t.a_row, x, y), ...);
            }
        }
        float* const c = t.c + i * t.c_row;
        ((_mm512_storeu_ps(c + R * t.c_row, left[R]), _mm512_storeu_ps(c + R * t.c_row + 16, right[R])), ...);
    }
    [[gnu::target("avx512f,avx512bf16"), gnu::always_inline]] static inline __m512 start(const tile_block& t, index_t i,
                                                                                         index_t j) {
        return t.from == nullptr ? _mm512_setzero_ps() : _mm512_loadu_ps(t.from + i * t.from_row + j);
    }
    [[gnu::target("avx512f,avx512bf16"), gnu::always_inline]] static inline void
    add(__m512& left, __m512& right, const std::uint16_t* pair, __m512i x, __m512i y) {
        int both;
        std::memcpy(&both, pair, sizeof both);
        const __m512i p = _mm512_set1_epi32(both);
        left = _mm512_dpbf16_ps(left, (__m512bh)p, (__m512bh)x);
        right = _mm512_dpbf16_ps(right, (__m512bh)p, (__m512bh)y);
    }
#else
    template <int, int>
    void run(const tile_block&) const {}
#endif
};

} // namespace OPD_ISA
} // namespace detail

inline namespace OPD_ISA {

/// A head (V,D) of bfloat16, or of a type with its bits, for dot products of pairs.
template <class E>
auto bf16_head(matrix_view<E> w) {
    static_assert(brain_float<std::remove_const_t<E>>, "opd: bf16_head is of bfloat16; a head in float is view(w,V,D)");
    return amx_head<std::remove_const_t<E>, detail::bf16_dots>(w);
}

} // namespace OPD_ISA

} // namespace opd
