// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// optimise: no
//
// Estimators over entries that the library does not have, written here alone (docs/concepts/entries.md shows them), on
// the CPU backend and on the GPU's rows: one of drawn tokens, in expectation over every token; one of a support,
// against central differences. And `through_softmax` on rows of every look.
#include "backends/host_run.hpp"
#include "support/generators.hpp"
#include "support/property.hpp"

#include <algorithm>
#include <cmath>
#include <vector>

#include <opd/backends/cpu.hpp>
#include <opd/opd.hpp>

namespace own {

/// Mean of ½ (log p - log q)² over tokens drawn from the student itself: c = log p - log q, whose mean gradient is that
/// of reverse KL at the prefix.
struct squared_log_ratio {
    static constexpr opd::cache_kind takes = opd::cache_kind::samples;
    OPD_HD opd::entry_row row(opd::sampled_entry* e, int m, opd::entry_facts, opd::diagnostics& d) const {
        opd::entry_row out;
        for (int j = 0; j < m; ++j) {
            const double gap = e[j].log_p - e[j].log_q;
            out.loss += e[j].weight * 0.5 * gap * gap;
            e[j].c = e[j].weight * gap;
            ++d.tokens;
        }
        out.bad = !(out.loss < 1e30); // NaN too
        return out;
    }
};
static_assert(opd::sampled_estimator<squared_log_ratio>);

/// ½ Σ_S (p - q)² over the ids of a support; what lies outside does not count. c = p (p - q).
struct squared_error {
    static constexpr opd::cache_kind takes = opd::cache_kind::support;
    OPD_HD opd::entry_row row(opd::support_entries& s, opd::entry_facts, opd::diagnostics&) const {
        opd::entry_row out;
        for (int j = 0; j < s.k; ++j) {
            const double p = ::exp(s.log_p[j]), gap = p - ::exp(s.log_q[j]);
            out.loss += 0.5 * gap * gap;
            s.h[j] = p * gap; // c; the rest's is 0
        }
        opd::through_softmax(s);
        return out;
    }
};
static_assert(opd::support_estimator<squared_error> && !opd::renormalised_estimator<squared_error>);

} // namespace own

using namespace opd;
using namespace opd::test;

namespace {

template <class Call>
void on_both(Call call) {
    cpu_backend lanes{.threads = 2};
    call("lanes", lanes);
    host_run_backend threads{32};
    call("threads", threads);
}

std::vector<double> softmax(const std::vector<double>& z, double temperature) {
    const double top = *std::max_element(z.begin(), z.end());
    std::vector<double> p;
    double sum = 0;
    for (const double x : z) p.push_back(std::exp((x - top) / temperature)), sum += p.back();
    for (double& x : p) x /= sum;
    return p;
}

std::vector<double> random_row(index_t n, double width) {
    numbers u(std::uint64_t(*rc::gen::inRange(0, 1 << 30)));
    std::vector<double> x;
    for (index_t i = 0; i < n; ++i) x.push_back(width * u.normal());
    return x;
}

} // namespace

TEST_CASE("an estimator of drawn tokens: its mean gradient is that of reverse KL") {
    on_both([](const char* name, auto& backend) {
        property(name, [&] {
            const index_t v = *rc::gen::inRange<index_t>(2, 7);
            const float t = *rc::gen::element(1.F, 0.5F, 3.F);
            const std::vector<double> z = random_row(v, 2), y = random_row(v, 2);
            const std::vector<double> p = softmax(z, double(t)), q = softmax(y, 1);
            double kl = 0;
            for (std::size_t i = 0; i < p.size(); ++i) kl += p[i] * std::log(p[i] / q[i]);
            std::vector<double> mean(z.size()), dz(z.size());
            double loss = 0, want = 0;
            for (index_t a = 0; a < v; ++a) { // every token, by its probability
                const auto i = static_cast<std::size_t>(a);
                const double log_p = std::log(p[i]), log_q = std::log(q[i]);
                const std::int32_t id = std::int32_t(a);
                const teacher::samples<std::int32_t, double> cache{view(&id, 1, 1), view(&log_p, 1, 1),
                                                                   view(&log_q, 1, 1)};
                const result r =
                    evaluate(backend, student::logits<double>{view(z.data(), 1, v), view(dz.data(), 1, v), t}, cache,
                             own::squared_log_ratio{});
                RC_ASSERT(r.diagnostics.tokens == 1);
                loss += p[i] * r.loss, want += p[i] * 0.5 * (log_p - log_q) * (log_p - log_q);
                for (std::size_t j = 0; j < dz.size(); ++j) mean[j] += p[i] * dz[j];
            }
            RC_ASSERT(std::abs(loss - want) <= 1e-11 * (1 + want));
            for (std::size_t j = 0; j < mean.size(); ++j)
                RC_ASSERT(std::abs(mean[j] - p[j] * (std::log(p[j] / q[j]) - kl) / double(t)) <= 1e-11 * (1 + kl));
        });
    });
}

TEST_CASE("an estimator of a support: its gradient is that of its loss") {
    on_both([](const char* name, auto& backend) {
        property(name, [&] {
            const index_t v = *rc::gen::inRange<index_t>(2, 12), k = *rc::gen::inRange<index_t>(1, v + 1);
            const float t = *rc::gen::element(1.F, 0.5F, 3.F);
            std::vector<double> z = random_row(v, 2);
            const std::vector<double> q = softmax(random_row(v, 2), 1);
            std::vector<std::int32_t> ids;
            std::vector<double> log_q;
            for (index_t j = 0; j < k; ++j) {
                ids.push_back(std::int32_t((j * 5 + 3) % v)); // may repeat where v divides by 5
                log_q.push_back(std::log(q[std::size_t(ids.back())]));
            }
            std::vector<std::int32_t> sorted = ids;
            std::sort(sorted.begin(), sorted.end());
            RC_PRE(std::adjacent_find(sorted.begin(), sorted.end()) == sorted.end());
            const auto loss_at = [&] {
                const std::vector<double> p = softmax(z, double(t));
                double sum = 0;
                for (const std::int32_t id : ids)
                    sum += 0.5 * (p[std::size_t(id)] - q[std::size_t(id)]) * (p[std::size_t(id)] - q[std::size_t(id)]);
                return sum;
            };
            std::vector<double> dz(z.size());
            const result r = evaluate(
                backend, student::logits<double>{view(std::as_const(z).data(), 1, v), view(dz.data(), 1, v), t},
                teacher::support<std::int32_t, double>{view(std::as_const(ids).data(), 1, k),
                                                       view(std::as_const(log_q).data(), 1, k)},
                own::squared_error{});
            RC_ASSERT(r.diagnostics.support_rows == 1);
            RC_ASSERT(r.diagnostics.tail_floored == 0);
            RC_ASSERT(std::abs(r.loss - loss_at()) <= 1e-13);
            double sum = 0;
            for (std::size_t i = 0; i < z.size(); ++i) {
                const double at = z[i], h = 1e-4;
                z[i] = at + h;
                const double up = loss_at();
                z[i] = at - h;
                const double down = loss_at();
                z[i] = at;
                RC_ASSERT(std::abs(dz[i] - (up - down) / (2 * h)) <= 1e-7);
                sum += dz[i];
            }
            RC_ASSERT(std::abs(sum) <= 1e-15);
        });
    });
}

TEST_CASE("through_softmax: h = c - p Σc, with a rest and without, at any top") {
    property("rows", [] {
        const int k = *rc::gen::inRange(1, 6);
        const bool rest = *rc::gen::inRange(0, 3) > 0;
        const std::vector<double> p = softmax(random_row(k + rest, *rc::gen::element(1., 30.)), 1);
        std::vector<double> log_p, h, c = random_row(k + rest, 1), log_q(std::size_t(k), -1.0);
        for (int j = 0; j < k; ++j) {
            log_p.push_back(std::log(p[std::size_t(j)])), h.push_back(c[std::size_t(j)]);
        }
        support_entries s{k, log_p.data(), log_q.data(),         rest ? std::log(p.back()) : detail::neg_inf<double>(),
                          0, h.data(),     rest ? c.back() : 777};
        through_softmax(s);
        double sum_c = 0, sum_h = rest ? s.h_rest : 0;
        for (const double x : c) sum_c += x;
        for (int j = 0; j < k; ++j) {
            RC_ASSERT(std::abs(h[std::size_t(j)] - (c[std::size_t(j)] - p[std::size_t(j)] * sum_c)) <= 1e-13);
            sum_h += h[std::size_t(j)];
        }
        if (rest)
            RC_ASSERT(std::abs(s.h_rest - (c.back() - p.back() * sum_c)) <= 1e-13);
        else
            RC_ASSERT(s.h_rest == 0);
        RC_ASSERT(std::abs(sum_h) <= 1e-16 * k * 4);
    });
}
