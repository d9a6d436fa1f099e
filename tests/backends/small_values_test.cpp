// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// build: whole-compiler, whole-ofast
// optimise: always
//
// Values near p = q against long double, the stored logits being the truth: right to 1e-3 of themselves at 1e-8 (to
// 1e-4 from 1e-6 on), never negative, exactly 0 for equal logits. V from 2 to 151,936, float and bfloat16 storage, any
// temperatures, diffuse and peaked rows and offsets; on the CPU and in the device's text.
#include "backends/host_run.hpp"
#include "support/compiled/dense.hpp"
#include "support/compiled/dense_double.hpp"
#include "support/compiled/device_text.hpp"
#include "support/generators.hpp"
#include "support/textbook.hpp"

#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>
#include <opd/backends/cpu.hpp>

using namespace opd;
using namespace opd::test;

namespace {

template <class Visit>
void for_each_refined(Visit f) {
    f("reverse_kl", reverse_kl{});
    f("forward_kl", forward_kl{});
    f("jsd(.5,.5)", jsd{});
    f("jsd(.2,.9)", jsd{.w = .2, .o = .9});
    f("skew_forward_kl(.1)", skew_forward_kl{});
    f("skew_reverse_kl(.3)", skew_reverse_kl{.a = .3});
    f("alpha(.5)", alpha_divergence{});
    f("alpha(-.5)", alpha_divergence{.a = -.5});
    f("alpha(.01)", alpha_divergence{.a = .01});
    f("alpha(.999)", alpha_divergence{.a = .999});
    f("chi_squared", chi_squared{});
}

template <class T>
struct pair_of_rows {
    std::vector<T> z, y;
    float t_s, t_t;
};

enum class shape { normal, flat, peaked, offset };

/// Logits whose scaled differences are N(0, sqrt(2 kl)).
template <class T>
pair_of_rows<T> near_rows(index_t vocab, double kl, shape s, float t_s, float t_t, std::uint64_t seed) {
    numbers u(seed);
    pair_of_rows<T> r{{}, {}, t_s, t_t};
    const index_t top = u.below(vocab);
    for (index_t v = 0; v < vocab; ++v) {
        const double x = (s == shape::flat ? 0.02 : 3) * u.normal() + (s == shape::peaked && v == top ? 12 : 0);
        r.z.push_back(element<T>::store(arithmetic_t<T>(x * t_s + (s == shape::offset ? 60 : 0))));
        r.y.push_back(element<T>::store(arithmetic_t<T>((x + std::sqrt(2 * kl) * u.normal()) * t_t)));
    }
    return r;
}

template <class T, class Backend, class D>
double value_of(Backend& backend, const pair_of_rows<T>& r, const D& d) {
    const auto n = index_t(r.z.size());
    return evaluate(backend, student::logits<T, T>{view(r.z.data(), 1, n), {}, r.t_s},
                    teacher::dense{view(r.y.data(), 1, n), r.t_t}, d)
        .loss;
}

/// `device`: in the device's text too, for float.
template <class T>
void check_row(const pair_of_rows<T>& r, bool device) {
    const auto n = index_t(r.z.size());
    const textbook::row exact = textbook::make_row(r.z.data(), r.y.data(), n, double(r.t_s), double(r.t_t));
    for_each_refined([&](const std::string& name, auto d) {
        const auto want = double(textbook::value(d, exact));
        const auto check = [&](auto& backend) {
            const double got = value_of(backend, r, d);
            INFO(name << ", V = " << n << ", T = " << r.t_s << ", " << r.t_t << ": " << got << ", not " << want);
            CHECK(got >= 0);
            // below 1e-9 the normalisers' own rounding, 1e-7, squared
            if (want > 1e-9) CHECK(std::abs(got - want) <= (want < 1e-6 ? 1e-3 : 3e-4) * want);
        };
        cpu_backend fast;
        check(fast);
        if constexpr (std::is_same_v<T, float>) {
            host_run_backend threads{64};
            if (device) check(threads);
        }
    });
}

} // namespace

TEST_CASE("small values keep their digits") {
    std::uint64_t seed = 20250601;
    for (const index_t vocab : {2, 50, 3000})
        for (const double kl : {1e-3, 1e-5, 1e-7, 2e-8, 1e-12})
            for (const shape s : {shape::normal, shape::flat, shape::peaked, shape::offset})
                for (const int i : {0, 1, 2}) {
                    const float t_s[] = {1, 0.7F, 1.3F}, t_t[] = {1, 0.7F, 0.6F};
                    check_row(near_rows<float>(vocab, kl, s, t_s[i], t_t[i], ++seed), i != 1);
                    if (i != 1) check_row(near_rows<bfloat16>(vocab, kl, s, t_s[i], t_t[i], ++seed), false);
                }
}

TEST_CASE("and in rows of vocabulary size") {
    for (const index_t vocab : {32768, 151936})
        for (const double kl : {1e-5, 2e-8}) {
            check_row(near_rows<float>(vocab, kl, shape::normal, 1, 1, 7), vocab == 32768);
            check_row(near_rows<float>(vocab, kl, shape::flat, 1.3F, 0.6F, 8), false);
        }
}

TEST_CASE("in double a mixture near either end keeps what the logits' rounding leaves") {
    using textbook::real;
    const index_t n = 400;
    for (const double gap : {1e-2, 1e-4, 1e-6})
        for (const double width : {0.1, 3.0}) {
            numbers u(7);
            std::vector<double> z, y, dz(n);
            for (index_t v = 0; v < n; ++v) z.push_back(width * u.normal()), y.push_back(z.back() + gap * u.normal());
            const textbook::row r = textbook::make_row(z.data(), y.data(), n, 1, 1);
            const auto check = [&](const std::string& name, real w, real o, auto d) {
                real want = 0, sum = 0, top = 0, worst = 0; // terms that are never negative, for Σ m = Σ p = Σ q
                std::vector<real> c;
                for (std::size_t v = 0; v < z.size(); ++v) {
                    const real p = std::exp(r.log_p[v]), less_p = std::expm1(r.log_q[v] - r.log_p[v]),
                               less_q = std::expm1(r.log_p[v] - r.log_q[v]), q = p * (1 + less_p);
                    want += o * q * ((1 - w) * less_q - std::log1p((1 - w) * less_q)) +
                            (1 - o) * p * (w * less_p - std::log1p(w * less_p));
                    const real m = 1 + w * less_p; // over p; the slope less that at p = q
                    c.push_back(p * (-o * (1 - w) * (1 - w) * less_p / m +
                                     (1 - o) * ((1 - w) * w * less_p / m - std::log1p(w * less_p))));
                    sum += c.back();
                }
                cpu_backend be;
                const double got =
                    evaluate(be, student::logits{view(std::as_const(z).data(), 1, n), view(dz.data(), 1, n)},
                             teacher::dense{view(std::as_const(y).data(), 1, n)}, d)
                        .loss;
                for (std::size_t v = 0; v < z.size(); ++v) {
                    const real g = c[v] - std::exp(r.log_p[v]) * sum;
                    top = std::max(top, std::abs(g)), worst = std::max(worst, std::abs(g - real(dz[v])));
                }
                INFO(name << ", log-ratios of " << gap << ", width " << width << ": " << got << ", not " << double(want)
                          << "; gradient off by " << double(worst / top));
                const double rounding = 1e-15 / gap + 1e-14; // of the log-ratios
                CHECK(std::abs(got - double(want)) <= (want < 0x1p-40L ? rounding * double(want) : 1e-15));
                CHECK(worst <= rounding * top);
            };
            for (const double a : {1e-3, 0.1, 0.5, 0.9, 0.99, 0.999}) {
                check("skew_reverse_kl " + std::to_string(a), 1 - real(a), 0, skew_reverse_kl{a});
                check("skew_forward_kl " + std::to_string(a), a, 1, skew_forward_kl{a});
                check("jsd " + std::to_string(a), a, a, jsd{a, a});
            }
        }
}

TEST_CASE("equal logits: exactly 0") {
    const auto check = [](auto storage, float temperature) {
        using T = decltype(storage);
        for (const index_t vocab : {1, 2, 50, 3000, 40000}) {
            pair_of_rows<T> r = near_rows<T>(vocab, 0, shape::normal, temperature, temperature, std::uint64_t(vocab));
            r.y = r.z;
            const auto both = [&](const std::string& name, auto d) {
                INFO(name << ", V = " << vocab);
                cpu_backend fast;
                CHECK(value_of(fast, r, d) == 0);
                if constexpr (std::is_same_v<T, float>) {
                    host_run_backend threads{64};
#if defined(__FAST_MATH__) // no device text is compiled so
                    if (vocab < 5000) CHECK(value_of(threads, r, d) <= 1e-30);
#else
                    if (vocab < 5000) CHECK(value_of(threads, r, d) == 0);
#endif
                }
            };
            if constexpr (std::is_same_v<T, double>)
                both("reverse_kl", reverse_kl{}), both("jsd", jsd{});
            else
                for_each_refined(both);
        }
    };
    check(float{}, 1), check(float{}, 0.7F), check(bfloat16{}, 1), check(double{}, 1.3F);
}

TEST_CASE("a gradient beside it, holes and clamps change nothing about a small value") {
    pair_of_rows<float> r = near_rows<float>(3000, 1e-8, shape::normal, 1, 1, 3);
    std::vector<float> z(r.z), y(r.y); // 0 log 0 = 0: without the holes
    z.erase(z.begin() + 100, z.begin() + 400), y.erase(y.begin() + 100, y.begin() + 400);
    const textbook::row exact = textbook::make_row(z.data(), y.data(), 2700, 1, 1);
    for (index_t v = 100; v < 400; ++v) r.z[std::size_t(v)] = r.y[std::size_t(v)] = detail::neg_inf<float>();
    for_each_refined([&](const std::string& name, auto d) {
        INFO(name);
        const auto want = double(textbook::value(d, exact));
        const auto check = [&](auto& backend) {
            std::vector<float> dz(3000);
            const student::logits s{view(r.z.data(), 1, 3000), view(dz.data(), 1, 3000)};
            const teacher::dense t{view(r.y.data(), 1, 3000)};
            const double value = evaluate(backend, s, t, d).loss;
            CHECK(value == value_of(backend, r, d));
            CHECK(std::abs(value - want) <= 1e-3 * want);
            const result cut = evaluate(backend, s, t, d, {.loss_clamp = want / 2});
            CHECK(cut.diagnostics.clamped_rows == 1);
            for (const float g : dz) CHECK(g == 0);
        };
        cpu_backend fast;
        host_run_backend threads{64};
        check(fast), check(threads);
    });
}
