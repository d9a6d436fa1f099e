// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// One request to an HTTP server and what became of it: what http_teacher.hpp and http_rollout.hpp have in common.
//
// Plain HTTP/1.1: TLS is not spoken; put a proxy beside you that does. This header and those two alone need
// cpp-httplib (0.11 or newer), with the flags that its library was built with: Debian's is
// `pkg-config --cflags --libs cpp-httplib`.
#pragma once

#include <algorithm>
#include <atomic>
#include <charconv>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#include <httplib.h>

#include "opd/config.hpp"
#include "opd/error.hpp"

namespace opd::serve {

/// What became of a request. http_teacher tries all but `refused` and `cancelled` again.
enum class failure {
    none,
    refused,      ///< status 3xx or 4xx: the request
    overloaded,   ///< 429, or 503 with Retry-After
    server_error, ///< 5xx, 408, 425
    connection,   ///< none, or broken
    timed_out,
    bad_answer,
    cancelled
};
inline const char* to_string(failure f) {
    constexpr const char* names[] = {"none",       "refused",   "overloaded", "server error",
                                     "connection", "timed out", "bad answer", "cancelled"};
    return names[static_cast<int>(f)];
}

namespace detail {

using http_clock = std::chrono::steady_clock;
using http_time = http_clock::time_point;
inline http_time after(http_time t, double seconds) {
    return t + std::chrono::duration_cast<http_clock::duration>(std::chrono::duration<double>(seconds));
}
inline double seconds_between(http_time a, http_time b) { return std::chrono::duration<double>(b - a).count(); }

/// http://host[:port][/prefix], taken apart.
struct base_url {
    std::string host, prefix;
    int port = 80;
};
inline base_url parsed_url(const std::string& url) {
    const auto refuse = [&](const char* why) { throw invalid_input("urls", "'" + url + "' " + why); };
    if (url.rfind("https://", 0) == 0) refuse("asks for TLS, which is not spoken: put a proxy in front");
    if (url.rfind("http://", 0) != 0) refuse("does not begin with http://");
    std::string_view rest = std::string_view(url).substr(7);
    base_url r;
    if (const auto slash = rest.find('/'); slash != std::string_view::npos) {
        r.prefix = rest.substr(slash);
        while (!r.prefix.empty() && r.prefix.back() == '/') r.prefix.pop_back();
        rest = rest.substr(0, slash);
    }
    const bool brackets = !rest.empty() && rest.front() == '['; // IPv6
    const auto end = brackets ? rest.find(']') : rest.find(':');
    r.host = brackets ? rest.substr(1, end == std::string_view::npos ? end : end - 1) : rest.substr(0, end);
    if (brackets)
        rest = end == std::string_view::npos ? "?" : rest.substr(end + 1);
    else
        rest = end == std::string_view::npos ? std::string_view() : rest.substr(end);
    if (!rest.empty()) {
        const auto [last, wrong] = std::from_chars(rest.data() + 1, rest.data() + rest.size(), r.port);
        if (rest[0] != ':' || wrong != std::errc() || last != rest.data() + rest.size() || r.port < 1 || r.port > 65535)
            refuse("has no port where one should be");
    }
    if (r.host.empty() || r.host.find_first_of("@ \r\n") != std::string::npos) refuse("has no host");
    if (r.prefix.find_first_of(" \r\n?#") != std::string::npos) refuse("has no plain path");
    return r;
}

inline void check_seconds(const char* name, double x) {
    if (!(x >= 1e-3 && x <= 1e6)) throw invalid_input(name, "must lie in [0.001, 1e6] seconds");
}

inline std::shared_ptr<httplib::Client> new_client(const base_url& at) {
    auto client = std::make_shared<httplib::Client>(at.host, at.port);
    client->set_keep_alive(true);
    client->set_tcp_nodelay(true);
    client->set_follow_location(false);
    return client;
}
/// A thread that writes to a server which closes meanwhile is not to die of it.
inline void block_sigpipe() {
    sigset_t pipe;
    sigemptyset(&pipe);
    sigaddset(&pipe, SIGPIPE);
    pthread_sigmask(SIG_BLOCK, &pipe, nullptr);
}

/// What is sent.
struct http_question {
    const char* method = "POST";
    std::string path, body, api_key;
    double connect_seconds = 5;
    double read_seconds = 120; ///< of silence
    std::size_t most_bytes = std::size_t{64} << 20;
};
/// What came of it. `status` 0: no answer began.
struct http_reply {
    failure why = failure::none;
    std::string text = {};
    int status = 0;
    double retry_after = 0;
    std::size_t sent = 0, received = 0; ///< bytes of the bodies
};

/// Of a Retry-After in seconds; a date counts as none.
inline double retry_after_of(const std::string& text) {
    int n = 0;
    const auto [end, wrong] = std::from_chars(text.data(), text.data() + text.size(), n);
    return wrong == std::errc() && end == text.data() + text.size() && n > 0 ? n : 0;
}

/// Asks, on this thread. take(const char*, std::size_t) gets an answer of status 200 piece by piece; false: it wants no
/// more, and the reply is a bad answer. Another thread may break it off: it says why in `broken_off`, then stops the
/// client.
template <class Take>
http_reply exchange(httplib::Client& client, const base_url& at, const http_question& q,
                    const std::atomic<failure>& broken_off, Take&& take) {
    const http_time begin = http_clock::now();
    const auto limit = [](double seconds) {
        return std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::duration<double>(seconds));
    };
    client.set_connection_timeout(limit(q.connect_seconds)); // which alone cannot be broken off
    client.set_read_timeout(limit(q.read_seconds));
    client.set_write_timeout(limit(q.read_seconds));
    httplib::Request post;
    post.method = q.method, post.path = at.prefix + q.path, post.body = q.body;
    post.headers = {{"Content-Type", "application/json"}, {"Accept-Encoding", "identity"}};
    if (!q.api_key.empty()) post.headers.emplace("Authorization", "Bearer " + q.api_key);
    http_reply r;
    r.sent = q.body.size();
    std::string said; // with another status
    bool too_long = false, enough = false;
    post.response_handler = [&](const httplib::Response& head) {
        r.status = head.status;
        return true;
    };
    post.content_receiver = [&](const char* p, std::size_t n, std::uint64_t, std::uint64_t) {
        too_long = n > q.most_bytes - r.received;
        if (too_long || broken_off != failure::none) return false;
        r.received += n;
        if (r.status == 200)
            enough = !take(p, n);
        else
            said.append(p, std::min(n, 300 - said.size()));
        return !enough;
    };
    httplib::Response got;
    auto error = httplib::Error::Success;
    const bool sent = client.send(post, got, error);
    if (broken_off != failure::none && (!sent || error != httplib::Error::Success)) {
        r.why = broken_off;
        r.text = r.why == failure::cancelled ? "broken off: cancelled" : "broken off: total_seconds are over";
    } else if (too_long || enough) {
        r.why = failure::bad_answer;
        if (too_long) r.text = "is longer than " + std::to_string(q.most_bytes) + " bytes";
    } else if (!sent) {
        const bool silent = error == httplib::Error::ConnectionTimeout ||
                            (error == httplib::Error::Read && // its clock is not ours
                             seconds_between(begin, http_clock::now()) >= 0.9 * q.read_seconds);
        r.why = silent ? failure::timed_out : failure::connection;
        r.text = (silent ? "no answer in time: " : "the connection failed: ") + httplib::to_string(error);
    } else if (got.status != 200) {
        r.status = got.status;
        r.retry_after = retry_after_of(got.get_header_value("Retry-After"));
        r.why = got.status == 429 || (got.status == 503 && r.retry_after > 0) ? failure::overloaded
                : got.status >= 500 || got.status == 408 || got.status == 425 ? failure::server_error
                                                                              : failure::refused;
        r.text = "status " + std::to_string(got.status) + ": " + said;
    }
    return r;
}

} // namespace detail
} // namespace opd::serve
