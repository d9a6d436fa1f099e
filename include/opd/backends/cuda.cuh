// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The CUDA backend's kernels: blocks of threads around the rows of rows/rows.hpp, merged by CUB. Compiled by nvcc
// (C++20, no other flag needed); the handle and what a caller reads are in cuda.hpp, losses from hidden states in
// cuda_hidden.cuh.
//
//   #include "opd/backends/cuda.cuh"
//   auto r = opd::evaluate(be, opd::student::logits{opd::device_view(z, N, V), opd::device_view(dz, N, V)},
//                          opd::teacher::dense{opd::device_view(y, N, V)}, opd::reverse_kl{}, opd::device_env{});
//
// To call from a translation unit that g++ compiles, instantiate cuda_backend::for_rows explicitly in a .cu file.
#pragma once

#include <cub/block/block_reduce.cuh>

#include <cstddef>
#include <memory>
#include <string>
#include <type_traits>

#include "opd/backends/cuda.hpp"
#include "opd/cuda/jobs.hpp"
#include "opd/evaluate.hpp"
#include "opd/rows/rows.hpp"
#include "opd/rows/tuning.hpp"

namespace opd::detail {
inline namespace OPD_ISA {

template <class Phase>
struct merge_of {
    template <class T>
    OPD_HD T operator()(const T& a, const T& b) const {
        return Phase::merge(a, b);
    }
};

/// Shared memory of a block, as bytes: its types have initialisers, which __shared__ does not take.
template <class State>
struct block_memory {
    static constexpr std::size_t scratch_bytes = 4096;
    alignas(16) unsigned char state[sizeof(State)];
    alignas(16) unsigned char scratch[scratch_bytes];
};

/// The team (rows/rows.hpp) of a block of GPU threads.
template <class State>
struct block_team {
    block_memory<State>& memory;

    __device__ State& shared() const { return *reinterpret_cast<State*>(memory.state); }
    __device__ void begin(index_t row, std::byte* scratch) {
        if (threadIdx.x == 0) {
            shared() = State{};
            shared().row = row;
            shared().scratch = scratch;
        }
        __syncthreads();
    }
    __device__ void move_to(index_t row) {
        if (threadIdx.x == 0) shared().row = row;
        __syncthreads();
    }
    template <class Phase, class Kernel>
    __device__ void fold(const Kernel& k) {
        if (!is_due<Phase>(k, shared())) return; // the same for every thread
        const one_of at{int(threadIdx.x), gpu_tuning::block_threads};
        using partial = decltype(Phase::part(k, shared(), at));
        using block_reduce = cub::BlockReduce<partial, gpu_tuning::block_threads, cub::BLOCK_REDUCE_WARP_REDUCTIONS>;
        using storage = typename block_reduce::TempStorage;
        static_assert(sizeof(storage) <= sizeof memory.scratch && alignof(storage) <= 16);
        const partial mine = Phase::part(k, shared(), at);
        const partial all = block_reduce(*reinterpret_cast<storage*>(memory.scratch)).Reduce(mine, merge_of<Phase>{});
        __syncthreads();
        if (threadIdx.x == 0) Phase::finish(k, shared(), all);
        __syncthreads();
    }
    template <class Phase, class Kernel>
    __device__ void repeat(const Kernel& k) {
        while (is_due<Phase>(k, shared())) fold<Phase>(k); // which ends with every thread seeing the same state
    }
    template <class Phase, class Kernel, class... Extra>
    __device__ void each(const Kernel& k, Extra... extra) {
        if (!is_due<Phase>(k, shared())) return;
        __syncthreads(); // a phase may change what it is due by
        Phase::run(k, shared(), one_of{int(threadIdx.x), gpu_tuning::block_threads}, extra...);
        __syncthreads();
    }
};

template <class Kernel>
static __global__ void __launch_bounds__(gpu_tuning::block_threads) block_kernel(const Kernel k) {
    using state_type = typename Kernel::state_type;
    __shared__ block_memory<state_type> memory;
    block_team<state_type> team{memory};
    k.run(index_t{blockIdx.x}, team);
}

/// Enqueues kernels on a stream.
struct stream_launcher {
    cudaStream_t stream;
    template <class Kernel>
    void operator()(const Kernel& k, index_t blocks) const {
        static_assert(std::is_trivially_copyable_v<Kernel>,
                      "opd: a kernel's argument is copied to the device byte by byte");
        if (blocks > 0x7fffffff)
            throw invalid_input("env.offsets", "has more sequences than one launch has blocks (2^31 - 1)");
        Kernel copy = k;
        void* arguments[] = {&copy};
        cuda_check("kernel launch",
                   cudaLaunchKernel(reinterpret_cast<const void*>(&block_kernel<Kernel>), dim3(unsigned(blocks)),
                                    dim3(gpu_tuning::block_threads), arguments, 0, stream));
    }
};

} // namespace OPD_ISA
} // namespace opd::detail

namespace opd {

namespace detail {
inline namespace OPD_ISA {
/// The arena's beginning, where it holds `bytes`.
inline std::byte* memory_of(const cuda_backend& be, std::size_t bytes) {
    constexpr std::size_t alignment = cuda_backend::alignment;
    void* p = be.arena.data();
    std::size_t room = be.arena.size();
    if (p == nullptr || !std::align(alignment, bytes, p, room))
        throw invalid_input("cuda_backend.arena", "holds " + std::to_string(be.arena.size()) +
                                                      " bytes; this call needs " + std::to_string(bytes + alignment) +
                                                      " (see workspace_bytes)");
    return static_cast<std::byte*>(p);
}
template <class Job>
device_result enqueue(const cuda_backend& be, const Job& job) {
    std::byte* const memory = memory_of(be, plan_of(job).bytes);
    result* out = be.results ? be.results : reinterpret_cast<result*>(memory);
    run_job(job, memory, out, stream_launcher{be.stream});
    return {out};
}
} // namespace OPD_ISA
} // namespace detail

template <class Student, class Teacher, class Estimator>
    requires detail::has_kernel<row_job<Student, Teacher, Estimator, space::device>>
        device_result cuda_backend::for_rows(const row_job<Student, Teacher, Estimator, space::device>& job) {
        detail::refuse_options(job.env);
        return detail::enqueue(*this, job);
    }
template <plain_job Job>
    requires(Job::memory_space == space::device && !detail::has_block_kernel<Job>)
device_result cuda_backend::for_rows(const Job& job) { return detail::enqueue(*this, job); }

} // namespace opd
