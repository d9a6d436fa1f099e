// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A permit: the right of one sequence to be outstanding. It is move-only and returns itself: an exception between
// admission and consumption costs no permit. Permits come from a staleness_queue (staleness_queue.hpp) and may
// outlive it.
//
// Every wait is a node of a first-in-first-out list, with a condition variable of its own. Whoever changes the state
// serves the lists under the lock: he hands permits, or a batch, over to the first in line as long as they suffice,
// and wakes it alone. So no wake-up is lost, because nobody has to notice a change by himself; none is for nothing;
// and a group of eight is not overtaken for ever by singles. A stop token or close() takes a node out, and the next
// in line is looked at. There is one lock, held for a few steps of bookkeeping and never while the caller's code
// runs.
#pragma once

#include <condition_variable>
#include <mutex>
#include <span>
#include <stop_token>
#include <string>
#include <utility>
#include <vector>

#include "opd/sched/ledger.hpp"

namespace opd::sched {

/// At any moment: acquired = consumed + returned + dropped + discarded + outstanding.
struct queue_counts {
    index_t acquired = 0;  ///< permits given out
    index_t consumed = 0;  ///< with items that were trained on
    index_t returned = 0;  ///< by permits that were destroyed: failed sequences
    index_t dropped = 0;   ///< with ready items that became stale under drop
    index_t discarded = 0; ///< with ready items that abort() gave back, or that were destroyed with the queue
    index_t retried = 0;   ///< ready items that became stale under retry, and restarts; their permits stay out
    index_t put_back = 0;  ///< items of batches that were destroyed untrained
    index_t batches = 0;   ///< trained and synchronised, or given up between the two

    index_t outstanding = 0, ready = 0, training = 0;    ///< now; the other outstanding ones are with their producers
    index_t waiting_producers = 0, waiting_learners = 0; ///< threads that wait now

    template <class A>
    void fields(A& a) {
        a(acquired, consumed, returned, dropped, discarded, retried, put_back, batches);
    }
};

class permit;
template <class T>
class staleness_queue;

namespace detail {

struct queue_waiter {
    queue_waiter *previous = nullptr, *next = nullptr;
    std::condition_variable wake;
    bool served = false, stopped = false;
    std::span<permit> out; // for permits
    slot_t slot = 0;       // for the gate
    version_t version = -1;
};

class wait_list {
public:
    bool empty() const { return first_ == nullptr; }
    queue_waiter& front() { return *first_; }
    void push(queue_waiter& w) {
        w.previous = last_;
        (last_ ? last_->next : first_) = &w;
        last_ = &w;
    }
    void remove(queue_waiter& w) {
        (w.previous ? w.previous->next : first_) = w.next;
        (w.next ? w.next->previous : last_) = w.previous;
    }
    /// The first has what it waits for. Its thread cannot go on before the caller lets go of the lock.
    void serve_front() {
        queue_waiter& w = *first_;
        remove(w);
        w.served = true;
        w.wake.notify_one();
    }
    index_t size() const {
        index_t n = 0;
        for (queue_waiter* w = first_; w; w = w->next) ++n;
        return n;
    }
    void wake_all() {
        for (queue_waiter* w = first_; w; w = w->next) w->wake.notify_one();
    }

private:
    queue_waiter *first_ = nullptr, *last_ = nullptr;
};

/// What a queue, its permits and its batch share; lives until the last of them is gone.
class permit_pool {
public:
    permit_pool(const plan& p, index_t group, void (*destroy)(permit_pool*))
        : plan_(p), group_(group), ledger_(p), destroy_(destroy) {}
    permit_pool(const permit_pool&) = delete;

    bool acquire(std::span<permit> out, const std::stop_token& stop, bool may_wait);
    /// If they are free and nobody waits for them.
    bool grant_now(std::span<permit> out) {
        if (closed_ || !permits_.empty() || free() < static_cast<index_t>(out.size())) return false;
        grant(out);
        return true;
    }
    void check_group(std::span<permit> out) const {
        if (static_cast<index_t>(out.size()) > group_)
            throw invalid_input("permits", "at most group = " + std::to_string(group_) + " at once, not " +
                                               std::to_string(out.size()));
    }
    void release(slot_t s) {
        std::unique_lock lock = hold();
        ledger_.release(s);
        ++counts_.returned;
        serve();
        leave(lock);
    }
    version_t restart(slot_t s, const std::stop_token& stop) {
        if (stop.stop_requested()) return -1;
        {
            const std::unique_lock lock = hold();
            if (aborted_) return -1;
            if (ledger_.gate_open()) return restart_now(s);
        }
        queue_waiter w;
        w.slot = s;
        wait(
            gate_, w, stop,
            [&] {
                if (ledger_.gate_open()) w.version = restart_now(s);
                return ledger_.gate_open();
            },
            [this] { return aborted_; });
        return w.version;
    }

    /// Whoever holds the lock lets go of it within a fraction of a microsecond, sooner than this thread could go to
    /// sleep.
    std::unique_lock<std::mutex> hold() const {
        std::unique_lock lock(mutex_, std::try_to_lock);
        for (int i = 0; i < 100 && !lock.owns_lock(); ++i) {
#if defined(__SSE2__)
            __builtin_ia32_pause();
#endif
            (void)lock.try_lock();
        }
        if (!lock.owns_lock()) lock.lock();
        return lock;
    }

protected:
    enum class training : std::uint8_t { none, picked, trained };

    ~permit_pool() = default;

    version_t restart_now(slot_t s) {
        ledger_.restarted(s);
        ledger_.started(s);
        ++counts_.retried;
        if (!batches_.empty()) serve_batches(); // an order by versions may no longer wait for it
        return ledger_.version();
    }
    void grant(std::span<permit> out);

    /// Follows every change of the state.
    void serve() {
        while (!gate_.empty() && ledger_.gate_open() && !aborted_) {
            gate_.front().version = restart_now(gate_.front().slot);
            gate_.serve_front();
        }
        if (!permits_.empty()) serve_permits();
        if (!batches_.empty()) serve_batches();
    }
    /// Permits that may be given out. None while a short batch is out: the theorems count B for each step, and what
    /// started now would be as old as what is in that batch, and more than it leaves room for.
    index_t free() const {
        const bool is_short = training_ != training::none && static_cast<index_t>(batch_.size()) < plan_.batch;
        return is_short ? 0 : ledger_.free();
    }
    void serve_permits();
    void serve_batches() {
        if (pick())
            batches_.serve_front();
        else if (drained())
            batches_.wake_all();
    }

    bool drained() const { return aborted_ || (closed_ && training_ == training::none && ledger_.outstanding() == 0); }
    /// Takes the next batch of B, if the policy has one; or all that is left, once nothing can join it: the queue is
    /// closed, or members of groups failed and a whole group does not fit into what they left.
    bool pick() {
        if (training_ != training::none || aborted_) return false;
        if (!ledger_.pick(plan_.batch, batch_)) {
            const index_t rest = ledger_.ready_count();
            const bool final = closed_ || !permits_.empty();
            if (!final || rest == 0 || rest >= plan_.batch || rest != ledger_.outstanding() ||
                !ledger_.pick(rest, batch_))
                return false;
        }
        training_ = training::picked;
        return true;
    }
    index_t in_training() const { return training_ == training::none ? 0 : static_cast<index_t>(batch_.size()); }

    /// Waits at the end of `list` until served, stopped or refused; served at once if none is before it and
    /// `try_now()`.
    template <class Try, class Refused>
    bool wait(wait_list& list, queue_waiter& w, const std::stop_token& stop, Try&& try_now, Refused&& refused) {
        // Made without the lock, since it may run at once in this thread, and destroyed without it, since its
        // destructor waits for one that runs in another.
        const std::stop_callback on_stop(stop, [&] {
            const std::unique_lock lock = hold();
            w.stopped = true;
            w.wake.notify_one();
        });
        std::unique_lock lock = hold();
        if (w.stopped || refused()) return false;
        if (list.empty() && try_now()) return true;
        list.push(w);
        serve(); // that somebody waits for permits may complete a batch
        w.wake.wait(lock, [&] { return w.served || w.stopped || refused(); });
        if (!w.served) {
            list.remove(w);
            serve(); // the next in line may need less
        }
        return w.served;
    }
    /// The last one turns off the light.
    void leave(std::unique_lock<std::mutex>& lock) {
        const bool last = orphaned_ && ledger_.outstanding() == 0;
        lock.unlock();
        if (last) destroy_(this);
    }
    void refuse_waiters() {
        permits_.wake_all();
        if (drained()) batches_.wake_all();
        if (aborted_) gate_.wake_all();
    }

    const plan plan_;
    const index_t group_;
    mutable std::mutex mutex_;
    ledger ledger_;
    wait_list permits_, batches_, gate_;
    std::vector<slot_t> batch_; // in training
    training training_ = training::none;
    bool closed_ = false, aborted_ = false, orphaned_ = false;
    queue_counts counts_;
    void (*destroy_)(permit_pool*);
};

} // namespace detail

/// Default-made and moved-from permits are empty: false. The destructor returns the permit, from any thread.
class permit {
public:
    permit() = default;
    permit(permit&& o) noexcept : pool_(std::exchange(o.pool_, nullptr)), slot_(o.slot_), version_(o.version_) {}
    permit& operator=(permit&& o) noexcept {
        permit old(std::move(*this)); // what it held is returned
        pool_ = std::exchange(o.pool_, nullptr);
        slot_ = o.slot_;
        version_ = o.version_;
        return *this;
    }
    ~permit() {
        if (pool_) pool_->release(slot_);
    }

    explicit operator bool() const { return pool_ != nullptr; }
    /// Of the weights that its sequence starts with.
    version_t version() const { return version_; }
    /// In [0, M), unique among outstanding sequences: fit to number lanes and buffers.
    slot_t slot() const { return slot_; }

    /// The sequence starts again, under the present weights: waits while the gate is closed. False if stopped or
    /// aborted.
    [[nodiscard]] bool restart(const std::stop_token& stop = {}) {
        if (!pool_) throw invalid_input("permit", "is empty");
        const version_t v = pool_->restart(slot_, stop);
        if (v >= 0) version_ = v;
        return v >= 0;
    }

private:
    friend class detail::permit_pool;
    template <class T>
    friend class staleness_queue;
    permit(detail::permit_pool* pool, slot_t slot, version_t version) : pool_(pool), slot_(slot), version_(version) {}

    detail::permit_pool* pool_ = nullptr;
    slot_t slot_ = 0;
    version_t version_ = -1;
};

namespace detail {

inline void permit_pool::grant(std::span<permit> out) {
    for (permit& p : out) {
        const slot_t s = ledger_.admit();
        ledger_.started(s);
        p.pool_ = this;
        p.slot_ = s;
        p.version_ = ledger_.version();
        ++counts_.acquired;
    }
}

inline void permit_pool::serve_permits() {
    while (!permits_.empty() && !closed_ && free() >= static_cast<index_t>(permits_.front().out.size())) {
        grant(permits_.front().out);
        permits_.serve_front();
    }
}

inline bool permit_pool::acquire(std::span<permit> out, const std::stop_token& stop, bool may_wait) {
    check_group(out);
    for (const permit& p : out)
        if (p) throw invalid_input("permits", "holds one already", &p - out.data());
    if (stop.stop_requested()) return false;
    {
        const std::unique_lock lock = hold();
        if (grant_now(out)) return true;
        if (closed_ || !may_wait) return false;
    }
    queue_waiter w;
    w.out = out;
    return wait(
        permits_, w, stop, [&] { return grant_now(out); }, [this] { return closed_; });
}

} // namespace detail
} // namespace opd::sched
