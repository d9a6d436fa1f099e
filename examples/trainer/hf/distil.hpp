// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// opd-distil: from two model directories of transformers and a file of prompts to a third directory.
//
// Prompts are lines of hf/prompts.hpp: {"ids": […]}, {"text": "…"}, {"messages": […]}. The student's directory has the
// tokenizer.json and the chat template; a file of ids needs neither. Where both directories have a tokenizer.json, the
// two must have the same tokens under the same ids: a loss between rows of two vocabularies says nothing.
//
// Each step takes the next prompts of a shuffled epoch, draws the student's answers, has the teacher look at every row
// of them, and makes its updates: rollout, teacher, learner and schedules are those of opd-train. A divergence of whole
// rows is computed from hidden states, so that no row of V is kept. An answer ends with one of the end tokens, or at
// its longest.
//
//   sync                         the three take turns, all threads for each: one copy of the student
//   step-off, controlled, async  opd-train's stages on threads under the library's scheduler, which bounds the lag.
//                                Rollout has immutable copies of the weights; each token keeps its log mu and version
//
// The teacher may be a server instead (pipeline/served.hpp), which is asked for the log-probs of drawn tokens or for
// its best ids. After a first probe a failed call is repeated for --teacher-patience; then the run ends, with all steps
// that it has made in its checkpoint.
//
// With a data set (pipeline/set_source.hpp) there are neither teacher nor rollout nor prompts: the learner alone reads
// tokens that somebody drew and a teacher scored. Its last sequences are held out: KL(student || teacher) is measured
// on them as the mean of (p/pi_ref) (log p - log q), and answers that are shown are to their prompts.
//
// With `stored` "bfloat16" the student's weights that forward and backward passes read are bfloat16. AdamW changes
// float masters, which are rounded to nearest even after each update (never stochastically); they are what a checkpoint
// has, and what is written. A teacher whose files are BF16 throughout is held as they are, whatever `stored` is: the
// bits are those of the floats.
//
// With `lora_rank` LoRA's matrices are learnt (lora.hpp); what is written is merged, the adapter beside it.
//
// With `checkpoint` a run that stops or dies goes on with --resume from its last whole file: weights or adapters,
// moments, step, the place in the prompts' order and, where stages overlap, the scheduler and what is between them. A
// resumed run has the bits of an unbroken one under sync, step-off and controlled, and with tau = 0; under async it
// learns from every answer once.
//
// Before and after, the mean over the tokens of answers to held-out prompts, drawn with the same noise, of
// KL(student || teacher) over the whole vocabulary is measured; of a served teacher the mean of log p - log q over the
// drawn tokens, which estimates it (a token that the teacher excludes counts as log q = -9999). The answer to the first
// of these prompts is shown then and at intervals, always drawn with the same noise. What memory it takes is said
// before it is taken.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "hf/bpe.hpp"
#include "hf/chat_template.hpp"
#include "hf/model_files.hpp"
#include "settings/config.hpp"
#include "settings/options.hpp"
#include "task/tokenizer.hpp"

namespace trainer::hf {

/// What a model directory has for text.
struct text_files {
    std::optional<bpe_tokenizer> tokenizer;
    std::optional<chat_template> chat;
    std::string no_tokenizer, no_chat; ///< why there is none, with the file's name
};
/// Never fails: a tokenizer or a template that is not supported is of no matter to prompts of ids.
text_files text_files_of(const model_source& source);

/// Refuses a teacher whose tokenizer.json has other tokens, or other ids for them, than the student's: a failure of
/// kind exit_input that names both files. Compared are model.vocab and added_tokens; a directory without the file
/// passes.
void check_same_tokenizer(const model_source& student, const model_source& teacher);

/// What those ids mean: 32 hexadecimal digits of model.vocab and added_tokens; empty: there is no tokenizer.json.
std::string print_of_tokenizer(const model_source& source);

/// The ids that end a text, as generation_config.json says, or config.json where that says none. Empty: neither does.
std::vector<token> end_tokens(const model_source& source);

/// Bytes that a learner takes for a forward and a backward pass over so many sequences of `length` input tokens: what
/// training_pass holds, and the head's inputs with their gradient. Rows of logits are not among them.
std::int64_t activation_bytes(const model_shape& shape, std::int64_t sequences, std::int64_t length, int threads,
                              bool checkpointed);

struct distil_settings {
    std::string student, teacher, prompts, out; ///< teacher: or is_url(); out: may not be there yet. With
                                                ///< settings.distill.offline neither teacher nor prompts
    std::string log;                            ///< file of a line of JSON a step; empty: none
    std::vector<token> ends;                    ///< empty: end_tokens() of the student
    int max_response = 256;
    int held_out = 16;              ///< of the prompts, or the set's sequences, the last
    int say_every = 10;             ///< steps; 0: the first and the last alone
    bool accept_tokenizer = false;  ///< without check_same_tokenizer()
    int lora_rank = 0;              ///< 0: all weights are trained
    double lora_alpha = 0;          ///< 0: twice the rank
    std::string checkpoint;         ///< file that the run can go on from, gone once `out` is there; empty: none
    bool resume = false;            ///< go on from it
    std::int64_t stop_after = -1;   ///< for tests: as if interrupted after so many further steps
    std::string stored = "float32"; ///< or "bfloat16": the student's weights while the run lasts
    write_options how;
    config settings; ///< what distil_options() names
};
/// It names servers, separated by commas, and no directory.
inline bool is_url(std::string_view teacher) { return teacher.find("://") != teacher.npos; }

/// What opd-distil takes of opd-train's settings, and what it calls them.
const option_names& distil_options();
/// These, and the settings that opd-distil takes in another way, by what it calls them: for what is said of settings.
const option_names& distil_names();
/// The settings with what follows from others: a divergence of whole rows is computed from hidden states where no
/// filter asks for logits. What opd-train refuses, and what it has and opd-distil has not, is a usage failure.
config settled(config c);
struct distil_report {
    double kl_before = 0, kl_after = 0; ///< held out, nats a token; after: NaN where a server did not answer any more
    std::int64_t tokens = 0;            ///< answered in training
    double lag = 0;                     ///< updates from a token's weights to those that learnt from it, their mean
    std::string sample_before, sample_after; ///< the answer to the first held-out prompt: text, or ids as [5,6]
};
distil_report distil(const distil_settings& s);

} // namespace trainer::hf
