// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "speculation/learned_drafter.hpp"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include <fmt/format.h>

#include "opd/sched/archive.hpp"

namespace trainer {

learned_drafter::learned_drafter(std::shared_ptr<const draft_model> d, double least_reach)
    : drafter_(std::move(d)), least_reach_(least_reach) {
    if (!drafter_) throw std::invalid_argument("learned_drafter: there are no weights");
}

void learned_drafter::install(std::shared_ptr<const draft_model> d) {
    if (!d || d->kind != drafter_->kind || !(d->target == drafter_->target) ||
        !(d->weights.shape == drafter_->weights.shape))
        throw std::invalid_argument("learned_drafter: the new weights are of another drafter");
    drafter_ = std::move(d);
    for (place& p : places_) p.forget(0);
}

std::string learned_drafter::state() const {
    std::vector<index_t> read;
    for (const place& p : places_) read.push_back(p.read);
    opd::sched::archive_writer w;
    w(read);
    return std::move(w.bytes);
}

// Of a layer's rows it is heard again what h is, which then is nothing new.
void learned_drafter::restore(std::string_view state) {
    std::vector<index_t> read;
    opd::sched::archive_reader r(state);
    r(read);
    if (!r.done()) throw std::invalid_argument("learned_drafter: the state is that of another drafter");
    for (std::size_t lane = 0; lane < read.size(); ++lane) {
        if (read[lane] < 0) throw std::invalid_argument("learned_drafter: the state has less than no rows");
        place& p = place_of(static_cast<index_t>(lane));
        p.clear();
        p.read = read[lane];
        p.restored = reads_hidden() && p.read > 0;
    }
}

learned_drafter::place& learned_drafter::place_of(index_t lane) {
    if (static_cast<std::size_t>(lane) >= places_.size()) places_.resize(static_cast<std::size_t>(lane) + 1);
    return places_[static_cast<std::size_t>(lane)];
}

void learned_drafter::hear(std::span<const lane_news> news, const policy& target) {
    if (target.model && !(target.model->shape == drafter_->target))
        throw std::invalid_argument("learned_drafter: a target of another shape than it was trained for");
    target_ = target;
    if (!reads_hidden()) return;
    const index_t d = drafter_->features();
    for (const lane_news& n : news) {
        place& p = place_of(n.lane);
        if (n.first != 0 && n.first != p.heard)
            throw std::logic_error(
                fmt::format("learned_drafter: position {} after {} of lane {}", n.first, p.heard, n.lane));
        p.heard = n.first + n.rows;
        p.forget(std::exchange(p.restored, false) ? p.heard : n.first);
        p.hidden.resize(static_cast<std::size_t>(n.first * d));
        p.hidden.insert(p.hidden.end(), n.hidden.begin(), n.hidden.end());
        if (p.hidden.size() != static_cast<std::size_t>(p.heard * d))
            throw std::logic_error("learned_drafter: hidden states of another number of rows");
    }
}

// For every lane, and so many columns a sequence. Whatever was in the cache is lost where there was less.
void learned_drafter::make_room(index_t columns) {
    const auto lanes = static_cast<index_t>(places_.size());
    if (lanes <= slots_ && columns <= cache_.capacity()) return;
    slots_ = std::max(lanes, slots_);
    cache_.resize(drafter_->weights.shape, slots_, std::max(columns, cache_.capacity()));
    for (place& p : places_) p.cached = 0;
}

// Rows of the sequence from `first` on.
void learned_drafter::add_rows(const growing& g, index_t first) {
    const auto& all = g.wish->sequence->tokens;
    const index_t n = g.rows - first, d = drafter_->target.width;
    segments_.push_back({g.wish->lane, first, n});
    rows_ += n;
    if (!reads_hidden()) {
        tokens_.insert(tokens_.end(), all.begin() + first, all.begin() + g.rows);
        return;
    }
    const place& p = places_[static_cast<std::size_t>(g.wish->lane)];
    pairs_.resize(static_cast<std::size_t>(rows_ * 2 * d));
    states_.resize(static_cast<std::size_t>(n * d));
    drafter_states(drafter_->weights, around<0>(along<float>{0, drafter_->features(), p.hidden}, first, n).data(), n,
                   states_.data());
    drafter_pairs(*target_.model, around<0>(along<float>{first, d, states_}, first, n),
                  around<1>(along<token>{0, 1, all}, first, n), pairs_.data() + (rows_ - n) * 2 * d);
}

// The row of a draft, which comes after its parent's.
void learned_drafter::add_node(const growing& g, std::size_t n) {
    const token id = g.wish->tree->token(g.nodes[n]);
    ++rows_;
    if (!reads_hidden()) {
        tokens_.push_back(id);
        return;
    }
    const index_t d = drafter_->target.width;
    const index_t position = g.rows - 1 + g.wish->tree->depth(g.nodes[n]); // of what the parent expects
    const auto parent = static_cast<std::size_t>(g.parents[n] + 1);
    pairs_.resize(static_cast<std::size_t>(rows_ * 2 * d));
    drafter_pairs(
        *target_.model,
        around<0>(
            along<float>{
                position, d,
                std::span(g.expected).subspan(parent * static_cast<std::size_t>(d), static_cast<std::size_t>(d))},
            position, 1),
        around<1>(along<token>{position + 1, 1, std::span(&id, 1)}, position, 1), pairs_.data() + (rows_ - 1) * 2 * d);
}

// The rows that were added, through the layers; logits of those that are wanted.
void learned_drafter::forward() {
    const transformer<float>& own = drafter_->weights;
    const index_t d = own.shape.width, v = drafter_->target.vocabulary;
    ++work_.passes;
    state_.resize(own.shape, rows_, cache_.capacity(), false);
    float* x0 = state_.layers[0].x.data();
    if (reads_hidden())
        drafter_inputs(own, static_cast<const float*>(pairs_.data()), rows_, x0);
    else
        for (std::size_t r = 0; r < tokens_.size(); ++r)
            std::copy_n(own.at(own.layout.embedding) + tokens_[r] * d, d, x0 + static_cast<index_t>(r) * d);
    forward_layers(own, std::span<const segment>(segments_), rows_, cache_, state_, false);
    const auto n = static_cast<index_t>(wanted_.size());
    const auto size = static_cast<std::size_t>(n * d);
    if (head_.x.size() < size) head_.x.resize(size), head_.n.resize(size), head_.inv.resize(wanted_.size());
    for (std::size_t i = 0; i < wanted_.size(); ++i)
        std::copy_n(state_.x.data() + wanted_[i] * d, d, head_.x.data() + static_cast<index_t>(i) * d);
    logits_.resize(static_cast<std::size_t>(n * v));
    forward_head(reads_hidden() ? *target_.model : own, head_, n, logits_.data());
}

draft_work learned_drafter::propose(std::span<const draft_wish> wishes) {
    count_ = 0;
    index_t columns = 0;
    for (const draft_wish& w : wishes) {
        const place& p = place_of(w.lane);
        const auto length = static_cast<index_t>(w.sequence->tokens.size());
        const index_t rows = reads_hidden() ? length - 1 : length;
        if (rows < 1 || (reads_hidden() && p.heard < rows)) continue;
        if (growing_.size() == count_) growing_.emplace_back();
        growing& g = growing_[count_++];
        g.wish = &w, g.rows = rows;
        g.depth = static_cast<std::int32_t>(std::min<index_t>(w.depth, drafter_->weights.shape.max_length - rows));
        g.nodes.clear(), g.parents.clear(), g.expected.clear();
        g.chain = true, g.computed = 0;
        columns = std::max(columns, rows + index_t{w.depth} * w.children);
    }
    work_ = {};
    if (count_ == 0) return work_;
    make_room(columns);

    const index_t d = drafter_->target.width, v = drafter_->target.vocabulary;
    const auto clear = [&] {
        segments_.clear(), tokens_.clear(), pairs_.clear(), wanted_.clear();
        rows_ = 0;
    };
    // logits and what is expected after the i-th wanted row
    const auto heard = [&](growing& g, index_t node, std::size_t i) {
        if (reads_hidden()) {
            const float* n = head_.n.data() + static_cast<index_t>(i) * d;
            g.expected.insert(g.expected.end(), n, n + d);
        }
        g.wish->tree->grow(node, opd::vector_view<const float>(logits_.data() + static_cast<index_t>(i) * v, v),
                           g.wish->law, g.wish->children);
    };

    clear();
    for (std::size_t i = 0; i < count_; ++i) {
        growing& g = growing_[i];
        place& p = places_[static_cast<std::size_t>(g.wish->lane)];
        // the last one again, if it is there: its logits are not
        add_rows(g, std::min(p.cached, g.rows - 1));
        work_.rows += g.rows - std::min(p.read, g.rows - 1);
        p.read = p.cached = g.rows;
        wanted_.push_back(rows_ - 1);
    }
    forward();
    for (std::size_t i = 0; i < count_; ++i) heard(growing_[i], -1, i);

    for (std::int32_t depth = 1;; ++depth) {
        clear();
        for (std::size_t i = 0; i < count_; ++i) {
            growing& g = growing_[i];
            if (depth >= g.depth) continue;
            best_.resize(static_cast<std::size_t>(g.wish->children));
            best_.resize(static_cast<std::size_t>(g.wish->tree->best_of_depth(depth, best_)));
            for (const index_t node : best_) {
                if (g.wish->tree->reach(node) < least_reach_) continue;
                const std::int32_t parent = g.wish->tree->parent(node);
                const auto at = std::find(g.nodes.begin(), g.nodes.end(), parent);
                g.parents.push_back(parent < 0 ? -1 : static_cast<std::int32_t>(at - g.nodes.begin()));
                g.nodes.push_back(node);
                g.chain = g.chain && g.parents.back() == static_cast<std::int32_t>(g.parents.size()) - 2;
            }
            if (g.nodes.size() == g.computed) continue;
            const auto known = static_cast<index_t>(g.computed), nodes = static_cast<index_t>(g.nodes.size());
            for (std::size_t n = g.computed; n < g.nodes.size(); ++n) add_node(g, n);
            if (g.chain)
                segments_.push_back({g.wish->lane, g.rows + known, nodes - known});
            else
                segments_.push_back({g.wish->lane, g.rows, 0, g.parents, known});
            for (std::size_t n = g.computed; n < g.nodes.size(); ++n)
                wanted_.push_back(rows_ - static_cast<index_t>(g.nodes.size() - n));
        }
        if (wanted_.empty()) return work_;
        work_.rows += rows_, work_.nodes += rows_;
        forward();
        std::size_t row = 0;
        for (std::size_t i = 0; i < count_; ++i) {
            growing& g = growing_[i];
            for (; g.computed < g.nodes.size(); ++g.computed) heard(g, g.nodes[g.computed], row++);
        }
    }
}

} // namespace trainer
