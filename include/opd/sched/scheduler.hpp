// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The scheduler: a state machine without a clock and without threads. `on(event, actions)` is all there is; drivers run it
// on threads (thread_driver.hpp), in virtual time (virtual_driver.hpp) or by messages.
//
// A sequence:   waiting -> rollout -> queued -> scoring -> ready -> training -> consumed
//               with its permit from admission to the end of the synchronisation; any stage can lead back or to `failed`
// The learner:  idle -> training -> leaving (finish-first: until nothing is in rollout) -> syncing -> idle
//
// After an update the gate is closed first, the weights go to the rollout workers, and only when all have them does the
// version move, do the permits return and does the gate open: nothing starts on old weights with new credit.
//
// Whole batches (sync, step_off, controlled): batch b is started once v >= b - k and batch b - 1 is completely rolled out;
// scored once it is completely rolled out; trained at version b, once batch b + k is started; the weights change once
// nothing is in rollout. So its start lag is min(b, k) exactly. In steady state with stage times r, t, l a step takes
// max(r, t, l, (r + t + l)/(k + 1)): r + t + l for k = 0, at most the paper's max(r, t + l) for k = 1 (a batch is scored
// while the one before it is trained), max(r, t, l) for k >= 2. controlled{k} waits until batch b + k is scored.
//
// Streaming (async): sequences are admitted under M permits, scored as they come, and make a batch when the staleness
// policy says so (ledger.hpp).
//
// A teacher call is made when `teacher_batch` sequences are queued; smaller ones when the oldest has waited `teacher_flush`
// seconds, when nothing is in rollout, or when the learner is idle and the call would complete a batch.
//
// Conservation, after every event: admitted = waiting + rollout + queued + scoring + ready + training + consumed + failed.
//
// Source: AsyncOPD section 7, appendices B and G. What is ours: faults as events, attempts, deadlines, snapshot.
#pragma once

#include <array>
#include <string>
#include <string_view>

#include "opd/sched/events.hpp"
#include "opd/sched/indexed_heap.hpp"
#include "opd/sched/ledger.hpp"

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
    std::int64_t late = 0;                      // replies to what was given up
    std::int64_t duplicates = 0;                // replies to what was answered already, or is not known any more
    std::int64_t lost_workers = 0;              // missed a deadline
    std::int64_t updates = 0;                   // optimizer updates, of completed steps
    std::int64_t short_batches = 0;             // smaller than B, empty ones included
    std::int64_t empty_batches = 0;             // all of a whole batch failed: a step that consumes nothing

    template <class A>
    void fields(A& a) {
        a(admitted, consumed, consumed_tokens, failed, retries, preempted, restarts, late, duplicates, lost_workers,
          updates, short_batches, empty_batches);
        for (auto& f : failed_by) a(f);
    }
};

/// Where the outstanding sequences are.
struct census {
    index_t waiting = 0, rollout = 0, queued = 0, scoring = 0, ready = 0, training = 0;
    index_t outstanding() const { return waiting + rollout + queued + scoring + ready + training; }
    bool operator==(const census&) const = default;
};

/// An outstanding sequence, for reports and drivers.
struct outstanding_sequence {
    /// none: it is not outstanding, so in no report.
    enum class place : std::uint8_t { none, waiting, rollout, queued, scoring, ready, training };
    friend constexpr place last_of(place) { return place::training; }
    sched::ticket ticket;
    place where = place::waiting;
    version_t start = -1; ///< version of its start; -1: none yet
};

class scheduler {
public:
    /// Throws invalid_input where the settings cannot work, and says why.
    explicit scheduler(const settings& s) : settings_(s), plan_(plan_of(s)), ledger_(plan_) {}

    /// Takes one event and appends what it leads to. An event that no driver could mean (a worker that was never
    /// announced, versions from the future) throws invalid_input before anything is changed; replies that are late, double
    /// or to nobody are counted and do nothing else.
    void on(const event& e, actions& out);

    version_t version() const { return ledger_.version(); }
    bool gate_open() const { return ledger_.gate_open(); }
    bool finished() const { return finished_; }
    const sched::counters& totals() const { return totals_; }
    const sched::census& where() const { return census_; }
    /// The schedule's settings as they are now.
    sched::plan resolved() const {
        sched::plan p = plan_;
        p.permits = ledger_.permits();
        return p;
    }
    const sched::settings& options() const { return settings_; }
    sample_t cursor() const { return cursor_; } ///< the next sequence's number
    /// A batch's worth is scored and the learner idle, but the staleness policy waits for someone.
    bool held_back() const {
        return phase_ == phase::idle && ledger_.ready_count() >= plan_.batch && !finished_ && can_train();
    }
    /// edf: sequences that could still have shared the tightest deadline of the last batch; -1 under other policies.
    index_t slack() const { return ledger_.slack(); }

    /// Calls f(outstanding_sequence) for every sequence that holds a permit.
    template <class F>
    void for_each(F&& f) const;

    /// Of an outstanding sequence: the version of its start (-1: none yet), and what drew its tokens once it is rolled out.
    version_t start_of(const ticket& t) const { return known(t).start; }
    const token_versions& versions_of(const ticket& t) const { return known(t).versions; }

    /// All of the state, for restore(). Equal states give equal bytes.
    std::string snapshot() const;
    /// A scheduler as it was. The schedule, batch and group must be those of then; limits, deadlines and attempts may
    /// differ, and take effect. So may `outstanding`: another number than the settings of then is the number of permits
    /// from now on, the same leaves what a resize has made of it. Throws invalid_input where they are not, and where the
    /// snapshot is damaged.
    static scheduler restore(const settings& s, std::string_view snapshot);
    /// After restore() in a new process: nobody is there yet. What was in rollout waits again, with its permit; what was
    /// being scored is queued; what was in training is ready; an unfinished synchronisation is one that did not happen, so
    /// the weights must be those of version(), and what has tokens of the version that never came waits again as well.
    /// Workers are announced by worker_up. `keep_prefixes`: the driver has the tokens of the sequences that were in rollout
    /// and goes on from those of versions up to version(), so they keep the version of their start.
    /// `reopen`: a pause, a close and an end that the snapshot had seen are forgotten; they were the old process's.
    /// Jobs and attempts have new numbers from here on, so answers to the old process count for nothing; take a snapshot
    /// after this and before the first event, or a third process from the same snapshot would give out the second's.
    void abandon_workers(bool keep_prefixes = false, bool reopen = false);

    /// Recounts everything; throws std::logic_error that names the broken invariant. For tests and simulations.
    void check_invariants() const;

private:
    using place = outstanding_sequence::place;
    enum class phase : std::uint8_t { idle, training, leaving, syncing };
    friend constexpr phase last_of(phase) { return phase::syncing; }

    struct sequence {
        sample_t sample = 0;
        std::uint32_t attempt = 0;
        std::int32_t worker = -1, lane = -1; // in rollout
        place where = place::none;
        std::int32_t rollout_failures = 0, teacher_failures = 0;
        std::uint64_t batch = 0; // whole batches: its number
        version_t start = -1;
        token_versions versions = {};
        template <class A>
        void fields(A& a) {
            a(sample, attempt, worker, lane, where, rollout_failures, teacher_failures, batch, start, versions.oldest,
              versions.newest, versions.mean, versions.tokens);
        }
    };
    struct lane {
        bool taken = false; // by the attempt, which may have been given up
        slot_t slot = 0;
        sample_t sample = 0;
        std::uint32_t attempt = 0;
        template <class A>
        void fields(A& a) {
            a(taken, slot, sample, attempt);
        }
    };
    struct worker {
        bool up = false;
        std::int32_t slots = 0, busy = 0;
        version_t told = -1, has = -1; // weights: sent, installed
        std::uint32_t comings = 0;     // a timer of an earlier one says nothing of this one
        std::vector<lane> lanes;       // rollout
        std::vector<std::int32_t> vacant;
        template <class A>
        void fields(A& a) {
            a(up, slots, busy, told, has, comings, lanes, vacant);
        }
    };
    struct job {
        std::uint64_t number = 0;
        std::int32_t worker = -1;
        std::vector<slot_t> slots;
        template <class A>
        void fields(A& a) {
            a(number, worker, slots);
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
    void on_worker_up(const event& e, actions& out);
    void on_worker_down(sched::stage s, std::int32_t w, actions& out);
    void on_reply(const event& e, actions& out);
    void on_scored(const event& e, actions& out);
    void on_learned(const event& e, actions& out);
    void on_learn_failed(actions& out, bool charged = true);
    void on_timer(const timer& t, actions& out);
    void on_stop(actions& out);

    // --- what may follow from any event
    void pump(actions& out);
    bool synchronise(actions& out);
    void complete_step(actions& out);
    void feed(actions& out);
    void feed_batches();
    void start_waiting(actions& out);
    void score(actions& out);
    void train(actions& out);
    void finish(actions& out);

    // --- parts
    index_t wanted() const; // sequences still to be admitted, at most: whole groups
    slot_t admit();
    void move(slot_t s, place to);
    void restart(slot_t s, bool in_front);
    // uncharged: the worker was lost, which is no fault of the sequence and never gives it up
    void rollout_fault(slot_t s, actions& out, bool charged = true);
    void teacher_fault(slot_t s, actions& out, bool charged = true);
    void call_back(std::uint64_t number, bool charged, actions& out);
    void give_up(slot_t s, failure why, actions& out);
    void put_training_back();
    bool rollout_empty() const { return census_.waiting + census_.rollout == 0; }
    bool can_train() const { return workers_of(stage::learner).size() > 0 && workers_of(stage::learner)[0].up; }
    bool no_more() const; // nothing will be admitted before something is consumed
    ticket ticket_of(slot_t s) const {
        const sequence& q = sequences_[s];
        return {q.sample, s, q.attempt, q.worker, q.lane};
    }
    bool current(const ticket& t) const {
        return t.slot < sequences_.size() && sequences_[t.slot].where != place::none &&
               sequences_[t.slot].sample == t.sample && sequences_[t.slot].attempt == t.attempt;
    }
    bool in_rollout(const ticket& t) const { return current(t) && sequences_[t.slot].where == place::rollout; }
    bool holds_lane(const ticket& t) const;
    void vacate_lane(const ticket& t);
    void enqueue(slot_t s, bool in_front, actions& out);
    void one_less_unrolled(batch& b) { // once none is left the batch goes to the teacher
        if (--b.unrolled > 0) return;
        for (const slot_t s : b.slots)
            if (sequences_[s].where == place::queued) queue_.push(s);
    }
    bool behind(const worker& w) const { return w.up && w.has <= version(); } // while syncing: it owes an answer
    void offer(std::int32_t w);
    void offer_teacher(std::int32_t number) {
        const worker& w = workers_of(stage::teacher)[static_cast<std::size_t>(number)];
        if (w.up && w.busy < w.slots)
            idle_teachers_.set(number, w.busy);
        else
            idle_teachers_.remove(number);
    }
    bool usable(const worker& w) const { return w.up && w.has == version() && w.told == version(); }
    void tell(std::int32_t w, version_t v, actions& out);
    void abort(const ticket& t, actions& out) const {
        emit(out, action::kind::abort).ticket = t;
        set_timer(out, {timer::kind::abort, t, 0, -1}, settings_.abort_deadline);
    }
    void set_timer(actions& out, const timer& t, double seconds) const {
        if (!(seconds > 0)) return;
        action& a = emit(out, action::kind::set_timer);
        a.timer = t, a.seconds = seconds;
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
    std::vector<worker>& workers_of(sched::stage s) { return workers_[static_cast<std::size_t>(s)]; }
    const std::vector<worker>& workers_of(sched::stage s) const { return workers_[static_cast<std::size_t>(s)]; }
    worker& known(sched::stage s, std::int32_t w) {
        auto& all = workers_of(s);
        if (w < 0 || static_cast<std::size_t>(w) >= all.size())
            throw invalid_input("event", std::string("no ") + name_of(s) + " worker " + std::to_string(w) +
                                             " was ever announced");
        return all[static_cast<std::size_t>(w)];
    }
    const sequence& known(const ticket& t) const {
        if (t.slot >= sequences_.size() || sequences_[t.slot].where == place::none ||
            sequences_[t.slot].sample != t.sample)
            throw invalid_input("ticket", "sequence " + std::to_string(t.sample) + " is not outstanding");
        return sequences_[t.slot];
    }
    index_t& count_of(place p) {
        switch (p) {
        case place::waiting:
            return census_.waiting;
        case place::rollout:
            return census_.rollout;
        case place::queued:
            return census_.queued;
        case place::scoring:
            return census_.scoring;
        case place::ready:
            return census_.ready;
        default:
            return census_.training;
        }
    }
    template <class A>
    void fields(A& a) {
        a(ledger_, sequences_, cursor_, waiting_, queue_, jobs_, workers_[0], workers_[1], workers_[2], idle_lanes_,
          idle_teachers_, training_, training_job_, training_failures_, training_updates_, phase_, behind_, next_job_,
          first_attempt_, flush_, flush_due_, paused_, closed_, finished_, batches_, first_batch_, totals_,
          census_.waiting, census_.rollout, census_.queued, census_.scoring, census_.ready, census_.training);
    }

    sched::settings settings_;
    sched::plan plan_;
    ledger ledger_;
    std::vector<sequence> sequences_; // by slot
    sample_t cursor_ = 0;
    slot_fifo waiting_; // hold a permit, wait for a lane
    slot_fifo queue_;   // rolled out, wait for a teacher
    std::vector<job> jobs_;
    std::vector<std::vector<slot_t>> spare_; // lists of calls that are over, so that a call allocates nothing; no state
    std::array<std::vector<worker>, stage_count> workers_;
    // Workers by how busy they are.
    detail::indexed_heap<std::int32_t> idle_lanes_;    // rollout workers with a vacant lane and the present weights
    detail::indexed_heap<std::int32_t> idle_teachers_; // with a vacant slot
    std::vector<slot_t> training_;                     // by sample
    std::uint64_t training_job_ = 0;
    std::int32_t training_failures_ = 0;
    std::int64_t training_updates_ = 0; // of the step that is being synchronised
    phase phase_ = phase::idle;
    index_t behind_ = 0;              // while syncing: rollout workers without the new weights
    std::uint64_t next_job_ = 1;      // the upper half counts the lives of the scheduler
    std::uint32_t first_attempt_ = 0; // less one; likewise
    std::uint64_t flush_ = 0;         // number of the flush timer that counts
    bool flush_due_ = false, paused_ = false, closed_ = false, finished_ = false;
    std::deque<batch> batches_;     // whole batches: those that are outstanding
    std::uint64_t first_batch_ = 0; // number of the first of them
    sched::counters totals_;
    sched::census census_;
};

// --- events ---------------------------------------------------------------------------------------------------------

inline void scheduler::on(const event& e, actions& out) {
    using kind = event::kind;
    switch (e.what) {
    case kind::worker_up:
        on_worker_up(e, out);
        break;
    case kind::worker_down:
        known(e.stage, e.worker);
        on_worker_down(e.stage, e.worker, out);
        break;
    case kind::rolled_out:
    case kind::rollout_failed:
    case kind::aborted:
        on_reply(e, out);
        break;
    case kind::scored:
    case kind::score_failed:
        on_scored(e, out);
        break;
    case kind::learned:
        on_learned(e, out);
        break;
    case kind::learn_failed:
        if (phase_ != phase::training || e.job != training_job_)
            ++totals_.late;
        else
            on_learn_failed(out);
        break;
    case kind::synced: {
        worker& w = known(stage::rollout, e.worker);
        if (e.version > w.told)
            throw invalid_input("event", "rollout worker " + std::to_string(e.worker) + " installed version " +
                                             std::to_string(e.version) + ", which it was not sent");
        if (!w.up || e.version <= w.has) {
            ++totals_.duplicates;
            break;
        }
        const bool was_behind = behind(w);
        w.has = e.version;
        if (phase_ == phase::syncing && was_behind && !behind(w)) --behind_;
        offer(e.worker);
        break;
    }
    case kind::timer:
        on_timer(e.timer, out);
        break;
    case kind::pause:
        paused_ = true;
        break;
    case kind::resume:
        paused_ = false;
        break;
    case kind::resize: {
        if (!plan_.streaming || plan_.policy == staleness_policy::areal)
            throw invalid_input("event",
                                "resize: only async schedules with permits have a number of permits to change");
        if (e.count < 1) throw invalid_input("event", "resize: permits must be at least batch");
        sched::settings changed = settings_;
        std::get<async>(changed.schedule).outstanding = e.count;
        plan_of(changed); // throws where it cannot work
        ledger_.resize(e.count);
        break;
    }
    case kind::close:
        closed_ = true;
        break;
    case kind::stop:
        on_stop(out);
        return;
    }
    pump(out);
}

inline void scheduler::on_worker_up(const event& e, actions& out) {
    if (e.worker < 0 || e.slots < 1)
        throw invalid_input("event", std::string("worker_up of ") + name_of(e.stage) + " worker " +
                                         std::to_string(e.worker) + " with " + std::to_string(e.slots) + " slots");
    if (e.stage == stage::learner && (e.worker != 0 || e.slots != 1))
        throw invalid_input("event", "there is one learner: worker 0 with one slot");
    auto& all = workers_of(e.stage);
    if (static_cast<std::size_t>(e.worker) >= all.size()) all.resize(static_cast<std::size_t>(e.worker) + 1);
    worker& w = all[static_cast<std::size_t>(e.worker)];
    const bool was_up = w.up;
    w.up = true;
    w.slots = e.slots;
    if (e.stage == stage::teacher) offer_teacher(e.worker);
    if (e.stage != stage::rollout) return;
    if (static_cast<std::size_t>(e.slots) > w.lanes.size()) w.lanes.resize(static_cast<std::size_t>(e.slots));
    w.vacant.clear();
    for (std::int32_t l = e.slots; l-- > 0;)
        if (!w.lanes[static_cast<std::size_t>(l)].taken) w.vacant.push_back(l);
    if (!was_up) {
        w.has = w.told = -1;
        ++w.comings;
        if (phase_ == phase::syncing) ++behind_;
        tell(e.worker, phase_ == phase::syncing ? version() + 1 : version(), out);
    }
    offer(e.worker);
}

inline void scheduler::on_worker_down(sched::stage s, std::int32_t number, actions& out) {
    worker& w = workers_of(s)[static_cast<std::size_t>(number)];
    if (!w.up) {
        ++totals_.duplicates;
        return;
    }
    if (s == stage::rollout && phase_ == phase::syncing && behind(w)) --behind_; // nobody waits for the dead
    w.up = false;
    w.busy = 0;
    if (s == stage::rollout) {
        std::vector<slot_t> running;
        for (lane& l : w.lanes) {
            if (l.taken && in_rollout({l.sample, l.slot, l.attempt, -1, -1})) running.push_back(l.slot);
            l = {};
        }
        offer(number);
        std::sort(running.begin(), running.end(),
                  [&](slot_t a, slot_t b) { return sequences_[a].sample > sequences_[b].sample; });
        for (const slot_t i : running) rollout_fault(i, out, false); // each in front, so the order of admission is kept
    } else if (s == stage::teacher) {
        offer_teacher(number);
        for (std::size_t j = jobs_.size(); j-- > 0;)
            if (jobs_[j].worker == number) call_back(jobs_[j].number, false, out);
    } else if (phase_ == phase::training) {
        on_learn_failed(out, false);
    }
}

// A reply to one attempt frees its lane, whoever still wants the result.
inline void scheduler::on_reply(const event& e, actions& out) {
    const ticket& t = e.ticket;
    const worker& w = known(stage::rollout, t.worker);
    if (!holds_lane(t)) {
        ++totals_.duplicates;
        return;
    }
    const bool wanted_still = in_rollout(t);
    if (wanted_still && e.what == event::kind::rolled_out &&
        (e.versions.oldest < sequences_[t.slot].start || e.versions.newest > w.told ||
         e.versions.oldest > e.versions.newest || e.versions.tokens < 0))
        throw invalid_input("event", "rolled_out of sequence " + std::to_string(t.sample) + ": " +
                                         std::to_string(e.versions.tokens) + " tokens of versions " +
                                         std::to_string(e.versions.oldest) + " to " +
                                         std::to_string(e.versions.newest) + "; it was started at version " +
                                         std::to_string(sequences_[t.slot].start) +
                                         " and the worker was sent version " + std::to_string(w.told));
    vacate_lane(t);
    if (!wanted_still) {
        totals_.late += e.what != event::kind::aborted;
        return;
    }
    sequence& q = sequences_[t.slot];
    if (e.what != event::kind::rolled_out) {
        rollout_fault(t.slot, out);
        return;
    }
    q.versions = e.versions;
    q.worker = q.lane = -1;
    ledger_.rolled_out(t.slot);
    move(t.slot, place::queued);
    if (plan_.streaming) {
        enqueue(t.slot, false, out);
    } else {
        one_less_unrolled(batches_[q.batch - first_batch_]);
    }
}

inline void scheduler::on_scored(const event& e, actions& out) {
    worker& w = known(stage::teacher, e.worker);
    const auto at = std::find_if(jobs_.begin(), jobs_.end(),
                                 [&](const job& j) { return j.number == e.job && j.worker == e.worker; });
    if (at == jobs_.end()) {
        ++(e.job < next_job_ && !w.up ? totals_.late : totals_.duplicates);
        return;
    }
    job done = std::move(*at);
    jobs_.erase(at);
    --w.busy;
    offer_teacher(e.worker);
    std::vector<slot_t> named; // none: all
    for (const ticket& t : e.tickets)
        if (t.slot < sequences_.size() && sequences_[t.slot].sample == t.sample) named.push_back(t.slot);
    std::sort(named.begin(), named.end());
    for (std::size_t i = done.slots.size(); i-- > 0;) { // from the back: what fails is queued in front, in order
        const slot_t s = done.slots[i];
        const bool scored =
            e.what == event::kind::scored && (e.tickets.empty() || std::binary_search(named.begin(), named.end(), s));
        if (!scored) teacher_fault(s, out);
    }
    for (const slot_t s : done.slots) {
        if (sequences_[s].where != place::scoring) continue;
        ledger_.ready(s);
        move(s, place::ready);
        if (!plan_.streaming) --batches_[sequences_[s].batch - first_batch_].unscored;
    }
    done.slots.clear();
    spare_.push_back(std::move(done.slots));
}

inline void scheduler::on_learned(const event& e, actions&) {
    if (phase_ != phase::training || e.job != training_job_) {
        ++(e.job < next_job_ && e.job != training_job_ ? totals_.late : totals_.duplicates);
        return;
    }
    if (e.count < 0) throw invalid_input("event", "learned: " + std::to_string(e.count) + " updates");
    ledger_.close_gate(); // first of all
    training_updates_ = e.count;
    training_failures_ = 0;
    phase_ = phase::leaving;
}

inline void scheduler::on_learn_failed(actions& out, bool charged) {
    phase_ = phase::idle;
    training_job_ = 0; // given up: an answer to it is late
    totals_.preempted += !charged;
    if (!charged || ++training_failures_ < settings_.learner_attempts) {
        ++totals_.retries;
        put_training_back();
        return;
    }
    training_failures_ = 0;
    const std::vector<slot_t> failed = std::exchange(training_, {});
    for (const slot_t s : failed) give_up(s, failure::learner, out);
}

inline void scheduler::on_timer(const timer& t, actions& out) {
    // `charge`: what it was late with; all else that it had is lost with it
    const auto lose = [&](sched::stage s, std::int32_t w, auto&& charge) {
        ++totals_.lost_workers;
        action& a = emit(out, action::kind::lost);
        a.stage = s, a.worker = w;
        charge();
        on_worker_down(s, w, out);
    };
    const auto nothing = [] {};
    switch (t.what) {
    case timer::kind::flush:
        if (t.number == flush_ && !queue_.empty()) flush_due_ = true;
        break;
    case timer::kind::rollout:
        if (in_rollout(t.attempt)) {
            abort(t.attempt, out);
            rollout_fault(t.attempt.slot, out);
        }
        break;
    case timer::kind::abort: {
        known(stage::rollout, t.attempt.worker);
        if (holds_lane(t.attempt)) lose(stage::rollout, t.attempt.worker, nothing); // charged when it was aborted
        break;
    }
    case timer::kind::teacher:
        for (const job& j : jobs_)
            if (j.number == t.number) {
                lose(stage::teacher, j.worker, [&] { call_back(t.number, true, out); });
                break;
            }
        break;
    case timer::kind::learner:
        if (phase_ == phase::training && training_job_ == t.number)
            lose(stage::learner, 0, [&] { on_learn_failed(out); });
        break;
    case timer::kind::sync: {
        const worker& w = known(stage::rollout, t.worker);
        const auto v = static_cast<version_t>(t.number);
        if (w.up && w.comings == t.attempt.attempt && w.told == v && w.has < v) lose(stage::rollout, t.worker, nothing);
        break;
    }
    }
}

inline void scheduler::on_stop(actions& out) {
    closed_ = true;
    if (finished_) return;
    for (slot_t s = 0; s < sequences_.size(); ++s) {
        if (sequences_[s].where == place::none) continue;
        if (sequences_[s].where == place::rollout) emit(out, action::kind::abort).ticket = ticket_of(s);
        give_up(s, failure::stopped, out);
    }
    jobs_.clear();
    training_.clear();
    training_updates_ = 0;
    training_job_ = 0;
    batches_.clear();
    phase_ = phase::idle;
    ledger_.reopen_gate();
    finish(out);
}

// --- what may follow ------------------------------------------------------------------------------------------------

inline void scheduler::pump(actions& out) {
    if (finished_) return;
    while (synchronise(out)) {}
    feed(out);
    score(out);
    train(out);
    finish(out);
}

// True when a step was completed.
inline bool scheduler::synchronise(actions& out) {
    if (phase_ == phase::leaving) {
        if (plan_.update == weight_update::finish_first) {
            if (!plan_.streaming) start_waiting(out); // admitted before the update: its version is this one
            if (census_.rollout > 0 || (!plan_.streaming && census_.waiting > 0)) return false;
        }
        if (plan_.update == weight_update::abort)
            for (slot_t s = 0; s < sequences_.size(); ++s)
                if (sequences_[s].where == place::rollout) {
                    abort(ticket_of(s), out);
                    ++totals_.restarts;
                    restart(s, false);
                }
        if (plan_.streaming && plan_.update != weight_update::keep)
            for (const slot_t s : waiting_) // a prefix that outlived a crash would go on under other weights
                if (sequences_[s].start >= 0) {
                    ledger_.restarted(s);
                    sequences_[s].start = -1;
                    ++totals_.restarts;
                }
        phase_ = phase::syncing;
        behind_ = 0;
        idle_lanes_.clear(); // at once, not one by one
        const auto& all = workers_of(stage::rollout);
        for (std::size_t w = 0; w < all.size(); ++w)
            if (all[w].up) {
                ++behind_;
                tell(static_cast<std::int32_t>(w), version() + 1, out);
            }
    }
    if (phase_ != phase::syncing || behind_ > 0) return false;
    complete_step(out);
    return true;
}

inline void scheduler::complete_step(actions& out) {
    phase_ = phase::idle;
    ledger_.advance(training_);
    action& a = emit(out, action::kind::step);
    a.version = version();
    a.first = static_cast<std::uint32_t>(out.consumed.size());
    a.count = static_cast<std::uint32_t>(training_.size());
    for (const slot_t s : training_) {
        out.consumed.push_back({ticket_of(s), sequences_[s].start, sequences_[s].versions});
        totals_.consumed_tokens += sequences_[s].versions.tokens;
        --census_.training;
        sequences_[s].where = place::none;
    }
    totals_.consumed += static_cast<std::int64_t>(training_.size());
    totals_.updates += std::exchange(training_updates_, 0);
    totals_.empty_batches += training_.empty();
    totals_.short_batches += static_cast<index_t>(training_.size()) < plan_.batch;
    training_.clear();
    if (!plan_.streaming) {
        batches_.pop_front();
        ++first_batch_;
    }
    idle_lanes_.clear();
    for (std::size_t w = 0; w < workers_of(stage::rollout).size(); ++w) offer(static_cast<std::int32_t>(w));
    std::vector<slot_t> stale;
    ledger_.stale(stale);
    for (const slot_t s : stale) {
        const place where = sequences_[s].where;
        if (where == place::rollout) abort(ticket_of(s), out);
        if (where == place::queued) queue_.erase(s);
        if (where == place::scoring)
            for (job& j : jobs_) std::erase(j.slots, s);
        if (plan_.policy == staleness_policy::drop) {
            give_up(s, failure::stale, out);
        } else {
            if (where == place::ready) ledger_.unready(s);
            if (where == place::waiting) waiting_.erase(s); // it has the tokens of an earlier process
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
    start_waiting(out);
    if (closed_) return;
    if (plan_.streaming) {
        while (waiting_.empty() && !idle_lanes_.empty() && wanted() > 0 && ledger_.free() >= settings_.group) {
            for (index_t g = 0; g < settings_.group; ++g) waiting_.push(admit());
            start_waiting(out);
        }
    } else {
        feed_batches();
        start_waiting(out);
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
    while (!waiting_.empty() && !idle_lanes_.empty()) {
        const std::int32_t number = idle_lanes_.top();
        worker& w = workers_of(stage::rollout)[static_cast<std::size_t>(number)];
        const slot_t s = waiting_.pop();
        sequence& q = sequences_[s];
        q.worker = number;
        q.lane = w.vacant.back();
        w.vacant.pop_back();
        ++w.busy;
        q.attempt = first_attempt_ + (q.attempt & 0xffff) + 1;
        if (q.start < 0) { // else it goes on with tokens that it has
            q.start = version();
            ledger_.started(s);
        }
        w.lanes[static_cast<std::size_t>(q.lane)] = {true, s, q.sample, q.attempt};
        offer(number);
        move(s, place::rollout);
        action& a = emit(out, action::kind::start);
        a.ticket = ticket_of(s);
        a.worker = number;
        a.version = version();
        set_timer(out, {timer::kind::rollout, ticket_of(s), 0, -1}, settings_.rollout_deadline);
    }
}

inline void scheduler::score(actions& out) {
    while (!queue_.empty() && !idle_teachers_.empty()) {
        const bool full = queue_.size() >= settings_.teacher_batch;
        // a smaller call: its time has come, nothing more can come, or it is all that the idle learner waits for
        const bool due = flush_due_ || rollout_empty() || !plan_.streaming ||
                         (phase_ == phase::idle && census_.ready + census_.scoring + queue_.size() >= plan_.batch);
        if (!full && !due) return;
        job j;
        if (!spare_.empty()) {
            j.slots = std::move(spare_.back());
            spare_.pop_back();
        }
        j.number = next_job_++;
        j.worker = idle_teachers_.top();
        while (!queue_.empty() && static_cast<index_t>(j.slots.size()) < settings_.teacher_batch) {
            j.slots.push_back(queue_.pop());
            move(j.slots.back(), place::scoring);
        }
        if (queue_.empty()) {
            flush_due_ = false;
            ++flush_;
        }
        ++workers_of(stage::teacher)[static_cast<std::size_t>(j.worker)].busy;
        offer_teacher(j.worker);
        action& a = emit(out, action::kind::score);
        a.job = j.number;
        a.worker = j.worker;
        list(out, a, j.slots);
        set_timer(out, {timer::kind::teacher, {}, j.number, -1}, settings_.teacher_deadline);
        jobs_.push_back(std::move(j));
    }
}

// A whole batch of which all failed is trained too, without sequences: who installs a version must find it published, and only
// the learner publishes.
inline void scheduler::train(actions& out) {
    if (phase_ != phase::idle || !gate_open() || !can_train()) return;
    if (plan_.streaming) {
        index_t n = plan_.batch;
        // the last batch: nothing else is outstanding and nothing will come
        if (ledger_.outstanding() < n && ledger_.ready_count() == ledger_.outstanding() && no_more())
            n = ledger_.ready_count();
        if (n == 0 || !ledger_.pick(n, training_)) return;
    } else {
        if (batches_.empty() || batches_.front().unscored > 0) return;
        const std::uint64_t ahead = first_batch_ + static_cast<std::uint64_t>(plan_.depth);
        const bool all_started = first_batch_ + batches_.size() > ahead || closed_ || wanted() == 0;
        if (!all_started) return;
        if (!plan_.overlap)
            for (const batch& b : batches_)
                if (b.unscored > 0) return;
        training_ = batches_.front().slots;
        ledger_.take(training_);
    }
    std::sort(training_.begin(), training_.end(),
              [&](slot_t a, slot_t b) { return sequences_[a].sample < sequences_[b].sample; });
    for (const slot_t s : training_) move(s, place::training);
    phase_ = phase::training;
    training_job_ = next_job_++;
    action& a = emit(out, action::kind::train);
    a.job = training_job_;
    a.version = version();
    a.worker = 0;
    list(out, a, training_);
    set_timer(out, {timer::kind::learner, {}, training_job_, -1}, settings_.learner_deadline);
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
    sequences_[s].where = place::waiting;
    ++census_.waiting;
    ++totals_.admitted;
    return s;
}

inline void scheduler::move(slot_t s, place to) {
    --count_of(sequences_[s].where);
    ++count_of(to);
    sequences_[s].where = to;
}

// From rollout or later back to waiting, under its permit; its next attempt has another number.
inline void scheduler::restart(slot_t s, bool in_front) {
    sequence& q = sequences_[s];
    ledger_.restarted(s);
    move(s, place::waiting);
    q.worker = q.lane = -1;
    q.start = -1;
    if (in_front)
        waiting_.push_front(s);
    else
        waiting_.push(s);
}

inline void scheduler::rollout_fault(slot_t s, actions& out, bool charged) {
    totals_.preempted += !charged;
    if (charged && ++sequences_[s].rollout_failures >= settings_.rollout_attempts) {
        give_up(s, failure::rollout, out);
        return;
    }
    ++totals_.retries;
    restart(s, true);
}

inline void scheduler::teacher_fault(slot_t s, actions& out, bool charged) {
    totals_.preempted += !charged;
    if (charged && ++sequences_[s].teacher_failures >= settings_.teacher_attempts) {
        give_up(s, failure::teacher, out);
        return;
    }
    ++totals_.retries;
    move(s, place::queued);
    enqueue(s, true, out);
}

// A teacher's call is over without an answer: its sequences are queued again, in front, in order.
inline void scheduler::call_back(std::uint64_t number, bool charged, actions& out) {
    const auto at = std::find_if(jobs_.begin(), jobs_.end(), [&](const job& j) { return j.number == number; });
    const job gone = std::move(*at);
    jobs_.erase(at);
    for (std::size_t i = gone.slots.size(); i-- > 0;) teacher_fault(gone.slots[i], out, charged);
}

// For the teacher; the first to wait starts the flush timer.
inline void scheduler::enqueue(slot_t s, bool in_front, actions& out) {
    if (queue_.empty()) {
        flush_due_ = settings_.teacher_flush == 0;
        set_timer(out, {timer::kind::flush, {}, ++flush_, -1}, settings_.teacher_flush);
    }
    if (in_front)
        queue_.push_front(s);
    else
        queue_.push(s);
}

inline void scheduler::give_up(slot_t s, failure why, actions& out) {
    sequence& q = sequences_[s];
    action& a = emit(out, action::kind::fail);
    a.ticket = ticket_of(s);
    a.why = why;
    if (q.where == place::waiting) waiting_.erase(s);
    if (q.where == place::queued && std::find(queue_.begin(), queue_.end(), s) != queue_.end()) queue_.erase(s);
    if (!plan_.streaming && !batches_.empty()) {
        batch& b = batches_[q.batch - first_batch_];
        std::erase(b.slots, s);
        b.unscored -= q.where < place::ready;
        if (q.where <= place::rollout) one_less_unrolled(b);
    }
    ledger_.release(s);
    --count_of(q.where);
    q.where = place::none;
    ++totals_.failed;
    ++totals_.failed_by[static_cast<std::size_t>(why)];
}

inline void scheduler::put_training_back() {
    for (const slot_t s : training_) move(s, place::ready);
    ledger_.put_back(training_);
    training_.clear();
}

// The attempt runs there, whether or not anybody still wants it.
inline bool scheduler::holds_lane(const ticket& t) const {
    const worker& w = workers_of(stage::rollout)[static_cast<std::size_t>(t.worker)];
    if (!w.up || t.lane < 0 || static_cast<std::size_t>(t.lane) >= w.lanes.size()) return false;
    const lane& l = w.lanes[static_cast<std::size_t>(t.lane)];
    return l.taken && l.slot == t.slot && l.sample == t.sample && l.attempt == t.attempt;
}

inline void scheduler::vacate_lane(const ticket& t) {
    worker& w = workers_of(stage::rollout)[static_cast<std::size_t>(t.worker)];
    w.lanes[static_cast<std::size_t>(t.lane)] = {};
    --w.busy;
    if (t.lane < w.slots) w.vacant.push_back(t.lane); // else the worker has shrunk
    offer(t.worker);
}

// Lists the worker among those that can take a sequence, or takes it off the list.
inline void scheduler::offer(std::int32_t number) {
    const worker& w = workers_of(stage::rollout)[static_cast<std::size_t>(number)];
    if (usable(w) && !w.vacant.empty())
        idle_lanes_.set(number, w.busy);
    else
        idle_lanes_.remove(number);
}

inline void scheduler::tell(std::int32_t number, version_t v, actions& out) {
    worker& w = workers_of(stage::rollout)[static_cast<std::size_t>(number)];
    w.told = v;
    offer(number);
    action& a = emit(out, action::kind::sync);
    a.worker = number;
    a.version = v;
    set_timer(out, {timer::kind::sync, {0, 0, w.comings}, static_cast<std::uint64_t>(v), number},
              settings_.sync_deadline);
}

// --- reports --------------------------------------------------------------------------------------------------------

template <class F>
void scheduler::for_each(F&& f) const {
    for (slot_t s = 0; s < sequences_.size(); ++s)
        if (sequences_[s].where != place::none)
            f(outstanding_sequence{ticket_of(s), sequences_[s].where, sequences_[s].start});
}

inline std::string scheduler::snapshot() const {
    archive_writer w;
    w(plan_.streaming, plan_.overlap, plan_.batch, plan_.depth, plan_.policy, plan_.update, plan_.concurrency,
      settings_.group, plan_.permits);
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
    if (permits != r.plan_.permits) r.ledger_.resize(r.plan_.permits);
    if (!reader.done()) throw invalid_input("snapshot", "is longer than the state it describes");
    return r;
}

inline void scheduler::abandon_workers(bool keep_prefixes, bool reopen) {
    if (reopen) paused_ = closed_ = finished_ = false;
    if (finished_) return;
    // The process that died may have given out numbers after the snapshot, and answers to those may still come.
    next_job_ += std::uint64_t{1} << 32;
    first_attempt_ += std::uint32_t{1} << 16;
    if (phase_ != phase::idle) put_training_back();
    phase_ = phase::idle;
    training_job_ = 0;
    training_updates_ = 0;
    behind_ = 0;
    ledger_.reopen_gate();
    for (auto& all : workers_)
        for (worker& w : all) {
            w.up = false;
            w.busy = 0;
            for (lane& l : w.lanes) l = {};
        }
    idle_lanes_.clear();
    idle_teachers_.clear();
    for (std::size_t j = jobs_.size(); j-- > 0;)
        for (std::size_t i = jobs_[j].slots.size(); i-- > 0;) {
            move(jobs_[j].slots[i], place::queued);
            queue_.push_front(jobs_[j].slots[i]);
        }
    jobs_.clear();
    // in the order of admission, in front of what waits already
    std::vector<slot_t> running;
    for (slot_t s = 0; s < sequences_.size(); ++s) {
        const sequence& q = sequences_[s];
        const bool ahead = q.where > place::rollout && q.versions.newest > version(); // only while sequences stream
        if (ahead && q.where == place::queued) queue_.erase(s);
        if (ahead && q.where == place::ready) ledger_.unready(s);
        if (ahead || q.where == place::rollout) running.push_back(s);
    }
    std::sort(running.begin(), running.end(),
              [&](slot_t a, slot_t b) { return sequences_[a].sample > sequences_[b].sample; });
    for (const slot_t s : running) {
        if (!keep_prefixes || sequences_[s].where != place::rollout) {
            restart(s, true);
            continue;
        }
        move(s, place::waiting);
        sequences_[s].worker = sequences_[s].lane = -1;
        waiting_.push_front(s);
    }
    flush_due_ = !queue_.empty(); // the timer is gone
}

inline void scheduler::check_invariants() const {
    const auto require = [](bool holds, const char* what) {
        if (!holds) throw std::logic_error(std::string("opd: scheduler: ") + what);
    };
    sched::census c;
    index_t ready = 0;
    for (slot_t s = 0; s < sequences_.size(); ++s) {
        const sequence& q = sequences_[s];
        require((q.where != place::none) == ledger_.in_use(s),
                "a sequence is outstanding exactly while it has a permit");
        switch (q.where) {
        case place::none:
            continue;
        case place::waiting:
            ++c.waiting;
            break;
        case place::rollout: {
            ++c.rollout;
            const worker& w = workers_of(stage::rollout)[static_cast<std::size_t>(q.worker)];
            const lane& l = w.lanes[static_cast<std::size_t>(q.lane)];
            require(w.up && l.taken && l.sample == q.sample && l.attempt == q.attempt,
                    "a sequence in rollout has its lane");
            require(q.start <= version(), "no sequence starts in the future");
            break;
        }
        case place::queued:
            ++c.queued;
            break;
        case place::scoring:
            ++c.scoring;
            break;
        case place::ready:
            ++c.ready;
            ++ready;
            break;
        case place::training:
            ++c.training;
            break;
        }
        require(q.where < place::queued || (q.versions.oldest >= q.start && q.versions.oldest <= q.versions.newest &&
                                            q.versions.newest <= version() + (phase_ == phase::syncing)),
                "versions never decrease along a sequence");
    }
    require(c == census_, "the census counts what is there");
    require(totals_.admitted == c.outstanding() + totals_.consumed + totals_.failed,
            "admitted = waiting + rollout + queued + scoring + ready + training + consumed + failed");
    require(c.outstanding() == ledger_.outstanding() && ready == ledger_.ready_count(), "the ledger agrees");
    require(phase_ != phase::idle || training_.empty(), "an idle learner trains nothing");
    require(gate_open() == (phase_ == phase::idle || phase_ == phase::training),
            "the gate is closed from the end of an update to the end of its synchronisation");
    std::size_t scoring = 0;
    for (const job& j : jobs_) scoring += j.slots.size();
    require(static_cast<index_t>(scoring) == c.scoring, "every sequence in scoring is in one call");
    index_t idle_teachers = 0, calls = 0;
    for (const worker& w : workers_of(stage::teacher)) {
        idle_teachers += w.up && w.busy < w.slots;
        calls += w.busy;
    }
    require(finished_ || calls == static_cast<index_t>(jobs_.size()), "every teacher's calls are counted");
    require(idle_teachers_.size() == idle_teachers, "the teachers with vacant slots are listed");
    require(waiting_.size() == c.waiting, "every waiting sequence is listed once");
    require(static_cast<index_t>(training_.size()) == c.training, "every sequence in training is in the batch");
    index_t rolling = 0, lanes_kept = 0, late_ones = 0;
    for (const worker& w : workers_of(stage::rollout)) {
        index_t taken = 0;
        for (const lane& l : w.lanes) {
            taken += l.taken;
            rolling += l.taken && in_rollout({l.sample, l.slot, l.attempt, -1, -1});
        }
        require(taken == w.busy && (w.up || taken == 0), "a worker's lanes are counted, and a dead one has none");
        const auto within =
            std::count_if(w.lanes.begin(), w.lanes.begin() + w.slots, [](const lane& l) { return l.taken; });
        require(!w.up || static_cast<index_t>(w.vacant.size()) + within == w.slots, "a lane is taken or vacant");
        lanes_kept += usable(w) && !w.vacant.empty();
        late_ones += behind(w);
    }
    require(rolling == c.rollout, "every sequence in rollout has one lane");
    require(idle_lanes_.size() == lanes_kept, "the workers with vacant lanes are listed");
    require(phase_ != phase::syncing || behind_ == late_ones, "the workers that synchronise are counted");
    index_t queued = plan_.streaming ? queue_.size() : c.queued;
    if (!plan_.streaming) {
        index_t all = 0, in_queue = 0;
        for (const batch& b : batches_) {
            index_t unrolled = 0, unscored = 0;
            for (const slot_t s : b.slots) {
                unrolled += sequences_[s].where < place::queued;
                unscored += sequences_[s].where < place::ready;
            }
            require(unrolled == b.unrolled && unscored == b.unscored, "a batch counts what it waits for");
            all += static_cast<index_t>(b.slots.size());
            if (unrolled == 0)
                for (const slot_t s : b.slots) in_queue += sequences_[s].where == place::queued;
        }
        require(finished_ || all == c.outstanding(), "every sequence is in one batch");
        require(queue_.size() == in_queue, "what is queued is of batches that are rolled out");
    }
    require(queued == c.queued, "every queued sequence is listed once");
}

} // namespace opd::sched
