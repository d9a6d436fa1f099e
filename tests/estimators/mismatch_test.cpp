// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Figures of training-inference mismatch against sums of their formulas; the same from any cut; quantiles against the
// sorted values.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <doctest/doctest.h>
#include <random>
#include <utility>
#include <vector>

#include <opd/estimators/mismatch.hpp>

using namespace opd;

namespace {

struct columns {
    std::vector<double> mu, old, p, a, raw, routed;
    std::vector<std::int32_t> top, old_top;
    std::vector<std::uint8_t> keep;
    explicit columns(unsigned seed, std::size_t n) {
        std::mt19937 u(seed);
        std::normal_distribution<double> normal;
        for (std::size_t i = 0; i < n; ++i) {
            mu.push_back(-1.5 - std::abs(normal(u))), raw.push_back(mu[i] - 0.01 * std::abs(normal(u)));
            routed.push_back(raw[i] + 1e-3 * normal(u)), old.push_back(routed[i] + (i % 7 == 0 ? 0.2 * normal(u) : 0));
            p.push_back(old[i] + 0.1 * normal(u)), a.push_back(i % 11 == 0 ? 0 : normal(u));
            top.push_back(std::int32_t(u() % 3)), old_top.push_back(std::int32_t(u() % 3)),
                keep.push_back(u() % 5 != 0);
        }
    }
    mismatch_columns<double> part(std::size_t first, std::size_t end) const {
        const auto of = [&](const auto& x) { return view(x.data() + first, index_t(end - first)); };
        return {.log_mu = of(mu),
                .log_old = of(old),
                .log_p = of(p),
                .advantage = of(a),
                .unfiltered = of(raw),
                .routed = of(routed),
                .rollout_top = of(top),
                .old_top = of(old_top),
                .mask = of(keep)};
    }
};
bool near(double x, double y) { return std::abs(x - y) <= 1e-12 * std::max(1.0, std::abs(y)); }

} // namespace

TEST_CASE("mismatch: every figure is its formula, from any cut") {
    const std::size_t n = 3000;
    const columns b(5, n);
    mismatch whole, parts;
    whole.add(b.part(0, n));
    for (std::size_t first = 0; first < n; first += 700) {
        mismatch one;
        one.add(b.part(first, std::min(first + 700, n)));
        parts.merge(one);
    }
    double tokens = 0, d_sum = 0, d_abs = 0, d_max = 0, k1c = 0, k2c = 0, k3c = 0, k1t = 0, k2t = 0, k3t = 0, flips = 0;
    double up = 0, up_train = 0, up_rollout = 0, down = 0, down_train = 0, down_rollout = 0, size = 0;
    double filters = 0, precision = 0, routing = 0;
    std::vector<double> sizes;
    for (std::size_t i = 0; i < n; ++i) {
        if (!b.keep[i]) continue;
        const double d = b.old[i] - b.mu[i], corr = std::exp(d), train = std::exp(b.p[i] - b.old[i]),
                     rollout = std::exp(b.p[i] - b.mu[i]);
        ++tokens, d_sum += d, d_abs += std::abs(d), d_max = std::max(d_max, std::abs(d)), sizes.push_back(std::abs(d));
        k1c -= std::log(corr), k2c += std::pow(std::log(corr), 2) / 2, k3c += corr - 1 - std::log(corr);
        k1t -= std::log(train), k2t += std::pow(std::log(train), 2) / 2, k3t += train - 1 - std::log(train);
        flips += b.top[i] != b.old_top[i];
        if (b.a[i] > 0) ++up, up_train -= (train - 1) * b.a[i], up_rollout -= (rollout - 1) * b.a[i];
        if (b.a[i] < 0) {
            ++down, down_train -= (train - 1) * b.a[i], down_rollout -= (rollout - 1) * b.a[i];
            size += std::abs((train - 1) * b.a[i]);
        }
        filters += b.raw[i] - b.mu[i], precision += b.routed[i] - b.raw[i], routing += b.old[i] - b.routed[i];
    }
    for (const mismatch& m : {whole, parts}) {
        CHECK(double(m.delta.tokens) == tokens);
        CHECK(near(m.delta.mean(), d_sum / tokens));
        CHECK(near(m.delta.abs_mean(), d_abs / tokens));
        CHECK(m.delta.abs_max == d_max);
        CHECK(near(m.corr.k1(), k1c / tokens));
        CHECK(near(m.corr.k2(), k2c / tokens));
        CHECK(near(m.corr.k3(), k3c / tokens));
        CHECK(near(m.train.k1(), k1t / tokens));
        CHECK(near(m.train.k2(), k2t / tokens));
        CHECK(near(m.train.k3(), k3t / tokens));
        CHECK(near(m.flip_share(), flips / tokens));
        CHECK(near(m.train.contribution(true), up_train / up));
        CHECK(near(m.rollout.contribution(true), up_rollout / up));
        CHECK(near(m.train.contribution(false), down_train / down));
        CHECK(near(m.rollout.contribution(false), down_rollout / down));
        CHECK(near(m.train.contribution_size(false), size / down));
        CHECK(near(m.filters.mean(), filters / tokens));
        CHECK(near(m.precision.mean(), precision / tokens));
        CHECK(near(m.routing.mean(), routing / tokens));
        CHECK(near(m.filters.sum + m.precision.sum + m.routing.sum, m.delta.sum)); // the parts are all of it
        CHECK(m.bad == 0);
    }
    CHECK(whole.counts == parts.counts);
    std::sort(sizes.begin(), sizes.end());
    for (const double q : {0.01, 0.25, 0.5, 0.9, 0.99, 1.0}) {
        const double exact = sizes[std::size_t(std::ceil(q * double(sizes.size()))) - 1];
        CHECK(std::abs(whole.quantile(q) - exact) <= exact / 16 + 1e-15);
    }
}

TEST_CASE("mismatch: equal policies, columns that are missing, numbers that are none") {
    const columns b(9, 40);
    mismatch same;
    same.add(mismatch_columns<double>{.log_mu = view(b.mu.data(), 40), .log_old = view(b.mu.data(), 40)});
    CHECK(same.exact == 40);
    CHECK(same.delta.abs_max == 0);
    CHECK(same.quantile(1) == 0);
    CHECK(same.corr.k3() == 0);
    CHECK(same.train.tokens == 0);
    CHECK(same.filters.tokens == 0);
    CHECK(std::isnan(mismatch{}.quantile(0.5)));

    mismatch some; // without the filters' column what lies before `routed` is precision
    some.add(mismatch_columns<double>{
        .log_mu = view(b.mu.data(), 40), .log_old = view(b.old.data(), 40), .routed = view(b.routed.data(), 40)});
    CHECK(some.filters.tokens == 0);
    CHECK(near(some.precision.sum + some.routing.sum, some.delta.sum));

    std::vector<double> holes = b.old;
    holes[3] = std::nan(""), holes[5] = -INFINITY, holes[7] = -9999, holes[9] = 0.5;
    mismatch with;
    with.add(
        mismatch_columns<double>{.log_mu = view(b.mu.data(), 40), .log_old = view(std::as_const(holes).data(), 40)});
    CHECK(with.bad == 4);
    CHECK(with.delta.tokens == 36);
    CHECK(std::isfinite(with.delta.sum));

    mismatch none;
    const auto refused = [&](mismatch_columns<double> c, const char* name) {
        CHECK_THROWS_WITH_AS(none.add(c), doctest::Contains(name), invalid_input);
        CHECK(none.delta.tokens == 0);
    };
    refused({.log_mu = view(b.mu.data(), 40), .log_old = view(b.old.data(), 39)}, "log_old");
    refused({.log_mu = view(b.mu.data(), 40), .log_old = view(b.old.data(), 40), .advantage = view(b.a.data(), 40)},
            "advantage");
    refused({.log_mu = view(b.mu.data(), 40), .log_old = view(b.old.data(), 40), .old_top = view(b.top.data(), 40)},
            "old_top");
    CHECK_THROWS_AS(with.quantile(1.5), invalid_input);
}

TEST_CASE("mismatch: as docs/estimators/corrections.md has it") {
    const columns b(3, 50);
    const auto log_mu = view(b.mu.data(), 50), log_old = view(b.old.data(), 50), log_p = view(b.p.data(), 50),
               advantage = view(b.a.data(), 50);
    const auto& mask = b.keep;
    opd::mismatch m; // add() every micro-batch, merge() threads and ranks
    m.add(opd::mismatch_columns<double>{
        .log_mu = log_mu, .log_old = log_old, .log_p = log_p, .advantage = advantage, .mask = mask});
    const double worst = m.delta.abs_max, p99 = m.quantile(0.99), k3 = m.corr.k3();
    const double skew = m.train.contribution(true) - m.rollout.contribution(true); // of the tokens with A > 0
    CHECK(worst >= p99 * 15 / 16);
    CHECK(k3 > 0);
    CHECK(skew != 0);
}
