// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// optimise: no
//
// Designs that state their weights, by enumeration: the mean over all that a design can draw of the sampled loss and
// gradient is the dense ones, at any staleness, to 1e-10. Head + tail: every sequence of tail draws. Gumbel top-m:
// every order of ids, and the threshold by quadrature over its law given the order, a sum of exponentials (Rényi).
#include "support/generators.hpp"
#include "support/property.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <doctest/doctest.h>
#include <functional>
#include <numeric>
#include <utility>
#include <vector>

#include <opd/backends/cpu.hpp>
#include <opd/estimators/divergences.hpp>
#include <opd/estimators/sampled.hpp>
#include <opd/evaluate.hpp>
#include <opd/rows/draw_rows.hpp>

using namespace opd;
using namespace opd::test;

namespace {

using weighted = teacher::weighted<std::int32_t, double, space::host, double>;

std::vector<double> random_law(numbers& u, index_t vocab, double spread) {
    std::vector<double> mass;
    for (index_t v = 0; v < vocab; ++v) mass.push_back(std::exp(spread * u.normal()));
    const double all = std::accumulate(mass.begin(), mass.end(), 0.0);
    for (double& x : mass) x /= all;
    return mass;
}

/// All that a design can draw at one prefix: rows of a weighted cache, each with its probability.
struct every_draw {
    index_t vocab, slots;
    std::vector<double> mu, q, z;
    std::vector<std::int32_t> ids;
    std::vector<double> weight, log_mu, log_q;
    std::vector<std::uint8_t> exact;
    std::vector<double> chance_of; // of each row

    every_draw(numbers& u, index_t vocab_, index_t slots_) : vocab(vocab_), slots(slots_) {
        mu = random_law(u, vocab, 1), q = random_law(u, vocab, 1.5);
        const std::vector<double> p = random_law(u, vocab, 1.5);
        for (const double x : p) z.push_back(std::log(x) + 3);
    }
    struct entry {
        index_t id;
        double weight;
        bool exact;
    };
    void add(const std::vector<entry>& row, double chance) {
        for (index_t j = 0; j < slots; ++j) {
            const bool used = j < index_t(row.size());
            const entry e = used ? row[std::size_t(j)] : entry{-1, 0, false};
            ids.push_back(std::int32_t(e.id)), weight.push_back(e.weight), exact.push_back(e.exact);
            log_mu.push_back(used ? std::log(mu[std::size_t(e.id)]) : 0);
            log_q.push_back(used ? std::log(q[std::size_t(e.id)]) : 0);
        }
        chance_of.push_back(chance);
    }
    /// Mean loss and gradient over all draws, and the dense ones of the same divergence.
    template <class D, class Baseline = baseline::exact_entries>
    void check(const D& divergence, Baseline b = {}) const {
        const auto n = index_t(chance_of.size());
        std::vector<double> rows, dz(std::size_t(n * vocab)), mean(std::size_t(vocab), 0.0), dense_dz(mean),
            log_teacher;
        for (index_t r = 0; r < n; ++r) rows.insert(rows.end(), z.begin(), z.end());
        for (const double x : q) log_teacher.push_back(std::log(x));
        const weighted cache{view(ids.data(), n, slots), view(weight.data(), n, slots), view(log_mu.data(), n, slots),
                             view(log_q.data(), n, slots), view(exact.data(), n, slots)};
        // weights of rows are float: each row's gradient alone, and its probability in double
        cpu_backend be{.threads = 1};
        const auto drawn = evaluate(be,
                                    student::logits<double, double>{.z = view(std::as_const(rows).data(), n, vocab),
                                                                    .dz = view(dz.data(), n, vocab)},
                                    cache, mc{divergence, unclipped_is{}, b}, {.reduction = reduce::sum});
        CHECK(drawn.diagnostics.bad_rows == 0);
        const auto dense = evaluate(
            be, student::logits<double, double>{.z = view(z.data(), 1, vocab), .dz = view(dense_dz.data(), 1, vocab)},
            teacher::dense{view(std::as_const(log_teacher).data(), 1, vocab)}, divergence);
        for (index_t r = 0; r < n; ++r)
            for (index_t v = 0; v < vocab; ++v)
                mean[std::size_t(v)] += chance_of[std::size_t(r)] * dz[std::size_t(r * vocab + v)];
        double largest = 0, loss = 0;
        for (const double g : dense_dz) largest = std::max(largest, std::abs(g));
        for (std::size_t v = 0; v < mean.size(); ++v) {
            CAPTURE(v);
            CHECK(std::abs(mean[v] - dense_dz[v]) < 1e-10 * largest);
        }
        // the loss, a row at a time: per-row losses are float
        for (index_t r = 0; r < n; ++r) {
            const weighted row{view(ids.data() + r * slots, 1, slots), view(weight.data() + r * slots, 1, slots),
                               view(log_mu.data() + r * slots, 1, slots), view(log_q.data() + r * slots, 1, slots),
                               view(exact.data() + r * slots, 1, slots)};
            loss +=
                chance_of[std::size_t(r)] * evaluate(be, student::logits<double, double>{.z = view(z.data(), 1, vocab)},
                                                     row, mc{divergence, unclipped_is{}, b})
                                                .loss;
        }
        CHECK(std::abs(loss - dense.loss) < 1e-10 * std::max(1.0, std::abs(dense.loss)));
    }
    void check_all() const {
        check(reverse_kl{});
        check(forward_kl{});
        check(jsd{0.3});
        check(reverse_kl{}, baseline::value{});
        check(reverse_kl{}, baseline::none{});
    }
};

} // namespace

TEST_CASE("head + tail is unbiased: every sequence of tail draws, to 1e-10; a head of V is the dense loss") {
    for (std::uint64_t seed = 0; seed < 6; ++seed) {
        CAPTURE(seed);
        numbers u(seed);
        const index_t vocab = 3 + u.below(4), m = 1 + u.below(3);
        for (index_t h = 0; h <= vocab; ++h) {
            CAPTURE(h);
            every_draw all(u, vocab, h + m);
            std::vector<index_t> order(static_cast<std::size_t>(vocab));
            std::iota(order.begin(), order.end(), index_t{0});
            std::sort(order.begin(), order.end(),
                      [&](index_t a, index_t b) { return all.mu[std::size_t(a)] > all.mu[std::size_t(b)]; });
            std::vector<every_draw::entry> row;
            double tail = 0;
            for (index_t j = 0; j < vocab; ++j) {
                const index_t id = order[std::size_t(j)];
                if (j < h)
                    row.push_back({id, all.mu[std::size_t(id)], true});
                else
                    tail += all.mu[std::size_t(id)];
            }
            const std::function<void(index_t, double)> draws = [&](index_t left, double chance) {
                if (left == 0 || h == vocab) return all.add(row, chance);
                for (index_t j = h; j < vocab; ++j) {
                    const index_t id = order[std::size_t(j)];
                    row.push_back({id, tail / double(m), false});
                    draws(left - 1, chance * all.mu[std::size_t(id)] / tail);
                    row.pop_back();
                }
            };
            draws(m, 1);
            all.check_all();
        }
    }
}

TEST_CASE("Gumbel top-m is unbiased: every order, quadrature over the threshold, to 1e-10") {
    for (std::uint64_t seed = 0; seed < 4; ++seed) {
        CAPTURE(seed);
        numbers u(seed + 100);
        const index_t vocab = 3 + u.below(seed < 2 ? 4 : 2), m = 1 + u.below(std::min<index_t>(3, vocab - 1));
        CAPTURE(vocab);
        CAPTURE(m);
        every_draw all(u, vocab, m);
        std::vector<index_t> order;
        std::vector<double> rates; // what was left before each draw, and after the last
        const std::function<void(double, double)> draws = [&](double left, double chance) {
            rates.push_back(left);
            if (index_t(order.size()) < m) {
                for (index_t v = 0; v < vocab; ++v) {
                    if (std::find(order.begin(), order.end(), v) != order.end()) continue;
                    order.push_back(v);
                    double rest = 0; // no difference
                    for (index_t w = 0; w < vocab; ++w)
                        if (std::find(order.begin(), order.end(), w) == order.end()) rest += all.mu[std::size_t(w)];
                    draws(rest, chance * all.mu[std::size_t(v)] / left);
                    order.pop_back();
                }
            } else {
                // density of Σ E_k / rate_k: Σ_k rate_k e^(-rate_k t) Π_{i≠k} rate_i / (rate_i - rate_k); t = e^(π/2
                // sinh x)
                const double step = 1. / 32;
                for (int i = -112; i <= 112; ++i) {
                    const double x = i * step, t = std::exp(1.5707963267948966 * std::sinh(x));
                    const double dt = step * 1.5707963267948966 * std::cosh(x) * t;
                    double density = 0;
                    for (std::size_t k = 0; k < rates.size(); ++k) {
                        double c = rates[k] * std::exp(-rates[k] * t);
                        for (std::size_t j = 0; j < rates.size(); ++j)
                            if (j != k) c *= rates[j] / (rates[j] - rates[k]);
                        density += c;
                    }
                    if (std::abs(density * dt) < 1e-18) continue;
                    std::vector<every_draw::entry> row;
                    for (const index_t v : order)
                        row.push_back({v, detail::gumbel_top_weight(all.mu[std::size_t(v)], t), false});
                    all.add(row, chance * density * dt);
                }
            }
            rates.pop_back();
        };
        draws(1, 1);
        CHECK(std::abs(std::accumulate(all.chance_of.begin(), all.chance_of.end(), 0.0) - 1) < 1e-11);
        all.check_all();
    }
}

TEST_CASE("a threshold far below a token's mass makes it certain, one far above weighs all alike") {
    CHECK(detail::gumbel_top_weight(0.25, 1e6) == 0.25);
    CHECK(std::abs(detail::gumbel_top_weight(1e-30, 2) - 0.5) < 1e-15);
    for (const double x : {0.999e-8, 1.001e-8}) // where the formula changes
        CHECK(std::abs(detail::gumbel_top_weight(x / 7, 7) * -std::expm1(-x) / (x / 7) - 1) < 1e-15);
}
