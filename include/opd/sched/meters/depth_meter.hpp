// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Levels over time: depths of the queues, and how long the learner is held back by the bound on staleness.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "opd/config.hpp"
#include "opd/element.hpp"
#include "opd/error.hpp"
#include "opd/sched/meters/measures.hpp"

namespace opd::sched {

/// A level that changes in steps, from the first `set` to the latest time: mean and quantiles by time, exact up to
/// `bound`; and its course, as means over equal spans of which there are at most `spans`: when they are full,
/// neighbours are joined and the spans double.
class level_meter {
public:
    explicit level_meter(std::int64_t bound = 1 << 16, int spans = 256, double finest = 1e-3)
        : bound_(bound), spans_(static_cast<std::size_t>(spans)), width_(finest) {
        if (bound < 0 || bound > (std::int64_t{1} << 32)) throw invalid_input("bound", "between 0 and 2^32");
        if (spans < 2 || spans % 2 != 0 || spans > (1 << 20)) throw invalid_input("spans", "even, between 2 and 2^20");
        if (!opd::detail::is_finite(finest) || finest <= 0)
            throw invalid_input("finest", "a positive number of seconds");
    }

    void set(std::int64_t level, double t) {
        detail::checked_count("level", level);
        observe(t);
        if (!clock_.started()) clock_.advance(t);
        if (level == level_) return;
        area_.set(double(level), clock_.now());
        level_ = level;
        max_ = std::max(max_, level);
    }
    void observe(double t) {
        if (!clock_.started()) return;
        const double before = clock_.now();
        if (clock_.advance(t) > before) spend(clock_.now() - before);
    }

    std::int64_t level() const { return level_; }
    std::int64_t max() const { return max_; }
    double seconds() const { return clock_.elapsed(); }
    /// The level itself as long as no time has passed.
    double mean() const { return detail::ratio(integral(), seconds()).value_or(double(level_)); }
    double integral() const { return area_.upto(clock_.now()); } ///< ∫ level dt
    /// Seconds spent at a level <= bound.
    double seconds_at(std::int64_t level) const {
        return level >= 0 && std::size_t(level) < at_.size() ? at_[std::size_t(level)] : 0.0;
    }
    /// Smallest level that was not exceeded for at least the share q of the time; bound + 1 stands for all beyond.
    std::int64_t quantile(double q) const {
        const std::size_t level = detail::quantile_bin(at_, beyond_, q);
        return level < at_.size() ? std::int64_t(level) : beyond_ > 0 ? bound_ + 1 : 0;
    }
    /// Mean level in span i, which covers [i, i+1) · span_seconds() after the first `set`; the last one may be
    /// incomplete.
    double span_seconds() const { return width_; }
    std::size_t spans() const { return seconds() > double(ends_.size()) * width_ ? ends_.size() + 1 : ends_.size(); }
    double span_mean(std::size_t i) const {
        const double begin = i > 0 ? ends_.at(i - 1) : 0.0;
        if (i < ends_.size()) return (ends_[i] - begin) / width_;
        return detail::ratio(integral() - begin, seconds() - double(i) * width_).value_or(0);
    }

    template <class Visit>
    void describe(Visit&& visit) const {
        visit("now", level_), visit("mean", mean()), visit("max", max_);
    }
    /// To be described: quantiles and course.
    auto profile() const {
        return figures{[this](auto&& visit) {
            std::vector<double> means(spans());
            for (std::size_t i = 0; i < means.size(); ++i) means[i] = span_mean(i);
            visit("seconds", seconds()), visit("p5", quantile(0.05)), visit("p50", quantile(0.5)),
                visit("p95", quantile(0.95)), visit("span_seconds", width_), visit("means", means);
        }};
    }

private:
    void spend(double time) {
        if (level_ > bound_) {
            beyond_ += time;
        } else {
            if (std::size_t(level_) >= at_.size()) at_.resize(std::size_t(level_) + 1);
            at_[std::size_t(level_)] += time;
        }
        while (seconds() > width_ * double(spans_)) {
            for (std::size_t i = 0; 2 * i + 1 < ends_.size(); ++i) ends_[i] = ends_[2 * i + 1];
            ends_.resize(ends_.size() / 2);
            width_ *= 2;
        }
        // A span is complete where its end is reached: found by its number, since a time that is stepped drifts.
        for (double end; ends_.size() < spans_ && (end = double(ends_.size() + 1) * width_) <= seconds();)
            ends_.push_back(integral() - double(level_) * (seconds() - end));
    }

    std::int64_t bound_, level_ = 0, max_ = 0;
    std::size_t spans_;
    double width_, beyond_ = 0;
    detail::meter_clock clock_;
    detail::time_integral area_;
    std::vector<double> at_, ends_; // seconds by level; ∫ level dt up to the end of each complete span
};

/// What waits where: sequences being generated, sequences waiting for or with the teacher, scored sequences.
enum class queue : std::uint8_t { running, teacher, ready };
/// How many of them there are: sizes of arrays by queue.
inline constexpr int queue_count = 3;
constexpr const char* name_of(queue q) {
    return q == queue::running ? "running" : q == queue::teacher ? "teacher" : "ready";
}

/// Depths of the queues, and the time that a learner with a full batch at hand is held back because the staleness
/// policy waits for an older sequence.
class depth_meter {
public:
    void set(queue q, std::int64_t depth, double t) { levels_[std::size_t(q)].set(depth, t); }
    void hold(double t) { held_.set(1, t); }
    void release(double t) { held_.set(0, t); }
    void observe(double t) {
        for (level_meter& l : levels_) l.observe(t);
        held_.observe(t);
    }

    const level_meter& operator()(queue q) const { return levels_[std::size_t(q)]; }
    double held_time() const { return held_.integral(); }

    /// The queues alone.
    template <class Visit>
    void describe(Visit&& visit) const {
        const auto level = [&](queue q) -> const level_meter& { return levels_[std::size_t(q)]; };
        detail::each<queue, queue_count>(level).describe(visit);
    }

private:
    std::array<level_meter, queue_count> levels_;
    level_meter held_; // 1: held back
};

} // namespace opd::sched
