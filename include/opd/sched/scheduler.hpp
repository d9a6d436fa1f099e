// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The scheduler: a state machine without a clock and without threads. `on(event, now, actions)` is all there is, and
// `next_deadline()` says when to call it at the latest; drivers run it on threads (thread_driver.hpp), in virtual time
// (virtual_driver.hpp) or by messages.
//
// A sequence:   waiting -> rollout -> queued -> scoring -> ready -> training -> consumed
//               with its permit from admission to the end of the synchronisation; any stage can lead back, or to
//               `failed`
// The learner:  idle -> training -> leaving (finish-first: until nothing is in rollout) -> syncing -> idle
//               from leaving and syncing to remaking, if the weights are lost with their source: the same batch is
//               trained again, but for sequences whose payloads are lost, too
//
// After an update the gate is closed first, the weights go to the rollout workers, and only when all that run
// something have them does the version move, do the permits return and does the gate open: nothing starts on old
// weights with new credit. Who joins is not waited for before it holds what the others hold, and nobody waits longer
// than one install for it: weights that were superseded while it installed them are followed by the newest; when two
// versions have gone by it rests instead, and the next synchronisation, which finds it ready, includes it.
//
// Whole batches (sync, step_off, controlled): batch b is started once v >= b - k and batch b - 1 is completely rolled
// out; scored once it is completely rolled out; trained at version b, once batch b + k is started; the weights change
// once nothing is in rollout. So its start lag is min(b, k) exactly. In steady state with stage times r, t, l a step
// takes max(r, t, l, (r + t + l)/(k + 1)): r + t + l for k = 0, at most the paper's max(r, t + l) for k = 1 (a batch
// is scored while the one before it is trained), max(r, t, l) for k >= 2. controlled{k} waits until batch b + k is
// scored.
//
// A group of sequences, the answers to one prompt, goes to one worker where that keeps no lane vacant: it computes
// the prompt once. Under async more groups than there are lanes for are admitted to that end, at most as many
// sequences as could wait for their worker.
//
// Streaming (async): sequences are admitted under M permits, scored as they come, and make a batch when the staleness
// policy says so (policies.hpp).
//
// A teacher call is made when `teacher_batch` sequences are queued; smaller ones when the oldest has waited
// `teacher_flush` seconds, when nothing is in rollout, or when the learner is idle and the call would complete a
// batch.
//
// The members are defined by topic, in scheduler/: events (what one leads to), admission, rollout, scoring, training,
// payloads, synchronising, workers, snapshots; the invariants in scheduler_checks.hpp.
//
// Conservation, after every event: admitted = waiting + rollout + queued + scoring + ready + training + consumed +
// failed.
//
// Source: AsyncOPD section 7, appendices B and G. What is ours: faults as events, attempts, lives, deadlines, snapshot.
#pragma once

#include <algorithm>
#include <array>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "opd/sched/deadlines.hpp"
#include "opd/sched/events.hpp"
#include "opd/sched/ledger.hpp"
#include "opd/sched/roster.hpp"

namespace opd::sched {

/// Running totals.
struct counters {
    std::int64_t admitted = 0;                  // sequences that took a permit
    std::int64_t consumed = 0;                  // by updates
    std::int64_t consumed_tokens = 0;           // response tokens of them
    std::int64_t failed = 0;                    // given up, for whatever reason
    std::array<std::int64_t, 5> failed_by = {}; // by `failure`
    std::int64_t retries = 0;                   // attempts after a fault
    std::int64_t preempted = 0;                 // attempts, scored sequences and updates that ended with their worker
    std::int64_t restarts = 0;                  // attempts after a weight change (abort) or staleness (retry)
    std::int64_t parked = 0;                    // attempts that ended with their tokens kept
    std::int64_t late = 0;                      // replies to what was given up, or of lives that are over
    std::int64_t duplicates = 0;                // replies to what was answered already, or is not known any more
    std::int64_t lost_workers = 0;              // missed a deadline
    std::int64_t lost_weights = 0;              // updates that were made again, as what they had published was lost
    std::int64_t updates = 0;                   // optimizer updates, of completed steps
    std::int64_t short_batches = 0;             // smaller than B, empty ones included
    std::int64_t empty_batches = 0;             // all of a whole batch failed: a step that consumes nothing
    std::int64_t lost_payloads = 0;             // of sequences, which were drawn again or given up

    template <class A>
    void fields(A& a) {
        a(admitted, consumed, consumed_tokens, failed, retries, preempted, restarts, parked, late, duplicates,
          lost_workers, lost_weights, updates, short_batches, empty_batches, lost_payloads);
        for (auto& f : failed_by) a(f);
    }
};

/// An outstanding sequence, for reports and drivers.
struct outstanding_sequence {
    using place = sched::place; ///< none: it is not outstanding, so in no report
    sched::ticket ticket;
    place where = place::waiting;
    version_t start = -1; ///< version of its start; -1: none yet
};

/// Equal events at equal times lead to equal actions. One thread's.
class scheduler {
public:
    /// Throws invalid_input where the settings cannot work, and says why.
    explicit scheduler(const settings& s)
        : settings_(s), plan_(plan_of(s)), limits_(s.teacher_flush + s.rollout_deadline + s.abort_deadline +
                                                       s.teacher_deadline + s.learner_deadline + s.sync_deadline >
                                                   0),
          ledger_(plan_), cursor_(s.first_sample),
          first_batch_(static_cast<std::uint64_t>(s.first_version)), weights_{s.first_version} {
        ledger_.begin_at(s.first_version);
    }

    /// Takes one event at the time `now`, in seconds, which never decreases, then whatever is due by then, and
    /// appends what it leads to. An event that no driver could mean (a life 0, versions from the future) throws
    /// invalid_input before anything is changed; replies that are late, double or to nobody are counted and do
    /// nothing else.
    void on(const event& e, double now, actions& out);
    /// When something is due: on() must be called by then, with event::kind::tick if nothing else happens. `forever`:
    /// nothing.
    double next_deadline() const;

    version_t version() const { return ledger_.version(); }
    /// The weights of version().
    const sched::weights& weights() const { return weights_; }
    bool gate_open() const { return ledger_.gate_open(); }
    bool finished() const { return finished_; }
    /// The stage for which the run ended as failed: the last of `fruitless_steps` in a row, or rollout where no
    /// worker is left that has the weights, and they are lost. None: it did not.
    std::optional<stage> failed() const { return failed_ ? std::optional(failed_in_) : std::nullopt; }
    /// Nobody needs what lower jobs published. What this job and higher ones have published must be there to install,
    /// whoever made it, as long as the run goes on.
    std::uint64_t needed_from() const;
    const sched::counters& totals() const { return totals_; }
    const sched::census& where() const { return ledger_.where(); }
    /// The schedule's settings as they are now.
    sched::plan resolved() const {
        sched::plan p = plan_;
        p.permits = ledger_.permits();
        return p;
    }
    const sched::settings& options() const { return settings_; }
    sample_t cursor() const { return cursor_; } ///< the next sequence's number
    /// A batch's worth is scored and the learner idle, but the staleness policy waits for someone.
    bool held_back() const { return learner_waits() && ledger_.ready_count() >= plan_.batch; }
    /// edf: sequences that could still have shared the tightest deadline of the last batch; -1 under other policies.
    index_t slack() const { return ledger_.slack(); }

    bool is_up(stage s, std::int32_t worker) const { return roster_.is_up(s, worker); }
    /// The latest life of a worker that was heard of; 0: none.
    incarnation_t incarnation_of(stage s, std::int32_t worker) const {
        const auto* w = roster_.find(s, worker);
        return w ? w->incarnation : 0;
    }

    /// Calls f(outstanding_sequence) for every sequence that holds a permit.
    template <class F>
    void for_each(F&& f) const {
        for (slot_t s = 0; s < sequences_.size(); ++s)
            if (ledger_.in_use(s)) f(outstanding_sequence{ticket_of(s), ledger_.place_of(s), ledger_.version_of(s)});
    }

    /// Of an outstanding sequence: the version of its start (-1: none yet), and what drew its tokens once it is
    /// rolled out.
    version_t start_of(const ticket& t) const { return ledger_.version_of(known(t)); }
    const token_versions& versions_of(const ticket& t) const { return sequences_[known(t)].versions; }

    /// All of the state, for restore(). Equal states give equal bytes.
    std::string snapshot() const;
    /// A scheduler as it was. The schedule, batch and group must be those of then; limits, deadlines and attempts may
    /// differ, and take effect, deadlines on what is running too. So may `outstanding`: another number than the
    /// settings of then is the number of permits from now on, the same leaves what a resize or the scheduler has made
    /// of it. Throws invalid_input where they are not, and where the snapshot is damaged or contradicts itself.
    static scheduler restore(const settings& s, std::string_view snapshot);
    /// After restore() in a new process: nobody is there yet. What was in rollout waits again, with its permit; what
    /// was being scored is queued; what was in training is ready; an unfinished synchronisation is one that did not
    /// happen, so the weights must be those of version(), and what has tokens of the version that never came waits
    /// again as well. Workers are announced by worker_up, in lives that are higher than those of before; the clock
    /// may be another. `keep_prefixes`: the driver has the tokens of the sequences that were in rollout and goes on
    /// from those of versions up to version(), so they keep the version of their start. `reopen`: a pause, a close
    /// and an end that the snapshot had seen are forgotten; they were the old process's. Jobs and attempts have new
    /// numbers from here on, so answers to the old process count for nothing; take a snapshot after this and before
    /// the first event, or a third process from the same snapshot would give out the second's.
    void abandon_workers(bool keep_prefixes = false, bool reopen = false);

    /// Recounts everything; throws std::logic_error that names the broken invariant. For tests and simulations;
    /// restore() asks it of what it has read.
    void check_invariants() const;

private:
    enum class phase : std::uint8_t { idle, training, leaving, syncing, remaking };
    friend constexpr phase last_of(phase) { return phase::remaking; }

    struct sequence {
        sample_t sample = 0;
        std::uint32_t attempt = 0;
        std::int32_t worker = -1, lane = -1; // in rollout
        std::int32_t home = -1;              // the worker that answers its prompt; -1: none yet
        std::int32_t rollout_failures = 0, teacher_failures = 0, payload_losses = 0;
        std::uint64_t batch = 0;      // whole batches: its number
        token_versions versions = {}; // once rolled out; before that of what it had when it was parked
        template <class A>
        void fields(A& a) {
            a(sample, attempt, worker, lane, home, rollout_failures, teacher_failures, payload_losses, batch, versions);
        }
    };
    struct job {
        std::uint64_t number = 0;
        std::int32_t worker = -1;
        double since = 0;
        std::vector<slot_t> slots;
        template <class A>
        void fields(A& a) {
            a(number, worker, since, slots);
        }
    };
    struct batch {
        std::vector<slot_t> slots; // of those that have not failed
        index_t unrolled = 0, unscored = 0;
        template <class A>
        void fields(A& a) {
            a(slots, unrolled, unscored);
        }
    };

    // --- what an event leads to (scheduler/events.hpp)
    void take(const event& e, actions& out);
    void pump(actions& out);
    void finish(actions& out);
    void on_stop(actions& out);
    void give_up(slot_t s, failure why, actions& out);
    // A sequence was given up, or the learner failed without any.
    void bore_no_fruit(stage s, std::int64_t sequences = 1) {
        fruitless_ += sequences;
        failed_in_ = s;
    }
    bool all_in_vain() const {
        return settings_.fruitless_steps > 0 && fruitless_ >= settings_.fruitless_steps * plan_.batch && !finished_;
    }
    void end_as_failed(actions& out);
    static action& emit(actions& out, action::kind k) {
        action& a = out.items.emplace_back();
        a.what = k;
        return a;
    }
    void list(actions& out, action& a, std::span<const slot_t> slots) const {
        a.first = static_cast<std::uint32_t>(out.tickets.size());
        a.count = static_cast<std::uint32_t>(slots.size());
        for (const slot_t s : slots) out.tickets.push_back(ticket_of(s));
    }
    place place_of(slot_t s) const { return ledger_.place_of(s); }
    ticket ticket_of(slot_t s) const {
        const sequence& q = sequences_[s];
        const incarnation_t life = q.worker < 0 ? 0 : roster_.at(stage::rollout, q.worker).incarnation;
        return {q.sample, s, q.attempt, q.worker, life, q.lane};
    }
    slot_t known(const ticket& t) const {
        if (!ledger_.in_use(t.slot) || sequences_[t.slot].sample != t.sample)
            throw invalid_input("ticket", "sequence " + std::to_string(t.sample) + " is not outstanding");
        return t.slot;
    }

    // --- admission
    index_t wanted() const; // sequences still to be admitted, at most: whole groups
    bool no_more() const;   // nothing will be admitted before something is consumed
    void on_resize(index_t permits);
    // As settings say it.
    index_t permits_chosen() const { return plan_.automatic ? automatic : plan_.permits; }
    void feed(actions& out);
    void feed_batches();
    slot_t admit();
    void start_waiting(actions& out);
    bool start_one(actions& out, bool anywhere);

    // --- rollout
    bool rollout_empty() const { return where().waiting + where().rollout == 0; }
    bool in_rollout(slot_t s, sample_t sample, std::uint32_t attempt) const {
        return place_of(s) == place::rollout && sequences_[s].sample == sample && sequences_[s].attempt == attempt;
    }
    void start(slot_t s, std::int32_t worker, actions& out);
    void on_reply(const event& e, actions& out);
    void on_park(const event& e, actions& out);
    void abort(const ticket& t, actions& out);
    // uncharged: the worker was lost, which is no fault of the sequence and never gives it up
    void rollout_fault(slot_t s, actions& out, bool charged = true);
    void restart(slot_t s, bool in_front);
    void park(slot_t s);
    void forget_prefix(slot_t s);

    // --- payloads
    void on_payload_lost(const event& e, actions& out);
    void draw_again(slot_t s, actions& out);
    void into_next_batch(slot_t s);
    void into_own_batch();

    // --- scoring
    void enqueue(slot_t s, bool in_front);
    bool may_be_scored(slot_t s) const;
    void one_less_unrolled(batch& b);
    void one_more_unrolled(batch& b);
    void score(actions& out);
    void on_scored(const event& e, actions& out);
    void call_back(std::uint64_t number, bool charged, actions& out);
    void teacher_fault(slot_t s, actions& out, bool charged = true);
    // As a share of all that they could do.
    double teachers_idle() const {
        const index_t slots = roster_.teacher_slots(), busy = static_cast<index_t>(jobs_.size());
        return busy < slots ? static_cast<double>(slots - busy) / static_cast<double>(slots) : 0;
    }

    // --- training
    bool can_train() const { return roster_.is_up(stage::learner, 0); }
    bool learner_waits() const { return phase_ == phase::idle && !finished_ && can_train(); }
    // The learner is asked for this now.
    bool trains(std::uint64_t number) const {
        return number != 0 && number == training_job_ && (phase_ == phase::training || phase_ == phase::remaking);
    }
    void train(actions& out);
    bool pick_batch();
    void on_learned(const event& e);
    void on_learn_failed(actions& out, bool charged = true);
    void put_training_back();

    // --- synchronising
    bool synchronise(actions& out);
    void publish(actions& out);
    void complete_step(actions& out);
    void end_stale(actions& out);
    void tell(std::int32_t w, const sched::weights& what, actions& out);
    void ask_to_install(std::int32_t w, actions& out);
    void on_synced(const event& e, actions& out);
    void on_weights_lost(const event& e, actions& out);
    void wake_resting(actions& out);
    // No worker has weights; or attempts that were given up hold all lanes, which are free once their workers answer:
    // without abort_deadline that may be never.
    bool nobody_rolls() const {
        return !roster_.any_runs() || (!roster_.any_lane() && where().rollout == 0 && where().waiting > 0);
    }
    // What a rollout worker that comes is told to install.
    const sched::weights& newest() const { return phase_ == phase::syncing ? target_ : weights_; }
    bool behind(const detail::roster::worker& w) const { return w.awaited && w.has != target_.job; } // while syncing
    // It waits for the next publication, and that for it.
    bool rests(std::int32_t number, const detail::roster::worker& w) const {
        return w.answers && !w.awaited && !installs_.has(static_cast<std::uint32_t>(number));
    }

    // --- workers
    bool of_present_life(const event& e, actions& out);
    void on_worker_up(const event& e, actions& out);
    void end_life(stage s, std::int32_t worker, actions& out);
    void expire(actions& out);
    template <class Charge>
    void lose(stage s, std::int32_t worker, actions& out, Charge&& charge);
    void lose(stage s, std::int32_t worker, actions& out) {
        lose(s, worker, out, [] {});
    }
    static double due(double since, double seconds) { return seconds > 0 ? since + seconds : forever; }

    // --- snapshots
    template <class A>
    void fields(A& a) {
        a(now_, ledger_, roster_, sequences_, cursor_, waiting_, queue_, queued_since_, flush_, jobs_, training_,
          training_job_, training_since_, training_failures_, training_updates_, phase_, weights_, target_, behind_,
          syncing_since_, next_job_, first_attempt_, paused_, closed_, finished_, batches_, first_batch_, totals_,
          gone_, fruitless_, failed_, failed_in_);
        attempts_.fields(a, sequences_.size());
        aborts_.fields(a, roster_.lanes());
        installs_.fields(a, roster_.of(stage::rollout).size());
    }

    sched::settings settings_;
    sched::plan plan_;
    bool limits_;           // anything is ever due
    double now_ = -forever; // of the latest event
    ledger ledger_;
    detail::roster roster_;
    std::vector<sequence> sequences_; // by slot
    sched::counters totals_;
    bool finished_ = false;
    std::int64_t fruitless_ = 0; // sequences given up since the last update that learnt from some
    bool failed_ = false;        // that is how the run ended
    stage failed_in_ = stage::rollout;
    // admission
    sample_t cursor_ = 0;
    bool paused_ = false, closed_ = false;
    slot_fifo waiting_;             // hold a permit, wait for a lane
    std::deque<batch> batches_;     // whole batches: those that are outstanding
    std::uint64_t first_batch_ = 0; // number of the first of them
    // rollout
    std::uint32_t first_attempt_ = 0; // less one; the upper half counts the lives of the scheduler
    detail::deadline_list attempts_;  // in rollout, by slot
    detail::deadline_list aborts_;    // not answered, by number of the lane
    // scoring
    slot_fifo queue_;               // rolled out, wait for a teacher
    double queued_since_ = forever; // the first of them
    bool flush_ = false;            // they go in a smaller call
    std::uint64_t next_job_ = 1;    // of teachers and learner; the upper half counts the lives of the scheduler
    std::vector<job> jobs_;         // calls of teachers, in order
    std::vector<std::vector<slot_t>> spare_; // lists of calls that are over, so that a call allocates nothing; no state
    // training
    phase phase_ = phase::idle;
    std::vector<slot_t> training_;   // by sample
    std::uint64_t training_job_ = 0; // until its weights are installed
    double training_since_ = 0;
    std::int32_t training_failures_ = 0;
    std::int64_t training_updates_ = 0; // of the step that is being synchronised
    // synchronising
    sched::weights weights_; // of the version
    sched::weights target_;  // syncing: what is being installed
    index_t behind_ = 0;     // syncing: rollout workers that answer and do not have them
    double syncing_since_ = 0;
    bool gone_ = false;              // the version's weights cannot be had any more, but from who has them
    detail::deadline_list installs_; // of workers that nobody waits for
};

} // namespace opd::sched

#include "opd/sched/scheduler/admission.hpp"
#include "opd/sched/scheduler/events.hpp"
#include "opd/sched/scheduler/payloads.hpp"
#include "opd/sched/scheduler/rollout.hpp"
#include "opd/sched/scheduler/scoring.hpp"
#include "opd/sched/scheduler/snapshots.hpp"
#include "opd/sched/scheduler/synchronising.hpp"
#include "opd/sched/scheduler/training.hpp"
#include "opd/sched/scheduler/workers.hpp"
#include "opd/sched/scheduler_checks.hpp"
