// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A heap over small numbers (workers) that knows where each of them is: the one with the least key on top, the lower
// number first among equals; a key changes or goes in O(log n). No number is looked for.
#pragma once

#include <cstdint>
#include <vector>

#include "opd/config.hpp"

namespace opd::sched::detail {

template <class Key>
class indexed_heap {
public:
    bool empty() const { return heap_.empty(); }
    index_t size() const { return static_cast<index_t>(heap_.size()); }
    /// Of what is on top; there must be something.
    std::int32_t top() const { return heap_.front().number; }
    const Key& least() const { return heap_.front().key; }

    void clear() {
        for (const entry& e : heap_) where_[index(e.number)] = -1;
        heap_.clear();
    }
    /// Adds the number, or gives it another key.
    void set(std::int32_t number, const Key& key) {
        if (index(number) >= where_.size()) where_.resize(index(number) + 1, -1);
        std::int32_t at = where_[index(number)];
        if (at < 0) {
            at = static_cast<std::int32_t>(heap_.size());
            heap_.emplace_back();
        }
        settle(index(at), {key, number});
    }
    /// Without effect if it is not there.
    void remove(std::int32_t number) {
        if (index(number) >= where_.size() || where_[index(number)] < 0) return;
        const std::int32_t at = where_[index(number)];
        where_[index(number)] = -1;
        const entry last = heap_.back();
        heap_.pop_back();
        if (last.number != number) settle(index(at), last);
    }
    /// Of a number; null if it is not there.
    const Key* find(std::int32_t number) const {
        return index(number) < where_.size() && where_[index(number)] >= 0 ? &heap_[index(where_[index(number)])].key
                                                                           : nullptr;
    }

private:
    struct entry {
        Key key = {};
        std::int32_t number = -1;
        bool operator<(const entry& o) const {
            if (key < o.key) return true;
            return !(o.key < key) && number < o.number;
        }
    };
    static std::size_t index(std::int32_t i) { return static_cast<std::size_t>(i); }
    void put(std::size_t at, const entry& e) {
        heap_[at] = e;
        where_[index(e.number)] = static_cast<std::int32_t>(at);
    }
    // Puts e where it belongs, the place `at` being vacant.
    void settle(std::size_t at, const entry& e) {
        for (; at > 0 && e < heap_[(at - 1) / 2]; at = (at - 1) / 2) put(at, heap_[(at - 1) / 2]);
        for (;;) {
            std::size_t child = 2 * at + 1;
            if (child >= heap_.size()) break;
            child += child + 1 < heap_.size() && heap_[child + 1] < heap_[child];
            if (!(heap_[child] < e)) break;
            put(at, heap_[child]);
            at = child;
        }
        put(at, e);
    }
    std::vector<entry> heap_;
    std::vector<std::int32_t> where_; // by number; -1: not in it
};

} // namespace opd::sched::detail
