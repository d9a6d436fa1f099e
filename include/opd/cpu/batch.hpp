// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A checked call on the CPU: rows (rows/rows.hpp) in groups over the thread team, one factor a row, one partial
// result a group, merged in order. A group depends on the number of rows alone, so bits do not depend on threads.
#pragma once

#include <algorithm>
#include <cstddef>
#include <new>
#include <span>
#include <string>
#include <type_traits>
#include <utility>

#include "opd/batch.hpp"
#include "opd/config.hpp"
#include "opd/cpu/dense_machine.hpp"
#include "opd/cpu/lane_engine.hpp"
#include "opd/diagnostics.hpp"
#include "opd/evaluate.hpp"
#include "opd/logits/block_sides.hpp"
#include "opd/logits/gathered_logits.hpp"
#include "opd/logits/logit_blocks.hpp"
#include "opd/logits/logit_rows.hpp"
#include "opd/logits/logit_tiles.hpp"
#include "opd/logits/makers.hpp"
#include "opd/logits/planner.hpp"
#include "opd/reduction.hpp"
#include "opd/rows/row_kinds.hpp"
#include "opd/rows/rows.hpp"
#include "opd/rows/tiles.hpp"
#include "opd/score.hpp"
#include "opd/source.hpp"
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
    index_t block = 0;      ///< rows whose logits are there together, a group each; 0: they are not made here
    index_t tile = 0;       ///< ids of them that are; 0: all of the vocabulary
    std::size_t blocks = 0; ///< bytes of these

    /// `one_by_one`: a group a row, so that they may be cut anywhere.
    host_plan(index_t rows_, std::size_t scratch_, bool one_by_one = false)
        : rows(rows_), group(one_by_one ? 1 : std::max<index_t>(1, (rows_ + 255) / 256)),
          groups((rows_ + group - 1) / group), factors(aligned(sizeof(double) * std::size_t(rows_))),
          partials(aligned(sizeof(result) * std::size_t(groups))), scratch(aligned(scratch_)) {}
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

template <class Estimator>
inline constexpr bool is_renormalised =
    renormalised_estimator<Estimator> || std::is_same_v<Estimator, renormalised_formula>;
/// Whether a job's rows ask for the logits of few ids, which are made one by one, and their gradients go back from a
/// block.
template <class Job>
inline constexpr bool gathers = false;
template <class Student, class Teacher, class Estimator>
inline constexpr bool gathers<row_job<Student, Teacher, Estimator, space::host>> = in_blocks<Student> &&
                                                                                   (has_kept_sets<Teacher> ||
                                                                                    is_renormalised<Estimator>);

/// Whether a job's logits are made in blocks, of either side.
template <class Job>
inline constexpr bool has_blocks = false;
template <class Student, class Teacher, class Estimator>
inline constexpr bool has_blocks<row_job<Student, Teacher, Estimator, space::host>> =
    (in_blocks<Student> || in_blocks<Teacher>)&&!gathers<row_job<Student, Teacher, Estimator, space::host>>;
template <plain_job Job>
    requires requires { typename decltype(Job::z)::source_type; }
inline constexpr bool has_blocks<Job> = in_blocks<typename decltype(Job::z)::source_type>;
template <class Z, class Cache, class L, class Source>
inline constexpr bool has_blocks<kept_logp_job<Z, Cache, L, space::host, rows_of_source<Source>>> = false;

/// Whether a job without a gradient asks for the logits of few ids.
template <class Job>
inline constexpr bool makes_sets = false;
template <class Z, class Cache, class L, class Source>
inline constexpr bool makes_sets<kept_logp_job<Z, Cache, L, space::host, rows_of_source<Source>>> = in_blocks<Source>;

/// Whether a job's logits may be made a tile at a time: its rows read them in order alone, and neither side is a
/// source of yours that makes its tiles in scratch, for which a row must be one thread's until it is done.
template <class Job>
inline constexpr bool may_tile = false;
template <class Student, class Teacher, class Estimator>
inline constexpr bool may_tile<row_job<Student, Teacher, Estimator, space::host>> =
    (divergence<Estimator> || is_any_formula<Estimator>)&&Teacher::kind == cache_kind::dense && !is_lumped<Teacher> &&
    !has_scratch<Student> && !has_scratch<Teacher> &&
    !fills_rows<Teacher> && has_blocks<row_job<Student, Teacher, Estimator, space::host>>;

/// A job as its rows see it; logits that are made here have no memory yet.
template <class Job>
decltype(auto) job_of_rows(const Job& job) {
    if constexpr (gathers<Job> || makes_sets<Job>) {
        return with_made(job,
                         [](const auto& side) { return gathered_side<std::remove_cvref_t<decltype(side)>>{side}; });
    } else if constexpr (has_blocks<Job>) {
        carver nowhere;
        return with_made(job,
                         [&](const auto& side) { return rows_of_maker<may_tile<Job>>(maker(side, 0, 0, nowhere)); });
    } else {
        return (job);
    }
}

/// Jobs that run as one of any divergence: as_run().
template <class Job>
inline constexpr bool one_for_all = false;
template <class Student, class Teacher, class Program>
inline constexpr bool one_for_all<row_job<Student, Teacher, Program, space::host>> =
    divergence<Program>&& Teacher::kind == cache_kind::dense && !Student::sparse_gradient && !is_lumped<Teacher>;
template <class Job>
inline constexpr bool one_for_all_supports = false;
template <class Student, class Teacher, class Estimator>
    requires(renormalised_estimator<Estimator>)
inline constexpr bool one_for_all_supports<row_job<Student, Teacher, Estimator, space::host>> =
    chosen_at_run_time<std::remove_cvref_t<decltype(std::declval<const Estimator&>().on_support)>>;
/// Whether a job's divergence is chosen at run time, of rows that a machine has for any.
template <class Job>
inline constexpr bool has_machine = false;
template <class Student, class Teacher, class Estimator>
inline constexpr bool has_machine<row_job<Student, Teacher, Estimator, space::host>> =
    one_for_all_supports<row_job<Student, Teacher, Estimator, space::host>> ||
    (one_for_all<row_job<Student, Teacher, Estimator, space::host>> && chosen_at_run_time<Estimator>);
/// Whether the CPU has rows for a job.
template <class Job>
concept has_lanes = has_machine<Job> || requires(const Job& job) {
    rows_of<lane_engine>(job_of_rows(job), host_frame_of(job));
};

template <class Job>
using state_of_rows =
    typename decltype(rows_of<lane_engine>(job_of_rows(std::declval<const Job&>()), host_frame{}))::state_type;

template <class Student, class Teacher, class Estimator, class Formula>
auto with_estimator(const row_job<Student, Teacher, Estimator, space::host>& job, const Formula& formula) {
    return row_job<Student, Teacher, Formula, space::host>{job.student, job.teacher, formula,
                                                           job.env,     job.rows,    job.vocab};
}
/// A job of a divergence as one of any divergence (dense_machine.hpp): all that follows is then compiled once a pair
/// of sources. The estimator's parameters stay in `job`. On a renormalised support likewise where it is chosen at run
/// time.
template <class Job>
decltype(auto) as_run(const Job& job) {
    if constexpr (one_for_all<Job>) {
        using Z = typename decltype(job.student)::logit_type;
        using Y = typename decltype(job.teacher)::logit_type;
        using G = typename decltype(job.student)::gradient_type;
        return with_estimator(job, formula_of<Z, Y, G, may_tile<Job>>(job.estimator));
    } else if constexpr (one_for_all_supports<Job>) {
        const renormalised_formula formula{
            formula_of<double, double, double, false>(program_on_support(job.estimator))};
        return with_estimator(job, formula);
    } else {
        return (job);
    }
}
template <class Estimator>
bool single_sweep_of(const Estimator& e) {
    if constexpr (is_any_formula<Estimator>)
        return e.functions->single_sweep;
    else
        return single_sweep_divergence<Estimator>;
}

/// How large the blocks are, within every side's budget; rows or tiles of rows, whichever costs less: a tile's logits
/// are made again for every pass over a row, and every block reads the heads again. Throws invalid_input where a
/// budget does not hold one row.
template <class Job>
void plan_blocks(const Job& job, host_plan& plan, bool tiles = true) {
    const auto bytes = [](const auto& side, index_t rows, index_t tile) {
        return block_memory(side, rows, tile).bytes;
    };
    const auto within = [&](index_t ids, index_t most) {
        each_made(job, [&](const auto& side) {
            most = rows_within(side.budget, most, [&](index_t rows) { return bytes(side, rows, ids); });
        });
        return most;
    };
    // a head's gradient in tiles is summed over rows in 32s: blocks of whole ones change no bit
    cut_limits limits{std::max<index_t>(plan.rows, 1)};
    each_made(job, [&](const auto& side) {
        if constexpr (requires { side.dw; })
            if constexpr (back_in_tiles<std::remove_cvref_t<decltype(side)>>)
                if (!side.dw.empty()) limits.whole = tile_cuts::side;
    });
    index_t least = 0; // ids of the smallest tile
    logit_cut cut;
    if constexpr (may_tile<Job>) {
        constexpr double operations_a_byte = 16; // of a processor, about
        const int passes = single_sweep_of(job.estimator) ? 1 : 2;
        const auto cost = [&](index_t rows, bool tiled) {
            double per_row = 0, per_block = 0; // operations; bytes of heads
            const bool back = job.student.has_gradient();
            each_made(job, [&](const auto& side) {
                const double size = double(side.vocab()) * double(product_columns(side)),
                             times = tiled ? passes + back : 1, of_head = double(sizeof(side.x.data[0])) * size;
                per_row += 2 * size * times, per_block += of_head * times;
                if (!tiled) per_row += sizeof(float) * double(side.vocab()) * (back ? 4 : 2) * operations_a_byte;
                if constexpr (requires { side.dx; }) {
                    if (!side.dx.empty()) per_row += 2 * size, per_block += of_head;
                    if (!side.dw.empty()) per_row += 2 * size, per_block += 2 * sizeof(float) * size;
                }
            });
            const index_t n = limits.rows;
            return double(n) * per_row + double((n + rows - 1) / rows) * per_block * operations_a_byte;
        };
        if (tiles) {
            each_made(job, [&](const auto& side) { limits.ids = std::max(limits.ids, side.vocab()); });
            limits.tile_rows = rows_of_tiles, limits.most_ids = stretch_of_ids;
            if (limits.ids > limits.least_ids) least = limits.least_ids;
        }
        cut = cut_logits(limits, within, cost);
    } else {
        cut = cut_logits(limits, within);
    }
    plan.block = cut.rows, plan.tile = cut.ids;
    if (plan.block == 0)
        each_made(job, [&](const auto& side) {
            if (const std::size_t row = bytes(side, 1, least); row > side.budget)
                throw invalid_input(std::string(name_of<std::remove_cvref_t<decltype(side)>>()).append(".budget"),
                                    "is " + std::to_string(side.budget) + " bytes; a row takes " + std::to_string(row));
        });
    each_made(job, [&](const auto& side) { plan.blocks += bytes(side, plan.block, plan.tile); });
    if constexpr (may_tile<Job>)
        if (plan.tile > 0) plan.blocks += host_plan::aligned(sizeof(state_of_rows<Job>) * std::size_t(plan.block));
    each_made(job, [&](const auto& side) { plan.scratch = std::max(plan.scratch, worker_bytes(side, plan.block)); });
}
/// Blocks of rows with the gradients of `width` ids each.
template <class Student>
void plan_gathered(const Student& student, index_t width, host_plan& plan) {
    const auto row =
        sizeof(float) * static_cast<std::size_t>(student.has_gradient() ? width + kept_of_update(student) : 0);
    const auto bytes = [row](index_t rows) { return row * static_cast<std::size_t>(rows); };
    const auto within = [&](index_t, index_t most) { return rows_within(student.budget, most, bytes); };
    plan.block = std::max<index_t>(cut_logits({std::max<index_t>(plan.rows, 1)}, within).rows, 1);
    plan.blocks = host_plan::aligned(static_cast<std::size_t>(plan.block) * row);
}

template <has_lanes Job>
host_plan host_plan_of(const Job& job) {
    const host_frame frame = host_frame_of(job);
    if constexpr (may_tile<Job>) { // nothing of a row is in scratch
        host_plan plan{frame.rows, 0, true};
        plan_blocks(job, plan);
        return plan;
    } else {
        const auto rows = rows_of<lane_engine>(job_of_rows(job), frame);
        host_plan plan{frame.rows, rows.scratch_bytes(), has_blocks<Job> || gathers<Job>};
        if constexpr (has_blocks<Job>) plan_blocks(job, plan);
        if constexpr (gathers<Job>) plan_gathered(job.student, rows.width(), plan);
        return plan;
    }
}

/// Rows of the groups [first, last), over the team.
template <class Job>
void run_groups(const Job& job, const host_frame& frame, const host_plan& plan, index_t first, index_t last,
                thread_team& team, std::byte* scratch) {
    const auto rows = rows_of<lane_engine>(job, frame);
    using state_type = typename decltype(rows_of<lane_engine>(job, frame))::state_type;
    team.run(last - first, [&](index_t group, int worker) {
        team_of_one<state_type> one;
        run_rows(rows, first + group, one, scratch + std::size_t(worker) * plan.scratch);
    });
}

/// Rows whose logits are made here: the logits of a block are made, its rows are run, and their gradient goes back.
/// Where a block holds tiles, all its rows walk from phase to phase together.
template <class Job>
void run_made(const Job& job, host_frame frame, const host_plan& plan, thread_team& team, std::byte* scratch,
              std::byte* memory) {
    carver from{memory};
    state_of_rows<Job>* const states = plan.tile > 0 ? from.take<state_of_rows<Job>>(plan.block) : nullptr;
    makers<Job> sides(job, plan.block, plan.tile, from, &team, worker_floats{scratch, plan.scratch});
    const float beta = frame.env.beta;
    if (sides.drains()) frame.env.beta = 0; // of the block; the caller's is for what goes back
    for (index_t begin = 0; begin == 0 || begin < plan.rows;
         begin += plan.block) { // without rows a head's gradient is 0 all the same
        const index_t end = std::min(begin + plan.block, plan.rows);
        sides.move_to(begin, end);
        sides.begin_back(beta, frame.env.mask);
        const auto made = sides.template job_of_rows<may_tile<Job>>(job);
        if constexpr (may_tile<Job>)
            if (states != nullptr) {
                run_block(rows_of<lane_engine>(made, frame), begin, end, states, sides, team);
                for (index_t i = 0; i < end - begin; ++i) frame.partials[begin + i] = states[i].partial;
                sides.finish();
                continue;
            }
        sides.ready([&](index_t r) { return frame.env.mask.kept(r); });
        sides.make_all();
        run_groups(made, frame, plan, begin, end, team, scratch);
        sides.back_all(frame.env.mask);
        sides.finish();
    }
}

/// Rows that have the logits of few ids made: a block of them is run, and their gradients go back.
template <class Job>
void run_gathered(const Job& job, host_frame frame, const host_plan& plan, thread_team& team, std::byte* scratch,
                  std::byte* memory) {
    auto made = job_of_rows(job);
    made.student.width = rows_of<lane_engine>(made, frame).width();
    made.student.gradient = reinterpret_cast<float*>(memory);
    float* const update = made.student.gradient + plan.block * made.student.width;
    frame.env.beta = 0; // of the block; drain_gathered() has the caller's
    for (index_t begin = 0; begin == 0 || begin < plan.rows; begin += plan.block) {
        const index_t end = std::min(begin + plan.block, plan.rows);
        made.student.first = begin;
        run_groups(made, frame, plan, begin, end, team, scratch);
        if (job.student.has_gradient())
            drain_gathered(made.student, rows_of<lane_engine>(made, frame), begin, end, job.env.beta, begin == 0,
                           update, team);
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
        run_made(job, frame, plan, team, scratch, blocks);
    else if constexpr (gathers<Job>)
        run_gathered(job, frame, plan, team, scratch, blocks);
    else
        run_groups(job_of_rows(job), frame, plan, 0, plan.groups, team, scratch);
    result all;
    for (index_t g = 0; g < plan.groups; ++g) {
        all.loss += partials[g].loss;
        all.diagnostics.merge(partials[g].diagnostics);
    }
    return all;
}

} // namespace OPD_ISA
} // namespace opd::detail
