// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Where kernels run and their tensors lie: the processor; with OPD_KERNELS_CUDA a CUDA device; with
// OPD_KERNELS_HOST_RUN the device's kernels on the processor, one thread after the other, for tests where no device
// is. The units of this folder are compiled for one place each.
#pragma once

#include <cstdint>

#include "opd/diagnostics.hpp"
#include "opd/evaluate.hpp"
#include "opd/view.hpp"
#include "tensor.hpp"

#if defined(OPD_KERNELS_CUDA)
#include "../cuda/engine.hpp"
#include "opd/backends/cuda_hidden.cuh"
#elif defined(OPD_KERNELS_HOST_RUN)
#include "backends/host_run.hpp"
#else
#include "opd/backends/cpu.hpp"
#endif

namespace opd_c::kernel {

#if defined(OPD_KERNELS_CUDA)
using backend = cuda_engine;
inline constexpr opd::space where = opd::space::device;
inline constexpr bool enqueues = true; ///< results are made later, on a stream
#elif defined(OPD_KERNELS_HOST_RUN)
using backend = opd::test::host_run_backend;
inline constexpr opd::space where = opd::space::host;
inline constexpr bool enqueues = false;
#else
using backend = opd::cpu_backend;
inline constexpr opd::space where = opd::space::host;
inline constexpr bool enqueues = false;
#endif

#if defined(OPD_KERNELS_CUDA) || defined(OPD_KERNELS_HOST_RUN)
inline constexpr bool on_device = true;
/// The device of the call that this thread makes.
inline thread_local place tensors_place = {kDLCUDA, 0};
#else
inline constexpr bool on_device = false;
inline constexpr place tensors_place = {kDLCPU, 0};
#endif

/// While a thread makes a call: the engine's device is the current one.
class turn {
public:
#if defined(OPD_KERNELS_CUDA)
    explicit turn(const backend& be) : device_(be.device) { tensors_place.id = be.device; }

private:
    current_device device_;
#else
    explicit turn(const backend&) {}
#endif
};

// Tensors of this place; each is empty for NULL.
template <class T>
opd::matrix_view<T, where> matrix(const char* name, const DLTensor* t) {
    return opd_c::matrix<T, where>(name, t, tensors_place);
}
template <class T>
opd::vector_view<T, where> vector(const char* name, const DLTensor* t) {
    return opd_c::vector<T, where>(name, t, tensors_place);
}
inline opd::matrix_view<const std::uint8_t, where> flags(const char* name, const DLTensor* t) {
    return opd_c::flags<where>(name, t, tensors_place);
}
inline opd::row_offsets<where> offsets(const char* name, const DLTensor* t) {
    return opd_c::offsets<where>(name, t, tensors_place);
}
inline opd::row_mask<where> mask(const char* name, const DLTensor* t, bool has_ignore, std::int64_t ignore) {
    return opd_c::mask<where>(name, t, has_ignore, ignore, tensors_place);
}
inline opd::row_weights<where> weights(const char* name, const DLTensor* t) {
    return opd_c::weights<where>(name, t, tensors_place);
}

} // namespace opd_c::kernel
