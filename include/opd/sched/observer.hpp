// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Who looks on while a run goes on: an observer, the same for all drivers. Each function is optional.
//
//   up(stage, worker, time)                        a worker comes, with nothing running,
//   down(stage, worker, time)                      or goes; then it is not busy any more
//   begin(stage, worker, time[, activity])         it begins to be busy,
//   end(stage, worker, time[, activity])           or ends. Without the last argument: not told of spare work
//   event(time, event, actions, scheduler)         the scheduler has taken an event; what it led to is not carried out yet
//
// Called from one thread at a time, where `time` never decreases: as steady_seconds() of threads, in virtual time the
// driver's. recorder.hpp has one that fills metrics and a trace.
#pragma once

#include <cstdint>

#include "opd/sched/events.hpp"
#include "opd/sched/types.hpp"

namespace opd::sched {

/// Who goes is not busy any more.
enum class worker_change : std::uint8_t { up, down, begin, end, begin_spare, end_spare };

/// Nobody looks on.
struct no_observer {};

namespace detail {

template <class Observer>
void tell(Observer& o, worker_change what, stage s, std::int32_t w, double t) {
    const activity doing =
        what == worker_change::begin_spare || what == worker_change::end_spare ? activity::spare : activity::work;
    switch (what) {
    case worker_change::up:
        if constexpr (requires { o.up(s, w, t); }) o.up(s, w, t);
        break;
    case worker_change::down:
        if constexpr (requires { o.down(s, w, t); }) o.down(s, w, t);
        break;
    case worker_change::begin:
    case worker_change::begin_spare:
        if constexpr (requires { o.begin(s, w, t, doing); }) {
            o.begin(s, w, t, doing);
        } else if constexpr (requires { o.begin(s, w, t); }) {
            if (doing == activity::work) o.begin(s, w, t);
        }
        break;
    case worker_change::end:
    case worker_change::end_spare:
        if constexpr (requires { o.end(s, w, t, doing); }) {
            o.end(s, w, t, doing);
        } else if constexpr (requires { o.end(s, w, t); }) {
            if (doing == activity::work) o.end(s, w, t);
        }
        break;
    }
}
template <class Observer, class Scheduler>
void tell(Observer& o, double t, const event& e, const actions& led_to, const Scheduler& s) {
    if constexpr (requires { o.event(t, e, led_to, s); }) o.event(t, e, led_to, s);
}

} // namespace detail
} // namespace opd::sched
