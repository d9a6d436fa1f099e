// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The checksum of weights: 64 bits at the speed of memory, of plain arithmetic, the same on every instruction set.
//
//   weight_sum(bytes)    all arithmetic modulo 2^64, words little-endian, i = 0…7:
//
//     mix(x)     x ^= x >> 30, x *= c1, x ^= x >> 27, x *= c2, x ^= x >> 31          (a bijection)
//                c1 = BF58476D1CE4E5B9, c2 = 94D049BB133111EB (hexadecimal)
//     key[j]     mix((j + 1) · 9E3779B97F4A7C15), j = 0…127;    s[i] = key[i]
//     of every 1,024 bytes, the last ones filled up with zeros, with w[l][i] its word 8 l + i, l = 0…15:
//                x = w[l][i] + key[8 l + i];   n[i] = Σ_l (x mod 2^32) · (x >> 32);   t[i] = Σ_l w[l][i]
//                s[i] = (s[i] ^ n[i]) · c1,    s[i] = s[i] ^ s[i] >> 32
//                s[i] = (s[i] + t[i ^ 1]) · c2, s[i] = s[i] ^ s[i] >> 29
//     the sum    r = mix(number of bytes); for i = 0…7: r = mix(r ^ s[i]) + key[i]
//
// n is the NH of UMAC (Black, Halevi, Krawczyk, Krovetz, Rogaway 1999, section 4) in eight lanes, with keys that
// everybody knows; t sees what a product with zero hides. Of other bytes it misses about one case in 2^64. It is no
// signature: whoever can write the bytes can make them fit.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

namespace opd::data {

static_assert(std::endian::native == std::endian::little, "opd: checksums of weights are those of little-endian words");

namespace detail {

inline constexpr std::uint64_t sum_c1 = 0xBF58476D1CE4E5B9u, sum_c2 = 0x94D049BB133111EBu;
constexpr std::uint64_t sum_mix(std::uint64_t x) {
    x = (x ^ x >> 30) * sum_c1;
    x = (x ^ x >> 27) * sum_c2;
    return x ^ x >> 31;
}
constexpr std::array<std::uint64_t, 128> make_sum_keys() {
    std::array<std::uint64_t, 128> k{};
    for (std::size_t j = 0; j < k.size(); ++j) k[j] = sum_mix((j + 1) * 0x9E3779B97F4A7C15u);
    return k;
}
alignas(64) inline constexpr std::array<std::uint64_t, 128> sum_keys = make_sum_keys();

inline constexpr std::size_t sum_chunk = 1024;

// The eight lanes in as many vectors as the instruction set needs; all give the same bits.
#if defined(__AVX512F__)
typedef std::uint64_t sum_vector __attribute__((vector_size(64)));
#elif defined(__AVX__)
typedef std::uint64_t sum_vector __attribute__((vector_size(32)));
#else
typedef std::uint64_t sum_vector __attribute__((vector_size(16)));
#endif
inline constexpr std::size_t sum_parts = 64 / sizeof(sum_vector);

struct sum_state {
    std::uint64_t s[8];
    sum_state() { std::memcpy(s, sum_keys.data(), sizeof s); }

    void chunk(const std::byte* p) {
        sum_vector n[sum_parts] = {}, t[sum_parts] = {};
        for (std::size_t l = 0; l < 16; ++l)
            for (std::size_t j = 0; j < sum_parts; ++j) {
                sum_vector w, k;
                std::memcpy(&w, p + 64 * l + sizeof w * j, sizeof w);
                std::memcpy(&k, sum_keys.data() + 8 * l + sizeof w / 8 * j, sizeof k);
                const sum_vector x = w + k;
                n[j] += (x & 0xFFFFFFFFu) * (x >> 32);
                t[j] += w;
            }
        fold(n, t);
    }
    /// As chunk() of zeros behind `bytes` of them; less than a chunk.
    void last(const std::byte* p, std::size_t bytes) {
        std::byte filled[sum_chunk] = {};
        std::memcpy(filled, p, bytes);
        chunk(filled);
    }
    /// A chunk, or the last bytes.
    void add(const std::byte* p, std::size_t bytes) { bytes == sum_chunk ? chunk(p) : last(p, bytes); }
    void fold(const void* products, const void* words) {
        std::uint64_t n[8], t[8];
        std::memcpy(n, products, 64), std::memcpy(t, words, 64);
        for (std::size_t i = 0; i < 8; ++i) {
            s[i] = (s[i] ^ n[i]) * sum_c1;
            s[i] ^= s[i] >> 32;
            s[i] = (s[i] + t[i ^ 1]) * sum_c2;
            s[i] ^= s[i] >> 29;
        }
    }
    std::uint64_t end(std::size_t bytes) const {
        std::uint64_t r = sum_mix(bytes);
        for (std::size_t i = 0; i < 8; ++i) r = sum_mix(r ^ s[i]) + sum_keys[i];
        return r;
    }
};

} // namespace detail

/// The checksum of bytes, as defined above.
inline std::uint64_t weight_sum(std::span<const std::byte> bytes) {
    detail::sum_state state;
    const std::size_t whole = bytes.size() / detail::sum_chunk * detail::sum_chunk;
    for (std::size_t at = 0; at < whole; at += detail::sum_chunk) state.chunk(bytes.data() + at);
    if (whole < bytes.size()) state.last(bytes.data() + whole, bytes.size() - whole);
    return state.end(bytes.size());
}

} // namespace opd::data
