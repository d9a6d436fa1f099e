// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// build: sanitize
//
// The figures that diagnostics derive from their counts and sums, by hand, and how reports of blocks merge.
#include <cmath>
#include <doctest/doctest.h>
#include <vector>

#include <opd/diagnostics.hpp>

using opd::diagnostics;

namespace {

/// Tokens of the given ratios, each of weight 1.
diagnostics of(const std::vector<double>& ratios) {
    diagnostics d;
    for (const double rho : ratios) {
        ++d.tokens;
        d.ratio_sum += rho, d.ratio_square_sum += rho * rho;
        d.ratio_max = rho > d.ratio_max ? rho : d.ratio_max;
        d.k1_sum += -std::log(rho), d.k2_sum += std::log(rho) * std::log(rho) / 2;
        d.k3_sum += rho - 1 - std::log(rho);
    }
    return d;
}

} // namespace

TEST_CASE("means over tokens, effective sample size, chi-squared") {
    const diagnostics d = of({0.5, 1, 2, 4});
    CHECK(d.ratio_mean() == doctest::Approx(7.5 / 4));
    CHECK(d.effective_sample_size() == doctest::Approx(7.5 * 7.5 / 21.25));
    CHECK(d.chi_squared() == doctest::Approx(21.25 / 4 - 1));
    CHECK(d.k1() == doctest::Approx(-std::log(4.0) / 4));
    const double l = std::log(2.0);
    CHECK(d.k2() == doctest::Approx((l * l + l * l + 4 * l * l) / 8));
    CHECK(d.k3() == doctest::Approx((7.5 - 4 - std::log(4.0)) / 4));
    CHECK(of(std::vector<double>(9, 3.0)).effective_sample_size() == doctest::Approx(9)); // equal weights: all count
    const diagnostics none;
    CHECK(none.ratio_mean() == 0);
    CHECK(none.effective_sample_size() == 0);
    CHECK(none.chi_squared() == 0);
    CHECK(none.k1() == 0);
    CHECK(none.k2() == 0);
    CHECK(none.k3() == 0);
}

TEST_CASE("suggested scale: the effective share of the tokens, at most 1") {
    CHECK(of({0.5, 1, 2, 4}).suggested_scale() == doctest::Approx(7.5 * 7.5 / 21.25 / 4));
    CHECK(of(std::vector<double>(9, 3.0)).suggested_scale() == doctest::Approx(1)); // equal ratios lose nothing
    CHECK(of({1e6, 1e-6, 1e-6, 1e-6}).suggested_scale() == doctest::Approx(0.25));  // one of four counts
    CHECK(diagnostics{}.suggested_scale() == 1);
}

TEST_CASE("loss variance: the mean over the rows that have one") {
    diagnostics a, b;
    a.variance_rows = 3, a.loss_variance_sum = 1.5;
    CHECK(a.loss_variance() == 0.5);
    b.variance_rows = 1, b.loss_variance_sum = 2.5;
    a.merge(b);
    CHECK(a.loss_variance() == 1);
    CHECK(diagnostics{}.loss_variance() == 0);
}

TEST_CASE("mu_mismatch: the mean of rho more than five standard errors from 1") {
    const auto shifted = [](double standard_errors) { // 100 ratios, half of them lower and half higher
        const double spread = 0.1, error = spread * std::sqrt(100.0 / 99) / 10;
        std::vector<double> rho;
        for (int i = 0; i < 100; ++i) rho.push_back(1 + standard_errors * error + (i % 2 ? spread : -spread));
        return of(rho).mu_mismatch();
    };
    CHECK_FALSE(shifted(0));
    CHECK_FALSE(shifted(4.9));
    CHECK_FALSE(shifted(-4.9));
    CHECK(shifted(5.1));
    CHECK(shifted(-5.1));
    CHECK(shifted(50));
    CHECK_FALSE(of({1, 1, 1}).mu_mismatch());
    CHECK(of({1.1, 1.1, 1.1}).mu_mismatch()); // no spread at all
    CHECK_FALSE(of({1 + 1e-6, 1 + 1e-6}).mu_mismatch());
    CHECK_FALSE(of({9}).mu_mismatch()); // one token says nothing
    CHECK_FALSE(diagnostics{}.mu_mismatch());
}

TEST_CASE("means over rows: of the good kept ones, and of the supports") {
    diagnostics d;
    d.rows = 10, d.kept = 7, d.bad_rows = 2, d.kept_loss = 15;
    CHECK(d.mean_kept_loss() == doctest::Approx(3));
    d.bad_rows = 7;
    CHECK(d.mean_kept_loss() == 0);
    d.support_rows = 4, d.student_mass_sum = 3, d.teacher_mass_sum = 2;
    CHECK(d.student_mass() == doctest::Approx(0.75));
    CHECK(d.teacher_mass() == doctest::Approx(0.5));
    CHECK(diagnostics{}.mean_kept_loss() == 0);
    CHECK(diagnostics{}.student_mass() == 0);
    CHECK(diagnostics{}.teacher_mass() == 0);
}

TEST_CASE("merging adds counts and sums and keeps the first row and the extremes") {
    diagnostics a = of({2, 3}), b = of({5}), none;
    a.rows = 3, a.kept = 2, a.bad_rows = 1, a.first_bad_row = 9, a.kept_loss = 1, a.clamped_rows = 1;
    b.rows = 4, b.kept = 4, b.bad_rows = 1, b.first_bad_row = 4, b.kept_loss = 2, b.careful_rows = 2;
    b.infinite_rows = 1, b.first_infinite_row = 6;
    a.student_mass_min = 0.25, b.student_mass_min = 0.5, a.teacher_mass_min = 0.75, b.teacher_mass_min = 0.125;
    a.support_rows = 1, b.support_rows = 2, a.student_mass_sum = 0.25, b.student_mass_sum = 1.5;
    a.teacher_mass_sum = 0.75, b.teacher_mass_sum = 0.5, a.tail_floored = 1, b.tail_floored = 1;
    a.staleness[0] = 1, a.staleness[32] = 1, a.staleness_max = 40, b.staleness[32] = 2, b.staleness_max = 33;
    a.truncated = 1, b.truncated = 2, a.masked = 3, b.masked = 4, a.dropped = 5, b.dropped = 6;
    a.positive_advantage = 1, a.negative_advantage = 2, b.positive_advantage = 4, b.negative_advantage = 8;
    a.clipped_positive = 1, a.clipped_negative = 2, b.clipped_positive = 4, b.clipped_negative = 8;
    a.saturated = 1, b.saturated = 2, a.baseline_missing = 3, b.baseline_missing = 4;
    for (const bool swapped : {false, true}) {
        diagnostics m = swapped ? b : a;
        m.merge(none);
        m.merge(swapped ? a : b);
        CHECK(m.rows == 7);
        CHECK(m.kept == 6);
        CHECK(m.bad_rows == 2);
        CHECK(m.first_bad_row == 4);
        CHECK(m.infinite_rows == 1);
        CHECK(m.first_infinite_row == 6);
        CHECK(m.clamped_rows == 1);
        CHECK(m.careful_rows == 2);
        CHECK(m.kept_loss == 3);
        CHECK(m.tokens == 3);
        CHECK(m.ratio_sum == 10);
        CHECK(m.ratio_square_sum == 38);
        CHECK(m.ratio_max == 5);
        CHECK(m.k1_sum == doctest::Approx(-std::log(30.0)));
        CHECK(m.k2_sum == doctest::Approx(a.k2_sum + b.k2_sum));
        CHECK(m.k3_sum == doctest::Approx(a.k3_sum + b.k3_sum));
        CHECK(m.truncated == 3);
        CHECK(m.masked == 7);
        CHECK(m.dropped == 11);
        CHECK(m.positive_advantage == 5);
        CHECK(m.negative_advantage == 10);
        CHECK(m.clipped_positive == 5);
        CHECK(m.clipped_negative == 10);
        CHECK(m.saturated == 3);
        CHECK(m.baseline_missing == 7);
        CHECK(m.support_rows == 3);
        CHECK(m.student_mass_sum == 1.75);
        CHECK(m.teacher_mass_sum == 1.25);
        CHECK(m.student_mass_min == 0.25);
        CHECK(m.teacher_mass_min == 0.125);
        CHECK(m.tail_floored == 2);
        CHECK(m.staleness[0] == 1);
        CHECK(m.staleness[32] == 3);
        CHECK(m.staleness_max == 40);
    }
}
