// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Slots: the numbers of the permits, one for each outstanding sequence, and a queue of them.
#pragma once

#include <algorithm>
#include <cassert>
#include <cstdint>
#include <vector>

#include "opd/config.hpp"

namespace opd::sched {

/// In [0, M), M permits.
using slot_t = std::uint32_t;

/// A queue of slots on one vector: push, pop, put back in front.
class slot_fifo {
public:
    bool empty() const { return head_ == items_.size(); }
    index_t size() const { return static_cast<index_t>(items_.size() - head_); }
    slot_t front() const { return items_[head_]; }
    auto begin() const { return items_.begin() + static_cast<std::ptrdiff_t>(head_); }
    auto end() const { return items_.end(); }
    void push(slot_t s) { items_.push_back(s); }
    slot_t pop() {
        const slot_t s = items_[head_++];
        if (head_ == items_.size()) {
            items_.clear();
            head_ = 0;
        } else if (head_ > 64 && head_ > items_.size() / 2) {
            items_.erase(items_.begin(), begin());
            head_ = 0;
        }
        return s;
    }
    void push_front(slot_t s) {
        if (head_ > 0)
            items_[--head_] = s;
        else
            items_.insert(items_.begin(), s);
    }
    void erase(slot_t s) {
        const auto at = std::find(items_.begin() + static_cast<std::ptrdiff_t>(head_), items_.end(), s);
        assert(at != items_.end());
        items_.erase(at);
    }
    template <class A>
    void fields(A& a) {
        if constexpr (A::reading)
            a(items_), head_ = 0;
        else
            a(std::vector<slot_t>(begin(), end())); // equal queues give equal bytes
    }

private:
    std::vector<slot_t> items_;
    std::size_t head_ = 0;
};

} // namespace opd::sched
