// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Supervised steps: how the teacher is made, of the task's own solutions, and the student warmed up, of those or of the
// teacher's own answers (SFT, Lightning OPD, arXiv 2604.13010, equations 5 and 6).
//
//   loss = mean over response positions of -log p[next token]        dz = (p - one_hot(next)) / positions
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "model/model.hpp"
#include "model/optimizer.hpp"
#include "opd/backends/cpu.hpp"
#include "task/task.hpp"

namespace trainer {

struct step_result {
    double loss = 0;
    double gradient_norm = 0;
    std::int64_t tokens = 0; ///< rows computed
};

/// A text to learn from: a prompt, and a response to it.
struct example {
    std::vector<token> tokens; ///< both
    std::size_t prompt_length = 0;
};

/// The task's solutions to the problems of samples first_sample, first_sample + 1, ...
std::vector<example> solutions(const any_task& task, std::uint64_t seed, std::uint64_t first_sample, int batch);

class supervised {
public:
    supervised(const any_task& task, transformer<float>& model, adamw_state& state, opd::cpu_backend& backend)
        : task_(task), model_(model), state_(state), backend_(backend), pass_(model, backend.team()) {}

    /// One optimizer step on some texts, at least one of whose responses is not empty.
    step_result step(std::span<const example> texts, double rate, const adamw& optimizer);
    /// The same on `batch` solutions.
    step_result step(std::uint64_t seed, std::uint64_t first_sample, int batch, double rate, const adamw& optimizer) {
        return step(solutions(task_, seed, first_sample, batch), rate, optimizer);
    }

private:
    const any_task& task_;
    transformer<float>& model_;
    adamw_state& state_;
    opd::cpu_backend& backend_;
    training_pass<float> pass_;
    std::vector<std::vector<token>> inputs_;
    std::vector<token> targets_;     // (N) -1 on rows of the prompt
    std::vector<float> logits_;      // (N,V), then their gradient
    std::vector<double> normaliser_; // (N)
    std::vector<double> losses_;     // (N) -log p of the targets, negated
    std::vector<float> gradient_;
};

} // namespace trainer
