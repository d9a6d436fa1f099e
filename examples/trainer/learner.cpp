// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "learner.hpp"

#include "log_probs.hpp"

namespace trainer {

learner_result learner::step(const row_batch& batch, const teacher_cache& cache, double rate, std::int32_t version) {
    const index_t v = model_.shape.vocabulary;
    const index_t rows = pass_.set_sequences(batch.inputs);
    logits_.resize(static_cast<std::size_t>(rows * v));
    pass_.forward(logits_.data());

    learner_result r;
    r.tokens = rows;
    double kl = 0;
    for (index_t row = 0; row < rows; ++row) {
        const auto i = static_cast<std::size_t>(row);
        if (!batch.mask[i]) continue;
        kl += static_cast<double>(batch.log_mu[i]) - static_cast<double>(cache.next_log_q[i]);
        if (batch.versions[i] != version) continue;
        const float* z = logits_.data() + row * v;
        const float normaliser = log_normaliser(z, v, settings_.distill.temperature);
        r.mismatched += log_prob(z, batch.next[i], settings_.distill.temperature, normaliser) != batch.log_mu[i];
    }
    r.kl = batch.kept > 0 ? kl / static_cast<double>(batch.kept) : 0;

    const opd::result o = objective(backend_, settings_, batch, cache, logits_.data(), v, version);
    r.loss = o.loss;
    r.diagnostics = o.diagnostics;
    pass_.backward(logits_.data(), gradient_);
    r.gradient_norm = adamw_step(settings_.optimizer, rate, gradient_, state_, model_);
    return r;
}

std::vector<float> learner::token_log_probs(const row_batch& batch) {
    const index_t v = model_.shape.vocabulary;
    const index_t rows = pass_.set_sequences(batch.inputs);
    logits_.resize(static_cast<std::size_t>(rows * v));
    pass_.forward(logits_.data());
    std::vector<float> r(static_cast<std::size_t>(rows), 0.0f);
    for (index_t row = 0; row < rows; ++row) {
        const auto i = static_cast<std::size_t>(row);
        const float* z = logits_.data() + row * v;
        if (batch.mask[i])
            r[i] = log_prob(z, batch.next[i], settings_.distill.temperature,
                            log_normaliser(z, v, settings_.distill.temperature));
    }
    return r;
}

} // namespace trainer
