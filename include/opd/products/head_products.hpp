// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The three products of a loss from hidden states, for a list of rows r and a head W (V,D):
//
//   head_logits     z[r, v]  = Σ_d x[r, d] W[v, d]              states lie across the lanes, a head's row is read as it
//                                                               lies, once
//   head_to_states  dx[r, d] = Σ_v g[r, v] W[v, d]               columns of D across the lanes
//   states_to_head  dW[v, d] += Σ_r g[r, v] x[r, d]              columns of D across the lanes
//
// Every output is one chain of multiply-adds in ascending order of what is summed, as product.hpp has it: neither the
// list, nor threads, nor how the work is cut change a bit. Whoever sums a vocabulary in dx says where its chains end.
//
// What costs is to have the head: at 64 rows it comes from memory for 64 multiply-adds a number. So it is read in
// long pieces of a row (1 kB and more), the next ones are fetched while these are used, and what is small is packed
// instead: the states.
#pragma once

#include <algorithm>
#include <cstddef>
#include <type_traits>

#include "opd/config.hpp"
#include "opd/element.hpp"
#include "opd/lanes.hpp"
#include "opd/products/heads.hpp"
#include "opd/products/product_tiles.hpp"
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
    static constexpr index_t panel = shape::panel, tall = shape::rows(shape::vectors); ///< of a tile of a product
    static constexpr index_t ids = 384;    ///< of a unit of logits, at most: what the states' panels are read for
    static constexpr index_t few_ids = 48; ///< of one at least
    static constexpr index_t panels = 256 / panel; ///< of states that stay in the second-level cache
    static constexpr index_t rows = panels * panel;
    static constexpr index_t depth = 512;    ///< of a head's row at a time, in logits
    static constexpr index_t columns = 1024; ///< of a unit of dx, at most
    static constexpr index_t packed =
        65536; ///< numbers of the head at a time, in dx: they stay in the second-level cache
    static constexpr index_t most_summed = 256;
    /// Ids at a time, in dx, of a unit of so many columns, whole panels of them.
    static constexpr index_t summed_ids(index_t width) {
        return std::clamp<index_t>(packed / width / 16 * 16, 64, most_summed);
    }
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
        const index_t of_head = std::min(cuts::padded(d) * cuts::most_summed, cuts::packed);
        const index_t floats =
            std::max({cuts::ids * some, cuts::most_summed * some + of_head, cuts::ids_of_gradient * some});
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

/// What is fetched while a kernel runs, at every 16th step, evenly: what comes all at once keeps the kernel's own
/// loads waiting. The same place of `count` rows:
struct fetch_rows {
    const char* next = nullptr;
    index_t stride = 0, number = 0; ///< bytes
    int count = 0;
    OPD_INLINE void operator()(index_t step) const {
        if (step * number % 64 != 0) return; // of a bfloat16's line this is the second half
        for (int r = 0; r < count; ++r) __builtin_prefetch(next + r * stride + step * number, 0, 2);
    }
};
/// Of ids [first, last): a line of the rows' gradients, and `some` columns of the head.
template <class Head, class Gradient>
struct fetch_ids {
    const Head* head;
    const Gradient* gradient;
    row_list rows;
    index_t first, last, left, width, some;
    index_t row = first < last ? 0 : rows.count, of_row = 0, id = first, of_id = 0;
    OPD_INLINE void operator()(index_t) {
        if (row < rows.count) {
            __builtin_prefetch((*gradient)(rows.at[row]) + first + of_row, 0, 2);
            of_row += 64 / sizeof(float);
            if (of_row >= last - first) of_row = 0, ++row;
        }
        if (id < last) {
            head->fetch(id, left + of_id, std::min(some, width - of_id));
            of_id += some;
            if (of_id >= width) of_id = 0, ++id;
        }
    }
};

/// product_micro as a function: its many shapes are compiled once for all of the products.
template <int Rows, int Vectors, bool Part, class Hint>
[[gnu::noinline]] void head_micro(index_t depth, const float* a, index_t a_row, index_t a_depth, const float* b,
                                  const float* from, index_t from_row, float* c, index_t c_row, int part, Hint& hint) {
    product_micro<lanes, Rows, Vectors, Part, Hint&>(depth, a, a_row, a_depth, b, head_cuts::panel, from, from_row, c,
                                                     c_row, part, hint);
}
/// It with B as it lies, which is packed by the way.
template <int Rows, class Hint>
[[gnu::noinline]] void packing_micro(index_t depth, const float* a, index_t a_row, const float* b, index_t b_depth,
                                     float* packed, const float* from, index_t from_row, float* c, index_t c_row,
                                     Hint& hint) {
    constexpr int vectors = head_cuts::shape::vectors;
    product_micro<lanes, Rows, vectors, false, Hint&>(
        depth, a, a_row, 1, b, b_depth, from, from_row, c, c_row, 0, hint,
        [&](const lanes(&x)[vectors]) OPD_INLINE_LAMBDA {
            unroll<vectors>([&](auto v) OPD_INLINE_LAMBDA { x[v()].store(packed + v() * lanes::width); });
            packed += head_cuts::panel;
        });
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
    unroll<head_cuts::shape::vectors>([&](auto less) OPD_INLINE_LAMBDA {
        constexpr bool last = less() + 1 == head_cuts::shape::vectors;
        if (vectors == less() + 1 || (last && vectors > less())) f(std::integral_constant<int, less() + 1>{});
    });
}

/// sums[i, r] (+)= Σ_k W[id + i, k] x[r, k] for Height ids and columns [k, k + depth) of them: the ids' pieces stay
/// in the first-level cache while the states of all rows come by from the second. `packed`: the states' first panel,
/// from that column on. Each panel has a share of what is fetched meanwhile.
template <int Height, class Part>
OPD_INLINE void logits_of_piece(const Part& part, index_t id, index_t k, index_t depth, const float* packed,
                                index_t width, index_t rows, bool goes_on, float* sums, index_t columns,
                                fetch_rows next) {
    constexpr index_t panel = head_cuts::panel;
    float converted[Part::in_place ? 1 : Height * head_cuts::depth];
    const float* w = converted;
    index_t stride = depth;
    if constexpr (Part::in_place)
        w = part.at(id, k), stride = part.stride;
    else
        part.copy(id, Height, k, depth, converted, depth);
    const index_t all = next.count;
    for (index_t p = 0, left = all; p < rows; p += panel) {
        const index_t after = rows <= p + panel ? 0 : all * (rows - p - panel) / rows;
        next.count = static_cast<int>(left - after);
        with_vectors(rows - p, [&](auto vectors) {
            head_micro<Height, vectors(), false>(depth, w, stride, 1, packed + p * width, goes_on ? sums + p : nullptr,
                                                 columns, sums + p, columns, 0, next);
        });
        next.next += next.count * next.stride;
        left = after;
    }
}

/// Rows of logits from columns of them, (ids, columns): some rows at a time, each then written in one piece, since
/// rows lie pages apart.
template <class Out>
void write_rows(const float* sums, index_t columns, index_t rows, index_t first, index_t ids, const Out& out) {
    constexpr index_t lane = lanes::width, ids_at_most = head_cuts::ids;
    alignas(64) float turned[lane * ids_at_most];
    for (index_t r = 0; r < rows; r += lane) {
        for (index_t i = 0; i < ids; i += lane) {
            if (i + lane > ids) {
                for (index_t q = 0; q < lane; ++q)
                    for (index_t j = i; j < ids; ++j) turned[q * ids_at_most + j] = sums[j * columns + r + q];
                continue;
            }
            lanes x[lane];
            unroll<lane>([&](auto j) OPD_INLINE_LAMBDA { x[j()] = lanes::load(sums + (i + j()) * columns + r); });
            transpose(x);
            unroll<lane>([&](auto j) OPD_INLINE_LAMBDA { x[j()].store(turned + j() * ids_at_most + i); });
        }
        for (index_t q = 0; q < std::min<index_t>(lane, rows - r); ++q)
            std::copy_n(turned + q * ids_at_most, ids, out(r + q) + first);
    }
}

/// Logits of ids [first, first + ids) and the states of up to head_cuts::rows rows, packed in panels `width` deep: to
/// out(r)[first…].
template <class Whole, class Out>
void logits_of_ids(const float* packed, index_t width, index_t rows, const Whole& head, index_t first, index_t ids,
                   index_t end, float* sums, const Out& out) {
    using cuts = head_cuts;
    constexpr index_t panel = cuts::panel;
    const index_t columns = cuts::padded(rows); // of sums, a row an id
    head.parts([&](const auto& part, index_t left) {
        for (index_t k = 0; k < part.width; k += cuts::depth) {
            const index_t depth = std::min(cuts::depth, part.width - k);
            const bool last_piece = k + depth >= part.width, goes_on = left + k > 0;
            const float* const states = packed + (left + k) * panel;
            with_vectors(rows, [&](auto vectors) {
                each_piece<vectors()>(ids, [&](index_t i, auto height) {
                    fetch_rows next;
                    if constexpr (requires { part.at(first, k); }) {
                        // the ids after these, else the next piece of the first, else the next unit's
                        const bool same_piece = i + 2 * height() <= ids;
                        const index_t id = same_piece ? first + i + height() : last_piece ? first + ids : first;
                        const index_t column = same_piece ? k : last_piece ? 0 : k + depth;
                        constexpr index_t number = sizeof(*part.at(first, k));
                        if (id + height() <= end)
                            next = {reinterpret_cast<const char*>(part.at(id, column)), part.stride * number, number,
                                    height()};
                    }
                    logits_of_piece<height()>(part, first + i, k, depth, states, width, rows, goes_on,
                                              sums + i * columns, columns, next);
                });
            });
        }
    });
    write_rows(sums, columns, rows, first, ids, out);
}

/// f(rows, from, first, ids, worker): rows of the list from its `from`th on, at most `most` of them, and ids [first,
/// first + ids) of [begin, end), a multiple of `unit` but where they end. As many for each thread, unless ids are
/// few.
template <class Function>
void each_unit_of_ids(row_list rows, index_t begin, index_t end, index_t unit, index_t most, thread_team& team,
                      Function&& f) {
    using cuts = head_cuts;
    const index_t across = (rows.count + most - 1) / most, count = end - begin, threads = team.size();
    const index_t least = std::max<index_t>(1, (count + cuts::ids - 1) / cuts::ids);
    const index_t parts = (least + threads - 1) / threads * threads;
    const index_t ids =
        std::max((cuts::few_ids + unit - 1) / unit, ((count + parts - 1) / parts + unit - 1) / unit) * unit;
    team.run((count + ids - 1) / ids * across, [&](index_t u, int worker) {
        const index_t first = begin + u / across * ids, from = u % across * most;
        f(rows.part(from, most), from, first, std::min(ids, end - first), worker);
    });
}

/// z of ids [begin, end) for each row of the list: out(r) is where row r's logits lie, id 0 first. `packed`:
/// pack_states_across, of which a narrower head takes the first columns.
template <class Head, class Out>
void head_logits(const float* packed, index_t width, row_list rows, const Head& head, index_t begin, index_t end,
                 thread_team& team, worker_floats memory, const Out& out) {
    each_unit_of_ids(rows, begin, end, lanes::width, head_cuts::rows, team,
                     [&](row_list mine, index_t from, index_t first, index_t ids, int worker) {
                         logits_of_ids(packed + from * width, width, mine.count, head, first, ids, end,
                                       memory.of(worker), [&](index_t i) { return out(mine.at[i]); });
                     });
}

/// sums[i, d] (stride padded(D)) = Σ over ids [begin, end) of g of the i-th row of the list times W; `goes_on`: from
/// what sums hold. gradient(r): that of row r, id 0 first.
template <class Head, class Gradient>
void head_to_states(const Gradient& gradient, row_list rows, const Head& head, index_t begin, index_t end, index_t d,
                    bool goes_on, float* sums, thread_team& team, worker_floats memory) {
    using cuts = head_cuts;
    constexpr index_t panel = cuts::panel;
    const index_t stride = cuts::padded(d), panels = stride / panel, at_most = cuts::columns / panel;
    const index_t pieces = (rows.count + cuts::tall - 1) / cuts::tall;
    // few units where there are few threads: pieces of a head's rows as long as they can be
    const index_t units = std::min(panels, std::max<index_t>((panels + at_most - 1) / at_most, team.size()));
    team.run(units, [&](index_t unit, int worker) {
        float* const mine = memory.of(worker); // (rows, ids) of g
        float* const of_head =
            mine + std::min(cuts::padded(rows.count), cuts::rows) * cuts::most_summed; // (panels, ids, columns)
        const index_t first = panels * unit / units, last = panels * (unit + 1) / units;
        const index_t left = first * panel, width = std::min(last * panel, d) - left;
        // columns that the first rows pack by the way; the rest are packed before
        const index_t by_the_way = Head::in_place ? std::clamp(d / panel * panel, left, left + width) : left;
        const index_t some = (panel + pieces - 1) / pieces * 16;
        const index_t at_once = cuts::summed_ids((last - first) * panel);
        for (index_t v = begin; v < end; v += at_once) {
            const index_t ids = std::min(at_once, end - v), then = std::min(end, v + ids + at_once);
            copy_panels(head, v, ids, by_the_way, left + width - by_the_way, of_head + (by_the_way - left) * ids);
            fetch_ids<Head, Gradient> ahead{&head, &gradient, rows, v + ids, then, left, width, some};
            for (index_t from = 0; from < rows.count; from += cuts::rows) {
                const row_list here = rows.part(from, cuts::rows);
                for (index_t i = 0; i < here.count; ++i) std::copy_n(gradient(here.at[i]) + v, ids, mine + i * ids);
                each_piece<cuts::shape::vectors>(here.count, [&](index_t i, auto height) {
                    for (index_t p = left; p < left + width; p += panel) {
                        const float* const g = mine + i * ids;
                        float* const b = of_head + (p - left) * ids;
                        float* const c = sums + (from + i) * stride + p;
                        const float* const chain = goes_on || v > begin ? c : nullptr;
                        if constexpr (Head::in_place)
                            if (from + i == 0 && p < by_the_way) {
                                packing_micro<height()>(ids, g, ids, head.at(v, p), head.stride, b, chain, stride, c,
                                                        stride, ahead);
                                continue;
                            }
                        head_micro<height(), cuts::shape::vectors, false>(ids, g, ids, 1, b, chain, stride, c, stride,
                                                                          0, ahead);
                    }
                });
            }
        }
    });
}

/// dW[v, ·] (+)= Σ over the list of g[r, v] x[r, ·], for ids [begin, end); `adds`: to what is there. `packed`:
/// pack_states_along.
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
