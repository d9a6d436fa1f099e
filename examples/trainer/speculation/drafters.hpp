// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What --speculate takes: no drafts, one of the drafters, or a choice among them by what they cost (speculation.hpp).
// Each drafter stands here once; to add one is to include its header and to add its line.
#pragma once

#include <array>
#include <string_view>

#include "speculation/drafter.hpp"

// A drafter's name, what a user reads of it, its class, and what it is made of: o are speculation_options.
// clang-format off
#define TRAINER_DRAFTERS(X)                                                                                             \
    X(ngram, "drafts of what came after the same tokens before, in a response, in other answers to its prompt, in its " \
             "last epoch's", retrieval_drafter, o.retrieval)                                                            \
    X(learned, "those of a drafter that --train-drafter made", learned_drafter, o.learned)
// clang-format on

namespace trainer {

class learned_drafter;

#define TRAINER_NAME(name, says, type, from) name,
enum class drafting { off, TRAINER_DRAFTERS(TRAINER_NAME) automatic };
#undef TRAINER_NAME

/// A line of the table: what a user types, what it is.
struct drafting_name {
    std::string_view text;
    drafting what;
    std::string_view says;
};
#define TRAINER_LINE(name, says, type, from) {#name, drafting::name, says},
inline constexpr auto draftings = std::to_array<drafting_name>(
    {{"off", drafting::off, "no drafts"},
     TRAINER_DRAFTERS(TRAINER_LINE){
         "auto", drafting::automatic,
         "as many as pay by the measured cost of steps, learned with --draft-from, else ngram"}});
#undef TRAINER_LINE

} // namespace trainer
