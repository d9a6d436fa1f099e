// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// build: tsan
// optimise: no
//
// Rollout by servers of both forms, against a server of our own: tokens, log-probs, lists, kept sets and versions are
// those of its policy, whatever breaks, and each sequence ends exactly once. Then as a stage under the thread driver
// and behind remote workers, where every sequence is learnt from once with faults of all kinds.
#include "support/property.hpp"
#include "support/rollout_server.hpp"
#include "trainer/scratch.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <doctest/doctest.h>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <span>
#include <stop_token>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "opd/sched/archive.hpp"
#include "opd/sched/mailbox.hpp"
#include "opd/sched/remote_driver.hpp"
#include "opd/sched/remote_worker.hpp"
#include "opd/sched/thread_driver.hpp"
#include "opd/serve/http_rollout.hpp"

using namespace opd;
using namespace opd::test;
namespace fs = std::filesystem;
using sched::ticket;
using sched::weights;
using serve::dialect;
using serve::drawn;
using serve::failure;
using serve::update_mode;

namespace {

struct weights_folder : scratch {
    void publish(const weights& w) const {
        serve::publish_weights(path, "opd", w, [&](const fs::path& to) { std::ofstream(to / "weights") << w.version; });
    }
};

std::vector<std::int32_t> prompt_of(std::uint64_t sample) {
    return {std::int32_t(1 + sample % 20), std::int32_t(1 + sample / 20 % 20), 5};
}
ticket ticket_of(std::uint64_t sample, std::uint32_t attempt = 1) {
    return {sample, std::uint32_t(sample), attempt, 0, 1, std::int32_t(sample)};
}
serve::rollout_settings settings_for(const rollout_server& server, const weights_folder& folder) {
    serve::rollout_settings s;
    s.url = server.url(), s.dialect = server.speaks, s.folder = folder.path.string();
    s.prompt_of = [](const ticket& t) { return prompt_of(t.sample); };
    s.sampling.most_tokens = 12, s.sampling.vocab = 24;
    s.connect_seconds = s.read_seconds = s.weights_seconds = 60; // what a loaded machine needs
    s.rest_seconds = s.quantum_seconds = 0.002;
    return s;
}
/// A sample whose first tokens are no end, under version 0.
std::uint64_t lasting() {
    for (std::uint64_t sample = 3;; ++sample) {
        std::vector<std::int32_t> prefix = prompt_of(sample);
        while (prefix.back() != 0 && prefix.size() < 10) prefix.push_back(toy_policy().step(0, prefix, 0, 0).token);
        if (prefix.back() != 0) return sample;
    }
}
/// Why it is not what the server's policy draws; empty: it is.
std::string wrong_with(const drawn& d, std::uint64_t sample, const serve::rollout_settings& s) {
    const toy_policy policy;
    std::vector<std::int32_t> prefix = prompt_of(sample);
    if (d.prompt != prefix) return "another prompt";
    d.check();
    for (index_t t = 0; t < d.size(); ++t) {
        const auto at = std::size_t(t);
        const toy_step right =
            policy.step(d.version_of(t), prefix, std::size_t(s.sampling.top_k), std::size_t(s.sampling.list));
        const std::string where = " at token " + std::to_string(t);
        if (d.tokens[at] != right.token) return "another token" + where;
        const bool filtered = s.dialect == dialect::vllm || s.sampling.kept_sets;
        if (d.log_mu[at] != float(filtered ? right.log_mu : right.log_p)) return "another log-prob" + where;
        if (s.sampling.kept_sets) {
            std::vector<std::int32_t> kept = right.kept;
            std::sort(kept.begin(), kept.end());
            if (kept != std::vector<std::int32_t>(d.kept_ids.begin() + d.kept_offsets[at],
                                                  d.kept_ids.begin() + d.kept_offsets[at + 1]))
                return "another kept set" + where;
        }
        if (s.sampling.list > 0 && right.best != std::vector<std::int32_t>(d.list_ids.begin() + d.list_offsets[at],
                                                                           d.list_ids.begin() + d.list_offsets[at + 1]))
            return "another list" + where;
        prefix.push_back(right.token);
    }
    const bool stop = d.size() > 0 && d.tokens.back() == 0;
    if (d.ended == serve::ending::stop && !stop) return "an end without its token";
    if (d.ended == serve::ending::length && d.size() != s.sampling.most_tokens) return "too short";
    return "";
}
using finished = sched::finished_rollout<drawn>;

/// Steps until so many have come back.
std::vector<finished> steps(serve::http_rollout& r, std::size_t n) {
    std::vector<finished> out;
    while (out.size() < n) r.step(out, {});
    return out;
}
std::string text_of(const std::exception_ptr& e) {
    try {
        std::rethrow_exception(e);
    } catch (const std::exception& x) {
        return x.what();
    }
}
rollout_fault fault(decltype(rollout_fault::does) does, int at = 0) {
    rollout_fault f;
    f.does = does, f.at = at;
    return f;
}

} // namespace

TEST_CASE("folders of weights: a marker last, names of jobs, and what is left of a crash") {
    const weights_folder root;
    const fs::path folder = root.path / "opd-3-7";
    CHECK_THROWS_AS(serve::publish_weights(root.path, "opd", {3, 7},
                                           [&](const fs::path& to) {
                                               std::ofstream(to / "half") << 1;
                                               CHECK_FALSE(fs::exists(folder));
                                               throw std::runtime_error("crash");
                                           }),
                    std::runtime_error);
    CHECK_FALSE(fs::exists(folder));
    fs::create_directories(folder); // of a crash before the marker
    std::ofstream(folder / "old") << 1;
    CHECK_FALSE(serve::is_stable(folder));
    root.publish({3, 7});
    CHECK(serve::is_stable(folder));
    CHECK_FALSE(fs::exists(folder / "old"));
    CHECK_FALSE(fs::exists(root.path / "opd-3-7.part"));
    std::ofstream(folder / "STABLE") << "opd-3-";
    CHECK_FALSE(serve::is_stable(folder)); // half a marker
    root.publish({3, 7});
    CHECK(serve::is_stable(folder));
    int written = 0;
    serve::publish_weights(root.path, "opd", {3, 7}, [&](const fs::path&) { ++written; });
    CHECK(written == 0); // it is there
    for (const std::uint64_t job : {8u, 9u}) root.publish({4, job});
    fs::create_directories(root.path / "other-1-1");
    fs::create_directories(root.path / "opd-x");
    serve::retire_weights(root.path, "opd", 9);
    CHECK_FALSE(fs::exists(folder));
    CHECK_FALSE(fs::exists(root.path / "opd-4-8"));
    CHECK(serve::is_stable(root.path / "opd-4-9"));
    CHECK(fs::exists(root.path / "other-1-1"));
    CHECK(fs::exists(root.path / "opd-x"));
}

TEST_CASE("settings, prompts and prefixes that cannot be") {
    rollout_server server(dialect::vllm);
    const weights_folder folder;
    const auto refuses = [&](auto&& change, const char* name) {
        serve::rollout_settings s = settings_for(server, folder);
        change(s);
        CHECK_THROWS_WITH(serve::http_rollout{s}, doctest::Contains(name));
    };
    refuses([](auto& s) { s.url = "https://x"; }, "TLS");
    refuses([](auto& s) { s.dialect = dialect::llama_cpp; }, "llama_cpp");
    refuses([](auto& s) { s.prompt_of = nullptr; }, "prompt_of");
    refuses([](auto& s) { s.folder = ""; }, "folder");
    refuses([](auto& s) { s.label = "a/b"; }, "label");
    refuses([](auto& s) { s.mode = update_mode::in_flight; }, "in_flight");
    refuses([](auto& s) { s.dialect = dialect::sglang, s.route = serve::update_route::sleep; }, "sleep");
    refuses([](auto& s) { s.most_requests = 0; }, "most_requests");
    refuses([](auto& s) { s.most_event_bytes = 0; }, "most_event_bytes");
    refuses([](auto& s) { s.most_answer_bytes = 0; }, "most_answer_bytes");
    refuses([](auto& s) { s.rest_seconds = 0; }, "rest_seconds");
    refuses([](auto& s) { s.sampling.most_tokens = 0; }, "most_tokens");
    refuses([](auto& s) { s.sampling.temperature = -1; }, "temperature");
    refuses([](auto& s) { s.sampling.top_p = 0; }, "top_p");
    refuses([](auto& s) { s.sampling.stop_ids = {-1}; }, "stop_ids");
    serve::rollout_settings s = settings_for(server, folder);
    s.prompt_of = [](const ticket& t) { return std::vector<std::int32_t>(t.sample, 24); };
    s.most_requests = 1;
    serve::http_rollout r(s);
    CHECK_THROWS_WITH(r.start(ticket_of(0), nullptr), doctest::Contains("no tokens"));
    CHECK_THROWS_WITH(r.start(ticket_of(1), nullptr), doctest::Contains("the id 24"));
    drawn prefix{.prompt = {1}, .tokens = {2}, .log_mu = {-1}};
    CHECK_THROWS_WITH(r.start(ticket_of(1), std::make_shared<drawn>(prefix)), doctest::Contains("no weights"));
    prefix.versions = {{0, 0, 0}}, prefix.kept_ids = {2}, prefix.kept_offsets = {0, 1};
    CHECK_THROWS_WITH(r.start(ticket_of(1), std::make_shared<drawn>(prefix)), doctest::Contains("kept sets"));
    CHECK(r.running() == 0);
    server.react = [](int, const json&) { return fault(rollout_fault::hangs); };
    r.install({0, 0});
    prefix.kept_ids = {}, prefix.kept_offsets = {0};
    r.start(ticket_of(1), std::make_shared<drawn>(prefix));
    CHECK_THROWS_WITH(r.start(ticket_of(2), std::make_shared<drawn>(prefix)), doctest::Contains("most_requests"));
    CHECK(r.running() == 1);
    CHECK_THROWS_WITH(r.park(ticket_of(9)), doctest::Contains("ticket"));
}

TEST_CASE("a response that contradicts itself is refused when it is read") {
    drawn d{.prompt = {1}, .tokens = {2, 3}, .log_mu = {-1, -2}, .versions = {{1, 4, 0}, {2, 5, 1}}};
    d.ended = serve::ending::stop;
    const auto read = [](const drawn& x) {
        sched::archive_writer out;
        out(x);
        drawn y;
        sched::archive_reader in(out.bytes);
        in(y);
        REQUIRE(in.done());
        return y;
    };
    const drawn same = read(d);
    CHECK(same.tokens == d.tokens);
    CHECK(same.versions == d.versions);
    CHECK(same.ended == d.ended);
    const auto refuses = [&](auto&& change) {
        drawn x = d;
        change(x);
        CHECK_THROWS_AS(read(x), invalid_input);
    };
    refuses([](drawn& x) { x.log_mu.pop_back(); });
    refuses([](drawn& x) { x.log_mu[0] = NAN; });
    refuses([](drawn& x) { x.log_mu[0] = -INFINITY; });
    refuses([](drawn& x) { x.tokens[0] = -1; });
    refuses([](drawn& x) { x.list_ids = {1}; });
    refuses([](drawn& x) { x.kept_ids = {1}, x.kept_offsets = {0, 2, 1}; });
    refuses([](drawn& x) { x.versions[0].begin = 1; });
    refuses([](drawn& x) { x.versions[1].begin = 2; });
    refuses([](drawn& x) { x.versions[1].version = 0; });
    refuses([](drawn& x) { x.versions.clear(); });
}

TEST_CASE("events that cannot be: refused, and what came before stands") {
    const serve::sampling how{.vocab = 24};
    const auto vllm = [](std::vector<int> ids, int count) {
        json content = json::array();
        for (const int id : ids)
            content.push_back({{"token", "token_id:" + std::to_string(id)}, {"logprob", -1}, {"top_logprobs", {}}});
        return json{{"choices", {{{"index", 0}, {"token_ids", ids}, {"logprobs", {{"content", content}}}}}},
                    {"usage", {{"completion_tokens", count}}}};
    };
    const auto sglang = [](std::vector<int> ids, int count) {
        json own = json::array();
        for (const int id : ids) own.push_back({-1, id, nullptr});
        return json{
            {"output_ids", ids},
            {"meta_info", {{"completion_tokens", count}, {"output_token_logprobs", own}, {"finish_reason", nullptr}}}};
    };
    const auto refuses = [&](dialect d, const std::vector<json>& before, const json& event, const char* text) {
        serve::detail::draw_reader r(d, how, 3);
        for (const json& e : before) r.read(e.dump());
        CHECK_THROWS_WITH_AS(r.read(event.dump()), doctest::Contains(text), serve::bad_answer);
    };
    const dialect v = dialect::vllm, g = dialect::sglang;
    refuses(v, {vllm({1, 2}, 2)}, vllm({3, 4}, 4), "more than the 3 tokens");
    refuses(g, {sglang({1, 2}, 2)}, sglang({1, 2, 3, 4}, 4), "more than the 3 tokens");
    refuses(v, {}, vllm({24}, 1), "the id 24");
    refuses(g, {}, sglang({24}, 1), "the id 24");
    refuses(g, {sglang({1, 2}, 2)}, sglang({1, 3, 4}, 3), "another token 1 than before");
    refuses(g, {sglang({1, 2}, 2)}, sglang({1}, 1), "counts 1 tokens");
    json e = vllm({1}, 1);
    e["choices"][0]["index"] = 1;
    refuses(v, {}, e, "not the first");
    e = vllm({1}, 1), e["choices"][0]["token_ids"] = {2};
    refuses(v, {}, e, "another token than it drew");
    e = sglang({1}, 1), e["output_ids"] = {2};
    refuses(g, {}, e, "another token than it drew");
    e = vllm({1}, 1), e["choices"][0]["finish_reason"] = "stop";
    refuses(v, {e}, vllm({2}, 2), "after its end");
    e["choices"][0]["finish_reason"] = "tired";
    refuses(v, {}, e, "'tired'");
    e = sglang({1}, 1), e["meta_info"]["finish_reason"] = {{"type", "length"}};
    refuses(g, {e}, sglang({1, 2}, 2), "after its end");
    refuses(v, {}, {{"error", {{"message", "no"}}}}, "is an error");
    e = sglang({1, 2}, 2), e["meta_info"]["weight_versions"] = {{{"version", "a"}, {"start", 1}, {"end", 2}}};
    refuses(g, {}, e, "leave tokens out");
    e["meta_info"]["weight_versions"] = {{{"version", "a"}, {"start", 0}, {"end", 1}}};
    refuses(g, {}, e, "another number of tokens");
    serve::detail::draw_reader r(v, how, 3);
    json silent = vllm({1}, 1);
    silent.erase("usage"), silent["choices"][0]["finish_reason"] = "stop";
    r.read(silent.dump());
    r.read("[DONE]");
    CHECK_THROWS_WITH(r.finish(), doctest::Contains("does not count"));
    CHECK_THROWS_WITH(r.read(silent.dump()), doctest::Contains("after its last event"));
}

// Random settings, weights that change while sequences run, sequences that are let go, parked, exported and resumed.
TEST_CASE("every sequence ends once, and is what the server's policy drew") {
    std::atomic<int> mixed = 0, parked = 0;
    property("of both forms",
             [&] {
                 std::mt19937_64 engine(*rc::gen::arbitrary<std::uint32_t>());
                 const auto below = [&](index_t n) { return index_t(engine() % std::uint64_t(n)); };
                 const weights_folder folder;
                 rollout_server server(below(2) ? dialect::sglang : dialect::vllm);
                 serve::rollout_settings s = settings_for(server, folder);
                 server.incremental = below(2) != 0, server.pace = below(2) ? 300 : 0;
                 s.sampling.top_k = below(2) ? 6 : 0, s.sampling.kept_sets = s.sampling.top_k > 0 && below(2);
                 s.sampling.list = below(3) * 2;
                 if (server.speaks == dialect::sglang && below(2)) s.mode = update_mode::in_flight;
                 if (server.speaks == dialect::vllm && below(3) == 0) s.route = serve::update_route::sleep;
                 serve::http_rollout r(s);
                 weights now{below(2), 0};
                 server.load(now.version, "default");
                 r.install(now);
                 const std::uint64_t n = 4 + std::uint64_t(below(6));
                 std::map<std::uint64_t, int> ended;
                 std::map<std::uint64_t, std::uint32_t> attempt;
                 std::uint64_t begun = 0, gone = 0;
                 const auto start = [&](std::uint64_t sample, std::shared_ptr<const drawn> prefix) {
                     r.start(ticket_of(sample, ++attempt[sample]), std::move(prefix));
                 };
                 std::vector<finished> out;
                 while (ended.size() + gone < n) {
                     const index_t what = below(8);
                     if (begun < n && what < 4) start(begun++, nullptr);
                     if (what == 4) {
                         now = {now.version + 1, now.job + 1 + std::uint64_t(below(2))};
                         folder.publish(now);
                         r.install(now);
                         RC_ASSERT(server.version() == now.version);
                         RC_ASSERT(!server.paused());
                     }
                     const std::uint64_t sample = std::uint64_t(below(index_t(n)));
                     if (what == 5 && sample < begun && ended.count(sample) == 0 && attempt[sample] > 0) {
                         const ticket t = ticket_of(sample, attempt[sample]);
                         if (below(2)) {
                             finished f = r.park(t); // at any moment, ended or not
                             ++parked;
                             RC_ASSERT(f.parked);
                             RC_ASSERT((f.sequence != nullptr) == (f.versions.tokens > 0));
                             if (f.sequence) RC_ASSERT(wrong_with(*f.sequence, sample, s) == "");
                             start(sample, f.sequence);
                         } else {
                             r.abort(t);
                             r.abort(t);
                             ++gone, attempt[sample] = 0;
                         }
                     }
                     if (what == 6) {
                         std::vector<sched::partial_rollout<drawn>> partials;
                         r.export_partials(partials);
                         for (const auto& p : partials) RC_ASSERT(wrong_with(*p.sequence, p.ticket.sample, s) == "");
                     }
                     out.clear();
                     r.step(out, {});
                     for (const finished& f : out) {
                         RC_ASSERT(!f.failed);
                         RC_ASSERT(!f.parked);
                         RC_ASSERT(f.ticket.attempt == attempt[f.ticket.sample]);
                         RC_ASSERT(ended.count(f.ticket.sample) == 0);
                         ended[f.ticket.sample] = 1;
                         RC_ASSERT(f.sequence->ended != serve::ending::none);
                         RC_ASSERT(wrong_with(*f.sequence, f.ticket.sample, s) == "");
                         double mean = 0;
                         for (index_t t = 0; t < f.sequence->size(); ++t) mean += double(f.sequence->version_of(t));
                         RC_ASSERT(std::abs(f.versions.mean - mean / double(f.sequence->size())) < 1e-9);
                         RC_ASSERT(f.versions.oldest == f.sequence->version_of(0));
                         RC_ASSERT(f.versions.newest == f.sequence->version_of(f.sequence->size() - 1));
                         RC_ASSERT(f.versions.newest <= now.version);
                         mixed += f.sequence->versions.size() > 1;
                     }
                 }
                 RC_ASSERT(r.running() == 0);
                 RC_ASSERT(r.metrics().ended == std::int64_t(n - gone));
                 RC_ASSERT(r.metrics().failed == 0);
             },
             {.cases = 25, .disable_shrink = true});
    MESSAGE(mixed << " of several weights, " << parked << " parked");
    CHECK(mixed > 0);
    CHECK(parked > 0);
}

TEST_CASE("what a request comes to: given back with its prefix, or failed, and why") {
    struct expectation {
        rollout_fault what;
        bool back; // given back, as it had drawn something
        const char* text;
    };
    rollout_fault overloaded = fault(rollout_fault::says), broken = overloaded, refused = overloaded;
    overloaded.status = 429, overloaded.headers = "Retry-After: 1\r\n", broken.status = 500, refused.status = 400;
    const expectation all[] = {
        {fault(rollout_fault::drops, 0), false, "connection"},
        {fault(rollout_fault::drops, 2), true, ""},
        {fault(rollout_fault::halts, 0), false, "not drawn"},
        {fault(rollout_fault::halts, 2), true, ""},
        {fault(rollout_fault::garbles, 0), false, "is not JSON"},
        {fault(rollout_fault::garbles, 2), false, "is not JSON"},
        {fault(rollout_fault::unscored, 1), false, "logprobs"},
        {fault(rollout_fault::sentinel, 1), false, "no log-prob of the token that it drew"},
        {fault(rollout_fault::giant, 1), false, "bytes"},
        {overloaded, false, "overloaded: "},
        {broken, false, "server error: "},
        {refused, false, "refused: "},
    };
    for (const dialect d : {dialect::vllm, dialect::sglang})
        for (const expectation& e : all) {
            CAPTURE(to_string(d));
            CAPTURE(int(e.what.does));
            CAPTURE(e.what.at);
            const weights_folder folder;
            rollout_server server(d);
            server.react = [&](int n, const json&) { return n == 0 ? e.what : rollout_fault{}; };
            serve::rollout_settings s = settings_for(server, folder);
            s.most_event_bytes = 1 << 16;
            serve::http_rollout r(s);
            r.install({0, 0});
            const std::uint64_t sample = lasting();
            const auto begin = std::chrono::steady_clock::now(); // the answer may be there before start() returns
            r.start(ticket_of(sample), nullptr);
            finished f = std::move(steps(r, 1)[0]);
            const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
            CHECK(r.running() == 0);
            if (!e.back) {
                REQUIRE(f.failed != nullptr);
                CHECK_MESSAGE(text_of(f.failed).find(e.text) != std::string::npos, text_of(f.failed));
                CHECK(f.sequence == nullptr);
                CHECK(r.metrics().failed == 1);
                if (e.what.status == 429) CHECK(seconds >= 1);
            } else {
                REQUIRE(f.parked);
                CHECK(f.versions.tokens == 2);
                CHECK(r.metrics().given_back == 1);
            }
            r.start(ticket_of(sample, 2), f.sequence);
            f = std::move(steps(r, 1)[0]);
            REQUIRE(f.sequence != nullptr);
            CHECK(wrong_with(*f.sequence, sample, s) == "");
            CHECK(f.sequence->ended != serve::ending::none);
            // only what was missing was asked for
            CHECK(server.asked().back().at(d == dialect::vllm ? "token_ids" : "input_ids").size() == (e.back ? 5 : 3));
        }
}

TEST_CASE("tokens that come twice are noticed, or do no harm") {
    for (const bool incremental : {false, true})
        for (const dialect d : {dialect::vllm, dialect::sglang}) {
            CAPTURE(incremental);
            CAPTURE(to_string(d));
            const weights_folder folder;
            rollout_server server(d);
            server.incremental = incremental;
            server.react = [](int, const json&) { return fault(rollout_fault::twice, 2); };
            const serve::rollout_settings s = settings_for(server, folder);
            serve::http_rollout r(s);
            r.install({0, 0});
            r.start(ticket_of(lasting()), nullptr);
            const finished f = std::move(steps(r, 1)[0]);
            const bool harmless = d == dialect::sglang && !incremental;
            REQUIRE((f.failed == nullptr) == harmless);
            if (harmless)
                CHECK(wrong_with(*f.sequence, lasting(), s) == "");
            else
                CHECK_MESSAGE(text_of(f.failed).find("counts") != std::string::npos, text_of(f.failed));
        }
}

TEST_CASE("silence, a deadline, an answer without end, and an abort that comes too late") {
    for (const dialect d : {dialect::vllm, dialect::sglang}) {
        CAPTURE(to_string(d));
        const weights_folder folder;
        rollout_server server(d);
        server.react = [](int n, const json&) {
            rollout_fault f = fault(n < 3 ? rollout_fault::hangs : rollout_fault::none, n == 1 ? 2 : 0);
            f.heeds = n >= 3;
            return f;
        };
        serve::rollout_settings s = settings_for(server, folder);
        s.read_seconds = 0.05;
        {
            serve::http_rollout r(s);
            r.install({0, 0});
            r.start(ticket_of(lasting()), nullptr);
            const finished f = std::move(steps(r, 1)[0]);
            REQUIRE(f.failed);
            CHECK(text_of(f.failed).find("timed out") != std::string::npos);
        }
        s.read_seconds = 60, s.total_seconds = 1;
        {
            serve::http_rollout r(s);
            r.install({0, 0});
            r.start(ticket_of(lasting()), nullptr);
            const finished f = std::move(steps(r, 1)[0]);
            REQUIRE(f.parked); // it had two tokens
            CHECK(f.versions.tokens == 2);
            CHECK(r.metrics().failures[int(failure::timed_out)] == 1);
        }
        s.total_seconds = 60, s.most_answer_bytes = 600;
        {
            serve::http_rollout r(s);
            r.install({0, 0});
            r.start(ticket_of(1), nullptr); // hangs, and hears of no abort
            while (server.generations() < 3) std::this_thread::yield();
            r.abort(ticket_of(1));
            CHECK(r.running() == 0);
            r.start(ticket_of(lasting()), nullptr);
            const finished f = std::move(steps(r, 1)[0]);
            REQUIRE(f.ticket.sample == lasting());
            REQUIRE(f.failed);
            CHECK(text_of(f.failed).find("longer than 600 bytes") != std::string::npos);
            server.let_go(); // it goes on, for nobody
            std::vector<finished> none;
            for (int i = 0; i < 5; ++i) r.step(none, {});
            CHECK(none.empty());
            if (d == dialect::sglang) {
                while (server.aborted().size() < 2) std::this_thread::yield(); // and the one whose time was over
                CHECK(server.aborted().size() == 2);
            }
        }
    }
}

TEST_CASE("weights that cannot be changed: the server goes on, the reason is thrown, the next ones are installed") {
    struct expectation {
        const char* path;
        bool sglang;
        control_fault what;
        const char* text;
    };
    const expectation all[] = {
        {"/collective_rpc", false, {.status = 500}, "status 500"},
        {"/collective_rpc", false, {.hangs = true}, "no answer in time"},
        {"/pause?mode=abort&clear_cache=true", false, {.status = 503}, "status 503"},
        {"/reset_prefix_cache", false, {.status = 500}, "/reset_prefix_cache"},
        {"/update_weights_from_disk", true, {.status = 500}, "status 500"},
        {"/update_weights_from_disk", true, {.fails = true}, "no success"},
        {"/update_weights_from_disk", true, {.hangs = true}, "no answer in time"},
        {"/pause_generation", true, {.status = 404}, "status 404"},
    };
    for (const expectation& e : all) {
        CAPTURE(e.path);
        const weights_folder folder;
        rollout_server server(e.sglang ? dialect::sglang : dialect::vllm);
        std::atomic<bool> bad = true;
        server.control = [&](int, const std::string& path) { return bad && path == e.path ? e.what : control_fault{}; };
        serve::rollout_settings s = settings_for(server, folder);
        if (e.what.hangs) s.weights_seconds = 1;
        server.pace = 20000;
        serve::http_rollout r(s);
        r.install({0, 0});
        r.start(ticket_of(lasting()), nullptr);
        server.await_tokens(1);
        folder.publish({1, 1});
        CHECK_THROWS_WITH(r.install({1, 1}), doctest::Contains(e.text));
        CHECK_FALSE(server.paused());
        CHECK(r.running() == 1); // it waits for weights, whichever
        bad = false;
        server.let_go();
        if (e.what.hangs) std::this_thread::sleep_for(std::chrono::milliseconds(100));
        folder.publish({2, 2});
        CHECK_NOTHROW(r.install({2, 2}));
        const finished f = std::move(steps(r, 1)[0]);
        REQUIRE(f.sequence);
        CHECK(wrong_with(*f.sequence, lasting(), s) == "");
        CHECK(f.versions.newest == 2);
        CHECK(r.metrics().failed_updates == 1);
        CHECK(r.metrics().interrupted == 1);
    }
}

TEST_CASE("weights without marker, weights that a server looks for by itself, a server without labels") {
    const weights_folder folder;
    for (const dialect d : {dialect::vllm, dialect::sglang}) {
        rollout_server server(d);
        serve::rollout_settings s = settings_for(server, folder);
        s.weights_seconds = 0.03;
        {
            serve::http_rollout r(s);
            fs::create_directories(folder.path / "opd-5-5");
            CHECK_THROWS_WITH(r.install({5, 5}), doctest::Contains("STABLE"));
            CHECK(server.controls().empty());
        }
        s.route = serve::update_route::watched, s.weights_seconds = 0.5;
        folder.publish({6, 6});
        {
            serve::http_rollout r(s);
            CHECK_THROWS_WITH(r.install({6, 6}), doctest::Contains("does not load them"));
        }
        s.weights_seconds = 60;
        serve::http_rollout r(s);
        std::jthread sidecar([&] {
            std::this_thread::sleep_for(std::chrono::milliseconds(30));
            server.load(6, "opd-6-6");
        });
        r.install({6, 6});
        sidecar.join();
        r.start(ticket_of(lasting()), nullptr);
        const finished f = std::move(steps(r, 1)[0]);
        REQUIRE(f.sequence);
        CHECK(wrong_with(*f.sequence, lasting(), s) == "");
        CHECK(f.versions.oldest == 6);
        CHECK(server.controls().empty());

        rollout_server old(d);
        old.labels = false;
        serve::http_rollout q(settings_for(old, folder));
        q.install({6, 6});
        q.start(ticket_of(4), nullptr);
        const finished g = std::move(steps(q, 1)[0]);
        REQUIRE(g.sequence);
        CHECK(wrong_with(*g.sequence, 4, settings_for(old, folder)) == "");
    }
}

TEST_CASE("in_flight: a server that does not say which weights drew what is not believed") {
    const weights_folder folder;
    rollout_server server(dialect::sglang);
    server.spans = false;
    serve::rollout_settings s = settings_for(server, folder);
    s.mode = update_mode::in_flight;
    serve::http_rollout r(s);
    r.install({0, 0});
    r.start(ticket_of(lasting()), nullptr);
    const finished f = std::move(steps(r, 1)[0]);
    REQUIRE(f.failed);
    CHECK(text_of(f.failed).find("weight_versions") != std::string::npos);
}

TEST_CASE("a server that was restarted gets its weights again before anything is drawn from others") {
    for (const dialect d : {dialect::vllm, dialect::sglang})
        for (const bool labels : {true, false}) {
            CAPTURE(to_string(d));
            CAPTURE(labels);
            const weights_folder folder;
            rollout_server server(d);
            server.labels = labels;
            const serve::rollout_settings s = settings_for(server, folder);
            serve::http_rollout r(s);
            folder.publish({3, 1});
            r.install({3, 1});
            server.load(0, "default"); // with what it began with
            server.deaf = 2;           // and for a while nobody is there
            for (std::uint64_t sample = 1; sample < 5; ++sample) r.start(ticket_of(sample), nullptr);
            std::map<std::uint64_t, std::uint32_t> attempt;
            for (std::size_t ended = 0; ended < 4;)
                for (const finished& f : steps(r, 1)) {
                    if (!f.failed && !f.parked) {
                        ++ended;
                        // without labels what was under way when it came back cannot be told
                        if (labels && d == dialect::sglang) CHECK(wrong_with(*f.sequence, f.ticket.sample, s) == "");
                        CHECK(f.versions.oldest == 3);
                        continue;
                    }
                    r.start(ticket_of(f.ticket.sample, 2 + ++attempt[f.ticket.sample]), f.sequence);
                }
            CHECK(r.metrics().restored >= 1);
            CHECK(server.version() == 3);
        }
}

TEST_CASE("a server that is gone: what waits for it fails, after down_seconds and not before rest_seconds") {
    const weights_folder folder;
    std::optional<rollout_server> server(std::in_place, dialect::vllm);
    serve::rollout_settings s = settings_for(*server, folder);
    s.rest_seconds = 0.02, s.down_seconds = 0.1;
    serve::http_rollout r(s);
    r.install({0, 0});
    server.reset();
    const auto begin = std::chrono::steady_clock::now();
    r.start(ticket_of(1), nullptr);
    const auto seconds = [&] {
        return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    };
    finished f = std::move(steps(r, 1)[0]);
    REQUIRE(f.failed);
    CHECK(seconds() >= 0.02);
    r.start(ticket_of(2), nullptr); // is not even sent
    f = std::move(steps(r, 1)[0]);
    REQUIRE(f.failed);
    CHECK(seconds() >= 0.12);
    CHECK(r.metrics().requests == 1);
    CHECK_THROWS_WITH(r.install({0, 0}), doctest::Contains("the connection failed"));
}

// --- under the scheduler

namespace {

using namespace opd::sched;

struct toy_score {
    std::int64_t tokens = 0;
    template <class A>
    void fields(A& a) {
        a(tokens);
    }
};
struct counting_teacher {
    using scored_type = toy_score;
    std::vector<std::shared_ptr<const toy_score>> score(std::span<const std::shared_ptr<const drawn>> rolled,
                                                        std::stop_token) {
        std::vector<std::shared_ptr<const toy_score>> r;
        for (const auto& d : rolled) r.push_back(std::make_shared<toy_score>(toy_score{d->size()}));
        return r;
    }
};
/// Learns by checking, and publishes folders.
struct checking_learner {
    const weights_folder& folder;
    const serve::rollout_settings& how;
    std::map<sample_t, int>& learnt;
    std::vector<std::string>& complaints;
    int& mixed;
    index_t tau;

    index_t train(std::span<const sequence_view<drawn, toy_score>> batch, const train_call& call, std::stop_token) {
        for (const auto& s : batch) {
            ++learnt[s.ticket.sample];
            mixed += s.rolled->versions.size() > 1;
            const std::string wrong = wrong_with(*s.rolled, s.ticket.sample, how);
            if (!wrong.empty()) complaints.push_back(wrong);
            if (s.scored->tokens != s.rolled->size()) complaints.push_back("another's score");
            if (s.rolled->ended == serve::ending::none) complaints.push_back("no end");
            if (call.from.version - s.start > tau) complaints.push_back("older than tau");
            if (s.versions.newest > call.from.version) complaints.push_back("a token of weights to come");
        }
        folder.publish(call.makes());
        return 1;
    }
};
struct invariants {
    void event(double, const sched::event&, const actions&, const scheduler& s) { s.check_invariants(); }
};

rollout_fault some_fault(int n) {
    rollout_fault f;
    if (n >= 90) return f; // it is well for good
    if (n % 13 == 1) f = fault(rollout_fault::drops, n % 4);
    if (n % 13 == 3) f = fault(rollout_fault::garbles, n % 4);
    if (n % 13 == 4) f = fault(rollout_fault::twice, 1);
    if (n % 13 == 6) f = fault(rollout_fault::unscored, 1);
    if (n % 13 == 7) f = fault(rollout_fault::sentinel, 1);
    if (n % 13 == 8) f = fault(rollout_fault::giant, 1);
    if (n % 13 == 9) f = fault(rollout_fault::halts, n % 4);
    if (n % 13 == 10) f = fault(rollout_fault::hangs, n % 4);
    if (n % 13 == 11) f = fault(rollout_fault::says), f.status = n % 2 ? 500 : 429;
    f.heeds = n % 5 != 2;
    return f;
}

settings schedule_of(index_t sequences) {
    async streaming;
    streaming.tau = 2, streaming.policy = staleness_policy::in_order;
    settings s;
    s.batch = 8, s.schedule = streaming, s.sequences = sequences, s.teacher_batch = 4, s.teacher_flush = 0.0005;
    s.rollout_attempts = 100000, s.fruitless_steps = 1000; // whatever the machine's load
    s.most_workers = 8, s.most_slots = 16;
    return s;
}

struct served_run {
    weights_folder folder;
    std::vector<std::unique_ptr<rollout_server>> servers;
    serve::rollout_settings how;
    std::map<sample_t, int> learnt; // the learner's thread alone, as are:
    std::vector<std::string> complaints;
    int mixed = 0;

    served_run(dialect d, update_mode mode) {
        for (int i = 0; i < 2; ++i) {
            servers.push_back(std::make_unique<rollout_server>(d));
            servers.back()->pace = 200;
            servers.back()->react = [](int n, const json&) { return some_fault(n); };
            servers.back()->control = [](int n, const std::string&) {
                return n % 17 == 9 ? control_fault{.status = 500} : control_fault{};
            };
        }
        how = settings_for(*servers[0], folder);
        how.mode = mode, how.read_seconds = 0.1, how.most_event_bytes = 1 << 16;
        how.sampling.top_k = 6, how.sampling.kept_sets = d == dialect::sglang, how.sampling.list = 2;
    }
    std::shared_ptr<serve::http_rollout> worker(std::size_t i) {
        serve::rollout_settings s = how;
        s.url = servers[i]->url();
        return std::make_shared<serve::http_rollout>(s);
    }
    checking_learner learner(index_t tau) { return {folder, how, learnt, complaints, mixed, tau}; }
    void check(index_t sequences) {
        CHECK(learnt.size() == std::size_t(sequences));
        for (const auto& [sample, times] : learnt) {
            CAPTURE(sample);
            CHECK(times == 1);
        }
        for (const std::string& c : complaints) FAIL_CHECK(c);
        CHECK(mixed > 0);
    }
};

} // namespace

TEST_CASE("the call") {
    rollout_server server(dialect::sglang);
    const weights_folder folder;
    std::map<sample_t, int> learnt;
    std::vector<std::string> complaints;
    int mixed = 0;
    thread_driver<serve::http_rollout, counting_teacher, checking_learner> driver(schedule_of(16));
    // [call]
    serve::rollout_settings how;
    how.url = server.url(), how.dialect = dialect::sglang;
    how.prompt_of = [](const ticket& t) { return prompt_of(t.sample); };
    how.folder = folder.path.string(); // the learner: serve::publish_weights(folder, "opd", call.makes(), write)
    driver.add_rollout(std::make_shared<serve::http_rollout>(how), 6);
    // [/call]
    driver.add_teacher(std::make_shared<counting_teacher>());
    driver.set_learner(std::make_shared<checking_learner>(checking_learner{folder, how, learnt, complaints, mixed, 2}));
    CHECK(driver.run().completed);
    CHECK(learnt.size() == 16);
    CHECK(complaints.empty());
}

TEST_CASE("under the thread driver, with every fault, a run completes and learns from each sequence once") {
    const std::pair<dialect, update_mode> all[] = {{dialect::vllm, update_mode::resume},
                                                   {dialect::sglang, update_mode::resume},
                                                   {dialect::sglang, update_mode::in_flight}};
    for (const auto& [d, mode] : all) {
        CAPTURE(to_string(d));
        CAPTURE(int(mode));
        served_run run(d, mode);
        invariants observer;
        const settings how = schedule_of(96);
        thread_driver<serve::http_rollout, counting_teacher, checking_learner> driver(how);
        for (std::size_t i = 0; i < 2; ++i) driver.add_rollout(run.worker(i), 6);
        driver.add_teacher(std::make_shared<counting_teacher>());
        driver.set_learner(std::make_shared<checking_learner>(run.learner(2)));
        driver.observe(observer);
        const run_report report = driver.run();
        CHECK(report.completed);
        CHECK(report.totals.consumed == 96);
        CHECK(report.totals.parked > 0);
        CHECK(report.totals.retries > 0);
        CHECK(report.discarded.empty());
        CHECK(report.left_behind.empty());
        CHECK(report.observer_exceptions == 0);
        run.check(96);
    }
}

namespace {

/// Frames between threads, none of them lost.
struct post_office {
    std::mutex mutex;
    std::map<std::string, std::deque<std::pair<std::string, std::string>>> boxes;
    void put(const std::string& to, std::string from, std::string frame) {
        const std::lock_guard lock(mutex);
        boxes[to].emplace_back(std::move(from), std::move(frame));
    }
    std::deque<std::pair<std::string, std::string>> take(const std::string& to) {
        const std::lock_guard lock(mutex);
        return std::exchange(boxes[to], {});
    }
};
struct to_workers {
    post_office& office;
    void send(const std::string& peer, std::string frame) { office.put(peer, "", std::move(frame)); }
};
struct to_scheduler {
    post_office& office;
    std::string me;
    void send(std::string frame) { office.put("", me, std::move(frame)); }
};
using command_type = worker_command<drawn, toy_score>;
using reply_type = worker_reply<drawn, toy_score>;
struct mailboxes {
    sched::detail::mailbox<command_type> in;
    sched::detail::mailbox<reply_type> out;
    bool receive(std::vector<command_type>& all, bool wait) {
        in.receive(all, wait);
        return true;
    }
    void send(reply_type r) { out.post(std::move(r)); }
};
struct no_hooks {};
double now_seconds() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
/// A worker's process, as two threads.
template <class Loop>
std::jthread process(post_office& office, stage what, std::int32_t number, std::int32_t slots, Loop loop) {
    return std::jthread([&office, what, number, slots, loop] {
        to_scheduler wire{office, std::string(name_of(what)) + std::to_string(number)};
        remote_worker<drawn, toy_score, to_scheduler> worker(what, number, slots, remote_options{}, wire);
        mailboxes boxes;
        std::jthread stage_thread([&] { loop(boxes); });
        std::vector<command_type> commands;
        std::vector<reply_type> replies;
        while (!worker.over() || !commands.empty()) {
            for (auto& [from, frame] : office.take(wire.me)) worker.hear(frame, now_seconds());
            commands.clear(), replies.clear();
            worker.take(commands);
            for (command_type& c : commands) boxes.in.post(std::move(c));
            boxes.out.receive(replies, true, std::chrono::steady_clock::now() + std::chrono::milliseconds(1));
            for (const reply_type& r : replies) worker.say(r);
            worker.tick(now_seconds());
        }
    });
}

} // namespace

TEST_CASE("behind remote workers: responses travel as bytes, and are what was drawn") {
    served_run run(dialect::sglang, update_mode::resume);
    post_office office;
    to_workers wire{office};
    no_hooks hooks;
    remote_driver<drawn, toy_score, to_workers, no_hooks> driver(schedule_of(64), remote_options{}, 1, wire, hooks);
    std::vector<std::jthread> processes;
    for (int i = 0; i < 2; ++i)
        processes.push_back(process(office, stage::rollout, i, 6, [&run, i](mailboxes& boxes) {
            rollout_actor<serve::http_rollout, toy_score> actor(run.worker(std::size_t(i)), i);
            run_rollout(actor, boxes);
        }));
    processes.push_back(process(office, stage::teacher, 0, 1, [](mailboxes& boxes) {
        counting_teacher teacher;
        run_teacher<counting_teacher, drawn>(teacher, 0, boxes);
    }));
    processes.push_back(process(office, stage::learner, 0, 1, [&run](mailboxes& boxes) {
        checking_learner learner = run.learner(2);
        run_learner<checking_learner, drawn, toy_score>(learner, boxes);
    }));
    while (!driver.done(now_seconds())) {
        for (auto& [from, frame] : office.take("")) driver.hear(from, frame, now_seconds());
        driver.tick(now_seconds());
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    processes.clear();
    run.check(64);
    CHECK(driver.counts().unfit == 0);
    CHECK(driver.counts().refused == 0);
}
