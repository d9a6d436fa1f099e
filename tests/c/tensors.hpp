// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// DLTensors of what tests have, and which kernels of libopd have the bits of this translation unit.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <type_traits>
#include <vector>

#include "opd/c/dlpack.h"
#include "opd/element.hpp"
#include "opd/view.hpp"

namespace opd::test {

template <class T>
constexpr DLDataType dl_type() {
    using U = std::remove_const_t<T>;
    constexpr auto bits = static_cast<std::uint8_t>(8 * sizeof(U));
    if constexpr (std::is_same_v<U, bfloat16>)
        return {kDLBfloat, bits, 1};
    else if constexpr (std::is_same_v<U, half> || std::is_floating_point_v<U>)
        return {kDLFloat, bits, 1};
    else if constexpr (std::is_same_v<U, bool>)
        return {kDLBool, bits, 1};
    else
        return {std::is_signed_v<U> ? std::uint8_t{kDLInt} : std::uint8_t{kDLUInt}, bits, 1};
}

/// A tensor over memory of the test's. It points into itself, so it stays where it is.
struct tensor : DLTensor {
    std::vector<std::int64_t> sizes, steps;

    template <class T>
    tensor(T* p, std::vector<std::int64_t> shape_, std::vector<std::int64_t> strides_ = {})
        : DLTensor{}, sizes(std::move(shape_)), steps(std::move(strides_)) {
        data = const_cast<std::remove_const_t<T>*>(p), device = {kDLCPU, 0};
        dtype = dl_type<T>(), ndim = static_cast<std::int32_t>(sizes.size());
        shape = sizes.data(), strides = steps.empty() ? nullptr : steps.data();
    }
    template <class T>
    tensor(const matrix_view<T>& m) : tensor(m.data, {m.rows, m.cols}, {m.stride, 1}) {}
    template <class T>
    tensor(const vector_view<T>& v) : tensor(v.data, {v.size}) {}
    template <class T>
    tensor(std::vector<T>& v) : tensor(v.data(), {static_cast<std::int64_t>(v.size())}) {}
    tensor(const tensor&) = delete;
    tensor& operator=(const tensor&) = delete;
};

/// Has libopd use the kernels that this unit was compiled for, if the processor and the library have them: their bits
/// are the same. Before the first call.
inline void choose_own_kernels() {
#if defined(__AVX512F__) && defined(__AVX512DQ__) && defined(__AVX512BW__) && defined(__AVX512VL__)
    ::setenv("OPD_ISA", "v4", 0);
#elif defined(__AVX2__) && defined(__FMA__)
    ::setenv("OPD_ISA", "v3", 0);
#else
    ::setenv("OPD_ISA", "base", 0);
#endif
}

} // namespace opd::test
