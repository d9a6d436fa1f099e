// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What an event leads to: the worker's message or the driver's wish is taken, then what is due by its time, then
// whatever may follow in any stage. And how a run ends.
#pragma once

#include <algorithm>
#include <string>
#include <utility>

#include "opd/sched/scheduler.hpp"

namespace opd::sched {

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
    // while others are still at it, one more worker with the weights leads to nothing but what is due; there may be
    // thousands
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
    case kind::payload_lost:
        on_payload_lost(e, out);
        break;
    }
}

inline void scheduler::pump(actions& out) {
    if (finished_) return;
    while (synchronise(out)) {}
    if (roster_.joining() > 0 && nobody_rolls()) wake_resting(out);
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

inline void scheduler::finish(actions& out) {
    if (finished_ || phase_ != phase::idle || ledger_.outstanding() > 0) return;
    if (!closed_ && wanted() > 0) return;
    finished_ = true;
    emit(out, action::kind::finished);
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

inline void scheduler::end_as_failed(actions& out) {
    failed_ = true;
    on_stop(out);
}

} // namespace opd::sched
