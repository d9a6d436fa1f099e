// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What a meter says of itself (opd/sched/metrics.hpp), as JSON text: {"name": value, ...}. A double has the fewest
// digits that give it back; NaN and infinities are null, as JSON has none.
#pragma once

#include <charconv>
#include <cmath>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>

namespace opd_c {

class json_visitor {
public:
    template <class T>
    void operator()(std::string_view name, const T& x) {
        text_.append(text_.empty() ? "{" : ", ").append("\"").append(name).append("\": ");
        append(x);
    }
    /// A number, a list or a group that is made already.
    void raw(std::string_view name, const std::string& json) {
        text_.append(text_.empty() ? "{" : ", ").append("\"").append(name).append("\": ").append(json);
    }
    std::string object() const { return text_.empty() ? "{}" : text_ + "}"; }

private:
    template <class T>
    void append(const T& x) {
        if constexpr (requires { x.describe(*this); }) {
            json_visitor group;
            x.describe(group);
            text_ += group.object();
        } else if constexpr (requires { x.has_value(); }) {
            if (x)
                append(*x);
            else
                text_ += "null"; // not known yet
        } else if constexpr (std::is_same_v<T, bool>) {
            text_ += x ? "true" : "false";
        } else if constexpr (std::is_arithmetic_v<T>) {
            if constexpr (std::is_floating_point_v<T>)
                if (!std::isfinite(x)) {
                    text_ += "null";
                    return;
                }
            char digits[64];
            const std::string_view made(digits, std::to_chars(digits, digits + sizeof digits, x).ptr);
            text_ += made;
            if (std::is_floating_point_v<T> && made.find_first_of(".e") == made.npos)
                text_ += ".0"; // it stays a real number
        } else {               // a list
            text_ += "[";
            bool first = true;
            for (const auto& y : x) {
                if (!std::exchange(first, false)) text_ += ", ";
                append(y);
            }
            text_ += "]";
        }
    }
    std::string text_;
};

} // namespace opd_c
