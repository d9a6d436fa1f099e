// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// How long a run will take on this machine: from a moment of each kind of work, on copies of its models.
//
//   a supervised step, a step of distillation   measured for as many tokens as solutions have
//   stages                                      steps × seconds of a step + looks and evaluations, at the measured pace
//                                               of greedy answers
//
// The student's warm-up counts with all its steps, though it may end sooner; schedules whose stages overlap count as if
// they took turns.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "opd/backends/cpu.hpp"
#include "settings/checkpoint.hpp"
#include "settings/config.hpp"
#include "task/task.hpp"

namespace trainer {

/// Seconds that this machine needs for a moment of each kind of work.
struct pace {
    struct of_model {
        double step = 0;  ///< a supervised step of its stage's batch
        double token = 0; ///< a token of a greedy answer
    };
    of_model teacher, student;
    double answer = 0; ///< mean tokens of a right answer
};

/// Measured on copies: the models only say how large they are.
pace measured(const config& c, const any_task& task, const transformer<float>& teacher,
              const transformer<float>& student, opd::cpu_backend& backend);

struct forecast {
    struct stage_time {
        std::int64_t steps = 0;
        double step = 0; ///< seconds
        double end = 0;  ///< seconds, once
        double all(std::int64_t done = 0) const { return step * static_cast<double>(steps - done) + end; }
    };
    std::array<stage_time, 3> stages; ///< by trainer::stage: teacher, student, distill

    /// Seconds from a step of a stage to the end of the run.
    double from(stage s, std::int64_t step) const;
    /// Seconds of a stage's end and of those behind it.
    double after(stage s) const;
};

forecast forecast_at(const pace& p, const config& c);

/// "about 40 seconds", "about 12 minutes", "about 1.5 hours".
std::string in_words(double seconds);

} // namespace trainer
