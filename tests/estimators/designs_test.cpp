// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// optimise: no
//
// Sampling designs on rows of several leaves and at temperatures: where a draw lands, its log mu, inclusion and weights, all
// against cumulative sums in float64; what the designs refuse.
#include "support/generators.hpp"
#include "support/naive_backend.hpp"

#include <cmath>
#include <doctest/doctest.h>
#include <numeric>
#include <vector>

#include <opd/estimators/designs.hpp>

using namespace opd;
using namespace opd::test;

namespace {

constexpr index_t vocab = 3000;

/// A row of N(0,2) logits with some -inf, and its law at a temperature.
struct policy {
    float temperature;
    std::vector<float> z;
    std::vector<double> log_mu, cumulative;
    std::vector<float> scratch = std::vector<float>(design::scratch_floats(vocab));

    explicit policy(float t, std::uint64_t seed = 2) : temperature(t) {
        numbers u(seed);
        for (index_t v = 0; v < vocab; ++v)
            z.push_back(u.uniform() < 0.1 ? detail::neg_inf<float>() : float(2 * double(t) * u.normal()));
        z[2500] = 7 * t, z[100] = 6 * t; // a few certain entries, not all in the first leaf
        double lse = 0, sum = 0;
        naive_backend::log_softmax(z.data(), vocab, double(t), nullptr, &lse, log_mu);
        for (const double l : log_mu) cumulative.push_back(sum += std::exp(l));
    }
};

} // namespace

TEST_CASE("iid: a draw takes the first id whose cumulative probability exceeds its uniform, in every leaf") {
    for (const float t : {1.F, 0.7F, 2.F}) {
        policy p(t);
        const index_t m = 2000;
        std::vector<std::int32_t> ids(m);
        std::vector<float> log_mu(m);
        const auto uniform = [](index_t j) { return (double(j) + 0.5) / 2000; };
        CHECK(design::iid(p.z.data(), vocab, t, m, uniform, ids.data(), log_mu.data(), p.scratch));
        index_t by_leaf[3] = {0, 0, 0};
        for (index_t j = 0; j < m; ++j) {
            const auto id = std::size_t(ids[std::size_t(j)]);
            const double u = uniform(j);
            CHECK(u < p.cumulative[id] + 1e-6); // probabilities are float
            CHECK(u > (id > 0 ? p.cumulative[id - 1] : 0) - 1e-6);
            CHECK(double(log_mu[std::size_t(j)]) == doctest::Approx(p.log_mu[id]).epsilon(1e-6));
            ++by_leaf[id / 1024];
        }
        for (const index_t leaf : by_leaf) CHECK(leaf > 100);
    }
}

TEST_CASE("threshold: inclusion min(1, kappa mu), weights mu / inclusion, exact entries first") {
    for (const float t : {1.F, 0.7F, 2.F})
        for (const index_t budget : {1, 16, 300}) {
            policy p(t);
            const auto size = std::size_t(budget);
            std::vector<std::int64_t> ids(size);
            std::vector<float> weight(size);
            std::vector<double> log_mu(size);
            std::vector<std::uint8_t> exact(size);
            // kappa by bisection: Σ min(1, kappa mu) = B
            double low = 0, high = 1e9;
            for (int i = 0; i < 200; ++i) {
                const double middle = (low + high) / 2;
                double sum = 0;
                for (const double l : p.log_mu) sum += std::min(1.0, middle * std::exp(l));
                (sum < double(budget) ? low : high) = middle;
            }
            std::vector<double> hits(vocab, 0.0);
            const int offsets = 500;
            for (int i = 0; i < offsets; ++i) {
                const double u = (i + 0.5) / offsets;
                const index_t n = design::threshold(p.z.data(), vocab, t, budget, u, ids.data(), weight.data(),
                                                    log_mu.data(), exact.data(), p.scratch);
                CHECK(n == budget);
                bool ascending = true;
                for (std::size_t j = 0; j < size; ++j) {
                    const auto id = std::size_t(ids[j]);
                    hits[id] += 1;
                    const double mu = std::exp(p.log_mu[id]), inclusion = std::min(1.0, low * mu);
                    if (i > 0) continue; // the same for every offset
                    CHECK(log_mu[j] == doctest::Approx(p.log_mu[id]).epsilon(1e-6));
                    if (std::abs(low * mu - 1) > 1e-5) CHECK((exact[j] != 0) == (low * mu >= 1));
                    CHECK(double(weight[j]) == doctest::Approx(mu / inclusion).epsilon(1e-5));
                    if (j > 0) ascending &= exact[j - 1] == exact[j] ? ids[j - 1] < ids[j] : exact[j - 1] > exact[j];
                }
                CHECK(ascending);
            }
            for (index_t v = 0; v < vocab; ++v) { // systematic: each id as often as its inclusion says
                const double want = std::min(1.0, low * std::exp(p.log_mu[std::size_t(v)])) * offsets;
                if (std::abs(hits[std::size_t(v)] - want) > 1.5 + 1e-5 * want)
                    FAIL("id " << v << " was drawn " << hits[std::size_t(v)] << " times, not " << want);
            }
        }
}

TEST_CASE("threshold: with fewer ids of mass than budget all are exact, and the other slots carry -1") {
    std::vector<float> z(2100, detail::neg_inf<float>());
    z[5] = 1, z[1500] = 0, z[2099] = -1;
    std::vector<float> scratch(design::scratch_floats(2100)), weight(5);
    std::vector<double> log_mu(5);
    std::vector<std::int32_t> ids(5);
    std::vector<std::uint8_t> exact(5);
    CHECK(design::threshold(z.data(), 2100, 1, 5, 0.7, ids.data(), weight.data(), log_mu.data(), exact.data(),
                            scratch) == 3);
    CHECK(ids == std::vector<std::int32_t>{5, 1500, 2099, -1, -1});
    CHECK(exact == std::vector<std::uint8_t>{1, 1, 1, 0, 0});
    CHECK(double(weight[0] + weight[1] + weight[2]) == doctest::Approx(1));
    CHECK(weight[3] == 0);
    for (std::uint64_t seed = 0; seed < 300; ++seed) { // as many ids as budget: exact whatever the sums round to
        numbers u(seed);
        const index_t n = 2 + u.below(4);
        for (index_t v = 0; v < n; ++v) z[std::size_t(v)] = float(3 * u.normal());
        CHECK(design::threshold(z.data(), n, 1.3F, n, u.uniform(), ids.data(), weight.data(), log_mu.data(),
                                exact.data(), scratch) == n);
        for (std::size_t v = 0; v < std::size_t(n); ++v) {
            CHECK(ids[v] == std::int32_t(v));
            CHECK(exact[v] == 1);
            CHECK(double(weight[v]) == doctest::Approx(std::exp(log_mu[v])).epsilon(1e-6));
        }
    }
}

TEST_CASE("what a design refuses, and rows without a law") {
    policy p(1);
    std::vector<std::int32_t> ids(4);
    std::vector<float> log_mu(4), weight(4);
    std::vector<std::uint8_t> exact(4);
    const auto iid = [&](index_t n, float t, std::span<float> scratch) {
        return design::iid(
            p.z.data(), n, t, 4, [](index_t) { return 0.5; }, ids.data(), log_mu.data(), scratch);
    };
    const auto threshold = [&](float t, index_t budget, std::span<float> scratch) {
        return design::threshold(p.z.data(), vocab, t, budget, 0.5, ids.data(), weight.data(), log_mu.data(),
                                 exact.data(), scratch);
    };
    const std::span<float> scratch(p.scratch), less = scratch.first(scratch.size() - 1);
    CHECK_THROWS_WITH_AS(iid(0, 1, scratch), doctest::Contains("z"), invalid_input);
    CHECK_THROWS_WITH_AS(iid(vocab, 1, less), doctest::Contains("scratch"), invalid_input);
    CHECK_THROWS_WITH_AS(threshold(1, 4, less), doctest::Contains("scratch"), invalid_input);
    CHECK_THROWS_WITH_AS(threshold(1, 0, scratch), doctest::Contains("budget"), invalid_input);
    const float nan = std::bit_cast<float>(0x7fc00000u);
    for (const float t : {0.F, -1.F, nan, float(1e-45), 1e-38F, 1e30F, std::bit_cast<float>(0x7f800000u)}) {
        CHECK_THROWS_WITH_AS(iid(vocab, t, scratch), doctest::Contains("temperature"), invalid_input);
        CHECK_THROWS_WITH_AS(threshold(t, 4, scratch), doctest::Contains("temperature"), invalid_input);
    }
    const double inf = std::bit_cast<double>(0x7ff0000000000000ull);
    for (const double u : {double(nan), -1.0, 0.0, 1.0, 2.0, inf, -inf}) {
        CAPTURE(u);
        CHECK_THROWS_AS(design::iid(
                            p.z.data(), vocab, 1.F, 4, [u](index_t j) { return j == 2 ? u : 0.5; }, ids.data(),
                            log_mu.data(), scratch),
                        invalid_input);
        CHECK_THROWS_AS(design::threshold(p.z.data(), vocab, 1, 4, u, ids.data(), weight.data(), log_mu.data(),
                                          exact.data(), scratch),
                        invalid_input);
    }
    CHECK(iid(vocab, 1, scratch));
    const std::vector<std::int32_t> before = ids;
    const std::vector<float> good = p.z;
    for (const float bad : {nan, std::bit_cast<float>(0x7f800000u)}) {
        p.z = good, p.z[2000] = bad;
        CHECK_FALSE(iid(vocab, 1, scratch));
        CHECK(ids == before);
        CHECK(threshold(1, 4, scratch) == 0);
        CHECK(ids == std::vector<std::int32_t>(4, -1));
        ids = before;
    }
    std::fill(p.z.begin(), p.z.end(), detail::neg_inf<float>());
    CHECK_FALSE(iid(vocab, 1, scratch));
    CHECK(threshold(1, 4, scratch) == 0);
}
