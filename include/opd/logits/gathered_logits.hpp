// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Logits of few ids a row, made from hidden states, and how a gradient of few ids goes back to them, on the CPU. For
// rows that read no other logit: on a renormalised support (renormalised_rows.hpp) and on kept sets
// (kept_set_rows.hpp). With k ids a row:
//
//   make             z[j] = x·w[id_j] (+ b), then the soft-cap; the bits of a product over the vocabulary
//                    N k D multiply-adds
//   drain_gathered   dx = beta dx + Σ_j g[j] w[id_j],  dw[id_j] += g[j] x,  db[id_j] += g[j]   2 N k D
//
// A block keeps k numbers a row, the gradient g; nothing is as long as the vocabulary but what the caller owns. The
// ids' rows of the head are read one by one: at many ids a row, or rows that ask for the same ids, a product over the
// vocabulary is faster.
//
// Order: dx over a row's ids as they stand, cut every 8,192; dw and db of an id over rows, ascending, as
// logit_blocks.hpp has it. Threads share ids out among them, so that no two meet in a row of dw.
#pragma once

#include <algorithm>
#include <cstddef>
#include <type_traits>

#include "opd/config.hpp"
#include "opd/element.hpp"
#include "opd/head.hpp"
#include "opd/hidden.hpp"
#include "opd/lanes.hpp"
#include "opd/logits/logit_blocks.hpp"
#include "opd/products/heads.hpp"
#include "opd/products/product_tiles.hpp"
#include "opd/threads.hpp"

namespace opd::detail {
inline namespace OPD_ISA {

/// y[j] (+)= Σ_k x[k] W[id(j), k] for n ≤ most_gathered ids, a piece of the head's rows at a time, for the product's
/// own tiles: its order is theirs. W's row is 0 of an id below 0. x: row `row` of `states`.
inline constexpr index_t most_gathered = 64;
template <class Head, class Id, class X>
void gathered_product(const Head& head, index_t n, const Id& id, const stored_head<X>& states, index_t row, float* y,
                      bool goes_on) {
    constexpr index_t piece = 128; // numbers of each
    float rows[most_gathered * piece], x[piece];
    for (index_t k = 0; k < head.width; k += piece) {
        const index_t depth = std::min(piece, head.width - k);
        for (index_t j = 0; j < n; ++j)
            if (id(j) < 0)
                std::fill_n(rows + j * piece, depth, 0.0f);
            else
                head.copy(id(j), 1, k, depth, rows + j * piece, piece);
        states.copy(row, 1, k, depth, x, depth);
        product(serial_executor{}, product_nt(1, n, depth, x, depth, rows, piece, y, n, goes_on || k > 0));
    }
}
/// u[j] = scale·x A[first + j] of a row (head.hpp), n ≤ most_gathered of them.
template <class Hidden>
void update_of_row(const Hidden& h, index_t row, index_t first, index_t n, float* u) {
    gathered_product(
        head_of(h.w.a), n, [first](index_t j) { return first + j; }, head_of(h.x), row, u, false);
    for (index_t j = 0; j < n; ++j) u[j] *= h.w.scale;
}

/// Hidden states as a source for rows that say which ids they read.
template <class Hidden>
struct gathered_side {
    using logit_type = float;
    using gradient_type = float;
    static constexpr space memory_space = space::host;
    static constexpr bool sparse_gradient = false, one_tile = true, whole_rows = true, makes_ids = true;
    Hidden side;
    float temperature = side.temperature;
    index_t width = 0;         ///< ids a row at most
    float* gradient = nullptr; ///< of the rows from `first` on, `width` numbers each, and nothing else of them is kept
    index_t first = 0;

    index_t rows() const { return side.rows(); }
    index_t vocab() const { return side.vocab(); }
    bool has_gradient() const { return side.has_gradient(); }
    float* gradient_row(index_t row) const { return gradient + (row - first) * width; }

    template <class Slots, class T>
    void make(index_t row, const Slots& slots, T* z) const;
    /// The gradient of a row's ids: 0, or from that of their logits z, which the soft-cap has made.
    template <class Slots>
    void clear(index_t row, const Slots& slots) const {
        if (has_gradient()) std::fill_n(gradient_row(row), slots.count, 0.0f);
    }
    template <class Slots, class T>
    void take_back(index_t row, const Slots& slots, const T* dz, const T* z) const {
        float* g = gradient_row(row);
        for (index_t j = 0; j < slots.count; ++j) {
            if (slots.ids[j] < 0) continue; // an unused slot
            g[j] = static_cast<float>(dz[j]);
            const float t = side.soft_cap > 0 ? static_cast<float>(z[j]) / side.soft_cap : 0;
            g[j] *= 1 - t * t;
        }
    }
};

/// z[j] of `slots`, a stretch of a row's ids; -inf for one below 0, an unused slot.
template <class Hidden>
template <class Slots, class T>
void gathered_side<Hidden>::make(index_t row, const Slots& slots, T* z) const {
    const Hidden& h = side;
    float y[most_gathered], bias[most_gathered], u[most_gathered];
    index_t u_from = -1; // what u holds
    for (index_t from = 0; from < slots.count; from += most_gathered) {
        const index_t n = std::min(most_gathered, slots.count - from);
        const auto id = [&](index_t j) { return static_cast<index_t>(slots.ids[from + j]); };
        gathered_product(head_of(base_of(h.w)), n, id, head_of(h.x), row, y, false);
        if constexpr (is_lora<decltype(h.w)>)
            for (index_t k = 0; k < rank_of(h.w); k += most_gathered) {
                const index_t some = std::min(most_gathered, rank_of(h.w) - k);
                if (u_from != k) update_of_row(h, row, u_from = k, some, u);
                auto b = head_of(h.w.b);
                b.data += k, b.width = some;
                gathered_product(b, n, id, stored_head<float>{u, some, some}, 0, y, true);
            }
        if (h.bias.data != nullptr)
            for (index_t j = 0; j < n; ++j)
                bias[j] =
                    id(j) < 0 ? 0.0f : float(element<std::remove_cvref_t<decltype(h.bias[0])>>::load(h.bias[id(j)]));
        add_bias_and_cap(h, h.bias.data != nullptr ? bias : nullptr, y, n);
        for (index_t j = 0; j < n; ++j) z[from + j] = id(j) < 0 ? neg_inf<T>() : static_cast<T>(y[j]);
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

/// to += Σ_j g[j] W[id_j], in stretches of ids (hidden.hpp).
template <class Head, class Slots>
void add_gathered(const Head& head, const Slots& slots, const float* g, float* to) {
    constexpr index_t piece = 256;
    float sum[piece], copied[piece];
    for (index_t d = 0; d < head.width; d += piece) {
        const index_t some = std::min(piece, head.width - d);
        for (index_t s = 0; s < slots.count; s += stretch_of_ids) {
            std::fill_n(sum, some, 0.0f);
            for (index_t j = s; j < std::min(slots.count, s + stretch_of_ids); ++j) {
                if (g[j] == 0) continue;
                const float* row = copied;
                if constexpr (Head::in_place)
                    row = head.at(static_cast<index_t>(slots.ids[j]), d);
                else
                    head.copy(static_cast<index_t>(slots.ids[j]), 1, d, some, copied, piece);
                add_scaled(sum, g[j], row, some);
            }
            for (index_t j = 0; j < some; ++j) to[d + j] += sum[j];
        }
    }
}

/// Numbers a row that a block keeps of a head's update: t, u (logit_blocks.hpp).
template <class Hidden>
index_t kept_of_update(const Hidden& h) {
    return h.has_gradient() ? 2 * rank_of(h.w) : 0;
}

/// Gradients of hidden states and head from those of the rows' ids, rows.slots_at(r) of row r; 0 in rows that have
/// none; another call's rows are left alone. `update`: kept_of_update(h) numbers a row.
template <class Hidden, class Rows>
void drain_gathered(const gathered_side<Hidden>& from, const Rows& rows, index_t begin, index_t end, float beta,
                    bool first_block, float* update, thread_team& team) {
    const Hidden& h = from.side;
    const index_t d = h.x.cols, v = h.vocab(), rank = rank_of(h.w);
    const auto gradient = [&](index_t r) -> const float* { return from.gradient_row(r); };
    const auto t_of = [&](index_t r) { return update + (r - begin) * 2 * rank; };
    const auto foreign = [&](index_t r) { return rows.frame.env.mask.foreign(r); };
    team.run(end - begin, [&](index_t i, int) {
        const index_t r = begin + i;
        if (foreign(r)) return;
        const auto slots = rows.slots_at(r);
        if (!h.dx.empty()) {
            float* const dx = h.dx.row(r);
            for (index_t j = 0; j < d; ++j) dx[j] = beta == 0 ? 0 : beta * dx[j];
            std::fill_n(dx + d, h.dx.padding, 0.0f);
            add_gathered(head_of(base_of(h.w)), slots, gradient(r), dx);
        }
        if constexpr (is_lora<decltype(h.w)>) {
            float* const t = t_of(r);
            std::fill_n(t, rank, 0.0f);
            add_gathered(head_of(h.w.b), slots, gradient(r), t);
            for (index_t j = 0; j < rank; ++j) t[j] *= h.w.scale;
            if (!h.w.db.empty())
                for (index_t k = 0; k < rank; k += most_gathered)
                    update_of_row(h, r, k, std::min(most_gathered, rank - k), t + rank + k);
            if (!h.dx.empty())
                for (index_t j = 0; j < rank; ++j)
                    if (t[j] != 0) add_scaled(h.dx.row(r), t[j], h.w.a.row(j), d);
        }
    });
    if (!h.trains_head()) return;
    if (first_block) scale_head_gradient(h, team);
    if constexpr (is_lora<decltype(h.w)>)
        if (!h.w.da.empty())
            team.run(rank, [&](index_t j, int) {
                for (index_t r = begin; r < end; ++r)
                    if (!foreign(r) && t_of(r)[j] != 0) add_scaled(h.w.da.row(j), t_of(r)[j], h.x.row(r), d);
            });
    const index_t parts = 8 * static_cast<index_t>(team.size()), together = 16; // ids of a part that lie side by side
    team.run(std::min(parts, (v + together - 1) / together), [&](index_t part, int) {
        for (index_t r = begin; r < end; ++r) {
            if (foreign(r)) continue;
            const auto slots = rows.slots_at(r);
            const float* g = gradient(r);
            for (index_t j = 0; j < slots.count; ++j) {
                if (g[j] == 0) continue;
                const auto id = static_cast<index_t>(slots.ids[j]);
                if (id / together % parts != part) continue;
                if (!h.dw.empty()) add_scaled(h.dw.row(id), g[j], h.x.row(r), d);
                if (h.db.data != nullptr) h.db.data[id] += g[j];
                if constexpr (is_lora<decltype(h.w)>)
                    if (!h.w.db.empty()) add_scaled(h.w.db.row(id), g[j], t_of(r) + rank, rank);
            }
        }
    });
}

} // namespace OPD_ISA
} // namespace opd::detail
