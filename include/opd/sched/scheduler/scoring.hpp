// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Scoring: what is rolled out is queued, goes to a teacher in calls, and is ready once it is scored; what is not is
// queued again.
#pragma once

#include <algorithm>
#include <utility>

#include "opd/sched/scheduler.hpp"

namespace opd::sched {

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

// Whole batches wait until nothing of them is left to be rolled out.
inline bool scheduler::may_be_scored(slot_t s) const {
    return plan_.streaming || batches_[sequences_[s].batch - first_batch_].unrolled == 0;
}

// Once none is left the batch goes to the teacher.
inline void scheduler::one_less_unrolled(batch& b) {
    if (--b.unrolled > 0) return;
    for (const slot_t s : b.slots)
        if (place_of(s) == place::queued) queue_.push(s);
}

// One of it is to be rolled out again: what has not gone to the teacher waits for it.
inline void scheduler::one_more_unrolled(batch& b) {
    if (b.unrolled++ > 0) return;
    for (const slot_t s : b.slots)
        if (place_of(s) == place::queued) queue_.erase(s);
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

// A teacher's call is over without an answer: its sequences are queued again, in front, in order.
inline void scheduler::call_back(std::uint64_t number, bool charged, actions& out) {
    const auto at = std::find_if(jobs_.begin(), jobs_.end(), [&](const job& j) { return j.number == number; });
    const job gone = std::move(*at);
    jobs_.erase(at);
    for (std::size_t i = gone.slots.size(); i-- > 0;) teacher_fault(gone.slots[i], out, charged);
}

inline void scheduler::teacher_fault(slot_t s, actions& out, bool charged) {
    totals_.preempted += !charged;
    if (charged && ++sequences_[s].teacher_failures >= settings_.teacher_attempts) {
        give_up(s, failure::teacher, out);
        return;
    }
    ++totals_.retries;
    ledger_.queued(s);
    if (may_be_scored(s)) enqueue(s, true);
}

} // namespace opd::sched
