// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// in_order: the B that were admitted first, once all of them are scored.
//
// Theorem: start lag <= ceil(M/B) - 1, as of cohort_fifo, with "admitted earlier" for "of lower version". Without
// failures batch j has the same sequences whatever the timing.
#pragma once

#include <limits>
#include <span>
#include <vector>

#include "opd/sched/policies/policy.hpp"

namespace opd::sched::policies {

/// Start lag at most ceil(M/B) - 1, and batches that no timing changes; waits for the slowest sequence.
class in_order {
public:
    static constexpr policy_traits traits{.name = "in_order", .lists_unscored = true};
    using order = in_order;
    explicit in_order(const policy_settings& = {}) {}

    void admitted(slot_t s) {
        if (s >= links_.size()) links_.resize(s + std::size_t{1});
        links_[s] = {last_, none, false};
        (last_ == none ? first_ : links_[last_].next) = s;
        last_ = s;
        if (frontier_ == none) frontier_ = s;
    }
    void started(slot_t, version_t) {}
    void restarted(slot_t, version_t) {}
    void ready(slot_t s, version_t) {
        links_[s].ready = true;
        move_frontier();
    }
    void unready(slot_t s, version_t) { // it keeps its place
        links_[s].ready = false;
        if (!before_frontier(s)) return;
        frontier_ = s;
        prefix_ = 0;
        for (slot_t i = first_; i != s; i = links_[i].next) ++prefix_;
    }
    void withdrawn(slot_t s) { left(s, -1, false); }
    void left(slot_t s, version_t, bool) {
        if (s == frontier_)
            frontier_ = links_[s].next;
        else if (links_[s].ready && before_frontier(s))
            --prefix_;
        unlink(s);
        move_frontier();
    }
    bool pick(index_t n, version_t, std::vector<slot_t>& out) {
        if (prefix_ < n) return false;
        for (prefix_ -= n; n > 0; --n) {
            const slot_t s = first_;
            out.push_back(s);
            unlink(s);
        }
        return true;
    }
    void put_back(std::span<const listing> batch) {
        for (std::size_t i = batch.size(); i-- > 0;) {
            const slot_t s = batch[i].slot;
            if (s >= links_.size()) links_.resize(s + std::size_t{1}); // restored meanwhile
            links_[s] = {none, first_, true};
            (first_ == none ? last_ : links_[first_].previous) = s;
            first_ = s;
            ++prefix_;
        }
    }
    void list(std::vector<slot_t>& out) const {
        for (slot_t s = first_; s != none; s = links_[s].next) out.push_back(s);
    }

private:
    static constexpr slot_t none = std::numeric_limits<slot_t>::max();
    struct link {
        slot_t previous = none, next = none;
        bool ready = false;
    };
    void unlink(slot_t s) {
        const link l = links_[s];
        (l.previous == none ? first_ : links_[l.previous].next) = l.next;
        (l.next == none ? last_ : links_[l.next].previous) = l.previous;
    }
    void move_frontier() {
        while (frontier_ != none && links_[frontier_].ready) {
            ++prefix_;
            frontier_ = links_[frontier_].next;
        }
    }
    bool before_frontier(slot_t s) const {
        for (slot_t i = first_; i != frontier_; i = links_[i].next)
            if (i == s) return true;
        return false;
    }
    std::vector<link> links_;                             // by slot
    slot_t first_ = none, last_ = none, frontier_ = none; // frontier: the first that is not ready
    index_t prefix_ = 0;                                  // ready ones before it
};

} // namespace opd::sched::policies
