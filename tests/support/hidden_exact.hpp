// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What losses of hidden states are in float64, from the states on: logits, gradients of reverse and forward KL.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>
#include <vector>

#include <opd/backends/cpu.hpp>
#include <opd/hidden.hpp>
#include <opd/opd.hpp>

#include "support/hidden_sides.hpp"

namespace opd::test {

using doubles = std::vector<double>;

/// Relative to b, in Frobenius norm.
inline double apart(const floats& a, const floats& b) { return distance(a, doubles(b.begin(), b.end())); }

/// z = x Wᵀ + b in float64.
inline doubles exact_logits(const side& s) {
    doubles z(std::size_t(s.n * s.v));
    for (index_t r = 0; r < s.n; ++r)
        for (index_t i = 0; i < s.v; ++i) {
            double sum = s.bias.empty() ? 0 : double(s.bias[std::size_t(i)]);
            for (index_t j = 0; j < s.d; ++j)
                sum += double(s.x[std::size_t(r * s.d + j)]) * double(s.w[std::size_t(i * s.d + j)]);
            z[std::size_t(r * s.v + i)] = sum;
        }
    return z;
}
inline doubles log_softmax(const doubles& z, index_t v) {
    doubles out(z);
    for (std::size_t r = 0; r < z.size(); r += std::size_t(v)) {
        const double top = *std::max_element(z.begin() + std::ptrdiff_t(r), z.begin() + std::ptrdiff_t(r) + v);
        double sum = 0;
        for (std::size_t i = r; i < r + std::size_t(v); ++i) sum += std::exp(z[i] - top);
        for (std::size_t i = r; i < r + std::size_t(v); ++i) out[i] -= top + std::log(sum);
    }
    return out;
}

/// In float64: dz of KL(p‖q) or KL(q‖p), summed over rows, and what it says of states and head.
struct exact {
    doubles dz, p;
    double kl = 1e300; ///< the least of a row
    exact(const side& s, const side& t, bool reverse) {
        const doubles lp = log_softmax(exact_logits(s), s.v), lq = log_softmax(exact_logits(t), s.v);
        for (std::size_t r = 0; r < lp.size(); r += std::size_t(s.v)) {
            double value = 0;
            for (std::size_t i = r; i < r + std::size_t(s.v); ++i)
                value += reverse ? std::exp(lp[i]) * (lp[i] - lq[i]) : std::exp(lq[i]) * (lq[i] - lp[i]);
            kl = std::min(kl, value);
            for (std::size_t i = r; i < r + std::size_t(s.v); ++i) {
                p.push_back(std::exp(lp[i]));
                dz.push_back(reverse ? p.back() * (lp[i] - lq[i] - value) : p.back() - std::exp(lq[i]));
            }
        }
    }
    doubles dx(const side& s) const {
        doubles out(std::size_t(s.n * s.d));
        each(s, [&](std::size_t i, std::size_t x, std::size_t w) { out[x] += dz[i] * double(s.w[w]); });
        return out;
    }
    doubles dw(const side& s) const {
        doubles out(std::size_t(s.v * s.d));
        each(s, [&](std::size_t i, std::size_t x, std::size_t w) { out[w] += dz[i] * double(s.x[x]); });
        return out;
    }

private:
    template <class F>
    static void each(const side& s, F&& f) {
        for (index_t r = 0; r < s.n; ++r)
            for (index_t i = 0; i < s.v; ++i)
                for (index_t j = 0; j < s.d; ++j)
                    f(std::size_t(r * s.v + i), std::size_t(r * s.d + j), std::size_t(i * s.d + j));
    }
};

/// A side whose logits are of deviation `size`.
inline side of_size(index_t n, index_t v, index_t d, unsigned seed, float size) {
    side s(n, v, d, seed);
    for (float& w : s.w) w *= size / 2;
    return s;
}

inline double norm(const doubles& x) { return std::sqrt(std::inner_product(x.begin(), x.end(), x.begin(), 0.0)); }

/// dz of each row by itself, which is db of a call on that row alone.
template <class Head, class TeacherHead, class E>
floats row_by_row(const Head& head, const TeacherHead& known, const side& s, const side& t, const E& estimator) {
    floats dz(std::size_t(s.n * s.v));
    cpu_backend be;
    for (index_t r = 0; r < s.n; ++r) {
        student::hidden mine{view(s.x.data() + r * s.d, 1, s.d), head};
        mine.bias = s.biases(), mine.db = view(dz.data() + r * s.v, s.v);
        teacher::hidden theirs{view(t.x.data() + r * t.d, 1, t.d), known};
        theirs.bias = t.biases();
        evaluate(be, mine, theirs, estimator);
    }
    return dz;
}

} // namespace opd::test
