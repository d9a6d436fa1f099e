// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A writer of JSON text (RFC 8259) for the metrics and the trace: objects and arrays nested to any depth, numbers by
// std::to_chars (the shortest text that reads back as the same double), strings escaped. What JSON has no word for, NaN
// and infinities, becomes null; a byte that is not UTF-8 becomes U+FFFD, so that the text is valid whatever comes in.
#pragma once

#include <charconv>
#include <concepts>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>

#include "opd/config.hpp"

namespace opd::sched {

namespace detail {

/// Decided by the bits: under -ffast-math a compiler may assume that there are no NaNs.
inline bool finite(double x) { return ((opd::detail::bit_cast<std::uint64_t>(x) >> 52) & 0x7ffu) != 0x7ffu; }

/// Bytes of the UTF-8 character at the start of `text`, 0 if it is none (overlong forms and surrogates are none).
inline std::size_t utf8_length(std::string_view text) {
    const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
    const auto continues = [&](std::size_t i) { return i < text.size() && (byte(i) & 0xc0u) == 0x80u; };
    const unsigned first = byte(0);
    if (first < 0x80u) return 1;
    if (first >= 0xc2u && first <= 0xdfu) return continues(1) ? 2 : 0;
    if (first >= 0xe0u && first <= 0xefu) {
        if (!continues(1) || !continues(2)) return 0;
        if (first == 0xe0u && byte(1) < 0xa0u) return 0;
        if (first == 0xedu && byte(1) > 0x9fu) return 0;
        return 3;
    }
    if (first >= 0xf0u && first <= 0xf4u) {
        if (!continues(1) || !continues(2) || !continues(3)) return 0;
        if (first == 0xf0u && byte(1) < 0x90u) return 0;
        if (first == 0xf4u && byte(1) > 0x8fu) return 0;
        return 4;
    }
    return 0;
}

/// Appends `text` as a JSON string with its quotes.
inline void append_json_string(std::string& out, std::string_view text) {
    constexpr char digits[] = "0123456789abcdef";
    out += '"';
    while (!text.empty()) {
        const std::size_t length = utf8_length(text);
        const char c = text.front();
        if (length == 0) {
            out += "\xef\xbf\xbd";
        } else if (c == '"' || c == '\\') {
            out += '\\';
            out += c;
        } else if (static_cast<unsigned char>(c) < 0x20u) {
            switch (c) {
            case '\n':
                out += "\\n";
                break;
            case '\t':
                out += "\\t";
                break;
            case '\r':
                out += "\\r";
                break;
            default:
                out += "\\u00";
                out += digits[static_cast<unsigned char>(c) >> 4];
                out += digits[static_cast<unsigned char>(c) & 15u];
            }
        } else {
            out.append(text.substr(0, length));
        }
        text.remove_prefix(length == 0 ? 1 : length);
    }
    out += '"';
}

/// Appends a number; `decimals` >= 0 rounds to that many places.
inline void append_json_number(std::string& out, double x, int decimals = -1) {
    if (!finite(x)) {
        out += "null";
        return;
    }
    char text[400]; // the largest double has 309 digits before the point
    const auto end = decimals < 0 ? std::to_chars(text, text + sizeof text, x)
                                  : std::to_chars(text, text + sizeof text, x, std::chars_format::fixed, decimals);
    out.append(text, end.ec == std::errc() ? end.ptr : text);
}

template <std::integral Int>
void append_json_number(std::string& out, Int x) {
    char text[24];
    out.append(text, std::to_chars(text, text + sizeof text, x).ptr);
}

} // namespace detail

/// Builds one JSON value from left to right; commas and quotes are its own. `key` belongs inside an object only, before
/// each value; `close` ends the innermost object or array.
class json_writer {
public:
    json_writer& object() { return open('{', '}'); }
    json_writer& array() { return open('[', ']'); }
    json_writer& close() {
        text_ += closers_.back();
        closers_.pop_back();
        comma_ = true;
        return *this;
    }
    json_writer& key(std::string_view name) {
        separate();
        detail::append_json_string(text_, name);
        text_ += ':';
        comma_ = false;
        return *this;
    }

    json_writer& value(std::string_view text) {
        separate();
        detail::append_json_string(text_, text);
        return done();
    }
    json_writer& value(const char* text) { return value(std::string_view(text)); }
    json_writer& value(const std::string& text) { return value(std::string_view(text)); }
    template <std::floating_point Float>
    json_writer& value(Float x) {
        separate();
        detail::append_json_number(text_, static_cast<double>(x));
        return done();
    }
    template <std::integral Int>
    json_writer& value(Int x) {
        separate();
        if constexpr (std::same_as<Int, bool>)
            text_ += x ? "true" : "false";
        else
            detail::append_json_number(text_, x);
        return done();
    }
    template <class T>
    json_writer& value(const std::optional<T>& x) {
        return x ? value(*x) : null();
    }
    json_writer& null() {
        separate();
        text_ += "null";
        return done();
    }

    template <class T>
    json_writer& field(std::string_view name, const T& x) {
        return key(name).value(x);
    }

    const std::string& text() const { return text_; }

private:
    json_writer& open(char opener, char closer) {
        separate();
        text_ += opener;
        closers_ += closer;
        comma_ = false;
        return *this;
    }
    void separate() {
        if (comma_) text_ += ',';
    }
    json_writer& done() {
        comma_ = true;
        return *this;
    }

    std::string text_, closers_;
    bool comma_ = false;
};

} // namespace opd::sched
