// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Losses over a vocabulary in shards on GPUs: each rank's kernels on its stream, with all-gathers of the caller's
// between them (shards/shard_rounds.hpp says how a row is cut).
//
//   #include "opd/backends/cuda_vocab_parallel.cuh"
//   auto r = opd::vocab_parallel(be, {.first = first, .total = V}, // this rank has the ids [first, first + count)
//                                opd::student::logits{opd::device_view(z, N, count), opd::device_view(dz, N, count)},
//                                opd::teacher::dense{opd::device_view(y, N, count)}, opd::jsd{}, opd::device_env{},
//                                ranks, [&](const void* from, void* to, std::size_t bytes, cudaStream_t stream) {
//                                    nccl_check(ncclAllGather(from, to, bytes, ncclUint8, communicator, stream));
//                                });
//
//   student   student::logits of the shard's columns, (N, count), or student::hidden with the shard's rows of the head;
//             count may be 0
//   teacher   teacher::dense or teacher::hidden of the same ids; support, samples or weighted with all their slots on
//             every rank alike. teacher::lumped{…, common}: as in vocab_parallel.hpp
//   env       the same on every rank; given_lse is over the whole vocabulary
//   gather    `bytes` from every rank's `from`, in the order of ranks, to every rank's `to`; enqueued on the stream
//
// Computes what `evaluate` does, with a value within rounding of that, on every rank the same bits; dz of own ids is
// complete. Nothing waits, and all may be captured if the gathers may. A gradient that its type does not hold
// saturates. Rows are bad, on every rank, where the shards do not hold each id once.
//
// Memory: `vocab_parallel_bytes` of the arena: some 1.2 kB a row, 3.1 of a support, and 232 bytes a row for each rank
// and once more; of supports and drawn tokens also their slots.
//
// Throws invalid_input and unsupported as `evaluate` does on this backend, before anything is enqueued; cuda_error
// where a launch is refused; what the gather throws, with dz in whatever state kernels have left it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <string>
#include <type_traits>

#include "opd/backends/cuda.cuh"
#include "opd/backends/cuda_hidden.cuh"
#include "opd/checks/types.hpp"
#include "opd/error.hpp"
#include "opd/evaluate.hpp"
#include "opd/shards/shard_blocks.hpp"
#include "opd/shards/shard_checks.hpp"
#include "opd/shards/shard_rounds.hpp"
#include "opd/vocab_parallel.hpp"

namespace opd {

/// What `vocab_parallel` returns on a device: the result, the same on every rank, and what only this one knows.
struct sharded_device_result : device_result {
    /// Device memory: in how many rows this rank's gradient was more than its type holds.
    const index_t* saturated = nullptr;
};

namespace detail {
inline namespace OPD_ISA {

/// Whether the types of a call can be run in shards on a device; if not, one sentence says why.
template <class Student, class Teacher, class Estimator>
constexpr bool fits_device_shards() {
    if constexpr (!types_fit<cuda_backend, Student, Teacher, Estimator>())
        return false; // it has said why
    else if constexpr (Student::sparse_gradient)
        static_assert(never<Student>,
                      "opd: a gradient of slots is not a shard's: of a vocabulary in shards the student "
                      "is student::logits of its columns, or student::hidden of its head's rows");
    else if constexpr (!has_kernel<row_job<Student, Teacher, Estimator, space::device>> &&
                       !has_block_kernel<row_job<Student, Teacher, Estimator, space::device>>)
        static_assert(never<Student>, "opd: cuda_backend has no rows for this student, cache and estimator; see "
                                      "docs/support-matrix.md");
    else
        return true;
    return false;
}

template <class Student, class Teacher, class Estimator>
auto checked_device_shard(vocab_shard shard, const Student& student, const Teacher& teacher, const Estimator& estimator,
                          const device_env& e, int ranks) {
    if (ranks < 1) throw invalid_input("ranks", "is " + std::to_string(ranks) + "; there is at least this one");
    refuse_options(e);
    return checked_shard_job(shard, student, teacher, estimator, e);
}

} // namespace OPD_ISA
} // namespace detail

inline namespace OPD_ISA {

/// Loss and gradient of this rank's ids, enqueued on the backend's stream; see the head of this file. Every rank calls
/// it, with the same `ranks` (how many there are) and an all-gather among them.
template <class Student, class Teacher, class Estimator, class AllGather>
sharded_device_result vocab_parallel(const cuda_backend& be, vocab_shard shard, Student student, Teacher teacher,
                                     const Estimator& estimator, const device_env& e, int ranks,
                                     AllGather&& all_gather) {
    if constexpr (detail::fits_device_shards<Student, Teacher, Estimator>()) {
        const auto job = detail::checked_device_shard(shard, student, teacher, estimator, e, ranks);
        constexpr bool blocks = detail::has_block_kernel<std::remove_const_t<decltype(job)>>;
        const std::size_t bytes = detail::shard_bytes(job, shard, ranks);
        std::byte* memory = nullptr;
        if constexpr (blocks)
            memory = detail::memory_with_products(be, bytes);
        else
            memory = detail::memory_of(be, bytes);
        result* const out = be.results ? be.results : reinterpret_cast<result*>(memory);
        sharded_device_result r{{out, e.on_bad}};
        const detail::stream_launcher launch{be.stream};
        const auto gather = [&](const std::byte* own, std::byte* all, std::size_t bytes_of_rank) {
            all_gather(static_cast<const void*>(own), static_cast<void*>(all), bytes_of_rank, be.stream);
        };
        if constexpr (blocks)
            r.saturated = detail::run_shard_in_blocks(job, shard, ranks, memory, out, launch,
                                                      detail::cublas_products(be, memory + bytes), gather);
        else
            r.saturated = detail::run_shard(job, shard, ranks, memory, out, launch, gather);
        return r;
    } else {
        return {};
    }
}

/// Bytes of arena that the same call to `vocab_parallel` needs.
template <class Student, class Teacher, class Estimator>
std::size_t vocab_parallel_bytes(const cuda_backend& be, vocab_shard shard, Student student, Teacher teacher,
                                 const Estimator& estimator, const device_env& e, int ranks) {
    if constexpr (detail::fits_device_shards<Student, Teacher, Estimator>()) {
        const auto job = detail::checked_device_shard(shard, student, teacher, estimator, e, ranks);
        constexpr bool blocks = detail::has_block_kernel<std::remove_const_t<decltype(job)>>;
        return detail::shard_bytes(job, shard, ranks) + (blocks ? be.product_workspace : 0) + cuda_backend::alignment;
    } else {
        return 0;
    }
}

} // namespace OPD_ISA

} // namespace opd
