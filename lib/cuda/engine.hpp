// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// An engine of a CUDA device: the backend with memory and a cuBLAS handle of its own where the caller gives none.
#pragma once

#include <cstddef>
#include <new>

#include "errors.hpp"
#include "opd/backends/cuda.hpp"

namespace opd_c::kernel {

/// Makes a device the thread's current one, and puts back the one before.
class current_device {
public:
    explicit current_device(int device) {
        opd::detail::cuda_check("cudaGetDevice", cudaGetDevice(&before_));
        if (device != before_) opd::detail::cuda_check("cudaSetDevice", cudaSetDevice(device));
        changed_ = device != before_;
    }
    current_device(const current_device&) = delete;
    ~current_device() {
        if (changed_) cudaSetDevice(before_);
    }

private:
    int before_ = 0;
    bool changed_ = false;
};

struct cuda_engine : opd::cuda_backend {
    int device = 0;
    void* own_arena = nullptr;
    std::size_t own_bytes = 0;
    cublasHandle_t own_handle = nullptr;
    bool arena_is_given = false;

    cuda_engine() = default;
    cuda_engine(const cuda_engine&) = delete;
    ~cuda_engine() {
        if (own_arena != nullptr) cudaFreeAsync(own_arena, stream);
        if (own_handle != nullptr) cublasDestroy(own_handle);
    }

    /// An arena of so many bytes, in the stream's order: what was enqueued before still has its own.
    void reserve(std::size_t bytes) {
        if (arena_is_given || bytes <= own_bytes) return;
        if (own_arena != nullptr) opd::detail::cuda_check("cudaFreeAsync", cudaFreeAsync(own_arena, stream));
        own_arena = nullptr, own_bytes = 0, arena = {};
        if (const cudaError_t e = cudaMallocAsync(&own_arena, bytes, stream); e == cudaErrorMemoryAllocation) {
            cudaGetLastError(); // else the next call of the caller's would find it
            own_arena = nullptr;
            throw std::bad_alloc();
        } else {
            opd::detail::cuda_check("cudaMallocAsync", e);
        }
        own_bytes = bytes, arena = {static_cast<std::byte*>(own_arena), bytes};
    }
    void make_handle() {
        if (cublas != nullptr) return;
        opd::detail::cublas_check("cublasCreate", cublasCreate(&own_handle));
        cublas = own_handle;
    }
};

/// guarded, with an error of CUDA's as OPD_DEVICE_ERROR.
template <class Body>
int guarded_on_device(Body&& body) noexcept {
    return guarded([&] {
        try {
            body();
            return int{OPD_OK};
        } catch (const opd::cuda_error& e) {
            opd_c_set_error(OPD_DEVICE_ERROR, e.what(), "", -1);
            return int{OPD_DEVICE_ERROR};
        }
    });
}

} // namespace opd_c::kernel
