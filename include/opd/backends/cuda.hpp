// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The CUDA backend's handle. This header needs CUDA's headers but no nvcc: a caller compiled by g++ holds the
// backend, plans its memory and fetches results. The translation unit that calls `evaluate` includes cuda.cuh and is
// compiled by nvcc.
//
//   opd::cuda_backend be{.stream = stream, .cublas = handle, .arena = {memory, bytes}}; // the caller owns all three
//   auto r = opd::evaluate(be, student, teacher, estimator, opd::device_env{…}); // enqueues; returns at once
//   …
//   opd::result host = r.fetch(stream);                                                     // the only call that waits
//
// Nothing is allocated, nothing synchronises, no global state is read or written, and everything but `fetch` is legal
// under stream capture. Views are device_view; every span of device_env lies in device memory. Workspace: about 1 MB
// at most, 8 bytes a sequence, and for supports and samples at most 2,048 times 112 bytes an entry of a row; losses
// from hidden states (cuda_hidden.cuh) take their budgets and `product_workspace` beside it.
//
// The same call gives the same bits (run_to_run): blocks and merges depend on sizes alone, there are no float atomics.
// From compute capability 9.0 on two blocks share a long row where there are few; so bits may differ from an older
// device's. (Losses from hidden states: on one kind of device with one cuBLAS.) Contents are counted, and
// `fetch` throws for them by env.on_bad; check::contents and infinite::raise are refused. Offsets or weights that
// make no sense make their rows bad.
#pragma once

#include <cublas_v2.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <span>
#include <string>
#include <type_traits>

#include "opd/config.hpp"
#include "opd/cuda/blocks.hpp"
#include "opd/cuda/jobs.hpp"
#include "opd/diagnostics.hpp"
#include "opd/element.hpp"
#include "opd/error.hpp"
#include "opd/evaluate.hpp"
#include "opd/view.hpp"

namespace opd {

/// A CUDA or cuBLAS call that failed; `code` is the cudaError_t or cublasStatus_t.
struct cuda_error : error {
    int code;
    cuda_error(const std::string& call, const char* reason, int code_)
        : error("opd: " + call + ": " + reason + " (" + std::to_string(code_) + ")"), code(code_) {}
};

namespace detail {
inline void cuda_check(const char* call, cudaError_t e) {
    if (e != cudaSuccess) throw cuda_error(call, cudaGetErrorString(e), static_cast<int>(e));
}
inline void cublas_check(const char* call, cublasStatus_t s) {
    if (s != CUBLAS_STATUS_SUCCESS) throw cuda_error(call, cublasGetStatusString(s), static_cast<int>(s));
}

template <class T>
struct cublas_type;
template <>
struct cublas_type<float> {
    using scale = float;
    static constexpr cudaDataType_t data = CUDA_R_32F;
    static constexpr cublasComputeType_t compute = CUBLAS_COMPUTE_32F_PEDANTIC; // no TF32 behind the caller's back
};
template <>
struct cublas_type<double> {
    using scale = double;
    static constexpr cudaDataType_t data = CUDA_R_64F;
    static constexpr cublasComputeType_t compute = CUBLAS_COMPUTE_64F;
};
template <>
struct cublas_type<bfloat16> {
    using scale = float;
    static constexpr cudaDataType_t data = CUDA_R_16BF;
    static constexpr cublasComputeType_t compute = CUBLAS_COMPUTE_32F;
};
template <>
struct cublas_type<half> {
    using scale = float;
    static constexpr cudaDataType_t data = CUDA_R_16F;
    static constexpr cublasComputeType_t compute = CUBLAS_COMPUTE_32F;
};
} // namespace detail

/// What `evaluate` returns on a device: where the result will be once the stream gets there.
struct device_result {
    const result* data = nullptr; ///< device memory: cuda_backend::results, or the head of the arena
    bad on_bad = {};              ///< the call's env.on_bad: `fetch` throws by it

    /// Device pointer to the reduced loss, for kernels of the caller's that follow on the stream.
    const double* loss() const { return reinterpret_cast<const double*>(data); }

    /// Waits for the stream and returns the result. With the arena's result: before the next evaluate reuses it. Throws
    /// bad_contents if there are more bad rows than env.on_bad allows.
    result fetch(cudaStream_t stream) const {
        result r;
        detail::cuda_check("cudaMemcpyAsync of the result",
                           cudaMemcpyAsync(&r, data, sizeof r, cudaMemcpyDeviceToHost, stream));
        detail::cuda_check("cudaStreamSynchronize", cudaStreamSynchronize(stream));
        detail::raise_bad(r, on_bad);
        return r;
    }
};
static_assert(std::is_standard_layout_v<result> && std::is_trivially_copyable_v<result>);

/// A handle: it owns nothing, and copies of it share stream, cuBLAS handle and memory.
struct cuda_backend {
    static constexpr space memory_space = space::device;
    cudaStream_t stream = nullptr;
    cublasHandle_t cublas = nullptr; ///< for gemm and losses from hidden states; created before a stream is captured
    std::span<std::byte> arena = {}; ///< device memory of at least workspace_bytes(…)
    result* results = nullptr;       ///< device memory for the result; null: the head of the arena
    bool tf32 = false; ///< products of float by tensor cores, which read 10 of its 23 bits: about ten times as fast
    std::size_t product_workspace = std::size_t{32}
                                    << 20; ///< bytes of the arena for cuBLAS, in losses from hidden states

    /// Bytes of arena that a dense call over this many rows (and sequences, for the reductions that know them) needs.
    static constexpr std::size_t workspace_bytes(index_t rows, index_t sequences = 0) {
        return detail::device_plan(rows, sequences, 0).bytes + alignment;
    }
    /// Bytes that any call needs; see opd::workspace_bytes(backend, student, …).
    template <class Job>
        requires(!std::is_arithmetic_v<Job> && !detail::has_block_kernel<Job>)
    static std::size_t workspace_bytes(const Job& job) { return detail::plan_of(job).bytes + alignment; }
    template <class Job>
        requires(detail::has_block_kernel<Job>)
    std::size_t workspace_bytes(const Job& job)
    const { return detail::block_plan_of(job).bytes + product_workspace + alignment; }

    /// Enqueues a checked call; called by evaluate, score and draw. Defined in cuda.cuh.
    template <class Student, class Teacher, class Estimator>
        requires detail::has_kernel<row_job<Student, Teacher, Estimator, space::device>>
            device_result for_rows(const row_job<Student, Teacher, Estimator, space::device>& job);
    template <plain_job Job>
        requires(Job::memory_space == space::device && !detail::has_block_kernel<Job>)
    device_result for_rows(const Job& job);
    /// The same from hidden states. Defined in cuda_hidden.cuh.
    template <class Student, class Teacher, class Estimator>
        requires detail::has_block_kernel<row_job<Student, Teacher, Estimator, space::device>>
            device_result for_rows(const row_job<Student, Teacher, Estimator, space::device>& job);
    template <plain_job Job>
        requires(Job::memory_space == space::device && detail::has_block_kernel<Job>)
    device_result for_rows(const Job& job);

    /// C = alpha·op(A) op(B) + beta·C by cuBLAS on the caller's handle, in float (double for double): run_to_run, not
    /// row-invariant. (M,K) (K,N) -> (M,N), row-major. The handle's stream and pointer mode are put back.
    template <class T>
    void gemm(bool trans_a, bool trans_b, arithmetic_t<T> alpha,
              std::type_identity_t<matrix_view<const T, space::device>> a,
              std::type_identity_t<matrix_view<const T, space::device>> b, arithmetic_t<T> beta,
              matrix_view<T, space::device> c) {
        const index_t m = trans_a ? a.cols : a.rows, k = trans_a ? a.rows : a.cols;
        const index_t kb = trans_b ? b.cols : b.rows, n = trans_b ? b.rows : b.cols;
        if (k != kb || c.rows != m || c.cols != n)
            throw invalid_input("gemm", "shapes do not fit: op(A) " + detail::shape(m, k) + ", op(B) " +
                                            detail::shape(kb, n) + ", C " + detail::shape(c.rows, c.cols));
        if (!cublas) throw invalid_input("cuda_backend.cublas", "is null; gemm needs a handle");
        if (m == 0 || n == 0) return;
        cudaStream_t old_stream;
        cublasPointerMode_t old_mode;
        detail::cublas_check("cublasGetStream", cublasGetStream(cublas, &old_stream));
        detail::cublas_check("cublasGetPointerMode", cublasGetPointerMode(cublas, &old_mode));
        detail::cublas_check("cublasSetStream", cublasSetStream(cublas, stream));
        detail::cublas_check("cublasSetPointerMode", cublasSetPointerMode(cublas, CUBLAS_POINTER_MODE_HOST));
        // a row-major C is a column-major transpose: C^T = op(B)^T op(A)^T
        using type = detail::cublas_type<stored_as<T>>;
        const typename type::scale s = alpha, t = beta;
        const cublasStatus_t status =
            cublasGemmEx_64(cublas, trans_b ? CUBLAS_OP_T : CUBLAS_OP_N, trans_a ? CUBLAS_OP_T : CUBLAS_OP_N, n, m, k,
                            &s, b.data, type::data, b.stride, a.data, type::data, a.stride, &t, c.data, type::data,
                            c.stride, compute_of<stored_as<T>>(), CUBLAS_GEMM_DEFAULT);
        cublasSetPointerMode(cublas, old_mode);
        cublasSetStream(cublas, old_stream);
        detail::cublas_check("cublasGemmEx", status);
    }

    /// What cuBLAS computes products of T in.
    template <class T>
    cublasComputeType_t compute_of() const {
        return std::is_same_v<T, float> && tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : detail::cublas_type<T>::compute;
    }

    static constexpr std::size_t alignment = 256;
};

} // namespace opd
