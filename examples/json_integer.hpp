// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#pragma once

#include <cstdint>
#include <utility>

#include <nlohmann/json.hpp>

/// Whether `j` is an integer that T holds. To be asked before get<T>(), which wraps an integer, and whose result is undefined
/// for a number as 1e300.
template <class T>
bool is_integer_of(const nlohmann::json& j) {
    if (j.is_number_unsigned()) return std::in_range<T>(j.get<std::uint64_t>());
    return j.is_number_integer() && std::in_range<T>(j.get<std::int64_t>());
}
