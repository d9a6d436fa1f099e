// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Judges of a backend that runs calls on logits in shards: against float64, and beside one rank.
#pragma once

#include "support/accuracy.hpp"
#include "support/compiled/dense.hpp"
#include "support/generators.hpp"
#include "support/naive_backend.hpp"
#include "support/property.hpp"
#include "support/shards.hpp"
#include "support/tolerances.hpp"
#include "support/traits.hpp"

#include <cmath>
#include <cstdint>
#include <string>
#include <type_traits>
#include <vector>

#include <opd/opd.hpp>

namespace opd::test {

inline const std::vector<flavour> every_kind = {
    flavour::wide,        flavour::near_equal,  flavour::equal,   flavour::peaked, flavour::filtered,
    flavour::student_gap, flavour::teacher_gap, flavour::one_hot, flavour::steep,  flavour::diffuse};

/// Losses, gradient and counts of a call in shards against the naive float64 backend.
template <class D>
void agrees(const D& d, const problem& p, auto& shards, env e) {
    naive_backend slow;
    buffers<float> b(p);
    auto reference = b.as<double, double, double>();
    std::vector<float> losses(std::size_t(p.rows)), losses_slow(losses);
    if (p.masked) e.mask = row_mask<>(b.kept);
    e.weights = b.weights;
    e.losses = losses;
    const result got = evaluate(shards, b.student(), b.teacher(), d, e);
    e.losses = losses_slow;
    const result want = evaluate(slow, reference.student(), reference.teacher(), d, e);
    const double kept = double(std::max<index_t>(want.diagnostics.kept, 1)), conditioning = conditioning_of(d);
    double size = 1, widest = 0;
    bool left_out = false;
    for (index_t r = 0; r < p.rows; ++r) {
        const auto i = std::size_t(r);
        if (!b.kept[i]) {
            for (index_t v = 0; v < p.vocab; ++v) RC_ASSERT(b.dz_view()(r, v) == 0);
            continue;
        }
        const double loss = losses_slow[i], w = std::abs(double(b.weights[i]));
        const double spread = conditioning * (spread_of(b.z_view().row(r), p.vocab, p.temperature_p) +
                                              spread_of(b.y_view().row(r), p.vocab, p.temperature_q));
        // value or slope beyond float's 1e30: infinite, so left out by any policy
        if (!(std::abs(loss) < 1e29 * w) && losses[i] == 0) {
            left_out = true;
            continue;
        }
        widest = std::max(widest, spread), size += std::abs(loss) / kept;
        if (!(std::abs(losses[i] - loss) <=
              2e-7 * std::abs(loss) + w * value_bound<float>(loss / std::max(w, 1e-6), spread)))
            RC_FAIL("loss of row " + std::to_string(r) + ": " + std::to_string(losses[i]) + ", not " +
                    std::to_string(loss));
        if (std::is_same_v<D, total_variation>) continue; // its kink: judged below, by the accuracy rows
        if (conditioning > 1 && std::abs(loss) > 1e4 * w) continue;
        const double excess = gradient_excess<float, float, float>(b.dz_view().row(r), reference.dz_view().row(r),
                                                                   p.vocab, w / kept / double(p.temperature_p), spread);
        if (!(excess <= 1)) RC_FAIL("gradient of row " + std::to_string(r) + ": " + std::to_string(excess) + " bounds");
    }
    if (!left_out && !(std::abs(got.loss - want.loss) <= value_bound<float>(size, widest)))
        RC_FAIL("loss " + std::to_string(got.loss) + ", not " + std::to_string(want.loss));
    RC_ASSERT(got.diagnostics.kept == want.diagnostics.kept);
    RC_ASSERT(got.diagnostics.bad_rows == want.diagnostics.bad_rows);
    for (const float loss : losses_slow)
        if (!(std::abs(loss) < 1e30F)) return; // beyond float: counted as infinite
    RC_ASSERT(got.diagnostics.infinite_rows == want.diagnostics.infinite_rows);
    RC_ASSERT(got.diagnostics.first_infinite_row == want.diagnostics.first_infinite_row);
}

/// The same call on one rank and in shards.
struct both {
    result whole, split;
    exchanged said;
    std::vector<float> dz_whole, dz_split, losses_whole, losses_split;
    std::vector<double> lse_whole, lse_split;
};
template <class D>
both on_both(const buffers<float>& b, const D& d, env e, auto shards) {
    both out;
    const auto rows = std::size_t(b.p.rows);
    out.losses_whole.resize(rows), out.losses_split.resize(rows), out.lse_whole.resize(rows),
        out.lse_split.resize(rows);
    buffers<float> whole = b, split = b;
    cpu_backend one;
    e.losses = out.losses_whole, e.lse = out.lse_whole;
    out.whole = evaluate(one, whole.student(), whole.teacher(), d, e);
    e.losses = out.losses_split, e.lse = out.lse_split;
    out.split = evaluate(shards, split.student(), split.teacher(), d, e);
    out.said = shards.said;
    out.dz_whole = whole.dz, out.dz_split = split.dz;
    return out;
}
/// Float's share of a number that both sides sum in their own way.
inline bool near(double a, double b, double size) { return std::abs(a - b) <= 4e-6 * size + 1e-12; }
inline void check_near(const both& o, double scale) {
    CHECK(near(o.split.loss, o.whole.loss, 1 + std::abs(o.whole.loss)));
    double top = 0;
    for (const float g : o.dz_whole) top = g == 777 ? top : std::max(top, std::abs(double(g)));
    for (std::size_t i = 0; i < o.dz_whole.size(); ++i)
        CHECK(near(double(o.dz_split[i]), double(o.dz_whole[i]), top + 0.02 * scale));
    for (std::size_t r = 0; r < o.losses_whole.size(); ++r) {
        CHECK(near(double(o.losses_split[r]), double(o.losses_whole[r]), 1 + std::abs(double(o.losses_whole[r]))));
        CHECK(near(o.lse_split[r], o.lse_whole[r], 0.25));
    }
    CHECK(o.split.diagnostics.kept == o.whole.diagnostics.kept);
    CHECK(o.split.diagnostics.bad_rows == o.whole.diagnostics.bad_rows);
    CHECK(o.split.diagnostics.first_bad_row == o.whole.diagnostics.first_bad_row);
    CHECK(o.split.diagnostics.infinite_rows == o.whole.diagnostics.infinite_rows);
    CHECK(o.split.diagnostics.clamped_rows == o.whole.diagnostics.clamped_rows);
}

} // namespace opd::test
