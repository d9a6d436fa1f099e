// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Who looks on while a run goes on: an observer, the same for all drivers. Each function is optional.
//
//   up(stage, worker, time)                    a worker comes, with nothing running,
//   down(stage, worker, time)                  or goes; then it is not busy any more
//   begin(stage, worker, time, activity)       it begins to be busy with its stage's work, or to do spare work,
//   end(stage, worker, time, activity)         or ends
//   event(time, event, actions, scheduler)     the scheduler has taken an event; what it led to is not carried out yet
//   drawn(ticket, tokens, time)                an attempt is let go of, or fails, or ends with its worker, and its
//                                              sequence had so many tokens by then; if the worker knows
//
// Called from one thread at a time; `time` never decreases: steady_seconds() on threads, else virtual time. On
// threads an observer is called under the driver's lock: it must be quick and must not call the driver, and what it
// throws stops nothing. recorder.hpp has one that fills metrics and a trace.
#pragma once

#include <cstdint>
#include <functional>
#include <tuple>

#include "opd/sched/events.hpp"
#include "opd/sched/types.hpp"

namespace opd::sched {

class scheduler;

/// What an observer hears of a worker, as one value.
enum class worker_change : std::uint8_t { up, down, begin, end, begin_spare, end_spare };

/// Nobody looks on.
struct no_observer {};

namespace detail {

template <class Observer>
void tell(Observer& o, worker_change what, stage s, std::int32_t w, double t) {
    constexpr bool begins = requires(activity a) { o.begin(s, w, t, a); };
    constexpr bool ends = requires(activity a) { o.end(s, w, t, a); };
    static_assert((begins || !requires { o.begin(s, w, t); }) && (ends || !requires { o.end(s, w, t); }),
                  "opd: begin and end of an observer take an activity, too");
    const bool spare = what == worker_change::begin_spare || what == worker_change::end_spare;
    const activity doing = spare ? activity::spare : activity::work;
    switch (what) {
    case worker_change::up:
        if constexpr (requires { o.up(s, w, t); }) o.up(s, w, t);
        break;
    case worker_change::down:
        if constexpr (requires { o.down(s, w, t); }) o.down(s, w, t);
        break;
    case worker_change::begin:
    case worker_change::begin_spare:
        if constexpr (begins) o.begin(s, w, t, doing);
        break;
    case worker_change::end:
    case worker_change::end_spare:
        if constexpr (ends) o.end(s, w, t, doing);
        break;
    }
}
template <class Observer, class Scheduler>
void tell(Observer& o, double t, const event& e, const actions& led_to, const Scheduler& s) {
    if constexpr (requires { o.event(t, e, led_to, s); }) o.event(t, e, led_to, s);
}

template <class Observer>
void tell(Observer& o, const ticket& which, std::int64_t tokens, double t) {
    if constexpr (requires { o.drawn(which, tokens, t); }) o.drawn(which, tokens, t);
}

/// One of any kind; or nobody.
struct any_observer {
    std::function<void(worker_change, stage, std::int32_t worker, double time)> worker;
    std::function<void(double time, const event&, const actions&, const scheduler&)> event;
    std::function<void(const ticket&, std::int64_t tokens, double time)> drawn;

    any_observer() = default;
    template <class Observer>
    explicit any_observer(Observer& o)
        : worker([&o](worker_change what, stage s, std::int32_t w, double t) { tell(o, what, s, w, t); }),
          event([&o](double t, const sched::event& e, const actions& led_to, const scheduler& s) {
              tell(o, t, e, led_to, s);
          }),
          drawn([&o](const ticket& which, std::int64_t tokens, double t) { tell(o, which, tokens, t); }) {}
};

} // namespace detail

/// Several, each told after the one before it.
template <class... Observer>
class observers {
public:
    explicit observers(Observer&... o) : all_(o...) {}
    void up(stage s, std::int32_t w, double t) { tell(worker_change::up, s, w, t); }
    void down(stage s, std::int32_t w, double t) { tell(worker_change::down, s, w, t); }
    void begin(stage s, std::int32_t w, double t, activity a) {
        tell(a == activity::spare ? worker_change::begin_spare : worker_change::begin, s, w, t);
    }
    void end(stage s, std::int32_t w, double t, activity a) {
        tell(a == activity::spare ? worker_change::end_spare : worker_change::end, s, w, t);
    }
    template <class Scheduler>
    void event(double t, const sched::event& e, const actions& led_to, const Scheduler& s) {
        tell(t, e, led_to, s);
    }
    void drawn(const ticket& which, std::int64_t tokens, double t) { tell(which, tokens, t); }

private:
    template <class... What>
    void tell(const What&... what) {
        std::apply([&](auto&... one) { (detail::tell(one, what...), ...); }, all_);
    }
    std::tuple<Observer&...> all_;
};

} // namespace opd::sched
