// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Rows that are not plain, from hidden states: in float64, infinite, clamped, measured, selected, weighted, of a frozen
// batch; all as of logits.
#include "support/compiled/hidden_sides.hpp"
#include "support/property.hpp"

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <utility>
#include <vector>

#include <opd/backends/cpu.hpp>
#include <opd/hidden.hpp>
#include <opd/opd.hpp>

using namespace opd;
using namespace opd::test;

namespace {

constexpr float none = -std::numeric_limits<float>::infinity();

/// Student and teacher whose logits are of size `scale`; the last `padding` ids of either are no tokens.
struct pair_of_sides {
    side s, t;
    floats y;
    pair_of_sides(index_t n, index_t v, float scale_s, float scale_t, index_t pad_s = 0, index_t pad_t = 0)
        : s(n, v, 24, 1, true), t(n, v, 33, 5, true) {
        for (float& x : s.w) x *= scale_s;
        for (float& x : t.w) x *= scale_t;
        for (index_t i = 0; i < pad_s; ++i) s.bias[std::size_t(v - 1 - i)] = none;
        for (index_t i = 0; i < pad_t; ++i) t.bias[std::size_t(v - 1 - i)] = none;
        y = t.logits();
    }
    teacher::hidden<float> theirs() const { return teacher_of(t); }
    teacher::dense<float> known() const { return {view(y.data(), t.n, t.v)}; }
};

} // namespace

TEST_CASE("rows that float cannot carry are computed in float64, a row at a time") {
    index_t careful = 0;
    for (const float scale : {1.0f, 40.0f, 400.0f}) { // gaps up to 1,000 nats and more
        const pair_of_sides p(9, 1300, 1, scale);
        careful += compare(p.s, p.theirs(), p.known(), forward_kl{}).diagnostics.careful_rows;
        careful += compare(p.s, p.theirs(), p.known(), chi_squared{}).diagnostics.careful_rows;
        compare(p.s, p.theirs(), p.known(), reverse_kl{});
        const teacher::lumped hidden{p.theirs(), index_t(1200)};
        const teacher::lumped plain{p.known(), index_t(1200)};
        compare(p.s, hidden, plain, reverse_kl{});
    }
    CHECK(careful > 9);
    // temperatures at the ends
    for (const float temperature : {0.01f, 100.0f}) {
        const pair_of_sides p(5, 300, 1, 1);
        auto hidden = p.theirs();
        auto plain = p.known();
        hidden.temperature = plain.temperature = temperature;
        compare(p.s, hidden, plain, forward_kl{}, {}, [&](auto& source) { source.temperature = temperature; });
    }
}

TEST_CASE("infinite values by their policy, where padded vocabularies differ") {
    const pair_of_sides teacher_lacks(7, 500, 1, 1, 2, 30), student_lacks(7, 500, 1, 1, 40, 3);
    for (const auto policy : {infinite::floor(-15), infinite::skip()}) {
        const env e{.on_infinite = policy};
        CHECK(compare(teacher_lacks.s, teacher_lacks.theirs(), teacher_lacks.known(), reverse_kl{}, e)
                  .diagnostics.infinite_rows == 7);
        CHECK(compare(student_lacks.s, student_lacks.theirs(), student_lacks.known(), forward_kl{}, e)
                  .diagnostics.infinite_rows == 7);
        CHECK(compare(student_lacks.s, student_lacks.theirs(), student_lacks.known(), reverse_kl{}, e)
                  .diagnostics.infinite_rows == 0);
    }
    // on a support of which the teacher rules ids out
    std::vector<std::int32_t> ids;
    floats log_q;
    for (index_t r = 0; r < 7; ++r)
        for (index_t j = 0; j < 6; ++j) {
            ids.push_back(std::int32_t(j * 80 + r)), log_q.push_back(j == 3 ? none : -2.0f - float(j) / 2);
        }
    const teacher::support of_k{view(std::as_const(ids).data(), 7, 6), view(std::as_const(log_q).data(), 7, 6)};
    CHECK(compare(teacher_lacks.s, of_k, of_k, renormalised{reverse_kl{}}).diagnostics.infinite_rows == 7);
    CHECK(compare(teacher_lacks.s, of_k, of_k, renormalised{reverse_kl{}}, {.on_infinite = infinite::skip()})
              .diagnostics.infinite_rows == 7);
}

TEST_CASE("clamps, weights, offsets, versions, collected losses and a given log-sum-exp") {
    const pair_of_sides p(10, 700, 1, 1);
    const floats weights{1, -2, 0.5f, 0, 3, 1, 1, 2, 0.25f, 1}, z = p.s.logits();
    const std::vector<std::int64_t> offsets{0, 3, 3, 10};
    const std::vector<std::int32_t> versions{5, 4, 3, 2, 1, 5, 5, 5, 5, 5};
    std::vector<double> lse(std::size_t(10), 0.0);
    cpu_backend be;
    log_sum_exp(be, view(z.data(), 10, 700), lse);
    const env plain{
        .reduction = reduce::sequence_mean, .weights = weights, .offsets = offsets, .versions = versions, .version = 6};
    env e = plain;
    compare(p.s, p.theirs(), p.known(), reverse_kl{}, e);
    e.given_lse = lse;
    compare(p.s, p.theirs(), p.known(), reverse_kl{}, e);
    std::vector<float> losses(10, 0.0f);
    const auto r = evaluate(be, student::logits{view(z.data(), 10, 700)}, p.known(), reverse_kl{}, {.losses = losses});
    const double middle = r.loss;
    e = plain, e.loss_clamp = middle;
    const index_t clamped = compare(p.s, p.theirs(), p.known(), reverse_kl{}, e).diagnostics.clamped_rows;
    CHECK(clamped > 0);
    CHECK(clamped < 10);
}

TEST_CASE("measures and selectors") {
    const pair_of_sides p(12, 600, 1, 2);
    const std::vector<std::int64_t> offsets{0, 5, 12};
    compare(p.s, p.theirs(), p.known(), reverse_kl{}, {.measure = {.entropy = true}});
    const result r = compare(p.s, p.theirs(), p.known(),
                             selected{reverse_kl{}, selector::tip{.entropy = 4.4, .gap = 100}}, {.offsets = offsets});
    CHECK(r.diagnostics.selector_left_out > 0);
    CHECK(r.diagnostics.selector_left_out < 12);
    compare(p.s, p.theirs(), p.known(), selected{weighted_sum{reverse_kl{}, forward_kl{}}, selector::eopd{3, 0.5}});
    const teacher::lumped hidden{p.theirs(), index_t(400)};
    const teacher::lumped plain{p.known(), index_t(400)};
    compare(p.s, hidden, plain, selected{reverse_kl{}, selector::prefix{.depth = 3}},
            {.offsets = offsets, .measure = {.entropy = true}});
}

TEST_CASE("drawn tokens of a frozen batch, their ratios measured, under a selector") {
    const index_t n = 8, v = 400, m = 3;
    const side s(n, v, 20, 3);
    std::mt19937 random(5);
    std::vector<std::int32_t> ids;
    floats log_mu, log_q;
    std::vector<std::uint8_t> keep;
    std::vector<double> weight, sequence(std::size_t(n), 0.0), advantage;
    for (index_t i = 0; i < n * m; ++i) {
        ids.push_back(std::int32_t(random() % 400)), log_mu.push_back(-6.0f - 0.1f * float(i % 7));
        log_q.push_back(-5.5f - 0.2f * float(i % 5)), keep.push_back(i % 4 != 1),
            weight.push_back(0.5 + 0.1 * double(i % 9));
        advantage.push_back(0.3 * double(i % 3) - 0.2);
    }
    const auto at = [&](const auto& x) { return view(x.data(), n, m); };
    const teacher::samples drawn{at(ids), at(log_mu), at(log_q)};
    std::vector<index_t> one(ratio_sketch::bins), other(ratio_sketch::bins);
    const frozen_batch<> frozen{
        .keep = at(keep), .weight = at(weight), .sequence_log_ratio = sequence, .advantage = at(advantage)};
    compare(s, drawn, drawn, mc{reverse_kl{}}, {.frozen = frozen, .measure = {.entropy = true}});
    compare(s, drawn, drawn, selected{mc{reverse_kl{}}, selector::band{.most = 1.5}}, {.frozen = frozen});
    // ratios are added to the sketch once for each token
    cpu_backend be;
    const floats z = s.logits();
    gradients g(s);
    evaluate(be, student::logits{view(z.data(), n, v)}, drawn, mc{reverse_kl{}}, {.measure = {.ratios = one}});
    evaluate(be, student_of(s, g, sizeof(float) * std::size_t(2 * v)), drawn, mc{reverse_kl{}},
             {.measure = {.ratios = other}});
    CHECK(one == other);
}
