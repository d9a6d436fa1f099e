// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Seconds of a step by what it did, from the last steps:
//
//   seconds = a + b·x + c·y,     a, b, c >= 0
//
// Least squares; a step counts 1 - 1/memory times as much at each one that comes after it. What has never varied
// cannot be told apart, and is shared out. Exact where seconds are of that form and the three can be told apart.
#pragma once

#include <array>
#include <cmath>
#include <cstddef>

#include "opd/element.hpp"
#include "opd/error.hpp"
#include "opd/sched/archive.hpp"

namespace opd::sched {

/// The fit's sums: as small after a million steps as after one.
class cost_fit {
public:
    /// `memory`: steps that count; at least 1.
    explicit cost_fit(double memory = 512) : kept_(1 - 1 / memory) {
        if (!(memory >= 1) || !opd::detail::is_finite(memory))
            throw invalid_input("memory", "must be finite and at least 1");
    }

    /// All finite and not negative.
    void add(double x, double y, double seconds) {
        const auto fits = [](double v) { return v >= 0 && opd::detail::is_finite(v); };
        if (!fits(x) || !fits(y) || !fits(seconds))
            throw invalid_input("seconds", "and what the step did are finite and not negative");
        const std::array<double, 3> row = {1, x, y};
        for (std::size_t i = 0; i < 3; ++i) {
            for (std::size_t j = 0; j < 3; ++j) xx_[i][j] = kept_ * xx_[i][j] + row[i] * row[j];
            xy_[i] = kept_ * xy_[i] + row[i] * seconds;
        }
    }
    /// a, b, c; zeros before the first step.
    std::array<double, 3> cost() const {
        std::array<bool, 3> in = {true, true, true};
        for (;;) { // without what would be negative
            std::array<double, 3> k = solve(in);
            std::size_t worst = 3;
            for (std::size_t i = 0; i < 3; ++i)
                if (in[i] && k[i] < 0 && (worst == 3 || k[i] * scale(i) < k[worst] * scale(worst))) worst = i;
            if (worst == 3) return k;
            in[worst] = false;
        }
    }
    template <class A>
    void fields(A& a) {
        for (auto& row : xx_)
            for (double& v : row) a(v);
        for (double& v : xy_) a(v);
    }

private:
    // Whether any step did something of the column.
    bool seen(std::size_t i) const { return xx_[i][i] > 0; }
    // Of a column, so that the three have the same unit.
    double scale(std::size_t i) const { return std::sqrt(xx_[i][i]); }
    // The normal equations of the columns that are in, by elimination.
    std::array<double, 3> solve(const std::array<bool, 3>& in) const {
        std::array<std::array<double, 4>, 3> m{};
        for (std::size_t i = 0; i < 3; ++i) {
            const bool used = in[i] && seen(i);
            for (std::size_t j = 0; used && j < 3; ++j)
                if (in[j] && seen(j)) m[i][j] = xx_[i][j] / (scale(i) * scale(j));
            m[i][3] = used ? xy_[i] / scale(i) : 0;
            m[i][i] = used ? m[i][i] * (1 + 1e-9) : 1; // a column that is the multiple of another leaves something
        }
        for (std::size_t i = 0; i < 3; ++i)
            for (std::size_t j = i + 1; j < 3; ++j) {
                const double f = m[j][i] / m[i][i];
                for (std::size_t k = i; k < 4; ++k) m[j][k] -= f * m[i][k];
            }
        std::array<double, 3> r{};
        for (std::size_t i = 3; i-- > 0;) {
            double left = m[i][3];
            for (std::size_t j = i + 1; j < 3; ++j) left -= m[i][j] * r[j];
            r[i] = left / m[i][i];
        }
        for (std::size_t i = 0; i < 3; ++i) r[i] = seen(i) ? r[i] / scale(i) : 0;
        return r;
    }

    double kept_;
    std::array<std::array<double, 3>, 3> xx_ = {};
    std::array<double, 3> xy_ = {};
};

} // namespace opd::sched
