// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What meters (metrics.hpp) share: sums that lose nothing, the integral of a level over time, a clock of events,
// quantiles of bins.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "opd/config.hpp"
#include "opd/element.hpp"
#include "opd/error.hpp"

namespace opd::sched {

/// A group of figures that no meter has of its own: figures{[&](auto&& visit) { visit("name", value); }}.
template <class F>
struct figures {
    F describe;
};
template <class F>
figures(F) -> figures<F>;

namespace detail {

/// Neumaier's sum: a day of microsecond intervals loses nothing. The pins keep -ffast-math from cancelling the
/// correction.
class precise_sum {
public:
    void add(double x) {
        using opd::detail::pin;
        const double t = pin(sum_ + x);
        const double lost = std::abs(sum_) >= std::abs(x) ? pin(sum_ - t) + x : pin(x - t) + sum_;
        correction_ = pin(correction_ + lost);
        sum_ = t;
    }
    double value() const { return sum_ + correction_; }

private:
    double sum_ = 0, correction_ = 0;
};

/// ∫ level dt of a level that changes in steps; times do not go back.
class time_integral {
public:
    void set(double level, double now) {
        area_.add(level_ * (now - since_));
        level_ = level;
        since_ = now;
    }
    double level() const { return level_; }
    double upto(double now) const { return area_.value() + level_ * (now - since_); }

private:
    double level_ = 0, since_ = 0;
    precise_sum area_;
};

inline double checked_time(double t) {
    if (!opd::detail::is_finite(t)) throw invalid_input("t", "a time is finite");
    return t;
}
inline std::int64_t checked_count(const char* name, std::int64_t n) {
    if (n < 0) throw invalid_input(name, "a negative number");
    return n;
}

/// Threads stamp their events before they get the lock that orders them, so a stamp may be a little older than one that
/// came before it. It is then taken as the newer one, and the largest such correction is kept to be reported.
class meter_clock {
public:
    double advance(double t) {
        checked_time(t);
        if (!first_) first_ = now_ = t;
        skew_ = std::max(skew_, now_ - t);
        return now_ = std::max(now_, t);
    }
    bool started() const { return first_.has_value(); }
    double now() const { return now_; }
    double elapsed() const { return first_ ? now_ - *first_ : 0.0; }
    double skew() const { return skew_; }

private:
    std::optional<double> first_;
    double now_ = 0, skew_ = 0;
};

inline std::optional<double> ratio(double over, double under) {
    if (under > 0) return over / under;
    return std::nullopt;
}

/// The first bin up to which at least the share q of the weight lies; bins.size(): none, it lies beyond them.
template <class Weight>
std::size_t quantile_bin(const std::vector<Weight>& bins, Weight beyond, double q) {
    if (!opd::detail::is_finite(q) || q < 0 || q > 1) throw invalid_input("q", "a quantile's level lies in [0, 1]");
    Weight total = 0, upto = 0;
    for (const Weight w : bins) total += w;
    for (std::size_t i = 0; i < bins.size(); ++i) {
        upto += bins[i];
        if (bins[i] > 0 && double(upto) / double(total + beyond) >= q) return i;
    }
    return bins.size();
}

/// A group with a figure for each value of an enum.
template <class Enum, int n, class F>
auto each(F figure) {
    return figures{[figure](auto&& visit) {
        for (int i = 0; i < n; ++i) visit(name_of(static_cast<Enum>(i)), figure(static_cast<Enum>(i)));
    }};
}

} // namespace detail

} // namespace opd::sched
