// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// optimise: no
//
// Who looks on is told what it asks for, and several are told one after the other. (That drivers tell it: virtual,
// threads, spare.)
#include <doctest/doctest.h>
#include <string>

#include "opd/sched/observer.hpp"
#include "opd/sched/scheduler.hpp"

namespace {

using namespace opd::sched;

std::string said;

struct worker_watch {
    const char* name;
    void say(const char* what, stage s, std::int32_t w, double t) const {
        said += std::string(name) + " " + what + " " + name_of(s) + " " + std::to_string(w) + " at " +
                std::to_string(static_cast<int>(t)) + "\n";
    }
    void up(stage s, std::int32_t w, double t) const { say("up", s, w, t); }
    void down(stage s, std::int32_t w, double t) const { say("down", s, w, t); }
    void begin(stage s, std::int32_t w, double t, activity a) const {
        say(a == activity::spare ? "begin spare" : "begin", s, w, t);
    }
    void end(stage s, std::int32_t w, double t, activity a) const {
        say(a == activity::spare ? "end spare" : "end", s, w, t);
    }
};
struct event_watch {
    void event(double t, const opd::sched::event&, const actions& led_to, const scheduler& s) const {
        said += "version " + std::to_string(s.version()) + ", " + std::to_string(led_to.items.size()) + " actions at " +
                std::to_string(static_cast<int>(t)) + "\n";
    }
};

/// All that there is to say, through a driver's any_observer.
template <class Observer>
std::string told(Observer& o) {
    said.clear();
    const detail::any_observer any(o);
    double t = 0;
    for (const worker_change c : {worker_change::up, worker_change::begin, worker_change::end,
                                  worker_change::begin_spare, worker_change::end_spare, worker_change::down})
        any.worker(c, stage::teacher, 3, ++t);
    any.event(++t, event::of(event::kind::tick), actions{}, scheduler(settings{}));
    return said;
}

const std::string of_workers = "a up teacher 3 at 1\na begin teacher 3 at 2\na end teacher 3 at 3\n"
                               "a begin spare teacher 3 at 4\na end spare teacher 3 at 5\na down teacher 3 at 6\n";
const std::string of_events = "version 0, 0 actions at 7\n";

} // namespace

TEST_CASE("each function of an observer is optional") {
    worker_watch a{"a"};
    event_watch b;
    no_observer nobody;
    CHECK(told(a) == of_workers);
    CHECK(told(b) == of_events);
    CHECK(told(nobody) == "");
}

TEST_CASE("observers are told one after the other") {
    worker_watch a{"a"}, c{"c"};
    event_watch b;
    observers both(a, b);
    CHECK(told(both) == of_workers + of_events);
    observers twice(a, c);
    CHECK(told(twice).find("a up teacher 3 at 1\nc up teacher 3 at 1\na begin") == 0);
}
