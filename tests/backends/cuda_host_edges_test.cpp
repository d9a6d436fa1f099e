// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// build: whole-compiler, whole-sanitize
// optimise: no
//
// The GPU's kernels, run on the host, where random rows do not go: unused slots, ties and repeats, factors that make no
// sense, rows without mass, entries at the lowest finite numbers, log-ratios that float cannot carry. Against float64
// or the CPU.
#include "backends/host_run.hpp"
#include "support/compiled/dense.hpp"
#include "support/compiled/device_text.hpp"
#include "support/compiled/sampled.hpp"
#include "support/compiled/support.hpp"
#include "support/generators.hpp"
#include "support/naive_backend.hpp"

#include <cmath>
#include <doctest/doctest.h>
#include <limits>
#include <string>
#include <vector>

#include <opd/backends/cpu.hpp>
#include <opd/estimators/divergences.hpp>
#include <opd/estimators/sampled.hpp>
#include <opd/estimators/support.hpp>

using namespace opd;
using namespace opd::test;

namespace {

using lse_type = std::remove_cvref_t<decltype(*env{}.lse.data)>;
const float nan_f = std::bit_cast<float>(0x7fc00000u);
const float minus_inf = detail::neg_inf<float>();

/// Value and gradient of one dense row against the naive backend, for several thread counts.
template <class D>
void agrees(const std::vector<float>& z, const std::vector<float>& y, const D& d, double bound, float t = 1) {
    const auto vocab = index_t(z.size());
    naive_backend slow;
    std::vector<double> want(z.size());
    const teacher::dense<float> teach{view(y.data(), 1, vocab), t};
    const double value =
        evaluate(slow, student::logits<float, double>{view(z.data(), 1, vocab), view(want.data(), 1, vocab), t}, teach,
                 d)
            .loss;
    CAPTURE(value);
    double top = 0;
    for (const double g : want) top = std::max(top, std::abs(g));
    for (const int threads : {1, 3, 64}) {
        CAPTURE(threads);
        host_run_backend backend{threads};
        std::vector<float> dz(z.size());
        const result got =
            evaluate(backend, student::logits<float>{view(z.data(), 1, vocab), view(dz.data(), 1, vocab), t}, teach, d);
        if (value > 1e30) {
            CHECK(got.diagnostics.infinite_rows == 1);
            continue;
        }
        CHECK(std::abs(got.loss - value) <= bound * std::max(1.0, value));
        double worst = 0;
        for (std::size_t v = 0; v < dz.size(); ++v) worst = std::max(worst, std::abs(double(dz[v]) - want[v]));
        CHECK(worst <= bound * top + 1e-9);
    }
}

/// Three rows with a weighted cache of five slots.
struct entries {
    index_t rows = 3, vocab = 50, k = 5;
    std::vector<float> z, dz, log_mu, log_q, weight, losses = std::vector<float>(3);
    std::vector<std::int32_t> ids{4, 30, 4, 49, 0, 7, 8, 9, 10, 11, 1, 3, 5, 7, 9};
    std::vector<std::uint8_t> exact = std::vector<std::uint8_t>(15, 0);
    entries() {
        numbers u(3);
        for (index_t i = 0; i < rows * vocab; ++i) z.push_back(float(2 * u.normal()));
        for (index_t i = 0; i < rows * k; ++i) {
            log_mu.push_back(float(-1 - 2 * u.uniform())), log_q.push_back(float(-1 - 2 * u.uniform()));
            weight.push_back(float(0.3 * u.uniform())), exact[std::size_t(i)] = i % 4 == 1;
        }
        dz.assign(z.size(), 0.5F);
    }
    student::logits<float> student() { return {view(z.data(), rows, vocab), view(dz.data(), rows, vocab), 0.8F}; }
    template <class T>
    matrix_view<const T> matrix(const std::vector<T>& x) const {
        return {x.data(), rows, k, k};
    }
    teacher::weighted<std::int32_t> weighted() const {
        return {matrix(ids), matrix(weight), matrix(log_mu), matrix(log_q), matrix(exact)};
    }
    teacher::samples<std::int32_t> samples() const { return {matrix(ids), matrix(log_mu), matrix(log_q)}; }
};

/// The same call on the CPU and on the host's blocks of threads.
template <class Call>
void same_as_cpu(const entries& start, Call call, const std::string& what) {
    INFO(what);
    cpu_backend cpu;
    entries a = start;
    const result want = call(cpu, a);
    for (const int threads : {1, 4, 64}) {
        CAPTURE(threads);
        host_run_backend backend{threads};
        entries b = start;
        const result got = call(backend, b);
        CHECK(got.loss == doctest::Approx(want.loss).epsilon(1e-6));
        CHECK(got.diagnostics.bad_rows == want.diagnostics.bad_rows);
        CHECK(got.diagnostics.first_bad_row == want.diagnostics.first_bad_row);
        CHECK(got.diagnostics.clamped_rows == want.diagnostics.clamped_rows);
        CHECK(got.diagnostics.tokens == want.diagnostics.tokens);
        CHECK(got.diagnostics.ratio_sum == doctest::Approx(want.diagnostics.ratio_sum).epsilon(1e-6));
        double worst = 0;
        for (std::size_t v = 0; v < a.dz.size(); ++v) worst = std::max(worst, double(std::abs(a.dz[v] - b.dz[v])));
        CHECK(worst <= 2e-6);
        for (std::size_t r = 0; r < 3; ++r) CHECK(b.losses[r] == doctest::Approx(a.losses[r]).epsilon(1e-6));
    }
}

} // namespace

TEST_CASE("unused slots, wherever they lie, and repeated ids with an old gradient under them") {
    const auto weighted = [](auto& backend, entries& c) {
        env e{.beta = -0.5F};
        e.losses = c.losses;
        return evaluate(backend, c.student(), c.weighted(), mc{reverse_kl{}}, e);
    };
    const auto samples = [](auto& backend, entries& c) {
        env e{.beta = 2};
        e.losses = c.losses;
        return evaluate(backend, c.student(), c.samples(), mc{.baseline = baseline::leave_one_out{}}, e);
    };
    entries c;
    same_as_cpu(c, weighted, "every slot used");
    same_as_cpu(c, samples, "repeated ids");
    c.ids[0] = c.ids[5] = c.ids[7] = c.ids[14] = -1; // first, first and middle, last
    same_as_cpu(c, weighted, "unused slots");
    std::fill_n(c.ids.begin() + 10, 4, -1);
    same_as_cpu(c, weighted, "one slot used");
    c.ids[14] = 6;
    same_as_cpu(c, weighted, "the last slot used");
    c.ids[14] = -1;
    same_as_cpu(c, weighted, "a row of unused slots is bad");
    c.ids[14] = std::int32_t(c.vocab);
    same_as_cpu(c, weighted, "an id beyond the vocabulary");
    c.ids[14] = std::int32_t(c.vocab - 1);
    same_as_cpu(c, weighted, "the last id of the vocabulary");
    const auto clamped = [](auto& backend, entries& x) {
        env e{.loss_clamp = 0.05};
        e.losses = x.losses;
        return evaluate(backend, x.student(), x.weighted(), mc{reverse_kl{}}, e);
    };
    for (float& l : c.log_q) l += 3; // both signs of the loss
    for (float& l : c.log_q) l = std::min(l, -1e-3F);
    same_as_cpu(c, clamped, "clamped on both sides");
}

TEST_CASE("a weight or an offset that makes no sense makes its row bad: nothing is written but zeros") {
    entries c;
    host_run_backend backend{16};
    std::vector<float> weights{1, nan_f, 2};
    std::vector<std::int64_t> offsets{0, 1, 3};
    const auto run = [&](auto spoil) {
        env e;
        e.losses = c.losses;
        auto job = checked_job(backend, c.student(), c.weighted(), mc{reverse_kl{}}, e);
        spoil(job.env);
        return backend.for_rows(job);
    };
    const auto zero = [&](index_t r) {
        return std::all_of(c.dz.begin() + r * c.vocab, c.dz.begin() + (r + 1) * c.vocab,
                           [](float g) { return g == 0; });
    };
    for (const float w : {nan_f, -minus_inf}) {
        weights[1] = w;
        const result r = run([&](env& e) { e.weights = weights; });
        CHECK(r.diagnostics.bad_rows == 1);
        CHECK(r.diagnostics.first_bad_row == 1);
        CHECK(detail::is_finite(r.loss));
        CHECK(zero(1));
        CHECK(c.losses[1] == 0);
        CHECK_FALSE(zero(2));
    }
    const auto by_sequence = [&] {
        return run([&](env& e) { e.offsets = offsets, e.reduction = reduce::sequence_mean; });
    };
    CHECK(by_sequence().diagnostics.bad_rows == 0);
    offsets = {1, 2, 3}; // row 0 lies in no sequence
    CHECK(by_sequence().diagnostics.first_bad_row == 0);
    CHECK(zero(0));
    offsets = {0, 1, 2}; // nor does the last row
    CHECK(by_sequence().diagnostics.first_bad_row == 2);
    offsets = {0, -5, 900};
    CHECK(detail::is_finite(by_sequence().loss));
}

TEST_CASE("sequences of one row, of none, and the first row of each") {
    entries c;
    const std::vector<std::int64_t> offsets{0, 0, 1, 1, 3, 3};
    const std::vector<int> mask{1, 1, 0};
    for (const auto reduction : {reduce::sequence_mean, reduce::sequence_sum_mean})
        for (const bool masked : {false, true})
            same_as_cpu(
                c,
                [&](auto& backend, entries& x) {
                    env e{.reduction = reduction};
                    e.losses = x.losses, e.offsets = offsets;
                    if (masked) e.mask = row_mask<>(mask);
                    return evaluate(backend, x.student(), x.weighted(), mc{reverse_kl{}}, e);
                },
                "sequences");
}

TEST_CASE("token_logp: a row without mass, a NaN, entries at -inf") {
    const index_t vocab = 300;
    std::vector<float> z(3 * vocab, minus_inf), out(6, 777.F);
    std::vector<lse_type> lse(3, lse_type(777));
    z[vocab + 5] = 2, z[vocab + 290] = 1, z[2 * vocab] = nan_f, z[2 * vocab + 1] = 0;
    const std::vector<std::int32_t> ids{5, 6, 5, 6, 1, 2};
    for (const int threads : {1, 7, 128}) {
        host_run_backend backend{threads};
        const result r = token_logp(backend, view(std::as_const(z).data(), 3, vocab), view(ids.data(), 3, 2),
                                    view(out.data(), 3, 2), 1.F, row_mask<>{}, vector_view<lse_type>(lse));
        CHECK(r.diagnostics.bad_rows == 2);
        CHECK(r.diagnostics.first_bad_row == 0);
        for (const std::size_t i : {0UL, 1UL, 3UL, 4UL, 5UL}) CHECK(out[i] == minus_inf);
        const double want = std::log(std::exp(2.0) + std::exp(1.0));
        CHECK(double(out[2]) == doctest::Approx(2 - want).epsilon(1e-6));
        CHECK(double(lse[1]) == doctest::Approx(want).epsilon(1e-6));
        CHECK(lse[0] == 0); // bad rows
        CHECK(lse[2] == 0);
    }
}

TEST_CASE("log-ratios that float cannot carry, met before and after the anchors") {
    for (const std::size_t top : {10UL, 700UL, 1400UL})
        for (const double gap : {30, 59, 70, 84, 95, 103, 150, 250}) {
            numbers u(11);
            std::vector<float> z(1500), y(z);
            for (std::size_t v = 0; v < z.size(); ++v) z[v] = float(u.normal()), y[v] = float(u.normal());
            z[top] = 8, y[top] = 8;
            z[1000] = -22, y[1000] = float(-22 - gap);
            INFO("top " << top << ", gap " << gap);
            agrees(z, y, chi_squared{}, 2e-6 + gap * 0x1p-22);
            agrees(z, y, forward_kl{}, 1e-6 + gap * 0x1p-22);
            std::swap(z, y);
            agrees(z, y, alpha_divergence{.a = -1}, 2e-6 + gap * 0x1p-22);
            agrees(z, y, forward_kl{}, 1e-6 + gap * 0x1p-22);
            agrees(z, y, reverse_kl{}, 1e-6 + gap * 0x1p-22);
            z[top] += 300, y[top] += 40; // the anchor moves by hundreds of nats
            agrees(z, y, reverse_kl{}, 1e-6 + 400 * 0x1p-22);
            agrees(z, y, forward_kl{}, 1e-6 + 400 * 0x1p-22);
        }
    for (const float gap : {9.F, 50.F, 90.F, 300.F}) { // two tokens, each side's own
        agrees({0, gap}, {8, 0}, forward_kl{}, 1e-6 + gap * 0x1p-22F);
        agrees({gap, 0}, {0, 8}, reverse_kl{}, 1e-6 + gap * 0x1p-22F);
    }
    agrees({0, 9}, {0.8F, 0}, forward_kl{}, 1e-5, 0.1F);
    agrees({105.26F, -0.69F, -560}, {-1.07F, -889.8F, 245.4F}, chi_squared{}, 1e-6, 10); // e^92: beyond float
}

TEST_CASE("a thread's top on which the sides disagree by hundreds of nats, among entries on which they agree") {
    for (const float far : {-60.F, -190.F, -210.F, -600.F, -3000.F}) {
        numbers u(18);
        std::vector<float> z(1500), y(z);
        for (std::size_t v = 0; v < z.size(); ++v) z[v] = float(1e-3 * u.normal()), y[v] = float(1e-3 * u.normal());
        z[0] = 0.01F, y[0] = far;
        z.back() = y.back() = 1;
        INFO("by " << far);
        const double bound = 1e-6 + (far > -200 ? -double(far) * 0x1p-23 : 0); // beyond: float64, or entry by entry
        agrees(z, y, reverse_kl{}, bound);
        agrees(z, y, forward_kl{}, bound);
    }
}

TEST_CASE("entries at the lowest finite numbers have no mass, and ties go to the lower id") {
    for (const float low : {-1e25F, -9e29F, -1e30F, -1e31F, -3e38F}) {
        std::vector<float> z(70), y(70);
        numbers u(5);
        for (std::size_t v = 0; v < z.size(); ++v) z[v] = float(u.normal()), y[v] = float(u.normal());
        std::vector<float> rest_z = z, rest_y = y;
        for (const std::size_t v : {0UL, 33UL, 69UL}) z[v] = y[v] = low, rest_z[v] = rest_y[v] = minus_inf;
        INFO("entries at " << low);
        for (const int threads : {1, 5, 64}) {
            host_run_backend backend{threads};
            const auto loss = [&](const std::vector<float>& a, const std::vector<float>& b, auto d) {
                return evaluate(backend, student::logits<float>{view(a.data(), 1, 70)},
                                teacher::dense<float>{view(b.data(), 1, 70)}, d)
                    .loss;
            };
            CHECK(loss(z, y, reverse_kl{}) == doctest::Approx(loss(rest_z, rest_y, reverse_kl{})).epsilon(1e-6));
            CHECK(loss(z, y, forward_kl{}) == doctest::Approx(loss(rest_z, rest_y, forward_kl{})).epsilon(1e-6));
        }
    }
    detail::row_sweep a, b;
    a.student_to(7, 1.5, 0), b.student_to(3, 1.5, 2), a.teacher_to(9, 0, 4), b.teacher_to(2, 1, 4);
    for (const bool swapped : {false, true}) {
        const detail::row_sweep m = swapped ? detail::row_sweep::merge(b, a) : detail::row_sweep::merge(a, b);
        CHECK(m.sums.s == 3);
        CHECK(m.sums.t == 2);
    }
}
