// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Bytes that a program wrote, damaged by a list of edits.
#pragma once

#include <string>

#include "fuzz/input.hpp"

namespace opd::fuzz {

/// Bytes overwritten, put in, taken out, said twice.
inline void damage(choices& c, std::string& bytes) {
    for (std::int64_t edits = c.below(6); edits > 0 && !bytes.empty(); --edits) {
        const auto at = static_cast<std::size_t>(c.below(static_cast<std::int64_t>(bytes.size())));
        const std::uint64_t number = c.once_in(2) ? c.bytes(8)
                                                  : c.of<std::uint64_t>({0, 1, 2, 255, 0x7fffffff, 0xffffffff, 1u << 20,
                                                                         ~std::uint64_t{0}, std::uint64_t{1} << 63});
        const auto width = static_cast<std::size_t>(c.of({1, 4, 8}));
        const std::string_view word(reinterpret_cast<const char*>(&number), width);
        switch (c.below(4)) {
        case 0:
            bytes.replace(at, width, word);
            break;
        case 1:
            bytes.insert(at, word);
            break;
        case 2:
            bytes.erase(at, static_cast<std::size_t>(c.below(40)));
            break;
        default:
            bytes.insert(at, bytes.substr(at, static_cast<std::size_t>(c.below(40))));
        }
    }
}

/// Numbers changed where they stand: the length stays, so all that follows is still read as what it was. Most edits
/// move a byte by little, since most fields are small numbers that refer to one another.
inline void nudge(choices& c, std::string& bytes) {
    for (std::int64_t edits = 1 + c.below(6); edits > 0 && !bytes.empty(); --edits) {
        const auto at = static_cast<std::size_t>(c.bytes(2) % bytes.size());
        switch (c.below(4)) {
        case 0:
            bytes[at] = static_cast<char>(bytes[at] + c.of({1, -1, 2, -2, 3, 8}));
            break;
        case 1:
            bytes[at] = static_cast<char>(c.of<std::uint64_t>({0, 1, 255, c.bytes(1)}));
            break;
        case 2:
            bytes[at] = static_cast<char>(bytes[at] ^ 1 << c.below(8));
            break;
        default: {
            const auto number =
                c.of<std::uint64_t>({~std::uint64_t{0}, 0, 0x7fffffff, 0xffffffff, 1u << 20, 1ull << 40, 1ull << 62,
                                     (1ull << 63) - 1, 1ull << 63, 0x7ff8ull << 48, 0x7fefull << 48});
            const std::string_view word(reinterpret_cast<const char*>(&number), static_cast<std::size_t>(c.of({8, 4})));
            bytes.replace(at, std::min(word.size(), bytes.size() - at), word.substr(0, bytes.size() - at));
        }
        }
    }
}

} // namespace opd::fuzz
