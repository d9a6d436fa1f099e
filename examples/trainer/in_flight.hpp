// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What is between rollout and learner when a checkpoint is written: the scheduler's state and every outstanding sequence,
// as far as it is. Scores are not kept: the teacher gives the same bits again.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "opd/sched/conveyor.hpp"
#include "stages.hpp"

namespace trainer {

using in_flight = opd::sched::run_snapshot<trajectory, scored_sequence>;

std::string to_bytes(in_flight state);

/// `score` is asked for what had been scored; the models have `vocabulary` ids. Bytes that are damaged are a failure of kind exit_input.
in_flight in_flight_of(std::string_view bytes,
                       const std::function<std::vector<std::shared_ptr<const scored_sequence>>(
                           std::span<const std::shared_ptr<const trajectory>>)>& score,
                       int vocabulary = gcd_task::text.vocabulary());

} // namespace trainer
