// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "threads.hpp"

#include <stdexcept>
#include <utility>

namespace trainer {

team::team(int size) {
    if (size < 1) throw std::invalid_argument("threads: at least 1 is needed");
    for (int thread = 1; thread < size; ++thread)
        workers_.emplace_back([this, thread](std::stop_token stop) { serve(stop, thread); });
}

team::~team() {
    for (auto& worker : workers_) worker.request_stop();
    wake_.notify_all();
}

void team::take_pieces(int thread) const {
    try {
        for (index_t piece; (piece = next_.fetch_add(1)) < count_;) (*work_)(piece, thread);
    } catch (...) {
        const std::lock_guard lock(mutex_);
        if (!failure_) failure_ = std::current_exception();
        next_ = count_; // nobody starts another piece
    }
}

void team::serve(std::stop_token stop, int thread) {
    std::uint64_t seen = 0;
    std::unique_lock lock(mutex_);
    for (;;) {
        if (!wake_.wait(lock, stop, [&] { return round_ != seen; })) return;
        seen = round_;
        lock.unlock();
        take_pieces(thread);
        lock.lock();
        if (--busy_ == 0) done_.notify_one();
    }
}

void team::run(index_t count, const std::function<void(index_t, int)>& work) const {
    if (workers_.empty() || count <= 1) {
        for (index_t piece = 0; piece < count; ++piece) work(piece, 0);
        return;
    }
    {
        const std::lock_guard lock(mutex_);
        work_ = &work;
        count_ = count;
        next_ = 0;
        busy_ = static_cast<int>(workers_.size());
        failure_ = nullptr;
        ++round_;
    }
    wake_.notify_all();
    take_pieces(0);
    std::unique_lock lock(mutex_);
    done_.wait(lock, [&] { return busy_ == 0; });
    if (failure_) std::rethrow_exception(std::exchange(failure_, nullptr));
}

} // namespace trainer
