// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The frame of every CPU call: rows in blocks over the thread team, one factor a row, one partial result a block, merged
// in block order. A block depends on the number of rows alone, so bits do not depend on threads.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <span>

#include "opd/batch.hpp"
#include "opd/config.hpp"
#include "opd/detail/row_outcome.hpp"
#include "opd/diagnostics.hpp"
#include "opd/element.hpp"
#include "opd/evaluate.hpp"
#include "opd/reduction.hpp"
#include "opd/student.hpp"
#include "opd/threads.hpp"

namespace opd::detail {
inline namespace OPD_ISA {

struct block_partial {
    double loss = 0;
    opd::diagnostics diagnostics = {};
};

constexpr std::size_t aligned64(std::size_t bytes) { return (bytes + 63) / 64 * 64; }

/// How a batch of rows is cut and what it needs.
struct batch_plan {
    index_t rows, block, blocks;
    std::size_t factors, partials, scratch; ///< bytes; scratch is per worker

    batch_plan(index_t rows_, std::size_t scratch_)
        : rows(rows_), block(std::max<index_t>(1, (rows_ + 255) / 256)), blocks((rows_ + block - 1) / block),
          factors(aligned64(sizeof(double) * std::size_t(rows_))),
          partials(aligned64(sizeof(block_partial) * std::size_t(blocks))), scratch(aligned64(scratch_)) {}
    std::size_t bytes(int workers) const { return factors + partials + scratch * std::size_t(workers); }
};

/// Row(r, factor, scratch, diagnostics&) -> row_outcome; Masked(r) writes a masked row's gradient.
template <class Row, class Masked>
result run_batch(thread_team& team, std::span<std::byte> memory, const batch_plan& plan, const env& e, const Row& row,
                 const Masked& masked) {
    auto* factor = reinterpret_cast<double*>(memory.data());
    auto* partial = reinterpret_cast<block_partial*>(memory.data() + plan.factors);
    std::byte* scratch = memory.data() + plan.factors + plan.partials;
    row_factors(e, plan.rows, factor);

    team.run(plan.blocks, [&](index_t b, int worker) {
        block_partial out;
        diagnostics& d = out.diagnostics;
        for (index_t r = b * plan.block, end = std::min(r + plan.block, plan.rows); r < end; ++r) {
            ++d.rows;
            if (!e.mask.kept(r)) {
                masked(r);
                if (!e.losses.empty()) e.losses[r] = e.beta_loss == 0 ? 0 : e.beta_loss * e.losses[r];
                continue;
            }
            ++d.kept;
            const row_outcome o = row(r, factor[r], scratch + std::size_t(worker) * plan.scratch, d);
            const double loss = o.clamped ? std::copysign(e.loss_clamp, o.loss) : o.loss;
            if (o.bad) {
                ++d.bad_rows;
                d.first_bad_row = d.first_bad_row < 0 ? r : d.first_bad_row;
            } else {
                count_staleness(d, e, r);
                d.kept_loss += o.loss;
            }
            if (o.infinite) {
                ++d.infinite_rows;
                d.first_infinite_row = d.first_infinite_row < 0 ? r : d.first_infinite_row;
            }
            d.careful_rows += o.careful;
            d.clamped_rows += o.clamped;
            out.loss += factor[r] * loss;
            if (!e.losses.empty()) {
                const double w = e.weights.empty() ? 1 : e.weights[r];
                e.losses[r] = (e.beta_loss == 0 ? 0 : e.beta_loss * e.losses[r]) + float(w * loss);
            }
            if (!e.lse.empty()) e.lse[r] = o.lse;
        }
        partial[b] = out;
    });
    result all;
    for (index_t b = 0; b < plan.blocks; ++b) {
        all.loss += partial[b].loss;
        all.diagnostics.merge(partial[b].diagnostics);
    }
    return all;
}

/// dz = beta·dz over columns [begin, cols) of a row of the student's gradient, then the view's padding by policy.
template <class Student>
void zero_columns(const Student& s, index_t row, index_t begin, float beta) {
    using G = typename Student::gradient_type;
    using value = arithmetic_t<G>;
    G* dz = s.dz.row(row);
    for (index_t i = begin; i < s.dz.cols; ++i)
        dz[i] = beta == 0 ? element<G>::store(0) : element<G>::store(value(beta) * element<G>::load(dz[i]));
    if (s.pad == padding::zero) std::fill_n(dz + s.dz.cols, s.dz.padding, element<G>::store(0));
}

} // namespace OPD_ISA
} // namespace opd::detail
