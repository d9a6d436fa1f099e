// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// opd-distil: from two model directories of transformers and a file of prompts to a third directory.
//
//   {"prompt": [12, 3, …]}        a line of JSON for each prompt, of token ids; other keys are passed over
//
// Each step takes the next prompts of a shuffled epoch, draws the student's answers, has the teacher look at every row
// of them, and makes one update, as opd-train does under --schedule sync: rollout, teacher and learner are its own. A
// divergence of whole rows is computed from hidden states, so that no row of V is kept. An answer ends with one of the
// end tokens, or at its longest.
//
// Before and after, the mean over the tokens of answers to held-out prompts, drawn with the same noise, of
// KL(student || teacher) over the whole vocabulary is measured. What memory it takes is said before it is taken.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "config.hpp"
#include "hf/model_files.hpp"
#include "tokenizer.hpp"

namespace trainer::hf {

/// The prompts of a file. A line that is none, an id outside [0, vocabulary), a prompt of more than `longest` ids and a
/// file without any are failures of kind exit_input that name file and line.
std::vector<std::vector<token>> read_prompts(const std::string& path, int vocabulary, int longest);

/// The ids that end a text, as generation_config.json says, or config.json where that says none. Empty: neither does.
std::vector<token> end_tokens(const model_source& source);

/// Bytes of what is kept of `rows` input positions in `sequences` between a training forward and its backward pass.
std::int64_t activation_bytes(const model_shape& shape, std::int64_t rows);

struct distil_settings {
    std::string student, teacher, prompts, out; ///< out: may not be there yet
    std::string log;                            ///< file of a line of JSON a step; empty: none
    std::vector<token> ends;                    ///< empty: end_tokens() of the student
    int max_response = 256;
    int held_out = 16;  ///< of the prompts, the last
    int say_every = 10; ///< steps; 0: the first and the last alone
    write_options how;
    config settings; ///< distill, optimizer, run.seed, run.threads
};
struct distil_report {
    double kl_before = 0, kl_after = 0; ///< held out, nats a token
    std::int64_t tokens = 0;            ///< answered in training
};
distil_report distil(const distil_settings& s);

} // namespace trainer::hf
