// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The divergences as a textbook writes them, from p and q alone, in long double, so that the library's formulas are
// never tested against themselves; and gradients by central differences of them.
//
//   value(D, row)      Σ over the vocabulary, with 0 log 0 = 0
//   gradient(D, row)   dvalue/dz[v] by four-point central differences: (f(-2h) - 8 f(-h) + 8 f(h) - f(2h)) / 12h
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <vector>

#include <opd/estimators/divergences.hpp>

namespace opd::test::textbook {

using real = long double;
using reals = std::vector<real>;

/// One row: scaled logits and the log-softmax of both sides. (V)
struct row {
    reals z, y;
    real temperature = 1;
    reals log_p, log_q;
};

inline reals log_softmax(const reals& x) {
    real top = -std::numeric_limits<real>::infinity(), sum = 0;
    for (const real v : x) top = v > top ? v : top;
    for (const real v : x) sum += std::exp(v - top);
    reals out;
    for (const real v : x) out.push_back(v - top - std::log(sum));
    return out;
}

template <class Z, class Y>
row make_row(const Z* z, const Y* y, index_t n, double temperature_p, double temperature_q) {
    row r;
    r.temperature = temperature_p;
    for (index_t v = 0; v < n; ++v) {
        r.z.push_back(real(element<Z>::load(z[v])) / real(temperature_p));
        r.y.push_back(real(element<Y>::load(y[v])) / real(temperature_q));
    }
    r.log_p = log_softmax(r.z);
    r.log_q = log_softmax(r.y);
    return r;
}

/// x (log x - log m) with 0 log 0 = 0.
inline real x_log(real log_x, real log_m) { return std::exp(log_x) == 0 ? 0 : std::exp(log_x) * (log_x - log_m); }

inline real kl(const reals& log_a, const reals& log_b) {
    real s = 0;
    for (std::size_t v = 0; v < log_a.size(); ++v) s += x_log(log_a[v], log_b[v]);
    return s;
}
/// w a + (1-w) b
inline reals mixture(real w, const reals& log_a, const reals& log_b) {
    reals m;
    for (std::size_t v = 0; v < log_a.size(); ++v)
        m.push_back(std::log(w * std::exp(log_a[v]) + (1 - w) * std::exp(log_b[v])));
    return m;
}

inline real value(const forward_kl&, const row& r) { return kl(r.log_q, r.log_p); }
inline real value(const reverse_kl&, const row& r) { return kl(r.log_p, r.log_q); }
inline real value(const jsd& d, const row& r) {
    const reals m = mixture(d.w, r.log_q, r.log_p);
    return d.o * kl(r.log_q, m) + (1 - d.o) * kl(r.log_p, m);
}
inline real value(const skew_forward_kl& d, const row& r) { return kl(r.log_q, mixture(d.a, r.log_q, r.log_p)); }
inline real value(const skew_reverse_kl& d, const row& r) { return kl(r.log_p, mixture(d.a, r.log_p, r.log_q)); }
inline real value(const total_variation&, const row& r) {
    real s = 0;
    for (std::size_t v = 0; v < r.log_p.size(); ++v) s += std::abs(std::exp(r.log_p[v]) - std::exp(r.log_q[v])) / 2;
    return s;
}
inline real value(const alpha_divergence& d, const row& r) {
    if (d.a == 0) return value(forward_kl{}, r);
    if (d.a == 1) return value(reverse_kl{}, r);
    real s = 0;
    for (std::size_t v = 0; v < r.log_p.size(); ++v)
        if (r.log_p[v] != r.log_q[v] || std::isfinite(r.log_p[v]))
            s += std::exp(real(d.a) * r.log_p[v] + (1 - real(d.a)) * r.log_q[v]);
    return (s - 1) / (real(d.a) * (real(d.a) - 1));
}
inline real value(const chi_squared&, const row& r) {
    real s = 0;
    for (std::size_t v = 0; v < r.log_p.size(); ++v)
        if (std::isfinite(r.log_p[v])) s += std::exp(2 * r.log_p[v] - r.log_q[v]);
    return s - 1;
}

inline real value(const acceptance&, const row& r) {
    real top = -std::numeric_limits<real>::infinity(), sum = 0;
    for (std::size_t v = 0; v < r.log_p.size(); ++v) top = std::max(top, std::min(r.log_p[v], r.log_q[v]));
    for (std::size_t v = 0; v < r.log_p.size(); ++v) sum += std::exp(std::min(r.log_p[v], r.log_q[v]) - top);
    return -top - std::log(sum);
}

/// dvalue/dz by central differences; `step` in scaled logits. Zero where z is -inf.
template <class D>
reals gradient(const D& d, const row& r, real step = 1e-4L) {
    reals g;
    row moved = r;
    for (std::size_t v = 0; v < r.z.size(); ++v) {
        const auto at = [&](real h) {
            moved.z[v] = r.z[v] + h;
            moved.log_p = log_softmax(moved.z);
            return value(d, moved);
        };
        const real slope = (at(-2 * step) - 8 * at(-step) + 8 * at(step) - at(2 * step)) / (12 * step);
        g.push_back(std::isfinite(r.z[v]) ? slope / r.temperature : 0);
        moved.z[v] = r.z[v];
    }
    return g;
}

} // namespace opd::test::textbook
