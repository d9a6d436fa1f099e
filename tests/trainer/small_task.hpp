// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A task and a model for tests: operands to 30, at most 6 steps, two layers; its prompts, and how its responses are
// drawn.
#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "model/model.hpp"
#include "model/publication.hpp"
#include "pipeline/sampler.hpp"
#include "task/task.hpp"
#include "task/trajectory.hpp"

namespace opd::test {

inline const trainer::gcd_task& small_task() {
    static const trainer::gcd_task task(30, 6, 4);
    return task;
}

inline trainer::model_shape small_shape() {
    return {.vocabulary = 15,
            .width = 24,
            .layers = 2,
            .heads = 4,
            .kv_heads = 2,
            .head_dim = 8,
            .ffn = 40,
            .max_length = small_task().max_length()};
}

inline trainer::policy small_weights(std::uint64_t seed, std::int32_t version) {
    trainer::transformer<float> model(small_shape());
    model.initialise(seed);
    return {std::make_shared<const trainer::transformer<float>>(std::move(model)), version};
}

/// `answers` samples in a row answer one prompt.
inline trainer::request small_prompt(std::uint64_t sample, std::uint64_t answers = 1) {
    return {sample, small_task().text.encode(small_task().prompt(small_task().draw(1, sample / answers)))};
}

/// Temperature 0: greedy.
inline trainer::sampling small_sampling(const trainer::draw_plan& plan, double temperature = 1) {
    trainer::sampling o;
    o.greedy = temperature == 0;
    if (temperature > 0) o.temperature = temperature;
    o.seed = 5;
    o.end = trainer::gcd_task::end;
    o.max_response = small_task().max_response();
    o.prefill_chunk = 3;
    o.plan = plan;
    return o;
}

inline constexpr trainer::draw_plan draw_plans[] = {{trainer::draw_plan::kind::none, 0},
                                                    {trainer::draw_plan::kind::iid, 3},
                                                    {trainer::draw_plan::kind::threshold, 4},
                                                    {trainer::draw_plan::kind::top_k, 2}};

} // namespace opd::test
