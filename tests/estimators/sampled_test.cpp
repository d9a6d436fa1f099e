// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// optimise: no
//
// Sampled reverse KL by exact enumeration: every tuple of m draws from mu at small V, every interval of the systematic
// offset for threshold(B). The mean of the gradients equals the dense gradient where an estimator claims to be
// unbiased, and must not where it is biased (negative controls). What each surrogate descends, and its c against
// differences in log p.
#include "support/compiled/dense.hpp"
#include "support/compiled/dense_double.hpp"
#include "support/compiled/sampled.hpp"
#include "support/enumerate.hpp"
#include "support/generators.hpp"
#include "support/policies.hpp"
#include "support/property.hpp"
#include "support/textbook.hpp"

#include <utility>

#include <opd/backends/cpu.hpp>
#include <opd/draw.hpp>
#include <opd/estimators/sampled.hpp>

using namespace opd;
using namespace opd::test;

namespace {

struct outcome {
    double loss = 0;
    std::vector<double> dz;
};

template <class Estimator>
outcome call(const policies& w, const teacher::samples<std::int64_t, double>& t, const Estimator& e) {
    cpu_backend backend;
    outcome o;
    o.dz.resize(w.z.size());
    const student::logits<double> s{view(w.z.data(), 1, w.vocab), view(o.dz.data(), 1, w.vocab), w.temperature};
    o.loss = evaluate(backend, s, t, e).loss;
    return o;
}

/// E over all m-tuples of i.i.d. draws from mu.
template <class Estimator>
outcome expectation(const policies& w, index_t m, const Estimator& e) {
    outcome mean{0, std::vector<double>(w.z.size(), 0.0)};
    double total = 0;
    for_each_tuple(w.vocab, m, [&](const std::vector<std::int64_t>& ids) {
        std::vector<double> log_mu, log_q;
        double lp = 0;
        for (const auto id : ids) {
            log_mu.push_back(w.log_mu[std::size_t(id)]), log_q.push_back(w.log_q[std::size_t(id)]);
            lp += log_mu.back();
        }
        const outcome o = call(w, {view(ids.data(), 1, m), view(log_mu.data(), 1, m), view(log_q.data(), 1, m)}, e);
        const double probability = std::exp(lp);
        total += probability;
        mean.loss += probability * o.loss;
        for (std::size_t v = 0; v < mean.dz.size(); ++v) mean.dz[v] += probability * o.dz[v];
    });
    CHECK(total == doctest::Approx(1).epsilon(1e-12));
    return mean;
}

const std::pair<index_t, index_t> sizes[] = {{2, 1}, {5, 1}, {3, 2}, {5, 2}, {4, 3}, {5, 3}}; // V, m

} // namespace

/// A baseline of one's own: a constant moves no mean.
struct constant_half {
    static constexpr bool pairs = false;
    static constexpr bool reads(cache_kind) { return true; }
    void add(const sampled_entry&, double, double) {}
    double of(const sampled_entry&, double, double, int) const { return 0.5; }
};
/// An advantage of one's own.
struct twice_theta {
    double operator()(const sampled_entry& x) const { return 2 * (x.log_q - x.log_p); }
};
/// A surrogate that flags tokens by their slot.
struct flagging {
    token_out operator()(const token_in& x) const {
        const unsigned flags[] = {token_flag::clipped, token_flag::truncated,
                                  token_flag::masked | token_flag::truncated, 0};
        return {-x.advantage, -x.advantage, flags[x.slot % 4]};
    }
};

TEST_CASE("policies of one's own, and flags") {
    const policies w(4, 5, true);
    CHECK(distance(expectation(w, 2, mc{twice_theta{}}).dz, expectation(w, 2, mc{reverse_kl{}}).dz) > 1e-3);
    const outcome once = expectation(w, 2, mc{reverse_kl{}}), twice = expectation(w, 2, mc{twice_theta{}});
    for (std::size_t i = 0; i < once.dz.size(); ++i)
        CHECK(twice.dz[i] == doctest::Approx(2 * once.dz[i]).epsilon(1e-12));
    std::vector<double> z{0.1, 0.2, 0.3}, logs(6, -1);
    const std::vector<std::int32_t> ids{0, 1, 2, 0, 1, 2};
    const teacher::samples<std::int32_t, double> drawn{view(ids.data(), 1, 6),
                                                       view(static_cast<const double*>(logs.data()), 1, 6),
                                                       view(static_cast<const double*>(logs.data()), 1, 6)};
    cpu_backend be{.threads = 1};
    const diagnostics d = evaluate(be, student::logits<double>{view(static_cast<const double*>(z.data()), 1, 3)}, drawn,
                                   mc{reverse_kl{}, flagging{}})
                              .diagnostics;
    CHECK(d.clipped_positive + d.clipped_negative == 2);
    CHECK(d.truncated == 3);
    CHECK(d.masked == 1);
}

TEST_CASE("MC-m with importance sampling is unbiased under staleness, with and without leave-one-out") {
    for (const auto& [v, m] : sizes)
        for (const float t : {1.F, 0.7F}) {
            const policies w(v, 100 + std::uint64_t(v * m), true, t);
            const auto dense = w.gradient_of_kl(w.log_q);
            CAPTURE(v);
            CAPTURE(m);
            const auto with = [&, &w = w, &m = m](auto b) {
                const outcome o = expectation(w, m, mc{.baseline = b});
                CHECK(distance(o.dz, dense) < 1e-10);
                CHECK(o.loss == doctest::Approx(w.kl(w.log_q)).epsilon(1e-10)); // the value never uses the baseline
            };
            with(baseline::none{}), with(baseline::leave_one_out{}), with(baseline::self_normalised{});
            with(constant_half{});
        }
}

TEST_CASE("control: without correction MC-m is unbiased on policy and biased when stale") {
    for (const auto& [v, m] : sizes) {
        const policies fresh(v, 7, false), stale(v, 7, true);
        CHECK(distance(expectation(fresh, m, accept_bias{mc{reverse_kl{}, score_function{}}}).dz,
                       fresh.gradient_of_kl(fresh.log_q)) < 1e-10);
        CHECK(distance(expectation(stale, m, accept_bias{mc{reverse_kl{}, score_function{}}}).dz,
                       stale.gradient_of_kl(stale.log_q)) > 1e-2);
    }
}

TEST_CASE("exactly zero at p = q, whatever was drawn") {
    policies w(5, 9, true);
    w.log_q = w.log_p;
    for_each_tuple(5, 2, [&](const std::vector<std::int64_t>& ids) {
        std::vector<double> log_mu, log_q;
        for (const auto id : ids)
            log_mu.push_back(w.log_mu[std::size_t(id)]), log_q.push_back(w.log_p[std::size_t(id)]);
        const outcome o = call(w, {view(ids.data(), 1, 2), view(log_mu.data(), 1, 2), view(log_q.data(), 1, 2)},
                               mc{.baseline = baseline::leave_one_out{}});
        CHECK(std::abs(o.loss) < 1e-14);
        for (const double g : o.dz) CHECK(std::abs(g) < 1e-14);
    });
}

TEST_CASE("repeated ids are summed: a tuple's gradient is the mean of its draws'") {
    const policies w(5, 31, true);
    for_each_tuple(5, 3, [&](const std::vector<std::int64_t>& ids) {
        std::vector<double> log_mu, log_q, mean(5, 0.0);
        for (const auto id : ids) {
            log_mu.push_back(w.log_mu[std::size_t(id)]), log_q.push_back(w.log_q[std::size_t(id)]);
            const outcome one =
                call(w, {view(&id, 1, 1), view(&log_mu.back(), 1, 1), view(&log_q.back(), 1, 1)}, mc{reverse_kl{}});
            for (std::size_t v = 0; v < 5; ++v) mean[v] += one.dz[v] / 3;
        }
        const outcome all =
            call(w, {view(ids.data(), 1, 3), view(log_mu.data(), 1, 3), view(log_q.data(), 1, 3)}, mc{reverse_kl{}});
        CHECK(distance(all.dz, mean) < 1e-13);
    });
}

TEST_CASE("diagnostics: E_mu[rho] = 1, K1, K2, K3, saturation, a missing baseline") {
    const policies w(4, 5, true);
    double rho = 0, k3 = 0;
    cpu_backend backend;
    for_each_tuple(4, 1, [&](const std::vector<std::int64_t>& ids) {
        const auto i = std::size_t(ids[0]);
        const student::logits<double> s{view(w.z.data(), 1, 4)};
        const teacher::samples<std::int64_t, double> t{view(ids.data(), 1, 1), view(&w.log_mu[i], 1, 1),
                                                       view(&w.log_q[i], 1, 1)};
        const auto d = evaluate(backend, s, t, mc{.baseline = baseline::leave_one_out{}}).diagnostics;
        const double l = w.log_p[i] - w.log_mu[i];
        CHECK(d.ratio_mean() == doctest::Approx(std::exp(l)));
        CHECK(d.k1() == doctest::Approx(-l));
        CHECK(d.k2() == doctest::Approx(l * l / 2));
        CHECK(d.baseline_missing == 1);
        CHECK(d.saturated == 0);
        rho += std::exp(w.log_mu[i]) * d.ratio_mean(), k3 += std::exp(w.log_mu[i]) * d.k3();
    });
    CHECK(rho == doctest::Approx(1));
    double kl_mu_p = 0; // E_mu[K3] = KL(mu‖p)
    for (std::size_t i = 0; i < 4; ++i) kl_mu_p += std::exp(w.log_mu[i]) * (w.log_mu[i] - w.log_p[i]);
    CHECK(k3 == doctest::Approx(kl_mu_p));

    const std::int64_t id = 0;
    const double log_mu = -300, log_q = -1, z[] = {0, 0};
    double dz[2];
    const auto d =
        evaluate(backend, student::logits{view(z, 1, 2), view(dz, 1, 2)},
                 teacher::samples<std::int64_t, double>{view(&id, 1, 1), view(&log_mu, 1, 1), view(&log_q, 1, 1)},
                 mc{reverse_kl{}})
            .diagnostics;
    CHECK(d.saturated == 1);
    CHECK(d.ratio_max == doctest::Approx(std::exp(80.0)));
}

TEST_CASE("threshold(B) is unbiased over its systematic offset, with its baseline too; equal weights are not") {
    cpu_backend backend;
    for (const index_t vocab : {5, 9})
        for (const index_t budget : {1, 2, 3, 4, 8})
            for (const std::uint64_t seed : {1, 2, 3}) {
                const policies w(vocab, seed, true, 0.8F);
                const auto draw = [&](double u) {
                    threshold_draw d(budget);
                    const drawn<std::int64_t, double, double> to{
                        view(d.ids.data(), 1, budget), view(d.log_mu.data(), 1, budget),
                        view(d.weight.data(), 1, budget), view(d.exact.data(), 1, budget)};
                    const result r =
                        opd::draw(backend, view(w.b.data(), 1, vocab), design::threshold{budget},
                                  {.uniforms = view(&u, 1, 1)}, to, {.filter = {.temperature = w.temperature}});
                    REQUIRE(r.diagnostics.bad_rows == 0);
                    d.count = std::count_if(d.ids.begin(), d.ids.end(), [](std::int64_t id) { return id >= 0; });
                    return d;
                };
                std::vector<std::vector<double>> mean(3, std::vector<double>(w.z.size(), 0.0));
                double value = 0, mass = 0, total = 0;
                for_each_offset_interval(w.log_mu, budget, draw, [&](double length, const threshold_draw& d) {
                    CHECK(d.count == std::min(budget, vocab));
                    total += length;
                    std::vector<double> log_q(std::size_t(budget), 0.0);
                    for (std::size_t j = 0; j < d.ids.size(); ++j)
                        if (d.ids[j] >= 0) log_q[j] = w.log_q[std::size_t(d.ids[j])], mass += length * d.weight[j];
                    for (const std::size_t kind : {0, 1, 2}) {
                        std::vector<double> dz(w.z.size());
                        std::vector<double> weight = d.weight;
                        if (kind == 2) std::fill(weight.begin(), weight.end(), 1 / double(d.count));
                        const teacher::weighted<std::int64_t, double> t{
                            view(d.ids.data(), 1, budget), view(static_cast<const double*>(weight.data()), 1, budget),
                            view(d.log_mu.data(), 1, budget), view(static_cast<const double*>(log_q.data()), 1, budget),
                            view(d.exact.data(), 1, budget)};
                        const student::logits<double> s{view(w.z.data(), 1, vocab), view(dz.data(), 1, vocab),
                                                        w.temperature};
                        const double loss = kind == 1 ? evaluate(backend, s, t, mc{reverse_kl{}}).loss
                                                      : evaluate(backend, s, t, mc{.baseline = baseline::none{}}).loss;
                        if (kind == 1) value += length * loss;
                        for (std::size_t v = 0; v < dz.size(); ++v) mean[kind][v] += length * dz[v];
                    }
                });
                INFO("V " << vocab << ", B " << budget << ", seed " << seed);
                const auto dense = w.gradient_of_kl(w.log_q);
                CHECK(total == doctest::Approx(1).epsilon(1e-12));
                CHECK(std::abs(mass - 1) < 1e-10); // E[Σ w] = 1
                CHECK(distance(mean[0], dense) < 1e-10);
                CHECK(distance(mean[1], dense) < 1e-10);
                CHECK(std::abs(value - w.kl(w.log_q)) < 1e-10);
                if (budget > 1 && budget < vocab) CHECK(distance(mean[2], dense) > 1e-3);
                if (budget >= vocab) CHECK(distance(mean[0], dense) < 1e-13); // all exact
            }
}

TEST_CASE("baselines by hand: they move the gradient of a tuple to w rho (A - b), and the value not at all") {
    const policies w(5, 44, true);
    const std::vector<std::int64_t> ids{3, 0, 2};
    std::vector<double> log_mu, log_q, rho, a;
    for (const auto id : ids) {
        const auto i = std::size_t(id);
        log_mu.push_back(w.log_mu[i]), log_q.push_back(w.log_q[i]);
        rho.push_back(std::exp(w.log_p[i] - w.log_mu[i])), a.push_back(w.log_q[i] - w.log_p[i]);
    }
    const teacher::samples<std::int64_t, double> t{view(ids.data(), 1, 3), view(std::as_const(log_mu).data(), 1, 3),
                                                   view(std::as_const(log_q).data(), 1, 3)};
    const auto want = [&](const std::vector<double>& b) {
        std::vector<double> c(5, 0.0);
        for (std::size_t i = 0; i < 3; ++i) c[std::size_t(ids[i])] -= rho[i] * (a[i] - b[i]) / 3;
        return w.pullback(c);
    };
    std::vector<double> plain, normalised;
    for (std::size_t i = 0; i < 3; ++i) {
        const std::size_t j = (i + 1) % 3, k = (i + 2) % 3;
        plain.push_back((rho[j] * a[j] + rho[k] * a[k]) / 2);
        normalised.push_back((rho[j] * a[j] + rho[k] * a[k]) / (rho[j] + rho[k]));
    }
    const outcome none = call(w, t, mc{reverse_kl{}});
    const outcome loo = call(w, t, mc{.baseline = baseline::leave_one_out{}});
    const outcome self = call(w, t, mc{.baseline = baseline::self_normalised{}});
    CHECK(distance(none.dz, want({0, 0, 0})) < 1e-14);
    CHECK(distance(loo.dz, want(plain)) < 1e-14);
    CHECK(distance(self.dz, want(normalised)) < 1e-14);
    CHECK(loo.loss == none.loss);
    CHECK(self.loss == none.loss);

    const std::vector<double> weight{0.5, 0.25, 0.5};
    const std::vector<std::uint8_t> exact{1, 0, 1};
    const teacher::weighted<std::int64_t, double> tw{t.ids, view(weight.data(), 1, 3), t.log_mu, t.log_q,
                                                     view(exact.data(), 1, 3)};
    const double p0 = std::exp(w.log_p[3]), p2 = std::exp(w.log_p[2]), b = (p0 * a[0] + p2 * a[2]) / (p0 + p2);
    std::vector<double> c(5, 0.0), dz(5);
    for (std::size_t i = 0; i < 3; ++i) c[std::size_t(ids[i])] -= weight[i] * rho[i] * (a[i] - b);
    cpu_backend backend;
    const student::logits<double> s{view(w.z.data(), 1, 5), view(dz.data(), 1, 5)};
    const double loss = evaluate(backend, s, tw, mc{reverse_kl{}}).loss;
    CHECK(distance(dz, w.pullback(c)) < 1e-14);
    CHECK(loss == doctest::Approx(-0.5 * rho[0] * a[0] - 0.25 * rho[1] * a[1] - 0.5 * rho[2] * a[2]));
}

TEST_CASE("i.i.d. draws follow mu: the inverse of its distribution function, in id order") {
    const policies w(7, 12, true);
    cpu_backend backend;
    double cumulative = 0;
    for (std::int64_t v = 0; v < 7; ++v) {
        for (const double inside : {0.001, 0.5, 0.999}) {
            const double u = cumulative + inside * std::exp(w.log_mu[std::size_t(v)]);
            std::int64_t id = -1;
            double log_mu = 0;
            const result r = draw(backend, view(w.b.data(), 1, 7), design::iid{1}, {.uniforms = view(&u, 1, 1)},
                                  drawn<std::int64_t, double, double>{view(&id, 1, 1), view(&log_mu, 1, 1)});
            REQUIRE(r.diagnostics.bad_rows == 0);
            CHECK(id == v);
            CHECK(log_mu == doctest::Approx(w.log_mu[std::size_t(v)]).epsilon(1e-13));
        }
        cumulative += std::exp(w.log_mu[std::size_t(v)]);
    }
}

TEST_CASE("bfloat16 gradients of a sampled loss near p = q keep a relative error below 1e-2") {
    constexpr index_t vocab = 3000, m = 64;
    numbers u(17);
    std::vector<float> z(vocab), log_mu(m), log_q(m);
    for (float& x : z) x = float(3 * u.normal());
    std::vector<double> lp, want(vocab);
    double lse = 0;
    naive_backend::log_softmax(z.data(), vocab, 1, nullptr, &lse, lp);
    std::vector<std::int32_t> ids(m);
    std::vector<double> uniforms;
    for (index_t j = 0; j < m; ++j) uniforms.push_back(u.uniform());
    cpu_backend backend;
    REQUIRE(draw(backend, view(z.data(), 1, vocab), design::iid{m}, {.uniforms = view(uniforms.data(), 1, m)},
                 drawn<>{view(ids.data(), 1, m), view(log_mu.data(), 1, m)})
                .diagnostics.bad_rows == 0);
    for (std::size_t j = 0; j < m; ++j) log_q[j] = float(lp[std::size_t(ids[j])] + 1e-3 * u.normal());
    const teacher::samples<std::int32_t> t{view(ids.data(), 1, m), view(log_mu.data(), 1, m), view(log_q.data(), 1, m)};
    std::vector<bfloat16> dz(vocab);
    const auto zv = view(static_cast<const float*>(z.data()), 1, vocab);
    evaluate(backend, student::logits<float, bfloat16>{zv, view(dz.data(), 1, vocab)}, t, mc{reverse_kl{}});
    evaluate(backend, student::logits<float, double>{zv, view(want.data(), 1, vocab)}, t, mc{reverse_kl{}});
    double top = 0;
    for (const double g : want) top = std::max(top, std::abs(g));
    for (std::size_t v = 0; v < dz.size(); ++v)
        if (std::abs(want[v]) > 1e-4 * top) CHECK(std::abs(element<bfloat16>::load(dz[v]) / want[v] - 1) < 1e-2);
}
