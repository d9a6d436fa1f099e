// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Schedulers of the C interface: an opd::sched::scheduler, the actions that no call has returned yet, and its meters.
#include "sched.hpp"

#include <algorithm>
#include <cmath>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>

#include "handles.hpp"
#include "json.hpp"
#include "opd/sched/observer.hpp"
#include "opd/sched/recorder.hpp"

namespace {

using namespace opd_c;

/// What one event led to. The caller's actions point into it.
struct consequences {
    sched::actions made;
    std::vector<opd_ticket> tickets;
    std::vector<opd_consumed> consumed;
    std::size_t next = 0; // of made.items: the first that no call has returned
    bool translated = false;

    std::size_t left() const { return made.items.size() - next; }
    void translate() {
        if (translated) return;
        tickets.clear(), consumed.clear();
        for (const sched::ticket& t : made.tickets) tickets.push_back(to_c(t));
        for (const sched::consumed_sequence& s : made.consumed) consumed.push_back(to_c(s));
        translated = true;
    }
    opd_action action(const sched::action& a) const {
        const auto& [what, stage, why, where, worker, incarnation, ticket, version, job, from, first, count] = a;
        opd_action r = {};
        r.kind = static_cast<int>(what), r.stage = static_cast<int>(stage), r.why = static_cast<int>(why);
        r.where = static_cast<int>(where), r.worker = worker, r.incarnation = incarnation;
        r.ticket = to_c(ticket), r.version = version, r.job = job, r.from = from, r.count = count;
        if (what == action_kind::step)
            r.consumed = consumed.data() + first;
        else if (what == action_kind::score || what == action_kind::train)
            r.tickets = tickets.data() + first;
        return r;
    }
    void clear() {
        made.clear();
        next = 0, translated = false;
    }
};

struct meters {
    sched::run_metrics metrics;
    sched::recorder recorder;
    bool begun = false;
    double latest = -sched::forever;
    std::string fault; // what the meters threw: the scheduler goes on without them
    explicit meters(const sched::run_metrics_options& o) : metrics(o), recorder(metrics) {}

    void event(double now, const sched::event& e, const sched::actions& made, const sched::scheduler& s) {
        if (!fault.empty()) return;
        try {
            if (!std::exchange(begun, true)) metrics.start(now);
            latest = std::max(latest, now);
            recorder.event(now, e, made, s);
        } catch (const std::exception& e) {
            fault = e.what();
        }
    }
};

sched::worker_change change_of(int value) {
    using change = sched::worker_change;
    static_assert(OPD_WORKER_UP == static_cast<int>(change::up) && OPD_WORKER_DOWN == static_cast<int>(change::down) &&
                  OPD_WORK_BEGINS == static_cast<int>(change::begin) &&
                  OPD_WORK_ENDS == static_cast<int>(change::end) &&
                  OPD_SPARE_BEGINS == static_cast<int>(change::begin_spare) &&
                  OPD_SPARE_ENDS == static_cast<int>(change::end_spare));
    return one_of("change", value,
                  {change::up, change::down, change::begin, change::end, change::begin_spare, change::end_spare});
}

} // namespace

struct opd_scheduler {
    std::mutex turn;
    sched::scheduler core;
    std::optional<sched::run_metrics_options> measured;
    std::unique_ptr<meters> meter;
    std::deque<consequences> pending;
    std::vector<sched::ticket> scratch;

    opd_scheduler(sched::scheduler s, const opd_scheduler_settings& o)
        : core(std::move(s)), measured(o.measure != 0 ? std::optional(metrics_of("settings", o)) : std::nullopt) {
        begin_metrics();
    }
    void begin_metrics() { meter = measured ? std::make_unique<meters>(*measured) : nullptr; }

    std::size_t waiting() const {
        std::size_t n = 0;
        for (const consequences& c : pending) n += c.left();
        return n;
    }
    void none_waiting(const char* what) const {
        if (const std::size_t n = waiting(); n > 0)
            refuse("scheduler", "has " + std::to_string(n) + " actions that no call has returned, which " + what +
                                    ": take them with opd_scheduler_actions()");
    }
    void forget_returned() {
        while (pending.size() > 1 && pending.front().left() == 0) pending.pop_front();
        if (!pending.empty() && pending.front().left() == 0)
            pending.front().clear(); // its memory serves the next event
    }
    void on(const sched::event& e, double now) {
        if (pending.empty() || !pending.back().made.items.empty()) pending.emplace_back(); // before anything changes
        consequences& c = pending.back();
        try {
            core.on(e, now, c.made);
        } catch (const opd::invalid_input& x) { // of a resize: settings that cannot be
            if (!x.argument.starts_with("schedule.")) throw;
            throw opd::invalid_input("event.count", text_of(x));
        }
        if (meter) meter->event(now, e, c.made, core);
    }
    std::size_t return_to(const strided<opd_action>& to, std::size_t capacity) {
        std::size_t n = 0, reached = 0;
        for (std::size_t i = 0; i < pending.size() && reached < capacity; ++i) {
            pending[i].translate();
            reached += pending[i].left();
        }
        for (std::size_t i = 0; i < pending.size() && n < capacity; ++i) {
            consequences& c = pending[i];
            for (; c.left() > 0 && n < capacity; ++c.next, ++n) {
                opd_action* const a = to[n];
                a->struct_size = to.size();
                write("actions", a, c.action(c.made.items[c.next]));
            }
        }
        return n;
    }
};

namespace {

/// body(scheduler), alone.
template <class Body>
int with(opd_scheduler* scheduler, Body&& body) {
    return guarded([&] {
        const auto held = handles<opd_scheduler>().of("scheduler", scheduler);
        const std::lock_guard turn(held->turn);
        body(*held);
    });
}
template <class Body>
auto in_row(std::size_t row, Body&& body) {
    try {
        return body();
    } catch (const opd::invalid_input& e) {
        std::string name = e.argument == "event" ? "events" : e.argument;
        if (name.starts_with("event.")) name.replace(0, std::string("event").size(), "events");
        throw opd::invalid_input(name, text_of(e), static_cast<opd::index_t>(row));
    }
}
template <class Make>
void create(opd_scheduler** out, const opd_scheduler_settings* settings, Make&& make) {
    if (out == nullptr) refuse("out", "is a null pointer");
    const opd_scheduler_settings o = read("settings", settings);
    const sched::settings s = settings_of("settings", o);
    *out = handles<opd_scheduler>().add(std::make_shared<opd_scheduler>(make(s), o));
}

} // namespace

extern "C" {

int opd_scheduler_create(const opd_scheduler_settings* settings, opd_scheduler** out) {
    return guarded([&] { create(out, settings, [](const sched::settings& s) { return sched::scheduler(s); }); });
}
void opd_scheduler_destroy(opd_scheduler* scheduler) { handles<opd_scheduler>().remove(scheduler); }

int opd_scheduler_on(opd_scheduler* scheduler, const opd_event* event, double now, opd_action* actions, size_t capacity,
                     size_t* count) {
    return with(scheduler, [&](opd_scheduler& s) {
        const sched::event e = event_of("event", read("event", event), s.scratch);
        check_room("actions", actions, capacity, count);
        const strided to("actions", actions, capacity);
        s.forget_returned();
        s.on(e, now);
        *count = s.return_to(to, capacity);
    });
}

int opd_scheduler_on_many(opd_scheduler* scheduler, const opd_event* events, size_t event_count, double now,
                          opd_action* actions, size_t capacity, size_t* count, size_t* taken) {
    return with(scheduler, [&](opd_scheduler& s) {
        if (taken != nullptr) *taken = 0;
        const strided from("events", events, event_count);
        check_room("actions", actions, capacity, count);
        const strided to("actions", actions, capacity);
        const auto event = [&](std::size_t i) {
            if (from[i]->struct_size != from.size())
                refuse("events.struct_size", "is " + std::to_string(from[i]->struct_size) + ", and " +
                                                 std::to_string(from.size()) + " of events[0]");
            return event_of("events", read("events", from[i]), s.scratch);
        };
        for (std::size_t i = 0; i < event_count; ++i) in_row(i, [&] { (void)event(i); }); // before any is taken
        s.forget_returned();
        for (std::size_t i = 0; i < event_count; ++i) {
            in_row(i, [&] { s.on(event(i), now); });
            if (taken != nullptr) *taken = i + 1;
        }
        *count = s.return_to(to, capacity);
    });
}

int opd_scheduler_actions(opd_scheduler* scheduler, opd_action* actions, size_t capacity, size_t* count) {
    return with(scheduler, [&](opd_scheduler& s) {
        check_room("actions", actions, capacity, count);
        const strided to("actions", actions, capacity);
        s.forget_returned();
        *count = s.return_to(to, capacity);
    });
}

int opd_scheduler_next_deadline(opd_scheduler* scheduler, double* deadline) {
    return with(scheduler, [&](opd_scheduler& s) {
        if (deadline == nullptr) refuse("deadline", "is a null pointer");
        *deadline = s.core.next_deadline();
    });
}

int opd_scheduler_totals(opd_scheduler* scheduler, opd_scheduler_counters* counters) {
    return with(scheduler, [&](opd_scheduler& s) {
        if (counters == nullptr) refuse("counters", "is a null pointer");
        write("counters", counters, to_c(s.core.totals()));
    });
}

int opd_scheduler_look(opd_scheduler* scheduler, opd_scheduler_state* state) {
    return with(scheduler, [&](opd_scheduler& s) {
        if (state == nullptr) refuse("state", "is a null pointer");
        const sched::scheduler& core = s.core;
        const auto& [waiting, rollout, queued, scoring, ready, training] = core.where();
        opd_scheduler_state r = {};
        r.version = core.version(), r.weights_job = core.weights().job, r.needed_from = core.needed_from();
        r.cursor = core.cursor(), r.permits = core.resolved().permits, r.slack = core.slack();
        r.waiting = waiting, r.rollout = rollout, r.queued = queued;
        r.scoring = scoring, r.ready = ready, r.training = training;
        r.pending = s.waiting();
        r.gate_open = core.gate_open(), r.finished = core.finished(), r.held_back = core.held_back();
        r.failed_stage = core.failed() ? static_cast<int>(*core.failed()) : -1;
        write("state", state, r);
    });
}

int opd_scheduler_outstanding(opd_scheduler* scheduler, opd_outstanding* sequences, size_t capacity, size_t* count) {
    return with(scheduler, [&](opd_scheduler& s) {
        check_room("sequences", sequences, capacity, count);
        const auto all = static_cast<std::size_t>(s.core.where().outstanding());
        if (capacity != 0) {
            if (capacity < all)
                refuse("capacity", "is " + std::to_string(capacity) + " for " + std::to_string(all) + " sequences");
            s.core.for_each([&, to = sequences](const sched::outstanding_sequence& q) mutable {
                const auto& [ticket, where, start] = q;
                *to++ = {to_c(ticket), start, to_c(s.core.versions_of(ticket)), static_cast<int>(where), 0};
            });
        }
        *count = all;
    });
}

int opd_scheduler_worker(opd_scheduler* scheduler, int32_t stage, int32_t worker, uint32_t* incarnation, int32_t* up) {
    return with(scheduler, [&](opd_scheduler& s) {
        const auto which = enumerator<sched::stage>("stage", stage);
        if (incarnation == nullptr) refuse("incarnation", "is a null pointer");
        if (up == nullptr) refuse("up", "is a null pointer");
        *incarnation = s.core.incarnation_of(which, worker);
        *up = s.core.is_up(which, worker);
    });
}

int opd_scheduler_check(opd_scheduler* scheduler) {
    return with(scheduler, [](opd_scheduler& s) { s.core.check_invariants(); });
}

int opd_scheduler_snapshot(opd_scheduler* scheduler, void* bytes, size_t capacity, size_t* size) {
    return with(scheduler, [&](opd_scheduler& s) {
        s.none_waiting("are in no snapshot");
        hand_out("bytes", s.core.snapshot(), bytes, capacity, size);
    });
}

int opd_scheduler_restore(const opd_scheduler_settings* settings, const void* bytes, size_t size, opd_scheduler** out) {
    return guarded([&] {
        create(out, settings,
               [&](const sched::settings& s) { return sched::scheduler::restore(s, bytes_of(bytes, size)); });
    });
}

int opd_scheduler_abandon_workers(opd_scheduler* scheduler, int32_t keep_prefixes, int32_t reopen) {
    return with(scheduler, [&](opd_scheduler& s) {
        const bool keep = flag("keep_prefixes", keep_prefixes), again = flag("reopen", reopen);
        s.none_waiting("are for workers that would be gone");
        s.core.abandon_workers(keep, again);
        s.begin_metrics(); // the clock may be another
    });
}

int opd_scheduler_observe(opd_scheduler* scheduler, int32_t change, int32_t stage, int32_t worker, double now) {
    return with(scheduler, [&](opd_scheduler& s) {
        const sched::worker_change what = change_of(change);
        const auto whose = enumerator<sched::stage>("stage", stage);
        if (!s.meter) refuse("settings.measure", "is 0: this scheduler keeps no metrics");
        if (!std::isfinite(now)) refuse("now", "is " + std::to_string(now) + ": a time is finite");
        using enum sched::worker_change;
        const bool spare = what == begin_spare || what == end_spare;
        if (spare && whose != sched::stage::rollout) refuse("stage", "is no rollout, which alone does spare work");
        s.meter->latest = std::max(s.meter->latest, now);
        sched::detail::tell(s.meter->recorder, what, whose, worker, now);
    });
}

int opd_scheduler_metrics(opd_scheduler* scheduler, double now, char* text, size_t capacity, size_t* length) {
    return with(scheduler, [&](opd_scheduler& s) {
        if (!s.meter) refuse("settings.measure", "is 0: this scheduler keeps no metrics");
        meters& m = *s.meter;
        if (!(now >= m.latest && now < sched::forever))
            refuse("now", "is " + std::to_string(now) + " after " + std::to_string(m.latest) +
                              ": time is finite and never decreases");
        if (!m.fault.empty()) throw opd::error(m.fault);
        sched::run_metrics at = m.metrics;
        if (!m.begun) at.start(now); // nothing has happened, so no time has passed
        at.observe(now);
        json_visitor visit;
        at.describe(visit);
        hand_out("text", visit.object(), text, capacity, length, true);
    });
}

} // extern "C"
