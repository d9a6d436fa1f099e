// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Permits, versions, the sync gate and the staleness policies: who may start, and which scored sequences make the next
// batch. Pure bookkeeping, shared by the scheduler and by the staleness queue.
//
//   admission   while the gate is open and fewer than M permits are out; M is given, or chosen at each step (outstanding.hpp)
//   a step      pick B ready sequences -> train -> close the gate -> synchronise -> version + 1, permits return, gate open
//
// Notation: v the version; B the batch; M <= (tau + 1)·B the permits. Between two steps at most M sequences are
// outstanding, those in training included, and every full batch consumes B of them.
//
//   capacity     A sequence with lag l is outstanding at l + 1 steps, so over the first J full steps of a run the sum of
//                (lag + 1) over consumed sequences is at most M·J, and they are B·J: the mean start lag is at most M/B - 1;
//                where M changes, at most the mean of what was outstanding at these steps over B, less 1.
//                Over any other J steps the at most M sequences that were there before add their earlier steps: at most
//                M·L/(B·J), L the largest lag. Nothing holds for one sequence: it can be overtaken for ever.
//   cohort_fifo  When v becomes v + 1, at most M - B sequences of version <= v are left, no later one goes before them and
//                none joins them: they are gone after ceil(M/B) - 1 more steps. Start lag <= ceil(M/B) - 1.
//   in_order     The same with "admitted earlier" for "of lower version".
//   edf          The deadline of a sequence of version u is the step at version u + tau. A batch is accepted if for every
//                j >= 1 at most B·(j - 1) others have their deadline within the next j steps. What is admitted at v has
//                its deadline at v + tau, and at most tau·B others are outstanding then; so feasibility is kept by every
//                step, and once all are scored the B of lowest version are always accepted: start lag <= tau, no deadlock.
//   drop, retry  When v becomes v + 1 every sequence of version < v + 1 - tau that is not in training leaves (or starts
//                again): start lag <= tau. The version moves only when B sequences were consumed, so progress is kept.
//   areal        Admission while running + accepted < (eta + v + 1)·B and running < concurrency (AReaL,
//                staleness_manager); consumption as capacity. With full batches this is capacity with M = (eta + 1)·B.
//   naive_wait   "Wait for whoever would exceed tau": more than B sequences can come to share a deadline; then it waits for
//                ever. Kept as a negative control.
//
// A failed sequence leaves and a retried one takes a new version; both only shrink the sets that the bounds count.
// Source: AsyncOPD appendix G; AReaL (arXiv 2505.24298) section 5; the feasibility test is that of earliest-deadline-first
// scheduling (Liu and Layland 1973) for jobs of one batch slot each.
#pragma once

#include <algorithm>
#include <cassert>
#include <limits>
#include <span>
#include <variant>
#include <vector>

#include "opd/sched/archive.hpp"
#include "opd/sched/outstanding.hpp"
#include "opd/sched/settings.hpp"

namespace opd::sched {

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

namespace detail {

/// What a policy sees of a sequence that leaves it.
struct listing {
    slot_t slot;
    version_t version; // of its start
};

/// capacity, drop, retry, areal: the B that were scored first.
class completion_order {
public:
    void admitted(slot_t) {}
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

/// in_order: the B that were admitted first, once all of them are scored.
class admission_order {
public:
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

/// Outstanding sequences by the version of their start. Those that wait for a lane have none yet.
class cohorts {
public:
    void admitted(slot_t) {}
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

/// cohort_fifo: the B of lowest version, once no unscored one is of lower version than any of them.
class cohort_order : public cohorts {
public:
    bool pick(index_t n, version_t, std::vector<slot_t>& out) {
        if (ready_count_ < n) return false;
        index_t need = n;
        for (const cohort& c : list_) {
            if (c.ready.size() >= need) break;
            if (c.unready > 0) return false;
            need -= c.ready.size();
        }
        take(n, out);
        return true;
    }
};

/// edf: the B of lowest version, if every deadline of the others stays feasible.
class deadline_order : public cohorts {
public:
    explicit deadline_order(index_t batch = 1, index_t tau = 0) : batch_(batch), tau_(tau) {}
    bool pick(index_t n, version_t now, std::vector<slot_t>& out) {
        if (ready_count_ < n) return false;
        index_t need = n, others = 0, slack = std::numeric_limits<index_t>::max();
        version_t u = base_;
        for (const cohort& c : list_) {
            const index_t taken = std::min(need, c.ready.size());
            need -= taken;
            others += c.unready + c.ready.size() - taken;
            // those of version <= u are due within the next u + tau - now steps after this one
            slack = std::min(slack, batch_ * std::max<version_t>(0, u + tau_ - now) - others);
            ++u;
        }
        if (slack < 0) return false;
        slack_ = slack;
        take(n, out);
        return true;
    }
    /// Of the last batch: how many more sequences could have shared the tightest deadline.
    index_t slack() const { return slack_; }
    template <class A>
    void fields(A& a) {
        a(slack_);
    }

private:
    index_t batch_, tau_, slack_ = 0;
};

/// naive_wait: order of completion, but whoever would exceed tau must be in the batch.
class naive_order {
public:
    explicit naive_order(index_t tau = 0) : tau_(tau) {}
    void admitted(slot_t) {}
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

} // namespace detail

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
    explicit ledger(const plan& p) : plan_(p), permits_(p.permits), control_(p) {
        switch (p.policy) {
        case staleness_policy::cohort_fifo:
            order_ = detail::cohort_order{};
            break;
        case staleness_policy::edf:
            order_ = detail::deadline_order(p.batch, p.depth);
            break;
        case staleness_policy::in_order:
            order_ = detail::admission_order{};
            break;
        case staleness_policy::naive_wait:
            order_ = detail::naive_order(p.depth);
            break;
        default:
            break;
        }
    }

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
        if (plan_.policy != staleness_policy::areal) return std::max<index_t>(0, permits_ - outstanding());
        const index_t room = (plan_.depth + version_ + 1) * plan_.batch - (consumed_ + outstanding());
        const index_t in_rollout = census_.waiting + census_.rollout;
        const index_t lanes = plan_.concurrency > 0 ? plan_.concurrency - in_rollout : room;
        return std::max<index_t>(0, std::min(room, lanes));
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
        std::vector<detail::listing> list;
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
        if (e.start < 0) {
            // a policy that lists by version does not know it
            if (auto* o = std::get_if<detail::admission_order>(&order_)) o->left(s, -1, false);
        } else if (e.where != place::training) {
            std::visit([&](auto& o) { o.left(s, e.start, e.where == place::ready); }, order_);
        }
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
    /// Under drop and retry: the sequences that may not be consumed any more. They are to be released or restarted.
    void stale(std::vector<slot_t>& out) const {
        if (plan_.policy != staleness_policy::drop && plan_.policy != staleness_policy::retry) return;
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
    bool permits_are_sound() const {
        return !plan_.automatic || (permits_ >= plan_.least && permits_ <= plan_.most && control_.sound());
    }

    /// Version of its start; -1: none yet.
    version_t version_of(slot_t s) const { return entries_[s].start; }
    place place_of(slot_t s) const { return s < entries_.size() ? entries_[s].where : place::none; }
    bool in_use(slot_t s) const { return place_of(s) != place::none; }
    slot_t slots() const { return static_cast<slot_t>(entries_.size()); }
    /// edf: sequences that could still have shared the tightest deadline of the last batch; -1 under other policies.
    index_t slack() const {
        const auto* o = std::get_if<detail::deadline_order>(&order_);
        return o ? o->slack() : -1;
    }

    /// What its policy lists (under in_order all that are not in training, else those that are ready), in the policy's order.
    std::vector<slot_t> order() const {
        std::vector<slot_t> r;
        std::visit([&](const auto& o) { o.list(r); }, order_);
        return r;
    }
    /// Read into a new one.
    template <class A>
    void fields(A& a) {
        a(permits_, control_, version_, consumed_, gate_open_, entries_, vacant_);
        if (auto* o = std::get_if<detail::deadline_order>(&order_)) a(*o);
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
        const bool by_version = plan_.policy == staleness_policy::cohort_fifo || plan_.policy == staleness_policy::edf;
        const auto vacant = [](place p) { return p == place::none; };
        const auto ordered = [&](place p) {
            return plan_.policy == staleness_policy::in_order ? p != place::none && p != place::training
                                                              : p == place::ready;
        };
        std::size_t listed = 0;
        for (const entry& e : entries_) {
            detail::needs(e.start <= version_ && (e.start >= 0 || (e.start == -1 && e.where <= place::waiting)) &&
                              (e.start == -1 || e.where != place::none),
                          "exactly what has started has the version of its start");
            detail::needs(!by_version || e.start < 0 || e.where == place::training || e.start >= version_ - plan_.depth,
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
    std::variant<detail::completion_order, detail::cohort_order, detail::deadline_order, detail::admission_order,
                 detail::naive_order>
        order_;
};

} // namespace opd::sched
