// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Synchronising: published weights go to the rollout workers, the version moves and the permits return once all have
// them; who joins is told, too; what was published and is lost is made again.
#pragma once

#include <algorithm>
#include <string>
#include <utility>

#include "opd/sched/scheduler.hpp"

namespace opd::sched {

// True when a step was completed.
inline bool scheduler::synchronise(actions& out) {
    if (phase_ == phase::leaving) {
        // weights that are made again went out before, when nothing ran: some have them, so nothing may start
        const bool again = target_.version > version();
        if (plan_.update == weight_update::finish_first && !again) {
            if (!plan_.streaming) start_waiting(out); // admitted before the update: its version is this one
            if (where().rollout > 0 || (!plan_.streaming && where().waiting > 0)) return false;
        }
        publish(out);
    }
    if (phase_ != phase::syncing || behind_ > 0) return false;
    complete_step(out);
    return true;
}

// All rollout workers are told to install the new weights.
inline void scheduler::publish(actions& out) {
    if (plan_.update == weight_update::abort)
        for (slot_t s = 0; s < sequences_.size(); ++s)
            if (place_of(s) == place::rollout) {
                abort(ticket_of(s), out);
                ++totals_.restarts;
                restart(s, false);
            }
    if (plan_.streaming && plan_.update != weight_update::keep)
        for (const slot_t s : waiting_) // a prefix, parked or of before a crash, would go on under other weights
            if (ledger_.version_of(s) >= 0) {
                forget_prefix(s);
                ++totals_.restarts;
            }
    phase_ = phase::syncing;
    syncing_since_ = now_;
    target_ = {version() + 1, training_job_};
    const auto count =
        static_cast<std::int32_t>(roster_.joining() > 0 || gone_ ? roster_.of(stage::rollout).size() : 0);
    for (std::int32_t w = 0; w < count; ++w) {
        detail::roster::worker& x = roster_.at(stage::rollout, w);
        if (rests(w, x)) roster_.await(w);
        if (!x.up || x.answers || installs_.has(static_cast<std::uint32_t>(w))) continue;
        installs_.begin(static_cast<std::uint32_t>(w), now_); // it came when there was nothing to install
        x.told = target_.job;
    }
    behind_ = roster_.awaited();
    tell(-1, target_, out);
}

inline void scheduler::complete_step(actions& out) {
    phase_ = phase::idle;
    training_job_ = 0;
    weights_ = target_;
    gone_ = false;
    if (!training_.empty()) fruitless_ = 0;
    action& a = emit(out, action::kind::step);
    a.version = target_.version;
    a.job = target_.job;
    a.first = static_cast<std::uint32_t>(out.consumed.size());
    a.count = static_cast<std::uint32_t>(training_.size());
    for (const slot_t s : training_) {
        out.consumed.push_back({ticket_of(s), ledger_.version_of(s), sequences_[s].versions});
        totals_.consumed_tokens += sequences_[s].versions.tokens;
    }
    ledger_.advance(training_);
    totals_.consumed += static_cast<std::int64_t>(training_.size());
    totals_.updates += std::exchange(training_updates_, 0);
    totals_.empty_batches += training_.empty();
    totals_.short_batches += static_cast<index_t>(training_.size()) < plan_.batch;
    training_.clear();
    if (!plan_.streaming) {
        batches_.pop_front();
        ++first_batch_;
    }
    end_stale(out);
}

// What the step has made too old, as the policy says.
inline void scheduler::end_stale(actions& out) {
    std::vector<slot_t> stale;
    ledger_.stale(stale);
    for (const slot_t s : stale) {
        const place where = place_of(s);
        if (where == place::rollout) abort(ticket_of(s), out);
        if (where == place::queued) queue_.erase(s);
        if (where == place::scoring)
            for (job& j : jobs_) std::erase(j.slots, s);
        if (traits_of(plan_.policy).stale == stale_end::given_up) {
            give_up(s, failure::stale, out);
        } else {
            if (where == place::ready) ledger_.unready(s);
            if (where == place::waiting) waiting_.erase(s); // it has tokens: was parked, or is of an earlier process
            ++totals_.restarts;
            restart(s, true);
        }
    }
}

inline std::uint64_t scheduler::needed_from() const {
    std::uint64_t from = weights_.job;
    installs_.each(
        [&](std::uint32_t w) { from = std::min(from, roster_.at(stage::rollout, static_cast<std::int32_t>(w)).told); });
    return from;
}

inline void scheduler::tell(std::int32_t number, const sched::weights& what, actions& out) {
    action& a = emit(out, action::kind::sync);
    a.worker = number;
    if (number >= 0) a.incarnation = incarnation_of(stage::rollout, number);
    a.version = what.version;
    a.job = what.job;
}

inline void scheduler::ask_to_install(std::int32_t w, actions& out) {
    installs_.end(static_cast<std::uint32_t>(w));
    if (gone_ && phase_ != phase::syncing) return; // there is nothing to install before the next publication
    installs_.begin(static_cast<std::uint32_t>(w), now_);
    roster_.at(stage::rollout, w).told = newest().job;
    tell(w, newest(), out);
}

// What a worker was told while it installed these it has dropped, unless it came between that and its answer: it is
// told again.
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

// Nobody is left whose work could lead to the publication that they wait for.
inline void scheduler::wake_resting(actions& out) {
    const auto count = static_cast<std::int32_t>(roster_.of(stage::rollout).size());
    for (std::int32_t w = 0; w < count; ++w) {
        detail::roster::worker& x = roster_.at(stage::rollout, w);
        if (!rests(w, x) || x.has >= newest().job) continue; // weights of a lower job it would not install
        x.came = newest().version;
        ask_to_install(w, out);
    }
}

// The source died before everyone had them: the update is made again, from the weights of the version and the same
// batch.
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

} // namespace opd::sched
