// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// UTF-8, step by step (Unicode 15, table 3-7). What is broken is told apart from what is cut off at the end; a broken
// part is a "maximal subpart", which becomes one U+FFFD, as in Rust's from_utf8_lossy.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace trainer {

struct utf8_step {
    enum { whole, broken, cut } kind;
    std::size_t bytes; ///< of the character, or of what is broken or cut
    char32_t code;     ///< of a whole one
};

/// What stands at `at`, which is within `s`.
inline utf8_step utf8_at(std::string_view s, std::size_t at) {
    const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(s[i]); };
    const unsigned first = byte(at);
    if (first < 0x80) return {utf8_step::whole, 1, first};
    if (first < 0xC2 || first > 0xF4) return {utf8_step::broken, 1, 0};
    const std::size_t bytes = first < 0xE0 ? 2 : first < 0xF0 ? 3 : 4;
    char32_t code = first & (0xFFu >> (bytes + 1));
    for (std::size_t i = 1; i < bytes; ++i) {
        if (at + i == s.size()) return {utf8_step::cut, i, 0};
        unsigned least = 0x80, most = 0xBF; // of the second: no overlong form, no surrogate, nothing beyond U+10FFFF
        if (i == 1 && first == 0xE0) least = 0xA0;
        if (i == 1 && first == 0xED) most = 0x9F;
        if (i == 1 && first == 0xF0) least = 0x90;
        if (i == 1 && first == 0xF4) most = 0x8F;
        if (byte(at + i) < least || byte(at + i) > most) return {utf8_step::broken, i, 0};
        code = code << 6 | (byte(at + i) & 0x3Fu);
    }
    return {utf8_step::whole, bytes, code};
}

/// Where the first byte stands that is not UTF-8; npos if there is none.
inline std::size_t not_utf8(std::string_view s) {
    for (std::size_t i = 0; i < s.size();) {
        const utf8_step step = utf8_at(s, i);
        if (step.kind != utf8_step::whole) return i;
        i += step.bytes;
    }
    return std::string_view::npos;
}

/// The same text, with U+FFFD for each part that is not UTF-8. `cut`, if given, is where what a cut character left at
/// the end begins; that part is then left out.
inline std::string utf8_repaired(std::string_view s, std::size_t* cut = nullptr) {
    std::string r;
    r.reserve(s.size());
    if (cut) *cut = s.size();
    for (std::size_t i = 0; i < s.size();) {
        const utf8_step step = utf8_at(s, i);
        if (step.kind == utf8_step::cut && cut) {
            *cut = i;
            return r;
        }
        step.kind == utf8_step::whole ? r.append(s, i, step.bytes) : r.append("\xEF\xBF\xBD");
        i += step.bytes;
    }
    return r;
}

/// Unicode's White_Space.
inline bool is_white_space(char32_t c) {
    return (c >= 9 && c <= 13) || c == ' ' || c == 0x85 || c == 0xA0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200A) ||
           c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F || c == 0x3000;
}

/// Where the last character of `s` begins, which is not empty and UTF-8.
inline std::size_t last_character(std::string_view s) {
    std::size_t at = s.size() - 1;
    while (at > 0 && (static_cast<unsigned char>(s[at]) & 0xC0u) == 0x80) --at;
    return at;
}

} // namespace trainer
