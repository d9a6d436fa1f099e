// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A teacher that is a formula, and a server of it in each dialect, written from what the servers document and not from
// the decoders. What it does to its n-th request a test decides: answer, hang until it is let go, answer half, close,
// say a status, or send whatever the test makes of the right answer.
#pragma once

#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <limits>
#include <mutex>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "opd/serve/dialects.hpp"
#include "support/http_listener.hpp"

namespace opd::test {

using nlohmann::json;

/// log q(v | prefix) = log softmax of numbers that a hash of the prefix makes, over T.
struct toy_law {
    std::int32_t vocab = 32;
    double temperature = 1;
    std::function<std::vector<double>(std::span<const std::int32_t>)> other = {}; ///< in place of it; from any thread

    std::vector<double> log_probs(std::span<const std::int32_t> prefix) const {
        if (other) return other(prefix);
        std::uint64_t hash = 0x9E3779B97F4A7C15u;
        for (const std::int32_t id : prefix) hash = mixed(hash ^ static_cast<std::uint64_t>(id + 1));
        std::vector<double> z;
        double sum = 0;
        for (std::int32_t v = 0; v < vocab; ++v) {
            z.push_back(6 * uniform(hash + static_cast<std::uint64_t>(v)) / temperature);
            sum += std::exp(z.back());
        }
        for (double& x : z) x -= std::log(sum);
        return z;
    }
    static std::uint64_t mixed(std::uint64_t x) {
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
        x = (x ^ x >> 27) * 0x94D049BB133111EBu;
        return x ^ x >> 31;
    }
    static double uniform(std::uint64_t x) {
        return static_cast<double>(mixed(x + 0x632BE59BD9B4E019u) >> 11) * 0x1p-53;
    }
};

inline std::string base64(const std::string& bytes) {
    constexpr const char* digits = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    std::string text;
    for (std::size_t i = 0; i < bytes.size(); i += 3) {
        std::uint32_t x = 0;
        for (std::size_t j = 0; j < 3; ++j)
            x = x << 8 | (i + j < bytes.size() ? static_cast<std::uint8_t>(bytes[i + j]) : 0u);
        for (std::size_t j = 0; j < 4; ++j) text += i + j > bytes.size() ? '=' : digits[x >> (18 - 6 * j) & 63];
    }
    return text;
}
/// As numpy.save writes a float32 matrix.
inline std::string npy(const std::vector<float>& numbers, std::size_t rows, std::size_t cols) {
    std::string header = "{'descr': '<f4', 'fortran_order': False, 'shape': (" + std::to_string(rows) + ", " +
                         std::to_string(cols) + "), }";
    header.append(63 - (10 + header.size()) % 64, ' ').append("\n");
    std::string s = "\x93NUMPY";
    s.append({'\1', '\0', static_cast<char>(header.size()), static_cast<char>(header.size() >> 8)}).append(header);
    for (const float x : numbers)
        for (int shift = 0; shift < 32; shift += 8) s += static_cast<char>(std::bit_cast<std::uint32_t>(x) >> shift);
    return s;
}

/// The right answer to a request, as the server of that dialect writes it. `error`: added to each log-prob of a token.
class toy_answers {
public:
    toy_law law = {};
    std::function<double()> error = [] { return 0.0; };

    json operator()(serve::dialect d, const json& q) const {
        switch (d) {
        case serve::dialect::vllm:
            return q.contains("token_ids") ? generate(q) : completions(q);
        case serve::dialect::sglang:
            return sglang(q);
        case serve::dialect::llama_cpp:
            return llama(q);
        default:
            return echo(q);
        }
    }

private:
    using ids = std::vector<std::int32_t>;
    static std::span<const std::int32_t> prefix(const ids& tokens, std::size_t p) { return {tokens.data(), p}; }
    static ids best(const std::vector<double>& q, std::size_t k) {
        ids order(q.size());
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(),
                         [&](auto a, auto b) { return q[std::size_t(a)] > q[std::size_t(b)]; });
        order.resize(std::min(k, order.size()));
        return order;
    }
    static std::string word(std::int32_t id) { return "w" + std::to_string(id); }

    json completions(const json& q) const {
        json choices = json::array();
        for (const json& prompt : q.at("prompt")) {
            const ids tokens = prompt;
            json all = json::array({nullptr});
            for (std::size_t p = 1; p < tokens.size(); ++p) {
                const auto log_q = law.log_probs(prefix(tokens, p));
                ids listed = best(log_q, q.at("prompt_logprobs"));
                if (std::find(listed.begin(), listed.end(), tokens[p]) == listed.end())
                    listed.insert(listed.begin(), tokens[p]);
                json entry = json::object();
                for (const std::int32_t id : listed)
                    entry[std::to_string(id)] = {{"logprob", log_q[std::size_t(id)] + (id == tokens[p] ? error() : 0)},
                                                 {"rank", 1},
                                                 {"decoded_token", word(id)}};
                all.push_back(std::move(entry));
            }
            choices.push_back({{"index", choices.size()},
                               {"text", "w"},
                               {"logprobs", nullptr},
                               {"finish_reason", "length"},
                               {"prompt_logprobs", std::move(all)}});
        }
        return {{"id", "cmpl-1"}, {"object", "text_completion"}, {"choices", std::move(choices)}};
    }
    json generate(const json& q) const {
        const ids tokens = q.at("token_ids");
        const json& how = q.at("sampling_params");
        const std::size_t start = how.at("prompt_logprob_start");
        const auto rows = how.at("prompt_logprob_token_ids").get<std::vector<ids>>();
        if (rows.size() != tokens.size() - 1 - start) return {{"error", {{"message", "rows"}}}};
        std::size_t widest = 0;
        for (const ids& row : rows) widest = std::max(widest, row.size());
        std::vector<float> numbers;
        for (std::size_t i = 0; i < rows.size(); ++i) {
            const auto log_q = law.log_probs(prefix(tokens, start + 1 + i));
            for (std::size_t j = 0; j < widest; ++j)
                numbers.push_back(j < rows[i].size() ? static_cast<float>(log_q[std::size_t(rows[i][j])])
                                                     : -std::numeric_limits<float>::infinity());
        }
        return {{"request_id", "1"},
                {"choices", json::array({{{"index", 0}, {"token_ids", {1}}, {"sampling_mask", nullptr}}})},
                {"prompt_logprobs", nullptr},
                {"prompt_token_id_logprobs", base64(npy(numbers, rows.size(), widest))}};
    }
    json sglang(const json& q) const {
        json all = json::array();
        for (std::size_t i = 0; i < q.at("input_ids").size(); ++i) {
            const ids tokens = q.at("input_ids")[i];
            const std::size_t start = q.at("logprob_start_len")[i], k = q.value("top_logprobs_num", 0);
            json own = json::array(), top = json::array(), asked = json::array();
            for (std::size_t p = start; p < tokens.size(); ++p) {
                if (p == start) { // always, whatever the start
                    own.push_back({nullptr, tokens[p], nullptr}), top.push_back(nullptr), asked.push_back(nullptr);
                    continue;
                }
                const auto log_q = law.log_probs(prefix(tokens, p));
                own.push_back({log_q[std::size_t(tokens[p])] + error(), tokens[p], nullptr});
                const auto listed = [&](const ids& which) {
                    json list = json::array();
                    for (const std::int32_t id : which) list.push_back({log_q[std::size_t(id)], id, nullptr});
                    return list;
                };
                top.push_back(listed(best(log_q, k)));
                if (q.contains("token_ids_logprob")) asked.push_back(listed(q["token_ids_logprob"][i]));
            }
            json meta = {{"id", "1"},
                         {"finish_reason", {{"type", "length"}, {"length", 0}}},
                         {"prompt_tokens", tokens.size()},
                         {"input_token_logprobs", std::move(own)}};
            if (k > 0) meta["input_top_logprobs"] = std::move(top);
            if (q.contains("token_ids_logprob")) meta["input_token_ids_logprobs"] = std::move(asked);
            all.push_back({{"text", ""}, {"output_ids", json::array()}, {"meta_info", std::move(meta)}});
        }
        return all;
    }
    json llama(const json& q) const {
        ids tokens = q.at("prompt");
        const std::string grammar = q.at("grammar");
        json all = json::array(), drawn = json::array();
        for (auto at = grammar.find("<["); at != std::string::npos; at = grammar.find("<[", at + 1)) {
            const std::int32_t token = std::stoi(grammar.substr(at + 2));
            const auto log_q = law.log_probs(tokens);
            json top = json::array();
            for (const std::int32_t id : best(log_q, q.at("n_probs")))
                top.push_back({{"id", id}, {"token", word(id)}, {"logprob", log_q[std::size_t(id)]}});
            all.push_back({{"id", token},
                           {"token", word(token)},
                           {"logprob", log_q[std::size_t(token)] + error()},
                           {"top_logprobs", std::move(top)}});
            tokens.push_back(token), drawn.push_back(token);
        }
        return {{"index", 0},
                {"content", "w"},
                {"tokens", drawn},
                {"truncated", false},
                {"completion_probabilities", std::move(all)}};
    }
    json echo(const json& q) const {
        json choices = json::array();
        const bool as_ids = q.value("return_tokens_as_token_ids", false);
        for (const json& prompt : q.at("prompt")) {
            ids tokens = prompt;
            tokens.push_back(1); // generated
            json own = json::array({nullptr}), top = json::array({nullptr});
            for (std::size_t p = 1; p < tokens.size(); ++p) {
                const auto log_q = law.log_probs(prefix(tokens, p));
                own.push_back(log_q[std::size_t(tokens[p])] + error());
                ids listed = best(log_q, q.at("logprobs"));
                if (std::find(listed.begin(), listed.end(), tokens[p]) == listed.end()) listed.push_back(tokens[p]);
                json entry = json::object();
                for (const std::int32_t id : listed)
                    entry[as_ids ? "token_id:" + std::to_string(id) : word(id)] = log_q[std::size_t(id)];
                top.push_back(std::move(entry));
            }
            choices.push_back({{"index", choices.size()},
                               {"text", "w"},
                               {"logprobs", {{"token_logprobs", std::move(own)}, {"top_logprobs", std::move(top)}}}});
        }
        return {{"choices", std::move(choices)}};
    }
};

/// What becomes of a request.
struct reaction {
    enum what { answers, hangs, halves, closes, says, trickles } does = answers;
    int status = 200;                     // says
    std::string headers = {}, body = {};  // says; headers: "Retry-After: 1\r\n"
    std::function<void(json&)> edit = {}; // answers, with this done to the answer
};

class teacher_server : public http_listener {
public:
    serve::dialect speaks;
    toy_answers right;
    /// To request n, from 0; from any thread.
    std::function<reaction(int n, const json& asked)> react = [](int, const json&) { return reaction{}; };
    std::string models = {}; ///< what it says of itself at /v1/models; empty: nothing

    explicit teacher_server(serve::dialect d, presence is = presence::serves)
        : http_listener(
              is, [this](int s, const std::string& head, const std::string& body) { return serve_one(s, head, body); }),
          speaks(d) {
        if (is == presence::serves) begin();
    }
    ~teacher_server() { end(); }

    /// Those that hang, now and later, answer.
    void let_go() {
        const std::lock_guard lock(mutex_);
        free_ = true;
        changed_.notify_all();
    }
    void await_hanging(int n) {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return hanging_ >= n; });
    }
    int requests() const { return requests_; }
    int most_at_once() const { return most_; }
    std::vector<json> asked() const { // bodies, in the order in which they came
        const std::lock_guard lock(mutex_);
        return asked_;
    }
    std::string last_head() const {
        const std::lock_guard lock(mutex_);
        return head_;
    }

private:
    bool serve_one(int s, const std::string& head, const std::string& body) {
        if (head.rfind("GET ", 0) == 0) // of itself: no request to be counted
            return send_all(s, std::string("HTTP/1.1 ") + (models.empty() ? "404 x" : "200 x") +
                                   "\r\nContent-Length: " + std::to_string(models.size()) + "\r\n\r\n" + models);
        const int n = requests_++;
        const int now = ++now_;
        for (int most = most_; most < now && !most_.compare_exchange_weak(most, now);) {}
        json q = json::parse(body);
        {
            const std::lock_guard lock(mutex_);
            asked_.push_back(q), head_ = head;
        }
        bool over = false; // for the client, too: it has the last byte after that, and may ask again
        const bool keep = answer(s, react(n, q), q, [&] {
            if (!std::exchange(over, true)) --now_;
        });
        if (!over) --now_;
        return keep;
    }
    template <class Leave>
    bool answer(int s, const reaction& r, const json& q, Leave&& leave) {
        std::string body = r.body;
        if (r.does == reaction::closes) return false;
        if (r.does == reaction::hangs) {
            std::unique_lock lock(mutex_);
            ++hanging_;
            changed_.notify_all();
            changed_.wait(lock, [&] { return free_ || over_; });
        }
        if (r.does != reaction::says) {
            json a = right(speaks, q);
            if (r.edit) r.edit(a);
            body = a.dump();
        }
        const std::string head = "HTTP/1.1 " + std::to_string(r.status) + " x\r\n" + r.headers +
                                 "Content-Type: application/json\r\nContent-Length: " + std::to_string(body.size()) +
                                 "\r\n\r\n";
        if (r.does == reaction::halves) {
            send_all(s, head + body.substr(0, body.size() / 2));
            return false;
        }
        if (r.does == reaction::trickles) { // never ends, and is never silent for long
            send_all(s, "HTTP/1.1 200 x\r\nContent-Length: 1000000000\r\n\r\n");
            while (send_all(s, " ")) {
                std::unique_lock lock(mutex_);
                if (changed_.wait_for(lock, std::chrono::milliseconds(5), [&] { return over_; })) break;
            }
            return false;
        }
        const std::string all = head + body;
        if (!send_all(s, std::string_view(all).substr(0, all.size() - 1), MSG_MORE)) return false;
        leave();
        return send_all(s, std::string_view(all).substr(all.size() - 1));
    }

    bool free_ = false;
    int hanging_ = 0;
    std::vector<json> asked_;
    std::string head_;
    std::atomic<int> requests_ = 0, now_ = 0, most_ = 0;
};

} // namespace opd::test
