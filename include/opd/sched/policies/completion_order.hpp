// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The order that capacity, drop, retry and areal have in common: that of the scores.
#pragma once

#include <span>
#include <vector>

#include "opd/sched/policies/policy.hpp"

namespace opd::sched::policies {

/// A batch is the n that were scored first.
struct completion_order {
    explicit completion_order(const policy_settings& = {}) {}
    void admitted(slot_t) {}
    void withdrawn(slot_t) {}
    void started(slot_t, version_t) {}
    void restarted(slot_t, version_t) {}
    void ready(slot_t s, version_t) { ready_.push(s); }
    void unready(slot_t s, version_t) { ready_.erase(s); }
    void left(slot_t s, version_t, bool was_ready) {
        if (was_ready) ready_.erase(s);
    }
    bool pick(index_t n, version_t, std::vector<slot_t>& out) {
        if (ready_.size() < n) return false;
        while (n-- > 0) out.push_back(ready_.pop());
        return true;
    }
    void put_back(std::span<const listing> batch) {
        for (std::size_t i = batch.size(); i-- > 0;) ready_.push_front(batch[i].slot);
    }
    void list(std::vector<slot_t>& out) const { out.assign(ready_.begin(), ready_.end()); }

private:
    slot_fifo ready_;
};

} // namespace opd::sched::policies
