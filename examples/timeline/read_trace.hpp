// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A Chrome trace that opd wrote, as the trace that it came from.
#pragma once

#include <cstdint>
#include <string>

#include <nlohmann/json.hpp>

#include "numbers.hpp"
#include "opd/error.hpp"
#include "opd/sched/trace.hpp"

/// The events that a picture shows. Throws where `whole` is no such trace.
inline opd::sched::trace recorded_by(const nlohmann::json& whole) {
    opd::sched::trace recorded;
    for (const auto& e : whole.at("traceEvents")) {
        const std::string phase = e.at("ph");
        if (phase != "X" && phase != "C" && phase != "i") continue;
        if (!is_integer_of<std::int32_t>(e.at("pid")) || !is_integer_of<std::int64_t>(e.at("tid")))
            throw opd::error("an event's pid or tid is no integer");
        const opd::sched::track where{e.at("pid").get<std::int32_t>(), e.at("tid").get<std::int64_t>()};
        const std::string name = e.at("name");
        const double begin = e.at("ts").get<double>() * 1e-6;
        if (phase == "X")
            recorded.span(where, name, begin, begin + e.at("dur").get<double>() * 1e-6);
        else if (phase == "i")
            recorded.instant(where, name, begin);
        else
            for (const auto& [series, value] : e.at("args").items()) // a curve each
                recorded.counter(e.at("args").size() == 1 ? name : name + " " + series, begin,
                                 {{"n", value.get<double>()}});
    }
    return recorded;
}
