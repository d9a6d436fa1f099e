// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Drafts by a model that was trained for it (drafter_training.hpp): a layer on the target's hidden states, or a small
// model of its own.
//
// A sequence's rows lie in a cache of the drafter's, one a position: of a model row t is token t, of a layer it is the
// pair of h[t] and token t + 1. Rows of what the target has drawn are computed once, those of drafts behind them at
// every call, and a layer's are computed again from the target's own h when it is heard of. All sequences go through
// the layers together: first what is new of each, whose last row names the first drafts, then depth by depth the best
// of those that were named (draft_builder::best_of_depth). Each depth computes the rows of the drafts that it goes on
// from, once.
//
// What is drafted is a function of the drafter's weights, the target's hidden states and the tokens: batches, chunks
// and whether the cache was rebuilt change nothing. What it costs is a function of that and of how far each sequence
// had been read, which state() keeps: rows that only a cache has lost are computed again and not counted.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "speculation/drafter.hpp"
#include "speculation/drafter_training.hpp"

namespace trainer {

class learned_drafter final : public drafter {
public:
    /// Drafts whose reach (draft_tree.hpp) is below `least_reach` are not gone on from.
    explicit learned_drafter(std::shared_ptr<const draft_model> d, double least_reach = 0.05);

    /// Other weights of the same shape: every cache is rebuilt.
    void install(std::shared_ptr<const draft_model> d);
    void adapt(const std::shared_ptr<const draft_model>& d) override {
        if (d != drafter_) install(d);
    }

    bool reads_hidden() const override { return drafter_->is_layer(); }
    bool reads_layers() const override { return drafter_->kind == drafter_kind::eagle3; }
    bool branches() const override { return true; }
    void begin(index_t lane, const trajectory&) override { place_of(lane).clear(); }
    void hear(std::span<const lane_news> news, const policy& target) override;
    void end(index_t lane, const trajectory&, bool) override { place_of(lane).clear(); }
    draft_work propose(std::span<const draft_wish> wishes) override;
    std::string state() const override;
    void restore(std::string_view state) override;

private:
    struct place {
        index_t heard = 0;         // positions whose h is known: of a layer
        index_t read = 0;          // rows of the sequence that were counted
        index_t cached = 0;        // of these, in the cache
        bool restored = false;     // and h is not known yet
        std::vector<float> hidden; // (heard, features())
        void forget(index_t from) { read = std::min(read, from), cached = std::min(cached, from); }
        void clear() { heard = read = cached = 0, restored = false, hidden.clear(); } // its memory is for the next
    };
    // A wish, and the drafts of it that rows were made of.
    struct growing {
        const draft_wish* wish = nullptr;
        index_t rows = 0;                  // of the sequence
        std::int32_t depth = 0;            // most
        std::vector<index_t> nodes;        // of the tree
        std::vector<std::int32_t> parents; // among these, -1: the sequence
        std::vector<float> expected; // (1 + nodes, D) h^ of the sequence's last row, then of the nodes': of a layer
        bool chain = true;
        std::size_t computed = 0; // nodes
    };

    place& place_of(index_t lane);
    void make_room(index_t columns);
    void add_rows(const growing& g, index_t first);
    void add_node(const growing& g, std::size_t n);
    void forward();

    std::shared_ptr<const draft_model> drafter_;
    double least_reach_;
    policy target_;
    std::vector<place> places_; // by lane
    index_t slots_ = 0;
    kv_cache<float> cache_;
    forward_state<float> state_;
    // of one pass
    std::vector<growing> growing_; // the first `count_`
    std::size_t count_ = 0;
    std::vector<segment> segments_;
    std::vector<token> tokens_;   // (R) of a model
    std::vector<float> states_;   // (n,D) of a sequence, of a layer
    std::vector<float> pairs_;    // (R,2D) of a layer
    std::vector<index_t> wanted_; // rows whose logits are looked at
    forward_state<float> head_;   // x, inv and n of these
    std::vector<float> logits_;   // (wanted,V)
    std::vector<index_t> best_;
    index_t rows_ = 0;
    draft_work work_; // of one call
};

} // namespace trainer
