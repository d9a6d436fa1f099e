// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// One row with a support of up to four ids, and its divergence over the ids and one bucket in long double.
#pragma once

#include "support/generators.hpp"
#include "support/textbook.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

#include <opd/estimators/divergences.hpp>
#include <opd/estimators/support.hpp>

namespace opd::test {

using textbook::real;

inline constexpr double endless = std::numeric_limits<double>::infinity();

/// d(value)/dp as the divergence's page has it, from log p and log q.
inline real slope(const reverse_kl&, real lp, real lq) { return lp - lq; }
inline real slope(const forward_kl&, real lp, real lq) { return -std::exp(lq - lp); }
inline real slope(const jsd& d, real lp, real lq) {
    const real w = d.w, o = d.o, top = std::max(lp, lq), // where both underflow, too
        log_m = top + std::log(w * std::exp(lq - top) + (1 - w) * std::exp(lp - top));
    return -o * (1 - w) * std::exp(lq - log_m) + (1 - o) * (lp - log_m - (1 - w) * std::exp(lp - log_m));
}
inline real slope(const skew_forward_kl& d, real lp, real lq) { return slope(jsd{d.a, 1}, lp, lq); }
inline real slope(const skew_reverse_kl& d, real lp, real lq) { return slope(jsd{1 - d.a, 0}, lp, lq); }
inline real slope(const total_variation&, real lp, real lq) { return lp > lq ? 0.5L : (lp < lq ? -0.5L : 0.0L); }
inline real slope(const alpha_divergence& d, real lp, real lq) {
    if (d.a == 1) return lp - lq;
    return std::exp((real(d.a) - 1) * (lp - lq)) / (real(d.a) - 1);
}
inline real slope(const chi_squared&, real lp, real lq) { return 2 * std::exp(lp - lq); }
/// p times it, as a power where p may vanish and the slope be beyond every number.
template <class D>
real p_slope(const D& d, real lp, real lq) {
    if constexpr (std::is_same_v<D, forward_kl>)
        return -std::exp(lq);
    else if constexpr (std::is_same_v<D, alpha_divergence>)
        return d.a == 1 ? std::exp(lp) * (lp - lq) : std::exp(real(d.a) * lp + (1 - real(d.a)) * lq) / (real(d.a) - 1);
    else
        return std::exp(lp) * slope(d, lp, lq);
}

/// One row: k ids that carry the student's mass, some of them tokens of the tail, and a teacher of its own mind.
template <class Z>
struct peaked_row {
    index_t vocab, k = 0;
    std::vector<Z> z, dz;
    std::vector<std::int32_t> ids;
    std::vector<double> log_q, log_tail;
    float temperature;

    peaked_row(index_t v, double gap, double q_rest, float t, std::uint64_t seed) : vocab(v), temperature(t) {
        numbers u(seed);
        std::vector<bool> inside(std::size_t(v), false);
        for (const index_t id : {v / 2, index_t(0), v - 1, v / 3})
            if (!inside[std::size_t(id)] && k < v - 1)
                ids.push_back(std::int32_t(id)), inside[std::size_t(id)] = true, ++k;
        for (index_t i = 0; i < v; ++i) {
            const bool head = i == ids[0] || (k > 2 && i == ids[1]); // ids 2, 3 lie as low as the tail
            const double x = (i == ids[0] ? 0.3 : 0) + u.normal() * (i == ids[0] ? 0 : 0.5) - (head ? 0 : gap);
            z.push_back(element<Z>::store(static_cast<arithmetic_t<Z>>(x * double(t))));
            if (gap == endless && !head) z.back() = element<Z>::store(detail::neg_inf<arithmetic_t<Z>>());
        }
        double sum = 0;
        for (index_t j = 0; j < k; ++j) log_q.push_back(u.uniform()), sum += log_q.back();
        for (double& q : log_q) q = std::log(q / sum * (1 - q_rest));
        log_tail.push_back(std::log(q_rest));
        dz.resize(z.size());
    }
    /// log q of slot `at`, k: of the rest; the others share its mass.
    void mask_teacher(index_t at, double none) {
        double& to = at < k ? log_q[std::size_t(at)] : log_tail[0];
        const double others = std::log1p(-std::exp(to));
        for (double& lq : log_q) lq -= others;
        log_tail[0] -= others;
        to = none;
    }
    student::logits<Z> student() {
        return {view(std::as_const(z).data(), 1, vocab), view(dz.data(), 1, vocab), temperature};
    }
    teacher::support<std::int32_t, double> cache() const {
        return {view(ids.data(), 1, k), view(log_q.data(), 1, k), log_tail};
    }

    struct outcome {
        real value = 0;
        std::vector<real> dz;
    };
    /// Without a floor, or with floors inside the logarithms of q, and of the value's p.
    template <class D>
    outcome reference(const D& d, real floor_q = -real(endless), real floor_p = -real(endless)) const {
        const textbook::row full = textbook::make_row(z.data(), z.data(), vocab, double(temperature), 1);
        textbook::row b;
        const auto rest = std::size_t(k);
        std::vector<std::size_t> bucket_of(z.size(), rest);
        for (index_t j = 0; j < k; ++j) {
            const auto id = std::size_t(ids[std::size_t(j)]);
            bucket_of[id] = std::size_t(j);
            b.log_p.push_back(full.log_p[id]), b.log_q.push_back(real(log_q[std::size_t(j)]));
        }
        real top = -std::numeric_limits<real>::infinity(), sum = 0; // the tail, relative to its own top
        for (std::size_t v = 0; v < full.log_p.size(); ++v)
            if (bucket_of[v] == std::size_t(k)) top = std::max(top, full.log_p[v]);
        for (std::size_t v = 0; v < full.log_p.size(); ++v)
            if (bucket_of[v] == std::size_t(k) && std::isfinite(top)) sum += std::exp(full.log_p[v] - top);
        b.log_p.push_back(std::isfinite(top) ? top + std::log(sum) : top), b.log_q.push_back(real(log_tail[0]));

        outcome out;
        for (real& lq : b.log_q) lq = std::max(lq, floor_q);
        textbook::row raised = b;
        for (real& lp : raised.log_p) lp = std::max(lp, floor_p);
        out.value = textbook::value(d, raised);
        const std::size_t star = std::size_t(std::max_element(b.log_p.begin(), b.log_p.end()) - b.log_p.begin());
        std::vector<real> h(b.log_p.size(), 0);
        real mean = 0, others = 0; // of slopes less the top's, so that nothing cancels
        // a masked id has forward KL's slope, p - q, like any other
        const auto moves = [&](std::size_t j) {
            return b.log_p[j] > -1e30L || (j < rest && std::is_same_v<D, forward_kl>);
        };
        for (std::size_t j = 0; j < h.size(); ++j)
            if (moves(j)) {
                h[j] =
                    p_slope(d, b.log_p[j], b.log_q[j]) - std::exp(b.log_p[j]) * slope(d, b.log_p[star], b.log_q[star]);
                mean += h[j];
            }
        for (std::size_t j = 0; j < h.size(); ++j)
            if (j != star && moves(j)) h[j] -= std::exp(b.log_p[j]) * mean, others += h[j];
        h[star] = -others;
        for (std::size_t v = 0; v < full.log_p.size(); ++v) {
            const std::size_t j = bucket_of[v];
            const real share = j < rest ? 1 : std::isfinite(full.log_p[v]) ? std::exp(full.log_p[v] - b.log_p[j]) : 0;
            out.dz.push_back(h[j] * share / real(temperature));
        }
        return out;
    }
};

template <class Visit>
void for_each_divergence(Visit f) {
    f("reverse KL", reverse_kl{});
    f("forward KL", forward_kl{});
    f("JSD", jsd{});
    f("JSD(.3,.6)", jsd{.3, .6});
    f("skew forward KL", skew_forward_kl{.1});
    f("skew reverse KL", skew_reverse_kl{.1});
    f("total variation", total_variation{});
    f("alpha(.5)", alpha_divergence{.5});
    f("chi-squared", chi_squared{});
}

} // namespace opd::test
