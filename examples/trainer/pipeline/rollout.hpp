// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Rollout of a whole batch: prompts in, trajectories out. Every thread drives a rollout_engine of its own and takes the
// next prompt when a lane is free; since a token depends on weights, seed, sample and position only, slots, chunks,
// threads and the order of prompts change nothing.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "model/model.hpp"
#include "opd/threads.hpp"
#include "pipeline/sampler.hpp"
#include "task/trajectory.hpp"

namespace trainer {

/// One trajectory per request, in their order; the weights are of that version. A policy whose logits are not finite is
/// a failure of kind exit_numeric.
std::vector<trajectory> roll_out(const transformer<float>& model, opd::thread_team& threads,
                                 std::span<const request> requests, const sampling& options, std::int32_t version = 0);

} // namespace trainer
