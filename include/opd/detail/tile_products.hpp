// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// head_logits (head_products.hpp) of a head for matrix tiles (backends/amx.hpp): blocks of 32 ids by 32 rows. The head is read as it lies;
// states are packed, in pairs of columns of 16 rows.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "opd/config.hpp"
#include "opd/detail/head_products.hpp"
#include "opd/element.hpp"
#include "opd/head.hpp"
#include "opd/threads.hpp"

namespace opd::detail {
inline namespace OPD_ISA {

/// 32 x 32 sums at a time, in four tiles: c[i, r] (+)= Σ_k a[i, k] b[r, k]. a: 32 rows of 32·steps numbers; b: of 16 rows each, (k/2, 16, 2).
struct tile_block {
    index_t steps;
    const void* a; ///< bfloat16
    index_t a_bytes;
    const void *b0, *b1; ///< bfloat16
    float* c;
    index_t c_bytes;
    bool goes_on;
    const char* fetched; ///< a line of each of `fetches` rows comes with every step
    index_t fetches;
};

struct tile_cuts {
    static constexpr index_t side = 32;   ///< ids and rows of a block, columns of a step
    static constexpr index_t rows = 256;  ///< of states that stay in the second-level cache, a piece of their columns
    static constexpr index_t depth = 512; ///< of a head's row at a time: those of a block stay in the first-level cache
    static constexpr index_t padded(index_t n) { return (n + side - 1) / side * side; }
};

/// Floats of memory that pack_pairs needs for n rows of width d.
constexpr index_t packed_pairs(index_t n, index_t d) { return tile_cuts::padded(n) * tile_cuts::padded(d) / 2; }

/// Bytes that a worker needs for up to `rows` rows.
constexpr std::size_t tile_scratch(index_t rows) {
    return sizeof(float) * std::size_t(head_cuts::ids * std::min(tile_cuts::padded(rows), tile_cuts::rows));
}

/// to[row / 16][k / 2][row % 16][k % 2]; 0 where there is no row or column.
template <class E>
void pack_pairs(const E* x, index_t stride, row_list rows, index_t d, float* memory, thread_team& team) {
    static_assert(brain_float<E>);
    auto* const to = reinterpret_cast<std::uint16_t*>(memory);
    const index_t width = tile_cuts::padded(d);
    team.run(tile_cuts::padded(rows.count) / 16, [&](index_t p, int) {
        std::uint16_t* const mine = to + p * 16 * width;
        std::fill_n(mine, 16 * width, std::uint16_t{0});
        for (index_t i = 0; i < std::min<index_t>(16, rows.count - p * 16); ++i) {
            const E* const from = x + rows.at[p * 16 + i] * stride;
            for (index_t k = 0; k < d; ++k) std::memcpy(mine + (k / 2 * 16 + i) * 2 + k % 2, from + k, 2);
        }
    });
}

/// Logits of ids [first, first + ids) and up to tile_cuts::rows rows: to out(r)[first…]. `packed`: those rows' first panel.
template <tiled_head Head, class Out>
void tile_logits_of_ids(const std::uint16_t* packed, index_t rows, const Head& head, index_t first, index_t ids,
                        index_t end, float* sums, const Out& out) {
    using cuts = tile_cuts;
    constexpr index_t side = cuts::side;
    const typename Head::tiles tiles;
    const index_t d = head.w.cols, width = cuts::padded(d), columns = cuts::padded(rows);
    const auto at = [&](index_t id, index_t k) { return head.w.data + id * head.w.stride + k; };
    alignas(64) std::uint16_t whole[side * cuts::depth]; // of a block that the head ends in
    for (index_t k = 0; k < d; k += cuts::depth) {
        const index_t depth = std::min(cuts::depth, d - k), padded = cuts::padded(depth);
        for (index_t i = 0; i < ids; i += side) {
            const void* a = at(first + i, k);
            index_t stride = head.w.stride;
            if (ids - i < side || padded != depth) {
                std::fill_n(whole, side * padded, std::uint16_t{0});
                for (index_t j = 0; j < std::min(side, ids - i); ++j)
                    std::memcpy(whole + j * padded, at(first + i + j, k), 2 * static_cast<std::size_t>(depth));
                a = whole, stride = padded;
            }
            // the ids after these, else the next piece of the first, else the next unit's
            const bool same_piece = i + 2 * side <= ids, last_piece = k + depth >= d;
            const index_t id = same_piece ? first + i + side : last_piece ? first + ids : first;
            const index_t then = same_piece ? k : last_piece ? 0 : k + depth;
            const index_t fetched = a == whole || id + side > end ? 0 : side;
            for (index_t r = 0; r < rows; r += side) {
                const index_t from = fetched * r / columns, to = fetched * (r + side) / columns;
                const std::uint16_t* const b = packed + r * width + k * 16;
                tiles.run({padded / side, a, 2 * stride, b, b + 16 * width, sums + i * columns + r,
                           index_t{sizeof(float)} * columns, k > 0,
                           fetched == 0 ? nullptr : reinterpret_cast<const char*>(at(id + from, then)), to - from});
            }
        }
    }
    write_rows(sums, columns, rows, first, ids, out);
}

/// As head_logits. `packed`: pack_pairs.
template <tiled_head Head, class Out>
void tile_logits(const float* packed, row_list rows, const Head& head, index_t begin, index_t end, thread_team& team,
                 worker_floats memory, const Out& out) {
    const auto* const pairs = reinterpret_cast<const std::uint16_t*>(packed);
    const index_t width = tile_cuts::padded(head.w.cols);
    each_unit_of_ids(rows, begin, end, tile_cuts::side, tile_cuts::rows, team,
                     [&](row_list mine, index_t from, index_t first, index_t ids, int worker) {
                         tile_logits_of_ids(pairs + from * width, mine.count, head, first, ids, end, memory.of(worker),
                                            [&](index_t i) { return out(mine.at[i]); });
                     });
}

} // namespace OPD_ISA
} // namespace opd::detail
