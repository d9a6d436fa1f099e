// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Deadlines of one kind. All of a kind take the same time, so the first to begin is the first to be due: a list
// through a table, in which whoever is done in time leaves in O(1), and which is never longer than what is still
// running.
#pragma once

#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "opd/sched/archive.hpp"
#include "opd/sched/types.hpp"

namespace opd::sched::detail {

class deadline_list {
public:
    bool empty() const { return first_ == none; }
    /// Who began first; there must be someone.
    std::uint32_t first() const { return first_; }
    /// When the first is due that takes `seconds`; 0: there is no limit.
    double next(double seconds) const { return seconds > 0 && !empty() ? links_[first_].since + seconds : forever; }

    bool has(std::uint32_t who) const { return who < links_.size() && links_[who].here; }
    /// From now on; times never decrease.
    void begin(std::uint32_t who, double now) {
        end(who);
        if (who >= links_.size()) links_.resize(who + std::size_t{1});
        links_[who] = {now, last_, none, true};
        (last_ == none ? first_ : links_[last_].after) = who;
        last_ = who;
    }
    /// Without effect if it is not there.
    void end(std::uint32_t who) {
        if (who >= links_.size() || !links_[who].here) return;
        const link l = links_[who];
        (l.before == none ? first_ : links_[l.before].after) = l.after;
        (l.after == none ? last_ : links_[l.after].before) = l.before;
        links_[who] = {};
    }
    void clear() {
        while (!empty()) end(first_);
    }
    /// f(who), the first to begin first.
    template <class F>
    void each(F&& f) const {
        for (std::uint32_t i = first_; i != none; i = links_[i].after) f(i);
    }
    /// Of numbers below `most`; read into a new one.
    template <class A>
    void fields(A& a, std::size_t most) {
        std::vector<std::pair<std::uint32_t, double>> list;
        if constexpr (!A::reading) each([&](std::uint32_t i) { list.emplace_back(i, links_[i].since); });
        a(list);
        if constexpr (A::reading)
            for (const auto& [who, since] : list) {
                needs(who < most, "a deadline is nobody's");
                begin(who, since);
            }
    }

private:
    static constexpr std::uint32_t none = std::numeric_limits<std::uint32_t>::max();
    struct link {
        double since = 0;
        std::uint32_t before = none, after = none;
        bool here = false;
    };
    std::vector<link> links_; // by number
    std::uint32_t first_ = none, last_ = none;
};

} // namespace opd::sched::detail
