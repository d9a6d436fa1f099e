// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// optimise: always
//
// student::hidden and teacher::hidden against the same call on materialised logits: equal bits where the products are
// the same, naive float64 for gradients of hidden states and head; budgets and threads change nothing.
#include "support/compiled/hidden_sides.hpp"
#include "support/property.hpp"

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include <opd/backends/cpu.hpp>
#include <opd/hidden.hpp>
#include <opd/opd.hpp>

using namespace opd;
using namespace opd::test;

TEST_CASE("hidden states give what their logits give, whatever the budget") {
    for (const index_t v : {1, 5, 37, 1500, 9000}) {
        const index_t n = v > 2000 ? 5 : 13;
        for (const bool more : {false, true}) {
            CAPTURE(v);
            const side s(n, v, 24, unsigned(v), more, more ? 3.0f : 0),
                t(n, v, 40, unsigned(v) + 10, more, more ? 5.0f : 0);
            const floats y = t.logits();
            const teacher::dense known{view(y.data(), n, v)};
            compare(s, teacher_of(t), known, reverse_kl{});
            compare(s, teacher_of(t, budget_of_rows(teacher_of(t), 1)), known, jsd{});
            compare(s, known, known, forward_kl{}); // one side alone
            std::vector<std::uint8_t> mask(std::size_t(n), 1);
            for (index_t r = 0; r < n; r += 3) mask[std::size_t(r)] = 0;
            compare(s, teacher_of(t), known, reverse_kl{}, {.reduction = reduce::sum, .mask = mask});
        }
    }
}

TEST_CASE("more rows than the products take together") {
    const side s(600, 20, 8, 1), t(600, 20, 8, 2);
    const floats y = t.logits();
    compare(s, teacher_of(t), teacher::dense{view(y.data(), 600, 20)}, reverse_kl{});
}

TEST_CASE("a bias of 10,000 costs the logits one rounding, not one of each addition") {
    const index_t n = 3, v = 200, d = 1024;
    side s(n, v, d, 1, true);
    for (float& b : s.bias) b += 1e4f;
    // the log-sum-exp of one id is its logit
    double worst = 0;
    for (index_t i = 0; i < v; ++i) {
        std::vector<double> lse(std::size_t(n), 0.0);
        student::hidden<float> one{.x = s.states(),
                                   .w = view(s.w.data() + i * d, 1, d),
                                   .bias = view(&std::as_const(s).bias[std::size_t(i)], 1)};
        const floats y(std::size_t(n), 0.0f);
        cpu_backend be;
        evaluate(be, one, teacher::dense{view(y.data(), n, 1)}, reverse_kl{}, {.lse = lse});
        for (index_t r = 0; r < n; ++r) {
            double z = double(s.bias[std::size_t(i)]);
            for (index_t j = 0; j < d; ++j)
                z += double(s.x[std::size_t(r * d + j)]) * double(s.w[std::size_t(i * d + j)]);
            worst = std::max(worst, std::abs(lse[std::size_t(r)] - z));
        }
    }
    CHECK(worst < 0.51 * 0x1p-10); // half a unit of numbers from 8,192 on, and the product's rounding
}

TEST_CASE("the page's call") {
    const index_t n = 4, v = 20, d = 3, d_teacher = 5;
    const side s(n, v, d, 1), t(n, v, d_teacher, 2);
    const float *x = s.x.data(), *w = s.w.data(), *h = t.x.data(), *head = t.w.data();
    gradients g(s), same(s);
    float *dx = g.dx.data(), *dw = g.dw.data();
    cpu_backend backend;
    // clang-format off
    const student::hidden mine{view(x, n, d), view(w, v, d),    // hidden states, and the head (V,D)
                               view(dx, n, d), view(dw, v, d)}; // where their gradients go
    const teacher::hidden theirs{view(h, n, d_teacher), view(head, v, d_teacher)};
    const auto r = evaluate(backend, mine, theirs, reverse_kl{});
    // clang-format on
    CHECK(r.loss == evaluate(backend, student_of(s, same), theirs, reverse_kl{}).loss);
    CHECK(g.dx == same.dx);
    CHECK(g.dw == same.dw);
}

TEST_CASE("supports and samples take hidden students too") {
    const index_t n = 11, v = 700, k = 6;
    const side s(n, v, 16, 3);
    const floats z = s.logits();
    std::mt19937 random(5);
    std::vector<std::int32_t> ids(std::size_t(n * k));
    floats log_q(ids.size()), log_mu(ids.size());
    for (index_t r = 0; r < n; ++r)
        for (index_t j = 0; j < k; ++j) {
            ids[std::size_t(r * k + j)] = std::int32_t(j * 100 + index_t(random() % 100));
            log_q[std::size_t(r * k + j)] = -2.5f - float(j), log_mu[std::size_t(r * k + j)] = -3.0f - float(j) / 2;
        }
    const auto i = view(std::as_const(ids).data(), n, k);
    const auto q = view(std::as_const(log_q).data(), n, k), mu = view(std::as_const(log_mu).data(), n, k);
    const teacher::support of_k{i, q};
    compare(s, of_k, of_k, tail_bucket{reverse_kl{}});
    const teacher::samples drawn{i, mu, q};
    compare(s, drawn, drawn, mc{reverse_kl{}});
}

TEST_CASE("with the identity for a head the hidden states are the logits") {
    const index_t n = 9, v = 64;
    const floats z = normals(std::size_t(n * v), 1), y = normals(std::size_t(n * v), 2);
    floats one(std::size_t(v * v)), dz(z.size()), dx(z.size());
    for (index_t i = 0; i < v; ++i) one[std::size_t(i * v + i)] = 1;
    cpu_backend be;
    const teacher::dense known{view(y.data(), n, v)};
    const auto expected =
        evaluate(be, student::logits{view(z.data(), n, v), view(dz.data(), n, v)}, known, reverse_kl{});
    const auto got = evaluate(be, student::hidden{view(z.data(), n, v), view(one.data(), v, v), view(dx.data(), n, v)},
                              teacher::hidden{view(y.data(), n, v), view(one.data(), v, v)}, reverse_kl{});
    CHECK(got.loss == doctest::Approx(expected.loss).epsilon(1e-14));
    CHECK(dx == dz);
}

TEST_CASE("temperatures, beta and collected heads") {
    const index_t n = 6, v = 50;
    const side s(n, v, 8, 1), t(n, v, 8, 2);
    cpu_backend be;
    gradients once(s), twice(s, 2);
    auto source = student_of(s, once);
    source.temperature = 0.7f;
    auto cache = teacher_of(t);
    cache.temperature = 2;
    const auto r = evaluate(be, source, cache, reverse_kl{});
    const floats z = s.logits(), y = t.logits();
    floats dz(z.size());
    CHECK(r.loss == doctest::Approx(evaluate(be, student::logits{view(z.data(), n, v), view(dz.data(), n, v), 0.7f},
                                             teacher::dense{view(y.data(), n, v), 2.0f}, reverse_kl{})
                                        .loss));
    check_gradients(s, z, dz, once);
    auto more = student_of(s, twice);
    more.budget = budget_of_rows(more, 2);
    more.temperature = 0.7f, more.beta_head = 0.5f;
    evaluate(be, more, cache, reverse_kl{}, {.beta = 3});
    for (std::size_t i = 0; i < once.dx.size(); ++i)
        CHECK(twice.dx[i] == doctest::Approx(6 + once.dx[i]).epsilon(1e-6));
    for (std::size_t i = 0; i < once.dw.size(); ++i)
        CHECK(twice.dw[i] == doctest::Approx(1 + once.dw[i]).epsilon(1e-6));
    for (std::size_t i = 0; i < once.db.size(); ++i)
        CHECK(twice.db[i] == doctest::Approx(1 + once.db[i]).epsilon(1e-6));
}

TEST_CASE("a bad row has gradient 0 and adds nothing to the head") {
    const index_t n = 7, v = 30;
    side s(n, v, 5, 1);
    const side t(n, v, 5, 2);
    gradients clean(s), got(s, 9);
    cpu_backend be;
    std::vector<std::uint8_t> mask{1, 1, 0, 1, 1, 1, 1};
    evaluate(be, student_of(s, clean), teacher_of(t), reverse_kl{}, {.reduction = reduce::sum, .mask = mask});
    for (const float bad : {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
        side broken = s;
        broken.x[2 * 5 + 1] = bad;
        const auto r = evaluate(be, student_of(broken, got), teacher_of(t), reverse_kl{}, {.reduction = reduce::sum});
        CHECK(r.diagnostics.bad_rows == 1);
        CHECK(r.diagnostics.first_bad_row == 2);
        CHECK(got == clean); // as if it were masked
    }
}

TEST_CASE("vocabularies of different size: what is beyond the common ids has no gradient") {
    const index_t n = 4, v = 1100, common = 1000;
    const side s(n, v, 6, 1), t(n, common, 9, 2);
    cpu_backend be;
    const floats z = s.logits(), y = t.logits();
    floats dz(z.size());
    const env e{.vocab = vocabulary::drop_and_renormalise};
    const auto expected = evaluate(be, student::logits{view(z.data(), n, v), view(dz.data(), n, v)},
                                   teacher::dense{view(y.data(), n, common)}, reverse_kl{}, e);
    gradients g(s, 5);
    CHECK(evaluate(be, student_of(s, g), teacher_of(t), reverse_kl{}, e).loss == doctest::Approx(expected.loss));
    check_gradients(s, z, dz, g);
    for (index_t i = common; i < v; ++i) CHECK(g.db[std::size_t(i)] == 0);
}

TEST_CASE("an arena of the bytes that are asked for does, and a smaller one is refused") {
    const index_t n = 20, v = 300;
    const side s(n, v, 12, 1, true, 4.0f), t(n, v, 12, 2);
    gradients g(s);
    auto source = student_of(s, g);
    source.budget = budget_of_rows(source, 6);
    cpu_backend be;
    const std::size_t bytes = workspace_bytes(be, source, teacher_of(t), reverse_kl{});
    // what rows need anyway, the blocks of both sides, the products' own
    const std::size_t own = opd::detail::worker_floats::bytes(6, 12);
    CHECK(bytes >= source.budget + budget_of_rows(teacher_of(t), 6) + own);
    CHECK(bytes <= source.budget + budget_of_rows(teacher_of(t), 6) + own + 20 * sizeof(result) + 1024);
    std::vector<std::byte> memory(bytes);
    be.arena = memory;
    CHECK(evaluate(be, source, teacher_of(t), reverse_kl{}).loss > 0);
    be.arena = std::span(memory).first(bytes / 2);
    CHECK_THROWS_AS(evaluate(be, source, teacher_of(t), reverse_kl{}), invalid_input);
}

namespace {
/// A teacher of the test's own, whose tiles lie in the asking thread's scratch.
struct scratch_teacher {
    using logit_type = float;
    static constexpr cache_kind kind = cache_kind::dense;
    static constexpr space memory_space = space::host;
    static constexpr bool one_tile = false;
    matrix_view<const float> y;
    float temperature = 1;
    index_t rows() const { return y.rows; }
    index_t vocab() const { return y.cols; }
    index_t tile_size() const { return 1024; }
    std::size_t scratch_bytes() const { return sizeof(float) * 1024; }
    float logit(row_place at, index_t id) const { return y(at.row, id); }
    const float* tile(row_place at, index_t begin) const {
        auto* const mine = reinterpret_cast<float*>(at.scratch);
        return std::copy_n(y.row(at.row) + begin, std::min<index_t>(1024, y.cols - begin), mine), mine;
    }
};
} // namespace

TEST_CASE("a hidden student beside a source of one's own that makes its tiles in scratch") {
    const index_t n = 9, v = 2500;
    const side s(n, v, 10, 1), t(n, v, 14, 2);
    const floats y = t.logits();
    compare(s, scratch_teacher{view(y.data(), n, v)}, teacher::dense{view(y.data(), n, v)}, jsd{});
}

TEST_CASE(
    "a hidden teacher beside a student's logits: every entry of dz is as beside a dense one, whatever the budget") {
    const index_t n = 11, v = 2500;
    side s(n, v, 6, 1);
    const side t(n, v - 300, 9, 2);
    s.x[4 * 6] = std::numeric_limits<float>::quiet_NaN(); // row 4 is bad
    const floats z = s.logits(), y = t.logits();
    std::vector<std::uint8_t> mask(std::size_t(n), 1);
    mask[2] = mask[7] = 0;
    const auto same = [&](const auto& estimator, float beta) {
        const env e{.mask = mask, .beta = beta, .vocab = vocabulary::drop_and_renormalise};
        cpu_backend be{.threads = 2};
        floats expected(z.size(), 3), got(z.size());
        const result r = evaluate(be, student::logits{view(z.data(), n, v), view(expected.data(), n, v)},
                                  teacher::dense{view(y.data(), n, v - 300)}, estimator, e);
        auto theirs = teacher_of(t);
        for (const std::size_t budget : {theirs.budget, budget_of_rows(theirs, 3), budget_of_rows(theirs, 3, 1024),
                                         budget_of_rows(theirs, n, 1024)}) {
            theirs.budget = budget;
            std::fill(got.begin(), got.end(), 3.0f);
            const result of_states =
                evaluate(be, student::logits{view(z.data(), n, v), view(got.data(), n, v)}, theirs, estimator, e);
            CHECK(of_states.loss == doctest::Approx(r.loss).epsilon(1e-12));
            CHECK(of_states.diagnostics.bad_rows == 1);
            CHECK(equal_bits(got, expected));
        }
    };
    for (const float beta : {0.0f, 1.0f}) same(reverse_kl{}, beta), same(jsd{}, beta);
}

TEST_CASE("bfloat16 states, heads and biases give what the floats that they are give, bit for bit") {
    const index_t n = 70, v = 2100;
    side s(n, v, 33, 1, true, 4.0f), t(n, v, 40, 2, true);
    const auto rounded = [](floats& x) {
        std::vector<bfloat16> stored;
        for (float& y : x) {
            stored.push_back(element<bfloat16>::store(y));
            y = element<bfloat16>::load(stored.back());
        }
        return stored;
    };
    const auto x = rounded(s.x), w = rounded(s.w), b = rounded(s.bias), h = rounded(t.x), head = rounded(t.w),
               c = rounded(t.bias);
    gradients expected(s, 1), got(s, 2);
    student::hidden<bfloat16> mine{.x = view(x.data(), n, 33),
                                   .w = view(w.data(), v, 33),
                                   .dx = view(got.dx.data(), n, 33),
                                   .dw = view(got.dw.data(), v, 33),
                                   .bias = view(b.data(), v),
                                   .db = view(got.db.data(), v),
                                   .soft_cap = s.cap};
    teacher::hidden<bfloat16> theirs{view(h.data(), n, 40), view(head.data(), v, 40)};
    theirs.bias = view(c.data(), v);
    cpu_backend be{.threads = 2};
    const double loss = evaluate(be, student_of(s, expected), teacher_of(t), reverse_kl{}).loss;
    CHECK(evaluate(be, mine, theirs, reverse_kl{}).loss == loss);
    CHECK(got == expected);
    CHECK(budget_of_rows(mine, 9) == budget_of_rows(student_of(s, got), 9));
    mine.budget = budget_of_rows(mine, 5, 1024), theirs.budget = budget_of_rows(theirs, 5, 1024);
    got = gradients(s, 3);
    mine.dx = view(got.dx.data(), n, 33), mine.dw = view(got.dw.data(), v, 33), mine.db = view(got.db.data(), v);
    CHECK(evaluate(be, mine, theirs, reverse_kl{}).loss == loss);
    CHECK(got == expected);
    // few logits a row
    std::vector<std::int32_t> ids;
    floats log_q;
    for (index_t i = 0; i < n * 4; ++i) ids.push_back(std::int32_t(i * 37 % v)), log_q.push_back(-2 - float(i % 4));
    const teacher::support cache{view(std::as_const(ids).data(), n, 4), view(std::as_const(log_q).data(), n, 4)};
    CHECK(evaluate(be, mine, cache, renormalised{reverse_kl{}}).loss ==
          evaluate(be, student_of(s, expected), cache, renormalised{reverse_kl{}}).loss);
    CHECK(got == expected);
}

TEST_CASE("tiles of the vocabulary: where a budget holds no whole rows, or few") {
    const index_t n = 300, v = 5000; // two blocks of rows
    const side s(n, v, 12, 1, true, 4.0f), t(n, v - 700, 20, 2, true);
    gradients whole(s, 1), tiled(s, 2);
    const env e{.vocab = vocabulary::drop_and_renormalise};
    auto student = student_of(s, tiled);
    auto teacher = teacher_of(t);
    const auto plan = [&](const auto& estimator) {
        return opd::detail::host_plan_of(checked_job(cpu_backend{}, student, teacher, estimator, e));
    };
    const side wide(4, v, 600, 5), known(4, v, 700, 6); // wide enough that logits are kept for the way back
    gradients of_wide(wide);
    auto source = student_of(wide, of_wide);
    const auto plan_of_wide = [&] {
        return opd::detail::host_plan_of(checked_job(cpu_backend{}, source, teacher_of(known), reverse_kl{}, e));
    };
    CHECK(plan_of_wide().tile == 0);
    CHECK(plan_of_wide().block == 4);
    source.dx = source.dw = {}, source.db = {};
    CHECK(plan_of_wide().tile > 0); // and nothing is kept of a value
    for (const index_t rows : {8, 60, 120}) {
        student.budget = budget_of_rows(student, rows, 1024), teacher.budget = budget_of_rows(teacher, rows, 1024);
        if (rows == 8) CHECK(plan(reverse_kl{}).tile == 1024); // two whole rows
        CHECK(plan(reverse_kl{}).block <= rows);
        const auto same = [&](const auto& estimator) {
            for (const int threads : {1, 2}) {
                cpu_backend be{.threads = threads};
                const auto expected = evaluate(be, student_of(s, whole), teacher_of(t), estimator, e);
                CHECK(evaluate(be, student, teacher, estimator, e).loss == expected.loss);
                CHECK(tiled == whole);
            }
        };
        same(reverse_kl{}), same(forward_kl{}), same(jsd{}), same(alpha_divergence{0.3f});
    }
    // a row of a tile is the least that there is
    student.budget = budget_of_rows(student, 1, 1024);
    CHECK(plan(reverse_kl{}).block == 1);
    student.budget -= 1;
    CHECK_THROWS_WITH_AS(plan(reverse_kl{}),
                         doctest::Contains(std::to_string(budget_of_rows(student, 1, 1024)).c_str()), invalid_input);
}

TEST_CASE("tiles: rows that float does not carry, that are infinite, bad or masked, and near p = q") {
    const index_t n = 9, v = 4000;
    side s(n, v, 6, 1), t(n, v, 6, 2);
    t.w = s.w;
    for (std::size_t i = 0; i < t.x.size(); ++i) t.x[i] = s.x[i] * (1 + 1e-6f * float(i % 3)); // near equality
    for (const std::size_t j : {0, 1, 2, 3, 4, 5}) {
        s.x[1 * 6 + j] *= 300, t.x[1 * 6 + j] *= -300;            // far apart
        s.x[2 * 6 + j] *= 40, t.x[2 * 6 + j] *= -20;              //
        s.x[3 * 6 + j] = std::numeric_limits<float>::quiet_NaN(); // bad
    }
    t.bias.assign(std::size_t(v), 0.f), s.bias = t.bias;
    for (std::size_t i = 3000; i < 3500; ++i) t.bias[i] = -std::numeric_limits<float>::infinity(); // a filter
    for (std::size_t i = 0; i < 20; ++i) s.bias[i] = t.bias[i] = -std::numeric_limits<float>::infinity();
    std::vector<std::uint8_t> mask(std::size_t(n), 1);
    mask[5] = 0;
    for (const auto act : {infinite::action::skip, infinite::action::floor}) {
        const env e{.mask = mask, .on_infinite = {.act = act}};
        const auto same = [&](const auto& estimator) {
            gradients whole(s, 1), tiled(s, 2);
            floats losses(std::size_t(n), 0.f), same_losses(std::size_t(n), 1.f);
            cpu_backend be{.threads = 2};
            env with = e;
            with.losses = losses;
            const auto expected = evaluate(be, student_of(s, whole), teacher_of(t), estimator, with);
            auto student = student_of(s, tiled);
            auto teacher = teacher_of(t);
            student.budget = budget_of_rows(student, n, 1024), teacher.budget = budget_of_rows(teacher, n, 1024);
            REQUIRE(opd::detail::host_plan_of(checked_job(be, student, teacher, estimator, e)).tile > 0);
            with.losses = same_losses;
            const auto got = evaluate(be, student, teacher, estimator, with);
            CHECK(equal_bits(losses, same_losses));
            check_diagnostics(got.diagnostics, expected.diagnostics);
            CHECK(tiled == whole);
        };
        same(reverse_kl{}), same(forward_kl{}), same(jsd{}), same(chi_squared{});
    }
}

TEST_CASE("the largest of calls has room for its spans, and the last is compared with the first") {
    // 3 outputs and 3 inputs of a hidden student, 15 of weighted tokens with kept sets, 3 outputs and 9 inputs of env
    floats memory(33);
    const auto at = [&](int i) { return view(memory.data() + i, 1); };
    opd::detail::call_spans spans;
    spans.writes("first", at(0));
    for (int i = 1; i < 32; ++i) spans.reads("between", at(i));
    spans.check();
    spans.reads("last", at(0));
    CHECK_THROWS_WITH_AS(spans.check(), doctest::Contains("overlaps last"), invalid_input);
    for (int i = 33; i < 40; ++i) spans.reads("more", at(32));
    CHECK_THROWS_AS(spans.reads("too many", at(32)), unsupported);
}

TEST_CASE("what cannot be is refused by name, before anything is written") {
    const index_t n = 3, v = 10, d = 4;
    side s(n, v, d, 1);
    const side t(n, v, d, 2);
    gradients g(s, 1);
    const gradients untouched(s, 1);
    cpu_backend be;
    const auto refused = [&](const auto& student, const auto& teacher, const char* argument, const char* why,
                             const env& e = {}) {
        try {
            evaluate(be, student, teacher, reverse_kl{}, e);
            FAIL("was taken: " << argument);
        } catch (const std::exception& error) {
            const std::string text = error.what();
            CHECK_MESSAGE(text.find(argument) != std::string::npos, text);
            CHECK_MESSAGE(text.find(why) != std::string::npos, text);
        }
        CHECK(g == untouched);
    };
    const auto changed = [&](auto&& change) {
        auto x = student_of(s, g);
        change(x);
        return x;
    };
    refused(changed([&](auto& x) { x.w = view(std::as_const(s.w).data(), v - 2, d + 1); }), teacher_of(t), "student.w",
            "not (8, 4)");
    refused(changed([&](auto& x) { x.dx = view(g.dx.data(), n, d - 1); }), teacher_of(t), "student.dx", "shape");
    refused(changed([&](auto& x) { x.db.size = v - 1; }), teacher_of(t), "student.db", "9 entries");
    refused(changed([&](auto& x) { x.budget = 39; }), teacher_of(t), "student.budget", "is 39 bytes; a row takes");
    refused(changed([&](auto& x) { x.soft_cap = -1; }), teacher_of(t), "student.soft_cap", "at least 0");
    refused(changed([&](auto& x) { x.temperature = 0; }), teacher_of(t), "student.temperature", "1e-6");
    refused(changed([&](auto& x) { x.dw = view(g.dx.data(), v, d); }), teacher_of(t), "student.d", "overlaps");
    refused(changed([&](auto& x) { x.dx = view(s.x.data(), n, d); }), teacher_of(t), "student.dx",
            "overlaps student.x");
    auto few = teacher_of(t);
    few.budget = 1;
    refused(student_of(s, g), few, "teacher.budget", std::to_string(budget_of_rows(few, 1)).c_str());
    auto nothing = teacher_of(t);
    nothing.x.data = nullptr;
    refused(student_of(s, g), nothing, "teacher.x", "null");
    refused(student_of(s, g), teacher_of(t), "check::contents", "check::count", {.checks = check::contents});
    // no row: nothing is read, and a head has no gradient
    auto none = student_of(s, g);
    none.x.rows = none.dx.rows = 0;
    auto no_rows = teacher_of(t);
    no_rows.x.rows = 0;
    CHECK(evaluate(be, none, no_rows, reverse_kl{}).loss == 0);
    CHECK(g.dx == untouched.dx);
    CHECK(g.dw == floats(g.dw.size()));
    CHECK(g.db == floats(g.db.size()));
}
