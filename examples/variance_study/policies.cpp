// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "policies.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <stdexcept>

namespace variance_study {

namespace {

using generator = std::mt19937_64;

double log_sum_exp(const reals& z) {
    const double top = *std::max_element(z.begin(), z.end());
    double sum = 0;
    for (const double x : z) sum += std::exp(x - top);
    return top + std::log(sum);
}

/// Where a falling function crosses zero.
template <class F>
double root_of_falling(double low, double high, F f) {
    for (int i = 0; i < 70; ++i) {
        const double middle = (low + high) / 2;
        (f(middle) > 0 ? low : high) = middle;
    }
    return (low + high) / 2;
}

reals shape(family f, index_t vocab, generator& random) {
    std::normal_distribution<double> normal;
    std::uniform_real_distribution<double> uniform;
    reals z;
    for (index_t v = 0; v < vocab; ++v) {
        const double rank = double(v) + 1;
        switch (f) {
        case family::zipf:
            z.push_back(-std::log(rank) + 0.3 * normal(random));
            break;
        case family::gaussian:
            z.push_back(normal(random));
            break;
        case family::model_like: {
            const double a = normal(random), b = normal(random), c = normal(random), d = normal(random);
            const double t = d / std::sqrt((a * a + b * b + c * c) / 3);
            z.push_back(-1.1 * std::log(rank + 1.7) + std::clamp(t, -8.0, 8.0) / 2);
            break;
        }
        case family::spike:
            z.push_back(-0.8 * std::log(rank) + 0.3 * normal(random));
            break;
        }
    }
    if (f == family::model_like) {
        const int candidates = 2 + static_cast<int>(11 * uniform(random));
        for (int i = 0; i < candidates; ++i) {
            const auto v = static_cast<std::size_t>(uniform(random) * uniform(random) * double(vocab));
            z[std::min(v, z.size() - 1)] += 1 + 4 * uniform(random);
        }
    }
    std::shuffle(z.begin(), z.end(), random);
    return z;
}

} // namespace

std::string_view name_of(family f) {
    switch (f) {
    case family::zipf:
        return "zipf";
    case family::gaussian:
        return "gaussian";
    case family::model_like:
        return "model_like";
    default:
        return "spike";
    }
}

reals log_softmax(const reals& z) {
    const double lse = log_sum_exp(z);
    reals log_p = z;
    for (double& x : log_p) x -= lse;
    return log_p;
}

reals log_softmax(const floats& z) { return log_softmax(reals(z.begin(), z.end())); }

double entropy_of(const reals& log_p) {
    double sum = 0;
    for (const double x : log_p) sum -= std::exp(x) * x;
    return sum;
}

double kl(const reals& log_p, const reals& log_q) {
    double sum = 0;
    for (std::size_t v = 0; v < log_p.size(); ++v) sum += std::exp(log_p[v]) * (log_p[v] - log_q[v]);
    return sum;
}

double chi2(const reals& log_p, const reals& log_q) {
    double sum = 0;
    for (std::size_t v = 0; v < log_p.size(); ++v) sum += std::exp(log_p[v]) * std::expm1(log_p[v] - log_q[v]);
    return sum;
}

policy make_policy(const shape_of_world& w, family f, double entropy, const std::vector<int>& staleness,
                   std::uint64_t seed, std::uint64_t number) {
    std::seed_seq key{seed & 0xffffffffu, seed >> 32, std::uint64_t(f), std::uint64_t(std::llround(1000 * entropy)),
                      number};
    generator random(key);
    reals z = shape(f, w.vocab, random);
    if (f == family::spike) {
        reals tail = z;
        const auto place = std::size_t(random() % std::uint64_t(w.vocab));
        std::swap(tail[place], tail.back());
        tail.pop_back();
        const double mass = log_sum_exp(tail), of_tail = entropy_of(log_softmax(tail));
        const double rest = root_of_falling(1e-9, 1 - std::exp(-of_tail), [&](double e) { // the tail's mass
            return entropy - (e * of_tail - e * std::log(e) - (1 - e) * std::log1p(-e));
        });
        z[place] = mass + std::log1p(-rest) - std::log(rest);
    } else {
        const auto scaled = [&](double s) {
            reals x = z;
            for (double& y : x) y *= s;
            return x;
        };
        const auto left = [&](double s) { return entropy_of(log_softmax(scaled(s))) - entropy; };
        constexpr double most = 50; // two tokens that nearly tie would need more: another policy instead
        for (int i = 0; i < 100 && left(most) > 0; ++i) z = shape(f, w.vocab, random);
        z = scaled(root_of_falling(0.01, most, left));
    }
    if (std::abs(entropy_of(log_softmax(z)) - entropy) > 1e-6)
        throw std::runtime_error("no policy over so few tokens has an entropy of that size");
    std::normal_distribution<double> normal;
    const auto rounded = [](const reals& x) { return floats(x.begin(), x.end()); };
    policy to{.z = rounded(z), .y = {}, .stale = {}};
    for (const double x : z) to.y.push_back(static_cast<float>(x + w.gap * normal(random)));
    int before = 0;
    for (const int k : staleness) {
        const double step = w.drift * std::sqrt(double(k - before));
        for (double& x : z) x += step * normal(random);
        to.stale.push_back(rounded(z));
        before = k;
    }
    return to;
}

} // namespace variance_study
