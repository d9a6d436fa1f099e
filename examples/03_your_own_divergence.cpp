// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Your own divergence in a few lines, on every cache that takes a divergence: here Le Cam's (triangular
// discrimination),
//
//   D(p, q) = Σ (p - q)² / (p + q) = Σ (p + q) x²,   x = (p - q)/(p + q) = tanh(½ (log p - log q))
//   d(value)/dp[v] = x (2 - x)
//
// symmetric, between 0 and 2, finite whatever is zero. Checked against central differences at the end.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "opd/opd.hpp"

// [le_cam]
struct le_cam {
    template <class F> // lanes of floats, float64, a GPU thread's float
    OPD_HD F term(const opd::row_constants<F>& row, const opd::dense_entry<F>& e) const {
        const F x = half_tanh(e.delta + row.d_star);
        return (e.p + e.q) * x * x;
    }
    template <class F>
    OPD_HD F c(const opd::row_constants<F>& row, const opd::dense_entry<F>& e) const { // dL/dlog p = p · slope
        const F x = half_tanh(e.delta + row.d_star);
        return e.p * x * (F(2) - x);
    }

private:
    template <class F>
    OPD_HD static F half_tanh(F d) { // tanh(d/2), by expm1: accurate near 0, never overflows
        const F u = expm1(-abs(d)), t = -u / (F(2) + u);
        return select(d >= F(0), t, -t);
    }
};
static_assert(opd::divergence<le_cam>);
// [/le_cam]

int main() {
    constexpr long N = 3, V = 50, K = 8;
    std::vector<double> z(N * V), y(N * V), dz(N * V); // (N,V); double in, double arithmetic
    for (long i = 0; i < N * V; ++i) {
        z[i] = 2 * std::sin(1.7 * double(i)) + 0.1 * double(i % 7);
        y[i] = 2 * std::sin(1.7 * double(i) + 0.6);
    }
    opd::cpu_backend backend;
    const opd::env sum{.reduction = opd::reduce::sum};
    int failures = 0;
    const auto check = [&](const char* name, auto loss) { // central differences against the gradient
        loss(true);
        double worst = 0;
        for (long i = 0; i < N * V; i += 7) {
            const double old = z[i], h = 1e-5;
            z[i] = old + h;
            const double above = loss(false);
            z[i] = old - h;
            const double below = loss(false);
            z[i] = old;
            worst = std::max(worst, std::abs((above - below) / (2 * h) - dz[i]));
        }
        std::printf("%-24s loss %.6f   gradient against central differences: %.1e\n", name, loss(false), worst);
        failures += !(worst < 1e-8);
    };
    const auto student = [&](bool gradient) {
        return opd::student::logits{opd::view(z.data(), N, V),
                                    gradient ? opd::view(dz.data(), N, V) : opd::matrix_view<double>()};
    };

    check("dense", [&](bool gradient) {
        const opd::teacher::dense teacher{opd::view(y.data(), N, V), 1.5f};
        return opd::evaluate(backend, student(gradient), teacher, le_cam{}, sum).loss;
    });

    // The same struct on a support: the teacher's K most probable tokens.
    std::vector<std::int32_t> ids(N * K); // (N,K)
    std::vector<double> log_q(N * K);     // (N,K)
    for (long r = 0; r < N; ++r) {
        std::vector<std::int32_t> order(V);
        for (long v = 0; v < V; ++v) order[v] = std::int32_t(v);
        std::partial_sort(order.begin(), order.begin() + K, order.end(),
                          [&](int a, int b) { return y[r * V + a] > y[r * V + b]; });
        std::copy_n(order.begin(), K, ids.begin() + r * K);
    }
    opd::token_logp(backend, opd::view(y.data(), N, V), opd::view(ids.data(), N, K), opd::view(log_q.data(), N, K));
    const opd::teacher::support support{opd::view(ids.data(), N, K), opd::view(log_q.data(), N, K)};
    check("renormalised on top-8", [&](bool gradient) {
        return opd::evaluate(backend, student(gradient), support, opd::renormalised{le_cam{}}, sum).loss;
    });
    check("top-8 and a tail bucket", [&](bool gradient) {
        return opd::evaluate(backend, student(gradient), support, opd::tail_bucket{le_cam{}}, sum).loss;
    });
    return failures;
}
