// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What a run of the three stages is measured by. Every time is a double in seconds that the caller hands in, from any clock
// (steady_clock, virtual time): nothing here reads one. Nothing here locks: the caller serialises.
//
//   overlap     = (T_rollout + T_teacher + T_learner) / T_wall                 between 0 and 3, 1 for a serial schedule
//                 T_teacher, T_learner: length of the union of the stage's busy intervals
//                 T_rollout = (1/N) Σ_i T_i, T_i the length of the union of worker i's busy intervals
//                 T_wall: from the beginning of the first to the end of the last recorded interval
//   throughput  = Σ_{j=6..J} n_j / (t_J - t_5)        n_j: response tokens that update j consumed, t_j: time after it
//   lag         = version of the update that consumes a token - version of the weights that drew it
//
// Source: AsyncOPD, appendix G (overlap, throughput) and section 3 (lag). Overlap measures concurrency, not efficiency: a
// stage that waits busily scores. Where workers come and go the paper has no formula; here T_rollout = ∫ b(t)/n(t) dt with
// b of n present workers busy, which is the paper's figure for a constant n and never exceeds T_wall.
//
// Exact (to rounding of one sum, compensated): all of the above, counts, maxima, quantiles of integers within the bound of
// their histogram. Approximate, as said where they are: quantiles beyond the bound and of fractional lags; the lag in
// optimizer updates of a mean version where updates per version change. Memory does not grow with time, but by an entry for
// each change of the number of optimizer updates in a version.
//
// A meter describes itself: describe(visit) calls visit(name, value) for each figure. A value is a number, an optional of one
// (empty: not known yet), a vector of numbers, or a group, which has a describe(visit) itself.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "opd/config.hpp"
#include "opd/element.hpp"
#include "opd/error.hpp"
#include "opd/sched/types.hpp"

namespace opd::sched {

/// A group of figures that no meter has of its own: figures{[&](auto&& visit) { visit("name", value); }}.
template <class F>
struct figures {
    F describe;
};
template <class F>
figures(F) -> figures<F>;

namespace detail {

/// Neumaier's sum: a day of microsecond intervals loses nothing. The pins keep -ffast-math from cancelling the correction.
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

// --- busy time --------------------------------------------------------------------------------------------------------

/// Busy times of the three stages and their overlap, with any number of workers in each. Workers may come and go; going
/// ends what the worker has open. Memory: 40 bytes a worker. Cost of a call: a few nanoseconds, no allocation but by `up`.
class stage_meter {
public:
    static constexpr std::int32_t max_workers = 1 << 20; ///< numbers are indices: a worker's lies below this

    stage_meter() = default;
    /// With workers 0 … n-1 of each stage present from the start.
    explicit stage_meter(std::int32_t rollout, std::int32_t teacher = 1, std::int32_t learner = 1) {
        for (const auto& [s, n] :
             {std::pair{stage::rollout, rollout}, {stage::teacher, teacher}, {stage::learner, learner}}) {
            if (n < 0 || n > max_workers) throw invalid_input("workers", std::to_string(n) + " workers of one stage");
            of(s).workers.assign(std::size_t(n), worker_state{true, 0, {}});
            of(s).present = n;
        }
    }

    void up(stage s, std::int32_t worker, double t) {
        if (worker < 0 || worker >= max_workers)
            throw invalid_input("worker", std::to_string(worker) + " is no worker's number");
        stage_state& state = of(s);
        if (std::size_t(worker) >= state.workers.size()) state.workers.resize(std::size_t(worker) + 1);
        worker_state& w = state.workers[std::size_t(worker)];
        if (w.up) throw invalid_input("worker", called(s, worker) + " is up already");
        clock_.advance(t);
        w.up = true;
        change(state, 1, 0);
    }
    void down(stage s, std::int32_t worker, double t) {
        worker_state& w = present(s, worker);
        clock_.advance(t);
        if (w.open > 0) stop(s, w);
        w.up = false;
        change(of(s), -1, 0);
    }
    void begin(stage s, std::int32_t worker, double t) {
        worker_state& w = present(s, worker);
        const double now = clock_.advance(t);
        if (w.open++ > 0) return;
        if (!first_) first_ = now;
        w.busy.set(1, now);
        change(of(s), 0, 1);
    }
    void end(stage s, std::int32_t worker, double t) {
        worker_state& w = present(s, worker);
        if (w.open == 0) throw invalid_input("worker", called(s, worker) + " ends an interval that has not begun");
        clock_.advance(t);
        if (w.open == 1)
            stop(s, w);
        else
            --w.open;
    }
    /// Moves the time that the figures are as of.
    void observe(double t) { clock_.advance(t); }

    std::int64_t workers(stage s) const { return of(s).present; }
    std::int64_t busy_workers(stage s) const { return of(s).busy; }

    /// Length of the union of the busy intervals of all workers of the stage.
    double merged_time(stage s) const { return of(s).merged.upto(clock_.now()); }
    /// ∫ busy workers / present workers dt: for a constant number of workers, the mean of their busy times.
    double shared_time(stage s) const { return of(s).shared.upto(clock_.now()); }
    /// T_s of the overlap: shared for rollout, merged for the others.
    double stage_time(stage s) const { return s == stage::rollout ? shared_time(s) : merged_time(s); }
    /// Union of one worker's busy intervals; 0 for a worker never seen.
    double worker_time(stage s, std::int32_t worker) const {
        const auto& all = of(s).workers;
        return worker < 0 || std::size_t(worker) >= all.size() ? 0.0 : all[std::size_t(worker)].busy.upto(clock_.now());
    }
    double wall_time() const {
        const bool busy = std::any_of(stages_.begin(), stages_.end(), [](const auto& s) { return s.busy > 0; });
        return first_ ? (busy ? clock_.now() : last_) - *first_ : 0.0;
    }
    /// Nothing while no time has passed.
    std::optional<double> overlap() const {
        return detail::ratio(stage_time(stage::rollout) + stage_time(stage::teacher) + stage_time(stage::learner),
                             wall_time());
    }
    double skew() const { return clock_.skew(); }

    template <class Visit>
    void describe(Visit&& visit) const {
        visit("overlap", overlap()), visit("wall_seconds", wall_time()), visit("clock_skew", skew());
        visit("busy_seconds", detail::each<stage, stage_count>([&](stage s) { return stage_time(s); }));
        visit("merged_busy_seconds", detail::each<stage, stage_count>([&](stage s) { return merged_time(s); }));
    }

private:
    struct worker_state {
        bool up = false;
        std::int32_t open = 0;
        detail::time_integral busy;
    };
    struct stage_state {
        std::vector<worker_state> workers;
        std::int64_t present = 0, busy = 0;
        detail::time_integral merged, shared;
    };

    static std::string called(stage s, std::int32_t worker) {
        return std::string(name_of(s)).append(" worker ").append(std::to_string(worker));
    }
    stage_state& of(stage s) { return stages_[std::size_t(s)]; }
    const stage_state& of(stage s) const { return stages_[std::size_t(s)]; }
    worker_state& present(stage s, std::int32_t worker) {
        stage_state& state = of(s);
        if (worker < 0 || std::size_t(worker) >= state.workers.size() || !state.workers[std::size_t(worker)].up)
            throw invalid_input("worker", called(s, worker) + " is not up");
        return state.workers[std::size_t(worker)];
    }
    void change(stage_state& state, int present, int busy) {
        state.present += present;
        state.busy += busy;
        state.merged.set(state.busy > 0 ? 1 : 0, clock_.now());
        state.shared.set(state.busy > 0 ? double(state.busy) / double(state.present) : 0, clock_.now());
    }
    void stop(stage s, worker_state& w) {
        w.open = 0;
        w.busy.set(0, last_ = clock_.now());
        change(of(s), 0, -1);
    }

    std::array<stage_state, stage_count> stages_;
    detail::meter_clock clock_;
    std::optional<double> first_; // beginning
    double last_ = 0;             // end
};

// --- throughput -------------------------------------------------------------------------------------------------------

/// Tokens consumed by updates per second. The first `warmup` updates are discarded (the paper: 5), and the clock starts
/// after the last of them; with J <= warmup updates, or no time between, there is no throughput yet and the answer is empty.
class throughput_meter {
public:
    explicit throughput_meter(std::int64_t warmup = 5) : warmup_(warmup) {
        if (warmup < 1) throw invalid_input("warmup", "the clock starts after an update, so at least one is discarded");
    }

    /// When the first update's work began, if its own time is to be known.
    void start(double t) {
        if (latest_) throw invalid_input("t", "the start comes once, before the first update");
        latest_ = detail::checked_time(t);
    }
    /// After an update that consumed so many tokens.
    void step(double t, std::int64_t response_tokens, std::int64_t prompt_tokens = 0) {
        detail::checked_time(t);
        if (latest_ && t < *latest_) throw invalid_input("t", "an update that ends before the one before it");
        detail::checked_count("response_tokens", response_tokens);
        detail::checked_count("prompt_tokens", prompt_tokens);
        step_seconds_ = latest_ ? std::optional<double>(t - *latest_) : std::nullopt;
        step_tokens_ = response_tokens + prompt_tokens;
        latest_ = t;
        response_ += response_tokens;
        prompt_ += prompt_tokens;
        if (++steps_ == warmup_) origin_ = {t, response_, prompt_};
    }

    std::int64_t steps() const { return steps_; }
    std::int64_t response_tokens() const { return response_; }
    std::int64_t prompt_tokens() const { return prompt_; }
    /// Σ_{j>warmup} response tokens of update j / (t_J - t_warmup).
    std::optional<double> throughput() const { return per_second(response_ - origin_.response); }
    /// The same with the prompts' tokens counted too.
    std::optional<double> total_throughput() const {
        return per_second(response_ - origin_.response + prompt_ - origin_.prompt);
    }
    /// Of the last update: its duration, and (prompt + response tokens) / duration.
    std::optional<double> step_seconds() const { return step_seconds_; }
    std::optional<double> step_rate() const { return detail::ratio(double(step_tokens_), step_seconds_.value_or(0)); }
    /// Mean duration of an update after the warm-up.
    std::optional<double> mean_step_seconds() const {
        return steps_ > warmup_ ? detail::ratio(*latest_ - origin_.time, double(steps_ - warmup_)) : std::nullopt;
    }

    template <class Visit>
    void describe(Visit&& visit) const {
        visit("steps", steps()), visit("response_tokens", response_tokens()), visit("prompt_tokens", prompt_tokens()),
            visit("throughput", throughput()), visit("total_throughput", total_throughput()),
            visit("mean_step_seconds", mean_step_seconds());
    }

private:
    std::optional<double> per_second(std::int64_t tokens) const {
        return steps_ > warmup_ ? detail::ratio(double(tokens), *latest_ - origin_.time) : std::nullopt;
    }

    std::int64_t warmup_, steps_ = 0, step_tokens_ = 0, response_ = 0, prompt_ = 0;
    struct {
        double time = 0;
        std::int64_t response = 0, prompt = 0;
    } origin_; // after the warm-up
    std::optional<double> latest_, step_seconds_;
};

// --- lags -------------------------------------------------------------------------------------------------------------

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
    /// Smallest x such that at least the share q of all lags is <= x; 0 of nothing. Exact for integer lags within the bound.
    /// A fractional lag counts as the lower end of its bin, one beyond the bound as the maximum.
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
inline constexpr int lag_unit_count = 2;
constexpr const char* name_of(lag_unit u) { return u == lag_unit::versions ? "versions" : "updates"; }

/// Histograms of the four lags in versions and in optimizer updates, of the whole run and of the batch at hand. A response
/// without tokens has a start lag only. Lags reach to the beginning of the update that consumes: with several optimizer
/// updates a version, those within the batch are not counted.
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

// --- depths -----------------------------------------------------------------------------------------------------------

/// A level that changes in steps, from the first `set` to the latest time: mean and quantiles by time, exact up to `bound`;
/// and its course, as means over equal spans of which there are at most `spans`: when they are full, neighbours are joined
/// and the spans double.
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
    /// Seconds spent at a level <= bound; those beyond it together.
    double seconds_at(std::int64_t level) const {
        return level >= 0 && std::size_t(level) < at_.size() ? at_[std::size_t(level)] : 0.0;
    }
    double seconds_beyond() const { return beyond_; }
    /// Smallest level that was not exceeded for at least the share q of the time; bound + 1 stands for all beyond.
    std::int64_t quantile(double q) const {
        const std::size_t level = detail::quantile_bin(at_, beyond_, q);
        return level < at_.size() ? std::int64_t(level) : beyond_ > 0 ? bound_ + 1 : 0;
    }
    /// Mean level in span i, which covers [i, i+1) · span_seconds() after the first `set`; the last one may be incomplete.
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
inline constexpr int queue_count = 3;
constexpr const char* name_of(queue q) {
    return q == queue::running ? "running" : q == queue::teacher ? "teacher" : "ready";
}

/// Depths of the queues, and the time that a learner with a full batch at hand is held back because the staleness policy
/// waits for an older sequence.
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

// --- transfer of weights ----------------------------------------------------------------------------------------------

/// The way of new weights to the rollout workers: how long each takes from being told to having them (the end of its quantum, the
/// transfer, the rebuilding of what depends on them), and how long admission was closed meanwhile.
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

// --- a run ------------------------------------------------------------------------------------------------------------

/// What is only counted.
enum class tally : std::uint8_t { retried, failed, dropped, aborted, late_reply, worker_lost, parked };
inline constexpr int tally_count = 7;
constexpr const char* name_of(tally c) {
    constexpr const char* names[] = {"retried",      "failed",       "dropped", "aborted",
                                     "late_replies", "workers_lost", "parked"};
    return names[static_cast<int>(c)];
}

struct run_metrics_options {
    std::int32_t rollout_workers = 0; ///< present from the start, numbered from 0; others by `up`
    std::int32_t teacher_workers = 1;
    std::int32_t learner_workers = 1;
    version_t version = 0;            ///< at the start; not 0 after a resume
    std::int64_t earlier_updates = 1; ///< optimizer updates in each version before it
    std::int64_t warmup = 5;          ///< updates that the throughput discards
    std::int64_t lag_bound = 1024;    ///< lags beyond it share a bin
};

/// All meters of a run. The parts are public: whoever needs one alone calls it.
class run_metrics {
public:
    stage_meter stages;
    throughput_meter tokens;
    lag_meter lags;
    depth_meter depths;
    transfer_meter transfers;

    explicit run_metrics(const run_metrics_options& options = {})
        : stages(options.rollout_workers, options.teacher_workers, options.learner_workers), tokens(options.warmup),
          lags(options.version, options.lag_bound, options.earlier_updates) {}

    /// When the run's work began: the first step's time is then known, and `time` counts from here.
    void start(double t) {
        tokens.start(t);
        now_ = begin_ = t;
        upto_ = at(t);
    }
    /// A sequence of the batch that the update in progress consumes.
    void consumed(version_t start_version, const token_versions& versions, std::int64_t prompt_tokens) {
        detail::checked_count("prompt_tokens", prompt_tokens);
        lags.add(start_version, versions);
        ++batch_.sequences;
        batch_.response += versions.tokens;
        batch_.prompt += prompt_tokens;
    }
    /// The update that consumed these sequences is done, in so many optimizer updates.
    void step(double t, std::int64_t updates) {
        tokens.step(t, batch_.response, batch_.prompt);
        lags.step(updates);
        sequences_ += batch_.sequences;
        last_batch_ = std::exchange(batch_, {});
        observe(t);
        const totals before = std::exchange(upto_, at(t));
        spent_ = tokens.step_seconds() ? upto_ - before : totals{};
    }
    /// So long a rollout worker did spare work, which is over now.
    void spare(double seconds) {
        if (!(seconds >= 0) || !opd::detail::is_finite(seconds))
            throw invalid_input("seconds", "are finite and at least 0");
        spare_.add(seconds);
    }
    double spare_seconds() const { return spare_.value(); }
    void count(tally c, std::int64_t n = 1) { tallies_[std::size_t(c)] += n; }
    std::int64_t sequences() const { return sequences_; }
    /// Moves the time that the figures are as of.
    void observe(double t) {
        stages.observe(t);
        depths.observe(t);
        transfers.observe(t);
        now_ = t;
    }

    /// The run up to the latest step or observe(t).
    template <class Visit>
    void describe(Visit&& visit) const {
        tokens.describe(visit);
        stages.describe(visit);
        visit("time", now_ - begin_), visit("sequences", sequences_), visit("lag", lags);
        describe_state(visit);
        visit("running_profile", depths(queue::running).profile());
        visit("held", figures{[&](auto&& in) { in("seconds", depths.held_time()); }});
        visit("spare", figures{[&](auto&& in) { in("seconds", spare_seconds()); }});
        visit("transfer", transfers);
    }
    /// To be described: the last step, up to the next. `busy` is each stage's share of the step's time and `overlap` their
    /// sum; `run_overlap` and `throughput` are those of the run so far.
    auto last_step() const {
        return figures{[this](auto&& visit) {
            visit("step", tokens.steps()), visit("time", upto_.time - begin_),
                visit("sequences", last_batch_.sequences);
            visit("response_tokens", last_batch_.response), visit("prompt_tokens", last_batch_.prompt);
            visit("step_seconds", tokens.step_seconds()), visit("step_tokens_per_second", tokens.step_rate());
            visit("throughput", tokens.throughput()), visit("run_overlap", stages.overlap());
            visit("busy", detail::each<stage, stage_count>(
                              [&](stage s) { return detail::ratio(spent_.stages[std::size_t(s)], spent_.time); }));
            visit("overlap", detail::ratio(spent_.stages[0] + spent_.stages[1] + spent_.stages[2], spent_.time));
            visit("lag", lags.last_batch());
            visit("held_seconds", tokens.step_seconds() ? std::optional<double>(spent_.held) : std::nullopt);
            describe_state(visit);
        }};
    }

private:
    struct batch_counts {
        std::int64_t sequences = 0, response = 0, prompt = 0;
    };
    struct totals {
        double time = 0, held = 0;
        std::array<double, stage_count> stages{};
        friend totals operator-(totals a, const totals& b) {
            a.time -= b.time, a.held -= b.held;
            for (std::size_t s = 0; s < stage_count; ++s) a.stages[s] -= b.stages[s];
            return a;
        }
    };
    totals at(double t) const {
        totals r{t, depths.held_time(), {}};
        for (std::size_t s = 0; s < stage_count; ++s) r.stages[s] = stages.stage_time(static_cast<stage>(s));
        return r;
    }
    template <class Visit>
    void describe_state(Visit&& visit) const {
        visit("version", lags.version()), visit("updates", lags.updates()), visit("depth", depths);
        detail::each<tally, tally_count>([&](tally c) { return tallies_[std::size_t(c)]; }).describe(visit);
    }

    batch_counts batch_, last_batch_;
    totals upto_, spent_; // up to the last step, and on it
    double now_ = 0, begin_ = 0;
    std::int64_t sequences_ = 0;
    detail::precise_sum spare_;
    std::array<std::int64_t, tally_count> tallies_{};
};

} // namespace opd::sched
