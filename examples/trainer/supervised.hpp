// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Supervised steps on the task's own solutions: how the teacher is made and the student warmed up.
//
//   loss = mean over response positions of -log p[next token]        dz = (p - one_hot(next)) / positions
#pragma once

#include <cstdint>
#include <vector>

#include "model.hpp"
#include "opd/backends/eigen.hpp"
#include "optimizer.hpp"
#include "task.hpp"

namespace trainer {

struct step_result {
    double loss = 0;
    double gradient_norm = 0;
    std::int64_t tokens = 0; ///< rows computed
};

class supervised {
public:
    supervised(const any_task& task, transformer<float>& model, adamw_state& state, opd::eigen_backend& backend)
        : task_(task), model_(model), state_(state), backend_(backend), pass_(model, backend.team()) {}

    /// One optimizer step on `batch` problems, those of samples first_sample, first_sample + 1, ...
    step_result step(std::uint64_t seed, std::uint64_t first_sample, int batch, double rate, const adamw& optimizer);

private:
    const any_task& task_;
    transformer<float>& model_;
    adamw_state& state_;
    opd::eigen_backend& backend_;
    training_pass<float> pass_;
    std::vector<std::vector<token>> inputs_;
    std::vector<token> targets_;     // (N) -1 on rows of the prompt
    std::vector<float> logits_;      // (N,V), then their gradient
    std::vector<double> normaliser_; // (N)
    std::vector<double> losses_;     // (N) -log p of the targets, negated
    std::vector<float> gradient_;
};

} // namespace trainer
