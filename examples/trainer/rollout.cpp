// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "rollout.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <numeric>

#include <fmt/format.h>

#include "config.hpp"
#include "log_probs.hpp"
#include "opd/rng.hpp"

namespace trainer {

namespace {

// One row of logits becomes a token and the records of the plan.
class sampler {
public:
    sampler(const sampling& options, index_t vocabulary)
        : o_(options), v_(vocabulary), log_mu_(static_cast<std::size_t>(vocabulary)),
          mu_(static_cast<std::size_t>(vocabulary)), order_(static_cast<std::size_t>(vocabulary)) {}

    // Appends the token at `position` of the sequence to t.
    void step(const float* z, std::uint32_t position, trajectory& t) {
        const float normaliser = log_normaliser(z, v_, o_.temperature);
        if (!std::isfinite(normaliser))
            throw failure(exit_numeric, fmt::format("rollout: logits of sample {} at position {} are not finite",
                                                    t.sample, position));
        for (index_t v = 0; v < v_; ++v)
            log_mu_[static_cast<std::size_t>(v)] = log_prob(z, v, o_.temperature, normaliser);
        index_t chosen = 0;
        if (o_.greedy)
            chosen = std::max_element(log_mu_.begin(), log_mu_.end()) - log_mu_.begin();
        else
            chosen = opd::gumbel_max(opd::noise_row(o_.seed, opd::noise_stream::rollout, t.sample, position), 0,
                                     log_mu_.data(), v_);
        record(static_cast<token>(chosen), position, t);
        t.tokens.push_back(static_cast<token>(chosen));
        t.log_mu.push_back(log_mu_[static_cast<std::size_t>(chosen)]);
        t.versions.push_back(o_.version);
    }

private:
    void add(std::int32_t id, float weight, bool exact, trajectory& t) const {
        t.draw_ids.push_back(id);
        t.draw_log_mu.push_back(id < 0 ? 0.0f : log_mu_[static_cast<std::size_t>(id)]);
        t.draw_weight.push_back(weight);
        t.draw_exact.push_back(exact);
    }

    void record(token chosen, std::uint32_t position, trajectory& t) {
        const int count = o_.plan.count;
        switch (o_.plan.what) {
        case draw_plan::kind::none:
            return;
        case draw_plan::kind::iid: {
            // draw 0 is the rollout's token; the others go through the inverse of mu's distribution function
            const opd::noise_row noise(o_.seed, opd::noise_stream::mc, t.sample, position);
            const double total = probabilities();
            for (int draw = 0; draw < count; ++draw) {
                std::int32_t id = chosen;
                if (draw > 0) id = invert(opd::keyed_uniform(noise, static_cast<std::uint32_t>(draw)) * total);
                add(id, 1.0f / static_cast<float>(count), false, t);
            }
            return;
        }
        case draw_plan::kind::threshold: {
            probabilities();
            const std::vector<double> inclusion = threshold_inclusion(mu_, count);
            int used = 0;
            // systematic sampling: one uniform u, an entry for every integer that the running sum + u passes
            double running =
                opd::keyed_uniform(opd::noise_row(o_.seed, opd::noise_stream::tail, t.sample, position), 0);
            for (index_t v = 0; v < v_; ++v) {
                const double p = inclusion[static_cast<std::size_t>(v)], mu = mu_[static_cast<std::size_t>(v)];
                if (p >= 1) {
                    add(static_cast<std::int32_t>(v), static_cast<float>(mu), true, t);
                    ++used;
                    continue;
                }
                running += p;
                if (running >= 1 && used < count) {
                    running -= 1;
                    add(static_cast<std::int32_t>(v), static_cast<float>(mu / p), false, t);
                    ++used;
                }
            }
            for (; used < count; ++used) add(-1, 0, false, t);
            return;
        }
        case draw_plan::kind::top_k: {
            std::iota(order_.begin(), order_.end(), 0);
            std::partial_sort(
                order_.begin(), order_.begin() + count, order_.end(), [&](std::int32_t a, std::int32_t b) {
                    const float x = log_mu_[static_cast<std::size_t>(a)], y = log_mu_[static_cast<std::size_t>(b)];
                    return x != y ? x > y : a < b;
                });
            for (int i = 0; i < count; ++i) add(order_[static_cast<std::size_t>(i)], 0, true, t);
            return;
        }
        }
    }

    double probabilities() {
        double total = 0;
        for (std::size_t v = 0; v < mu_.size(); ++v) total += mu_[v] = std::exp(static_cast<double>(log_mu_[v]));
        return total;
    }
    std::int32_t invert(double target) const {
        double running = 0;
        std::size_t last = 0;
        for (std::size_t v = 0; v < mu_.size(); ++v)
            if (mu_[v] > 0) {
                last = v;
                if ((running += mu_[v]) > target) break;
            }
        return static_cast<std::int32_t>(last);
    }

    const sampling& o_;
    index_t v_;
    std::vector<float> log_mu_;       // (V)
    std::vector<double> mu_;          // (V)
    std::vector<std::int32_t> order_; // (V)
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
            for (const segment& g : segments_) {
                row += g.count;
                slot& s = slots_[static_cast<std::size_t>(g.slot)];
                s.computed += static_cast<std::size_t>(g.count);
                trajectory& t = *s.running;
                if (s.computed < t.tokens.size()) continue; // the rest of the prompt comes in the next step
                sampler_.step(logits_.data() + (row - 1) * v, static_cast<std::uint32_t>(t.tokens.size()), t);
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

std::vector<double> threshold_inclusion(std::span<const double> mu, int budget) {
    std::vector<std::size_t> order;
    double rest = 0; // mass of the entries that are not certain
    for (std::size_t v = 0; v < mu.size(); ++v)
        if (mu[v] > 0) {
            order.push_back(v);
            rest += mu[v];
        }
    std::vector<double> inclusion(mu.size(), 0);
    if (order.size() <= static_cast<std::size_t>(budget)) {
        for (std::size_t v : order) inclusion[v] = 1;
        return inclusion;
    }
    std::sort(order.begin(), order.end(),
              [&](std::size_t a, std::size_t b) { return mu[a] != mu[b] ? mu[a] > mu[b] : a < b; });
    // the largest become certain while kappa = (budget - certain) / rest would lift them to 1
    std::size_t certain = 0;
    while (certain < static_cast<std::size_t>(budget) &&
           (static_cast<double>(budget) - static_cast<double>(certain)) * mu[order[certain]] >= rest) {
        inclusion[order[certain]] = 1;
        ++certain;
        rest = 0; // summed anew, smallest first: subtracting would leave rounding behind
        for (std::size_t i = order.size(); i-- > certain;) rest += mu[order[i]];
    }
    const double kappa = (static_cast<double>(budget) - static_cast<double>(certain)) / rest;
    for (std::size_t i = certain; i < order.size(); ++i) inclusion[order[i]] = kappa * mu[order[i]];
    return inclusion;
}

float log_normaliser(const float* z, index_t vocabulary, double temperature) {
    const float inverse = 1.0f / static_cast<float>(temperature);
    float top = z[0] / static_cast<float>(temperature);
    for (index_t v = 1; v < vocabulary; ++v) top = std::max(top, z[v] / static_cast<float>(temperature));
    double sum = 0;
    for (index_t v = 0; v < vocabulary; ++v) sum += std::exp(z[v] * inverse - top);
    return top + static_cast<float>(std::log(sum));
}

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
