// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Logits that are made here from hidden states (hidden.hpp), on the CPU, and how their gradient goes back: for a
// block of rows, and all of the vocabulary or a tile of it. cpu/batch.hpp runs the rows in between.
//
//   fill    z = x Wᵀ (+ b), then the soft-cap, of the rows that are asked for. The bias comes last: a chain that began
//           with a large one would round each of its additions at that size
//   drain   dx += dz W, dw += dzᵀ x, db += Σ_r dz, of rows that have a gradient. A bad row has none: its hidden states
//           are not looked at again, else NaN times 0 would reach the head
//
// A head with an update (head.hpp) is [W, B] of D + R columns beside states [x, u], u = scale·x Aᵀ; what reaches u
// goes on: t = scale·dz B, dx += t A, dA += tᵀ x.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <type_traits>

#include "opd/batch.hpp"
#include "opd/config.hpp"
#include "opd/head.hpp"
#include "opd/hidden.hpp"
#include "opd/products/head_products.hpp"
#include "opd/products/heads.hpp"
#include "opd/products/tile_products.hpp"
#include "opd/rows/rows.hpp"
#include "opd/rows/workspace.hpp"
#include "opd/threads.hpp"
#include "opd/view.hpp"

namespace opd::detail {
inline namespace OPD_ISA {

/// Whether a side has a gradient that goes back.
template <class Hidden>
bool drains(const Hidden& h) {
    if constexpr (requires { h.dx; })
        return h.has_gradient();
    else
        return false;
}

/// Columns of a side's products.
template <class Hidden>
index_t product_columns(const Hidden& h) {
    return h.x.cols + rank_of(h.w);
}

template <class Hidden>
using state_number = std::remove_cvref_t<decltype(Hidden::x.data[0])>;
/// Whether matrix tiles make its logits, and its gradients too.
template <class Hidden>
concept in_tiles = tiled_head<decltype(Hidden::w)> &&
    (!logits_alone<decltype(Hidden::w)> || brain_float<state_number<Hidden>>);
template <class Hidden>
concept back_in_tiles = in_tiles<Hidden> && !logits_alone<decltype(Hidden::w)>;
template <class Hidden>
inline constexpr index_t depth_there =
    logits_depth<tile_parts<typename decltype(Hidden::w)::number>, tile_parts<state_number<Hidden>>>;

/// Floats of a side's states as the way there wants them, and the way back for its head's gradient; of the sums of dx.
template <class Hidden>
index_t packed_there(const Hidden& h, index_t rows) {
    if constexpr (in_tiles<Hidden>)
        return tile_floats(tile_cuts::padded(rows), tile_cuts::padded(h.x.cols), tile_parts<state_number<Hidden>>);
    else
        return packed_across(rows, product_columns(h));
}
template <class Hidden>
index_t packed_back(const Hidden& h, index_t rows) {
    if constexpr (back_in_tiles<Hidden>)
        return tile_floats(most_tile_rows(rows), tile_cuts::padded(h.x.cols), tile_parts<state_number<Hidden>>);
    else
        return packed_along(rows, h.x.cols);
}
template <class Hidden>
index_t sums_of_states(const Hidden& h, index_t rows) {
    if constexpr (back_in_tiles<Hidden>)
        return tile_cuts::padded(rows) * tile_cuts::stride_of_sums(h.x.cols);
    else
        return rows * head_cuts::padded(product_columns(h));
}
/// Bytes that a worker needs for a side's products.
template <class Hidden>
std::size_t worker_bytes(const Hidden& h, index_t rows) {
    if constexpr (fills_rows<Hidden>)
        return h.bytes_of_worker(rows);
    else if constexpr (back_in_tiles<Hidden>)
        return tile_scratch(rows, tile_parts<typename decltype(h.w)::number>);
    else if constexpr (in_tiles<Hidden>)
        return std::max(logits_scratch(rows, 1), worker_floats::bytes(rows, product_columns(h)));
    else
        return worker_floats::bytes(rows, product_columns(h));
}

/// Memory of one side: `rows` rows of logits, their gradient if it cannot lie in their place, states as the products
/// want them. `tile`: ids that are there at a time; 0: all of the vocabulary, and then states are packed for the way
/// back where they were for the way there.
template <class Hidden>
struct block_memory {
    float *logits = nullptr, *gradient = nullptr;
    float *across = nullptr, *along = nullptr;  ///< packed states
    float* sums = nullptr;                      ///< of dx, (rows, D + R)
    float *update = nullptr, *back = nullptr;   ///< u and t, (rows, R)
    float* update_along = nullptr;              ///< u packed
    index_t *wanted = nullptr, *live = nullptr; ///< rows
    index_t* of_cache = nullptr;                ///< the wanted ones as a teacher's map has them
    index_t* in_32 = nullptr;                   ///< tile_rows of those with a gradient
    std::size_t bytes = 0;

    /// Without `memory` it counts.
    block_memory(const Hidden& h, index_t rows, index_t tile, std::byte* memory = nullptr) {
        carver from{memory};
        const index_t rank = rank_of(h.w), ids = ids_of(h, tile);
        logits = gradient = from.take<float>(rows * ids);
        wanted = live = from.take<index_t>(rows);
        if constexpr (has_row_map<Hidden>) of_cache = from.take<index_t>(rows);
        if (rank > 0) update = from.take<float>(rows * rank);
        if (!drains(h)) {
            across = from.take<float>(packed_there(h, rows));
        } else if constexpr (requires { h.dx; }) {
            if (h.soft_cap > 0) gradient = from.take<float>(rows * ids);
            live = from.take<index_t>(rows);
            const index_t there = packed_there(h, rows), way_back = needs_states(h) ? packed_back(h, rows) : 0;
            across = along = from.take<float>(tile > 0 ? there : std::max(there, way_back));
            if (tile > 0) along = from.take<float>(way_back);
            if (sums_states(h)) sums = from.take<float>(sums_of_states(h, rows));
            if constexpr (back_in_tiles<Hidden>)
                if (needs_states(h)) in_32 = from.take<index_t>(most_tile_rows(rows));
            if constexpr (is_lora<decltype(h.w)>) {
                if (sums_states(h)) back = from.take<float>(rows * rank);
                if (!h.w.db.empty()) update_along = from.take<float>(packed_along(rows, rank));
            }
        }
        bytes = from.used;
    }
    static index_t ids_of(const Hidden& h, index_t tile) { return tile > 0 ? std::min(tile, h.vocab()) : h.vocab(); }
};

/// What follows the product: bias, which may be null, and soft-cap of n logits.
template <class Hidden, class Bias>
void add_bias_and_cap(const Hidden& h, const Bias* bias, float* z, index_t n) {
    if (bias != nullptr)
        for (index_t j = 0; j < n; ++j) z[j] += element<Bias>::load(bias[j]);
    if (h.soft_cap > 0)
        for (index_t j = 0; j < n; ++j) z[j] = h.soft_cap * std::tanh(z[j] / h.soft_cap);
}

/// Rows of [begin, end) that are wanted, into `to`.
template <class Wanted>
row_list list_of(index_t begin, index_t end, index_t* to, Wanted&& wanted) {
    index_t count = 0;
    for (index_t r = begin; r < end; ++r)
        if (wanted(r)) to[count++] = r;
    return {to, count};
}

/// Readies rows, of a block that begins at `begin`, for fill.
template <class Hidden>
void ready_states(const Hidden& h, const block_memory<Hidden>& memory, row_list rows, index_t begin, thread_team& team,
                  worker_floats workers) {
    const index_t d = h.x.cols, width = product_columns(h);
    row_list from = rows; // of x
    if constexpr (has_row_map<Hidden>) {
        for (index_t i = 0; i < rows.count; ++i) memory.of_cache[i] = h.cache_row(rows.at[i]);
        from.at = memory.of_cache;
    }
    if constexpr (in_tiles<Hidden>)
        return pack_pairs<depth_there<Hidden>>(h.x.data, h.x.stride, from, d, memory.across, team);
    pack_states_across(h.x.data, h.x.stride, from, d, memory.across, width, 0, team);
    if constexpr (is_lora<decltype(h.w)>) {
        const index_t rank = rank_of(h.w);
        const auto at = [&](index_t r) { return memory.update + (r - begin) * rank; };
        head_logits(memory.across, width, rows, head_of(h.w.a), 0, rank, team, workers, at);
        for (index_t i = 0; i < rows.count; ++i)
            for (index_t j = 0; j < rank; ++j) at(rows.at[i])[j] *= h.w.scale;
        pack_states_across(memory.update - begin * rank, rank, rows, rank, memory.across, width, d, team);
    }
}
/// Logits of ids [first, last) of packed rows: row r's go to memory.logits + (r - begin) stride.
template <class Hidden>
void fill(const Hidden& h, const block_memory<Hidden>& memory, row_list rows, index_t begin, index_t stride,
          index_t first, index_t last, thread_team& team, worker_floats workers) {
    const auto at = [&](index_t r) { return memory.logits + (r - begin) * stride; };
    const bool plain = h.bias.data == nullptr && h.soft_cap == 0;
    const auto out = [&](index_t r) { return at(r) - first; };
    if constexpr (in_tiles<Hidden>)
        tile_logits<state_number<Hidden>>(memory.across, rows, h.w, first, last, team, workers, out);
    else
        head_logits(memory.across, product_columns(h), rows, head_of(h.w), first, last, team, workers, out);
    if (plain) return;
    team.run(rows.count, [&](index_t i, int) {
        add_bias_and_cap(h, h.bias.data == nullptr ? nullptr : h.bias.data + first, at(rows.at[i]), last - first);
    });
}

/// dw = beta_head dw, the head's other gradients likewise: what was there. With beta_head = 0 dw is left to the first
/// product where there is one.
template <class Hidden>
void scale_head_gradient(const Hidden& h, thread_team& team, bool product_follows = false) {
    index_t padding = h.dw.padding;
    if constexpr (is_lora<decltype(h.w)>) padding += h.w.db.padding + h.w.da.padding;
    if (h.beta_head == 1 && padding == 0) return;
    const index_t v = h.vocab();
    const auto scale = [&h](float* x, index_t n) {
        for (index_t j = 0; j < n; ++j) x[j] = h.beta_head == 0 ? 0 : h.beta_head * x[j];
    };
    const auto row = [&scale](const auto& of, index_t i, bool left = false) {
        if (of.empty()) return;
        if (!left) scale(of.row(i), of.cols);
        std::fill_n(of.row(i) + of.cols, of.padding, 0.0f);
    };
    team.run((v + 255) / 256, [&](index_t c, int) {
        for (index_t i = c * 256; i < std::min(v, (c + 1) * 256); ++i) {
            if (h.db.data != nullptr) scale(h.db.data + i, 1);
            row(h.dw, i, product_follows && h.beta_head == 0);
            if constexpr (is_lora<decltype(h.w)>) row(h.w.db, i);
        }
    });
    if constexpr (is_lora<decltype(h.w)>)
        for (index_t i = 0; i < rank_of(h.w); ++i) row(h.w.da, i);
}

/// Before the gradients of rows [begin, end) go back: dx = beta dx; `first_block`: dw and db are what they were
/// before the call.
template <class Hidden>
void begin_drain(const Hidden& h, index_t begin, index_t end, float beta, bool first_block, const row_mask<>& mask,
                 thread_team& team) {
    if (first_block) scale_head_gradient(h, team, true);
    if (h.dx.empty()) return;
    team.run(end - begin, [&](index_t i, int) {
        if (mask.foreign(begin + i)) return;
        float* const dx = h.dx.row(begin + i);
        if (beta == 0)
            std::fill_n(dx, h.x.cols, 0.0f);
        else
            for (index_t j = 0; j < h.x.cols; ++j) dx[j] *= beta;
        std::fill_n(dx + h.x.cols, h.dx.padding, 0.0f);
    });
}
/// Readies rows for drain.
template <class Hidden>
void ready_back(const Hidden& h, const block_memory<Hidden>& memory, row_list live, index_t begin, thread_team& team) {
    if (needs_states(h)) {
        if constexpr (back_in_tiles<Hidden>)
            pack_pairs_of_rows(h.x.data, h.x.stride, tile_rows(live, memory.in_32), h.x.cols, memory.along, team);
        else
            pack_states_along(h.x.data, h.x.stride, live, h.x.cols, memory.along, team);
    }
    if constexpr (is_lora<decltype(h.w)>) {
        const index_t rank = rank_of(h.w);
        if (!h.w.db.empty())
            pack_states_along(memory.update - begin * rank, rank, live, rank, memory.update_along, team);
    } else {
        (void)begin;
    }
}
/// What has come back to u goes on: t = scale·t; dA += tᵀ x, dx += t A.
template <class Hidden>
void drain_update(const Hidden& h, const block_memory<Hidden>& memory, row_list rows, index_t begin, thread_team& team,
                  worker_floats workers) {
    const index_t d = h.x.cols, rank = rank_of(h.w);
    const auto t = [&](index_t r) { return memory.back + (r - begin) * rank; };
    for (index_t i = 0; i < rows.count; ++i)
        for (index_t j = 0; j < rank; ++j) t(rows.at[i])[j] *= h.w.scale;
    if (!h.w.da.empty())
        states_to_head(t, rows, memory.along, d, 0, rank, true, h.w.da.data, h.w.da.stride, team, workers);
    if (h.dx.empty()) return;
    head_to_states(t, rows, head_of(h.w.a), 0, rank, d, false, memory.sums, team, workers);
    team.run(rows.count, [&](index_t i, int) {
        float* const dx = h.dx.row(rows.at[i]);
        const float* const sums = memory.sums + i * head_cuts::padded(d);
        for (index_t j = 0; j < d; ++j) dx[j] += sums[j];
    });
}
/// dx += dz W, and t = scale·dz B, of ids [first, last), of which dz is of_row(r)[id]. In order of ids: sums go on
/// from call to call, up to `common`.
template <class Hidden, class Gradient>
void drain_to_states(const Hidden& h, const block_memory<Hidden>& memory, row_list rows, index_t begin, index_t first,
                     index_t last, index_t common, const Gradient& of_row, thread_team& team, worker_floats workers) {
    const index_t d = h.dx.empty() ? 0 : h.x.cols; // columns of W that are wanted; B's follow
    const auto multiply = [&](const auto& head) {
        const index_t stride =
            back_in_tiles<Hidden> ? tile_cuts::stride_of_sums(head.width) : head_cuts::padded(head.width);
        for (index_t from = first, to; from < last; from = to) {
            to = std::min(last, (from / stretch_of_ids + 1) * stretch_of_ids);
            const bool goes_on = from % stretch_of_ids != 0;
            if constexpr (back_in_tiles<Hidden>)
                tile_to_states(of_row, rows, h.w, from, to, goes_on, memory.sums, team, workers);
            else
                head_to_states(of_row, rows, head, from, to, head.width, goes_on, memory.sums, team, workers);
            if (to % stretch_of_ids != 0 && to != common) continue;
            team.run(rows.count, [&](index_t i, int) {
                const index_t r = rows.at[i];
                const float* const sums = memory.sums + i * stride;
                for (index_t j = 0; j < d; ++j) h.dx.row(r)[j] += sums[j];
                if constexpr (is_lora<decltype(h.w)>) {
                    float* const t = memory.back + (r - begin) * rank_of(h.w);
                    for (index_t j = d; j < head.width; ++j)
                        t[j - d] = (from < stretch_of_ids ? 0 : t[j - d]) + sums[j];
                }
            });
        }
    };
    if constexpr (is_lora<decltype(h.w)>) {
        if (h.dx.empty())
            multiply(head_of(h.w.b));
        else
            multiply(head_of(h.w));
        if (last == common) drain_update(h, memory, rows, begin, team, workers);
    } else {
        multiply(head_of(h.w));
    }
}
/// The gradient of ids [first, last) of the rows goes back: that of row r lies at memory.gradient + (r - begin)
/// stride. Ids from `common` on have none, and nothing there is read.
template <class Hidden>
void drain(const Hidden& h, const block_memory<Hidden>& memory, row_list rows, index_t begin, index_t stride,
           index_t first, index_t last, index_t common, bool first_block, thread_team& team, worker_floats workers) {
    const index_t d = h.x.cols, end = std::min(last, common);
    const auto at = [&](index_t r) { return memory.gradient + (r - begin) * stride; };
    const auto of_row = [&](index_t r) { return at(r) - first; };
    if (h.soft_cap > 0)
        team.run(rows.count, [&](index_t i, int) {
            float* const g = at(rows.at[i]);
            const float* const z = memory.logits + (rows.at[i] - begin) * stride;
            for (index_t j = 0; j < end - first; ++j) {
                const float t = z[j] / h.soft_cap;
                g[j] *= 1 - t * t;
            }
        });
    if (sums_states(h) && rows.count > 0 && first < end)
        drain_to_states(h, memory, rows, begin, first, end, common, of_row, team, workers);
    const bool adds = !first_block || h.beta_head != 0;
    if (!h.dw.empty()) {
        const auto to_head = [&](row_list some, index_t from, index_t to) {
            if constexpr (back_in_tiles<Hidden>)
                tile_to_head<state_number<Hidden>, typename decltype(h.w)::tiles>(
                    of_row, tile_rows(some, memory.in_32), memory.along, d, from, to, adds, h.dw.data, h.dw.stride,
                    team, workers);
            else
                states_to_head(of_row, some, memory.along, d, from, to, adds, h.dw.data, h.dw.stride, team, workers);
        };
        to_head(rows, first, end), to_head(row_list{}, std::max(first, end), last);
    }
    if constexpr (is_lora<decltype(h.w)>)
        if (!h.w.db.empty() && first < end)
            states_to_head(of_row, rows, memory.update_along, rank_of(h.w), first, end, true, h.w.db.data,
                           h.w.db.stride, team, workers);
    if (h.db.data == nullptr) return;
    team.run((end - first + 1023) / 1024, [&](index_t c, int) {
        for (index_t i = 0; i < rows.count; ++i) {
            const float* const g = of_row(rows.at[i]);
            for (index_t v = first + c * 1024; v < std::min(end, first + (c + 1) * 1024); ++v) h.db.data[v] += g[v];
        }
    });
}
/// Which rows of a block have a gradient, now that they are done: not those whose every entry of the first `common`
/// is 0, nor another call's.
template <class Hidden>
row_list rows_with_gradient(const block_memory<Hidden>& memory, index_t begin, index_t end, index_t stride,
                            index_t common, const row_mask<>& mask, thread_team& team) {
    team.run(end - begin, [&](index_t i, int) {
        const float* const g = memory.gradient + i * stride;
        memory.live[i] = !mask.foreign(begin + i) && std::any_of(g, g + common, [](float x) { return x != 0; });
    });
    return list_of(begin, end, memory.live, [&](index_t r) { return memory.live[r - begin] != 0; });
}

} // namespace OPD_ISA
} // namespace opd::detail

namespace opd {
inline namespace OPD_ISA {

/// The `.budget` that holds the logits of so many rows at a time, on the CPU backends: those of all of the
/// vocabulary, or in tiles of so many ids.
template <class Hidden>
std::size_t budget_of_rows(const Hidden& h, index_t rows, index_t tile = 0) {
    return detail::block_memory(h, rows, tile).bytes;
}

} // namespace OPD_ISA
} // namespace opd
