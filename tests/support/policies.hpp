// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A student, a teacher and a behaviour policy over few tokens, in double: what enumerating tests compare with.
#pragma once

#include "support/generators.hpp"
#include "support/naive_backend.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include <opd/config.hpp>

namespace opd::test {

/// Student, teacher and a stale behaviour policy over V tokens, in double.
struct policies {
    index_t vocab;
    float temperature = 1;
    std::vector<double> z, y, b; // logits (V): student, teacher, behaviour
    std::vector<double> log_p, log_q, log_mu;

    policies(index_t v, std::uint64_t seed, bool stale, float t = 1) : vocab(v), temperature(t) {
        numbers u(seed);
        for (index_t i = 0; i < v; ++i) {
            z.push_back(1.5 * u.normal()), y.push_back(1.5 * u.normal());
            b.push_back(stale ? z.back() + 0.7 * u.normal() : z.back());
        }
        double lse = 0;
        naive_backend::log_softmax(z.data(), v, t, nullptr, &lse, log_p);
        naive_backend::log_softmax(y.data(), v, 1, nullptr, &lse, log_q);
        naive_backend::log_softmax(b.data(), v, t, nullptr, &lse, log_mu);
    }
    /// c (V) through the pullback.
    std::vector<double> pullback(const std::vector<double>& c) const {
        double sum = 0;
        for (const double x : c) sum += x;
        std::vector<double> g;
        for (std::size_t v = 0; v < c.size(); ++v) g.push_back((c[v] - std::exp(log_p[v]) * sum) / double(temperature));
        return g;
    }
    std::vector<double> gradient_of_kl(const std::vector<double>& log_other) const { // ∇ KL(p‖other)
        std::vector<double> c;
        for (std::size_t v = 0; v < log_p.size(); ++v) c.push_back(std::exp(log_p[v]) * (log_p[v] - log_other[v]));
        return pullback(c);
    }
    double kl(const std::vector<double>& log_other) const {
        double s = 0;
        for (std::size_t v = 0; v < log_p.size(); ++v) s += std::exp(log_p[v]) * (log_p[v] - log_other[v]);
        return s;
    }
};

inline double distance(const std::vector<double>& a, const std::vector<double>& b) {
    double d = 0;
    for (std::size_t v = 0; v < a.size(); ++v) d = std::max(d, std::abs(a[v] - b[v]));
    return d;
}

} // namespace opd::test
