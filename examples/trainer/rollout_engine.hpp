// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Continuous batching over a fixed number of lanes: sequences enter and leave one by one, every step() takes all running
// ones one quantum further, and the weights can change between two steps.
//
// A token is a pure function of (weights, seed, sample, position) and of the tokens before it: lanes, chunks, and what
// else is running change nothing (model.hpp, sampler.hpp).
//
//   install   the running prefixes are kept, their keys and values are rebuilt under the new weights before the next token
//             is drawn (by chunks, as a prompt is), and every later token carries the new version. So a token's log mu is
//             that of one set of weights over the whole prefix, and a learner of that version computes the same bits.
//   partials  what is running, with everything drawn so far; start() goes on from such a one bit for bit.
//
// Source: AsyncOPD section 7 (in-flight weight updates that keep the sampled prefix).
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "model.hpp"
#include "publication.hpp"
#include "sampler.hpp"
#include "trajectory.hpp"

namespace trainer {

/// What runs, or ran, on a lane.
struct lane_trajectory {
    index_t lane = 0;
    trajectory sequence;
    bool operator==(const lane_trajectory&) const = default;
};

class rollout_engine {
public:
    /// Room for sequences of `length` tokens, prompt and response. Of the options, `slots` is not looked at.
    rollout_engine(const policy& weights, const sampling& options, index_t lanes, index_t length);

    index_t lanes() const { return static_cast<index_t>(lanes_.size()); }
    index_t running() const { return running_; }
    bool busy(index_t lane) const { return at(lane).busy; }
    std::int32_t version() const { return weights_.version; }

    /// A prompt, or a response that was begun elsewhere, enters a free lane.
    void start(index_t lane, trajectory sequence);
    void start(index_t lane, const request& prompt) { start(lane, begin_response(prompt)); }

    /// What runs on a lane, so far.
    const trajectory& drawn(index_t lane) const;

    /// Frees the lane; what was drawn is forgotten.
    void abort(index_t lane);

    /// All that is drawn from now on is drawn from these weights. Prefixes are kept.
    void install(const policy& weights);

    /// One quantum: every running sequence takes a chunk of what its cache lacks, and a token if nothing is lacking.
    /// Appends those that are finished; their lanes are free. Returns how many tokens it took through the model.
    index_t step(std::vector<lane_trajectory>& finished);

    /// Those of the last step() that had gone through it before, under other weights.
    index_t recomputed() const { return recomputed_; }

    /// What is running, by lane.
    std::vector<lane_trajectory> partials() const;

    /// All of its state but the weights, which must be those again when it is read. Of the cache it is known how far it is
    /// filled, and its bits are computed again.
    template <class A>
    void fields(A& a) {
        a(lanes_);
        if constexpr (A::reading) fill_cache();
    }

private:
    struct lane_state {
        trajectory sequence;
        std::size_t computed = 0; // tokens whose keys and values are in the cache, under the present weights
        std::size_t known = 0;    // tokens that were in it, since its start, under any weights
        bool busy = false;
        template <class A>
        void fields(A& a) {
            a(sequence, computed, known, busy);
        }
    };

    lane_state& at(index_t lane);
    const lane_state& at(index_t lane) const { return const_cast<rollout_engine*>(this)->at(lane); }
    bool complete(const trajectory& t) const;
    void check(const trajectory& t) const; // it can go on
    void fill_cache();
    void forward();                                // segments_, tokens_: to the cache and logits_
    std::size_t chunk(const lane_state& s) const { // of a busy one
        return std::min(s.sequence.tokens.size() - s.computed, static_cast<std::size_t>(o_.prefill_chunk));
    }

    policy weights_;
    sampling o_;
    index_t length_;
    sampler sampler_;
    std::vector<lane_state> lanes_;
    index_t running_ = 0, cache_lanes_ = 0, recomputed_ = 0;
    kv_cache<float> cache_;
    forward_state<float> state_;
    std::vector<segment> segments_;
    std::vector<token> tokens_;
    std::vector<float> logits_;
};

} // namespace trainer
