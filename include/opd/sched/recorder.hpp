// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The connection between a driver and the meters: an observer for thread_driver::observe() and virtual_driver that
// fills a run_metrics and, if there is one, a trace.
//
//   stages    busy intervals of all workers; they come and go as the driver says, so none is present from the start.
//             Spare work is not among them: its seconds are counted apart, and are spans of their own in the trace
//   tokens    what each step consumed; `prompt_tokens`, if given, says how long a sample's prompt is
//   lags      of what each step consumed; from the scheduler's version at the first event, so also of a resumed run
//   transfers what each rollout worker needs from being told to install weights to having them; how long admission is
//             closed
//   depths    sequences in rollout; queued for or with the teacher; scored. The time that a policy holds the learner
//             back
//   tallies   differences of the scheduler's counters
//   trace     busy intervals, the closed gate, holds, lost workers and, if wanted, the life of each sequence
//
// Source: AsyncOPD, appendix G (overlap, throughput).
#pragma once

#include <algorithm>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "opd/sched/metrics.hpp"
#include "opd/sched/scheduler.hpp"
#include "opd/sched/trace.hpp"

namespace opd::sched {

/// For run_metrics that a recorder fills.
inline run_metrics_options recorded(run_metrics_options o = {}) {
    o.rollout_workers = o.teacher_workers = o.learner_workers = 0;
    return o;
}

/// Not thread-safe; drivers call an observer from one thread at a time. The meters must outlive it; whoever reads them
/// during a run does so in `after_step`, or holds off the driver otherwise.
class recorder {
public:
    /// Called after each step has been recorded, where the driver calls its observer: metrics.last_step() is that step.
    std::function<void(version_t, double time)> after_step;
    std::function<std::int64_t(sample_t)> prompt_tokens;
    bool trace_sequences = false; ///< a span for each consumed sequence, from its start to the step

    explicit recorder(run_metrics& m, sched::trace* t = nullptr) : metrics_(m), trace_(t) {}

    void up(stage s, std::int32_t worker, double t) {
        if (s == stage::rollout) rollouts_.insert(worker);
        metrics_.stages.up(s, worker, t);
    }
    void down(stage s, std::int32_t worker, double t) {
        if (s == stage::rollout) {
            rollouts_.erase(worker);
            metrics_.transfers.gone(worker);
        }
        end_span(s, worker, t);
        metrics_.stages.down(s, worker, t);
    }
    void begin(stage s, std::int32_t worker, double t, activity what = activity::work) {
        if (what == activity::spare)
            spare_since_[worker_track(s, worker)] = t;
        else {
            metrics_.stages.begin(s, worker, t);
            if (trace_) since_.try_emplace(worker_track(s, worker), t);
        }
    }
    void end(stage s, std::int32_t worker, double t, activity what = activity::work) {
        if (what == activity::spare) {
            const auto node = spare_since_.extract(worker_track(s, worker));
            if (!node) return;
            metrics_.spare(std::max(t - node.mapped(), 0.0));
            if (trace_) trace_->span(s, worker, spare_name, node.mapped(), std::max(t, node.mapped()));
        } else {
            end_span(s, worker, t);
            metrics_.stages.end(s, worker, t);
        }
    }

    void event(double t, const sched::event& e, const actions& out, const scheduler& now) {
        const counters& c = now.totals();
        if (!std::exchange(any_, true)) begin(out, now);
        if (e.what == sched::event::kind::synced) metrics_.transfers.installed(e.worker, e.job, t);
        for (const action& a : out.items) {
            switch (a.what) {
            case action::kind::sync:
                if (a.worker >= 0)
                    metrics_.transfers.asked(a.worker, a.job, t);
                else
                    for (const std::int32_t w : rollouts_) metrics_.transfers.asked(w, a.job, t);
                break;
            case action::kind::start:
                if (trace_ && trace_sequences) starts_[a.ticket.slot] = {a.ticket.sample, t};
                break;
            case action::kind::abort:
                metrics_.count(tally::aborted);
                break;
            case action::kind::lost:
                if (trace_) trace_->fault(a.stage, a.worker, t, "missed a deadline");
                break;
            case action::kind::fail:
                if (trace_) trace_->instant(sequence_track(a.ticket), name_of(a.why), t);
                break;
            case action::kind::step:
                step(t, a, out, c);
                break;
            default:
                break;
            }
        }
        count(tally::retried, c.retries, before_.retries);
        count(tally::late_reply, c.late, before_.late);
        count(tally::worker_lost, c.lost_workers, before_.lost_workers);
        count(tally::parked, c.parked, before_.parked);
        const auto stale = static_cast<std::size_t>(failure::stale);
        count(tally::dropped, c.failed_by[stale], before_.failed_by[stale]);
        count(tally::failed, c.failed - c.failed_by[stale], before_.failed - before_.failed_by[stale]);
        before_ = c;

        const census w = now.where();
        metrics_.depths.set(queue::running, w.rollout, t);
        metrics_.depths.set(queue::teacher, w.queued + w.scoring, t);
        metrics_.depths.set(queue::ready, w.ready, t);
        follow(held_, now.held_back(), t, [&](double from) {
            metrics_.depths.release(t);
            if (trace_) trace_->hold(from, t);
        });
        if (held_) metrics_.depths.hold(t);
        follow(gate_, !now.gate_open(), t, [&](double from) {
            metrics_.transfers.open(t);
            if (trace_) trace_->gate(from, t, now.version());
        });
        if (gate_) metrics_.transfers.close(t);
    }

private:
    /// A resumed run: what was counted before is not ours, and versions go on where they were.
    void begin(const actions& out, const scheduler& now) {
        before_ = now.totals();
        version_t first = now.version();
        for (const action& a : out.items) first -= a.what == action::kind::step;
        if (metrics_.lags.version() != first) metrics_.lags.begin(first);
    }
    template <class F>
    static void follow(std::optional<double>& since, bool is, double t, F&& ended) {
        if (is == since.has_value()) return;
        if (since) ended(*since);
        since = is ? std::optional<double>(t) : std::nullopt;
    }
    void count(tally what, std::int64_t now, std::int64_t before) {
        if (now > before) metrics_.count(what, now - before);
    }
    void end_span(stage s, std::int32_t worker, double t) {
        if (!trace_) return;
        const auto node = since_.extract(worker_track(s, worker));
        if (node) trace_->span(s, worker, name_of(s), node.mapped(), t);
    }
    void step(double t, const action& a, const actions& out, const counters& c) {
        for (const consumed_sequence& s : out.consumed_by(a)) {
            token_versions versions = s.versions; // a mean of equal versions may round beyond them
            versions.mean =
                std::clamp(versions.mean, static_cast<double>(versions.oldest), static_cast<double>(versions.newest));
            metrics_.consumed(s.start, versions, prompt_tokens ? prompt_tokens(s.ticket.sample) : 0);
            if (!trace_ || !trace_sequences) continue;
            const auto node = starts_.extract(s.ticket.slot);
            if (node && node.mapped().first == s.ticket.sample)
                trace_->span(sequence_track(s.ticket), "sequence " + std::to_string(s.ticket.sample),
                             node.mapped().second, t,
                             {{"tokens", s.versions.tokens}, {"start_lag", a.version - 1 - s.start}});
        }
        // of several steps at once only one had anything to consume
        const std::int64_t updates = a.count > 0 ? c.updates - before_.updates : 0;
        metrics_.step(t, updates);
        if (trace_) trace_->instant(gate_track, "step", t, {{"version", a.version}, {"sequences", a.count}});
        if (after_step) after_step(a.version, t);
    }

    run_metrics& metrics_;
    sched::trace* trace_;
    counters before_;
    bool any_ = false;
    std::map<track, double> since_, spare_since_;                 // of busy workers
    std::map<std::uint32_t, std::pair<sample_t, double>> starts_; // by slot
    std::set<std::int32_t> rollouts_;                             // that are there
    std::optional<double> held_, gate_;
};

} // namespace opd::sched
