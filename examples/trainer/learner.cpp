// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "learner.hpp"

#include <memory>
#include <stdexcept>
#include <utility>

#include <fmt/format.h>

#include "opd/opd.hpp"
#include "opd/ranges.hpp"

namespace trainer {

double rate_of(const config& c, const rate_change& from, std::int64_t step) {
    return planned_rate(from, c.distill.rate, 0.1, c.distill.warmup, step, c.distill.steps);
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
    prefix.merge(o.prefix);
    diagnostics.merge(o.diagnostics);
    updates += o.updates;
}

learner_result learner::step(const row_batch& batch, const teacher_cache& cache, double rate, std::int32_t version,
                             int updates) {
    const index_t v = model_.shape.vocabulary;
    if (cache.rows() != batch.rows)
        throw std::invalid_argument(
            fmt::format("learner: a batch of {} rows and a teacher cache of {}", batch.rows, cache.rows()));
    const index_t rows = pass_.set_sequences(batch.inputs);
    logits_.resize(static_cast<std::size_t>(rows * v));
    pass_.forward(logits_.data());

    learner_result r;
    r.tokens = rows;
    r.rate = rate;
    recompute(batch);
    double kl = 0;
    for (const index_t row : opd::kept_rows(batch.mask, rows)) {
        const auto i = static_cast<std::size_t>(row);
        kl += static_cast<double>(batch.log_mu[i]) - static_cast<double>(cache.next_log_q[i]);
        r.mismatched += updates == 0 && batch.versions[i] == version && log_p_[i] != batch.log_mu[i];
    }
    r.kl = batch.kept > 0 ? kl / static_cast<double>(batch.kept) : 0;

    r.prefix.add(opd::view(std::as_const(log_p_).data(), rows), opd::view(batch.log_mu.data(), rows),
                 opd::row_offsets<>(batch.offsets), opd::row_mask(batch.mask));
    const opd::result o = objective(backend_, settings_, batch, cache, logits_.data(), v, version);
    r.loss = o.loss;
    r.diagnostics = o.diagnostics;
    pass_.backward(logits_.data(), gradient_);
    r.gradient_norm = adamw_step(settings_.optimizer, rate, gradient_, state_, model_);
    r.updates = 1;
    return r;
}

policy learner::snapshot(std::int32_t version) const {
    return {std::make_shared<const transformer<float>>(model_), version};
}

// log p of the tokens that follow, from the logits of the last forward pass, by the call that rollout makes too.
void learner::recompute(const row_batch& batch) {
    const index_t v = model_.shape.vocabulary;
    log_p_.assign(static_cast<std::size_t>(batch.rows), 0.0f);
    opd::token_logp(backend_, opd::view(static_cast<const float*>(logits_.data()), batch.rows, v),
                    opd::view(batch.next.data(), batch.rows, 1), opd::view(log_p_.data(), batch.rows, 1),
                    static_cast<float>(settings_.distill.temperature), opd::row_mask(batch.mask));
}

std::vector<float> learner::token_log_probs(const row_batch& batch) {
    const index_t rows = pass_.set_sequences(batch.inputs);
    logits_.resize(static_cast<std::size_t>(rows * model_.shape.vocabulary));
    pass_.forward(logits_.data());
    recompute(batch);
    return log_p_;
}

} // namespace trainer
