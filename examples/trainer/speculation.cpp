// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "speculation.hpp"

#include <algorithm>

#include "learned_drafter.hpp"
#include "opd/rng.hpp"

namespace trainer {

namespace spec = opd::spec;

namespace {

// Chains of retrieval: one child a node. More sequences, fewer tokens each.
spec::tuner_options arms() {
    spec::tuner_options o;
    o.arms = {{8, 1, 8}, {5, 1, 8}, {3, 1, 8}, {4, 1, 4}, {2, 1, 4}, {2, 1, 2}, {1, 1, 2}};
    o.thresholds = {1, 5, 17};
    return o;
}

constexpr double look_again = 1.0 / 128;         // of the decisions: what all nodes cost, and bring
constexpr std::int32_t patience = 16, rest = 64; // decisions, steps
constexpr std::int32_t hold = 8;                 // decisions that an arm is kept for: medians take time

} // namespace

std::int32_t speculation_options::most() const {
    switch (what) {
    case kind::off:
        return 0;
    case kind::ngram:
    case kind::learned:
        return fixed.verify;
    case kind::automatic:
        break;
    }
    std::int32_t r = 0;
    for (const spec::strategy& s : arms().arms) r = std::max(r, s.verify);
    return r;
}

std::unique_ptr<drafter> make_drafter(const speculation_options& o) {
    if (o.learned) return std::make_unique<learned_drafter>(o.learned);
    return std::make_unique<retrieval_drafter>(o.retrieval);
}

// --- what is learnt -------------------------------------------------------------------------------------------------

void step_fit::heard(index_t rows, index_t drafted, double seconds) {
    if (known()) {
        const double usual = without(rows) + of_draft() * static_cast<double>(drafted);
        seconds = std::min(seconds, 3 * usual);
    }
    fit_.add(static_cast<double>(rows), static_cast<double>(drafted), seconds);
    ++heard_;
    cost_ = fit_.cost();
}

double step_fit::without(index_t rows) const {
    constexpr double least_seconds = 1e-12;
    return std::max(least_seconds, cost_[0] + cost_[1] * static_cast<double>(rows));
}

double step_fit::of_draft() const { return cost_[fit_.seen(2) ? 2 : 1]; }

void length_record::add_up() {
    double sequences = 1, tokens = 0; // one that is not known, and may end anywhere
    const std::size_t most = ended_.size() - 1;
    remaining_.resize(ended_.size());
    for (std::size_t drawn = most; drawn + 1 > 0; --drawn) { // those that are longer
        remaining_[drawn] = std::max(1.0, (tokens + static_cast<double>(most - drawn) / 2) / sequences);
        sequences += static_cast<double>(ended_[drawn]);
        tokens += sequences - 1;
    }
}

// --- a step ---------------------------------------------------------------------------------------------------------

speculation::speculation(const speculation_options& o, std::unique_ptr<drafter> d, const opd::filter& filter,
                         bool greedy, std::uint64_t seed, index_t lanes, index_t max_response)
    : options_(o), drafter_(std::move(d)), law_{.filter = filter, .greedy = greedy, .seed = seed},
      max_response_(max_response), plans_(static_cast<std::size_t>(lanes)), tuner_(arms()),
      switch_({.on_at = o.running, .off_at = o.running + o.running / 4}), lengths_(max_response) {}

void speculation::end(index_t lane, const trajectory& t, bool finished) {
    if (finished) lengths_.heard(static_cast<index_t>(t.response().size()));
    drafter_->end(lane, t, finished);
}

double speculation::uniform() {
    const opd::noise_row noise(law_.seed, opd::noise_stream::coin, decisions_, 0);
    return opd::keyed_uniform(noise, uniforms_++);
}

void speculation::draft(std::span<const due> sequences, index_t reading, bool vacant) {
    for (plan& p : plans_) p.tree = {};
    batch_ = static_cast<index_t>(sequences.size());
    accepted_ = verified_ = 0;
    strategy_ = {};
    if (batch_ == 0) return;
    const bool fixed = options_.what != speculation_options::kind::automatic;
    bool all = fixed; // nodes of the strategy, whatever they cost
    if (fixed) {
        strategy_ = options_.fixed;
    } else if (switch_.check(batch_)) {
        if (rests_ > 0) {
            --rests_;
            return;
        }
        ++decisions_, uniforms_ = 0;
        if (held_ == 0) arm_ = tuner_.choose(batch_, [this] { return uniform(); }), held_ = hold;
        --held_;
        strategy_ = arm_;
        all = !cost_.known() || uniform() < look_again;
    }
    if (strategy_.none()) return;

    wishes_.clear();
    for (const due& d : sequences) {
        const auto drawn = static_cast<index_t>(d.sequence->response().size());
        const auto room =
            static_cast<std::int32_t>(max_response_ - drawn - 1); // the step draws one more than is followed
        plan& p = plans_[static_cast<std::size_t>(d.lane)];
        p.builder.begin(rates_);
        if (room < 1) continue;
        spec::draft_law law = law_;
        law.sample = d.sequence->sample;
        law.position = static_cast<std::uint32_t>(d.sequence->tokens.size());
        wishes_.push_back({d.lane, d.sequence, law, std::min(strategy_.depth, room), strategy_.top_k, &p.builder});
    }
    drafter_->propose(wishes_);
    bool offered = false;
    for (const draft_wish& w : wishes_) {
        counts_.drafted += w.tree->size();
        offered = offered || w.tree->size() > 0;
    }
    if (!offered) {
        strategy_ = {};
        return;
    }
    const auto select = [&](const draft_wish& w, index_t nodes) {
        spec::draft_tree& tree = plans_[static_cast<std::size_t>(w.lane)].tree;
        tree = w.tree->select(nodes);
        verified_ += tree.size();
    };
    if (all) {
        for (const draft_wish& w : wishes_) select(w, strategy_.verify);
        return;
    }
    candidates_.clear();
    for (const draft_wish& w : wishes_) {
        const auto gains = w.tree->gains();
        candidates_.push_back({gains.first(std::min(gains.size(), static_cast<std::size_t>(strategy_.verify))),
                               lengths_.remaining(static_cast<index_t>(w.sequence->response().size()))});
    }
    const auto rows = static_cast<index_t>(candidates_.size());
    const double without = cost_.without(batch_ + reading);
    const auto shares =
        budget_.share(candidates_, spec::step_cost({{rows, without}, {rows + 1, without + cost_.of_draft()}}),
                      {.tail = vacant ? 1.0 : 0.0});
    for (std::size_t i = 0; i < wishes_.size(); ++i) select(wishes_[i], shares[i]);
    if (verified_ > 0) {
        fruitless_ = 0;
        return;
    }
    strategy_ = {}; // what the step comes to says nothing of it
    if (++fruitless_ == patience) fruitless_ = 0, rests_ = rest;
}

void speculation::verified(index_t lane, const spec::verdict& v, index_t tokens) {
    plan& p = plans_[static_cast<std::size_t>(lane)];
    ++counts_.steps;
    counts_.tokens += tokens;
    if (p.tree.size() == 0) return;
    ++counts_.verified_steps;
    counts_.verified += p.tree.size();
    counts_.accepted += v.accepted;
    accepted_ += v.accepted;
    p.builder.learn(rates_, v);
}

void speculation::took(index_t rows, double seconds) {
    if (options_.what != speculation_options::kind::automatic || batch_ == 0 || rows == 0 || !(seconds > 0)) return;
    cost_.heard(rows - static_cast<index_t>(verified_), static_cast<index_t>(verified_), seconds);
    if (!strategy_.none())
        tuner_.heard(strategy_, batch_, static_cast<double>(accepted_) / static_cast<double>(batch_), seconds);
}

} // namespace trainer
