// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A listener on the loopback with a thread a connection, for servers that a test wants to misbehave: what a request is
// answered, byte by byte, is the server's own affair.
#pragma once

#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <functional>
#include <list>
#include <mutex>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <utility>

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

namespace opd::test {

class http_listener {
public:
    std::atomic<int> deaf = 0; ///< so many connections are reset before anything is read

    enum class presence {
        serves,
        deaf, ///< takes connections and reads nothing
        gone  ///< has a port, at which nobody listens
    };
    http_listener(const http_listener&) = delete;
    http_listener& operator=(const http_listener&) = delete;
    std::string url() const { return "http://127.0.0.1:" + std::to_string(port_); }

protected:
    /// serve(socket, head, body): a request; false: the connection is closed.
    using serve_type = std::function<bool(int, const std::string&, const std::string&)>;

    http_listener(presence is, serve_type serve) : serve_(std::move(serve)) {
        listener_ = ::socket(AF_INET, SOCK_STREAM, 0);
        sockaddr_in address{};
        address.sin_family = AF_INET;
        address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        socklen_t size = sizeof address;
        if (listener_ < 0 || ::bind(listener_, reinterpret_cast<sockaddr*>(&address), size) != 0 ||
            (is != presence::gone && ::listen(listener_, 128) != 0) ||
            ::getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &size) != 0)
            throw std::runtime_error("no socket to listen on");
        port_ = ntohs(address.sin_port);
    }
    /// When the server is made.
    void begin() {
        acceptor_ = std::thread([this] { accept_all(); });
    }
    /// Before it is gone.
    void end() {
        {
            const std::lock_guard lock(mutex_);
            over_ = true;
            for (const int s : open_) ::shutdown(s, SHUT_RDWR);
        }
        changed_.notify_all();
        ::shutdown(listener_, SHUT_RDWR);
        if (acceptor_.joinable()) acceptor_.join();
        for (std::thread& t : threads_) t.join();
        ::close(listener_);
    }
    ~http_listener() = default;

    static bool send_all(int s, std::string_view text, int flags = 0) {
        while (!text.empty()) {
            const auto n = ::send(s, text.data(), text.size(), MSG_NOSIGNAL | flags);
            if (n <= 0) return false;
            text.remove_prefix(static_cast<std::size_t>(n));
        }
        return true;
    }

    mutable std::mutex mutex_;
    std::condition_variable changed_;
    bool over_ = false;

private:
    void accept_all() {
        for (int s; (s = ::accept(listener_, nullptr, nullptr)) >= 0 || errno == EINTR || errno == ECONNABORTED;) {
            if (s < 0) continue;
            const std::lock_guard lock(mutex_);
            if (over_) {
                ::close(s);
                return;
            }
            if (deaf > 0) {
                --deaf;
                const linger at_once{1, 0};
                ::setsockopt(s, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
                ::close(s);
                continue;
            }
            open_.push_back(s);
            threads_.emplace_back([this, s] {
                while (serve_one(s)) {}
                const std::lock_guard l(mutex_);
                open_.remove(s);
                ::close(s);
            });
        }
    }
    bool serve_one(int s) {
        std::string in;
        std::size_t head = std::string::npos, length = 0;
        for (char part[4096]; head == std::string::npos || in.size() < head + length;) {
            const auto n = ::recv(s, part, sizeof part, 0);
            if (n <= 0) return false;
            in.append(part, static_cast<std::size_t>(n));
            if (head == std::string::npos && (head = in.find("\r\n\r\n")) != std::string::npos) {
                const auto at = in.find("Content-Length: ");
                head += 4;
                length = at < head ? std::stoul(in.substr(at + 16)) : 0;
            }
        }
        return serve_(s, in.substr(0, head), in.substr(head));
    }

    serve_type serve_;
    int listener_ = -1, port_ = 0;
    std::list<int> open_;
    std::list<std::thread> threads_;
    std::thread acceptor_;
};

} // namespace opd::test
