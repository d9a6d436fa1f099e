// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Workers: their lives begin and end, what they had is somebody else's then, and who misses a deadline is lost.
#pragma once

#include <algorithm>
#include <string>

#include "opd/sched/scheduler.hpp"

namespace opd::sched {

// What a worker says of a life that is over is late; of a later life than the present, that the present one is over.
// True: the event is of the present life, or a worker_up that begins one.
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
