// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Runs a scheduler in virtual time: a discrete-event executor that is deterministic to the last bit. Durations,
// lengths and faults come from a *model*; the events of one moment are handled in the order in which they were
// caused.
//
//   model, always                              answers
//     rollout(worker)                          a fresh rollout worker (see rollout_worker)
//     start(rollout worker, ticket)            starts it there. Or, where sequences are parked, (rollout worker,
//                                              ticket, version of its start, whether it goes on from what was parked)
//     teacher(job, worker, tickets)            seconds of a scoring call
//     learner(job, weights, tickets)           seconds of a train step from those weights
//     sync(worker, weights)                    seconds of installing them; the worker stands still and keeps what it
//                                              runs
//   model, if it has them
//     transfer(worker, weights)                seconds until the weights have come and their install begins; it goes on
//                                              with what it runs. Not of workers that move in quanta (timed_rollout)
//     rollout_fault(ticket), teacher_fault(job, worker), learner_fault(job), sync_fault(worker, weights, life)
//                                              a `fault` (fault.hpp)
//     publication(job)                         seconds from a learner's answer until what it published is lost; none:
//                                              never
//     recovery(stage, worker, life)            seconds until a worker that the scheduler gave up is back; none: never
//     rolled(ticket, token_versions, payload)  what the rollout worker made
//     parked(ticket, token_versions, payload)  what it had made of a sequence that was parked
//     scored(job, worker, tickets)             a scoring call is over: tickets that are scored (none: all); may throw:
//                                              it failed
//     learned(job, weights, tickets)           a train step is over: optimizer updates (none: 1); may throw: it failed
//     fields(archive)                          its state, for snapshots
//   Faults must be functions of their arguments and a seed: they are asked for more than once.
//
//   observer: observer.hpp
//
// The dispatcher (dispatcher.hpp) is between scheduler and driver; payloads are the model's. What is to come is in
// virtual_agenda.hpp, who is there in virtual_workers.hpp.
//
// Where several stages share devices, their durations say so (a learner on all of the devices is faster); nothing
// here models devices. A worker that dies takes its running work with it; a reply that is late survives it. What a
// learner has published outlives it, unless the model loses it.
//
// Above 600 lines: one loop over one queue of events, whose order is the result.
#pragma once

#include <cmath>
#include <exception>
#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <utility>

#include "opd/sched/dispatcher.hpp"
#include "opd/sched/fault.hpp"
#include "opd/sched/observer.hpp"
#include "opd/sched/scheduler.hpp"
#include "opd/sched/simulated.hpp"
#include "opd/sched/virtual_agenda.hpp"
#include "opd/sched/virtual_workers.hpp"

namespace opd::sched {

/// A rollout worker in virtual time; simulated_rollout is one, timed_rollout makes one of a real stage.
template <class W>
concept rollout_worker = requires(W w, const W c, const ticket& t, const weights& v, double dt) {
    { w.abort(t) } -> std::convertible_to<bool>; // false: it does not run
    w.install(v);
    { c.next() } -> std::convertible_to<double>; // seconds until it has something to report
    w.advance(dt, [](const ticket&, const token_versions&, auto&&...) {});
    { c.running() } -> std::convertible_to<index_t>;
    // if it counts them: c.drawn(dt, f) calls f(ticket, tokens of its response dt seconds from now) for all that runs
};

/// `Scheduler`: sched::scheduler, or one that stands in for it in a test.
template <class Model, class Observer = no_observer, class Scheduler = sched::scheduler>
class virtual_driver {
public:
    using worker_type = decltype(std::declval<Model&>().rollout(std::int32_t{}));
    static_assert(rollout_worker<worker_type>);

    virtual_driver(const settings& s, Model m, Observer* o = nullptr) : work_(Scheduler(s)), model_(std::move(m)) {
        workers_.observer = o;
    }

    /// Who is told what happens; not copied into snapshots.
    void observe(Observer* o) { workers_.observer = o; }

    /// Hands the scheduler `e` at time t: workers that come (their slots) and go, lost weights, pause, resume,
    /// resize, close, stop. A worker that comes is new unless it is there already; which life of it that is the
    /// driver says.
    void at(double t, const event& e) {
        if (!(t >= now_ && t < forever))
            throw invalid_input("t", "must be finite and not before now, " + std::to_string(now_) + ", not " +
                                         std::to_string(t));
        if (!e.tickets.empty()) throw invalid_input("event", "an event from outside names no tickets");
        if (const settings& s = scheduler().options();
            e.from_worker() && (e.worker >= s.most_workers || e.slots > s.most_slots))
            throw invalid_input("event", "names worker " + std::to_string(e.worker) + " with " +
                                             std::to_string(e.slots) +
                                             " slots, more than settings.most_workers or most_slots");
        record& r = agenda_.push(t, record::kind::deliver);
        r.what = e;
        r.outside = true;
    }
    /// Workers 0 … count-1 of a stage, now.
    void bring_up(stage s, std::int32_t count, std::int32_t slots = 1) {
        for (std::int32_t w = 0; w < count; ++w) at(now_, event::up(s, w, slots));
    }

    /// Lets the scheduler take one more event. False when there is none: the run is over, or stuck (see finished()),
    /// or the next one comes after `last`.
    bool step(double last = forever) {
        if (std::isnan(last)) throw invalid_input("last", "must be a time, not NaN");
        for (;;) {
            const detail::moment wake = workers_.first_wake(), event_at = first_event();
            const double deadline = scheduler().next_deadline(), first = std::min(wake.time, event_at.time);
            if (agenda_.empty() && deadline == forever && workers_.only_spare()) return false; // which nobody waits for
            if (std::min(first, deadline) > last) return false;
            if (deadline < first) { // what comes at the deadline is in time
                now_ = deadline;
                deliver(event::of(event::kind::tick));
                return true;
            }
            if (agenda_.empty() || wake < event_at) {
                if (wake.time == forever) return false;
                now_ = wake.time;
                report(workers_.first_to_wake());
                continue;
            }
            now_ = event_at.time;
            if (handle(agenda_.pop())) return true;
        }
    }
    /// Runs until the scheduler has finished, nothing is left to happen, or after `most` events. Returns finished().
    bool run(std::uint64_t most = std::numeric_limits<std::uint64_t>::max()) {
        for (; most > 0 && !scheduler().finished(); --most)
            if (!step()) break;
        return scheduler().finished();
    }
    /// Runs up to and including time t.
    bool run_until(double t) {
        while (!scheduler().finished() && step(t)) {}
        return scheduler().finished();
    }

    double now() const { return now_; }
    /// When something happens next; `forever` if nothing does.
    double next() const {
        if (agenda_.empty() && workers_.only_spare()) return scheduler().next_deadline();
        return std::min({workers_.first_wake().time, first_event().time, scheduler().next_deadline()});
    }
    /// f(ticket, tokens of its response at the time t, its prefix included) of all that runs; t: from now() to next().
    template <class F>
    void running(double t, F&& f) {
        for (std::int32_t n = 0; n < workers_.count(stage::rollout); ++n) {
            const worker& w = workers_.of(stage::rollout, n);
            if (w.up && !w.silent) w.engine->drawn(!w.installing && t > w.since ? t - w.since : 0.0, f);
        }
    }
    bool finished() const { return scheduler().finished(); }
    /// Events that the scheduler has taken.
    std::uint64_t events() const { return events_; }
    const Scheduler& scheduler() const { return work_.scheduler(); }
    const Model& model() const { return model_; }
    Model& model() { return model_; }
    /// The first that the model's scored() or learned() threw, or that the run has failed; null: none. The scheduler
    /// sees failed calls only.
    std::exception_ptr first_exception() const { return first_exception_; }
    /// Tells the observer who is there, and busy: for one that comes late, as to a driver that was restored.
    void introduce() { workers_.introduce(now_, agenda_); }

    /// All of the state. Equal states give equal bytes.
    std::string snapshot() const {
        archive_writer w;
        w(scheduler().snapshot());
        const_cast<virtual_driver*>(this)->fields(w);
        return seal(std::move(w.bytes));
    }
    /// A driver as it was. Settings are not in the snapshot, and of the model only its fields(). Throws invalid_input
    /// where the snapshot is damaged.
    static virtual_driver restore(const settings& s, Model m, std::string_view snapshot, Observer* o = nullptr) {
        virtual_driver r(s, std::move(m), o);
        archive_reader reader(unseal(snapshot));
        std::string bytes;
        reader(bytes);
        r.work_.scheduler() = Scheduler::restore(s, bytes);
        r.fields(reader);
        if (!reader.done()) throw invalid_input("snapshot", "is longer than the state it describes");
        return r;
    }
    /// The process dies and comes back: of the present state only the scheduler's is kept, every worker that was
    /// there is up again after `seconds`, what was to come from outside still comes. `reopen`: likewise of a run that
    /// had finished, of which more is wanted now.
    void crash(double seconds = 0, bool reopen = false) {
        const std::vector<record> outside = agenda_.clear();
        work_.scheduler().abandon_workers(false, reopen);
        for (const stage s : {stage::rollout, stage::teacher, stage::learner})
            for (std::int32_t w = 0; w < workers_.count(s); ++w) {
                const worker& x = workers_.of(s, w);
                if (x.up) tell_drawn(event::down(s, w)), workers_.take_down(s, w, now_);
                if (x.slots > 0) agenda_.reply(now_ + seconds, event::up(s, w, x.slots));
            }
        for (const record& r : outside) {
            record& again = agenda_.push(std::max(r.when, now_), record::kind::deliver);
            again.what = r.what;
            again.outside = true;
        }
    }

private:
    friend class dispatcher<no_payloads, Scheduler>; // which calls what a carrier has

    using record = detail::agenda::record;
    using staff = detail::virtual_workers<worker_type, Observer>;
    using worker = typename staff::worker;

    static constexpr std::int32_t as_before = -1; // slots of a worker that is back: those it was given last

    detail::moment first_event() const { return agenda_.empty() ? detail::moment{} : agenda_.first(); }
    void reply(double t, const event& e) { agenda_.push(t, record::kind::deliver).what = e; }
    worker& of(stage s, std::int32_t number) { return workers_.of(s, number); }
    static bool alive(const worker& w, std::uint32_t life) { return staff::alive(w, life); }

    // --- what happens

    // True when the scheduler took an event.
    bool handle(const record& r) {
        switch (r.is) {
        case record::kind::deliver: {
            // said by a worker some time ago, or by nobody
            if (r.what.incarnation > 0 || r.what.what > event::kind::worker_down) {
                deliver(r.what);
                return true;
            }
            event e = r.what;
            worker& w = of(e.stage, e.worker);
            if (e.what == event::kind::worker_up) {
                if (e.slots == as_before) e.slots = w.slots;
                workers_.come(e, now_, [this](std::int32_t n) { return model_.rollout(n); });
            } else if (w.up) {
                tell_drawn(e);
                workers_.take_down(e.stage, e.worker, now_);
            }
            deliver(e.of_life(w.life));
            return true;
        }
        case record::kind::fail: {
            worker& w = of(stage::rollout, r.what.ticket.worker);
            if (!alive(w, r.life)) return false;
            touch(r.what.ticket.worker);
            tell_drawn(r.what.ticket.worker, &r.what.ticket);
            const bool ran = w.engine->abort(r.what.ticket);
            settle(r.what.ticket.worker);
            if (ran) deliver(event::rollout_failed(r.what.ticket));
            return ran;
        }
        case record::kind::sync_begin: {
            worker& w = of(stage::rollout, r.what.worker);
            if (!alive(w, r.life)) return false;
            touch(r.what.worker);
            w.installing = true;
            settle(r.what.worker);
            return false;
        }
        case record::kind::sync_end:
            return sync_end(r);
        case record::kind::sync_answer:
            if (!alive(of(stage::rollout, r.what.worker), r.life)) return false;
            deliver(r.what);
            return true;
        case record::kind::job_end:
            return job_end(r);
        case record::kind::death: {
            worker& w = of(r.what.stage, r.what.worker);
            if (!alive(w, r.life)) return false;
            tell_drawn(r.what);
            if (r.bad) {
                workers_.silence(r.what.stage, r.what.worker, now_);
                w.back = r.back; // from when the scheduler finds out
                return false;
            }
            workers_.take_down(r.what.stage, r.what.worker, now_);
            if (r.back < forever) reply(now_ + r.back, event::up(r.what.stage, r.what.worker, as_before));
            deliver(event::down(r.what.stage, r.what.worker).of_life(w.life));
            return true;
        }
        }
        return false;
    }

    void deliver(const event& e) { work_.on(e, now_, *this); }
    void took(const event& e, double now, const actions& led_to) {
        ++events_;
        if (scheduler().failed() && !first_exception_)
            first_exception_ = std::make_exception_ptr(
                error(std::string("opd: the run has failed: nothing was learnt from any more, for want of ") +
                      name_of(*scheduler().failed())));
        if (workers_.observer) detail::tell(*workers_.observer, now, e, led_to, scheduler());
    }
    void carried_out() {
        for (const std::int32_t w : touched_) settle(w);
        touched_.clear();
    }
    void carry_out(const action& a) {
        switch (a.what) {
        case action::kind::start:
            start(a.ticket);
            break;
        case action::kind::abort:
            abort(a.ticket);
            break;
        case action::kind::park:
            park(a.ticket);
            break;
        case action::kind::score:
            score(a);
            break;
        case action::kind::train:
            train(a);
            break;
        case action::kind::sync: {
            const weights what{a.version, a.job};
            if (a.worker >= 0) {
                sync(a.worker, what);
            } else {
                for (std::int32_t w = 0; w < workers_.count(stage::rollout); ++w) sync(w, what);
            }
            break;
        }
        case action::kind::lost:
            lost(a.stage, a.worker);
            break;
        case action::kind::step:
        case action::kind::fail:
        case action::kind::finished:
            break;
        }
    }

    void start(const ticket& t) {
        worker& w = of(stage::rollout, t.worker);
        if (!w.up || w.silent) return;
        const fault f = detail::fault_of_rollout(model_, t);
        mark(t.worker);
        if (f.what == fault::kind::hang) {
            w.hung.push_back(t);
            return;
        }
        // it may go on from what was parked, if the scheduler has not heard that it is lost
        if constexpr (requires { model_.start(*w.engine, t, version_t{}, bool{}); })
            model_.start(*w.engine, t, scheduler().start_of(t), scheduler().versions_of(t).tokens > 0);
        else
            model_.start(*w.engine, t);
        if (f.what == fault::kind::fail) {
            record& r = agenda_.push(now_ + f.after, record::kind::fail);
            r.what = event::rollout_failed(t);
            r.life = w.life;
        }
        may_die(f, stage::rollout, t.worker);
    }

    void abort(const ticket& t) {
        worker& w = of(stage::rollout, t.worker);
        if (!w.up || w.silent) return;
        mark(t.worker);
        const auto hung = std::find(w.hung.begin(), w.hung.end(), t);
        tell_drawn(t.worker, &t);
        if (hung != w.hung.end())
            w.hung.erase(hung);
        else if (!w.engine->abort(t))
            return; // its reply is on the way
        reply(now_, event::aborted(t));
    }

    void park(const ticket& t) {
        if constexpr (requires(worker_type & e) { e.park(t, on_parked()); }) {
            worker& w = of(stage::rollout, t.worker);
            if (!w.up || w.silent) return;
            mark(t.worker);
            w.engine->park(t, on_parked()); // a hung one does not answer
        } else {
            throw std::logic_error("opd: virtual_driver: the model's rollout workers have no park()");
        }
    }
    auto on_parked() {
        return [this](const ticket& t, const token_versions& v, auto&&... made) {
            if constexpr (requires { model_.parked(t, v, std::forward<decltype(made)>(made)...); })
                model_.parked(t, v, std::forward<decltype(made)>(made)...);
            reply(now_, event::parked(t, v));
        };
    }

    void score(const action& a) {
        const auto tickets = work_.actions().of(a);
        const double seconds = model_.teacher(a.job, a.worker, tickets);
        call(stage::teacher, a, seconds, detail::fault_of_teacher(model_, a.job, a.worker));
    }
    void train(const action& a) {
        const auto tickets = work_.actions().of(a);
        const double seconds = model_.learner(a.job, weights{a.version, a.from}, tickets);
        call(stage::learner, a, seconds, detail::fault_of_learner(model_, a.job));
    }
    void call(stage s, const action& a, double seconds, const fault& f) {
        worker& w = of(s, a.worker);
        check_seconds(seconds, name_of(s));
        if (!w.up || w.silent) return;
        workers_.begin(s, a.worker, now_);
        may_die(f, s, a.worker);
        if (f.what == fault::kind::hang) return;
        const bool bad = f.what == fault::kind::fail;
        record& r = agenda_.push(now_ + (bad ? f.after : seconds), record::kind::job_end);
        r.what = event::of(event::kind::scored);
        r.what.stage = s, r.what.worker = a.worker, r.what.job = a.job;
        r.bad = bad;
        r.wrong = f;
        r.life = w.life;
        detail::agenda::job& j = agenda_.begin_job(r);
        j.from = {a.version, a.from};
        const auto tickets = work_.actions().of(a);
        j.tickets.assign(tickets.begin(), tickets.end());
    }
    bool job_end(const record& r) {
        const detail::agenda::job& j = agenda_.end_job(r); // nothing takes its place before this event is over
        const std::int32_t number = r.what.worker;
        if (!alive(of(r.what.stage, number), r.life)) return false;
        workers_.end(r.what.stage, number, now_);
        event answer;
        bool bad = r.bad, some = false;
        index_t updates = 1;
        const std::span<const ticket> tickets(j.tickets);
        if (!bad) try {
                if (r.what.stage == stage::teacher) {
                    if constexpr (requires { part_ = model_.scored(r.what.job, number, tickets); }) {
                        part_ = model_.scored(r.what.job, number, tickets);
                        some = part_.size() < tickets.size();
                    } else if constexpr (requires { model_.scored(r.what.job, number, tickets); }) {
                        model_.scored(r.what.job, number, tickets);
                    }
                } else {
                    if constexpr (requires { model_.learned(r.what.job, j.from, tickets); })
                        updates = static_cast<index_t>(model_.learned(r.what.job, j.from, tickets));
                }
            } catch (const std::exception&) {
                bad = true;
                if (!first_exception_) first_exception_ = std::current_exception();
            }
        if (r.what.stage == stage::teacher)
            answer = bad ? event::score_failed(r.what.job, number) : event::scored(r.what.job, number);
        else
            answer = bad ? event::learn_failed(r.what.job) : event::learned(r.what.job, updates);
        answer.incarnation = r.life;
        if constexpr (requires { model_.publication(r.what.job); })
            if (r.what.stage == stage::learner && !bad)
                if (const double lost = model_.publication(r.what.job); lost < forever)
                    reply(now_ + lost, event::weights_lost(r.what.job));
        if (r.wrong.what == fault::kind::late) {
            reply(now_ + r.wrong.after,
                  some && !bad ? event::score_failed(r.what.job, number).of_life(r.life) : answer);
            return false;
        }
        if (r.wrong.what == fault::kind::twice) reply(now_ + r.wrong.after, answer);
        if (r.wrong.what == fault::kind::partial && r.what.stage == stage::teacher && !some) {
            part_.clear();
            for (std::size_t i = 0; i < tickets.size(); ++i)
                if (r.wrong.which >> (i % 64) & 1) part_.push_back(tickets[i]);
            some = true;
        }
        if (some && !bad)
            answer =
                (part_.empty() ? event::score_failed(r.what.job, number) : event::scored(r.what.job, number, part_))
                    .of_life(r.life);
        if (r.wrong.what == fault::kind::gone && !bad && !lose(r, tickets, answer)) return true;
        deliver(answer);
        return true;
    }
    // Some of a call's payloads cannot be had. False: so it has no other answer.
    bool lose(const record& r, std::span<const ticket> tickets, event& answer) {
        std::vector<ticket> lost;
        part_.clear();
        for (std::size_t i = 0; i < tickets.size(); ++i)
            (r.wrong.which >> (i % 64) & 1 ? lost : part_).push_back(tickets[i]);
        if (lost.empty()) return true;
        if (r.wrong.after > 0) reply(now_ + r.wrong.after, event::payload_lost(lost.front(), r.what.job));
        deliver(event::payload_lost(std::span<const ticket>(lost), r.what.job));
        if (r.what.stage == stage::learner) return false;
        answer = part_.empty() ? event::score_failed(r.what.job, r.what.worker)
                               : event::scored(r.what.job, r.what.worker, part_);
        answer.incarnation = r.life;
        return true;
    }

    void sync(std::int32_t number, const weights& v) {
        worker& w = of(stage::rollout, number);
        if (!w.up || w.silent) return;
        if (w.installing) { // as on threads: it finishes them, drops these, and is told again
            w.superseded = v.job != w.told.job;
            return;
        }
        w.told = v;
        if (std::exchange(w.asked, true)) return;
        const fault f = detail::fault_of_sync(model_, number, v, w.life);
        const double seconds =
            model_.sync(number, v) + (f.what == fault::kind::late || f.what == fault::kind::fail ? f.after : 0);
        check_seconds(seconds, "sync");
        mark(number);
        double begin = now_;
        // a worker in the middle of a decode step finishes it first
        if constexpr (requires { w.engine->until_settled(); })
            begin = std::max(begin, now_ + w.engine->until_settled());
        if constexpr (requires { model_.transfer(number, v); }) {
            static_assert(
                !requires { w.engine->until_settled(); }, "opd: a quantum may be under way when it is over");
            const double transfer = model_.transfer(number, v);
            check_seconds(transfer, "transfer");
            begin += transfer;
        }
        if (begin > now_) {
            record& r = agenda_.push(begin, record::kind::sync_begin);
            r.what = event::synced(number, v.job);
            r.life = w.life;
        } else {
            w.installing = true;
        }
        if (f.what == fault::kind::hang) return; // it stands still from here on
        record& r = agenda_.push(begin + seconds, record::kind::sync_end);
        r.what = event::synced(number, v.job).of_life(w.life);
        r.life = w.life;
        r.wrong = f;
        may_die(f, stage::rollout, number);
    }
    bool sync_end(const record& r) {
        const std::int32_t number = r.what.worker;
        worker& w = of(stage::rollout, number);
        if (!alive(w, r.life)) return false;
        event answer = event::synced(number, w.told.job).of_life(w.life);
        if (r.wrong.what == fault::kind::twice) {
            record& again = agenda_.push(now_ + r.wrong.after, record::kind::sync_answer);
            again.what = answer;
            again.life = r.life;
        }
        w.asked = w.installing = false;
        w.since = now_;
        if (!std::exchange(w.superseded, false)) { // else nothing runs on these, which may be gone
            w.engine->install(w.told);
            if constexpr (requires { w.engine->elasticity(); }) answer.elasticity = w.engine->elasticity();
        }
        settle(number);
        deliver(answer);
        return true;
    }

    // The scheduler has given the worker up.
    void lost(stage s, std::int32_t number) {
        worker& w = of(s, number);
        if (!w.up) return;
        const double after = w.silent ? w.back : forever;
        tell_drawn(event::down(s, number));
        workers_.take_down(s, number, now_);
        double back = after;
        if constexpr (requires { model_.recovery(s, number, w.life); })
            back = std::min(back, static_cast<double>(model_.recovery(s, number, w.life)));
        if (back < forever) reply(now_ + back, event::up(s, number, as_before));
    }

    // --- workers

    void may_die(const fault& f, stage s, std::int32_t number) {
        if (f.what != fault::kind::death && f.what != fault::kind::silence) return;
        record& r = agenda_.push(now_ + f.after, record::kind::death);
        r.what = event::down(s, number);
        r.bad = f.what == fault::kind::silence;
        r.back = f.back;
        r.life = of(s, number).life;
    }

    // What this attempt, or all that runs there, has drawn, of which no event will tell.
    void tell_drawn(std::int32_t number, const ticket* one = nullptr) {
        const worker& w = of(stage::rollout, number);
        if (!workers_.observer || !w.up || w.silent) return;
        const auto say = [&](const ticket& t, std::int64_t tokens) {
            if (!one || t == *one) detail::tell(*workers_.observer, t, tokens, now_);
        };
        if constexpr (requires { w.engine->drawn(0.0, say); }) {
            for (const ticket& t : w.hung) say(t, 0);
            w.engine->drawn(!w.installing && now_ > w.since ? now_ - w.since : 0.0, say);
        }
    }
    void tell_drawn(const event& of_worker) {
        if (of_worker.stage == stage::rollout) tell_drawn(of_worker.worker);
    }

    // Brings a rollout worker to the present; its replies are queued.
    void touch(std::int32_t number) {
        worker& w = of(stage::rollout, number);
        if (!w.installing && now_ > w.since) advance(number, now_ - w.since);
        w.since = now_;
    }
    void mark(std::int32_t number) {
        touch(number);
        if (touched_.empty() || touched_.back() != number) touched_.push_back(number);
    }
    // The time has come that it had named.
    void report(std::int32_t number) {
        worker& w = of(stage::rollout, number);
        advance(number, w.engine->next()); // exactly, whatever the clock's rounding
        w.since = now_;
        settle(number);
    }
    void advance(std::int32_t number, double dt) {
        const auto finished = [this](const ticket& t, const token_versions& v, auto&&... made) {
            hand_over(model_, t, v, std::forward<decltype(made)>(made)...);
            const fault f = detail::fault_of_rollout(model_, t);
            reply(f.what == fault::kind::late ? now_ + f.after : now_, event::rolled_out(t, v));
            if (f.what == fault::kind::twice) reply(now_ + f.after, event::rolled_out(t, v));
        };
        worker_type& engine = *of(stage::rollout, number).engine;
        if constexpr (requires { engine.advance(dt, finished, on_parked()); })
            engine.advance(dt, finished, on_parked());
        else
            engine.advance(dt, finished);
    }
    template <class M, class... Payload>
    static void hand_over(M& model, const ticket& t, const token_versions& v, Payload&&... made) {
        if constexpr (sizeof...(made) > 0 || requires { model.rolled(t, v); })
            model.rolled(t, v, std::forward<Payload>(made)...);
    }
    void settle(std::int32_t number) { workers_.settle(number, now_, agenda_.next_number); }

    static void check_seconds(double seconds, const char* what) {
        if (!(seconds >= 0 && seconds < forever))
            throw invalid_input(what, "takes " + std::to_string(seconds) + " seconds; must be finite and at least 0");
    }

    template <class A>
    void fields(A& a) {
        a(now_, agenda_.next_number, events_, agenda_);
        workers_.fields(a, [this](std::int32_t w) { return model_.rollout(w); });
        if constexpr (requires { model_.fields(a); }) model_.fields(a);
    }

    dispatcher<no_payloads, Scheduler> work_;
    Model model_;
    double now_ = 0;
    std::uint64_t events_ = 0;
    detail::agenda agenda_;
    staff workers_;
    std::exception_ptr first_exception_;
    // of the event in hand:
    std::vector<ticket> part_;
    std::vector<std::int32_t> touched_;
};

} // namespace opd::sched
