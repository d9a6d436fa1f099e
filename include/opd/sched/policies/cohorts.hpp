// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The table that cohort_fifo and edf have in common: outstanding sequences by the version of their start.
#pragma once

#include <deque>
#include <span>
#include <vector>

#include "opd/sched/policies/policy.hpp"

namespace opd::sched::policies {

/// Outstanding sequences by the version of their start. Those that wait for a lane have none yet.
class cohorts {
public:
    void admitted(slot_t) {}
    void withdrawn(slot_t) {}
    void started(slot_t, version_t v) { ++at(v).unready; }
    void restarted(slot_t, version_t v) {
        --at(v).unready;
        trim();
    }
    void ready(slot_t s, version_t v) {
        cohort& c = at(v);
        --c.unready;
        c.ready.push(s);
        ++ready_count_;
    }
    void unready(slot_t s, version_t v) {
        cohort& c = at(v);
        ++c.unready;
        c.ready.erase(s);
        --ready_count_;
    }
    void left(slot_t s, version_t v, bool was_ready) {
        cohort& c = at(v);
        if (was_ready) {
            c.ready.erase(s);
            --ready_count_;
        } else {
            --c.unready;
        }
        trim();
    }
    void put_back(std::span<const listing> batch) {
        for (std::size_t i = batch.size(); i-- > 0;) {
            at(batch[i].version).ready.push_front(batch[i].slot);
            ++ready_count_;
        }
    }
    void list(std::vector<slot_t>& out) const {
        for (const cohort& c : list_) out.insert(out.end(), c.ready.begin(), c.ready.end());
    }

protected:
    struct cohort {
        index_t unready = 0; // started, not scored
        slot_fifo ready;
    };
    cohort& at(version_t v) {
        if (list_.empty()) base_ = v;
        for (; v < base_; --base_) list_.emplace_front();
        while (v >= base_ + static_cast<version_t>(list_.size())) list_.emplace_back();
        return list_[static_cast<std::size_t>(v - base_)];
    }
    void trim() {
        while (!list_.empty() && list_.front().unready == 0 && list_.front().ready.empty()) {
            list_.pop_front();
            ++base_;
        }
    }
    // The n ready ones of lowest version, which are there.
    void take(index_t n, std::vector<slot_t>& out) {
        ready_count_ -= n;
        for (cohort& c : list_)
            for (; n > 0 && !c.ready.empty(); --n) out.push_back(c.ready.pop());
        trim();
    }
    version_t base_ = 0; // version of the first cohort
    std::deque<cohort> list_;
    index_t ready_count_ = 0;
};

} // namespace opd::sched::policies
