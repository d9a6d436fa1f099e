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
#include "opd/detail/lane_engine.hpp"
#include "opd/detail/row_kinds.hpp"
#include "opd/detail/rows.hpp"
#include "opd/detail/tiles.hpp"
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
    index_t rows, at_once, group, groups;
    std::size_t factors, partials, scratch_of_row, states, scratch; ///< bytes; scratch is per worker

    /// `at_once`: rows in hand together, whose states a worker keeps.
    host_plan(index_t rows_, std::size_t scratch_, index_t at_once_, std::size_t state)
        : rows(rows_), at_once(at_once_), group(std::max<index_t>(1, (rows_ + 255) / 256)),
          groups((rows_ + group - 1) / group), factors(aligned(sizeof(double) * std::size_t(rows_))),
          partials(aligned(sizeof(result) * std::size_t(groups))), scratch_of_row(aligned(scratch_)),
          states(at_once > 1 ? aligned(state * std::size_t(at_once)) : 0),
          scratch(states + scratch_of_row * std::size_t(at_once)) {}
    std::size_t bytes(int workers) const { return factors + partials + scratch * std::size_t(workers); }
    static constexpr std::size_t aligned(std::size_t n) { return (n + 63) / 64 * 64; }
};

template <class Student, class Teacher, class Estimator>
host_frame host_frame_of(const row_job<Student, Teacher, Estimator, space::host>& job) {
    return {job.env, job.rows};
}
template <plain_job Job>
    requires(Job::memory_space == space::host)
host_frame host_frame_of(const Job& job) { return {job.as_env(), job.row_count()}; }

/// Whether the CPU has rows for a job.
template <class Job>
concept has_lanes = requires(const Job& job) {
    rows_of<lane_engine>(job, host_frame_of(job));
};

/// Rows that a job's sources want to be visited together.
template <class Student, class Teacher, class Estimator>
constexpr index_t at_once_of(const row_job<Student, Teacher, Estimator, space::host>*) {
    return std::max(rows_at_once<Student>(), rows_at_once<Teacher>());
}
template <plain_job Job>
constexpr index_t at_once_of(const Job*) {
    return 1;
}

template <has_lanes Job>
host_plan host_plan_of(const Job& job) {
    const host_frame frame = host_frame_of(job);
    const auto rows = rows_of<lane_engine>(job, frame);
    return {frame.rows, rows.scratch_bytes(), at_once_of(static_cast<const Job*>(nullptr)),
            sizeof(typename decltype(rows_of<lane_engine>(job, frame))::state_type)};
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
    using state_type = typename decltype(rows_of<lane_engine>(job, frame))::state_type;
    constexpr index_t at_once = at_once_of(static_cast<const Job*>(nullptr));
    static_assert(at_once <= team_of_rows<state_type>::most, "opd: a source's rows_at_once is at most 64");
    const auto of_worker = [&](int worker) { return scratch + std::size_t(worker) * plan.scratch; };
    if constexpr (at_once > 1) {
        const index_t unit = (at_once + plan.group - 1) / plan.group * plan.group; // whole groups
        team.run((plan.rows + unit - 1) / unit, [&](index_t u, int worker) {
            std::byte* const mine = of_worker(worker);
            run_rows_together(rows, u * unit, std::min((u + 1) * unit, plan.rows), reinterpret_cast<state_type*>(mine),
                              at_once, mine + plan.states, plan.scratch_of_row);
        });
    } else {
        team.run(plan.groups, [&](index_t group, int worker) {
            team_of_one<state_type> one;
            run_rows(rows, group, one, of_worker(worker));
        });
    }
    result all;
    for (index_t g = 0; g < plan.groups; ++g) {
        all.loss += partials[g].loss;
        all.diagnostics.merge(partials[g].diagnostics);
    }
    return all;
}

} // namespace OPD_ISA
} // namespace opd::detail
