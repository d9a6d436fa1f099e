// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// JSON that a program wrote, damaged by a list of edits.
#pragma once

#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "fuzz/damage.hpp"

namespace opd::fuzz {

/// Values replaced, keys taken out and put in; or, of its text, bytes.
inline std::string damaged_json(choices& c, nlohmann::json j) {
    using nlohmann::json;
    for (std::int64_t edits = c.below(6); edits > 0; --edits) {
        std::vector<json*> all = {&j}; // every value, from the root
        for (std::size_t i = 0; i < all.size(); ++i)
            if (all[i]->is_structured())
                for (auto& inner : *all[i]) all.push_back(&inner);
        json& here = *all[static_cast<std::size_t>(c.below(static_cast<std::int64_t>(all.size())))];
        const json other = *all[static_cast<std::size_t>(c.below(static_cast<std::int64_t>(all.size())))];
        switch (c.below(5)) {
        case 0:
            here = c.of<json>({nullptr, true, 0, -1, 1, 0.5, 1e300, -1e300, 1e-300, std::int64_t{1} << 62,
                               ~std::uint64_t{0}, 2147483648, "", "async", "edf", "mixture", json::array(),
                               json::object()});
            break;
        case 1:
            here = other;
            break;
        case 2:
            if (here.is_object() && !here.empty()) here.erase(here.begin());
            if (here.is_array() && !here.empty()) here.erase(0);
            break;
        case 3:
            if (here.is_object()) here[c.of({"law", "x", "k", "steps", "parts"})] = other;
            if (here.is_array()) here.push_back(other);
            break;
        default:
            if (here.is_number())
                here = static_cast<double>(static_cast<std::int64_t>(c.bytes(3)) - 1000) * c.of({1.0, 0.001});
        }
    }
    std::string text = j.dump(-1, ' ', false, json::error_handler_t::replace);
    if (c.once_in(3)) damage(c, text);
    return text;
}

} // namespace opd::fuzz
