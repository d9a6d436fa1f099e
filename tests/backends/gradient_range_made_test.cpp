// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// build: whole-compiler, whole-sanitize
// optimise: no
//
// Gradients beyond float where logits are made from hidden states (gradient_range_test.cpp: where they lie in memory):
// an infinite row, counted, or saturated entries, in blocks, in tiles, of few ids and in a shard.
#include "support/generators.hpp"

#include <cmath>
#include <cstdint>
#include <doctest/doctest.h>
#include <limits>
#include <utility>
#include <vector>

#include <opd/backends/cpu.hpp>
#include <opd/backends/vocab_parallel.hpp>
#include <opd/estimators/divergences.hpp>
#include <opd/estimators/sampled.hpp>
#include <opd/estimators/support.hpp>
#include <opd/evaluate.hpp>
#include <opd/hidden.hpp>

using namespace opd;
using namespace opd::test;

namespace {

constexpr index_t n = 3;

/// Three rows of even logits at a low temperature; the middle one's weight takes its gradient beyond float.
struct states {
    static constexpr index_t ids = 2050, d = 2;
    std::vector<float> x = std::vector<float>(n * d, 0.F), w = std::vector<float>(ids * d, 0.F),
                       z = std::vector<float>(n * ids, 0.F), dz = std::vector<float>(n * ids, 3.F),
                       dx = std::vector<float>(n * d, 3.F), dw = std::vector<float>(ids * d, 3.F);
    std::vector<float> losses = std::vector<float>(n), weights{1, 9e29F, 1};
    static constexpr float temperature = 1e-6F;
    states() { w[0] = w[3] = 1; } // ids 0 and 1 are columns of x
    auto logits() { return student::logits{view(z.data(), n, ids), view(dz.data(), n, ids), temperature}; }
    auto hidden(index_t rows = 0, index_t tile = 0) {
        student::hidden h{view(x.data(), n, d), view(w.data(), ids, d), view(dx.data(), n, d), view(dw.data(), ids, d)};
        h.temperature = temperature;
        if (rows > 0) h.budget = budget_of_rows(h, rows, tile);
        return h;
    }
    env of(overflow policy) {
        return {.reduction = reduce::sum, .weights = weights, .losses = view(losses.data(), n), .on_overflow = policy};
    }
};
/// What the same call says of logits in memory.
template <class Teacher, class Estimator>
void check_states(const char* name, const Teacher& teacher, const Estimator& estimator) {
    CAPTURE(std::string(name));
    cpu_backend backend;
    states b;
    for (const overflow policy : {overflow::skip_row, overflow::saturate}) {
        const bool skips = policy == overflow::skip_row;
        CAPTURE(skips);
        const result want = evaluate(backend, b.logits(), teacher, estimator, b.of(policy));
        const auto losses = b.losses;
        REQUIRE(want.diagnostics.infinite_rows == 1);
        REQUIRE(want.diagnostics.first_infinite_row == 1);
        for (const auto& [rows, tile] : {std::pair<index_t, index_t>{0, 0}, {1, 0}, {2, 1024}, {1, 1024}}) {
            if (tile > 0 && Teacher::kind != cache_kind::dense) continue;
            CAPTURE(rows);
            CAPTURE(tile);
            const auto student = b.hidden(rows, tile);
            const result r = evaluate(backend, student, teacher, estimator, b.of(policy));
            CHECK(r.diagnostics.infinite_rows == 1);
            CHECK(r.diagnostics.first_infinite_row == 1);
            CHECK(r.diagnostics.bad_rows == 0);
            CHECK(b.losses[1] == doctest::Approx(losses[1]).epsilon(1e-6));
            CHECK((b.losses[1] == 0) == skips);
            for (const std::size_t i : {0, 2}) CHECK(b.losses[i] == doctest::Approx(losses[i]).epsilon(1e-6));
            for (std::size_t i = 0; i < b.dx.size(); ++i) {
                CHECK(std::abs(b.dx[i]) <= std::numeric_limits<float>::max());
                if (i / 2 == 1) CHECK((b.dx[i] == 0) == skips);
                if (i / 2 != 1) CHECK(b.dx[i] == doctest::Approx(b.dz[i / 2 * states::ids + i % 2]).epsilon(1e-5));
            }
            for (const float g : b.dw) CHECK(g == 0); // the states are 0
        }
    }
}

} // namespace

TEST_CASE("a gradient of logits that are made: in blocks, in tiles, of few ids") {
    std::vector<float> y(n * states::ids, 0.F);
    for (index_t r = 0; r < n; ++r) y[r * states::ids] = -1e7F, y[r * states::ids + 1] = -1;
    check_states("dense", teacher::dense{view(std::as_const(y).data(), n, states::ids)}, reverse_kl{});
    for (index_t r = 0; r < n; ++r) y[r * states::ids] = -20;
    check_states("dense, two passes", teacher::dense{view(std::as_const(y).data(), n, states::ids)},
                 alpha_divergence{2});
    const std::vector<std::int32_t> ids{0, 1, 2, 0, 1, 2, 0, 1, 2}, from{0, 3, 6, 9}, one{0, 0, 0};
    const std::vector<float> log_q{-1e7F, -1, -.5F, -1e7F, -1, -.5F, -1e7F, -1, -.5F}, log_one{-3000, -3000, -3000},
        log_mu{-7.6F, -7.6F, -7.6F};
    const teacher::support k{view(ids.data(), n, 3), view(log_q.data(), n, 3)};
    const teacher::samples drawn{view(one.data(), n, 1), view(log_mu.data(), n, 1), view(log_one.data(), n, 1)};
    check_states("tail_bucket", k, tail_bucket{reverse_kl{}});
    check_states("mc", drawn, mc{reverse_kl{}});
    check_states("renormalised", k, renormalised{reverse_kl{}});
    check_states("kept sets", teacher::on_kept_sets{drawn, view(ids.data(), 9), row_offsets<>(from)}, mc{reverse_kl{}});
}

TEST_CASE("so does a shard of hidden states, in blocks and of few ids") {
    std::vector<float> y(n * states::ids, 0.F);
    for (index_t r = 0; r < n; ++r) y[r * states::ids] = -1e7F;
    const std::vector<std::int32_t> ids{0, 1, 2, 0, 1, 2, 0, 1, 2};
    const std::vector<float> log_q{-1e7F, -1, -.5F, -1e7F, -1, -.5F, -1e7F, -1, -.5F};
    cpu_backend backend;
    const auto check = [&](const auto& teacher, const auto& estimator) {
        states b;
        auto call = vocab_parallel(backend, {.first = 0, .total = states::ids}, b.hidden(), teacher, estimator,
                                   b.of(overflow::skip_row));
        while (call.local()) {}
        call.finish();
        CHECK(call.backward() == 1);
        for (const float x : b.dx) CHECK(std::abs(x) <= std::numeric_limits<float>::max());
        CHECK(b.dx[2] == std::numeric_limits<float>::max());
    };
    check(teacher::dense{view(std::as_const(y).data(), n, states::ids)}, reverse_kl{});
    check(teacher::support{view(ids.data(), n, 3), view(log_q.data(), n, 3)}, renormalised{reverse_kl{}});
}
