// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// build: whole-ofast, whole-compiler, whole-sanitize
// optimise: no
//
// Gradients that their storage does not hold, on both engines (gradient_range_made_test.cpp: of hidden states): an
// infinite row, counted, or saturated entries; other rows keep their bits.
#include "backends/both_engines.hpp"

#include <cmath>
#include <cstdint>
#include <doctest/doctest.h>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include <opd/backends/vocab_parallel.hpp>
#include <opd/estimators/divergences.hpp>
#include <opd/estimators/sampled.hpp>
#include <opd/estimators/support.hpp>
#include <opd/evaluate.hpp>

using namespace opd;
using namespace opd::test;

namespace {

constexpr index_t n = 3, v = 2;

/// Three rows, of which the middle one has a gradient of 8e4 under alpha = -1.
struct rows {
    std::vector<float> z{0.5F, 0, 0, -12, 1, 0}, y{0, 1, -12, 0, 0, 2};
    std::vector<half> dz = std::vector<half>(6, half(3.F));
    auto of_student() const { return view(z.data(), n, v); }
    auto of_teacher() const { return teacher::dense{view(y.data(), n, v)}; }
    auto student() { return student::logits{of_student(), view(dz.data(), n, v)}; }
};
std::vector<float> floats(const std::vector<half>& x) {
    std::vector<float> out;
    for (const half h : x) out.push_back(float(h));
    return out;
}
const env each_row{.reduction = reduce::sum};

/// What float holds of the same call; the middle row beyond half.
template <class Run>
void check_all(const char* name, Run&& run) {
    CAPTURE(std::string(name));
    std::vector<float> exact(6), losses(3), all_losses(3);
    env e = each_row;
    e.losses = view(all_losses.data(), n);
    const result in_float = run(view(exact.data(), n, v), e);
    REQUIRE(in_float.diagnostics.infinite_rows == 0);
    REQUIRE(std::abs(exact[2]) > 65520);
    e.losses = view(losses.data(), n);
    const auto expect = [&](const std::vector<half>& got, float was, bool zero) {
        for (std::size_t i = 0; i < 6; ++i) {
            const bool unfit = i / 2 == 1;
            const float want = exact[i] + was;
            if (unfit && zero)
                CHECK(float(got[i]) == 0);
            else if (unfit && std::abs(want) > 65504)
                CHECK(float(got[i]) == std::copysign(65504.F, want));
            else
                CHECK(float(got[i]) == float(half(want)));
        }
    };
    std::vector<half> dz(6, half(3.F));
    const result r = run(view(dz.data(), n, v), e);
    CHECK(r.diagnostics.infinite_rows == 1);
    CHECK(r.diagnostics.first_infinite_row == 1);
    CHECK(r.diagnostics.bad_rows == 0);
    CHECK(losses == std::vector<float>{all_losses[0], 0, all_losses[2]});
    CHECK(r.loss == doctest::Approx(double(all_losses[0]) + double(all_losses[2])));
    expect(dz, 0, true);
    e.on_overflow = overflow::saturate;
    dz.assign(6, half(3.F));
    const result cut = run(view(dz.data(), n, v), e);
    CHECK(cut.diagnostics.infinite_rows == 1);
    CHECK(cut.loss == in_float.loss);
    expect(dz, 0, false);
    // what was there cannot be had back
    e.on_overflow = overflow::skip_row, e.beta = 1;
    dz.assign(6, half(3.F));
    CHECK(run(view(dz.data(), n, v), e).diagnostics.infinite_rows == 1);
    expect(dz, 3, false);
}

} // namespace

TEST_CASE("half ends at 65,504: dense rows, drawn tokens, supports") {
    rows b;
    const std::vector<std::int32_t> ids{0, 1, 0, 1, 1, 0}, one{0, 1, 1};
    const std::vector<float> log_q{-1.3132617F, -0.31326169F, -12.000006F, -6.1441933e-6F, -0.126928F, -2.126928F};
    const std::vector<float> log_one{-1, -2, -1}, log_mu{-1, -23, -1};
    const teacher::support k{view(ids.data(), n, 2), view(log_q.data(), n, 2)};
    const teacher::samples drawn{view(one.data(), n, 1), view(log_mu.data(), n, 1), view(log_one.data(), n, 1)};
    on_both([&](auto& backend, const char* name) {
        CAPTURE(std::string(name));
        check_all("dense", [&](auto dz, const env& e) {
            return evaluate(backend, student::logits{b.of_student(), dz}, b.of_teacher(), alpha_divergence{-1}, e);
        });
        check_all("renormalised", [&](auto dz, const env& e) {
            return evaluate(backend, student::logits{b.of_student(), dz}, k, renormalised{alpha_divergence{-1}}, e);
        });
        check_all("tail_bucket", [&](auto dz, const env& e) {
            return evaluate(backend, student::logits{b.of_student(), dz}, k, tail_bucket{alpha_divergence{-1}}, e);
        });
        check_all("mc", [&](auto dz, const env& e) {
            return evaluate(backend, student::logits{b.of_student(), dz}, drawn, mc{reverse_kl{}}, e);
        });
        // in place, and a row that the mask leaves out
        std::vector<half> z;
        for (const float x : b.z) z.push_back(half(x));
        const std::vector<std::uint8_t> mask{1, 1, 0};
        const auto place = view(z.data(), n, v);
        const result r = evaluate(backend, student::logits{view(std::as_const(z).data(), n, v), place}, b.of_teacher(),
                                  alpha_divergence{-1}, {.reduction = reduce::sum, .mask = mask});
        CHECK(r.diagnostics.infinite_rows == 1);
        for (std::size_t i = 2; i < 6; ++i) CHECK(float(z[i]) == 0);
        CHECK(float(z[0]) != 0);
        z.assign(6, half(-40000.F)); // twice that is none
        evaluate(backend, student::logits{b.of_student(), place}, b.of_teacher(), reverse_kl{},
                 {.mask = std::vector<std::uint8_t>{0, 0, 0}, .beta = 2});
        for (const half x : z) CHECK(float(x) == -65504);
    });
}

TEST_CASE("and every other kind of rows: sparse gradients, ragged lines, a bucket, kept sets") {
    rows b;
    const std::vector<std::int32_t> ids{0, 1, 0, 1, 1, 0}, one{0, 1, 1}, both{0, 1, 0, 1, 0, 1}, from{0, 2, 4, 6};
    const std::vector<float> log_q{-1.3132617F, -0.31326169F, -12.000006F, -6.1441933e-6F, -0.126928F, -2.126928F};
    const std::vector<float> log_one{-1, -2, -1}, log_mu{-1, -23, -1};
    cpu_backend backend;
    check_all("sparse", [&](auto dz, const env& e) {
        const teacher::support k{view(ids.data(), n, 2), view(log_q.data(), n, 2)};
        return evaluate(backend, student::on_support{b.of_student(), dz}, k, renormalised{alpha_divergence{-1}}, e);
    });
    check_all("ragged", [&](auto dz, const env& e) {
        const teacher::ragged_support k{view(ids.data(), 6), view(log_q.data(), 6), row_offsets<>(from)};
        return evaluate(backend, student::on_support{b.of_student(), view(dz.data, 1, 6)}, k,
                        renormalised{alpha_divergence{-1}}, e);
    });
    check_all("lumped", [&](auto dz, const env& e) {
        return evaluate(backend, student::logits{b.of_student(), dz}, teacher::lumped{b.of_teacher(), 1},
                        alpha_divergence{-1}, e);
    });
    check_all("kept sets", [&](auto dz, const env& e) {
        const teacher::on_kept_sets drawn{
            teacher::samples{view(one.data(), n, 1), view(log_mu.data(), n, 1), view(log_one.data(), n, 1)},
            view(both.data(), 6), row_offsets<>(from)};
        return evaluate(backend, student::logits{b.of_student(), dz}, drawn, mc{reverse_kl{}}, e);
    });
}

TEST_CASE("float, where a weight takes a gradient beyond it") {
    rows b;
    on_both([&](auto& backend, const char* name) {
        CAPTURE(std::string(name));
        const std::vector<float> weights{1, 9e29F, 1};
        b.z = {0.5F, 0, 0, -36, 1, 0}, b.y = {0, 1, -36, 0, 0, 2}; // c about e^36
        std::vector<float> dz(6, 3.F);
        const auto run = [&](env e) {
            e.reduction = reduce::sum, e.weights = weights;
            return evaluate(backend, student::logits{b.of_student(), view(dz.data(), n, v)}, b.of_teacher(),
                            alpha_divergence{-1}, e)
                .diagnostics;
        };
        const auto d = run({});
        CHECK(d.infinite_rows == 1);
        CHECK(d.bad_rows == 0);
        CHECK(dz[2] == 0);
        CHECK(dz[3] == 0);
        CHECK(dz[0] != 0);
        CHECK(run({.on_overflow = overflow::saturate}).infinite_rows == 1);
        CHECK(std::abs(dz[2]) == std::numeric_limits<float>::max());
        CHECK(dz[2] == -dz[3]);
        // drawn tokens whose share of the softmax is an infinite float: times a probability of 0, NaN
        b.z = {0.5F, 0, 0, -300, 1, 0};
        const std::vector<std::int32_t> one{0, 0, 1};
        const std::vector<float> log_mu{-1, -1, -1};
        std::vector<float> advantage{0, 1e20F, 0};
        teacher::samples drawn{view(one.data(), n, 1), view(log_mu.data(), n, 1), view(log_mu.data(), n, 1)};
        drawn.advantage = view(std::as_const(advantage).data(), n, 1);
        for (const overflow policy : {overflow::skip_row, overflow::saturate}) {
            const result r = evaluate(backend, student::logits{b.of_student(), view(dz.data(), n, v)}, drawn,
                                      mc{advantage::outside{}},
                                      {.reduction = reduce::sum, .weights = weights, .on_overflow = policy});
            CHECK(r.diagnostics.infinite_rows == 1);
            for (const float x : dz) CHECK(std::abs(x) <= std::numeric_limits<float>::max()); // no NaN
        }
    });
}

namespace {

/// A weight, or what was there times beta, takes dz of G beyond it: every kind of rows.
template <class G>
void beyond(const char* type) {
    CAPTURE(std::string(type));
    const std::vector<float> z{0.5F, 0, 0, -36, 1, 0}, y{0, 1, -36, 0, 0, 2}, weights{1, 9e29F, 1};
    const std::vector<std::int32_t> ids{0, 1, 0, 1, 1, 0}, one{0, 1, 1};
    const std::vector<float> log_q{-1.3132617F, -0.31326169F, -36, 0, -0.126928F, -2.126928F};
    const std::vector<float> log_one{-1, -2, -1}, log_mu{-1, -36, -1};
    const teacher::dense dense{view(y.data(), n, v)};
    const teacher::support k{view(ids.data(), n, 2), view(log_q.data(), n, 2)};
    const std::vector<float> advantage{1, 1e20F, 1};
    teacher::samples drawn{view(one.data(), n, 1), view(log_mu.data(), n, 1), view(log_one.data(), n, 1)};
    drawn.advantage = view(advantage.data(), n, 1);
    const auto most = double(detail::largest_stored<G>);
    const auto check = [&](const char* name, auto&& run) {
        CAPTURE(std::string(name));
        const auto call = [&](double was, env e) {
            std::vector<G> dz(6, detail::store_finite<G>(was));
            e.reduction = reduce::sum, e.weights = weights;
            const diagnostics d = run(view(dz.data(), n, v), e).diagnostics;
            CHECK(d.bad_rows == 0);
            std::vector<double> got;
            for (const G x : dz) got.push_back(double(element<G>::load(x)));
            return std::pair{got, d.infinite_rows};
        };
        const auto [skipped, cut] = call(3, {});
        CHECK(cut == 1);
        CHECK(skipped[2] == 0);
        CHECK(skipped[3] == 0);
        CHECK(skipped[0] != 0);
        for (const float beta : {0.F, 1.F}) {
            const auto [got, rows] = call(3, {.beta = beta, .on_overflow = overflow::saturate});
            CHECK(rows == 1);
            CHECK(std::abs(got[2]) == most);
            CHECK(got[2] == -got[3]);
            CHECK(std::abs(got[0]) < 10);
        }
        for (const std::uint8_t kept : {1, 0}) {
            const std::vector<std::uint8_t> mask{kept, 0, kept};
            const auto [got, rows] = call(-0.75 * most, {.mask = mask, .beta = 2});
            CHECK(rows == (kept ? 2 : 0));
            for (const double x : got) CHECK(x == -most);
        }
    };
    cpu_backend cpu;
    on_both([&](auto& backend, const char*) {
        check("dense", [&](auto dz, const env& e) {
            return evaluate(backend, student::logits{view(z.data(), n, v), dz}, dense, alpha_divergence{-1}, e);
        });
    });
    check("renormalised", [&](auto dz, const env& e) {
        return evaluate(cpu, student::logits{view(z.data(), n, v), dz}, k, renormalised{alpha_divergence{-1}}, e);
    });
    check("tail_bucket", [&](auto dz, const env& e) {
        return evaluate(cpu, student::logits{view(z.data(), n, v), dz}, k, tail_bucket{alpha_divergence{-1}}, e);
    });
    check("mc", [&](auto dz, const env& e) {
        return evaluate(cpu, student::logits{view(z.data(), n, v), dz}, drawn, mc{advantage::outside{}}, e);
    });
}

} // namespace

TEST_CASE("bfloat16 and float: a weight, and what was there times beta") {
    beyond<bfloat16>("bfloat16");
    beyond<float>("float");
}

TEST_CASE("infinite::raise throws for what a look at the logits does not show, "
          "when all is written") {
    rows b;
    cpu_backend backend;
    env e = each_row;
    e.on_infinite = infinite::raise();
    CHECK_THROWS_WITH_AS(evaluate(backend, b.student(), b.of_teacher(), alpha_divergence{-1}, e),
                         doctest::Contains("row 1"), infinite_result);
    CHECK(floats(b.dz)[2] == 0);
    CHECK(floats(b.dz)[0] != 3);
}

TEST_CASE("a shard saturates its part and says in how many rows") {
    rows b;
    cpu_backend backend;
    auto call =
        vocab_parallel(backend, {.first = 0, .total = v}, b.student(), b.of_teacher(), alpha_divergence{-1}, each_row);
    while (call.local()) {}
    call.finish();
    CHECK(call.backward() == 1);
    CHECK(std::abs(float(b.dz[2])) == 65504);
    CHECK(float(b.dz[2]) == -float(b.dz[3]));
}
