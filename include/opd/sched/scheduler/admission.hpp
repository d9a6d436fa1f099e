// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Admission: how many sequences may still come, who takes a permit, and which of those that wait for a lane starts
// next, where.
#pragma once

#include <algorithm>
#include <limits>
#include <variant>

#include "opd/sched/scheduler.hpp"

namespace opd::sched {

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
    // less than a batch where the last step left some of its own to the next
    const index_t free = ledger_.free() / settings_.group * settings_.group;
    if (free == 0) return;
    if (!plan_.overlap)
        for (const batch& b : batches_)
            if (b.unscored > 0) return;
    batch b;
    for (index_t n = std::min({plan_.batch, wanted(), free}); n > 0; --n) {
        const slot_t s = admit();
        sequences_[s].batch = next;
        b.slots.push_back(s);
        waiting_.push(s);
    }
    b.unrolled = b.unscored = static_cast<index_t>(b.slots.size());
    batches_.push_back(std::move(b));
}

inline slot_t scheduler::admit() {
    const slot_t s = ledger_.admit();
    if (s >= sequences_.size()) sequences_.resize(s + std::size_t{1});
    sequences_[s] = {};
    sequences_[s].sample = cursor_++;
    ++totals_.admitted;
    return s;
}

inline void scheduler::start_waiting(actions& out) {
    if (paused_) return;
    while (roster_.any_lane() && start_one(out, true)) {}
}

// There is a lane. Starts the first that waits whose prompt's worker has one, or whose prompt nobody answers;
// `anywhere`: else the first of all. False: there is none.
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

} // namespace opd::sched
