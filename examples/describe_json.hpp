// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What a meter says of itself (opd/sched/metrics.hpp), as JSON.
#pragma once

#include <utility>

#include <nlohmann/json.hpp>

namespace examples {

class json_visitor {
public:
    nlohmann::ordered_json object = nlohmann::ordered_json::object();

    template <class T>
    void operator()(const char* name, const T& x) {
        if constexpr (requires { x.describe(*this); }) {
            json_visitor group;
            x.describe(group);
            object[name] = std::move(group.object);
        } else if constexpr (requires { x.has_value(); }) {
            object[name] = x ? nlohmann::ordered_json(*x) : nullptr; // not known yet
        } else {
            object[name] = x; // dump() writes NaN and infinities as null
        }
    }
};

template <class T>
nlohmann::ordered_json described(const T& x) {
    json_visitor visit;
    x.describe(visit);
    return std::move(visit.object);
}

} // namespace examples
