// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Messages from any thread to one, which waits for them.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

namespace opd::sched::detail {

template <class Message>
class mailbox {
public:
    using clock = std::chrono::steady_clock;

    void post(Message m) {
        const std::lock_guard lock(mutex_);
        mail_.push_back(std::move(m));
        came_.notify_one();
    }
    /// Appends what has come, and empties the box. Waits until something is there, at most until `limit`.
    void receive(std::vector<Message>& out, bool wait, std::optional<clock::time_point> limit = {}) {
        std::unique_lock lock(mutex_);
        const auto any = [&] { return !mail_.empty(); };
        if (wait && limit)
            came_.wait_until(lock, *limit, any);
        else if (wait)
            came_.wait(lock, any);
        if (out.empty()) {
            out.swap(mail_);
            return;
        }
        for (Message& m : mail_) out.push_back(std::move(m));
        mail_.clear();
    }
    /// Throws away what has come and is `unwanted`.
    template <class Unwanted>
    void discard(Unwanted&& unwanted) {
        std::vector<Message> gone; // destroyed without the lock
        const std::lock_guard lock(mutex_);
        std::vector<Message> kept;
        for (Message& m : mail_) (unwanted(std::as_const(m)) ? gone : kept).push_back(std::move(m));
        mail_ = std::move(kept);
    }

private:
    std::mutex mutex_;
    std::condition_variable came_;
    std::vector<Message> mail_;
};

} // namespace opd::sched::detail
