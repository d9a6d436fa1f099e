// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// From the caller's points to a step_cost.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "opd/spec/draft_budget.hpp"
#include "spec.hpp"

namespace opd_c {

inline opd::spec::step_cost cost_of(const std::string& name, std::span<const opd_cost_point> points) {
    std::vector<opd::spec::step_cost::point> to;
    for (const opd_cost_point& p : points) to.push_back({p.rows, p.seconds});
    try {
        return opd::spec::step_cost(std::move(to));
    } catch (const opd::invalid_input& e) {
        again(e, name, e.row);
    }
}

} // namespace opd_c
