// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// build: sanitize
//
// Supports, samples and token log-probs on the CPU backend where small rows do not reach: ids in every leaf of 1,024,
// beta in full leaves, caches and gradients with padded rows, every field that a surrogate may read, the log-sum-exp
// given and returned, floors by hand.
#include "support/compiled/dense.hpp"
#include "support/compiled/sampled.hpp"
#include "support/compiled/support.hpp"
#include "support/generators.hpp"
#include "support/naive_backend.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <doctest/doctest.h>
#include <string>
#include <vector>

#include <opd/backends/cpu.hpp>
#include <opd/estimators/divergences.hpp>
#include <opd/estimators/sampled.hpp>
#include <opd/estimators/support.hpp>

using namespace opd;
using namespace opd::test;

namespace {

using lse_type = std::remove_cvref_t<decltype(*env{}.lse.data)>;
const float nan_f = std::bit_cast<float>(0x7fc00000u);
const float minus_inf = detail::neg_inf<float>();

/// A student row, k ids with log q and log mu, and the float64 of it.
struct sparse_rows {
    index_t rows, vocab, k;
    float temperature;
    std::vector<float> z, dz;
    std::vector<std::int32_t> ids;
    std::vector<float> log_q, log_mu, weight, log_tail;
    std::vector<std::vector<double>> log_p; // (N,V) in float64
    std::vector<double> lse;

    sparse_rows(index_t n, index_t vocab_, std::vector<std::int32_t> of_a_row, float t = 1, std::uint64_t seed = 1)
        : rows(n), vocab(vocab_), k(index_t(of_a_row.size())), temperature(t) {
        numbers u(seed);
        for (index_t r = 0; r < n; ++r) {
            for (index_t v = 0; v < vocab; ++v) z.push_back(float(2 * u.normal()));
            double z_q = 0;
            for (const auto id : of_a_row) {
                ids.push_back(id);
                log_q.push_back(float(-std::log(double(k)) - 0.3 - u.uniform()));
                log_mu.push_back(float(-std::log(double(k)) - 0.3 - u.uniform()));
                weight.push_back(float(0.05 + 0.2 * u.uniform()));
                z_q += std::exp(double(log_q.back()));
            }
            log_tail.push_back(float(std::log(1 - z_q)));
        }
        dz.assign(z.size(), 0);
        settle();
    }
    void settle() { // after z has been written
        log_p.clear(), lse.clear();
        for (index_t r = 0; r < rows; ++r) {
            double l = 0;
            log_p.emplace_back();
            naive_backend::log_softmax(z.data() + r * vocab, vocab, double(temperature), nullptr, &l, log_p.back());
            lse.push_back(l);
        }
    }
    student::logits<float> student() {
        return {view(z.data(), rows, vocab), view(dz.data(), rows, vocab), temperature};
    }
    template <class T>
    matrix_view<const T> matrix(const std::vector<T>& x) const {
        return {x.data(), rows, k, k};
    }
    teacher::support<std::int32_t> support() const { return {matrix(ids), matrix(log_q), log_tail}; }
    teacher::samples<std::int32_t> samples() const { return {matrix(ids), matrix(log_mu), matrix(log_q)}; }
    teacher::weighted<std::int32_t> weighted() const {
        return {matrix(ids), matrix(weight), matrix(log_mu), matrix(log_q)};
    }
};

/// Tail-bucketed reverse KL of row r and its gradient, in float64; log Z may be another's.
double bucketed(const sparse_rows& s, index_t r, std::vector<double>& dz, double shift = 0) {
    std::vector<double> lp = s.log_p[std::size_t(r)];
    for (double& x : lp) x -= shift;
    std::vector<bool> inside(lp.size(), false);
    double rest = 0, value = 0, sum_c = 0;
    for (index_t j = 0; j < s.k; ++j) inside[std::size_t(s.ids[std::size_t(r * s.k + j)])] = true;
    for (std::size_t v = 0; v < lp.size(); ++v) rest += inside[v] ? 0 : std::exp(lp[v]);
    const double slope_rest = std::log(rest) - double(s.log_tail[std::size_t(r)]);
    value = rest * slope_rest;
    std::vector<double> c(lp.size(), 0.0);
    for (index_t j = 0; j < s.k; ++j) {
        const auto at = std::size_t(r * s.k + j), id = std::size_t(s.ids[at]);
        const double slope = lp[id] - double(s.log_q[at]);
        value += std::exp(lp[id]) * slope;
        c[id] = std::exp(lp[id]) * (slope - slope_rest);
        sum_c += c[id];
    }
    dz.clear();
    for (std::size_t v = 0; v < lp.size(); ++v)
        dz.push_back((c[v] - std::exp(lp[v]) * sum_c) / double(s.temperature) / double(s.rows));
    return value;
}
/// Importance-weighted samples: w = 1/m or the entry's own.
double sampled(const sparse_rows& s, index_t r, bool weighted, std::vector<double>& dz, double shift = 0) {
    std::vector<double> lp = s.log_p[std::size_t(r)], c(lp.size(), 0.0);
    for (double& x : lp) x -= shift;
    double value = 0, sum_c = 0;
    for (index_t j = 0; j < s.k; ++j) {
        const auto at = std::size_t(r * s.k + j), id = std::size_t(s.ids[at]);
        const double w = weighted ? double(s.weight[at]) : 1 / double(s.k);
        const double term = -w * std::exp(lp[id] - double(s.log_mu[at])) * (double(s.log_q[at]) - lp[id]);
        value += term, c[id] += term, sum_c += term;
    }
    dz.clear();
    for (std::size_t v = 0; v < lp.size(); ++v)
        dz.push_back((c[v] - std::exp(lp[v]) * sum_c) / double(s.temperature) / double(s.rows));
    return value;
}

double largest_difference(const float* got, const std::vector<double>& want) {
    double worst = 0;
    for (std::size_t v = 0; v < want.size(); ++v) worst = std::max(worst, std::abs(double(got[v]) - want[v]));
    return worst;
}
double largest(const std::vector<double>& x) {
    double top = 0;
    for (const double v : x) top = std::max(top, std::abs(v));
    return top;
}

const mc plain_weighted{.baseline = baseline::none{}};

/// f(name, call(env), reference(row, dz, shift)) for every cache whose rows have a dense gradient.
template <class Visit>
void dense_gradients(sparse_rows& s, Visit f) {
    static cpu_backend backend;
    f(
        "tail bucket",
        [&s](const env& e) { return evaluate(backend, s.student(), s.support(), tail_bucket{reverse_kl{}}, e); },
        [&s](index_t r, std::vector<double>& dz, double shift) { return bucketed(s, r, dz, shift); });
    f(
        "samples", [&s](const env& e) { return evaluate(backend, s.student(), s.samples(), mc{reverse_kl{}}, e); },
        [&s](index_t r, std::vector<double>& dz, double shift) { return sampled(s, r, false, dz, shift); });
    f(
        "weighted samples",
        [&s](const env& e) { return evaluate(backend, s.student(), s.weighted(), plain_weighted, e); },
        [&s](index_t r, std::vector<double>& dz, double shift) { return sampled(s, r, true, dz, shift); });
}

} // namespace

TEST_CASE("ids in every leaf, some of them the row's top tokens") {
    const std::vector<std::int32_t> ids{4999, 0, 1023, 1024, 2600, 3071, 3072, 4097};
    for (const std::int32_t top : {-1, 0, 2600, 4999, 1500})
        for (const float t : {1.F, 0.7F, 2.F}) {
            sparse_rows s(2, 5000, ids, t, 17);
            if (top >= 0) { // anchors met one after the other, in the support and outside
                s.z[std::size_t(top)] = s.z[std::size_t(5000 + top)] = 14 * t;
                s.z[1024] = 11 * t, s.z[700] = 10.5F * t;
                s.settle();
            }
            dense_gradients(s, [&](const char* name, auto call, auto reference) {
                INFO(name << ", top " << top << ", T " << t);
                std::vector<float> losses(2);
                std::vector<lse_type> lse(2);
                env e;
                e.losses = losses, e.lse = lse;
                const result got = call(e);
                double total = 0, mass = 0;
                for (index_t r = 0; r < 2; ++r) {
                    std::vector<double> want;
                    const double value = reference(r, want, 0.0);
                    total += value / 2;
                    CHECK(double(losses[std::size_t(r)]) == doctest::Approx(value).epsilon(2e-6));
                    CHECK(double(lse[std::size_t(r)]) == doctest::Approx(s.lse[std::size_t(r)]).epsilon(2e-7));
                    CHECK(largest_difference(s.dz.data() + r * 5000, want) <= 2e-6 * largest(want) + 1e-10);
                    for (const auto id : ids) mass += std::exp(s.log_p[std::size_t(r)][std::size_t(id)]) / 2;
                }
                CHECK(got.loss == doctest::Approx(total).epsilon(2e-6));
                if (got.diagnostics.support_rows > 0)
                    CHECK(got.diagnostics.student_mass() == doctest::Approx(mass).epsilon(1e-6));
            });
        }
}

TEST_CASE("beta in full leaves: the old gradient stays under the new one, also on the ids") {
    for (const index_t vocab : {1024, 2500})
        for (const float beta : {1.F, -0.5F}) {
            sparse_rows s(1, vocab, {0, 5, 1023, std::int32_t(vocab - 1 - (vocab == 1024))}, 1.F, 3);
            dense_gradients(s, [&](const char* name, auto call, auto reference) {
                INFO(name << ", V " << vocab << ", beta " << beta);
                numbers u(4);
                std::vector<double> want;
                reference(0, want, 0.0);
                for (std::size_t v = 0; v < s.dz.size(); ++v) {
                    s.dz[v] = float(u.normal());
                    want[v] += double(beta) * double(s.dz[v]);
                }
                call(env{.beta = beta});
                CHECK(largest_difference(s.dz.data(), want) <= 1e-6);
            });
        }
}

TEST_CASE("log-sum-exp: what a call returns another may be given; it is used; a NaN makes the row bad") {
    for (const float t : {1.F, 0.7F, 2.F}) {
        sparse_rows s(2, 1500, {3, 900, 1400, 7}, t, 5);
        for (float& x : s.z) x += 5;
        s.settle();
        dense_gradients(s, [&](const char* name, auto call, auto reference) {
            INFO(name << ", T " << t);
            std::vector<lse_type> lse(2), again(2);
            env e;
            e.lse = lse;
            const double plain = call(e).loss;
            const std::vector<float> dz = s.dz;
            e.lse = again, e.given_lse = lse;
            CHECK(call(e).loss == doctest::Approx(plain).epsilon(3e-6));
            double worst = 0;
            for (std::size_t v = 0; v < dz.size(); ++v) worst = std::max(worst, double(std::abs(dz[v] - s.dz[v])));
            CHECK(worst <= 3e-6);
            for (std::size_t r = 0; r < 2; ++r)
                CHECK(double(again[r]) == doctest::Approx(double(lse[r])).epsilon(1e-6));
            // another log Z: every log p is that much lower
            for (lse_type& l : lse) l += lse_type(0.5);
            const double moved = call(e).loss;
            if (std::string(name) != "tail bucket") { // whose rest stays what was summed
                double want = 0;
                std::vector<double> gradient;
                for (index_t r = 0; r < 2; ++r) {
                    want += reference(r, gradient, 0.5) / 2;
                    CHECK(largest_difference(s.dz.data() + r * 1500, gradient) <= 3e-6 * largest(gradient));
                }
                CHECK(moved == doctest::Approx(want).epsilon(3e-6));
            }
            CHECK(std::abs(moved - plain) > 1e-2 * std::abs(plain));
            lse[1] = lse_type(nan_f);
            const result bad = call(e);
            CHECK(bad.diagnostics.bad_rows == 1);
            CHECK(bad.diagnostics.first_bad_row == 1);
            CHECK(std::all_of(s.dz.begin() + 1500, s.dz.end(), [](float g) { return g == 0; }));
        });
    }
}

TEST_CASE("log-sum-exp given to a dense row that is floored, and one that has two sweeps") {
    cpu_backend backend;
    naive_backend slow;
    for (const float t : {1.F, 0.7F}) {
        buffers<float> b({.rows = 2, .vocab = 1500, .temperature_p = t, .temperature_q = t, .seed = 6});
        b.y[3] = minus_inf; // reverse KL: infinite, floored
        const auto check = [&](const char* name, auto d) {
            INFO(name << ", T " << t);
            std::vector<lse_type> lse(2);
            env e;
            e.lse = lse;
            const double plain = evaluate(backend, b.student(), b.teacher(), d, e).loss;
            const std::vector<float> dz = b.dz;
            e.lse = {}, e.given_lse = lse;
            CHECK(evaluate(backend, b.student(), b.teacher(), d, e).loss == doctest::Approx(plain).epsilon(1e-6));
            double worst = 0;
            for (std::size_t v = 0; v < dz.size(); ++v) worst = std::max(worst, double(std::abs(dz[v] - b.dz[v])));
            CHECK(worst <= 1e-6);
            // another log Z: every log p is that much lower; a gradient, which rests on Σ p = 1, is then nobody's
            for (lse_type& l : lse) l += lse_type(0.5);
            std::vector<float> losses(2), losses_slow(2);
            e.losses = losses;
            evaluate(backend, b.student(), b.teacher(), d, e);
            e.losses = losses_slow;
            auto ref = b.as<double, double, float>();
            evaluate(slow, ref.student(), ref.teacher(), d, e);
            CHECK(losses[0] == doctest::Approx(losses_slow[0]).epsilon(3e-6));
            CHECK(std::abs(2 * plain - double(losses[0]) - double(losses[1])) > 1e-2);
        };
        check("reverse KL", reverse_kl{});
        check("JSD(.3,.3)", jsd{.w = .3, .o = .3});
    }
}

TEST_CASE("caches and gradients with padded rows are read and written by their strides") {
    cpu_backend backend;
    const index_t n = 3, vocab = 40, k = 4, far = 9;
    sparse_rows s(n, vocab, {3, 17, 0, 39}, 1.F, 8);
    const auto spaced = [&]<class T>(const std::vector<T>& packed, T other) {
        std::vector<T> out(std::size_t(n * far), other);
        for (index_t r = 0; r < n; ++r) std::copy_n(packed.begin() + r * k, k, out.begin() + r * far);
        return out;
    };
    const auto ids = spaced(s.ids, -7);
    const auto log_q = spaced(s.log_q, nan_f), log_mu = spaced(s.log_mu, nan_f), weight = spaced(s.weight, nan_f);
    const std::vector<std::uint8_t> certain{1, 0, 1, 0, 0, 1, 1, 0, 0, 0, 1, 1};
    const auto exact = spaced(certain, std::uint8_t{1});
    const auto wide = [&]<class T>(const std::vector<T>& x) { return matrix_view<const T>{x.data(), n, k, far}; };
    const teacher::support<std::int32_t> support{wide(ids), wide(log_q), s.log_tail};
    const teacher::samples<std::int32_t> samples{wide(ids), wide(log_mu), wide(log_q)};
    const teacher::weighted<std::int32_t> weighted{wide(ids), wide(weight), wide(log_mu), wide(log_q), wide(exact)};
    teacher::weighted<std::int32_t> packed_weighted = s.weighted();
    packed_weighted.exact = view(certain.data(), n, k);

    const index_t stride = vocab + 6;
    for (const auto policy : {padding::keep, padding::zero}) {
        const auto check = [&](const char* name, const auto& packed, const auto& padded, const auto& estimator) {
            INFO(std::string(name));
            CAPTURE(int(policy));
            const double want = evaluate(backend, s.student(), packed, estimator).loss;
            std::vector<float> dz(std::size_t(n * stride), 777.F);
            student::logits<float> out = s.student();
            out.dz = padded_view(dz.data(), n, vocab, stride), out.pad = policy;
            CHECK(evaluate(backend, out, padded, estimator).loss == want);
            for (index_t r = 0; r < n; ++r) {
                CHECK(std::memcmp(dz.data() + r * stride, s.dz.data() + r * vocab, sizeof(float) * vocab) == 0);
                for (index_t v = vocab; v < stride; ++v)
                    CHECK(dz[std::size_t(r * stride + v)] == (policy == padding::zero ? 0 : 777));
            }
            const std::vector<int> one{1, 0, 1}; // a masked row's padding likewise
            std::fill(dz.begin(), dz.end(), 777.F);
            env e;
            e.mask = row_mask<>(one);
            evaluate(backend, out, padded, estimator, e);
            CHECK(dz[std::size_t(stride + vocab)] == (policy == padding::zero ? 0 : 777));
            CHECK(dz[std::size_t(stride)] == 0);
        };
        check("tail bucket", s.support(), support, tail_bucket{reverse_kl{}});
        check("renormalised", s.support(), support, renormalised{reverse_kl{}});
        check("samples", s.samples(), samples, mc{reverse_kl{}});
        check("weighted", packed_weighted, weighted, mc{reverse_kl{}});

        std::vector<float> narrow(std::size_t(n * k)), sparse(std::size_t(n * far), 777.F);
        const matrix_view<const float> z = s.student().z;
        const student::on_support<float> a{z, view(narrow.data(), n, k)};
        student::on_support<float> b{z, padded_view(sparse.data(), n, k, far)};
        b.pad = policy;
        CHECK(evaluate(backend, a, s.support(), renormalised{reverse_kl{}}).loss ==
              evaluate(backend, b, support, renormalised{reverse_kl{}}).loss);
        for (index_t r = 0; r < n; ++r) {
            CHECK(std::memcmp(sparse.data() + r * far, narrow.data() + r * k, sizeof(float) * k) == 0);
            for (index_t j = k; j < far; ++j)
                CHECK(sparse[std::size_t(r * far + j)] == (policy == padding::zero ? 0 : 777));
        }
    }
}

namespace {
/// One field of what a surrogate sees, as loss; c = 1.
struct reads {
    double token_in::*field = &token_in::log_p;
    token_out operator()(const token_in& x) const { return {x.*field, 1}; }
};
} // namespace

TEST_CASE("a surrogate sees every field of its token") {
    cpu_backend backend;
    sparse_rows s(2, 30, {4, 20}, 1.F, 9);
    const std::vector<float> prox{-0.5F, -0.75F, -1.F, -1.25F}, ref{-2.F, -2.25F, -2.5F, -2.75F};
    const std::vector<std::int32_t> versions{3, 9};
    std::vector<float> losses(2);
    env e;
    e.losses = losses, e.versions = versions, e.version = 7;
    const auto check = [&](auto cache, auto estimator, std::vector<float> w) {
        const auto seen = [&](double token_in::*field, index_t r) {
            estimator.surrogate.field = field;
            evaluate(backend, s.student(), cache, estimator, e);
            return double(losses[std::size_t(r)]);
        };
        const auto mean = [&](const std::vector<float>& x, std::size_t r) {
            return double(w[2 * r] * x[2 * r] + w[2 * r + 1] * x[2 * r + 1]);
        };
        for (std::size_t r = 0; r < 2; ++r) {
            std::vector<float> lp, ratio;
            for (std::size_t i = 0; i < 4; ++i) {
                lp.push_back(float(s.log_p[i / 2][std::size_t(s.ids[i])]));
                ratio.push_back(lp.back() - s.log_mu[i]);
            }
            const auto row = index_t(r);
            CHECK(seen(&token_in::log_p, row) == doctest::Approx(mean(lp, r)).epsilon(1e-6));
            CHECK(seen(&token_in::log_mu, row) == doctest::Approx(mean(s.log_mu, r)).epsilon(1e-6));
            CHECK(seen(&token_in::log_q, row) == doctest::Approx(mean(s.log_q, r)).epsilon(1e-6));
            CHECK(seen(&token_in::log_ratio, row) == doctest::Approx(mean(ratio, r)).epsilon(1e-5));
            CHECK(seen(&token_in::log_prox, row) == doctest::Approx(mean(prox, r)).epsilon(1e-6));
            CHECK(seen(&token_in::log_ref, row) == doctest::Approx(mean(ref, r)).epsilon(1e-6));
            CHECK(seen(&token_in::age, row) ==
                  doctest::Approx((7 - versions[r]) * double(w[2 * r] + w[2 * r + 1])).epsilon(1e-6));
            cache.log_prox = cache.log_ref = {}; // without: the behaviour policy
            CHECK(seen(&token_in::log_prox, row) == doctest::Approx(mean(s.log_mu, r)).epsilon(1e-6));
            CHECK(seen(&token_in::log_ref, row) == doctest::Approx(mean(s.log_mu, r)).epsilon(1e-6));
            e.versions = {};
            CHECK(seen(&token_in::age, row) == 0);
            e.versions = versions, cache.log_prox = s.matrix(prox), cache.log_ref = s.matrix(ref);
        }
    };
    auto samples = s.samples();
    samples.log_prox = s.matrix(prox), samples.log_ref = s.matrix(ref);
    check(samples, mc{reverse_kl{}, reads{}}, std::vector<float>(4, 0.5F));
    auto weighted = s.weighted();
    weighted.log_prox = s.matrix(prox), weighted.log_ref = s.matrix(ref);
    check(weighted, mc{reverse_kl{}, reads{}, baseline::none{}}, s.weight);
}

TEST_CASE("at unchanged weights every ratio is exactly 1, whatever type the cache holds") {
    cpu_backend backend;
    const auto check = [&](const char* name, auto example) {
        using L = decltype(example);
        INFO(std::string(name));
        sparse_rows s(40, 300, {1, 50, 77, 120, 299, 50}, 0.7F, 10);
        std::vector<L> log_mu(s.ids.size()), log_q(s.ids.size());
        const auto row_of = [&](std::vector<L>& x) { return view(x.data(), s.rows, s.k); };
        token_logp(backend, s.student().z, s.matrix(s.ids), row_of(log_mu), s.temperature);
        for (std::size_t i = 0; i < log_q.size(); ++i) log_q[i] = element<L>::store(arithmetic_t<L>(s.log_q[i]));
        const teacher::samples<std::int32_t, L> t{s.matrix(s.ids), row_of(log_mu), row_of(log_q)};
        const diagnostics d = evaluate(backend, s.student(), t, mc{reverse_kl{}}).diagnostics;
        CHECK(d.tokens == 240);
        CHECK(d.ratio_sum == 240);
        CHECK(d.ratio_max == 1);
        CHECK(d.k1_sum == 0);
        CHECK(d.k2_sum == 0);
        CHECK_FALSE(d.mu_mismatch());
    };
    check("bfloat16", bfloat16{});
    check("half", half{});
    check("float", float{});
    check("double", double{});
}

TEST_CASE("a log-sum-exp that is given, far above the logits: nothing depends on what lay in the arena") {
    const float z[] = {-9, -10}, log_q[] = {-0.1F};
    const std::int32_t ids[] = {0};
    const double lse[] = {5}, q = std::exp(double(log_q[0])), rest = 1 - q;
    std::vector<std::byte> arena(1 << 16);
    for (const unsigned char was : {0x00, 0xff}) {
        std::fill(arena.begin(), arena.end(), std::byte(was));
        cpu_backend backend{.arena = arena};
        float dz[2];
        double again[1];
        const auto row = [&](index_t vocab, float t) {
            return evaluate(backend, student::logits{view(z, 1, vocab), view(dz, 1, vocab), t},
                            teacher::support<std::int32_t>{view(ids, 1, 1), view(log_q, 1, 1)},
                            tail_bucket{forward_kl{}},
                            {.lse = vector_view(again, 1), .given_lse = vector_view<const double>(lse, 1)});
        };
        for (const float t : {0.02F, 0.01F}) { // of these e^(lse - z*/T) is beyond double at 0.01
            const double far = 9 / double(t) + 5, farther = 10 / double(t) + 5;
            CHECK(double(row(1, t).loss) == doctest::Approx(q * (double(log_q[0]) + far)).epsilon(1e-5));
            const result r = row(2, t);
            CHECK(double(r.loss) ==
                  doctest::Approx(q * (double(log_q[0]) + far) + rest * (std::log(rest) + farther)).epsilon(1e-5));
            CHECK(r.diagnostics.infinite_rows == 0);
            CHECK(again[0] == 5);
        }
    }
}

TEST_CASE("floors by hand: raised on every entry of the row, not on the infinite one alone") {
    cpu_backend backend;
    const float z[] = {0, 0, 0, 0}, y[] = {0, -40, -5, minus_inf};
    float dz[4];
    const double log_q0 = -std::log(1 + std::exp(-40.0) + std::exp(-5.0)), lp = std::log(0.25);
    const auto dense = [&](infinite policy) {
        return evaluate(backend, student::logits{view(z, 1, 4), view(dz, 1, 4)}, teacher::dense{view(y, 1, 4)},
                        reverse_kl{}, {.on_infinite = policy})
            .loss;
    };
    CHECK(dense(infinite::floor(-30)) == doctest::Approx(lp - (log_q0 + (log_q0 - 5) - 60) / 4).epsilon(1e-6));
    CHECK(dense(infinite::floor(-60)) ==
          doctest::Approx(lp - (log_q0 + (log_q0 - 5) + (log_q0 - 40) - 60) / 4).epsilon(1e-6));
    CHECK(dense(infinite::floor(-3)) == doctest::Approx(lp - (log_q0 - 9) / 4).epsilon(1e-6));
    CHECK(dz[1] == doctest::Approx(dz[3])); // the gradient is the floored value's

    const std::int32_t ids[] = {0, 1, 3};
    const float log_q[] = {-0.1F, -40, minus_inf}, log_mu[] = {-1, -1, -1}, tail = std::log(0.05F);
    const auto samples = [&](infinite policy) {
        return evaluate(backend, student::logits{view(z, 1, 4)},
                        teacher::samples<std::int32_t>{view(ids, 1, 3), view(log_mu, 1, 3), view(log_q, 1, 3)},
                        mc{reverse_kl{}}, {.on_infinite = policy})
            .loss;
    };
    const double lp_f = double(float(lp)), rho = std::exp(lp_f + 1);
    CHECK(samples(infinite::floor(-30)) == doctest::Approx(-rho * ((-0.1 - 60) / 3 - lp_f)).epsilon(1e-6));
    CHECK(samples(infinite::floor(-50)) == doctest::Approx(-rho * ((-0.1 - 90) / 3 - lp_f)).epsilon(1e-6));
    const auto bucket = [&](infinite policy) {
        return evaluate(backend, student::logits{view(z, 1, 4), view(dz, 1, 4)},
                        teacher::support<std::int32_t>{view(ids, 1, 3), view(log_q, 1, 3), vector_view(&tail, 1)},
                        tail_bucket{reverse_kl{}}, {.on_infinite = policy})
            .loss;
    };
    CHECK(bucket(infinite::floor(-30)) == doctest::Approx(lp - (-0.1 - 60 + std::log(0.05)) / 4).epsilon(1e-6));
    CHECK(bucket(infinite::floor(-2)) == doctest::Approx(lp - (-0.1 - 6) / 4).epsilon(1e-6)); // the rest as well
    const float low_p[] = {0, -40, 0, minus_inf}, even[] = {-1.5F, -1.5F, -1.5F};
    const float rest = std::log(1 - 3 * std::exp(-1.5F));
    const double forward =
        evaluate(backend, student::logits{view(low_p, 1, 4), view(dz, 1, 4)},
                 teacher::support<std::int32_t>{view(ids, 1, 3), view(even, 1, 3), vector_view(&rest, 1)},
                 tail_bucket{forward_kl{}})
            .loss;
    const double q = std::exp(-1.5), q_rest = double(std::exp(rest)), half_p = std::log(0.5);
    CHECK(forward == doctest::Approx(q * (-4.5 - half_p + 60) + q_rest * (double(rest) - half_p)).epsilon(1e-6));
}

TEST_CASE("a clipped advantage is cut on both sides, and its loss is its divergence's") {
    cpu_backend backend;
    const float z[] = {0, 0};
    const std::int32_t ids[] = {0, 1};
    const float log_mu[] = {-1, -1}, log_q[] = {-0.1F, -3};
    const double lp = double(float(std::log(0.5))), rho = std::exp(lp + 1), a = -0.1 - lp, b = -3 - lp;
    float dz[2];
    const auto gradient = [&](double clip) { // of logit 0: c_0 - p_0 (c_0 + c_1), p_0 = ½
        const auto r = evaluate(backend, student::logits{view(z, 1, 2), view(dz, 1, 2)},
                                teacher::samples<std::int32_t>{view(ids, 1, 2), view(log_mu, 1, 2), view(log_q, 1, 2)},
                                mc{shape::clipped{clip}, unclipped_is{}, baseline::none{}});
        CHECK(r.loss ==
              doctest::Approx(rho * (shape::clipped{clip}.value(a) + shape::clipped{clip}.value(b)) / 2).epsilon(1e-6));
        return double(dz[0]);
    };
    CHECK(gradient(100) == doctest::Approx(-rho * (a - b) / 4).epsilon(1e-6));
    CHECK(gradient(1) == doctest::Approx(-rho * (a + 1) / 4).epsilon(1e-6));
    CHECK(gradient(0.25) == doctest::Approx(-rho * 0.5 / 4).epsilon(1e-6));
}

TEST_CASE("diagnostics of weighted entries carry the design's weights; a positive log mu makes the row bad") {
    cpu_backend backend;
    sparse_rows s(1, 20, {3, 8, 11}, 1.F, 12);
    auto cache = s.weighted();
    const diagnostics d = evaluate(backend, s.student(), cache, plain_weighted).diagnostics;
    double sum = 0, square = 0, k1 = 0;
    for (std::size_t j = 0; j < 3; ++j) {
        const double l = double(float(s.log_p[0][std::size_t(s.ids[j])])) - double(s.log_mu[j]),
                     w = 3 * double(s.weight[j]);
        sum += w * std::exp(l), square += w * std::exp(2 * l), k1 -= w * l;
    }
    CHECK(d.tokens == 3);
    CHECK(d.ratio_sum == doctest::Approx(sum).epsilon(1e-6));
    CHECK(d.ratio_square_sum == doctest::Approx(square).epsilon(1e-6));
    CHECK(d.k1_sum == doctest::Approx(k1).epsilon(1e-5));
    for (const float spoilt : {0.5F, 0.01F}) {
        s.log_mu[1] = spoilt;
        CHECK(evaluate(backend, s.student(), cache, plain_weighted).diagnostics.bad_rows == 1);
        CHECK(evaluate(backend, s.student(), s.samples(), mc{reverse_kl{}}).diagnostics.bad_rows == 1);
    }
}

TEST_CASE("the floor of a teacher's tail is k eps of the cache's type, by hand") {
    cpu_backend backend;
    const float z[] = {0, 0, 0, 0, 0};
    const auto check = [&](auto example, double eps) {
        using L = decltype(example);
        const std::int32_t ids[] = {0, 2, 4, 1};
        std::vector<L> log_q(4, element<L>::store(arithmetic_t<L>(-1.375))); // Z_q > 1 by 1 %
        const result r = evaluate(backend, student::logits{view(z, 1, 5)},
                                  teacher::support<std::int32_t, L>{view(ids, 1, 4), view(log_q.data(), 1, 4)},
                                  tail_bucket{reverse_kl{}});
        const double lp = std::log(0.2);
        CHECK(r.diagnostics.tail_floored == 1);
        CHECK(r.loss == doctest::Approx(0.8 * (lp + 1.375) + 0.2 * (lp - std::log(4 * eps))).epsilon(1e-6));
    };
    check(float{}, 0x1p-23);
    check(double{}, 0x1p-52);
    check(bfloat16{}, 0x1p-7);
    check(half{}, 0x1p-10);
}

TEST_CASE("token_logp and log_sum_exp: values, masks, bad rows and ids") {
    cpu_backend backend{.threads = 2};
    const index_t n = 5, vocab = 2100, m = 3;
    const float untouched = 777;
    for (const float t : {1.F, 1.5F, 0.4F}) {
        sparse_rows s(n, vocab, {0, 2099, 1024}, t, 13);
        std::vector<std::int64_t> ids(s.ids.begin(), s.ids.end());
        s.z[0] = minus_inf;                          // row 0: a token without mass
        s.z[std::size_t(2 * vocab + 7)] = nan_f;     // row 2
        ids[1 * m + 1] = vocab, ids[4 * m + 2] = -2; // rows 1 and 4
        s.settle();
        const std::vector<int> mask{1, 1, 1, 0, 1};
        std::vector<float> out(std::size_t(n * m), untouched);
        std::vector<lse_type> lse(std::size_t(n), untouched);
        const result r = token_logp(backend, s.student().z, view(std::as_const(ids).data(), n, m),
                                    view(out.data(), n, m), t, row_mask<>(mask), vector_view<lse_type>(lse));
        CHECK(r.diagnostics.rows == 5);
        CHECK(r.diagnostics.kept == 4);
        CHECK(r.diagnostics.bad_rows == 3);
        CHECK(r.diagnostics.first_bad_row == 1);
        for (index_t row = 0; row < n; ++row) {
            CAPTURE(row);
            if (row == 3) CHECK(lse[3] == untouched);
            if (row != 3 && row != 2)
                CHECK(double(lse[std::size_t(row)]) == doctest::Approx(s.lse[std::size_t(row)]).epsilon(2e-7));
            for (index_t j = 0; j < m; ++j) {
                const float got = out[std::size_t(row * m + j)];
                const auto id = ids[std::size_t(row * m + j)];
                if (row == 3)
                    CHECK(got == untouched);
                else if (row == 2 || id < 0 || id >= vocab || (row == 0 && id == 0))
                    CHECK(got == minus_inf);
                else
                    CHECK(double(got) == doctest::Approx(s.log_p[std::size_t(row)][std::size_t(id)]).epsilon(2e-7));
            }
        }
        std::vector<lse_type> alone(std::size_t(n), untouched);
        CHECK(log_sum_exp(backend, s.student().z, vector_view<lse_type>(alone), t).diagnostics.bad_rows == 1);
        CHECK(double(alone[3]) == doctest::Approx(s.lse[3]).epsilon(2e-7));
        for (const std::size_t row : {0UL, 1UL, 4UL}) CHECK(alone[row] == lse[row]);
    }
}

TEST_CASE("token_logp refuses lengths, nulls and overlaps") {
    cpu_backend backend;
    std::vector<float> z(60), out(12);
    std::vector<std::int32_t> ids(12);
    std::vector<lse_type> lse(3);
    const std::vector<int> two{1, 1};
    const auto zv = view(std::as_const(z).data(), 3, 20);
    const auto iv = view(std::as_const(ids).data(), 3, 4);
    const auto ov = view(out.data(), 3, 4);
    const auto refused = [&](const char* text, auto call) {
        INFO(text);
        CHECK_THROWS_WITH_AS(call(), doctest::Contains(text), invalid_input);
    };
    token_logp(backend, zv, iv, ov, 1, {}, vector_view<lse_type>(lse));
    refused("mask: has 2 entries for 3 rows", [&] { token_logp(backend, zv, iv, ov, 1, row_mask<>(two)); });
    refused("lse: has 2 entries for 3 rows",
            [&] { token_logp(backend, zv, iv, ov, 1, {}, vector_view<lse_type>(lse.data(), 2)); });
    refused("ids: has shape (2,4)", [&] { token_logp(backend, zv, view(std::as_const(ids).data(), 2, 4), ov); });
    refused("log_p: has shape (3,3)", [&] { token_logp(backend, zv, iv, view(out.data(), 3, 3)); });
    refused("z: is a null pointer",
            [&] { token_logp(backend, view(static_cast<const float*>(nullptr), 3, 20), iv, ov); });
    refused("z: has no columns", [&] { token_logp(backend, view(z.data(), 3, 0), iv, ov); });
    refused("log_p: has a row stride of 3",
            [&] { token_logp(backend, zv, iv, matrix_view<float>(out.data(), 3, 4, 3)); });
    refused("overlaps", [&] { token_logp(backend, zv, iv, view(z.data() + 48, 3, 4)); });
    refused("overlaps", [&] { token_logp(backend, zv, iv, view(reinterpret_cast<float*>(ids.data()), 3, 4)); });
    for (const float t : {0.F, -1.F, nan_f, std::bit_cast<float>(0x7f800000u)})
        refused("temperature", [&] { token_logp(backend, zv, iv, ov, t); });
}
