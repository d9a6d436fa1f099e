// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The staleness queue of the C interface: an opd::sched::staleness_queue of numbers, and the permits and the batch that
// are out, which its caller knows by number.
#include <cmath>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <stop_token>
#include <thread>
#include <unordered_map>

#include "handles.hpp"
#include "opd/sched/staleness_queue.hpp"
#include "sched.hpp"

namespace {

using namespace opd_c;
using core_queue = sched::staleness_queue<std::int64_t>;

sched::queue_options options_of(const opd_queue_settings& s) {
    sched::queue_options r;
    auto& [batch, schedule, group] = r;
    batch = or_default(s.batch, batch), group = or_default(s.group, group);
    auto& [tau, outstanding, policy, update, concurrency, negative_control] = schedule;
    tau = or_zero<std::int64_t>(s.tau, tau), outstanding = s.outstanding, concurrency = s.concurrency;
    policy = choose("settings.policy", s.policy, staleness_policies, policy);
    update = sched::weight_update::keep;
    negative_control = flag("settings.negative_control", s.negative_control);
    if (s.reserved != 0) refuse("settings.reserved", "is " + std::to_string(s.reserved) + "; it must be 0");
    return r;
}

/// Asks for a stop when the time is over. Without a thread where there is no end, or no time.
class time_limit {
public:
    explicit time_limit(double seconds) {
        if (seconds >= 1e9) return; // longer than any process; a clock's 64-bit nanoseconds end there
        timer_ = std::jthread([this, seconds](const std::stop_token& answered) {
            std::unique_lock lock(mutex_);
            const std::chrono::duration<double> rest(seconds);
            sleeps_.wait_for(lock, answered, rest, [] { return false; });
            if (!answered.stop_requested()) over_.request_stop();
        });
    }
    std::stop_token token() const { return over_.get_token(); }

private:
    std::stop_source over_;
    std::mutex mutex_;
    std::condition_variable_any sleeps_;
    std::jthread timer_; // joined first
};
void check_wait(double seconds) {
    if (!(seconds >= 0)) refuse("seconds", "are " + std::to_string(seconds) + "; a wait is 0 or longer");
}

} // namespace

struct opd_queue {
    const std::size_t most; // items of a batch
    core_queue core;
    std::mutex mutex; // of what follows, and never held while a call waits
    std::unordered_map<std::uint64_t, sched::permit> permits;
    std::uint64_t next_permit = 1, next_batch = 1;
    std::uint64_t out = 0; // number of the batch or update that is out; 0: none
    std::optional<core_queue::batch> batch;
    std::optional<core_queue::update> update;
    std::vector<opd_stale> stale;         // that no call has returned
    std::vector<std::int64_t> given_back; // by an abort, likewise
    std::size_t stale_returned = 0, items_returned = 0;

    explicit opd_queue(const sched::queue_options& o) : most(static_cast<std::size_t>(o.batch)), core(o) {}
    opd_queue(const sched::queue_options& o, std::string_view snapshot)
        : most(static_cast<std::size_t>(o.batch)), core(o, snapshot, [](sched::archive_reader& from) {
              std::int64_t item = 0;
              from(item);
              return item;
          }) {}

    opd_permit keep(sched::permit p) {
        opd_permit r = {};
        r.permit = next_permit, r.version = p.version(), r.slot = p.slot();
        permits.emplace(next_permit, std::move(p));
        ++next_permit;
        return r;
    }
    /// While a call uses it, it has no entry.
    sched::permit take(const char* name, std::uint64_t number, opd::index_t row = -1) {
        const auto found = permits.find(number);
        if (found == permits.end())
            throw opd::invalid_input(
                name,
                "is " + std::to_string(number) +
                    ", which is no permit that is out: it was pushed or released, or another call uses it",
                row);
        sched::permit p = std::move(found->second);
        permits.erase(found);
        return p;
    }
    void put_back(std::uint64_t number, sched::permit p) { permits.emplace(number, std::move(p)); }
    void check_out(std::uint64_t number, bool trained) const {
        const std::string n = std::to_string(number);
        if (number == 0 || number != out) refuse("batch", "is " + n + ", which is not out");
        if (trained && !update)
            refuse("batch", "is " + n + ", which is not trained yet: opd_queue_trained() comes first");
        if (!trained && !batch) refuse("batch", "is " + n + ", which is trained already");
    }
};

namespace {

template <class Body>
int with(opd_queue* queue, Body&& body) {
    return guarded([&] {
        const auto held = handles<opd_queue>().of("queue", queue);
        body(*held);
    });
}
template <class T>
T& needed(const char* name, T* p) {
    if (p == nullptr) refuse(name, "is a null pointer");
    return *p;
}
/// The next of a list that are to be returned.
template <class T>
std::size_t next_of(std::vector<T>& list, std::size_t& returned, T* to, std::size_t capacity) {
    const std::size_t n = std::min(capacity, list.size() - returned);
    std::copy_n(list.begin() + static_cast<std::ptrdiff_t>(returned), n, to);
    if ((returned += n) == list.size()) list.clear(), returned = 0;
    return n;
}

} // namespace

extern "C" {

int opd_queue_create(const opd_queue_settings* settings, opd_queue** out) {
    return guarded([&] {
        needed("out", out);
        const sched::queue_options o = options_of(read("settings", settings));
        *out = with_names("settings", [&] { return handles<opd_queue>().add(std::make_shared<opd_queue>(o)); });
    });
}
void opd_queue_destroy(opd_queue* queue) {
    (void)guarded([&] {
        if (queue == nullptr) return;
        const auto held = handles<opd_queue>().of("queue", queue);
        handles<opd_queue>().remove(queue);
        (void)held->core.abort(); // whoever waits in it goes on, and lets go of it
    });
}

int opd_queue_acquire(opd_queue* queue, size_t n, double seconds, opd_permit* permits, int32_t* got) {
    return with(queue, [&](opd_queue& q) {
        check_wait(seconds);
        needed("got", got);
        if (n == 0) refuse("n", "is 0; at least one permit is taken");
        if (n > (std::size_t{1} << 31)) refuse("n", "is " + std::to_string(n) + "; it must lie below 2^31");
        needed("permits", permits);
        std::vector<sched::permit> mine(n);
        bool any = q.core.try_acquire(std::span(mine));
        if (!any && seconds > 0) {
            time_limit limit(seconds);
            any = q.core.acquire(std::span(mine), limit.token());
        }
        if (any) {
            const std::lock_guard lock(q.mutex);
            for (std::size_t i = 0; i < n; ++i) permits[i] = q.keep(std::move(mine[i]));
        }
        *got = any;
    });
}

int opd_queue_push(opd_queue* queue, const uint64_t* permits, const int64_t* items, size_t n, int32_t* pushed) {
    return with(queue, [&](opd_queue& q) {
        needed("pushed", pushed);
        if (n == 0) refuse("n", "is 0; at least one item is pushed");
        needed("permits", permits), needed("items", items);
        std::vector<std::int64_t> values(items, items + n);
        std::vector<sched::permit> mine;
        mine.reserve(n);
        const std::lock_guard lock(q.mutex); // a push never waits
        const auto put_back = [&] {
            for (std::size_t i = 0; i < mine.size(); ++i) q.put_back(permits[i], std::move(mine[i]));
        };
        try {
            for (std::size_t i = 0; i < n; ++i)
                mine.push_back(q.take("permits", permits[i], n == 1 ? -1 : static_cast<opd::index_t>(i)));
            const sched::push_result r = q.core.push(std::span(mine), std::span(values));
            if (r != sched::push_result::queued) put_back();
            static_assert(OPD_PUSHED == static_cast<int>(sched::push_result::queued) &&
                          OPD_PUSH_STALE == static_cast<int>(sched::push_result::stale) &&
                          OPD_PUSH_ABORTED == static_cast<int>(sched::push_result::aborted));
            *pushed = static_cast<int>(r);
        } catch (...) {
            put_back();
            throw;
        }
    });
}

int opd_queue_release(opd_queue* queue, uint64_t permit) {
    return with(queue, [&](opd_queue& q) {
        sched::permit p;
        const std::lock_guard lock(q.mutex);
        p = q.take("permit", permit);
    });
}

int opd_queue_restart(opd_queue* queue, uint64_t permit, double seconds, int64_t* version) {
    return with(queue, [&](opd_queue& q) {
        check_wait(seconds);
        needed("version", version);
        std::unique_lock lock(q.mutex);
        sched::permit p = q.take("permit", permit);
        bool again = false;
        if (!q.update) { // the gate is open, and stays so while this lock is held: no wait
            again = p.restart();
        } else if (seconds > 0) {
            lock.unlock();
            {
                time_limit limit(seconds);
                again = p.restart(limit.token());
            }
            lock.lock();
        }
        const std::int64_t now = again ? p.version() : -1;
        q.put_back(permit, std::move(p));
        *version = now;
    });
}

int opd_queue_pop(opd_queue* queue, double seconds, int64_t* items, int64_t* versions, size_t capacity,
                  opd_queue_batch* out) {
    return with(queue, [&](opd_queue& q) {
        check_wait(seconds);
        needed("items", items);
        needed("out", out);
        if (capacity < q.most)
            refuse("capacity", "is " + std::to_string(capacity) + "; a batch has " + std::to_string(q.most) + " items");
        check_size("out", out);
        auto b = q.core.try_pop();
        if (!b && seconds > 0) {
            time_limit limit(seconds);
            b = q.core.pop(limit.token());
        }
        opd_queue_batch r = {};
        if (!b) return write("out", out, r);
        r.version = b->version(), r.count = b->size();
        for (std::size_t i = 0; i < r.count; ++i) {
            items[i] = (*b)[i];
            if (versions != nullptr) versions[i] = b->version_of(i);
        }
        const std::lock_guard lock(q.mutex);
        r.batch = q.out = q.next_batch++;
        q.batch.emplace(std::move(*b));
        write("out", out, r);
    });
}

int opd_queue_trained(opd_queue* queue, uint64_t batch) {
    return with(queue, [&](opd_queue& q) {
        const std::lock_guard lock(q.mutex);
        q.check_out(batch, false);
        q.update.emplace(std::move(*q.batch).trained());
        q.batch.reset();
    });
}

int opd_queue_synchronised(opd_queue* queue, uint64_t batch) {
    return with(queue, [&](opd_queue& q) {
        const std::lock_guard lock(q.mutex);
        q.check_out(batch, true);
        auto stale = std::move(*q.update).synchronised();
        q.update.reset();
        q.out = 0;
        for (auto& [item, version, permit] : stale)
            q.stale.push_back({item, version, permit ? q.keep(std::move(permit)) : opd_permit{}});
    });
}

int opd_queue_stale(opd_queue* queue, opd_stale* stale, size_t capacity, size_t* count) {
    return with(queue, [&](opd_queue& q) {
        check_room("stale", stale, capacity, count);
        const std::lock_guard lock(q.mutex);
        *count = next_of(q.stale, q.stale_returned, stale, capacity);
    });
}

int opd_queue_give_up(opd_queue* queue, uint64_t batch) {
    return with(queue, [&](opd_queue& q) {
        const std::lock_guard lock(q.mutex);
        q.check_out(batch, q.update.has_value());
        q.out = 0;
        q.batch.reset();
        q.update.reset();
    });
}

int opd_queue_close(opd_queue* queue) {
    return with(queue, [](opd_queue& q) { q.core.close(); });
}

int opd_queue_abort(opd_queue* queue) {
    return with(queue, [](opd_queue& q) {
        const std::lock_guard lock(q.mutex);
        const std::vector<std::int64_t> items = q.core.abort();
        q.given_back.insert(q.given_back.end(), items.begin(), items.end());
    });
}

int opd_queue_aborted_items(opd_queue* queue, int64_t* items, size_t capacity, size_t* count) {
    return with(queue, [&](opd_queue& q) {
        check_room("items", items, capacity, count);
        const std::lock_guard lock(q.mutex);
        *count = next_of(q.given_back, q.items_returned, items, capacity);
    });
}

int opd_queue_look(opd_queue* queue, opd_queue_state* state) {
    return with(queue, [&](opd_queue& q) {
        needed("state", state);
        const auto n = q.core.counts();
        const auto& [acquired, consumed, returned, dropped, discarded, retried, put_back, batches, outstanding, ready,
                     training, waiting_producers, waiting_learners] = n;
        opd_queue_state r = {};
        r.version = q.core.version();
        r.acquired = acquired, r.consumed = consumed, r.returned = returned, r.dropped = dropped;
        r.discarded = discarded, r.retried = retried, r.put_back = put_back, r.batches = batches;
        r.outstanding = outstanding, r.ready = ready, r.training = training;
        r.waiting_producers = waiting_producers, r.waiting_learners = waiting_learners;
        r.closed = q.core.closed(), r.aborted = q.core.aborted();
        write("state", state, r);
    });
}

int opd_queue_snapshot(opd_queue* queue, void* bytes, size_t capacity, size_t* size) {
    return with(queue, [&](opd_queue& q) {
        const std::string made = q.core.snapshot([](sched::archive_writer& to, const std::int64_t& item) { to(item); });
        hand_out("bytes", made, bytes, capacity, size);
    });
}

int opd_queue_restore(const opd_queue_settings* settings, const void* bytes, size_t size, opd_queue** out) {
    return guarded([&] {
        needed("out", out);
        const sched::queue_options o = options_of(read("settings", settings));
        const std::string_view from = bytes_of(bytes, size);
        *out = with_names("settings", [&] { return handles<opd_queue>().add(std::make_shared<opd_queue>(o, from)); });
    });
}

} // extern "C"
