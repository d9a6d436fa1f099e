// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Runs a scheduler on threads. One loop, on the thread of run(), owns the scheduler, the payloads (conveyor.hpp) and the time;
// each worker is a loop of messages on a thread of its own (worker_loop.hpp), with a mailbox. Threads wait on condition variables;
// nothing polls, nothing sleeps.
//
//                         commands
//           run() ------------------------> mailbox of each worker  -> start, step, install | score | train, hooks
//             ^                                                              |
//             +----------------- one mailbox of replies <--------------------+
//
// Stages are called by their own thread alone, hooks by the learner's, between two updates. Payloads are shared_ptr<const T>.
//
// Faults, beside what the scheduler makes of them (attempts, deadlines):
//   start() throws      the sequence's attempt fails
//   step() throws       what it had appended is finished, every other attempt on that worker fails
//   install() throws    the worker's life is over, and it begins another; after the third time in a row it stays away. Unless
//                       other weights are to be installed already: then it goes on to those
//   score(), train()    throw: the call failed. A score() with another number of entries than sequences: likewise
//   a missed deadline   the worker counts as lost and its call is asked to stop. If the call ever returns, its answer is
//                       counted as late and the worker begins its next life. What a learner publishes late has the name of a
//                       job that nobody will ask for
//   on_step or          the run stops: what they write down is part of it. on_worker and on_event, which look on, stop
//   on_checkpoint       nothing: what they throw is counted (observer_exceptions)
//   throws
// A stage that always fails ends the run as failed (settings.fruitless_steps); so do installs, when every rollout worker stays
// away. The first exception is kept for the report, and the last of a stage that failed; those of calls that were asked to
// stop count for nothing.
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
#include <exception>
#include <functional>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <thread>
#include <utility>

#include "opd/sched/conveyor.hpp"
#include "opd/sched/mailbox.hpp"
#include "opd/sched/scheduler.hpp"
#include "opd/sched/stages.hpp"
#include "opd/sched/thread_report.hpp"
#include "opd/sched/worker_loop.hpp"

namespace opd::sched {

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
    /// weights that the stages install first must be snapshot.weights.
    thread_driver(const settings& s, const snapshot_type& from, const thread_options& options = {},
                  hooks_type hooks = {})
        : core_(std::make_shared<core>(scheduler::restore(s, from.scheduler), options, std::move(hooks))) {
        core_->sched.abandon_workers(detail::exports_partials<Rollout>, true);
        core_->payloads.resume(core_->sched, from);
    }

    thread_driver(const thread_driver&) = delete;
    thread_driver& operator=(const thread_driver&) = delete;

    /// Also while it runs. Returns the worker's number.
    std::int32_t add_rollout(std::shared_ptr<Rollout> stage, std::int32_t lanes) {
        check_new(stage != nullptr);
        if (const std::int32_t most = core_->sched.options().most_slots; lanes < 1 || lanes > most)
            throw invalid_input("lanes", "must be at least 1 and at most settings.most_slots, " + std::to_string(most) +
                                             ", not " + std::to_string(lanes));
        return core_->add(stage::rollout, core_->rollouts, std::move(stage), lanes);
    }
    std::int32_t add_teacher(std::shared_ptr<Teacher> stage) {
        check_new(stage != nullptr);
        return core_->add(stage::teacher, core_->teachers, std::move(stage), 1);
    }
    /// Before run().
    void set_learner(std::shared_ptr<Learner> stage) {
        check_new(stage != nullptr);
        {
            const std::lock_guard lock(core_->mutex);
            if (core_->started) throw std::logic_error("opd: thread_driver: the learner is set before run()");
            core_->learners.clear();
        }
        core_->add(stage::learner, core_->learners, std::move(stage), 1);
    }

    /// Before run(): an observer (recorder.hpp has one) that is told under the driver's lock what happens. It needs up, down,
    /// begin, end (stage, worker, time) and event(time, event, actions, scheduler). Replaces on_worker and on_event. begin and end
    /// may take an activity behind, and are then told of spare work, too.
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
            case worker_change::begin_spare:
                if constexpr (requires { o.begin(s, w, t, activity::spare); }) o.begin(s, w, t, activity::spare);
                return;
            case worker_change::end_spare:
                if constexpr (requires { o.end(s, w, t, activity::spare); }) o.end(s, w, t, activity::spare);
                return;
            }
        };
        core_->hooks.on_event = [&o](double t, const event& e, const actions& a, const scheduler& s) {
            o.event(t, e, a, s);
        };
    }

    /// Blocks until the run is over and its threads have returned or were left behind. Once per driver.
    run_report run(std::stop_token stop = {}) {
        {
            const std::lock_guard lock(core_->mutex); // others may add workers meanwhile
            if (core_->rollouts.empty()) throw invalid_input("add_rollout", "a run needs at least one rollout worker");
            if (core_->teachers.empty()) throw invalid_input("add_teacher", "a run needs at least one teacher");
            if (core_->learners.empty()) throw invalid_input("set_learner", "a run needs a learner");
        }
        const double begin = steady_seconds();
        const std::shared_ptr<core> c = core_;
        run_report report;
        {
            const std::stop_callback on_stop(stop, [c] { c->request_stop(); }); // made and destroyed without the lock
            std::unique_lock lock(c->mutex);
            if (std::exchange(c->started, true)) throw std::logic_error("opd: thread_driver: run() is called once");
            try {
                c->launch_all();
            } catch (...) { // no more threads to be had
                c->finish();
                lock.unlock();
                c->threads.clear();
                throw;
            }
            c->loop(lock);
            c->wait_for_workers(lock);
            c->abandoned = true; // whoever returns later touches nothing
            report = c->report;
            report.completed = c->sched.finished() && !c->stop_requested && !c->broken && !report.failed;
            report.version = c->sched.version();
            report.totals = c->sched.totals();
            for (auto& [w, thread] : c->threads)
                if (!w->returned) {
                    report.left_behind.push_back({w->kind, w->number});
                    thread.detach();
                }
        }
        c->threads.clear(); // joins the others, which have nothing left to do
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
    /// Another number of sequences for a worker, at most what it was added with. 0: it drains; what runs there is finished.
    void set_slots(stage s, std::int32_t w, std::int32_t slots) { core_->set_slots(s, w, slots); }
    /// Stops what runs on a rollout worker beyond so many sequences, the youngest first, and keeps what they have drawn: they go on
    /// later, on whoever has a lane. With set_slots(stage::rollout, w, 0) it empties a worker that is to leave. Refused
    /// unless the stages have park().
    void park(std::int32_t w, std::int32_t beyond = 0) {
        if constexpr (detail::parks<Rollout>) {
            core_->park(w, beyond);
        } else {
            throw invalid_input("park", "the rollout stages have no park()");
        }
    }
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
    /// What lower jobs published nobody needs any more (scheduler::needed_from).
    std::uint64_t needed_from() const {
        const std::lock_guard lock(core_->mutex);
        return core_->sched.needed_from();
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
    using command = worker_command<rolled_type, scored_type>;
    using reply = worker_reply<rolled_type, scored_type>;
    using order = typename command::kind;

    // All but the mailbox belongs to the loop, under its mutex.
    struct worker {
        sched::stage kind = stage::rollout;
        std::int32_t number = -1;
        std::int32_t most = 1; // slots that it was added with
        std::int32_t slots = 1;
        incarnation_t life = 0;  // the latest that it was told to begin
        std::stop_source stop;   // of its calls in this life
        bool begins = false;     // told to, and not yet up
        bool up = false;         // as the scheduler has it
        bool killed = false;     // nothing is heard of it
        bool returned = false;   // its thread has nothing left to do
        std::int64_t load = 0;   // what it has not answered: sequences, calls, and 1 for weights
        std::stop_source spare;  // of its spare work,
        bool sparing = false;    // which it is at, as far as is known
        bool installing = false; // told to, and has not answered
        int failed_installs = 0; // in a row
        detail::mailbox<command> mail;
    };
    // What a worker said; `from` null: nobody, the loop is to look up.
    struct message {
        std::shared_ptr<worker> from;
        reply said;
        bool asked_to_stop = false;
        bool returned = false;
    };
    template <class Stage>
    struct worker_of : worker {
        std::shared_ptr<Stage> stage;
    };
    using inbox = detail::mailbox<message>;

    // A worker's end of the line.
    struct channel {
        std::shared_ptr<worker> self;
        std::shared_ptr<inbox> to;
        std::stop_token stop = {};
        void receive(std::vector<command>& out, bool wait) {
            self->mail.receive(out, wait);
            for (const command& c : out)
                if (c.what == order::begin) stop = c.stop;
        }
        void send(reply&& r) { to->post({self, std::move(r), stop.stop_requested(), false}); }
    };

    struct core : std::enable_shared_from_this<core> {
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

        mutable std::mutex mutex; // of all that follows: the loop's, and whoever asks from outside
        std::shared_ptr<inbox> replies = std::make_shared<inbox>();
        scheduler sched;
        thread_options options;
        hooks_type hooks;
        conveyor<rolled_type, scored_type> payloads;
        std::vector<std::shared_ptr<worker_of<Rollout>>> rollouts;
        std::vector<std::shared_ptr<worker_of<Teacher>>> teachers;
        std::vector<std::shared_ptr<worker_of<Learner>>> learners; // one
        std::vector<std::pair<std::shared_ptr<worker>, std::jthread>> threads;
        actions todo;
        run_report report;
        std::array<std::exception_ptr, stage_count> last_exceptions; // of each stage
        bool started = false, over = false, abandoned = false, broken = false;
        bool stop_requested = false, stop_at_once = false, checkpoint_requested = false, stopping = false;
        version_t exporting = -1; // the version whose install makes workers export
        bool export_now = false;
        std::int64_t hooking = 0;                           // hooks that were asked for and are not over
        std::array<std::int32_t, stage_count> present = {}; // workers that are up
        std::array<std::optional<clock::time_point>, stage_count> stranded; // since when there are none

        // --- the scheduler

        void dispatch(const event& e) {
            if (over) return;
            todo.clear();
            const double now = steady_seconds();
            sched.on(e, now, todo);
            if (hooks.on_event) observed([&] { hooks.on_event(now, e, todo, sched); });
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
            if (where) last_exceptions[index_of(where->stage)] = e;
            if (!report.first_exception) {
                report.first_exception = std::move(e);
                report.first_exception_at = where;
            }
            if (where && !options.stop_on_error) return;
            broken = broken || !where;
            stop_at_once = stop_requested = true;
        }

        /// After what the stage threw last.
        void fail(stage s) {
            if (report.failed) return;
            report.failed = s;
            report.last_exception_of_failed = last_exceptions[index_of(s)];
            if (!report.first_exception)
                report.first_exception = std::make_exception_ptr(
                    error(std::string("opd: the run has failed: nothing was learnt from any more, for want of ") +
                          name_of(s)));
        }

        void perform() {
            using kind = action::kind;
            std::vector<report_type> steps;
            std::vector<bool> empty; // of those
            const action* train = nullptr;
            bool ends = false;
            for (const action& a : todo.items) {
                switch (a.what) {
                case kind::start: {
                    command c{.what = order::start, .ticket = a.ticket};
                    c.prefix = payloads.start(a.ticket, sched.start_of(a.ticket));
                    ask(*rollouts[index_of(a.worker)], std::move(c));
                    break;
                }
                case kind::abort:
                    post(*rollouts[index_of(a.worker)], {.what = order::abort, .ticket = a.ticket});
                    break;
                case kind::park:
                    post(*rollouts[index_of(a.worker)], {.what = order::park, .ticket = a.ticket});
                    break;
                case kind::score: {
                    command c{.what = order::score, .job = a.job};
                    for (const ticket& t : todo.of(a)) {
                        c.tickets.push_back(t);
                        c.sequences.push_back(payloads.view(t).rolled);
                    }
                    ask(*teachers[index_of(a.worker)], std::move(c));
                    break;
                }
                case kind::train: // after the hooks of the steps before it
                    train = &a;
                    break;
                case kind::sync:
                    install(a);
                    break;
                case kind::step:
                    steps.push_back(report_of(a));
                    empty.push_back(a.count == 0);
                    break;
                case kind::fail:
                    if (a.why != failure::stale) report.discarded.push_back({a.ticket, a.why, a.where});
                    payloads.forget(a.ticket);
                    break;
                case kind::lost: {
                    worker& w = named({a.stage, a.worker});
                    end_life(w);
                    begin_life(w);
                    break;
                }
                case kind::finished: // after the hooks of the last step
                    ends = true;
                    break;
                }
            }
            for (std::size_t i = 0; i < steps.size(); ++i) {
                report_type& s = steps[i];
                const version_t v = s.version;
                if (hooks.on_step) hook([this, s = std::make_shared<report_type>(std::move(s))] { hooks.on_step(*s); });
                // as it was decided when the workers were told to install
                const bool due = hooks.on_checkpoint && (v == exporting ? export_now : checkpoint_due(v));
                if (!due || v != sched.version() || stopping || sched.failed()) continue;
                // where everything failed, the sequences that were given up are in the checkpoint before
                checkpoint_requested = empty[i];
                if (empty[i]) continue;
                hook([this, s = std::make_shared<snapshot_type>(payloads.snapshot(sched))] {
                    hooks.on_checkpoint(std::move(*s));
                });
            }
            if (ends && sched.failed()) fail(*sched.failed());
            if (ends) finish();
            if (!train) return;
            command c{.what = order::train, .call = {train->job, {train->version, train->from}}};
            for (const ticket& t : todo.of(*train)) c.batch.push_back(payloads.view(t));
            ask(*learners[0], std::move(c));
        }
        void install(const action& a) {
            if (a.version > sched.version() && a.version != exporting) {
                exporting = a.version;
                export_now = hooks.on_checkpoint && checkpoint_due(a.version);
            }
            const auto tell = [&](worker& w) {
                if (!w.up) return;
                if (!std::exchange(w.installing, true)) load(w, +1);
                post(w, {.what = order::install,
                         .weights = {a.version, a.job},
                         .exports = export_now && a.version == exporting});
            };
            if (a.worker >= 0) return tell(*rollouts[index_of(a.worker)]);
            for (const auto& w : rollouts) tell(*w);
        }
        bool checkpoint_due(version_t v) const {
            return checkpoint_requested || (options.checkpoint_every > 0 && v % options.checkpoint_every == 0);
        }
        report_type report_of(const action& a) {
            report_type r;
            r.version = a.version;
            r.time = steady_seconds();
            r.totals = sched.totals();
            for (const consumed_sequence& s : todo.consumed_by(a)) {
                if (hooks.on_step) r.consumed.push_back(payloads.view(s.ticket));
                payloads.forget(s.ticket);
            }
            return r;
        }

        // --- to the workers

        static std::size_t index_of(auto stage_or_worker) { return static_cast<std::size_t>(stage_or_worker); }
        void post(worker& w, command c) {
            c.life = w.life;
            w.mail.post(std::move(c));
        }
        /// A command that will be answered, if the worker lives.
        void ask(worker& w, command c) {
            load(w, +1);
            post(w, std::move(c));
        }
        void hook(std::function<void()> f) {
            ++hooking;
            post(*learners[0], {.what = order::hook, .hook = std::move(f)});
        }
        /// It forgets what it was doing and announces itself.
        void begin_life(worker& w) {
            if (over || w.up || w.begins) return;
            w.life = std::max(w.life, sched.incarnation_of(w.kind, w.number)) + 1;
            w.stop = std::stop_source();
            w.begins = true;
            w.killed = false;
            post(w, {.what = order::begin, .stop = w.stop.get_token(), .slots = w.slots});
        }
        /// The scheduler counts it as gone, or is about to.
        void end_life(worker& w) {
            if (std::exchange(w.up, false)) {
                end_spare(w);
                load(w, -w.load);
                tell(w, worker_change::down);
                if (--present[index_of(w.kind)] == 0) stranded[index_of(w.kind)] = clock::now();
            }
            w.begins = false;
            w.load = 0;
            w.installing = false;
            w.stop.request_stop();
            w.mail.discard([](const command& c) { return c.what != order::hook; });
        }
        void load(worker& w, std::int64_t more) {
            const bool was_busy = w.load > 0;
            w.load += more;
            if (w.load > 0) end_spare(w);
            if (was_busy != (w.load > 0)) tell(w, w.load > 0 ? worker_change::begin : worker_change::end);
        }
        /// It has answered all that it was asked, and the scheduler had nothing more for it.
        void offer_spare(worker& w) {
            if constexpr (detail::spares<Rollout>) {
                if (over || w.kind != stage::rollout || !w.up || w.load > 0 || w.sparing) return;
                w.sparing = true;
                w.spare = std::stop_source();
                post(w, {.what = order::spare, .stop = w.spare.get_token()});
                tell(w, worker_change::begin_spare);
            }
        }
        void end_spare(worker& w) {
            if (!std::exchange(w.sparing, false)) return;
            w.spare.request_stop();
            tell(w, worker_change::end_spare);
        }
        void tell(const worker& w, worker_change what) {
            if (!hooks.on_worker || abandoned) return;
            observed([&] { hooks.on_worker(w.kind, w.number, what, steady_seconds()); });
        }
        void finish() {
            over = true;
            for_all([this](worker& w) {
                end_spare(w);
                w.stop.request_stop();
                w.mail.discard([](const command& c) { return c.what != order::hook; });
                w.mail.post({.what = order::halt});
            });
        }

        // --- from the workers

        void take(message& m) {
            if (!m.from) return;
            worker& w = *m.from;
            const event& e = m.said.what;
            w.returned = w.returned || m.returned;
            if (m.said.of_hook) {
                --hooking;
                if (m.said.failed) note(m.said.failed, {});
                return;
            }
            if (m.said.failed && !m.asked_to_stop && !(m.said.spared && !w.sparing))
                note(m.said.failed, worker_name{w.kind, w.number});
            if (m.said.spared) {
                if (w.up && e.incarnation == w.life) end_spare(w);
                return;
            }
            if (over || w.killed || !e.from_worker()) return;
            const bool lives = w.up && e.incarnation == w.life;
            switch (e.what) {
            case event::kind::worker_up:
                if (e.incarnation == w.life && w.begins) come(w);
                return;
            case event::kind::worker_down: // it could not install
                if (!lives) break;
                end_life(w);
                offer(w, e);
                if (++w.failed_installs < 3) begin_life(w);
                if (std::all_of(rollouts.begin(), rollouts.end(),
                                [](const auto& r) { return r->failed_installs >= 3; })) {
                    fail(stage::rollout); // nobody comes back
                    stop_at_once = stop_requested = true;
                }
                return;
            case event::kind::rolled_out:
                if (lives) payloads.rolled(e.ticket, e.versions, std::move(m.said.sequence));
                break;
            case event::kind::parked:
                if (lives) m.said.sequence = payloads.parked(e.ticket, std::move(m.said.sequence));
                break;
            case event::kind::scored:
                for (std::size_t i = 0; lives && i < m.said.tickets.size(); ++i)
                    payloads.scored(m.said.tickets[i], std::move(m.said.scores[i]));
                break;
            case event::kind::synced:
                if (!lives) break;
                w.failed_installs = 0;
                for (auto& p : m.said.prefixes) payloads.exported(p.ticket, std::move(p.sequence));
                break;
            default:
                break;
            }
            const bool synced = e.what == event::kind::synced;
            // what else it was to install it has dropped
            if (lives && (!synced || std::exchange(w.installing, false))) load(w, -1);
            event said = e;
            said.tickets = m.said.tickets;
            // one that the scheduler cannot take is an attempt that failed; the next one replaces the payload
            const bool parked = e.what == event::kind::parked;
            if (!offer(w, said) && lives && (e.what == event::kind::rolled_out || parked)) {
                if (parked) payloads.parked(e.ticket, std::move(m.said.sequence));
                offer(w, event::rollout_failed(e.ticket));
            }
            if (lives) offer_spare(w);
        }
        void come(worker& w) {
            w.begins = false;
            w.up = true;
            ++present[index_of(w.kind)];
            stranded[index_of(w.kind)].reset();
            tell(w, worker_change::up);
            guarded({}, [&] { dispatch(event::up(w.kind, w.number, w.slots).of_life(w.life)); });
        }

        // --- workers and their threads

        template <class F>
        void for_all(F&& f) {
            for (const auto& w : learners) f(*w);
            for (const auto& w : teachers) f(*w);
            for (const auto& w : rollouts) f(*w);
        }
        worker& named(const worker_name& n) {
            worker* found = nullptr;
            for_all([&](worker& w) {
                if (w.kind == n.stage && w.number == n.worker) found = &w;
            });
            if (!found)
                throw invalid_input("worker",
                                    std::string("no ") + name_of(n.stage) + " worker " + std::to_string(n.worker));
            return *found;
        }
        template <class Stage>
        std::int32_t add(stage kind, std::vector<std::shared_ptr<worker_of<Stage>>>& all, std::shared_ptr<Stage> s,
                         std::int32_t slots) {
            const std::lock_guard lock(mutex);
            if (over) throw std::logic_error("opd: thread_driver: the run is over");
            auto w = std::make_shared<worker_of<Stage>>();
            w->kind = kind;
            w->number = static_cast<std::int32_t>(all.size());
            w->most = w->slots = slots;
            w->stage = std::move(s);
            all.push_back(w);
            try {
                if (started) launch(w);
            } catch (...) { // no more threads to be had
                all.pop_back();
                throw;
            }
            return w->number;
        }
        void launch_all() {
            if (sched.finished()) finish();
            for (const auto& w : learners) launch(w);
            for (const auto& w : teachers) launch(w);
            for (const auto& w : rollouts) launch(w);
        }
        template <class Stage>
        void launch(const std::shared_ptr<worker_of<Stage>>& w) {
            threads.emplace_back(w, std::jthread([w, c = this->shared_from_this()] {
                                     channel line{w, c->replies};
                                     work(w->stage, w->number, line);
                                     c->replies->post({w, {}, false, true});
                                 }));
            begin_life(*w);
        }
        static void work(const std::shared_ptr<Rollout>& s, std::int32_t number, channel& line) {
            rollout_actor<Rollout, scored_type> w(s, number);
            run_rollout(w, line);
        }
        static void work(const std::shared_ptr<Teacher>& s, std::int32_t number, channel& line) {
            run_teacher<Teacher, rolled_type>(*s, number, line);
        }
        static void work(const std::shared_ptr<Learner>& s, std::int32_t, channel& line) {
            run_learner<Learner, rolled_type, scored_type>(*s, line);
        }

        // --- the loop

        void loop(std::unique_lock<std::mutex>& lock) {
            std::optional<clock::time_point> drained;
            std::vector<message> mail;
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
                const double due = sched.next_deadline();
                if (due <= steady_seconds()) {
                    guarded({}, [&] { dispatch(event::of(event::kind::tick)); });
                    continue;
                }
                std::optional<clock::time_point> until = drained;
                const auto no_later = [&](clock::time_point t) { until = until ? std::min(*until, t) : t; };
                if (due < forever) no_later(clock::time_point() + duration(due) + clock::duration(1));
                if (options.stranded_seconds > 0 && !drained && look_for_stranded(now, no_later)) continue;
                receive(mail, lock, until);
            }
        }
        /// Waits for messages, and takes them.
        void receive(std::vector<message>& mail, std::unique_lock<std::mutex>& lock,
                     std::optional<clock::time_point> until) {
            lock.unlock();
            mail.clear();
            replies->receive(mail, true, until);
            lock.lock();
            for (message& m : mail) take(m);
        }
        // True: the run is to be stopped.
        template <class NoLater>
        bool look_for_stranded(clock::time_point now, NoLater&& no_later) {
            for (int i = 0; i < stage_count; ++i) {
                const auto& since = stranded[static_cast<std::size_t>(i)];
                if (!since) continue;
                const auto limit = *since + duration(options.stranded_seconds);
                if (now >= limit)
                    note(std::make_exception_ptr(
                             error(std::string("opd: no ") + name_of(static_cast<stage>(i)) + " worker is left")),
                         {});
                no_later(limit);
            }
            return stop_requested;
        }
        void stop() {
            stopping = true;
            guarded({}, [&] { dispatch(event::of(event::kind::stop)); });
            if (!over) finish();
        }
        void wait_for_workers(std::unique_lock<std::mutex>& lock) {
            auto limit = clock::now() + duration(options.shutdown_seconds);
            std::vector<message> mail;
            const auto wait = [&](auto&& until) {
                while (!until() && clock::now() < limit) receive(mail, lock, limit);
            };
            const auto gone = [](const auto& w) { return w->returned; };
            const auto others = [&] {
                return std::all_of(rollouts.begin(), rollouts.end(), gone) &&
                       std::all_of(teachers.begin(), teachers.end(), gone);
            };
            // the last hooks of a run that ended by itself take their time
            const auto hooks_alone = [&] { return !stop_requested && hooking > 0 && learners[0]->load == 0; };
            wait([&] { return others() && (learners[0]->returned || hooks_alone()); });
            while (hooks_alone() && !learners[0]->returned) {
                receive(mail, lock, {});
                limit = clock::now() + duration(options.shutdown_seconds);
            }
            wait([&] { return others() && learners[0]->returned; });
        }
        static clock::duration duration(double seconds) {
            return std::chrono::duration_cast<clock::duration>(std::chrono::duration<double>(std::min(seconds, 1e9)));
        }

        // --- from outside

        void send(const event& e) {
            const std::lock_guard lock(mutex);
            dispatch(e);
            look_up();
        }
        void request_stop(bool at_once = false) {
            const std::lock_guard lock(mutex);
            stop_requested = true;
            stop_at_once = stop_at_once || at_once;
            look_up();
        }
        void kill(stage s, std::int32_t number) {
            const std::lock_guard lock(mutex);
            worker& w = named({s, number});
            if (over || !started) return;
            const bool was_up = w.up;
            end_life(w);
            w.killed = true;
            if (was_up) dispatch(event::down(s, number).of_life(w.life));
            look_up();
        }
        void revive(stage s, std::int32_t number) {
            const std::lock_guard lock(mutex);
            begin_life(named({s, number}));
        }
        void set_slots(stage s, std::int32_t number, std::int32_t slots) {
            const std::lock_guard lock(mutex);
            worker& w = named({s, number});
            if (s == stage::learner) throw invalid_input("worker", "a learner has one slot");
            if (slots < 0 || slots > w.most)
                throw invalid_input("slots",
                                    "must lie in [0, " + std::to_string(w.most) + "], not " + std::to_string(slots));
            w.slots = slots;
            if (w.up) dispatch(event::up(s, number, slots).of_life(w.life));
            look_up();
        }
        void park(std::int32_t number, std::int32_t beyond) {
            const std::lock_guard lock(mutex);
            if (beyond < 0) throw invalid_input("beyond", "must be at least 0, not " + std::to_string(beyond));
            worker& w = named({stage::rollout, number});
            std::vector<ticket> running;
            sched.for_each([&](const outstanding_sequence& q) {
                if (q.where == place::rollout && q.ticket.worker == w.number) running.push_back(q.ticket);
            });
            std::sort(running.begin(), running.end(),
                      [](const ticket& a, const ticket& b) { return a.sample < b.sample; });
            for (std::size_t i = index_of(beyond); i < running.size(); ++i) dispatch(event::park(running[i]));
            look_up();
        }
        /// The loop sees what has changed.
        void look_up() { replies->post({}); }
    };

    void check_new(bool given) const {
        if (!given) throw invalid_input("stage", "is null");
    }

    std::shared_ptr<core> core_;
};

} // namespace opd::sched
