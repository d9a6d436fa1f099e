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
    if (o.what == speculation_options::kind::learned) return std::make_unique<learned_drafter>(o.learned);
    return std::make_unique<retrieval_drafter>(o.retrieval);
}

// --- what is learnt -------------------------------------------------------------------------------------------------

void cost_line::heard(index_t rows, double seconds) {
    const auto r = static_cast<double>(rows);
    n_ = n_ * kept + 1, r_ = r_ * kept + r, rr_ = rr_ * kept + r * r;
    s_ = s_ * kept + seconds, rs_ = rs_ * kept + r * seconds;
}

std::optional<spec::step_cost> cost_line::cost() const {
    if (n_ < 4) return {};
    const double spread = rr_ - r_ * r_ / n_; // of rows, times n
    if (!(spread > 1e-3 * n_)) return {};
    double b = std::max(0.0, (rs_ - r_ * s_ / n_) / spread), a = (s_ - b * r_) / n_;
    if (!(a > 0)) a = 0, b = s_ / r_; // every row costs the same
    if (!(a + b > 0)) return {};
    constexpr double least = 1e-12; // a step cost is positive
    return spec::step_cost({{0, std::max(a, least)}, {1, std::max(a, least) + b}});
}

double length_record::remaining(index_t drawn) const {
    double sequences = 1, tokens = (static_cast<double>(size()) - 1 - static_cast<double>(drawn)) / 2; // one unknown
    for (std::size_t n = static_cast<std::size_t>(drawn) + 1; n < ended_.size(); ++n) {
        sequences += static_cast<double>(ended_[n]);
        tokens += static_cast<double>(ended_[n]) * static_cast<double>(n - static_cast<std::size_t>(drawn));
    }
    return std::max(1.0, tokens / sequences);
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

void speculation::draft(std::span<const due> sequences, index_t reading) {
    for (plan& p : plans_) p.tree = {};
    batch_ = static_cast<index_t>(sequences.size());
    accepted_ = 0;
    strategy_ = {};
    if (batch_ == 0) return;
    const bool fixed = options_.what != speculation_options::kind::automatic;
    if (fixed) {
        strategy_ = options_.fixed;
    } else if (switch_.check(batch_)) {
        ++decisions_, uniforms_ = 0;
        strategy_ = tuner_.choose(batch_, [this] { return uniform(); });
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
    for (const draft_wish& w : wishes_) counts_.drafted += w.tree->size();
    const auto verify = static_cast<std::size_t>(strategy_.verify);
    const auto cost = fixed ? std::optional<spec::step_cost>() : cost_.cost();
    if (!cost) {
        for (const draft_wish& w : wishes_)
            plans_[static_cast<std::size_t>(w.lane)].tree = w.tree->select(strategy_.verify);
        return;
    }
    // rows that only read are there anyway
    const double a = cost->seconds(0), b = cost->seconds(1) - a;
    candidates_.clear();
    for (const draft_wish& w : wishes_) {
        const auto gains = w.tree->gains();
        candidates_.push_back({gains.first(std::min(gains.size(), verify)),
                               lengths_.remaining(static_cast<index_t>(w.sequence->response().size()))});
    }
    if (candidates_.empty()) return;
    const auto others = batch_ - static_cast<index_t>(candidates_.size()) + reading;
    const auto shares = budget_.share(candidates_, spec::step_cost::line(a + b * static_cast<double>(others), b));
    bool any = false;
    for (std::size_t i = 0; i < wishes_.size(); ++i) {
        plans_[static_cast<std::size_t>(wishes_[i].lane)].tree = wishes_[i].tree->select(shares[i]);
        any = any || shares[i] > 0;
    }
    if (!any) strategy_ = {}; // what the step comes to says nothing of it
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
    if (options_.what != speculation_options::kind::automatic || rows == 0 || !(seconds > 0)) return;
    cost_.heard(rows, seconds);
    if (batch_ > 0 && !strategy_.none())
        tuner_.heard(strategy_, batch_, static_cast<double>(accepted_) / static_cast<double>(batch_), seconds);
}

} // namespace trainer
