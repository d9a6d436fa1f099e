// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The accounts of a run: permits, versions, the sync gate, and where each sequence is. Pure bookkeeping, shared by
// the scheduler and by the staleness queue.
//
//   admission   while the gate is open and fewer than M permits are out; M is given, or chosen at each step
//               (outstanding.hpp)
//   a step      pick B ready sequences -> train -> close the gate -> synchronise -> version + 1, permits return, the
//               gate opens
//
// Which sequences a batch is made of, and what bound that keeps, is the staleness policy's (policies/).
//
// Source: AsyncOPD appendix G.
#pragma once

#include <algorithm>
#include <cassert>
#include <span>
#include <variant>
#include <vector>

#include "opd/sched/archive.hpp"
#include "opd/sched/outstanding.hpp"
#include "opd/sched/policies.hpp"
#include "opd/sched/settings.hpp"
#include "opd/sched/slots.hpp"

namespace opd::sched {

/// Where the outstanding sequences are.
struct census {
    index_t waiting = 0, rollout = 0, queued = 0, scoring = 0, ready = 0, training = 0;
    index_t outstanding() const { return waiting + rollout + queued + scoring + ready + training; }
    index_t& operator[](place p) {
        static constexpr index_t census::*of[] = {&census::waiting, &census::rollout, &census::queued,
                                                  &census::scoring, &census::ready,   &census::training};
        return this->*of[static_cast<int>(p) - 1];
    }
    bool operator==(const census&) const = default;
};

/// Permits and versions of one run, and where each sequence is. A permit is a slot number; slots are reused.
class ledger {
public:
    explicit ledger(const plan& p)
        : plan_(p), permits_(p.permits), control_(p),
          order_(policies::make(policies::all{}, static_cast<std::uint8_t>(p.policy),
                                {p.batch, p.depth, p.concurrency})) {}

    /// A new one: as after so many steps.
    void begin_at(version_t v) {
        version_ = v;
        consumed_ = v * plan_.batch;
    }

    version_t version() const { return version_; }
    bool gate_open() const { return gate_open_; }
    const census& where() const { return census_; }
    index_t outstanding() const { return static_cast<index_t>(entries_.size() - vacant_.size()); }
    index_t ready_count() const { return census_.ready; }
    index_t permits() const { return permits_; }

    /// How many sequences may be admitted now.
    index_t free() const {
        if (!gate_open_) return 0;
        const index_t room = std::visit(
            [&](const auto& o) {
                if constexpr (requires { o.admissible(policies::admission_state{}); })
                    return o.admissible({version_, consumed_, outstanding(), census_.waiting + census_.rollout});
                else
                    return permits_ - outstanding();
            },
            order_);
        return std::max<index_t>(0, room);
    }

    /// Takes a permit. free() must be positive.
    slot_t admit() {
        slot_t s;
        if (vacant_.empty()) {
            s = static_cast<slot_t>(entries_.size());
            entries_.emplace_back();
            vacant_.reserve(entries_.capacity()); // so that giving a permit back never allocates
        } else {
            s = vacant_.back();
            vacant_.pop_back();
        }
        entries_[s] = {-1, place::waiting};
        ++census_.waiting;
        std::visit([&](auto& o) { o.admitted(s); }, order_);
        return s;
    }
    /// It is in rollout. Its first token will be drawn by the present version, unless it has some already.
    void started(slot_t s) {
        assert(entries_[s].where == place::waiting);
        move(s, place::rollout);
        if (entries_[s].start >= 0) return;
        entries_[s].start = version_;
        std::visit([&](auto& o) { o.started(s, version_); }, order_);
    }
    /// It waits for a lane and starts again: its tokens are forgotten.
    void restarted(slot_t s) {
        assert(entries_[s].start >= 0 && entries_[s].where < place::ready);
        std::visit([&](auto& o) { o.restarted(s, entries_[s].start); }, order_);
        move(s, place::waiting);
        entries_[s].start = -1;
    }
    /// As restarted, and behind all that were admitted before: its step went on without it, so in front of them it
    /// would push one beyond its step.
    void admitted_again(slot_t s) {
        restarted(s);
        std::visit([&](auto& o) { o.withdrawn(s), o.admitted(s); }, order_);
    }
    /// It waits for a lane with the tokens that it has.
    void interrupted(slot_t s) {
        assert(entries_[s].where == place::rollout);
        move(s, place::waiting);
    }
    void queued(slot_t s) { move(s, place::queued); }
    void scoring(slot_t s) { move(s, place::scoring); }
    /// Scored: it may be picked.
    void ready(slot_t s) {
        move(s, place::ready);
        std::visit([&](auto& o) { o.ready(s, entries_[s].start); }, order_);
    }
    /// Appends the next batch of n sequences, if the policy has one.
    bool pick(index_t n, std::vector<slot_t>& out) {
        const std::size_t first = out.size();
        if (!std::visit([&](auto& o) { return o.pick(n, version_, out); }, order_)) return false;
        for (std::size_t i = first; i < out.size(); ++i) move(out[i], place::training);
        return true;
    }
    /// A picked batch was not consumed: its sequences are ready again, in front.
    void put_back(std::span<const slot_t> batch) {
        std::vector<policies::listing> list;
        for (const slot_t s : batch) {
            assert(entries_[s].where == place::training);
            move(s, place::ready);
            list.push_back({s, entries_[s].start});
        }
        std::visit([&](auto& o) { o.put_back(list); }, order_);
    }
    /// Returns the permit of a sequence that was not consumed.
    void release(slot_t s) {
        const entry e = entries_[s];
        if (e.start < 0)
            std::visit([&](auto& o) { o.withdrawn(s); }, order_);
        else if (e.where != place::training)
            std::visit([&](auto& o) { o.left(s, e.start, e.where == place::ready); }, order_);
        vacate(s);
    }
    /// Nothing is admitted until advance(): called when an update is done and its weights are not yet out.
    void close_gate() { gate_open_ = false; }
    void reopen_gate() { gate_open_ = true; }
    /// Automatic M: what was seen for some time.
    void pass(double seconds, bool held, bool starved, double teachers_idle, index_t queue, double rollout_idle) {
        control_.pass(seconds, held, starved, teachers_idle, queue, rollout_idle);
    }
    void called(double full) { control_.called(full); }
    void told(double elasticity) { control_.told(elasticity); }
    /// What was seen was by another clock.
    void forget_time() { control_.forget(); }
    /// The update that consumed `batch` is synchronised: the version moves, the permits return, the gate opens.
    void advance(std::span<const slot_t> batch) {
        if (plan_.automatic)
            permits_ = control_.step(census_.waiting + census_.rollout + census_.queued + census_.scoring, permits_);
        ++version_;
        for (const slot_t s : batch) {
            assert(entries_[s].where == place::training);
            vacate(s);
        }
        consumed_ += static_cast<index_t>(batch.size());
        gate_open_ = true;
    }
    /// The sequences that may not be consumed any more, to be released or restarted as the policy says.
    void stale(std::vector<slot_t>& out) const {
        if (traits_of(plan_.policy).stale == stale_end::none) return;
        for (slot_t s = 0; s < entries_.size(); ++s) {
            const entry& e = entries_[s];
            if (e.where != place::training && e.start >= 0 && e.start < version_ - plan_.depth) out.push_back(s);
        }
    }
    /// A stale sequence that was ready is not any more, so that it can be restarted.
    void unready(slot_t s) {
        std::visit([&](auto& o) { o.unready(s, entries_[s].start); }, order_);
        move(s, place::queued);
    }
    /// Another number of permits, from now on. Those that are out stay out.
    void resize(index_t permits) {
        permits_ = permits;
        control_.start_at(permits);
    }

    /// Automatic M is one that the rule can come to.
    bool permits_are_sound() const { return !plan_.automatic || (permits_ >= plan_.least && permits_ <= plan_.most); }
    /// So is what the rule remembers.
    bool rule_is_sound() const { return !plan_.automatic || control_.sound(); }

    /// Version of its start; -1: none yet.
    version_t version_of(slot_t s) const { return entries_[s].start; }
    place place_of(slot_t s) const { return s < entries_.size() ? entries_[s].where : place::none; }
    bool in_use(slot_t s) const { return place_of(s) != place::none; }
    slot_t slots() const { return static_cast<slot_t>(entries_.size()); }
    /// edf: sequences that could still have shared the tightest deadline of the last batch; -1 under other policies.
    index_t slack() const {
        const auto of = [](const auto& o) -> index_t {
            if constexpr (requires { o.slack(); }) return o.slack();
            return -1;
        };
        return std::visit(of, order_);
    }

    /// What its policy lists (those that are ready, or all that are not in training), in the policy's order.
    std::vector<slot_t> order() const {
        std::vector<slot_t> r;
        std::visit([&](const auto& o) { o.list(r); }, order_);
        return r;
    }
    /// Read into a new one.
    template <class A>
    void fields(A& a) {
        a(permits_, control_, version_, consumed_, gate_open_, entries_, vacant_);
        const auto more = [&](auto& o) {
            if constexpr (requires { o.fields(a); }) o.fields(a);
        };
        std::visit(more, order_);
        std::vector<slot_t> order;
        if constexpr (!A::reading) order = this->order();
        a(order);
        if constexpr (A::reading) rebuild(order);
    }

private:
    struct entry {
        version_t start = -1;
        place where = place::none;
        template <class A>
        void fields(A& a) {
            a(start, where);
        }
    };
    void move(slot_t s, place to) {
        --census_[entries_[s].where];
        ++census_[to];
        entries_[s].where = to;
    }
    // Counts and lists follow from the places and the order.
    void rebuild(const std::vector<slot_t>& order) {
        detail::count_range counted;
        counted(consumed_, version_);
        detail::needs(counted.holds && version_ <= counted.most / plan_.batch && permits_ >= 1 &&
                          permits_ < index_t{1} << 31,
                      "versions and permits are no counts");
        const policy_traits& policy = traits_of(plan_.policy);
        const auto vacant = [](place p) { return p == place::none; };
        const auto ordered = [&](place p) {
            return policy.lists_unscored ? p != place::none && p != place::training : p == place::ready;
        };
        std::size_t listed = 0;
        for (const entry& e : entries_) {
            detail::needs(e.start <= version_ && (e.start >= 0 || (e.start == -1 && e.where <= place::waiting)) &&
                              (e.start == -1 || e.where != place::none),
                          "exactly what has started has the version of its start");
            detail::needs(!policy.table_by_version || e.start < 0 || e.where == place::training ||
                              e.start >= version_ - plan_.depth,
                          "a start lag is above its bound");
            if (e.where != place::none) ++census_[e.where];
            listed += vacant(e.where) || ordered(e.where);
        }
        std::vector<bool> seen(entries_.size());
        const auto names = [&](const std::vector<slot_t>& list, auto&& belongs) {
            for (const slot_t s : list) {
                detail::needs(s < slots() && !seen[s] && belongs(entries_[s].where), "a list names what it should not");
                seen[s] = true;
            }
        };
        names(vacant_, vacant), names(order, ordered);
        detail::needs(vacant_.size() + order.size() == listed, "a list is too short");
        const auto replay = [&](auto& o) {
            for (const slot_t s : order) o.admitted(s);
            for (slot_t s = 0; s < slots(); ++s)
                if (entries_[s].start >= 0 && entries_[s].where != place::training) o.started(s, entries_[s].start);
            for (const slot_t s : order)
                if (entries_[s].where == place::ready) o.ready(s, entries_[s].start);
        };
        std::visit(replay, order_);
    }
    void vacate(slot_t s) {
        --census_[entries_[s].where];
        entries_[s] = {};
        vacant_.push_back(s);
    }

    plan plan_;
    index_t permits_;
    detail::outstanding_control control_;
    version_t version_ = 0;
    index_t consumed_ = 0; // over the whole run
    bool gate_open_ = true;
    std::vector<entry> entries_; // by slot
    std::vector<slot_t> vacant_;
    census census_;
    policies::any_order order_;
};

} // namespace opd::sched
