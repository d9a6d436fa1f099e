// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The way of new weights to the rollout workers.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <utility>

#include "opd/config.hpp"
#include "opd/sched/meters/depth_meter.hpp"
#include "opd/sched/meters/measures.hpp"

namespace opd::sched {

/// The way of new weights to the rollout workers: how long each takes from being told to having them (the end of its
/// quantum, the transfer, the rebuilding of what depends on them), and how long admission was closed meanwhile.
class transfer_meter {
public:
    double bytes = 0; ///< of one set of weights, if it is to be reported

    void asked(std::int32_t worker, std::uint64_t job, double t) { asked_[worker] = {job, detail::checked_time(t)}; }
    /// Of other weights than those it was told last: nothing.
    void installed(std::int32_t worker, std::uint64_t job, double t) {
        const auto at = asked_.find(worker);
        if (at == asked_.end() || at->second.first != job) return;
        const double seconds = std::max(detail::checked_time(t) - at->second.second, 0.0);
        asked_.erase(at);
        ++count_;
        sum_.add(seconds);
        most_ = std::max(most_, seconds);
    }
    void gone(std::int32_t worker) { asked_.erase(worker); }
    void close(double t) { closed_.set(1, t); }
    void open(double t) { closed_.set(0, t); }
    void observe(double t) { closed_.observe(t); }

    std::int64_t count() const { return count_; }
    double seconds() const { return sum_.value(); } ///< of all of them together
    double longest() const { return most_; }
    double closed_seconds() const { return closed_.integral(); }

    template <class Visit>
    void describe(Visit&& visit) const {
        visit("count", count_);
        visit("mean_seconds", detail::ratio(seconds(), double(count_)));
        visit("max_seconds", most_);
        visit("closed_seconds", closed_seconds());
        visit("bytes", bytes > 0 ? std::optional<double>(bytes * double(count_)) : std::nullopt);
    }

private:
    std::map<std::int32_t, std::pair<std::uint64_t, double>> asked_; // by worker: what, and when
    std::int64_t count_ = 0;
    detail::precise_sum sum_;
    double most_ = 0;
    level_meter closed_; // 1: it is
};

} // namespace opd::sched
