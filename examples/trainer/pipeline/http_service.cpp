// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "pipeline/http_service.hpp"

#include <exception>
#include <utility>

#include <httplib.h>
#include <sys/socket.h>

#include "settings/config.hpp"

namespace trainer {

struct http_service::server {
    httplib::Server http;
};

http_service::http_service(const std::string& host, int port, handler answer) : server_(std::make_unique<server>()) {
    httplib::Server& http = server_->http;
    http.set_tcp_nodelay(true);
    http.set_keep_alive_max_count(1'000'000);
    http.set_keep_alive_timeout(600);
    http.set_payload_max_length(std::size_t{1} << 30);
    http.set_socket_options([](socket_t s) { // not of two servers one port
        const int yes = 1;
        ::setsockopt(s, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    });
    const auto ask = [answer = std::move(answer)](const httplib::Request& q, httplib::Response& r) {
        http_reply a;
        try {
            a = answer(q.method, q.path, q.body);
        } catch (const std::exception& e) {
            a = {500, nlohmann::json({{"error", {{"message", e.what()}, {"code", 500}}}})
                          .dump(-1, ' ', false, nlohmann::json::error_handler_t::replace)};
        }
        r.status = a.status;
        r.set_content(std::move(a.body), "application/json");
    };
    http.Get(".*", ask);
    http.Post(".*", ask);
    const int bound = port == 0 ? http.bind_to_any_port(host) : http.bind_to_port(host, port) ? port : -1;
    if (bound < 0)
        throw failure(exit_io, "cannot listen at " + host + ", port " + std::to_string(port) +
                                   ": it is taken, or no address of this machine");
    const bool brackets = host.find(':') != std::string::npos; // IPv6
    url_ = "http://" + (brackets ? "[" + host + "]" : host) + ":" + std::to_string(bound);
}

http_service::~http_service() = default;

void http_service::serve() { server_->http.listen_after_bind(); }

void http_service::stop() { server_->http.stop(); }

} // namespace trainer
