// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "sampler.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

#include <fmt/format.h>

#include "config.hpp"
#include "opd/opd.hpp"
#include "opd/rng.hpp"

namespace trainer {

sampler::sampler(const sampling& options, index_t vocabulary)
    : o_(options), v_(vocabulary), width_(1 + options.plan.count), scaled_(static_cast<std::size_t>(vocabulary)),
      order_(static_cast<std::size_t>(vocabulary)), scratch_(opd::design::scratch_floats(vocabulary)) {}

void sampler::clear() {
    rows_.clear();
    z_.clear();
}

void sampler::add(trajectory& t, const float* z) {
    rows_.push_back(&t);
    z_.insert(z_.end(), z, z + v_);
}

void sampler::draw(std::int32_t version) {
    const auto n = static_cast<index_t>(rows_.size());
    const auto entries = static_cast<std::size_t>(n * width_);
    ids_.resize(entries);
    log_mu_.resize(entries);
    weight_.resize(entries);
    exact_.resize(entries);
    for (index_t r = 0; r < n; ++r) choose(r);
    // the library's log p, as in the learner; unused slots ask for id 0 and are blanked
    asked_ = ids_;
    for (auto& id : asked_) id = std::max(id, 0);
    opd::token_logp(backend_, opd::view(static_cast<const float*>(z_.data()), n, v_),
                    opd::view(static_cast<const token*>(asked_.data()), n, width_),
                    opd::view(log_mu_.data(), n, width_), static_cast<float>(o_.temperature));
    for (index_t r = 0; r < n; ++r)
        if (!std::isfinite(log_mu_[static_cast<std::size_t>(r * width_)])) {
            const trajectory& t = *rows_[static_cast<std::size_t>(r)];
            throw failure(exit_numeric, fmt::format("rollout: logits of sample {} at position {} are not finite",
                                                    t.sample, t.tokens.size()));
        }
    for (index_t r = 0; r < n; ++r) {
        trajectory& t = *rows_[static_cast<std::size_t>(r)];
        const auto first = static_cast<std::size_t>(r * width_);
        t.tokens.push_back(ids_[first]);
        t.log_mu.push_back(log_mu_[first]);
        t.versions.push_back(version);
        for (std::size_t e = first + 1; e < first + static_cast<std::size_t>(width_); ++e) {
            t.draw_ids.push_back(ids_[e]);
            t.draw_log_mu.push_back(ids_[e] < 0 ? 0.0f : log_mu_[e]);
            t.draw_weight.push_back(weight_[e]);
            t.draw_exact.push_back(exact_[e]);
        }
    }
}

void sampler::choose(index_t r) {
    const trajectory& t = *rows_[static_cast<std::size_t>(r)];
    const float* z = z_.data() + r * v_;
    const auto position = static_cast<std::uint32_t>(t.tokens.size());
    const auto first = static_cast<std::size_t>(r * width_);
    token* ids = ids_.data() + first + 1;
    const int count = o_.plan.count;
    const auto temperature = static_cast<float>(o_.temperature);
    index_t chosen = 0;
    if (o_.greedy) {
        chosen = std::max_element(z, z + v_) - z;
    } else {
        for (index_t v = 0; v < v_; ++v) scaled_[static_cast<std::size_t>(v)] = z[v] / temperature;
        chosen = opd::gumbel_max(opd::noise_row(o_.seed, opd::noise_stream::rollout, t.sample, position), 0,
                                 scaled_.data(), v_);
    }
    ids_[first] = static_cast<token>(std::max<index_t>(chosen, 0)); // NaN shows in the log-probs
    std::fill_n(weight_.data() + first, width_, 0.0f);
    std::fill_n(exact_.data() + first, width_, std::uint8_t{0});
    switch (o_.plan.what) {
    case draw_plan::kind::none:
        return;
    case draw_plan::kind::iid: {
        // draw 0 is the rollout's token
        const opd::noise_row noise(o_.seed, opd::noise_stream::mc, t.sample, position);
        ids[0] = ids_[first];
        opd::design::iid(
            z, v_, temperature, count - 1,
            [&](index_t draw) { return opd::keyed_uniform(noise, static_cast<std::uint32_t>(draw) + 1); }, ids + 1,
            log_mu_.data() + first + 2, scratch_);
        std::fill_n(weight_.data() + first + 1, count, 1.0f / static_cast<float>(count));
        return;
    }
    case draw_plan::kind::threshold:
        opd::design::threshold(
            z, v_, temperature, count,
            opd::keyed_uniform(opd::noise_row(o_.seed, opd::noise_stream::tail, t.sample, position), 0), ids,
            weight_.data() + first + 1, log_mu_.data() + first + 1, exact_.data() + first + 1, scratch_);
        return;
    case draw_plan::kind::top_k:
        std::iota(order_.begin(), order_.end(), 0);
        std::partial_sort(order_.begin(), order_.begin() + count, order_.end(),
                          [&](token a, token b) { return z[a] != z[b] ? z[a] > z[b] : a < b; });
        std::copy_n(order_.begin(), count, ids);
        return;
    }
}

} // namespace trainer
