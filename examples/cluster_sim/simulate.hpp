// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// One schedule of a configuration, in virtual time.
#pragma once

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "config.hpp"
#include "opd/sched/trace.hpp"
#include "outcome.hpp"

namespace cluster_sim {

/// Runs schedule `e`; records spans into `recorded` if that is not null.
outcome simulate(const config& c, const entry& e, opd::sched::trace* recorded = nullptr);

/// The sensitivity study of the configuration; `progress` is called before each run with the share that is done.
template <class F>
std::vector<sensitivity_row> study(const config& c, F&& progress) {
    std::vector<sensitivity_row> rows;
    const std::size_t total = c.sensitivity.tails.size() * c.sensitivity.learner_scales.size();
    for (const config::tail& tail : c.sensitivity.tails)
        for (const double scale : c.sensitivity.learner_scales) {
            progress(static_cast<double>(rows.size()) / static_cast<double>(total));
            config changed = c;
            changed.lengths.response = tail_of(c.lengths.response, tail);
            changed.learner.job.fixed *= scale;
            changed.learner.job.per_item *= scale;
            changed.learner.job.per_token *= scale;
            sensitivity_row row;
            row.tail = tail;
            row.learner_scale = scale;
            row.longest = quantile(changed.lengths.response, 1 - 1.0 / static_cast<double>(c.batch)) /
                          mean(changed.lengths.response);
            const outcome first = simulate(changed, c.schedules[0]);
            row.rollout_over_learner = first.busy[2] > 0 ? first.busy[0] / first.busy[2] : 0;
            double best = 0;
            for (const entry& e : c.schedules)
                if (is_synchronous(e)) best = std::max(best, simulate(changed, e).throughput);
            for (const std::string& name : c.sensitivity.schedules)
                for (const entry& e : c.schedules)
                    if (e.name == name) {
                        const outcome o = simulate(changed, e);
                        row.speedups.push_back(first.throughput > 0 ? o.throughput / first.throughput : 0);
                        if (best > 0) row.fair.push_back(o.throughput / best);
                    }
            rows.push_back(std::move(row));
        }
    return rows;
}

} // namespace cluster_sim
