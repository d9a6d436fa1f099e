// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// build: sanitize
// optimise: no
//
// What servers answer, decoded: by hand from what they document, and against a formula that a server of each dialect
// answers with, whatever is asked. Every shift, gap, sentinel and piece of nonsense is refused where it stands, or
// marked.
#include "support/generators.hpp"
#include "support/property.hpp"
#include "support/teacher_server.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <doctest/doctest.h>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "opd/caches.hpp"
#include "opd/serve/dialects.hpp"
#include "opd/serve/kept_sets.hpp"

using namespace opd;
using namespace opd::test;
using serve::dialect;

namespace {

static_assert(teacher_cache<decltype(serve::scores{}.support())>);

constexpr dialect all_dialects[] = {dialect::vllm, dialect::sglang, dialect::llama_cpp, dialect::openai_echo};
constexpr float inf = std::numeric_limits<float>::infinity();

struct question {
    std::vector<serve::sequence> sequences;
    serve::wanted what;
};
question random_question(numbers& u, dialect d) {
    question q;
    q.what.vocab = 32;
    const bool lists_candidates = d == dialect::vllm || d == dialect::sglang;
    const auto kind = u.below(lists_candidates ? 3 : 2);
    if (kind == 1) q.what.top_k = 1 + index_t(u.below(40));
    q.what.candidates = kind == 2;
    const bool alone = serve::most_per_request(d, q.what) == 1;
    for (index_t n = alone ? 1 : 1 + index_t(u.below(3)); n > 0; --n) {
        serve::sequence s;
        for (index_t l = 1 + index_t(u.below(9)); l > 0; --l) s.tokens.push_back(std::int32_t(u.below(32)));
        s.from = index_t(u.below(std::int64_t(s.tokens.size()) + 1));
        if (q.what.candidates)
            for (index_t t = 0; t < s.scored(); ++t) {
                std::vector<std::int32_t> ids(32);
                for (std::int32_t v = 0; v < 32; ++v) ids[std::size_t(v)] = v;
                for (auto k = u.below(6); k > 0; --k) { // a few, without repeats, some slots unused
                    const auto at = std::size_t(u.below(std::int64_t(ids.size())));
                    s.candidates.push_back(u.below(5) == 0 ? -1 : ids[at]);
                    ids.erase(ids.begin() + std::ptrdiff_t(at));
                }
                s.candidate_offsets.push_back(std::int64_t(s.candidates.size()));
            }
        q.sequences.push_back(std::move(s));
    }
    return q;
}
/// Empty: s are the law's scores of the sequence.
std::string differs(const toy_law& law, const question& q, std::size_t i, const serve::scores& s) {
    const serve::sequence& of = q.sequences[i];
    const auto count = std::size_t(of.scored());
    if (s.from != of.from || s.log_q.size() != count || s.scored.size() != count || s.offsets.size() != count + 1)
        return "sizes";
    for (std::size_t t = 0; t < count; ++t) {
        const auto p = std::size_t(of.from) + t;
        const auto begin = std::size_t(s.offsets[t]), end = std::size_t(s.offsets[t + 1]);
        if (p == 0) {
            if (s.scored[t] != 0 || !std::isnan(s.log_q[t])) return "the first token is scored";
            if (std::any_of(s.ids.begin(), s.ids.begin() + std::ptrdiff_t(end), [](auto id) { return id != -1; }))
                return "the first token has a list";
            continue;
        }
        const auto log_q = law.log_probs({of.tokens.data(), p});
        const auto is = [&](float x, std::int32_t id) { return x == float(log_q[std::size_t(id)]); };
        if (s.scored[t] != 1 || !is(s.log_q[t], of.tokens[p])) return "token " + std::to_string(p);
        std::vector<double> sorted = log_q;
        std::sort(sorted.begin(), sorted.end(), std::greater<>());
        const std::size_t listed = q.what.candidates
                                       ? std::size_t(of.candidate_offsets[t + 1] - of.candidate_offsets[t])
                                       : std::min<std::size_t>(std::size_t(q.what.top_k), 32);
        if (end - begin != listed) return "length of list " + std::to_string(p);
        for (std::size_t j = begin; j < end; ++j) {
            if (q.what.candidates && s.ids[j] != of.candidates[j]) return "candidate " + std::to_string(p);
            if (s.ids[j] >= 0 && !is(s.list_log_q[j], s.ids[j])) return "list " + std::to_string(p);
            if (!q.what.candidates && s.list_log_q[j] != float(sorted[j - begin])) return "order " + std::to_string(p);
        }
    }
    return "";
}

/// The toy's answer to three tokens after two of prompt, after `edit`, decoded.
serve::answer edited(dialect d, const std::function<void(json&)>& edit, serve::wanted what = {.top_k = 2}) {
    serve::sequence s{{3, 1, 4, 1, 5}, 2};
    if (what.candidates) s.candidates = {7, 1, 8, 2}, s.candidate_offsets = {0, 1, 2, 4};
    const std::vector<serve::sequence> one{s};
    json a = toy_answers()(d, json::parse(serve::request_of(d, one, what).body));
    edit(a);
    return serve::decode(d, a.dump(), one, what).at(0);
}
void refused(dialect d, index_t position, const std::string& text, const std::function<void(json&)>& edit,
             const serve::wanted& what = {.top_k = 2}) {
    CAPTURE(to_string(d));
    CAPTURE(text);
    try {
        const serve::answer a = edited(d, edit, what);
        REQUIRE(a.wrong.has_value());
        throw serve::bad_answer(*a.wrong);
    } catch (const serve::bad_answer& e) {
        CHECK(e.position == position);
        CHECK(e.dialect == d);
        CHECK(std::string(e.what()).find(std::string("opd: answer of ") + to_string(d)) == 0);
        CHECK_MESSAGE(std::string(e.what()).find(text) != std::string::npos, e.what());
    }
}
json& entries_of(dialect d, json& a) {
    switch (d) {
    case dialect::vllm:
        return a["choices"][0]["prompt_logprobs"];
    case dialect::sglang:
        return a[0]["meta_info"]["input_token_logprobs"];
    case dialect::llama_cpp:
        return a["completion_probabilities"];
    default:
        return a["choices"][0]["logprobs"]["token_logprobs"];
    }
}
/// Of the last token, as the server writes it.
json& last_of(dialect d, json& a) {
    json& all = entries_of(d, a);
    switch (d) {
    case dialect::vllm:
        return all[4]["5"]["logprob"];
    case dialect::sglang:
        return all[3][0]; // from 1 on
    case dialect::llama_cpp:
        return all[2]["logprob"];
    default:
        return all[4];
    }
}

} // namespace

TEST_CASE("whatever is asked, in every dialect, is decoded to what was meant") {
    for (const dialect d : all_dialects) {
        CAPTURE(to_string(d));
        property(std::string("as the law says: ") + to_string(d), [d] {
            numbers u(*rc::gen::arbitrary<std::uint64_t>());
            const question q = random_question(u, d);
            const toy_answers right;
            const json asked = json::parse(serve::request_of(d, q.sequences, q.what).body);
            const auto answers = serve::decode(d, right(d, asked).dump(), q.sequences, q.what);
            RC_ASSERT(answers.size() == q.sequences.size());
            for (std::size_t i = 0; i < answers.size(); ++i) {
                if (answers[i].wrong) RC_FAIL(std::string(answers[i].wrong->what()));
                if (const auto why = differs(right.law, q, i, answers[i].scores); !why.empty()) RC_FAIL(why);
            }
        });
    }
}

TEST_CASE("without the client") {
    const std::vector<serve::sequence> sequences{{{3, 1, 4, 1, 5}, 2}};
    const auto post = [](const serve::request& q) {
        return toy_answers()(dialect::sglang, json::parse(q.body)).dump();
    };
    // [decode]
    const opd::serve::wanted what{.top_k = 20};
    const opd::serve::request question = opd::serve::request_of(opd::serve::dialect::sglang, sequences, what);
    const std::string body = post(question); // question.body to question.path, by whatever client you have
    const auto answers = opd::serve::decode(opd::serve::dialect::sglang, body, sequences, what);
    if (answers[0].wrong) throw opd::serve::bad_answer(*answers[0].wrong);
    const auto log_q = answers[0].scores.log_probs(); // (T) of tokens from, from + 1, …
    const auto top = answers[0].scores.support();     // (T) rows: a teacher::ragged_support
    // [/decode]
    CHECK(log_q.size == 3);
    CHECK(top.offsets[3] == 60);
}

TEST_CASE("by hand: vLLM") {
    const std::vector<serve::sequence> two{{{11, 12, 13}, 1}, {{21, 22}, 0}};
    const serve::wanted what{.top_k = 1, .model = "teacher"};
    const auto q = serve::request_of(dialect::vllm, two, what);
    CHECK(q.path == "/v1/completions");
    CHECK(json::parse(q.body) == json::parse(R"({"prompt": [[11,12,13],[21,22]], "max_tokens": 1, "temperature": 1.0,
        "prompt_logprobs": 1, "stream": false, "model": "teacher"})"));
    const auto a = serve::decode(dialect::vllm, R"({"choices": [
        {"index": 1, "prompt_logprobs": [null, {"22": {"logprob": -9999.0, "rank": 9, "decoded_token": "b"},
                                                "7": {"logprob": -0.5, "rank": 1, "decoded_token": "c"}}]},
        {"index": 0, "prompt_logprobs": [null, {"12": {"logprob": -0.25, "rank": 1, "decoded_token": null}},
                                         null]}]})",
                                 two, what);
    CHECK(a[0].scores.log_q[0] == -0.25f);
    CHECK(std::isnan(a[0].scores.log_q[1]));
    CHECK(a[0].scores.scored == std::vector<std::uint8_t>{1, 0});
    CHECK(a[0].scores.missing() == 1);
    CHECK_FALSE(a[0].scores.mask().kept(1));
    CHECK(a[0].scores.offsets == std::vector<std::int64_t>{0, 1, 1});
    CHECK(a[0].scores.ids == std::vector<std::int32_t>{12});
    CHECK(a[1].scores.scored == std::vector<std::uint8_t>{0, 1}); // the first token has no prefix
    CHECK(a[1].scores.log_q[1] == -inf);
    CHECK(a[1].scores.ids == std::vector<std::int32_t>{7}); // not 22, which is its own and not the best
    CHECK(a[1].scores.support().offsets[2] == 1);
    CHECK(a[1].scores.log_probs().size == 2);
}

TEST_CASE("by hand: vLLM's candidates") {
    const std::vector<serve::sequence> one{{{11, 12, 13}, 1, {5, -1, 13}, {0, 2, 3}}};
    const serve::wanted what{.candidates = true};
    const auto q = serve::request_of(dialect::vllm, one, what);
    CHECK(q.path == "/inference/v1/generate");
    CHECK(json::parse(q.body) == json::parse(R"({"token_ids": [11,12,13], "stream": false, "sampling_params":
        {"max_tokens": 1, "temperature": 1.0, "prompt_logprob_start": 0, "prompt_logprob_token_ids": [[5,12],[13]]}})"));
    const std::string matrix = base64(npy({-1, -2, -3, -inf}, 2, 2));
    const auto a = serve::decode(dialect::vllm, json{{"prompt_token_id_logprobs", matrix}}.dump(), one, what)[0].scores;
    CHECK(a.log_q == std::vector<float>{-2, -3});
    CHECK(a.ids == std::vector<std::int32_t>{5, -1, 13});
    CHECK(a.list_log_q[0] == -1);
    CHECK(std::isnan(a.list_log_q[1]));
    CHECK(a.list_log_q[2] == -3);
}

TEST_CASE("by hand: SGLang") {
    const std::vector<serve::sequence> one{{{11, 12, 13, 31}, 2, {9, 8, 9}, {0, 2, 3}}};
    const serve::wanted what{.candidates = true, .vocab = 32};
    const auto q = serve::request_of(dialect::sglang, one, what);
    CHECK(q.path == "/generate");
    CHECK(json::parse(q.body) == json::parse(R"({"input_ids": [[11,12,13,31]], "return_logprob": true, "stream": false,
        "logprob_start_len": [1], "token_ids_logprob": [[8,9]],
        "sampling_params": {"max_new_tokens": 0, "temperature": 1.0}})"));
    const auto a = serve::decode(dialect::sglang, R"([{"text": "", "meta_info": {
        "input_token_logprobs": [[null, 12, null], [-1.5, 13, null], [-2.5, 0, null]],
        "input_token_ids_logprobs": [null, [[-3.0, 8, null], [-4.0, 9, null]], [[-5.0, 8, null], [-6.0, 9, null]]]}}])",
                                 one, what)[0];
    REQUIRE_FALSE(a.wrong); // 0 in place of the last id is SGLang's way
    CHECK(a.scores.log_q == std::vector<float>{-1.5f, -2.5f});
    CHECK(a.scores.ids == std::vector<std::int32_t>{9, 8, 9});
    CHECK(a.scores.list_log_q == std::vector<float>{-4, -3, -6});
}

TEST_CASE("by hand: llama.cpp and echo") {
    const std::vector<serve::sequence> one{{{11, 12, 13, 14}, 2}};
    const auto q = serve::request_of(dialect::llama_cpp, one, {.top_k = 1});
    CHECK(q.path == "/completion");
    const json body = json::parse(q.body);
    CHECK(body["prompt"] == json{11, 12});
    CHECK(body["grammar"] == "root ::= <[13]> <[14]>");
    CHECK(body["n_predict"] == 2);
    CHECK(body["n_probs"] == 1);
    CHECK(body["post_sampling_probs"] == false);
    const auto a =
        serve::decode(dialect::llama_cpp, R"({"tokens": [13], "truncated": false, "completion_probabilities": [
        {"id": 13, "token": " x", "bytes": [32], "logprob": -3.4028234663852886e38,
         "top_logprobs": [{"id": 5, "token": "y", "bytes": [1], "logprob": -0.1}]}]})",
                      one, {.top_k = 1})[0];
    REQUIRE_FALSE(a.wrong);
    CHECK(a.scores.log_q[0] == -inf);                          // the least float stands for it
    CHECK(a.scores.scored == std::vector<std::uint8_t>{1, 0}); // stopped early: the rest is not guessed
    CHECK(a.scores.offsets == std::vector<std::int64_t>{0, 1, 1});

    const auto e = serve::decode(dialect::openai_echo, R"({"choices": [{"index": 0, "logprobs": {
        "token_logprobs": [null, -1, -2, -3], "top_logprobs": [null, {"token_id:5": -0.5}, {"token_id:13": -2},
        {"token_id:9": -0.25, "token_id:14": -3}]}}]})",
                                 one, {.top_k = 1})[0];
    REQUIRE_FALSE(e.wrong);
    CHECK(e.scores.log_q == std::vector<float>{-2, -3});
    CHECK(e.scores.ids == std::vector<std::int32_t>{13, 9});
}

TEST_CASE("what cannot be right is refused where it stands") {
    for (const dialect d : all_dialects) {
        refused(d, 4, "above 0", [d](json& a) { last_of(d, a) = 3.5; });
        refused(d, 4, "no number", [d](json& a) { last_of(d, a) = "-1"; });
        refused(d, -1, "is an error: ", [](json& a) { a = {{"error", {{"message", "out of memory"}}}}; });
        if (d == dialect::vllm || d == dialect::sglang)
            refused(d, -1, "entries, expected", [d](json& a) { entries_of(d, a).erase(0); });
        refused(d, -1, "no array", [d](json& a) { entries_of(d, a) = 7; });
        refused(d, -1, "is null", [d](json& a) { entries_of(d, a) = nullptr; });
        const std::vector<serve::sequence> one{{{1, 2}, 1}};
        for (const char* text : {"", "{", "NaN", "[1e999]", "{\"choices\": [NaN]}", "\"\xff\"", "<html>"})
            CHECK_THROWS_WITH_AS(serve::decode(d, text, one), doctest::Contains("is not JSON"), serve::bad_answer);
        for (const char* text : {"7", "{}", "null", "[[], [], []]", "\"x\""})
            CHECK_THROWS_AS(
                [&] {
                    for (const auto& a : serve::decode(d, text, one))
                        if (a.wrong) throw serve::bad_answer(*a.wrong);
                }(),
                serve::bad_answer);
        CHECK_THROWS_AS(serve::decode(d, std::string(100000, '['), one), serve::bad_answer);
        const serve::answer no_mass = edited(d, [d](json& a) { last_of(d, a) = -9999.0; });
        REQUIRE_FALSE(no_mass.wrong);
        CHECK(no_mass.scores.log_q[2] == -inf);
        CHECK(no_mass.scores.missing() == 0);
    }
    const serve::answer gap = edited(dialect::sglang, [](json& a) { last_of(dialect::sglang, a) = nullptr; });
    REQUIRE_FALSE(gap.wrong);
    CHECK(gap.scores.scored == std::vector<std::uint8_t>{1, 1, 0});
    CHECK(gap.scores.offsets.back() == gap.scores.offsets[2]);
}

TEST_CASE("an answer that is off by one is seen by its ids") {
    const auto shift = [](json& entries) { // each one says what the next should
        for (std::size_t i = 0; i + 1 < entries.size(); ++i) entries[i] = entries[i + 1];
    };
    refused(dialect::vllm, 2, "off by one", [&](json& a) { shift(entries_of(dialect::vllm, a)); });
    refused(dialect::sglang, 2, "scores the token 1, sent was 4",
            [&](json& a) { shift(entries_of(dialect::sglang, a)); });
    refused(dialect::llama_cpp, -1, "scores the token 5, which was not forced there",
            [&](json& a) { shift(entries_of(dialect::llama_cpp, a)); });
    refused(dialect::llama_cpp, 3, "generated the token 9 where 1 was forced: it knows no grammar of token ids",
            [&](json& a) { a["tokens"][1] = 9; });
    refused(dialect::llama_cpp, -1, "more tokens than were forced", [&](json& a) { a["tokens"].push_back(9); });
    refused(dialect::openai_echo, -1, "off by one", [&](json& a) { shift(entries_of(dialect::openai_echo, a)); });
}

TEST_CASE("what a server does not say is not made up") {
    const auto vllm = dialect::vllm, sglang = dialect::sglang, llama = dialect::llama_cpp, echo = dialect::openai_echo;
    const auto row = [](json& a) -> json& { return a["choices"][0]["prompt_logprobs"][2]; };
    refused(vllm, 2, "ids of the 2 asked for", [&](json& a) {
        for (const char* id : {"20", "21", "22", "23"}) row(a)[id] = {{"logprob", -5}};
    });
    refused(vllm, 2, "no id: 04", [&](json& a) { row(a)["04"] = row(a)["4"]; });
    refused(vllm, 2, "no id: -4", [&](json& a) { row(a)["-4"] = row(a)["4"]; });
    refused(vllm, 2, "no object", [&](json& a) { row(a) = 3; });
    refused(vllm, 2, "has no logprob", [&](json& a) { row(a)["4"] = json::object(); });
    refused(vllm, -1, "too many", [](json& a) { a["choices"].push_back(a["choices"][0]); });
    refused(vllm, -1, "leaves it out", [](json& a) { a["choices"] = json::array(); });
    const auto list = [](json& a) -> json& { return a[0]["meta_info"]["input_top_logprobs"][1]; };
    refused(sglang, 2, "twice", [&](json& a) { list(a)[1] = list(a)[0]; });
    refused(sglang, 2, "no array", [&](json& a) { list(a) = nullptr; });
    refused(sglang, 2, "no [log-prob, id]", [&](json& a) { list(a)[0] = {-1}; });
    refused(sglang, 2, "no integer", [&](json& a) { list(a)[0] = {-1, 2.5}; });
    refused(sglang, 2, "no log-prob for the id", [&](json& a) { list(a)[0][0] = nullptr; });
    refused(sglang, -1, "aborted", [](json& a) {
        a[0]["meta_info"]["finish_reason"] = {{"type", "abort"}, {"message", "too long"}};
    });
    refused(llama, -1, "server cut", [](json& a) { a["truncated"] = true; });
    refused(llama, 2, "no top_logprobs", [](json& a) { a["completion_probabilities"][0].erase("top_logprobs"); });
    refused(echo, 2, "texts and no ids", [](json& a) {
        a["choices"][0]["logprobs"]["top_logprobs"][2] = {{" w", -1}};
    });
    refused(echo, 2, "no id: x", [](json& a) {
        a["choices"][0]["logprobs"]["top_logprobs"][2] = {{"token_id:x", -1}};
    });

    const serve::wanted asked{.candidates = true};
    const char* const name = "prompt_token_id_logprobs";
    const auto matrix = [&](const std::string& bytes) { return [=](json& a) { a[name] = base64(bytes); }; };
    refused(
        vllm, -1, "is null", [&](json& a) { a[name] = nullptr; }, asked);
    refused(
        vllm, -1, "no base64", [&](json& a) { a[name] = "a=b="; }, asked);
    refused(
        vllm, -1, "no base64", [&](json& a) { a[name] = "abc"; }, asked);
    refused(vllm, -1, "no .npy", matrix("a numpy array, or not"), asked);
    refused(vllm, -1, "another length", matrix(npy({-1, -2, -3, -4, -5}, 3, 2)), asked);
    refused(vllm, -1, "another length", matrix(npy({-1, -2, -3, -4, -5, -6, -7, -8}, 3, 2)), asked);
    refused(vllm, -1, "another length", matrix(npy({-1}, std::size_t{1} << 62, 4)), asked);
    refused(vllm, -1, "2 rows, expected 3", matrix(npy({-1, -2, -3, -4}, 2, 2)), asked);
    refused(vllm, 2, "1 columns, expected 2", matrix(npy({-1, -2, -3}, 3, 1)), asked);
    const float nan = std::numeric_limits<float>::quiet_NaN();
    refused(vllm, 3, "no number", matrix(npy({-1, -2, -3, nan, nan, -1, -1, -1, -1}, 3, 3)), asked);
    const serve::answer left_out = edited(
        sglang, [](json& a) { a[0]["meta_info"]["input_token_ids_logprobs"][3].erase(3); }, asked);
    REQUIRE_FALSE(left_out.wrong); // of the last token's 8 and 2, the union being 1, 2, 7, 8
    CHECK(left_out.scores.ids == std::vector<std::int32_t>{7, 1, -1, 2});
}

TEST_CASE("tokens within a character, which llama-server leaves out, are marked where they can be told") {
    const auto scored = [](std::vector<std::int32_t> tokens, std::vector<std::size_t> left_out) {
        const std::vector<serve::sequence> one{{std::move(tokens), 1}};
        json a = toy_answers()(dialect::llama_cpp, json::parse(serve::request_of(dialect::llama_cpp, one).body));
        for (const std::size_t i : left_out) a["completion_probabilities"].erase(i); // from the last
        const serve::answer got = serve::decode(dialect::llama_cpp, a.dump(), one)[0];
        REQUIRE_FALSE(got.wrong);
        const toy_law law;
        for (std::size_t t = 0; t < got.scores.scored.size(); ++t)
            if (got.scores.scored[t] != 0)
                CHECK(got.scores.log_q[t] ==
                      float(law.log_probs({one[0].tokens.data(), t + 1})[std::size_t(one[0].tokens[t + 1])]));
        return got.scores.scored;
    };
    using marks = std::vector<std::uint8_t>;
    CHECK(scored({1, 13, 14, 15}, {}) == marks{1, 1, 1});
    CHECK(scored({1, 13, 14, 15}, {1}) == marks{1, 0, 1});
    CHECK(scored({1, 13, 14, 15}, {2, 0}) == marks{0, 1, 0});
    CHECK(scored({1, 5, 5, 6}, {1}) == marks{0, 0, 1}); // which of the two?
    CHECK(scored({1, 5, 6, 5, 5}, {3}) == marks{1, 1, 0, 0});
}

TEST_CASE("log-probs that speculation makes up are refused") {
    const std::vector<serve::sequence> one{{{1, 2, 3, 4, 5}, 1}};
    json a = toy_answers()(dialect::llama_cpp, json::parse(serve::request_of(dialect::llama_cpp, one).body));
    for (json& x : a["completion_probabilities"]) x["logprob"] = 0.0;
    const auto sure = serve::decode(dialect::llama_cpp, a.dump(), one)[0];
    REQUIRE(sure.wrong);
    CHECK(std::string(sure.wrong->what()).find("is speculation on?") != std::string::npos);
    a["completion_probabilities"][2]["logprob"] = -1e-6; // a teacher may be as sure as that
    CHECK_FALSE(serve::decode(dialect::llama_cpp, a.dump(), one)[0].wrong);
}

TEST_CASE("half an answer is half an answer") {
    const std::vector<serve::sequence> three{{{1, 2}, 1}, {{3, 4, 5}, 1}, {{6, 7}, 1}};
    for (const dialect d : {dialect::vllm, dialect::sglang, dialect::openai_echo}) {
        json a = toy_answers()(d, json::parse(serve::request_of(d, three).body));
        (d == dialect::sglang ? a : a["choices"]).erase(2);
        entries_of(d, a).erase(0); // of the first
        const auto answers = serve::decode(d, a.dump(), three);
        REQUIRE(answers.size() == 3);
        REQUIRE(answers[0].wrong);
        CHECK(answers[0].wrong->sequence == 0);
        CHECK_FALSE(answers[1].wrong);
        CHECK(answers[1].scores.missing() == 0);
        REQUIRE(answers[2].wrong);
        CHECK(answers[2].wrong->sequence == 2);
        CHECK(std::string(answers[2].wrong->what()).find("sequence 2: leaves it out") != std::string::npos);
    }
}

TEST_CASE("requests that no server should see") {
    const auto ask = [](dialect d, serve::sequence s, serve::wanted what = {}) {
        const std::vector<serve::sequence> one{std::move(s)};
        return serve::request_of(d, one, what);
    };
    CHECK_THROWS_AS(ask(dialect::vllm, {}), invalid_input);
    CHECK_THROWS_AS(ask(dialect::vllm, {{1, 2}, 3}), invalid_input);
    CHECK_THROWS_AS(ask(dialect::vllm, {{1, 2}, -1}), invalid_input);
    CHECK_THROWS_AS(ask(dialect::vllm, {{1, -2}, 1}), invalid_input);
    CHECK_THROWS_AS(ask(dialect::vllm, {{1, 32}, 1}, {.vocab = 32}), invalid_input);
    CHECK_THROWS_AS(ask(dialect::vllm, {{1, 2}, 1}, {.top_k = -1}), invalid_input);
    CHECK_THROWS_AS(ask(dialect::vllm, {{1, 2}, 1}, {.top_k = 2, .candidates = true}), invalid_input);
    CHECK_THROWS_AS(ask(dialect::vllm, {{1, 2}, 1}, {.candidates = true}), invalid_input); // one offset too few
    CHECK_THROWS_AS(ask(dialect::vllm, {{1, 2}, 1, {3, 3}, {0, 2}}, {.candidates = true}), invalid_input);
    CHECK_THROWS_AS(ask(dialect::vllm, {{1, 2}, 1, {3, -2}, {0, 2}}, {.candidates = true}), invalid_input);
    CHECK_NOTHROW(ask(dialect::vllm, {{1, 2}, 1, {3, -1, -1}, {0, 3}}, {.candidates = true}));
    CHECK_THROWS_AS(ask(dialect::llama_cpp, {{1, 2}, 1, {3}, {0, 1}}, {.candidates = true}), unsupported);
    CHECK_THROWS_AS(ask(dialect::openai_echo, {{1, 2}, 1, {3}, {0, 1}}, {.candidates = true}), unsupported);
    const std::vector<serve::sequence> two{{{1, 2}, 1}, {{1, 2}, 1}};
    CHECK_THROWS_AS(serve::request_of(dialect::llama_cpp, two), invalid_input);
    CHECK_THROWS_AS(serve::request_of(dialect::vllm, {}), invalid_input);
}

TEST_CASE("kept sets of rollout servers") {
    const std::string answer = R"({"choices": [{"index": 0, "token_ids": [187, 42], "finish_reason": "stop",
                                   "sampling_mask": [[326, 187, 512], [42]]}]})";
    // [kept]
    const std::vector<opd::serve::kept_sets> kept = opd::serve::decode_kept_sets(opd::serve::dialect::vllm, answer);
    const auto ids = kept[0].kept_ids(); // of teacher::on_kept_sets
    const auto offsets = kept[0].kept_offsets();
    // [/kept]
    CHECK(kept.size() == 1);
    CHECK(kept[0].tokens == std::vector<std::int32_t>{187, 42});
    CHECK(kept[0].ids == std::vector<std::int32_t>{187, 326, 512, 42});
    CHECK(kept[0].offsets == std::vector<std::int64_t>{0, 3, 4});
    CHECK(ids.size == 4);
    CHECK(offsets[1] == 3);
    const auto by_offsets =
        serve::decode_kept_sets(dialect::vllm, R"({"choices": [{"token_ids": [187, 42], "sampling_mask":
                           {"token_ids": [326, 187, 512, 42], "offsets": [0, 3, 4]}}]})");
    CHECK(by_offsets[0].ids == kept[0].ids);
    CHECK(by_offsets[0].offsets == kept[0].offsets);
    const auto sglang = serve::decode_kept_sets(
        dialect::sglang, R"([{"output_ids": [7, 9], "meta_info": {"output_token_sampling_mask": [[8, 7], [9]],
                             "output_token_sampling_logprobs": [-0.5, 0.0]}}])");
    CHECK(sglang[0].ids == std::vector<std::int32_t>{7, 8, 9});
    CHECK(sglang[0].log_mu == std::vector<float>{-0.5f, 0});

    const auto refused_set = [](const char* mask, const char* text) {
        const std::string body = R"({"choices": [{"token_ids": [1, 2], "sampling_mask": )" + std::string(mask) + "}]}";
        CHECK_THROWS_WITH_AS(serve::decode_kept_sets(dialect::vllm, body), doctest::Contains(text), serve::bad_answer);
    };
    refused_set("null", "sampling_mask is null");
    refused_set("[[1]]", "1 entries, expected 2");
    refused_set("[[1], []]", "position 1: drew the token 2, which it did not keep");
    refused_set("[[1], [3]]", "position 1: drew the token 2");
    refused_set("[[1, 1], [2]]", "position 0: keeps an id twice");
    refused_set("[[1], [2, -3]]", "position 1: has the id -3");
    refused_set("[1, 2]", "no list");
    refused_set("7", "neither lists nor offsets");
    refused_set(R"({"token_ids": [1, 2], "offsets": [0, 1]})", "2 entries, expected 3");
    refused_set(R"({"token_ids": [1, 2], "offsets": [0, 1, 3]})", "do not ascend");
    refused_set(R"({"token_ids": [1, 2, 3], "offsets": [0, 1, 2]})", "leave ids out");
    refused_set(R"({"token_ids": [1, 2], "offsets": [1, 1, 2]})", "do not ascend");
    CHECK_THROWS_AS(serve::decode_kept_sets(dialect::llama_cpp, "{}"), unsupported);
}
