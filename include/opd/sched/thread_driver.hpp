// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Runs a scheduler on threads:
//
//   const settings how{.batch = 16, .schedule = async{.tau = 4}, .sequences = 1600};
//   thread_driver<my_rollout, my_teacher, my_learner> driver(how);
//   driver.add_rollout(std::make_shared<my_rollout>(), 8);   // lanes; once a worker. What a stage has: stages.hpp
//   driver.add_teacher(std::make_shared<my_teacher>());
//   driver.set_learner(std::make_shared<my_learner>());
//   const run_report report = driver.run();                  // until all sequences are consumed
//
// One loop, on the thread of run(), owns the scheduler, the payloads (dispatcher.hpp) and the time. Each worker is a
// message loop with a mailbox, on a thread of its own (thread_workers.hpp). Threads wait on condition variables; no
// thread polls.
//
//                         commands
//           run() ------------------------> mailbox of each worker  -> start, step, install | score | train, hooks
//             ^                                                              |
//             +----------------- one mailbox of replies <--------------------+
//
// A stage is called by its own thread alone. The learner's thread calls the hooks, between two updates. Payloads are
// shared_ptr<const T>.
//
// Faults, beside what the scheduler does about them (attempts, deadlines):
//   start() throws      this attempt of the sequence fails
//   step() throws       what step() had appended is finished; every other attempt on that worker fails
//   install() throws    the worker clears itself and begins another epoch; after the third time in a row it stays away.
//                       If other weights are waiting to be installed already, the worker goes on to those
//   score(), train()    throw: the call failed; likewise a score() with another number of entries than sequences
//   a missed deadline   the worker counts as lost, and its call is asked to stop. If the call returns later, its answer
//                       is counted as late, and the worker begins its next epoch. Weights that a learner publishes late
//                       bear the name of a job that nobody will ask for
//   on_step or          the run stops, since what these hooks write down is part of the run. An exception of an
//   on_checkpoint       observer stops nothing, and is counted (observer_exceptions)
//   throws
// If a stage always fails, the run ends as failed (settings.fruitless_steps); likewise if every rollout worker stays
// away. The report keeps the first exception, and the last one of a stage that failed. Exceptions of calls that were
// asked to stop do not count.
//
// Shutdown: request_stop() closes the scheduler (it admits nothing new and finishes what is outstanding) for at most
// `drain_seconds`. Then the driver gives up everything outstanding, and threads have `shutdown_seconds` to return. A
// thread that does not return is left behind and named in the report; it shares ownership of its stage and of the
// driver's state. What the stage refers to must outlive the thread.
//
// Checkpoints: `on_checkpoint` gets the scheduler's state and all payloads at a completed step: all workers have the
// new weights, and the learner is not training. A stage with export_partials() is asked for the prefixes of its running
// sequences when it installs these weights. A sequence that finishes after that and before the snapshot is in the
// snapshot as finished. A driver made from the snapshot goes on from it: it loses nothing and consumes nothing twice.
//
// Order: with whole batches or tau = 0, timing does not change which sets are consumed, nor at which versions.
//
// Above 600 lines: one class, whose parts share its lock and its mailboxes.
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
#include "opd/sched/dispatcher.hpp"
#include "opd/sched/observer.hpp"
#include "opd/sched/scheduler.hpp"
#include "opd/sched/stages.hpp"
#include "opd/sched/thread_report.hpp"
#include "opd/sched/thread_workers.hpp"

namespace opd::sched {

/// One run: made, given its stages, run once.
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
        core_->work.scheduler().abandon_workers(detail::exports_partials<Rollout>, true);
        core_->work.resume(from);
    }

    thread_driver(const thread_driver&) = delete;
    thread_driver& operator=(const thread_driver&) = delete;

    /// Also while it runs. Returns the worker's number.
    std::int32_t add_rollout(std::shared_ptr<Rollout> stage, std::int32_t lanes) {
        check_new(stage != nullptr);
        if (const std::int32_t most = core_->sched.options().most_slots; lanes < 1 || lanes > most)
            throw invalid_input("lanes", "must be at least 1 and at most settings.most_slots, " + std::to_string(most) +
                                             ", not " + std::to_string(lanes));
        return core_->add(stage::rollout, core_->workers.rollouts, std::move(stage), lanes);
    }
    std::int32_t add_teacher(std::shared_ptr<Teacher> stage) {
        check_new(stage != nullptr);
        return core_->add(stage::teacher, core_->workers.teachers, std::move(stage), 1);
    }
    /// Before run().
    void set_learner(std::shared_ptr<Learner> stage) {
        check_new(stage != nullptr);
        {
            const std::lock_guard lock(core_->mutex);
            if (core_->started) throw std::logic_error("opd: thread_driver: the learner is set before run()");
            core_->workers.learners.clear();
        }
        core_->add(stage::learner, core_->workers.learners, std::move(stage), 1);
    }

    /// Before run(): who looks on (observer.hpp).
    template <class Observer>
    void observe(Observer& o) {
        core_->looks_on = detail::any_observer(o);
    }

    /// Blocks until the run is over and its threads have returned or were left behind. Once per driver.
    run_report run(std::stop_token stop = {}) {
        {
            const std::lock_guard lock(core_->mutex); // others may add workers meanwhile
            if (core_->workers.rollouts.empty())
                throw invalid_input("add_rollout", "a run needs at least one rollout worker");
            if (core_->workers.teachers.empty()) throw invalid_input("add_teacher", "a run needs at least one teacher");
            if (core_->workers.learners.empty()) throw invalid_input("set_learner", "a run needs a learner");
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
                c->workers.halt();
                lock.unlock();
                c->workers.threads.clear();
                throw;
            }
            c->loop(lock);
            c->wait_for_workers(lock);
            c->log.closed = true; // whoever returns later touches nothing
            report = c->log.report;
            report.completed = c->sched.finished() && !c->stop_requested && !c->log.broken && !report.failed;
            report.version = c->sched.version();
            report.totals = c->sched.totals();
            for (auto& [w, thread] : c->workers.threads)
                if (!w->returned) {
                    report.left_behind.push_back({w->kind, w->number});
                    thread.detach();
                }
        }
        c->workers.threads.clear(); // joins the others, which have nothing left to do
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
    /// Another number of sequences for a worker, at most what it was added with. 0: it drains; what runs there is
    /// finished.
    void set_slots(stage s, std::int32_t w, std::int32_t slots) { core_->set_slots(s, w, slots); }
    /// Stops what runs on a rollout worker beyond so many sequences, the youngest first, and keeps what they have
    /// drawn: they go on later, on whoever has a lane. With set_slots(stage::rollout, w, 0) it empties a worker that
    /// is to leave. Refused unless the stages have park().
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
        return locked([&](const core& c) { return c.sched.version(); });
    }
    /// Workers of a stage that are there: announced, not lost, not killed.
    std::int32_t workers(stage s) const {
        return locked([&](const core& c) { return c.workers.present[static_cast<std::size_t>(s)]; });
    }
    /// What lower jobs published nobody needs any more (scheduler::needed_from).
    std::uint64_t needed_from() const {
        return locked([&](const core& c) { return c.sched.needed_from(); });
    }
    census where() const {
        return locked([&](const core& c) { return c.sched.where(); });
    }
    counters totals() const {
        return locked([&](const core& c) { return c.sched.totals(); });
    }
    /// The worker dies: what it is doing is lost and nothing is heard of it until revive().
    void kill(stage s, std::int32_t w) { core_->kill(s, w); }
    /// The worker is back, with nothing running. Without effect on one that is there.
    void revive(stage s, std::int32_t w) { core_->revive(s, w); }

private:
    using clock = std::chrono::steady_clock;
    using staff = detail::thread_workers<Rollout, Teacher, Learner>;
    using worker = typename staff::worker;
    using message = typename staff::message;
    using command = typename staff::command;
    using order = typename staff::order;

    struct core : std::enable_shared_from_this<core> {
        core(scheduler s, const thread_options& o, hooks_type h) : work(std::move(s)), options(o), hooks(std::move(h)) {
            const auto at_least_0 = [](const char* name, double x) {
                if (!(x >= 0 && x <= 1e9))
                    throw invalid_input(name, "must lie in [0, 1e9] seconds, not " + std::to_string(x));
            };
            at_least_0("drain_seconds", o.drain_seconds);
            at_least_0("shutdown_seconds", o.shutdown_seconds);
            at_least_0("stranded_seconds", o.stranded_seconds);
            if (o.checkpoint_every < 0) throw invalid_input("checkpoint_every", "must be at least 0");
            workers.changed = [this](const worker& w, worker_change what) {
                if (!looks_on.worker || log.closed) return;
                observed([&] { looks_on.worker(what, w.kind, w.number, steady_seconds()); });
            };
        }

        mutable std::mutex mutex; // of all that follows: the loop's, and whoever asks from outside
        dispatcher<conveyor<rolled_type, scored_type>> work;
        const scheduler& sched = work.scheduler();
        staff workers;
        thread_options options;
        hooks_type hooks;
        detail::any_observer looks_on;
        detail::run_log log;
        bool started = false;
        bool stop_requested = false, stop_at_once = false, checkpoint_requested = false, stopping = false;
        version_t exporting = -1; // the version whose install makes workers export
        bool export_now = false;
        std::int64_t hooking = 0; // hooks that were asked for and are not over
        // of the event in hand
        std::optional<worker_name> speaker; // who said it
        std::vector<report_type> steps;
        std::vector<bool> empty; // of those
        std::optional<command> train;
        bool ends = false;

        // --- the scheduler

        void dispatch(const event& e) {
            if (!workers.over) work.on(e, steady_seconds(), *this);
        }
        template <class F>
        void guarded(const std::optional<worker_name>& where, F&& f) {
            try {
                f();
            } catch (...) {
                note(std::current_exception(), where);
            }
        }
        /// Whoever looks on does not stop the run.
        template <class F>
        void observed(F&& f) {
            try {
                f();
            } catch (...) {
                log.observer_threw(std::current_exception());
            }
        }
        void note(std::exception_ptr e, const std::optional<worker_name>& where) {
            if (log.threw(std::move(e), where) || (options.stop_on_error && !log.closed))
                stop_at_once = stop_requested = true;
        }

        void took(const event& e, double now, const actions& out) {
            steps.clear(), empty.clear(), train.reset(), ends = false;
            if (looks_on.event) observed([&] { looks_on.event(now, e, out, sched); });
        }
        void carry_out(const action& a) {
            using kind = action::kind;
            switch (a.what) {
            case kind::start:
                workers.ask(*workers.rollouts[index_of(a.worker)], work.command(a));
                break;
            case kind::abort:
            case kind::park:
                workers.post(*workers.rollouts[index_of(a.worker)], work.command(a));
                break;
            case kind::score:
                workers.ask(*workers.teachers[index_of(a.worker)], work.command(a));
                break;
            case kind::train: // after the hooks of the steps before it
                train = work.command(a);
                break;
            case kind::sync:
                install(a);
                break;
            case kind::step:
                steps.push_back(report_of(a));
                empty.push_back(a.count == 0);
                break;
            case kind::fail:
                if (a.why != failure::stale) log.report.discarded.push_back({a.ticket, a.why, a.where});
                break;
            case kind::lost: {
                worker& w = workers.named({a.stage, a.worker});
                workers.end_life(w);
                begin_life(w);
                break;
            }
            case kind::finished: // after the hooks of the last step
                ends = true;
                break;
            }
        }
        void carried_out() {
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
                hook([this, s = std::make_shared<snapshot_type>(work.snapshot())] {
                    hooks.on_checkpoint(std::move(*s));
                });
            }
            if (ends && sched.failed()) log.failed(*sched.failed());
            if (ends) workers.halt();
            if (train) workers.ask(*workers.learners[0], *std::move(train));
        }
        void install(const action& a) {
            if (a.version > sched.version() && a.version != exporting) {
                exporting = a.version;
                export_now = hooks.on_checkpoint && checkpoint_due(a.version);
            }
            const auto tell = [&](worker& w) {
                if (!w.up) return;
                if (!std::exchange(w.installing, true)) workers.load(w, +1);
                command c = work.command(a);
                c.exports = export_now && a.version == exporting;
                workers.post(w, std::move(c));
            };
            if (a.worker >= 0) return tell(*workers.rollouts[index_of(a.worker)]);
            for (const auto& w : workers.rollouts) tell(*w);
        }
        bool checkpoint_due(version_t v) const {
            return checkpoint_requested || (options.checkpoint_every > 0 && v % options.checkpoint_every == 0);
        }
        report_type report_of(const action& a) {
            report_type r;
            r.version = a.version;
            r.time = steady_seconds();
            r.totals = sched.totals();
            if (!hooks.on_step) return r;
            for (const consumed_sequence& s : work.actions().consumed_by(a))
                r.consumed.push_back(work.payloads().view(s.ticket));
            return r;
        }

        // --- the workers

        static std::size_t index_of(auto stage_or_worker) { return static_cast<std::size_t>(stage_or_worker); }
        void hook(std::function<void()> f) {
            ++hooking;
            workers.post(*workers.learners[0], {.what = order::hook, .hook = std::move(f)});
        }
        void begin_life(worker& w) { workers.begin_life(w, sched.incarnation_of(w.kind, w.number)); }
        void take(message& m) {
            if (!m.from) return;
            worker& w = *m.from;
            const event& e = m.said.what;
            w.returned = w.returned || m.returned;
            if (looks_on.drawn && !log.closed)
                for (const auto& x : m.said.drawn)
                    observed([&] { looks_on.drawn(x.first, x.second, steady_seconds()); });
            if (m.said.of_hook) {
                --hooking;
                if (m.said.failed) note(m.said.failed, {});
                return;
            }
            if (m.said.failed && !m.asked_to_stop && !(m.said.spared && !w.sparing))
                note(m.said.failed, worker_name{w.kind, w.number});
            if (m.said.spared) {
                if (w.up && e.incarnation == w.life) workers.end_spare(w);
                return;
            }
            if ((workers.over || w.killed) && (e.what == event::kind::rolled_out || e.what == event::kind::parked) &&
                looks_on.drawn && !log.closed) // which the scheduler will not hear of
                observed([&] { looks_on.drawn(e.ticket, e.versions.tokens, steady_seconds()); });
            if (workers.over || w.killed || !e.from_worker()) return;
            const bool lives = w.up && e.incarnation == w.life;
            switch (e.what) {
            case event::kind::worker_up:
                if (e.incarnation == w.life && w.begins) come(w);
                return;
            case event::kind::worker_down: // it could not install
                if (!lives) break;
                workers.end_life(w);
                guarded(worker_name{w.kind, w.number}, [&] { dispatch(e); });
                if (++w.failed_installs < 3) begin_life(w);
                if (std::all_of(workers.rollouts.begin(), workers.rollouts.end(),
                                [](const auto& r) { return r->failed_installs >= 3; })) {
                    log.failed(stage::rollout); // nobody comes back
                    stop_at_once = stop_requested = true;
                }
                return;
            case event::kind::synced:
                if (lives) w.failed_installs = 0;
                break;
            default:
                break;
            }
            // what else it was to install it has dropped
            if (lives && (e.what != event::kind::synced || std::exchange(w.installing, false))) workers.load(w, -1);
            speaker = {w.kind, w.number};
            work.hear(m.said, steady_seconds(), *this);
            if (lives) workers.offer_spare(w);
        }
        /// What a worker said is nothing that a scheduler could take.
        void refused(std::exception_ptr e) { note(std::move(e), speaker); }
        void come(worker& w) {
            workers.come(w);
            guarded({}, [&] { dispatch(event::up(w.kind, w.number, w.slots).of_life(w.life)); });
        }

        template <class Stage, class All>
        std::int32_t add(stage kind, All& all, std::shared_ptr<Stage> s, std::int32_t slots) {
            const std::lock_guard lock(mutex);
            if (workers.over) throw std::logic_error("opd: thread_driver: the run is over");
            const auto w = workers.add(kind, all, std::move(s), slots);
            try {
                if (started) launch(w);
            } catch (...) { // no more threads to be had
                all.pop_back();
                throw;
            }
            return w->number;
        }
        void launch_all() {
            if (sched.finished()) workers.halt();
            for (const auto& w : workers.learners) launch(w);
            for (const auto& w : workers.teachers) launch(w);
            for (const auto& w : workers.rollouts) launch(w);
        }
        void launch(const auto& w) {
            workers.launch(w, this->shared_from_this());
            begin_life(*w);
        }

        // --- the loop

        void loop(std::unique_lock<std::mutex>& lock) {
            std::optional<clock::time_point> drained;
            std::vector<message> mail;
            while (!workers.over) {
                const auto now = clock::now();
                if (stop_requested && !drained) {
                    drained = now + duration(stop_at_once ? 0 : options.drain_seconds);
                    guarded({}, [&] { dispatch(event::of(event::kind::close)); });
                    continue;
                }
                if (drained && (now >= *drained || stop_at_once)) {
                    stopping = true;
                    guarded({}, [&] { dispatch(event::of(event::kind::stop)); });
                    if (!workers.over) workers.halt();
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
                if (options.stranded_seconds > 0 && !drained) {
                    for (int i = 0; i < stage_count; ++i)
                        if (const auto limit =
                                workers.stranded_at(static_cast<stage>(i), duration(options.stranded_seconds))) {
                            if (now >= *limit)
                                note(std::make_exception_ptr(error(std::string("opd: no ") +
                                                                   name_of(static_cast<stage>(i)) + " worker is left")),
                                     {});
                            no_later(*limit);
                        }
                    if (stop_requested) continue;
                }
                receive(mail, lock, until);
            }
        }
        /// Waits for messages, and takes them.
        void receive(std::vector<message>& mail, std::unique_lock<std::mutex>& lock,
                     std::optional<clock::time_point> until) {
            lock.unlock();
            mail.clear();
            workers.replies->receive(mail, true, until);
            lock.lock();
            for (message& m : mail) take(m);
        }
        void wait_for_workers(std::unique_lock<std::mutex>& lock) {
            auto limit = clock::now() + duration(options.shutdown_seconds);
            std::vector<message> mail;
            const auto wait = [&](auto&& until) {
                while (!until() && clock::now() < limit) receive(mail, lock, limit);
            };
            const auto gone = [](const auto& w) { return w->returned; };
            const auto others = [&] {
                return std::all_of(workers.rollouts.begin(), workers.rollouts.end(), gone) &&
                       std::all_of(workers.teachers.begin(), workers.teachers.end(), gone);
            };
            // the last hooks of a run that ended by itself take their time
            const auto hooks_alone = [&] { return !stop_requested && hooking > 0 && workers.learners[0]->load == 0; };
            wait([&] { return others() && (workers.learners[0]->returned || hooks_alone()); });
            while (hooks_alone() && !workers.learners[0]->returned) {
                receive(mail, lock, {});
                limit = clock::now() + duration(options.shutdown_seconds);
            }
            wait([&] { return others() && workers.learners[0]->returned; });
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
            worker& w = workers.named({s, number});
            if (workers.over || !started) return;
            const bool was_up = w.up;
            workers.end_life(w);
            w.killed = true;
            if (was_up) dispatch(event::down(s, number).of_life(w.life));
            look_up();
        }
        void revive(stage s, std::int32_t number) {
            const std::lock_guard lock(mutex);
            begin_life(workers.named({s, number}));
        }
        void set_slots(stage s, std::int32_t number, std::int32_t slots) {
            const std::lock_guard lock(mutex);
            worker& w = workers.named({s, number});
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
            worker& w = workers.named({stage::rollout, number});
            const std::vector<ticket> running = work.running(w.number);
            for (std::size_t i = index_of(beyond); i < running.size(); ++i) dispatch(event::park(running[i]));
            look_up();
        }
        /// The loop sees what has changed.
        void look_up() { workers.replies->post({}); }
    };

    template <class F>
    auto locked(F&& f) const {
        const std::lock_guard lock(core_->mutex);
        return f(std::as_const(*core_));
    }
    void check_new(bool given) const {
        if (!given) throw invalid_input("stage", "is null");
    }

    std::shared_ptr<core> core_;
};

} // namespace opd::sched
