// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Logits of few ids a row, made from hidden states, and how a gradient of few ids goes back to them, on the CPU. For rows that read no other
// logit: on a renormalised support (renormalised_rows.hpp) and on kept sets (kept_set_rows.hpp). With k ids a row:
//
//   gather_logits    z[j] = x·w[id_j] (+ b), then the soft-cap; the bits of a product over the vocabulary       N k D multiply-adds
//   drain_gathered   dx = beta dx + Σ_j g[j] w[id_j],  dw[id_j] += g[j] x,  db[id_j] += g[j]                     2 N k D
//
// A block keeps k numbers a row, the gradient g; nothing is as long as the vocabulary but what the caller owns. The ids' rows of the head are
// read one by one: at many ids a row, or rows that ask for the same ids, a product over the vocabulary is faster.
//
// Order: dx over a row's ids as they stand, cut every 8,192; dw and db of an id over rows, ascending, as logit_blocks.hpp has it. Threads
// share ids out among them, so that no two meet in a row of dw.
#pragma once

#include <algorithm>
#include <cstddef>
#include <type_traits>

#include "opd/backends/logit_blocks.hpp"
#include "opd/config.hpp"
#include "opd/detail/product_tiles.hpp"
#include "opd/element.hpp"
#include "opd/hidden.hpp"
#include "opd/lanes.hpp"
#include "opd/threads.hpp"

namespace opd::detail {
inline namespace OPD_ISA {

/// z[j] of `slots`, a stretch of a row's ids; -inf for one below 0, an unused slot. The head's rows are gathered a piece at a time, for the
/// product's own tiles: its order is theirs.
template <class Hidden, class Slots, class T>
void gather_logits(const Hidden& h, index_t row, const Slots& slots, T* z) {
    constexpr index_t most = 64, piece = 128; // ids, numbers of each
    float rows[most * piece], y[most], bias[most];
    const stored_head x{h.x.data, h.x.stride};
    float states[piece];
    for (index_t from = 0; from < slots.count; from += most) {
        const index_t n = std::min(most, slots.count - from);
        const auto id = [&](index_t j) { return static_cast<index_t>(slots.ids[from + j]); };
        for (index_t k = 0; k < h.x.cols; k += piece) {
            const index_t depth = std::min(piece, h.x.cols - k);
            for (index_t j = 0; j < n; ++j)
                if (id(j) < 0)
                    std::fill_n(rows + j * piece, depth, 0.0f);
                else
                    head_of(h).copy(id(j), 1, k, depth, rows + j * piece, piece);
            x.copy(row, 1, k, depth, states, piece);
            product(serial_executor{}, product_nt(1, n, depth, states, depth, rows, piece, y, n, k > 0));
        }
        if (h.bias.data != nullptr)
            for (index_t j = 0; j < n; ++j)
                bias[j] =
                    id(j) < 0 ? 0.0f : float(element<std::remove_cvref_t<decltype(h.bias[0])>>::load(h.bias[id(j)]));
        add_bias_and_cap(h, h.bias.data != nullptr ? bias : nullptr, y, n);
        for (index_t j = 0; j < n; ++j) z[from + j] = id(j) < 0 ? neg_inf<T>() : static_cast<T>(y[j]);
    }
}

/// The gradient of a row's ids in the block, `width` numbers a row: 0, or from that of their logits z, which the soft-cap has made.
template <class Hidden, class Slots>
void clear_gathered(const Hidden& h, index_t row, const Slots& slots, index_t width) {
    if (h.has_gradient()) std::fill_n(h.block.gradient_row(row, width), slots.count, 0.0f);
}
template <class Hidden, class Slots, class T>
void scatter_gathered(const Hidden& h, index_t row, const Slots& slots, index_t width, const T* dz, const T* z) {
    float* g = h.block.gradient_row(row, width);
    for (index_t j = 0; j < slots.count; ++j) {
        if (slots.ids[j] < 0) continue; // an unused slot
        g[j] = static_cast<float>(dz[j]);
        const float t = h.soft_cap > 0 ? static_cast<float>(z[j]) / h.soft_cap : 0;
        g[j] *= 1 - t * t;
    }
}

/// to += g from; n numbers.
template <class E>
void add_scaled(float* to, float g, const E* stored, index_t n) {
    float piece[64];
    if constexpr (!std::is_same_v<E, float>) {
        for (index_t i = 0; i < n; i += 64) {
            const index_t count = std::min<index_t>(64, n - i);
            for (index_t j = 0; j < count; ++j) piece[j] = element<E>::load(stored[i + j]);
            add_scaled<float>(to + i, g, piece, count);
        }
    } else {
        const float* from = stored;
        const lanes factor{double(g)};
        index_t i = 0;
        for (; i + lanes::width <= n; i += lanes::width)
            fma(factor, lanes::load(from + i), lanes::load(to + i)).store(to + i);
        if (const int rest = static_cast<int>(n - i); rest > 0)
            store_part(fma(factor, load_part(from + i, rest), load_part(to + i, rest)), to + i, rest);
    }
}

/// Gradients of hidden states and head from those of the rows' ids: row r's lie in h.block, rows.width() numbers apart, those of
/// rows.slots(r) first; 0 in rows that have none.
template <class Hidden, class Rows>
void drain_gathered(const Hidden& h, const Rows& rows, index_t begin, index_t end, float beta, bool first_block,
                    thread_team& team) {
    const index_t d = h.x.cols, v = h.vocab();
    if (!h.dx.empty())
        team.run(end - begin, [&](index_t i, int) {
            const index_t r = begin + i;
            const auto slots = rows.slots_at(r);
            const float* g = h.block.gradient_row(r, rows.width());
            float* dx = h.dx.row(r);
            constexpr index_t piece = 256;
            float sum[piece];
            for (index_t from = 0; from < d; from += piece) {
                const index_t n = std::min(piece, d - from);
                for (index_t j = 0; j < n; ++j) dx[from + j] = beta == 0 ? 0 : beta * dx[from + j];
                for (index_t s = 0; s < slots.count; s += stretch_of_ids) {
                    std::fill_n(sum, n, 0.0f);
                    for (index_t j = s; j < std::min(slots.count, s + stretch_of_ids); ++j)
                        if (g[j] != 0) add_scaled(sum, g[j], h.w.row(static_cast<index_t>(slots.ids[j])) + from, n);
                    for (index_t j = 0; j < n; ++j) dx[from + j] += sum[j];
                }
            }
        });
    if (h.dw.empty() && h.db.data == nullptr) return;
    if (first_block) scale_head_gradient(h, team);
    const index_t parts = 8 * static_cast<index_t>(team.size()), together = 16; // ids of a part that lie side by side
    team.run(std::min(parts, (v + together - 1) / together), [&](index_t part, int) {
        for (index_t r = begin; r < end; ++r) {
            const auto slots = rows.slots_at(r);
            const float* g = h.block.gradient_row(r, rows.width());
            for (index_t j = 0; j < slots.count; ++j) {
                if (g[j] == 0) continue;
                const auto id = static_cast<index_t>(slots.ids[j]);
                if (id / together % parts != part) continue;
                if (!h.dw.empty()) add_scaled(h.dw.row(id), g[j], h.x.row(r), d);
                if (h.db.data != nullptr) h.db.data[id] += g[j];
            }
        }
    });
}

} // namespace OPD_ISA
} // namespace opd::detail
