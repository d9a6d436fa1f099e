// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// From the settings to what rollout is asked: how to draw, how to draft, and which prompt a sample answers.
#pragma once

#include <cstdint>

#include "pipeline/sampler.hpp"
#include "settings/config.hpp"
#include "task/task.hpp"

namespace trainer {

/// How distillation samples: from the run's settings.
sampling sampling_of(const config& c, const any_task& task);

/// How its rollout drafts.
speculation_options speculation_of(const config& c, const model_shape* target = nullptr);

/// The number of a sample's prompt. The top byte of a sample is its stage's; within a stage `answers` consecutive
/// samples answer one prompt, and the n-th prompt is the same however many do.
constexpr std::uint64_t prompt_of(std::uint64_t sample, int answers) {
    constexpr std::uint64_t within = (std::uint64_t{1} << 56) - 1;
    return (sample & ~within) | (sample & within) / static_cast<std::uint64_t>(answers);
}

/// A sample and its prompt, which is a pure function of (seed, prompt_of(sample, answers)).
request request_of(const any_task& task, std::uint64_t seed, std::uint64_t sample, int answers = 1);

} // namespace trainer
