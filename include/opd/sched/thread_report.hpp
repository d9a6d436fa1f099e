// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What a run on threads (thread_driver.hpp) is told beforehand, calls while it runs, and says afterwards.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "opd/config.hpp"
#include "opd/error.hpp"
#include "opd/sched/conveyor.hpp"
#include "opd/sched/scheduler.hpp"
#include "opd/sched/types.hpp"

namespace opd::sched {

/// Seconds on the clock of all times that the driver reports.
inline double steady_seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

/// How long a run waits for its threads, when it stops by itself, how often it is written down. Seconds of the steady
/// clock.
struct thread_options {
    double drain_seconds = 30;    ///< after a request to stop: for what is outstanding to be finished
    double shutdown_seconds = 10; ///< for threads to return once the run is over; then they are left behind
    double stranded_seconds = 0;  ///< a stage that has had no worker for so long stops the run; 0: it waits for ever
    bool stop_on_error = false;   ///< the first exception of a stage stops the run, without draining
    /// Versions between two calls of on_checkpoint, each of which copies the running prefixes of all workers; 0: only
    /// as request_checkpoint() asks.
    index_t checkpoint_every = 0;
};

/// A step is complete: an update consumed these, by sample, and all rollout workers have its weights.
template <class Rolled, class Scored>
struct step_report {
    version_t version = 0; ///< now; the update was made at version - 1
    double time = 0;       ///< steady_seconds() at its completion
    counters totals;       ///< at its completion
    std::vector<sequence_view<Rolled, Scored>> consumed;
};

/// What a driver calls while it runs; either may be empty. What one throws stops the run.
template <class Rolled, class Scored>
struct thread_hooks {
    /// On the learner's thread, between two updates, without a lock: rollout and scoring go on meanwhile. One that is
    /// still at work `shutdown_seconds` after a stopped run's end is left behind as a stage is.
    std::function<void(const step_report<Rolled, Scored>&)> on_step;
    /// Likewise, after on_step of the same version.
    std::function<void(run_snapshot<Rolled, Scored>)> on_checkpoint;
};

/// A worker as a report names it.
struct worker_name {
    sched::stage stage = sched::stage::rollout;
    std::int32_t worker = -1;
    bool operator==(const worker_name&) const = default;
};

/// A sequence that was admitted and never consumed, and why.
struct discarded_sequence {
    sched::ticket ticket;
    failure why = failure::stopped;
    place where = place::waiting; ///< why = stopped: where it was
};

/// What run() returns: how the run ended, what was lost, what went wrong first.
struct run_report {
    bool completed = false; ///< all that was to be consumed was, or failed; not stopped before
    version_t version = 0;
    counters totals;
    std::vector<discarded_sequence> discarded; ///< but for stale ones, which totals.failed_by counts
    std::exception_ptr first_exception;
    std::optional<worker_name> first_exception_at; ///< none: on_step, on_checkpoint or the driver
    std::int64_t exceptions = 0;
    std::exception_ptr first_observer_exception; ///< of an observer, which stops nothing
    std::int64_t observer_exceptions = 0;
    /// The run ended as failed, for this stage: nothing was learnt from for `fruitless_steps`, or no rollout worker
    /// can install.
    std::optional<stage> failed;
    std::exception_ptr last_exception_of_failed; ///< null: it threw none
    std::vector<worker_name> left_behind;        ///< threads that did not return
    double seconds = 0;                          ///< of run()
};

namespace detail {

/// What the report says of exceptions.
class run_log {
public:
    run_report report;
    bool broken = false; // by what no stage threw
    bool closed = false; // what comes from now on is not in it

    /// True: the run cannot go on. `where` none: no stage threw it.
    bool threw(std::exception_ptr e, const std::optional<worker_name>& where) {
        if (closed) return false;
        ++report.exceptions;
        if (where) last_[static_cast<std::size_t>(where->stage)] = e;
        if (!report.first_exception) {
            report.first_exception = std::move(e);
            report.first_exception_at = where;
        }
        broken = broken || !where;
        return !where;
    }
    void observer_threw(std::exception_ptr e) {
        if (!closed && report.observer_exceptions++ == 0) report.first_observer_exception = std::move(e);
    }
    /// The run has failed, after what that stage threw last.
    void failed(stage s) {
        if (report.failed) return;
        report.failed = s;
        report.last_exception_of_failed = last_[static_cast<std::size_t>(s)];
        if (!report.first_exception)
            report.first_exception = std::make_exception_ptr(error(
                std::string("opd: the run has failed: nothing was learnt from any more, for want of ") + name_of(s)));
    }

private:
    std::array<std::exception_ptr, stage_count> last_; // of each stage
};

} // namespace detail
} // namespace opd::sched
