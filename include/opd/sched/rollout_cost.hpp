// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What more sequences at once would do to a rollout worker's pace, learnt from how long its quanta take.
//
//   seconds of a quantum = a + b·drawn + c·again              a, b, c >= 0, least squares, the last few hundred quanta count
//
// drawn: rows of new tokens; again: rows of prefixes that were computed before, and are again under new weights. Let n sequences run.
// A batch takes in proportion to 1/n quanta, each with its fixed part a (on a GPU the read of the weights), and while it is drawn
// n prefixes are rebuilt. So with T the seconds of some quanta,
//
//   elasticity = d log(tokens a second)/d log n = (a·quanta - c·again)/T
//
// which is near 1 where a step costs the same for one sequence and for many, and below 0 where new weights cost more than fuller steps
// save: then fewer sequences at once are faster. Rows that do not depend on n (prompts) belong to `drawn`.
#pragma once

#include <array>
#include <cmath>
#include <cstddef>

#include "opd/element.hpp"
#include "opd/error.hpp"
#include "opd/sched/archive.hpp"
#include "opd/sched/types.hpp"

namespace opd::sched {

class rollout_cost {
public:
    /// A quantum: finite, not negative.
    void add(double drawn, double again, double seconds) {
        const std::array<double, 3> x = {1, drawn, again};
        const auto fits = [](double v) { return v >= 0 && opd::detail::is_finite(v); };
        if (!fits(drawn) || !fits(again) || !fits(seconds))
            throw invalid_input("rollout_cost", "rows and seconds of a quantum are finite and not negative");
        for (std::size_t i = 0; i < 3; ++i) {
            for (std::size_t j = 0; j < 3; ++j) xx_[i][j] = kept * xx_[i][j] + x[i] * x[j];
            xy_[i] = kept * xy_[i] + x[i] * seconds;
        }
        quanta_ += 1, again_ += again, seconds_ += seconds;
    }
    /// Of the quanta since it was asked for last; `untold` if there were none.
    double elasticity() {
        double e = untold;
        if (seconds_ > 0) {
            const std::array<double, 3> k = cost();
            e = (k[0] * quanta_ - k[2] * again_) / seconds_;
            e = e < -1 ? -1 : e > 1 ? 1 : e; // a fit may be off
        }
        quanta_ = again_ = seconds_ = 0;
        return e;
    }
    /// a, b, c. What has never varied cannot be told apart, and is shared out.
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
        a(quanta_, again_, seconds_);
    }

private:
    static constexpr double kept = 1 - 1.0 / 512; // of a quantum, at the next one

    // Of a column, so that the three have the same unit.
    double scale(std::size_t i) const { return std::sqrt(xx_[i][i]); }
    // The normal equations of the columns that are in, by elimination.
    std::array<double, 3> solve(const std::array<bool, 3>& in) const {
        std::array<std::array<double, 4>, 3> m{};
        for (std::size_t i = 0; i < 3; ++i) {
            const bool used = in[i] && xx_[i][i] > 0;
            for (std::size_t j = 0; used && j < 3; ++j)
                if (in[j] && xx_[j][j] > 0) m[i][j] = xx_[i][j] / (scale(i) * scale(j));
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
        for (std::size_t i = 0; i < 3; ++i) r[i] = xx_[i][i] > 0 ? r[i] / scale(i) : 0;
        return r;
    }

    std::array<std::array<double, 3>, 3> xx_ = {};
    std::array<double, 3> xy_ = {};
    double quanta_ = 0, again_ = 0, seconds_ = 0; // since it was asked
};

} // namespace opd::sched
