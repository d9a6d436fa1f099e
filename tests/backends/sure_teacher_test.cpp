// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// An untrained student and a teacher that is sure of the student's first choice: the entry at which a row's sums are anchored is then
// unlike all the others, and has little of the student's mass. Float gradients against double ones, entry by entry. On both engines.
#include "backends/both_engines.hpp"
#include "support/generators.hpp"

#include <cmath>
#include <cstddef>
#include <vector>

#include <doctest/doctest.h>
#include <opd/estimators/divergences.hpp>

using namespace opd;
using namespace opd::test;

TEST_CASE("gradients of an untrained student and a sure teacher are right to float precision in every entry") {
    for (const index_t vocab : {index_t{64}, index_t{5000}, index_t{40000}})
        for (const double gap : {30., 300.}) {
            numbers u(3);
            std::vector<float> z, y;
            for (index_t v = 0; v < vocab; ++v)
                z.push_back(float(0.02 * u.normal())), y.push_back(float(0.02 * u.normal()));
            z[std::size_t(vocab / 2)] = 0.2F, y[std::size_t(vocab / 2)] = float(gap);
            const std::vector<double> z64(z.begin(), z.end()), y64(y.begin(), y.end());
            on_both([&](auto& be, const char* engine) {
                const auto check = [&](const char* name, const auto& divergence) {
                    INFO(engine << ", " << name << ", V " << vocab << ", gap " << gap);
                    std::vector<float> dz(z.size());
                    std::vector<double> want(z.size());
                    evaluate(be, student::logits{view(z.data(), 1, vocab), view(dz.data(), 1, vocab)},
                             teacher::dense{view(y.data(), 1, vocab)}, divergence);
                    evaluate(be, student::logits<double>{view(z64.data(), 1, vocab), view(want.data(), 1, vocab)},
                             teacher::dense<double>{view(y64.data(), 1, vocab)}, divergence);
                    double worst = 0, sum = 0, size = 0, sum64 = 0;
                    for (std::size_t v = 0; v < dz.size(); ++v) {
                        worst = std::max(worst, std::abs(double(dz[v]) - want[v]) / std::abs(want[v]));
                        sum += double(dz[v]), size += std::abs(double(dz[v])), sum64 += want[v];
                    }
                    CHECK(worst < 5e-6);
                    CHECK(std::abs(sum) < 1e-6 * size);
                    CHECK(std::abs(sum64) < 1e-13 * size);
                };
                check("alpha -1", alpha_divergence{-1});
                check("alpha 0.3", alpha_divergence{0.3});
                check("alpha 0.5", alpha_divergence{0.5});
                check("jsd", jsd{});
                check("jsd 0.2, 0.9", jsd{.w = 0.2, .o = 0.9});
                check("skew_forward_kl", skew_forward_kl{});
                check("skew_reverse_kl", skew_reverse_kl{.a = 0.3});
                check("forward_kl", forward_kl{});
            });
        }
}
