// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Ids as int64, which the kernels are compiled for: int32 is copied, into memory that the thread keeps. An id takes 8
// bytes; its logit is read from another line of memory.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "place.hpp"

namespace opd_c::kernel {

/// `slot`: of the arrays of ids that a call has at once.
inline std::vector<std::int64_t>& kept_ids_memory(int slot) {
    thread_local std::array<std::vector<std::int64_t>, 4> memory;
    return memory[static_cast<std::size_t>(slot)];
}

/// Of ids that are of neither type, or are to be copied where this thread cannot read them.
inline void refuse_id_type(const char* name, const DLTensor& t) {
    if (opd_c::type_of(t) != dtype::int32) opd_c::detail::refuse_type(name, t, on_device ? "int64" : "int32 or int64");
    if (on_device) throw opd::unsupported(std::string("opd: ") + name + " is of int32; on a device ids are int64");
}
inline opd::matrix_view<const std::int64_t, where> id_matrix(int slot, const char* name, const DLTensor* t) {
    if (t == nullptr) return {};
    if (opd_c::type_of(*t) == dtype::int64) return matrix<const std::int64_t>(name, t);
    refuse_id_type(name, *t);
    const auto from = matrix<const std::int32_t>(name, t);
    std::vector<std::int64_t>& to = kept_ids_memory(slot);
    to.resize(static_cast<std::size_t>(from.rows * from.cols) + 1); // never null
    for (index_t r = 0; r < from.rows; ++r)
        for (index_t j = 0; j < from.cols; ++j)
            to[static_cast<std::size_t>(r * from.cols + j)] = from.data[r * from.stride + j];
    return {to.data(), from.rows, from.cols, from.cols};
}
inline opd::vector_view<const std::int64_t, where> id_vector(int slot, const char* name, const DLTensor* t) {
    if (t == nullptr) return {};
    if (opd_c::type_of(*t) == dtype::int64) return vector<const std::int64_t>(name, t);
    refuse_id_type(name, *t);
    const auto from = vector<const std::int32_t>(name, t);
    std::vector<std::int64_t>& to = kept_ids_memory(slot);
    to.resize(static_cast<std::size_t>(from.size) + 1);
    for (index_t i = 0; i < from.size; ++i) to[static_cast<std::size_t>(i)] = from.data[i];
    return {to.data(), from.size};
}

} // namespace opd_c::kernel
