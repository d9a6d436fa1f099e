// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The three products of a loss from hidden states, for a list of rows r and a head W (V,D):
//
//   head_logits     z[r, v]  = Σ_d x[r, d] W[v, d]              states lie across the lanes, a head's row is read as it lies, once
//   head_to_states  dx[r, d] = Σ_v g[r, v] W[v, d]               columns of D across the lanes
//   states_to_head  dW[v, d] += Σ_r g[r, v] x[r, d]              columns of D across the lanes
//
// Every output is one chain of multiply-adds in ascending order of what is summed, as product.hpp has it: neither the list, nor threads,
// nor how the work is cut change a bit. Whoever sums a vocabulary in dx says where its chains end.
//
// What costs is to have the head: at 64 rows it comes from memory for 64 multiply-adds a number. So it is read in long pieces of a row
// (1 kB and more), the next ones are fetched while these are used, and what is small is packed instead: the states.
#pragma once

#include <algorithm>
#include <cstddef>
#include <type_traits>

#include "opd/config.hpp"
#include "opd/detail/heads.hpp"
#include "opd/detail/product_tiles.hpp"
#include "opd/element.hpp"
#include "opd/lanes.hpp"
#include "opd/threads.hpp"

namespace opd::detail {
inline namespace OPD_ISA {

/// Rows of a batch, ascending.
struct row_list {
    const index_t* at = nullptr;
    index_t count = 0;
    row_list part(index_t first, index_t most) const { return {at + first, std::min(most, count - first)}; }
};

struct head_cuts {
    using shape = product_shape<lanes>;
    static constexpr index_t panel = shape::panel;
    static constexpr index_t ids = 96;             ///< of a unit of logits: what the states' panels are read for
    static constexpr index_t panels = 256 / panel; ///< of states that stay in the second-level cache
    static constexpr index_t rows = panels * panel;
    static constexpr index_t depth = 512;      ///< of a head's row at a time, in logits
    static constexpr index_t summed_ids = 128; ///< at a time, in dx: a panel of them stays in the first-level cache
    static constexpr index_t columns =
        1024; ///< of a unit of dx: what is packed of summed_ids stays in the second-level cache
    static constexpr index_t ids_of_gradient = 48;
    static constexpr index_t padded(index_t n) { return (n + panel - 1) / panel * panel; }
};

/// Memory of the products for each worker.
struct worker_floats {
    std::byte* base = nullptr;
    std::size_t each = 0;
    /// Bytes that a worker needs for the products of up to `rows` rows of width d.
    static constexpr std::size_t bytes(index_t rows, index_t d) {
        using cuts = head_cuts;
        const index_t some = std::min(cuts::padded(rows), cuts::rows);
        const index_t floats =
            std::max({cuts::ids * some, (some + std::min(cuts::padded(d), cuts::columns)) * cuts::summed_ids,
                      some * cuts::ids_of_gradient});
        return sizeof(float) * std::size_t(floats);
    }
    float* of(int worker) const { return reinterpret_cast<float*>(base + each * std::size_t(worker)); }
};

/// to[p][i][lane] = W[first + i, d + panel·p + lane], 0 from `width` on.
template <class Head>
void copy_panels(const Head& head, index_t first, index_t ids, index_t d, index_t width, float* to) {
    constexpr index_t panel = head_cuts::panel;
    for (index_t i = 0; i < ids; ++i)
        for (index_t p = 0; p * panel < width; ++p) {
            const index_t count = std::min(panel, width - p * panel);
            float* const row = to + (p * ids + i) * panel;
            head.copy(first + i, 1, d + p * panel, count, row, panel);
            std::fill_n(row + count, panel - count, 0.0f);
        }
}

/// Floats that pack_states_across and pack_states_along write for n rows of width d.
constexpr index_t packed_across(index_t n, index_t d) { return head_cuts::padded(n) * d; }
constexpr index_t packed_along(index_t n, index_t d) { return head_cuts::padded(d) * n; }

/// to[p][left + k][lane], k < d, of panels `width` deep: rows side by side, for head_logits. Lanes without a row are 0.
template <class E>
void pack_states_across(const E* x, index_t stride, row_list rows, index_t d, float* to, index_t width, index_t left,
                        thread_team& team) {
    constexpr index_t panel = head_cuts::panel, piece = 128;
    const index_t pieces = (d + piece - 1) / piece;
    team.run((rows.count + panel - 1) / panel * pieces, [&](index_t unit, int) {
        const index_t p = unit / pieces, begin = unit % pieces * piece, end = std::min(d, begin + piece);
        float* const mine = to + (p * width + left) * panel;
        for (index_t lane = 0; lane < panel; ++lane) {
            const index_t i = p * panel + lane;
            const E* from = i < rows.count ? x + rows.at[i] * stride : nullptr;
            for (index_t k = begin; k < end; ++k) mine[k * panel + lane] = from ? element<E>::load(from[k]) : 0;
        }
    });
}

/// to[p][row][lane]: panels of columns, for states_to_head. Lanes without a column are 0.
template <class E>
void pack_states_along(const E* x, index_t stride, row_list rows, index_t d, float* to, thread_team& team) {
    constexpr index_t panel = head_cuts::panel;
    team.run((d + panel - 1) / panel, [&](index_t p, int) {
        const index_t begin = p * panel, count = std::min(panel, d - begin);
        for (index_t i = 0; i < rows.count; ++i) {
            const E* from = x + rows.at[i] * stride + begin;
            float* const row = to + (p * rows.count + i) * panel;
            for (index_t k = 0; k < panel; ++k) row[k] = k < count ? element<E>::load(from[k]) : 0;
        }
    });
}

/// What is fetched while a kernel runs: at every 16th step the same place of `rows` rows, or the next lines of a stretch of ids.
template <int Rows>
struct fetch_rows {
    const float* next;
    index_t stride;
    OPD_INLINE void operator()(index_t step) const {
        unroll<Rows>([&](auto r)
                         __attribute__((always_inline)) { __builtin_prefetch(next + r() * stride + step, 0, 3); });
    }
};
template <class Head>
struct fetch_ids {
    const Head* head;
    index_t id, last, left, width;
    index_t done = 0;
    OPD_INLINE void operator()(index_t) {
        constexpr index_t some = 8 * 64 / sizeof(float);
        if (id >= last) return;
        head->fetch(id, left + done, std::min(some, width - done));
        done += some;
        if (done >= width) done = 0, ++id;
    }
};

/// product_micro as a function: its many shapes are compiled once for all of the products.
template <int Rows, int Vectors, bool Part, class Hint>
[[gnu::noinline]] void head_micro(index_t depth, const float* a, index_t a_row, index_t a_depth, const float* b,
                                  const float* from, index_t from_row, float* c, index_t c_row, int part, Hint& hint) {
    product_micro<lanes, Rows, Vectors, Part, Hint&>(depth, a, a_row, a_depth, b, head_cuts::panel, from, from_row, c,
                                                     c_row, part, hint);
}
/// f(first, rows) for pieces of [0, count) of as many rows as registers hold, then of 4, 2 and 1.
template <int Vectors, class Function>
OPD_INLINE void each_piece(index_t count, Function&& f) {
    constexpr int full = head_cuts::shape::rows(Vectors);
    index_t i = 0;
    for (; i + full <= count; i += full) f(i, std::integral_constant<int, full>{});
    if constexpr (full > 4)
        for (; i + 4 <= count; i += 4) f(i, std::integral_constant<int, 4>{});
    for (; i + 2 <= count; i += 2) f(i, std::integral_constant<int, 2>{});
    if (i < count) f(i, std::integral_constant<int, 1>{});
}
/// f(vectors) with a constant number of registers that hold `columns` of a panel.
template <class Function>
OPD_INLINE void with_vectors(index_t columns, Function&& f) {
    const index_t vectors = (columns + lanes::width - 1) / lanes::width;
    unroll<head_cuts::shape::vectors>([&](auto less) __attribute__((always_inline)) {
        constexpr bool last = less() + 1 == head_cuts::shape::vectors;
        if (vectors == less() + 1 || (last && vectors > less())) f(std::integral_constant<int, less() + 1>{});
    });
}

/// Logits of ids [first, first + ids) and the states of up to head_cuts::rows rows, packed in panels `width` deep: to out(r)[first…].
template <class Whole, class Out>
void logits_of_ids(const float* packed, index_t width, index_t rows, const Whole& head, index_t first, index_t ids,
                   index_t end, float* sums, const Out& out) {
    using cuts = head_cuts;
    constexpr index_t panel = cuts::panel, lane = lanes::width;
    const index_t columns = cuts::padded(rows); // of sums, a row an id
    head.parts([&](const auto& part, index_t left) {
        for (index_t k = 0; k < part.width; k += cuts::depth) {
            const index_t depth = std::min(cuts::depth, part.width - k);
            const bool last_piece = k + depth >= part.width;
            for (index_t p = 0; p < rows; p += panel)
                with_vectors(rows - p, [&](auto vectors) {
                    each_piece<vectors()>(ids, [&](index_t i, auto height) {
                        float* const c = sums + i * columns + p;
                        const float* const from = left + k > 0 ? c : nullptr;
                        const float* const b = packed + p * width + (left + k) * panel;
                        no_hint nothing;
                        if constexpr (std::remove_cvref_t<decltype(part)>::in_place) {
                            const float* const w = part.at(first + i, k);
                            const auto run = [&](auto hint) {
                                head_micro<height(), vectors(), false>(depth, w, part.stride, 1, b, from, columns, c,
                                                                       columns, 0, hint);
                            };
                            // the ids after these, else the next piece of the first, else the next unit's
                            const bool same_piece = i + 2 * height() <= ids;
                            const index_t id = same_piece ? first + i + height() : last_piece ? first + ids : first;
                            const index_t next = same_piece ? k : last_piece ? 0 : k + depth;
                            if (p == 0 && id + height() <= end)
                                run(fetch_rows<height()>{part.at(id, next), part.stride});
                            else
                                run(nothing);
                        } else {
                            float piece[height() * cuts::depth];
                            part.copy(first + i, height(), k, depth, piece, depth);
                            head_micro<height(), vectors(), false>(depth, piece, depth, 1, b, from, columns, c, columns,
                                                                   0, nothing);
                        }
                    });
                });
        }
    });
    // rows of logits from columns of them: some rows at a time, each then written in one piece, since rows lie pages apart
    alignas(64) float turned[lane * cuts::ids];
    for (index_t r = 0; r < rows; r += lane) {
        for (index_t i = 0; i < ids; i += lane) {
            if (i + lane > ids) {
                for (index_t q = 0; q < lane; ++q)
                    for (index_t j = i; j < ids; ++j) turned[q * cuts::ids + j] = sums[j * columns + r + q];
                continue;
            }
            lanes x[lane];
            unroll<lane>([&](auto j)
                             __attribute__((always_inline)) { x[j()] = lanes::load(sums + (i + j()) * columns + r); });
            transpose(x);
            unroll<lane>([&](auto j) __attribute__((always_inline)) { x[j()].store(turned + j() * cuts::ids + i); });
        }
        for (index_t q = 0; q < std::min<index_t>(lane, rows - r); ++q)
            std::copy_n(turned + q * cuts::ids, ids, out(r + q) + first);
    }
}

/// z of ids [begin, end) for each row of the list: out(r) is where row r's logits lie, id 0 first. `packed`: pack_states_across, of which
/// a narrower head takes the first columns.
template <class Head, class Out>
void head_logits(const float* packed, index_t width, row_list rows, const Head& head, index_t begin, index_t end,
                 thread_team& team, worker_floats memory, const Out& out) {
    using cuts = head_cuts;
    const index_t across = (rows.count + cuts::rows - 1) / cuts::rows,
                  units = (end - begin + cuts::ids - 1) / cuts::ids;
    team.run(units * across, [&](index_t unit, int worker) {
        const index_t first = begin + unit / across * cuts::ids, from = unit % across * cuts::rows;
        const row_list mine = rows.part(from, cuts::rows);
        logits_of_ids(packed + from * width, width, mine.count, head, first, std::min(cuts::ids, end - first), end,
                      memory.of(worker), [&](index_t i) { return out(mine.at[i]); });
    });
}

/// sums[i, d] (stride padded(D)) = Σ over ids [begin, end) of g of the i-th row of the list times W; `goes_on`: from what sums hold.
/// gradient(r): that of row r, id 0 first.
template <class Head, class Gradient>
void head_to_states(const Gradient& gradient, row_list rows, const Head& head, index_t begin, index_t end, index_t d,
                    bool goes_on, float* sums, thread_team& team, worker_floats memory) {
    using cuts = head_cuts;
    constexpr index_t panel = cuts::panel;
    const index_t stride = cuts::padded(d), panels = stride / panel, at_most = cuts::columns / panel;
    // few units where there are few threads: pieces of a head's rows as long as they can be
    const index_t units =
        std::min(panels, std::max<index_t>((panels + at_most - 1) / at_most, team.size() > 1 ? 2 * team.size() : 1));
    team.run(units, [&](index_t unit, int worker) {
        float* const mine = memory.of(worker); // (rows, ids) of g
        float* const of_head =
            mine + std::min(cuts::padded(rows.count), cuts::rows) * cuts::summed_ids; // (panels, ids, columns)
        const index_t first = panels * unit / units, last = panels * (unit + 1) / units;
        const index_t left = first * panel, width = std::min(last * panel, d) - left;
        for (index_t v = begin; v < end; v += cuts::summed_ids) {
            const index_t ids = std::min(cuts::summed_ids, end - v);
            copy_panels(head, v, ids, left, width, of_head);
            fetch_ids<Head> ahead{&head, v + ids, std::min(end, v + ids + cuts::summed_ids), left, width};
            for (index_t from = 0; from < rows.count; from += cuts::rows) {
                const row_list some = rows.part(from, cuts::rows);
                for (index_t i = 0; i < some.count; ++i) std::copy_n(gradient(some.at[i]) + v, ids, mine + i * ids);
                for (index_t p = first; p < last; ++p)
                    each_piece<cuts::shape::vectors>(some.count, [&](index_t i, auto height) {
                        float* const c = sums + (from + i) * stride + p * panel;
                        head_micro<height(), cuts::shape::vectors, false>(
                            ids, mine + i * ids, ids, 1, of_head + (p - first) * ids * panel,
                            goes_on || v > begin ? c : nullptr, stride, c, stride, 0, ahead);
                    });
            }
        }
    });
}

/// dW[v, ·] (+)= Σ over the list of g[r, v] x[r, ·], for ids [begin, end); `adds`: to what is there. `packed`: pack_states_along.
template <class Gradient>
void states_to_head(const Gradient& gradient, row_list rows, const float* packed, index_t d, index_t begin, index_t end,
                    bool adds, float* dw, index_t stride, thread_team& team, worker_floats memory) {
    using cuts = head_cuts;
    constexpr index_t panel = cuts::panel, width = lanes::width;
    team.run((end - begin + cuts::ids_of_gradient - 1) / cuts::ids_of_gradient, [&](index_t unit, int worker) {
        float* const mine = memory.of(worker); // (rows, ids) of g
        const index_t v = begin + unit * cuts::ids_of_gradient, ids = std::min(cuts::ids_of_gradient, end - v);
        if (rows.count == 0 && !adds)
            for (index_t i = 0; i < ids; ++i) std::fill_n(dw + (v + i) * stride, d, 0.0f);
        for (index_t from = 0; from < rows.count; from += cuts::rows) {
            const row_list some = rows.part(from, cuts::rows);
            for (index_t i = 0; i < some.count; ++i) std::copy_n(gradient(some.at[i]) + v, ids, mine + i * ids);
            for (index_t column = 0; column < d; column += panel) {
                const float* const b = packed + (column / panel * rows.count + from) * panel;
                const index_t real = std::min(panel, d - column);
                const int part = static_cast<int>(real % width);
                const bool goes_on = adds || from > 0;
                with_vectors(real, [&](auto vectors) {
                    each_piece<vectors()>(ids, [&](index_t i, auto height) {
                        float* const c = dw + (v + i) * stride + column;
                        const auto run = [&](auto partly) {
                            no_hint nothing;
                            head_micro<height(), vectors(), partly()>(some.count, mine + i, 1, ids, b,
                                                                      goes_on ? c : nullptr, stride, c, stride, part,
                                                                      nothing);
                        };
                        part == 0 ? run(std::false_type{}) : run(std::true_type{});
                    });
                });
            }
        }
    });
}

} // namespace OPD_ISA
} // namespace opd::detail
