// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "rollout_engine.hpp"

#include <algorithm>
#include <stdexcept>
#include <utility>

#include <fmt/format.h>

#include "config.hpp"

namespace trainer {

namespace {

void need_model(const policy& weights) {
    if (!weights.model) throw std::invalid_argument("rollout_engine: there are no weights");
}

} // namespace

rollout_engine::rollout_engine(const policy& weights, const sampling& options, index_t lanes, index_t length)
    : weights_((need_model(weights), weights)), o_(options), length_(length),
      sampler_(options, weights.model->shape.vocabulary) {
    if (lanes < 1) throw std::invalid_argument(fmt::format("rollout_engine: lanes must be at least 1, not {}", lanes));
    if (options.max_response < 1) throw std::invalid_argument("rollout: max_response must be at least 1");
    if (options.prefill_chunk < 1) throw std::invalid_argument("rollout: prefill_chunk must be at least 1");
    if (length > weights.model->shape.max_length)
        throw std::invalid_argument(fmt::format("rollout: {} tokens of prompt and response, the model takes {}", length,
                                                weights.model->shape.max_length));
    with_memory_for(fmt::format("the keys and values of {} sequences: --slots sets how many run at once", lanes), [&] {
        lanes_.resize(static_cast<std::size_t>(lanes));
        cache_.resize(weights.model->shape, lanes, length);
    });
    cache_lanes_ = lanes;
}

rollout_engine::lane_state& rollout_engine::at(index_t lane) {
    if (lane < 0 || lane >= lanes())
        throw std::invalid_argument(fmt::format("rollout_engine: lane {} of {}", lane, lanes()));
    return lanes_[static_cast<std::size_t>(lane)];
}

bool rollout_engine::complete(const trajectory& t) const {
    const std::size_t drawn = t.tokens.size() - t.prompt_length;
    return drawn > 0 && (t.tokens.back() == o_.end || drawn >= static_cast<std::size_t>(o_.max_response));
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
}

const trajectory& rollout_engine::drawn(index_t lane) const {
    const lane_state& s = at(lane);
    if (!s.busy) throw std::invalid_argument(fmt::format("rollout: nothing runs on lane {}", lane));
    return s.sequence;
}

void rollout_engine::abort(index_t lane) {
    lane_state& s = at(lane);
    if (!s.busy) throw std::invalid_argument(fmt::format("rollout: nothing runs on lane {}", lane));
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
    if (weights.model != weights_.model)
        for (lane_state& s : lanes_) s.computed = 0;
    weights_ = weights;
}

void rollout_engine::forward() {
    const transformer<float>& model = *weights_.model;
    logits_.resize(tokens_.size() * static_cast<std::size_t>(model.shape.vocabulary));
    forward_rows(model, std::span<const segment>(segments_), std::span<const std::int32_t>(tokens_), cache_, state_,
                 false, logits_.data());
}

void rollout_engine::fill_cache() {
    if (static_cast<index_t>(lanes_.size()) != cache_lanes_)
        throw std::invalid_argument(
            fmt::format("rollout_engine: {} lanes were kept of {}", lanes_.size(), cache_lanes_));
    running_ = 0;
    for (std::size_t i = 0; i < lanes_.size(); ++i) {
        const lane_state& s = lanes_[i];
        if (!s.busy) continue;
        check(s.sequence);
        const auto& all = s.sequence.tokens;
        if (s.computed >= all.size())
            throw std::invalid_argument(
                fmt::format("rollout_engine: {} of {} tokens are in the cache", s.computed, all.size()));
        ++running_;
        if (s.computed == 0) continue;
        segments_ = {{static_cast<index_t>(i), 0, static_cast<index_t>(s.computed)}};
        tokens_.assign(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(s.computed));
        forward();
    }
}

index_t rollout_engine::step(std::vector<lane_trajectory>& finished) {
    segments_.clear();
    tokens_.clear();
    recomputed_ = 0;
    for (std::size_t i = 0; i < lanes_.size(); ++i) {
        const lane_state& s = lanes_[i];
        if (!s.busy) continue;
        const auto& all = s.sequence.tokens;
        const std::size_t count = chunk(s);
        segments_.push_back({static_cast<index_t>(i), static_cast<index_t>(s.computed), static_cast<index_t>(count)});
        tokens_.insert(tokens_.end(), all.begin() + static_cast<std::ptrdiff_t>(s.computed),
                       all.begin() + static_cast<std::ptrdiff_t>(s.computed + count));
    }
    if (segments_.empty()) return 0;
    forward();
    const index_t v = weights_.model->shape.vocabulary;
    index_t row = 0;
    sampler_.clear();
    for (const segment& g : segments_) {
        row += g.count;
        lane_state& s = lanes_[static_cast<std::size_t>(g.slot)];
        // else the rest of the prefix comes in the next step
        if (s.computed + static_cast<std::size_t>(g.count) == s.sequence.tokens.size())
            sampler_.add(s.sequence, logits_.data() + (row - 1) * v);
    }
    sampler_.draw(weights_.version); // throws before it changes anything
    for (const segment& g : segments_) {
        lane_state& s = lanes_[static_cast<std::size_t>(g.slot)];
        const std::size_t first = s.computed;
        s.computed += static_cast<std::size_t>(g.count);
        recomputed_ += static_cast<index_t>(std::min(s.computed, std::max(first, s.known)) - first);
        s.known = std::max(s.known, s.computed);
        if (!complete(s.sequence)) continue;
        s.sequence.ended = s.sequence.tokens.back() == o_.end;
        finished.push_back({g.slot, std::move(s.sequence)});
        s = {};
        --running_;
    }
    return row;
}

std::vector<lane_trajectory> rollout_engine::partials() const {
    std::vector<lane_trajectory> r;
    for (std::size_t i = 0; i < lanes_.size(); ++i)
        if (lanes_[i].busy) r.push_back({static_cast<index_t>(i), lanes_[i].sequence});
    return r;
}

} // namespace trainer
