// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// opd-train --train-drafter: the target answers prompts, a drafter learns from the answers, and held-out ones say how
// many of its drafts are accepted.
#pragma once

#include "settings/command_line.hpp"
#include "settings/config.hpp"

namespace trainer {

/// Trains a drafter for the student in the run directory's last checkpoint and writes checkpoints/drafter.ckpt beside
/// it.
exit_code train_drafter(const command& arguments);

} // namespace trainer
