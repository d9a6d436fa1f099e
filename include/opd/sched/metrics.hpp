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
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "opd/config.hpp"
#include "opd/error.hpp"
#include "opd/sched/json.hpp"
#include "opd/sched/types.hpp"

namespace opd::sched {

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

inline double checked_time(double t) {
    if (!finite(t)) throw invalid_input("t", "a time is finite");
    return t;
}

/// Threads stamp their events before they get the lock that orders them, so a stamp may be a little older than one that
/// came before it. It is then taken as the newer one, and the largest such correction is kept to be reported.
class meter_clock {
public:
    double advance(double t) {
        checked_time(t);
        if (!started_) {
            started_ = true;
            now_ = t;
        } else if (t < now_) {
            skew_ = std::max(skew_, now_ - t);
        } else {
            now_ = t;
        }
        return now_;
    }
    double now() const { return now_; }
    bool started() const { return started_; }
    double skew() const { return skew_; }

private:
    double now_ = 0, skew_ = 0;
    bool started_ = false;
};

inline std::optional<double> ratio(double over, double under) {
    if (under > 0) return over / under;
    return std::nullopt;
}

inline void check_quantile(double q) {
    if (!finite(q) || q < 0 || q > 1) throw invalid_input("q", "a quantile's level lies in [0, 1]");
}

} // namespace detail

// --- busy time --------------------------------------------------------------------------------------------------------

/// Length of the union of one worker's busy intervals, each given by begin and end; they may nest and overlap.
/// The figures are as of the latest time handed in, an open interval counted up to it.
class busy_meter {
public:
    void begin(double t) {
        observe(t);
        if (open_++ > 0) return;
        if (!any_) first_ = clock_.now();
        any_ = true;
        ++stretches_;
        since_ = clock_.now();
    }
    void end(double t) {
        if (open_ == 0) throw invalid_input("t", "the end of an interval that has not begun");
        observe(t);
        if (--open_ == 0) close();
    }
    /// Ends all that is open.
    void end_all(double t) {
        observe(t);
        if (std::exchange(open_, 0) > 0) close();
    }
    void observe(double t) { clock_.advance(t); }

    bool busy() const { return open_ > 0; }
    std::int64_t open() const { return open_; }
    double busy_time() const { return total_.value() + (open_ > 0 ? clock_.now() - since_ : 0.0); }
    /// From the first beginning to the last end, or to the latest time while busy.
    double wall_time() const { return any_ ? (open_ > 0 ? clock_.now() : last_) - first_ : 0.0; }
    /// The longest stretch without a pause, and how many there were.
    double longest() const { return std::max(longest_, open_ > 0 ? clock_.now() - since_ : 0.0); }
    std::int64_t stretches() const { return stretches_; }
    /// Largest correction of a stamp older than its predecessor.
    double skew() const { return clock_.skew(); }

private:
    void close() {
        last_ = clock_.now();
        total_.add(last_ - since_);
        longest_ = std::max(longest_, last_ - since_);
    }

    detail::meter_clock clock_;
    detail::precise_sum total_;
    double since_ = 0, first_ = 0, last_ = 0, longest_ = 0;
    std::int64_t open_ = 0, stretches_ = 0;
    bool any_ = false;
};

/// Busy times of the three stages and their overlap, with any number of workers in each. Workers may come and go; going
/// ends what the worker has open. Memory: 40 bytes a worker. Cost of a call: a few nanoseconds, no allocation but by `up`.
class stage_meter {
public:
    static constexpr std::int32_t max_workers = 1 << 20; ///< numbers are indices: a worker's lies below this

    stage_meter() = default;
    /// With workers 0 … n-1 of each stage present from the start.
    explicit stage_meter(std::int32_t rollout, std::int32_t teacher = 1, std::int32_t learner = 1) {
        const std::int32_t wanted[] = {rollout, teacher, learner};
        for (int s = 0; s < stage_count; ++s) {
            if (wanted[s] < 0 || wanted[s] > max_workers)
                throw invalid_input("workers", std::to_string(wanted[s]) + " workers of one stage");
            stages_[std::size_t(s)].workers.assign(std::size_t(wanted[s]), worker_state{true, 0, 0, {}});
            stages_[std::size_t(s)].present = wanted[s];
        }
    }

    void up(stage s, std::int32_t worker, double t) {
        if (worker < 0 || worker >= max_workers)
            throw invalid_input("worker", std::to_string(worker) + " is no worker's number");
        stage_state& state = of(s);
        if (std::size_t(worker) >= state.workers.size()) state.workers.resize(std::size_t(worker) + 1);
        worker_state& w = state.workers[std::size_t(worker)];
        if (w.up) throw invalid_input("worker", describe(s, worker) + " is up already");
        settle(state, clock_.advance(t));
        w.up = true;
        ++state.present;
    }
    void down(stage s, std::int32_t worker, double t) {
        worker_state& w = present(s, worker);
        stage_state& state = of(s);
        const double now = clock_.advance(t);
        settle(state, now);
        if (std::exchange(w.open, 0) > 0) close(state, w, now);
        w.up = false;
        --state.present;
    }
    void begin(stage s, std::int32_t worker, double t) {
        worker_state& w = present(s, worker);
        stage_state& state = of(s);
        const double now = clock_.advance(t);
        if (w.open++ > 0) return;
        settle(state, now);
        w.since = now;
        ++state.busy;
        if (!any_) first_ = now;
        any_ = true;
        ++busy_workers_;
    }
    void end(stage s, std::int32_t worker, double t) {
        worker_state& w = present(s, worker);
        if (w.open == 0) throw invalid_input("worker", describe(s, worker) + " ends an interval that has not begun");
        stage_state& state = of(s);
        const double now = clock_.advance(t);
        if (--w.open > 0) return;
        settle(state, now);
        close(state, w, now);
    }
    /// Moves the time that the figures are as of.
    void observe(double t) { clock_.advance(t); }

    std::int64_t workers(stage s) const { return of(s).present; }
    std::int64_t busy_workers(stage s) const { return of(s).busy; }

    /// Length of the union of the busy intervals of all workers of the stage.
    double merged_time(stage s) const {
        const stage_state& state = of(s);
        return state.merged.value() + (state.busy > 0 ? clock_.now() - state.since : 0.0);
    }
    /// ∫ busy workers / present workers dt: for a constant number of workers, the mean of their busy times.
    double shared_time(stage s) const {
        const stage_state& state = of(s);
        return state.shared.value() + (state.busy > 0 ? (clock_.now() - state.since) * share(state) : 0.0);
    }
    /// T_s of the overlap: shared for rollout, merged for the others.
    double stage_time(stage s) const { return s == stage::rollout ? shared_time(s) : merged_time(s); }
    /// Union of one worker's busy intervals; 0 for a worker never seen.
    double worker_time(stage s, std::int32_t worker) const {
        const stage_state& state = of(s);
        if (worker < 0 || std::size_t(worker) >= state.workers.size()) return 0;
        const worker_state& w = state.workers[std::size_t(worker)];
        return w.total.value() + (w.open > 0 ? clock_.now() - w.since : 0.0);
    }
    double wall_time() const { return any_ ? (busy_workers_ > 0 ? clock_.now() : last_) - first_ : 0.0; }
    /// Nothing while no time has passed.
    std::optional<double> overlap() const {
        double sum = 0;
        for (int s = 0; s < stage_count; ++s) sum += stage_time(static_cast<stage>(s));
        return detail::ratio(sum, wall_time());
    }
    double skew() const { return clock_.skew(); }

private:
    struct worker_state {
        bool up = false;
        std::int64_t open = 0;
        double since = 0;
        detail::precise_sum total;
    };
    struct stage_state {
        std::vector<worker_state> workers;
        std::int64_t present = 0, busy = 0;
        double since = 0; // the sums are as of this time, while anyone is busy
        detail::precise_sum merged, shared;
    };

    static std::string describe(stage s, std::int32_t worker) {
        return std::string(name_of(s)).append(" worker ").append(std::to_string(worker));
    }
    static double share(const stage_state& state) { return double(state.busy) / double(state.present); }

    stage_state& of(stage s) { return stages_[std::size_t(s)]; }
    const stage_state& of(stage s) const { return stages_[std::size_t(s)]; }
    worker_state& present(stage s, std::int32_t worker) {
        stage_state& state = of(s);
        if (worker < 0 || std::size_t(worker) >= state.workers.size() || !state.workers[std::size_t(worker)].up)
            throw invalid_input("worker", describe(s, worker) + " is not up");
        return state.workers[std::size_t(worker)];
    }
    /// Before the number of busy or of present workers changes.
    static void settle(stage_state& state, double now) {
        if (state.busy > 0 && now > state.since) {
            state.merged.add(now - state.since);
            state.shared.add((now - state.since) * share(state));
        }
        state.since = now;
    }
    void close(stage_state& state, worker_state& w, double now) {
        w.total.add(now - w.since);
        --state.busy;
        --busy_workers_;
        last_ = now;
    }

    std::array<stage_state, stage_count> stages_;
    detail::meter_clock clock_;
    double first_ = 0, last_ = 0;
    std::int64_t busy_workers_ = 0;
    bool any_ = false;
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
        if (steps_ > 0 || started_) throw invalid_input("t", "the start comes once, before the first update");
        latest_ = detail::checked_time(t);
        started_ = true;
    }
    /// After an update that consumed so many tokens.
    void step(double t, std::int64_t response_tokens, std::int64_t prompt_tokens = 0) {
        detail::checked_time(t);
        if ((started_ || steps_ > 0) && t < latest_)
            throw invalid_input("t", "an update that ends before the one before it");
        if (response_tokens < 0) throw invalid_input("response_tokens", "a negative number of tokens");
        if (prompt_tokens < 0) throw invalid_input("prompt_tokens", "a negative number of tokens");
        step_seconds_ = started_ || steps_ > 0 ? std::optional<double>(t - latest_) : std::nullopt;
        latest_ = t;
        step_tokens_ = response_tokens + prompt_tokens;
        response_total_ += response_tokens;
        prompt_total_ += prompt_tokens;
        ++steps_;
        if (steps_ == warmup_) {
            origin_ = t;
        } else if (steps_ > warmup_) {
            response_ += response_tokens;
            prompt_ += prompt_tokens;
        }
    }

    std::int64_t steps() const { return steps_; }
    std::int64_t response_tokens() const { return response_total_; }
    std::int64_t prompt_tokens() const { return prompt_total_; }
    /// Σ_{j>warmup} response tokens of update j / (t_J - t_warmup).
    std::optional<double> throughput() const { return rate(response_); }
    /// The same with the prompts' tokens counted too.
    std::optional<double> total_throughput() const { return rate(response_ + prompt_); }
    /// Of the last update: its duration, and (prompt + response tokens) / duration.
    std::optional<double> step_seconds() const { return step_seconds_; }
    std::optional<double> step_rate() const {
        return step_seconds_ ? detail::ratio(double(step_tokens_), *step_seconds_) : std::nullopt;
    }
    /// Mean duration of an update after the warm-up.
    std::optional<double> mean_step_seconds() const {
        return steps_ > warmup_ ? detail::ratio(latest_ - origin_, double(steps_ - warmup_)) : std::nullopt;
    }

private:
    std::optional<double> rate(std::int64_t tokens) const {
        return steps_ > warmup_ ? detail::ratio(double(tokens), latest_ - origin_) : std::nullopt;
    }

    std::int64_t warmup_, steps_ = 0, step_tokens_ = 0;
    std::int64_t response_ = 0, prompt_ = 0, response_total_ = 0, prompt_total_ = 0;
    double origin_ = 0, latest_ = 0;
    bool started_ = false;
    std::optional<double> step_seconds_;
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

    void add(double x, std::int64_t times = 1) {
        if (!detail::finite(x) || x < 0) throw invalid_input("lag", "a lag is finite and not negative");
        if (times < 0) throw invalid_input("times", "a negative count");
        if (times == 0) return;
        if (x > double(bound_)) {
            beyond_ += times;
        } else {
            const auto bin = static_cast<std::size_t>(x * divisions_);
            if (bin >= bins_.size()) bins_.resize(bin + 1);
            bins_[bin] += times;
        }
        count_ += times;
        sum_.add(x * double(times));
        max_ = std::max(max_, x);
    }
    void merge(const lag_histogram& other) {
        if (other.bound_ != bound_ || other.divisions_ != divisions_)
            throw invalid_input("other", "histograms of different bounds or divisions");
        if (other.bins_.size() > bins_.size()) bins_.resize(other.bins_.size());
        for (std::size_t i = 0; i < other.bins_.size(); ++i) bins_[i] += other.bins_[i];
        count_ += other.count_;
        beyond_ += other.beyond_;
        sum_.add(other.sum_.value());
        max_ = std::max(max_, other.max_);
    }

    std::int64_t count() const { return count_; }
    std::int64_t beyond() const { return beyond_; }
    std::int64_t bound() const { return bound_; }
    int divisions() const { return divisions_; }
    /// As many as reach to the largest lag seen within the bound.
    const std::vector<std::int64_t>& bins() const { return bins_; }
    double max() const { return max_; }
    double mean() const { return count_ > 0 ? sum_.value() / double(count_) : 0.0; }
    /// Smallest x such that at least the share q of all lags is <= x; 0 of nothing. Exact for integer lags within the bound.
    /// A fractional lag counts as the lower end of its bin, one beyond the bound as the maximum.
    double quantile(double q) const {
        detail::check_quantile(q);
        if (count_ == 0) return 0;
        std::int64_t upto = 0;
        for (std::size_t i = 0; i < bins_.size(); ++i) {
            upto += bins_[i];
            if (bins_[i] > 0 && double(upto) / double(count_) >= q) return double(i) / divisions_;
        }
        return max_;
    }

    void write(json_writer& out) const {
        out.object().field("count", count_).field("mean", mean()).field("max", max_);
        out.field("p50", quantile(0.5)).field("p90", quantile(0.9)).field("p99", quantile(0.99));
        out.field("bins_per_unit", divisions_).key("bins").array();
        for (const std::int64_t n : bins_) out.value(n);
        out.close().field("beyond", beyond_).close();
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
        check(earlier);
        segments_.push_back({first, 0, earlier});
    }
    /// One version more, of so many updates.
    void advance(std::int64_t updates) {
        check(updates);
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
    static void check(std::int64_t updates) {
        if (updates < 0) throw invalid_input("updates", "a negative number of updates");
    }

    std::vector<segment> segments_;
    version_t version_;
    std::int64_t count_ = 0;
};

/// Unit of a lag.
enum class lag_unit : std::uint8_t { versions, updates };
inline constexpr int lag_unit_count = 2;
constexpr const char* name_of(lag_unit u) { return u == lag_unit::versions ? "versions" : "updates"; }

/// The four lags of one sequence, in both units. Index: lag, then unit.
using lag_values = std::array<std::array<double, lag_unit_count>, lag_count>;

/// Histograms of the four lags in versions and in optimizer updates, of the whole run and of the batch at hand. A response
/// without tokens has a start lag only. Lags reach to the beginning of the update that consumes: with several optimizer
/// updates a version, those within the batch are not counted.
class lag_meter {
public:
    explicit lag_meter(version_t first = 0, std::int64_t bound = 1024, std::int64_t earlier_updates = 1)
        : updates_(first, earlier_updates), earlier_(earlier_updates) {
        for (int l = 0; l < lag_count; ++l)
            for (int u = 0; u < lag_unit_count; ++u)
                run_[std::size_t(l)][std::size_t(u)] = lag_histogram(bound, divisions(static_cast<lag>(l)));
    }

    /// A sequence of the batch that the update at the present version consumes. `start`: version when it was started.
    void add(version_t start, const token_versions& tokens) {
        check_version("start", double(start));
        if (tokens.tokens < 0) throw invalid_input("tokens", "a negative number of tokens");
        const bool any = tokens.tokens > 0;
        if (any) {
            check_version("newest", double(tokens.newest));
            if (!(tokens.oldest <= tokens.newest) || !detail::finite(tokens.mean) ||
                tokens.mean < double(tokens.oldest) || tokens.mean > double(tokens.newest))
                throw invalid_input("tokens", "versions out of order: oldest <= mean <= newest");
        }
        const double from[lag_count] = {double(start), double(tokens.oldest), tokens.mean, double(tokens.newest)};
        for (int l = 0; l < (any ? lag_count : 1); ++l) {
            const double lags[lag_unit_count] = {double(updates_.version()) - from[l],
                                                 std::max(0.0, updates_.since(from[l]))};
            for (int u = 0; u < lag_unit_count; ++u) {
                run_[std::size_t(l)][std::size_t(u)].add(lags[u]);
                batch_stats& b = batch_[std::size_t(l)][std::size_t(u)];
                ++b.count;
                b.sum += lags[u];
                b.max = std::max(b.max, lags[u]);
            }
        }
    }
    /// The update is done: one version more.
    void step(std::int64_t updates) {
        updates_.advance(updates);
        last_ = std::exchange(batch_, {});
    }

    /// The run goes on from this version; lags before it stay counted.
    void begin(version_t first) { updates_ = update_count(first, earlier_); }

    version_t version() const { return updates_.version(); }
    std::int64_t updates() const { return updates_.updates(); }
    const lag_histogram& operator()(lag l, lag_unit u = lag_unit::versions) const {
        return run_[std::size_t(l)][std::size_t(u)];
    }
    /// Of the last batch: means and maxima; 0 of an empty one.
    double batch_mean(lag l, lag_unit u = lag_unit::versions) const {
        const batch_stats& b = last_[std::size_t(l)][std::size_t(u)];
        return b.count > 0 ? b.sum / double(b.count) : 0.0;
    }
    double batch_max(lag l, lag_unit u = lag_unit::versions) const { return last_[std::size_t(l)][std::size_t(u)].max; }

    /// Adds another meter's histograms (another run, another rank), not its versions.
    void merge(const lag_meter& other) {
        for (int l = 0; l < lag_count; ++l)
            for (int u = 0; u < lag_unit_count; ++u)
                run_[std::size_t(l)][std::size_t(u)].merge(other.run_[std::size_t(l)][std::size_t(u)]);
    }

    void write(json_writer& out) const {
        out.object();
        for (int l = 0; l < lag_count; ++l) {
            out.key(name_of(static_cast<lag>(l))).object();
            for (int u = 0; u < lag_unit_count; ++u) {
                out.key(name_of(static_cast<lag_unit>(u)));
                run_[std::size_t(l)][std::size_t(u)].write(out);
            }
            out.close();
        }
        out.close();
    }
    void write_batch(json_writer& out) const {
        out.object();
        for (int l = 0; l < lag_count; ++l) {
            const lag which = static_cast<lag>(l);
            out.key(name_of(which)).object();
            out.field("mean", batch_mean(which)).field("max", batch_max(which));
            out.field("mean_updates", batch_mean(which, lag_unit::updates));
            out.field("max_updates", batch_max(which, lag_unit::updates)).close();
        }
        out.close();
    }

private:
    struct batch_stats {
        std::int64_t count = 0;
        double sum = 0, max = 0;
    };
    static int divisions(lag l) { return l == lag::mean_token ? 16 : 1; } // the one that is no integer
    void check_version(const char* name, double v) const {
        if (v > double(updates_.version()))
            throw invalid_input(name, "a version later than that of the update that consumes it");
    }

    update_count updates_;
    std::int64_t earlier_;
    std::array<std::array<lag_histogram, lag_unit_count>, lag_count> run_;
    std::array<std::array<batch_stats, lag_unit_count>, lag_count> batch_{}, last_{};
};

// --- depths -----------------------------------------------------------------------------------------------------------

/// Time-weighted mean and maximum of a level that changes in steps, from the first `set` to the latest time.
class level_meter {
public:
    void set(std::int64_t level, double t) {
        if (level < 0) throw invalid_input("level", "a negative level");
        const bool first = !clock_.started();
        settle(t);
        if (first) first_ = clock_.now();
        level_ = level;
        max_ = std::max(max_, level);
    }
    void observe(double t) {
        if (clock_.started()) settle(t);
    }
    std::int64_t level() const { return level_; }
    std::int64_t max() const { return max_; }
    double seconds() const { return clock_.started() ? clock_.now() - first_ : 0.0; }
    /// The level itself as long as no time has passed.
    double mean() const { return detail::ratio(area_.value(), seconds()).value_or(double(level_)); }
    double skew() const { return clock_.skew(); }

    void write(json_writer& out) const {
        out.object().field("now", level_).field("mean", mean()).field("max", max_).close();
    }

private:
    void settle(double t) {
        const double before = clock_.now();
        const bool started = clock_.started();
        const double now = clock_.advance(t);
        if (started) area_.add(double(level_) * (now - before));
    }

    detail::meter_clock clock_;
    detail::precise_sum area_;
    double first_ = 0;
    std::int64_t level_ = 0, max_ = 0;
};

/// How long a level was held, by level, exact up to `bound`; and how the level went over time, as means over equal spans of
/// which there are at most `spans`: when they are full, neighbours are joined and the spans double.
class level_profile {
public:
    explicit level_profile(std::int64_t bound = 1 << 16, int spans = 256, double finest = 1e-3)
        : bound_(bound), spans_(static_cast<std::size_t>(spans)), width_(finest) {
        if (bound < 0 || bound > (std::int64_t{1} << 32)) throw invalid_input("bound", "between 0 and 2^32");
        if (spans < 2 || spans % 2 != 0 || spans > (1 << 20)) throw invalid_input("spans", "even, between 2 and 2^20");
        if (!detail::finite(finest) || finest <= 0) throw invalid_input("finest", "a positive number of seconds");
    }

    void set(std::int64_t level, double t) {
        if (level < 0) throw invalid_input("level", "a negative level");
        observe(t);
        if (!clock_.started()) first_ = clock_.advance(t);
        level_ = level;
    }
    void observe(double t) {
        if (!clock_.started()) return;
        const double before = clock_.now(), now = clock_.advance(t);
        if (now > before) spend(before - first_, now - first_);
    }

    /// Seconds spent at a level <= bound; those beyond it together.
    double seconds_at(std::int64_t level) const {
        return level >= 0 && std::size_t(level) < at_.size() ? at_[std::size_t(level)] : 0.0;
    }
    double seconds_beyond() const { return beyond_; }
    double seconds() const { return clock_.started() ? clock_.now() - first_ : 0.0; }
    /// Smallest level that was not exceeded for at least the share q of the time; bound + 1 stands for all beyond.
    std::int64_t quantile(double q) const {
        detail::check_quantile(q);
        double total = beyond_;
        for (const double s : at_) total += s;
        double upto = 0;
        std::int64_t last = 0;
        for (std::size_t i = 0; i < at_.size(); ++i) {
            if (at_[i] <= 0) continue;
            last = std::int64_t(i);
            upto += at_[i];
            if (upto >= q * total) return last;
        }
        return beyond_ > 0 ? bound_ + 1 : last;
    }

    /// Mean level in span i, which covers [i, i+1) · span_seconds() after the first `set`; the last one may be incomplete.
    double span_seconds() const { return width_; }
    std::size_t spans() const { return area_.size(); }
    double span_mean(std::size_t i) const {
        const double covered = std::min(width_, seconds() - double(i) * width_);
        return covered > 0 ? area_.at(i) / covered : 0.0;
    }

    void write(json_writer& out) const {
        out.object().field("seconds", seconds());
        out.field("p5", quantile(0.05)).field("p50", quantile(0.5)).field("p95", quantile(0.95));
        out.field("span_seconds", width_).key("means").array();
        for (std::size_t i = 0; i < spans(); ++i) out.value(span_mean(i));
        out.close().close();
    }

private:
    void spend(double from, double to) { // seconds after the first `set`
        if (level_ > bound_) {
            beyond_ += to - from;
        } else {
            if (std::size_t(level_) >= at_.size()) at_.resize(std::size_t(level_) + 1);
            at_[std::size_t(level_)] += to - from;
        }
        while (to > width_ * double(spans_)) fold();
        // Spans are found by index, not by stepping a time: rounding at an edge can then leave no span out and never loop.
        const auto index = [&](double t) { return std::min(static_cast<std::size_t>(t / width_), spans_ - 1); };
        const std::size_t begin = index(from), end = index(to);
        if (end >= area_.size()) area_.resize(end + 1);
        for (std::size_t i = begin; i <= end; ++i) {
            const double left = i == begin ? from : double(i) * width_;
            const double right = i == end ? to : double(i + 1) * width_;
            area_[i] += double(level_) * std::max(0.0, right - left);
        }
    }
    void fold() {
        for (std::size_t i = 0; 2 * i < area_.size(); ++i)
            area_[i] = area_[2 * i] + (2 * i + 1 < area_.size() ? area_[2 * i + 1] : 0.0);
        area_.resize((area_.size() + 1) / 2);
        width_ *= 2;
    }

    std::int64_t bound_, level_ = 0;
    std::size_t spans_;
    double width_, first_ = 0, beyond_ = 0;
    detail::meter_clock clock_;
    std::vector<double> at_, area_;
};

/// What waits where: sequences being generated, sequences waiting for or with the teacher, scored sequences.
enum class queue : std::uint8_t { running, teacher, ready };
inline constexpr int queue_count = 3;
constexpr const char* name_of(queue q) {
    return q == queue::running ? "running" : q == queue::teacher ? "teacher" : "ready";
}

/// Depths of the queues, the profile of running requests, and the time that a learner with a full batch at hand is held
/// back because the staleness policy waits for an older sequence.
class depth_meter {
public:
    void set(queue q, std::int64_t depth, double t) {
        levels_[std::size_t(q)].set(depth, t);
        if (q == queue::running) profile_.set(depth, t);
    }
    void hold(double t) {
        if (!held_.busy()) held_.begin(t);
    }
    void release(double t) {
        if (held_.busy()) held_.end(t);
    }
    void observe(double t) {
        for (level_meter& l : levels_) l.observe(t);
        profile_.observe(t);
        held_.observe(t);
    }

    const level_meter& operator()(queue q) const { return levels_[std::size_t(q)]; }
    const level_profile& running_profile() const { return profile_; }
    double held_time() const { return held_.busy_time(); }
    double longest_hold() const { return held_.longest(); }
    std::int64_t holds() const { return held_.stretches(); }

    void write(json_writer& out) const {
        out.object();
        for (int q = 0; q < queue_count; ++q) {
            out.key(name_of(static_cast<queue>(q)));
            levels_[std::size_t(q)].write(out);
        }
        out.close();
    }

private:
    std::array<level_meter, queue_count> levels_;
    level_profile profile_;
    busy_meter held_;
};

// --- a run ------------------------------------------------------------------------------------------------------------

/// What is only counted.
enum class tally : std::uint8_t { retried, failed, dropped, aborted, late_reply, worker_lost };
inline constexpr int tally_count = 6;
constexpr const char* name_of(tally c) {
    constexpr const char* names[] = {"retried", "failed", "dropped", "aborted", "late_replies", "workers_lost"};
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

/// All meters of a run. The parts are public: whoever needs one alone calls it. One JSON line per step and one at the end.
class run_metrics {
public:
    stage_meter stages;
    throughput_meter tokens;
    lag_meter lags;
    depth_meter depths;

    explicit run_metrics(const run_metrics_options& options = {})
        : stages(options.rollout_workers, options.teacher_workers, options.learner_workers), tokens(options.warmup),
          lags(options.version, options.lag_bound, options.earlier_updates) {}

    /// When the run's work began: the first step's time is then known, and `time` in the lines counts from here.
    void start(double t) {
        tokens.start(t);
        begin_ = t;
        window_ = current_window(t);
    }
    /// A sequence of the batch that the update in progress consumes.
    void consumed(version_t start_version, const token_versions& versions, std::int64_t prompt_tokens) {
        if (prompt_tokens < 0) throw invalid_input("prompt_tokens", "a negative number of tokens");
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
        last_ = std::exchange(batch_, {});
        observe(t);
        const window now = current_window(t);
        last_window_ = {now.time - window_.time, now.held - window_.held, {}};
        for (std::size_t s = 0; s < stage_count; ++s) last_window_.stages[s] = now.stages[s] - window_.stages[s];
        window_ = now;
        time_ = t;
    }
    void count(tally c, std::int64_t n = 1) { tallies_[std::size_t(c)] += n; }
    std::int64_t sequences() const { return sequences_; }
    void observe(double t) {
        stages.observe(t);
        depths.observe(t);
    }

    /// The last step as one JSON object without a line end. `busy` is each stage's share of the step's time and `overlap`
    /// their sum; `run_overlap` and `throughput` are those of the run so far.
    std::string step_line() const {
        json_writer out;
        out.object().field("step", tokens.steps()).field("version", lags.version()).field("time", time_ - begin_);
        out.field("updates", lags.updates()).field("sequences", last_.sequences);
        out.field("response_tokens", last_.response).field("prompt_tokens", last_.prompt);
        out.field("step_seconds", tokens.step_seconds()).field("step_tokens_per_second", tokens.step_rate());
        out.field("throughput", tokens.throughput());
        std::optional<double> sum = 0.0;
        out.key("busy").object();
        for (std::size_t s = 0; s < stage_count; ++s) {
            const auto share =
                tokens.step_seconds() ? detail::ratio(last_window_.stages[s], last_window_.time) : std::nullopt;
            sum = sum && share ? std::optional<double>(*sum + *share) : std::nullopt;
            out.field(name_of(static_cast<stage>(s)), share);
        }
        out.close().field("overlap", sum).field("run_overlap", stages.overlap());
        out.key("lag");
        lags.write_batch(out);
        out.key("depth");
        depths.write(out);
        out.field("held_seconds", tokens.step_seconds() ? std::optional<double>(last_window_.held) : std::nullopt);
        write_tallies(out);
        return out.close().text();
    }

    /// The run up to time t as one JSON object without a line end.
    std::string summary_line(double t) {
        observe(t);
        json_writer out;
        out.object().field("summary", true).field("steps", tokens.steps()).field("version", lags.version());
        out.field("time", t - begin_).field("updates", lags.updates()).field("sequences", sequences_);
        out.field("response_tokens", tokens.response_tokens()).field("prompt_tokens", tokens.prompt_tokens());
        out.field("throughput", tokens.throughput()).field("total_throughput", tokens.total_throughput());
        out.field("mean_step_seconds", tokens.mean_step_seconds());
        out.field("overlap", stages.overlap()).field("wall_seconds", stages.wall_time());
        out.key("busy_seconds").object();
        for (int s = 0; s < stage_count; ++s)
            out.field(name_of(static_cast<stage>(s)), stages.stage_time(static_cast<stage>(s)));
        out.close().key("merged_busy_seconds").object();
        for (int s = 0; s < stage_count; ++s)
            out.field(name_of(static_cast<stage>(s)), stages.merged_time(static_cast<stage>(s)));
        out.close().key("lag");
        lags.write(out);
        out.key("depth");
        depths.write(out);
        out.key("running_profile");
        depths.running_profile().write(out);
        out.key("held").object().field("seconds", depths.held_time()).field("times", depths.holds());
        out.field("longest", depths.longest_hold()).close();
        write_tallies(out);
        out.field("clock_skew", stages.skew());
        return out.close().text();
    }

private:
    struct batch_counts {
        std::int64_t sequences = 0, response = 0, prompt = 0;
    };
    struct window {
        double time = 0, held = 0;
        std::array<double, stage_count> stages{};
    };
    window current_window(double t) const {
        window w{t, depths.held_time(), {}};
        for (int s = 0; s < stage_count; ++s) w.stages[std::size_t(s)] = stages.stage_time(static_cast<stage>(s));
        return w;
    }
    void write_tallies(json_writer& out) const {
        for (int c = 0; c < tally_count; ++c) out.field(name_of(static_cast<tally>(c)), tallies_[std::size_t(c)]);
    }

    batch_counts batch_, last_;
    window window_, last_window_;
    double time_ = 0, begin_ = 0;
    std::int64_t sequences_ = 0;
    std::array<std::int64_t, tally_count> tallies_{};
};

} // namespace opd::sched
