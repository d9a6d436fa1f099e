// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// optimise: always
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <set>
#include <string>
#include <vector>

#include "opd/sched/distributions.hpp"
#include "support/property.hpp"

using namespace opd::sched;

namespace {

// One of each law, with and without clips.
const std::vector<std::pair<const char*, distribution>>& all() {
    static const std::vector<std::pair<const char*, distribution>> r = {
        {"constant", {constant{3}}},
        {"uniform", {uniform{2, 5}}},
        {"exponential", {exponential{2.5}}},
        {"lognormal", {lognormal{3, 0.8}}},
        {"lognormal, cut", {lognormal{3, 1.2}, 1, 9}},
        {"pareto 1.5 cap 100", {pareto{1.5, 2, 100}}},
        {"pareto 1.1 cap 1e6", {pareto{1.1, 1, 1e6}}},
        {"pareto 1 cap 50", {pareto{1, 1, 50}}},
        {"pareto 0.7 cap 50, cut", {pareto{0.7, 1, 50}, 1.5, 20}},
        {"pareto 3", {pareto{3, 2}}},
        {"empirical", {empirical{{1, 2, 2, 7, 9.5}}}},
        {"quantile table", {quantile_table{{0, 0.5, 0.9, 1}, {1, 2, 10, 40}}}},
        {"quantile table with a jump", {quantile_table{{0, 0.5, 0.75, 1}, {1, 2, 2, 40}}}},
        {"mixture", {mixture{{3, 1}, {{exponential{1}}, {pareto{1.5, 5, 80}}}}}},
        {"mixture with masses, cut",
         {mixture{{1, 0, 2, 1}, {{constant{4}}, {constant{1}}, {uniform{1, 6}}, {exponential{9}}}}, 2, 15}},
    };
    return r;
}

// Mean as the integral of the quantile, midpoints in a variable that spreads the tail: u = 1 - (1-s)^4.
double numeric_mean(const distribution& d) {
    const int n = 400000;
    double sum = 0;
    for (int i = 0; i < n; ++i) {
        const double s = 1 - (i + 0.5) / n;
        sum += quantile(d, std::min(1 - s * s * s * s, 1 - 0x1p-53)) * 4 * s * s * s / n;
    }
    return sum;
}

std::string refusal(const distribution& d) {
    try {
        validate(d, "lengths");
    } catch (const opd::invalid_input& e) {
        return e.argument + "|" + e.what();
    }
    return {};
}

} // namespace

TEST_CASE("keyed uniforms: pure, in (0, 1), different for every part of the key") {
    CHECK(keyed_uniform(7, draw_of::response_length, 11, 2) == keyed_uniform(7, draw_of::response_length, 11, 2));
    std::set<double> seen;
    for (std::uint64_t seed : {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{1} << 32})
        for (draw_of what : {draw_of::response_length, draw_of::prompt_length, draw_of::own})
            for (std::uint64_t number : {std::uint64_t{0}, std::uint64_t{1}, std::uint64_t{1} << 32})
                for (std::uint32_t attempt = 0; attempt < 3; ++attempt) {
                    const double u = keyed_uniform(seed, what, number, attempt);
                    CHECK(u > 0);
                    CHECK(u < 1);
                    seen.insert(u);
                }
    CHECK(seen.size() == 3 * 3 * 3 * 3);
}

TEST_CASE("the normal quantile inverts the normal distribution function, also far out") {
    for (double x = -8; x <= 8; x += 0.03125) {
        const double p = x < 0 ? opd::sched::detail::normal_cdf(x) : opd::sched::detail::normal_cdf(-x);
        const double got = x < 0 ? opd::sched::detail::normal_quantile(p) : -opd::sched::detail::normal_quantile(p);
        CHECK(std::abs(got - x) <= 4e-15 * (1 + std::abs(x)));
    }
    CHECK(opd::sched::detail::normal_quantile(0.975) == doctest::Approx(1.959963984540054).epsilon(1e-14));
    CHECK(std::abs(opd::sched::detail::normal_quantile(0.5)) < 1e-15);
}

TEST_CASE("quantiles have their closed forms") {
    CHECK(quantile({constant{3}}, 0.3) == 3);
    CHECK(quantile({uniform{2, 6}}, 0.25) == 3);
    CHECK(quantile({exponential{2}}, 0.5) == doctest::Approx(2 * std::log(2.0)).epsilon(1e-15));
    CHECK(quantile({lognormal{5, 0.7}}, 0.5) == doctest::Approx(5).epsilon(1e-14));
    CHECK(quantile({lognormal{5, 0.7}}, 0.975) ==
          doctest::Approx(5 * std::exp(0.7 * 1.959963984540054)).epsilon(1e-14));
    CHECK(quantile({lognormal{5, 0}}, 0.9) == 5);
    CHECK(quantile({pareto{2, 3}}, 0.75) == doctest::Approx(6).epsilon(1e-15));
    // truncated: 1 - u·Z = (1/x)^alpha, Z = 1 - 1/16
    CHECK(quantile({pareto{2, 1, 4}}, 0.5) == doctest::Approx(1 / std::sqrt(1 - 0.5 * 15 / 16)).epsilon(1e-15));
    CHECK(quantile({empirical{{1, 2, 4, 8}}}, 0.25) == 1);
    CHECK(quantile({empirical{{1, 2, 4, 8}}}, 0.26) == 2);
    CHECK(quantile({empirical{{1, 2, 4, 8}}}, 0.999) == 8);
    CHECK(quantile({quantile_table{{0, 0.5, 1}, {1, 2, 10}}}, 0.75) == 6);
    CHECK(quantile({lognormal{5, 1}, 2, 7}, 0.999) == 7);
    CHECK(quantile({lognormal{5, 1}, 2, 7}, 0.001) == 2);
    // half exponential(1), half exponential(1): the same law
    CHECK(quantile({mixture{{1, 1}, {{exponential{1}}, {exponential{1}}}}}, 0.7) ==
          doctest::Approx(-std::log(0.3)).epsilon(1e-14));
    // a quarter at 1, the rest at 2
    const distribution two{mixture{{1, 3}, {{constant{1}}, {constant{2}}}}};
    CHECK(quantile(two, 0.25) == 1);
    CHECK(quantile(two, 0.2500001) == 2);
}

TEST_CASE("cdf and quantile are inverse to each other in the generalised sense") {
    for (const auto& [name, d] : all()) {
        CAPTURE(name);
        validate(d, name);
        for (int i = 1; i < 200; ++i) {
            const double u = i / 200.0 - 1e-3, x = quantile(d, u);
            CAPTURE(u);
            CHECK(cdf(d, x * (1 + 1e-12)) >= u - 1e-11);
            CHECK((x == 0 || cdf(d, x * (1 - 1e-9)) <= u + 1e-7));
            CHECK(quantile(d, u + 1e-4) >= x);
        }
    }
}

TEST_CASE("means have their closed forms") {
    CHECK(mean({constant{3}}) == 3);
    CHECK(mean({uniform{2, 6}}) == 4);
    CHECK(mean({exponential{2}}) == 2);
    CHECK(mean({lognormal{5, 0.7}}) == doctest::Approx(5 * std::exp(0.245)).epsilon(1e-15));
    CHECK(mean({pareto{3, 2}}) == doctest::Approx(3).epsilon(1e-15));
    CHECK(mean({pareto{1, 1, std::exp(2.0)}}) == doctest::Approx(2 / (1 - std::exp(-2.0))).epsilon(1e-14));
    CHECK(mean({pareto{1, 2}}) == forever);
    CHECK(mean({pareto{0.5, 2}}) == forever);
    CHECK(mean({pareto{0.5, 2}, 0, 8}) == doctest::Approx(2 + 2 * (std::sqrt(4.0) - 1) / 0.5).epsilon(1e-14));
    CHECK(mean({empirical{{1, 2, 6}}}) == 3);
    CHECK(mean({quantile_table{{0, 0.5, 1}, {1, 3, 5}}}) == 3);
    CHECK(mean({mixture{{3, 1}, {{constant{1}}, {exponential{5}}}}}) == 2);
    for (const auto& [name, d] : all()) {
        CAPTURE(name);
        CHECK(mean(d) == doctest::Approx(numeric_mean(d)).epsilon(2e-4));
        // E min(X, c) climbs with slope 1 - F and ends at the mean
        double area = 0;
        for (double c = 0; c < 12; c += 0.5) {
            CHECK(limited_mean(d, c) <= mean(d) + 1e-12);
            area += limited_mean(d, c + 0.5) - limited_mean(d, c);
            CHECK(limited_mean(d, c + 0.5) - limited_mean(d, c) <= 0.5 * (1 - cdf(d, c)) + 1e-12);
            CHECK(limited_mean(d, c + 0.5) - limited_mean(d, c) >= 0.5 * (1 - cdf(d, c + 0.5)) - 1e-12);
        }
        CHECK(area == doctest::Approx(limited_mean(d, 12)).epsilon(1e-12));
    }
}

TEST_CASE("keyed draws follow the law: Kolmogorov distance") {
    const int n = 40000;
    for (const auto& [name, d] : all()) {
        CAPTURE(name);
        std::vector<double> x;
        for (int i = 0; i < n; ++i) x.push_back(draw(d, 5, draw_of::response_length, static_cast<std::uint64_t>(i)));
        std::sort(x.begin(), x.end());
        double distance = 0;
        for (int i = 0; i < n;) { // at the end of every run of equal values, where the empirical F has jumped
            int end = i;
            while (end < n && x[static_cast<std::size_t>(end)] == x[static_cast<std::size_t>(i)]) ++end;
            // rounding may place a mass point a last bit off
            distance =
                std::max(distance, std::abs(double(end) / n - cdf(d, x[static_cast<std::size_t>(i)] * (1 + 1e-12))));
            i = end;
        }
        CHECK(distance < 2.2 / std::sqrt(double(n))); // exceeded with probability 1e-4 by a sound sampler
        // and the same draws against a law that is not theirs
        const distribution other{exponential{100}};
        double wrong = 0;
        for (int i = 0; i < n; i += 50)
            wrong = std::max(wrong, std::abs(double(i) / n - cdf(other, x[static_cast<std::size_t>(i)])));
        CHECK(wrong > 0.1);
    }
}

TEST_CASE("validation names the argument and what is wrong") {
    const double nan = std::numeric_limits<double>::quiet_NaN();
    const auto refuses = [](const distribution& d, const char* what) {
        const std::string text = refusal(d);
        CAPTURE(text);
        CHECK(text.find("lengths") == 0);
        CHECK(text.find(what) != std::string::npos);
    };
    refuses({constant{-1}}, "value");
    refuses({constant{nan}}, "value");
    refuses({uniform{3, 2}}, "high");
    refuses({uniform{0, forever}}, "high");
    refuses({exponential{0}}, "mean");
    refuses({lognormal{0, 1}}, "median");
    refuses({lognormal{1, -1}}, "sigma");
    refuses({pareto{0, 1, 2}}, "alpha");
    refuses({pareto{1, 0, 2}}, "minimum");
    refuses({pareto{1, 2, 2}}, "cap");
    refuses({pareto{1, 2, nan}}, "cap");
    refuses({empirical{}}, "values");
    refuses({empirical{{2, 1}}}, "ascend");
    refuses({quantile_table{{0, 1}, {1}}}, "same number");
    refuses({quantile_table{{0.1, 1}, {1, 2}}}, "0 to 1");
    refuses({quantile_table{{0, 0.5, 0.5, 1}, {1, 2, 3, 4}}}, "ascend");
    refuses({quantile_table{{0, 1}, {2, 1}}}, "descend");
    refuses({mixture{}}, "weights");
    refuses({mixture{{0}, {{constant{1}}}}}, "weights");
    refuses({mixture{{-1}, {{constant{1}}}}}, "weights");
    refuses({mixture{{1, 1}, {{constant{1}}, {exponential{-1}}}}}, "parts[1]");
    refuses({constant{1}, -1}, "at_least");
    refuses({constant{1}, 2, 1}, "at_most");
    refuses({constant{1}, 0, nan}, "at_most");
    CHECK(refusal({empirical_of({3, 1, 2})}).empty());
    CHECK(empirical_of({3, 1, 2}).values == std::vector<double>{1, 2, 3});
}

TEST_CASE("clips and mixtures in random nestings") {
    property("the mean of a clipped mixture is that of its draws", [] {
        const double a = 1 + *rc::gen::inRange(0, 50) / 10.0, s = *rc::gen::inRange(0, 20) / 10.0;
        const double low = *rc::gen::inRange(0, 30) / 10.0, high = low + *rc::gen::inRange(0, 200) / 10.0;
        const double w = *rc::gen::inRange(0, 5);
        const distribution inner{mixture{{1, w}, {{lognormal{a, s}}, {pareto{1.1, a, 40}, 2, 30}}}};
        const distribution d{mixture{{2, 1}, {inner, {constant{a}}}}, low, high};
        validate(d, "d");
        double sum = 0, square = 0;
        const int n = 4000;
        for (int i = 0; i < n; ++i) {
            const double x = value_at(d, (i + 0.5) / n); // systematic: the error is O(1/n) a part
            sum += x, square += x * x;
            RC_ASSERT(x >= low);
            RC_ASSERT(x <= high);
        }
        const double spread = std::sqrt(std::max(0.0, square / n - sum / n * sum / n));
        RC_ASSERT(std::abs(sum / n - mean(d)) <= 0.02 * spread + 2e-3 * (high - low) + 1e-9);
    });
}
