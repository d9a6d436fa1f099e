// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// From the names on the command line to the library's schedules.
#pragma once

#include <string>
#include <vector>

#include "opd/sched/settings.hpp"
#include "settings/config.hpp"

namespace trainer {

/// What the scheduler is to do: a train batch is the `--answers` to `--prompts` prompts. Names that do not exist and
/// choices that cannot work are usage failures that name the flag.
opd::sched::settings schedule_of(const config& c);

/// The threads of a run: as set, or one per core.
int threads_of(const config& c);
/// Rollout workers; unset, as many as threads, or in virtual time four.
int rollout_workers_of(const config& c);
/// Teachers, each on a thread of its own; unset, as many as threads where the stages take turns, four of a served one,
/// else one.
int teachers_of(const config& c);
/// The learner's threads.
int learner_threads_of(const config& c);

/// Where schedule and estimator do not fit: sentences that say why and what would. Empty: they do.
std::vector<std::string> advice_on(const config& c, int vocabulary);

/// What the library says of its own setting, said of the flag that sets it: "--score-flush must be …" for
/// "opd: teacher_flush: must be …".
std::string in_options(const opd::invalid_input& e);

} // namespace trainer
