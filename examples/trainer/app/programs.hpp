// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The trainer's smaller programs, from their arguments to their exit codes, which are those of opd-train:
//
//   opd-serve-teacher   a checkpoint's teacher behind HTTP, for --teacher-url          answering.hpp, http_service.hpp
//   opd-score           a data set of responses that are there already                 scoring.hpp
//   opd-model           what a model directory of transformers holds; writes it anew   hf/model_files.hpp
//   opd-distil          from two such directories and prompts to a third               hf/distil.hpp
#pragma once

namespace trainer {

int serve_main(int argc, const char* const* argv);
int score_main(int argc, const char* const* argv);
int model_main(int argc, const char* const* argv);
int distil_main(int argc, const char* const* argv);

} // namespace trainer
