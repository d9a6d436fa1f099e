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

#include <cooperative_groups.h>
#include <cub/block/block_reduce.cuh>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <memory>
#include <string>
#include <type_traits>

#include "opd/backends/cuda.hpp"
#include "opd/cuda/jobs.hpp"
#include "opd/evaluate.hpp"
#include "opd/rows/rows.hpp"
#include "opd/rows/tuning.hpp"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define OPD_HAS_CLUSTERS
#endif

namespace opd::detail {
inline namespace OPD_ISA {

/// Shared memory of a block, as bytes: its types have initialisers, which __shared__ does not take.
template <class State>
struct block_memory {
    static constexpr std::size_t scratch_bytes = 4096;
    alignas(16) unsigned char state[sizeof(State)];
    alignas(16) unsigned char scratch[scratch_bytes];
};

/// The team (rows/rows.hpp) of a block of GPU threads, or of a cluster's blocks: those read the state in the shared
/// memory of the first.
template <class State, int Threads>
class block_team {
public:
    __device__ explicit block_team(block_memory<State>& memory) : memory_(memory), state_(memory.state) {
#if defined(OPD_HAS_CLUSTERS)
        const auto cluster = cooperative_groups::this_cluster();
        blocks_ = int(cluster.num_blocks()), block_ = int(cluster.block_rank());
        if (blocks_ > 1) state_ = cluster.map_shared_rank(memory.state, 0);
#endif
    }
    __device__ int blocks() const { return blocks_; }

    __device__ void begin(index_t row, std::byte* scratch) {
        if (leads()) {
            shared() = State{};
            shared().row = row;
            shared().scratch = scratch;
        }
        sync();
    }
    __device__ void move_to(index_t row) {
        if (leads()) shared().row = row;
        sync();
    }
    template <class Phase, class Kernel>
    __device__ void fold(const Kernel& k) {
        if (!is_due<Phase>(k, shared())) return; // the same for every thread
        auto mine = Phase::part(k, shared(), at());
        using partial = decltype(mine);
        if constexpr (requires { typename partial::agreed_type; }) {
            mine.agree(for_all(merged(mine.proposed())));
            mine.take(merged(mine.summed()));
            if (leads()) Phase::finish(k, shared(), mine);
        } else {
            const partial all = merged(mine, [](const partial& a, const partial& b) { return Phase::merge(a, b); });
            if (leads()) Phase::finish(k, shared(), all);
        }
        sync();
    }
    template <class Phase, class Kernel>
    __device__ void repeat(const Kernel& k) {
        while (is_due<Phase>(k, shared())) fold<Phase>(k); // which ends with every thread seeing the same state
    }
    template <class Phase, class Kernel, class... Extra>
    __device__ void each(const Kernel& k, Extra... extra) {
        if (!is_due<Phase>(k, shared())) return;
        sync(); // a phase may change what it is due by
        Phase::run(k, shared(), at(), extra...);
        sync();
    }

private:
    block_memory<State>& memory_;
    unsigned char* state_;
    int blocks_ = 1, block_ = 0;

    /// Of all threads' numbers, for the thread that leads.
    template <class T, class Merge>
    __device__ T merged(const T& mine, Merge merge) {
        using block_reduce = cub::BlockReduce<T, Threads, cub::BLOCK_REDUCE_WARP_REDUCTIONS>;
        using storage = typename block_reduce::TempStorage;
        static_assert(sizeof(storage) <= sizeof memory_.scratch && alignof(storage) <= 16);
        static_assert(sizeof(T) <= sizeof memory_.scratch && alignof(T) <= 16);
        T all = block_reduce(*reinterpret_cast<storage*>(memory_.scratch)).Reduce(mine, merge);
#if defined(OPD_HAS_CLUSTERS)
        if (blocks_ > 1) {
            if (threadIdx.x == 0) place<T>() = all;
            sync();
            if (leads())
                for (int b = 1; b < blocks_; ++b) all = merge(all, place<T>(b));
        }
#endif
        __syncthreads(); // the next may use the same memory
        return all;
    }
    template <class T>
    __device__ T merged(const T& mine) {
        return merged(mine, [](const T& a, const T& b) { return T::merge(a, b); });
    }
    /// What the leading thread has, for all.
    template <class T>
    __device__ T for_all(const T& of_leader) {
        if (leads()) place<T>() = of_leader;
        sync();
        const T all = place<T>(0);
        sync();
        return all;
    }
    /// A number in the scratch of a block of the team.
    template <class T>
    __device__ T& place() {
        return *reinterpret_cast<T*>(memory_.scratch);
    }
    template <class T>
    __device__ const T& place(int block) {
#if defined(OPD_HAS_CLUSTERS)
        if (blocks_ > 1)
            return *reinterpret_cast<const T*>(
                cooperative_groups::this_cluster().map_shared_rank(memory_.scratch, unsigned(block)));
#endif
        return place<T>();
    }

    __device__ State& shared() const { return *reinterpret_cast<State*>(state_); }
    __device__ bool leads() const { return threadIdx.x == 0 && block_ == 0; }
    __device__ one_of at() const { return {block_ * Threads + int(threadIdx.x), blocks_ * Threads, Threads}; }
    __device__ void sync() const {
#if defined(OPD_HAS_CLUSTERS)
        if (blocks_ > 1) return cooperative_groups::this_cluster().sync();
#endif
        __syncthreads();
    }
};

template <class Kernel>
inline constexpr int threads_of = [] {
    if constexpr (requires { Kernel::threads; }) return Kernel::threads;
    return gpu_tuning::block_threads;
}();

template <class Kernel>
static __global__ void __launch_bounds__(threads_of<Kernel>, gpu_tuning::threads_at_once / threads_of<Kernel>)
    block_kernel(const Kernel k) {
    using state_type = typename Kernel::state_type;
    __shared__ block_memory<state_type> memory;
    block_team<state_type, threads_of<Kernel>> team(memory);
    k.run(index_t{blockIdx.x} / team.blocks(), team);
}

/// Whether a kernel's code for the current device knows clusters.
inline bool has_clusters(const void* kernel) {
    int device = 0, major = 0;
    cuda_check("cudaGetDevice", cudaGetDevice(&device));
    cuda_check("cudaDeviceGetAttribute", cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    if (major < 9) return false;
    cudaFuncAttributes code;
    cuda_check("cudaFuncGetAttributes", cudaFuncGetAttributes(&code, kernel));
    return code.ptxVersion >= 90; // else it was compiled for an older device
}

/// Enqueues kernels on a stream.
struct stream_launcher {
    cudaStream_t stream;
    template <class Kernel>
    void operator()(const Kernel& k, index_t teams) const {
        static_assert(std::is_trivially_copyable_v<Kernel>,
                      "opd: a kernel's argument is copied to the device byte by byte");
        const void* const code = reinterpret_cast<const void*>(&block_kernel<Kernel>);
        index_t blocks = 1;
        if constexpr (requires { k.blocks_of_team(); })
            if (k.blocks_of_team() > 1 && has_clusters(code)) blocks = k.blocks_of_team();
        if (teams > 0x7fffffff / blocks)
            throw invalid_input("env.offsets", "has more sequences than one launch has blocks (2^31 - 1)");
        cudaLaunchAttribute cluster;
        cluster.id = cudaLaunchAttributeClusterDimension;
        cluster.val.clusterDim = {unsigned(blocks), 1, 1};
        cudaLaunchConfig_t launch{};
        launch.gridDim = dim3(unsigned(teams * blocks)), launch.blockDim = dim3(threads_of<Kernel>);
        launch.stream = stream;
        launch.attrs = &cluster, launch.numAttrs = blocks > 1;
        Kernel copy = k;
        void* arguments[] = {&copy};
        cuda_check("kernel launch", cudaLaunchKernelExC(&launch, code, arguments));
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

#undef OPD_HAS_CLUSTERS
