// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A policy that is a formula of prefix and version, and a rollout server of it in vLLM's or SGLang's form, written from
// what the servers document and not from the readers. What it does wrong a test decides, request by request. What a
// response must be follows from its prompt and from the versions of its tokens alone: policy.step().
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <functional>
#include <mutex>
#include <numeric>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "opd/serve/dialects.hpp"
#include "support/http_listener.hpp"
#include "support/teacher_server.hpp"

namespace opd::test {

struct toy_step {
    std::int32_t token = 0;
    double log_p = 0, log_mu = 0; ///< without and with the filter
    std::vector<std::int32_t> kept, best;
    std::vector<double> all; ///< log p
};
/// Draws by top_k of a law; token 0 ends.
struct toy_policy {
    toy_law law{.vocab = 24};

    toy_step step(std::int64_t version, std::vector<std::int32_t> prefix, std::size_t top_k, std::size_t list) const {
        prefix.push_back(static_cast<std::int32_t>(100000 + version));
        toy_step s;
        s.all = law.log_probs(prefix);
        std::vector<std::int32_t> order(s.all.size());
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return s.all[at(a)] > s.all[at(b)]; });
        s.best.assign(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(std::min(list, order.size())));
        s.kept.assign(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(top_k > 0 ? top_k : order.size()));
        double mass = 0;
        for (const auto id : s.kept) mass += std::exp(s.all[at(id)]);
        std::uint64_t hash = 77;
        for (const auto id : prefix) hash = toy_law::mixed(hash ^ static_cast<std::uint64_t>(id));
        double u = toy_law::uniform(hash) * mass;
        s.token = s.kept.back();
        for (const auto id : s.kept)
            if ((u -= std::exp(s.all[at(id)])) < 0) {
                s.token = id;
                break;
            }
        s.log_p = s.all[at(s.token)], s.log_mu = s.log_p - std::log(mass);
        return s;
    }
    static std::size_t at(std::int32_t id) { return static_cast<std::size_t>(id); }
};

/// What a generation comes to after `at` tokens.
struct rollout_fault {
    enum what { none, drops, garbles, twice, unscored, sentinel, giant, halts, hangs, says } does = none;
    int at = 0;
    int status = 200;         // says
    std::string headers = {}; // says
    bool heeds = true;        // aborts
};
/// What a call that changes weights comes to.
struct control_fault {
    int status = 200; // with 200: as it should be
    bool hangs = false, fails = false;
};

class rollout_server : public http_listener {
public:
    serve::dialect speaks;
    toy_policy policy;
    bool incremental = false, labels = true, spans = true; ///< before it is asked
    int pace = 0;                                          ///< microseconds a token
    std::function<rollout_fault(int n, const json& asked)> react = [](int, const json&) { return rollout_fault{}; };
    std::function<control_fault(int n, const std::string& path)> control = [](int, const std::string&) {
        return control_fault{};
    };

    explicit rollout_server(serve::dialect d)
        : http_listener(presence::serves, [this](int s, const std::string& head,
                                                 const std::string& body) { return serve_one(s, head, body); }),
          speaks(d) {
        begin();
    }
    ~rollout_server() { end(); }

    /// As somebody beside it might, or a restart.
    void load(std::int64_t version, const std::string& label) {
        const std::lock_guard lock(mutex_);
        version_ = version, label_ = label;
    }
    void await_tokens(std::int64_t n) {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return drawn_ >= n; });
    }
    /// Those that hang go on.
    void let_go() {
        const std::lock_guard lock(mutex_);
        free_ = true;
        changed_.notify_all();
    }
    int generations() const { return locked(generations_); }
    std::int64_t version() const { return locked(version_); }
    bool paused() const { return locked(paused_); }
    std::vector<std::string> controls() const { return locked(controls_); } ///< paths, in order
    std::set<std::string> aborted() const { return locked(aborted_); }      ///< SGLang: rids
    std::vector<json> asked() const { return locked(asked_); }

private:
    template <class T>
    T locked(const T& x) const {
        const std::lock_guard lock(mutex_);
        return x;
    }
    static bool answer(int s, int status, const std::string& body, const std::string& headers = {}) {
        return send_all(s, "HTTP/1.1 " + std::to_string(status) + " x\r\n" + headers +
                               "Content-Type: application/json\r\nContent-Length: " + std::to_string(body.size()) +
                               "\r\n\r\n" + body);
    }
    bool serve_one(int s, const std::string& head, const std::string& body) {
        const auto space = head.find(' ');
        const std::string path = head.substr(space + 1, head.find(' ', space + 1) - space - 1);
        if (path == (speaks == serve::dialect::vllm ? "/weight_info" : "/model_info"))
            return labels ? answer(s, 200, json{{"weight_version", locked(label_)}}.dump()) : answer(s, 404, "{}");
        json q = json::parse(body);
        if (path == (speaks == serve::dialect::vllm ? "/inference/v1/generate" : "/generate")) return generate(s, q);
        if (path == "/abort_request" && speaks == serve::dialect::sglang) {
            const std::lock_guard lock(mutex_);
            aborted_.insert(q.at("rid"));
            changed_.notify_all();
            return answer(s, 200, "{}");
        }
        return change(s, path, q);
    }

    bool change(int s, const std::string& path, const json& q) {
        std::unique_lock lock(mutex_);
        const int n = static_cast<int>(controls_.size());
        controls_.push_back(path);
        lock.unlock();
        const control_fault f = control(n, path);
        lock.lock();
        if (f.hangs) changed_.wait(lock, [&] { return free_ || over_; });
        if (f.status != 200) return answer(s, f.status, "{\"detail\": \"no\"}");
        const auto is = [&](const char* p) { return path == p; };
        const bool vllm = speaks == serve::dialect::vllm;
        std::string done = "{}";
        if (vllm ? is("/pause?mode=abort&clear_cache=true") || is("/sleep?level=2&mode=abort")
                 : is("/pause_generation")) {
            paused_ = true;
            if (vllm || q.at("mode") == "abort") ++epoch_;
        } else if (vllm ? is("/resume") || is("/wake_up?tags=kv_cache") : is("/continue_generation")) {
            paused_ = false;
        } else if (vllm ? is("/collective_rpc") : is("/update_weights_from_disk")) {
            if (!paused_) return answer(s, 400, "{\"detail\": \"not paused\"}");
            if (vllm && q.at("method") != "reload_weights") return answer(s, 400, "{}");
            const std::string folder = vllm ? q.at("kwargs").at("weights_path") : q.at("model_path");
            std::ifstream in(folder + "/weights"), marker(folder + "/STABLE");
            std::int64_t v = -1;
            const bool read = marker && in >> v && !f.fails;
            if (read) version_ = v;
            if (read && !vllm && labels) label_ = q.at("weight_version");
            if (!read && vllm) return answer(s, 500, "{}");
            done = json{{"success", read}, {"message", ""}}.dump();
        } else if (is("/update_weight_version")) {
            if (!labels) return answer(s, 404, "{}");
            label_ = q.at("new_version");
        } else if (!is("/reset_prefix_cache") && !is("/wake_up?tags=weights")) {
            return answer(s, 404, "{\"detail\": \"no such path\"}");
        }
        changed_.notify_all();
        lock.unlock();
        return answer(s, 200, done);
    }

    // --- generation

    struct run { // of one request
        std::vector<toy_step> steps;
        std::vector<std::string> labels;
        std::string ended;
    };
    static bool chunk(int s, const std::string& text) {
        char size[20];
        std::snprintf(size, sizeof size, "%zx\r\n", text.size());
        return send_all(s, size + text + "\r\n");
    }
    bool generate(int s, const json& q) {
        const bool vllm = speaks == serve::dialect::vllm;
        std::unique_lock lock(mutex_);
        const int n = generations_++;
        asked_.push_back(q);
        const int epoch = epoch_;
        lock.unlock();
        const rollout_fault f = react(n, q);
        if (f.does == rollout_fault::says) return answer(s, f.status, "{\"detail\": \"no\"}", f.headers);
        const json& how = q.at("sampling_params");
        std::vector<std::int32_t> prefix = q.at(vllm ? "token_ids" : "input_ids");
        const std::size_t most = how.at(vllm ? "max_tokens" : "max_new_tokens"), top_k = how.value("top_k", 0u);
        const std::size_t list = vllm ? how.at("logprobs").get<std::size_t>() : q.value("top_logprobs_num", 0u);
        const std::string rid = q.at(vllm ? "request_id" : "rid");
        const bool stream = q.at("stream"), whole_lists = vllm ? !stream : q.value("return_sampling_mask", false);
        if (stream &&
            !send_all(s, "HTTP/1.1 200 x\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"))
            return false;
        run r;
        while (r.ended.empty()) {
            lock.lock();
            const auto abort = [&] { return f.heeds && (epoch != epoch_ || aborted_.count(rid) > 0); };
            const auto held = [&] {
                return (paused_ && f.heeds) ||
                       (f.does == rollout_fault::hangs && !free_ && static_cast<int>(r.steps.size()) == f.at);
            };
            if (pace > 0) changed_.wait_for(lock, std::chrono::microseconds(pace), [&] { return over_; });
            changed_.wait(lock, [&] { return over_ || abort() || !held(); });
            if (over_) return false;
            const std::int64_t version = version_;
            const std::string label = label_;
            const bool cut = abort();
            if (!cut) ++drawn_;
            changed_.notify_all();
            lock.unlock();
            const int at = static_cast<int>(r.steps.size());
            const bool now = at == f.at;
            if (now && f.does == rollout_fault::drops) return false;
            if (cut || (now && f.does == rollout_fault::halts)) {
                r.ended = "abort";
            } else {
                r.steps.push_back(policy.step(version, prefix, top_k, list));
                r.labels.push_back(label);
                prefix.push_back(r.steps.back().token);
                if (r.steps.back().token == 0)
                    r.ended = "stop";
                else if (r.steps.size() == most)
                    r.ended = "length";
            }
            if (!stream) continue;
            json e = vllm ? vllm_event(r, r.steps.size() - (r.ended == "abort" ? 0 : 1), rid, false)
                          : sglang_event(r, r.ended == "abort" ? r.steps.size() : r.steps.size() - 1, rid, whole_lists);
            if (now) spoil(f, e);
            std::string text = "data: " + e.dump() + "\n\n";
            if (now && f.does == rollout_fault::garbles) text.resize(text.size() / 2), text += "\n\n";
            if (now && f.does == rollout_fault::giant) text = "data: \"" + std::string(1 << 17, 'x') + "\"\n\n";
            if (vllm && r.ended == "abort") text.clear(); // no tokens, no event
            const std::size_t half = text.size() / 2;     // an event may come in pieces
            if (!text.empty() && (!chunk(s, text.substr(0, half)) || !chunk(s, text.substr(half)))) return false;
            if (now && f.does == rollout_fault::twice && !chunk(s, text)) return false;
        }
        if (!stream) {
            json e = vllm ? vllm_event(r, 0, rid, true) : sglang_event(r, 0, rid, whole_lists);
            spoil(f, e);
            std::string text = e.dump();
            if (f.does == rollout_fault::garbles) text.resize(text.size() / 2);
            if (f.does == rollout_fault::giant) text = "\"" + std::string(1 << 17, 'x') + "\"";
            return answer(s, 200, text);
        }
        std::string last;
        if (vllm)
            last = "data: " +
                   json{{"request_id", rid},
                        {"choices", json::array()},
                        {"usage", {{"prompt_tokens", 1}, {"completion_tokens", r.steps.size()}}}}
                       .dump() +
                   "\n\n";
        return chunk(s, last + "data: [DONE]\n\n") && send_all(s, "0\r\n\r\n");
    }
    void spoil(const rollout_fault& f, json& e) const {
        const bool vllm = speaks == serve::dialect::vllm;
        if (f.does == rollout_fault::unscored) {
            if (vllm)
                e["choices"][0]["logprobs"] = nullptr;
            else
                e["meta_info"].erase("output_token_logprobs");
        }
        if (f.does == rollout_fault::sentinel) {
            json& of = vllm ? e["choices"][0]["logprobs"]["content"] : e["meta_info"]["output_token_logprobs"];
            if (of.empty()) return; // it was aborted before a token
            if (vllm)
                of.back()["logprob"] = -9999.0;
            else
                of.back()[0] = -9999.0;
            if (!vllm && e["meta_info"].contains("output_token_sampling_logprobs"))
                e["meta_info"]["output_token_sampling_logprobs"].back() = -9999.0;
        }
    }
    json vllm_event(const run& r, std::size_t from, const std::string& rid, bool whole) const {
        json ids = json::array(), content = json::array(), masks = json::array();
        const auto name = [](std::int32_t id) { return "token_id:" + std::to_string(id); };
        for (std::size_t i = from; i < r.steps.size(); ++i) {
            const toy_step& t = r.steps[i];
            const auto log_mu = [&](std::int32_t id) { // --logprobs-mode processed_logprobs
                const bool in = std::find(t.kept.begin(), t.kept.end(), id) != t.kept.end();
                return in ? t.all[toy_policy::at(id)] - t.log_p + t.log_mu : -9999.0;
            };
            std::vector<std::int32_t> listed = {t.token}; // it comes first, and takes a place
            for (const auto id : t.best)
                if (id != t.token && listed.size() < std::max<std::size_t>(t.best.size(), 1)) listed.push_back(id);
            json top = json::array();
            for (const auto id : listed) top.push_back({{"token", name(id)}, {"logprob", log_mu(id)}});
            ids.push_back(t.token);
            content.push_back({{"token", name(t.token)}, {"logprob", t.log_mu}, {"top_logprobs", std::move(top)}});
            masks.push_back(t.kept);
        }
        json choice = {{"index", 0},
                       {"token_ids", std::move(ids)},
                       {"logprobs", {{"content", std::move(content)}}},
                       {"finish_reason", r.ended.empty() ? json() : json(r.ended)}};
        if (whole) choice["sampling_mask"] = std::move(masks);
        return {{"request_id", "generate-tokens-" + rid},
                {"choices", json::array({std::move(choice)})},
                {"usage", {{"prompt_tokens", 1}, {"completion_tokens", r.steps.size()}}}};
    }
    json sglang_event(const run& r, std::size_t fresh, const std::string& rid, bool masks) const {
        json ids = json::array(), own = json::array(), top = json::array(), kept = json::array(), mu = json::array();
        json marks = json::array();
        for (std::size_t i = incremental ? fresh : 0; i < r.steps.size(); ++i) {
            const toy_step& t = r.steps[i];
            ids.push_back(t.token), own.push_back({t.log_p, t.token, nullptr});
            json row = json::array();
            for (const auto id : t.best) row.push_back({t.all[toy_policy::at(id)], id, nullptr});
            top.push_back(std::move(row)), kept.push_back(t.kept), mu.push_back(t.log_mu);
        }
        for (std::size_t i = 0; i < r.labels.size(); ++i) {
            if (i == 0 || r.labels[i] != r.labels[i - 1])
                marks.push_back({{"version", r.labels[i]}, {"start", i}, {"end", i}});
            marks.back()["end"] = i + 1;
        }
        json meta = {{"id", rid},
                     {"completion_tokens", r.steps.size()},
                     {"output_token_logprobs", std::move(own)},
                     {"output_top_logprobs", std::move(top)},
                     {"finish_reason", r.ended.empty() ? json() : json{{"type", r.ended}}}};
        if (masks) {
            meta["output_token_sampling_mask"] = std::move(kept);
            meta["output_token_sampling_logprobs"] = std::move(mu);
        }
        if (labels && !r.labels.empty()) meta["weight_version"] = r.labels.back();
        if (labels && spans) meta["weight_versions"] = std::move(marks);
        return {{"text", ""}, {"output_ids", std::move(ids)}, {"meta_info", std::move(meta)}};
    }

    std::int64_t version_ = 0, drawn_ = 0;
    std::string label_ = "default";
    bool paused_ = false, free_ = false;
    int epoch_ = 0, generations_ = 0;
    std::vector<std::string> controls_;
    std::set<std::string> aborted_;
    std::vector<json> asked_;
};

} // namespace opd::test
