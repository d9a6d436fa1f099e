// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A model for the virtual driver (virtual_driver.hpp) without faults: rollout workers of one kind, lengths by
// sequence, durations by formula.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "opd/config.hpp"
#include "opd/sched/distributions.hpp"
#include "opd/sched/simulated.hpp"
#include "opd/sched/types.hpp"

namespace opd::sched {

/// A model without faults made of simulated stages: rollout workers of one kind, lengths by sequence, durations by
/// formula.
struct simulated_cluster {
    simulated_lengths lengths;
    engine_speed speed;
    index_t lanes = 64;                  ///< most slots that a rollout worker will be given
    std::int64_t budget = 0;             ///< tokens of an attempt, after which it is parked; 0: all
    distribution factor = {constant{1}}; ///< of each rollout worker's times: drawn once a worker
    simulated_job teacher_time, learner_time, sync_time;
    std::uint64_t seed = 1;

    simulated_rollout rollout(std::int32_t worker) const {
        engine_speed s = speed;
        s.factor *= draw(factor, seed, draw_of::worker_speed, static_cast<std::uint64_t>(worker));
        return simulated_rollout(s, lanes);
    }
    void start(simulated_rollout& r, const ticket& t, version_t start, bool keeps = true) {
        const auto size = lengths.of(t);
        token_versions had;
        if (keeps && t.slot < parked_.size() && parked_[t.slot].first == t.sample &&
            parked_[t.slot].second.oldest >= start)
            had = parked_[t.slot].second;                      // else it was made to start again since
        const auto more = static_cast<double>(had.tokens + 1); // lengths may be drawn by attempt
        r.start(t, std::max(size.response, more), size.prompt, had, budget);
    }
    void parked(const ticket& t, const token_versions& v) {
        if (t.slot >= parked_.size()) parked_.resize(t.slot + std::size_t{1});
        parked_[t.slot] = {t.sample, v};
    }
    double teacher(std::uint64_t job, std::int32_t, std::span<const ticket> tickets) const {
        return teacher_time.seconds(job, 0, static_cast<index_t>(tickets.size()), tokens_of(teacher_time, tickets));
    }
    double learner(std::uint64_t job, const weights&, std::span<const ticket> tickets) const {
        if (tickets.empty()) return 0; // it publishes what it has
        return learner_time.seconds(job, 0, static_cast<index_t>(tickets.size()), tokens_of(learner_time, tickets));
    }
    double sync(std::int32_t worker, const weights& v) const {
        return sync_time.seconds(static_cast<std::uint64_t>(v.version), static_cast<std::uint32_t>(worker), 1, 0);
    }

    template <class A>
    void fields(A& a) {
        a(parked_);
    }

private:
    std::vector<std::pair<sample_t, token_versions>> parked_; // what is drawn of those that were, by slot
    double tokens_of(const simulated_job& j, std::span<const ticket> tickets) const {
        double tokens = 0;
        if (j.per_token > 0)
            for (const ticket& t : tickets) {
                const auto size = lengths.of(t);
                tokens += size.response + size.prompt;
            }
        return tokens;
    }
};

} // namespace opd::sched
