// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Messages to the text that a chat model was trained on. A template is data; there is no Jinja here. For all of the
// messages:
//
//   begin { before_role role after_role content after_content }… generation
//
// The templates of models on the Hub are programs. Those that do no more than this where there are no tools, ChatML's
// (Qwen2, 2.5, 3 and their like) and Llama-3's, are known by what stands in them. All others are refused: give prompts
// as ids, or as text in the model's format. Formatting follows transformers' apply_chat_template of the model's own
// template.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace trainer {

struct chat_message {
    std::string role, content; ///< role: system, user or assistant
};

struct chat_template {
    std::string name;
    std::string begin = {}; ///< <|begin_of_text|>: encode the text without special tokens
    std::string before_role = {}, after_role = {}, after_content = {};
    bool writes_role = true;
    std::string generation = {}; ///< what the model's answer follows
    std::optional<std::string> default_system =
        {};                         ///< where the first message is not the system's: as if this one stood there
    std::string before_system = {}; ///< within the first system message, before its content
    bool trims = false;             ///< contents, of white space
    /// Answers have thoughts, which the model's template takes out of earlier ones and writes into the last one. What
    /// that would change is refused: "</think>" in an answer, an answer as the last message, a user's
    /// "<tool_response>".
    bool thinks = false;

    /// `answer`: with `generation`. A failure of kind exit_input names the message.
    std::string formatted(std::span<const chat_message> messages, bool answer = true) const;
};

/// "chatml", "llama-3" or "plain" (contents alone, a line feed after each); a failure of kind exit_usage where it is
/// none of these.
chat_template named_chat_template(std::string_view name);

/// The template that a Jinja program is; a failure of kind exit_input, which says why, where it is no known one. `bos`:
/// the text of the model's bos token. `name`: what errors call the file.
chat_template chat_template_of_jinja(std::string_view jinja, std::string_view bos, const std::string& name);

/// That of a tokenizer_config.json: its `chat_template`, or of several the one called "default"; or `jinja`, the text
/// of the chat_template.jinja that stands beside it, which goes first in transformers too.
chat_template chat_template_of(std::string_view tokenizer_config, const std::string& name,
                               std::optional<std::string_view> jinja = std::nullopt);

} // namespace trainer
