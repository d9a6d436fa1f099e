// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Prompts from a file of JSON lines, each one of
//
//   {"ids": [9707, 11]}                                  tokens as they are
//   {"text": "Once upon a time"}                         encoded, with the tokenizer's own special tokens around
//   {"messages": [{"role": "user", "content": "Hi"}]}    formatted by the chat template, to where the answer begins,
//                                                        then encoded without special tokens: the template writes them
//
// The first line that is anything else is a failure of kind exit_input that names file and line.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "hf/bpe.hpp"
#include "hf/chat_template.hpp"

namespace trainer {

struct prompt {
    std::vector<token> ids;
    std::size_t line = 0; ///< from 1
};

struct prompt_settings {
    token vocabulary = 0;                     ///< of the model: no id may be this or more
    std::size_t most_tokens = 0;              ///< of a prompt; 0: any number
    const bpe_tokenizer* tokenizer = nullptr; ///< without one, lines of text are refused
    const chat_template* chat = nullptr;      ///< without one, lines of messages are refused
    /// What refusals of such lines say.
    std::string no_tokenizer = "there is no tokenizer; give ids";
    std::string no_chat = "there is no chat template: give ids, or text in the model's format";
};

std::vector<prompt> prompts_of(std::string_view lines, const std::string& name, const prompt_settings& how);

} // namespace trainer
