// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What the kernels are compared with, one row at a time, on one thread: `plain`, the array expressions that an Eigen
// user writes, over temporaries that are allocated once; `naive`, loops over std::exp and std::log.
#pragma once

#include <Eigen/Core>

#include <cmath>
#include <vector>

#include "opd/config.hpp"

namespace bench {

using opd::index_t;

enum class peer { lse, reverse_value, reverse, forward_value, forward, jsd, tv, gathered };

/// Temporaries of one row.
struct plain {
    using row = Eigen::ArrayXf;
    row lp, lq, p, q, c;

    explicit plain(index_t v) : lp(v), lq(v), p(v), q(v), c(v) {}

    // 64 sampled entries: rho and A from numbers that cost nothing to find
    float coefficient[64] = {}, total = 0;
    static index_t at(int j, index_t v) { return index_t(j) * 7919 % v; }
    template <class LogP>
    float gather(LogP log_p, index_t v) {
        total = 0;
        for (int j = 0; j < 64; ++j) {
            const float lp_j = log_p(at(j, v));
            coefficient[j] = -std::exp(lp_j - (lp_j - 0.1f)) * (-2 - lp_j) / 64;
            total += coefficient[j];
        }
        return total;
    }

    static float lse(const Eigen::Map<const row>& x) {
        const float m = x.maxCoeff();
        return m + std::log((x - m).exp().sum());
    }
    float run(peer what, const float* z_, const float* y_, float* dz_, index_t v) {
        const Eigen::Map<const row> z(z_, v), y(y_, v);
        const float a = lse(z);
        if (what == peer::lse) return a;
        if (what == peer::gathered) { // log-softmax of the row, 64 of its entries, its gradient
            lp = z - a;
            const float value = gather([&](index_t i) { return lp[i]; }, v);
            Eigen::Map<row> dz(dz_, v);
            dz = -lp.exp() * total;
            for (int j = 0; j < 64; ++j) dz[at(j, v)] += coefficient[j];
            return value;
        }
        lp = z - a, lq = y - lse(y);
        if (what == peer::reverse_value) return (lp.exp() * (lp - lq)).sum();
        if (what == peer::forward_value) return (lq.exp() * (lq - lp)).sum();
        p = lp.exp();
        float value = 0;
        if (what == peer::reverse) {
            c = p * (lp - lq);
            value = c.sum();
        } else {
            q = lq.exp();
            if (what == peer::forward) {
                value = (q * (lq - lp)).sum();
                c = -q;
            } else if (what == peer::tv) {
                value = 0.5f * (p - q).abs().sum();
                c = 0.5f * p * (p - q).sign();
            } else { // log m = log((p + q)/2)
                lp -= (0.5f * (p + q)).log();
                lq -= (0.5f * (p + q)).log();
                value = 0.5f * ((q * lq).sum() + (p * lp).sum());
                c = 0.5f * p * lp;
            }
        }
        Eigen::Map<row>(dz_, v) = c - p * c.sum();
        return value;
    }
};

struct naive {
    std::vector<float> p, q, c;

    explicit naive(index_t v) : p(size_t(v)), q(size_t(v)), c(size_t(v)) {}

    static float lse(const float* x, index_t v) {
        float m = x[0], s = 0;
        for (index_t i = 1; i < v; ++i) m = std::max(m, x[i]);
        for (index_t i = 0; i < v; ++i) s += std::exp(x[i] - m);
        return m + std::log(s);
    }
    float run(peer what, const float* z, const float* y, float* dz, index_t v) {
        const float a = lse(z, v);
        if (what == peer::lse) return a;
        if (what == peer::gathered) {
            for (index_t i = 0; i < v; ++i) p[std::size_t(i)] = z[i] - a;
            plain sums(1);
            const float value = sums.gather([&](index_t i) { return p[std::size_t(i)]; }, v);
            for (index_t i = 0; i < v; ++i) dz[i] = -std::exp(p[std::size_t(i)]) * sums.total;
            for (int j = 0; j < 64; ++j) dz[plain::at(j, v)] += sums.coefficient[j];
            return value;
        }
        const float b = lse(y, v);
        float value = 0, total = 0;
        for (index_t i = 0; i < v; ++i) {
            const float lp = z[i] - a, lq = y[i] - b;
            if (what == peer::reverse_value) {
                value += std::exp(lp) * (lp - lq);
                continue;
            }
            if (what == peer::forward_value) {
                value += std::exp(lq) * (lq - lp);
                continue;
            }
            const auto j = static_cast<std::size_t>(i);
            p[j] = std::exp(lp);
            if (what == peer::reverse) {
                c[j] = p[j] * (lp - lq), value += c[j];
            } else {
                q[j] = std::exp(lq);
                if (what == peer::forward) {
                    value += q[j] * (lq - lp), c[j] = -q[j];
                } else if (what == peer::tv) {
                    value += 0.5f * std::abs(p[j] - q[j]);
                    c[j] = p[j] > q[j] ? 0.5f * p[j] : p[j] < q[j] ? -0.5f * p[j] : 0;
                } else {
                    const float lm = std::log(0.5f * (p[j] + q[j]));
                    value += 0.5f * (q[j] * (lq - lm) + p[j] * (lp - lm)), c[j] = 0.5f * p[j] * (lp - lm);
                }
            }
            total += c[j];
        }
        if (what == peer::reverse_value || what == peer::forward_value) return value;
        for (index_t i = 0; i < v; ++i) dz[i] = c[size_t(i)] - p[size_t(i)] * total;
        return value;
    }
};

} // namespace bench
