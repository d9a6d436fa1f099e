// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A bounded queue between threads that make samples and a learner. It bounds staleness: versions of the weights.
//
//     staleness_queue<sample> queue({.batch = 256, .schedule = {.tau = 4, .policy = staleness_policy::edf}});
//     producer:  while (permit p = queue.acquire(stop)) {
//                    sample s = generate(p.version());
//                    queue.push(p, std::move(s));
//                }
//     learner:   while (auto batch = queue.pop(stop)) {
//                    train(*batch);
//                    auto update = std::move(*batch).trained();   // the gate closes: nothing starts on old weights
//                    publish_weights();
//                    std::move(update).synchronised();            // version + 1, permits return, the gate opens
//                }
//
// At most M = outstanding permits are out, so the queue never holds more than M items and push() never waits. The
// policy chooses which items make a batch, and so bounds how stale they are; the theorems are in policies/. One batch
// is out at a time: a second batch would be consumed a version later than it was chosen for, and no bound would hold.
//
// Stale items (drop, retry): push() refuses a stale item and leaves permit and item with the producer. When the version
// moves, synchronised() gives back the stale items of the queue. Under drop their permits return; under retry the
// permits come along, restarted.
//
// Ends: after close() the queue gives no more permits; what is out is still pushed and consumed, the last batch may be
// short, and then pop() returns nothing. abort() ends all waits at once and gives back the queue's items. A batch that
// is destroyed untrained puts its items back in front. An update that is destroyed between trained() and synchronised()
// aborts the queue: the weights that its items made are not out, so nothing may start any more. Destroying a queue
// discards its items. Permits and batches may outlive the queue; threads that wait in it may not. Source: AsyncOPD
// section 7 and appendix G (permits, sync gate).
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "opd/sched/permit.hpp"

namespace opd::sched {

/// A queue's batch and bound. The schedule is async's; a serial one is tau = 0.
struct queue_options {
    index_t batch = 256; ///< B
    async schedule =
        {}; ///< tau, outstanding (by_policy: widest), policy. `update` is the business of whoever generates: leave it
    index_t group = 1; ///< most permits taken at once
};

/// What became of an item. `stale` leaves permit and item with the producer.
enum class push_result : std::uint8_t {
    queued,
    stale,  ///< the version moved more than tau past the permit's: let the permit go (drop) or restart it (retry)
    aborted ///< nobody will consume it
};

/// T: moves without throwing.
template <class T>
class staleness_queue {
    static_assert(std::is_nothrow_move_constructible_v<T>, "opd: a queue's items must move without throwing");
    using pool = detail::permit_pool;

    struct cell {
        version_t version = -1;
        bool full = false;
        alignas(T) std::byte bytes[sizeof(T)];
        T& value() { return *std::launder(reinterpret_cast<T*>(bytes)); }
        T take() {
            T x(std::move(value()));
            std::destroy_at(&value());
            full = false;
            return x;
        }
    };
    struct core : pool {
        core(const plan& p, index_t group) : pool(p, group, [](pool* x) { delete static_cast<core*>(x); }) {}
        using pool::aborted_, pool::batch_, pool::batches_, pool::closed_, pool::counts_, pool::gate_, pool::permits_,
            pool::drained, pool::in_training, pool::leave, pool::ledger_, pool::mutex_, pool::orphaned_, pool::pick,
            pool::plan_, pool::refuse_waiters, pool::serve, pool::training_, pool::wait;
        using training = typename pool::training;

        /// By slot; in pieces, since a batch refers to them while others are added.
        class cell_table {
        public:
            slot_t size() const { return static_cast<slot_t>(pieces_.size() * piece); }
            void reach(slot_t s) {
                while (s >= size()) pieces_.push_back(std::make_unique<cell[]>(piece));
            }
            cell& operator[](slot_t s) const { return pieces_[s / piece][s % piece]; }

        private:
            static constexpr std::size_t piece = 256;
            std::vector<std::unique_ptr<cell[]>> pieces_;
        };
        cell_table cells;
        std::vector<cell*> picked; // of the batch
        void open() {
            picked.clear();
            for (const slot_t s : batch_) picked.push_back(&cells[s]);
        }
        /// Items that are ready leave; `each(slot, item)`.
        template <class Each>
        void take_ready(Each&& each) {
            for (slot_t s = 0; s < cells.size(); ++s)
                if (cells[s].full &&
                    (training_ == training::none || std::find(batch_.begin(), batch_.end(), s) == batch_.end())) {
                    ledger_.release(s);
                    ++counts_.discarded;
                    each(cells[s].take());
                }
        }
        /// A batch that is not trained.
        void put_back() {
            std::vector<T> discarded; // destroyed after the lock is gone
            std::unique_lock lock = pool::hold();
            counts_.put_back += static_cast<index_t>(batch_.size());
            ledger_.put_back(batch_);
            batch_.clear();
            training_ = training::none;
            if (orphaned_) take_ready([&](T&& x) { discarded.push_back(std::move(x)); });
            serve();
            leave(lock);
        }
        void trained() {
            {
                const std::unique_lock lock = pool::hold();
                ledger_.close_gate();
                training_ = training::trained;
                for (cell* c : picked) c->full = false; // a snapshot does not look at them any more
            }
            for (cell* c : picked) std::destroy_at(&c->value());
        }
    };

public:
    /// What lay in the queue too long.
    struct stale_item {
        T item;
        version_t version;    ///< of its start
        sched::permit permit; ///< retry: restarted under the new version; drop: empty
    };

    /// The learner's turn after trained() and before synchronised().
    class [[nodiscard]] update {
    public:
        update(update&& o) noexcept : core_(std::exchange(o.core_, nullptr)) {}
        update& operator=(update&&) = delete;
        ~update() {
            if (core_) give_up();
        }
        /// The new weights are out: the version moves, the permits return, the gate opens. Returns what became stale
        /// by it.
        std::vector<stale_item> synchronised() && {
            if (!core_) throw invalid_input("update", "was synchronised already");
            core* const c = std::exchange(core_, nullptr);
            std::vector<stale_item> out;
            std::unique_lock lock = c->hold();
            finish(*c);
            std::vector<slot_t> stale;
            c->ledger_.stale(stale);
            for (const slot_t s : stale) {
                if (s >= c->cells.size() || !c->cells[s].full) continue; // with its producer, who learns it from push()
                const version_t started = c->cells[s].version;
                sched::permit p;
                if (traits_of(c->plan_.policy).stale == stale_end::started_again && !c->orphaned_) {
                    c->ledger_.unready(s);
                    c->ledger_.restarted(s);
                    c->ledger_.started(s);
                    ++c->counts_.retried;
                    p = sched::permit(c, s, c->ledger_.version());
                } else {
                    c->ledger_.release(s);
                    ++c->counts_.dropped;
                }
                out.push_back({c->cells[s].take(), started, std::move(p)});
            }
            c->serve();
            c->leave(lock);
            return out;
        }

    private:
        friend class staleness_queue;
        explicit update(core* c) : core_(c) {}
        static void finish(core& c) {
            c.counts_.consumed += static_cast<index_t>(c.batch_.size());
            ++c.counts_.batches;
            c.ledger_.advance(c.batch_);
            c.batch_.clear();
            c.training_ = core::training::none;
        }
        void give_up() {
            std::unique_lock lock = core_->hold();
            finish(*core_);
            core_->closed_ = core_->aborted_ = true;
            core_->refuse_waiters();
            core_->leave(lock);
        }
        core* core_;
    };

    /// Items chosen for one update, in the policy's order. Destroyed untrained, it puts them back.
    class [[nodiscard]] batch {
    public:
        batch(batch&& o) noexcept : core_(std::exchange(o.core_, nullptr)), version_(o.version_) {}
        batch& operator=(batch&& o) noexcept {
            batch old(std::move(*this));
            core_ = std::exchange(o.core_, nullptr);
            version_ = o.version_;
            return *this;
        }
        ~batch() {
            if (core_) core_->put_back();
        }
        std::size_t size() const { return checked().picked.size(); }
        const T& operator[](std::size_t i) const { return checked().picked[i]->value(); }
        /// Of the weights before this update.
        version_t version() const { return version_; }
        /// Of the weights that item i was started with; version() minus it is the start lag.
        version_t version_of(std::size_t i) const { return checked().picked[i]->version; }

        struct iterator {
            using value_type = T;
            using difference_type = std::ptrdiff_t;
            cell* const* at = nullptr;
            const T& operator*() const { return (*at)->value(); }
            const T* operator->() const { return &(*at)->value(); }
            iterator& operator++() { return ++at, *this; }
            iterator operator++(int) { return {at++}; }
            bool operator==(const iterator&) const = default;
        };
        iterator begin() const { return {checked().picked.data()}; }
        iterator end() const { return {checked().picked.data() + checked().picked.size()}; }

        /// They are trained on, and destroyed. Closes the gate until synchronised().
        update trained() && {
            checked().trained();
            return update(std::exchange(core_, nullptr));
        }

    private:
        friend class staleness_queue;
        batch(core* c, version_t v) : core_(c), version_(v) {}
        core& checked() const {
            if (!core_) throw invalid_input("batch", "was trained or moved from");
            return *core_;
        }
        core* core_;
        version_t version_;
    };

    explicit staleness_queue(const queue_options& options = {}) : core_(make(options)) {}

    /// As snapshot() left it; `T read(archive_reader&)`. The options must be those of then.
    template <class Read>
    staleness_queue(const queue_options& options, std::string_view snapshot, Read&& read) : core_(make(options)) {
        try {
            restore(snapshot, read);
        } catch (...) { // its ledger speaks of items that were not read
            for (slot_t s = 0; s < core_->cells.size(); ++s)
                if (core_->cells[s].full) (void)core_->cells[s].take();
            delete core_;
            throw;
        }
    }
    staleness_queue(const staleness_queue&) = delete;
    ~staleness_queue() { destroy(); }

    /// A permit under the present version, as soon as there is one and the gate is open; an empty one if stopped or
    /// closed.
    [[nodiscard]] permit acquire(const std::stop_token& stop = {}) {
        permit p;
        core_->acquire({&p, 1}, stop, true);
        return p;
    }
    /// All or none, first come first served. False: none.
    [[nodiscard]] bool acquire(std::span<permit> out, const std::stop_token& stop = {}) {
        return core_->acquire(out, stop, true);
    }
    /// Without waiting.
    [[nodiscard]] permit try_acquire() {
        permit p;
        core_->acquire({&p, 1}, {}, false);
        return p;
    }
    [[nodiscard]] bool try_acquire(std::span<permit> out) { return core_->acquire(out, {}, false); }

    /// Unless `queued`, permit and item stay as they are.
    [[nodiscard]] push_result push(permit& p, T&& item) { return push({&p, 1}, {&item, 1}); }
    /// All or none.
    [[nodiscard]] push_result push(std::span<permit> permits, std::span<T> items) {
        check(permits, items);
        const std::unique_lock lock = core_->hold();
        return push_now(permits, items);
    }
    /// push(), and if `queued` acquire() into the same permits: cheaper than one after the other. Then they are empty
    /// if stopped or closed.
    [[nodiscard]] push_result exchange(permit& p, T&& item, const std::stop_token& stop = {}) {
        return exchange({&p, 1}, {&item, 1}, stop);
    }
    [[nodiscard]] push_result exchange(std::span<permit> permits, std::span<T> items,
                                       const std::stop_token& stop = {}) {
        check(permits, items);
        core_->check_group(permits);
        {
            const std::unique_lock lock = core_->hold();
            const push_result r = push_now(permits, items);
            if (r != push_result::queued || stop.stop_requested() || core_->grant_now(permits)) return r;
        }
        (void)core_->acquire(permits, stop, true);
        return push_result::queued;
    }

    /// The next batch, as soon as the policy has one and no other is out; none if stopped, aborted, or closed and
    /// empty.
    [[nodiscard]] std::optional<batch> pop(const std::stop_token& stop = {}) {
        if (stop.stop_requested()) return {};
        if (auto b = try_pop()) return b;
        detail::queue_waiter w;
        if (!core_->wait(
                core_->batches_, w, stop, [this] { return core_->pick(); }, [this] { return core_->drained(); }))
            return {};
        const std::unique_lock lock = core_->hold();
        core_->open();
        return batch(core_, core_->ledger_.version());
    }
    [[nodiscard]] std::optional<batch> try_pop() {
        const std::unique_lock lock = core_->hold();
        if (!core_->batches_.empty() || !core_->pick()) return {};
        core_->open();
        return batch(core_, core_->ledger_.version());
    }

    /// No more permits; who waits for one gets none.
    void close() {
        const std::unique_lock lock = core_->hold();
        core_->closed_ = true;
        core_->refuse_waiters();
        core_->serve();
    }
    /// Ends every wait. Returns the items that lie in the queue; a batch that is out may still be trained and
    /// synchronised, and if it is put back, another abort() returns its items.
    std::vector<T> abort() {
        std::vector<T> out;
        const std::unique_lock lock = core_->hold();
        core_->closed_ = core_->aborted_ = true;
        core_->refuse_waiters();
        core_->take_ready([&](T&& x) { out.push_back(std::move(x)); });
        return out;
    }
    bool closed() const {
        return under_lock([](const core& c) { return c.closed_; });
    }
    bool aborted() const {
        return under_lock([](const core& c) { return c.aborted_; });
    }
    version_t version() const {
        return under_lock([](const core& c) { return c.ledger_.version(); });
    }
    queue_counts counts() const {
        return under_lock([](const core& c) {
            queue_counts n = c.counts_;
            n.outstanding = c.ledger_.outstanding();
            n.ready = c.ledger_.ready_count();
            n.training = c.in_training();
            n.waiting_producers = c.permits_.size() + c.gate_.size();
            n.waiting_learners = c.batches_.size();
            return n;
        });
    }

    /// Version, counts and ready items, in order; `write(archive_writer&, const T&)`, which may not call the queue. A
    /// batch that is out counts as put back until trained(), and as synchronised from then on. Permits with producers
    /// are not in it, since their sequences are not: whoever restores submits those again.
    template <class Write>
    std::string snapshot(Write&& write) const {
        const std::unique_lock lock = core_->hold();
        ledger l = core_->ledger_;
        queue_counts n = core_->counts_;
        using training = typename core::training;
        if (core_->training_ == training::picked) l.put_back(core_->batch_);
        if (core_->training_ == training::trained) {
            l.advance(core_->batch_);
            n.consumed += static_cast<index_t>(core_->batch_.size());
            ++n.batches;
        }
        const auto full = [&](slot_t s) { return s < core_->cells.size() && core_->cells[s].full; };
        std::vector<slot_t> stale;
        l.stale(stale);
        for (const slot_t s : stale) {
            if (full(s))
                ++(traits_of(core_->plan_.policy).stale == stale_end::given_up ? n.dropped : n.returned);
            else
                ++n.returned;
            l.release(s);
        }
        for (slot_t s = 0; s < l.slots(); ++s)
            if (l.in_use(s) && !full(s)) {
                l.release(s);
                ++n.returned;
            }
        archive_writer to;
        to(format, core_->plan_.batch, core_->plan_.depth, core_->plan_.permits, core_->plan_.policy, n, l);
        for (slot_t s = 0; s < l.slots(); ++s)
            if (l.in_use(s)) {
                to(core_->cells[s].version);
                write(to, std::as_const(core_->cells[s].value()));
            }
        return seal(std::move(to.bytes));
    }

private:
    static constexpr std::uint32_t format = 0x32'71'73'6f; // "osq2"

    static core* make(const queue_options& o) {
        if (o.schedule.update != weight_update::keep)
            throw invalid_input("schedule.update",
                                "the queue does not run sequences: what happens to those that run when the "
                                "weights change is up to their producer");
        if (o.schedule.outstanding == automatic)
            throw invalid_input("schedule.outstanding", "cannot be automatic in a queue, which sees neither stages nor "
                                                        "time: say how many, or widest");
        async how = o.schedule;
        if (how.outstanding == by_policy) how.outstanding = widest;
        return new core(plan_of({.batch = o.batch, .schedule = how, .group = o.group}), o.group);
    }
    void check(std::span<permit> permits, std::span<T> items) const {
        if (permits.size() != items.size())
            throw invalid_input("items", "must be as many as permits, " + std::to_string(permits.size()) + ", not " +
                                             std::to_string(items.size()));
        for (std::size_t i = 0; i < permits.size(); ++i)
            if (permits[i].pool_ != core_)
                throw invalid_input("permits", permits[i] ? "belongs to another queue" : "is empty",
                                    permits.size() == 1 ? -1 : static_cast<index_t>(i));
    }
    push_result push_now(std::span<permit> permits, std::span<T> items) {
        core& c = *core_;
        if (c.aborted_) return push_result::aborted;
        if (traits_of(c.plan_.policy).stale != stale_end::none)
            for (const permit& p : permits)
                if (p.version_ < c.ledger_.version() - c.plan_.depth) return push_result::stale;
        for (const permit& p : permits) c.cells.reach(p.slot_);
        for (std::size_t i = 0; i < permits.size(); ++i) {
            permit& p = permits[i];
            cell& x = c.cells[p.slot_];
            std::construct_at(reinterpret_cast<T*>(x.bytes), std::move(items[i]));
            x.full = true;
            x.version = p.version_;
            c.ledger_.ready(p.slot_);
            p.pool_ = nullptr;
        }
        c.serve();
        return push_result::queued;
    }
    template <class F>
    auto under_lock(F&& f) const {
        const std::unique_lock lock = core_->hold();
        return f(std::as_const(*core_));
    }
    template <class Read>
    void restore(std::string_view snapshot, Read& read) {
        core& c = *core_;
        archive_reader from(unseal(snapshot));
        std::uint32_t magic = 0;
        index_t size = 0, depth = 0, permits = 0;
        staleness_policy policy{};
        from(magic);
        if (magic != format) throw invalid_input("snapshot", "is not of a staleness_queue");
        from(size, depth, permits, policy);
        if (size != c.plan_.batch || depth != c.plan_.depth || permits != c.plan_.permits || policy != c.plan_.policy)
            throw invalid_input("snapshot", "was taken under other options: batch " + std::to_string(size) + ", tau " +
                                                std::to_string(depth) + ", outstanding " + std::to_string(permits));
        from(c.counts_, c.ledger_);
        detail::count_range counted;
        queue_counts n = c.counts_;
        n.fields(counted);
        std::vector<slot_t> stale;
        c.ledger_.stale(stale);
        detail::needs(counted.holds && stale.empty() && c.ledger_.gate_open() &&
                          c.ledger_.ready_count() == c.ledger_.outstanding() &&
                          n.acquired == n.consumed + n.returned + n.dropped + n.discarded + c.ledger_.outstanding(),
                      "its permits are not accounted for");
        for (slot_t s = 0; s < c.ledger_.slots(); ++s)
            if (c.ledger_.in_use(s)) {
                c.cells.reach(s);
                cell& x = c.cells[s];
                from(x.version);
                detail::needs(x.version == c.ledger_.version_of(s), "an item is of another version");
                std::construct_at(reinterpret_cast<T*>(x.bytes), read(from));
                x.full = true;
            }
        if (!from.done()) throw invalid_input("snapshot", "goes on after its end");
    }
    void destroy() {
        std::vector<T> discarded = abort();
        std::unique_lock lock = core_->hold();
        core_->orphaned_ = true;
        core_->leave(lock);
    }

    core* core_;
};

} // namespace opd::sched
