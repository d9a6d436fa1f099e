// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// naive_wait: order of completion, but whoever would exceed tau must be in the batch.
//
// A negative control: more than B sequences can come to share a deadline, and then it waits for ever.
#pragma once

#include <algorithm>
#include <span>
#include <utility>
#include <vector>

#include "opd/sched/policies/policy.hpp"

namespace opd::sched::policies {

/// For tests, which show that it deadlocks; a run must ask for it by async::negative_control.
class naive_wait {
public:
    static constexpr policy_traits traits{.name = "naive_wait",
                                          .deadlock = "deadlocks as soon as more than a batch shares a deadline"};
    using order = naive_wait;
    explicit naive_wait(const policy_settings& s) : tau_(s.tau) {}

    void admitted(slot_t) {}
    void withdrawn(slot_t) {}
    void started(slot_t s, version_t v) { unready_.push_back({s, v}); }
    void restarted(slot_t s, version_t) { forget(unready_, s); }
    void ready(slot_t s, version_t v) {
        forget(unready_, s);
        ready_.push_back({s, v});
    }
    void unready(slot_t s, version_t v) {
        forget(ready_, s);
        unready_.push_back({s, v});
    }
    void left(slot_t s, version_t, bool was_ready) { forget(was_ready ? ready_ : unready_, s); }
    bool pick(index_t n, version_t now, std::vector<slot_t>& out) {
        const auto urgent = [&](const entry& e) { return e.second <= now - tau_; };
        if (static_cast<index_t>(ready_.size()) < n || std::any_of(unready_.begin(), unready_.end(), urgent) ||
            std::count_if(ready_.begin(), ready_.end(), urgent) > n)
            return false;
        std::vector<entry> rest;
        for (const bool now_or_never : {true, false})
            for (const entry& e : ready_)
                if (urgent(e) == now_or_never) {
                    if (n > 0)
                        out.push_back(e.first), --n;
                    else
                        rest.push_back(e);
                }
        ready_ = std::move(rest);
        return true;
    }
    void put_back(std::span<const listing> batch) {
        for (std::size_t i = batch.size(); i-- > 0;) ready_.insert(ready_.begin(), {batch[i].slot, batch[i].version});
    }
    void list(std::vector<slot_t>& out) const {
        for (const entry& e : ready_) out.push_back(e.first);
    }

private:
    using entry = std::pair<slot_t, version_t>;
    static void forget(std::vector<entry>& list, slot_t s) {
        list.erase(std::find_if(list.begin(), list.end(), [&](const entry& e) { return e.first == s; }));
    }
    index_t tau_;
    std::vector<entry> unready_, ready_;
};

} // namespace opd::sched::policies
