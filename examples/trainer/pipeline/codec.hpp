// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The teacher's hidden states in fewer numbers than it is wide: the directions that matter for its probabilities, found
// once, before distillation, by the library's probability-reweighted SVD (opd/compressed.hpp).
//
// Calibrated on the teacher's own responses to training prompts, at the temperature of distillation. So a codec is a
// function of teacher and settings alone, and a run that goes on makes the one that it had.
#pragma once

#include <span>

#include "model/model.hpp"
#include "model/teacher.hpp"
#include "opd/backends/cpu.hpp"
#include "opd/codec.hpp"
#include "settings/config.hpp"
#include "task/task.hpp"

namespace trainer {

struct teacher_codec {
    opd::codec codes;      ///< encoder (r,D), decoder (V,r)
    index_t rows = 0;      ///< that it was calibrated on
    double kl_teacher = 0; ///< mean KL(teacher, coded teacher) along other responses of the teacher, a quarter as many
};

/// The codec of --cache-rank and --cache-calibration.
teacher_codec calibrated_codec(const config& c, const any_task& task, const transformer<float>& teacher,
                               opd::cpu_backend& backend);

/// Mean over the rows of KL(teacher, coded teacher), at the temperature of distillation.
double kl_of_codec(const config& c, const opd::codec& codes, const transformer<float>& teacher,
                   opd::cpu_backend& backend, const row_batch& batch);

} // namespace trainer
