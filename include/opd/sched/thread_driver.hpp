// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Runs a scheduler on threads: one for each rollout worker, each teacher and the learner, and the caller's for the timers.
// Threads wait on condition variables; nothing polls, nothing sleeps.
//
//   rollout worker   looks into its mailbox between quanta: start, abort, install; steps while anything runs, else waits
//   teacher          one call at a time
//   learner          one call at a time; between two calls it runs the hooks on_step and on_checkpoint
//   run()'s thread   waits for the next deadline, if there is any, for a request to stop, and for the end
//
// One mutex guards the scheduler, the mailboxes and the payloads; it is never held while a stage, on_step or on_checkpoint
// runs. Payloads (sequences, scores) are shared_ptr<const T>, kept by slot and attempt; those of an attempt that was given
// up are dropped.
//
// Faults, beside what the scheduler makes of them (attempts, deadlines):
//   start() throws      the sequence's attempt fails
//   step() throws       what it had appended is finished, every other attempt on that worker fails
//   install() throws    the worker is down, clears itself and comes back; after the third time in a row it stays away
//   score(), train()    throw: the call failed. A score() with another number of entries than sequences: likewise
//   a missed deadline   the worker counts as lost and its call is asked to stop. If the call ever returns, its answer is
//                       counted as late and the worker comes back. A learner whose update comes late has changed weights
//                       that nobody will install: it must look at its stop token before it publishes
//   on_step or          the run stops: what they write down is part of it. on_worker and on_event, which look on, stop
//   on_checkpoint       nothing: what they throw is counted (observer_exceptions)
//   throws
// The first exception is kept for the report; those of calls that were asked to stop count for nothing.
//
// Shutdown: request_stop() closes the scheduler (nothing new is admitted, what is outstanding is finished) for at most
// `drain_seconds`; then everything outstanding is given up, and threads have `shutdown_seconds` to return. Those that do not
// are left behind, each with shared ownership of its stage and of the driver's state, and are named in the report. What a
// stage refers to must then outlive its thread.
//
// Checkpoints: `on_checkpoint` gets the scheduler's state and all payloads at a completed step: all workers have the new
// weights, the learner is not training. Stages with export_partials() are asked for the prefixes of what is running when
// they install these weights; what finishes after that and before the snapshot is in it as finished. A driver made from such
// a snapshot goes on from it: nothing is lost, nothing is consumed twice.
//
// Order: with whole batches or tau = 0 the sets that are consumed, and at which versions, do not depend on timing.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <queue>
#include <stdexcept>
#include <thread>
#include <utility>

#include "opd/sched/scheduler.hpp"
#include "opd/sched/stages.hpp"

namespace opd::sched {

/// Seconds on the clock of all times that the driver reports.
inline double steady_seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct thread_options {
    double drain_seconds = 30;    ///< after a request to stop: for what is outstanding to be finished
    double shutdown_seconds = 10; ///< for threads to return once the run is over; then they are left behind
    double stranded_seconds = 0;  ///< a stage that has had no worker for so long stops the run; 0: it waits for ever
    bool stop_on_error = false;   ///< the first exception of a stage stops the run, without draining
    /// Versions between two calls of on_checkpoint, each of which copies the running prefixes of all workers; 0: only as
    /// request_checkpoint() asks.
    index_t checkpoint_every = 0;
};

/// All that a run needs to go on from a completed step, but for the user's own weights and optimizer.
template <class Rolled, class Scored>
struct run_snapshot {
    struct entry {
        sched::ticket ticket;
        outstanding_sequence::place where = outstanding_sequence::place::waiting;
        version_t start = -1;                   ///< of its start; -1: none yet
        std::shared_ptr<const Rolled> sequence; ///< waiting, rollout: what is drawn so far, or null; else all of it
        std::shared_ptr<const Scored> scored;   ///< ready, training
    };
    version_t version = 0;
    std::string scheduler; ///< scheduler::snapshot()
    std::vector<entry> sequences;
};

/// A step is complete: an update consumed these, by sample, and all rollout workers have its weights.
template <class Rolled, class Scored>
struct step_report {
    version_t version = 0; ///< now; the update was made at version - 1
    double time = 0;       ///< steady_seconds() at its completion
    counters totals;       ///< at its completion
    std::vector<sequence_view<Rolled, Scored>> consumed;
};

/// A worker comes, goes, begins or ends to be busy. Who goes is not busy any more.
enum class worker_change : std::uint8_t { up, down, begin, end };

template <class Rolled, class Scored>
struct thread_hooks {
    /// On the learner's thread, between two updates, without a lock: rollout and scoring go on meanwhile. One that is still
    /// at work `shutdown_seconds` after a stopped run's end is left behind as a stage is.
    std::function<void(const step_report<Rolled, Scored>&)> on_step;
    /// Likewise, after on_step of the same version.
    std::function<void(run_snapshot<Rolled, Scored>)> on_checkpoint;
    /// Under the driver's lock, on any thread: must be quick and must not call the driver. `time` never decreases.
    std::function<void(stage, std::int32_t worker, worker_change, double time)> on_worker;
    /// Likewise, after each event: what it led to and the state that it left.
    std::function<void(double time, const event&, const actions&, const scheduler&)> on_event;
};

struct worker_name {
    sched::stage stage = sched::stage::rollout;
    std::int32_t worker = -1;
    bool operator==(const worker_name&) const = default;
};

struct discarded_sequence {
    sched::ticket ticket;
    failure why = failure::stopped;
    outstanding_sequence::place where = outstanding_sequence::place::waiting; ///< why = stopped: where it was
};

struct run_report {
    bool completed = false; ///< all that was to be consumed was, or failed; not stopped before
    version_t version = 0;
    counters totals;
    std::vector<discarded_sequence> discarded; ///< but for stale ones, which totals.failed_by counts
    std::exception_ptr first_exception;
    std::optional<worker_name> first_exception_at; ///< none: on_step, on_checkpoint or the driver
    std::int64_t exceptions = 0;
    std::exception_ptr first_observer_exception; ///< of on_worker and on_event, which stop nothing
    std::int64_t observer_exceptions = 0;
    std::vector<worker_name> left_behind; ///< threads that did not return
    double seconds = 0;                   ///< of run()
};

template <class Rollout, class Teacher, class Learner>
    requires rollout_stage<Rollout> && teacher_stage<Teacher, typename Rollout::rolled_type> &&
        learner_stage<Learner, typename Rollout::rolled_type, typename Teacher::scored_type>
class thread_driver {
public:
    using rolled_type = typename Rollout::rolled_type;
    using scored_type = typename Teacher::scored_type;
    using view_type = sequence_view<rolled_type, scored_type>;
    using snapshot_type = run_snapshot<rolled_type, scored_type>;
    using hooks_type = thread_hooks<rolled_type, scored_type>;
    using report_type = step_report<rolled_type, scored_type>;

    explicit thread_driver(const settings& s, const thread_options& options = {}, hooks_type hooks = {})
        : core_(std::make_shared<core>(scheduler(s), options, std::move(hooks))) {}

    /// Goes on from a snapshot. `settings` must be those of the run it was taken from (`sequences` may be more); the
    /// weights that the stages install first must be those of snapshot.version.
    thread_driver(const settings& s, const snapshot_type& from, const thread_options& options = {},
                  hooks_type hooks = {})
        : core_(std::make_shared<core>(scheduler::restore(s, from.scheduler), options, std::move(hooks))) {
        core_->resume(from);
    }

    thread_driver(const thread_driver&) = delete;
    thread_driver& operator=(const thread_driver&) = delete;

    /// Before run(). Returns the worker's number.
    std::int32_t add_rollout(std::shared_ptr<Rollout> stage, std::int32_t lanes) {
        check_new(stage != nullptr);
        if (lanes < 1) throw invalid_input("lanes", "must be at least 1, not " + std::to_string(lanes));
        auto w = std::make_shared<rollout_worker>();
        w->stage = std::move(stage);
        w->lanes = lanes;
        w->number = static_cast<std::int32_t>(core_->rollouts.size());
        core_->rollouts.push_back(w);
        return w->number;
    }
    std::int32_t add_teacher(std::shared_ptr<Teacher> stage) {
        check_new(stage != nullptr);
        auto w = std::make_shared<teacher_worker>();
        w->stage = std::move(stage);
        w->number = static_cast<std::int32_t>(core_->teachers.size());
        core_->teachers.push_back(w);
        return w->number;
    }
    void set_learner(std::shared_ptr<Learner> stage) {
        check_new(stage != nullptr);
        core_->learner = std::make_shared<learner_worker>();
        core_->learner->stage = std::move(stage);
        core_->learner->number = 0;
    }

    /// Before run(): an observer (recorder.hpp has one) that is told under the driver's lock what happens. It needs up, down,
    /// begin, end (stage, worker, time) and event(time, event, actions, scheduler). Replaces on_worker and on_event.
    template <class Observer>
    void observe(Observer& o) {
        core_->hooks.on_worker = [&o](stage s, std::int32_t w, worker_change what, double t) {
            switch (what) {
            case worker_change::up:
                return o.up(s, w, t);
            case worker_change::down:
                return o.down(s, w, t);
            case worker_change::begin:
                return o.begin(s, w, t);
            case worker_change::end:
                return o.end(s, w, t);
            }
        };
        core_->hooks.on_event = [&o](double t, const event& e, const actions& a, const scheduler& s) {
            o.event(t, e, a, s);
        };
    }

    /// Blocks until the run is over and its threads have returned or were left behind. Once per driver.
    run_report run(std::stop_token stop = {}) {
        if (core_->rollouts.empty()) throw invalid_input("add_rollout", "a run needs at least one rollout worker");
        if (core_->teachers.empty()) throw invalid_input("add_teacher", "a run needs at least one teacher");
        if (!core_->learner) throw invalid_input("set_learner", "a run needs a learner");
        const double begin = steady_seconds();
        const std::shared_ptr<core> c = core_;
        {
            const std::lock_guard lock(c->mutex);
            if (std::exchange(c->started, true)) throw std::logic_error("opd: thread_driver: run() is called once");
            c->announce_all();
        }
        std::vector<std::pair<worker*, std::jthread>> threads;
        const auto launch = [&](auto w) { threads.emplace_back(w.get(), std::jthread([c, w] { c->work(*w); })); };
        try {
            launch(c->learner);
            for (const auto& w : c->teachers) launch(w);
            for (const auto& w : c->rollouts) launch(w);
        } catch (...) { // no more threads to be had
            {
                const std::lock_guard lock(c->mutex);
                c->finish();
            }
            threads.clear();
            throw;
        }

        run_report report;
        {
            const std::stop_callback on_stop(stop, [c] { c->request_stop(); });
            std::unique_lock lock(c->mutex);
            c->keep_time(lock);
            c->wait_for_workers(lock);
            c->abandoned = true; // whoever returns later touches nothing
            report = c->report;
            report.completed = c->sched.finished() && !c->stop_requested && !c->broken;
            report.version = c->sched.version();
            report.totals = c->sched.totals();
            for (auto& [w, thread] : threads)
                if (!w->returned) {
                    report.left_behind.push_back({w->kind, w->number});
                    thread.detach();
                }
        }
        threads.clear(); // joins the others, which have nothing left to do
        report.seconds = steady_seconds() - begin;
        return report;
    }

    // The following may be called from any thread and from on_step and on_checkpoint.

    /// Drains for at most drain_seconds, then stops.
    void request_stop() { core_->request_stop(); }
    /// Gives everything outstanding up at once.
    void stop_now() { core_->request_stop(true); }
    /// Nothing new is admitted; the run ends when what is outstanding is finished, however long that takes.
    void close() { core_->send(event::of(event::kind::close)); }
    void pause() { core_->send(event::of(event::kind::pause)); }
    void resume() { core_->send(event::of(event::kind::resume)); }
    /// Another number of permits.
    void resize(index_t outstanding) { core_->send(event::of(event::kind::resize, outstanding)); }
    /// on_checkpoint is called at the next step, whatever checkpoint_every says.
    void request_checkpoint() {
        const std::lock_guard lock(core_->mutex);
        core_->checkpoint_requested = true;
    }
    version_t version() const {
        const std::lock_guard lock(core_->mutex);
        return core_->sched.version();
    }
    /// Workers of a stage that are there: announced, not lost, not killed.
    std::int32_t workers(stage s) const {
        const std::lock_guard lock(core_->mutex);
        return core_->present[static_cast<std::size_t>(s)];
    }
    census where() const {
        const std::lock_guard lock(core_->mutex);
        return core_->sched.where();
    }
    counters totals() const {
        const std::lock_guard lock(core_->mutex);
        return core_->sched.totals();
    }
    /// The worker dies: what it is doing is lost and nothing is heard of it until revive().
    void kill(stage s, std::int32_t w) { core_->kill(s, w); }
    /// The worker is back, with nothing running. Without effect on one that is there.
    void revive(stage s, std::int32_t w) { core_->revive(s, w); }

private:
    using clock = std::chrono::steady_clock;

    // What is common to the workers. All members but a rollout worker's `running` and `stage` belong to the mutex.
    struct worker {
        explicit worker(sched::stage s) : kind(s) {}
        sched::stage kind;
        std::int32_t number = -1;
        std::condition_variable wake;
        std::stop_source stop;   // of its calls, until it is down
        bool up = false;         // as the scheduler has it
        bool may_return = false; // down, but to be announced again as soon as it can be
        bool returned = false;   // its thread has nothing left to do
        bool busy = false;
    };
    struct command {
        enum class kind { start, abort, install } what = kind::start;
        sched::ticket ticket = {};
        std::shared_ptr<const rolled_type> partial = {};
        version_t version = 0;
        bool exports = false;
    };
    struct rollout_worker : worker {
        rollout_worker() : worker(stage::rollout) {}
        std::shared_ptr<Rollout> stage;
        std::int32_t lanes = 1;
        std::vector<command> mail;
        std::vector<ticket> running; // of its thread alone
        int installs = 0;            // asked for and not answered
        int failed_installs = 0;     // in a row
    };
    struct call {
        std::uint64_t job = 0;
        std::vector<ticket> tickets;
        std::vector<std::shared_ptr<const rolled_type>> rolled;
    };
    struct teacher_worker : worker {
        teacher_worker() : worker(stage::teacher) {}
        std::shared_ptr<Teacher> stage;
        std::deque<call> mail;
    };
    struct training {
        std::uint64_t job = 0;
        version_t version = 0;
        std::vector<view_type> batch;
    };
    struct learner_worker : worker {
        learner_worker() : worker(stage::learner) {}
        std::shared_ptr<Learner> stage;
        std::deque<std::function<void()>> hooks; // before the next update
        std::optional<training> next;
        bool calling = false; // train() runs: newer weights than the version may be published
        bool hooking = false;
    };

    // What is known of the sequence in a slot.
    struct payload {
        sample_t sample = 0;
        std::uint32_t attempt = 0;
        bool known = false;
        bool resumed = false; // partial is for the next start
        version_t start = -1;
        token_versions versions;
        std::shared_ptr<const rolled_type> rolled, partial;
        std::shared_ptr<const scored_type> scored;
    };

    struct core {
        core(scheduler s, const thread_options& o, hooks_type h)
            : sched(std::move(s)), options(o), hooks(std::move(h)) {
            const auto at_least_0 = [](const char* name, double x) {
                if (!(x >= 0 && x <= 1e9))
                    throw invalid_input(name, "must lie in [0, 1e9] seconds, not " + std::to_string(x));
            };
            at_least_0("drain_seconds", o.drain_seconds);
            at_least_0("shutdown_seconds", o.shutdown_seconds);
            at_least_0("stranded_seconds", o.stranded_seconds);
            if (o.checkpoint_every < 0) throw invalid_input("checkpoint_every", "must be at least 0");
        }

        mutable std::mutex mutex;
        std::condition_variable time_passes; // for run()
        scheduler sched;
        thread_options options;
        hooks_type hooks;
        std::vector<std::shared_ptr<rollout_worker>> rollouts;
        std::vector<std::shared_ptr<teacher_worker>> teachers;
        std::shared_ptr<learner_worker> learner;
        std::vector<payload> payloads; // by slot
        actions todo;
        run_report report;
        bool started = false, over = false, abandoned = false, broken = false;
        bool stop_requested = false, stop_at_once = false, checkpoint_requested = false;
        version_t exporting = -1; // the version whose install makes workers export
        bool export_now = false;

        struct alarm {
            clock::time_point at;
            std::uint64_t number = 0;
            sched::timer what;
            bool operator<(const alarm& o) const { return at != o.at ? at > o.at : number > o.number; }
        };
        std::array<std::int32_t, stage_count> present = {};                 // workers that are up
        std::array<std::optional<clock::time_point>, stage_count> stranded; // since when there are none
        std::priority_queue<alarm> alarms;
        std::uint64_t alarm_count = 0;

        // --- the scheduler, under the mutex

        void dispatch(const event& e) {
            if (over) return;
            todo.clear();
            sched.on(e, todo);
            if (hooks.on_event) observed([&] { hooks.on_event(steady_seconds(), e, todo, sched); });
            perform();
        }
        /// An event whose contents come from a stage. False if no scheduler could take it.
        bool offer(const worker& w, const event& e) {
            return guarded(worker_name{w.kind, w.number}, [&] { dispatch(e); });
        }
        template <class F>
        bool guarded(const std::optional<worker_name>& where, F&& f) {
            try {
                f();
                return true;
            } catch (...) {
                note(std::current_exception(), where);
                return false;
            }
        }
        /// Whoever looks on does not stop the run.
        template <class F>
        void observed(F&& f) {
            try {
                f();
            } catch (...) {
                if (!abandoned && report.observer_exceptions++ == 0)
                    report.first_observer_exception = std::current_exception();
            }
        }
        void note(std::exception_ptr e, const std::optional<worker_name>& where) {
            if (abandoned) return;
            ++report.exceptions;
            if (!report.first_exception) {
                report.first_exception = std::move(e);
                report.first_exception_at = where;
            }
            if (where && !options.stop_on_error) return;
            broken = broken || !where;
            stop_at_once = stop_requested = true;
            time_passes.notify_all();
        }

        void perform() {
            using kind = action::kind;
            std::vector<report_type> steps;
            const action* train = nullptr;
            for (const action& a : todo.items) {
                switch (a.what) {
                case kind::start:
                    start(a);
                    break;
                case kind::abort: {
                    command c;
                    c.what = command::kind::abort, c.ticket = a.ticket;
                    post(*rollouts[static_cast<std::size_t>(a.ticket.worker)], std::move(c));
                    break;
                }
                case kind::score: {
                    teacher_worker& w = *teachers[static_cast<std::size_t>(a.worker)];
                    call c;
                    c.job = a.job;
                    for (const ticket& t : todo.of(a)) {
                        c.tickets.push_back(t);
                        c.rolled.push_back(payloads[t.slot].rolled);
                    }
                    w.mail.push_back(std::move(c));
                    w.wake.notify_one();
                    break;
                }
                case kind::train: // after the hooks of the steps before it
                    train = &a;
                    break;
                case kind::sync: {
                    if (a.version > sched.version() && a.version != exporting) {
                        exporting = a.version;
                        export_now = hooks.on_checkpoint && checkpoint_due(a.version);
                    }
                    command c;
                    c.what = command::kind::install, c.version = a.version;
                    c.exports = export_now && a.version == exporting;
                    ++rollouts[static_cast<std::size_t>(a.worker)]->installs;
                    post(*rollouts[static_cast<std::size_t>(a.worker)], std::move(c));
                    break;
                }
                case kind::step:
                    steps.push_back(report_of(a));
                    break;
                case kind::fail: {
                    if (a.why != failure::stale) report.discarded.push_back({a.ticket, a.why, {}});
                    payload& p = at(a.ticket.slot);
                    if (p.known && p.sample == a.ticket.sample) p = {};
                    break;
                }
                case kind::set_timer:
                    alarms.push({clock::now() + duration(a.seconds), ++alarm_count, a.timer});
                    if (alarms.top().number == alarm_count) time_passes.notify_all(); // it is the next
                    break;
                case kind::lost:
                    lose(named({a.stage, a.worker}), true);
                    break;
                case kind::finished:
                    finish();
                    break;
                }
            }
            for (report_type& s : steps) {
                const version_t v = s.version;
                if (hooks.on_step)
                    learner->hooks.push_back(
                        [this, s = std::make_shared<report_type>(std::move(s))] { hooks.on_step(*s); });
                // as it was decided when the workers were told to install
                const bool due = hooks.on_checkpoint && (v == exporting ? export_now : checkpoint_due(v));
                if (due && v == sched.version()) {
                    checkpoint_requested = false;
                    learner->hooks.push_back([this, s = std::make_shared<snapshot_type>(snapshot())] {
                        hooks.on_checkpoint(std::move(*s));
                    });
                }
            }
            if (train) {
                training t;
                t.job = train->job;
                t.version = train->version;
                for (const ticket& k : todo.of(*train)) t.batch.push_back(view_of(k));
                learner->next = std::move(t);
            }
            if (train || !steps.empty()) learner->wake.notify_one();
        }

        bool checkpoint_due(version_t v) const {
            return checkpoint_requested || (options.checkpoint_every > 0 && v % options.checkpoint_every == 0);
        }
        payload& at(std::uint32_t slot) {
            if (slot >= payloads.size()) payloads.resize(slot + std::size_t{1});
            return payloads[slot];
        }
        /// Of this attempt; null if it is not the present one of its slot.
        payload* find(const ticket& t) {
            if (t.slot >= payloads.size()) return nullptr;
            payload& p = payloads[t.slot];
            return p.known && p.sample == t.sample && p.attempt == t.attempt ? &p : nullptr;
        }
        view_type view_of(const ticket& t) const {
            const payload& p = payloads[t.slot];
            return {t, p.start, p.versions, p.rolled, p.scored};
        }
        void start(const action& a) {
            payload& p = at(a.ticket.slot);
            const version_t begun = sched.start_of(a.ticket);
            // a prefix from before the snapshot, unless the sequence was made to start again since
            const bool goes_on = p.known && p.resumed && p.sample == a.ticket.sample && p.start == begun;
            auto partial = goes_on ? std::move(p.partial) : nullptr;
            p = {};
            p.known = true, p.sample = a.ticket.sample, p.attempt = a.ticket.attempt, p.start = begun;
            p.partial = partial; // until the worker exports a longer one
            command c;
            c.what = command::kind::start, c.ticket = a.ticket, c.partial = std::move(partial);
            post(*rollouts[static_cast<std::size_t>(a.worker)], std::move(c));
        }
        report_type report_of(const action& a) {
            report_type r;
            r.version = a.version;
            r.time = steady_seconds();
            r.totals = sched.totals();
            for (const consumed_sequence& s : todo.consumed_by(a)) {
                if (hooks.on_step) r.consumed.push_back(view_of(s.ticket));
                payloads[s.ticket.slot] = {};
            }
            return r;
        }
        void post(rollout_worker& w, command c) {
            w.mail.push_back(std::move(c));
            w.wake.notify_one();
        }
        static clock::duration duration(double seconds) {
            return std::chrono::duration_cast<clock::duration>(std::chrono::duration<double>(std::min(seconds, 1e9)));
        }

        // --- workers coming and going, under the mutex

        static std::size_t index_of(stage s) { return static_cast<std::size_t>(s); }
        worker& named(const worker_name& n) {
            const auto i = static_cast<std::size_t>(n.worker);
            const std::size_t count = n.stage == stage::rollout   ? rollouts.size()
                                      : n.stage == stage::teacher ? teachers.size()
                                                                  : std::size_t{1};
            if (n.worker < 0 || i >= count)
                throw invalid_input("worker",
                                    std::string("no ") + name_of(n.stage) + " worker " + std::to_string(n.worker));
            if (n.stage == stage::rollout) return *rollouts[i];
            if (n.stage == stage::teacher) return *teachers[i];
            return *learner;
        }
        void announce(worker& w) {
            w.up = true;
            ++present[index_of(w.kind)];
            stranded[index_of(w.kind)].reset();
            tell(w, worker_change::up);
            w.may_return = false;
            w.stop = std::stop_source();
            const std::int32_t slots = w.kind == stage::rollout ? static_cast<rollout_worker&>(w).lanes : 1;
            dispatch(event::up(w.kind, w.number, slots));
        }
        void announce_all() {
            if (sched.finished()) return finish();
            announce(*learner);
            for (const auto& w : teachers) announce(*w);
            for (const auto& w : rollouts) announce(*w);
        }
        /// The scheduler counts it as gone, or is about to.
        void lose(worker& w, bool may_return) {
            if (std::exchange(w.up, false)) {
                busy(w, false);
                tell(w, worker_change::down);
                if (--present[index_of(w.kind)] == 0) {
                    stranded[index_of(w.kind)] = clock::now();
                    time_passes.notify_all();
                }
            }
            w.may_return = may_return;
            w.stop.request_stop();
            if (w.kind == stage::rollout) {
                static_cast<rollout_worker&>(w).mail.clear();
                installed(static_cast<rollout_worker&>(w), true);
            }
            if (w.kind == stage::teacher) static_cast<teacher_worker&>(w).mail.clear();
            if (w.kind == stage::learner) {
                learner->next.reset();
                wake_the_lost();
            }
            w.wake.notify_one();
        }
        void kill(stage s, std::int32_t number) {
            const std::lock_guard lock(mutex);
            worker& w = named({s, number});
            if (over || !started) return;
            const bool was_up = w.up;
            lose(w, false);
            if (was_up) dispatch(event::down(s, number));
        }
        void revive(stage s, std::int32_t number) {
            const std::lock_guard lock(mutex);
            worker& w = named({s, number});
            if (over || w.up) return;
            w.may_return = true;
            w.wake.notify_one();
        }
        // What is published must be what the workers are told to install: the learner waits while one of them is at it, and
        // none comes back while the learner trains.
        void installed(rollout_worker& w, bool all = false) {
            w.installs = all ? 0 : w.installs - 1;
            if (w.installs == 0) learner->wake.notify_one();
        }
        bool may_train() const {
            return learner->next &&
                   std::none_of(rollouts.begin(), rollouts.end(), [](const auto& w) { return w->installs > 0; });
        }
        void wake_the_lost() {
            for (const auto& w : rollouts)
                if (!w->up) w->wake.notify_one();
        }
        void busy(worker& w, bool begins) {
            if (w.busy == begins) return;
            w.busy = begins;
            tell(w, begins ? worker_change::begin : worker_change::end);
        }
        void tell(const worker& w, worker_change what) {
            if (!hooks.on_worker || abandoned) return;
            observed([&] { hooks.on_worker(w.kind, w.number, what, steady_seconds()); });
        }
        void finish() {
            over = true;
            const auto end = [](worker& w) {
                w.stop.request_stop();
                w.wake.notify_one();
            };
            for (const auto& w : rollouts) end(*w);
            for (const auto& w : teachers) end(*w);
            end(*learner);
            time_passes.notify_all();
        }

        // --- threads

        void work(rollout_worker& w) {
            std::vector<command> mail;
            std::vector<finished_rollout<rolled_type>> out;
            std::unique_lock lock(mutex);
            for (;;) {
                if (w.running.empty() && w.mail.empty()) busy(w, false);
                // a worker that comes back gets the weights of the version, so these must be the newest
                const auto may_return = [&] { return w.may_return && !(learner->up && learner->calling); };
                w.wake.wait(lock, [&] {
                    return over || (w.up ? !w.mail.empty() || !w.running.empty() : may_return() || !w.running.empty());
                });
                if (over) break;
                if (!w.up) {
                    if (!w.running.empty())
                        clear(w, lock);
                    else
                        guarded({}, [&] { announce(w); });
                    continue;
                }
                busy(w, true);
                if (!w.mail.empty()) {
                    mail.clear();
                    mail.swap(w.mail);
                    obey(w, mail, lock);
                } else {
                    step(w, out, lock);
                }
            }
            leave(w);
        }
        /// Makes it forget what was given up with it.
        void clear(rollout_worker& w, std::unique_lock<std::mutex>& lock) {
            lock.unlock();
            std::exception_ptr failed;
            for (const ticket& t : std::exchange(w.running, {})) try {
                    w.stage->abort(t);
                } catch (...) {
                    failed = std::current_exception();
                }
            lock.lock();
            if (failed) note(failed, worker_name{w.kind, w.number});
        }
        void obey(rollout_worker& w, std::vector<command>& mail, std::unique_lock<std::mutex>& lock) {
            struct reply {
                const command* to;
                bool done;
                std::exception_ptr failed;
            };
            std::vector<reply> replies;
            std::vector<partial_rollout<rolled_type>> partials;
            lock.unlock();
            for (command& c : mail) {
                const auto here = std::find(w.running.begin(), w.running.end(), c.ticket);
                reply r{&c, true, {}};
                try {
                    switch (c.what) {
                    case command::kind::start:
                        start_on(*w.stage, c);
                        w.running.push_back(c.ticket);
                        break;
                    case command::kind::abort:
                        r.done = here != w.running.end(); // else it was answered already
                        if (r.done) {
                            w.running.erase(here);
                            w.stage->abort(c.ticket);
                        }
                        break;
                    case command::kind::install:
                        w.stage->install(c.version);
                        if constexpr (detail::exports_partials<Rollout>)
                            if (c.exports) w.stage->export_partials(partials);
                        break;
                    }
                } catch (...) {
                    r.failed = std::current_exception();
                }
                replies.push_back(r);
                if (r.failed && c.what == command::kind::install) break;
            }
            lock.lock();
            for (auto& p : partials)
                if (payload* known = find(p.ticket)) known->partial = std::move(p.sequence);
            for (const reply& r : replies) {
                if (!w.up || over) break; // it was lost meanwhile: all of this was given up
                if (r.failed) note(r.failed, worker_name{w.kind, w.number});
                switch (r.to->what) {
                case command::kind::start:
                    if (r.failed) offer(w, event::rollout_failed(r.to->ticket));
                    break;
                case command::kind::abort:
                    if (r.done) offer(w, event::aborted(r.to->ticket));
                    break;
                case command::kind::install:
                    if (!r.failed) {
                        installed(w);
                        w.failed_installs = 0;
                        offer(w, event::synced(w.number, r.to->version));
                    } else {
                        lose(w, ++w.failed_installs < 3);
                        offer(w, event::down(w.kind, w.number));
                    }
                    break;
                }
            }
        }
        static void start_on(Rollout& stage, const command& c) {
            if constexpr (detail::starts_partial<Rollout>) {
                if constexpr (detail::starts_fresh<Rollout>)
                    if (!c.partial) return stage.start(c.ticket);
                stage.start(c.ticket, c.partial);
            } else {
                stage.start(c.ticket);
            }
        }
        void step(rollout_worker& w, std::vector<finished_rollout<rolled_type>>& out,
                  std::unique_lock<std::mutex>& lock) {
            const std::stop_token stop = w.stop.get_token();
            std::exception_ptr failed;
            std::vector<ticket> dead;
            out.clear();
            lock.unlock();
            try {
                if constexpr (detail::steps_stoppably<Rollout>)
                    w.stage->step(out, stop);
                else
                    w.stage->step(out);
                for (const auto& f : out) {
                    if (!f.sequence) throw std::logic_error("opd: a rollout stage finished a sequence without payload");
                    std::erase(w.running, f.ticket);
                }
                if (static_cast<index_t>(w.stage->running()) < static_cast<index_t>(w.running.size()))
                    throw std::logic_error("opd: a rollout stage runs fewer sequences than it was given");
            } catch (...) {
                failed = std::current_exception();
                std::erase_if(out, [](const auto& f) { return !f.sequence; });
                for (const auto& f : out) std::erase(w.running, f.ticket);
                dead = std::exchange(w.running, {});
                for (const ticket& t : dead) try {
                        w.stage->abort(t);
                    } catch (...) { // the first exception says why
                    }
            }
            lock.lock();
            if (failed && !stop.stop_requested()) note(failed, worker_name{w.kind, w.number});
            for (auto& f : out) {
                if (f.ticket.worker != w.number) { // nobody asked it
                    note(std::make_exception_ptr(invalid_input("step", "a rollout stage answered another's ticket")),
                         worker_name{w.kind, w.number});
                    continue;
                }
                if (!w.up && !w.may_return && !over) continue; // killed: nothing is heard of it
                if (payload* p = w.up ? find(f.ticket) : nullptr; p && !p->rolled) {
                    p->rolled = std::move(f.sequence);
                    p->versions = f.versions;
                    p->partial.reset();
                }
                // one that the scheduler cannot take is an attempt that failed; the next one replaces the payload
                if (!offer(w, event::rolled_out(f.ticket, f.versions)) && w.up)
                    offer(w, event::rollout_failed(f.ticket));
            }
            out.clear();
            if (w.up)
                for (const ticket& t : dead) offer(w, event::rollout_failed(t));
        }

        void work(teacher_worker& w) {
            std::unique_lock lock(mutex);
            for (;;) {
                if (w.mail.empty()) busy(w, false);
                w.wake.wait(lock, [&] { return over || (w.up ? !w.mail.empty() : w.may_return); });
                if (over) break;
                if (!w.up) {
                    guarded({}, [&] { announce(w); });
                    continue;
                }
                busy(w, true);
                call c = std::move(w.mail.front());
                w.mail.pop_front();
                const std::stop_token stop = w.stop.get_token();
                std::exception_ptr failed;
                std::vector<std::shared_ptr<const scored_type>> scores;
                lock.unlock();
                try {
                    const std::span<const std::shared_ptr<const rolled_type>> rolled = c.rolled;
                    if constexpr (detail::scores_stoppably<Teacher, rolled_type>)
                        scores = w.stage->score(rolled, stop);
                    else
                        scores = w.stage->score(rolled);
                    if (scores.size() != c.tickets.size())
                        throw std::logic_error("opd: a teacher scored " + std::to_string(scores.size()) + " of " +
                                               std::to_string(c.tickets.size()) +
                                               " sequences: one entry each, null where there is no score");
                } catch (...) {
                    failed = std::current_exception();
                }
                c.rolled.clear();
                lock.lock();
                if (failed && !stop.stop_requested()) note(failed, worker_name{w.kind, w.number});
                if (!w.up && !w.may_return) continue; // killed
                std::vector<ticket> done;
                for (std::size_t i = 0; !failed && i < scores.size(); ++i) {
                    if (!scores[i]) continue;
                    if (payload* p = w.up ? find(c.tickets[i]) : nullptr) p->scored = std::move(scores[i]);
                    done.push_back(c.tickets[i]);
                }
                if (failed || done.empty())
                    offer(w, event::score_failed(c.job, w.number));
                else
                    offer(w, event::scored(c.job, w.number, done));
            }
            leave(w);
        }

        void work(learner_worker& w) {
            std::unique_lock lock(mutex);
            for (;;) {
                if (!w.next) busy(w, false);
                w.wake.wait(lock, [&] { return over || !w.hooks.empty() || (w.up ? may_train() : w.may_return); });
                if (!w.hooks.empty() && !abandoned) {
                    busy(w, false);
                    const auto hook = std::move(w.hooks.front());
                    w.hooks.pop_front();
                    w.hooking = true;
                    lock.unlock();
                    std::exception_ptr failed;
                    try {
                        hook();
                    } catch (...) {
                        failed = std::current_exception();
                    }
                    lock.lock();
                    w.hooking = false;
                    if (failed) note(failed, {});
                    continue;
                }
                if (over) break;
                if (!w.up) {
                    guarded({}, [&] { announce(w); });
                    continue;
                }
                if (!may_train()) continue;
                busy(w, true);
                const training t = std::move(*w.next);
                w.next.reset();
                const std::stop_token stop = w.stop.get_token();
                std::exception_ptr failed;
                index_t updates = 0;
                w.calling = true;
                lock.unlock();
                try {
                    const std::span<const view_type> batch = t.batch;
                    if constexpr (detail::trains_stoppably<Learner, view_type>)
                        updates = w.stage->train(batch, t.version, stop);
                    else
                        updates = w.stage->train(batch, t.version);
                } catch (...) {
                    failed = std::current_exception();
                }
                lock.lock();
                w.calling = false;
                if (failed && !stop.stop_requested()) note(failed, worker_name{w.kind, w.number});
                if (w.up || w.may_return) // else it was killed
                    offer(w, failed ? event::learn_failed(t.job) : event::learned(t.job, updates));
                wake_the_lost();
            }
            leave(w);
        }
        void leave(worker& w) {
            busy(w, false);
            w.returned = true;
            time_passes.notify_all();
        }

        // --- run()'s thread

        void keep_time(std::unique_lock<std::mutex>& lock) {
            std::optional<clock::time_point> drained;
            while (!over) {
                const auto now = clock::now();
                if (stop_requested && !drained) {
                    drained = now + duration(stop_at_once ? 0 : options.drain_seconds);
                    guarded({}, [&] { dispatch(event::of(event::kind::close)); });
                    continue;
                }
                if (drained && (now >= *drained || stop_at_once)) {
                    stop();
                    break;
                }
                if (!alarms.empty() && alarms.top().at <= now) {
                    const sched::timer t = alarms.top().what;
                    alarms.pop();
                    guarded({}, [&] { dispatch(event::fired(t)); });
                    continue;
                }
                std::optional<clock::time_point> until = drained;
                const auto no_later = [&](clock::time_point t) { until = until ? std::min(*until, t) : t; };
                if (!alarms.empty()) no_later(alarms.top().at);
                if (options.stranded_seconds > 0 && !drained) {
                    for (int i = 0; i < stage_count; ++i) {
                        const auto& since = stranded[static_cast<std::size_t>(i)];
                        if (!since) continue;
                        const auto limit = *since + duration(options.stranded_seconds);
                        if (now >= limit)
                            note(std::make_exception_ptr(error(std::string("opd: no ") +
                                                               name_of(static_cast<stage>(i)) + " worker is left")),
                                 {});
                        no_later(limit);
                    }
                    if (stop_requested) continue;
                }
                if (until)
                    time_passes.wait_until(lock, *until);
                else
                    time_passes.wait(lock);
            }
        }
        void stop() {
            std::vector<outstanding_sequence::place> places; // by slot
            sched.for_each([&](const outstanding_sequence& s) {
                places.resize(std::max(places.size(), s.ticket.slot + std::size_t{1}));
                places[s.ticket.slot] = s.where;
            });
            const std::size_t before = report.discarded.size();
            guarded({}, [&] { dispatch(event::of(event::kind::stop)); });
            for (std::size_t i = before; i < report.discarded.size(); ++i)
                report.discarded[i].where = places[report.discarded[i].ticket.slot];
            if (!over) finish();
        }
        void wait_for_workers(std::unique_lock<std::mutex>& lock) {
            const auto gone = [](const auto& w) { return w->returned; };
            const auto stages_gone = [&] {
                return std::all_of(rollouts.begin(), rollouts.end(), gone) &&
                       std::all_of(teachers.begin(), teachers.end(), gone) &&
                       (learner->returned || (!stop_requested && !learner->calling && learner->hooking));
            };
            auto limit = clock::now() + duration(options.shutdown_seconds);
            time_passes.wait_until(lock, limit, stages_gone);
            if (!stop_requested && !learner->calling) { // the last hooks of a run that ended by itself take their time
                time_passes.wait(lock, [&] { return learner->returned || stop_requested; });
                limit = clock::now() + duration(options.shutdown_seconds);
            }
            time_passes.wait_until(lock, limit, [&] { return learner->returned; });
        }

        // --- from outside

        void send(const event& e) {
            const std::lock_guard lock(mutex);
            dispatch(e);
        }
        void request_stop(bool at_once = false) {
            const std::lock_guard lock(mutex);
            stop_requested = true;
            stop_at_once = stop_at_once || at_once;
            time_passes.notify_all();
        }

        // --- snapshots

        snapshot_type snapshot() const {
            snapshot_type r;
            r.version = sched.version();
            r.scheduler = sched.snapshot();
            using place = outstanding_sequence::place;
            sched.for_each([&](const outstanding_sequence& s) {
                typename snapshot_type::entry e{s.ticket, s.where, s.start, nullptr, nullptr};
                const payload* p = s.ticket.slot < payloads.size() ? &payloads[s.ticket.slot] : nullptr;
                if (p && p->known && p->sample == s.ticket.sample) {
                    if (s.where == place::waiting)
                        e.sequence = p->resumed && s.start == p->start ? p->partial : nullptr;
                    else if (s.where == place::rollout)
                        e.sequence = p->attempt == s.ticket.attempt ? p->partial : nullptr;
                    else
                        e.sequence = p->rolled;
                    if (s.where >= place::ready) e.scored = p->scored;
                }
                r.sequences.push_back(std::move(e));
            });
            return r;
        }
        void resume(const snapshot_type& from) {
            using place = outstanding_sequence::place;
            sched.abandon_workers(detail::starts_partial<Rollout> && detail::exports_partials<Rollout>, true);
            std::vector<const typename snapshot_type::entry*> by_slot;
            for (const auto& e : from.sequences) {
                if (e.ticket.slot >= by_slot.size()) by_slot.resize(e.ticket.slot + std::size_t{1});
                by_slot[e.ticket.slot] = &e;
            }
            sched.for_each([&](const outstanding_sequence& s) {
                const auto* e = s.ticket.slot < by_slot.size() ? by_slot[s.ticket.slot] : nullptr;
                const auto refuse = [&](const char* why) {
                    throw invalid_input("snapshot", "sequence " + std::to_string(s.ticket.sample) + " " + why);
                };
                if (!e || e->ticket.sample != s.ticket.sample) return refuse("is not among the payloads");
                payload& p = at(s.ticket.slot);
                p.known = true;
                p.sample = s.ticket.sample, p.attempt = s.ticket.attempt, p.start = s.start;
                p.versions = sched.versions_of(s.ticket);
                if (s.where == place::waiting) {
                    p.resumed = e->sequence && s.start >= 0;
                    if (p.resumed) p.partial = e->sequence;
                    return;
                }
                if (!e->sequence) refuse("has no payload");
                p.rolled = e->sequence;
                if (s.where != place::ready) return;
                if (!e->scored) refuse("has no score");
                p.scored = e->scored;
            });
        }
    };

    void check_new(bool given) const {
        if (!given) throw invalid_input("stage", "is null");
        if (core_->started) throw std::logic_error("opd: thread_driver: workers are added before run()");
    }

    std::shared_ptr<core> core_;
};

} // namespace opd::sched
