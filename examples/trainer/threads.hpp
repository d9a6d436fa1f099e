// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A team of threads that share out numbered pieces of work and sleep in between. What a piece computes must not depend
// on who runs it: then nothing in the trainer depends on the number of threads.
#pragma once

#include <atomic>
#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "opd/config.hpp"

namespace trainer {

using opd::index_t;

class team {
public:
    /// `size` threads including the caller of parallel_for.
    explicit team(int size);
    ~team();
    team(const team&) = delete;
    team& operator=(const team&) = delete;

    int size() const { return static_cast<int>(workers_.size()) + 1; }

    /// Calls work(piece) for 0 ... count - 1, each once, on any thread; returns when all are done. The first exception
    /// is rethrown here.
    void parallel_for(index_t count, const std::function<void(index_t piece)>& work) const {
        run(count, [&](index_t piece, int) { work(piece); });
    }

    /// The same with the number of the thread, 0 ... size() - 1, for scratch memory.
    void run(index_t count, const std::function<void(index_t piece, int thread)>& work) const;

private:
    void take_pieces(int thread) const;
    void serve(std::stop_token stop, int thread);

    mutable std::mutex mutex_;
    mutable std::condition_variable_any wake_, done_;
    mutable std::uint64_t round_ = 0;                                 // counts calls of run
    mutable int busy_ = 0;                                            // workers still in this round
    mutable const std::function<void(index_t, int)>* work_ = nullptr; // of this round
    mutable index_t count_ = 0;
    mutable std::atomic<index_t> next_{0};
    mutable std::exception_ptr failure_;
    std::vector<std::jthread> workers_;
};

} // namespace trainer
