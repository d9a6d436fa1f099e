// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Rollout: an attempt starts on a lane, and is answered, aborted or parked; what fails waits again.
#pragma once

#include <string>

#include "opd/sched/scheduler.hpp"

namespace opd::sched {

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

inline void scheduler::abort(const ticket& t, actions& out) {
    action& a = emit(out, action::kind::abort);
    a.ticket = t, a.worker = t.worker, a.incarnation = t.incarnation;
    if (const auto* l = roster_.lane_of(t))
        aborts_.begin(l->number, now_); // whatever the deadline: a restore may set one
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

} // namespace opd::sched
