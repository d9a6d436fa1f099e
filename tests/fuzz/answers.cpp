// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Answers of served teachers and rollout servers, right ones with pieces changed, damaged bytes and any bytes: they are
// refused as bad answers, or every position is scored or marked, lists are as long as may be, of ids that may be.
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "fuzz/damage.hpp"
#include "fuzz/input.hpp"
#include "opd/serve/dialects.hpp"
#include "opd/serve/kept_sets.hpp"
#include "support/teacher_server.hpp"

namespace {

using namespace opd::fuzz;
namespace serve = opd::serve;
using nlohmann::json;
using opd::index_t;

void change(choices& c, json& j) {
    for (std::int64_t edits = c.below(5); edits > 0; --edits) {
        std::vector<json*> all = {&j};
        for (std::size_t i = 0; i < all.size(); ++i)
            if (all[i]->is_structured())
                for (auto& inner : *all[i]) all.push_back(&inner);
        const auto some = [&]() -> json& { return *all[static_cast<std::size_t>(c.below(std::int64_t(all.size())))]; };
        json& here = some();
        const json other = some();
        switch (c.below(4)) {
        case 0:
            here = c.of<json>({nullptr, true, 0, -1, 1, -0.5, 1e300, -1e300, -9999.0, 31, std::int64_t{1} << 62,
                               ~std::uint64_t{0}, 2147483648, "", "token_id:3", "AAAA", json::array(), json::object()});
            break;
        case 1:
            here = other;
            break;
        case 2:
            if (here.is_object() && !here.empty()) here.erase(here.begin());
            if (here.is_array() && !here.empty())
                here.erase(static_cast<std::size_t>(c.below(std::int64_t(here.size()))));
            break;
        default:
            if (here.is_object()) here[c.of({"3", "error", "-1", "03", "offsets", "token_ids"})] = other;
            if (here.is_array()) here.insert(here.begin() + c.below(std::int64_t(here.size()) + 1), other);
        }
    }
}

/// A .npy of a few numbers, often not one.
std::string matrix(choices& c) {
    std::vector<float> numbers;
    const auto rows = static_cast<std::size_t>(c.below(4)), cols = static_cast<std::size_t>(c.below(4));
    for (std::size_t i = 0; i < rows * cols; ++i)
        numbers.push_back(c.of({-1.0f, 0.0f, 2.0f, -9999.0f, NAN, -INFINITY}));
    std::string bytes = opd::test::npy(numbers, rows, cols);
    if (c.once_in(2)) damage(c, bytes);
    std::string text = opd::test::base64(bytes);
    if (c.once_in(4)) damage(c, text);
    return text;
}

void check_scores(const serve::sequence& s, const serve::wanted& what, const serve::scores& got) {
    const auto count = static_cast<std::size_t>(s.scored());
    need(got.from == s.from && got.log_q.size() == count && got.scored.size() == count, "not every position is there");
    need(got.offsets.size() == count + 1 && got.offsets.front() == 0 &&
             got.offsets.back() == static_cast<std::int64_t>(got.ids.size()) && got.list_log_q.size() == got.ids.size(),
         "offsets do not fit their lists");
    const auto is_log_prob = [](float x) { return x <= 1e-3f && (x > -9000 || x == -INFINITY); };
    for (std::size_t t = 0; t < count; ++t) {
        need(got.scored[t] == 1 ? is_log_prob(got.log_q[t]) : std::isnan(got.log_q[t]),
             "a token is neither scored nor marked");
        const std::int64_t listed = got.offsets[t + 1] - got.offsets[t];
        need(listed >= 0 &&
                 listed <= (what.candidates ? s.candidate_offsets[t + 1] - s.candidate_offsets[t] : what.top_k),
             "a list is too long");
        for (auto i = static_cast<std::size_t>(got.offsets[t]); i < static_cast<std::size_t>(got.offsets[t + 1]); ++i) {
            need(got.ids[i] == -1 ? what.candidates : got.ids[i] >= 0 && got.ids[i] < 32, "an id is none");
            need(got.ids[i] == -1 || is_log_prob(got.list_log_q[i]), "a log-prob of a list is none");
        }
    }
}

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    choices c(data, size);
    const auto d =
        c.of({serve::dialect::vllm, serve::dialect::sglang, serve::dialect::llama_cpp, serve::dialect::openai_echo});
    serve::wanted what{.vocab = 32};
    const auto kind = c.below(d == serve::dialect::vllm || d == serve::dialect::sglang ? 4 : 2);
    const bool kept = kind == 3;
    if (kind == 1) what.top_k = 1 + c.below(4);
    what.candidates = kind == 2;
    std::vector<serve::sequence> sequences;
    for (std::int64_t n = serve::most_per_request(d, what) == 1 ? 1 : 1 + c.below(2); n > 0; --n) {
        serve::sequence s;
        for (std::int64_t l = 1 + c.below(4); l > 0; --l) s.tokens.push_back(static_cast<std::int32_t>(c.below(32)));
        s.from = c.below(static_cast<std::int64_t>(s.tokens.size()) + 1);
        for (index_t t = 0; what.candidates && t < s.scored(); ++t) {
            for (std::int32_t k = static_cast<std::int32_t>(c.below(3)); k > 0; --k)
                s.candidates.push_back(c.once_in(4) ? -1 : 7 * k);
            s.candidate_offsets.push_back(static_cast<std::int64_t>(s.candidates.size()));
        }
        sequences.push_back(std::move(s));
    }
    std::string body;
    if (c.once_in(8)) {
        body = c.rest();
    } else {
        json a;
        if (kept && d == serve::dialect::vllm)
            a = {{"choices", json::array({{{"token_ids", {1, 2}}, {"sampling_mask", {{1, 3}, {2}}}}})}};
        else if (kept)
            a = {{"output_ids", {1, 2}},
                 {"meta_info",
                  {{"output_token_sampling_mask", {{3, 1}, {2}}}, {"output_token_sampling_logprobs", {-0.5, 0}}}}};
        else
            a = opd::test::toy_answers()(d, json::parse(serve::request_of(d, sequences, what).body));
        if (what.candidates && d == serve::dialect::vllm && c.once_in(2)) a["prompt_token_id_logprobs"] = matrix(c);
        change(c, a);
        body = a.dump(-1, ' ', false, json::error_handler_t::replace);
        if (c.once_in(3)) damage(c, body);
    }
    try {
        if (kept) {
            for (const serve::kept_sets& k : serve::decode_kept_sets(d, body)) {
                need(k.offsets.size() == k.tokens.size() + 1 && k.log_mu.size() <= k.tokens.size(), "rows are missing");
                for (std::size_t r = 0; r < k.tokens.size(); ++r) {
                    bool drawn = false;
                    for (auto i = k.offsets[r]; i < k.offsets[r + 1]; ++i) {
                        drawn = drawn || k.ids[std::size_t(i)] == k.tokens[r];
                        need(i == k.offsets[r] || k.ids[std::size_t(i - 1)] < k.ids[std::size_t(i)],
                             "ids do not ascend");
                    }
                    need(drawn, "a token is not in its set");
                }
            }
            return 0;
        }
        const auto answers = serve::decode(d, body, sequences, what);
        need(answers.size() == sequences.size(), "a sequence has no answer");
        for (std::size_t i = 0; i < answers.size(); ++i)
            if (!answers[i].wrong) check_scores(sequences[i], what, answers[i].scores);
    } catch (const serve::bad_answer&) {}
    return 0;
}
