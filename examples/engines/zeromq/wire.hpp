// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// ZeroMQ beneath the remote driver: a ROUTER socket in the scheduler's process, a DEALER in each worker's, one frame of
// opd/sched/remote_link.hpp a message. ZeroMQ connects, reconnects and keeps messages whole; what it loses when a
// process dies, the sessions send again.
//
// Keys (CURVE): a folder with scheduler.pub, scheduler.key, worker.pub and worker.key, made by `opd-schedule
// --make-keys FOLDER`; scheduler.key stays where the scheduler is, worker.key with the workers. A worker is let in if
// its public key is in the folder, as worker.pub or any other worker*.pub. Without keys the scheduler binds to
// loopback (or ipc://) alone.
#pragma once

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include <sys/stat.h>
#include <zmq.hpp>

namespace engine {

inline double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// --- keys

inline std::string read_key(const std::filesystem::path& file) {
    std::string key;
    if (!(std::ifstream(file) >> key) || key.size() != 40)
        throw std::runtime_error(file.string() + ": is no key of 40 characters");
    return key;
}
inline void make_keys(const std::filesystem::path& folder) {
    std::filesystem::create_directories(folder);
    for (const char* name : {"scheduler", "worker"}) {
        std::array<char, 41> open{}, secret{};
        if (zmq_curve_keypair(open.data(), secret.data()) != 0)
            throw std::runtime_error("this libzmq was built without CURVE");
        const std::filesystem::path key = folder / (std::string(name) + ".key");
        if (std::filesystem::exists(key)) throw std::runtime_error(key.string() + " is there already");
        const mode_t mask = umask(077); // the secret is its owner's to read
        std::ofstream(key) << secret.data() << '\n';
        umask(mask);
        std::ofstream(folder / (std::string(name) + ".pub")) << open.data() << '\n';
    }
}
/// Whether only processes of this machine reach it.
inline bool is_local(const std::string& endpoint) {
    return endpoint.rfind("ipc://", 0) == 0 || endpoint.rfind("tcp://127.", 0) == 0 ||
           endpoint.rfind("tcp://localhost:", 0) == 0 || endpoint.rfind("tcp://[::1]:", 0) == 0;
}
inline void need_keys(const std::string& endpoint, const std::string& keys) {
    if (keys.empty() && !is_local(endpoint))
        throw std::invalid_argument(
            endpoint +
            " is no loopback address: others could speak there, so keys are needed (--keys; see --make-keys)");
}

/// Lets in whose key is in the folder (ZAP, ZeroMQ's RFC 27). Read once: restart the scheduler to let in others.
class gate {
public:
    gate(zmq::context_t& context, const std::filesystem::path& keys)
        : context_(context), socket_(context, zmq::socket_type::rep) {
        for (const auto& entry : std::filesystem::directory_iterator(keys)) {
            const std::string name = entry.path().filename();
            if (name.rfind("worker", 0) != 0 || entry.path().extension() != ".pub") continue;
            std::array<std::uint8_t, 32> key{};
            if (!zmq_z85_decode(key.data(), read_key(entry.path()).c_str()))
                throw std::runtime_error(entry.path().string() + ": is no key");
            allowed_.emplace(key.begin(), key.end());
        }
        socket_.bind("inproc://zeromq.zap.01");
        thread_ = std::thread([this] { serve(); });
    }
    ~gate() {
        context_.shutdown(); // nothing else ends its wait
        thread_.join();
    }
    gate(const gate&) = delete;
    gate& operator=(const gate&) = delete;

private:
    void serve() {
        try {
            for (;;) {
                std::vector<std::string> asked; // version, request, domain, address, identity, mechanism, key
                zmq::message_t part;
                do {
                    if (!socket_.recv(part)) return;
                    asked.push_back(part.to_string());
                } while (part.more());
                const bool in = asked.size() == 7 && asked[5] == "CURVE" && allowed_.contains(asked[6]);
                const std::string request = asked.size() > 1 ? asked[1] : "";
                const std::vector<std::string> answer = {"1.0", request, in ? "200" : "400", in ? "OK" : "no such key",
                                                         "",    ""};
                for (std::size_t i = 0; i < answer.size(); ++i)
                    socket_.send(zmq::buffer(answer[i]),
                                 i + 1 < answer.size() ? zmq::send_flags::sndmore : zmq::send_flags::none);
            }
        } catch (const zmq::error_t&) { // the context is shut down
        }
        socket_.close();
    }
    zmq::context_t& context_;
    zmq::socket_t socket_;
    std::set<std::string> allowed_;
    std::thread thread_;
};

// --- sockets

/// Waits until something can be read, or for `seconds`; a signal ends it, too.
inline void wait_for(std::vector<zmq::pollitem_t>& items, double seconds) {
    const double ms = std::ceil(1000 * std::clamp(seconds, 0.0, 1.0));
    try {
        zmq::poll(items.data(), items.size(), std::chrono::milliseconds(static_cast<long>(ms)));
    } catch (const zmq::error_t& e) {
        if (e.num() != EINTR) throw;
    }
}

/// The scheduler's end. A peer's name is its routing id.
class router {
public:
    router(zmq::context_t& context, const std::string& endpoint, const std::string& keys, std::size_t most_bytes)
        : socket_(context, zmq::socket_type::router) {
        need_keys(endpoint, keys);
        // A longer message ends its connection before memory is taken for it; so many wait of one peer.
        socket_.set(zmq::sockopt::maxmsgsize, static_cast<std::int64_t>(most_bytes));
        socket_.set(zmq::sockopt::rcvhwm, 64);
        socket_.set(zmq::sockopt::sndhwm, 1024);
        socket_.set(zmq::sockopt::linger, 200);
        socket_.set(zmq::sockopt::ipv6, endpoint.find('[') != std::string::npos);
        if (!keys.empty()) {
            socket_.set(zmq::sockopt::curve_server, true);
            socket_.set(zmq::sockopt::curve_secretkey, read_key(std::filesystem::path(keys) / "scheduler.key"));
        }
        socket_.bind(endpoint);
    }
    void send(const std::string& peer, const std::string& frame) {
        constexpr auto at_once = zmq::send_flags::dontwait; // what does not go now is sent again
        try {
            if (socket_.send(zmq::buffer(peer), at_once | zmq::send_flags::sndmore))
                (void)socket_.send(zmq::buffer(frame), at_once);
        } catch (const zmq::error_t& e) {
            if (e.num() != EHOSTUNREACH) throw;
        }
    }
    /// hear(peer, bytes) of what has come, at most so many.
    template <class Hear>
    void receive(int most, Hear&& hear) {
        for (; most > 0 && socket_.recv(peer_, zmq::recv_flags::dontwait); --most) {
            int parts = 1;
            for (bool more = peer_.more(); more; ++parts) {
                zmq::message_t& into = parts == 1 ? frame_ : rest_;
                if (!socket_.recv(into)) return;
                more = into.more();
            }
            if (parts != 2) continue; // no worker of ours
            name_.assign(peer_.data<char>(), peer_.size());
            hear(name_, std::string_view(frame_.data<char>(), frame_.size()));
        }
    }
    zmq::pollitem_t item() { return {socket_.handle(), 0, ZMQ_POLLIN, 0}; }

private:
    zmq::socket_t socket_;
    zmq::message_t peer_, frame_, rest_;
    std::string name_;
};

/// A worker's end; its routing id is drawn, so that another process has another.
class dealer {
public:
    dealer(zmq::context_t& context, const std::string& endpoint, const std::string& keys, std::size_t most_bytes)
        : socket_(context, zmq::socket_type::dealer) {
        need_keys(endpoint, keys);
        std::random_device random;
        std::string name(17, 'w'); // not from 0: such ids are ZeroMQ's own
        for (std::size_t i = 1; i < name.size(); ++i) name[i] = static_cast<char>(random());
        socket_.set(zmq::sockopt::routing_id, name);
        socket_.set(zmq::sockopt::maxmsgsize, static_cast<std::int64_t>(most_bytes));
        socket_.set(zmq::sockopt::sndhwm, 1024);
        socket_.set(zmq::sockopt::linger, 200);
        socket_.set(zmq::sockopt::reconnect_ivl, 50);
        socket_.set(zmq::sockopt::reconnect_ivl_max, 2000);
        socket_.set(zmq::sockopt::ipv6, endpoint.find('[') != std::string::npos);
        if (!keys.empty()) {
            const std::filesystem::path folder = keys;
            socket_.set(zmq::sockopt::curve_serverkey, read_key(folder / "scheduler.pub"));
            socket_.set(zmq::sockopt::curve_publickey, read_key(folder / "worker.pub"));
            socket_.set(zmq::sockopt::curve_secretkey, read_key(folder / "worker.key"));
        }
        socket_.connect(endpoint);
    }
    void send(const std::string& frame) { (void)socket_.send(zmq::buffer(frame), zmq::send_flags::dontwait); }
    template <class Hear>
    void receive(Hear&& hear) {
        while (socket_.recv(frame_, zmq::recv_flags::dontwait)) {
            const bool whole = !frame_.more();
            for (bool more = !whole; more; more = rest_.more())
                if (!socket_.recv(rest_)) return;
            if (whole) hear(std::string_view(frame_.data<char>(), frame_.size()));
        }
    }
    zmq::pollitem_t item() { return {socket_.handle(), 0, ZMQ_POLLIN, 0}; }

private:
    zmq::socket_t socket_;
    zmq::message_t frame_, rest_;
};

} // namespace engine
