// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Sums over a support alone: the generalised divergences and the biased ones, against their textbook sums and central
// differences, on both engines; that the former are divergences on the support and the latter are not; reweighting;
// what is refused.
#include "backends/both_engines.hpp"
#include "support/generators.hpp"
#include "support/property.hpp"
#include "support/textbook.hpp"
#include "support/traits.hpp"

#include <cmath>
#include <cstdint>
#include <doctest/doctest.h>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include <opd/estimators/support.hpp>

using namespace opd;
using namespace opd::test;
using textbook::real;
using textbook::reals;

namespace {

/// One row of V logits, a teacher, a stale student, and k distinct ids in random order.
struct supported {
    index_t v, k;
    float temperature;
    std::vector<double> z, y, b, log_q, log_mu;
    std::vector<std::int32_t> ids;

    supported(numbers& u, index_t v_, index_t k_) : v(v_), k(k_), temperature(float(0.5 + u.uniform())) {
        for (index_t i = 0; i < v; ++i) {
            z.push_back(2 * u.normal()), y.push_back(2 * u.normal()), b.push_back(z.back() + 0.5 * u.normal());
            ids.push_back(std::int32_t(i));
        }
        for (std::size_t i = ids.size() - 1; i > 0; --i) std::swap(ids[i], ids[std::size_t(u.below(index_t(i) + 1))]);
        ids.resize(std::size_t(k));
        const auto lq = textbook::make_row(y.data(), y.data(), v, 1, 1).log_p;
        const auto lm = textbook::make_row(b.data(), b.data(), v, double(temperature), 1).log_p;
        for (const auto id : ids)
            log_q.push_back(double(lq[std::size_t(id)])), log_mu.push_back(double(lm[std::size_t(id)]));
    }
    teacher::support<std::int32_t, double> cache() const {
        return {view(ids.data(), 1, k),
                view(log_q.data(), 1, k),
                {},
                view(log_mu.data(), 1, k),
                teacher::chosen_by::stale_student};
    }
    reals log_p(const std::vector<double>& at) const {
        return textbook::make_row(at.data(), at.data(), v, double(temperature), 1).log_p;
    }
    /// Central differences of value(log p of the ids, log q of the ids) in the logits.
    template <class Value>
    std::vector<double> differences(Value value) const {
        std::vector<double> g;
        for (std::size_t i = 0; i < z.size(); ++i) {
            const auto at = [&](double h) {
                std::vector<double> moved = z;
                moved[i] += h;
                return value_of(moved, value);
            };
            const real h = 1e-4L;
            g.push_back(double((at(-2e-4) - 8 * at(-1e-4) + 8 * at(1e-4) - at(2e-4)) / (12 * h)));
        }
        return g;
    }
    template <class Value>
    real value_of(const std::vector<double>& at, Value value) const {
        const reals lp = log_p(at);
        real s = 0;
        for (std::size_t j = 0; j < ids.size(); ++j) s += value(lp[std::size_t(ids[j])], real(log_q[j]));
        return s;
    }
};

struct outcome {
    double loss;
    std::vector<double> dz;
    diagnostics seen;
};
template <class Backend, class E>
outcome call(Backend& be, const supported& s, const E& estimator, const env& e = {}) {
    std::vector<double> dz(std::size_t(s.v), 9);
    const result r =
        evaluate(be,
                 student::logits<double>{
                     .z = view(s.z.data(), 1, s.v), .dz = view(dz.data(), 1, s.v), .temperature = s.temperature},
                 s.cache(), estimator, e);
    return {r.loss, dz, r.diagnostics};
}
void near(const std::vector<double>& a, const std::vector<double>& b, double eps) {
    for (std::size_t i = 0; i < a.size(); ++i) RC_ASSERT(std::abs(a[i] - b[i]) < eps * (1 + std::abs(b[i])));
}

} // namespace

TEST_CASE("sums over a support against their textbook and central differences") {
    property("sums", [] {
        numbers u(*rc::gen::arbitrary<std::uint64_t>());
        const index_t v = 2 + u.below(40);
        const supported s(u, v, 1 + u.below(v));
        const auto check = [&](const auto& estimator, auto term) { // of log p and log q
            const auto want = s.differences(term);
            const auto value = double(s.value_of(s.z, term));
            on_both([&](auto& be, const char*) {
                const outcome got = call(be, s, estimator);
                RC_ASSERT(got.seen.bad_rows == 0);
                RC_ASSERT(std::abs(got.loss - value) < 1e-11 * (1 + std::abs(value)));
                near(got.dz, want, 1e-9);
            });
        };
        // q f(r) - q f'(1)(r - 1), f(1) = 0, with f as each divergence's definition gives it
        check(generalised{reverse_kl{}},
              [](real lp, real lq) { return std::exp(lp) * (lp - lq) - std::exp(lp) + std::exp(lq); });
        check(generalised{forward_kl{}},
              [](real lp, real lq) { return std::exp(lq) * (lq - lp) - std::exp(lq) + std::exp(lp); });
        check(generalised{chi_squared{}}, [](real lp, real lq) {
            const real p = std::exp(lp), q = std::exp(lq);
            return (p - q) * (p - q) / q;
        });
        check(generalised{alpha_divergence{.5}}, [](real lp, real lq) {
            const real gap = std::exp(lp / 2) - std::exp(lq / 2);
            return 2 * gap * gap;
        });
        check(generalised{jsd{}}, [](real lp, real lq) {
            const real p = std::exp(lp), q = std::exp(lq), m = (p + q) / 2;
            return (q * std::log(q / m) + p * std::log(p / m)) / 2;
        });
        check(generalised{jsd{.w = .3, .o = .8}}, [](real lp, real lq) {
            const real p = std::exp(lp), q = std::exp(lq), m = .3L * q + .7L * p;
            return .8L * (q * std::log(q / m) - q + m) + .2L * (p * std::log(p / m) - p + m);
        });
        check(truncated_biased{reverse_kl{}}, [](real lp, real lq) { return std::exp(lp) * (lp - lq); });
        check(truncated_biased{forward_kl{}}, [](real lp, real lq) { return std::exp(lq) * (lq - lp); });
    });
}

TEST_CASE("generalised ones are divergences on the support; the truncated ones are not") {
    property("divergence", [] {
        numbers u(*rc::gen::arbitrary<std::uint64_t>());
        const index_t v = 3 + u.below(30);
        supported s(u, v, 2 + u.below(v - 2));
        supported equal = s;
        const reals lp = s.log_p(s.z);
        for (std::size_t j = 0; j < s.ids.size(); ++j) equal.log_q[j] = double(lp[std::size_t(s.ids[j])]);
        cpu_backend be;
        for_each_divergence_type([&](const std::string&, auto d) {
            RC_ASSERT(call(be, s, generalised{d}).loss >= 0);
            const outcome none = call(be, equal, generalised{d});
            RC_ASSERT(std::abs(none.loss) < 1e-13);
            if (!std::is_same_v<decltype(d), total_variation>) // which jumps there
                for (const double g : none.dz) RC_ASSERT(std::abs(g) < 1e-13);
            RC_ASSERT(traits_of<generalised<decltype(d)>>().exact_zero_at_equality);
        });
        const outcome biased = call(be, equal, truncated_biased{reverse_kl{}});
        double largest = 0, inside = 0;
        for (const auto id : s.ids) inside += std::exp(double(lp[std::size_t(id)]));
        for (const double g : biased.dz) largest = std::max(largest, std::abs(g));
        if (inside > 0.01 && inside < 0.99) RC_ASSERT(largest > 1e-5); // it pushes mass out of the support
    });
    // k = 1, p = .9, q = .6 … and the other way round: negative
    cpu_backend be;
    const double z[] = {std::log(.3), std::log(.7)}, log_q = std::log(.6);
    const std::int32_t id = 0;
    const result r = evaluate(be, student::logits<double>{.z = view(z, 1, 2)},
                              teacher::support<std::int32_t, double>{view(&id, 1, 1), view(&log_q, 1, 1)},
                              truncated_biased{reverse_kl{}});
    CHECK(r.loss == doctest::Approx(.3 * std::log(.5)));
}

TEST_CASE("k = V: generalised is the dense divergence") {
    numbers u(4);
    const supported s(u, 30, 30);
    on_both([&](auto& be, const char*) {
        for_each_divergence_type([&](const std::string& name, auto d) {
            INFO(name);
            std::vector<double> dz(30);
            const double loss =
                evaluate(be,
                         student::logits<double>{
                             .z = view(s.z.data(), 1, 30), .dz = view(dz.data(), 1, 30), .temperature = s.temperature},
                         teacher::dense<double>{view(s.y.data(), 1, 30)}, d)
                    .loss;
            const outcome got = call(be, s, generalised{d});
            CHECK(got.loss == doctest::Approx(loss).epsilon(1e-11));
            for (std::size_t i = 0; i < 30; ++i) CHECK(std::abs(got.dz[i] - dz[i]) < 1e-12);
        });
    });
}

TEST_CASE("reweighting by hand; it does not repair a stale support") {
    numbers u(9);
    const supported s(u, 12, 4);
    const reals lp = s.log_p(s.z);
    double zp = 0, zq = 0, loss = 0, sum = 0;
    std::vector<double> c;
    for (std::size_t j = 0; j < 4; ++j) zp += std::exp(double(lp[std::size_t(s.ids[j])])), zq += std::exp(s.log_q[j]);
    for (std::size_t j = 0; j < 4; ++j) {
        const double l = double(lp[std::size_t(s.ids[j])]), share = std::exp(l) / zp;
        c.push_back(std::exp(l - s.log_mu[j]) * share * (std::log(share) - s.log_q[j] + std::log(zq)));
        loss += c.back(), sum += c.back();
    }
    on_both([&](auto& be, const char*) {
        const outcome got = call(be, s, reweighted{});
        CHECK(got.loss == doctest::Approx(loss));
        double total = 0;
        for (const double g : got.dz) total += g;
        CHECK(std::abs(total) < 1e-14);
        for (std::size_t j = 0; j < 4; ++j) {
            const auto id = std::size_t(s.ids[j]);
            const double want = (c[j] - std::exp(double(lp[id])) / zp * sum) / double(s.temperature);
            CHECK(got.dz[id] == doctest::Approx(want));
        }
        std::vector<double> whole(12);
        evaluate(be,
                 student::logits<double>{
                     .z = view(s.z.data(), 1, 12), .dz = view(whole.data(), 1, 12), .temperature = s.temperature},
                 teacher::dense<double>{view(s.y.data(), 1, 12)}, reverse_kl{});
        double off = 0;
        for (std::size_t i = 0; i < 12; ++i) off = std::max(off, std::abs(whole[i] - got.dz[i]));
        CHECK(off > 1e-2);
    });
    cpu_backend be;
    const auto refuses = [&](const char* name, auto cache) {
        CHECK_THROWS_WITH_AS(evaluate(be, student::logits<double>{.z = view(s.z.data(), 1, 12)}, cache, reweighted{}),
                             doctest::Contains(name), invalid_input);
    };
    auto cache = s.cache();
    cache.log_mu = {};
    refuses("teacher.log_mu", cache);
    cache = s.cache(), cache.chosen_by = teacher::chosen_by::teacher;
    refuses("teacher.chosen_by", cache);
}

TEST_CASE("infinite terms follow the policy; no number is not one") {
    const double inf = std::numeric_limits<double>::infinity(), nan = std::numeric_limits<double>::quiet_NaN();
    const double z[] = {0, 1, 2}, log_q[] = {-1, -inf, -2}, dropped[] = {0, -inf, 2}, all_q[] = {-1, -1.5, -2};
    const std::int32_t ids[] = {0, 1, 2};
    on_both([&](auto& be, const char*) {
        const auto run = [&](const auto& estimator, const double* logits, const double* q, infinite policy) {
            env e;
            e.on_infinite = policy;
            return evaluate(be, student::logits<double>{.z = view(logits, 1, 3)},
                            teacher::support<std::int32_t, double>{view(ids, 1, 3), view(q, 1, 3)}, estimator, e);
        };
        const double lse = std::log(1 + std::exp(1.) + std::exp(2.)),
                     p[] = {std::exp(-lse), std::exp(1 - lse), std::exp(2 - lse)};
        const auto floored = run(truncated_biased{reverse_kl{}}, z, log_q, infinite::floor(-30));
        CHECK(floored.diagnostics.infinite_rows == 1);
        CHECK(floored.loss == doctest::Approx(p[0] * (-lse + 1) + p[1] * (1 - lse + 30) + p[2] * (2 - lse + 2)));
        CHECK(run(truncated_biased{reverse_kl{}}, z, log_q, infinite::skip()).loss == 0);
        CHECK(run(generalised{jsd{}}, z, log_q, infinite::skip()).diagnostics.infinite_rows == 0);
        CHECK(run(generalised{total_variation{}}, z, log_q, infinite::skip()).loss > 0);
        CHECK(run(generalised{forward_kl{}}, dropped, all_q, infinite::skip()).diagnostics.infinite_rows == 1);
        CHECK(run(generalised{forward_kl{}}, dropped, all_q, infinite::floor(-30)).loss > std::exp(-1.5) * 28);
        CHECK(run(generalised{reverse_kl{}}, dropped, all_q, infinite::skip()).diagnostics.infinite_rows == 0);
        const double broken[] = {-1, nan, -2};
        CHECK(run(generalised{reverse_kl{}}, z, broken, infinite::skip()).diagnostics.bad_rows == 1);
    });
}

TEST_CASE("renormalised: the masses of the support where the log-sum-exp is given") {
    numbers u(5);
    const supported s(u, 20, 6);
    double lse = 0, zp = 0, zq = 0;
    for (const double x : s.z) lse += std::exp(x / double(s.temperature));
    lse = std::log(lse);
    for (std::size_t j = 0; j < 6; ++j)
        zp += std::exp(s.z[std::size_t(s.ids[j])] / double(s.temperature) - lse), zq += std::exp(s.log_q[j]);
    on_both([&](auto& be, const char*) {
        const outcome plain = call(be, s, renormalised{reverse_kl{}});
        CHECK(plain.seen.student_mass_sum == 0);
        env e;
        e.given_lse = view(static_cast<const double*>(&lse), 1);
        const outcome given = call(be, s, renormalised{reverse_kl{}}, e);
        CHECK(given.seen.student_mass() == doctest::Approx(zp));
        CHECK(given.seen.teacher_mass() == doctest::Approx(zq));
        CHECK(given.seen.student_mass_min == doctest::Approx(zp));
        CHECK(given.seen.overlap_rows == 1);
        CHECK(given.loss == plain.loss);
        CHECK(given.dz == plain.dz);
        const double none = std::numeric_limits<double>::quiet_NaN();
        e.given_lse = view(&none, 1);
        CHECK(call(be, s, renormalised{reverse_kl{}}, e).seen.bad_rows == 1);
    });
}
