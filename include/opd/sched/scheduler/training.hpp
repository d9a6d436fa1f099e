// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Training: the staleness policy's batch, or the next whole one, goes to the learner, which answers that it
// published, or failed.
#pragma once

#include <algorithm>
#include <string>
#include <utility>

#include "opd/sched/scheduler.hpp"

namespace opd::sched {

// A whole batch of which all failed is trained too, without sequences: who installs a version must find it published,
// and only the learner publishes.
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
    const bool all_started =
        first_batch_ + batches_.size() > ahead || closed_ || wanted() == 0 || ledger_.free() < settings_.group;
    if (!all_started) return false;
    if (!plan_.overlap)
        for (const batch& b : batches_)
            if (b.unscored > 0) return false;
    // what was admitted first, in the order of admission, is this batch
    return ledger_.pick(static_cast<index_t>(batches_.front().slots.size()), training_);
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

inline void scheduler::put_training_back() {
    ledger_.put_back(training_);
    training_.clear();
}

} // namespace opd::sched
