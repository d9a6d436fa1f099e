// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The scheduler's invariants, recounted from scratch: for tests, simulations and snapshots that are restored.
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
    const slot_t slots = ledger_.slots();
    require(sequences_.size() == slots, "every permit has room for its sequence");
    require((first_attempt_ & 0xffff) == 0, "lives of the scheduler count in the upper half of an attempt");
    sched::census c;
    std::vector<sample_t> samples;
    for (slot_t s = 0; s < slots; ++s) {
        const place at = place_of(s);
        if (at == place::none) continue;
        ++c[at];
        const sequence& q = sequences_[s];
        const version_t start = ledger_.version_of(s);
        samples.push_back(q.sample);
        require((q.attempt >> 16) <= (first_attempt_ >> 16), "attempts are numbered by lives of the scheduler");
        require(start <= version() && (start >= 0 || at == place::waiting), "who runs has started, not in the future");
        require(at == place::rollout ? roster_.find(stage::rollout, q.worker) && roster_.lane_of(ticket_of(s))
                                     : q.worker == -1,
                "a worker is named while it rolls out, and has a lane for it");
        require(at < place::queued ||
                    (q.versions.oldest >= start && q.versions.oldest <= q.versions.newest && q.versions.tokens >= 0 &&
                     q.versions.tokens <= detail::most_at_once &&
                     q.versions.newest <= version() + (phase_ == phase::syncing || phase_ == phase::remaking)),
                "versions never decrease along a sequence");
    }
    std::sort(samples.begin(), samples.end());
    require(std::adjacent_find(samples.begin(), samples.end()) == samples.end() &&
                (samples.empty() || samples.back() < cursor_),
            "a sequence was admitted, and is there once");
    require(c == where(), "the census counts what is there");
    require(ledger_.permits_are_sound(), "automatic permits lie between B and (tau + 1) B");
    require(ledger_.rule_is_sound(), "what automatic permits follow, times, counts and probes, can be");
    require(totals_.admitted == c.outstanding() + totals_.consumed + totals_.failed,
            "admitted = waiting + rollout + queued + scoring + ready + training + consumed + failed");
    require(phase_ != phase::idle || training_.empty(), "an idle learner trains nothing");
    require(gate_open() == (phase_ == phase::idle || phase_ == phase::training),
            "the gate is closed from the end of an update to the end of its synchronisation");
    require(weights_.version == version() && weights_.job < next_job_, "the version's weights have a name");
    require(!finished_ || (phase_ == phase::idle && c.outstanding() == 0), "nothing is outstanding after the end");
    require(!failed_ || finished_, "a run that has failed is over");
    require(training_job_ < next_job_ && (phase_ == phase::training || phase_ == phase::remaking ||
                                          (training_job_ == 0) == (phase_ == phase::idle)),
            "an update has a job, unless it is to be asked for again");
    require(!trains(training_job_) || can_train(), "a learner that trains is there");
    require(phase_ != phase::syncing || target_ == sched::weights{version() + 1, training_job_},
            "the next version's weights are installed");
    std::vector<bool> listed(slots);
    const auto names = [&](const auto& list, place p) { // with the sizes: each that is there, once
        for (const slot_t s : list) {
            require(place_of(s) == p && !listed[s], "a sequence is listed once, where it is");
            listed[s] = true;
        }
    };
    std::size_t scoring = 0;
    std::uint64_t before = 0;
    const auto& teachers = roster_.of(stage::teacher);
    std::vector<std::int32_t> calls(teachers.size());
    for (const job& j : jobs_) {
        require(roster_.find(stage::teacher, j.worker) && j.number > before && j.number < next_job_,
                "calls are made in order, of teachers");
        before = j.number;
        ++calls[static_cast<std::size_t>(j.worker)];
        scoring += j.slots.size();
        names(j.slots, place::scoring);
    }
    require(static_cast<index_t>(scoring) == c.scoring, "every sequence in scoring is in one call");
    for (std::size_t w = 0; w < calls.size(); ++w)
        require(teachers[w].busy == calls[w] || (finished_ && teachers[w].busy > calls[w]),
                "every teacher's calls are counted");
    names(waiting_, place::waiting), names(queue_, place::queued), names(training_, place::training);
    require(waiting_.size() == c.waiting, "every waiting sequence is listed once");
    require(static_cast<index_t>(training_.size()) == c.training, "every sequence in training is in the batch");
    attempts_.each([&](slot_t s) { require(place_of(s) == place::rollout, "a deadline is of what is in rollout"); });
    installs_.each([&](std::uint32_t w) {
        const auto& x = roster_.at(stage::rollout, static_cast<std::int32_t>(w));
        require(x.up && !x.awaited, "a deadline is of who installs and is not waited for");
    });
    roster_.check(require);
    index_t rolling = 0, late_ones = 0;
    for (const auto& w : roster_.of(stage::rollout)) {
        for (const auto& l : w.lanes) {
            rolling += l.taken && in_rollout(l.slot, l.sample, l.attempt);
            const bool outstanding = ledger_.in_use(l.slot) && sequences_[l.slot].sample == l.sample;
            require(!l.taken || (l.sample < cursor_ && (!outstanding || l.attempt <= sequences_[l.slot].attempt)),
                    "a lane is kept by an attempt that was made");
        }
        late_ones += behind(w);
        require(!gate_open() || finished_ || !w.current || w.has == weights_.job,
                "who is current has the version's weights");
    }
    require(rolling == c.rollout, "every sequence in rollout has one lane");
    require(phase_ != phase::syncing || behind_ == late_ones, "the workers that synchronise are counted");
    index_t queued = plan_.streaming ? queue_.size() : c.queued;
    if (!plan_.streaming) {
        require(first_batch_ == static_cast<std::uint64_t>(version()), "a step is a batch");
        require(phase_ == phase::idle || !batches_.empty(), "a batch is trained");
        index_t all = 0, in_queue = 0;
        listed.assign(slots, false);
        for (std::size_t i = 0; i < batches_.size(); ++i) {
            const batch& b = batches_[i];
            index_t unrolled = 0, unscored = 0;
            for (const slot_t s : b.slots) {
                require(ledger_.in_use(s) && !listed[s] && sequences_[s].batch == first_batch_ + i,
                        "a sequence is in its batch");
                listed[s] = true;
                require((place_of(s) == place::training) == (i == 0 && phase_ != phase::idle),
                        "one batch is trained, whole");
                unrolled += place_of(s) < place::queued;
                unscored += place_of(s) < place::ready;
            }
            require(unrolled == b.unrolled && unscored == b.unscored, "a batch counts what it waits for");
            all += static_cast<index_t>(b.slots.size());
            if (unrolled == 0)
                for (const slot_t s : b.slots) in_queue += place_of(s) == place::queued;
        }
        const auto rolled_out = [&](slot_t s) { return batches_[sequences_[s].batch - first_batch_].unrolled == 0; };
        require(all == c.outstanding(), "every sequence is in one batch");
        require(queue_.size() == in_queue && std::all_of(queue_.begin(), queue_.end(), rolled_out),
                "what is queued is of batches that are rolled out");
    }
    require(queued == c.queued, "every queued sequence is listed once");
}

} // namespace opd::sched
