// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The three products of a loss from hidden states (head_products.hpp) through matrix tiles (backends/amx.hpp), which
// multiply bfloat16 and add up in float. A number that is stored as bfloat16 is one; a float is the sum of three, cut
// off one after the other, exactly:
//
//   x = x0 + x1 + x2,  8 bits each;      x y ≈ x0 y2 + x0 y1 + x0 y0 + x2 y0 + x1 y0 + x1 y1
//
// What is left out of x y is below 2^-22 of it, the size of float's own roundings, so all products are those of floats.
//
//   tile_logits      z[r, v]               ids down, rows across      head: as it lies, or its parts
//                                                                     states: in pairs of columns
//   tile_to_states   dx[r, d], sums of     rows down, columns across  dz: parts; head: in pairs of ids
//   tile_to_head     dW[v, d] +=           ids down, columns across   dz: parts, turned; states: in pairs of rows
//
// Work is cut into blocks of 32 x 32 outputs, and sums go in steps of 32: columns, ids from `begin` on, rows of the
// batch (tile_rows). No bit depends on anything else.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "opd/config.hpp"
#include "opd/element.hpp"
#include "opd/head.hpp"
#include "opd/lanes.hpp"
#include "opd/products/head_products.hpp"
#include "opd/threads.hpp"

namespace opd::detail {
inline namespace OPD_ISA {

/// What comes while a block runs: at each step a line of each of `rows` rows.
struct tile_fetch {
    const char* at = nullptr;
    index_t stride = 0, rows = 0; ///< stride in bytes
    OPD_INLINE void operator()(index_t step) const {
        for (index_t r = 0; r < rows; ++r) __builtin_prefetch(at + r * stride + step * 64, 0, 2);
    }
};

/// 32 x 32 sums at a time, in four tiles: c[i, j] = from[i, j] + Σ_k a[i, k] b[j, k] of 32·steps numbers k, a and b
/// being sums of parts.
struct tile_block {
    index_t steps;
    const std::uint16_t* a; ///< (32, k)
    index_t a_row, a_part;  ///< from one to the next, in numbers
    const std::uint16_t* b; ///< of 16 j each, twice: (k/2, 16, 2)
    index_t b_half, b_part;
    const float* from; ///< null: 0
    index_t from_row;
    float* c;
    index_t c_row;
    tile_fetch next = {};
};

struct tile_cuts {
    static constexpr index_t side = 32; ///< of a block, and of a step
    static constexpr index_t rows = 256;
    static constexpr index_t columns = 512;                                    ///< of a head's piece, in dx
    static constexpr index_t ids_of_gradient = 384, columns_of_gradient = 256; ///< of dW at a time
    /// Of what is summed, at a time: a block of both operands stays in the first-level cache.
    static constexpr index_t depth = 128, depth_of_one = 512; ///< where either has three parts; where both have one
    static constexpr index_t padded(index_t n) { return (n + side - 1) / side * side; }
    /// Of rows of dx's sums: rows that lie a power of 2 apart would meet in few sets of the caches.
    static constexpr index_t stride_of_sums(index_t d) { return (padded(d) / side | 1) * side; }
};
/// What is summed comes in pieces, and each piece of an operand lies in one place, its blocks one after the other. Of
/// a piece that begins at k:
struct tile_piece {
    index_t k, depth; ///< a multiple of 32
    static tile_piece at(index_t k, index_t all, index_t most) { return {k, std::min(most, all - k)}; }
    /// Where `height` (16 or 32) neighbours begin, the first of them the `first` of `count`; then part by part.
    index_t place(index_t first, index_t count, int parts) const { return parts * (count * k + first * depth); }
};
/// Of logits: how much of the width at a time.
template <int A, int B>
inline constexpr index_t logits_depth = A* B == 1 ? tile_cuts::depth_of_one : tile_cuts::depth;

/// bfloat16 numbers that a stored number is the sum of.
template <class E>
inline constexpr int tile_parts = brain_float<E> ? 1 : 3;
inline constexpr int gradient_parts = tile_parts<float>;

/// The parts of numbers in lanes, each in the upper half; below the last one's there is nothing.
template <int Parts>
struct cut_lanes {
    typedef std::uint32_t uvec __attribute__((vector_size(4 * lanes::width)));
    typedef std::uint16_t hvec __attribute__((vector_size(4 * lanes::width)));
    uvec at[std::size_t(Parts)];
    OPD_INLINE explicit cut_lanes(lanes x) {
        unroll<Parts>([&](auto p) OPD_INLINE_LAMBDA {
            at[p()] = std::bit_cast<uvec>(x.v) & 0xffff0000u;
            if constexpr (p() + 1 < Parts) x = x - lanes::raw(std::bit_cast<lanes::vec>(at[p()]));
        });
    }
    /// Part p of these and of those that follow.
    OPD_INLINE void store(int p, const cut_lanes& then, std::uint16_t* to) const {
        [&]<int... I>(std::integer_sequence<int, I...>) OPD_INLINE_LAMBDA {
            const hvec both =
                __builtin_shufflevector(std::bit_cast<hvec>(at[p]), std::bit_cast<hvec>(then.at[p]), (2 * I + 1)...);
            std::memcpy(to, &both, sizeof both);
        }
        (std::make_integer_sequence<int, 2 * lanes::width>{});
    }
    /// Part p of each of these, and beside it that of another.
    OPD_INLINE void store_pair(int p, const cut_lanes& odd, std::uint16_t* to) const {
        const uvec both = at[p] >> 16 | odd.at[p];
        std::memcpy(to, &both, sizeof both);
    }
};
/// The first `count` numbers, then 0: up to a register.
template <class E>
OPD_INLINE lanes load_some(const E* from, index_t count) {
    return count >= lanes::width ? lanes::load(from) : load_part(from, static_cast<int>(count));
}
/// `count` numbers, and 0 up to `all`, a multiple of 32; each part to its place: to[p·part + j]. Meanwhile `ahead`
/// numbers further come.
template <class E>
OPD_INLINE void cut_row(const E* from, index_t count, index_t all, std::uint16_t* to, index_t part, index_t ahead = 0) {
    constexpr int parts = tile_parts<E>;
    constexpr index_t w = lanes::width;
    const auto store = [&](lanes x, lanes y, index_t j) OPD_INLINE_LAMBDA {
        const cut_lanes<parts> a(x), b(y);
        unroll<parts>([&](auto p) OPD_INLINE_LAMBDA { a.store(p(), b, to + p() * part + j); });
    };
    index_t j = 0;
    for (; j + 2 * w <= count; j += 2 * w) {
        if (ahead != 0)
            for (index_t b = 0; b < 2 * w * index_t{sizeof(E)}; b += 64)
                __builtin_prefetch(reinterpret_cast<const char*>(from + j + ahead) + b, 0, 2);
        store(lanes::load(from + j), lanes::load(from + j + w), j);
    }
    for (; j < all; j += 2 * w) {
        const index_t k = std::min(j, count), l = std::min(j + w, count);
        store(load_some(from + k, count - k), load_some(from + l, count - l), j);
    }
}
/// Two rows, column by column: to[column / 16][column % 16][which], panels `panel` apart. Null: zeros; `count`
/// columns are there, `all` written.
template <class E>
void cut_pair(const E* even, const E* odd, index_t count, index_t all, std::uint16_t* to, index_t panel, index_t part) {
    constexpr int parts = tile_parts<E>;
    const auto load = [&](const E* row, index_t j) OPD_INLINE_LAMBDA {
        return row == nullptr ? lanes(0) : load_some(row + std::min(j, count), count - j);
    };
    for (index_t j = 0; j < all; j += lanes::width) {
        const cut_lanes<parts> a(load(even, j)), b(load(odd, j));
        unroll<parts>([&](auto p)
                          OPD_INLINE_LAMBDA { a.store_pair(p(), b, to + p() * part + j / 16 * panel + j % 16 * 2); });
    }
}

/// A number a row of 32, absolute, of those that have one of a list: the row, or -1 if it is not in the list. What is
/// summed over rows is summed over these, and not over the list: so it is the same wherever blocks of whole 32 rows
/// begin.
inline row_list tile_rows(row_list rows, index_t* to) {
    index_t count = 0;
    for (index_t i = 0; i < rows.count; ++i) {
        const index_t place = rows.at[i] % tile_cuts::side;
        if (i == 0 || rows.at[i] / tile_cuts::side != rows.at[i - 1] / tile_cuts::side)
            std::fill_n(to + count, tile_cuts::side, index_t{-1}), count += tile_cuts::side;
        to[count - tile_cuts::side + place] = rows.at[i];
    }
    return {to, count};
}
/// Room for those of a list of so many rows out of as many neighbours.
constexpr index_t most_tile_rows(index_t rows) { return tile_cuts::padded(rows) + tile_cuts::side; }

/// Floats of memory for a matrix of numbers in parts.
constexpr index_t tile_floats(index_t rows, index_t columns, int parts) { return parts * rows * columns / 2; }
/// Bytes that a worker needs for the logits of up to `rows` rows and a head of numbers in so many parts; for all three
/// products.
constexpr std::size_t logits_scratch(index_t rows, int parts) {
    using cuts = tile_cuts;
    const index_t some = std::min(cuts::padded(rows), cuts::rows);
    return sizeof(float) * std::size_t(head_cuts::ids * some + tile_floats(cuts::side, cuts::depth_of_one, parts));
}
constexpr std::size_t tile_scratch(index_t rows, int parts) {
    using cuts = tile_cuts;
    const index_t some = std::min(cuts::padded(rows), cuts::rows);
    const index_t to_states =
                      tile_floats(cuts::depth, some, gradient_parts) + tile_floats(cuts::depth, cuts::columns, parts),
                  to_head = tile_floats(cuts::ids_of_gradient, cuts::rows, gradient_parts) +
                            cuts::ids_of_gradient * cuts::columns_of_gradient + cuts::side * cuts::side;
    return std::max(logits_scratch(rows, parts), sizeof(float) * std::size_t(std::max(to_states, to_head)));
}

/// States for tile_logits: of each tile_piece of the width to[row / 16][part][k / 2][row % 16][k % 2]; 0 where there
/// is no row or column.
template <index_t Depth, class E>
void pack_pairs(const E* x, index_t stride, row_list rows, index_t d, float* memory, thread_team& team) {
    constexpr int parts = tile_parts<E>;
    constexpr index_t side = tile_cuts::side;
    auto* const to = reinterpret_cast<std::uint16_t*>(memory);
    const index_t width = tile_cuts::padded(d), all = tile_cuts::padded(rows.count);
    team.run(all / 16, [&](index_t panel, int) {
        for (index_t i = 0; i < 16; ++i) {
            const index_t r = panel * 16 + i, count = r < rows.count ? d : 0;
            const E* const from = x + (r < rows.count ? rows.at[r] : 0) * stride;
            for (index_t k = 0; k < width; k += side) {
                const auto piece = tile_piece::at(k / Depth * Depth, width, Depth);
                std::uint16_t* const there = to + piece.place(panel * 16, all, parts) + (k - piece.k) * 16 + i * 2;
                std::uint16_t row[std::size_t(parts)][std::size_t(side)];
                cut_row(from + std::min(k, count), std::min(side, count - k), side, row[0], side);
                for (int p = 0; p < parts; ++p)
                    for (index_t j = 0; j < side; j += 2)
                        std::memcpy(there + p * piece.depth * 16 + j * 16, row[p] + j, 4);
            }
        }
    });
}
/// States for tile_to_head, of tile_rows: to[column / 16][part][row / 2][column % 16][row % 2].
template <class E>
void pack_pairs_of_rows(const E* x, index_t stride, row_list rows, index_t d, float* memory, thread_team& team) {
    constexpr int parts = tile_parts<E>;
    auto* const to = reinterpret_cast<std::uint16_t*>(memory);
    const auto row = [&](index_t i) { return rows.at[i] < 0 ? nullptr : x + rows.at[i] * stride; };
    team.run(rows.count / 2, [&](index_t i, int) {
        cut_pair(row(2 * i), row(2 * i + 1), d, tile_cuts::padded(d), to + 32 * i, 16 * parts * rows.count,
                 16 * rows.count);
    });
}

/// Logits of ids [first, first + ids) and rows [from, from + rows) of the `all` packed ones, up to tile_cuts::rows:
/// to out(r)[first…].
template <int Parts, tiled_head Head, class Out>
void tile_logits_of_ids(const std::uint16_t* packed, index_t all, index_t from, index_t rows, const Head& head,
                        index_t first, index_t ids, index_t end, float* sums, const Out& out) {
    using cuts = tile_cuts;
    using number = typename Head::number;
    constexpr int parts = tile_parts<number>;
    constexpr index_t side = cuts::side, at_once = logits_depth<parts, Parts>;
    const typename Head::tiles tiles;
    const index_t d = head.w.cols, columns = cuts::padded(rows), stride = head.w.stride;
    const auto at = [&](index_t id, index_t k) { return head.w.data + id * stride + k; };
    auto* const cut_ids = reinterpret_cast<std::uint16_t*>(sums + head_cuts::ids * columns); // (part, id, k)
    for (index_t k = 0; k < d; k += at_once) {
        const auto piece = tile_piece::at(k, cuts::padded(d), at_once);
        const index_t depth = std::min(at_once, d - k);
        for (index_t i = 0; i < ids; i += side) {
            const bool whole = ids - i >= side && piece.depth == depth, as_it_lies = parts == 1 && whole;
            // the ids after these, else the next piece of the first, else the next unit's
            const bool same_piece = i + 2 * side <= ids, last_piece = k + depth >= d;
            const index_t id = same_piece ? first + i + side : last_piece ? first + ids : first;
            const index_t then = same_piece ? k : last_piece ? 0 : k + depth;
            const index_t fetched = whole && id + side <= end && then + depth <= d ? side : 0;
            if (!as_it_lies) // of ids beyond the last, its own again: nobody reads their sums
                for (index_t j = 0; j < side; ++j)
                    cut_row(at(first + std::min(i + j, ids - 1), k), depth, piece.depth, cut_ids + j * piece.depth,
                            side * piece.depth, fetched > 0 ? at(id, then) - at(first + i, k) : 0);
            const auto* const a = as_it_lies ? reinterpret_cast<const std::uint16_t*>(at(first + i, k)) : cut_ids;
            for (index_t r = 0; r < rows; r += side) {
                const index_t begins = fetched * r / columns, ends = fetched * (r + side) / columns;
                tile_fetch next;
                if (as_it_lies && begins < ends)
                    next = {reinterpret_cast<const char*>(at(id + begins, then)), 2 * stride, ends - begins};
                float* const c = sums + i * columns + r;
                tiles.template run<parts, Parts>({piece.depth / side, a, as_it_lies ? stride : piece.depth,
                                                  side * piece.depth, packed + piece.place(from + r, all, Parts),
                                                  16 * Parts * piece.depth, 16 * piece.depth, k > 0 ? c : nullptr,
                                                  columns, c, columns, next});
            }
        }
    }
    write_rows(sums, columns, rows, first, ids, out);
}

/// As head_logits, of states of E. `packed`: pack_pairs.
template <class E, tiled_head Head, class Out>
void tile_logits(const float* packed, row_list rows, const Head& head, index_t begin, index_t end, thread_team& team,
                 worker_floats memory, const Out& out) {
    const auto* const pairs = reinterpret_cast<const std::uint16_t*>(packed);
    each_unit_of_ids(rows, begin, end, tile_cuts::side, tile_cuts::rows, team,
                     [&](row_list mine, index_t from, index_t first, index_t ids, int worker) {
                         tile_logits_of_ids<tile_parts<E>>(pairs, tile_cuts::padded(rows.count), from, mine.count, head,
                                                           first, ids, end, memory.of(worker),
                                                           [&](index_t i) { return out(mine.at[i]); });
                     });
}

/// As head_to_states; sums are padded(rows) rows, stride_of_sums(D) apart.
template <tiled_head Head, class Gradient>
void tile_to_states(const Gradient& gradient, row_list rows, const Head& head, index_t begin, index_t end, bool goes_on,
                    float* sums, thread_team& team, worker_floats memory) {
    using cuts = tile_cuts;
    using number = typename Head::number;
    constexpr int parts = tile_parts<number>;
    constexpr index_t side = cuts::side;
    const index_t d = head.w.cols, stride = cuts::stride_of_sums(d), blocks = cuts::padded(d) / side;
    const index_t units = std::min(blocks, std::max<index_t>((d + 1023) / 1024, team.size()));
    team.run(units, [&](index_t unit, int worker) {
        const typename Head::tiles tiles;
        const index_t left = blocks * unit / units * side, right = blocks * (unit + 1) / units * side;
        auto* const of_rows = reinterpret_cast<std::uint16_t*>(memory.of(worker)); // (row / 32, part, row % 32, id)
        auto* const of_head = // (column / 16, part, id / 2, column % 16, id % 2)
            of_rows + 2 * tile_floats(cuts::depth, std::min(cuts::padded(rows.count), cuts::rows), gradient_parts);
        const auto at = [&](index_t id, index_t c) { return head.w.data + id * head.w.stride + c; };
        for (index_t v = begin; v < end; v += cuts::depth) {
            const index_t ids = std::min(cuts::depth, end - v), depth = cuts::padded(ids);
            for (index_t from = 0; from < rows.count; from += cuts::rows) {
                const row_list here = rows.part(from, cuts::rows);
                const index_t down = cuts::padded(here.count);
                for (index_t i = 0; i < down; ++i)
                    cut_row(gradient(here.at[std::min(i, here.count - 1)]) + v, ids, depth,
                            of_rows + (i / side * gradient_parts * side + i % side) * depth, side * depth);
                for (index_t c = left; c < right; c += cuts::columns) {
                    const index_t across = std::min(cuts::columns, right - c), real = std::min(across, d - c);
                    for (index_t k = 0; k < depth; k += 2)
                        cut_pair<number>(k < ids ? at(v + k, c) : nullptr, k + 1 < ids ? at(v + k + 1, c) : nullptr,
                                         real, across, of_head + 16 * k, 16 * parts * depth, 16 * depth);
                    for (index_t r = 0; r < down; r += side)
                        for (index_t j = 0; j < across; j += side) {
                            float* const to = sums + (from + r) * stride + c + j;
                            tiles.template run<gradient_parts, parts>(
                                {depth / side, of_rows + gradient_parts * r * depth, depth, side * depth,
                                 of_head + parts * j * depth, 16 * parts * depth, 16 * depth,
                                 goes_on || v > begin ? to : nullptr, stride, to, stride});
                        }
                }
            }
        }
    });
}

/// dz of tile_rows, from id v on, turned: of each tile_piece of the rows to[id / 32][part][id % 32][row]; 0 up to a
/// multiple of 32 ids.
template <class Gradient>
void turn_gradient(const Gradient& gradient, row_list rows, index_t v, index_t ids, std::uint16_t* to) {
    using cuts = tile_cuts;
    constexpr index_t w = lanes::width, side = cuts::side;
    const index_t all = cuts::padded(ids);
    for (index_t r = 0; r < rows.count; r += 2 * w) {
        const auto piece = tile_piece::at(r / cuts::depth * cuts::depth, rows.count, cuts::depth);
        const auto number = [&](index_t j) { return rows.at[r + j] < 0 ? nullptr : gradient(rows.at[r + j]) + v; };
        for (index_t i = 0; i < all; i += w) {
            alignas(64) float turned[w][2 * w];
            unroll<2>([&](auto half) OPD_INLINE_LAMBDA {
                lanes x[w];
                unroll<w>([&](auto j) OPD_INLINE_LAMBDA {
                    const float* const from = number(half() * w + j());
                    x[j()] = from == nullptr ? lanes(0) : load_some(from + std::min(i, ids), ids - i);
                });
                transpose(x);
                unroll<w>([&](auto q) OPD_INLINE_LAMBDA { x[q()].store(turned[q()] + half() * w); });
            });
            std::uint16_t* const block = to + piece.place(i / side * side, all, gradient_parts) + (r - piece.k);
            for (index_t q = 0; q < w; ++q)
                cut_row(turned[q], 2 * w, 2 * w, block + (i + q) % side * piece.depth, side * piece.depth);
        }
    }
}

/// As states_to_head, of states of E. `rows`: tile_rows; `packed`: pack_pairs_of_rows.
template <class E, class Tiles, class Gradient>
void tile_to_head(const Gradient& gradient, row_list rows, const float* packed, index_t d, index_t begin, index_t end,
                  bool adds, float* dw, index_t stride, thread_team& team, worker_floats memory) {
    using cuts = tile_cuts;
    constexpr int parts = tile_parts<E>;
    constexpr index_t side = cuts::side, block = side * side;
    const auto* const pairs = reinterpret_cast<const std::uint16_t*>(packed);
    team.run((end - begin + cuts::ids_of_gradient - 1) / cuts::ids_of_gradient, [&](index_t unit, int worker) {
        const Tiles tiles;
        float *const edge = memory.of(worker), *const sums = edge + block; // (column / 32, id, column % 32)
        auto* const of_ids = reinterpret_cast<std::uint16_t*>(sums + cuts::ids_of_gradient * cuts::columns_of_gradient);
        const index_t v = begin + unit * cuts::ids_of_gradient, ids = std::min(cuts::ids_of_gradient, end - v);
        if (rows.count == 0 && !adds)
            for (index_t i = 0; i < ids; ++i) std::fill_n(dw + (v + i) * stride, d, 0.0f);
        for (index_t from = 0; from < rows.count; from += cuts::rows) {
            const row_list some = rows.part(from, cuts::rows);
            turn_gradient(gradient, some, v, ids, of_ids);
            const auto run = [&](tile_piece piece, index_t i, index_t c, float* sum) {
                float* const out = dw + (v + i) * stride + c;
                const index_t down = std::min(side, ids - i), across = std::min(side, d - c);
                const bool first = piece.k == 0, last = piece.k + piece.depth == some.count;
                const bool whole = down == side && across == side, adds_here = adds || from > 0;
                const auto copy = [&](const float* x, index_t x_row, float* y, index_t y_row) {
                    for (index_t j = 0; j < down; ++j) std::copy_n(x + j * x_row, across, y + j * y_row);
                };
                if (first && adds_here && !whole) copy(out, stride, edge, side);
                const float* const begins = !first ? sum : !adds_here ? nullptr : whole ? out : edge;
                float* const ends = !last ? sum : whole ? out : edge;
                tiles.template run<gradient_parts, parts>(
                    {piece.depth / side, of_ids + piece.place(i, cuts::padded(ids), gradient_parts), piece.depth,
                     side * piece.depth, pairs + c * parts * rows.count + (from + piece.k) * 16,
                     16 * parts * rows.count, 16 * rows.count, begins, begins == out ? stride : side, ends,
                     ends == out ? stride : side});
                if (last && !whole) copy(edge, side, out, stride);
            };
            for (index_t left = 0; left < d; left += cuts::columns_of_gradient)
                for (index_t k = 0; k < some.count; k += cuts::depth)
                    for (index_t i = 0; i < ids; i += side)
                        for (index_t c = left; c < std::min(d, left + cuts::columns_of_gradient); c += side)
                            run(tile_piece::at(k, some.count, cuts::depth), i, c,
                                sums + (c - left) * cuts::ids_of_gradient + i * side);
        }
    });
}

} // namespace OPD_ISA
} // namespace opd::detail
