// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The scheduler, first half: what an event changes, and what is due by the time of an event. What follows from that
// (what starts, what is scored and trained, when the version moves) is in scheduler.hpp.
#pragma once

#include "opd/sched/scheduler.hpp"

namespace opd::sched {

// --- events ---------------------------------------------------------------------------------------------------------

inline void scheduler::on(const event& e, double now, actions& out) {
    if (!(now >= now_ && now < forever))
        throw invalid_input("now", "is " + std::to_string(now) + " after " + std::to_string(now_) +
                                       ": time is finite and never decreases");
    const double before = std::exchange(now_, now);
    const bool held = plan_.automatic && held_back(), starved = plan_.automatic && learner_waits() && !held;
    const double idle = plan_.automatic ? teachers_idle() : 0, unused = plan_.automatic ? roster_.rollout_idle() : 0;
    const index_t queue = queue_.size();
    try {
        take(e, out);
    } catch (const invalid_input&) {
        now_ = before;
        throw;
    }
    if (plan_.automatic && before > -forever) ledger_.pass(now - before, held, starved, idle, queue, unused);
    if (e.what == event::kind::stop) return;
    expire(out);
    if (all_in_vain()) return end_as_failed(out);
    // while others are still at it, one more worker with the weights leads to nothing but what is due; there may be thousands
    if (e.what == event::kind::synced && phase_ == phase::syncing && behind_ > 0 && out.items.empty() && !flush_)
        return;
    pump(out);
}

inline void scheduler::take(const event& e, actions& out) {
    using kind = event::kind;
    if (e.from_worker()) {
        const detail::roster::worker* w = roster_.find(e.stage, e.worker);
        if ((!w || !w->up || w->incarnation != e.incarnation || e.what == kind::worker_up) && !of_present_life(e, out))
            return;
    }
    switch (e.what) {
    case kind::worker_up:
        on_worker_up(e, out);
        break;
    case kind::worker_down:
        end_life(e.stage, e.worker, out);
        break;
    case kind::rolled_out:
    case kind::rollout_failed:
    case kind::aborted:
    case kind::parked:
        on_reply(e, out);
        break;
    case kind::scored:
    case kind::score_failed:
        on_scored(e, out);
        break;
    case kind::learned:
        on_learned(e);
        break;
    case kind::learn_failed:
        if (!trains(e.job))
            ++totals_.late;
        else
            on_learn_failed(out);
        break;
    case kind::synced:
        on_synced(e, out);
        break;
    case kind::weights_lost:
        on_weights_lost(e, out);
        break;
    case kind::tick:
        break;
    case kind::pause:
        paused_ = true;
        break;
    case kind::resume:
        paused_ = false;
        break;
    case kind::park:
        on_park(e, out);
        break;
    case kind::resize:
        on_resize(e.count);
        break;
    case kind::close:
        closed_ = true;
        break;
    case kind::stop:
        on_stop(out);
        break;
    }
}

// What a worker says of a life that is over is late; of a later life than the present, that the present one is over. True: the
// event is of the present life, or a worker_up that begins one.
inline bool scheduler::of_present_life(const event& e, actions& out) {
    using kind = event::kind;
    if (e.worker < 0 || e.worker >= settings_.most_workers || e.incarnation == 0) // tables go by their numbers
        throw invalid_input("event", std::string(name_of(e.stage)) + " worker " + std::to_string(e.worker) +
                                         " in life " + std::to_string(e.incarnation) +
                                         ": workers count from 0, below settings.most_workers = " +
                                         std::to_string(settings_.most_workers) + ", and their lives from 1");
    if (e.stage == stage::learner && e.worker != 0) throw invalid_input("event", "there is one learner: worker 0");
    if (e.what == kind::worker_up && (e.slots < 0 || (e.stage == stage::learner && e.slots != 1)))
        throw invalid_input("event", std::string("worker_up of ") + name_of(e.stage) + " worker " +
                                         std::to_string(e.worker) + " with " + std::to_string(e.slots) + " slots" +
                                         (e.stage == stage::learner ? ": a learner has one" : ""));
    if (e.what == kind::worker_up && e.slots > settings_.most_slots)
        throw invalid_input("event",
                            std::string("worker_up of ") + name_of(e.stage) + " worker " + std::to_string(e.worker) +
                                " with " + std::to_string(e.slots) +
                                " slots, more than settings.most_slots = " + std::to_string(settings_.most_slots));
    if (e.what > kind::worker_down && !roster_.find(e.stage, e.worker)) {
        ++totals_.late; // of one that never came there is nothing to keep
        return false;
    }
    detail::roster::worker& w = roster_.reach(e.stage, e.worker);
    if (w.up && e.incarnation == w.incarnation) return true;
    if (e.incarnation <= w.incarnation) {
        ++(e.what == kind::worker_down && e.incarnation == w.incarnation ? totals_.duplicates : totals_.late);
        return false;
    }
    if (w.up) end_life(e.stage, e.worker, out);
    if (e.what == kind::worker_up) return true;
    w.incarnation = e.what == kind::worker_down ? e.incarnation : e.incarnation - 1; // its worker_up may still come
    totals_.late += e.what != kind::worker_down;
    return false;
}

inline void scheduler::on_worker_up(const event& e, actions& out) {
    const bool comes = !roster_.is_up(e.stage, e.worker);
    if (comes) roster_.come(e.stage, e.worker, e.incarnation);
    roster_.resize(e.stage, e.worker, e.slots);
    if (!comes || e.stage != stage::rollout) return;
    roster_.at(stage::rollout, e.worker).came = newest().version;
    ask_to_install(e.worker, out);
}

inline void scheduler::end_life(stage s, std::int32_t number, actions& out) {
    if (s == stage::rollout) {
        behind_ -= phase_ == phase::syncing && behind(roster_.at(s, number)); // nobody waits for the dead
        installs_.end(static_cast<std::uint32_t>(number));
    }
    std::vector<slot_t> running;
    roster_.go(s, number, [&](const detail::roster::lane& l) {
        aborts_.end(l.number);
        if (l.taken && in_rollout(l.slot, l.sample, l.attempt)) running.push_back(l.slot);
    });
    std::sort(running.begin(), running.end(),
              [&](slot_t a, slot_t b) { return sequences_[a].sample > sequences_[b].sample; });
    for (const slot_t i : running) rollout_fault(i, out, false); // each in front, so the order of admission is kept
    if (s == stage::teacher)
        for (std::size_t j = jobs_.size(); j-- > 0;)
            if (jobs_[j].worker == number) call_back(jobs_[j].number, false, out);
    if (s == stage::learner && trains(training_job_)) on_learn_failed(out, false);
}

// A reply to one attempt frees its lane, whoever still wants the result.
inline void scheduler::on_reply(const event& e, actions& out) {
    const ticket& t = e.ticket;
    const detail::roster::lane* lane =
        t.worker == e.worker && t.incarnation == e.incarnation ? roster_.lane_of(t) : nullptr;
    if (!lane) {
        ++totals_.duplicates;
        return;
    }
    const bool wanted_still = in_rollout(t.slot, t.sample, t.attempt), parks = e.what == event::kind::parked;
    const version_t newest = version() + (phase_ == phase::syncing || phase_ == phase::remaking);
    if (wanted_still && (parks || e.what == event::kind::rolled_out) && !(parks && e.versions.tokens == 0) &&
        (e.versions.oldest < ledger_.version_of(t.slot) || e.versions.newest > newest ||
         e.versions.oldest > e.versions.newest || e.versions.tokens < 0 || e.versions.tokens > detail::most_at_once))
        throw invalid_input("event", std::string(parks ? "parked" : "rolled_out") + ": sequence " +
                                         std::to_string(t.sample) + ": " + std::to_string(e.versions.tokens) +
                                         " tokens of versions " + std::to_string(e.versions.oldest) + " to " +
                                         std::to_string(e.versions.newest) + "; it was started at version " +
                                         std::to_string(ledger_.version_of(t.slot)) +
                                         " and the worker was sent version " + std::to_string(newest));
    if (wanted_still && (parks || e.what == event::kind::rolled_out) &&
        e.versions.tokens < sequences_[t.slot].versions.tokens)
        throw invalid_input("event", std::string(parks ? "parked" : "rolled_out") + ": sequence " +
                                         std::to_string(t.sample) + " has " + std::to_string(e.versions.tokens) +
                                         " tokens, but went on from " +
                                         std::to_string(sequences_[t.slot].versions.tokens));
    aborts_.end(lane->number);
    roster_.vacate_lane(t);
    if (!wanted_still) {
        totals_.late += e.what != event::kind::aborted && !parks;
        return;
    }
    sequence& q = sequences_[t.slot];
    if (parks) {
        ++totals_.parked;
        if (e.versions.tokens == 0) return restart(t.slot, false); // it has nothing to go on from
        q.versions = e.versions;
        park(t.slot);
        waiting_.push(t.slot); // who waits already has its turn first
        return;
    }
    if (e.what != event::kind::rolled_out) {
        rollout_fault(t.slot, out);
        return;
    }
    q.versions = e.versions;
    q.worker = q.lane = -1;
    attempts_.end(t.slot);
    ledger_.queued(t.slot);
    if (plan_.streaming)
        enqueue(t.slot, false);
    else
        one_less_unrolled(batches_[q.batch - first_batch_]);
}

// Whoever asks need not know what has become of it meanwhile.
inline void scheduler::on_park(const event& e, actions& out) {
    const ticket& t = e.ticket;
    const detail::roster::lane* lane = roster_.lane_of(t);
    if (!lane || !in_rollout(t.slot, t.sample, t.attempt) || aborts_.has(lane->number)) return;
    action& a = emit(out, action::kind::park);
    a.ticket = t, a.worker = t.worker, a.incarnation = t.incarnation;
    aborts_.begin(lane->number, now_);
}

inline void scheduler::on_scored(const event& e, actions& out) {
    const auto at = std::find_if(jobs_.begin(), jobs_.end(),
                                 [&](const job& j) { return j.number == e.job && j.worker == e.worker; });
    if (at == jobs_.end()) {
        ++totals_.duplicates;
        return;
    }
    job done = std::move(*at);
    jobs_.erase(at);
    roster_.call(e.worker, -1);
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
        if (place_of(s) != place::scoring) continue;
        ledger_.ready(s);
        if (!plan_.streaming) --batches_[sequences_[s].batch - first_batch_].unscored;
    }
    done.slots.clear();
    spare_.push_back(std::move(done.slots));
}

inline void scheduler::on_learned(const event& e) {
    if (!trains(e.job)) {
        ++(e.job < next_job_ && e.job != training_job_ ? totals_.late : totals_.duplicates);
        return;
    }
    if (e.count < 0 || e.count > detail::most_at_once)
        throw invalid_input("event", "learned: " + std::to_string(e.count) + " updates");
    ledger_.close_gate(); // first of all
    training_updates_ = e.count;
    training_failures_ = 0;
    phase_ = phase::leaving;
}

// The batch stays chosen until it is trained or given up: the learner may have learnt from it, and its answer was lost.
inline void scheduler::on_learn_failed(actions& out, bool charged) {
    training_job_ = 0; // given up: an answer to it is late
    totals_.preempted += !charged;
    const bool again = !charged || ++training_failures_ < settings_.learner_attempts;
    totals_.retries += again;
    if (again) return;
    training_failures_ = 0;
    if (training_.empty()) bore_no_fruit(stage::learner, plan_.batch);
    for (const slot_t s : std::exchange(training_, {})) give_up(s, failure::learner, out);
    // remaking: workers may have had the weights of version + 1: it comes, if with nothing learnt
    if (phase_ == phase::training) phase_ = phase::idle;
}

// What a worker was told while it installed these it has dropped, unless it came between that and its answer: it is told again.
inline void scheduler::on_synced(const event& e, actions& out) {
    detail::roster::worker& w = roster_.at(stage::rollout, e.worker);
    if (e.job >= next_job_)
        throw invalid_input("event", "rollout worker " + std::to_string(e.worker) + " installed weights of job " +
                                         std::to_string(e.job) + ", which is none");
    if (!(e.elasticity >= -1 && e.elasticity <= 1) && e.elasticity != untold)
        throw invalid_input("event", "an elasticity lies in [-1, 1], or is not told");
    const bool counts = e.job == newest().job, asked = installs_.has(static_cast<std::uint32_t>(e.worker));
    if (w.answers && e.job <= w.has && !(asked && e.job == w.told)) {
        if (w.again == 0 || e.job != w.again)
            ++totals_.duplicates;
        else
            w.again = 0;
        return;
    }
    if (plan_.automatic && e.elasticity != untold) ledger_.told(e.elasticity);
    const bool syncing = phase_ == phase::syncing;
    const bool was_behind = syncing && behind(w);
    installs_.end(static_cast<std::uint32_t>(e.worker));
    roster_.installed(e.worker, e.job, counts);
    if (syncing) behind_ += static_cast<index_t>(behind(w)) - static_cast<index_t>(was_behind);
    if (counts) return;
    if (w.awaited && was_behind) {
        w.again = target_.job;
        tell(e.worker, target_, out);
    } else if (!w.awaited && e.job < newest().job && newest().version < w.came + 2) {
        w.again = newest().job;
        ask_to_install(e.worker, out);
    }
}

// The source died before everyone had them: the update is made again, from the weights of the version and the same batch.
inline void scheduler::on_weights_lost(const event& e, actions& out) {
    gone_ = gone_ || e.job == weights_.job; // who has them keeps them; who has not waits for the next
    if ((phase_ != phase::leaving && phase_ != phase::syncing) || e.job != training_job_) {
        ++totals_.late;
        return;
    }
    ++totals_.lost_weights;
    training_job_ = 0;
    if (std::exchange(phase_, phase::remaking) != phase::syncing) return;
    std::vector<std::uint32_t> newcomers;
    installs_.each([&](std::uint32_t w) { newcomers.push_back(w); });
    for (const std::uint32_t w : newcomers)
        ask_to_install(static_cast<std::int32_t>(w), out); // what it was told is gone
}

inline void scheduler::on_resize(index_t permits) {
    if (!plan_.streaming || traits_of(plan_.policy).own_admission)
        throw invalid_input("event", "resize: only async schedules with permits have a number of permits to change");
    if (plan_.automatic) throw invalid_input("event", "resize: permits are automatic: the scheduler chooses how many");
    if (permits < 1) throw invalid_input("event", "resize: permits must be at least batch");
    sched::settings changed = settings_;
    std::get<async>(changed.schedule).outstanding = permits;
    plan_of(changed); // throws where it cannot work
    ledger_.resize(permits);
}

inline void scheduler::on_stop(actions& out) {
    closed_ = true;
    if (finished_) return;
    if (phase_ == phase::leaving || phase_ == phase::syncing) { // the update was made
        target_ = {version() + 1, training_job_};
        complete_step(out);
    }
    for (slot_t s = 0; s < sequences_.size(); ++s) {
        if (place_of(s) == place::none) continue;
        if (place_of(s) == place::rollout) abort(ticket_of(s), out);
        give_up(s, failure::stopped, out);
    }
    jobs_.clear();
    training_.clear();
    training_job_ = 0;
    batches_.clear();
    phase_ = phase::idle;
    ledger_.reopen_gate();
    finish(out);
}

// --- what is due ----------------------------------------------------------------------------------------------------

inline double scheduler::next_deadline() const {
    if (finished_) return forever;
    double t = std::min({attempts_.next(settings_.rollout_deadline), aborts_.next(settings_.abort_deadline),
                         installs_.next(settings_.sync_deadline)});
    if (plan_.streaming && !queue_.empty() && !flush_) t = std::min(t, due(queued_since_, settings_.teacher_flush));
    if (!jobs_.empty()) t = std::min(t, due(jobs_.front().since, settings_.teacher_deadline));
    if (trains(training_job_)) t = std::min(t, due(training_since_, settings_.learner_deadline));
    if (phase_ == phase::syncing) t = std::min(t, due(syncing_since_, settings_.sync_deadline));
    return t;
}

inline void scheduler::expire(actions& out) {
    if (!limits_ || finished_ || next_deadline() > now_) return;
    if (!queue_.empty() && due(queued_since_, settings_.teacher_flush) <= now_) flush_ = true;
    while (attempts_.next(settings_.rollout_deadline) <= now_) {
        const slot_t s = attempts_.first();
        abort(ticket_of(s), out);
        rollout_fault(s, out);
    }
    while (aborts_.next(settings_.abort_deadline) <= now_) // charged when it was aborted; parking is no fault
        lose(stage::rollout, roster_.lane_at(aborts_.first()).first, out);
    while (!jobs_.empty() && due(jobs_.front().since, settings_.teacher_deadline) <= now_) {
        const std::uint64_t late = jobs_.front().number;
        lose(stage::teacher, jobs_.front().worker, out, [&] { call_back(late, true, out); });
    }
    if (trains(training_job_) && due(training_since_, settings_.learner_deadline) <= now_)
        lose(stage::learner, 0, out, [&] { on_learn_failed(out); });
    while (installs_.next(settings_.sync_deadline) <= now_)
        lose(stage::rollout, static_cast<std::int32_t>(installs_.first()), out);
    if (phase_ == phase::syncing && due(syncing_since_, settings_.sync_deadline) <= now_)
        for (std::size_t w = 0; w < roster_.of(stage::rollout).size(); ++w)
            if (behind(roster_.of(stage::rollout)[w])) lose(stage::rollout, static_cast<std::int32_t>(w), out);
}

// `charge`: what it was late with; all else that it had is lost with it.
template <class Charge>
void scheduler::lose(stage s, std::int32_t number, actions& out, Charge&& charge) {
    ++totals_.lost_workers;
    action& a = emit(out, action::kind::lost);
    a.stage = s, a.worker = number, a.incarnation = incarnation_of(s, number);
    charge();
    end_life(s, number, out);
}

} // namespace opd::sched
