// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// An inference server as a rollout worker of the schedulers (opd/sched/stages.hpp): one object a server, used by the
// thread driver or behind a remote_worker. Requests are sent, tokens arrive, weights are changed, all by HTTP.
//
//   serve::rollout_settings how{.url = "http://10.0.0.7:30000", .dialect = serve::dialect::sglang,
//                               .prompt_of = [&](const sched::ticket& t) { return prompts[t.sample]; },
//                               .folder = "/shared/run/weights"};
//   driver.add_rollout(std::make_shared<serve::http_rollout>(how), 64);        // 64 requests under way
//
// What is posted to draw, and which fields are read: generation.hpp. Beside it:
//
//               SGLang                                              vLLM (VLLM_SERVER_DEV_MODE=1)
//   abort       the connection closes; /abort_request {rid}         the connection closes
//   pause       /pause_generation {mode: abort | retract}           /pause?mode=abort&clear_cache=true
//   weights     /update_weights_from_disk {model_path,              /collective_rpc {method: reload_weights,
//                weight_version, flush_cache}                        kwargs{weights_path}}, /reset_prefix_cache
//   go on       /continue_generation                                /resume
//   label       in that call; /update_weight_version                /update_weight_version {new_version}
//               read: GET /model_info                               read: GET /weight_info
// vLLM by way of sleep: /sleep?level=2&mode=abort, /wake_up?tags=weights, reload_weights, /wake_up?tags=kv_cache.
// Sources: docs.sglang.io/advanced_features/sglang_for_rl, docs.vllm.ai/training/async_rl and features/sleep_mode,
// vllm/entrypoints/serve/dev/rlhf/api_router.py, vllm-project/vllm#49040 and #54443, sgl-project/sglang#10071.
//
//   weights     folder/label-version-job with its STABLE marker (weight_folders.hpp); of job 0 `initial`, empty: the
//               server has them. `watched`: the server or somebody beside it loads new folders by itself, and install()
//               waits until the server says that name
//   resume      (mode) install() breaks off what is drawn, changes the weights, and asks for the rest: prompt and
//               tokens so far. The weights of each token are known on any server, and KV state is computed anew
//   in_flight   (mode) requests go on through the change; the server says which weights drew which token. vLLM does not
//               (vllm#54443), and is refused
//   a failure   is never tried again here. An attempt whose request broke off (no connection, silence, 5xx, aborted by
//               the server) goes back as it stands if it has drawn something since it was started: parked, uncharged,
//               to go on anywhere. Else, or where the answer was a bad one, the attempt fails and is charged. That is
//               reported after rest_seconds, or Retry-After: a server that refuses all does not use all attempts up
//   a server    that could not be reached may have been restarted with other weights, as may one that names other
//               weights in an answer. Nothing is sent to it until it has said that it has the right ones, or was given
//               them again; what waits longer than down_seconds for this fails
//   a deadline  read_seconds of silence, total_seconds of a request, weights_seconds of a change of weights
//   limits      most_event_bytes in memory, most_answer_bytes in all, most_requests under way, broken-off ones included
//
// A sequence ends once: what arrives after abort(), park() or a change of weights is dropped. park() and
// export_partials() give tokens, log-probs, lists, kept sets and weights so far; start() goes on from there.
//
// Exceptions: invalid_input for settings, a prompt or a prefix; start() also error where most_requests are under way;
// install() what went wrong, with the server's words.
//
// Above 600 lines: a request's life, from its start to what is told of it, is one state machine for two dialects.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <random>
#include <stop_token>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "opd/config.hpp"
#include "opd/error.hpp"
#include "opd/sched/stages.hpp"
#include "opd/sched/types.hpp"
#include "opd/serve/generation.hpp"
#include "opd/serve/http_post.hpp"
#include "opd/serve/weight_folders.hpp"

namespace opd::serve {

/// How weights get into the server.
enum class update_route {
    endpoint, ///< it is told to load a folder
    sleep,    ///< vLLM: weights and KV cache are given up first, so there is room
    watched   ///< it looks for new folders by itself
};
/// What becomes of requests under way.
enum class update_mode { resume, in_flight };

/// One server as a rollout worker. `url`, `prompt_of` and `folder` have no useful default.
struct rollout_settings {
    std::string url; ///< http://host[:port][/prefix]
    serve::dialect dialect = serve::dialect::vllm;
    serve::sampling sampling = {};
    std::function<std::vector<std::int32_t>(const sched::ticket&)> prompt_of = {}; ///< ids, at least one
    std::string folder = {};   ///< of the weights, for this process and the server alike
    std::string initial = {};  ///< weights of job 0; empty: the server has them
    std::string label = "opd"; ///< of the run, in the names of weights
    update_route route = update_route::endpoint;
    update_mode mode = update_mode::resume; ///< what becomes of requests when the weights change
    std::string model = {};                 ///< member `model` of requests; empty: left out
    std::string api_key = {};               ///< sent as Authorization: Bearer; empty: not sent
    int most_requests = 1024;
    double connect_seconds = 5;
    double read_seconds = 120;     ///< of silence; in_flight: above what a change of weights takes
    double total_seconds = 3600;   ///< of a request
    double weights_seconds = 600;  ///< of a change of weights
    double rest_seconds = 1;       ///< before a failure without progress is reported, and between looks at a server
    double down_seconds = 60;      ///< that a sequence waits for a server that cannot be reached
    double quantum_seconds = 0.01; ///< of a step() in which nothing ends
    std::size_t most_event_bytes = std::size_t{64} << 20;
    std::size_t most_answer_bytes = std::size_t{4} << 30;
};

/// Why an attempt failed.
struct not_drawn : error {
    failure why;
    not_drawn(failure why_, const std::string& text)
        : error(std::string("opd: not drawn: ").append(to_string(why_)).append(": ").append(text)), why(why_) {}
};

/// Since the worker was made.
struct rollout_metrics {
    std::int64_t requests = 0;                          ///< under way or over
    std::int64_t failures[8] = {};                      ///< requests that are over, by `failure`
    std::int64_t ended = 0, failed = 0, given_back = 0; ///< attempts; given back: after a failure, with progress
    std::int64_t interrupted = 0;                       ///< requests broken off by a change of weights
    std::int64_t tokens = 0;                            ///< that were taken
    std::int64_t received_bytes = 0;
    std::int64_t updates = 0, failed_updates = 0; ///< changes of weights
    std::int64_t restored = 0;                    ///< of those, since the server had lost them
};

namespace detail {

/// A call that changes a server's weights.
struct control_call {
    std::string path, body = "{}";
    bool optional = false; ///< older servers do not have it
    bool success = false;  ///< says {"success": true}
};
struct control_plan {
    std::vector<control_call> calls, last; ///< last: whatever becomes of the calls
};
/// `path` empty: the weights are there, and get a name alone.
inline control_plan plan_of_update(const rollout_settings& s, const std::string& path, const std::string& name) {
    control_plan p;
    const bool vllm = s.dialect == dialect::vllm;
    const control_call label{"/update_weight_version",
                             vllm ? json{{"new_version", name}}.dump()
                                  : json{{"new_version", name}, {"abort_all_requests", false}}.dump(),
                             true};
    if (path.empty()) {
        p.calls.push_back(label);
        return p;
    }
    if (!vllm) {
        const char* const how = s.mode == update_mode::resume ? "abort" : "retract";
        p.calls.push_back({"/pause_generation", json{{"mode", how}}.dump()});
        p.calls.push_back({"/update_weights_from_disk",
                           json{{"model_path", path}, {"weight_version", name}, {"flush_cache", true}}.dump(), false,
                           true});
        p.last.push_back({"/continue_generation"});
        return p;
    }
    const control_call reload{"/collective_rpc",
                              json{{"method", "reload_weights"}, {"kwargs", {{"weights_path", path}}}}.dump()};
    if (s.route == update_route::sleep) {
        p.calls = {control_call{"/sleep?level=2&mode=abort"}, control_call{"/wake_up?tags=weights"}, reload, label};
        p.last.push_back({"/wake_up?tags=kv_cache"});
    } else {
        p.calls = {control_call{"/pause?mode=abort&clear_cache=true"}, reload, control_call{"/reset_prefix_cache"},
                   label};
        p.last.push_back({"/resume"});
    }
    return p;
}

inline rollout_settings checked(rollout_settings s) {
    parsed_url(s.url);
    check_sampling(s.dialect, s.sampling);
    if (!s.prompt_of) throw invalid_input("prompt_of", "is empty");
    if (s.folder.empty()) throw invalid_input("folder", "is empty: weights come from there");
    if (s.label.empty() || s.label.find_first_of("/\\ \r\n") != std::string::npos)
        throw invalid_input("label", "must be a name without slashes and spaces");
    if (s.api_key.find_first_of("\r\n") != std::string::npos) throw invalid_input("api_key", "has a line break");
    if (s.mode == update_mode::in_flight && s.dialect != dialect::sglang)
        throw unsupported("opd: in_flight needs a server that says which weights drew each token, as SGLang does");
    if (s.route == update_route::sleep && s.dialect != dialect::vllm)
        throw unsupported("opd: the route by way of sleep is vLLM's");
    if (s.most_requests < 1 || s.most_requests > 1 << 16)
        throw invalid_input("most_requests", "must lie in [1, 65536]");
    if (s.most_event_bytes < 1) throw invalid_input("most_event_bytes", "must be at least 1");
    if (s.most_answer_bytes < 1) throw invalid_input("most_answer_bytes", "must be at least 1");
    for (const auto& [name, seconds] : {std::pair{"connect_seconds", s.connect_seconds},
                                        {"read_seconds", s.read_seconds},
                                        {"total_seconds", s.total_seconds},
                                        {"weights_seconds", s.weights_seconds},
                                        {"rest_seconds", s.rest_seconds},
                                        {"down_seconds", s.down_seconds},
                                        {"quantum_seconds", s.quantum_seconds}})
        check_seconds(name, seconds);
    return s;
}

/// By versions, as the scheduler wants them; `now` of a response without tokens.
inline sched::token_versions versions_of(const drawn& d, sched::version_t now) {
    sched::token_versions v{now, now, static_cast<double>(now), d.size()};
    if (d.tokens.empty()) return v;
    v.oldest = d.versions.front().version, v.newest = d.versions.back().version, v.mean = 0;
    for (std::size_t i = 0; i < d.versions.size(); ++i) {
        const auto end = i + 1 < d.versions.size() ? d.versions[i + 1].begin : d.size();
        v.mean += static_cast<double>(d.versions[i].version) * static_cast<double>(end - d.versions[i].begin);
    }
    v.mean /= static_cast<double>(d.size());
    return v;
}

} // namespace detail

/// A rollout stage (opd/sched/stages.hpp) over one server; its requests run on threads of its own.
class http_rollout {
public:
    using rolled_type = drawn;

    explicit http_rollout(rollout_settings settings)
        : settings_(detail::checked(std::move(settings))), at_(detail::parsed_url(settings_.url)) {
        std::random_device device; // a request of an earlier process may still be there under its name
        name_ = settings_.label + "-" + std::to_string(device()) + "-" + std::to_string(device()) + "-";
        breaker_ = std::jthread([this] { break_off_all(); });
    }
    http_rollout(const http_rollout&) = delete;
    http_rollout& operator=(const http_rollout&) = delete;
    ~http_rollout() {
        std::unique_lock lock(mutex_);
        for (const auto& r : requests_) break_off(*r, failure::cancelled);
        changed_.wait(lock, [&] {
            return std::all_of(requests_.begin(), requests_.end(), [](const auto& r) { return r->over; });
        });
        closing_ = true;
        lock.unlock();
        to_break_.notify_all();
    }

    const rollout_settings& settings() const { return settings_; }
    rollout_metrics metrics() const {
        const std::lock_guard lock(mutex_);
        return metrics_;
    }

    // --- the stage

    void start(const sched::ticket& t, std::shared_ptr<const drawn> prefix) {
        auto s = std::make_shared<sequence>();
        s->ticket = t;
        if (prefix)
            s->so_far = *prefix;
        else
            s->so_far.prompt = settings_.prompt_of(t);
        check_prefix(s->so_far);
        s->had = s->so_far.tokens.size();
        const std::lock_guard lock(mutex_);
        s->since = detail::http_clock::now();
        if (ready()) launch(s);
        sequences_.push_back(std::move(s));
    }
    void abort(const sched::ticket& t) {
        const std::lock_guard lock(mutex_);
        take_out(t);
    }
    sched::finished_rollout<drawn> park(const sched::ticket& t) {
        const std::lock_guard lock(mutex_);
        const auto s = take_out(t);
        if (!s) throw invalid_input("ticket", "does not run here");
        return report_of(*s, true);
    }
    void install(const sched::weights& w) {
        {
            const std::lock_guard lock(mutex_);
            if (settings_.mode == update_mode::resume) interrupt();
            whole_ = false;
            known_.push_back(w);
            if (known_.size() > 256) known_.erase(known_.begin());
        }
        put(w, false);
        const std::lock_guard lock(mutex_);
        current_ = w;
        whole_ = true, suspect_ = false;
        launch_waiting();
    }
    void step(std::vector<sched::finished_rollout<drawn>>& out, std::stop_token stop) {
        std::unique_lock lock(mutex_);
        join_those_over(lock);
        if (suspect_ && whole_) look_after_server(lock);
        for (const auto& r : requests_)
            if (r->limit <= detail::http_clock::now()) break_off(*r, failure::timed_out);
        const auto reportable = [&] {
            const auto now = detail::http_clock::now();
            return std::any_of(sequences_.begin(), sequences_.end(), [&](const auto& s) { return s->reports(now); });
        };
        changed_.wait_for(lock, std::chrono::duration<double>(settings_.quantum_seconds),
                          [&] { return stop.stop_requested() || reportable(); });
        const auto now = detail::http_clock::now();
        for (auto i = sequences_.begin(); i != sequences_.end();) {
            sequence& s = **i;
            if (!s.reports(now)) {
                ++i;
                continue;
            }
            if (s.is == state::ended) {
                ++metrics_.ended;
                out.push_back(report_of(s, false));
            } else if (s.keeps && s.so_far.tokens.size() > s.had) {
                ++metrics_.given_back;
                out.push_back(report_of(s, true));
            } else {
                ++metrics_.failed;
                sched::finished_rollout<drawn> f;
                f.ticket = s.ticket;
                f.failed = std::make_exception_ptr(not_drawn(s.why, s.text));
                out.push_back(std::move(f));
            }
            i = sequences_.erase(i);
        }
    }
    void export_partials(std::vector<sched::partial_rollout<drawn>>& out) {
        const std::lock_guard lock(mutex_);
        for (const auto& s : sequences_)
            if (!s->so_far.tokens.empty()) out.push_back({s->ticket, std::make_shared<const drawn>(s->so_far)});
    }
    index_t running() const {
        const std::lock_guard lock(mutex_);
        return static_cast<index_t>(sequences_.size());
    }

private:
    /// On a thread of its own, which may outlive the sequence it was for.
    struct request {
        std::shared_ptr<httplib::Client> client;
        std::string id;
        detail::http_time limit;
        std::atomic<failure> broken_off = failure::none; // set with the lock
        bool over = false;                               // with the lock, as its thread's last act
        std::thread thread;
        ~request() {
            if (thread.joinable()) thread.join();
        }
    };
    enum class state { waiting, drawing, ended, failed };
    struct sequence {
        sched::ticket ticket;
        drawn so_far;
        std::size_t had = 0; // tokens at its start
        state is = state::waiting;
        detail::http_time since; // that it waits
        std::shared_ptr<request> by;
        // failed:
        failure why = failure::none;
        bool keeps = false; // what it has drawn
        std::string text;
        detail::http_time report_at;

        bool reports(detail::http_time now) const {
            return is == state::ended ||
                   (is == state::failed && (report_at <= now || (keeps && so_far.tokens.size() > had)));
        }
    };
    struct dropped {}; // nobody wants what arrives

    void check_prefix(const drawn& d) const {
        if (d.prompt.empty()) throw invalid_input("prompt_of", "gave no tokens");
        for (const std::int32_t id : d.prompt)
            if (id < 0 || (settings_.sampling.vocab > 0 && id >= settings_.sampling.vocab))
                throw invalid_input("prompt_of", "gave the id " + std::to_string(id));
        if (d.tokens.empty()) return;
        d.check();
        if (d.listed() != (settings_.sampling.list > 0) || d.kept() != settings_.sampling.kept_sets)
            throw invalid_input("prefix", "was drawn with other lists or kept sets");
    }

    // All of these with the lock, but where one is given.

    bool ready() const { return whole_ && !suspect_; }
    void launch(const std::shared_ptr<sequence>& s) {
        const index_t left = settings_.sampling.most_tokens - s->so_far.size();
        if (s->so_far.ended != ending::none || left <= 0) { // interrupted just before its end was told
            if (s->so_far.ended == ending::none) s->so_far.ended = ending::length;
            s->is = state::ended;
            return;
        }
        if (static_cast<int>(requests_.size()) >= settings_.most_requests)
            throw error("opd: " + std::to_string(requests_.size()) + " requests are under way, and most_requests is " +
                        std::to_string(settings_.most_requests));
        auto r = std::make_shared<request>();
        r->client = detail::new_client(at_);
        r->limit = detail::after(detail::http_clock::now(), settings_.total_seconds);
        r->id = name_ + std::to_string(++numbers_);
        request_text q = {
            detail::generation_of(settings_.dialect, s->so_far, settings_.sampling, r->id, settings_.model), left,
            weights_name(settings_.label, current_)};
        requests_.push_back(r);
        try {
            r->thread = std::thread([this, s, raw = r.get(), q = std::move(q)] { draw(*raw, s, q); });
        } catch (...) { // no more threads to be had
            requests_.pop_back();
            throw;
        }
        s->is = state::drawing, s->by = std::move(r);
        ++metrics_.requests;
    }
    void launch_waiting() {
        for (const auto& s : sequences_)
            if (s->is == state::waiting) try {
                    launch(s);
                } catch (const std::exception& e) {
                    fail(*s, failure::refused, e.what(), false, 0);
                }
    }
    void break_off(request& r, failure why) {
        failure none = failure::none;
        if (!r.over && r.broken_off.compare_exchange_strong(none, why)) to_break_.notify_all();
    }
    void interrupt() {
        for (const auto& s : sequences_)
            if (s->is == state::drawing) {
                break_off(*s->by, failure::cancelled);
                s->is = state::waiting, s->since = detail::http_clock::now();
                s->by.reset();
                ++metrics_.interrupted;
            }
    }
    std::shared_ptr<sequence> take_out(const sched::ticket& t) {
        const auto at =
            std::find_if(sequences_.begin(), sequences_.end(), [&](const auto& s) { return s->ticket == t; });
        if (at == sequences_.end()) return nullptr;
        auto s = std::move(*at);
        sequences_.erase(at);
        if (s->by) break_off(*s->by, failure::cancelled);
        s->by.reset();
        return s;
    }
    sched::finished_rollout<drawn> report_of(sequence& s, bool parked) const {
        sched::finished_rollout<drawn> f;
        f.ticket = s.ticket, f.parked = parked;
        f.versions = detail::versions_of(s.so_far, current_.version);
        if (!parked || !s.so_far.tokens.empty()) f.sequence = std::make_shared<const drawn>(std::move(s.so_far));
        return f;
    }
    void fail(sequence& s, failure why, std::string text, bool keeps, double retry_after) {
        s.is = state::failed, s.why = why, s.keeps = keeps, s.text = std::move(text);
        s.report_at = detail::after(detail::http_clock::now(), std::clamp(retry_after, settings_.rest_seconds, 1e6));
        s.by.reset();
    }
    void join_those_over(std::unique_lock<std::mutex>& lock) {
        std::list<std::shared_ptr<request>> gone; // joined without the lock
        for (auto i = requests_.begin(); i != requests_.end();) {
            const auto next = std::next(i);
            if ((*i)->over) gone.splice(gone.end(), requests_, i);
            i = next;
        }
        if (gone.empty()) return;
        lock.unlock();
        gone.clear();
        lock.lock();
    }
    /// The breaker's thread: what is broken off is stopped, again and again, in case it was about to connect.
    void break_off_all() {
        std::unique_lock lock(mutex_);
        while (!closing_) {
            std::vector<std::shared_ptr<httplib::Client>> clients;
            for (const auto& r : requests_)
                if (!r->over && r->broken_off != failure::none) clients.push_back(r->client);
            if (clients.empty()) {
                to_break_.wait(lock);
                continue;
            }
            lock.unlock(); // stop() waits for a connection in the making
            for (const auto& c : clients) c->stop();
            lock.lock();
            to_break_.wait_for(lock, std::chrono::milliseconds(20), [&] { return closing_; });
        }
    }

    // --- a request's thread

    struct request_text {
        serve::request ask;
        index_t most;
        std::string weights; // that the server is to have
    };
    detail::http_question question(const char* method, const std::string& path, const std::string& body) const {
        return {.method = method,
                .path = path,
                .body = body,
                .api_key = settings_.api_key,
                .connect_seconds = settings_.connect_seconds,
                .read_seconds = settings_.read_seconds,
                .most_bytes = settings_.most_answer_bytes};
    }
    void draw(request& r, const std::shared_ptr<sequence>& s, const request_text& q) {
        detail::block_sigpipe();
        detail::draw_reader reader(settings_.dialect, settings_.sampling, q.most);
        detail::event_lines lines(settings_.dialect, settings_.most_event_bytes);
        const bool streams = detail::streams(settings_.dialect, settings_.sampling);
        std::string whole, wrong;
        bool aborted = false, unwanted = false;
        const auto event = [&](std::string_view text) {
            const detail::draw_chunk c = reader.read(text);
            aborted = aborted || c.aborted;
            take(r, *s, c, reader, q.weights);
        };
        const auto guarded = [&](auto&& f) {
            try {
                f();
                return true;
            } catch (const dropped&) {
                unwanted = true;
            } catch (const std::exception& e) {
                wrong = e.what();
            }
            return false;
        };
        detail::http_reply got;
        if (!guarded([&] {
                detail::http_question ask = question("POST", q.ask.path, q.ask.body);
                got = detail::exchange(*r.client, at_, ask, r.broken_off, [&](const char* p, std::size_t n) {
                    return guarded([&] {
                        if (streams) return lines.feed({p, n}, event);
                        if (n > settings_.most_event_bytes - whole.size())
                            throw error("the answer has more than " + std::to_string(settings_.most_event_bytes) +
                                        " bytes");
                        whole.append(p, n);
                    });
                });
                if (got.why != failure::none) return;
                if (!streams) event(whole);
                reader.finish();
            }) &&
            !unwanted)
            got.why = failure::bad_answer;
        if (!wrong.empty()) got.why = failure::bad_answer, got.text = wrong;
        if (got.why == failure::none && !reader.over())
            got.why = failure::connection, got.text = "the answer stopped before the end";
        if (got.why == failure::none && aborted) got.why = failure::server_error, got.text = "aborted by the server";
        if (settings_.dialect == dialect::sglang && r.broken_off != failure::none && !reader.over())
            tell_of_abort(r.id);
        const std::lock_guard lock(mutex_);
        metrics_.received_bytes += static_cast<std::int64_t>(got.received);
        if (r.broken_off != failure::none) got.why = r.broken_off;
        ++metrics_.failures[static_cast<int>(got.why)];
        if (s->by.get() == &r && s->is == state::drawing) { // else nobody waits for it
            if (got.why == failure::none) {
                s->is = state::ended;
                s->by.reset();
            } else {
                if (got.why == failure::connection) suspect_ = true;
                fail(*s, got.why, settings_.url + ": " + got.text,
                     got.why != failure::bad_answer && got.why != failure::refused, got.retry_after);
            }
        }
        r.over = true;
        changed_.notify_all();
    }
    /// An event's tokens, with the weights that drew them.
    void take(request& r, sequence& s, const detail::draw_chunk& c, const detail::draw_reader& reader,
              const std::string& asked) {
        const std::lock_guard lock(mutex_);
        if (r.broken_off != failure::none || s.by.get() != &r) throw dropped();
        drawn& d = s.so_far;
        const bool resumes = settings_.mode == update_mode::resume;
        std::vector<version_span> spans;
        for (const auto& [begin, label] : c.labels) {
            const auto w = std::find_if(known_.begin(), known_.end(), [&, &name = label](const sched::weights& x) {
                return weights_name(settings_.label, x) == name;
            });
            if (resumes ? labelled_ && label != asked : w == known_.end()) {
                suspect_ = true; // it was restarted, or somebody else changed them
                throw error("the server has the weights '" + label.substr(0, 80) + "', not '" + asked + "'");
            }
            if (!resumes) spans.push_back({w->version, w->job, d.size() + begin});
        }
        if (!resumes && !c.more.tokens.empty() && !reader.spanned())
            throw error("the server does not say which weights drew each token (weight_versions)");
        if (resumes && !c.more.tokens.empty()) spans.push_back({current_.version, current_.job, d.size()});
        for (const version_span& v : spans) {
            if (!d.versions.empty() && v.version < d.versions.back().version)
                throw error("the server went back to earlier weights");
            if (d.versions.empty() || v.version != d.versions.back().version || v.job != d.versions.back().job)
                d.versions.push_back(v);
        }
        detail::append(d, c);
        metrics_.tokens += c.more.size();
    }
    void tell_of_abort(const std::string& id) const {
        detail::http_question ask = question("POST", "/abort_request", detail::json{{"rid", id}}.dump());
        ask.connect_seconds = ask.read_seconds = std::min(settings_.connect_seconds, 1.0);
        const std::atomic<failure> never = failure::none;
        try {
            detail::exchange(*detail::new_client(at_), at_, ask, never, [](const char*, std::size_t) { return true; });
        } catch (const std::exception&) { // it was a courtesy: nothing of it is wanted any more
        }
    }

    // --- weights; without the lock

    detail::http_reply call(const char* method, const std::string& path, const std::string& body,
                            detail::http_time limit, std::string& answer) const {
        detail::http_question ask = question(method, path, body);
        ask.read_seconds = std::max(detail::seconds_between(detail::http_clock::now(), limit), 0.001);
        ask.connect_seconds = std::min(ask.connect_seconds, ask.read_seconds);
        ask.most_bytes = std::size_t{1} << 20;
        const std::atomic<failure> never = failure::none;
        return detail::exchange(*detail::new_client(at_), at_, ask, never, [&](const char* p, std::size_t n) {
            answer.append(p, n);
            return true;
        });
    }
    bool make(const detail::control_call& c, detail::http_time limit) const {
        std::string answer;
        const detail::http_reply r = call("POST", c.path, c.body, limit, answer);
        if (c.optional && r.why == failure::refused) return false;
        std::string text = r.text;
        if (r.why == failure::none && c.success) {
            const detail::json said = detail::json::parse(answer, nullptr, false);
            if (!said.is_object() || said.value("success", detail::json()) != true)
                text = "no success: " + answer.substr(0, 300);
        }
        if (!text.empty()) throw error("opd: " + settings_.url + c.path + ": " + text);
        return true;
    }
    /// What the server calls its weights; empty: it does not say.
    std::string said_weights(detail::http_time limit) const {
        std::string answer;
        const char* path = settings_.dialect == dialect::vllm ? "/weight_info" : "/model_info";
        const detail::http_reply r = call("GET", path, "", limit, answer);
        if (r.why == failure::refused) return {};
        if (r.why != failure::none) throw error("opd: " + settings_.url + path + ": " + r.text);
        const detail::json said = detail::json::parse(answer, nullptr, false);
        const auto at = said.is_object() ? said.find("weight_version") : said.end();
        return said.is_object() && at != said.end() && at->is_string() ? at->get<std::string>() : std::string();
    }
    std::string path_of(const sched::weights& w) const {
        return w.job == 0 ? settings_.initial : settings_.folder + "/" + weights_name(settings_.label, w);
    }
    void put(const sched::weights& w, bool again) {
        bool labelled = false;
        std::exception_ptr failed;
        try {
            labelled = put(w);
        } catch (...) {
            failed = std::current_exception();
        }
        const std::lock_guard lock(mutex_);
        ++metrics_.updates;
        metrics_.failed_updates += failed != nullptr, metrics_.restored += !failed && again;
        if (failed) std::rethrow_exception(failed);
        labelled_ = labelled;
    }
    /// Whether the server has a name for them now.
    bool put(const sched::weights& w) const {
        const std::string path = path_of(w), name = weights_name(settings_.label, w);
        const detail::http_time limit = detail::after(detail::http_clock::now(), settings_.weights_seconds);
        const auto pause = [&](const std::string& what) {
            if (detail::http_clock::now() >= limit) throw error("opd: weights " + name + ": " + what);
            std::this_thread::sleep_for(std::chrono::milliseconds(10));
        };
        if (w.job != 0)
            while (!is_stable(path)) pause("no STABLE marker in " + settings_.folder);
        if (settings_.route == update_route::watched && w.job != 0) {
            std::string why = "the server does not load them"; // until the deadline it may be away too
            const auto loaded = [&] {
                try {
                    return said_weights(limit) == name;
                } catch (const error& e) {
                    why = std::string("the server does not load them: ") + e.what();
                    return false;
                }
            };
            while (!loaded()) pause(why);
            return true;
        }
        const detail::control_plan plan = detail::plan_of_update(settings_, path, name);
        std::exception_ptr failed;
        bool labelled = settings_.dialect == dialect::sglang;
        try {
            for (const detail::control_call& c : plan.calls) {
                const bool there = make(c, limit);
                if (c.optional) labelled = there;
            }
        } catch (...) {
            failed = std::current_exception();
        }
        for (const detail::control_call& c : plan.last) try {
                make(c, std::max(limit, detail::after(detail::http_clock::now(), settings_.connect_seconds + 1)));
            } catch (...) {
                if (!failed) failed = std::current_exception();
            }
        if (failed) std::rethrow_exception(failed);
        return labelled;
    }
    /// Whether a server that could not be reached, or names other weights, has the right ones; gives it those.
    void look_after_server(std::unique_lock<std::mutex>& lock) {
        const auto now = detail::http_clock::now();
        if (now >= look_at_) {
            const sched::weights w = current_;
            const bool labelled = labelled_;
            lock.unlock();
            bool has = false;
            std::string text;
            try {
                const std::string said = said_weights(detail::after(now, settings_.connect_seconds));
                has = labelled ? said == weights_name(settings_.label, w) : path_of(w).empty();
                if (!has && settings_.mode == update_mode::resume) {
                    const std::lock_guard again(mutex_);
                    interrupt();
                }
                if (!has) put(w, true);
                has = true;
            } catch (const std::exception& e) {
                text = e.what();
            }
            lock.lock();
            if (has) {
                suspect_ = false;
                launch_waiting();
                return;
            }
            trouble_ = std::move(text);
            look_at_ = detail::after(detail::http_clock::now(), settings_.rest_seconds);
        }
        for (const auto& s : sequences_)
            if (s->is == state::waiting && detail::after(s->since, settings_.down_seconds) <= now) {
                fail(*s, failure::connection, trouble_, true, 0);
                s->report_at = now;
            }
    }

    const rollout_settings settings_;
    const detail::base_url at_;
    std::string name_;         // of its requests
    mutable std::mutex mutex_; // of all that follows
    std::condition_variable changed_, to_break_;
    std::list<std::shared_ptr<request>> requests_;
    std::vector<std::shared_ptr<sequence>> sequences_;
    std::vector<sched::weights> known_;
    sched::weights current_;
    bool whole_ = false, suspect_ = false, labelled_ = false, closing_ = false;
    detail::http_time look_at_ = detail::http_time::min();
    std::string trouble_;
    std::uint64_t numbers_ = 0;
    rollout_metrics metrics_;
    std::jthread breaker_;
};

} // namespace opd::serve
