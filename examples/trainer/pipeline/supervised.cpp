// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "pipeline/supervised.hpp"

#include <algorithm>
#include <cmath>

#include "opd/opd.hpp"

namespace trainer {

std::vector<example> solutions(const any_task& task, std::uint64_t seed, std::uint64_t first_sample, int batch) {
    std::vector<example> r(static_cast<std::size_t>(batch));
    for (std::size_t i = 0; i < r.size(); ++i) {
        const problem p = task.training_problem(seed, first_sample + i);
        r[i].tokens = task.prompt_tokens(p);
        r[i].prompt_length = r[i].tokens.size();
        const std::vector<token> solution = task.solution_tokens(p);
        r[i].tokens.insert(r[i].tokens.end(), solution.begin(), solution.end());
    }
    return r;
}

step_result supervised::step(std::span<const example> texts, double rate, const adamw& optimizer) {
    inputs_.resize(texts.size());
    targets_.clear();
    std::size_t kept = 0;
    for (std::size_t i = 0; i < inputs_.size(); ++i) {
        std::vector<token>& tokens = inputs_[i];
        tokens = texts[i].tokens;
        const std::size_t prompt = texts[i].prompt_length;
        for (std::size_t t = 1; t < tokens.size(); ++t) targets_.push_back(t < prompt ? -1 : tokens[t]);
        kept += tokens.size() - prompt;
        tokens.pop_back(); // the last token is only a target
    }
    const index_t rows = pass_.set_sequences(inputs_), v_count = model_.shape.vocabulary;
    logits_.resize(static_cast<std::size_t>(rows * v_count));
    pass_.forward(logits_.data());

    normaliser_.resize(static_cast<std::size_t>(rows));
    opd::log_sum_exp(backend_, opd::view(static_cast<const float*>(logits_.data()), rows, v_count),
                     opd::view(normaliser_.data(), rows));
    const float share = 1.0f / static_cast<float>(kept);
    losses_.assign(static_cast<std::size_t>(rows), 0.0);
    constexpr index_t some = 64; // rows of a piece
    backend_.team().run((rows + some - 1) / some, [&](index_t piece, int) {
        for (index_t r = piece * some; r < std::min(rows, (piece + 1) * some); ++r) {
            float* z = logits_.data() + r * v_count;
            const token target = targets_[static_cast<std::size_t>(r)];
            if (target < 0) {
                std::fill_n(z, v_count, 0.0f);
                continue;
            }
            const auto normaliser = static_cast<float>(normaliser_[static_cast<std::size_t>(r)]);
            losses_[static_cast<std::size_t>(r)] = static_cast<double>(z[target] - normaliser);
            for (index_t v = 0; v < v_count; ++v)
                z[v] = share * (std::exp(z[v] - normaliser) - (v == target ? 1.0f : 0.0f));
        }
    });
    double loss = 0; // in the order of the rows, whatever the threads
    for (const double of_row : losses_) loss -= of_row;
    pass_.backward(logits_.data(), gradient_);
    const double norm = adamw_step(optimizer, rate, gradient_, state_, model_);
    return {loss / static_cast<double>(kept), norm, rows};
}

} // namespace trainer
