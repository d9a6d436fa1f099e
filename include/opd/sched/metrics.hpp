// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What a run of the three stages is measured by. Every time is a double in seconds that the caller hands in, from any
// clock (steady_clock, virtual time): nothing here reads one. Nothing here locks: the caller serialises.
//
//   overlap     = (T_rollout + T_teacher + T_learner) / T_wall                 between 0 and 3, 1 for a serial schedule
//                 T_teacher, T_learner: length of the union of the stage's busy intervals
//                 T_rollout = (1/N) Σ_i T_i, T_i the length of the union of worker i's busy intervals
//                 T_wall: from the beginning of the first to the end of the last recorded interval
//   throughput  = Σ_{j=6..J} n_j / (t_J - t_5)        n_j: response tokens that update j consumed, t_j: time after it
//   lag         = version of the update that consumes a token - version of the weights that drew it
//
// Source: AsyncOPD, appendix G (overlap, throughput) and section 3 (lag). Overlap measures concurrency, not
// efficiency: a stage that waits busily scores. Where workers come and go the paper has no formula; here T_rollout =
// ∫ b(t)/n(t) dt with b of n present workers busy, which is the paper's figure for a constant n and never exceeds
// T_wall.
//
// Exact (to rounding of one sum, compensated): all of the above, counts, maxima, quantiles of integers within the
// bound of their histogram. Approximate, as said where they are: quantiles beyond the bound and of fractional lags;
// the lag in optimizer updates of a mean version where updates per version change. Memory does not grow with time,
// but by an entry for each change of the number of optimizer updates in a version.
//
// A meter describes itself: describe(visit) calls visit(name, value) for each figure. A value is a number, an
// optional of one (empty: not known yet), a vector of numbers, or a group, which has a describe(visit) itself.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>

#include "opd/config.hpp"
#include "opd/element.hpp"
#include "opd/error.hpp"
#include "opd/sched/meters/depth_meter.hpp"
#include "opd/sched/meters/lag_meter.hpp"
#include "opd/sched/meters/measures.hpp"
#include "opd/sched/meters/stage_meter.hpp"
#include "opd/sched/meters/throughput_meter.hpp"
#include "opd/sched/meters/transfer_meter.hpp"
#include "opd/sched/types.hpp"

namespace opd::sched {

/// What is only counted.
enum class tally : std::uint8_t { retried, failed, dropped, aborted, late_reply, worker_lost, parked };
/// How many of them there are: sizes of arrays by tally.
inline constexpr int tally_count = 7;
constexpr const char* name_of(tally c) {
    constexpr const char* names[] = {"retried",      "failed",       "dropped", "aborted",
                                     "late_replies", "workers_lost", "parked"};
    return names[static_cast<int>(c)];
}

/// Who is there at the start, and what the figures leave out.
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
    /// To be described: the last step, up to the next. `busy` is each stage's share of the step's time and `overlap`
    /// their sum; `run_overlap` and `throughput` are those of the run so far.
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
