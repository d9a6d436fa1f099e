// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The kernels of CUDA devices: libopd_cuda's only name, and engines.
#include "kernels.hpp"

#include <cstddef>
#include <memory>
#include <string>

#include "call.hpp"
#include "opd/version.hpp"

namespace opd_c::kernel {
namespace {

using error_sink = void (*)(int, const char*, const char*, std::int64_t) noexcept;
error_sink libopd_error = nullptr;

int make(const opd_engine_options& o, void** made) {
    return guarded_on_device([&] {
        int devices = 0;
        opd::detail::cuda_check("cudaGetDeviceCount", cudaGetDeviceCount(&devices));
        if (o.device_id < 0 || o.device_id >= devices)
            refuse("options.device_id", "is " + std::to_string(o.device_id) + "; this process sees " +
                                            std::to_string(devices) + " device(s)");
        auto e = std::make_unique<cuda_engine>();
        e->device = o.device_id, e->stream = static_cast<cudaStream_t>(o.stream);
        e->cublas = static_cast<cublasHandle_t>(o.cublas);
        e->arena_is_given = o.arena != nullptr;
        e->arena = {static_cast<std::byte*>(o.arena), static_cast<std::size_t>(o.arena_bytes)};
        *made = e.release();
    });
}
void unmake(void* engine) {
    const std::unique_ptr<cuda_engine> e(static_cast<cuda_engine*>(engine));
    try {
        const current_device of_engine(e->device);
    } catch (const opd::error&) { // the process ends, and CUDA is gone before us
        e->own_arena = nullptr, e->own_handle = nullptr;
    }
}

} // namespace
} // namespace opd_c::kernel

void opd_c_set_error(int code, const char* text, const char* argument, std::int64_t row) noexcept {
    opd_c::kernel::libopd_error(code, text, argument, row);
}

const opd_kernels* opd_kernels_cuda(opd_c::kernel::error_sink set_error) {
    namespace k = opd_c::kernel;
    k::libopd_error = set_error;
    static constexpr opd_kernels all = {.size = sizeof(opd_kernels),
                                        .name = "cuda",
                                        .make = &k::make,
                                        .unmake = &k::unmake,
                                        .evaluate = &k::evaluate,
                                        .draw = nullptr,
                                        .kept_ids = nullptr,
                                        .score = nullptr,
                                        .tokens = nullptr};
    return &all;
}
