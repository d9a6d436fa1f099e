// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The reference trainer's own stages in place of the hash (task.hpp), by the settings that opd-train reads: the student
// answers prompts of the embedded task, the teacher scores the answers, the learner steps and publishes. They are the
// classes that opd-train runs on threads (examples/trainer/schedule/stages.hpp), so the same schedule makes the same
// weights. The run begins with the warm student and the teacher of the settings' run.start_from.
//
//   payload/<sample>/r<attempt>, p<attempt>, s<attempt>    a trajectory, one that was parked, a scored_sequence
//   weights/<job>, optimizer/<job>                         of what a train call published, sealed
//                                                          (opd/sched/archive.hpp)
//
// A learner that comes anew loads both. Errors: trainer::failure where the settings ask for what runs in one process
// alone, or start_from does not fit.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "opd/sched/settings.hpp"
#include "task.hpp"

namespace engine {

class channel;

/// The schedule of the settings in this file.
sched::settings trainer_schedule(const std::string& config);

/// Runs a worker's loop until it is told to halt.
void run_trainer_stage(sched::stage s, const std::string& config, const run_folder& folder, std::int32_t number,
                       std::int32_t slots, channel& between, const std::atomic<std::uint64_t>& keep_from);

/// What a finished run has learnt, as a checkpoint of opd-train: `opd-train --config … --run-dir … --resume` evaluates
/// it.
void write_student(const std::string& config, const run_folder& folder, const std::string& checkpoint);

} // namespace engine
