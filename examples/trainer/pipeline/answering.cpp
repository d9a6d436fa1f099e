// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "pipeline/answering.hpp"

#include <algorithm>
#include <bit>
#include <iterator>
#include <limits>
#include <stdexcept>
#include <utility>

#include <fmt/format.h>

#include "opd/opd.hpp"
#include "pipeline/prints.hpp"
#include "task/task.hpp"

namespace trainer {

namespace {

using nlohmann::json;

/// The request's fault: status 400.
struct bad_request : std::runtime_error {
    using std::runtime_error::runtime_error;
};

std::string error_body(const std::string& text, int code) {
    return json({{"error", {{"message", text}, {"type", "BadRequestError"}, {"param", nullptr}, {"code", code}}}})
        .dump(-1, ' ', false, json::error_handler_t::replace);
}

std::string base64(const std::string& bytes) {
    constexpr const char* digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    std::string text;
    text.reserve((bytes.size() + 2) / 3 * 4);
    for (std::size_t i = 0; i < bytes.size(); i += 3) {
        std::uint32_t x = 0;
        for (std::size_t j = 0; j < 3; ++j)
            x = x << 8 | (i + j < bytes.size() ? static_cast<std::uint8_t>(bytes[i + j]) : 0u);
        for (std::size_t j = 0; j < 4; ++j) text += i + j > bytes.size() ? '=' : digits[x >> (18 - 6 * j) & 63];
    }
    return text;
}

// A float32 matrix as a .npy of version 1.
std::string npy_of(const std::vector<float>& numbers, std::size_t rows, std::size_t cols) {
    std::string header = fmt::format("{{'descr': '<f4', 'fortran_order': False, 'shape': ({}, {}), }}", rows, cols);
    header.append(63 - (10 + header.size()) % 64, ' ').append("\n");
    std::string s = "\x93NUMPY";
    s.append({'\1', '\0', static_cast<char>(header.size()), static_cast<char>(header.size() >> 8)}).append(header);
    for (const float x : numbers)
        for (int shift = 0; shift < 32; shift += 8) s += static_cast<char>(std::bit_cast<std::uint32_t>(x) >> shift);
    return s;
}

int integer_of(const json& j, const char* name, int otherwise, int least, int most) {
    const auto at = j.find(name);
    if (at == j.end() || at->is_null()) return otherwise;
    const bool fits = at->is_number_integer() && *at >= least && *at <= most;
    if (!fits) throw bad_request(fmt::format("{} must be an integer in [{}, {}]", name, least, most));
    return at->get<int>();
}

} // namespace

teacher_answers::teacher_answers(const transformer<float>& model, const any_task& task, int threads, int most_logprobs,
                                 std::string name)
    : model_(model), most_logprobs_(std::min(most_logprobs, model.shape.vocabulary)),
      name_(std::move(name)), backend_{.threads = threads}, scorer_(model, backend_) {
    const int v = model.shape.vocabulary;
    for (token t = 0; t < v; ++t)
        escaped_.push_back(json(t < task.vocabulary() ? task.written(std::span(&t, 1)) : std::string())
                               .dump(-1, ' ', true, json::error_handler_t::replace));
    models_ = json({{"object", "list"},
                    {"data", json::array({{{"id", name_},
                                           {"object", "model"},
                                           {"owned_by", "opd"},
                                           {"max_model_len", model.shape.max_length + 1},
                                           {"opd",
                                            {{"vocabulary", v},
                                             {"teacher", print_of_teacher(model.weights)},
                                             {"tokenizer", print_of_tokenizer(task, v)}}}}})}})
                  .dump(-1, ' ', false, json::error_handler_t::replace);
}

http_reply teacher_answers::operator()(const std::string& method, const std::string& path, const std::string& body) {
    const bool get = method == "GET";
    if (get && path == "/v1/models") return {200, models_};
    if (get && path == "/health") return {200, "{}"};
    const bool completions_ = path == "/v1/completions", generate_ = path == "/inference/v1/generate";
    if (get || (!completions_ && !generate_))
        return {404, error_body(fmt::format("{} {} is not served here", method, path), 404)};
    try {
        const json q = json::parse(body, nullptr, false);
        if (!q.is_object()) throw bad_request("the body is no JSON object");
        if (const auto m = q.find("model"); m != q.end() && *m != name_)
            return {404, error_body(fmt::format("the model {} does not exist", m->dump()), 404)};
        return completions_ ? completions(q) : generate(q);
    } catch (const bad_request& e) {
        return {400, error_body(e.what(), 400)};
    } catch (const json::exception& e) {
        return {400, error_body(e.what(), 400)};
    }
}

// A prompt: one token at least, and one of the context is left for what a server of this form generates.
std::vector<token> teacher_answers::ids_of(const json& list, const char* name) const {
    if (!list.is_array() || list.empty()) throw bad_request(fmt::format("{} is no list of token ids", name));
    std::vector<token> ids;
    for (const json& x : list) {
        if (!x.is_number_integer() || x < 0 || x >= model_.shape.vocabulary)
            throw bad_request(
                fmt::format("{} has the id {}; the model knows {}", name, x.dump(), model_.shape.vocabulary));
        ids.push_back(x.get<token>());
    }
    if (std::ssize(ids) > model_.shape.max_length)
        throw bad_request(
            fmt::format("{} has {} tokens; the model takes {}", name, ids.size(), model_.shape.max_length));
    return ids;
}

http_reply teacher_answers::completions(const json& q) {
    const int k = integer_of(q, "prompt_logprobs", 1, 0, most_logprobs_);
    const auto prompt = q.find("prompt");
    if (prompt == q.end() || !prompt->is_array() || prompt->empty() || prompt->front().is_string())
        throw bad_request("prompt must be token ids, or lists of them: this server knows no text");
    std::vector<std::vector<token>> prompts;
    if (prompt->front().is_array())
        for (const json& one : *prompt) prompts.push_back(ids_of(one, "prompt"));
    else
        prompts.push_back(ids_of(*prompt, "prompt"));

    std::vector<std::vector<token>> inputs;
    std::vector<token> next; // (N) the tokens after the first, all prompts
    for (const auto& p : prompts) {
        inputs.emplace_back(p.begin(), p.end() - 1);
        next.insert(next.end(), p.begin() + 1, p.end());
    }
    const index_t n = std::ssize(next), v = model_.shape.vocabulary, width = std::max(k, 1);
    std::vector<std::int32_t> ids(static_cast<std::size_t>(n * width));
    std::vector<float> log_p(ids.size()), own(static_cast<std::size_t>(n));
    std::vector<int> rank(static_cast<std::size_t>(n));
    {
        const std::lock_guard lock(mutex_);
        scorer_.logits(inputs, logits_);
        opd::scores<> what{.ids = opd::view(std::as_const(next).data(), n, 1), .log_p = opd::view(own.data(), n, 1)};
        what.top_ids = opd::view(ids.data(), n, width), what.top_log_p = opd::view(log_p.data(), n, width);
        if (n > 0) opd::score(backend_, opd::view(std::as_const(logits_).data(), n, v), what);
        for (index_t r = 0; r < n; ++r) { // ties count for the lower id
            const float *const z = logits_.data() + r * v, mine = z[next[static_cast<std::size_t>(r)]];
            const std::int64_t before =
                std::count_if(z, z + next[static_cast<std::size_t>(r)], [=](float x) { return x == mine; });
            rank[static_cast<std::size_t>(r)] =
                static_cast<int>(1 + before + std::count_if(z, z + v, [=](float x) { return x > mine; }));
        }
    }
    std::string out = R"({"id":"cmpl-opd","object":"text_completion","model":)";
    out += json(name_).dump(-1, ' ', false, json::error_handler_t::replace) + R"(,"choices":[)";
    const auto entry = [&](bool first, std::int32_t id, float x, std::int64_t place) {
        // as double: seventeen digits come back as this very float
        fmt::format_to(std::back_inserter(out), R"({}"{}":{{"logprob":{},"rank":{},"decoded_token":{}}})",
                       first ? "" : ",", id, std::max(double{x}, -9999.0), place,
                       escaped_[static_cast<std::size_t>(id)]);
    };
    std::size_t row = 0;
    for (std::size_t i = 0; i < prompts.size(); ++i) {
        fmt::format_to(std::back_inserter(out),
                       R"({}{{"index":{},"text":"","logprobs":null,"finish_reason":"length","prompt_logprobs":[null)",
                       i > 0 ? "," : "", i);
        for (std::size_t p = 1; p < prompts[i].size(); ++p, ++row) {
            out += ",{";
            entry(true, next[row], own[row], rank[row]);
            const std::size_t at = row * static_cast<std::size_t>(width);
            for (std::size_t j = 0; j < static_cast<std::size_t>(k); ++j)
                if (ids[at + j] >= 0 && ids[at + j] != next[row])
                    entry(false, ids[at + j], log_p[at + j], static_cast<std::int64_t>(j) + 1);
            out += "}";
        }
        out += "]}";
    }
    return {200, out + "]}"};
}

http_reply teacher_answers::generate(const json& q) {
    if (!q.contains("token_ids")) throw bad_request("token_ids is missing");
    const std::vector<token> tokens = ids_of(q["token_ids"], "token_ids");
    const auto how = q.find("sampling_params");
    if (how == q.end() || !how->is_object() || !how->contains("prompt_logprob_token_ids"))
        throw bad_request("sampling_params.prompt_logprob_token_ids is missing");
    const int start = integer_of(*how, "prompt_logprob_start", 0, 0, static_cast<int>(tokens.size()) - 1);
    const json& asked = (*how)["prompt_logprob_token_ids"];
    const std::size_t rows = tokens.size() - 1 - static_cast<std::size_t>(start);
    if (!asked.is_array() || asked.size() != rows)
        throw bad_request(fmt::format("prompt_logprob_token_ids must be {} lists, one a token after the start", rows));
    std::vector<std::int32_t> ids;
    std::vector<std::int64_t> offsets(static_cast<std::size_t>(start) + 1, 0); // of every input; none before the start
    std::size_t widest = 0;
    for (const json& list : asked) {
        if (!list.is_array()) throw bad_request("prompt_logprob_token_ids has an entry that is no list");
        for (const json& x : list) {
            if (!x.is_number_integer() || x < 0 || x >= model_.shape.vocabulary)
                throw bad_request(fmt::format("prompt_logprob_token_ids has the id {}", x.dump()));
            ids.push_back(x.get<std::int32_t>());
        }
        widest = std::max(widest, list.size());
        offsets.push_back(std::ssize(ids));
    }
    std::vector<float> log_p(ids.size());
    const std::vector<std::vector<token>> inputs{{tokens.begin(), tokens.end() - 1}};
    const index_t n = std::ssize(inputs[0]), total = std::ssize(ids);
    if (total > 0) {
        const std::lock_guard lock(mutex_);
        scorer_.logits(inputs, logits_);
        opd::score(backend_, opd::view(std::as_const(logits_).data(), n, index_t{model_.shape.vocabulary}),
                   opd::scores<>{.ids = opd::view(std::as_const(ids).data(), 1, total),
                                 .log_p = opd::view(log_p.data(), 1, total),
                                 .offsets = opd::row_offsets<>(offsets)});
    }
    std::vector<float> matrix(rows * widest, -std::numeric_limits<float>::infinity());
    for (std::size_t r = 0; r < rows; ++r) {
        const std::int64_t begin = offsets[static_cast<std::size_t>(start) + r];
        std::copy(log_p.begin() + begin, log_p.begin() + offsets[static_cast<std::size_t>(start) + r + 1],
                  matrix.begin() + static_cast<std::ptrdiff_t>(r * widest));
    }
    return {200, json({{"request_id", "opd"},
                       {"choices", json::array({{{"index", 0}, {"token_ids", json::array()}}})},
                       {"prompt_logprobs", nullptr},
                       {"prompt_token_id_logprobs", base64(npy_of(matrix, rows, widest))}})
                     .dump()};
}

} // namespace trainer
