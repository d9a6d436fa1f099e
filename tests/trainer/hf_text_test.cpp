// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Text in and out: the byte-level BPE beside what the PyPI package `tokenizers` made of the same lines (golden/text/,
// written by
// scripts/make_bpe_golden.py) and beside merges done one after another; decoding, streamed or not; chat templates
// beside what Jinja made of the models' own; files of prompts. Whatever is damaged or not supported is refused by its
// name.
#include <doctest/doctest.h>

#include <algorithm>
#include <fstream>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <rapidcheck.h>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "hf/bpe.hpp"
#include "hf/chat_template.hpp"
#include "hf/pattern.hpp"
#include "hf/prompts.hpp"
#include "hf/strict_json.hpp"
#include "hf/utf8.hpp"
#include "settings/failure.hpp"
#include "support/property.hpp"

using namespace trainer;
using nlohmann::json;
using opd::test::property;

namespace {

std::string golden(const std::string& name) {
    std::ifstream file(OPD_TEST_SOURCE_DIR "/tests/trainer/golden/text/" + name, std::ios::binary);
    std::ostringstream text;
    text << file.rdbuf();
    REQUIRE(file);
    return text.str();
}
const json& golden_encodings() {
    static const json j = json::parse(golden("encodings.json"));
    return j;
}

/// What the failure says that call() ends in; its code must be `code`.
std::string refusal(const std::function<void()>& call, exit_code code = exit_input) {
    try {
        call();
    } catch (const failure& e) {
        CHECK(e.code == code);
        return e.what();
    }
    return "nothing was refused";
}
void check_says(const std::string& said, const std::string& what) {
    CAPTURE(said);
    CAPTURE(what);
    CHECK(said.find(what) != said.npos);
}

std::string streamed(const bpe_tokenizer& t, const std::vector<token>& ids, bool skip_special) {
    text_stream stream(t, skip_special);
    std::string r;
    for (const token id : ids) r += stream.add(id);
    return r + stream.finish();
}

// The character that stands for a byte, written in another way than in bpe.cpp.
std::string letter(int byte) {
    static const std::vector<std::string> letters = [] {
        std::vector<std::string> r(256);
        int others = 0;
        for (int b = 0; b < 256; ++b) {
            const bool itself = (b > 32 && b < 127) || (b > 160 && b != 173);
            const int code = itself ? b : 256 + others++;
            r[static_cast<std::size_t>(b)] =
                code < 128 ? std::string(1, static_cast<char>(code))
                           : std::string{static_cast<char>(0xC0 | code >> 6), static_cast<char>(0x80 | (code & 63))};
        }
        return r;
    }();
    return letters[static_cast<std::size_t>(byte)];
}
std::string letters_of(const std::string& bytes) {
    std::string r;
    for (const char c : bytes) r += letter(static_cast<unsigned char>(c));
    return r;
}

/// A tokenizer.json with a token for each byte, in order, and what these merges make, each a new token.
json small_tokenizer(const std::vector<std::pair<std::string, std::string>>& merges = {{"a", "b"}, {"ab", "c"}}) {
    json vocab, list = json::array();
    for (int b = 0; b < 256; ++b) vocab[letter(b)] = b;
    for (const auto& [left, right] : merges) {
        const auto id = static_cast<int>(vocab.size());
        vocab.emplace(letters_of(left + right), id);
        list.push_back({letters_of(left), letters_of(right)});
    }
    const json bytes = {
        {"type", "ByteLevel"}, {"add_prefix_space", false}, {"trim_offsets", true}, {"use_regex", true}};
    return {{"version", "1.0"},
            {"truncation", nullptr},
            {"padding", nullptr},
            {"added_tokens", json::array()},
            {"normalizer", nullptr},
            {"pre_tokenizer", bytes},
            {"post_processor", nullptr},
            {"decoder", bytes},
            {"model",
             {{"type", "BPE"},
              {"dropout", nullptr},
              {"unk_token", nullptr},
              {"continuing_subword_prefix", ""},
              {"end_of_word_suffix", nullptr},
              {"fuse_unk", false},
              {"byte_fallback", false},
              {"ignore_merges", false},
              {"vocab", vocab},
              {"merges", list}}}};
}
json added(int id, const std::string& content) {
    return {{"id", id},        {"content", content},  {"single_word", false}, {"lstrip", false},
            {"rstrip", false}, {"normalized", false}, {"special", true}};
}
std::vector<token> encoded(const json& tokenizer, const std::string& text) {
    return bpe_tokenizer(tokenizer.dump()).encode(text);
}
using ids = std::vector<token>;

/// Text of any characters, many of them of the kinds on which patterns split.
std::string any_text() {
    static const std::vector<std::string> common = {"a",
                                                    "B",
                                                    "the",
                                                    " ",
                                                    "  ",
                                                    "\n",
                                                    "\r\n",
                                                    "\t",
                                                    "1",
                                                    "23",
                                                    "'s",
                                                    "'LL",
                                                    ".",
                                                    ",-",
                                                    "é",
                                                    "e\xCC\x81",
                                                    "中",
                                                    "م",
                                                    "👍",
                                                    "\xE2\x80\x8D",
                                                    "\xC2\xA0",
                                                    "\xE3\x80\x80",
                                                    std::string(1, '\0')};
    std::string r;
    for (const int kind : *rc::gen::container<std::vector<int>>(rc::gen::inRange(0, 40))) {
        if (kind < static_cast<int>(common.size())) {
            r += common[static_cast<std::size_t>(kind)];
            continue;
        }
        const auto code = *rc::gen::oneOf(rc::gen::inRange(1, 0x800), rc::gen::inRange(0x800, 0xD800),
                                          rc::gen::inRange(0xE000, 0x110000));
        if (code < 0x80)
            r += static_cast<char>(code);
        else if (code < 0x800)
            (r += static_cast<char>(0xC0 | code >> 6)) += static_cast<char>(0x80 | (code & 63));
        else if (code < 0x10000)
            ((r += static_cast<char>(0xE0 | code >> 12)) += static_cast<char>(0x80 | (code >> 6 & 63))) +=
                static_cast<char>(0x80 | (code & 63));
        else
            (((r += static_cast<char>(0xF0 | code >> 18)) += static_cast<char>(0x80 | (code >> 12 & 63))) +=
             static_cast<char>(0x80 | (code >> 6 & 63))) += static_cast<char>(0x80 | (code & 63));
    }
    return r;
}

} // namespace

TEST_CASE("lines of mixed text are encoded and decoded as tokenizers does") {
    const json& lines = golden_encodings()["lines"];
    REQUIRE(lines.size() > 200);
    for (const std::string family : {"gpt2", "qwen", "llama3"}) {
        CAPTURE(family);
        const bpe_tokenizer t(golden(family + ".json"), family);
        const json& of = golden_encodings()[family];
        for (std::size_t i = 0; i < lines.size(); ++i) {
            const std::string line = lines[i];
            CAPTURE(line);
            const ids expected = of["ids"][i].get<ids>();
            CHECK(t.encode(line) == expected);
            CHECK(t.encode(line) == expected); // with all words known
            const std::string key = std::to_string(i);
            const std::string text = of["text"].value(key, line), plain = of["without_special"].value(key, line);
            CHECK(t.decode(expected) == text);
            CHECK(t.decode(expected, true) == plain);
            CHECK(streamed(t, expected, false) == text);
            CHECK(streamed(t, expected, true) == plain);
        }
        for (std::size_t i = 0; i < of["drawn"].size(); ++i) { // ids without tokens among them
            const ids drawn = of["drawn"][i].get<ids>();
            CHECK(t.decode(drawn) == of["drawn_text"][i].get<std::string>());
            CHECK(streamed(t, drawn, false) == of["drawn_text"][i].get<std::string>());
        }
    }
}

TEST_CASE("what is encoded is decoded to itself") {
    const bpe_tokenizer llama3(golden("llama3.json")), qwen(golden("qwen.json"));
    property("text", [&] {
        const std::string text = any_text();
        RC_ASSERT(llama3.decode(llama3.encode(text, false)) == text);
        RC_ASSERT(llama3.decode(llama3.encode(text), true) == text);
        const ids once = qwen.encode(text); // of text in NFC
        RC_ASSERT(qwen.encode(qwen.decode(once)) == once);
    });
    property("any ids, in any pieces", [&] {
        const auto some = *rc::gen::container<ids>(rc::gen::inRange(0, llama3.vocabulary() + 4));
        for (const bool skip : {false, true}) {
            const std::string whole = llama3.decode(some, skip);
            RC_ASSERT(streamed(llama3, some, skip) == whole);
            RC_ASSERT(not_utf8(whole) == std::string::npos);
            RC_ASSERT(whole == utf8_repaired(llama3.bytes(some, skip)));
        }
    });
}

TEST_CASE("merges are those of the definition, one after another") {
    property("random merges", [] {
        // tokens over three letters, each new one of two that are there
        std::vector<std::string> made = {"a", "b", "c"};
        std::vector<std::pair<std::string, std::string>> merges;
        for (const auto& [l, r] : *rc::gen::container<std::vector<std::pair<int, int>>>(
                 rc::gen::pair(rc::gen::inRange(0, 1000), rc::gen::inRange(0, 1000)))) {
            const std::string left = made[static_cast<std::size_t>(l) % made.size()];
            const std::string right = made[static_cast<std::size_t>(r) % made.size()];
            const std::pair merge(left, right);
            if (std::count(merges.begin(), merges.end(), merge) > 0 || left.size() + right.size() > 40) continue;
            // what another merge makes too, as in the vocabularies that were tiktoken's
            if (std::count(made.begin(), made.end(), left + right) == 0) made.push_back(left + right);
            merges.emplace_back(left, right);
        }
        std::string text;
        for (const char c : *rc::gen::container<std::vector<char>>(rc::gen::elementOf(std::string("aaabbc"))))
            text += c;

        std::vector<std::string> parts;
        for (const char c : text) parts.emplace_back(1, c);
        for (;;) {
            std::size_t best = merges.size(), at = 0;
            for (std::size_t i = 0; i + 1 < parts.size(); ++i)
                for (std::size_t m = 0; m < best; ++m)
                    if (merges[m] == std::pair(parts[i], parts[i + 1])) best = m, at = i;
            if (best == merges.size()) break;
            parts[at] += parts[at + 1];
            parts.erase(parts.begin() + static_cast<std::ptrdiff_t>(at) + 1);
        }
        const bpe_tokenizer t(small_tokenizer(merges).dump());
        ids expected;
        for (const std::string& p : parts) expected.push_back(t.id_of(p).value());
        RC_ASSERT(t.encode(text) == expected);
    });
}

TEST_CASE("a word of any length takes n log n") { // the square of it would be minutes
    std::vector<std::pair<std::string, std::string>> merges;
    for (int i = 0; i < 6; ++i)
        merges.emplace_back(std::string(std::size_t{1} << i, 'a'), std::string(std::size_t{1} << i, 'a'));
    const bpe_tokenizer t(small_tokenizer(merges).dump());
    const ids all = t.encode(std::string(300'000, 'a'));
    CHECK(all.size() == 300'000 / 64 + 1); // and 32 over
    CHECK(t.decode(all) == std::string(300'000, 'a'));
    // the pattern is asked for its longest match, and has much to try again
    CHECK(t.decode(t.encode(std::string(300'000, ' ') + "x")).size() == 300'001);
    std::string numbers; // more words than are remembered
    for (int i = 0; i < 140'000; ++i) numbers += std::to_string(i) += ' ';
    const bpe_tokenizer digits(small_tokenizer({{"1", "2"}, {"12", "3"}}).dump());
    CHECK(digits.decode(digits.encode(numbers)) == numbers);
    CHECK(digits.encode("12345 123") == ids{257, '4', '5', ' ', 257});
    const bpe_tokenizer qwen(golden("qwen.json"));
    std::string marks = "x"; // to be sorted by the normalizer
    for (int i = 0; i < 50'000; ++i) marks += "\xCC\x81\xCC\xA3";
    CHECK(qwen.decode(qwen.encode(marks)).size() == marks.size());
    CHECK(qwen.encode(std::string(300'000, ' ') + "\n" + std::string(300'000, '\n')).size() > 0);
}

TEST_CASE("added tokens") {
    json t = small_tokenizer();
    t["added_tokens"] = {added(258, "<x>"), added(259, "<xy>"), added(256, "ab")};
    t["added_tokens"][1]["special"] = false;
    const bpe_tokenizer b(t.dump());
    CHECK(b.encode("<x><xy><x<x>") == ids{258, 259, '<', 'x', 258});
    CHECK(b.encode("abc") == ids{256, 'c'}); // cut out before merges
    CHECK(b.decode(ids{258, 97, 259, 256}, true) == "a<xy>");
    CHECK(b.is_special(258));
    CHECK_FALSE(b.is_special(259));
    CHECK_FALSE(b.is_special(-1));
    CHECK_FALSE(b.is_special(5000));
    CHECK(b.id_of("<xy>") == 259);
    CHECK_FALSE(b.id_of("<z>"));
    CHECK(b.vocabulary() == 260);
    CHECK(refusal([&] { b.decode(ids{3, -1}); }) == "ids: -1 is no token");
    // cut out before the normalizer makes one character of '>' and U+0338, or after
    t["normalizer"] = {{"type", "NFC"}};
    CHECK(encoded(t, "<x>\u0338") == ids{258, 0xCC, 0xB8});
    t["added_tokens"][0]["normalized"] = true;
    CHECK(encoded(t, "<x>\u0338") == ids{'<', 'x', 0xE2, 0x89, 0xAF});
}

TEST_CASE("UTF-8 that is broken") {
    const bpe_tokenizer t(small_tokenizer().dump());
    CHECK(refusal([&] { t.encode("ab\xFF"); }) == "text: is not UTF-8 at byte 2");
    CHECK(refusal([&] { t.encode("\xED\xA0\x80"); }) == "text: is not UTF-8 at byte 0"); // a surrogate
    CHECK(refusal([&] { t.encode("x\xE2\x82"); }) == "text: is not UTF-8 at byte 1");
    // The Unicode Standard 15.0, section 3.9, tables 3-8 to 3-11: how many U+FFFD
    const auto repaired = [](const std::string& s) {
        std::string r;
        const std::string fixed = utf8_repaired(s);
        for (std::size_t i = 0; i < fixed.size();) {
            const utf8_step step = utf8_at(fixed, i);
            r += step.code == 0xFFFD ? '?' : static_cast<char>(step.code);
            i += step.bytes;
        }
        return r;
    };
    CHECK(repaired("\xC0\xAF\xE0\x80\xBF\xF0\x81\x82\x41") == "????????A");
    CHECK(repaired("\xED\xA0\x80\xED\xBF\xBF\xED\xAF\x41") == "????????A");
    CHECK(repaired("\xF4\x91\x92\x93\xFF\x41\x80\xBF\x42") == "?????A??B");
    CHECK(repaired("\xE1\x80\xE2\xF0\x91\x92\xF1\xBF\x41") == "????A");
    CHECK(repaired("a\xF0\x9F\x91") == "a?");
    text_stream stream(t);
    CHECK(stream.add(0xF0) == "");
    CHECK(stream.add(0x9F) == "");
    CHECK(stream.add('a') == "\xEF\xBF\xBD"
                             "a");
    CHECK(stream.add(0xC3) == "");
    CHECK(stream.add(0xA9) == "é");
    CHECK(stream.add(0xC3) == "");
    CHECK(stream.finish() == "\xEF\xBF\xBD");
    CHECK(stream.finish() == "");
}

TEST_CASE("files that are damaged or not supported are refused by name") {
    struct wrong {
        const char* where; // a JSON pointer; "-" before it: what stands there goes
        json value;
        const char* says;
    };
    const json bytes = small_tokenizer()["pre_tokenizer"];
    const json split = {{"type", "Split"}, {"pattern", {{"Regex", "x"}}}, {"behavior", "Isolated"}, {"invert", false}};
    const json bos = {
        {"type", "TemplateProcessing"},
        {"single",
         {{{"SpecialToken", {{"id", "<s>"}, {"type_id", 0}}}}, {{"Sequence", {{"id", "A"}, {"type_id", 0}}}}}},
        {"pair", json::array()},
        {"special_tokens", {{"<s>", {{"id", "<s>"}, {"ids", {5}}, {"tokens", {"<s>"}}}}}}};
    const auto with = [](json j, const char* pointer, json value) {
        j[json::json_pointer(pointer)] = std::move(value);
        return j;
    };
    const auto sequence = [](const char* key, json list) { return json{{"type", "Sequence"}, {key, std::move(list)}}; };
    const wrong all[] = {
        {"/version", "2.0", "t.json: version: is \"2.0\"; supported is \"1.0\""},
        {"/version", 1, "t.json: version: is number, not a string"},
        {"/truncation", {{"max_length", 5}}, "t.json: truncation: is not supported; set it to null"},
        {"/padding", json::object(), "t.json: padding: is not supported"},
        {"/colour", 1, "t.json: the key \"colour\" is not supported"},
        {"/model", 5, "t.json: model: is number, not an object"},
        {"-/model", {}, "t.json: has no 'model'"},
        {"/model/type", "WordPiece", "t.json: model.type: is \"WordPiece\"; supported is BPE"},
        {"/model/dropout", 0.1, "t.json: model.dropout: is not supported"},
        {"/model/continuing_subword_prefix", "##", "t.json: model.continuing_subword_prefix: is not supported"},
        {"/model/end_of_word_suffix", "</w>", "t.json: model.end_of_word_suffix: is not supported"},
        {"/model/unk_token", 3, "t.json: model.unk_token: is number, not a string"},
        {"/model/fuse_unk", "yes", "t.json: model.fuse_unk: is string, not true or false"},
        {"/model/ignore_merges", 1, "t.json: model.ignore_merges: is number, not true or false"},
        {"/model/speed", 1, "t.json: model: the key \"speed\" is not supported"},
        {"/model/vocab", json::array(), "t.json: model.vocab: is array, not an object"},
        {"/model/vocab/ab", -1, "t.json: model.vocab.ab: must be an id from 0 to 16777215, not \"-1\""},
        {"/model/vocab/ab", 1e300, "t.json: model.vocab.ab: must be an id from 0 to 16777215, not \"1e+300\""},
        {"/model/vocab/ab", 2.0, "t.json: model.vocab.ab: must be an id from 0"},
        {"/model/vocab/ab", 1 << 24, "t.json: model.vocab.ab: must be an id from 0"},
        {"/model/vocab/ab", std::uint64_t{1} << 40, "t.json: model.vocab.ab: must be an id from 0"},
        {"/model/vocab/ab", "256", "t.json: model.vocab.ab: must be an id from 0"},
        {"/model/vocab/ab", 98, "t.json: model.vocab: the id 98 is there twice, once of \"b\""},
        {"-/model/vocab/b", {}, "t.json: model.vocab: has no token \"b\" for the byte 98"},
        {"/model/merges", "a b", "t.json: model.merges: is string, not a list"},
        {"/model/merges/0", 5, "t.json: model.merges[0]: is neither a string nor a pair of strings"},
        {"/model/merges/0", {"a", "b", "c"}, "t.json: model.merges[0]: is neither a string nor a pair of strings"},
        {"/model/merges/0", {"a", 1}, "t.json: model.merges[0]: is neither a string nor a pair of strings"},
        {"/model/merges/1", "abc", "t.json: model.merges[1]: is \"abc\", not two tokens and a space"},
        {"/model/merges/1", "a b c", "t.json: model.merges[1]: is \"a b c\", not two tokens and a space"},
        {"/model/merges/1", "a q", "t.json: model.merges[1]: the token \"aq\" is not in the vocabulary"},
        {"/model/merges/1", {"ab", "\t"}, "t.json: model.merges[1]: the token \"ab\\t\" is not in the vocabulary"},
        {"/model/merges/1", {"", "ab"}, "t.json: model.merges[1]: the token \"\" is not in the vocabulary"},
        {"/model/merges/1", {"abc", ""}, "t.json: model.merges[1]: the token \"\" is not in the vocabulary"},
        {"/model/merges/1", "a b", "t.json: model.merges[1]: merges \"a\" and \"b\" a second time"},
        {"/normalizer", {{"type", "NFKC"}}, "t.json: normalizer: the type \"NFKC\" is not supported; null and NFC are"},
        {"/normalizer", sequence("normalizers", json::array({{{"type", "Lowercase"}}})),
         "t.json: normalizer.normalizers[0]: the type \"Lowercase\" is not supported"},
        {"/normalizer", "NFC", "t.json: normalizer: is string, not an object"},
        {"/pre_tokenizer", nullptr, "t.json: has no pre_tokenizer; supported is byte-level BPE alone"},
        {"/pre_tokenizer", {{"type", "Whitespace"}}, "t.json: pre_tokenizer: the type \"Whitespace\" is not supported"},
        {"/pre_tokenizer", split, "t.json: pre_tokenizer: has no ByteLevel"},
        {"/pre_tokenizer", sequence("pretokenizers", {bytes, split}),
         "t.json: pre_tokenizer.pretokenizers[1]: comes after ByteLevel"},
        {"/pre_tokenizer", sequence("pretokenizers", {bytes, bytes}),
         "t.json: pre_tokenizer.pretokenizers[1]: comes after ByteLevel"},
        {"/pre_tokenizer", sequence("pretokenizers", json(40, split)), "has more than 32 steps"},
        {"/pre_tokenizer", with(split, "/behavior", "MergedWithNext"),
         "t.json: pre_tokenizer.behavior: is \"MergedWithNext\"; supported are Isolated and Removed"},
        {"/pre_tokenizer", with(split, "/pattern", {{"String", "x"}}),
         "t.json: pre_tokenizer.pattern: the key \"String\" is not supported"},
        {"/pre_tokenizer", with(split, "/pattern/Regex", "x*"),
         "t.json: pre_tokenizer.pattern: matches the empty string"},
        {"/pre_tokenizer", with(split, "/pattern/Regex", "(x"),
         "t.json: pre_tokenizer.pattern: \"(x\" has an open '('"},
        {"/pre_tokenizer/colour", 1, "t.json: pre_tokenizer: the key \"colour\" is not supported"},
        {"/pre_tokenizer/use_regex", 1, "t.json: pre_tokenizer.use_regex: is number, not true or false"},
        {"/post_processor",
         {{"type", "BertProcessing"}},
         "t.json: post_processor: the type \"BertProcessing\" is not supported"},
        {"/post_processor", sequence("processors", {bos, bos}),
         "t.json: post_processor.processors[1]: is a second template"},
        {"/post_processor", with(bos, "/special_tokens/<s>/ids/0", 300),
         "special_tokens.<s>.ids[0]: must be an id from 0 to 257, not \"300\""},
        {"/post_processor", with(bos, "/single/1/Sequence/id", "B"),
         "t.json: post_processor.single[1].Sequence.id: is \"B\", not \"A\""},
        {"/post_processor", with(bos, "/single/0/SpecialToken/id", "</s>"),
         "t.json: post_processor.special_tokens: has no '</s>'"},
        {"/post_processor", with(bos, "/single", json::array()),
         "t.json: post_processor.single: has no place for the text"},
        {"/decoder", nullptr, "t.json: has no decoder; supported is ByteLevel"},
        {"/decoder", {{"type", "Metaspace"}}, "t.json: decoder: the type \"Metaspace\" is not supported"},
        {"/added_tokens", json::object(), "t.json: added_tokens: is object, not a list"},
        {"/added_tokens", json::array({5}), "t.json: added_tokens[0]: is number, not an object"},
        {"/added_tokens", json::array({added(300, "<x>")}),
         "t.json: added_tokens[0]: the token \"<x>\" has the id 300, but tokenizers would give it 258"},
        {"/added_tokens", json::array({added(5, "<x>")}),
         "t.json: added_tokens[0]: the token \"<x>\" has the id 5, but"},
        {"/added_tokens", json::array({added(258, "<x>"), added(258, "<y>")}),
         "t.json: added_tokens[1]: the token \"<y>\" has the id 258, but tokenizers would give it 259"},
        {"/added_tokens", json::array({added(258, "<x>"), added(259, "<x>")}),
         "t.json: added_tokens[1]: the token \"<x>\" is there twice"},
        {"/added_tokens", json::array({added(258, "")}), "t.json: added_tokens[0]: has no content"},
        {"/added_tokens", json::array({with(added(258, "<x>"), "/special", "no")}),
         "t.json: added_tokens[0].special: is string, not true or false"},
        {"/added_tokens", json::array({with(added(258, "<x>"), "/colour", 1)}),
         "t.json: added_tokens[0]: the key \"colour\" is not supported"},
    };
    for (const auto& [where, value, says] : all) {
        json t = small_tokenizer();
        const bool goes = *where == '-';
        const json::json_pointer at(where + (goes ? 1 : 0));
        goes ? void(t[at.parent_pointer()].erase(at.back())) : void(t[at] = value);
        check_says(refusal([&] { bpe_tokenizer(t.dump(), "t.json"); }), says);
    }
    json nfc = small_tokenizer();
    nfc["normalizer"] = {{"type", "NFC"}};
    nfc["added_tokens"].push_back(with(added(258, "ne\u0301"), "/normalized", true));
    check_says(refusal([&] { encoded(nfc, "x"); }),
               "added_tokens[0]: the token \"ne\\u0301\" is special and changes when it is normalised: give it in NFC");
    nfc["added_tokens"][0]["special"] = false;
    CHECK(encoded(nfc, "n\u00e9e\u0301") == ids{258, 0xC3, 0xA9});
    nfc["added_tokens"].push_back(with(added(259, "n\u00e9"), "/normalized", true));
    check_says(refusal([&] { encoded(nfc, "x"); }),
               "added_tokens[1]: the token \"n\\u00e9\" is another one when it is normalised");
    // an id of an added token that the model's vocabulary, with holes, has already
    json holes = small_tokenizer();
    holes["model"]["vocab"]["abc"] = 300;
    holes["added_tokens"].push_back(added(258, "<x>"));
    CHECK(encoded(holes, "<x>abc") == ids{258, 300});
    holes["model"]["vocab"]["abc"] = 258;
    check_says(refusal([&] { encoded(holes, "x"); }), "added_tokens[0]: the id 258 is another token's");

    const std::string text = small_tokenizer().dump();
    const auto read = [](const std::string& s) { return refusal([&] { bpe_tokenizer(s, "t.json"); }); };
    for (const std::size_t size : {std::size_t{0}, std::size_t{1}, text.size() / 2, text.size() - 1})
        check_says(read(text.substr(0, size)), "t.json: is no JSON: ");
    check_says(read("[]"), "t.json: is array, not an object");
    check_says(read("{\"model\": {\"vocab\": {\"a\": 1, \"a\": 2}}}"), "t.json: has the key \"a\" twice");
    check_says(read(std::string(100'000, '[')), "t.json: is nested deeper than 32 levels");
    check_says(read("{\"version\": \"\xFF\"}"), "t.json: is no JSON: ");
    check_says(read("{\"version\": 1e999}"), "t.json: is no JSON: ");
}

TEST_CASE("patterns: what means the same in PCRE2, and nothing else") {
    const auto translated = [](const char* p) { return pcre2_pattern(p, "p"); };
    CHECK(translated("(?i:'s|'t|'re|'ve|'m|'ll|'d)|a{1,3}b{2}c{2,}") == "(?i:'s|'t|'re|'ve|'m|'ll|'d)|a{1,3}b{2}c{2,}");
    CHECK(translated("[^\\r\\n\\p{L}\\p{N}]?+\\p{Lu}*+ ?[a-z-]++(?!x)(?=y)(?:z)+") ==
          "[^\\r\\n\\p{L}\\p{N}]?+\\p{Lu}*+ ?[a-z\\-]++(?!x)(?=y)(?:z)+");
    CHECK(translated("[一-龥]\\.\\P{L}\\d[\\]&-]") == "[一-龥]\\.\\P{L}\\d[\\]&\\-]");
    const pattern white(translated("\\s+"), "p"), others(translated("\\S+|x"), "p"), set(translated("[^\\sx]+"), "p");
    const std::string text = "a\xE1\xA0\x8E\xC2\x85 b"; // U+180E is no white space, U+0085 is
    CHECK(white.find(text, 0).begin == 4);
    CHECK(white.find(text, 0).end == 7);
    CHECK(others.find(text, 0).end == 4);
    CHECK(set.find(text, 5).begin == 7);
    CHECK_FALSE(white.find("abc", 1).found);

    const std::pair<const char*, const char*> wrong[] = {
        {"a)", "\"a)\" has a ')' too many, at byte 1"},
        {"((a)", "has an open '('"},
        {"[ab", "has an open '['"},
        {"[]", "has an empty [ ]"},
        {"[^]", "has an empty [ ]"},
        {"[a[b]]", "has a set within a set"},
        {"[a&&b]", "has a set within a set"},
        {"[a-\\d]", "has a range without an end"},
        {"[a-]", ""},
        {"[\\s-a]", "has a '-' that is no range"},
        {"[a-b-c]", "has a '-' that is no range"},
        {"[\\S]", "has the escape \"\\\\S\""},
        {"*a", "repeats what cannot be repeated"},
        {"a|*", "repeats what cannot be repeated"},
        {"(?=a)*", "repeats what cannot be repeated"},
        {"a+*", "repeats what cannot be repeated"},
        {"a{2}+", "has a '?' or '+' after '}'"},
        {"a{2}?", "has a '?' or '+' after '}'"},
        {"a{,2}", "has a '{' without numbers"},
        {"a{1000}", "has a '{' without numbers"},
        {"a{1", "has a '{' without '}'"},
        {"a$", "has '$', which is not supported"},
        {"^a", "has '^', which is not supported"},
        {"a.", "has '.', which is not supported"},
        {"\\w", "has the escape \"\\\\w\""},
        {"\\h", "has the escape"},
        {"a\\", "has the escape \"\\\\\""},
        {"\\p{Han}", "has the property \"\\\\p{Han}\", which is no general category"},
        {"\\pL", "which is no general category"},
        {"\\p{L", "which is no general category"},
        {"(?i:ss)", "has a group \"(?i:\", which is not supported"},
        {"(?<a>b)", "has a group \"(?<a\""},
        {"(*UTF)a", "repeats what cannot be repeated"},
    };
    for (const auto& [p, says] : wrong)
        if (*says)
            check_says(refusal([&] { translated(p); }), says);
        else
            CHECK_NOTHROW(translated(p));
    check_says(refusal([&] { translated(std::string(40, '(').c_str()); }), "has groups within 30 others");
    check_says(refusal([] { pattern("[z-a]", "p"); }), "p: PCRE2: ");
}

TEST_CASE("steps of a pre-tokenizer") {
    const auto steps = [](std::vector<json> list, bool prefix) {
        json t = small_tokenizer({{"1", "2"}, {"a", "b"}, {" ", "a"}});
        list.push_back(
            {{"type", "ByteLevel"}, {"add_prefix_space", prefix}, {"trim_offsets", true}, {"use_regex", false}});
        t["pre_tokenizer"] = {{"type", "Sequence"}, {"pretokenizers", list}};
        return t;
    };
    const auto split = [](const char* regex, const char* behavior, bool invert) {
        return json{{"type", "Split"}, {"pattern", {{"Regex", regex}}}, {"behavior", behavior}, {"invert", invert}};
    };
    const auto digits = [](bool individual) { return json{{"type", "Digits"}, {"individual_digits", individual}}; };
    CHECK(encoded(steps({}, false), "12ab") == ids{256, 257});
    CHECK(encoded(steps({digits(true)}, false), "12ab") == ids{'1', '2', 257});
    CHECK(encoded(steps({digits(false)}, false), "12ab") == ids{256, 257});
    CHECK(encoded(steps({split("1|b", "Isolated", false)}, false), "12ab") == ids{'1', '2', 'a', 'b'});
    CHECK(encoded(steps({split("1|b", "Removed", false)}, false), "12ab") == ids{'2', 'a'});
    CHECK(encoded(steps({split("1|b", "Removed", true)}, false), "12ab") == ids{'1', 'b'});
    CHECK(encoded(steps({split("2", "Isolated", false), split("a", "Removed", false)}, false), "12ab") ==
          ids{'1', '2', 'b'});
    CHECK(encoded(steps({split("2", "Isolated", false)}, true), "12a ab") == ids{' ', '1', ' ', '2', 258, ' ', 257});
    CHECK(encoded(steps({}, true), "") == ids{});
}

TEST_CASE("chat templates: as Jinja renders the models' own") {
    const json j = json::parse(golden("chats.json"));
    REQUIRE(j["chats"].size() == 24);
    const auto config_of = [&](const std::string& name) {
        return json{{"bos_token", {{"content", "<|begin_of_text|>"}}}, {"chat_template", j["templates"][name]}}.dump();
    };
    for (const json& chat : j["chats"]) {
        const chat_template t = chat_template_of(config_of(chat["template"]), "c.json");
        CAPTURE(chat.dump());
        std::vector<chat_message> messages;
        for (const json& m : chat["messages"]) messages.push_back({m["role"], m["content"]});
        CHECK(t.formatted(messages) == chat["text"].get<std::string>());
        if (t.thinks && messages.back().role == "assistant") continue;
        CHECK(t.formatted(messages, false) == chat["closed"].get<std::string>());
    }
    // one of several; the file beside goes first
    const json named = {
        {"bos_token", nullptr},
        {"chat_template",
         {{{"name", "tools"}, {"template", "?"}}, {{"name", "default"}, {"template", j["templates"]["chatml"]}}}}};
    CHECK(chat_template_of(named.dump(), "c.json").name == "chatml");
    CHECK(chat_template_of(config_of("chatml"), "c.json", j["templates"]["llama-3"].get<std::string>()).name ==
          "llama-3");

    CHECK(named_chat_template("chatml").formatted(std::vector<chat_message>{{"user", "Hi"}}) ==
          "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n");
    CHECK(named_chat_template("llama-3").formatted(std::vector<chat_message>{{"user", " Hi\n"}}) ==
          "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_"
          "header_id|>\n\n");
    CHECK(named_chat_template("plain").formatted(std::vector<chat_message>{{"user", "Hi "}, {"user", "x"}}) ==
          "Hi \nx\n");
    CHECK(refusal([] { named_chat_template("vicuna"); }, exit_usage) ==
          "no chat template is called \"vicuna\"; there are chatml, llama-3 and plain");
}

TEST_CASE("chat templates that are not known are refused") {
    const json j = json::parse(golden("chats.json"))["templates"];
    const auto changed = [&](const char* name, const std::string& what, const std::string& by) {
        std::string t = j[name];
        const std::size_t at = t.find(what);
        REQUIRE(at != t.npos);
        t.replace(at, what.size(), by);
        return refusal([&] { chat_template_of_jinja(t, "<s>", "c.json"); });
    };
    check_says(changed("chatml", "'<|im_start|>' + message", "'<|im_start|>' + bos_token + message"),
               "has \"bos_token\", which is not supported");
    check_says(changed("chatml", "message['content']", "message['content'] | trim"), "has \"|trim\"");
    check_says(changed("chatml", "message['content']", "message['content'].strip()"), "has \"strip(\"");
    check_says(changed("chatml", "message['role']", "names[message['role']]"),
               "writes messages in a way that is not known");
    check_says(changed("chatml", "<|im_end|>", "<|im_stop|>"), "ends messages in a way that is not known");
    check_says(changed("chatml", "assistant\\n", "model\\n"), "begins answers in a way that is not known");
    check_says(changed("chatml-thinks", "is false", "is true"), "begins answers in a way that is not known");
    check_says(changed("chatml-default", "'<|im_start|>system", "pre + ' <|im_start|>system"),
               "writes a system message in a way that is not known");
    check_says(changed("chatml-default", "verse.", "verse. {{ x }}' + '"),
               "writes a system message in a way that is not known");
    check_says(changed("llama-3.1", "\"26 Jul 2024\"", "strftime_now(\"%d %b %Y\")"), "writes the date of the day");
    check_says(changed("llama-3.1", "December", "June"), "writes dates in a way that is not known");
    check_says(changed("llama-3.1", "set date_string = \"", "set date_string = \""), "nothing was refused");
    check_says(changed("llama-3", "<|end_header_id|>\\n\\n' + message", "<|end_header_id|>\\n' + message"),
               "writes messages in a way");
    check_says(refusal([&] { chat_template_of_jinja(j["llama-3"].get<std::string>(), "", "c.json"); }),
               "writes a bos_token, but there is none");
    check_says(refusal([] { chat_template_of_jinja("{{ bos_token }}[INST]", "<s>", "c.json"); }),
               "c.json: the chat template is not a known one; known are ChatML's and Llama-3's: give prompts as ids, "
               "or as text in the model's format");
    check_says(refusal([] { chat_template_of("{}", "c.json"); }),
               "c.json: has no chat_template: give prompts as ids, or as text");
    check_says(refusal([] { chat_template_of("{\"chat_template\": 5}", "c.json"); }),
               "c.json: chat_template: is number, not a string");
    check_says(refusal([] { chat_template_of("{\"chat_template\": []}", "c.json"); }),
               "c.json: chat_template: has none with the name \"default\"");
    check_says(refusal([] { chat_template_of("{", "c.json"); }), "c.json: is no JSON");

    const auto formatted = [&](const char* name, std::vector<chat_message> m) {
        return refusal([&] { chat_template_of_jinja(j[name].get<std::string>(), "<s>", "c.json").formatted(m); });
    };
    check_says(formatted("chatml", {}), "messages: there are none");
    check_says(formatted("chatml", {{"user", ""}, {"tool", "5"}}),
               "messages[1]: the role \"tool\" is not supported; system, user and assistant are");
    check_says(formatted("chatml-thinks", {{"user", ""}, {"assistant", "<think>\n</think>\n5"}, {"user", ""}}),
               "messages[1]: this model's template takes thoughts out");
    check_says(formatted("chatml-thinks", {{"user", ""}, {"assistant", "5"}}),
               "messages[1]: this model's template writes thoughts into an answer");
    check_says(formatted("chatml-thinks", {{"user", "<tool_response>5</tool_response>"}}),
               "messages[0]: answers of tools are not supported");
}

TEST_CASE("what the page shows") {
    const std::string tokenizer_json = golden("qwen.json"), text = "Grüße <|im_end|>";
    const std::string tokenizer_config =
        json{{"chat_template", json::parse(golden("chats.json"))["templates"]["chatml"]}}.dump();
    const std::string lines = "{\"messages\": [{\"role\": \"user\", \"content\": \"Hi\"}]}\n";
    const token model_rows = 1024;
    std::string shown;

    const bpe_tokenizer tokenizer(tokenizer_json, "model/tokenizer.json");
    const std::vector<token> ids = tokenizer.encode(text);
    const std::string again = tokenizer.decode(ids), without_special = tokenizer.decode(ids, true);

    text_stream stream(tokenizer, true);
    for (const token id : ids) shown += stream.add(id); // each time the characters that are complete
    shown += stream.finish();

    const chat_template chat = chat_template_of(tokenizer_config, "model/tokenizer_config.json");
    const std::vector<prompt> prompts = prompts_of(
        lines, "prompts.jsonl", {.vocabulary = model_rows, .most_tokens = 512, .tokenizer = &tokenizer, .chat = &chat});

    CHECK(again == text);
    CHECK(without_special == "Grüße ");
    CHECK(shown == "Grüße ");
    REQUIRE(prompts.size() == 1);
    CHECK(tokenizer.decode(prompts[0].ids) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n");
}

TEST_CASE("prompts") {
    const bpe_tokenizer llama3(golden("llama3.json"));
    const chat_template chat = named_chat_template("llama-3");
    const prompt_settings how{.vocabulary = llama3.vocabulary(), .tokenizer = &llama3, .chat = &chat};
    const std::string lines = "{\"ids\": [5, 0, 7]}\r\n{\"text\": \"Gr\\u00fc\\u00dfe <|eot_id|>\"}\n{\"messages\": "
                              "[{\"role\": \"user\", \"content\": \"Hi\"}]}";
    const std::vector<prompt> read = prompts_of(lines, "p.jsonl", how);
    REQUIRE(read.size() == 3);
    CHECK(read[0].ids == ids{5, 0, 7});
    CHECK(read[1].ids == llama3.encode("Grüße <|eot_id|>"));
    CHECK(read[1].ids.front() == llama3.id_of("<|begin_of_text|>"));
    CHECK(read[2].ids == llama3.encode("<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
                                       "<|start_header_id|>assistant<|end_header_id|>\n\n",
                                       false));
    CHECK(read[2].line == 3);

    const auto second = [&](const std::string& line, prompt_settings s) {
        return refusal([&] { prompts_of("{\"ids\": [5, 6]}\n" + line + "\n", "p.jsonl", s); });
    };
    const auto none = [&](prompt_settings s) { return s.tokenizer = nullptr, s; };
    check_says(second("", how), "p.jsonl, line 2: is empty");
    check_says(second(" \t\r", how), "p.jsonl, line 2: is empty");
    check_says(second("[5]", how), "p.jsonl, line 2: is array, not an object");
    check_says(second("{\"ids\": [5]", how), "p.jsonl, line 2: is no JSON: ");
    check_says(second("{}", how), "p.jsonl, line 2: must have one key: ids, text or messages");
    check_says(second("{\"ids\": [5], \"text\": \"x\"}", how), "p.jsonl, line 2: must have one key");
    check_says(second("{\"ids\": [5], \"ids\": [6]}", how), "p.jsonl, line 2: has the key \"ids\" twice");
    check_says(second("{\"prompt\": \"x\"}", how), "p.jsonl, line 2: the key \"prompt\" is not supported");
    check_says(second("{\"ids\": []}", how), "p.jsonl, line 2: has no tokens");
    check_says(second("{\"ids\": null}", how), "p.jsonl, line 2: ids: is null, not a list");
    check_says(second("{\"ids\": [5, -1]}", how), "p.jsonl, line 2: ids[1]: must be an id from 0 to ");
    check_says(second("{\"ids\": [5, 1.5]}", how), "p.jsonl, line 2: ids[1]: must be an id from 0 to ");
    check_says(second("{\"ids\": [100000]}", how), "p.jsonl, line 2: ids[0]: must be an id from 0 to ");
    check_says(second("{\"text\": 5}", how), "p.jsonl, line 2: text: is number, not a string");
    check_says(second("{\"text\": \"\xFF\"}", how), "p.jsonl, line 2: is no JSON: ");
    check_says(second("{\"text\": \"x\"}", none(how)), "p.jsonl, line 2: text: there is no tokenizer; give ids");
    check_says(second("{\"messages\": {}}", how), "p.jsonl, line 2: messages: is object, not a list");
    check_says(second("{\"messages\": []}", how), "p.jsonl, line 2: messages: there are none");
    check_says(second("{\"messages\": [{\"role\": \"user\"}]}", how), "p.jsonl, line 2: messages[0]: has no 'content'");
    check_says(second("{\"messages\": [{\"role\": \"user\", \"content\": \"\", \"name\": \"x\"}]}", how),
               "p.jsonl, line 2: messages[0]: the key \"name\" is not supported");
    check_says(second("{\"messages\": [{\"role\": \"root\", \"content\": \"\"}]}", how),
               "p.jsonl, line 2: messages[0]: the role \"root\" is not supported");
    prompt_settings narrow = how;
    narrow.chat = nullptr;
    check_says(second("{\"messages\": []}", narrow), "p.jsonl, line 2: messages: there is no chat template: give ids");
    narrow.most_tokens = 2;
    check_says(second("{\"ids\": [5, 6, 7]}", narrow), "p.jsonl, line 2: has 3 tokens; the most is 2");
    narrow.vocabulary = 300; // of a model that has fewer rows than the tokenizer has tokens
    check_says(second("{\"text\": \"x\"}", narrow), "but the model has 300");
    check_says(refusal([&] { prompts_of("", "p.jsonl", how); }), "p.jsonl: has no prompts");
    const bpe_tokenizer bare(small_tokenizer().dump());
    check_says(refusal([&] { prompts_of("{\"text\": \"\"}", "p.jsonl", {.vocabulary = 258, .tokenizer = &bare}); }),
               "p.jsonl, line 1: has no tokens");
}
