// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The scheduler's state as bytes, and how it goes on in another process.
#pragma once

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

#include "opd/sched/scheduler.hpp"

namespace opd::sched {

inline std::string scheduler::snapshot() const {
    archive_writer w;
    w(plan_.streaming, plan_.overlap, plan_.batch, plan_.depth, plan_.policy, plan_.update, plan_.concurrency,
      settings_.group, permits_chosen());
    const_cast<scheduler*>(this)->fields(w);
    return seal(std::move(w.bytes));
}

inline scheduler scheduler::restore(const sched::settings& s, std::string_view snapshot) {
    scheduler r(s);
    archive_reader reader(unseal(snapshot));
    const auto same = [&](const char* name, auto now) {
        auto then = now;
        reader(then);
        if (then != now) throw invalid_input("snapshot", std::string("is of another ") + name);
    };
    same("kind of schedule", r.plan_.streaming);
    same("kind of schedule", r.plan_.overlap);
    same("batch", r.plan_.batch);
    same("schedule.k or schedule.tau", r.plan_.depth);
    same("schedule.policy", r.plan_.policy);
    same("schedule.update", r.plan_.update);
    same("schedule.concurrency", r.plan_.concurrency);
    same("group", r.settings_.group);
    index_t permits = 0;
    reader(permits);
    r.fields(reader);
    if (permits != r.permits_chosen())
        r.ledger_.resize(r.plan_.automatic ? std::clamp(r.ledger_.permits(), r.plan_.least, r.plan_.most)
                                           : r.plan_.permits);
    if (!reader.done()) throw invalid_input("snapshot", "is longer than the state it describes");
    detail::count_range counted, failures{.most = std::numeric_limits<std::int32_t>::max() / 2};
    r.totals_.fields(counted);
    counted(r.cursor_, r.next_job_, r.training_updates_, r.fruitless_);
    failures(r.training_failures_);
    for (const sequence& q : r.sequences_) failures(q.rollout_failures, q.teacher_failures, q.payload_losses);
    detail::needs(counted.holds && failures.holds, "a count is none");
    try {
        r.check_invariants();
    } catch (const std::logic_error& e) {
        detail::needs(false, e.what());
    }
    const std::vector<slot_t> order = r.ledger_.order();
    const auto earlier = [&](slot_t a, slot_t b) { return r.sequences_[a].batch < r.sequences_[b].batch; };
    detail::needs(r.plan_.streaming || std::is_sorted(order.begin(), order.end(), earlier),
                  "a batch is to be consumed before an earlier one");
    if (s.teacher_flush == 0 && r.plan_.streaming && !r.queue_.empty()) r.flush_ = true; // there was a time to wait
    return r;
}

inline void scheduler::abandon_workers(bool keep_prefixes, bool reopen) {
    if (reopen) paused_ = closed_ = finished_ = failed_ = false;
    if (finished_) return;
    // The process that died may have given out numbers after the snapshot, and answers to those may still come.
    next_job_ += std::uint64_t{1} << 32;
    first_attempt_ += std::uint32_t{1} << 16;
    fruitless_ = 0; // what failed may have been mended, and weights that were lost are there again
    gone_ = false;
    now_ = -forever; // the clock may be another's
    queued_since_ = forever, training_since_ = syncing_since_ = 0;
    ledger_.forget_time();
    attempts_.clear();
    aborts_.clear();
    installs_.clear();
    if (phase_ != phase::idle) put_training_back();
    into_own_batch();
    phase_ = phase::idle;
    training_job_ = 0;
    target_ = weights_;
    ledger_.reopen_gate();
    roster_.clear();
    for (sequence& q : sequences_) q.home = -1;
    for (std::size_t j = jobs_.size(); j-- > 0;)
        for (std::size_t i = jobs_[j].slots.size(); i-- > 0;) {
            const slot_t s = jobs_[j].slots[i];
            ledger_.queued(s);
            if (may_be_scored(s)) queue_.push_front(s);
        }
    jobs_.clear();
    for (const slot_t s : waiting_) // nobody has those tokens, or they are of the version that never came
        if (ledger_.version_of(s) >= 0 && (!keep_prefixes || sequences_[s].versions.newest > version()))
            forget_prefix(s);
    // in the order of admission, in front of what waits already
    std::vector<slot_t> running;
    for (slot_t s = 0; s < sequences_.size(); ++s) {
        const place where = place_of(s);
        const bool ahead =
            where > place::rollout && sequences_[s].versions.newest > version(); // only while sequences stream
        if (ahead && where == place::queued) queue_.erase(s);
        if (ahead && where == place::ready) ledger_.unready(s);
        if (ahead || where == place::rollout) running.push_back(s);
    }
    std::sort(running.begin(), running.end(),
              [&](slot_t a, slot_t b) { return sequences_[a].sample > sequences_[b].sample; });
    for (const slot_t s : running) {
        if (!keep_prefixes || place_of(s) != place::rollout) {
            restart(s, true);
            continue;
        }
        park(s);
        waiting_.push_front(s);
    }
    flush_ = !queue_.empty(); // how long they have waited nobody knows
}

} // namespace opd::sched
