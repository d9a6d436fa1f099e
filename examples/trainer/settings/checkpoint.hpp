// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Everything a run must remember to go on as if it had never stopped. A checkpoint holds no machine's clock: under
// sync and in virtual time the same settings give the same bytes, interrupted or not.
//
// File: "OPDTRAIN" · version (u32) · sections (name, length, bytes), little-endian · FNV-1a of all before (32
// characters).
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "model/optimizer.hpp"

namespace trainer {

enum class stage : std::uint32_t { teacher = 0, student = 1, distill = 2, finished = 3 };
const char* name_of(stage s);

/// Notices a KL that rises for 100 steps: means over blocks of 20 steps, five rises in a row.
struct kl_watch {
    static constexpr int block = 20, limit = 5;
    double sum = 0;
    double last_mean = 0;
    std::int32_t count = 0;
    std::int32_t blocks = 0;
    std::int32_t rises = 0;

    /// Takes one step's KL; true when the warning is due.
    bool add(double kl);
};

struct run_state {
    trainer::stage stage = trainer::stage::teacher;
    std::int64_t step = 0;         ///< completed steps of the stage
    std::uint64_t next_sample = 0; ///< of the stage's prompts
    std::vector<float> teacher_weights, student_weights;
    adamw_state teacher_optimizer, student_optimizer;
    rate_change rate; ///< of distillation, where --resume --steps changed its plan
    kl_watch kl;
    std::int64_t tokens[6] = {};    ///< by clock_name
    std::string evaluations = "{}"; ///< JSON: teacher, before, after
    std::string in_flight; ///< the scheduler and what is between the stages of distillation, where they overlap
    std::string drafter;   ///< --adapt-drafter: spot_trainer::state(); empty: none, and none in the file
};

/// The file's bytes, and what they say: bytes that are damaged, or that no run writes, are a failure of kind exit_input
/// that names `path`. `settings` is what the bytes were made with.
std::string checkpoint_bytes(const run_state& state, const std::string& settings);
run_state checkpoint_of(std::string_view bytes, const std::string& path, std::string& settings);

/// Writes the file; failures are of kind exit_io.
void save_checkpoint(const std::string& path, const run_state& state, const std::string& settings);

/// Reads and verifies the file; failures are of kind exit_input. `settings` is what save_checkpoint was given.
run_state load_checkpoint(const std::string& path, std::string& settings);

} // namespace trainer
