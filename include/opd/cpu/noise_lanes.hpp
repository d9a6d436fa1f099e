// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Keyed noise (rng.hpp) in lanes: the bits of many tokens of a draw at once, those that noise_row::bits gives one by
// one; and what -log E can be at most, from the bits alone, so that a logarithm is taken only where a token may win.
#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h> // a twentieth of the time that the other takes to read
#endif

#include "opd/config.hpp"
#include "opd/lanes.hpp"
#include "opd/rng.hpp"

namespace opd::detail {
inline namespace OPD_ISA {

struct noise_lanes {
    static constexpr int width = lanes::width;      ///< groups of four tokens at a time
    static constexpr int tokens = 4 * lanes::width; ///< of a block
    typedef std::uint32_t uvec __attribute__((vector_size(4 * width)));
    typedef std::uint64_t wide __attribute__((vector_size(4 * width)));

    uvec draw, root2, root3;
    std::uint32_t key0, key1;

    noise_lanes(const noise_row& row, std::uint32_t draw_)
        : draw(draw_ - uvec{}), root2(row.root.word[2] - uvec{}), root3(row.root.word[3] - uvec{}),
          key0(row.root.word[0]), key1(row.root.word[1]) {}

    /// Bits of tokens 4·group ... 4·group + tokens - 1, in their order.
    OPD_INLINE void block(std::uint32_t group, uvec out[4]) const {
        uvec c0 = draw, c1 = group + order(), c2 = root2, c3 = root3;
        std::uint32_t k0 = key0, k1 = key1;
        for (int round = 0; round < 10; ++round) {
            uvec high0, low0, high1, low1;
            multiply(c0, 0xD2511F53u, high0, low0);
            multiply(c2, 0xCD9E8D57u, high1, low1);
            c0 = high1 ^ c1 ^ k0, c1 = low1, c2 = high0 ^ c3 ^ k1, c3 = low0;
            k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
        }
        // four words of each group, from a register a word to a register of neighbours: see `order`
        const uvec a = low_pairs(c0, c1), b = high_pairs(c0, c1), c = low_pairs(c2, c3), d = high_pairs(c2, c3);
        out[0] = std::bit_cast<uvec>(low_pairs(std::bit_cast<wide>(a), std::bit_cast<wide>(c)));
        out[1] = std::bit_cast<uvec>(high_pairs(std::bit_cast<wide>(a), std::bit_cast<wide>(c)));
        out[2] = std::bit_cast<uvec>(low_pairs(std::bit_cast<wide>(b), std::bit_cast<wide>(d)));
        out[3] = std::bit_cast<uvec>(high_pairs(std::bit_cast<wide>(b), std::bit_cast<wide>(d)));
    }

    /// No -log E of these bits lies above: E >= (k >> 8) 2^-24 >= 2^(e - 24).
    OPD_INLINE static lanes largest_gumbel(uvec k) {
        const auto f = __builtin_convertvector(std::bit_cast<lanes::ivec>(k >> 8), lanes::vec);
        const lanes::ivec e = (std::bit_cast<lanes::ivec>(f) >> 23) - 127; // -127 of 0
        return lanes::raw(__builtin_convertvector(24 - e, lanes::vec)) * lanes(0.6931472);
    }

private:
    /// Interleaving pairs within 128 bits leaves groups apart by the number of such parts: counted in this order they
    /// come out in line.
    static OPD_INLINE uvec order() {
        uvec v{};
        for (int i = 0; i < width; ++i) v[i] = static_cast<std::uint32_t>((i % 4) * (width / 4) + i / 4);
        return v;
    }
    static OPD_INLINE wide product(wide a, std::uint64_t m) { // of the lower halves
#if defined(OPD_AVX512)
        return std::bit_cast<wide>(
            _mm512_maskz_mul_epu32(0xff, std::bit_cast<__m512i>(a), _mm512_set1_epi64(static_cast<long long>(m))));
#elif defined(__AVX2__)
        return std::bit_cast<wide>(
            _mm256_mul_epu32(std::bit_cast<__m256i>(a), _mm256_set1_epi64x(static_cast<long long>(m))));
#elif defined(__SSE2__)
        return std::bit_cast<wide>(
            _mm_mul_epu32(std::bit_cast<__m128i>(a), _mm_set1_epi64x(static_cast<long long>(m))));
#else
        return (a & 0xffffffffull) * m;
#endif
    }
    static OPD_INLINE void multiply(uvec x, std::uint64_t m, uvec& high, uvec& low) {
        const wide w = std::bit_cast<wide>(x), even = product(w, m), odd = product(w >> 32, m);
        low = std::bit_cast<uvec>((even & 0xffffffffull) | (odd << 32));
        high = std::bit_cast<uvec>((even >> 32) | (odd & 0xffffffff00000000ull));
    }
    static OPD_INLINE uvec low_pairs(uvec a, uvec b) {
#if defined(OPD_AVX512)
        return __builtin_shufflevector(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
#elif defined(__AVX2__)
        return __builtin_shufflevector(a, b, 0, 8, 1, 9, 4, 12, 5, 13);
#else
        return __builtin_shufflevector(a, b, 0, 4, 1, 5);
#endif
    }
    static OPD_INLINE uvec high_pairs(uvec a, uvec b) {
#if defined(OPD_AVX512)
        return __builtin_shufflevector(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
#elif defined(__AVX2__)
        return __builtin_shufflevector(a, b, 2, 10, 3, 11, 6, 14, 7, 15);
#else
        return __builtin_shufflevector(a, b, 2, 6, 3, 7);
#endif
    }
    static OPD_INLINE wide low_pairs(wide a, wide b) {
#if defined(OPD_AVX512)
        return __builtin_shufflevector(a, b, 0, 8, 2, 10, 4, 12, 6, 14);
#elif defined(__AVX2__)
        return __builtin_shufflevector(a, b, 0, 4, 2, 6);
#else
        return __builtin_shufflevector(a, b, 0, 2);
#endif
    }
    static OPD_INLINE wide high_pairs(wide a, wide b) {
#if defined(OPD_AVX512)
        return __builtin_shufflevector(a, b, 1, 9, 3, 11, 5, 13, 7, 15);
#elif defined(__AVX2__)
        return __builtin_shufflevector(a, b, 1, 5, 3, 7);
#else
        return __builtin_shufflevector(a, b, 1, 3);
#endif
    }
};

} // namespace OPD_ISA
} // namespace opd::detail
