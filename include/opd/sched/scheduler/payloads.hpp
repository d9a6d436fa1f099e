// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What was drawn of a sequence, or its score, is lost with who held it: the sequence is drawn again, under its permit
// and the present version, so its lag only shrinks. It is no fault of the sequence, but too many losses
// (settings.payload_attempts) give it up: a store that keeps nothing must not keep the run for ever.
//
//   waiting, rollout       it has tokens that were parked: those are forgotten
//   queued, scoring, ready it waits for a lane again
//   training               a learner that was asked may have it, or have learnt from it; only its own word counts,
//                          which names the call. Then what is left of the batch is ready again, in front. If workers
//                          may have had the next version's weights (remaking), that version comes, of the rest alone,
//                          unless the scheduler dies before: then nobody has them
//
// The ticket names the attempt: what is said of another one is late.
#pragma once

#include <algorithm>
#include <span>
#include <string>
#include <vector>

#include "opd/sched/scheduler.hpp"

namespace opd::sched {

inline void scheduler::on_payload_lost(const event& e, actions& out) {
    if (e.job >= next_job_) throw invalid_input("event", "payload_lost: call " + std::to_string(e.job) + " is none");
    const std::span<const ticket> tickets = e.tickets.empty() ? std::span(&e.ticket, 1) : e.tickets;
    std::vector<slot_t> gone;
    bool answers = false; // the learner, which has learnt from nothing
    for (const ticket& t : tickets) {
        const bool known =
            ledger_.in_use(t.slot) && sequences_[t.slot].sample == t.sample && sequences_[t.slot].attempt == t.attempt;
        const place at = known ? place_of(t.slot) : place::none;
        const bool has = at >= place::queued || (known && sequences_[t.slot].versions.tokens > 0);
        if (!has || (at == place::training && !trains(e.job))) {
            ++totals_.late;
            continue;
        }
        answers = answers || at == place::training;
        gone.push_back(t.slot);
    }
    if (answers) {
        training_job_ = 0;
        if (phase_ == phase::training) {
            put_training_back();
            phase_ = phase::idle;
        }
    }
    std::sort(gone.begin(), gone.end(),
              [&](slot_t a, slot_t b) { return sequences_[a].sample > sequences_[b].sample; });
    gone.erase(std::unique(gone.begin(), gone.end()), gone.end());
    for (const slot_t s : gone) draw_again(s, out); // each in front, so the order of admission is kept
}

inline void scheduler::draw_again(slot_t s, actions& out) {
    sequence& q = sequences_[s];
    const place at = place_of(s);
    ++totals_.lost_payloads;
    if (at == place::scoring)
        for (job& j : jobs_) std::erase(j.slots, s);
    if (at == place::training) std::erase(training_, s);
    if (++q.payload_losses >= settings_.payload_attempts) {
        if (at == place::rollout) abort(ticket_of(s), out);
        return give_up(s, failure::rollout, out);
    }
    ++totals_.retries;
    if (at == place::rollout) { // it has yet to fail; then it starts from nothing
        q.versions = {};
        return;
    }
    if (at == place::waiting) return forget_prefix(s);
    if (at == place::training) {
        ledger_.put_back(std::span(&s, 1));
        if (!plan_.streaming) into_next_batch(s);
    }
    if (!plan_.streaming) {
        batch& b = batches_[q.batch - first_batch_];
        b.unscored += at >= place::ready;
        one_more_unrolled(b);
    } else if (at == place::queued) {
        queue_.erase(s);
    }
    if (at >= place::ready) ledger_.unready(s);
    if (at == place::training && plan_.streaming) {
        q.versions = {};
        q.home = -1;
        ledger_.admitted_again(s);
        return waiting_.push(s);
    }
    restart(s, true);
}

// Whole batches: its own goes without it.
inline void scheduler::into_next_batch(slot_t s) {
    std::erase(batches_.front().slots, s);
    if (batches_.size() == 1) batches_.emplace_back();
    batches_[1].slots.push_back(s);
    ++sequences_[s].batch;
}

// Undone at depth 0 where another process goes on: nobody has weights that were made without it any more, and nothing
// closes the gate, so it would start before its step and be consumed a version too late.
inline void scheduler::into_own_batch() {
    if (batches_.size() <= static_cast<std::size_t>(plan_.depth) + 1) return;
    batch& own = batches_[0];
    const batch& next = batches_[1];
    for (const slot_t s : next.slots) {
        --sequences_[s].batch;
        own.slots.push_back(s);
    }
    own.unrolled += next.unrolled, own.unscored += next.unscored;
    batches_.pop_back();
}

} // namespace opd::sched
