// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Ids in fewer bits than their type has: 17 hold a vocabulary of 131,071, 18 one of 262,143.
//
//   id i stands in bits [i·bits, (i+1)·bits) of the stream, the lowest bit first; bit b is bit b mod 8 of byte b / 8
//   -1, an unused slot, is all ones: so ids lie in [0, 2^bits - 2]
//
// On x86-64, eight ids at a time where the processor has AVX2, asked for at run time; the bytes are the same.
//
// In numpy: np.unpackbits(x, bitorder="little")[:n * bits].reshape(n, bits) @ (1 << np.arange(bits)).
#pragma once

#include <algorithm>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <utility>

#include "opd/config.hpp"
#include "opd/error.hpp"

namespace opd::data {

/// Bits that a packed id may have.
inline constexpr int least_id_bits = 8, most_id_bits = 31;

/// Bytes of n ids, and whether there are so many at all.
constexpr std::size_t packed_bytes(index_t n, int bits) {
    return (static_cast<std::size_t>(n) * static_cast<std::size_t>(bits) + 7) / 8;
}

/// The most ids that a vocabulary of `bits` has; -1 takes one number.
constexpr index_t largest_vocabulary(int bits) { return (index_t{1} << bits) - 1; }

namespace detail {
inline namespace OPD_ISA {

/// Ids [i, n) to the bytes at `to`, of which `filled` bits are taken.
template <std::integral Id>
void pack_one_by_one(const Id* ids, index_t i, index_t n, int bits, std::byte* to, int filled) {
    const auto all = (std::uint64_t{1} << bits) - 1;
    std::uint64_t word = filled > 0 ? std::to_integer<std::uint64_t>(*to) : 0;
    for (; i < n; ++i) {
        word |= (static_cast<std::uint64_t>(static_cast<index_t>(ids[i])) & all) << filled;
        filled += bits;
        if (filled < 32) continue;
        const auto four = static_cast<std::uint32_t>(word);
        std::memcpy(to, &four, 4);
        to += 4, filled -= 32, word >>= 32;
    }
    for (; filled > 0; filled -= 8, word >>= 8) *to++ = static_cast<std::byte>(word & 255u);
}

#if defined(__x86_64__)
inline constexpr int most_bits_by_eight = 25; ///< an id that begins anywhere in a byte ends in the fourth

inline bool has_avx2() {
    static const bool has = __builtin_cpu_supports("avx2") != 0;
    return has;
}

using bytes_16 __attribute__((vector_size(16))) = unsigned char;
using bytes_32 __attribute__((vector_size(32))) = char;
using words_2 __attribute__((vector_size(16))) = std::uint64_t;
using words_4 __attribute__((vector_size(32))) = std::uint64_t;
using words_8 __attribute__((vector_size(64))) = std::int64_t;
using ints_8 __attribute__((vector_size(32))) = std::uint32_t;

/// Where eight ids lie, four in each half of a register: the second half begins at byte bits / 2, and there at bit 0 or
/// 4. Bit of id j of a half, counted from there.
constexpr int bit_of(int half, int j, int bits) { return (half == 1 ? 4 * bits % 8 : 0) + j * bits; }

/// Eight ids after eight, which take `bits` bytes each time, as long as 16 bytes at byte bits / 2 are within `end`;
/// how many it took. The first one begins a byte.
template <std::integral Id>
__attribute__((target("avx2"))) index_t pack_by_eight(const Id* ids, index_t n, int bits, std::byte* to,
                                                      const std::byte* end) {
    words_4 shift{}; // of pairs of ids, within a byte
    bytes_32 first{}, second{};
    bytes_16 common{}; // of both halves: the byte that they share, where bits is odd
    for (int half = 0; half < 2; ++half) {
        const int at = bit_of(half, 2, bits);
        shift[2 * half] = static_cast<std::uint64_t>(bit_of(half, 0, bits));
        shift[2 * half + 1] = static_cast<std::uint64_t>(at % 8);
        for (int b = 0; b < 16; ++b) {
            first[16 * half + b] = static_cast<char>(b < 8 ? b : -1);
            second[16 * half + b] = static_cast<char>(b >= at / 8 && b < at / 8 + 8 ? b - at / 8 + 8 : -1);
        }
    }
    for (int b = 0; b < 16; ++b) common[b] = static_cast<unsigned char>(b == 0 ? bits / 2 : 255);
    const auto all = static_cast<std::uint32_t>((std::uint64_t{1} << bits) - 1);
    index_t i = 0;
    for (; i + 8 <= n && end - to >= bits / 2 + 16; i += 8, to += bits) {
        ints_8 some;
        if constexpr (sizeof(Id) == 8) {
            words_8 wide;
            std::memcpy(&wide, ids + i, sizeof wide);
            some = __builtin_convertvector(wide, ints_8);
        } else {
            std::memcpy(&some, ids + i, sizeof some);
        }
        const auto pairs = reinterpret_cast<words_4>(some & all);
        const words_4 joined = ((pairs & 0xFFFFFFFFu) | (pairs >> 32 << bits)) << shift;
        const auto v = reinterpret_cast<bytes_32>(joined);
        const auto both =
            reinterpret_cast<words_4>(__builtin_ia32_pshufb256(v, first) | __builtin_ia32_pshufb256(v, second));
        const words_2 low = __builtin_shufflevector(both, both, 0, 1);
        words_2 high = __builtin_shufflevector(both, both, 2, 3);
        using chars = char __attribute__((vector_size(16)));
        high |= reinterpret_cast<words_2>(
            __builtin_ia32_pshufb128(reinterpret_cast<chars>(low), reinterpret_cast<chars>(common)));
        std::memcpy(to, &low, 16);
        std::memcpy(to + bits / 2, &high, 16);
    }
    return i;
}

/// The way back; `from` begins an id.
template <std::integral Id>
__attribute__((target("avx2"))) index_t unpack_by_eight(const std::byte* from, const std::byte* end, index_t n,
                                                        int bits, Id* to) {
    ints_8 shift{};
    bytes_32 windows{}; // of four bytes each, one for an id
    for (int i = 0; i < 8; ++i) {
        const int at = bit_of(i / 4, i % 4, bits);
        shift[i] = static_cast<std::uint32_t>(at % 8);
        for (int b = 0; b < 4; ++b) windows[4 * i + b] = static_cast<char>(at / 8 + b);
    }
    const auto all = static_cast<std::uint32_t>((std::uint64_t{1} << bits) - 1);
    index_t i = 0;
    for (; i + 8 <= n && end - from >= bits / 2 + 16; i += 8, from += bits) {
        words_2 low, high;
        std::memcpy(&low, from, 16);
        std::memcpy(&high, from + bits / 2, 16);
        const words_4 both = __builtin_shufflevector(low, high, 0, 1, 2, 3);
        const auto found =
            reinterpret_cast<ints_8>(__builtin_ia32_pshufb256(reinterpret_cast<bytes_32>(both), windows)) >> shift &
            all;
        const ints_8 ids = found | reinterpret_cast<ints_8>(found == all); // all ones: -1
        if constexpr (sizeof(Id) == 8) {
            using signed_8 = std::int32_t __attribute__((vector_size(32)));
            const auto wide = __builtin_convertvector(reinterpret_cast<signed_8>(ids), words_8);
            std::memcpy(to + i, &wide, sizeof wide);
        } else {
            std::memcpy(to + i, &ids, sizeof ids);
        }
    }
    return i;
}
#else
inline constexpr int most_bits_by_eight = 0; // as many as another processor would be given here
inline bool has_avx2() { return false; }
template <std::integral Id>
index_t pack_by_eight(const Id*, index_t, int, std::byte*, const std::byte*) {
    return 0;
}
template <std::integral Id>
index_t unpack_by_eight(const std::byte*, const std::byte*, index_t, int, Id*) {
    return 0;
}
#endif

/// The least and the largest of n ids and 0.
template <std::integral Id>
std::pair<Id, Id> range_of_ids(const Id* ids, index_t n) {
    Id least = 0, most = 0;
    for (index_t i = 0; i < n; ++i) {
        least = ids[i] < least ? ids[i] : least;
        most = ids[i] > most ? ids[i] : most;
    }
    return {least, most};
}

/// Appends n ids to a stream of `have`: ids that were looked at. `by_eight`: with the instructions that the processor
/// has; the bytes are the same.
template <std::integral Id, class Bytes>
void append_ids(const Id* ids, index_t n, int bits, Bytes& stream, index_t have, bool by_eight = has_avx2()) {
    stream.resize(packed_bytes(have + n, bits));
    index_t i = 0;
    const auto bit = [&] { return static_cast<std::size_t>(have + i) * static_cast<std::size_t>(bits); };
    if (by_eight && bits <= most_bits_by_eight) {
        const index_t begun = std::min(n, -have & 7); // up to where an id begins a byte
        pack_one_by_one(ids, 0, begun, bits, stream.data() + bit() / 8, static_cast<int>(bit() % 8));
        i = begun;
        if (i < n) i += pack_by_eight(ids + i, n - i, bits, stream.data() + bit() / 8, stream.data() + stream.size());
    }
    pack_one_by_one(ids, i, n, bits, stream.data() + bit() / 8, static_cast<int>(bit() % 8));
}

/// The same of ids that nobody has looked at: throws invalid_input that names `name`, before anything is written, where
/// one does not fit.
template <std::integral Id, class Bytes>
void pack_ids(const char* name, const Id* ids, index_t n, int bits, Bytes& stream, index_t have,
              bool by_eight = has_avx2()) {
    const index_t end = largest_vocabulary(bits);
    const auto [least, most] = range_of_ids(ids, n);
    if (least < -1 || static_cast<index_t>(most) >= end)
        throw invalid_input(name, "holds " + std::to_string(least < -1 ? least : most) + ", which " +
                                      std::to_string(bits) + " bits do not: ids lie in [0, " + std::to_string(end - 1) +
                                      "]");
    append_ids(ids, n, bits, stream, have, by_eight);
}

/// Ids [first, first + n) of a stream that holds them.
template <std::integral Id>
void unpack_ids(std::span<const std::byte> stream, index_t first, index_t n, int bits, Id* to,
                bool by_eight = has_avx2()) {
    const auto all = (std::uint64_t{1} << bits) - 1;
    std::size_t at = static_cast<std::size_t>(first) * static_cast<std::size_t>(bits);
    const auto take = [&](std::uint64_t word) {
        const std::uint64_t id = (word >> at % 8) & all;
        at += static_cast<std::size_t>(bits);
        return id == all ? static_cast<Id>(-1) : static_cast<Id>(id);
    };
    index_t i = 0;
    const auto one_by_one = [&](index_t last) {
        for (; i < last && at / 8 + 8 <= stream.size(); ++i) {
            std::uint64_t word;
            std::memcpy(&word, stream.data() + at / 8, 8);
            to[i] = take(word);
        }
        for (; i < last; ++i) { // the last eight bytes
            std::uint64_t word = 0;
            std::memcpy(&word, stream.data() + at / 8, stream.size() - at / 8);
            to[i] = take(word);
        }
    };
    if (by_eight && bits <= most_bits_by_eight) {
        one_by_one(std::min(n, -first & 7));
        if (i < n) {
            const index_t some =
                unpack_by_eight(stream.data() + at / 8, stream.data() + stream.size(), n - i, bits, to + i);
            i += some, at += static_cast<std::size_t>(some) * static_cast<std::size_t>(bits);
        }
    }
    one_by_one(n);
}

} // namespace OPD_ISA
} // namespace detail

} // namespace opd::data
