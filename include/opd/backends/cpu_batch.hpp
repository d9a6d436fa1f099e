// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A checked call on the CPU: rows (detail/rows.hpp) in groups over the thread team, one factor a row, one partial result a group,
// merged in order. A group depends on the number of rows alone, so bits do not depend on threads.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>

#include "opd/backends/gathered_logits.hpp"
#include "opd/backends/logit_blocks.hpp"
#include "opd/batch.hpp"
#include "opd/config.hpp"
#include "opd/detail/lane_engine.hpp"
#include "opd/detail/logit_rows.hpp"
#include "opd/detail/row_kinds.hpp"
#include "opd/detail/rows.hpp"
#include "opd/detail/tiles.hpp"
#include "opd/diagnostics.hpp"
#include "opd/evaluate.hpp"
#include "opd/reduction.hpp"
#include "opd/score.hpp"
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
    index_t block = 0;      ///< rows whose logits are there together, a group each; 0: they are not made here
    std::size_t blocks = 0; ///< bytes of these

    /// `at_once`: rows in hand together, whose states a worker keeps. `one_by_one`: a group a row, so that they may be cut anywhere.
    host_plan(index_t rows_, std::size_t scratch_, index_t at_once_, std::size_t state, bool one_by_one = false)
        : rows(rows_), at_once(at_once_), group(one_by_one ? 1 : std::max<index_t>(1, (rows_ + 255) / 256)),
          groups((rows_ + group - 1) / group), factors(aligned(sizeof(double) * std::size_t(rows_))),
          partials(aligned(sizeof(result) * std::size_t(groups))), scratch_of_row(aligned(scratch_)),
          states(at_once > 1 ? aligned(state * std::size_t(at_once)) : 0),
          scratch(states + scratch_of_row * std::size_t(at_once)) {}
    std::size_t bytes(int workers) const { return factors + partials + blocks + scratch * std::size_t(workers); }
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

/// f(source) for each side of a job whose logits are made here.
template <class Job, class Function>
constexpr void each_made(Job& job, Function&& f) {
    const auto visit = [&](auto& source) {
        if constexpr (in_blocks<std::remove_cvref_t<decltype(source)>>) f(source);
    };
    if constexpr (requires { job.student; })
        visit(job.student), visit(job.teacher);
    else if constexpr (requires { job.z.source; })
        visit(job.z.source);
}

/// Whether a job's rows ask for the logits of few ids, which are made one by one, and their gradients go back from a block.
template <class Job>
inline constexpr bool gathers = false;
template <class Student, class Teacher, class Estimator>
inline constexpr bool gathers<row_job<Student, Teacher, Estimator, space::host>> = in_blocks<Student> &&
                                                                                   (has_kept_sets<Teacher> ||
                                                                                    renormalised_estimator<Estimator>);

/// Whether a job's logits are made in blocks, of either side.
template <class Job>
inline constexpr bool has_blocks = false;
template <class Student, class Teacher, class Estimator>
inline constexpr bool has_blocks<row_job<Student, Teacher, Estimator, space::host>> =
    (in_blocks<Student> || in_blocks<Teacher>)&&!gathers<row_job<Student, Teacher, Estimator, space::host>>;
template <plain_job Job>
    requires requires { typename decltype(Job::z)::source_type; }
inline constexpr bool has_blocks<Job> = in_blocks<typename decltype(Job::z)::source_type>;
template <class Z, class Cache, class L, class Source> // whose rows make those of their sets
inline constexpr bool has_blocks<kept_logp_job<Z, Cache, L, space::host, rows_of_source<Source>>> = false;

/// Blocks as large as every side's budget allows.
template <class Job>
void plan_blocks(const Job& job, host_plan& plan) {
    plan.block = std::max<index_t>(plan.rows, 1);
    each_made(job, [&](const auto& side) {
        const std::size_t row = std::max<std::size_t>(1, side.bytes_of_row());
        plan.block = std::min(plan.block, static_cast<index_t>(side.budget / row));
    });
    plan.block = std::max<index_t>(plan.block, 1);
    each_made(job, [&](const auto& side) { plan.blocks += block_memory(side, plan.block).bytes(); });
}
/// Blocks of rows with the gradients of `width` ids each.
template <class Student>
void plan_gathered(const Student& student, index_t width, host_plan& plan) {
    const auto row = sizeof(float) * static_cast<std::size_t>(student.has_gradient() ? width : 0);
    plan.block = std::max<index_t>(plan.rows, 1);
    if (row > 0) plan.block = std::clamp<index_t>(static_cast<index_t>(student.budget / row), 1, plan.block);
    plan.blocks = host_plan::aligned(static_cast<std::size_t>(plan.block) * row);
}

template <has_lanes Job>
host_plan host_plan_of(const Job& job) {
    const host_frame frame = host_frame_of(job);
    const auto rows = rows_of<lane_engine>(job, frame);
    host_plan plan{frame.rows, rows.scratch_bytes(), at_once_of(static_cast<const Job*>(nullptr)),
                   sizeof(typename decltype(rows_of<lane_engine>(job, frame))::state_type),
                   has_blocks<Job> || gathers<Job>};
    if constexpr (has_blocks<Job>) plan_blocks(job, plan);
    if constexpr (gathers<Job>) plan_gathered(job.student, rows.width(), plan);
    return plan;
}

/// Rows of the groups [first, last), over the team.
template <class Job>
void run_groups(const Job& job, const host_frame& frame, const host_plan& plan, index_t first, index_t last,
                thread_team& team, std::byte* scratch) {
    const auto rows = rows_of<lane_engine>(job, frame);
    using state_type = typename decltype(rows_of<lane_engine>(job, frame))::state_type;
    constexpr index_t at_once = at_once_of(static_cast<const Job*>(nullptr));
    static_assert(at_once <= team_of_rows<state_type>::most, "opd: a source's rows_at_once is at most 64");
    const auto of_worker = [&](int worker) { return scratch + std::size_t(worker) * plan.scratch; };
    if constexpr (at_once > 1) {
        const index_t unit = (at_once + plan.group - 1) / plan.group * plan.group; // whole groups
        const index_t begin = first * plan.group, end = std::min(last * plan.group, plan.rows);
        team.run((end - begin + unit - 1) / unit, [&](index_t u, int worker) {
            std::byte* const mine = of_worker(worker);
            run_rows_together(rows, begin + u * unit, std::min(begin + (u + 1) * unit, end),
                              reinterpret_cast<state_type*>(mine), at_once, mine + plan.states, plan.scratch_of_row);
        });
    } else {
        team.run(last - first, [&](index_t group, int worker) {
            team_of_one<state_type> one;
            run_rows(rows, first + group, one, of_worker(worker));
        });
    }
}

/// Rows whose logits are made here: a block is filled, its rows are run, and what they say goes back.
template <class Job>
void run_blocks(Job job, host_frame frame, const host_plan& plan, thread_team& team, std::byte* scratch,
                std::byte* memory) {
    std::byte* rest = nullptr; // of what goes back
    each_made(job, [&](auto& side) {
        const block_memory sizes(side, plan.block);
        auto* const gradient = memory + (sizes.gradient > 0 ? sizes.logits : 0);
        side.block = {reinterpret_cast<float*>(memory), reinterpret_cast<float*>(gradient), 0};
        if constexpr (requires { side.dx; }) {
            rest = memory + sizes.logits + sizes.gradient;
            frame.env.beta = 0; // of the block; drain() has the caller's
        }
        memory += sizes.bytes();
    });
    for (index_t begin = 0; begin == 0 || begin < plan.rows;
         begin += plan.block) { // without rows a head's gradient is 0 all the same
        const index_t end = std::min(begin + plan.block, plan.rows);
        each_made(job, [&](auto& side) {
            side.block.first = begin;
            fill(side, begin, end, frame.env.mask, team);
        });
        run_groups(job, frame, plan, begin, end, team, scratch);
        if constexpr (requires { job.student; })
            if constexpr (in_blocks<decltype(job.student)>)
                if (job.student.has_gradient())
                    drain(job.student, begin, end, is_lumped<decltype(job.teacher)> ? job.student.vocab() : job.vocab,
                          job.env.beta, begin == 0, team, rest);
    }
}

/// Rows that have the logits of few ids made: a block of them is run, and their gradients go back.
template <class Job>
void run_gathered(Job job, host_frame frame, const host_plan& plan, thread_team& team, std::byte* scratch,
                  std::byte* memory) {
    job.student.block.gradient = reinterpret_cast<float*>(memory);
    frame.env.beta = 0; // of the block; drain_gathered() has the caller's
    for (index_t begin = 0; begin == 0 || begin < plan.rows; begin += plan.block) {
        const index_t end = std::min(begin + plan.block, plan.rows);
        job.student.block.first = begin;
        run_groups(job, frame, plan, begin, end, team, scratch);
        if (job.student.has_gradient())
            drain_gathered(job.student, rows_of<lane_engine>(job, frame), begin, end, job.env.beta, begin == 0, team);
    }
}

/// Runs a job. `memory` holds plan.bytes(team.size()).
template <has_lanes Job>
result run_on_host(const Job& job, const host_plan& plan, thread_team& team, std::span<std::byte> memory) {
    auto* factors = reinterpret_cast<double*>(memory.data());
    auto* partials = reinterpret_cast<result*>(memory.data() + plan.factors);
    std::byte* blocks = memory.data() + plan.factors + plan.partials;
    std::byte* scratch = blocks + plan.blocks;
    host_frame frame = host_frame_of(job);
    row_factors(frame.env, plan.rows, factors);
    frame.group = plan.group, frame.factors = factors, frame.partials = partials;
    if constexpr (has_blocks<Job>)
        run_blocks(job, frame, plan, team, scratch, blocks);
    else if constexpr (gathers<Job>)
        run_gathered(job, frame, plan, team, scratch, blocks);
    else
        run_groups(job, frame, plan, 0, plan.groups, team, scratch);
    result all;
    for (index_t g = 0; g < plan.groups; ++g) {
        all.loss += partials[g].loss;
        all.diagnostics.merge(partials[g].diagnostics);
    }
    return all;
}

} // namespace OPD_ISA
} // namespace opd::detail
