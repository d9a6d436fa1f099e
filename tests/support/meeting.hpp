// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Where threads wait for each other, asleep: std::barrier yields first, to whatever else the machine runs.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <mutex>

namespace opd::test {

class meeting {
public:
    explicit meeting(std::size_t threads) : threads_(threads) {}
    void arrive_and_wait() {
        std::unique_lock hold(lock_);
        if (++here_ == threads_) {
            here_ = 0, ++times_;
            met_.notify_all();
        } else {
            met_.wait(hold, [this, time = times_] { return times_ != time; });
        }
    }

private:
    std::mutex lock_;
    std::condition_variable met_;
    std::size_t threads_, here_ = 0, times_ = 0;
};

} // namespace opd::test
