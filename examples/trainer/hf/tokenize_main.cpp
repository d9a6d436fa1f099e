// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// opd-tokenize: prompts as JSON lines (hf/prompts.hpp) to lines of ids, or ids back to text.
//
//   opd-tokenize TOKENIZER.json PROMPTS.jsonl [CHAT]      {"ids": […]} a line; CHAT is a tokenizer_config.json, or
//                                                         one of chatml, llama-3 and plain
//   opd-tokenize --decode TOKENIZER.json IDS.jsonl        {"text": "…"} a line
//   opd-tokenize --time TOKENIZER.json PROMPTS.jsonl      of lines of text: how fast they are encoded and decoded
#include <cstdio>
#include <ctime>
#include <fstream>
#include <iostream>
#include <optional>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "hf/prompts.hpp"
#include "settings/failure.hpp"

namespace {

using namespace trainer;

std::string read(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    std::ostringstream bytes;
    bytes << file.rdbuf();
    if (!file || !bytes) throw failure(exit_input, "cannot read " + path);
    return std::move(bytes).str();
}

void time(const std::string& tokenizer_json, const std::string& lines) {
    std::vector<std::string> texts;
    std::size_t bytes = 0;
    std::istringstream in(lines);
    for (std::string line; std::getline(in, line);) {
        texts.push_back(nlohmann::json::parse(line).at("text"));
        bytes += texts.back().size();
    }
    auto lap = [begin = std::clock()]() mutable { // of the processor: others may be using the machine
        const std::clock_t from = std::exchange(begin, std::clock());
        return static_cast<double>(begin - from) / CLOCKS_PER_SEC;
    };
    const bpe_tokenizer tokenizer(tokenizer_json);
    const double reading = lap();
    std::vector<std::vector<token>> ids;
    double encoding[2];
    for (double& t : encoding) { // with no words remembered, then with those of the first time
        ids.clear();
        lap();
        for (const std::string& text : texts) ids.push_back(tokenizer.encode(text));
        t = lap();
    }
    std::size_t decoded = 0;
    lap();
    for (const auto& i : ids) decoded += tokenizer.decode(i).size();
    const double decoding = lap(), mega = static_cast<double>(bytes) * 1e-6;
    std::printf("{\"bytes\": %zu, \"read_seconds\": %.3f, \"encode_mb_s\": %.2f, \"again_mb_s\": %.2f, "
                "\"decode_mb_s\": %.2f}\n",
                bytes, reading, mega / encoding[0], mega / encoding[1], static_cast<double>(decoded) * 1e-6 / decoding);
}

int run(std::vector<std::string> arguments) {
    const std::string mode = !arguments.empty() && arguments[0].starts_with("--") ? arguments[0] : "";
    if (!mode.empty()) arguments.erase(arguments.begin());
    const bool chat_too = mode.empty() && arguments.size() == 3;
    if ((arguments.size() != 2 && !chat_too) || (!mode.empty() && mode != "--decode" && mode != "--time"))
        throw failure(exit_usage, "usage: opd-tokenize [--decode | --time] TOKENIZER.json LINES.jsonl [CHAT]");
    const std::string json = read(arguments[0]), lines = read(arguments[1]);
    if (mode == "--time") {
        time(json, lines);
        return exit_ok;
    }
    const bpe_tokenizer tokenizer(json, arguments[0]);
    std::optional<chat_template> chat;
    if (chat_too)
        chat = arguments[2].ends_with(".json") ? chat_template_of(read(arguments[2]), arguments[2])
                                               : named_chat_template(arguments[2]);
    const std::vector<prompt> prompts =
        prompts_of(lines, arguments[1],
                   {.vocabulary = tokenizer.vocabulary(), .tokenizer = &tokenizer, .chat = chat ? &*chat : nullptr});
    for (const prompt& p : prompts) {
        const nlohmann::json line =
            mode.empty() ? nlohmann::json{{"ids", p.ids}} : nlohmann::json{{"text", tokenizer.decode(p.ids)}};
        std::cout << line << '\n';
    }
    std::cout.flush();
    if (!std::cout) throw failure(exit_io, "cannot write the lines");
    return exit_ok;
}

} // namespace

int main(int argc, char** argv) {
    try {
        return run({argv + 1, argv + argc});
    } catch (const trainer::failure& e) {
        std::cerr << "opd-tokenize: " << e.what() << '\n';
        return e.code;
    } catch (const std::exception& e) {
        std::cerr << "opd-tokenize: " << e.what() << '\n';
        return trainer::exit_other;
    }
}
