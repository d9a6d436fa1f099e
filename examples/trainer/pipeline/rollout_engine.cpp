// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "pipeline/rollout_engine.hpp"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include <fmt/format.h>

#include "settings/config.hpp"

namespace trainer {

namespace {

void need_model(const policy& weights) {
    if (!weights.model) throw std::invalid_argument("rollout_engine: there are no weights");
}

} // namespace

rollout_engine::rollout_engine(const policy& weights, const sampling& options, index_t lanes, index_t length)
    : weights_((need_model(weights), weights)), o_(options), model_(injected(options.inject, weights.model)),
      length_(length), sampler_(options, weights.model->shape.vocabulary) {
    if (lanes < 1) throw std::invalid_argument(fmt::format("rollout_engine: lanes must be at least 1, not {}", lanes));
    if (options.max_response < 1) throw std::invalid_argument("rollout: max_response must be at least 1");
    if (options.prefill_chunk < 1) throw std::invalid_argument("rollout: prefill_chunk must be at least 1");
    if (length > weights.model->shape.max_length)
        throw std::invalid_argument(fmt::format("rollout: {} tokens of prompt and response, the model takes {}", length,
                                                weights.model->shape.max_length));
    cache_lanes_ = lanes;
    make_cache();
    if (o_.speculate.on()) draft_with(make_drafters(o_.speculate), o_.speculate);
}

// A step's drafts are in the columns behind a sequence.
void rollout_engine::make_cache() {
    const index_t length = length_ + o_.speculate.most();
    const bool pages = o_.kv_tokens > 0;
    if (pages && o_.kv_tokens < least_memory(o_, length_))
        throw std::invalid_argument(fmt::format("rollout: memory for {} tokens, a sequence and its drafts take {}",
                                                o_.kv_tokens, least_memory(o_, length_)));
    with_memory_for(fmt::format("the keys and values of {} sequences: --slots sets how many run at once", cache_lanes_),
                    [&] {
                        lanes_.resize(static_cast<std::size_t>(cache_lanes_));
                        cache_.resize(weights_.model->shape, cache_lanes_, length, pages ? kv_page : 0,
                                      pages ? o_.kv_tokens / kv_page : 0);
                    });
}

void rollout_engine::give_back(index_t lane) {
    if (o_.kv_tokens > 0) cache_.release(lane);
}

// Every sequence gets the pages that its tokens and a step's drafts need, who has drawn most first. Who finds none
// takes those of the one that has drawn least; who has drawn least itself waits, and everybody behind it that has none.
void rollout_engine::make_room() {
    order_.clear();
    for (index_t i = 0; i < lanes(); ++i)
        if (at(i).busy) order_.push_back(i);
    const auto drawn = [&](index_t lane) { return at(lane).sequence.response().size(); };
    std::sort(order_.begin(), order_.end(),
              [&](index_t a, index_t b) { return drawn(a) > drawn(b) || (drawn(a) == drawn(b) && a < b); });
    std::size_t last = order_.size(); // those from there on have no pages
    for (std::size_t i = 0; i < order_.size(); ++i) {
        lane_state& s = at(order_[i]);
        const index_t columns = static_cast<index_t>(s.sequence.tokens.size()) + o_.speculate.most();
        const index_t pages = (columns + kv_page - 1) / kv_page;
        bool room = i < last;
        while (room && cache_.held(order_[i]) < pages)
            if (!cache_.take(order_[i])) {
                while (last > i + 1 && cache_.held(order_[last - 1]) == 0) --last;
                const index_t victim = order_[last - 1]; // perhaps itself
                cache_.release(victim);
                forget(victim);
                --last;
                room = last > i;
            }
        s.waits = !room;
        s.pages = cache_.held(order_[i]);
    }
}

void rollout_engine::draft_with(drafters all, const speculation_options& o) {
    if (running_ > 0) throw std::invalid_argument("rollout_engine: drafters come before the sequences");
    if (all.empty() || all.size() > 2)
        throw std::invalid_argument(fmt::format("rollout_engine: one or two drafters, not {}", all.size()));
    o_.speculate = o;
    speculation_.reset();
    if (!o.on()) return;
    make_cache();
    speculation_ = std::make_unique<speculation>(o, std::move(all), o_.filter(), o_.greedy, o_.seed, cache_lanes_,
                                                 index_t{o_.max_response});
}

void rollout_engine::record_with(std::shared_ptr<response_recorder> r) {
    if (running_ > 0 || !speculation_)
        throw std::invalid_argument("rollout_engine: an engine without drafts, or one that runs, records nothing");
    speculation_->record_with(std::move(r));
}

rollout_engine::lane_state& rollout_engine::at(index_t lane) {
    if (lane < 0 || lane >= lanes())
        throw std::invalid_argument(fmt::format("rollout_engine: lane {} of {}", lane, lanes()));
    return lanes_[static_cast<std::size_t>(lane)];
}

bool rollout_engine::complete(const trajectory& t) const {
    const std::size_t drawn = t.tokens.size() - t.prompt_length;
    return drawn > 0 && (o_.ends(t.tokens.back()) || drawn >= static_cast<std::size_t>(o_.max_response));
}

void rollout_engine::check(const trajectory& t) const {
    const auto need = [&](bool ok, const char* what) {
        if (!ok) throw std::invalid_argument(fmt::format("rollout: sample {} has {}", t.sample, what));
    };
    if (t.prompt_length == 0)
        throw std::invalid_argument(fmt::format("rollout: the prompt of sample {} is empty", t.sample));
    need(t.tokens.size() >= t.prompt_length, "a prompt longer than the tokens");
    const std::size_t drawn = t.tokens.size() - t.prompt_length;
    const std::size_t entries = drawn * static_cast<std::size_t>(o_.plan.count);
    need(t.kept_counts.size() == (o_.keep_sets ? drawn : 0), "not one kept set a token");
    need(t.top_ids.size() == (o_.keep_tops ? drawn : 0), "not one most probable id a token");
    need(t.log_mu.size() == drawn && t.versions.size() == drawn, "not one log_mu and one version a token");
    need(t.draw_ids.size() == entries && t.draw_log_mu.size() == entries && t.draw_weight.size() == entries &&
             t.draw_exact.size() == entries,
         "draws that do not fit the plan");
    need(!complete(t), "a finished response");
    if (static_cast<index_t>(t.prompt_length) + o_.max_response > length_)
        throw std::invalid_argument(
            fmt::format("rollout: {} tokens of prompt and response of sample {}, the lane takes {}",
                        static_cast<index_t>(t.prompt_length) + o_.max_response, t.sample, length_));
    for (const token id : t.tokens)
        need(id >= 0 && id < weights_.model->shape.vocabulary, "a token outside the vocabulary");
}

void rollout_engine::start(index_t lane, trajectory t) {
    lane_state& s = at(lane);
    if (s.busy)
        throw std::invalid_argument(fmt::format("rollout: lane {} still runs sample {}", lane, s.sequence.sample));
    check(t);
    s.sequence = std::move(t);
    s.computed = s.known = 0;
    s.busy = true;
    ++running_;
    if (speculation_) speculation_->begin(lane, s.sequence);
}

const trajectory& rollout_engine::drawn(index_t lane) const {
    const lane_state& s = at(lane);
    if (!s.busy) throw std::invalid_argument(fmt::format("rollout: nothing runs on lane {}", lane));
    return s.sequence;
}

void rollout_engine::abort(index_t lane) {
    lane_state& s = at(lane);
    if (!s.busy) throw std::invalid_argument(fmt::format("rollout: nothing runs on lane {}", lane));
    if (speculation_) speculation_->end(lane, s.sequence, false);
    give_back(lane);
    s = {};
    --running_;
}

void rollout_engine::install(const policy& weights) {
    need_model(weights);
    if (!(weights.model->shape == weights_.model->shape))
        throw std::invalid_argument("rollout_engine: the new weights are of a model of another shape");
    if (weights.version < weights_.version)
        throw std::invalid_argument(
            fmt::format("rollout_engine: version {} after version {}", weights.version, weights_.version));
    const bool others = weights.model != weights_.model;
    weights_ = weights;
    if (!others) return;
    model_ = injected(o_.inject, weights_.model);
    for (index_t lane = 0; lane < lanes(); ++lane) forget(lane);
}

// What the model has read of a sequence is gone, and so is what a drafter made of it.
void rollout_engine::forget(index_t lane) {
    lane_state& s = at(lane);
    if (std::exchange(s.computed, 0) == 0 || !speculation_) return;
    const lane_news nothing{.lane = lane};
    speculation_->hear(std::span(&nothing, 1), weights_);
}

void rollout_engine::forward() {
    const transformer<float>& model = *model_;
    logits_.resize(tokens_.size() * static_cast<std::size_t>(model.shape.vocabulary));
    state_.tapped = speculation_ && speculation_->reads_layers();
    forward_rows(model, std::span<const segment>(segments_), std::span<const std::int32_t>(tokens_), cache_, state_,
                 false, logits_.data());
}

void rollout_engine::fill_cache() {
    if (static_cast<index_t>(lanes_.size()) != cache_lanes_)
        throw std::invalid_argument(
            fmt::format("rollout_engine: {} lanes were kept of {}", lanes_.size(), cache_lanes_));
    running_ = 0;
    for (index_t lane = 0; lane < lanes(); ++lane) give_back(lane);
    for (std::size_t i = 0; i < lanes_.size(); ++i) {
        const lane_state& s = lanes_[i];
        if (!s.busy) continue;
        check(s.sequence);
        const auto& all = s.sequence.tokens;
        if (s.computed >= all.size())
            throw std::invalid_argument(
                fmt::format("rollout_engine: {} of {} tokens are in the cache", s.computed, all.size()));
        ++running_;
        if (o_.kv_tokens > 0) {
            const auto lane = static_cast<index_t>(i);
            while (cache_.held(lane) < s.pages)
                if (!cache_.take(lane))
                    throw std::invalid_argument("rollout_engine: more pages are held than there are");
            if (s.pages * kv_page < static_cast<index_t>(s.computed))
                throw std::invalid_argument(
                    fmt::format("rollout_engine: {} tokens are in {} pages", s.computed, s.pages));
        }
        if (s.computed == 0) continue;
        segments_ = {{static_cast<index_t>(i), 0, static_cast<index_t>(s.computed)}};
        tokens_.assign(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(s.computed));
        forward();
        if (!speculation_ || !speculation_->reads_hidden()) continue;
        walking_ = 0;
        tell_drafter();
    }
}

// The sequences that are read to their end get drafts, in the rows behind their last token.
void rollout_engine::draft() {
    due_.clear();
    for (const segment& g : segments_) {
        const lane_state& s = lanes_[static_cast<std::size_t>(g.slot)];
        if (s.computed + static_cast<std::size_t>(g.count) == s.sequence.tokens.size())
            due_.push_back({g.slot, &s.sequence});
    }
    speculation_->draft(due_, running_ < lanes());
    const std::int32_t v = weights_.model->shape.vocabulary;
    for (const speculation::due& d : due_)
        for (const token id : speculation_->tree(d.lane).tokens)
            if (id < 0 || id >= v)
                throw std::logic_error(fmt::format("rollout: token {} was drafted, of a vocabulary of {}", id, v));
}

// The target's own tokens: those after the last tokens of all sequences, then those after the drafts that they are, and
// so on. A draw that fails where drafts led is left to the step in which it would be due without them.
void rollout_engine::follow() {
    const index_t v = weights_.model->shape.vocabulary;
    const auto sequence_of = [&](index_t walk) -> trajectory& {
        const std::size_t segment = walks_[static_cast<std::size_t>(walk)].segment;
        return lanes_[static_cast<std::size_t>(segments_[segment].slot)].sequence;
    };
    bool first = true;
    const auto draw = [&](std::span<const opd::spec::batch_follower::due> due, std::span<token> drawn) {
        sampler_.clear();
        for (const auto& d : due)
            sampler_.add(sequence_of(d.sequence),
                         logits_.data() + (walks_[static_cast<std::size_t>(d.sequence)].row + d.row) * v);
        try {
            sampler_.draw(weights_.version); // throws before it changes anything
        } catch (const failure&) {
            if (first) throw;
            return false; // the drafts' rows that were not drawn from are read again
        }
        first = false;
        for (std::size_t i = 0; i < due.size(); ++i) {
            drawn[i] = sequence_of(due[i].sequence).tokens.back();
            if (due[i].row > 0) walks_[static_cast<std::size_t>(due[i].sequence)].path.push_back(due[i].row - 1);
        }
        return true;
    };
    found_ = follower_.follow(trees_, draw, [&](index_t walk) { return complete(sequence_of(walk)); });
}

void rollout_engine::tell_drafter() {
    news_.clear();
    hidden_.clear();
    const index_t d = weights_.model->shape.width, width = state_.tapped ? 4 * d : d;
    const bool hidden = speculation_->reads_hidden();
    std::size_t walking = 0;
    index_t row = 0;
    for (std::size_t i = 0; i < segments_.size(); ++i) {
        const segment& g = segments_[i];
        lane_news n{.lane = g.slot, .first = g.start, .rows = g.count};
        const auto keep = [&](index_t r) { append_features(state_, d, r, hidden_); };
        if (hidden)
            for (index_t r = 0; r < g.count; ++r) keep(row + r);
        if (walking < walking_ && walks_[walking].segment == i) {
            const walk& w = walks_[walking++];
            const auto& all = lanes_[static_cast<std::size_t>(g.slot)].sequence.tokens;
            n.drawn = std::span<const token>(all).subspan(w.tokens);
            n.rows += static_cast<index_t>(w.path.size());
            if (hidden)
                for (const index_t node : w.path) keep(row + g.count + node);
        }
        news_.push_back(n);
        row += g.rows();
    }
    if (hidden) {
        const float* at = hidden_.data();
        for (lane_news& n : news_) n.hidden = {at, static_cast<std::size_t>(n.rows * width)}, at += n.rows * width;
    }
    speculation_->hear(news_, weights_);
}

index_t rollout_engine::step(std::vector<lane_trajectory>& finished) {
    segments_.clear();
    tokens_.clear();
    recomputed_ = 0;
    if (o_.kv_tokens > 0) make_room();
    for (std::size_t i = 0; i < lanes_.size(); ++i) {
        const lane_state& s = lanes_[i];
        if (!s.busy || s.waits) continue;
        segments_.push_back(
            {static_cast<index_t>(i), static_cast<index_t>(s.computed), static_cast<index_t>(chunk(s))});
    }
    rows_ = 0;
    if (segments_.empty()) return 0;
    if (speculation_) draft();
    walking_ = 0;
    trees_.clear();
    for (std::size_t i = 0; i < segments_.size(); ++i) {
        segment& g = segments_[i];
        const lane_state& s = lanes_[static_cast<std::size_t>(g.slot)];
        const auto& all = s.sequence.tokens;
        const auto from = all.begin() + static_cast<std::ptrdiff_t>(s.computed);
        tokens_.insert(tokens_.end(), from, from + g.count);
        if (from + g.count != all.end()) continue; // the rest of the prefix comes in the next step
        if (walks_.size() == walking_) walks_.emplace_back();
        walk& w = walks_[walking_++];
        w.segment = i, w.row = static_cast<index_t>(tokens_.size()) - 1;
        w.tokens = all.size();
        w.path.clear();
        trees_.push_back(speculation_ ? speculation_->tree(g.slot) : opd::spec::draft_tree{});
        const opd::spec::draft_tree& tree = trees_.back();
        g.parents = tree.parents;
        tokens_.insert(tokens_.end(), tree.tokens.begin(), tree.tokens.end());
    }
    rows_ = static_cast<index_t>(tokens_.size());
    forward();
    follow();
    if (speculation_) tell_drafter();
    std::size_t walking = 0;
    for (std::size_t i = 0; i < segments_.size(); ++i) {
        const segment& g = segments_[i];
        lane_state& s = lanes_[static_cast<std::size_t>(g.slot)];
        const std::size_t first = s.computed;
        s.computed += static_cast<std::size_t>(g.count);
        recomputed_ += static_cast<index_t>(std::min(s.computed, std::max(first, s.known)) - first);
        s.known = std::max(s.known, s.computed);
        if (walking == walking_ || walks_[walking].segment != i) continue;
        const opd::spec::verdict& found = found_[walking];
        const walk& w = walks_[walking++];
        for (const index_t node : w.path) { // ascending, so that none is overwritten before it moves
            const auto to = static_cast<index_t>(s.computed++);
            if (g.start + g.count + node != to) cache_.move(g.slot, g.start + g.count + node, to);
        }
        s.known = std::max(s.known, s.computed);
        if (speculation_)
            speculation_->verified(g.slot, found, static_cast<index_t>(s.sequence.tokens.size() - w.tokens));
        if (!complete(s.sequence)) continue;
        s.sequence.ended = o_.ends(s.sequence.tokens.back());
        if (speculation_) speculation_->end(g.slot, s.sequence, true);
        finished.push_back({g.slot, std::move(s.sequence)});
        give_back(g.slot);
        s = {};
        --running_;
    }
    return rows_;
}

std::vector<lane_trajectory> rollout_engine::partials() const {
    std::vector<lane_trajectory> r;
    for (std::size_t i = 0; i < lanes_.size(); ++i)
        if (lanes_[i].busy) r.push_back({static_cast<index_t>(i), lanes_[i].sequence});
    return r;
}

} // namespace trainer
