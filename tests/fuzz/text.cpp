// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What the trainer reads text with: tokenizer.json, patterns of pre-tokenizers, chat templates, files of prompts, each
// damaged; and any text. A reader refuses with a failure of kind exit_input; a tokenizer that is taken encodes any
// UTF-8 to ids that it has, the same with and without words that it remembers, and decodes whole what it streams.
#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "fuzz/damaged_json.hpp"
#include "trainer/hf/bpe.hpp"
#include "trainer/hf/chat_template.hpp"
#include "trainer/hf/pattern.hpp"
#include "trainer/hf/prompts.hpp"
#include "trainer/hf/utf8.hpp"
#include "trainer/settings/failure.hpp"

namespace {

using namespace opd::fuzz;
using nlohmann::json;
using trainer::bpe_tokenizer;
using trainer::failure;

/// What read() makes, or nothing where it refuses.
template <class Read>
auto taken(Read&& read) -> std::optional<decltype(read())> {
    try {
        return read();
    } catch (const failure& e) {
        need(e.code == trainer::exit_input, "a text is refused as something else than a bad input");
        return std::nullopt;
    }
}

const json& bytes_and_words() {
    static const json vocab = [] {
        json r;
        int others = 256;
        for (int b = 0; b < 256; ++b) {
            const bool itself = (b > 32 && b < 127) || (b > 160 && b != 173);
            const int code = itself ? b : others++;
            r[code < 128 ? std::string(1, static_cast<char>(code))
                         : std::string{static_cast<char>(0xC0 | code >> 6), static_cast<char>(0x80 | (code & 63))}] = b;
        }
        for (const char* word : {"ab", "abc", "aa", "aaaa", "bc", "Ġa", "12", "123"}) r.emplace(word, r.size());
        return r;
    }();
    return vocab;
}

constexpr const char* qwen =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+(?!\S)|\s+)";
constexpr const char* patterns[] = {qwen, R"(\p{N}{1,3}|\p{L}++|[^\s\x-z])", R"((?:a|bc?)+|\s)", "[a-c]?+b|[^a-c]"};

json some_tokenizer(choices& c, bool& lossless) {
    const auto flag = [&] { return c.once_in(2); };
    json t = {{"version", "1.0"},
              {"truncation", nullptr},
              {"padding", nullptr},
              {"added_tokens", json::array()},
              {"normalizer", nullptr},
              {"post_processor", nullptr},
              {"model",
               {{"type", "BPE"},
                {"dropout", nullptr},
                {"unk_token", nullptr},
                {"continuing_subword_prefix", nullptr},
                {"end_of_word_suffix", nullptr},
                {"fuse_unk", false},
                {"byte_fallback", false},
                {"ignore_merges", flag()}}}};
    const json byte_level = {
        {"type", "ByteLevel"}, {"add_prefix_space", c.once_in(4)}, {"trim_offsets", true}, {"use_regex", flag()}};
    lossless = !byte_level["add_prefix_space"].get<bool>();
    t["decoder"] = byte_level;
    t["pre_tokenizer"] = byte_level;
    if (flag()) {
        const bool removes = c.once_in(4);
        std::string regex = patterns[c.below(4)];
        if (c.once_in(4)) regex.erase(static_cast<std::size_t>(c.below(static_cast<std::int64_t>(regex.size()))), 1);
        const json split = {{"type", "Split"},
                            {"pattern", {{"Regex", regex}}},
                            {"behavior", removes ? "Removed" : "Isolated"},
                            {"invert", flag()}};
        t["pre_tokenizer"] = {
            {"type", "Sequence"},
            {"pretokenizers", {split, {{"type", "Digits"}, {"individual_digits", flag()}}, byte_level}}};
        lossless = lossless && !removes;
    }
    if (c.once_in(3)) t["normalizer"] = {{"type", "NFC"}}, lossless = false;
    int id = static_cast<int>(bytes_and_words().size());
    for (const char* content : {"<x>", "a", "<xy>", " <", "é"}) {
        if (flag()) continue;
        const std::string text = content;
        const auto known = bytes_and_words().find(text);
        const bool strips_left = c.once_in(3), strips_right = c.once_in(3);
        t["added_tokens"].push_back({{"id", known != bytes_and_words().end() ? known->get<int>() : id++},
                                     {"content", text},
                                     {"single_word", c.once_in(3)},
                                     {"lstrip", strips_left},
                                     {"rstrip", strips_right},
                                     {"normalized", flag()},
                                     {"special", flag()}});
        lossless = lossless && !strips_left && !strips_right && text != "é"; // of which decoding makes a byte
    }
    if (c.once_in(3))
        t["post_processor"] = {
            {"type", "TemplateProcessing"},
            {"single",
             {{{"SpecialToken", {{"id", "a"}, {"type_id", 0}}}}, {{"Sequence", {{"id", "A"}, {"type_id", 0}}}}}},
            {"pair", json::array()},
            {"special_tokens", {{"a", {{"id", "a"}, {"ids", {97}}, {"tokens", {"a"}}}}}}};
    return t;
}

void tokenizer(choices& c) {
    bool lossless = false;
    json t = some_tokenizer(c, lossless);
    json words = {
        {"vocab", bytes_and_words()},
        {"merges", {"a b", {"ab", "c"}, "a a", {"aa", "aa"}, {"b", "c"}, {"a", "bc"}, {"Ġ", "a"}, "1 2", "12 3"}}};
    std::string text;
    if (c.once_in(2)) { // the values around the vocabulary, which has most of all
        text = damaged_json(c, t);
        json again = json::parse(text, nullptr, false);
        if (again.is_object() && again.contains("model") && again["model"].is_object()) {
            again["model"].update(words);
            text = again.dump(-1, ' ', false, json::error_handler_t::replace);
        }
        lossless = false;
    } else if (c.once_in(2)) {
        t["model"].update(words);
        text = damaged_json(c, t);
        lossless = false;
    } else {
        t["model"].update(words);
        text = t.dump();
    }
    const auto b = taken([&] { return bpe_tokenizer(text, "t.json"); });
    if (!b) return;
    const std::string some = trainer::utf8_repaired(c.rest());
    for (const bool special : {false, true}) {
        const auto ids = taken([&] { return b->encode(some, special); });
        if (!ids) return; // a pattern that takes too long
        for (const trainer::token id : *ids) need(id >= 0 && id < b->vocabulary(), "an id is not of the vocabulary");
        need(b->encode(some, special) == *ids, "words that are remembered are others");
        const std::string whole = b->decode(*ids, special);
        trainer::text_stream stream(*b, special);
        std::string streamed;
        for (const trainer::token id : *ids) streamed += stream.add(id);
        need(streamed + stream.finish() == whole, "a stream of tokens is decoded as another text");
        if (lossless && !special) need(whole == some, "a text is decoded as another one");
    }
}

void a_pattern(choices& c) {
    std::string regex;
    for (std::int64_t n = c.below(12); n >= 0; --n)
        regex += c.of<const char*>({"a",      "b",     " ",
                                    "'",      "[",     "]",
                                    "[^",     "(",     "(?:",
                                    "(?!",    "(?=",   ")",
                                    "|",      "*",     "+",
                                    "?",      "{1,3}", "{2}",
                                    "-",      "&",     "^",
                                    "\\s",    "\\S",   "\\p{L}",
                                    "\\P{N}", "\\r",   "\\\\",
                                    "\\d",    "é",     "中",
                                    "{",      "}",     "(?i:'s|'t|'re|'ve|'m|'ll|'d)",
                                    "\\",     "p"});
    const std::string text = trainer::utf8_repaired(c.rest());
    const auto p = taken([&] { return trainer::pattern(trainer::pcre2_pattern(regex, "p"), "p"); });
    if (!p) return;
    for (std::size_t at = 0; at < text.size();) {
        const auto m = taken([&] { return p->find(text, at); });
        if (!m || !m->found) return;
        need(m->begin >= at && m->end > m->begin && m->end <= text.size(), "a match is empty, or not where it can be");
        need(trainer::not_utf8(std::string_view(text).substr(m->begin, m->end - m->begin)) == std::string::npos,
             "a match cuts a character");
        at = m->end;
    }
}

void a_chat_template(choices& c) {
    std::string jinja =
        c.of<const char*>({"{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + "
                           "message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}"
                           "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
                           "{{ bos_token }}{% for message in messages %}{{ '<|start_header_id|>' + message['role'] + "
                           "'<|end_header_id|>\\n\\n' + message['content'] | trim + "
                           "'<|eot_id|>' }}{% endfor %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}",
                           "{%- set date_string = \"26 Jul 2024\" %}{{- \"Cutting Knowledge Date: December 2023\\n\" "
                           "}}{{- \"Today Date: \" + date_string + \"\\n\\n\" }}"
                           "'<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'{% if "
                           "add_generation_prompt %}'<|start_header_id|>assistant<|end_header_id|>\\n\\n'"});
    if (c.once_in(2)) damage(c, jinja);
    const json config = {{"bos_token", c.of({"<s>", ""})}, {"chat_template", jinja}};
    const std::string text =
        c.once_in(2) ? damaged_json(c, config) : config.dump(-1, ' ', false, json::error_handler_t::replace);
    const auto t = taken([&] { return trainer::chat_template_of(text, "c.json"); });
    if (!t) return;
    const std::string content = "x" + std::string(c.rest()) + "x";
    const auto formatted = taken([&] {
        return t->formatted(std::vector<trainer::chat_message>{{c.of({"user", "system", "tool"}), content}});
    });
    need(!formatted || formatted->find(content) != std::string::npos, "a message is not in its text");
}

void prompts(choices& c) {
    static const bpe_tokenizer b = [] {
        bool lossless = false;
        choices none(nullptr, 0);
        json t = some_tokenizer(none, lossless);
        t["model"].update({{"vocab", bytes_and_words()}, {"merges", json::array()}});
        return bpe_tokenizer(t.dump());
    }();
    const trainer::chat_template chat = trainer::named_chat_template("chatml");
    std::string lines;
    for (std::int64_t n = c.below(4); n >= 0; --n) {
        const json line = c.of<json>(
            {{{"ids", {1, 2, 3}}}, {{"text", "Grüße"}}, {{"messages", {{{"role", "user"}, {"content", "Hi"}}}}}});
        lines += damaged_json(c, line) + c.of({"\n", "\r\n"});
    }
    if (c.once_in(3)) damage(c, lines);
    const trainer::token vocabulary = b.vocabulary();
    const auto read = taken([&] {
        return trainer::prompts_of(lines, "p.jsonl",
                                   {.vocabulary = vocabulary, .most_tokens = 100, .tokenizer = &b, .chat = &chat});
    });
    if (!read) return;
    std::size_t line = 0;
    for (const trainer::prompt& p : *read) {
        need(p.line == ++line && !p.ids.empty() && p.ids.size() <= 100,
             "a prompt is empty, too long, or of another line");
        need(std::all_of(p.ids.begin(), p.ids.end(), [&](auto id) { return id >= 0 && id < vocabulary; }),
             "an id is not of the vocabulary");
    }
}

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    choices c(data, size);
    switch (c.below(5)) {
    case 0:
    case 1:
        tokenizer(c);
        break;
    case 2:
        a_pattern(c);
        break;
    case 3:
        a_chat_template(c);
        break;
    default:
        prompts(c);
    }
    return 0;
}
