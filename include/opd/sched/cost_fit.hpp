// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Seconds of a step by what it did, from the last steps:
//
//   seconds = c_0 + c_1·x_1 + … + c_n·x_n,     c >= 0
//
// Least squares; a step counts 1 - 1/memory times as much at each one that comes after it. What has never varied
// cannot be told apart, and is shared out. Exact where seconds are of that form and all c can be told apart.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>

#include "opd/element.hpp"
#include "opd/error.hpp"
#include "opd/sched/archive.hpp"

namespace opd::sched {

/// The fit's sums: as small after a million steps as after one. `Kinds`: n, of what a step does.
template <std::size_t Kinds = 2>
class cost_fit {
    static constexpr std::size_t columns = Kinds + 1;

public:
    /// `memory`: steps that count; at least 1.
    explicit cost_fit(double memory = 512) : kept_(1 - 1 / memory) {
        if (!(memory >= 1) || !opd::detail::is_finite(memory))
            throw invalid_input("memory", "must be finite and at least 1");
    }

    /// All finite and not negative.
    void add(const std::array<double, Kinds>& did, double seconds) {
        const auto fits = [](double v) { return v >= 0 && opd::detail::is_finite(v); };
        if (!std::all_of(did.begin(), did.end(), fits) || !fits(seconds))
            throw invalid_input("seconds", "and what the step did are finite and not negative");
        const auto of = [&](std::size_t i) { return i == 0 ? 1 : did[i - 1]; };
        for (std::size_t i = 0; i < columns; ++i) {
            for (std::size_t j = 0; j < columns; ++j) xx_[i][j] = kept_ * xx_[i][j] + of(i) * of(j);
            xy_[i] = kept_ * xy_[i] + of(i) * seconds;
        }
    }
    /// c_0 to c_n; zeros before the first step.
    std::array<double, columns> cost() const {
        std::array<bool, columns> in;
        in.fill(true);
        for (;;) { // without what would be negative
            std::array<double, columns> k = solve(in);
            std::size_t worst = columns;
            for (std::size_t i = 0; i < columns; ++i)
                if (in[i] && k[i] < 0 && (worst == columns || k[i] * scale(i) < k[worst] * scale(worst))) worst = i;
            if (worst == columns) return k;
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
    // Of a column, so that all have the same unit.
    double scale(std::size_t i) const { return std::sqrt(xx_[i][i]); }
    // The normal equations of the columns that are in, by elimination.
    std::array<double, columns> solve(const std::array<bool, columns>& in) const {
        std::array<std::array<double, columns + 1>, columns> m{};
        for (std::size_t i = 0; i < columns; ++i) {
            const bool used = in[i] && seen(i);
            for (std::size_t j = 0; used && j < columns; ++j)
                if (in[j] && seen(j)) m[i][j] = xx_[i][j] / (scale(i) * scale(j));
            m[i][columns] = used ? xy_[i] / scale(i) : 0;
            m[i][i] = used ? m[i][i] * (1 + 1e-9) : 1; // a column that is the multiple of another leaves something
        }
        for (std::size_t i = 0; i < columns; ++i)
            for (std::size_t j = i + 1; j < columns; ++j) {
                const double f = m[j][i] / m[i][i];
                for (std::size_t k = i; k <= columns; ++k) m[j][k] -= f * m[i][k];
            }
        std::array<double, columns> r{};
        for (std::size_t i = columns; i-- > 0;) {
            double left = m[i][columns];
            for (std::size_t j = i + 1; j < columns; ++j) left -= m[i][j] * r[j];
            r[i] = left / m[i][i];
        }
        for (std::size_t i = 0; i < columns; ++i) r[i] = seen(i) ? r[i] / scale(i) : 0;
        return r;
    }

    double kept_;
    std::array<std::array<double, columns>, columns> xx_ = {};
    std::array<double, columns> xy_ = {};
};

} // namespace opd::sched
