// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// optimise: no
//
// The log-sum-exp as a double, returned by one call and given to another, for every kind of cache and at offsets of the
// logits up to 1e4: nothing is lost to its rounding. At unchanged weights every ratio is exactly 1, whether the second
// call sweeps the row or is given its log-sum-exp; gradients are the long-double ones of the logits as they are stored.
#include "support/compiled/dense.hpp"
#include "support/compiled/sampled.hpp"
#include "support/compiled/support.hpp"
#include "support/generators.hpp"
#include "support/textbook.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <doctest/doctest.h>
#include <string>
#include <vector>

#include <opd/backends/cpu.hpp>
#include <opd/estimators/divergences.hpp>
#include <opd/estimators/sampled.hpp>
#include <opd/estimators/support.hpp>

using namespace opd;
using namespace opd::test;
using textbook::real;

namespace {

template <class T>
T as(double x) {
    return element<T>::store(static_cast<arithmetic_t<T>>(x));
}

template <class Z, class L>
struct offset_rows {
    static constexpr index_t rows = 2, vocab = 2500, m = 5;
    float temperature;
    std::vector<Z> z, y, dz;
    std::vector<std::int32_t> ids;
    std::vector<L> log_mu, log_q, log_tail;
    std::vector<arithmetic_t<L>> weight;
    std::vector<double> lse;

    offset_rows(double offset, float t) : temperature(t) {
        numbers u(5);
        for (index_t r = 0; r < rows; ++r) {
            for (index_t v = 0; v < vocab; ++v) {
                z.push_back(as<Z>(offset + 2 * u.normal()));
                y.push_back(as<Z>(2 * u.normal()));
            }
            for (index_t j = 0; j < m; ++j) {
                ids.push_back(std::int32_t(u.below(vocab / m) + j * (vocab / m)));
                log_q.push_back(as<L>(-2 - u.uniform()));
                weight.push_back(arithmetic_t<L>(0.25));
            }
            log_tail.push_back(as<L>(-1));
        }
        dz.resize(z.size());
        lse.resize(rows);
        log_mu.resize(rows * m);
    }
    auto id_view() const { return view(ids.data(), rows, m); }
    template <class T>
    static auto of(const std::vector<T>& x) {
        return view(x.data(), rows, m);
    }
    student::logits<Z> student() {
        return {view(std::as_const(z).data(), rows, vocab), view(dz.data(), rows, vocab), temperature};
    }
    teacher::support<std::int32_t, L> support() const { return {id_view(), of(log_q), log_tail}; }
    teacher::samples<std::int32_t, L> samples() const { return {id_view(), of(log_mu), of(log_q)}; }
    teacher::dense<Z> dense() const { return {view(std::as_const(y).data(), rows, vocab)}; }
};

/// dz of c on the ids, in long double.
template <class Z, class L, class C>
std::vector<real> pulled_back(const offset_rows<Z, L>& o, index_t r, C c_of) {
    const textbook::row t =
        textbook::make_row(o.z.data() + r * o.vocab, o.y.data() + r * o.vocab, o.vocab, double(o.temperature), 1);
    std::vector<real> c(std::size_t(o.vocab), 0), out;
    real sum = 0;
    for (index_t j = 0; j < o.m; ++j) {
        const auto id = std::size_t(o.ids[std::size_t(r * o.m + j)]);
        c[id] = c_of(j, t.log_p[id]);
        sum += c[id];
    }
    for (std::size_t v = 0; v < c.size(); ++v) out.push_back((c[v] - std::exp(t.log_p[v]) * sum) / real(o.temperature));
    return out;
}

template <class Z, class L>
void check_offsets(const char* type) {
    cpu_backend backend;
    for (const double offset : {0.0, 100.0, 1e4, -1e4})
        for (const float temperature : {1.F, 0.7F}) {
            INFO(std::string(type) << ", offset " << offset << ", T " << temperature);
            offset_rows<Z, L> o(offset, temperature);
            const auto z = view(std::as_const(o.z).data(), o.rows, o.vocab);
            token_logp(backend, z, o.id_view(), view(o.log_mu.data(), o.rows, o.m), temperature, {},
                       vector_view<double>(o.lse));
            for (const bool given : {false, true}) {
                CAPTURE(given);
                env e{.reduction = reduce::sum};
                if (given) e.given_lse = o.lse;
                std::vector<double> returned(o.rows);
                e.lse = returned;
                const result r = evaluate(backend, o.student(), o.samples(), mc{reverse_kl{}}, e);
                CHECK(returned == o.lse);
                CHECK(r.diagnostics.bad_rows == 0);
                CHECK(r.diagnostics.ratio_max == 1); // and so is every other
                CHECK(r.diagnostics.ratio_sum == double(r.diagnostics.tokens));
                CHECK(r.diagnostics.ratio_square_sum == double(r.diagnostics.tokens));
                for (index_t row = 0; row < o.rows; ++row) {
                    // rho is 1 and A = log q - log p with log p as the cache's type holds it
                    const auto want = pulled_back(o, row, [&](index_t j, real) {
                        const auto at = std::size_t(row * o.m + j);
                        return -real(double(element<L>::load(o.log_q[at])) - double(element<L>::load(o.log_mu[at]))) /
                               o.m;
                    });
                    real top = 0, worst = 0;
                    for (std::size_t v = 0; v < want.size(); ++v) {
                        const real got = real(element<Z>::load(o.dz[std::size_t(row * o.vocab) + v]));
                        top = std::max(top, std::abs(want[v])), worst = std::max(worst, std::abs(got - want[v]));
                    }
                    CHECK(double(worst / top) <= 1e-6);
                }
            }
            // the other caches: what a call returns, another may be given
            const auto same = [&](const auto& t, const auto& estimator) {
                std::vector<double> returned(o.rows), again(o.rows);
                env e{.reduction = reduce::sum, .lse = returned};
                const double swept = evaluate(backend, o.student(), t, estimator, e).loss;
                const std::vector<Z> first = o.dz;
                e.lse = again, e.given_lse = returned;
                const double loss = evaluate(backend, o.student(), t, estimator, e).loss;
                CHECK(again == returned);
                CHECK(std::abs(loss - swept) <= 1e-10 * (1 + std::abs(swept)));
                double top = 0, worst = 0;
                for (std::size_t i = 0; i < first.size(); ++i) {
                    const double a = double(element<Z>::load(first[i])), b = double(element<Z>::load(o.dz[i]));
                    top = std::max(top, std::abs(a)), worst = std::max(worst, std::abs(a - b));
                }
                CHECK(worst <= (sizeof(Z) == 8 ? 1e-10 : 2e-7) * top);
                for (index_t r = 0; r < o.rows; ++r) { // float lanes sum to 2e-7, at any offset
                    real sum = 0;
                    for (index_t v = 0; v < o.vocab; ++v)
                        sum += std::exp((real(element<Z>::load(o.z[std::size_t(r * o.vocab + v)])) - real(offset)) /
                                        real(temperature));
                    const real want = std::log(sum) + real(offset) / real(temperature);
                    CHECK(double(std::abs(real(returned[std::size_t(r)]) - want)) <= (sizeof(Z) == 8 ? 1e-11 : 2e-7));
                }
            };
            const teacher::weighted<std::int32_t, L> weighted{o.id_view(), o.of(o.weight), o.of(o.log_mu),
                                                              o.of(o.log_q)};
            same(weighted, mc{reverse_kl{}});
            same(o.support(), tail_bucket{reverse_kl{}});
            same(o.support(), tail_bucket{forward_kl{}});
            same(o.dense(), reverse_kl{});
        }
}

} // namespace

TEST_CASE("float logits, float cache") { check_offsets<float, float>("float"); }
TEST_CASE("double logits, double cache") { check_offsets<double, double>("double"); }
TEST_CASE("float logits, bfloat16 cache") { check_offsets<float, bfloat16>("bfloat16 cache"); }
