// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What is between rollout and learner when a checkpoint is written: the scheduler's state and every outstanding
// sequence, as far as it is. Scores are not kept: the teacher gives the same bits again.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "opd/sched/conveyor.hpp"
#include "schedule/stages.hpp"

namespace trainer {

using in_flight = opd::sched::run_snapshot<trajectory, scored_sequence>;

std::string to_bytes(in_flight state);

/// `score` is asked for what had been scored; the models have `vocabulary` ids. Bytes that are damaged are a failure of
/// kind exit_input.
in_flight in_flight_of(std::string_view bytes,
                       const std::function<std::vector<std::shared_ptr<const scored_sequence>>(
                           std::span<const std::shared_ptr<const trajectory>>)>& score,
                       int vocabulary = gcd_task::text.vocabulary());

/// What a process that goes on under the schedule needs of it besides the weights: nothing of this one's clock and
/// workers, and nothing at all where the next step can begin as the first did.
std::string kept(const opd::sched::settings& schedule, in_flight state);

/// The schedule of what was kept: it began at the step at which nothing was in flight, and counts from there.
opd::sched::settings going_on(opd::sched::settings schedule, const in_flight& state);

} // namespace trainer
