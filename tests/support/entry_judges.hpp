// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A judge of a backend that runs calls on few ids a row in shards: beside one rank.
#pragma once

#include "support/generators.hpp"
#include "support/shards.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <doctest/doctest.h>
#include <vector>

#include <opd/opd.hpp>

namespace opd::test {

inline bool near_number(double a, double b, double size) { // what is not a number on one rank is none in shards
    return detail::is_nan(a) ? detail::is_nan(b) : std::abs(a - b) <= 4e-6 * size + 1e-12;
}

/// A sparse call on one rank and in shards: the log-sum-exps differ by rounding of the sum alone, and all else follows.
template <class Cache, class Estimator>
exchanged agrees_on_entries(const buffers<float>& b, const Cache& cache, const Estimator& estimator, env e,
                            auto shards) {
    buffers<float> whole = b, split = b;
    const auto rows = std::size_t(b.p.rows);
    std::vector<float> losses(rows), losses_split(rows);
    std::vector<double> lse(rows), lse_split(rows);
    cpu_backend one;
    constexpr bool has_lse = !detail::offers_sparse_gradient<Estimator>(); // over the vocabulary
    e.losses = losses;
    if (has_lse) e.lse = lse;
    const result want = evaluate(one, whole.student(), cache, estimator, e);
    e.losses = losses_split;
    if (has_lse) e.lse = lse_split;
    const result got = evaluate(shards, split.student(), cache, estimator, e);
    const double kept = double(std::max<index_t>(1, want.diagnostics.kept));
    CHECK(got.diagnostics.bad_rows == want.diagnostics.bad_rows);
    CHECK(got.diagnostics.first_bad_row == want.diagnostics.first_bad_row);
    CHECK(got.diagnostics.infinite_rows == want.diagnostics.infinite_rows);
    CHECK(got.diagnostics.tokens == want.diagnostics.tokens);
    CAPTURE(got.diagnostics.ratio_sum);
    CAPTURE(want.diagnostics.ratio_sum);
    CHECK(near_number(got.diagnostics.ratio_sum, want.diagnostics.ratio_sum, 1 + want.diagnostics.ratio_sum));
    double size = 1;
    for (std::size_t r = 0; r < rows; ++r) {
        size += std::abs(double(losses[r]));
        CHECK(near_number(double(losses_split[r]), double(losses[r]), 1 + std::abs(double(losses[r]))));
        CHECK(near_number(lse_split[r], lse[r], 1));
    }
    CHECK(near_number(got.loss, want.loss, size));
    for (index_t r = 0; r < b.p.rows; ++r) {
        // a drawn token's log p, of up to some 16 nats, is rounded to float in both; the log-sum-exps differ, so by a
        // unit in the last place
        double top = 0, log_p = 1;
        for (index_t v = 0; v < b.p.vocab; ++v) {
            top = std::max(top, std::abs(double(whole.dz_view()(r, v))));
            const double far = lse[std::size_t(r)] - double(b.z_view()(r, v)) / double(b.p.temperature_p);
            if (far < 16) log_p = std::max(log_p, far);
        }
        const double scale = std::max(1.0, std::abs(double(b.weights[std::size_t(r)])));
        for (index_t v = 0; v < b.p.vocab; ++v)
            CHECK(near_number(double(split.dz_view()(r, v)), double(whole.dz_view()(r, v)),
                              top + 0.03 * (1 + log_p) * scale / kept / double(b.p.temperature_p)));
    }
    return shards.said;
}

} // namespace opd::test
