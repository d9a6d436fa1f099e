// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "hf/prompts.hpp"

#include "hf/strict_json.hpp"

namespace trainer {

namespace {

std::vector<token> ids_of(const json_value& line, const prompt_settings& how) {
    if (line.object().size() != 1) line.refuse("must have one key: ids, text or messages");
    line.only({"ids", "text", "messages"});
    const std::string& key = line.raw().begin().key();
    const json_value value = line.at(key);
    if (key == "ids") {
        std::vector<token> ids(value.list().size());
        for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = value.at(i).id(how.vocabulary - 1);
        return ids;
    }
    if (!how.tokenizer) value.refuse(how.no_tokenizer);
    if (key == "text") return how.tokenizer->encode(value.text());
    if (!how.chat) value.refuse(how.no_chat);
    std::vector<chat_message> messages;
    for (std::size_t i = 0; i < value.list().size(); ++i) {
        const json_value m = value.at(i);
        m.only({"role", "content"});
        messages.push_back({m.at("role").text(), m.at("content").text()});
    }
    return how.tokenizer->encode(how.chat->formatted(messages), false);
}

} // namespace

std::vector<prompt> prompts_of(std::string_view lines, const std::string& name, const prompt_settings& how) {
    std::vector<prompt> r;
    for (std::size_t number = 1; !lines.empty(); ++number) {
        const std::size_t end = lines.find('\n');
        const std::string_view text = lines.substr(0, end);
        lines.remove_prefix(end == lines.npos ? lines.size() : end + 1);
        const std::string where = name + ", line " + std::to_string(number);
        if (text.find_first_not_of(" \t\r") == text.npos) throw failure(exit_input, where + ": is empty");
        const nlohmann::json j = strict_json(text, where);
        const json_value line(j, where);
        prompt p{{}, number};
        try {
            p.ids = ids_of(line, how);
        } catch (const failure& e) { // of the tokenizer or the template, which know of no line
            if (std::string_view(e.what()).starts_with(where)) throw;
            line.refuse(e.what());
        }
        if (p.ids.empty()) line.refuse("has no tokens");
        for (const token id : p.ids)
            if (id >= how.vocabulary)
                line.refuse("has the token " + std::to_string(id) + ", but the model has " +
                            std::to_string(how.vocabulary));
        if (how.most_tokens > 0 && p.ids.size() > how.most_tokens)
            line.refuse("has " + std::to_string(p.ids.size()) + " tokens; the most is " +
                        std::to_string(how.most_tokens));
        r.push_back(std::move(p));
    }
    if (r.empty()) throw failure(exit_input, name + ": has no prompts");
    return r;
}

} // namespace trainer
