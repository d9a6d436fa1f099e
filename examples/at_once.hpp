// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Independent pieces of work on some threads: f(0) … f(n - 1), in this order as threads are free. Of pieces that throw,
// the first exception comes at the end: the other pieces are done.
#pragma once

#include <atomic>
#include <cstddef>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

namespace examples {

template <class F>
void at_once(int threads, std::size_t n, F&& f) {
    std::mutex mutex;
    std::exception_ptr error;
    std::atomic<std::size_t> next{0};
    {
        std::vector<std::jthread> team;
        for (int t = 0; t < threads; ++t)
            team.emplace_back([&] {
                for (std::size_t i = next++; i < n; i = next++) try {
                        f(i);
                    } catch (...) {
                        const std::lock_guard lock(mutex);
                        if (!error) error = std::current_exception();
                    }
            });
    }
    if (error) std::rethrow_exception(error);
}

} // namespace examples
