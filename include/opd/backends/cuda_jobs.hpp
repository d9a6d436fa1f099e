// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// From a checked call to kernels in stream order, for any launcher: launch(kernel, blocks). No CUDA header.
#pragma once

#include <cstddef>

#include "opd/backends/cuda_rows.hpp"
#include "opd/backends/cuda_sparse_rows.hpp"
#include "opd/batch.hpp"
#include "opd/config.hpp"
#include "opd/diagnostics.hpp"
#include "opd/evaluate.hpp"

namespace opd::detail {
inline namespace OPD_ISA {

template <class Student, class Teacher, class Estimator, space S>
device_plan plan_of(const row_job<Student, Teacher, Estimator, S>& job) {
    return {job.rows, sequences_of(job.env), scratch_of(job)};
}
template <class Z, class Id, class L, space S>
device_plan plan_of(const token_logp_job<Z, Id, L, S>& job) {
    return {job.z.rows, 0, 0};
}

template <space S>
row_frame<S> frame_of(const device_plan& plan, const basic_env<S>& e, std::byte* memory) {
    row_frame<S> frame;
    frame.env = e;
    frame.rows = plan.rows, frame.group = plan.group;
    frame.totals = reinterpret_cast<batch_totals*>(memory + plan.totals);
    frame.counts = reinterpret_cast<index_t*>(memory + plan.counts);
    frame.partials = reinterpret_cast<result*>(memory + plan.partials);
    frame.scratch = memory + plan.scratch;
    frame.scratch_of_block = plan.groups > 0 ? (plan.bytes - plan.scratch) / std::size_t(plan.groups) : 0;
    return frame;
}

/// Whether there is a kernel for a job. For row_job<Student, Teacher, Estimator, S>.
template <class Job>
inline constexpr bool has_kernel = false;
template <class Student, class Teacher, class Estimator, space S>
inline constexpr bool has_kernel<row_job<Student, Teacher, Estimator, S>> =
    requires(const row_job<Student, Teacher, Estimator, S>& job, const row_frame<S>& frame) {
    kernel_of(job, frame);
};

/// The kernels of one call. `memory` holds plan_of(job).bytes.
template <class Student, class Teacher, class Estimator, space S, class Launch>
void run_job(const row_job<Student, Teacher, Estimator, S>& job, std::byte* memory, result* out, Launch&& launch) {
    const device_plan plan = plan_of(job);
    const row_frame<S> frame = frame_of(plan, job.env, memory);
    if (plan.sequences > 0) launch(count_sequences<S>{frame}, plan.sequences);
    if (reduces_sequences(job.env) || job.env.reduction == reduce::token_mean)
        launch(count_batch<S>{frame, plan.sequences}, index_t{1});
    if (plan.groups > 0) launch(kernel_of(job, frame), plan.groups);
    launch(merge_results{frame.partials, plan.groups, out}, index_t{1});
}
template <class Z, class Id, class L, space S, class Launch>
void run_job(const token_logp_job<Z, Id, L, S>& job, std::byte* memory, result* out, Launch&& launch) {
    const device_plan plan = plan_of(job);
    basic_env<S> e;
    e.reduction = reduce::sum;
    e.mask = job.mask;
    e.lse = job.lse;
    const row_frame<S> frame = frame_of(plan, e, memory);
    if (plan.groups > 0) launch(logp_kernel<Z, Id, L, S>{frame, job}, plan.groups);
    launch(merge_results{frame.partials, plan.groups, out}, index_t{1});
}

} // namespace OPD_ISA
} // namespace opd::detail
