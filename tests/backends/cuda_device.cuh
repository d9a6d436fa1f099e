// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Device memory for the cases of cuda_cases.hpp.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdio>
#include <doctest/doctest.h>
#include <vector>

#include "opd/backends/cuda.cuh"

namespace opd::test {

/// False, with the word that ctest looks for, where there is no device.
inline bool device_present() {
    int count = 0;
    if (cudaGetDeviceCount(&count) == cudaSuccess && count > 0) return true;
    std::puts("SKIPPED: no CUDA device");
    return false;
}

struct device_memory {
    static constexpr space memory_space = space::device;
    cuda_backend backend;
    std::vector<void*> owned = {};

    device_memory() {
        constexpr std::size_t bytes = std::size_t{4} << 20;
        backend.arena = {static_cast<std::byte*>(allocate(bytes)), bytes};
    }
    device_memory(const device_memory&) = delete;
    device_memory& operator=(const device_memory&) = delete;
    ~device_memory() {
        for (void* p : owned) cudaFree(p);
    }

    void* allocate(std::size_t bytes) {
        void* p = nullptr;
        REQUIRE(cudaMalloc(&p, bytes) == cudaSuccess);
        owned.push_back(p);
        return p;
    }
    template <class T>
    T* put(std::vector<T>& v) {
        if (v.empty()) return nullptr;
        T* p = static_cast<T*>(allocate(v.size() * sizeof(T)));
        REQUIRE(cudaMemcpy(p, v.data(), v.size() * sizeof(T), cudaMemcpyHostToDevice) == cudaSuccess);
        return p;
    }
    template <class T>
    void get(std::vector<T>& v, T* p) {
        if (!v.empty()) REQUIRE(cudaMemcpy(v.data(), p, v.size() * sizeof(T), cudaMemcpyDeviceToHost) == cudaSuccess);
    }
    result finish(device_result r) { return r.fetch(backend.stream); }
};

} // namespace opd::test
