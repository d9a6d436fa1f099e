// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// build: tsan
//
// The staleness queue between many threads: producers that fail, stop and take groups, learners that fail and stop, a
// queue that is closed or aborted while they run. Afterwards every permit is back, and every item was consumed once or
// reported. The property seeds the threads' choices; their interleaving is the machine's.
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <doctest/doctest.h>
#include <mutex>
#include <optional>
#include <random>
#include <thread>
#include <vector>

#include "opd/sched/staleness_queue.hpp"
#include "support/property.hpp"

namespace {

using namespace opd::sched;
using opd::index_t;

struct item {
    int id = -1;
    std::vector<int> payload; // on the heap, so that a lost or doubled item is an error of memory, too
};
item make(int id) { return {id, {id, id}}; }

/// A moment, without the system's help: a yield beside a busy program lasts for that program's slice, milliseconds.
void dawdle(unsigned steps) {
    for (std::atomic<unsigned> i = 0; i < steps;) ++i;
}

/// What became of every item.
struct record {
    enum fate : int { unmade, queued, consumed, reported };
    explicit record(std::size_t n) : fates(n) {}
    std::vector<std::atomic<int>> fates;
    std::atomic<int> wrong{0};
    void from_to(int id, fate from, fate to) {
        int expected = from;
        if (!fates[static_cast<std::size_t>(id)].compare_exchange_strong(expected, to)) ++wrong;
    }
    long count(fate f) const {
        return std::count_if(fates.begin(), fates.end(), [f](const auto& x) { return x.load() == f; });
    }
};

struct world {
    staleness_policy policy;
    index_t batch, tau, outstanding, group;
    int producers, learners, each; // items a producer makes
    bool producers_fail, learners_fail;
    std::uint32_t seed;
};

void producer(staleness_queue<item>& q, const world& w, record& r, int number, const std::stop_token& stop) {
    std::mt19937 random(w.seed * 7919U + static_cast<std::uint32_t>(number));
    std::array<permit, 8> permits;
    std::array<item, 8> items;
    for (int i = 0; i < w.each;) {
        const int n = w.group == 1 || random() % 2 ? 1 : int(w.group);
        try {
            const std::span<permit> p(permits.data(), std::size_t(n));
            if (!q.acquire(p, stop)) break;
            if (w.producers_fail && random() % 8 == 0) throw std::runtime_error("generation failed");
            for (int k = 0; k < n; ++k) items[std::size_t(k)] = make(number * w.each + std::min(i + k, w.each - 1));
            const int made = std::min(n, w.each - i); // the last group may be larger than what is left
            for (int k = made; k < n; ++k) permits[std::size_t(k)] = {};
            for (int k = 0; k < made; ++k) r.from_to(items[std::size_t(k)].id, record::unmade, record::queued);
            for (;;) {
                const push_result pushed =
                    q.push(p.first(std::size_t(made)), std::span(items).first(std::size_t(made)));
                if (pushed == push_result::queued) break;
                bool again = pushed == push_result::stale && w.policy == staleness_policy::retry;
                for (int k = 0; k < made && again; ++k) again = permits[std::size_t(k)].restart(stop);
                if (again) continue;
                for (int k = 0; k < made; ++k) r.from_to(items[std::size_t(k)].id, record::queued, record::reported);
                break;
            }
            i += made;
        } catch (const std::runtime_error&) {}
        permits = {};
    }
}

/// The same with exchange(), one item at a time, and no failures.
void exchanger(staleness_queue<item>& q, const world& w, record& r, int number, const std::stop_token& stop) {
    permit p = q.acquire(stop);
    for (int i = 0; i < w.each && p; ++i) {
        const int id = number * w.each + i;
        r.from_to(id, record::unmade, record::queued);
        push_result pushed = push_result::stale;
        while (pushed == push_result::stale) {
            pushed = q.exchange(p, make(id), stop);
            if (pushed == push_result::stale && (w.policy != staleness_policy::retry || !p.restart(stop))) break;
        }
        if (pushed == push_result::queued) continue;
        r.from_to(id, record::queued, record::reported);
        p = {}; // returned before the next is taken: more producers than permits must not hold them all
        p = q.acquire(stop);
    }
}

void learner(staleness_queue<item>& q, const world& w, record& r, int number, std::atomic<int>& out,
             const std::stop_token& stop) {
    std::mt19937 random(w.seed * 104729U + static_cast<std::uint32_t>(number));
    while (auto b = q.pop(stop)) {
        if (++out != 1) ++r.wrong; // one batch at a time
        if (index_t(b->size()) > w.batch || b->size() == 0) ++r.wrong;
        std::vector<int> ids;
        for (std::size_t i = 0; i < b->size(); ++i) {
            const version_t lag = b->version() - b->version_of(i);
            const bool bounded = w.policy != staleness_policy::capacity && w.policy != staleness_policy::areal;
            if (lag < 0 || (bounded && lag > w.tau)) ++r.wrong;
            ids.push_back((*b)[i].id);
            if ((*b)[i].payload != std::vector<int>{ids.back(), ids.back()}) ++r.wrong;
        }
        const version_t v = b->version();
        --out;
        if (w.learners_fail && random() % 4 == 0) continue; // it goes back
        auto u = std::move(*b).trained();
        if (q.version() != v) ++r.wrong;
        for (const int id : ids) r.from_to(id, record::queued, record::consumed);
        if (random() % 2) dawdle(unsigned(random() % 200));
        for (auto& s : std::move(u).synchronised()) r.from_to(s.item.id, record::queued, record::reported);
    }
}

world drawn() {
    world w;
    w.policy = *rc::gen::element(staleness_policy::capacity, staleness_policy::cohort_fifo, staleness_policy::edf,
                                 staleness_policy::drop, staleness_policy::retry, staleness_policy::in_order,
                                 staleness_policy::areal);
    w.batch = *rc::gen::inRange<index_t>(1, 9);
    w.tau = *rc::gen::inRange<index_t>(0, 4);
    w.group = *rc::gen::element<index_t>(1, 2, 8);
    w.outstanding = 0;
    // so that singles and groups may be mixed
    while ((w.tau + 1) * w.batch < w.batch + w.group - 1) ++w.tau;
    w.producers = *rc::gen::inRange(1, 6);
    w.learners = *rc::gen::inRange(1, 4);
    w.each = *rc::gen::inRange(1, 200);
    w.producers_fail = *rc::gen::arbitrary<bool>();
    w.learners_fail = *rc::gen::arbitrary<bool>();
    w.seed = *rc::gen::arbitrary<std::uint32_t>();
    return w;
}
queue_options options(const world& w) {
    return {.batch = w.batch,
            .schedule = {.tau = w.tau, .outstanding = w.outstanding, .policy = w.policy},
            .group = w.group};
}

/// Runs until all producers are done; `disturb` runs beside them.
template <class Disturb>
void run(const world& w, bool to_the_end, Disturb&& disturb) {
    record r(std::size_t(w.producers * w.each));
    std::atomic<int> out{0};
    std::vector<item> left;
    queue_counts n;
    {
        staleness_queue<item> q(options(w));
        std::vector<std::jthread> producers, learners;
        for (int k = 0; k < w.producers; ++k)
            producers.emplace_back(
                [&, k](const std::stop_token& stop) { ((w.seed >> k) % 2 ? exchanger : producer)(q, w, r, k, stop); });
        for (int k = 0; k < w.learners; ++k)
            learners.emplace_back([&, k](const std::stop_token& stop) { learner(q, w, r, k, out, stop); });
        disturb(q, producers, learners, left);
        producers.clear(); // asks to stop; what is wanted to the end was joined
        q.close();
        if (to_the_end)
            for (auto& t : learners) t.join();
        learners.clear();
        for (item& x : q.abort()) left.push_back(std::move(x));
        n = q.counts();
    }
    for (const item& x : left) r.from_to(x.id, record::queued, record::reported);
    RC_ASSERT(r.wrong == 0);
    RC_ASSERT(r.count(record::queued) == 0);
    RC_ASSERT(n.outstanding == 0);
    RC_ASSERT(n.waiting_learners + n.waiting_producers == 0);
    RC_ASSERT(n.acquired == n.consumed + n.returned + n.dropped + n.discarded);
    RC_ASSERT(n.consumed == r.count(record::consumed));
    if (to_the_end) {
        RC_ASSERT(r.count(record::unmade) == 0);
        RC_ASSERT(left.empty());
        if (w.policy != staleness_policy::drop && w.policy != staleness_policy::retry)
            RC_ASSERT(r.count(record::consumed) == w.producers * w.each);
    }
}

void wander(std::mt19937& random) { std::this_thread::sleep_for(std::chrono::microseconds(random() % 600)); }

} // namespace

TEST_CASE("every item is consumed once, whoever fails") {
    property("to the end",
             [] {
                 const world w = drawn();
                 run(w, true, [](auto&, auto& producers, auto&, auto&) {
                     for (auto& t : producers) t.join();
                 });
             },
             {.cases = 150, .disable_shrink = true});
}

TEST_CASE("threads that are stopped at any moment leave no permit behind") {
    property("stopped",
             [] {
                 const world w = drawn();
                 run(w, false, [&](auto& q, auto& producers, auto& learners, auto&) {
                     std::mt19937 random(w.seed);
                     for (auto& t : producers) {
                         wander(random);
                         t.request_stop();
                         if (random() % 2) (void)q.counts();
                     }
                     for (auto& t : learners)
                         if (random() % 2) t.request_stop();
                 });
             },
             {.cases = 150, .disable_shrink = true});
}

TEST_CASE("a queue that is closed, aborted or saved at any moment") {
    property("ended",
             [] {
                 const world w = drawn();
                 const bool abort = *rc::gen::arbitrary<bool>();
                 run(w, false, [&](auto& q, auto& producers, auto& learners, auto& left) {
                     std::mt19937 random(w.seed);
                     wander(random);
                     for (int i = 0; i < 3; ++i) {
                         const std::string bytes =
                             q.snapshot([](archive_writer& to, const item& x) { to(x.id, x.payload); });
                         std::vector<int> ids;
                         staleness_queue<item> copy(options(w), bytes, [&](archive_reader& from) {
                             item x;
                             from(x.id, x.payload);
                             ids.push_back(x.id);
                             return x;
                         });
                         std::sort(ids.begin(), ids.end());
                         RC_ASSERT(std::adjacent_find(ids.begin(), ids.end()) == ids.end());
                         RC_ASSERT(copy.counts().outstanding == index_t(ids.size()));
                         copy.close();
                         while (auto b = copy.try_pop()) (void)std::move(*b).trained().synchronised();
                         RC_ASSERT(copy.counts().outstanding == 0);
                     }
                     if (abort)
                         left = q.abort();
                     else
                         q.close();
                     for (auto& t : producers) t.join(); // all waits end without a stop
                     for (auto& t : learners) t.join();
                 });
             },
             {.cases = 150, .disable_shrink = true});
}

TEST_CASE("a stop and a hand-over at the same moment: the permit is with one or the other") {
    property("handed over or stopped",
             [](std::uint8_t delay, std::uint8_t other) {
                 staleness_queue<int> q({.batch = 1, .schedule = {.tau = 0}});
                 permit held = q.acquire();
                 std::stop_source stop;
                 permit got;
                 std::jthread waiter([&] { got = q.acquire(stop.get_token()); });
                 std::jthread stopper([&] {
                     dawdle(40U * delay);
                     stop.request_stop();
                 });
                 dawdle(40U * other);
                 held = {};
                 waiter.join();
                 stopper.join();
                 RC_ASSERT(bool(got) != bool(q.try_acquire()));
             },
             {.cases = 300, .disable_shrink = true});
}

TEST_CASE("permits that outlive their queue in other threads") {
    property("outlived",
             [](std::uint8_t n) {
                 std::vector<std::jthread> threads;
                 std::atomic<bool> go{false};
                 {
                     staleness_queue<item> q({.batch = 4, .schedule = {.tau = 3}});
                     for (int i = 0; i < 4; ++i) {
                         permit p = q.acquire();
                         (void)q.push(p, make(i));
                     }
                     for (int i = 0; i < 1 + n % 6; ++i)
                         threads.emplace_back([&go, p = q.acquire()] { go.wait(false); });
                     threads.emplace_back([&go, b = q.pop()]() mutable {
                         go.wait(false);
                         b.reset();
                     });
                     if (n % 2) go = true, go.notify_all();
                 }
                 go = true, go.notify_all();
                 threads.clear();
                 RC_ASSERT(threads.empty()); // the address and thread sanitizers look at the rest
             },
             {.cases = 100, .disable_shrink = true});
}
