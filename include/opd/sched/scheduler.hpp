// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The scheduler: a state machine without a clock and without threads. `on(event, now, actions)` is all there is, and
// `next_deadline()` says when to call it at the latest; drivers run it on threads (thread_driver.hpp), in virtual time
// (virtual_driver.hpp) or by messages.
//
// A sequence:   waiting -> rollout -> queued -> scoring -> ready -> training -> consumed
//               with its permit from admission to the end of the synchronisation; any stage can lead back or to `failed`
// The learner:  idle -> training -> leaving (finish-first: until nothing is in rollout) -> syncing -> idle
//               from leaving and syncing to remaking, if the weights are lost with their source: the same batch is trained again
//
// After an update the gate is closed first, the weights go to the rollout workers, and only when all that run something have
// them does the version move, do the permits return and does the gate open: nothing starts on old weights with new credit.
// Who joins is not waited for before it holds what the others hold, and nobody waits longer than one install for it: weights that
// were superseded while it installed them are followed by the newest; when two versions have gone by it rests instead, and
// the next synchronisation, which finds it ready, includes it.
//
// Whole batches (sync, step_off, controlled): batch b is started once v >= b - k and batch b - 1 is completely rolled out;
// scored once it is completely rolled out; trained at version b, once batch b + k is started; the weights change once
// nothing is in rollout. So its start lag is min(b, k) exactly. In steady state with stage times r, t, l a step takes
// max(r, t, l, (r + t + l)/(k + 1)): r + t + l for k = 0, at most the paper's max(r, t + l) for k = 1 (a batch is scored
// while the one before it is trained), max(r, t, l) for k >= 2. controlled{k} waits until batch b + k is scored.
//
// A group of sequences, the answers to one prompt, goes to one worker where that keeps no lane vacant: it computes the prompt once.
// Under async more groups than there are lanes for are admitted to that end, at most as many sequences as could wait for their worker.
//
// Streaming (async): sequences are admitted under M permits, scored as they come, and make a batch when the staleness
// policy says so (policies.hpp).
//
// A teacher call is made when `teacher_batch` sequences are queued; smaller ones when the oldest has waited `teacher_flush`
// seconds, when nothing is in rollout, or when the learner is idle and the call would complete a batch.
//
// Conservation, after every event: admitted = waiting + rollout + queued + scoring + ready + training + consumed + failed.
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

    template <class A>
    void fields(A& a) {
        a(admitted, consumed, consumed_tokens, failed, retries, preempted, restarts, parked, late, duplicates,
          lost_workers, lost_weights, updates, short_batches, empty_batches);
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

class scheduler {
public:
    /// Throws invalid_input where the settings cannot work, and says why.
    explicit scheduler(const settings& s)
        : settings_(s), plan_(plan_of(s)), limits_(s.teacher_flush + s.rollout_deadline + s.abort_deadline +
                                                       s.teacher_deadline + s.learner_deadline + s.sync_deadline >
                                                   0),
          ledger_(plan_), cursor_(s.first_sample), weights_{s.first_version},
          first_batch_(static_cast<std::uint64_t>(s.first_version)) {
        ledger_.begin_at(s.first_version);
    }

    /// Takes one event at the time `now`, in seconds, which never decreases, then whatever is due by then, and appends what it
    /// leads to. An event that no driver could mean (a life 0, versions from the future) throws invalid_input before
    /// anything is changed; replies that are late, double or to nobody are counted and do nothing else.
    void on(const event& e, double now, actions& out);
    /// When something is due: on() must be called by then, with event::kind::tick if nothing else happens. `forever`: nothing.
    double next_deadline() const;

    version_t version() const { return ledger_.version(); }
    /// The weights of version().
    const sched::weights& weights() const { return weights_; }
    bool gate_open() const { return ledger_.gate_open(); }
    bool finished() const { return finished_; }
    /// The stage for which the run ended as failed: the last of `fruitless_steps` in a row, or rollout where no worker is left
    /// that has the weights, and they are lost. None: it did not.
    std::optional<stage> failed() const { return failed_ ? std::optional(failed_in_) : std::nullopt; }
    /// Nobody needs what lower jobs published. What this job and higher ones have published must be there to install, whoever
    /// made it, as long as the run goes on.
    std::uint64_t needed_from() const {
        std::uint64_t job = weights_.job;
        installs_.each([&](std::uint32_t w) {
            job = std::min(job, roster_.at(stage::rollout, static_cast<std::int32_t>(w)).told);
        });
        return job;
    }
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

    /// Of an outstanding sequence: the version of its start (-1: none yet), and what drew its tokens once it is rolled out.
    version_t start_of(const ticket& t) const { return ledger_.version_of(known(t)); }
    const token_versions& versions_of(const ticket& t) const { return sequences_[known(t)].versions; }

    /// All of the state, for restore(). Equal states give equal bytes.
    std::string snapshot() const;
    /// A scheduler as it was. The schedule, batch and group must be those of then; limits, deadlines and attempts may
    /// differ, and take effect, deadlines on what is running too. So may `outstanding`: another number than the settings
    /// of then is the number of permits from now on, the same leaves what a resize or the scheduler has made of it. Throws invalid_input
    /// where they are not, and where the snapshot is damaged or contradicts itself.
    static scheduler restore(const settings& s, std::string_view snapshot);
    /// After restore() in a new process: nobody is there yet. What was in rollout waits again, with its permit; what was
    /// being scored is queued; what was in training is ready; an unfinished synchronisation is one that did not happen, so
    /// the weights must be those of version(), and what has tokens of the version that never came waits again as well.
    /// Workers are announced by worker_up, in lives that are higher than those of before; the clock may be another.
    /// `keep_prefixes`: the driver has the tokens of the sequences that were in rollout and goes on from those of versions
    /// up to version(), so they keep the version of their start.
    /// `reopen`: a pause, a close and an end that the snapshot had seen are forgotten; they were the old process's.
    /// Jobs and attempts have new numbers from here on, so answers to the old process count for nothing; take a snapshot
    /// after this and before the first event, or a third process from the same snapshot would give out the second's.
    void abandon_workers(bool keep_prefixes = false, bool reopen = false);

    /// Recounts everything; throws std::logic_error that names the broken invariant. For tests and simulations; restore() asks
    /// it of what it has read.
    void check_invariants() const;

private:
    enum class phase : std::uint8_t { idle, training, leaving, syncing, remaking };
    friend constexpr phase last_of(phase) { return phase::remaking; }

    struct sequence {
        sample_t sample = 0;
        std::uint32_t attempt = 0;
        std::int32_t worker = -1, lane = -1; // in rollout
        std::int32_t home = -1;              // the worker that answers its prompt; -1: none yet
        std::int32_t rollout_failures = 0, teacher_failures = 0;
        std::uint64_t batch = 0;      // whole batches: its number
        token_versions versions = {}; // once rolled out; before that of what it had when it was parked
        template <class A>
        void fields(A& a) {
            a(sample, attempt, worker, lane, home, rollout_failures, teacher_failures, batch, versions);
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

    // --- events
    void take(const event& e, actions& out);
    bool of_present_life(const event& e, actions& out);
    void on_worker_up(const event& e, actions& out);
    void end_life(stage s, std::int32_t worker, actions& out);
    void on_reply(const event& e, actions& out);
    void on_scored(const event& e, actions& out);
    void on_learned(const event& e);
    void on_learn_failed(actions& out, bool charged = true);
    void on_synced(const event& e, actions& out);
    void on_weights_lost(const event& e, actions& out);
    void on_resize(index_t permits);
    void on_stop(actions& out);

    // --- what is due
    void expire(actions& out);
    template <class Charge>
    void lose(stage s, std::int32_t worker, actions& out, Charge&& charge);
    void lose(stage s, std::int32_t worker, actions& out) {
        lose(s, worker, out, [] {});
    }

    // --- what may follow from any event
    void pump(actions& out);
    bool synchronise(actions& out);
    void publish(actions& out);
    void complete_step(actions& out);
    void feed(actions& out);
    void feed_batches();
    void start_waiting(actions& out);
    bool start_one(actions& out, bool anywhere);
    void start(slot_t s, std::int32_t worker, actions& out);
    void score(actions& out);
    void train(actions& out);
    bool pick_batch();
    void finish(actions& out);

    // --- parts
    index_t wanted() const; // sequences still to be admitted, at most: whole groups
    slot_t admit();
    void restart(slot_t s, bool in_front);
    void park(slot_t s);
    void forget_prefix(slot_t s);
    void on_park(const event& e, actions& out);
    // uncharged: the worker was lost, which is no fault of the sequence and never gives it up
    void rollout_fault(slot_t s, actions& out, bool charged = true);
    void teacher_fault(slot_t s, actions& out, bool charged = true);
    void call_back(std::uint64_t number, bool charged, actions& out);
    void give_up(slot_t s, failure why, actions& out);
    void put_training_back();
    // The learner is asked for this now.
    bool trains(std::uint64_t number) const {
        return number != 0 && number == training_job_ && (phase_ == phase::training || phase_ == phase::remaking);
    }
    bool rollout_empty() const { return where().waiting + where().rollout == 0; }
    bool can_train() const { return roster_.is_up(stage::learner, 0); }
    bool learner_waits() const { return phase_ == phase::idle && !finished_ && can_train(); }
    // As a share of all that they could do.
    double teachers_idle() const {
        const index_t slots = roster_.teacher_slots(), busy = static_cast<index_t>(jobs_.size());
        return busy < slots ? static_cast<double>(slots - busy) / static_cast<double>(slots) : 0;
    }
    // As settings say it.
    index_t permits_chosen() const { return plan_.automatic ? automatic : plan_.permits; }
    bool no_more() const; // nothing will be admitted before something is consumed
    place place_of(slot_t s) const { return ledger_.place_of(s); }
    ticket ticket_of(slot_t s) const {
        const sequence& q = sequences_[s];
        const incarnation_t life = q.worker < 0 ? 0 : roster_.at(stage::rollout, q.worker).incarnation;
        return {q.sample, s, q.attempt, q.worker, life, q.lane};
    }
    bool in_rollout(slot_t s, sample_t sample, std::uint32_t attempt) const {
        return place_of(s) == place::rollout && sequences_[s].sample == sample && sequences_[s].attempt == attempt;
    }
    void enqueue(slot_t s, bool in_front);
    void one_less_unrolled(batch& b) { // once none is left the batch goes to the teacher
        if (--b.unrolled > 0) return;
        for (const slot_t s : b.slots)
            if (place_of(s) == place::queued) queue_.push(s);
    }
    bool behind(const detail::roster::worker& w) const { return w.awaited && w.has != target_.job; } // while syncing
    // What a rollout worker that comes is told to install.
    const sched::weights& newest() const { return phase_ == phase::syncing ? target_ : weights_; }
    void ask_to_install(std::int32_t w, actions& out) {
        installs_.end(static_cast<std::uint32_t>(w));
        if (gone_ && phase_ != phase::syncing) return; // there is nothing to install before the next publication
        installs_.begin(static_cast<std::uint32_t>(w), now_);
        roster_.at(stage::rollout, w).told = newest().job;
        tell(w, newest(), out);
    }
    // A sequence was given up, or the learner failed without any.
    void bore_no_fruit(stage s, std::int64_t sequences = 1) {
        fruitless_ += sequences;
        failed_in_ = s;
    }
    bool all_in_vain() const {
        return settings_.fruitless_steps > 0 && fruitless_ >= settings_.fruitless_steps * plan_.batch && !finished_;
    }
    void end_as_failed(actions& out) {
        failed_ = true;
        on_stop(out);
    }
    // It waits for the next publication, and that for it.
    bool rests(std::int32_t number, const detail::roster::worker& w) const {
        return w.answers && !w.awaited && !installs_.has(static_cast<std::uint32_t>(number));
    }
    void wake_resting(actions& out);
    void tell(std::int32_t w, const sched::weights& what, actions& out);
    void abort(const ticket& t, actions& out) {
        action& a = emit(out, action::kind::abort);
        a.ticket = t, a.worker = t.worker, a.incarnation = t.incarnation;
        if (const auto* l = roster_.lane_of(t))
            aborts_.begin(l->number, now_); // whatever the deadline: a restore may set one
    }
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
    slot_t known(const ticket& t) const {
        if (!ledger_.in_use(t.slot) || sequences_[t.slot].sample != t.sample)
            throw invalid_input("ticket", "sequence " + std::to_string(t.sample) + " is not outstanding");
        return t.slot;
    }
    static double due(double since, double seconds) { return seconds > 0 ? since + seconds : forever; }
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
    sample_t cursor_ = 0;
    slot_fifo waiting_;                      // hold a permit, wait for a lane
    slot_fifo queue_;                        // rolled out, wait for a teacher
    double queued_since_ = forever;          // the first of them
    bool flush_ = false;                     // they go in a smaller call
    std::vector<job> jobs_;                  // calls of teachers, in order
    std::vector<std::vector<slot_t>> spare_; // lists of calls that are over, so that a call allocates nothing; no state
    detail::deadline_list attempts_;         // in rollout, by slot
    detail::deadline_list aborts_;           // not answered, by number of the lane
    detail::deadline_list installs_;         // of workers that nobody waits for
    std::vector<slot_t> training_;           // by sample
    std::uint64_t training_job_ = 0;         // until its weights are installed
    double training_since_ = 0;
    std::int32_t training_failures_ = 0;
    std::int64_t training_updates_ = 0; // of the step that is being synchronised
    phase phase_ = phase::idle;
    sched::weights weights_; // of the version
    sched::weights target_;  // syncing: what is being installed
    index_t behind_ = 0;     // syncing: rollout workers that answer and do not have them
    double syncing_since_ = 0;
    std::uint64_t next_job_ = 1;      // the upper half counts the lives of the scheduler
    std::uint32_t first_attempt_ = 0; // less one; likewise
    bool paused_ = false, closed_ = false, finished_ = false;
    bool gone_ = false;          // the version's weights cannot be had any more, but from who has them
    std::int64_t fruitless_ = 0; // sequences given up since the last update that learnt from some
    bool failed_ = false;        // that is how the run ended
    stage failed_in_ = stage::rollout;
    std::deque<batch> batches_;     // whole batches: those that are outstanding
    std::uint64_t first_batch_ = 0; // number of the first of them
    sched::counters totals_;
};

// --- what may follow ------------------------------------------------------------------------------------------------

inline void scheduler::pump(actions& out) {
    if (finished_) return;
    while (synchronise(out)) {}
    if (roster_.joining() > 0 && !roster_.any_runs()) wake_resting(out);
    feed(out);
    score(out);
    train(out);
    finish(out);
    // nobody has the weights, nobody can get them, and nothing that is under way leads to others
    const bool stands = phase_ == phase::leaving || (phase_ == phase::idle && can_train());
    if (gone_ && stands && !finished_ && roster_.awaited() == 0 && installs_.empty() && queue_.empty() &&
        jobs_.empty()) {
        failed_in_ = stage::rollout;
        end_as_failed(out);
    }
}

// Nobody is left whose work could lead to the publication that they wait for.
inline void scheduler::wake_resting(actions& out) {
    const auto count = static_cast<std::int32_t>(roster_.of(stage::rollout).size());
    for (std::int32_t w = 0; w < count; ++w) {
        detail::roster::worker& x = roster_.at(stage::rollout, w);
        if (!rests(w, x) || x.has >= newest().job) continue; // weights of a lower job it would not install
        x.came = newest().version;
        ask_to_install(w, out);
    }
}

// True when a step was completed.
inline bool scheduler::synchronise(actions& out) {
    if (phase_ == phase::leaving) {
        if (plan_.update == weight_update::finish_first) {
            if (!plan_.streaming) start_waiting(out); // admitted before the update: its version is this one
            if (where().rollout > 0 || (!plan_.streaming && where().waiting > 0)) return false;
        }
        publish(out);
    }
    if (phase_ != phase::syncing || behind_ > 0) return false;
    complete_step(out);
    return true;
}

// All rollout workers are told to install the new weights.
inline void scheduler::publish(actions& out) {
    if (plan_.update == weight_update::abort)
        for (slot_t s = 0; s < sequences_.size(); ++s)
            if (place_of(s) == place::rollout) {
                abort(ticket_of(s), out);
                ++totals_.restarts;
                restart(s, false);
            }
    if (plan_.streaming && plan_.update != weight_update::keep)
        for (const slot_t s : waiting_) // a prefix, parked or of before a crash, would go on under other weights
            if (ledger_.version_of(s) >= 0) {
                forget_prefix(s);
                ++totals_.restarts;
            }
    phase_ = phase::syncing;
    syncing_since_ = now_;
    target_ = {version() + 1, training_job_};
    const auto count =
        static_cast<std::int32_t>(roster_.joining() > 0 || gone_ ? roster_.of(stage::rollout).size() : 0);
    for (std::int32_t w = 0; w < count; ++w) {
        detail::roster::worker& x = roster_.at(stage::rollout, w);
        if (rests(w, x)) roster_.await(w);
        if (!x.up || x.answers || installs_.has(static_cast<std::uint32_t>(w))) continue;
        installs_.begin(static_cast<std::uint32_t>(w), now_); // it came when there was nothing to install
        x.told = target_.job;
    }
    behind_ = roster_.awaited();
    tell(-1, target_, out);
}

inline void scheduler::complete_step(actions& out) {
    phase_ = phase::idle;
    training_job_ = 0;
    weights_ = target_;
    gone_ = false;
    if (!training_.empty()) fruitless_ = 0;
    action& a = emit(out, action::kind::step);
    a.version = target_.version;
    a.job = target_.job;
    a.first = static_cast<std::uint32_t>(out.consumed.size());
    a.count = static_cast<std::uint32_t>(training_.size());
    for (const slot_t s : training_) {
        out.consumed.push_back({ticket_of(s), ledger_.version_of(s), sequences_[s].versions});
        totals_.consumed_tokens += sequences_[s].versions.tokens;
    }
    ledger_.advance(training_);
    totals_.consumed += static_cast<std::int64_t>(training_.size());
    totals_.updates += std::exchange(training_updates_, 0);
    totals_.empty_batches += training_.empty();
    totals_.short_batches += static_cast<index_t>(training_.size()) < plan_.batch;
    training_.clear();
    if (!plan_.streaming) {
        batches_.pop_front();
        ++first_batch_;
    }
    std::vector<slot_t> stale;
    ledger_.stale(stale);
    for (const slot_t s : stale) {
        const place where = place_of(s);
        if (where == place::rollout) abort(ticket_of(s), out);
        if (where == place::queued) queue_.erase(s);
        if (where == place::scoring)
            for (job& j : jobs_) std::erase(j.slots, s);
        if (traits_of(plan_.policy).stale == stale_end::given_up) {
            give_up(s, failure::stale, out);
        } else {
            if (where == place::ready) ledger_.unready(s);
            if (where == place::waiting) waiting_.erase(s); // it has tokens: was parked, or is of an earlier process
            ++totals_.restarts;
            restart(s, true);
        }
    }
}

inline index_t scheduler::wanted() const {
    index_t n = std::numeric_limits<index_t>::max();
    if (settings_.sequences > 0) n = settings_.sequences - totals_.consumed - ledger_.outstanding();
    if (n <= 0) return 0;
    // where one of a group failed, what is missing is not a whole group, but a prompt is answered by a whole one
    if (settings_.sequences > 0) n = (n + settings_.group - 1) / settings_.group * settings_.group;
    if (settings_.available > 0) n = std::min(n, settings_.available - static_cast<index_t>(cursor_));
    return std::max<index_t>(0, n);
}

// Nothing will be admitted before something is consumed or given up.
inline bool scheduler::no_more() const {
    return closed_ || wanted() == 0 || (plan_.streaming && ledger_.gate_open() && ledger_.free() < settings_.group);
}

inline void scheduler::feed(actions& out) {
    if (paused_ || !gate_open()) return;
    if (!plan_.streaming || closed_) {
        start_waiting(out);
        if (closed_) return;
        feed_batches();
        start_waiting(out);
        return;
    }
    const index_t for_siblings = roster_.awaited() * (settings_.group - 1);
    while (roster_.any_lane()) {
        if (start_one(out, false)) continue;
        if (waiting_.size() <= for_siblings && wanted() > 0 && ledger_.free() >= settings_.group)
            for (index_t g = 0; g < settings_.group; ++g) waiting_.push(admit());
        else if (!start_one(out, true))
            return;
    }
}

inline void scheduler::feed_batches() {
    const std::uint64_t next = first_batch_ + batches_.size();
    if (static_cast<version_t>(next) > version() + plan_.depth || wanted() == 0) return;
    if (!rollout_empty()) return;
    if (!plan_.overlap)
        for (const batch& b : batches_)
            if (b.unscored > 0) return;
    batch b;
    for (index_t n = std::min(plan_.batch, wanted()); n > 0; --n) {
        const slot_t s = admit();
        sequences_[s].batch = next;
        b.slots.push_back(s);
        waiting_.push(s);
    }
    b.unrolled = b.unscored = static_cast<index_t>(b.slots.size());
    batches_.push_back(std::move(b));
}

inline void scheduler::start_waiting(actions& out) {
    if (paused_) return;
    while (roster_.any_lane() && start_one(out, true)) {}
}

// There is a lane. Starts the first that waits whose prompt's worker has one, or whose prompt nobody answers; `anywhere`: else the
// first of all. False: there is none.
inline bool scheduler::start_one(actions& out, bool anywhere) {
    if (waiting_.empty()) return false;
    const std::int32_t next = roster_.next_lane().first;
    if (settings_.group == 1) {
        start(waiting_.pop(), next, out);
        return true;
    }
    const auto at_home = [&](slot_t s) { return sequences_[s].home >= 0 && roster_.has_lane(sequences_[s].home); };
    const auto found = std::find_if(waiting_.begin(), waiting_.end(),
                                    [&](slot_t s) { return at_home(s) || !roster_.serves(sequences_[s].home); });
    if (found == waiting_.end() && !anywhere) return false;
    const slot_t chosen = found != waiting_.end() ? *found : waiting_.front();
    waiting_.erase(chosen);
    if (!at_home(chosen)) { // with all of its prompt that waits
        const auto prompt = [&](slot_t s) { return sequences_[s].sample / static_cast<sample_t>(settings_.group); };
        sequences_[chosen].home = next;
        for (const slot_t s : waiting_)
            if (prompt(s) == prompt(chosen)) sequences_[s].home = next;
    }
    start(chosen, sequences_[chosen].home, out);
    return true;
}

inline void scheduler::start(slot_t s, std::int32_t worker, actions& out) {
    sequence& q = sequences_[s];
    q.worker = worker, q.lane = roster_.lane_on(worker);
    if ((q.attempt & 0xffff) == 0xffff) { // the next number is another life's: it is ours from now on
        first_attempt_ += std::uint32_t{1} << 16;
        q.attempt = 0;
    }
    q.attempt = first_attempt_ + (q.attempt & 0xffff) + 1;
    ledger_.started(s);
    action& a = emit(out, action::kind::start);
    a.ticket = ticket_of(s);
    a.worker = a.ticket.worker, a.incarnation = a.ticket.incarnation;
    a.version = version();
    roster_.take_lane(q.worker, a.ticket);
    attempts_.begin(s, now_); // likewise
}

inline void scheduler::score(actions& out) {
    while (!queue_.empty() && roster_.any_teacher()) {
        const bool full = queue_.size() >= settings_.teacher_batch;
        // a smaller call: its time has come, nothing more can come, or it is all that the idle learner waits for
        const bool due = flush_ || rollout_empty() || !plan_.streaming ||
                         (phase_ == phase::idle && where().ready + where().scoring + queue_.size() >= plan_.batch);
        if (!full && !due) return;
        job j;
        if (!spare_.empty()) {
            j.slots = std::move(spare_.back());
            spare_.pop_back();
        }
        j.number = next_job_++;
        j.worker = roster_.next_teacher();
        j.since = now_;
        while (!queue_.empty() && static_cast<index_t>(j.slots.size()) < settings_.teacher_batch) {
            j.slots.push_back(queue_.pop());
            ledger_.scoring(j.slots.back());
        }
        if (queue_.empty()) flush_ = false;
        roster_.call(j.worker, 1);
        action& a = emit(out, action::kind::score);
        a.job = j.number;
        a.worker = j.worker, a.incarnation = incarnation_of(stage::teacher, j.worker);
        list(out, a, j.slots);
        ledger_.called(static_cast<double>(j.slots.size()) / static_cast<double>(settings_.teacher_batch));
        jobs_.push_back(std::move(j));
    }
}

// A whole batch of which all failed is trained too, without sequences: who installs a version must find it published, and only
// the learner publishes.
inline void scheduler::train(actions& out) {
    if (!can_train()) return;
    if (phase_ == phase::idle) {
        if (!pick_batch()) return;
        std::sort(training_.begin(), training_.end(),
                  [&](slot_t a, slot_t b) { return sequences_[a].sample < sequences_[b].sample; });
        phase_ = phase::training;
    } else if ((phase_ != phase::training && phase_ != phase::remaking) || training_job_ != 0) {
        return; // else it is asked for again
    }
    training_job_ = next_job_++;
    training_since_ = now_;
    action& a = emit(out, action::kind::train);
    a.job = training_job_;
    a.version = version();
    a.from = weights_.job;
    a.worker = 0, a.incarnation = incarnation_of(stage::learner, 0);
    list(out, a, training_);
}

inline bool scheduler::pick_batch() {
    if (plan_.streaming) {
        index_t n = plan_.batch;
        // the last batch: nothing else is outstanding and nothing will come
        if (ledger_.outstanding() < n && ledger_.ready_count() == ledger_.outstanding() && no_more())
            n = ledger_.ready_count();
        return n > 0 && ledger_.pick(n, training_);
    }
    if (batches_.empty() || batches_.front().unscored > 0) return false;
    const std::uint64_t ahead = first_batch_ + static_cast<std::uint64_t>(plan_.depth);
    const bool all_started = first_batch_ + batches_.size() > ahead || closed_ || wanted() == 0;
    if (!all_started) return false;
    if (!plan_.overlap)
        for (const batch& b : batches_)
            if (b.unscored > 0) return false;
    // what was admitted first, in the order of admission, is this batch
    return ledger_.pick(static_cast<index_t>(batches_.front().slots.size()), training_);
}

inline void scheduler::finish(actions& out) {
    if (finished_ || phase_ != phase::idle || ledger_.outstanding() > 0) return;
    if (!closed_ && wanted() > 0) return;
    finished_ = true;
    emit(out, action::kind::finished);
}

// --- parts ----------------------------------------------------------------------------------------------------------

inline slot_t scheduler::admit() {
    const slot_t s = ledger_.admit();
    if (s >= sequences_.size()) sequences_.resize(s + std::size_t{1});
    sequences_[s] = {};
    sequences_[s].sample = cursor_++;
    ++totals_.admitted;
    return s;
}

// From rollout or later back to waiting, under its permit; its next attempt has another number.
inline void scheduler::restart(slot_t s, bool in_front) {
    sequence& q = sequences_[s];
    attempts_.end(s);
    forget_prefix(s);
    q.worker = q.lane = -1;
    if (in_front)
        waiting_.push_front(s);
    else
        waiting_.push(s);
}

// From rollout back to waiting with the tokens that its `versions` tell of. The caller lists it.
inline void scheduler::park(slot_t s) {
    attempts_.end(s);
    ledger_.interrupted(s);
    sequences_[s].worker = sequences_[s].lane = -1;
}

inline void scheduler::forget_prefix(slot_t s) {
    ledger_.restarted(s);
    sequences_[s].versions = {};
    sequences_[s].home = -1;
}

inline void scheduler::rollout_fault(slot_t s, actions& out, bool charged) {
    totals_.preempted += !charged;
    if (charged && ++sequences_[s].rollout_failures >= settings_.rollout_attempts) {
        give_up(s, failure::rollout, out);
        return;
    }
    ++totals_.retries;
    if (sequences_[s].versions.tokens == 0) return restart(s, true);
    park(s); // from what it had when it was parked last
    waiting_.push_front(s);
}

inline void scheduler::teacher_fault(slot_t s, actions& out, bool charged) {
    totals_.preempted += !charged;
    if (charged && ++sequences_[s].teacher_failures >= settings_.teacher_attempts) {
        give_up(s, failure::teacher, out);
        return;
    }
    ++totals_.retries;
    ledger_.queued(s);
    enqueue(s, true);
}

// A teacher's call is over without an answer: its sequences are queued again, in front, in order.
inline void scheduler::call_back(std::uint64_t number, bool charged, actions& out) {
    const auto at = std::find_if(jobs_.begin(), jobs_.end(), [&](const job& j) { return j.number == number; });
    const job gone = std::move(*at);
    jobs_.erase(at);
    for (std::size_t i = gone.slots.size(); i-- > 0;) teacher_fault(gone.slots[i], out, charged);
}

// For the teacher.
inline void scheduler::enqueue(slot_t s, bool in_front) {
    if (queue_.empty()) {
        flush_ = settings_.teacher_flush == 0;
        queued_since_ = now_;
    }
    if (in_front)
        queue_.push_front(s);
    else
        queue_.push(s);
}

inline void scheduler::give_up(slot_t s, failure why, actions& out) {
    sequence& q = sequences_[s];
    const place where = place_of(s);
    action& a = emit(out, action::kind::fail);
    a.ticket = ticket_of(s);
    a.why = why;
    a.where = where;
    if (why <= failure::learner) bore_no_fruit(static_cast<stage>(why));
    attempts_.end(s);
    if (where == place::waiting) waiting_.erase(s);
    if (where == place::queued && std::find(queue_.begin(), queue_.end(), s) != queue_.end()) queue_.erase(s);
    if (!plan_.streaming && !batches_.empty()) {
        batch& b = batches_[q.batch - first_batch_];
        std::erase(b.slots, s);
        b.unscored -= where < place::ready;
        if (where <= place::rollout) one_less_unrolled(b);
    }
    ledger_.release(s);
    ++totals_.failed;
    ++totals_.failed_by[static_cast<std::size_t>(why)];
}

inline void scheduler::put_training_back() {
    ledger_.put_back(training_);
    training_.clear();
}

inline void scheduler::tell(std::int32_t number, const sched::weights& what, actions& out) {
    action& a = emit(out, action::kind::sync);
    a.worker = number;
    if (number >= 0) a.incarnation = incarnation_of(stage::rollout, number);
    a.version = what.version;
    a.job = what.job;
}

// --- snapshots ------------------------------------------------------------------------------------------------------

inline std::string scheduler::snapshot() const {
    archive_writer w;
    w(plan_.streaming, plan_.overlap, plan_.batch, plan_.depth, plan_.policy, plan_.update, plan_.concurrency,
      settings_.group, permits_chosen());
    const_cast<scheduler*>(this)->fields(w);
    return seal(std::move(w.bytes));
}

inline scheduler scheduler::restore(const sched::settings& s, std::string_view snapshot) {
    scheduler r(s);
    archive_reader reader(unseal(snapshot));
    const auto same = [&](const char* name, auto now) {
        auto then = now;
        reader(then);
        if (then != now) throw invalid_input("snapshot", std::string("is of another ") + name);
    };
    same("kind of schedule", r.plan_.streaming);
    same("kind of schedule", r.plan_.overlap);
    same("batch", r.plan_.batch);
    same("schedule.k or schedule.tau", r.plan_.depth);
    same("schedule.policy", r.plan_.policy);
    same("schedule.update", r.plan_.update);
    same("schedule.concurrency", r.plan_.concurrency);
    same("group", r.settings_.group);
    index_t permits = 0;
    reader(permits);
    r.fields(reader);
    if (permits != r.permits_chosen())
        r.ledger_.resize(r.plan_.automatic ? std::clamp(r.ledger_.permits(), r.plan_.least, r.plan_.most)
                                           : r.plan_.permits);
    if (!reader.done()) throw invalid_input("snapshot", "is longer than the state it describes");
    detail::count_range counted, failures{.most = std::numeric_limits<std::int32_t>::max() / 2};
    r.totals_.fields(counted);
    counted(r.cursor_, r.next_job_, r.training_updates_, r.fruitless_);
    failures(r.training_failures_);
    for (const sequence& q : r.sequences_) failures(q.rollout_failures, q.teacher_failures);
    detail::needs(counted.holds && failures.holds, "a count is none");
    try {
        r.check_invariants();
    } catch (const std::logic_error& e) {
        detail::needs(false, e.what());
    }
    const std::vector<slot_t> order = r.ledger_.order();
    const auto earlier = [&](slot_t a, slot_t b) { return r.sequences_[a].batch < r.sequences_[b].batch; };
    detail::needs(r.plan_.streaming || std::is_sorted(order.begin(), order.end(), earlier),
                  "a batch is to be consumed before an earlier one");
    if (s.teacher_flush == 0 && r.plan_.streaming && !r.queue_.empty()) r.flush_ = true; // there was a time to wait
    return r;
}

inline void scheduler::abandon_workers(bool keep_prefixes, bool reopen) {
    if (reopen) paused_ = closed_ = finished_ = failed_ = false;
    if (finished_) return;
    // The process that died may have given out numbers after the snapshot, and answers to those may still come.
    next_job_ += std::uint64_t{1} << 32;
    first_attempt_ += std::uint32_t{1} << 16;
    fruitless_ = 0; // what failed may have been mended, and weights that were lost are there again
    gone_ = false;
    now_ = -forever; // the clock may be another's
    queued_since_ = forever, training_since_ = syncing_since_ = 0;
    ledger_.forget_time();
    attempts_.clear();
    aborts_.clear();
    installs_.clear();
    if (phase_ != phase::idle) put_training_back();
    phase_ = phase::idle;
    training_job_ = 0;
    ledger_.reopen_gate();
    roster_.clear();
    for (sequence& q : sequences_) q.home = -1;
    for (std::size_t j = jobs_.size(); j-- > 0;)
        for (std::size_t i = jobs_[j].slots.size(); i-- > 0;) {
            ledger_.queued(jobs_[j].slots[i]);
            queue_.push_front(jobs_[j].slots[i]);
        }
    jobs_.clear();
    for (const slot_t s : waiting_) // nobody has those tokens, or they are of the version that never came
        if (ledger_.version_of(s) >= 0 && (!keep_prefixes || sequences_[s].versions.newest > version()))
            forget_prefix(s);
    // in the order of admission, in front of what waits already
    std::vector<slot_t> running;
    for (slot_t s = 0; s < sequences_.size(); ++s) {
        const place where = place_of(s);
        const bool ahead =
            where > place::rollout && sequences_[s].versions.newest > version(); // only while sequences stream
        if (ahead && where == place::queued) queue_.erase(s);
        if (ahead && where == place::ready) ledger_.unready(s);
        if (ahead || where == place::rollout) running.push_back(s);
    }
    std::sort(running.begin(), running.end(),
              [&](slot_t a, slot_t b) { return sequences_[a].sample > sequences_[b].sample; });
    for (const slot_t s : running) {
        if (!keep_prefixes || place_of(s) != place::rollout) {
            restart(s, true);
            continue;
        }
        park(s);
        waiting_.push_front(s);
    }
    flush_ = !queue_.empty(); // how long they have waited nobody knows
}

} // namespace opd::sched

#include "opd/sched/scheduler_checks.hpp"
#include "opd/sched/scheduler_events.hpp"
