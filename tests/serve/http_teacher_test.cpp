// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// build: tsan, whole-sanitize
// optimise: no
//
// A teacher over HTTP against a server that hangs, answers half, closes, refuses, is overloaded, lies, and comes back:
// every sequence is scored as the law says or has a reason, nothing is scored twice, at most so many requests are under
// way, and what hangs is broken off. Gates in place of waits. As a stage under sync and async schedules: what was
// rolled out is learnt from exactly once.
#include "sched/toy_stages.hpp"
#include "support/generators.hpp"
#include "support/teacher_server.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <doctest/doctest.h>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <stop_token>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "opd/serve/http_teacher.hpp"
#include "opd/serve/stage.hpp"
#include "opd/teacher_probe.hpp"

using namespace opd;
using namespace opd::test;
using serve::dialect;
using serve::failure;

namespace {

serve::http_settings settings_for(const std::vector<const teacher_server*>& servers) {
    serve::http_settings s;
    for (const teacher_server* server : servers) s.urls.push_back(server->url());
    s.dialect = servers[0]->speaks;
    s.what.vocab = 32;
    s.connect_seconds = 60, s.read_seconds = 60, s.total_seconds = 600; // what a loaded machine needs
    s.backoff_seconds = 0.001, s.most_backoff_seconds = 0.002, s.quarantine_seconds = 0.002;
    return s;
}
std::vector<serve::sequence> some_sequences(index_t n, std::uint64_t seed = 1) {
    numbers u(seed);
    std::vector<serve::sequence> all;
    for (index_t i = 0; i < n; ++i) {
        serve::sequence s;
        for (index_t l = 4 + u.below(8); l > 0; --l) s.tokens.push_back(std::int32_t(u.below(30)));
        s.from = u.below(4);
        all.push_back(std::move(s));
    }
    return all;
}
bool right(const serve::sequence& s, const serve::scores& got, const toy_law& law = {}) {
    if (got.from != s.from || index_t(got.log_q.size()) != s.scored()) return false;
    for (std::size_t t = 0; t < got.log_q.size(); ++t) {
        const auto p = std::size_t(s.from) + t;
        if (p == 0) { // it has no prefix
            if (got.scored[0] != 0 || !std::isnan(got.log_q[0])) return false;
            continue;
        }
        if (got.log_q[t] != float(law.log_probs({s.tokens.data(), p})[std::size_t(s.tokens[p])])) return false;
    }
    return true;
}
void check_all_right(const std::vector<serve::sequence>& s, const std::vector<serve::outcome>& r) {
    REQUIRE(r.size() == s.size());
    for (std::size_t i = 0; i < s.size(); ++i) {
        CAPTURE(r[i].text);
        REQUIRE(r[i]);
        CHECK(right(s[i], *r[i].scores));
    }
}
bool holds(const json& asked, std::int32_t id) {
    const std::string text = asked.dump();
    return text.find("," + std::to_string(id) + ",") != std::string::npos ||
           text.find("," + std::to_string(id) + "]") != std::string::npos;
}
reaction says(int status, std::string headers = {}, std::string body = "{\"detail\": \"no\"}") {
    return {reaction::says, status, std::move(headers), std::move(body)};
}

} // namespace

TEST_CASE("every dialect, over HTTP, at most so many at once") {
    for (const dialect d : {dialect::vllm, dialect::sglang, dialect::llama_cpp, dialect::openai_echo}) {
        CAPTURE(to_string(d));
        teacher_server server(d);
        serve::http_settings how = settings_for({&server});
        how.concurrency = 3, how.batch = 2, how.api_key = "key", how.what.model = "m";
        const std::vector<serve::sequence> sequences = some_sequences(21);
        serve::http_teacher teacher(how);
        std::vector<std::vector<serve::outcome>> r(3);
        {
            std::vector<std::jthread> threads; // who share its limit
            for (auto& mine : r) threads.emplace_back([&] { mine = teacher.score(sequences); });
        }
        for (const auto& mine : r) check_all_right(sequences, mine);
        const int requests = d == dialect::llama_cpp ? 63 : 33;
        CHECK(server.requests() == requests);
        CHECK(server.most_at_once() <= 3);
        CHECK(server.last_head().find("Authorization: Bearer key\r\n") != std::string::npos);
        CHECK(server.asked().front().at("model") == "m");
        const serve::http_metrics m = teacher.metrics();
        CHECK(m.requests == requests);
        CHECK(m.failures[0] == requests);
        CHECK(m.scored == 63);
        CHECK(m.retries == 0);
        CHECK(m.given_up == 0);
        std::int64_t tokens = 0;
        for (const auto& s : sequences) tokens += 3 * (s.scored() - (s.from == 0));
        CHECK(m.tokens == tokens);
        CHECK(m.received_bytes > m.tokens);
        CHECK(m.sent_bytes > 0);
        CHECK(m.busy_seconds > 0);
    }
}

TEST_CASE("the call") {
    teacher_server server(dialect::vllm), replica(dialect::vllm);
    const std::vector<serve::sequence> sequences = some_sequences(9);
    std::stop_token stop;
    // [call]
    opd::serve::http_settings settings;
    settings.urls = {server.url(), replica.url()}; // http://host[:port][/prefix]
    settings.dialect = opd::serve::dialect::vllm;
    settings.what.top_k = 20;
    opd::serve::http_teacher teacher(settings);
    const std::vector<opd::serve::outcome> scored = teacher.score(sequences, stop);
    for (const opd::serve::outcome& o : scored)
        if (!o) std::printf("%s: %s after %d tries\n", o.url.c_str(), o.text.c_str(), o.tries);
    // [/call]
    check_all_right(sequences, scored);
    CHECK(server.requests() > 0); // 3 requests, in turn
    CHECK(replica.requests() > 0);
    CHECK(server.requests() + replica.requests() == 3);
}

TEST_CASE("what fails once is scored at the second try, and only that") {
    struct fault {
        const char* name;
        failure why;
        reaction what;
    };
    const auto edit = [](std::function<void(json&)> f) {
        reaction r;
        r.edit = std::move(f);
        return r;
    };
    const auto entries = [](json& a) -> json& { return a["choices"][0]["prompt_logprobs"]; };
    const fault faults[] = {
        {"closes", failure::connection, {reaction::closes}},
        {"half a body", failure::connection, {reaction::halves}},
        {"500", failure::server_error, says(500)},
        {"502 in HTML", failure::server_error, says(502, "", "<html>bad gateway</html>")},
        {"503", failure::server_error, says(503)},
        {"429", failure::overloaded, says(429)},
        {"half a JSON", failure::bad_answer, says(200, "", "{\"choices\": [{\"index\": 0, \"prompt_lo")},
        {"NaN", failure::bad_answer, says(200, "", "{\"choices\": [{\"index\": 0, \"prompt_logprobs\": [NaN]}]}")},
        {"empty", failure::bad_answer, says(200, "", "")},
        {"another JSON", failure::bad_answer, says(200, "", "[1, 2, 3]")},
        {"too short", failure::bad_answer, edit([&](json& a) { entries(a).erase(1); })},
        {"a logit", failure::bad_answer, edit([&](json& a) {
             for (auto& [key, x] : entries(a)[3].items()) x["logprob"] = 7.5;
         })},
        {"a gap", failure::bad_answer, edit([&](json& a) { entries(a)[3] = nullptr; })},
        {"off by one", failure::bad_answer, edit([&](json& a) {
             entries(a).erase(1);
             entries(a).push_back(entries(a).back());
         })},
        {"an error", failure::bad_answer, edit([](json& a) {
             a = {{"error", "engine is dead"}};
         })},
        {"too long", failure::bad_answer, edit([](json& a) { a["padding"] = std::string(2000000, 'x'); })},
    };
    for (const fault& f : faults) {
        CAPTURE(f.name);
        teacher_server server(dialect::vllm);
        server.react = [&](int n, const json&) { return n == 1 ? f.what : reaction{}; };
        serve::http_settings how = settings_for({&server});
        how.concurrency = 1, how.batch = 1, how.most_answer_bytes = 1 << 20;
        const auto sequences = some_sequences(4);
        serve::http_teacher teacher(how);
        const auto r = teacher.score(sequences);
        check_all_right(sequences, r);
        CHECK(server.requests() == 5);
        int again = 0;
        for (const auto& o : r)
            if (o.tries == 2) {
                ++again;
                CHECK(o.why == f.why);
                CHECK(o.text != "");
                CHECK(o.url == server.url());
            } else {
                CHECK(o.tries == 1);
                CHECK(o.why == failure::none);
            }
        CHECK(again == 1);
        CHECK(teacher.metrics().retries == 1);
        CHECK(teacher.metrics().failures[int(f.why)] == 1);
    }
}

TEST_CASE("of half an answer the whole sequences stay, the others are asked for again") {
    teacher_server server(dialect::sglang);
    server.react = [](int n, const json&) {
        reaction r;
        if (n == 0)
            r.edit = [](json& a) {
                a.erase(3);
                a[1]["meta_info"]["input_token_logprobs"][2][0] = nullptr;
            };
        return r;
    };
    serve::http_settings how = settings_for({&server});
    how.batch = 4;
    const auto sequences = some_sequences(4);
    serve::http_teacher teacher(how);
    const auto r = teacher.score(sequences);
    check_all_right(sequences, r);
    REQUIRE(server.requests() == 2);
    CHECK(server.asked()[1]["input_ids"] == json({sequences[1].tokens, sequences[3].tokens}));
    CHECK(r[0].tries == 1);
    CHECK(r[1].tries == 2);
    CHECK(r[1].text.find("was not scored") != std::string::npos);
    CHECK(r[3].text.find("leaves it out") != std::string::npos);

    how.whole = false; // a gap is then an answer, and marked
    server.react = [](int, const json&) {
        reaction r;
        r.edit = [](json& a) { a[1]["meta_info"]["input_token_logprobs"][2][0] = nullptr; };
        return r;
    };
    const auto gaps = serve::http_teacher(how).score(sequences);
    REQUIRE(gaps[1]);
    CHECK(gaps[1].tries == 1);
    CHECK(gaps[1].scores->missing() == 1);
}

TEST_CASE("a refused sequence is found among others and given up; they are scored") {
    teacher_server server(dialect::vllm);
    server.react = [](int, const json& q) { return holds(q, 31) ? says(400, "", "too long") : reaction{}; };
    serve::http_settings how = settings_for({&server});
    how.batch = 5, how.concurrency = 1;
    auto sequences = some_sequences(5);
    sequences[2].tokens.back() = 31;
    serve::http_teacher teacher(how);
    const auto r = teacher.score(sequences);
    for (std::size_t i = 0; i < 5; ++i) {
        CHECK(bool(r[i]) == (i != 2));
        CHECK(r[i].tries == 1);
    }
    CHECK(r[2].why == failure::refused);
    CHECK(r[2].text == "status 400: too long");
    CHECK(server.requests() == 6);
    CHECK(teacher.metrics().given_up == 1);
    CHECK(teacher.metrics().quarantines == 0); // it answers
}

TEST_CASE("tries end") {
    teacher_server server(dialect::vllm);
    server.react = [](int, const json&) { return says(500); };
    serve::http_settings how = settings_for({&server});
    how.tries = 4;
    const auto r = serve::http_teacher(how).score(some_sequences(1));
    CHECK_FALSE(r[0]);
    CHECK(r[0].why == failure::server_error);
    CHECK(r[0].tries == 4);
    CHECK(r[0].text.find("given up after 4 tries") != std::string::npos);
    CHECK(r[0].text.find("the try before") == std::string::npos); // it failed alike
    CHECK(server.requests() == 4);
    server.react = [&](int n, const json&) { return says(n < 4 + 3 ? 500 : 429); };
    const auto s = serve::http_teacher(how).score(some_sequences(1));
    CHECK(s[0].why == failure::overloaded);
    CHECK(s[0].text.find("given up after 4 tries; the try before: status 500") != std::string::npos);
}

TEST_CASE("Retry-After is heeded: where it is too late for that, at once") {
    teacher_server server(dialect::vllm);
    server.react = [](int, const json&) { return says(429, "Retry-After: 3600\r\n"); };
    serve::http_settings how = settings_for({&server});
    how.total_seconds = 1000;
    const auto r = serve::http_teacher(how).score(some_sequences(1));
    CHECK(r[0].why == failure::overloaded);
    CHECK(r[0].tries == 1);
    CHECK(r[0].text.find("no time is left") != std::string::npos);
    std::atomic<int> n = 0;
    server.react = [&](int, const json&) { return n++ == 0 ? says(503, "Retry-After: 1\r\n") : reaction{}; };
    const auto s = serve::http_teacher(how).score(some_sequences(1));
    REQUIRE(s[0]);
    CHECK(s[0].why == failure::overloaded);
    CHECK(s[0].seconds >= 1);
}

TEST_CASE("what hangs, or drips, is broken off at its deadline; the others are scored") {
    for (const auto what : {reaction::hangs, reaction::trickles}) {
        teacher_server server(dialect::vllm);
        server.react = [&](int, const json& q) { return holds(q, 31) ? reaction{what} : reaction{}; };
        serve::http_settings how = settings_for({&server});
        how.batch = 1, how.total_seconds = 0.3;
        auto sequences = some_sequences(6);
        sequences[2].tokens.back() = 31;
        const auto r = serve::http_teacher(how).score(sequences);
        CHECK_FALSE(r[2]);
        CHECK(r[2].why == failure::timed_out);
        CHECK(r[2].text.find("no time is left") != std::string::npos);
        CHECK(r[2].seconds >= 0.3);
        for (std::size_t i = 0; i < 6; ++i) // or had no time, on a machine that is loaded
            if (r[i]) CHECK(right(sequences[i], *r[i].scores));
    }
}

TEST_CASE("a server that is silent is asked again until it is back") {
    teacher_server server(dialect::vllm);
    server.react = [](int n, const json&) { return n < 3 ? reaction{reaction::hangs} : reaction{}; };
    serve::http_settings how = settings_for({&server});
    how.read_seconds = 0.05, how.tries = 10000; // under load more than three may take longer
    const auto sequences = some_sequences(5);
    serve::http_teacher teacher(how);
    check_all_right(sequences, teacher.score(sequences));
    CHECK(teacher.metrics().failures[int(failure::timed_out)] >= 1);
}

TEST_CASE("a stop breaks off what is under way and keeps what is there") {
    teacher_server server(dialect::vllm);
    server.react = [](int, const json& q) { return holds(q, 31) ? reaction{reaction::hangs} : reaction{}; };
    serve::http_settings how = settings_for({&server});
    how.batch = 1, how.concurrency = 1;
    auto sequences = some_sequences(5);
    sequences[2].tokens.back() = 31;
    std::stop_source stop;
    serve::http_teacher teacher(how);
    std::jthread other([&] {
        server.await_hanging(1);
        stop.request_stop();
    });
    const auto r = teacher.score(sequences, stop.get_token());
    for (std::size_t i = 0; i < 5; ++i) {
        CHECK(bool(r[i]) == (i < 2));
        if (i >= 2) CHECK(r[i].why == failure::cancelled);
        if (i > 2) CHECK(r[i].tries == 0);
    }
    CHECK(teacher.metrics().given_up == 3);
    const auto none = teacher.score(sequences, stop.get_token()); // stopped before it began
    for (const auto& o : none) CHECK(o.why == failure::cancelled);
    CHECK(server.requests() == 3);
}

TEST_CASE("a replica that fails is left alone, and taken back") {
    teacher_server good(dialect::vllm), bad(dialect::vllm);
    std::atomic<bool> ill = true;
    bad.react = [&](int, const json&) { return ill ? says(500) : reaction{}; };
    serve::http_settings how = settings_for({&good, &bad});
    how.batch = 1, how.concurrency = 1, how.quarantine_after = 2, how.quarantine_seconds = 1e5;
    const auto sequences = some_sequences(12);
    {
        serve::http_teacher teacher(how);
        check_all_right(sequences, teacher.score(sequences));
        CHECK(bad.requests() == 2);
        CHECK(good.requests() == 12);
        CHECK(teacher.metrics().quarantines == 1);
    }
    teacher_server moody(dialect::vllm); // fails every other time, and so never twice in a row
    moody.react = [](int n, const json&) { return n % 2 == 0 ? says(500) : reaction{}; };
    serve::http_settings of_moody = how;
    of_moody.urls = {moody.url()};
    serve::http_teacher of_mood(of_moody);
    check_all_right(sequences, of_mood.score(sequences));
    CHECK(of_mood.metrics().quarantines == 0);
    CHECK(moody.requests() == 24);
    how.quarantine_seconds = 0.001;
    serve::http_teacher teacher(how);
    check_all_right(sequences, teacher.score(sequences));
    ill = false;
    const int before = bad.requests();
    const std::int64_t failed = teacher.metrics().failures[int(failure::server_error)];
    while (bad.requests() < before + 4) check_all_right(sequences, teacher.score(sequences));
    CHECK(teacher.metrics().failures[int(failure::server_error)] == failed);
}

TEST_CASE("nobody is there, or resets what is written: no signal, an outcome") {
    const teacher_server gone(dialect::vllm, teacher_server::presence::gone);
    const std::string nowhere = gone.url();
    teacher_server server(dialect::vllm);
    serve::http_settings how = settings_for({&server});
    how.urls.push_back(nowhere);
    serve::sequence longer;
    longer.tokens.assign(300000, 7);
    longer.from = 299998;
    server.deaf = 2;
    how.tries = 100;
    const std::vector<serve::sequence> one{longer};
    server.react = [](int, const json&) { return says(422); }; // the answer is not the point
    const auto r = serve::http_teacher(how).score(one);
    CHECK(r[0].why == failure::refused);
    CHECK(r[0].tries >= 3);
    how.urls = {nowhere};
    how.tries = 2;
    const auto none = serve::http_teacher(how).score(some_sequences(1));
    CHECK(none[0].why == failure::connection);
    CHECK(none[0].url == nowhere);
}

TEST_CASE("a stop in the middle of a long request raises no signal") {
    const teacher_server deaf(dialect::vllm, teacher_server::presence::deaf);
    serve::http_settings how = settings_for({&deaf});
    how.what.vocab = 0, how.total_seconds = 0.2;
    const std::vector<serve::sequence> one{{std::vector<std::int32_t>(1000000, 1234567), 999999}}; // 8 MB
    const auto r = serve::http_teacher(how).score(one);
    CHECK(r[0].why == failure::timed_out);
}

TEST_CASE("what needs no server asks none") {
    teacher_server server(dialect::vllm);
    const std::vector<serve::sequence> nothing{{{5}, 0}, {{5, 6}, 2}};
    const auto r = serve::http_teacher(settings_for({&server})).score(nothing);
    REQUIRE(r[0]);
    CHECK(r[0].scores->missing() == 1);
    REQUIRE(r[1]);
    CHECK(r[1].scores->log_q.empty());
    CHECK(r[1].scores->offsets == std::vector<std::int64_t>{0});
    CHECK(server.requests() == 0);
    CHECK(serve::http_teacher(settings_for({&server})).score({}).empty());
}

TEST_CASE("backoff doubles, within its bound, by a factor that the seed draws") {
    serve::http_settings s;
    s.backoff_seconds = 0.5, s.most_backoff_seconds = 30;
    double least = 1, most = 0;
    for (std::uint64_t i = 0; i < 500; ++i)
        for (int n = 1; n < 200; n += n < 8 ? 1 : 60) {
            const double base = std::min(30.0, 0.5 * std::pow(2.0, n - 1)),
                         x = serve::detail::backoff_of(s, n, i) / base;
            least = std::min(least, x), most = std::max(most, x);
            CHECK(serve::detail::backoff_of(s, n, i) == serve::detail::backoff_of(s, n, i));
        }
    CHECK(least >= 0.5);
    CHECK(least < 0.51);
    CHECK(most < 1);
    CHECK(most > 0.99);
    serve::http_settings other = s;
    other.seed = 2;
    CHECK(serve::detail::backoff_of(s, 1, 0) != serve::detail::backoff_of(other, 1, 0));
    CHECK(serve::detail::backoff_of(s, 1, 0) != serve::detail::backoff_of(s, 1, 1));
}

TEST_CASE("settings and urls that cannot be") {
    const auto with = [](std::string url) {
        serve::http_settings s;
        s.urls = {std::move(url)};
        return s;
    };
    for (const char* url :
         {"", "host:80", "https://host", "http://", "http://:80", "http://host:", "http://host:0", "http://host:65536",
          "http://host:80x", "http://user@host", "http://[::1", "http://[::1]80", "http://host/a b", "http://host/a?b"})
        CHECK_THROWS_AS(serve::http_teacher{with(url)}, invalid_input);
    const auto at = serve::detail::parsed_url("http://[::1]:8000/teacher/");
    CHECK(at.host == "::1");
    CHECK(at.port == 8000);
    CHECK(at.prefix == "/teacher");
    CHECK(serve::detail::parsed_url("http://host").port == 80);
    CHECK_THROWS_WITH(serve::http_teacher{with("https://host")}, doctest::Contains("proxy"));
    CHECK_THROWS_AS(serve::http_teacher{serve::http_settings{}}, invalid_input);
    for (const auto& spoil : std::vector<std::function<void(serve::http_settings&)>>{
             [](auto& s) { s.concurrency = 0; }, [](auto& s) { s.batch = 0; }, [](auto& s) { s.tries = 0; },
             [](auto& s) { s.total_seconds = 0; }, [](auto& s) { s.read_seconds = NAN; },
             [](auto& s) { s.quarantine_after = 0; }, [](auto& s) { s.most_answer_bytes = 0; },
             [](auto& s) { s.api_key = "a\r\nb"; }, [](auto& s) { s.what.top_k = -1; }}) {
        serve::http_settings s = with("http://host");
        spoil(s);
        CHECK_THROWS_AS(serve::http_teacher{s}, invalid_input);
    }
    teacher_server server(dialect::vllm);
    serve::http_teacher teacher(settings_for({&server}));
    const std::vector<serve::sequence> bad{{{1, 2}, 1}, {{1, 40}, 1}};
    CHECK_THROWS_WITH_AS(teacher.score(bad), doctest::Contains("row 1"), invalid_input);
    CHECK(server.requests() == 0);
}

// --- the probe, before a run depends on it

namespace {

/// 40 sequences of 20 scored tokens, asked for twice with 8 ids a position; log p is by the law as it is.
teacher_report probed_server(double temperature, double noise) {
    teacher_server server(dialect::sglang);
    server.right.law.temperature = temperature;
    numbers u(7);
    std::mutex mutex;
    server.right.error = [&] {
        const std::lock_guard lock(mutex);
        return std::min(0.0, noise * u.normal() - 2 * noise);
    };
    std::vector<serve::sequence> sequences;
    const toy_law own;
    numbers draws(3);
    for (int i = 0; i < 40; ++i) {
        serve::sequence s{{std::int32_t(draws.below(32))}, 1};
        for (int t = 0; t < 20; ++t) s.tokens.push_back(std::int32_t(draws.below(32)));
        sequences.push_back(std::move(s));
    }
    serve::http_settings how = settings_for({&server});
    how.what.top_k = 8;
    // [probe]
    opd::serve::http_teacher teacher(how);
    std::vector<double> log_q, list_log_q;
    std::vector<opd::index_t> list_ids;
    for (int repeat = 0; repeat < 2; ++repeat)
        for (const opd::serve::outcome& o : teacher.score(sequences)) {
            if (!o) throw std::runtime_error(o.text);
            log_q.insert(log_q.end(), o.scores->log_q.begin(), o.scores->log_q.end()); // (2,N)
            if (repeat > 0) continue;
            list_ids.insert(list_ids.end(), o.scores->ids.begin(), o.scores->ids.end()); // (N,8): 8 at each position
            list_log_q.insert(list_log_q.end(), o.scores->list_log_q.begin(), o.scores->list_log_q.end());
        }
    // [/probe]
    std::vector<double> log_p, list_log_p;
    std::vector<std::int64_t> offsets{0};
    for (const serve::sequence& s : sequences) {
        for (std::size_t p = 1; p < s.tokens.size(); ++p) {
            const auto row = own.log_probs({s.tokens.data(), p});
            log_p.push_back(row[std::size_t(s.tokens[p])] - 0.5 * draws.uniform());
            for (std::size_t j = 0; j < 8; ++j) list_log_p.push_back(row[std::size_t(list_ids[list_log_p.size()])]);
        }
        offsets.push_back(std::int64_t(log_p.size()));
    }
    const auto n = index_t(log_p.size());
    teacher_answers a;
    a.log_q = view(log_q.data(), 2, n), a.log_p = view(log_p.data(), n), a.offsets = row_offsets<>(offsets);
    a.list_ids = view(list_ids.data(), n, 8), a.list_log_q = view(list_log_q.data(), n, 8);
    a.list_log_p = view(list_log_p.data(), n, 8), a.vocab = 32;
    return probe_teacher(a);
}

} // namespace

TEST_CASE("a served teacher, probed: as it is, hot, and noisy") {
    const teacher_report good = probed_server(1, 0);
    CAPTURE(to_string(good));
    CHECK_FALSE(good.refused());
    CHECK(good.tokens == 800);
    CHECK(good.bad_tokens == 0);
    CHECK(good.noise == probed::good);
    CHECK(good.temperature == probed::good);
    CHECK(good.shift == probed::good);
    CHECK(good.ids == probed::good);
    const teacher_report hot = probed_server(1.5, 0);
    CHECK(hot.temperature == probed::bad);
    CHECK(hot.estimated_temperature == doctest::Approx(1.5).epsilon(0.01));
    const teacher_report noisy = probed_server(1, 0.5);
    CHECK(noisy.noise == probed::bad);
    CHECK(noisy.sigma_delta > 0.4);
    CHECK(noisy.temperature == probed::good); // lists are of another computation
}

// --- as a stage

namespace {

using namespace opd::sched;
using stage_type = serve::http_stage<toy::sequence>;

serve::sequence sequence_of(const toy::sequence& s) {
    serve::sequence r{{std::int32_t(s.sample % 30), std::int32_t(s.sample / 30)}, 2};
    for (std::size_t i = 0; i < s.versions.size(); ++i) r.tokens.push_back(std::int32_t((s.sample * 7 + 5 * i) % 30));
    return r;
}

/// Learns by checking: each sequence once, with its own scores, as the law has them.
struct checking_learner {
    std::shared_ptr<toy::world> world;
    std::map<sample_t, int>& learnt;
    index_t train(std::span<const sequence_view<toy::sequence, serve::scores>> batch, const train_call& call,
                  std::stop_token) {
        for (const auto& s : batch) {
            if (!right(sequence_of(*s.rolled), *s.scored)) world->complain("another's scores, or wrong ones");
            ++learnt[s.ticket.sample];
        }
        const std::lock_guard lock(world->mutex);
        world->before = call.from, world->published = call.makes();
        return 1;
    }
};
struct looks_on {
    toy::world& world;
    void event(double, const opd::sched::event&, const actions& out, const scheduler& s) {
        const std::lock_guard lock(world.mutex);
        for (const action& a : out.items)
            if (a.what == action::kind::start) world.starts[{a.ticket.sample, a.ticket.attempt}] = a.version;
        s.check_invariants();
    }
};

void run_under(const schedule& how, std::function<reaction(int, const json&)> react) {
    teacher_server server(dialect::vllm);
    server.react = std::move(react);
    serve::http_settings served = settings_for({&server});
    served.read_seconds = 0.1, served.tries = 2, served.concurrency = 3, served.batch = 2;
    const auto world = std::make_shared<toy::world>();
    std::map<sample_t, int> learnt; // the learner's thread alone
    settings s;
    s.batch = 8, s.schedule = how, s.sequences = 96, s.teacher_batch = 4, s.teacher_flush = 0.0005;
    s.teacher_attempts = 100000; // whatever the machine's load
    s.fruitless_steps = 1000;
    looks_on observer{*world};
    // [stage]
    auto teacher = std::make_shared<opd::serve::http_teacher>(served);
    opd::sched::thread_driver<toy::rollout, stage_type, checking_learner> driver(s);
    for (int worker = 0; worker < 2; ++worker) // each a call under way
        driver.add_teacher(std::make_shared<stage_type>(teacher, sequence_of));
    // [/stage]
    for (int i = 0; i < 2; ++i) driver.add_rollout(std::make_shared<toy::rollout>(world, i, 4), 4);
    driver.set_learner(std::make_shared<checking_learner>(checking_learner{world, learnt}));
    driver.observe(observer);
    const run_report report = driver.run();
    CHECK(report.completed);
    CHECK(report.totals.consumed == 96);
    CHECK(report.discarded.empty());
    CHECK(report.left_behind.empty());
    CHECK(learnt.size() == 96);
    for (const auto& [sample, times] : learnt) {
        CAPTURE(sample);
        CHECK(times == 1);
    }
    for (const std::string& c : world->complaints) FAIL_CHECK(c);
    CHECK(teacher->metrics().scored >= 96);
    CHECK(server.requests() >= 48);
}

} // namespace

TEST_CASE("under every kind of schedule a server that hangs, halves and comes back loses nothing") {
    async streaming;
    streaming.tau = 2;
    const std::pair<const char*, schedule> schedules[] = {
        {"sync", opd::sched::sync{}}, {"one step off", step_off{1}}, {"async", streaming}};
    for (const auto& [name, how] : schedules) {
        CAPTURE(name);
        run_under(how, [](int n, const json&) {
            reaction r;
            if (n >= 40) return r; // it is back for good
            if (n % 9 == 1) r.does = reaction::hangs;
            if (n % 5 == 2) r = says(500);
            if (n % 7 == 3) r.does = reaction::halves;
            if (n % 7 == 5) r.does = reaction::closes;
            if (n % 8 == 6) r.edit = [](json& a) { a["choices"].erase(0); };
            return r;
        });
    }
}

TEST_CASE("a stage that scored none throws why") {
    teacher_server server(dialect::vllm);
    server.react = [](int, const json& q) { return holds(q, 29) ? says(400, "", "no") : reaction{}; };
    stage_type stage(std::make_shared<serve::http_teacher>(settings_for({&server})), [](const toy::sequence& s) {
        return serve::sequence{{1, s.sample == 0 ? 29 : 2}, 1};
    });
    std::vector<std::shared_ptr<const toy::sequence>> two{std::make_shared<toy::sequence>(toy::sequence{0, {}, 0}),
                                                          std::make_shared<toy::sequence>(toy::sequence{1, {}, 0})};
    const auto r = stage.score(two, {});
    CHECK(r[0] == nullptr);
    REQUIRE(r[1] != nullptr);
    CHECK(r[1]->log_q.size() == 1);
    two.pop_back();
    CHECK_THROWS_WITH_AS(stage.score(two, {}), doctest::Contains("refused: status 400: no"), serve::not_scored);
    CHECK(stage.score({}, {}).empty());
}
