// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// build: ofast
//
// Bad input, one case a kind. Shapes, strides, aliasing, options: `invalid_input` naming argument and row, thrown before
// anything is written. Contents: counted with loss 0 and gradient 0, or thrown under check::contents. Infinite rows: floored,
// skipped or raised. Rows beyond the clamp: cut.
#include "support/generators.hpp"
#include "support/naive_backend.hpp"
#include "support/property.hpp"

#include <opd/backends/eigen.hpp>
#include <opd/estimators/divergences.hpp>
#include <opd/estimators/sampled.hpp>
#include <opd/estimators/support.hpp>

using namespace opd;
using namespace opd::test;

namespace {

const float nan_f = std::bit_cast<float>(0x7fc00000u), inf_f = std::bit_cast<float>(0x7f800000u);
const float minus_inf = detail::neg_inf<float>();
constexpr index_t rows = 3, vocab = 20, k = 4;

/// A good call of every kind over the same student; cases spoil one thing.
struct call {
    std::vector<float> z = std::vector<float>(rows * 24), y = z, dz = std::vector<float>(rows * 24, 777.F);
    std::vector<std::int32_t> ids = std::vector<std::int32_t>(rows * k);
    std::vector<float> log_mu = std::vector<float>(rows * k, -2.F), log_q = std::vector<float>(rows * k, -1.5F);
    std::vector<float> weight = std::vector<float>(rows * k, 0.25F), log_tail = std::vector<float>(rows, -3.F);
    std::vector<float> losses = std::vector<float>(rows, 777.F), row_weights = std::vector<float>(rows, 1.F);
    student::logits<float> s;
    teacher::dense<float> dense;
    teacher::support<std::int32_t> support;
    teacher::samples<std::int32_t> samples;
    teacher::weighted<std::int32_t> weighted;
    opd::env env;

    call() {
        numbers u(11);
        for (float& x : z) x = float(u.normal());
        for (float& x : y) x = float(u.normal());
        for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = std::int32_t(3 * (i % k) + i / k);
        s = student::logits<float>{view(z.data(), rows, vocab, 24), view(dz.data(), rows, vocab, 24)};
        dense = teacher::dense<float>{view(y.data(), rows, vocab, 24)};
        const auto id = view(ids.data(), rows, k);
        const auto f = [](std::vector<float>& x) { return view(x.data(), rows, k); };
        support = {id, f(log_q), log_tail};
        samples = {id, f(log_mu), f(log_q)};
        weighted = {id, f(weight), f(log_mu), f(log_q)};
        env.losses = losses;
    }
    call(const call&) = delete;

    result run_dense() { return evaluate(backend, s, dense, reverse_kl{}, env); }
    result run_support() { return evaluate(backend, s, support, tail_bucket{reverse_kl{}}, env); }
    result run_samples() { return evaluate(backend, s, samples, mc_reverse_kl{}, env); }
    result run_weighted() { return evaluate(backend, s, weighted, weighted_reverse_kl{}, env); }
    bool untouched() const {
        return std::all_of(dz.begin(), dz.end(), [](float x) { return x == 777; }) &&
               std::all_of(losses.begin(), losses.end(), [](float x) { return x == 777; });
    }
    bool zero_row(index_t r) const {
        for (index_t v = 0; v < vocab; ++v)
            if (dz[std::size_t(r * 24 + v)] != 0) return false;
        return true;
    }
    eigen_backend backend;
};

/// spoil(call) must make `run` throw `text` and leave the outputs alone.
template <class Spoil, class Run>
void refused(const char* text, Spoil spoil, Run run, index_t row = -1) {
    call c;
    spoil(c);
    INFO(text);
    bool thrown = false;
    try {
        run(c);
    } catch (const invalid_input& e) {
        thrown = true;
        CHECK(std::string(e.what()).find(text) != std::string::npos);
        CHECK_MESSAGE(std::string(e.what()).find(e.argument) != std::string::npos, e.what());
        if (row >= 0) CHECK(e.row == row);
        if (row >= 0) CHECK(std::string(e.what()).find("row " + std::to_string(row)) != std::string::npos);
    }
    CHECK(thrown);
    CHECK(c.untouched());
}
const auto on_dense = [](call& c) { c.run_dense(); };
const auto on_support = [](call& c) { c.run_support(); };
const auto on_samples = [](call& c) { c.run_samples(); };
const auto on_weighted = [](call& c) { c.run_weighted(); };

} // namespace

TEST_CASE("the good calls are good") {
    call c;
    CHECK(c.run_dense().diagnostics.bad_rows == 0);
    CHECK(c.run_support().diagnostics.bad_rows == 0);
    CHECK(c.run_samples().diagnostics.bad_rows == 0);
    CHECK(c.run_weighted().diagnostics.bad_rows == 0);
    c.env.checks = check::contents;
    c.run_dense(), c.run_support(), c.run_samples(), c.run_weighted();
}

TEST_CASE("shapes, strides, pointers") {
    refused(
        "teacher.y: has shape (2,20), expected (3,20)", [](call& c) { c.dense.y.rows = 2; }, on_dense);
    refused(
        "student.dz: has shape (3,19), expected (3,20)", [](call& c) { c.s.dz.cols = 19; }, on_dense);
    refused(
        "student.z: has a row stride of 10 for 20 columns", [](call& c) { c.s.z.stride = 10; }, on_dense);
    refused(
        "student.dz: has a row stride of 19", [](call& c) { c.s.dz.stride = 19; }, on_dense);
    refused(
        "student.z: is a null pointer", [](call& c) { c.s.z.data = nullptr; }, on_dense);
    refused(
        "teacher.y: is a null pointer", [](call& c) { c.dense.y.data = nullptr; }, on_dense);
    refused(
        "student.z: has a negative shape", [](call& c) { c.s.z.rows = -3; }, on_dense);
    refused(
        "student.z: has no columns", [](call& c) { c.s.z.cols = c.s.dz.cols = 0; }, on_dense);
    refused(
        "student.z: is not aligned to its element type",
        [](call& c) { c.s.z.data = reinterpret_cast<const float*>(reinterpret_cast<std::uintptr_t>(c.z.data()) + 2); },
        on_dense);
    refused(
        "teacher.ids: has shape (2,4), expected (3,4)", [](call& c) { c.support.ids.rows = 2; }, on_support);
    refused(
        "teacher.log_q: has shape (3,3), expected (3,4)", [](call& c) { c.support.log_q.cols = 3; }, on_support);
    refused(
        "teacher.log_tail: has 2 entries for 3 rows", [](call& c) { c.support.log_tail.size = 2; }, on_support);
    refused(
        "teacher.ids: has no columns", [](call& c) { c.samples.ids.cols = 0; }, on_samples);
    refused(
        "teacher.log_mu: has shape (3,2), expected (3,4)", [](call& c) { c.samples.log_mu.cols = 2; }, on_samples);
    refused(
        "teacher.log_mu: is a null pointer", [](call& c) { c.samples.log_mu.data = nullptr; }, on_samples);
    refused(
        "teacher.weight: has shape", [](call& c) { c.weighted.weight.cols = 2; }, on_weighted);
    refused(
        "columns for a vocabulary of 3", [](call& c) { c.s.z.cols = c.s.dz.cols = 3; }, on_support);
}

TEST_CASE("vocabularies, temperatures, determinism, estimator options") {
    refused(
        "teacher.y: has 19 columns, the student 20; set env.vocab", [](call& c) { c.dense.y.cols = 19; }, on_dense);
    for (const float t : {0.F, -1.F, nan_f, inf_f}) {
        refused(
            "student.temperature: must be positive and finite", [t](call& c) { c.s.temperature = t; }, on_dense);
        refused(
            "teacher.temperature: must be positive and finite", [t](call& c) { c.dense.temperature = t; }, on_dense);
    }
    call c;
    c.env.level = determinism::tiling_invariant;
    CHECK_THROWS_WITH_AS(c.run_dense(), doctest::Contains("tiling_invariant is not offered"), unsupported);
    CHECK(c.untouched());
    refused(
        "mc_reverse_kl.baseline: exact_entries needs a teacher::weighted cache", [](call&) {},
        [](call& d) {
            evaluate(d.backend, d.s, d.samples, mc_reverse_kl<>{.baseline = baseline::exact_entries}, d.env);
        });
    refused(
        "weighted_reverse_kl.baseline: leave-one-out", [](call&) {},
        [](call& d) {
            evaluate(d.backend, d.s, d.weighted, weighted_reverse_kl<>{.baseline = baseline::leave_one_out}, d.env);
        });
    refused(
        "advantage_clip", [](call&) {},
        [](call& d) { evaluate(d.backend, d.s, d.samples, mc_reverse_kl<>{.advantage_clip = -1}, d.env); });
    refused(
        "jsd.w", [](call&) {}, [](call& d) { evaluate(d.backend, d.s, d.support, tail_bucket{jsd{.w = 2}}, d.env); });
    refused(
        "has no log-sum-exp", [](call& d) { d.env.lse = d.row_weights; },
        [](call& d) { evaluate(d.backend, d.s, d.support, renormalised{reverse_kl{}}, d.env); });
}

TEST_CASE("aliasing") {
    refused(
        "student.dz: overlaps student.z; only the same pointer, type and stride may alias",
        [](call& c) {
            c.s.dz.data = c.z.data() + 4;
            c.s.dz.rows = c.s.z.rows = c.dense.y.rows = 2;
            c.env.losses = {};
        },
        on_dense);
    refused(
        "student.dz: overlaps student.z", [](call& c) { c.s.dz.data = c.z.data(), c.s.dz.stride = 20; }, on_dense);
    refused(
        "student.dz: is student.z, which env.beta = 0 alone allows",
        [](call& c) { c.s.dz.data = c.z.data(), c.env.beta = 1; }, on_dense);
    refused(
        "student.dz: overlaps teacher.y", [](call& c) { c.s.dz.data = c.y.data(); }, on_dense);
    refused(
        "student.dz: overlaps env.losses", [](call& c) { c.env.losses = vector_view<float>(c.dz.data() + 3, 3); },
        on_dense);
    refused(
        "student.dz: overlaps teacher.log_q",
        [](call& c) { c.support.log_q = matrix_view<const float>(c.dz.data(), rows, k, k); }, on_support);
    call c; // another type at the same address
    const student::logits<float, bfloat16> s{c.s.z, view(reinterpret_cast<bfloat16*>(c.z.data()), rows, vocab, 24)};
    CHECK_THROWS_WITH_AS(evaluate(c.backend, s, c.dense, reverse_kl{}), doctest::Contains("overlaps student.z"),
                         invalid_input);
}

TEST_CASE("env") {
    const std::vector<int> short_mask{1, 0};
    const std::vector<std::int64_t> late{1, 3}, falling{0, 2, 1, 3}, early{0, 2};
    const std::vector<float> two{1, 1}, bad_weight{1, nan_f, 1};
    refused(
        "env.mask: has 2 entries for 3 rows", [&](call& c) { c.env.mask = row_mask<>(short_mask); }, on_dense);
    refused(
        "env.weights: has 2 entries for 3 rows", [&](call& c) { c.env.weights = two; }, on_dense);
    refused(
        "env.given_lse: has 2 entries", [&](call& c) { c.env.given_lse = two; }, on_dense);
    refused(
        "env.losses: has 2 entries", [](call& c) { c.env.losses.size = 2; }, on_dense);
    refused(
        "env.lse: has 1 entries", [](call& c) { c.env.lse = vector_view<float>(c.row_weights.data(), 1); }, on_dense);
    refused(
        "env.weights, row 1: is not finite", [&](call& c) { c.env.weights = bad_weight; }, on_dense, 1);
    refused(
        "env.normalizer: must be positive under reduce::constant", [](call& c) { c.env.reduction = reduce::constant; },
        on_dense);
    refused(
        "env.normalizer: must be positive, or 0", [](call& c) { c.env.normalizer = -1; }, on_dense);
    refused(
        "env.offsets: is needed by a reduction over sequences",
        [](call& c) { c.env.reduction = reduce::sequence_mean; }, on_dense);
    refused(
        "env.offsets, row 0: must start at 0", [&](call& c) { c.env.offsets = late; }, on_dense, 0);
    refused(
        "must ascend; entry 2 does not", [&](call& c) { c.env.offsets = falling; }, on_dense, 2);
    refused(
        "env.offsets: ends at 2 for 3 rows", [&](call& c) { c.env.offsets = early; }, on_dense);
    refused(
        "env.beta: must be finite", [](call& c) { c.env.beta = nan_f; }, on_dense);
    refused(
        "env.loss_clamp: must be positive", [](call& c) { c.env.loss_clamp = -1; }, on_dense);
}

TEST_CASE("contents, checked: the argument and the row are named") {
    const auto check_all = [](call& c) { c.env.checks = check::contents; };
    refused(
        "student.z, row 1: NaN at column 7", [&](call& c) { check_all(c), c.z[24 + 7] = nan_f; }, on_dense, 1);
    refused(
        "student.z, row 2: +inf at column 0", [&](call& c) { check_all(c), c.z[48] = inf_f; }, on_dense, 2);
    refused(
        "teacher.y, row 0: NaN at column 19", [&](call& c) { check_all(c), c.y[19] = nan_f; }, on_dense, 0);
    refused(
        "student.z, row 1: every logit is -inf",
        [&](call& c) { check_all(c), std::fill_n(c.z.begin() + 24, vocab, minus_inf); }, on_dense, 1);
    refused(
        "teacher.ids, row 1: id 20 in column 2", [&](call& c) { check_all(c), c.ids[k + 2] = 20; }, on_support, 1);
    refused(
        "teacher.ids, row 1: id -1 in column 2", [&](call& c) { check_all(c), c.ids[k + 2] = -1; }, on_samples, 1);
    refused(
        "teacher.ids, row 2: id 2 twice in a support",
        [&](call& c) { check_all(c), c.ids[2 * k + 1] = c.ids[2 * k] = 2; }, on_support, 2);
    refused(
        "teacher.log_q, row 0: is not a log-probability in column 3", [&](call& c) { check_all(c), c.log_q[3] = 0.5F; },
        on_support, 0);
    refused(
        "teacher.log_mu, row 2: is not the log-probability of a drawn token in column 0",
        [&](call& c) { check_all(c), c.log_mu[2 * k] = -9999; }, on_samples, 2);
    refused(
        "teacher.log_mu, row 2", [&](call& c) { check_all(c), c.log_mu[2 * k] = nan_f; }, on_weighted, 2);
    call c; // masked rows are not looked at
    check_all(c);
    const std::vector<int> mask{1, 0, 1};
    c.env.mask = row_mask<>(mask);
    c.z[24 + 7] = nan_f, c.ids[k + 2] = 99;
    CHECK(c.run_dense().diagnostics.kept == 2);
    CHECK(c.run_samples().diagnostics.kept == 2);
}

TEST_CASE("contents, counted: loss 0 and gradient 0 in the bad row, the others as if it were masked") {
    const auto counted = [](auto run, auto spoil) {
        call c, clean;
        spoil(c);
        const std::vector<int> mask{1, 0, 1};
        clean.env.mask = row_mask<>(mask);
        c.env.reduction = clean.env.reduction = reduce::sum;
        const result got = run(c), want = run(clean);
        CHECK(got.diagnostics.bad_rows == 1);
        CHECK(got.diagnostics.first_bad_row == 1);
        CHECK(got.loss == want.loss);
        CHECK(c.losses == clean.losses);
        CHECK(c.zero_row(1));
        CHECK(c.dz == clean.dz);
    };
    const auto dense = [](call& c) { return c.run_dense(); };
    const auto support = [](call& c) { return c.run_support(); };
    const auto samples = [](call& c) { return c.run_samples(); };
    const auto weighted = [](call& c) { return c.run_weighted(); };
    counted(dense, [](call& c) { c.z[24] = nan_f; });
    counted(dense, [](call& c) { c.z[24 + 19] = inf_f; });
    counted(dense, [](call& c) { c.y[24 + 3] = nan_f; });
    counted(dense, [](call& c) { std::fill_n(c.z.begin() + 24, vocab, minus_inf); });
    counted(dense, [](call& c) { std::fill_n(c.y.begin() + 24, vocab, minus_inf); });
    counted([](call& c) { return evaluate(c.backend, c.s, c.dense, jsd{}, c.env); },
            [](call& c) { c.y[24 + 3] = nan_f; });
    counted(support, [](call& c) { c.ids[k] = 20; });
    counted(support, [](call& c) { c.ids[k] = c.ids[k + 1]; });
    counted(support, [](call& c) { c.log_q[k] = nan_f; });
    counted(support, [](call& c) { c.z[24] = nan_f; });
    counted(support, [](call& c) { c.log_tail[1] = nan_f; });
    counted(samples, [](call& c) { c.ids[k] = -5; });
    counted(samples, [](call& c) { c.ids[k + 3] = 1 << 30; });
    counted(samples, [](call& c) { c.log_mu[k] = nan_f; });
    counted(samples, [](call& c) { c.log_mu[k] = -9999; });
    counted(samples, [](call& c) { c.log_mu[k] = 0; }); // a placeholder: this token's p is far from 1
    counted(samples, [](call& c) { c.log_mu[k] = minus_inf; });
    counted(samples, [](call& c) { c.log_q[k] = 0.1F; });
    counted(samples, [](call& c) { c.z[24 + 5] = nan_f; });
    counted(weighted, [](call& c) { std::fill_n(c.ids.begin() + k, k, -1); });
    counted(weighted, [](call& c) { c.weight[k] = nan_f; });
    counted([](call& c) { return evaluate(c.backend, c.s, c.support, renormalised{reverse_kl{}}, c.env); },
            [](call& c) { c.ids[k] = 77; });
}

TEST_CASE("infinite rows: counted; floored at -30 nats, skipped or raised") {
    const auto spoil = [](call& c, bool teacher_side) {
        (teacher_side ? c.y : c.z)[24 + 7] = minus_inf;
        c.env.reduction = reduce::sum;
    };
    {
        call c, skipped;
        spoil(c, true), spoil(skipped, true);
        naive_backend slow;
        std::vector<double> want(rows * vocab);
        const student::logits<float, double> s{c.s.z, view(want.data(), rows, vocab)};
        const result got = c.run_dense(), ref = evaluate(slow, s, c.dense, reverse_kl{}, c.env);
        CHECK(got.diagnostics.infinite_rows == 1);
        CHECK(got.diagnostics.first_infinite_row == 1);
        CHECK(got.loss == doctest::Approx(ref.loss).epsilon(1e-6));
        for (index_t v = 0; v < vocab; ++v)
            CHECK(c.dz[std::size_t(24 + v)] == doctest::Approx(want[std::size_t(vocab + v)]));
        skipped.env.on_infinite = infinite::skip();
        const result left = skipped.run_dense();
        CHECK(left.diagnostics.infinite_rows == 1);
        CHECK(skipped.zero_row(1));
        CHECK(skipped.losses[1] == 0);
        CHECK(left.loss < got.loss);
        CHECK(evaluate(c.backend, c.s, c.dense, forward_kl{}, c.env).diagnostics.infinite_rows == 0);
        CHECK(evaluate(c.backend, c.s, c.dense, jsd{}, c.env).diagnostics.infinite_rows == 0);
    }
    { // forward KL: the value is floored, the gradient p - q stays
        call c;
        spoil(c, false);
        std::vector<double> lp, lq;
        double lse = 0;
        naive_backend::log_softmax(c.s.z.row(1), vocab, 1, nullptr, &lse, lp);
        naive_backend::log_softmax(c.dense.y.row(1), vocab, 1, nullptr, &lse, lq);
        const result got = evaluate(c.backend, c.s, c.dense, forward_kl{}, c.env);
        CHECK(got.diagnostics.infinite_rows == 1);
        double want = 0;
        for (std::size_t v = 0; v < lp.size(); ++v) want += std::exp(lq[v]) * (lq[v] - std::max(lp[v], -30.0));
        CHECK(c.losses[1] == doctest::Approx(want));
        for (std::size_t v = 0; v < lp.size(); ++v)
            CHECK(c.dz[24 + v] == doctest::Approx(std::exp(lp[v]) - std::exp(lq[v])).epsilon(1e-5));
        c.env.on_infinite = infinite::floor(-5);
        evaluate(c.backend, c.s, c.dense, forward_kl{}, c.env);
        CHECK(c.losses[1] < want);
    }
    for (const bool teacher_side : {true, false}) {
        call c;
        spoil(c, teacher_side);
        c.env.on_infinite = infinite::raise();
        const auto run = [&] {
            teacher_side ? evaluate(c.backend, c.s, c.dense, reverse_kl{}, c.env)
                         : evaluate(c.backend, c.s, c.dense, forward_kl{}, c.env);
        };
        CHECK_THROWS_WITH_AS(run(), doctest::Contains("the loss is infinite in row 1"), infinite_value);
        CHECK(c.untouched());
    }
    { // samples: log q = -inf on a drawn token
        call c;
        c.log_q[k + 1] = minus_inf;
        CHECK(c.run_samples().diagnostics.infinite_rows == 1);
        CHECK(detail::is_finite(c.losses[1]));
        c.env.on_infinite = infinite::skip();
        c.run_samples();
        CHECK(c.zero_row(1));
        CHECK(c.losses[1] == 0);
    }
}

TEST_CASE("loss clamp: the loss is cut, the gradient zero, the row counted") {
    call c, open;
    c.env.reduction = open.env.reduction = reduce::sum;
    open.run_dense();
    const double cut = open.losses[0] * 0.5;
    c.env.loss_clamp = cut;
    const result r = c.run_dense();
    CHECK(c.losses[0] == doctest::Approx(cut));
    CHECK(c.zero_row(0));
    index_t above = 0;
    for (const float l : open.losses) above += l > cut;
    CHECK(r.diagnostics.clamped_rows == above);
    double before = 0;
    for (const float l : open.losses) before += l;
    CHECK(r.diagnostics.kept_loss == doctest::Approx(before)); // reported before the clamp
    c.env.loss_clamp = 1e-3;
    CHECK(c.run_support().diagnostics.clamped_rows > 0);
    CHECK(c.run_samples().diagnostics.clamped_rows > 0);
}

TEST_CASE("an arena too small says how much is needed") {
    call c;
    std::vector<std::byte> arena(64);
    c.backend.arena = arena;
    const auto s = c.s;
    CHECK_THROWS_WITH_AS(evaluate(c.backend, s, c.dense, jsd{}), doctest::Contains("this call needs"), invalid_input);
    CHECK(c.untouched());
    arena.resize(workspace_bytes(c.backend, s, c.dense, jsd{}));
    c.backend.arena = arena;
    evaluate(c.backend, s, c.dense, jsd{});
}
