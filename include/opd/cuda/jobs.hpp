// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A checked call as kernels in stream order, for any launcher: launch(kernel, blocks). No CUDA header. A kernel is a
// struct of plain members with run(block, team): the rows of rows/rows.hpp in groups, and what counts the batch
// before them and merges the groups' results after.
#pragma once

#include <cstddef>

#include "opd/batch.hpp"
#include "opd/config.hpp"
#include "opd/cuda/thread_engine.hpp"
#include "opd/diagnostics.hpp"
#include "opd/element.hpp"
#include "opd/error.hpp"
#include "opd/evaluate.hpp"
#include "opd/reduction.hpp"
#include "opd/rows/row_kinds.hpp"
#include "opd/rows/rows.hpp"
#include "opd/rows/tuning.hpp"
#include "opd/source.hpp"

namespace opd::detail {
inline namespace OPD_ISA {

/// What counting the batch gives; written once on the device, never read back.
struct batch_totals {
    index_t kept = 0, sequences = 0;
};

/// How a batch lies in the workspace. It depends on sizes alone.
struct device_plan {
    index_t rows, sequences;
    index_t group, groups; ///< rows a block works through, one after the other; blocks
    std::size_t totals, counts, partials, scratch, bytes;

    /// `scratch_of_block`: what one block needs beside shared memory.
    constexpr device_plan(index_t rows_, index_t sequences_, std::size_t scratch_of_block)
        : rows(rows_), sequences(sequences_),
          group(rows_ < gpu_tuning::most_groups ? 1 : (rows_ + gpu_tuning::most_groups - 1) / gpu_tuning::most_groups),
          groups((rows_ + group - 1) / group), totals(aligned(sizeof(result))),
          counts(totals + aligned(sizeof(batch_totals))),
          partials(counts + aligned(sizeof(index_t) * std::size_t(sequences_))),
          scratch(partials + aligned(sizeof(result) * std::size_t(groups))),
          bytes(scratch + aligned(scratch_of_block) * std::size_t(groups)) {}
    static constexpr std::size_t aligned(std::size_t n) { return (n + 255) / 256 * 256; }
};

template <space S>
index_t sequences_of(const basic_env<S>& e) {
    return reduces_sequences(e.reduction) && e.offsets.size > 0 ? e.offsets.size - 1 : 0;
}

/// What every kernel over rows knows.
template <space S>
struct row_frame {
    basic_env<S> env;
    index_t rows = 0;
    index_t group = 1;
    batch_totals* totals = nullptr;
    index_t* counts = nullptr; ///< (sequences) kept rows
    result* partials = nullptr;

    /// offsets[s] as a row of the batch, whatever the caller's memory holds.
    OPD_HD index_t offset(index_t s) const {
        const index_t o = env.offsets[s];
        return o < 0 ? 0 : (o > rows ? rows : o);
    }
    /// w_r f_r of a kept row; NaN if it has none (weights or offsets that make no sense).
    OPD_HD double factor(index_t r) const {
        const double nan = quiet_nan<double>();
        const double w = env.weights.empty() ? 1 : env.weights[r];
        double count = 1, in_sequence = 1;
        if (reduces_sequences(env.reduction)) {
            if (env.offsets.size < 2) return nan;
            const index_t s = sequence_of(env.offsets, env.offsets.size - 1, r);
            if (r < offset(s) || r >= offset(s + 1)) return nan;
            if (env.reduction == reduce::sequence_mean) in_sequence = double(counts[s]);
            count = env.normaliser > 0 ? env.normaliser : double(totals->sequences);
        } else if (env.reduction == reduce::token_mean) {
            count = env.normaliser > 0 ? env.normaliser : double(totals->kept);
        } else if (env.reduction == reduce::constant) {
            count = env.normaliser;
        }
        const double f = w / in_sequence / (count > 0 ? count : 1);
        return is_finite(f) && f <= largest_factor && f >= -largest_factor ? f : nan;
    }
};

/// Kept rows of one sequence a block.
template <space S>
struct count_sequences {
    using state_type = row_state;
    row_frame<S> frame;

    struct phase {
        template <class At>
        OPD_HD static index_t part(const count_sequences& k, const row_state& st, At at) {
            return k.frame.env.mask.kept_of(k.frame.offset(st.row) + at.id, k.frame.offset(st.row + 1), at.count);
        }
        OPD_HD static index_t merge(index_t a, index_t b) { return a + b; }
        OPD_HD static void finish(const count_sequences& k, row_state& st, index_t n) { k.frame.counts[st.row] = n; }
    };
    template <class Team>
    OPD_HD void run(index_t sequence, Team& team) const {
        team.begin(sequence, nullptr);
        team.template fold<phase>(*this);
    }
};

/// Kept rows and sequences of the batch, in one block. Counts are whole numbers: no order changes them.
template <space S>
struct count_batch {
    using state_type = row_state;
    row_frame<S> frame;
    index_t sequences = 0;

    struct phase {
        template <class At>
        OPD_HD static batch_totals part(const count_batch& k, const row_state&, At at) {
            batch_totals t;
            for (index_t s = at.id; s < k.sequences; s += at.count)
                t.sequences += k.frame.counts[s] > 0, t.kept += k.frame.counts[s];
            if (k.sequences == 0) t.kept = k.frame.env.mask.kept_of(at.id, k.frame.rows, at.count);
            return t;
        }
        OPD_HD static batch_totals merge(batch_totals a, batch_totals b) {
            return {a.kept + b.kept, a.sequences + b.sequences};
        }
        OPD_HD static void finish(const count_batch& k, row_state&, batch_totals t) { *k.frame.totals = t; }
    };
    template <class Team>
    OPD_HD void run(index_t, Team& team) const {
        team.begin(0, nullptr);
        team.template fold<phase>(*this);
    }
};

/// Partial results into one, in a tree of fixed shape: eight neighbours at a time. One block.
struct merge_results {
    using state_type = row_state;
    result* partials = nullptr;
    index_t count = 0;
    result* out = nullptr;
    bool more = false; ///< to what `out` holds

    struct level { // state.row holds the distance between partials that are still apart
        template <class At>
        OPD_HD static void run(const merge_results& k, const row_state& st, At at) {
            const index_t d = st.row;
            for (index_t i = at.id * d * 8; i < k.count; i += at.count * d * 8)
                for (index_t j = i + d; j < i + 8 * d && j < k.count; j += d) {
                    k.partials[i].loss += k.partials[j].loss;
                    k.partials[i].diagnostics.merge(k.partials[j].diagnostics);
                }
        }
    };
    struct store {
        template <class At>
        OPD_HD static void run(const merge_results& k, const row_state&, At at) {
            if (at.id != 0) return;
            const result all = k.count > 0 ? k.partials[0] : result{};
            if (!k.more) {
                *k.out = all;
                return;
            }
            k.out->loss += all.loss;
            k.out->diagnostics.merge(all.diagnostics);
        }
    };
    template <class Team>
    OPD_HD void run(index_t, Team& team) const {
        for (index_t d = 1; d < count; d *= 8) {
            team.begin(d, nullptr);
            team.template each<level>(*this);
        }
        team.begin(0, nullptr);
        team.template each<store>(*this);
    }
};

/// Rows [begin, end) in groups, each group with scratch of its own.
template <class Rows>
struct row_groups {
    using state_type = typename Rows::state_type;
    Rows rows;
    index_t begin = 0, end = 0;
    std::byte* scratch = nullptr;
    std::size_t scratch_of_group = 0;

    static constexpr int threads = [] {
        if constexpr (requires { requires Rows::few_entries; }) return gpu_tuning::small_block_threads;
        return gpu_tuning::block_threads;
    }();
    /// How many blocks a device that can lets share a row.
    index_t blocks_of_team() const {
        index_t blocks = 1;
        if constexpr (requires { Rows::spreads; })
            if (rows.frame.rows <= gpu_tuning::few_rows)
                while (blocks < gpu_tuning::most_blocks && rows.vocab >= 2 * blocks * gpu_tuning::ids_of_block)
                    blocks *= 2;
        return blocks;
    }
    template <class Team>
    OPD_HD void run(index_t group, Team& team) const {
        run_rows(rows, begin, end, group, team, scratch + scratch_of_group * static_cast<std::size_t>(group));
    }
};

/// What no kernel does: throw for what the rows hold, sum as if a tile began elsewhere.
template <space S>
void refuse_options(const basic_env<S>& e) {
    if (e.checks == check::contents)
        throw unsupported(
            "opd: env.checks = check::contents throws for what rows hold, which a device call would have to "
            "wait for; use check::count and read bad_rows of fetch()");
    if (e.on_infinite.act == infinite::action::raise)
        throw unsupported(
            "opd: env.on_infinite = infinite::raise() throws for what rows hold, which a device call would "
            "have to wait for; use floor or skip and read infinite_rows of fetch()");
    if (e.level == determinism::tiling_invariant)
        throw unsupported("opd: env.level tiling_invariant is not offered on a device: which entries a thread adds up "
                          "follows from where its tile begins; use run_to_run");
}

template <class Student, class Teacher, class Estimator, space S>
device_plan plan_of(const row_job<Student, Teacher, Estimator, S>& job) {
    return {job.rows, sequences_of(job.env), rows_of<thread_engine>(job, row_frame<S>{}).scratch_bytes()};
}
template <plain_job Job>
device_plan plan_of(const Job& job) {
    return {job.row_count(), 0, rows_of<thread_engine>(job, row_frame<Job::memory_space>{}).scratch_bytes()};
}

template <space S>
row_frame<S> frame_of(const device_plan& plan, const basic_env<S>& e, std::byte* memory) {
    row_frame<S> frame;
    frame.env = e;
    frame.rows = plan.rows, frame.group = plan.group;
    frame.totals = reinterpret_cast<batch_totals*>(memory + plan.totals);
    frame.counts = reinterpret_cast<index_t*>(memory + plan.counts);
    frame.partials = reinterpret_cast<result*>(memory + plan.partials);
    return frame;
}

/// Whether there is a kernel for a job. A block's threads share a row, so there is no scratch that a source could
/// make a tile in. Logits that the backend makes are cuda/blocks.hpp's.
template <class Job>
inline constexpr bool has_kernel = false;
template <class Student, class Teacher, class Estimator, space S>
inline constexpr bool has_kernel<row_job<Student, Teacher, Estimator, S>> =
    !has_scratch<Student> && !has_scratch<Teacher> && !in_blocks<Student> && !in_blocks<Teacher> &&
    requires(const row_job<Student, Teacher, Estimator, S>& job) {
    rows_of<thread_engine>(job, row_frame<S>{});
};

/// Rows [begin, end), as many as `plan` is for or fewer, and their result into `out`; `more`: added to what it holds.
template <class Job, space S, class Launch>
void launch_rows(const Job& job, const device_plan& plan, const row_frame<S>& frame, index_t begin, index_t end,
                 std::byte* memory, result* out, bool more, Launch&& launch) {
    const auto rows = rows_of<thread_engine>(job, frame);
    const std::size_t scratch = plan.groups > 0 ? (plan.bytes - plan.scratch) / std::size_t(plan.groups) : 0;
    const index_t groups = (end - begin + plan.group - 1) / plan.group;
    if (groups > 0)
        launch(row_groups<std::remove_const_t<decltype(rows)>>{rows, begin, end, memory + plan.scratch, scratch},
               groups);
    launch(merge_results{frame.partials, groups, out, more}, index_t{1});
}
/// What a reduction has to know of the whole batch.
template <space S, class Launch>
void launch_counts(const device_plan& plan, const row_frame<S>& frame, Launch&& launch) {
    if (plan.sequences > 0) launch(count_sequences<S>{frame}, plan.sequences);
    if (reduces_sequences(frame.env.reduction) || frame.env.reduction == reduce::token_mean)
        launch(count_batch<S>{frame, plan.sequences}, index_t{1});
}

/// The kernels of one call. `memory` holds plan_of(job).bytes.
template <class Student, class Teacher, class Estimator, space S, class Launch>
void run_job(const row_job<Student, Teacher, Estimator, S>& job, std::byte* memory, result* out, Launch&& launch) {
    const device_plan plan = plan_of(job);
    const row_frame<S> frame = frame_of(plan, job.env, memory);
    launch_counts(plan, frame, launch);
    launch_rows(job, plan, frame, 0, plan.rows, memory, out, false, launch);
}
template <plain_job Job, class Launch>
void run_job(const Job& job, std::byte* memory, result* out, Launch&& launch) {
    const device_plan plan = plan_of(job);
    launch_rows(job, plan, frame_of(plan, job.as_env(), memory), 0, plan.rows, memory, out, false, launch);
}

} // namespace OPD_ISA
} // namespace opd::detail
