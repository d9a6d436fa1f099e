// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Rows whose logits are made for a block of them at a time (hidden.hpp), on the CPU: what a block holds, how it is filled from
// hidden states, and how its gradient goes back to them. cpu_batch.hpp runs the rows in between.
//
//   fill    z = x Wᵀ (+ b), then the soft-cap: for runs of rows that the mask keeps. The bias comes last: a chain that began with a large
//           one would round each of its additions at that size
//   drain   dx = beta dx + dz W, dw += dzᵀ x, db += Σ_r dz: for runs of rows that have a gradient. A bad row has none: its hidden states
//           are not looked at again, else NaN times 0 would reach the head
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "opd/backends/workspace.hpp"
#include "opd/batch.hpp"
#include "opd/config.hpp"
#include "opd/detail/product_tiles.hpp"
#include "opd/hidden.hpp"
#include "opd/threads.hpp"
#include "opd/view.hpp"

namespace opd::detail {
inline namespace OPD_ISA {

/// What product() wants of an executor.
struct team_executor {
    thread_team& team;
    template <class Function>
    void parallel_for(index_t count, Function&& f) const {
        team.run(count, [&](index_t i, int) { f(i); });
    }
};

/// Ids whose products with dz are summed in one chain; the sums of such stretches are then added. One chain over a whole vocabulary would
/// lose a digit.
inline constexpr index_t stretch_of_ids = 8192;

/// f(first, last) for runs of rows in [begin, end) of which wanted(r) says yes.
template <class Wanted, class Function>
void each_run(index_t begin, index_t end, Wanted&& wanted, Function&& f) {
    for (index_t r = begin; r < end; ++r) {
        if (!wanted(r)) continue;
        const index_t first = r;
        while (r < end && wanted(r)) ++r;
        f(first, r);
    }
}

/// Memory of one side's block.
template <class Hidden>
struct block_memory {
    std::size_t logits = 0, gradient = 0, sums = 0, live = 0; ///< bytes
    explicit block_memory(const Hidden& h, index_t rows) {
        const auto bytes = [](index_t n, std::size_t size) {
            return (static_cast<std::size_t>(n) * size + 63) / 64 * 64;
        };
        logits = bytes(rows * h.vocab(), sizeof(float));
        if constexpr (requires { h.dx; }) {
            if (!h.has_gradient()) return;
            if (h.soft_cap > 0) gradient = logits;
            if (!h.dx.empty() && h.vocab() > stretch_of_ids) sums = bytes(rows * h.x.cols, sizeof(float));
            live = bytes(rows, 1);
        }
    }
    std::size_t bytes() const { return logits + gradient + sums + live; }
};

/// What follows the product: bias, which may be null, and soft-cap of n logits.
template <class Hidden>
void finish_logits(const Hidden& h, const float* bias, float* z, index_t n) {
    if (bias != nullptr)
        for (index_t j = 0; j < n; ++j) z[j] += bias[j];
    if (h.soft_cap > 0)
        for (index_t j = 0; j < n; ++j) z[j] = h.soft_cap * std::tanh(z[j] / h.soft_cap);
}

/// Logits of the block's rows.
template <class Hidden, space S>
void fill(const Hidden& h, index_t begin, index_t end, const row_mask<S>& mask, thread_team& team) {
    const index_t v = h.vocab(), d = h.x.cols;
    const auto kept = [&](index_t r) { return mask.kept(r); };
    each_run(begin, end, kept, [&](index_t first, index_t last) {
        product(team_executor{team}, product_nt(last - first, v, d, h.x.data + first * h.x.stride, h.x.stride, h.w.data,
                                                h.w.stride, h.block.row(first, v), v));
    });
    if (h.bias.data == nullptr && h.soft_cap == 0) return;
    team.run(end - begin, [&](index_t i, int) {
        if (kept(begin + i)) finish_logits(h, h.bias.data, h.block.row(begin + i, v), v);
    });
}

/// dw = beta_head dw, db likewise: what was there.
template <class Hidden>
void scale_head(const Hidden& h, thread_team& team) {
    if (h.beta_head == 1) return;
    const index_t v = h.vocab();
    team.run((v + 255) / 256, [&](index_t c, int) {
        for (index_t i = c * 256; i < std::min(v, (c + 1) * 256); ++i) {
            const auto scale = [&](float& x) { x = h.beta_head == 0 ? 0 : h.beta_head * x; };
            if (h.db.data != nullptr) scale(h.db.data[i]);
            if (h.dw.empty()) continue;
            float* dw = h.dw.row(i);
            for (index_t j = 0; j < h.x.cols; ++j) scale(dw[j]);
        }
    });
}

/// Gradients of hidden states and head from that of the block's logits, of which the first `common` ids have one. `first_block`: dw and db
/// are what they were before the call.
template <class Hidden>
void drain(const Hidden& h, index_t begin, index_t end, index_t common, float beta, bool first_block, thread_team& team,
           std::byte* memory) {
    const index_t v = h.vocab(), d = h.x.cols, ids = (v + stretch_of_ids - 1) / stretch_of_ids;
    auto* const sums = reinterpret_cast<float*>(memory);
    const block_memory<Hidden> sizes(h, end - begin);
    auto* const live = reinterpret_cast<unsigned char*>(memory + sizes.sums); // by row of the block
    team.run(end - begin, [&](index_t i, int) {
        const index_t r = begin + i;
        const float* z = h.block.row(r, v);
        float* g = h.block.gradient_row(r, v);
        std::fill(g + common, g + v, 0.0f);
        const bool any = std::any_of(g, g + v, [](float x) { return x != 0; });
        live[i] = any;
        if (any && h.soft_cap > 0)
            for (index_t j = 0; j < v; ++j) {
                const float t = z[j] / h.soft_cap;
                g[j] *= 1 - t * t;
            }
        if (h.dx.empty()) return;
        float* dx = h.dx.row(r);
        if (beta == 0)
            std::fill_n(dx, d, 0.0f);
        else
            for (index_t j = 0; j < d; ++j) dx[j] *= beta;
    });
    const auto runs = [&](auto&& f) {
        each_run(
            begin, end, [&](index_t r) { return live[r - begin] != 0; }, f);
    };
    const team_executor all{team};
    if (!h.dx.empty())
        runs([&](index_t first, index_t last) {
            const index_t n = last - first;
            for (index_t s = 0; s < ids; ++s) {
                const index_t from = s * stretch_of_ids, count = std::min(stretch_of_ids, v - from);
                const bool alone = ids == 1;
                product(all,
                        product_nn(n, d, count, h.block.gradient_row(first, v) + from, v, h.w.data + from * h.w.stride,
                                   h.w.stride, alone ? h.dx.row(first) : sums, alone ? h.dx.stride : d, alone));
                if (alone) continue;
                team.run(n, [&](index_t i, int) {
                    float* dx = h.dx.row(first + i);
                    for (index_t j = 0; j < d; ++j) dx[j] += sums[i * d + j];
                });
            }
        });
    const bool head = !h.dw.empty() || h.db.data != nullptr;
    if (!head) return;
    if (first_block) scale_head(h, team);
    runs([&](index_t first, index_t last) {
        if (!h.dw.empty())
            product(all, product_tn(v, d, last - first, h.block.gradient_row(first, v), v,
                                    h.x.data + first * h.x.stride, h.x.stride, h.dw.data, h.dw.stride, true));
        if (h.db.data == nullptr) return;
        team.run((v + 1023) / 1024, [&](index_t c, int) {
            for (index_t r = first; r < last; ++r)
                for (index_t i = c * 1024; i < std::min(v, (c + 1) * 1024); ++i)
                    h.db.data[i] += h.block.gradient_row(r, v)[i];
        });
    });
}

} // namespace OPD_ISA
} // namespace opd::detail
