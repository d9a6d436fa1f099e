// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Parked threads for row blocks: `run(count, f)` calls f(block, worker) for every block in [0, count), the caller
// taking part as worker 0. Blocks are handed out one at a time, so a slow core holds nobody up; what a block computes
// must not depend on the worker, and then results do not depend on the number of threads. Idle threads sleep on a
// condition variable and never spin. The first exception of a block is rethrown by `run` once all blocks have
// stopped. No allocation after the threads have started.
#pragma once

#include <atomic>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "opd/config.hpp"
#include "opd/error.hpp"

namespace opd {
inline namespace OPD_ISA {

/// `threads` of them, the caller among them; at least 1. Made once and used for every call.
class thread_team {
public:
    /// Throws `unsupported` where the system refuses a thread: it has too many, or too little memory for another's
    /// stack.
    explicit thread_team(int threads) {
        try {
            for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { serve(i); });
        } catch (const std::exception& e) { // the destructor does not run
            const int refused = size();
            close();
            throw unsupported("opd: the system refused thread " + std::to_string(refused + 1) + " of " +
                              std::to_string(threads) + ": " + e.what());
        }
    }
    thread_team(const thread_team&) = delete;
    thread_team& operator=(const thread_team&) = delete;
    ~thread_team() { close(); }

    int size() const { return static_cast<int>(workers_.size()) + 1; }

    /// One call at a time; not re-entrant.
    template <class Body>
    void run(index_t count, Body&& body) {
        if (count <= 0) return;
        if (workers_.empty() || count == 1) {
            for (index_t i = 0; i < count; ++i) body(i, 0);
            return;
        }
        {
            const std::lock_guard lock(mutex_);
            call_ = [](void* b, index_t block, int worker) {
                (*static_cast<std::remove_reference_t<Body>*>(b))(block, worker);
            };
            body_ = const_cast<void*>(static_cast<const void*>(std::addressof(body)));
            count_ = count;
            next_.store(0, std::memory_order_relaxed);
            failure_ = nullptr;
            busy_ = static_cast<int>(workers_.size());
            ++generation_;
        }
        wake_.notify_all();
        work(0);
        std::unique_lock lock(mutex_);
        done_.wait(lock, [this] { return busy_ == 0; });
        if (failure_) std::rethrow_exception(failure_);
    }

private:
    void close() {
        {
            const std::lock_guard lock(mutex_);
            closing_ = true;
        }
        wake_.notify_all();
        for (auto& t : workers_) t.join();
    }
    void serve(int worker) {
        std::uint64_t seen = 0;
        for (;;) {
            {
                std::unique_lock lock(mutex_);
                wake_.wait(lock, [&] { return closing_ || generation_ != seen; });
                if (closing_) return;
                seen = generation_;
            }
            work(worker);
            {
                const std::lock_guard lock(mutex_);
                if (--busy_ == 0) done_.notify_one();
            }
        }
    }
    void work(int worker) {
        for (index_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < count_;) try {
                call_(body_, i, worker);
            } catch (...) {
                next_.store(count_, std::memory_order_relaxed);
                const std::lock_guard lock(mutex_);
                if (!failure_) failure_ = std::current_exception();
            }
    }

    std::vector<std::thread> workers_;
    std::mutex mutex_;
    std::condition_variable wake_, done_;
    std::atomic<index_t> next_{0};
    index_t count_ = 0;
    void (*call_)(void*, index_t, int) = nullptr;
    void* body_ = nullptr;
    std::exception_ptr failure_;
    int busy_ = 0;
    std::uint64_t generation_ = 0;
    bool closing_ = false;
};

/// What product() (opd/product.hpp) wants of an executor: calls on a team's threads.
struct team_executor {
    thread_team& team;
    template <class Function>
    void parallel_for(index_t count, Function&& f) const {
        team.run(count, [&](index_t i, int) { f(i); });
    }
};

} // namespace OPD_ISA
} // namespace opd
