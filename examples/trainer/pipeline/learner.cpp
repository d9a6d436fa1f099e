// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "pipeline/learner.hpp"

#include <algorithm>
#include <cmath>
#include <memory>
#include <stdexcept>
#include <utility>

#include <fmt/format.h>

#include "opd/opd.hpp"
#include "opd/ratio_sketch.hpp"
#include "settings/estimator.hpp"

namespace trainer {

double rate_of(const config& c, const rate_change& from, std::int64_t step) {
    return planned_rate(from, c.distill.rate, 0.1, c.distill.warmup, step, c.distill.steps);
}

opd::offline_drift drift_of(const config& c, const row_batch& batch, const teacher_cache& cache,
                            const std::vector<float>& log_p) {
    opd::offline_drift d;
    if (part_estimator_of(c) == part_estimator::lightning) d.clip = c.distill.advantage_clip;
    const auto of = [&](const std::vector<float>& column) { return opd::view(column.data(), batch.rows); };
    d.add(of(log_p), of(batch.log_mu), opd::row_offsets<>(batch.offsets), opd::row_mask(batch.mask),
          of(cache.next_log_q));
    return d;
}

void learner_result::add(const learner_result& o) {
    const auto mean = [](double a, double n, double b, double m) { return n > 0 ? (a * n + b * m) / (n + m) : b; };
    const auto mine = static_cast<double>(diagnostics.kept), theirs = static_cast<double>(o.diagnostics.kept);
    loss = mean(loss, mine, o.loss, theirs);
    kl = mean(kl, mine, o.kl, theirs);
    gradient_norm = mean(gradient_norm, updates, o.gradient_norm, o.updates);
    rate = o.rate;
    tokens += o.tokens;
    mismatched += o.mismatched;
    mismatch.merge(o.mismatch);
    prefix.merge(o.prefix);
    diagnostics.merge(o.diagnostics);
    drift.merge(o.drift);
    if (ratios.empty())
        ratios = o.ratios;
    else
        for (std::size_t i = 0; i < o.ratios.size(); ++i) ratios[i] += o.ratios[i];
    updates += o.updates;
}

learner_result learner::step(const row_batch& batch, const teacher_cache& cache, double rate, std::int32_t version,
                             int updates) {
    learner_result r = accumulate(batch, cache, version, updates);
    finish(r, rate);
    return r;
}

void learner::finish(learner_result& r, double rate) {
    std::vector<float>& gradient = parts_ > 1 ? sum_ : gradient_;
    r.gradient_norm =
        update_ ? update_(rate, gradient) : adamw_step(settings_.optimizer, rate, gradient, state_, model_);
    r.rate = rate;
    r.updates = 1;
    parts_ = 0;
}

learner_result learner::accumulate(const row_batch& batch, const teacher_cache& cache, std::int32_t version,
                                   int updates) {
    if (cache.rows() != batch.rows)
        throw std::invalid_argument(
            fmt::format("learner: a batch of {} rows and a teacher cache of {}", batch.rows, cache.rows()));
    const bool hidden = cache.what == teacher_cache::kind::hidden;
    if (hidden && teacher_head_.columns != cache.entries)
        throw std::invalid_argument(fmt::format("learner: hidden states of {} numbers, and a teacher's head for {}",
                                                cache.entries, teacher_head_.columns));
    if (parts_ == 1) std::swap(sum_, gradient_);
    const index_t rows = pass_.set_sequences(batch.inputs);
    if (hidden) {
        states_.resize(static_cast<std::size_t>(rows * model_.shape.width));
        pass_.forward_states(states_.data());
        next_log_probs(backend_, model_, states_.data(), batch, settings_.distill.temperature,
                       static_cast<std::size_t>(settings_.distill.hidden_budget), log_p_);
    } else {
        logits_.resize(static_cast<std::size_t>(rows * model_.shape.vocabulary));
        pass_.forward(logits_.data());
        recompute(batch);
    }

    learner_result r;
    r.tokens = rows;
    const bool filtered = !batch.kept_offsets.empty();
    double kl = 0;
    for (std::size_t i = 0; i < batch.mask.size(); ++i) {
        if (batch.mask[i] == 0) continue;
        kl += static_cast<double>(batch.log_mu[i]) - static_cast<double>(cache.next_log_q[i]);
        // a filter's log mu and log p on the kept set are equal up to rounding
        const float apart = std::abs(log_p_[i] - batch.log_mu[i]);
        r.mismatched += updates == 0 && batch.versions[i] == version && !(apart <= (filtered ? 1e-4f : 0.0f));
    }
    r.kl = batch.kept > 0 ? kl / static_cast<double>(batch.kept) : 0;

    r.prefix.add(opd::view(std::as_const(log_p_).data(), rows), opd::view(batch.log_mu.data(), rows),
                 opd::row_offsets<>(batch.offsets), opd::row_mask(batch.mask));
    if (is_offline(settings_)) r.drift = drift_of(settings_, batch, cache, log_p_);
    if (!batch.log_old.empty()) {
        std::vector<float> advantage(log_p_.size(), 0.0f); // of reverse KL
        for (std::size_t i = 0; i < log_p_.size(); ++i)
            if (batch.mask[i] != 0) advantage[i] = cache.next_log_q[i] - log_p_[i];
        const auto of = []<class T>(const std::vector<T>& column) {
            return column.empty() ? opd::vector_view<const T>() : opd::view(column.data(), std::ssize(column));
        };
        r.mismatch.add(opd::mismatch_columns<float>{.log_mu = of(batch.log_mu),
                                                    .log_old = of(batch.log_old),
                                                    .log_p = of(log_p_),
                                                    .advantage = of(advantage),
                                                    .rollout_top = of(batch.top),
                                                    .old_top = of(batch.old_top),
                                                    .mask = opd::row_mask(batch.mask)});
    }
    if (batch.entries > 0 && cache.what != teacher_cache::kind::support)
        r.ratios.assign(static_cast<std::size_t>(opd::ratio_sketch::bins), 0);
    const opd::result o =
        hidden ? loss_of_states(batch, cache, version) : loss_of_logits(batch, cache, version, r.ratios);
    r.loss = o.loss;
    r.diagnostics = o.diagnostics;
    if (++parts_ > 1)
        for (std::size_t i = 0; i < sum_.size(); ++i) sum_[i] += gradient_[i];
    return r;
}

// Loss, and the gradient of the weights, from the logits of the last forward pass.
opd::result learner::loss_of_logits(const row_batch& batch, const teacher_cache& cache, std::int32_t version,
                                    std::span<index_t> ratios) {
    logits_at_once_ = std::max(logits_at_once_, sizeof(float) * (logits_.size() + cache.logits.size()));
    const opd::result r =
        objective(backend_, settings_, batch, cache, logits_.data(), model_.shape.vocabulary, version, ratios);
    pass_.backward(logits_.data(), gradient_);
    return r;
}

// The same from what the heads read: the call makes the logits, and writes the gradient of the student's head to its
// place.
opd::result learner::loss_of_states(const row_batch& batch, const teacher_cache& cache, std::int32_t version) {
    const index_t v = model_.shape.vocabulary, d = model_.shape.width;
    const tensor& head = model_.layout.head;
    d_states_.resize(states_.size());
    gradient_.resize(static_cast<std::size_t>(model_.layout.size));
    const student_rows student{.x = opd::view(std::as_const(states_).data(), batch.rows, d),
                               .w = model_head(model_),
                               .dx = opd::view(d_states_.data(), batch.rows, d),
                               .dw = opd::view(gradient_.data() + head.offset, v, d)};
    const auto budget = static_cast<std::size_t>(settings_.distill.hidden_budget);
    const std::size_t row = sizeof(float) * static_cast<std::size_t>(v);
    const auto block = std::min(static_cast<std::size_t>(batch.rows), budget / row);
    logits_at_once_ = std::max(logits_at_once_, 2 * row * block);
    const opd::result r = objective(backend_, settings_, batch, cache, student, teacher_head_, version);
    pass_.backward_states(d_states_.data(), gradient_);
    return r;
}

policy learner::snapshot(std::int32_t version) const {
    return {std::make_shared<const transformer<float>>(model_.working()), version};
}

// log p of the tokens that follow, from the logits of the last forward pass, by the call that rollout makes too.
void learner::recompute(const row_batch& batch) {
    const index_t v = model_.shape.vocabulary;
    if (!batch.kept_offsets.empty()) return kept_next_log_probs(backend_, settings_, batch, logits_.data(), v, log_p_);
    log_p_.assign(static_cast<std::size_t>(batch.rows), 0.0f);
    opd::token_logp(backend_, opd::view(static_cast<const float*>(logits_.data()), batch.rows, v),
                    opd::view(batch.next.data(), batch.rows, 1), opd::view(log_p_.data(), batch.rows, 1),
                    static_cast<float>(settings_.distill.temperature), opd::row_mask(batch.mask));
}

void learner::look_back(row_batch& batch) {
    const bool entries = reads_proximal(settings_), next = tells_mismatch(settings_);
    if (!entries && !next) return;
    const index_t rows = pass_.set_sequences(batch.inputs), v = model_.shape.vocabulary;
    logits_.resize(static_cast<std::size_t>(rows * v));
    pass_.forward(logits_.data());
    if (entries) trainer::entry_log_probs(backend_, settings_, batch, logits_.data(), v, batch.entry_log_prox);
    if (!next) return;
    recompute(batch);
    batch.log_old = log_p_;
    batch.old_top.clear();
    for (std::size_t r = 0; r < batch.top.size(); ++r) {
        const auto row = logits_.begin() + static_cast<std::ptrdiff_t>(r) * v;
        batch.old_top.push_back(static_cast<token>(std::max_element(row, row + v) - row));
    }
}

std::vector<float> learner::token_log_probs(const row_batch& batch) {
    const index_t rows = pass_.set_sequences(batch.inputs);
    logits_.resize(static_cast<std::size_t>(rows * model_.shape.vocabulary));
    pass_.forward(logits_.data());
    recompute(batch);
    return log_p_;
}

std::vector<float> learner::entry_log_probs(const row_batch& batch) {
    const index_t rows = pass_.set_sequences(batch.inputs), v = model_.shape.vocabulary;
    logits_.resize(static_cast<std::size_t>(rows * v));
    pass_.forward(logits_.data());
    std::vector<float> log_p;
    trainer::entry_log_probs(backend_, settings_, batch, logits_.data(), v, log_p);
    return log_p;
}

} // namespace trainer
