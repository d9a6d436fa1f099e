// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "hf/chat_template.hpp"

#include <algorithm>
#include <utility>
#include <vector>

#include "hf/strict_json.hpp"
#include "hf/utf8.hpp"

namespace trainer {

namespace {

[[noreturn]] void refuse(const std::string& what) { throw failure(exit_input, what); }

bool has(std::string_view text, std::string_view part) { return text.find(part) != text.npos; }

// Python's str.strip(), which is Jinja's trim: White_Space and four separators.
std::string_view trimmed(std::string_view s) {
    const auto white = [&](std::size_t at) {
        const utf8_step step = utf8_at(s, at);
        return step.kind == utf8_step::whole && (is_white_space(step.code) || (step.code >= 0x1C && step.code <= 0x1F));
    };
    while (!s.empty() && white(0)) s.remove_prefix(utf8_at(s, 0).bytes);
    while (!s.empty() && white(last_character(s))) s = s.substr(0, last_character(s));
    return s;
}

chat_template chatml() {
    return {.name = "chatml",
            .before_role = "<|im_start|>",
            .after_role = "\n",
            .after_content = "<|im_end|>\n",
            .generation = "<|im_start|>assistant\n"};
}
chat_template llama3(std::string_view bos) {
    return {.name = "llama-3",
            .begin = std::string(bos),
            .before_role = "<|start_header_id|>",
            .after_role = "<|end_header_id|>\n\n",
            .after_content = "<|eot_id|>",
            .generation = "<|start_header_id|>assistant<|end_header_id|>\n\n",
            .trims = true};
}

std::string replaced(std::string_view text, std::string_view what, std::string_view by) {
    std::string r;
    for (std::size_t at = 0;;) {
        const std::size_t next = text.find(what, at);
        r.append(text.substr(at, next - at)); // to the end where there is none
        if (next == std::string_view::npos) return r;
        r.append(by);
        at = next + what.size();
    }
}

// A Jinja program, as its markers are looked for.
class program {
public:
    program(std::string_view jinja, const std::string& name) : text_(replaced(jinja, "\\n", "\n")), name_(name) {
        for (const char c : text_)
            if (c != ' ') dense_ += c == '"' ? '\'' : c;
    }

    [[noreturn]] void refuse(const std::string& why) const {
        trainer::refuse(name_ + ": the chat template " + why +
                        "; known are ChatML's and Llama-3's: give prompts as ids, or as text in the model's format");
    }
    bool says(std::string_view what) const { return has(text_, what); }
    /// Without regard to blanks and to the kind of quotation marks.
    bool does(std::string_view what) const { return has(dense_, what); }
    void must_not(std::initializer_list<std::string_view> what) const {
        for (const std::string_view w : what)
            if (does(w)) refuse("has " + shown(w) + ", which is not supported");
    }

    /// The strings in what follows the last message: what is written before an answer.
    std::vector<std::string> at_the_end() const {
        std::size_t at = text_.rfind("add_generation_prompt");
        if (at == text_.npos) at = text_.rfind("endfor");
        std::vector<std::string> r;
        while (at != text_.npos && (at = text_.find_first_of("'\"", at)) != text_.npos) {
            const std::size_t end = text_.find(text_[at], at + 1);
            if (end == text_.npos) break;
            r.push_back(text_.substr(at + 1, end - at - 1));
            at = end + 1;
        }
        return r;
    }
    /// What is written as the system's message where there is none: the text between `begin` and `end` within one
    /// string.
    std::optional<std::string> default_system(std::string_view begin, std::string_view end) const {
        std::optional<std::string> r;
        for (std::size_t at = 0; (at = text_.find(begin, at)) != text_.npos; at += begin.size()) {
            const char quote = at == 0 ? ' ' : text_[at - 1];
            if (quote != '\'' && quote != '"') refuse("writes a system message in a way that is not known");
            const std::size_t from = at + begin.size(), to = text_.find(quote, from);
            const std::string inside = text_.substr(from, to == text_.npos ? to : to - from);
            if (inside.empty()) continue; // the message's own content follows
            const std::size_t ends = inside.find(end);
            if (ends == inside.npos || has(inside, "\\") || (r && *r != inside.substr(0, ends)))
                refuse("writes a system message in a way that is not known");
            r = inside.substr(0, ends);
        }
        return r;
    }
    /// The string that `name` is set to.
    std::string set_to(std::string_view name) const {
        const std::string begin = "set " + std::string(name) + " = \"";
        const std::size_t at = text_.find(begin), from = at + begin.size();
        const std::size_t end = at == text_.npos ? at : text_.find('"', from);
        if (end == text_.npos) refuse("sets no " + std::string(name));
        return text_.substr(from, end - from);
    }

private:
    std::string text_, dense_;
    const std::string& name_;
};

chat_template chatml_of(const program& p) {
    chat_template r = chatml();
    p.must_not({"bos_token", "eos_token", "strftime_now", "|trim", "<|im_sep|>", "<|start_header_id|>"});
    if (!p.does("'<|im_start|>'+message['role']+'\n'") && !p.does("'<|im_start|>'+message.role+'\n'"))
        p.refuse("writes messages in a way that is not known");
    if (!p.says("<|im_end|>\n") && !p.does("'<|im_end|>'+'\n'")) p.refuse("ends messages in a way that is not known");
    r.thinks = p.says("</think>");
    if (!r.thinks) p.must_not({"strip("});
    const std::vector<std::string> end = p.at_the_end();
    const bool optional_thoughts = end.size() == 2 && end[1] == "<think>\n\n</think>\n\n" &&
                                   p.does("enable_thinkingisdefinedandenable_thinkingisfalse");
    if (end.size() == 1 && end[0] == r.generation + "<think>\n")
        r.generation = end[0];
    else if ((end.size() != 1 && !optional_thoughts) || end[0] != r.generation)
        p.refuse("begins answers in a way that is not known");
    r.default_system = p.default_system("<|im_start|>system\n", "<|im_end|>\n");
    return r;
}

chat_template llama3_of(const program& p, std::string_view bos) {
    chat_template r = llama3(p.says("bos_token") ? bos : "");
    if (p.says("bos_token") && bos.empty()) p.refuse("writes a bos_token, but there is none");
    if (p.says("strftime_now")) p.refuse("writes the date of the day, on which no run should depend");
    p.must_not({"eos_token", "<|im_start|>", "strip("});
    if (!p.does("'<|start_header_id|>'+message['role']+'<|end_header_id|>\n\n'") &&
        !p.does("'<|start_header_id|>'+message.role+'<|end_header_id|>\n\n'"))
        p.refuse("writes messages in a way that is not known");
    r.trims = p.does("|trim");
    if (p.at_the_end() != std::vector{r.generation}) p.refuse("begins answers in a way that is not known");
    r.default_system = p.default_system("<|start_header_id|>system<|end_header_id|>\n\n", "<|eot_id|>");
    if (p.says("Cutting Knowledge Date: ")) { // Llama-3.1: always a system message, which begins with two dates
        if (!p.says("Cutting Knowledge Date: December 2023\n") || !p.does("'TodayDate:'+date_string+'\n\n'") ||
            r.default_system)
            p.refuse("writes dates in a way that is not known");
        r.before_system = "Cutting Knowledge Date: December 2023\nToday Date: " + p.set_to("date_string") + "\n\n";
        r.default_system = "";
    }
    return r;
}

} // namespace

std::string chat_template::formatted(std::span<const chat_message> messages, bool answer) const {
    if (messages.empty()) refuse("messages: there are none");
    std::string r = begin;
    const auto write = [&](std::string_view role, std::string_view content, bool first) {
        r += before_role;
        if (writes_role) r += role;
        r += after_role;
        if (first && role == "system") r += before_system;
        r += trims ? trimmed(content) : content;
        r += after_content;
    };
    if (default_system && messages.front().role != "system") write("system", *default_system, true);
    for (std::size_t i = 0; i < messages.size(); ++i) {
        const auto& [role, content] = messages[i];
        const std::string where = "messages[" + std::to_string(i) + "]: ";
        if (role != "system" && role != "user" && role != "assistant")
            refuse(where + "the role " + shown(role) + " is not supported; system, user and assistant are");
        if (thinks && role == "assistant" && has(content, "</think>"))
            refuse(where + "this model's template takes thoughts out of answers; give what is left, or text or ids");
        if (thinks && role == "assistant" && i + 1 == messages.size())
            refuse(where +
                   "this model's template writes thoughts into an answer that is the last message; give text or ids");
        if (thinks && role == "user" && content.starts_with("<tool_response>"))
            refuse(where + "answers of tools are not supported with this model's template; give text or ids");
        write(role, content, i == 0);
    }
    if (answer) r += generation;
    return r;
}

chat_template named_chat_template(std::string_view name) {
    if (name == "chatml") return chatml();
    if (name == "llama-3") return llama3("<|begin_of_text|>");
    if (name == "plain") return {.name = "plain", .after_content = "\n", .writes_role = false};
    throw failure(exit_usage, "no chat template is called " + shown(name) + "; there are chatml, llama-3 and plain");
}

chat_template chat_template_of_jinja(std::string_view jinja, std::string_view bos, const std::string& name) {
    const program p(jinja, name);
    if (p.says("<|im_start|>")) return chatml_of(p);
    if (p.says("<|start_header_id|>")) return llama3_of(p, bos);
    p.refuse("is not a known one");
}

chat_template chat_template_of(std::string_view tokenizer_config, const std::string& name,
                               std::optional<std::string_view> jinja) {
    const nlohmann::json j = strict_json(tokenizer_config, name);
    const json_value config(j, name);
    std::string bos;
    if (config.has("bos_token")) {
        const json_value value = config.at("bos_token");
        bos = value.raw().is_object() ? value.at("content").text() : value.text();
    }
    if (jinja) return chat_template_of_jinja(*jinja, bos, "chat_template.jinja");
    if (!config.has("chat_template"))
        config.refuse("has no chat_template: give prompts as ids, or as text in the model's format");
    const json_value of = config.at("chat_template");
    if (!of.raw().is_array()) return chat_template_of_jinja(of.text(), bos, name);
    for (std::size_t i = 0; i < of.size(); ++i)
        if (of.at(i).at("name").text() == "default")
            return chat_template_of_jinja(of.at(i).at("template").text(), bos, name);
    of.refuse("has none with the name \"default\"");
}

} // namespace trainer
