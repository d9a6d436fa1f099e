// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Ids in fewer bits than their type has: 17 hold a vocabulary of 131,071, 18 one of 262,143.
//
//   id i stands in bits [i·bits, (i+1)·bits) of the stream, the lowest bit first; bit b is bit b mod 8 of byte b / 8
//   -1, an unused slot, is all ones: so ids lie in [0, 2^bits - 2]
//
// In numpy: np.unpackbits(x, bitorder="little")[:n * bits].reshape(n, bits) @ (1 << np.arange(bits)).
#pragma once

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "opd/config.hpp"
#include "opd/error.hpp"

namespace opd::data {

inline constexpr int least_id_bits = 8, most_id_bits = 31;

/// Bytes of n ids, and whether there are so many at all.
constexpr std::size_t packed_bytes(index_t n, int bits) {
    return (static_cast<std::size_t>(n) * static_cast<std::size_t>(bits) + 7) / 8;
}

/// The most ids that a vocabulary of `bits` has; -1 takes one number.
constexpr index_t largest_vocabulary(int bits) { return (index_t{1} << bits) - 1; }

namespace detail {
inline namespace OPD_ISA {

/// Appends n ids to a stream of `have`. Throws invalid_input that names `name`, before anything is written, where one
/// does not fit.
template <std::integral Id>
void pack_ids(const char* name, const Id* ids, index_t n, int bits, std::vector<std::byte>& stream, index_t have) {
    const auto all = (std::uint64_t{1} << bits) - 1;
    for (index_t i = 0; i < n; ++i)
        if (const auto id = static_cast<index_t>(ids[i]); id < -1 || id >= static_cast<index_t>(all))
            throw invalid_input(name, "holds " + std::to_string(id) + ", which " + std::to_string(bits) +
                                          " bits do not: ids lie in [0, " + std::to_string(all - 1) + "]");
    std::size_t at = static_cast<std::size_t>(have) * static_cast<std::size_t>(bits);
    auto filled = static_cast<int>(at % 8); // bits of the last byte that are taken; later, of `word`
    std::uint64_t word = filled > 0 ? std::to_integer<std::uint64_t>(stream[at / 8]) : 0;
    stream.resize(packed_bytes(have + n, bits));
    std::byte* to = stream.data() + at / 8;
    for (index_t i = 0; i < n; ++i) {
        word |= (static_cast<std::uint64_t>(static_cast<index_t>(ids[i])) & all) << filled;
        filled += bits;
        if (filled < 32) continue;
        const auto four = static_cast<std::uint32_t>(word);
        std::memcpy(to, &four, 4);
        to += 4, filled -= 32, word >>= 32;
    }
    for (; filled > 0; filled -= 8, word >>= 8) *to++ = static_cast<std::byte>(word & 255u);
}

/// Ids [first, first + n) of a stream that holds them.
template <std::integral Id>
void unpack_ids(std::span<const std::byte> stream, index_t first, index_t n, int bits, Id* to) {
    const auto all = (std::uint64_t{1} << bits) - 1;
    std::size_t at = static_cast<std::size_t>(first) * static_cast<std::size_t>(bits);
    const auto take = [&](std::uint64_t word) {
        const std::uint64_t id = (word >> at % 8) & all;
        at += static_cast<std::size_t>(bits);
        return id == all ? static_cast<Id>(-1) : static_cast<Id>(id);
    };
    index_t i = 0;
    for (; i < n && at / 8 + 8 <= stream.size(); ++i) {
        std::uint64_t word;
        std::memcpy(&word, stream.data() + at / 8, 8);
        to[i] = take(word);
    }
    for (; i < n; ++i) { // the last eight bytes
        std::uint64_t word = 0;
        std::memcpy(&word, stream.data() + at / 8, stream.size() - at / 8);
        to[i] = take(word);
    }
}

} // namespace OPD_ISA
} // namespace detail

} // namespace opd::data
