// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Numbers from a command line or a JSON file, of which nothing is known yet.
#pragma once

#include <charconv>
#include <cstdint>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

/// Whether `j` is an integer that T holds. To be asked before get<T>(), which wraps an integer, and whose result is
/// undefined for a number as 1e300.
template <class T>
bool is_integer_of(const nlohmann::json& j) {
    if (j.is_number_unsigned()) return std::in_range<T>(j.get<std::uint64_t>());
    return j.is_number_integer() && std::in_range<T>(j.get<std::int64_t>());
}

/// All of `text` as an integer, in decimal: strtoull takes "-1" for 2^64 - 1, "010" for 8, and clamps what is too
/// large.
template <class T>
std::optional<T> integer_of(std::string_view text) {
    T value{};
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc{} || end != text.data() + text.size()) return std::nullopt;
    return value;
}

/// All of `text` as a finite number.
inline std::optional<double> number_of(std::string_view text) {
    double value{};
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc{} || end != text.data() + text.size() || !(value - value == 0)) return std::nullopt;
    return value;
}

/// "an integer from 0 to 2147483647": for settings of which none may be negative.
template <class T>
std::string integer_range(T most = std::numeric_limits<T>::max()) {
    return "an integer from 0 to " + std::to_string(most);
}

/// The JSON in `text`. Of a number that no double holds the exception says whose it is: "distill.rate: number overflow
/// …".
inline nlohmann::json parse_json(std::string_view text) {
    std::vector<std::string> keys; // to where the parser is; empty: an element of a list
    const auto follow = [&keys](int depth, nlohmann::json::parse_event_t event, nlohmann::json& value) {
        keys.resize(static_cast<std::size_t>(depth));
        if (event == nlohmann::json::parse_event_t::key) keys.back() = value.get<std::string>();
        return true;
    };
    try {
        return nlohmann::json::parse(text, follow);
    } catch (const nlohmann::json::exception& e) {
        std::string why = e.what(), where;
        if (const auto end = why.find("] "); end != std::string::npos) why.erase(0, end + 2); // its own numbers
        if (dynamic_cast<const nlohmann::json::out_of_range*>(&e) != nullptr)
            for (const std::string& key : keys)
                if (!key.empty()) where += (where.empty() ? "" : ".") + key;
        if (why.find("/'") != std::string::npos) why += " (JSON has no comments)";
        throw std::runtime_error(where.empty() ? why : where + ": " + why);
    }
}
