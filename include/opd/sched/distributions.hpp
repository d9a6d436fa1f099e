// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Distributions of lengths and durations for simulated time: quantile, distribution function and mean in closed form,
// and draws that are a pure function of what they are for.
//
//   u = keyed_uniform(seed, what, number, attempt)    52 random bits, in (0, 1)
//   draw = F^-1(u)                                    a mixture: u picks the part, its rest is the part's own u
//
// A draw does not depend on the order of events, so two schedules, two cluster sizes or a resumed run meet the same
// response lengths. Values are at least 0.
//
//   law                    F(x)
//   constant(value)        0 below value, 1 from it
//   uniform(low, high)     (x - low)/(high - low)
//   exponential(mean)      1 - exp(-x/mean)
//   lognormal(median, sigma)   Phi(log(x/median)/sigma)
//   pareto(alpha, minimum, cap)   (1 - (minimum/x)^alpha) / (1 - (minimum/cap)^alpha): truncated, no mass at the cap
//   empirical(values)      share of the values that are at most x
//   quantile_table(u, x)   linear between the given quantiles
//   mixture(weights, parts)    sum of weight_i F_i(x)
//
// `at_least` and `at_most` clip a law: its mass outside moves to the bound, as responses cut at the longest length do.
// Means come from E min(X, c) = integral of 1 - F over [0, c]:
//   E clip(X, a, b) = a + E min(X, b) - E min(X, a).
//
// Exact up to rounding: means, quantiles. Approximate: the quantile of a mixture is bisected to the last bits; the
// normal quantile starts from Abramowitz and Stegun 26.2.23 and takes Halley steps, to about 1e-15 relative to 1 +
// |x|.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <string>
#include <variant>
#include <vector>

#include "opd/error.hpp"
#include "opd/rng.hpp"
#include "opd/sched/types.hpp"

namespace opd::sched {

/// What a simulated draw is for. Values from `own` on are the caller's.
enum class draw_of : std::uint32_t {
    response_length,
    prompt_length,
    worker_speed,
    teacher_time,
    learner_time,
    sync_time,
    fault,
    fault_time,
    own = 1000
};

/// A uniform in (0, 1) for (seed, what, number, attempt); `number` is a sample, a job, a worker or a version. Philox
/// words that the noise of rng.hpp never uses, so that simulated lengths are independent of sampled tokens.
inline double keyed_uniform(std::uint64_t seed, draw_of what, std::uint64_t number, std::uint32_t attempt = 0) {
    const philox_block b = philox4x32({{static_cast<std::uint32_t>(number), static_cast<std::uint32_t>(number >> 32),
                                        attempt, 0x80000000u | static_cast<std::uint32_t>(what)}},
                                      static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32));
    const std::uint64_t k = (std::uint64_t{b.word[0]} << 20) | (b.word[1] >> 12);
    return (static_cast<double>(k) + 0.5) * 0x1p-52;
}

/// Always `value`, at least 0.
struct constant {
    double value = 1;
    bool operator==(const constant&) const = default;
};
/// Between `low` and `high`, 0 ≤ low ≤ high.
struct uniform {
    double low = 0, high = 1;
    bool operator==(const uniform&) const = default;
};
/// Of mean `mean`, positive; without memory, as waiting times for faults.
struct exponential {
    double mean = 1;
    bool operator==(const exponential&) const = default;
};
/// log X is normal with mean log(median) and standard deviation sigma.
struct lognormal {
    double median = 1, sigma = 1;
    bool operator==(const lognormal&) const = default;
};
/// Pareto's law on [minimum, cap), conditioned on staying below the cap. alpha <= 1 and no cap: the mean is infinite.
struct pareto {
    double alpha = 1.5, minimum = 1, cap = forever;
    bool operator==(const pareto&) const = default;
};
/// Measured values in ascending order, each with the same mass.
struct empirical {
    std::vector<double> values;
    bool operator==(const empirical&) const = default;
};
/// Quantile x[i] at u[i]; u ascends strictly from 0 to 1, x does not descend.
struct quantile_table {
    std::vector<double> u, x;
    bool operator==(const quantile_table&) const = default;
};
struct distribution;
/// Weights need not sum to one.
struct mixture {
    std::vector<double> weights;
    std::vector<distribution> parts;
};

/// A law, clipped to [at_least, at_most].
struct distribution {
    std::variant<constant, uniform, exponential, lognormal, pareto, empirical, quantile_table, mixture> law =
        constant{};
    double at_least = 0;      ///< what lies below moves here
    double at_most = forever; ///< and what lies above here
};

/// Measured values in any order.
inline empirical empirical_of(std::vector<double> values) {
    std::sort(values.begin(), values.end());
    return {std::move(values)};
}

/// Throws invalid_input naming `argument`; every other function takes a distribution that passed.
inline void validate(const distribution& d, const std::string& argument);

/// P(X <= x).
inline double cdf(const distribution& d, double x);

/// The least x with P(X <= x) >= u, 0 < u < 1.
inline double quantile(const distribution& d, double u);

/// E min(X, c), c >= 0; with c = forever the mean.
inline double limited_mean(const distribution& d, double c);

/// E X, after the clipping to [at_least, at_most].
inline double mean(const distribution& d) { return limited_mean(d, forever); }

/// The value at a uniform: the quantile, but for mixtures, whose part is picked by u. Distributed as X if u is uniform.
inline double value_at(const distribution& d, double u);

/// The value for (seed, what, number, attempt).
inline double draw(const distribution& d, std::uint64_t seed, draw_of what, std::uint64_t number,
                   std::uint32_t attempt = 0) {
    return value_at(d, keyed_uniform(seed, what, number, attempt));
}

namespace detail {

inline double normal_cdf(double x) { return 0.5 * std::erfc(-x * 0.70710678118654752440); }

inline double normal_quantile(double u) {
    const double tail = std::min(u, 1 - u);
    const double t = std::sqrt(-2 * std::log(tail));
    double x = t - (2.515517 + t * (0.802853 + t * 0.010328)) / (1 + t * (1.432788 + t * (0.189269 + t * 0.001308)));
    for (int step = 0; step < 2; ++step) { // Halley on F(-x) = tail: cubic, from an error below 5e-4
        const double density = std::exp(-0.5 * x * x) * 0.39894228040143267794;
        const double e = (normal_cdf(-x) - tail) / density;
        x += e / (1 - 0.5 * x * e);
    }
    return u < 0.5 ? -x : x;
}

struct law_cdf {
    double x;
    double operator()(const constant& l) const { return x >= l.value ? 1 : 0; }
    double operator()(const uniform& l) const {
        return l.low == l.high ? (x >= l.low ? 1 : 0) : std::clamp((x - l.low) / (l.high - l.low), 0.0, 1.0);
    }
    double operator()(const exponential& l) const { return x <= 0 ? 0 : -std::expm1(-x / l.mean); }
    double operator()(const lognormal& l) const {
        if (x <= 0) return 0;
        return l.sigma == 0 ? (x >= l.median ? 1 : 0) : normal_cdf(std::log(x / l.median) / l.sigma);
    }
    double operator()(const pareto& l) const {
        if (x <= l.minimum) return 0;
        if (x >= l.cap) return 1;
        return std::expm1(-l.alpha * std::log(x / l.minimum)) / std::expm1(-l.alpha * std::log(l.cap / l.minimum));
    }
    double operator()(const empirical& l) const {
        const auto after = std::upper_bound(l.values.begin(), l.values.end(), x);
        return static_cast<double>(after - l.values.begin()) / static_cast<double>(l.values.size());
    }
    double operator()(const quantile_table& l) const {
        const auto i = static_cast<std::size_t>(std::upper_bound(l.x.begin(), l.x.end(), x) - l.x.begin());
        if (i == 0) return 0;
        if (i == l.x.size()) return 1;
        return l.u[i - 1] + (l.u[i] - l.u[i - 1]) * (x - l.x[i - 1]) / (l.x[i] - l.x[i - 1]);
    }
    double operator()(const mixture& l) const {
        double sum = 0, total = 0;
        for (std::size_t i = 0; i < l.parts.size(); ++i) {
            sum += l.weights[i] * cdf(l.parts[i], x);
            total += l.weights[i];
        }
        return std::min(1.0, sum / total);
    }
};

struct law_quantile {
    double u;
    double operator()(const constant& l) const { return l.value; }
    double operator()(const uniform& l) const { return l.low + u * (l.high - l.low); }
    double operator()(const exponential& l) const { return -l.mean * std::log1p(-u); }
    double operator()(const lognormal& l) const {
        return l.sigma == 0 ? l.median : l.median * std::exp(l.sigma * normal_quantile(u));
    }
    double operator()(const pareto& l) const {
        const double z = -std::expm1(-l.alpha * std::log(l.cap / l.minimum)); // 1 without a cap
        return std::min(l.cap, l.minimum * std::exp(-std::log1p(-u * z) / l.alpha));
    }
    double operator()(const empirical& l) const {
        const double n = static_cast<double>(l.values.size());
        const auto i = static_cast<std::size_t>(std::max(0.0, std::ceil(u * n) - 1));
        return l.values[std::min(i, l.values.size() - 1)];
    }
    double operator()(const quantile_table& l) const {
        const auto i = static_cast<std::size_t>(std::lower_bound(l.u.begin(), l.u.end(), u) - l.u.begin());
        if (i == 0) return l.x.front();
        return l.x[i - 1] + (l.x[i] - l.x[i - 1]) * (u - l.u[i - 1]) / (l.u[i] - l.u[i - 1]);
    }
    double operator()(const mixture& l) const {
        double low = forever, high = 0; // the mixture's quantile lies between those of its parts
        for (std::size_t i = 0; i < l.parts.size(); ++i) {
            if (l.weights[i] == 0) continue;
            const double q = quantile(l.parts[i], u);
            low = std::min(low, q), high = std::max(high, q);
        }
        const law_cdf at_low{low};
        if (at_low(l) >= u) return low;
        for (;;) {
            const double middle = low + (high - low) / 2;
            if (middle <= low || middle >= high) return high;
            (law_cdf{middle}(l) >= u ? high : low) = middle;
        }
    }
};

struct law_limited_mean {
    double c;
    double operator()(const constant& l) const { return std::min(l.value, c); }
    double operator()(const uniform& l) const {
        if (c <= l.low) return c;
        if (c >= l.high) return 0.5 * (l.low + l.high);
        return l.low + 0.5 * (c - l.low) * (1 + (l.high - c) / (l.high - l.low));
    }
    double operator()(const exponential& l) const { return -l.mean * std::expm1(-c / l.mean); }
    double operator()(const lognormal& l) const {
        if (c <= 0) return 0;
        if (l.sigma == 0) return std::min(l.median, c);
        const double all = l.median * std::exp(0.5 * l.sigma * l.sigma);
        if (c == forever) return all;
        const double z = std::log(c / l.median) / l.sigma;
        return all * normal_cdf(z - l.sigma) + c * normal_cdf(-z);
    }
    double operator()(const pareto& l) const {
        if (c <= l.minimum) return c;
        const double top = std::min(c, l.cap);
        const double z = -std::expm1(-l.alpha * std::log(l.cap / l.minimum));
        if (top == forever && l.alpha <= 1) return forever;
        // integral of (minimum/x)^alpha over [minimum, top]
        const double span = std::log(top / l.minimum), slope = 1 - l.alpha;
        const double power = l.minimum * (slope == 0 ? span : std::expm1(slope * span) / slope);
        return l.minimum + (z == 1 ? 0 : (top - l.minimum) * (1 - 1 / z)) + power / z;
    }
    double operator()(const empirical& l) const {
        double sum = 0;
        for (const double x : l.values) sum += std::min(x, c);
        return sum / static_cast<double>(l.values.size());
    }
    double operator()(const quantile_table& l) const {
        double sum = 0;
        for (std::size_t i = 1; i < l.u.size(); ++i)
            sum += (l.u[i] - l.u[i - 1]) * law_limited_mean{c}(uniform{l.x[i - 1], l.x[i]});
        return sum;
    }
    double operator()(const mixture& l) const {
        double sum = 0, total = 0;
        for (std::size_t i = 0; i < l.parts.size(); ++i) {
            if (l.weights[i] == 0) continue;
            sum += l.weights[i] * limited_mean(l.parts[i], c);
            total += l.weights[i];
        }
        return sum / total;
    }
};

struct law_validate {
    const std::string& argument;
    [[noreturn]] void refuse(const std::string& text) const { throw invalid_input(argument, text); }
    void at_least_0(const char* name, double x) const {
        if (!(x >= 0 && x < forever))
            refuse(std::string(name) + " must be finite and at least 0, not " + std::to_string(x));
    }
    void positive(const char* name, double x) const {
        if (!(x > 0 && x < forever))
            refuse(std::string(name) + " must be finite and positive, not " + std::to_string(x));
    }
    void operator()(const constant& l) const { at_least_0("value", l.value); }
    void operator()(const uniform& l) const {
        at_least_0("low", l.low), at_least_0("high", l.high);
        if (l.high < l.low) refuse("high must not be below low");
    }
    void operator()(const exponential& l) const { positive("mean", l.mean); }
    void operator()(const lognormal& l) const { positive("median", l.median), at_least_0("sigma", l.sigma); }
    void operator()(const pareto& l) const {
        positive("alpha", l.alpha), positive("minimum", l.minimum);
        if (!(l.cap > l.minimum)) refuse("cap must lie above minimum");
    }
    void operator()(const empirical& l) const {
        if (l.values.empty()) refuse("values must not be empty");
        for (const double x : l.values) at_least_0("every one of values", x);
        if (!std::is_sorted(l.values.begin(), l.values.end())) refuse("values must ascend (empirical_of sorts)");
    }
    void operator()(const quantile_table& l) const {
        if (l.u.size() != l.x.size() || l.u.size() < 2)
            refuse("u and x must have the same number of entries, two at least");
        if (l.u.front() != 0 || l.u.back() != 1) refuse("u must run from 0 to 1");
        for (const double x : l.x) at_least_0("every one of x", x);
        for (std::size_t i = 1; i < l.u.size(); ++i)
            if (!(l.u[i] > l.u[i - 1]) || l.x[i] < l.x[i - 1]) refuse("u must ascend strictly, and x not descend");
    }
    void operator()(const mixture& l) const {
        if (l.parts.empty() || l.parts.size() != l.weights.size())
            refuse("weights and parts must have the same number of entries, one at least");
        for (const double w : l.weights) at_least_0("every one of weights", w);
        if (!(std::accumulate(l.weights.begin(), l.weights.end(), 0.0) > 0)) refuse("the weights must not all be 0");
        for (std::size_t i = 0; i < l.parts.size(); ++i)
            validate(l.parts[i], argument + ".parts[" + std::to_string(i) + "]");
    }
};

} // namespace detail

inline void validate(const distribution& d, const std::string& argument) {
    if (!(d.at_least >= 0 && d.at_least < forever))
        throw invalid_input(argument, "at_least must be finite and at least 0, not " + std::to_string(d.at_least));
    if (!(d.at_most >= d.at_least)) throw invalid_input(argument, "at_most must not be below at_least");
    std::visit(detail::law_validate{argument}, d.law);
}

inline double cdf(const distribution& d, double x) {
    if (x < d.at_least) return 0;
    return x >= d.at_most ? 1 : std::visit(detail::law_cdf{x}, d.law);
}

inline double quantile(const distribution& d, double u) {
    return std::clamp(std::visit(detail::law_quantile{u}, d.law), d.at_least, d.at_most);
}

inline double limited_mean(const distribution& d, double c) {
    if (c <= d.at_least) return c;
    const double below = d.at_least == 0 ? 0 : std::visit(detail::law_limited_mean{d.at_least}, d.law);
    return d.at_least + std::visit(detail::law_limited_mean{std::min(c, d.at_most)}, d.law) - below;
}

inline double value_at(const distribution& d, double u) {
    const auto* m = std::get_if<mixture>(&d.law);
    if (!m) return quantile(d, u);
    double rest = u * std::accumulate(m->weights.begin(), m->weights.end(), 0.0);
    std::size_t i = 0, last = 0;
    for (; i < m->parts.size(); ++i) {
        if (m->weights[i] == 0) continue;
        last = i;
        if (rest < m->weights[i]) break;
        rest -= m->weights[i];
    }
    const double inner = std::clamp(rest / m->weights[last], 0x1p-53, 1 - 0x1p-53);
    return std::clamp(value_at(m->parts[last], inner), d.at_least, d.at_most);
}

} // namespace opd::sched
