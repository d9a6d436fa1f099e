// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A task and a model for tests: operands to 30, at most 6 steps, two layers.
#pragma once

#include "model.hpp"
#include "task.hpp"

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

} // namespace opd::test
