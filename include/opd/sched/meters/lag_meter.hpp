// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Lags in versions and in optimizer updates: of the run, and of the batch at hand. metrics.hpp has the formula.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <utility>
#include <vector>

#include "opd/config.hpp"
#include "opd/element.hpp"
#include "opd/error.hpp"
#include "opd/sched/meters/measures.hpp"
#include "opd/sched/types.hpp"

namespace opd::sched {

/// Counts of lags in bins [i/d, (i+1)/d), d = divisions, exact up to `bound`, and one bin for all beyond. With d = 1 an
/// integer lag has a bin of its own.
class lag_histogram {
public:
    explicit lag_histogram(std::int64_t bound = 1024, int divisions = 1) : bound_(bound), divisions_(divisions) {
        if (bound < 0 || bound > (std::int64_t{1} << 32)) throw invalid_input("bound", "between 0 and 2^32");
        if (divisions < 1 || divisions > 1024) throw invalid_input("divisions", "between 1 and 1024");
    }

    void add(double x) {
        if (!opd::detail::is_finite(x) || x < 0) throw invalid_input("lag", "a lag is finite and not negative");
        if (x > double(bound_)) {
            ++beyond_;
        } else {
            const auto bin = static_cast<std::size_t>(x * divisions_);
            if (bin >= bins_.size()) bins_.resize(bin + 1);
            ++bins_[bin];
        }
        ++count_;
        sum_.add(x);
        max_ = std::max(max_, x);
    }

    std::int64_t count() const { return count_; }
    std::int64_t beyond() const { return beyond_; }
    int divisions() const { return divisions_; }
    /// As many as reach to the largest lag seen within the bound.
    const std::vector<std::int64_t>& bins() const { return bins_; }
    double max() const { return max_; }
    double mean() const { return detail::ratio(sum_.value(), double(count_)).value_or(0); }
    /// Smallest x such that at least the share q of all lags is <= x; 0 of nothing. Exact for integer lags within the
    /// bound. A fractional lag counts as the lower end of its bin, one beyond the bound as the maximum.
    double quantile(double q) const {
        const std::size_t bin = detail::quantile_bin(bins_, beyond_, q);
        return bin < bins_.size() ? double(bin) / divisions_ : max_;
    }

    template <class Visit>
    void describe(Visit&& visit) const {
        visit("count", count_), visit("mean", mean()), visit("max", max_), visit("p50", quantile(0.5)),
            visit("p90", quantile(0.9)), visit("p99", quantile(0.99)), visit("bins_per_unit", divisions_),
            visit("bins", bins_), visit("beyond", beyond_);
    }

private:
    std::int64_t bound_, count_ = 0, beyond_ = 0;
    int divisions_;
    double max_ = 0;
    detail::precise_sum sum_;
    std::vector<std::int64_t> bins_;
};

/// How many optimizer updates led to a version. Memory: one entry per change of the number of updates in a version.
class update_count {
public:
    /// `earlier`: updates in each version before the first that is counted (after a resume).
    explicit update_count(version_t first = 0, std::int64_t earlier = 1) : version_(first) {
        segments_.push_back({first, 0, detail::checked_count("updates", earlier)});
    }
    /// One version more, of so many updates.
    void advance(std::int64_t updates) {
        detail::checked_count("updates", updates);
        if (updates != segments_.back().each) segments_.push_back({version_, count_, updates});
        count_ += updates;
        ++version_;
    }
    version_t version() const { return version_; }
    /// Updates since the first version.
    std::int64_t updates() const { return count_; }
    /// Entries kept.
    std::size_t entries() const { return segments_.size(); }
    /// Updates between a version (also a fractional one, then interpolated) and the present one.
    double since(double version) const {
        auto after = std::upper_bound(segments_.begin(), segments_.end(), version,
                                      [](double v, const segment& s) { return v < double(s.from); });
        const segment& s = after == segments_.begin() ? *after : *std::prev(after);
        return double(count_ - s.before) - (version - double(s.from)) * double(s.each);
    }

private:
    struct segment {
        version_t from;
        std::int64_t before, each;
    };
    std::vector<segment> segments_;
    version_t version_;
    std::int64_t count_ = 0;
};

/// Unit of a lag.
enum class lag_unit : std::uint8_t { versions, updates };
/// How many of them there are: sizes of arrays by unit.
inline constexpr int lag_unit_count = 2;
constexpr const char* name_of(lag_unit u) { return u == lag_unit::versions ? "versions" : "updates"; }

/// Histograms of the four lags in versions and in optimizer updates, of the whole run and of the batch at hand. A
/// response without tokens has a start lag only. Lags reach to the beginning of the update that consumes: with
/// several optimizer updates a version, those within the batch are not counted.
class lag_meter {
public:
    explicit lag_meter(version_t first = 0, std::int64_t bound = 1024, std::int64_t earlier_updates = 1)
        : updates_(first, earlier_updates), earlier_(earlier_updates) {
        for (auto& units : cells_) units.fill({lag_histogram(bound), {}, {}});
        cells_[std::size_t(lag::mean_token)].fill({lag_histogram(bound, 16), {}, {}}); // the one that is no integer
    }

    /// A sequence of the batch that the update at the present version consumes. `start`: version when it was started.
    void add(version_t start, const token_versions& tokens) {
        check_version("start", start);
        const bool any = detail::checked_count("tokens", tokens.tokens) > 0;
        if (any) {
            check_version("newest", tokens.newest);
            if (!(tokens.oldest <= tokens.newest) || !opd::detail::is_finite(tokens.mean) ||
                tokens.mean < double(tokens.oldest) || tokens.mean > double(tokens.newest))
                throw invalid_input("tokens", "versions out of order: oldest <= mean <= newest");
        }
        const double from[lag_count] = {double(start), double(tokens.oldest), tokens.mean, double(tokens.newest)};
        for (std::size_t l = 0; l < (any ? lag_count : 1); ++l) {
            cells_[l][0].add(double(updates_.version()) - from[l]);
            cells_[l][1].add(std::max(0.0, updates_.since(from[l])));
        }
    }
    /// The update is done: one version more.
    void step(std::int64_t updates) {
        updates_.advance(updates);
        for (auto& units : cells_)
            for (cell& c : units) c.last = std::exchange(c.batch, {});
    }

    /// The run goes on from this version; lags before it stay counted.
    void begin(version_t first) { updates_ = update_count(first, earlier_); }

    version_t version() const { return updates_.version(); }
    std::int64_t updates() const { return updates_.updates(); }
    const lag_histogram& operator()(lag l, lag_unit u = lag_unit::versions) const { return of(l, u).run; }
    /// Of the last batch: means and maxima; 0 of an empty one.
    double batch_mean(lag l, lag_unit u = lag_unit::versions) const {
        return detail::ratio(of(l, u).last.sum, double(of(l, u).last.count)).value_or(0);
    }
    double batch_max(lag l, lag_unit u = lag_unit::versions) const { return of(l, u).last.max; }

    template <class Visit>
    void describe(Visit&& visit) const {
        detail::each<lag, lag_count>([this](lag l) {
            return detail::each<lag_unit, lag_unit_count>(
                [this, l](lag_unit u) -> const lag_histogram& { return of(l, u).run; });
        }).describe(visit);
    }
    /// To be described: the last batch.
    auto last_batch() const {
        return detail::each<lag, lag_count>([this](lag l) {
            return figures{[this, l](auto&& visit) {
                visit("mean", batch_mean(l)), visit("max", batch_max(l));
                visit("mean_updates", batch_mean(l, lag_unit::updates));
                visit("max_updates", batch_max(l, lag_unit::updates));
            }};
        });
    }

private:
    struct batch_stats {
        std::int64_t count = 0;
        double sum = 0, max = 0;
    };
    struct cell {
        lag_histogram run;
        batch_stats batch, last;
        void add(double x) {
            run.add(x);
            ++batch.count;
            batch.sum += x;
            batch.max = std::max(batch.max, x);
        }
    };
    const cell& of(lag l, lag_unit u) const { return cells_[std::size_t(l)][std::size_t(u)]; }
    void check_version(const char* name, version_t v) const {
        if (v > updates_.version())
            throw invalid_input(name, "a version later than that of the update that consumes it");
    }

    update_count updates_;
    std::int64_t earlier_;
    std::array<std::array<cell, lag_unit_count>, lag_count> cells_;
};

} // namespace opd::sched
