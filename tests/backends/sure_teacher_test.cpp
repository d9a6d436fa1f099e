// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// build: whole-compiler
// optimise: always
//
// An untrained student and a teacher that is sure of the student's first choice, or against it: the entry at which a
// row's sums are anchored is then unlike all the others, and has little of the student's mass. Float on both engines
// against double on lanes.
#include "backends/both_engines.hpp"
#include "support/compiled/dense.hpp"
#include "support/compiled/dense_double.hpp"
#include "support/generators.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>
#include <opd/estimators/divergences.hpp>
#include <opd/estimators/selectors.hpp>

using namespace opd;
using namespace opd::test;

namespace {

cpu_backend exact; // in double

} // namespace

TEST_CASE("an untrained student and a teacher that is sure of its first choice, or against it: values and gradients in "
          "float") {
    for (const index_t vocab : {index_t{64}, index_t{5000}, index_t{40000}})
        for (const double gap : {2., 8., 20., 30., 39., 60., 300., -2., -8., -30.}) {
            numbers u(3);
            std::vector<float> z, y;
            for (index_t v = 0; v < vocab; ++v)
                z.push_back(float(0.02 * u.normal())), y.push_back(float(0.02 * u.normal()));
            const auto top = std::size_t(vocab / 2);
            z[top] = 0.2F, y[top] = float(gap);
            const std::vector<double> z64(z.begin(), z.end()), y64(y.begin(), y.end());
            on_both([&](auto& be, const char* engine) {
                const auto check = [&](const std::string& name, const auto& divergence, double value_error = 2e-4) {
                    INFO(std::string(engine) << ", " << name << ", V " << std::to_string(vocab) << ", gap " << gap);
                    std::vector<float> dz(z.size());
                    std::vector<double> want(z.size());
                    const result got =
                        evaluate(be, student::logits{view(z.data(), 1, vocab), view(dz.data(), 1, vocab)},
                                 teacher::dense{view(y.data(), 1, vocab)}, divergence);
                    const result wanted = evaluate(
                        exact, student::logits<double>{view(z64.data(), 1, vocab), view(want.data(), 1, vocab)},
                        teacher::dense<double>{view(y64.data(), 1, vocab)}, divergence);
                    REQUIRE(got.diagnostics.infinite_rows == wanted.diagnostics.infinite_rows);
                    if (got.diagnostics.infinite_rows > 0) return; // alpha 3: e^120
                    double error = 0, size = 0, sum = 0, all = 0, sum64 = 0, all64 = 0;
                    for (std::size_t v = 0; v < dz.size(); ++v) {
                        if (v != top)
                            error += (double(dz[v]) - want[v]) * (double(dz[v]) - want[v]), size += want[v] * want[v];
                        sum += double(dz[v]), all += std::abs(double(dz[v]));
                        sum64 += want[v], all64 += std::abs(want[v]);
                    }
                    // e^x with x a float of up to twice the gap
                    CHECK(std::abs(double(dz[top]) - want[top]) < (2e-6 + 4e-8 * std::abs(gap)) * std::abs(want[top]));
                    // of log-ratios that differ by 0.03 and are subtracted from a float as large as the gap
                    CHECK(std::sqrt(error / size) < 2e-5 * (1 + std::abs(gap)));
                    CHECK(std::abs(sum) < 1e-5 * (1 + std::abs(gap)) * all);
                    CHECK(std::abs(sum64) < 2e-11 * all64);
                    CHECK(double(got.loss) == doctest::Approx(double(wanted.loss)).epsilon(value_error));
                };
                for (const double a : {-1., 0.3, 0.5, 0.75, 0.8, 1.5, 2., 3.})
                    check("alpha " + std::to_string(a), alpha_divergence{a});
                for (const double a : {0.9, 0.99, 1.01, 1.1}) // as little of d* is left as of reverse KL's
                    check("alpha " + std::to_string(a), alpha_divergence{a}, 1e-5);
                check("reverse_kl + chi_squared", weighted_sum{reverse_kl{}, chi_squared{}});
                check("jsd", jsd{});
                check("jsd 0.2, 0.9", jsd{.w = 0.2, .o = 0.9});
                check("skew_forward_kl", skew_forward_kl{});
                check("skew_reverse_kl", skew_reverse_kl{});
                check("skew_reverse_kl 0.3", skew_reverse_kl{.a = 0.3});
                check("forward_kl", forward_kl{});
                check("reverse_kl", reverse_kl{});
                check("chi_squared", chi_squared{});
                if (gap < 0) return;
                // where s* is what the teacher denies, these are relative to it still, and total variation's signs hang
                // on the last digit
                check("skew_forward_kl 0.99", skew_forward_kl{.a = 0.99});
                check("forward_kl + chi_squared", weighted_sum{forward_kl{}, chi_squared{}});
                check("total_variation", total_variation{});
            });
        }
}

TEST_CASE(
    "a teacher that is sure of another token and denies the student's first choice more than the rest: rows sum to 0") {
    for (const index_t vocab : {index_t{64}, index_t{1140}, index_t{20000}})
        for (const double denied : {0., 3., 6., 9.}) {
            numbers u(std::uint64_t(7 + vocab));
            std::vector<float> z, y;
            for (index_t v = 0; v < vocab; ++v)
                z.push_back(float(0.3 * u.normal())), y.push_back(float(1.5 * u.normal()));
            const auto top = std::size_t(vocab / 2), sure = std::size_t(vocab / 3);
            z[top] = 1.5F, y[top] = float(-denied), y[sure] = 16;
            const std::vector<double> z64(z.begin(), z.end()), y64(y.begin(), y.end());
            on_both([&](auto& be, const char* engine) {
                const auto check = [&](const std::string& name, const auto& divergence) {
                    INFO(std::string(engine)
                         << ", " << name << ", V " << std::to_string(vocab) << ", denied " << denied);
                    std::vector<float> dz(z.size());
                    std::vector<double> want(z.size());
                    const result got =
                        evaluate(be, student::logits{view(z.data(), 1, vocab), view(dz.data(), 1, vocab)},
                                 teacher::dense{view(y.data(), 1, vocab)}, divergence);
                    const result wanted = evaluate(
                        exact, student::logits<double>{view(z64.data(), 1, vocab), view(want.data(), 1, vocab)},
                        teacher::dense<double>{view(y64.data(), 1, vocab)}, divergence);
                    REQUIRE(got.diagnostics.infinite_rows == wanted.diagnostics.infinite_rows);
                    if (got.diagnostics.infinite_rows > 0) return;
                    double error = 0, size = 0, sum = 0, all = 0;
                    for (std::size_t v = 0; v < dz.size(); ++v) {
                        if (v != top && v != sure)
                            error += (double(dz[v]) - want[v]) * (double(dz[v]) - want[v]), size += want[v] * want[v];
                        sum += double(dz[v]), all += std::abs(double(dz[v]));
                    }
                    CHECK(std::sqrt(error / size) < 4e-6);
                    CHECK(std::abs(sum) < 2e-6 * all);
                    CHECK(double(got.loss) == doctest::Approx(double(wanted.loss)).epsilon(4e-6));
                };
                for (const double a : {-1., 0.3, 0.5, 0.9, 1.1, 1.5, 2., 3.})
                    check("alpha " + std::to_string(a), alpha_divergence{a});
                check("jsd", jsd{});
                check("forward_kl", forward_kl{});
                check("reverse_kl", reverse_kl{});
                check("chi_squared", chi_squared{});
            });
        }
}

TEST_CASE("a student that is sure: what its first token gets is what the others lose") {
    for (const index_t vocab : {index_t{64}, index_t{1140}})
        for (const double sure : {10., 25., 45.})
            for (const float t : {1.F, 0.1F}) {
                numbers u(std::uint64_t(11 + vocab));
                std::vector<float> z, y;
                for (index_t v = 0; v < vocab; ++v)
                    z.push_back(float(u.normal())), y.push_back(float((t < 1 ? 0.3 : 1) * u.normal()));
                const auto top = std::size_t(vocab / 2);
                z[top] = float(sure);
                on_both([&](auto& be, const char* engine) {
                    const auto check = [&](const std::string& name, const auto& divergence) {
                        INFO(std::string(engine)
                             << ", " << name << ", V " << std::to_string(vocab) << ", sure by " << sure);
                        std::vector<float> dz(z.size());
                        (void)evaluate(be, student::logits{view(z.data(), 1, vocab), view(dz.data(), 1, vocab)},
                                       teacher::dense{view(y.data(), 1, vocab), t}, divergence);
                        double sum = 0, all = 0;
                        for (const float g : dz) sum += double(g), all += std::abs(double(g));
                        CHECK(all > 0);
                        CHECK(std::abs(sum) < 4e-6 * all);
                    };
                    for (const double a : {-1., 0.3, 0.5, 0.9, 1.1, 1.5, 2., 3.})
                        check("alpha " + std::to_string(a), alpha_divergence{a});
                    check("jsd", jsd{});
                    check("reverse_kl", reverse_kl{});
                    check("chi_squared", chi_squared{});
                });
            }
}

TEST_CASE("two models that nearly agree once each is tempered: gradients as where temperatures are equal") {
    for (const auto& [t_s, t_t] : {std::pair{0.7F, 1.F}, {0.5F, 1.F}, {1.3F, 0.6F}, {1.F, 1.F}})
        for (const double apart : {1e-3, 3e-2, 0.3})
            for (const index_t vocab : {index_t{40}, index_t{1100}}) {
                numbers u(std::uint64_t(3 + vocab));
                std::vector<float> z, y;
                for (index_t v = 0; v < vocab; ++v) {
                    z.push_back(float(3 * u.normal()));
                    y.push_back(float((double(z.back()) / double(t_s) + apart * u.normal()) * double(t_t)));
                }
                const std::vector<double> z64(z.begin(), z.end()), y64(y.begin(), y.end());
                on_both([&](auto& be, const char* engine) {
                    const auto check = [&](const std::string& name, const auto& divergence) {
                        INFO(std::string(engine) << ", " << name << ", V " << std::to_string(vocab) << ", T " << t_s
                                                 << ", " << t_t << ", " << apart << " apart");
                        std::vector<float> dz(z.size());
                        std::vector<double> want(z.size());
                        evaluate(be, student::logits{view(z.data(), 1, vocab), view(dz.data(), 1, vocab), t_s},
                                 teacher::dense{view(y.data(), 1, vocab), t_t}, divergence);
                        evaluate(exact,
                                 student::logits<double>{view(z64.data(), 1, vocab), view(want.data(), 1, vocab), t_s},
                                 teacher::dense<double>{view(y64.data(), 1, vocab), t_t}, divergence);
                        double worst = 0, top = 0;
                        for (std::size_t v = 0; v < dz.size(); ++v)
                            worst = std::max(worst, std::abs(double(dz[v]) - want[v])),
                            top = std::max(top, std::abs(want[v]));
                        CHECK(worst <= 1e-6 * top);
                    };
                    check("reverse_kl", reverse_kl{}), check("forward_kl", forward_kl{}), check("jsd", jsd{});
                    check("jsd 0.2, 0.9", jsd{.w = 0.2, .o = 0.9}), check("skew_forward_kl", skew_forward_kl{});
                    for (const double a : {-1., 0.3, 0.5, 1.5})
                        check("alpha " + std::to_string(a), alpha_divergence{a});
                    check("chi_squared", chi_squared{});
                });
            }
}
