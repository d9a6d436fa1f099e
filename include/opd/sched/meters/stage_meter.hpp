// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Busy times of the three stages and their overlap. metrics.hpp has the formulas.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "opd/config.hpp"
#include "opd/error.hpp"
#include "opd/sched/meters/measures.hpp"
#include "opd/sched/types.hpp"

namespace opd::sched {

/// Busy times of the three stages and their overlap, with any number of workers in each. Workers may come and go;
/// going ends what the worker has open. Memory: 40 bytes a worker. Cost of a call: a few nanoseconds, no allocation
/// but by `up`.
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

} // namespace opd::sched
