// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Distillation from a data set, with no teacher at hand while the student learns:
//
//   --write-offline   pi_ref, the warm student of a run, answers training prompts; a teacher scores every token once. A
//                     set of opd/data/: tokens, log pi_ref, log q, fingerprints of who made them; with --estimator topk
//                     or tail_bucket the teacher's k best ids at each token, too
//   --offline         the learner alone, epoch after epoch; how far it has moved from pi_ref is in the log
//
// What is written depends on the two models, the settings and the number of sequences alone, not on threads or on where
// a writer was killed. What is learnt depends on the set, its shuffle by --seed, and the settings.
//
// Source: Lightning OPD (arXiv 2604.13010), equation 7 and algorithm 1.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "opd/offline_drift.hpp"
#include "settings/command_line.hpp"
#include "settings/config.hpp"
#include "task/task.hpp"

namespace trainer {

/// The figures of a drift, for a log.
nlohmann::ordered_json described(const opd::offline_drift& d);
/// The set and the drift at the end of a run, for its table.
std::string offline_told(const nlohmann::ordered_json& j);

/// opd-train --write-offline. A shard is written when so many bytes are collected; a killed writer loses what is in no
/// shard.
exit_code write_offline(const command& arguments, std::size_t shard_bytes = std::size_t{1} << 20);

} // namespace trainer
