// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Losses from hidden states on the CUDA backend: the rows of cuda.cuh over logits that cuBLAS makes, a block of rows
// at a time (cuda/blocks.hpp). A header of its own, since it wants cuBLAS to be linked.
//
//   #include "opd/backends/cuda_hidden.cuh"
//   opd::cuda_backend be{.stream = stream, .cublas = handle, .arena = {memory, bytes}};
//   const opd::student::hidden mine{opd::device_view(x, N, D), opd::device_view(w, V, D),
//                                   opd::device_view(dx, N, D), opd::device_view(dw, V, D)};
//   const opd::teacher::hidden theirs{opd::device_view(h, N, D_t), opd::device_view(head, V, D_t)};
//   auto r = opd::evaluate(be, mine, theirs, opd::reverse_kl{});
//
// Heads: a view, a lora_head, or a type of your own that is asked on the device (head.hpp). States and heads are
// float (products in float, or with be.tf32 by tensor cores) or bfloat16 (products of bfloat16 with sums in float; dz
// is rounded to bfloat16 on its way back). Logits, losses and gradients are float either way.
//
// Capture: nothing is allocated and nothing waits; cuBLAS works in be.product_workspace bytes of the arena. Create
// the handle before the capture begins (cublasCreate allocates). Its stream and pointer mode are put back, but not a
// workspace that was set on it: cuBLAS forgets that whenever a stream is set.
//
// Bits: run_to_run, with one cuBLAS on one kind of device. They may depend on `.budget`, since cuBLAS chooses its
// kernel by the sizes.
//
// Throws as evaluate does, and invalid_input where be.cublas is null, be.product_workspace is below 64 KiB, the arena
// too small or a budget below one row; cuda_error where a product or a launch is refused.
#pragma once

#include <cublas_v2.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <string>

#include "opd/backends/cuda.cuh"
#include "opd/cuda/blocks.hpp"
#include "opd/hidden.hpp"

namespace opd::detail {
inline namespace OPD_ISA {

/// Products on the backend's handle and stream. The handle is put back at the end.
class cublas_products {
public:
    cublas_products(const cuda_backend& be, void* workspace) : backend_(be) {
        cublas_check("cublasGetStream", cublasGetStream(be.cublas, &stream_));
        cublas_check("cublasGetPointerMode", cublasGetPointerMode(be.cublas, &mode_));
        cublas_check("cublasSetStream", cublasSetStream(be.cublas, be.stream)); // which drops a workspace: so first
        cublasStatus_t status = cublasSetWorkspace(be.cublas, workspace, be.product_workspace);
        if (status == CUBLAS_STATUS_SUCCESS) status = cublasSetPointerMode(be.cublas, CUBLAS_POINTER_MODE_HOST);
        if (status != CUBLAS_STATUS_SUCCESS) put_back();
        cublas_check("cublasSetWorkspace", status);
    }
    cublas_products(const cublas_products&) = delete;
    cublas_products& operator=(const cublas_products&) = delete;
    ~cublas_products() { put_back(); }

    template <class T>
    void operator()(const column_major_product<T>& p) const {
        constexpr cudaDataType_t type = cublas_type<T>::data;
        const float one = 1;
        cublas_check("cublasGemmEx", cublasGemmEx_64(backend_.cublas, p.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N,
                                                     p.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N, p.m, p.n, p.k, &one,
                                                     p.a, type, p.lda, p.b, type, p.ldb, &p.beta, p.c, CUDA_R_32F,
                                                     p.ldc, backend_.template compute_of<T>(), CUBLAS_GEMM_DEFAULT));
    }

private:
    void put_back() const {
        cublasSetPointerMode(backend_.cublas, mode_);
        cublasSetStream(backend_.cublas, stream_);
    }
    const cuda_backend& backend_;
    cudaStream_t stream_ = nullptr;
    cublasPointerMode_t mode_ = CUBLAS_POINTER_MODE_HOST;
};

/// Memory of a call with products: `bytes`, a multiple of the alignment, and behind them cuBLAS's.
inline std::byte* memory_with_products(const cuda_backend& be, std::size_t bytes) {
    constexpr std::size_t least = std::size_t{64} << 10;
    if (be.product_workspace < least)
        throw invalid_input("cuda_backend.product_workspace", "is " + std::to_string(be.product_workspace) +
                                                                  " bytes; cuBLAS needs " + std::to_string(least) +
                                                                  " and is faster with its default of 32 MiB");
    std::byte* const memory = memory_of(be, bytes + be.product_workspace);
    if (!be.cublas) throw invalid_input("cuda_backend.cublas", "is null; products of hidden states need a handle");
    return memory;
}

/// Enqueues a checked call whose logits are made here.
template <class Job>
device_result enqueue_in_blocks(const cuda_backend& be, const Job& job) {
    const std::size_t bytes = block_plan_of(job).bytes;
    std::byte* const memory = memory_with_products(be, bytes);
    result* const out = be.results ? be.results : reinterpret_cast<result*>(memory);
    const cublas_products products(be, memory + bytes);
    run_in_blocks(job, memory, out, stream_launcher{be.stream}, products);
    return {out};
}

} // namespace OPD_ISA
} // namespace opd::detail

namespace opd {

template <class Student, class Teacher, class Estimator>
    requires detail::has_block_kernel<row_job<Student, Teacher, Estimator, space::device>>
        device_result cuda_backend::for_rows(const row_job<Student, Teacher, Estimator, space::device>& job) {
        detail::refuse_options(job.env);
        return detail::enqueue_in_blocks(*this, job);
    }
template <plain_job Job>
    requires(Job::memory_space == space::device && detail::has_block_kernel<Job>)
device_result cuda_backend::for_rows(const Job& job) { return detail::enqueue_in_blocks(*this, job); }

} // namespace opd
