// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Runs a scheduler in virtual time: a discrete-event executor that is deterministic to the last bit. Durations, lengths and
// faults come from a *model*; the events of one moment are handled in the order in which they were caused.
//
//   model, always                              answers
//     rollout(worker)                          a fresh rollout worker (see rollout_worker)
//     start(rollout worker, ticket)            starts it there
//     teacher(job, worker, tickets)            seconds of a scoring call
//     learner(job, weights, tickets)           seconds of a train step from those weights
//     sync(worker, weights)                    seconds of installing them; the worker stands still and keeps what it runs
//   model, if it has them
//     rollout_fault(ticket), teacher_fault(job, worker), learner_fault(job), sync_fault(worker, weights, life)   a `fault`
//     publication(job)                         seconds from a learner's answer until what it published is lost; none: never
//     recovery(stage, worker, life)            seconds until a worker that the scheduler gave up is back; none: never
//     rolled(ticket, token_versions, payload)  what the rollout worker made
//     parked(ticket, token_versions, payload)  what it had made of a sequence that was parked
//     scored(job, worker, tickets)             a scoring call is over: tickets that are scored (none: all); may throw: it
//                                              failed
//     learned(job, weights, tickets)           a train step is over: optimizer updates (none: 1); may throw: it failed
//     fields(archive)                          its state, for snapshots
//   Faults must be functions of their arguments and a seed: they are asked for more than once.
//
//   observer, if it has them: up, down, begin, end (stage, worker, time): presence and busy intervals of workers, as
//   stage_meter takes them; begin and end may take an activity behind, and are then told of spare work, too; event(time, event, actions, scheduler): after every event that the scheduler has taken.
//
// Where several stages share devices, their durations say so (a learner on all of the devices is faster); nothing here
// models devices. A worker that dies takes its running work with it; a reply that is late survives it. What a learner has published
// outlives it, unless the model loses it.
#pragma once

#include <cmath>
#include <exception>
#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <utility>

#include "opd/sched/indexed_heap.hpp"
#include "opd/sched/scheduler.hpp"
#include "opd/sched/simulated.hpp"

namespace opd::sched {

/// What goes wrong with one attempt, call or transfer.
struct fault {
    enum class kind : std::uint8_t {
        none,
        fail, ///< fails `after` seconds after its start (a transfer: is repeated, as `late`)
        hang, ///< never answers; an attempt can still be aborted
        late, ///< answers `after` seconds late, even if the worker is gone by then (a transfer: takes that much longer)
        twice,   ///< answers, and again `after` seconds later
        partial, ///< scoring only: of the tickets those are scored whose bit is set in `which` (position modulo 64)
        death,   ///< its worker dies `after` seconds after the start, is seen to, and returns `back` seconds later
        silence  ///< as death, but nobody is told: only deadlines find out
    };
    friend constexpr kind last_of(kind) { return kind::silence; }
    kind what = kind::none;
    double after = 0;
    double back = forever; ///< death, silence
    std::uint64_t which = 0;
};

/// A rollout worker in virtual time; simulated_rollout is one, timed_rollout makes one of a real stage.
template <class W>
concept rollout_worker = requires(W w, const W c, const ticket& t, const weights& v, double dt) {
    { w.abort(t) } -> std::convertible_to<bool>; // false: it does not run
    w.install(v);
    { c.next() } -> std::convertible_to<double>; // seconds until it has something to report
    w.advance(dt, [](const ticket&, const token_versions&, auto&&...) {});
    { c.running() } -> std::convertible_to<index_t>;
};

struct no_observer {};

namespace detail {

struct moment {
    double time = forever;
    std::uint64_t number = 0;
    bool operator<(const moment& o) const { return time != o.time ? time < o.time : number < o.number; }
    template <class A>
    void fields(A& a) {
        a(time, number);
    }
};

} // namespace detail

/// `Scheduler`: sched::scheduler, or one that stands in for it in a test.
template <class Model, class Observer = no_observer, class Scheduler = sched::scheduler>
class virtual_driver {
public:
    using worker_type = decltype(std::declval<Model&>().rollout(std::int32_t{}));
    static_assert(rollout_worker<worker_type>);

    virtual_driver(const settings& s, Model m, Observer* o = nullptr)
        : scheduler_(s), model_(std::move(m)), observer_(o) {}

    /// Who is told what happens; not copied into snapshots.
    void observe(Observer* o) { observer_ = o; }

    /// Hands the scheduler `e` at time t: workers that come (their slots) and go, lost weights, pause, resume, resize, close,
    /// stop. A worker that comes is new unless it is there already; which life of it that is the driver says.
    void at(double t, const event& e) {
        if (!(t >= now_ && t < forever))
            throw invalid_input("t", "must be finite and not before now, " + std::to_string(now_) + ", not " +
                                         std::to_string(t));
        if (!e.tickets.empty()) throw invalid_input("event", "an event from outside names no tickets");
        if (const settings& s = scheduler_.options();
            e.from_worker() && (e.worker >= s.most_workers || e.slots > s.most_slots))
            throw invalid_input("event", "names worker " + std::to_string(e.worker) + " with " +
                                             std::to_string(e.slots) +
                                             " slots, more than settings.most_workers or most_slots");
        record& r = push(t, record::kind::deliver);
        r.what = e;
        r.outside = true;
    }
    /// Workers 0 … count-1 of a stage, now.
    void bring_up(stage s, std::int32_t count, std::int32_t slots = 1) {
        for (std::int32_t w = 0; w < count; ++w) at(now_, event::up(s, w, slots));
    }

    /// Lets the scheduler take one more event. False when there is none: the run is over, or stuck (see finished()), or the next one
    /// comes after `last`.
    bool step(double last = forever) {
        if (std::isnan(last)) throw invalid_input("last", "must be a time, not NaN");
        for (;;) {
            const detail::moment wake = first_wake();
            const double deadline = scheduler_.next_deadline();
            if (heap_.empty() && deadline == forever && only_spare()) return false; // which nobody waits for
            const double first = std::min(wake.time, heap_.empty() ? forever : heap_.front().when.time);
            if (std::min(first, deadline) > last) return false;
            if (deadline < first) { // what comes at the deadline is in time
                now_ = deadline;
                deliver(event::of(event::kind::tick));
                return true;
            }
            if (heap_.empty() || wake < heap_.front().when) {
                if (wake.time == forever) return false;
                now_ = wake.time;
                report(wakes_.top());
                continue;
            }
            now_ = heap_.front().when.time;
            const std::uint32_t at = pop();
            const record r = records_[at];
            vacant_.push_back(at);
            if (handle(r)) return true;
        }
    }
    /// Runs until the scheduler has finished, nothing is left to happen, or after `most` events. Returns finished().
    bool run(std::uint64_t most = std::numeric_limits<std::uint64_t>::max()) {
        for (; most > 0 && !scheduler_.finished(); --most)
            if (!step()) break;
        return scheduler_.finished();
    }
    /// Runs up to and including time t.
    bool run_until(double t) {
        while (!scheduler_.finished() && step(t)) {}
        return scheduler_.finished();
    }

    double now() const { return now_; }
    /// When something happens next; `forever` if nothing does.
    double next() const {
        if (heap_.empty() && only_spare()) return scheduler_.next_deadline();
        return std::min(
            {first_wake().time, heap_.empty() ? forever : heap_.front().when.time, scheduler_.next_deadline()});
    }
    bool finished() const { return scheduler_.finished(); }
    /// Events that the scheduler has taken.
    std::uint64_t events() const { return events_; }
    const Scheduler& scheduler() const { return scheduler_; }
    const Model& model() const { return model_; }
    Model& model() { return model_; }
    /// The first that the model's scored() or learned() threw, or that the run has failed; null: none. The scheduler sees failed
    /// calls only.
    std::exception_ptr first_exception() const { return first_exception_; }
    /// Tells the observer who is there, and busy: for one that comes late, as to a driver that was restored.
    void introduce() {
        for (int s = 0; s < stage_count; ++s) {
            const auto number = static_cast<stage>(s);
            const auto& all = workers_[static_cast<std::size_t>(s)];
            for (std::size_t w = 0; w < all.size(); ++w) {
                if (!all[w].up) continue;
                if constexpr (requires(Observer & o) { o.up(number, std::int32_t{}, now_); })
                    if (observer_) observer_->up(number, static_cast<std::int32_t>(w), now_);
                if (all[w].doing != activity::none) begin(number, static_cast<std::int32_t>(w), all[w].doing);
            }
        }
        for (const entry& e : heap_) {
            const record& r = records_[e.at];
            if (r.is == record::kind::job_end && alive(of(r.what.stage, r.what.worker), r.life))
                begin(r.what.stage, r.what.worker);
        }
    }

    /// All of the state. Equal states give equal bytes.
    std::string snapshot() const {
        archive_writer w;
        w(scheduler_.snapshot());
        const_cast<virtual_driver*>(this)->fields(w);
        return seal(std::move(w.bytes));
    }
    /// A driver as it was. Settings are not in the snapshot, and of the model only its fields(). Throws invalid_input where
    /// the snapshot is damaged.
    static virtual_driver restore(const settings& s, Model m, std::string_view snapshot, Observer* o = nullptr) {
        virtual_driver r(s, std::move(m), o);
        archive_reader reader(unseal(snapshot));
        std::string bytes;
        reader(bytes);
        r.scheduler_ = Scheduler::restore(s, bytes);
        r.fields(reader);
        if (!reader.done()) throw invalid_input("snapshot", "is longer than the state it describes");
        return r;
    }
    /// The process dies and comes back: of the present state only the scheduler's is kept, every worker that was there is
    /// up again after `seconds`, what was to come from outside still comes. `reopen`: likewise of a run that had finished, of
    /// which more is wanted now.
    void crash(double seconds = 0, bool reopen = false) {
        std::vector<record> outside;
        while (!heap_.empty()) {
            const std::uint32_t at = pop();
            if (records_[at].outside) outside.push_back(records_[at]);
        }
        records_.clear();
        vacant_.clear();
        wakes_.clear();
        jobs_.clear();
        vacant_jobs_.clear();
        scheduler_.abandon_workers(false, reopen);
        for (int s = 0; s < stage_count; ++s) {
            auto& all = workers_[static_cast<std::size_t>(s)];
            for (std::size_t w = 0; w < all.size(); ++w) {
                if (all[w].up) take_down(static_cast<stage>(s), static_cast<std::int32_t>(w));
                if (all[w].slots > 0)
                    push(now_ + seconds, record::kind::deliver).what =
                        event::up(static_cast<stage>(s), static_cast<std::int32_t>(w), all[w].slots);
            }
        }
        for (const record& r : outside) {
            record& again = push(std::max(r.when, now_), record::kind::deliver);
            again.what = r.what;
            again.outside = true;
        }
    }

private:
    bool only_spare() const { return wakes_.size() == spare_wakes_; }
    detail::moment first_wake() const { return wakes_.empty() ? detail::moment{} : wakes_.least(); }
    struct record {
        enum class kind : std::uint8_t {
            deliver,    // `what`
            fail,       // of the attempt what.ticket
            sync_begin, // what.worker
            sync_end,
            sync_answer,
            job_end, // job
            death    // what.stage, what.worker; back
        };
        friend constexpr kind last_of(kind) { return kind::death; }
        kind is = kind::deliver;
        bool outside = false;
        bool bad = false;       // job_end: it failed; death: nobody is told
        std::uint32_t life = 0; // of the worker that it belongs to
        std::uint32_t job = 0;
        double when = 0, back = 0;
        event what;
        fault wrong;
        template <class A>
        void fields(A& a) {
            a(is, outside, bad, life, back, wrong.what, wrong.after, wrong.back, wrong.which, what);
            detail::needs(std::max({what.worker, what.ticket.worker, what.slots}) < most_workers,
                          "a worker's number is none");
        }
    };
    struct entry {
        detail::moment when;
        std::uint32_t at = 0;
        bool operator<(const entry& o) const { return o.when < when; } // std's heaps have the largest first
    };
    struct job {
        weights from;
        std::vector<ticket> tickets;
        template <class A>
        void fields(A& a) {
            a(from, tickets);
        }
    };
    struct worker {
        bool up = false, silent = false;
        activity doing = activity::none;
        bool spares = false;    // it is woken for spare work alone
        std::uint32_t life = 0; // counts returns
        std::int32_t slots = 0;
        bool asked = false;                // to install weights, and is not done
        bool installing = false;           // has begun to
        bool superseded = false;           // others have come since
        weights told;                      // which they are
        double since = 0;                  // its time
        double back = forever;             // silent: seconds from its loss to its return
        std::optional<worker_type> engine; // rollout
        std::vector<ticket> hung;
    };

    // --- queue

    record& push(double t, typename record::kind k) {
        std::uint32_t at;
        if (vacant_.empty()) {
            at = static_cast<std::uint32_t>(records_.size());
            records_.emplace_back();
        } else {
            at = vacant_.back();
            vacant_.pop_back();
        }
        record& r = records_[at] = {};
        r.is = k;
        r.when = t;
        heap_.push_back({{t, next_number_++}, at});
        std::push_heap(heap_.begin(), heap_.end());
        return r;
    }
    std::uint32_t pop() {
        const std::uint32_t at = heap_.front().at;
        std::pop_heap(heap_.begin(), heap_.end());
        heap_.pop_back();
        return at;
    }
    void reply(double t, const event& e) { push(t, record::kind::deliver).what = e; }

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
                come(e);
            } else if (w.up) {
                take_down(e.stage, e.worker);
            }
            deliver(e.of_life(w.life));
            return true;
        }
        case record::kind::fail: {
            worker& w = of(stage::rollout, r.what.ticket.worker);
            if (!alive(w, r.life)) return false;
            touch(r.what.ticket.worker);
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
            if (r.bad) {
                silence(r.what.stage, r.what.worker);
                w.back = r.back; // from when the scheduler finds out
                return false;
            }
            take_down(r.what.stage, r.what.worker);
            if (r.back < forever) reply(now_ + r.back, event::up(r.what.stage, r.what.worker, as_before));
            deliver(event::down(r.what.stage, r.what.worker).of_life(w.life));
            return true;
        }
        }
        return false;
    }

    void deliver(const event& e) {
        actions_.clear();
        scheduler_.on(e, now_, actions_);
        ++events_;
        if (scheduler_.failed() && !first_exception_)
            first_exception_ = std::make_exception_ptr(
                error(std::string("opd: the run has failed: nothing was learnt from any more, for want of ") +
                      name_of(*scheduler_.failed())));
        if constexpr (requires(Observer & o) { o.event(now_, e, actions_, scheduler_); })
            if (observer_) observer_->event(now_, e, std::as_const(actions_), std::as_const(scheduler_));
        for (const action& a : actions_.items) carry_out(a);
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
                auto& all = workers_[static_cast<std::size_t>(stage::rollout)];
                for (std::size_t w = 0; w < all.size(); ++w) sync(static_cast<std::int32_t>(w), what);
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
        const fault f = fault_of_rollout(t);
        mark(t.worker);
        if (f.what == fault::kind::hang) {
            w.hung.push_back(t);
            return;
        }
        if constexpr (requires { model_.start(*w.engine, t, version_t{}); })
            model_.start(*w.engine, t, scheduler_.start_of(t)); // it may go on from what was parked
        else
            model_.start(*w.engine, t);
        if (f.what == fault::kind::fail) {
            record& r = push(now_ + f.after, record::kind::fail);
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
        const auto tickets = actions_.of(a);
        const double seconds = model_.teacher(a.job, a.worker, tickets);
        call(stage::teacher, a, seconds, fault_of_teacher(a.job, a.worker));
    }
    void train(const action& a) {
        const auto tickets = actions_.of(a);
        const double seconds = model_.learner(a.job, weights{a.version, a.from}, tickets);
        call(stage::learner, a, seconds, fault_of_learner(a.job));
    }
    void call(stage s, const action& a, double seconds, const fault& f) {
        worker& w = of(s, a.worker);
        check_seconds(seconds, name_of(s));
        if (!w.up || w.silent) return;
        begin(s, a.worker);
        may_die(f, s, a.worker);
        if (f.what == fault::kind::hang) return;
        const bool bad = f.what == fault::kind::fail;
        record& r = push(now_ + (bad ? f.after : seconds), record::kind::job_end);
        r.what = event::of(event::kind::scored);
        r.what.stage = s, r.what.worker = a.worker, r.what.job = a.job;
        r.bad = bad;
        r.wrong = f;
        r.life = w.life;
        if (vacant_jobs_.empty()) {
            vacant_jobs_.push_back(static_cast<std::uint32_t>(jobs_.size()));
            jobs_.emplace_back();
        }
        r.job = vacant_jobs_.back();
        vacant_jobs_.pop_back();
        jobs_[r.job].from = {a.version, a.from};
        const auto tickets = actions_.of(a);
        jobs_[r.job].tickets.assign(tickets.begin(), tickets.end());
    }
    bool job_end(const record& r) {
        vacant_jobs_.push_back(r.job); // nothing takes it before this event is over
        const job& j = jobs_[r.job];
        const std::int32_t number = r.what.worker;
        if (!alive(of(r.what.stage, number), r.life)) return false;
        end(r.what.stage, number);
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
        deliver(answer);
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
        const fault f = fault_of_sync(number, v, w.life);
        const double seconds =
            model_.sync(number, v) + (f.what == fault::kind::late || f.what == fault::kind::fail ? f.after : 0);
        check_seconds(seconds, "sync");
        mark(number);
        double begin = now_;
        // a worker in the middle of a decode step finishes it first
        if constexpr (requires { w.engine->until_settled(); })
            begin = std::max(begin, now_ + w.engine->until_settled());
        if (begin > now_) {
            record& r = push(begin, record::kind::sync_begin);
            r.what = event::synced(number, v.job);
            r.life = w.life;
        } else {
            w.installing = true;
        }
        if (f.what == fault::kind::hang) return; // it stands still from here on
        record& r = push(begin + seconds, record::kind::sync_end);
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
            record& again = push(now_ + r.wrong.after, record::kind::sync_answer);
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
        take_down(s, number);
        double back = after;
        if constexpr (requires { model_.recovery(s, number, w.life); })
            back = std::min(back, static_cast<double>(model_.recovery(s, number, w.life)));
        if (back < forever) reply(now_ + back, event::up(s, number, as_before));
    }

    // --- workers

    static constexpr std::int32_t most_workers = 1 << 18; // of a snapshot; likewise their slots
    static constexpr std::int32_t as_before = -1;         // slots of a worker that is back: those it was given last

    worker& of(stage s, std::int32_t number) {
        auto& all = workers_[static_cast<std::size_t>(s)];
        if (number < 0) throw invalid_input("worker", "must not be negative");
        if (static_cast<std::size_t>(number) >= all.size()) all.resize(static_cast<std::size_t>(number) + 1);
        return all[static_cast<std::size_t>(number)];
    }
    bool is_up(stage s, std::int32_t number) const {
        const auto& all = workers_[static_cast<std::size_t>(s)];
        return number >= 0 && static_cast<std::size_t>(number) < all.size() && all[static_cast<std::size_t>(number)].up;
    }
    static bool alive(const worker& w, std::uint32_t life) { return w.up && !w.silent && w.life == life; }

    void come(const event& e) {
        worker& w = of(e.stage, e.worker);
        w.slots = e.slots;
        if (w.up) return;
        w.up = true;
        w.silent = false;
        ++w.life;
        w.asked = w.installing = w.superseded = false;
        w.since = now_;
        w.hung.clear();
        if (e.stage == stage::rollout) w.engine.emplace(model_.rollout(e.worker));
        if constexpr (requires(Observer & o) { o.up(e.stage, e.worker, now_); })
            if (observer_) observer_->up(e.stage, e.worker, now_);
    }
    void take_down(stage s, std::int32_t number) {
        silence(s, number);
        worker& w = of(s, number);
        w.up = w.silent = false;
        w.engine.reset();
        if constexpr (requires(Observer & o) { o.down(s, number, now_); })
            if (observer_) observer_->down(s, number, now_);
    }
    // It does nothing any more.
    void silence(stage s, std::int32_t number) {
        worker& w = of(s, number);
        if (s == stage::rollout) {
            wake(number, forever);
            if (w.doing != activity::none) end(s, number, w.doing);
        }
        w.silent = true;
        w.doing = activity::none;
        w.hung.clear();
    }
    void may_die(const fault& f, stage s, std::int32_t number) {
        if (f.what != fault::kind::death && f.what != fault::kind::silence) return;
        record& r = push(now_ + f.after, record::kind::death);
        r.what = event::down(s, number);
        r.bad = f.what == fault::kind::silence;
        r.back = f.back;
        r.life = of(s, number).life;
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
            const fault f = fault_of_rollout(t);
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
    // Enters when it will next report, and whether it is busy.
    void settle(std::int32_t number) {
        worker& w = of(stage::rollout, number);
        if (!w.up || w.silent) return;
        wake(number, w.installing ? forever : static_cast<double>(w.engine->next()));
        activity doing = !w.installing && w.engine->running() > 0 ? activity::work : activity::none;
        if constexpr (requires { w.engine->sparing(); })
            if (!w.installing && w.engine->sparing()) doing = activity::spare;
        if (doing == w.doing) return;
        if (w.doing != activity::none) end(stage::rollout, number, w.doing);
        w.doing = doing;
        if (doing != activity::none) begin(stage::rollout, number, doing);
    }
    void wake(std::int32_t number, double seconds) {
        worker& w = of(stage::rollout, number);
        if (seconds < forever)
            wakes_.set(number, {now_ + seconds, next_number_++});
        else
            wakes_.remove(number);
        count_spare(w, seconds < forever);
    }
    void count_spare(worker& w, bool woken) {
        bool spares = false;
        if constexpr (requires { w.engine->spares(); }) spares = woken && w.engine->spares();
        spare_wakes_ += static_cast<index_t>(spares) - static_cast<index_t>(std::exchange(w.spares, spares));
    }
    void begin(stage s, std::int32_t number, activity what = activity::work) {
        if constexpr (requires(Observer & o) { o.begin(s, number, now_, what); }) {
            if (observer_) observer_->begin(s, number, now_, what);
        } else if constexpr (requires(Observer & o) { o.begin(s, number, now_); }) {
            if (observer_ && what == activity::work) observer_->begin(s, number, now_);
        }
    }
    void end(stage s, std::int32_t number, activity what = activity::work) {
        if constexpr (requires(Observer & o) { o.end(s, number, now_, what); }) {
            if (observer_) observer_->end(s, number, now_, what);
        } else if constexpr (requires(Observer & o) { o.end(s, number, now_); }) {
            if (observer_ && what == activity::work) observer_->end(s, number, now_);
        }
    }

    // --- the model's faults, if it has any

    fault fault_of_rollout(const ticket& t) const {
        if constexpr (requires { model_.rollout_fault(t); }) return model_.rollout_fault(t);
        return {};
    }
    fault fault_of_teacher(std::uint64_t j, std::int32_t w) const {
        if constexpr (requires { model_.teacher_fault(j, w); }) return model_.teacher_fault(j, w);
        return {};
    }
    fault fault_of_learner(std::uint64_t j) const {
        if constexpr (requires { model_.learner_fault(j); }) return model_.learner_fault(j);
        return {};
    }
    fault fault_of_sync(std::int32_t w, const weights& v, std::uint32_t life) const {
        if constexpr (requires { model_.sync_fault(w, v, life); }) return model_.sync_fault(w, v, life);
        return {};
    }
    static void check_seconds(double seconds, const char* what) {
        if (!(seconds >= 0 && seconds < forever))
            throw invalid_input(what, "takes " + std::to_string(seconds) + " seconds; must be finite and at least 0");
    }

    template <class A>
    void fields(A& a) {
        a(now_, next_number_, events_);
        detail::list_fields(a, heap_, [&](entry& e) {
            if constexpr (A::reading) e.at = static_cast<std::uint32_t>(records_.size()), records_.emplace_back();
            record& r = records_[e.at];
            a(e.when, r);
            r.when = e.when.time;
            if (r.is != record::kind::job_end) return;
            if constexpr (A::reading) r.job = static_cast<std::uint32_t>(jobs_.size()), jobs_.emplace_back();
            a(jobs_[r.job]);
        });
        for (int s = 0; s < stage_count; ++s) {
            std::int32_t number = 0;
            detail::list_fields(a, workers_[static_cast<std::size_t>(s)], [&](worker& w) {
                const std::int32_t i = number++;
                a(w.up, w.silent, w.doing, w.life, w.slots, w.asked, w.installing, w.superseded, w.told, w.since,
                  w.back);
                a(w.hung);
                detail::needs(w.slots >= 0 && w.slots < most_workers, "a worker's count is none");
                if (!w.up || static_cast<stage>(s) != stage::rollout) return;
                const detail::moment* known = wakes_.find(i);
                detail::moment wake = known ? *known : detail::moment{};
                a(wake);
                if constexpr (A::reading) {
                    if (!w.silent && wake.time < forever) wakes_.set(i, wake);
                    w.engine.emplace(model_.rollout(i));
                }
                if constexpr (requires { w.engine->fields(a); })
                    w.engine->fields(a);
                else
                    throw std::logic_error("opd: this rollout worker has no fields(): its driver has no snapshots");
                if constexpr (A::reading) count_spare(w, wakes_.find(i) != nullptr);
            });
        }
        if constexpr (requires { model_.fields(a); }) model_.fields(a);
    }

    Scheduler scheduler_;
    Model model_;
    Observer* observer_;
    double now_ = 0;
    std::uint64_t next_number_ = 0, events_ = 0;
    std::vector<entry> heap_;
    std::vector<record> records_;
    std::vector<std::uint32_t> vacant_;
    detail::indexed_heap<detail::moment> wakes_;
    index_t spare_wakes_ = 0; // of those
    std::vector<job> jobs_;   // calls that run
    std::vector<std::uint32_t> vacant_jobs_;
    std::array<std::vector<worker>, stage_count> workers_;
    std::exception_ptr first_exception_;
    actions actions_; // of the event in hand, as are:
    std::vector<ticket> part_;
    std::vector<std::int32_t> touched_;
};

} // namespace opd::sched
