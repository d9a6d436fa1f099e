// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Continuous batching over a fixed number of lanes: sequences enter and leave one by one, every step() takes all
// running ones one quantum further, and the weights can change between two steps.
//
// A token is a pure function of (weights, seed, sample, position) and of the tokens before it: lanes, chunks, and what
// else is running change nothing (model.hpp, sampler.hpp).
//
//   install   the running prefixes are kept, their keys and values are rebuilt under the new weights before the next
//             token is drawn (by chunks, as a prompt is), and every later token carries the new version. So a token's
//             log mu is that of one set of weights over the whole prefix, and a learner of that version computes the
//             same bits.
//   drafts    a step may bring several tokens of a sequence: a drafter guesses what comes next, the guesses go through
//             the model with the last token, and the sampler draws at each of them that the sequence reaches, in the
//             order of positions. What is drawn and recorded is what steps of one token would (speculation.hpp)
//   memory    with kv_tokens, keys and values are in pages that sequences take as they grow. Where pages run out, the
//             sequence that has drawn least gives its own back and waits on its lane; it is read again, from its
//             tokens, when there is room for them
//   partials  what is running, with everything drawn so far; start() goes on from such a one bit for bit.
//
// Source: AsyncOPD section 7 (in-flight weight updates that keep the sampled prefix).
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "model/model.hpp"
#include "model/publication.hpp"
#include "pipeline/sampler.hpp"
#include "speculation/speculation.hpp"
#include "task/trajectory.hpp"

#include <opd/spec/verify.hpp>

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

    /// The least kv_tokens that an engine with these options takes: one sequence's, and its drafts'.
    static index_t least_memory(const sampling& options, index_t length) {
        return (length + options.speculate.most() + kv_page - 1) / kv_page * kv_page;
    }

    /// Before anything runs: other drafters than the options name; auto chooses among them. Strategies as the options
    /// say; none of --speculate off.
    void draft_with(drafters all, const speculation_options& o);

    /// Before anything runs, of an engine that drafts: who is told of its sequences' hidden states.
    void record_with(std::shared_ptr<response_recorder> r);
    /// Another model for the drafter that learnt, of the same shape; what it made of running sequences is made again.
    void adapt(const std::shared_ptr<const draft_model>& d) {
        if (speculation_) speculation_->adapt(d);
    }

    /// Large products share out what they put out on these threads, of a team that outlives the engine and does nothing
    /// else while it steps.
    void share_products(opd::thread_team* threads) { state_.threads = threads; }

    index_t lanes() const { return static_cast<index_t>(lanes_.size()); }
    index_t running() const { return running_; }
    bool busy(index_t lane) const { return at(lane).busy; }
    std::int32_t version() const { return weights_.version; }
    const policy& weights() const { return weights_; }

    /// A prompt, or a response that was begun elsewhere, enters a free lane.
    void start(index_t lane, trajectory sequence);
    void start(index_t lane, const request& prompt) { start(lane, begin_response(prompt)); }

    /// What runs on a lane, so far.
    const trajectory& drawn(index_t lane) const;

    /// Frees the lane; what was drawn is forgotten.
    void abort(index_t lane);

    /// All that is drawn from now on is drawn from these weights. Prefixes are kept.
    void install(const policy& weights);

    /// One quantum: every running sequence takes a chunk of what its cache lacks, and a token if nothing is lacking, or
    /// several where drafts are right. Appends those that are finished; their lanes are free. Returns how many tokens
    /// it took through the model, drafted ones among them.
    index_t step(std::vector<lane_trajectory>& finished);

    /// Those of the last step() that had gone through it before, under other weights.
    index_t recomputed() const { return recomputed_; }

    /// How long the last step took: --speculate auto goes by it.
    void took(double seconds) {
        if (speculation_) speculation_->took(rows_, seconds);
    }

    /// What drafting for it took.
    draft_work drafting() const { return speculation_ && rows_ > 0 ? speculation_->work() : draft_work{}; }

    /// Since they were taken last, or its beginning, or that of the engine it was restored from. Zeros without
    /// speculation.
    speculation_counts counts() const { return speculation_ ? speculation_->counts() : speculation_counts{}; }
    speculation_counts take_counts() {
        const speculation_counts c = counts();
        if (speculation_) speculation_->forget_counts();
        return c;
    }

    /// What is running, by lane.
    std::vector<lane_trajectory> partials() const;

    /// All of its state but the weights, which must be those again when it is read. Of the cache it is known how far it
    /// is filled, and its bits are computed again.
    template <class A>
    void fields(A& a) {
        a(lanes_);
        if (speculation_) a(rows_, *speculation_);
        if constexpr (A::reading) fill_cache();
    }

private:
    static constexpr index_t kv_page = 32; // columns
    struct lane_state {
        trajectory sequence;
        std::size_t computed = 0; // tokens whose keys and values are in the cache, under the present weights
        std::size_t known = 0;    // tokens that were in it, since its start, under any weights
        bool busy = false;
        bool waits = false;     // for memory
        std::int64_t pages = 0; // of the cache, where it has pages
        template <class A>
        void fields(A& a) {
            a(sequence, computed, known, busy, waits, pages);
        }
    };

    lane_state& at(index_t lane);
    const lane_state& at(index_t lane) const { return const_cast<rollout_engine*>(this)->at(lane); }
    bool complete(const trajectory& t) const;
    void check(const trajectory& t) const; // it can go on
    void fill_cache();
    void make_cache();
    void make_room();
    void give_back(index_t lane);
    void forget(index_t lane);
    void draft();
    void follow();
    void tell_drafter();
    void forward();                                // segments_, tokens_: to the cache and logits_
    std::size_t chunk(const lane_state& s) const { // of a busy one
        return std::min(s.sequence.tokens.size() - s.computed, static_cast<std::size_t>(o_.prefill_chunk));
    }

    // A sequence that draws a token, and the drafts it was found to go along.
    struct walk {
        std::size_t segment = 0;
        index_t row = 0;           // of the last token; its drafts' follow
        std::size_t tokens = 0;    // before the step
        std::vector<index_t> path; // drafts that were drawn after
    };

    policy weights_;
    sampling o_;
    std::shared_ptr<const transformer<float>> model_; // what computes: weights_' model, or what was injected into it
    index_t length_;
    sampler sampler_;
    std::vector<lane_state> lanes_;
    index_t running_ = 0, cache_lanes_ = 0, recomputed_ = 0;
    kv_cache<float> cache_;
    forward_state<float> state_;
    std::vector<segment> segments_;
    std::vector<index_t> order_; // lanes
    std::vector<token> tokens_;
    std::vector<float> logits_;
    index_t rows_ = 0; // of the last step
    std::unique_ptr<speculation> speculation_;
    std::vector<speculation::due> due_;
    std::vector<walk> walks_; // the first `walking_` of them
    std::size_t walking_ = 0;
    std::vector<opd::spec::draft_tree> trees_; // of the walks
    opd::spec::batch_follower follower_;
    std::span<const opd::spec::verdict> found_; // of the walks
    std::vector<lane_news> news_;
    std::vector<float> hidden_;
};

} // namespace trainer
