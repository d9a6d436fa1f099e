// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The scheduler's invariants, recounted from scratch: for tests and simulations.
#pragma once

#include <algorithm>
#include <stdexcept>
#include <string>

#include "opd/sched/scheduler.hpp"

namespace opd::sched {

inline void scheduler::check_invariants() const {
    const auto require = [](bool holds, const char* what) {
        if (!holds) throw std::logic_error(std::string("opd: scheduler: ") + what);
    };
    sched::census c;
    for (slot_t s = 0; s < ledger_.slots(); ++s) {
        const place at = place_of(s);
        if (at == place::none) continue;
        ++c[at];
        const sequence& q = sequences_[s];
        const version_t start = ledger_.version_of(s);
        require(start <= version() && (start >= 0 || at == place::waiting), "who runs has started, not in the future");
        require(at == place::rollout || q.worker == -1, "a worker is named while it rolls out");
        require(at < place::queued ||
                    (q.versions.oldest >= start && q.versions.oldest <= q.versions.newest &&
                     q.versions.newest <= version() + (phase_ == phase::syncing || phase_ == phase::remaking)),
                "versions never decrease along a sequence");
    }
    require(c == where(), "the census counts what is there");
    require(totals_.admitted == c.outstanding() + totals_.consumed + totals_.failed,
            "admitted = waiting + rollout + queued + scoring + ready + training + consumed + failed");
    require(phase_ != phase::idle || training_.empty(), "an idle learner trains nothing");
    require(gate_open() == (phase_ == phase::idle || phase_ == phase::training),
            "the gate is closed from the end of an update to the end of its synchronisation");
    require(weights_.version == version(), "the version's weights have a name");
    std::size_t scoring = 0;
    for (const job& j : jobs_) scoring += j.slots.size();
    require(static_cast<index_t>(scoring) == c.scoring, "every sequence in scoring is in one call");
    index_t calls = 0;
    for (const auto& w : roster_.of(stage::teacher)) calls += w.busy;
    require(finished_ || calls == static_cast<index_t>(jobs_.size()), "every teacher's calls are counted");
    require(waiting_.size() == c.waiting, "every waiting sequence is listed once");
    require(static_cast<index_t>(training_.size()) == c.training, "every sequence in training is in the batch");
    roster_.check(require);
    index_t rolling = 0, late_ones = 0;
    for (const auto& w : roster_.of(stage::rollout)) {
        for (const auto& l : w.lanes) rolling += l.taken && in_rollout(l.slot, l.sample, l.attempt);
        late_ones += behind(w);
        require(!gate_open() || finished_ || !w.current || w.has == weights_.job,
                "who is current has the version's weights");
    }
    require(rolling == c.rollout, "every sequence in rollout has one lane");
    require(phase_ != phase::syncing || behind_ == late_ones, "the workers that synchronise are counted");
    index_t queued = plan_.streaming ? queue_.size() : c.queued;
    if (!plan_.streaming) {
        index_t all = 0, in_queue = 0;
        for (const batch& b : batches_) {
            index_t unrolled = 0, unscored = 0;
            for (const slot_t s : b.slots) {
                unrolled += place_of(s) < place::queued;
                unscored += place_of(s) < place::ready;
            }
            require(unrolled == b.unrolled && unscored == b.unscored, "a batch counts what it waits for");
            all += static_cast<index_t>(b.slots.size());
            if (unrolled == 0)
                for (const slot_t s : b.slots) in_queue += place_of(s) == place::queued;
        }
        require(finished_ || all == c.outstanding(), "every sequence is in one batch");
        require(queue_.size() == in_queue, "what is queued is of batches that are rolled out");
    }
    require(queued == c.queued, "every queued sequence is listed once");
}

} // namespace opd::sched
