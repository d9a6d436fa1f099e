// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "rollout.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <numeric>

#include <fmt/format.h>

#include "config.hpp"
#include "opd/backends/eigen.hpp"
#include "opd/opd.hpp"
#include "opd/rng.hpp"

namespace trainer {

namespace {

// Rows of logits become tokens and the records of the plan.
class sampler {
public:
    sampler(const sampling& options, index_t vocabulary)
        : o_(options), v_(vocabulary), width_(1 + options.plan.count), scaled_(static_cast<std::size_t>(vocabulary)),
          order_(static_cast<std::size_t>(vocabulary)), scratch_(opd::design::scratch_floats(vocabulary)) {}

    void clear() {
        rows_.clear();
        z_.clear();
    }
    /// The next token of t is to be drawn from the logits z (V).
    void add(trajectory& t, const float* z) {
        rows_.push_back(&t);
        z_.insert(z_.end(), z, z + v_);
    }

    /// Appends a token to every trajectory that was added.
    void draw() {
        const auto n = static_cast<index_t>(rows_.size());
        const auto entries = static_cast<std::size_t>(n * width_);
        ids_.resize(entries); // the token, then the plan's entries
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
        for (index_t r = 0; r < n; ++r) {
            trajectory& t = *rows_[static_cast<std::size_t>(r)];
            const auto first = static_cast<std::size_t>(r * width_);
            if (!std::isfinite(log_mu_[first]))
                throw failure(exit_numeric, fmt::format("rollout: logits of sample {} at position {} are not finite",
                                                        t.sample, t.tokens.size()));
            t.tokens.push_back(ids_[first]);
            t.log_mu.push_back(log_mu_[first]);
            t.versions.push_back(o_.version);
            for (std::size_t e = first + 1; e < first + static_cast<std::size_t>(width_); ++e) {
                t.draw_ids.push_back(ids_[e]);
                t.draw_log_mu.push_back(ids_[e] < 0 ? 0.0f : log_mu_[e]);
                t.draw_weight.push_back(weight_[e]);
                t.draw_exact.push_back(exact_[e]);
            }
        }
    }

private:
    void choose(index_t r) {
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

    const sampling& o_;
    index_t v_, width_;
    opd::eigen_backend backend_{.threads = 1};
    std::vector<trajectory*> rows_;   // (n)
    std::vector<float> z_;            // (n,V)
    std::vector<token> ids_, asked_;  // (n,width)
    std::vector<float> log_mu_;       // (n,width)
    std::vector<float> weight_;       // (n,width)
    std::vector<std::uint8_t> exact_; // (n,width)
    std::vector<float> scaled_;       // (V)
    std::vector<token> order_;        // (V)
    std::vector<float> scratch_;
};

// One thread's share of the slots.
class engine {
public:
    engine(const transformer<float>& model, const sampling& options, index_t slots, index_t length)
        : model_(model), o_(options), sampler_(options, model.shape.vocabulary),
          slots_(static_cast<std::size_t>(slots)) {
        cache_.resize(model.shape, slots, length);
    }

    void run(std::span<const request> requests, std::atomic<std::size_t>& next, std::vector<trajectory>& out) {
        for (;;) {
            segments_.clear();
            tokens_.clear();
            for (std::size_t i = 0; i < slots_.size(); ++i) {
                slot& s = slots_[i];
                if (!s.running) start(s, requests, next, out);
                if (!s.running) continue;
                const auto& all = s.running->tokens;
                const std::size_t count = std::min(all.size() - s.computed, static_cast<std::size_t>(o_.prefill_chunk));
                segments_.push_back(
                    {static_cast<index_t>(i), static_cast<index_t>(s.computed), static_cast<index_t>(count)});
                tokens_.insert(tokens_.end(), all.begin() + static_cast<std::ptrdiff_t>(s.computed),
                               all.begin() + static_cast<std::ptrdiff_t>(s.computed + count));
            }
            if (segments_.empty()) return;
            const index_t v = model_.shape.vocabulary;
            logits_.resize(tokens_.size() * static_cast<std::size_t>(v));
            forward_rows(model_, std::span<const segment>(segments_), std::span<const std::int32_t>(tokens_), cache_,
                         state_, false, logits_.data());
            index_t row = 0;
            sampler_.clear();
            for (const segment& g : segments_) {
                row += g.count;
                slot& s = slots_[static_cast<std::size_t>(g.slot)];
                s.computed += static_cast<std::size_t>(g.count);
                if (s.computed == s.running->tokens.size()) // else the rest of the prompt comes in the next step
                    sampler_.add(*s.running, logits_.data() + (row - 1) * v);
            }
            sampler_.draw();
            for (slot& s : slots_) {
                if (!s.running || s.running->tokens.size() == s.running->prompt_length) continue;
                trajectory& t = *s.running;
                t.ended = t.tokens.back() == o_.end;
                if (t.ended || t.tokens.size() - t.prompt_length == static_cast<std::size_t>(o_.max_response))
                    s.running = nullptr;
            }
        }
    }

private:
    struct slot {
        trajectory* running = nullptr;
        std::size_t computed = 0; // tokens whose keys and values are in the cache
    };

    static void start(slot& s, std::span<const request> requests, std::atomic<std::size_t>& next,
                      std::vector<trajectory>& out) {
        const std::size_t i = next.fetch_add(1);
        if (i >= requests.size()) return;
        trajectory& t = out[i];
        t.sample = requests[i].sample;
        t.tokens = requests[i].prompt;
        t.prompt_length = t.tokens.size();
        s = {&t, 0};
    }

    const transformer<float>& model_;
    const sampling& o_;
    sampler sampler_;
    std::vector<slot> slots_;
    kv_cache<float> cache_;
    forward_state<float> state_;
    std::vector<segment> segments_;
    std::vector<token> tokens_;
    std::vector<float> logits_;
};

} // namespace

std::vector<trajectory> roll_out(const transformer<float>& model, opd::thread_team& threads,
                                 std::span<const request> requests, const sampling& options) {
    std::vector<trajectory> out(requests.size());
    if (options.max_response < 1) throw std::invalid_argument("rollout: max_response must be at least 1");
    std::size_t longest = 0;
    for (const request& r : requests) {
        if (r.prompt.empty())
            throw std::invalid_argument(fmt::format("rollout: the prompt of sample {} is empty", r.sample));
        longest = std::max(longest, r.prompt.size());
    }
    const index_t length = static_cast<index_t>(longest) + options.max_response;
    if (length > model.shape.max_length)
        throw std::invalid_argument(fmt::format("rollout: {} tokens of prompt and response, the model takes {}", length,
                                                model.shape.max_length));
    std::atomic<std::size_t> next{0};
    const index_t share = std::max<index_t>(1, options.slots / threads.size());
    threads.run(threads.size(), [&](index_t, int) {
        if (next >= requests.size()) return;
        engine(model, options, share, length).run(requests, next, out);
    });
    return out;
}

} // namespace trainer
