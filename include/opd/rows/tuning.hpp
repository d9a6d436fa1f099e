// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What to measure again on another processor: one struct an architecture. What the CPU's say changes no bit of any
// result; the GPU's say in which order numbers are added. Sizes that mean something (a leaf, a group) stand where
// they are meant.
#pragma once

#include "opd/config.hpp"

namespace opd::detail {
inline namespace OPD_ISA {

struct cpu_tuning {
    static constexpr int prefetch_ahead = 4096; ///< elements, where a pass reads a row from its beginning
    static constexpr int prefetch_back = 2048;  ///< elements, where one reads it from its end
    static constexpr index_t stream_from =
        64 * 1024; ///< elements: a shorter gradient may still be in L2 when it is read
    /// Entries at a row's end whose exponentials wait for the gradient: with AVX-512 what L2 holds beside their logits.
    /// Narrower registers take longer for an exponential than memory for a number.
#if defined(OPD_AVX512)
    static constexpr index_t kept_students = 32 * 1024;
#else
    static constexpr index_t kept_students = index_t{1} << 40;
#endif
};

} // namespace OPD_ISA

struct gpu_tuning {
    static constexpr int block_threads = 256;
    static constexpr int small_block_threads = 64; ///< where rows have few entries
    static constexpr int threads_at_once = 512;    ///< of a multiprocessor: what registers are rationed for
    static constexpr index_t few_rows = 128;       ///< up to which blocks share a row, for there are not enough rows
    static constexpr index_t ids_of_block = 16384; ///< of a row, before blocks share it
    static constexpr index_t most_blocks = 2;      ///< that share a row: a cluster's
    static constexpr int entries_at_a_time = 8;    ///< of a thread, before their sum is folded into double
    static constexpr index_t most_groups = 2048;   ///< blocks
    static constexpr index_t chunk_of_ids = 8192;  ///< of a row, that a block finishes where rows are few
    static constexpr index_t tile_rows = 128;      ///< of a matrix product: blocks of rows are whole ones
    static constexpr int id_words = 512;           ///< of 32 bits, of a support's set of ids in shared memory
};

} // namespace opd::detail
