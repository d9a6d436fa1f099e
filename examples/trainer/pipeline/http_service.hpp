// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// An HTTP server that asks a function: plain HTTP/1.1, one thread a request under way. Neither this header nor who
// includes it sees cpp-httplib, which is compiled in http_service.cpp alone.
#pragma once

#include <functional>
#include <memory>
#include <string>

namespace trainer {

struct http_reply {
    int status = 200;
    std::string body; ///< application/json
};

class http_service {
public:
    /// What is said to a method and path with a body; from any thread. What it throws is status 500.
    using handler =
        std::function<http_reply(const std::string& method, const std::string& path, const std::string& body)>;

    /// Binds; port 0: one that is free. A port that is taken is a failure of kind exit_io.
    http_service(const std::string& host, int port, handler answer);
    ~http_service();
    http_service(const http_service&) = delete;
    http_service& operator=(const http_service&) = delete;

    std::string url() const { return url_; }
    /// Answers until stop(), which any thread may call, and a signal handler may not.
    void serve();
    void stop();

private:
    struct server;
    std::unique_ptr<server> server_;
    std::string url_;
};

} // namespace trainer
