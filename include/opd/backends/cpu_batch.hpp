// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A checked call on the CPU: rows (detail/rows.hpp) in groups over the thread team, one factor a row, one partial result a group,
// merged in order. A group depends on the number of rows alone, so bits do not depend on threads.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>

#include "opd/batch.hpp"
#include "opd/config.hpp"
#include "opd/detail/entry_rows.hpp"
#include "opd/detail/lane_engine.hpp"
#include "opd/detail/rows.hpp"
#include "opd/diagnostics.hpp"
#include "opd/evaluate.hpp"
#include "opd/reduction.hpp"
#include "opd/threads.hpp"

namespace opd::detail {
inline namespace OPD_ISA {

struct host_frame {
    opd::env env = {};
    index_t rows = 0;
    index_t group = 1;
    const double* factors = nullptr; ///< (rows)
    result* partials = nullptr;      ///< one a group

    double factor(index_t r) const { return factors[r]; }
};

/// How a batch of rows is cut and what it needs. 256 groups keep every core busy to the end.
struct host_plan {
    index_t rows, group, groups;
    std::size_t factors, partials, scratch; ///< bytes; scratch is per worker

    host_plan(index_t rows_, std::size_t scratch_)
        : rows(rows_), group(std::max<index_t>(1, (rows_ + 255) / 256)), groups((rows_ + group - 1) / group),
          factors(aligned(sizeof(double) * std::size_t(rows_))),
          partials(aligned(sizeof(result) * std::size_t(groups))), scratch(aligned(scratch_)) {}
    std::size_t bytes(int workers) const { return factors + partials + scratch * std::size_t(workers); }
    static constexpr std::size_t aligned(std::size_t n) { return (n + 63) / 64 * 64; }
};

template <class Student, class Teacher, class Estimator>
host_frame host_frame_of(const row_job<Student, Teacher, Estimator, space::host>& job) {
    return {job.env, job.rows};
}
template <class Z, class Id, class L>
host_frame host_frame_of(const token_logp_job<Z, Id, L>& job) {
    env e;
    e.reduction = reduce::sum;
    e.mask = job.mask;
    e.lse = job.lse;
    return {e, job.z.rows};
}

/// Whether the CPU has rows for a job.
template <class Job>
concept has_lanes = requires(const Job& job) {
    rows_of<lane_engine>(job, host_frame_of(job));
};

template <has_lanes Job>
host_plan host_plan_of(const Job& job) {
    const host_frame frame = host_frame_of(job);
    return {frame.rows, rows_of<lane_engine>(job, frame).scratch_bytes()};
}

/// Runs a job. `memory` holds plan.bytes(team.size()).
template <has_lanes Job>
result run_on_host(const Job& job, const host_plan& plan, thread_team& team, std::span<std::byte> memory) {
    auto* factors = reinterpret_cast<double*>(memory.data());
    auto* partials = reinterpret_cast<result*>(memory.data() + plan.factors);
    std::byte* scratch = memory.data() + plan.factors + plan.partials;
    host_frame frame = host_frame_of(job);
    row_factors(frame.env, plan.rows, factors);
    frame.group = plan.group, frame.factors = factors, frame.partials = partials;
    const auto rows = rows_of<lane_engine>(job, frame);
    team.run(plan.groups, [&](index_t group, int worker) {
        team_of_one<typename decltype(rows_of<lane_engine>(job, frame))::state_type> one;
        run_rows(rows, group, one, scratch + std::size_t(worker) * plan.scratch);
    });
    result all;
    for (index_t g = 0; g < plan.groups; ++g) {
        all.loss += partials[g].loss;
        all.diagnostics.merge(partials[g].diagnostics);
    }
    return all;
}

} // namespace OPD_ISA
} // namespace opd::detail
