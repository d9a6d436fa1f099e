// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// build: tsan
//
// The staleness queue, one promise a case; random single-threaded histories against counts, bounds and resumed copies.
// What threads may do to each other is in queue_stress_test.cpp.
#include <atomic>
#include <doctest/doctest.h>
#include <iterator>
#include <map>
#include <memory>
#include <set>
#include <thread>
#include <vector>

#include "opd/sched/staleness_queue.hpp"
#include "support/property.hpp"

namespace {

using namespace opd::sched;
using opd::index_t;

using queue = staleness_queue<int>;
static_assert(!std::is_copy_constructible_v<permit> && std::is_nothrow_move_constructible_v<permit>);
static_assert(!std::is_copy_constructible_v<queue::batch> && !std::is_copy_constructible_v<queue::update>);
static_assert(!std::is_constructible_v<queue::update> && !std::is_constructible_v<queue::batch>);
static_assert(std::forward_iterator<queue::batch::iterator>);

queue_options options(index_t batch, index_t tau, staleness_policy policy = staleness_policy::capacity,
                      index_t outstanding = 0, index_t group = 1) {
    return {.batch = batch, .schedule = {.tau = tau, .outstanding = outstanding, .policy = policy}, .group = group};
}

template <class T>
void put(staleness_queue<T>& q, T x) {
    permit p = q.try_acquire();
    REQUIRE(p);
    REQUIRE(q.push(p, std::move(x)) == push_result::queued);
    CHECK_FALSE(p);
}
std::vector<int> items(const queue::batch& b) { return {b.begin(), b.end()}; }
template <class Batch>
auto consume(Batch&& b) {
    return std::move(b).trained().synchronised();
}
void balanced(const queue_counts& n) {
    CHECK(n.acquired == n.consumed + n.returned + n.dropped + n.discarded + n.outstanding);
}
/// Returns once `n` threads wait.
template <class T>
void until_waiting(const staleness_queue<T>& q, index_t n) {
    for (;; std::this_thread::yield())
        if (const queue_counts c = q.counts(); c.waiting_producers + c.waiting_learners == n) return;
}
template <class F>
std::string argument_of(F&& f) {
    try {
        f();
    } catch (const opd::invalid_input& e) {
        return e.argument;
    }
    return "";
}

/// Counts its instances.
struct counted {
    static inline std::atomic<int> alive{0};
    int value = 0;
    explicit counted(int v) : value(v) { ++alive; }
    counted(counted&& o) noexcept : value(o.value) { ++alive; }
    counted& operator=(counted&&) = default;
    ~counted() { --alive; }
};

} // namespace

TEST_CASE("options that cannot work are refused by name") {
    CHECK(argument_of([] { queue q(options(0, 1)); }) == "batch");
    CHECK(argument_of([] { queue q(options(4, -1)); }) == "schedule.tau");
    CHECK(argument_of([] { queue q(options(4, 1, staleness_policy::edf, 9)); }) == "schedule.outstanding");
    CHECK(argument_of([] { queue q(options(4, 1, staleness_policy::capacity, 3)); }) == "schedule.outstanding");
    CHECK(argument_of([] { queue q(options(4, 1, staleness_policy::naive_wait)); }) == "schedule.policy");
    CHECK(argument_of([] { queue q(options(4, 0, staleness_policy::edf, 0, 3)); }) == "group");
    CHECK(argument_of([] { queue q({.batch = 4, .schedule = {.update = weight_update::abort}}); }) ==
          "schedule.update");
}

TEST_CASE("a permit moves, and returns itself") {
    queue q(options(2, 0));
    {
        permit a = q.acquire(), b = q.try_acquire();
        CHECK(a);
        CHECK(b);
        CHECK(a.slot() != b.slot());
        CHECK_FALSE(q.try_acquire());
        permit c = std::move(a);
        CHECK_FALSE(a); // NOLINT: that is the promise
        CHECK(c);
        CHECK_FALSE(q.try_acquire());
        c = std::move(b); // what c held is returned
        permit d = q.try_acquire();
        CHECK(d);
        CHECK_FALSE(q.try_acquire());
    }
    CHECK(q.counts().outstanding == 0);
    CHECK(q.counts().returned == 3);
    balanced(q.counts());
    try {
        const permit p = q.acquire();
        throw std::runtime_error("in generation");
    } catch (const std::runtime_error&) {}
    CHECK(q.counts().outstanding == 0);
}

TEST_CASE("groups take all permits or none") {
    queue q(options(4, 1, staleness_policy::capacity, 0, 4)); // 8 permits
    permit group[4], one = q.acquire();
    CHECK(q.acquire(group));
    for (const permit& p : group) CHECK(p);
    permit more[4];
    CHECK_FALSE(q.try_acquire(more)); // 3 are left
    for (const permit& p : more) CHECK_FALSE(p);
    CHECK(q.try_acquire(std::span(more).first(3)));
    CHECK(argument_of([&] { (void)q.try_acquire(group); }) == "permits"); // they are in use
    permit five[5];
    CHECK(argument_of([&] { (void)q.acquire(five); }) == "permits");
    int x[4] = {0, 1, 2, 3};
    CHECK(q.push(group, x) == push_result::queued);
    CHECK(items(*q.try_pop()) == std::vector{0, 1, 2, 3});
}

TEST_CASE("push checks its permits") {
    queue q(options(2, 0)), other(options(2, 0));
    permit none, foreign = other.acquire(), mine = q.acquire();
    CHECK(argument_of([&] { (void)q.push(none, 1); }) == "permits");
    CHECK(argument_of([&] { (void)q.push(foreign, 1); }) == "permits");
    CHECK(argument_of([&] { (void)none.restart(); }) == "permit");
    permit two[2] = {std::move(mine), permit()};
    int x[2] = {1, 2};
    CHECK(argument_of([&] { (void)q.push(two, x); }) == "permits");
    CHECK(argument_of([&] { (void)q.push(two, std::span(x).first(1)); }) == "items");
    CHECK(q.counts().ready == 0); // nothing was written
    CHECK(two[0]);
}

TEST_CASE("a batch is trained, the gate closes, the version moves, the permits return") {
    queue q(options(2, 1)); // 4 permits
    for (int i = 0; i < 3; ++i) put(q, i);
    auto b = q.pop();
    REQUIRE(b);
    CHECK(items(*b) == std::vector{0, 1});
    CHECK(b->version() == 0);
    CHECK(b->version_of(1) == 0);
    CHECK_FALSE(q.try_pop()); // one batch at a time
    put(q, 3);
    CHECK_FALSE(q.try_acquire()); // M are out, those in training included
    CHECK(q.counts().training == 2);
    auto u = std::move(*b).trained();
    CHECK(q.version() == 0);
    CHECK_FALSE(q.try_acquire());
    CHECK_FALSE(q.try_pop());
    CHECK(std::move(u).synchronised().empty());
    CHECK(q.version() == 1);
    const permit p = q.try_acquire();
    CHECK(p.version() == 1);
    auto c = q.pop();
    CHECK(items(*c) == std::vector{2, 3});
    CHECK(c->version() - c->version_of(0) == 1);
    CHECK(consume(*std::move(c)).empty());
    CHECK(q.counts().consumed == 4);
    CHECK(q.counts().batches == 2);
    balanced(q.counts());
}

TEST_CASE("the gate is closed to permits that are free, too") {
    queue q(options(2, 1));
    put(q, 0);
    put(q, 1);
    auto u = std::move(*q.pop()).trained();
    CHECK(q.counts().outstanding == 2); // of 4
    CHECK_FALSE(q.try_acquire());
    version_t got = -1;
    std::jthread producer([&] { got = q.acquire().version(); });
    until_waiting(q, 1);
    std::move(u).synchronised();
    producer.join();
    CHECK(got == 1);
}

TEST_CASE("a batch that is destroyed untrained goes back in front") {
    for (const staleness_policy policy : {staleness_policy::capacity, staleness_policy::cohort_fifo,
                                          staleness_policy::edf, staleness_policy::in_order}) {
        CAPTURE(name_of(policy));
        queue q(options(2, 1, policy));
        for (int i = 0; i < 4; ++i) put(q, i);
        try {
            const auto b = q.pop();
            CHECK(items(*b) == std::vector{0, 1});
            throw std::runtime_error("the learner failed");
        } catch (const std::runtime_error&) {}
        CHECK(q.counts().put_back == 2);
        auto b = q.pop();
        CHECK(items(*b) == std::vector{0, 1});
        consume(*std::move(b));
        CHECK(items(*q.pop()) == std::vector{2, 3});
    }
}

TEST_CASE("what was moved from says so") {
    queue q(options(1, 0));
    put(q, 0);
    auto b = q.pop();
    auto u = std::move(*b).trained();
    CHECK(argument_of([&] { (void)b->size(); }) == "batch");
    CHECK(argument_of([&] { (void)std::move(*b).trained(); }) == "batch");
    std::move(u).synchronised();
    CHECK(argument_of([&] { std::move(u).synchronised(); }) == "update");
    CHECK(q.version() == 1);
}

TEST_CASE("weights that were trained and never got out end the queue") {
    queue q(options(2, 1));
    for (int i = 0; i < 3; ++i) put(q, i);
    permit held = q.acquire();
    try {
        const auto u = std::move(*q.pop()).trained();
        throw std::runtime_error("the network is down");
    } catch (const std::runtime_error&) {}
    CHECK(q.aborted());
    CHECK_FALSE(q.acquire());
    CHECK_FALSE(q.pop());
    CHECK_FALSE(held.restart());
    int x = 7;
    CHECK(q.push(held, std::move(x)) == push_result::aborted);
    CHECK(held);
    CHECK(q.abort() == std::vector{2}); // the one that was left
    held = {};
    CHECK(q.counts().outstanding == 0);
    balanced(q.counts());
}

TEST_CASE("a closed queue drains, with a short batch at the end") {
    queue q(options(2, 1));
    permit late = q.acquire();
    for (int i = 0; i < 3; ++i) put(q, i);
    q.close();
    CHECK(q.closed());
    CHECK_FALSE(q.acquire());
    auto b = q.pop();
    CHECK(items(*b) == std::vector{0, 1});
    consume(*std::move(b));
    CHECK_FALSE(q.try_pop()); // one is still with its producer
    std::vector<std::vector<int>> got;
    std::jthread learner([&] {
        while (auto last = q.pop()) {
            got.push_back(items(*last));
            consume(*std::move(last));
        }
    });
    until_waiting(q, 1);
    CHECK(q.push(late, 9) == push_result::queued);
    learner.join();
    CHECK(got == std::vector<std::vector<int>>{{2, 9}});
    CHECK(q.counts().outstanding == 0);

    queue r(options(2, 1));
    put(r, 5);
    permit fails = r.acquire();
    r.close();
    CHECK_FALSE(r.try_pop());
    fails = {};
    auto s = r.pop();
    CHECK(items(*s) == std::vector{5});
    CHECK_FALSE(r.try_pop());
    consume(*std::move(s));
    CHECK_FALSE(r.pop());
}

TEST_CASE("weights that were trained and never got out wake whoever waits") {
    queue q(options(2, 0));
    for (int i = 0; i < 2; ++i) put(q, i);
    auto b = q.pop();
    std::atomic<int> ended{0};
    std::jthread producer([&] { ended += !q.acquire(); }), learner([&] { ended += !q.pop(); });
    until_waiting(q, 2);
    { const auto u = std::move(*b).trained(); }
    producer.join(), learner.join();
    CHECK(ended == 2);
}

TEST_CASE("a batch that is destroyed untrained is the next learner's, who waits") {
    queue q(options(2, 0));
    for (int i = 0; i < 2; ++i) put(q, i);
    auto first = q.pop();
    std::vector<int> got;
    std::jthread second([&] { got = items(*q.pop()); });
    until_waiting(q, 1);
    first.reset();
    second.join();
    CHECK(got == std::vector{0, 1});
}

TEST_CASE("a restart lets a batch go that waited for it") {
    queue q(options(1, 1, staleness_policy::cohort_fifo));
    permit old = q.acquire();
    put(q, 0);
    consume(*q.pop());
    put(q, 1); // of version 1: after the old one
    CHECK_FALSE(q.try_pop());
    std::vector<int> got;
    std::jthread learner([&] { got = items(*q.pop()); });
    until_waiting(q, 1);
    CHECK(old.restart());
    learner.join();
    CHECK(got == std::vector{1});
}

TEST_CASE("closing wakes whoever waits for a permit, draining whoever waits for a batch") {
    queue q(options(2, 0));
    permit a = q.acquire(), b = q.acquire();
    std::atomic<int> ended{0};
    std::vector<std::jthread> threads;
    for (int i = 0; i < 3; ++i) threads.emplace_back([&] { ended += !q.acquire(); });
    for (int i = 0; i < 2; ++i) threads.emplace_back([&] { ended += !q.pop(); });
    until_waiting(q, 5);
    q.close();
    until_waiting(q, 2);
    a = {};
    b = {};
    threads.clear();
    CHECK(ended == 5);
}

TEST_CASE("abort ends all waits and gives the items back") {
    queue q(options(2, 1));
    put(q, 1);
    permit held = q.acquire();
    std::atomic<int> ended{0};
    {
        std::jthread learner([&] { ended += !q.pop(); });
        until_waiting(q, 1);
        CHECK(q.abort() == std::vector{1});
    }
    CHECK(ended == 1);
    CHECK_FALSE(q.acquire());
    CHECK(q.abort().empty());
    held = {};
    CHECK(q.counts().discarded == 1);
    balanced(q.counts());

    queue r(options(2, 1)); // a batch that is out at that moment
    for (int i = 0; i < 3; ++i) put(r, i);
    auto b = r.pop();
    CHECK(r.abort() == std::vector{2});
    b.reset();
    CHECK(r.abort() == std::vector{0, 1});
    CHECK(r.counts().outstanding == 0);
}

TEST_CASE("a stop ends every wait, and a stopped token takes nothing") {
    queue q(options(2, 0));
    std::stop_source stopped;
    stopped.request_stop();
    CHECK_FALSE(q.acquire(stopped.get_token()));
    CHECK(q.counts().acquired == 0);
    permit a = q.acquire(), b = q.acquire();
    CHECK_FALSE(a.restart(stopped.get_token()));
    CHECK(a);
    {
        std::stop_source stop;
        std::atomic<int> ended{0};
        std::jthread producer([&] { ended += !q.acquire(stop.get_token()); });
        std::jthread learner([&] { ended += !q.pop(stop.get_token()); });
        until_waiting(q, 2);
        stop.request_stop();
        producer.join();
        learner.join();
        CHECK(ended == 2);
        CHECK(q.counts().waiting_learners + q.counts().waiting_producers == 0);
    }
    REQUIRE(q.push(a, 0) == push_result::queued);
    REQUIRE(q.push(b, 1) == push_result::queued);
    CHECK_FALSE(q.pop(stopped.get_token()));
    auto u = std::move(*q.pop()).trained();
    std::stop_source stop; // restart waits for the gate
    queue two(options(2, 1));
    permit p = two.acquire();
    put(two, 1);
    put(two, 2);
    auto v = std::move(*two.pop()).trained();
    bool restarted = true;
    std::jthread producer([&] { restarted = p.restart(stop.get_token()); });
    until_waiting(two, 1);
    stop.request_stop();
    producer.join();
    CHECK_FALSE(restarted);
    CHECK(p.version() == 0);
    std::move(v).synchronised();
    CHECK(p.restart());
    CHECK(p.version() == 1);
    std::move(u).synchronised();
}

TEST_CASE("restart waits for the gate and takes the next version") {
    queue q(options(2, 1));
    permit p = q.acquire();
    put(q, 1);
    put(q, 2);
    auto u = std::move(*q.pop()).trained();
    std::jthread producer([&] { CHECK(p.restart()); });
    until_waiting(q, 1);
    std::move(u).synchronised();
    producer.join();
    CHECK(p.version() == 1);
    CHECK(q.counts().retried == 1);
}

TEST_CASE("abort ends a restart that waits for the gate") {
    queue q(options(2, 1));
    permit p = q.acquire();
    put(q, 1);
    put(q, 2);
    auto u = std::move(*q.pop()).trained();
    std::jthread producer([&] { CHECK_FALSE(p.restart()); });
    until_waiting(q, 1);
    CHECK(q.abort().empty());
    producer.join();
    CHECK(p.version() == 0);
    CHECK(std::move(u).synchronised().empty()); // trained and out, all the same
    CHECK(q.counts().consumed == 2);
}

TEST_CASE("exchange pushes and takes the next permit") {
    queue q(options(2, 0, staleness_policy::retry));
    permit p = q.acquire();
    CHECK(q.exchange(p, 1) == push_result::queued);
    REQUIRE(p);
    CHECK(q.counts().outstanding == 2);
    std::jthread learner([&] { // the next is free only once these two are consumed
        auto b = q.pop();
        CHECK(items(*b) == std::vector{1, 2});
        consume(*std::move(b));
    });
    CHECK(q.exchange(p, 2) == push_result::queued);
    CHECK(p.version() == 1);
    learner.join();
    permit other = q.acquire();
    std::stop_source stop;
    std::jthread producer([&] { CHECK(q.exchange(p, 3, stop.get_token()) == push_result::queued); });
    until_waiting(q, 1);
    stop.request_stop();
    producer.join();
    CHECK_FALSE(p);
    CHECK(q.exchange(other, 4, stop.get_token()) == push_result::queued);
    CHECK_FALSE(other);
    auto b = q.pop();
    CHECK(items(*b) == std::vector{3, 4});
    consume(*std::move(b));

    p = q.acquire();
    q.close();
    CHECK(q.exchange(p, 5) == push_result::queued);
    CHECK_FALSE(p);
    CHECK(q.abort() == std::vector{5});
    permit two[2];
    int x[2] = {};
    queue r(options(2, 1)), s(options(2, 0));
    two[0] = r.acquire(), two[1] = r.acquire();
    CHECK(argument_of([&] { (void)r.exchange(two, x); }) == "permits"); // group is 1
    CHECK(r.counts().ready == 0);
    CHECK(argument_of([&] { (void)s.exchange(two[0], 1); }) == "permits");
}

TEST_CASE("first come, first served: singles do not overtake a group") {
    queue q(options(2, 3, staleness_policy::capacity, 0, 4)); // 8 permits
    std::vector<permit> held;
    for (int i = 0; i < 8; ++i) held.push_back(q.acquire());
    std::vector<int> order; // under `q`'s hand-over: each appends after it was served
    std::mutex m;
    const auto note = [&](int who) {
        const std::lock_guard lock(m);
        order.push_back(who);
    };
    std::stop_source stop;
    permit group[4], single;
    std::atomic<bool> group_served{false};
    std::jthread a([&] {
        group_served = q.acquire(group, stop.get_token());
        note(1);
    });
    until_waiting(q, 1);
    std::jthread b([&] {
        single = q.acquire();
        note(2);
    });
    until_waiting(q, 2);
    SUBCASE("served in turn") {
        for (int i = 0; i < 3; ++i) held.pop_back(); // enough for the single
        CHECK(q.counts().waiting_producers == 2);
        CHECK_FALSE(q.try_acquire());
        held.pop_back();
        until_waiting(q, 1);
        a.join();
        CHECK(group_served);
        CHECK(q.counts().waiting_producers == 1);
        held.pop_back();
        b.join();
        CHECK(single);
        CHECK(order == std::vector{1, 2});
    }
    SUBCASE("a group that stops lets the next one in") {
        held.pop_back();
        stop.request_stop();
        b.join();
        a.join();
        CHECK_FALSE(group_served);
        CHECK(single);
    }
}

TEST_CASE("drop and retry: what is too old is refused, or given back when the version moves") {
    for (const staleness_policy policy : {staleness_policy::drop, staleness_policy::retry}) {
        CAPTURE(name_of(policy));
        queue q(options(1, 1, policy, 4));
        permit slow = q.acquire(), slower = q.acquire();
        const auto step = [&](int i) {
            put(q, i);
            return consume(*q.pop());
        };
        CHECK(step(0).empty());
        CHECK(q.push(slow, 10) == push_result::queued); // started at 0; the version is 1
        auto b = q.pop();
        CHECK(b->version() - b->version_of(0) == 1);
        put(q, 1);
        CHECK(consume(*std::move(b)).empty());
        CHECK(q.version() == 2);
        int x = 20;
        CHECK(q.push(slower, std::move(x)) == push_result::stale); // started at 0
        CHECK(slower);
        put(q, 2); // items 1 (version 1) and 2 (version 2) lie in the queue
        put(q, 3);
        CHECK(consume(*q.pop()).empty()); // 1 is consumed
        if (policy == staleness_policy::drop) {
            slower = {};
        } else {
            CHECK(slower.restart());
            CHECK(slower.version() == 3);
            CHECK(q.push(slower, 20) == push_result::queued);
        }
        CHECK(consume(*q.pop()).size() == 1); // 2 is consumed; 3 was started at 2 and the version is 4
        CHECK(q.version() == 4);
        balanced(q.counts());
        if (policy == staleness_policy::drop) {
            CHECK(q.counts().dropped == 1);
            CHECK(q.counts().outstanding == 0);
        } else {
            CHECK(q.counts().retried == 2);
            CHECK(items(*q.pop()) == std::vector{20});
        }
    }
    queue q(options(1, 0, staleness_policy::retry, 2));
    put(q, 1);
    put(q, 2);
    auto stale = consume(*q.pop());
    REQUIRE(stale.size() == 1);
    CHECK(stale[0].item == 2);
    CHECK(stale[0].version == 0);
    REQUIRE(stale[0].permit);
    CHECK(stale[0].permit.version() == 1);
    CHECK(q.push(stale[0].permit, 3) == push_result::queued);
    CHECK(items(*q.pop()) == std::vector{3});
}

TEST_CASE("a group that cannot be completed leaves a short batch, not a deadlock") {
    queue q(options(4, 0, staleness_policy::capacity, 0, 4)); // 4 permits: one group
    permit group[4], next[4];
    REQUIRE(q.acquire(group));
    for (int i = 0; i < 3; ++i) REQUIRE(q.push(group[i], int(i)) == push_result::queued);
    group[3] = {};            // a member failed for good
    CHECK_FALSE(q.try_pop()); // somebody might still replace it
    std::size_t size = 0;
    const auto produce = [&] { CHECK(q.acquire(next)); };
    const auto learn = [&] {
        auto b = q.pop();
        size = b->size();
        consume(*std::move(b));
    };
    std::vector<std::jthread> threads;
    SUBCASE("the producer waits first") {
        threads.emplace_back(produce);
        until_waiting(q, 1);
        threads.emplace_back(learn);
    }
    SUBCASE("the learner waits first") {
        threads.emplace_back(learn);
        until_waiting(q, 1);
        threads.emplace_back(produce);
    }
    threads.clear();
    CHECK(size == 3);
    for (const permit& p : next) CHECK(p.version() == 1);
}

TEST_CASE("permits and batches may outlive their queue") {
    CHECK(counted::alive == 0);
    {
        auto q = std::make_unique<staleness_queue<counted>>(options(2, 2));
        permit held = q->acquire();
        for (int i = 0; i < 4; ++i) put(*q, counted(i));
        auto b = q->pop();
        CHECK(counted::alive == 4);
        q.reset(); // two are discarded
        CHECK(counted::alive == 2);
        CHECK((*b)[1].value == 1);
        CHECK_FALSE(held.restart());
        SUBCASE("trained after its end") { consume(*std::move(b)); }
        SUBCASE("destroyed after its end") { b.reset(); }
        SUBCASE("the permit goes first") { held = {}; }
        SUBCASE("trained and not synchronised") {
            const auto u = std::move(*b).trained();
            CHECK(counted::alive == 0);
        }
    }
    CHECK(counted::alive == 0);
}

TEST_CASE("items may be move-only") {
    staleness_queue<std::unique_ptr<int>> q(options(1, 0));
    put(q, std::make_unique<int>(5));
    const auto b = q.pop();
    CHECK(*(*b)[0] == 5);
    CHECK(*b->begin()->get() == 5);
}

namespace {

std::string saved(const queue& q) {
    return q.snapshot([](archive_writer& to, const int& x) { to(x); });
}
std::unique_ptr<queue> loaded(const queue_options& o, const std::string& bytes) {
    return std::make_unique<queue>(o, bytes, [](archive_reader& from) {
        int x = 0;
        from(x);
        return x;
    });
}

} // namespace

TEST_CASE("a snapshot that does not fit is refused") {
    queue q(options(2, 1));
    for (int i = 0; i < 3; ++i) put(q, i);
    const std::string bytes = saved(q);
    CHECK(argument_of([&] { loaded(options(2, 2), bytes); }) == "snapshot");
    CHECK(argument_of([&] { loaded(options(2, 1, staleness_policy::edf), bytes); }) == "snapshot");
    CHECK(argument_of([&] { loaded(options(2, 1), bytes + "x"); }) == "snapshot");
    for (std::size_t n = 0; n < bytes.size(); ++n)
        CHECK(argument_of([&] { loaded(options(2, 1), bytes.substr(0, n)); }) == "snapshot");
    CHECK(saved(*loaded(options(2, 1), bytes)) == bytes);
}

TEST_CASE("nothing starts while a short batch is out, or it would be consumed a version late") {
    for (const staleness_policy p :
         {staleness_policy::edf, staleness_policy::cohort_fifo, staleness_policy::in_order}) {
        queue q(options(2, 0, p, 0, 2));
        {
            std::vector<permit> pair(2);
            REQUIRE(q.try_acquire(pair));
            REQUIRE(q.push(pair[0], 1) == push_result::queued);
        } // the other one failed
        std::stop_source stop;
        std::thread group([&] {
            std::vector<permit> pair(2);
            (void)q.acquire(pair, stop.get_token()); // one is free: it does not fit
        });
        until_waiting(q, 1);
        auto b = q.pop();
        REQUIRE(items(*b) == std::vector{1}); // what is left
        stop.request_stop();
        group.join();
        CHECK_FALSE(q.try_acquire());
        consume(*std::move(b));
        const permit held = q.try_acquire();
        REQUIRE(held);
        CHECK(held.version() == 1);
    }
}

TEST_CASE("random histories: counts balance, nothing is lost or doubled, bounds hold, copies go on equally") {
    for (const staleness_policy policy :
         {staleness_policy::capacity, staleness_policy::cohort_fifo, staleness_policy::edf, staleness_policy::drop,
          staleness_policy::retry, staleness_policy::in_order, staleness_policy::areal})
        property(name_of(policy),
                 [policy] {
                     const index_t batch = *rc::gen::inRange<index_t>(1, 5), tau = *rc::gen::inRange<index_t>(0, 4);
                     const queue_options o = options(batch, tau, policy);
                     const auto events = *rc::gen::arbitrary<std::vector<std::uint8_t>>();
                     auto q = std::make_unique<queue>(o);
                     std::vector<permit> held;
                     std::optional<queue::batch> b;
                     std::optional<queue::update> u;
                     std::multiset<int> inside; // items pushed and neither consumed nor given back
                     int next = 0;
                     const auto leaves = [&](int x) {
                         const auto at = inside.find(x);
                         RC_ASSERT(at != inside.end());
                         inside.erase(at);
                     };
                     const auto synchronise = [&] {
                         for (auto& s : std::move(*u).synchronised()) {
                             leaves(s.item);
                             RC_ASSERT(bool(s.permit) == (policy == staleness_policy::retry));
                             if (s.permit) held.push_back(std::move(s.permit));
                         }
                         u.reset();
                     };
                     const auto train = [&] {
                         for (std::size_t i = 0; i < b->size(); ++i) {
                             const version_t lag = b->version() - b->version_of(i);
                             RC_ASSERT(lag >= 0);
                             if (policy != staleness_policy::capacity && policy != staleness_policy::areal)
                                 RC_ASSERT(lag <= tau);
                             leaves((*b)[i]);
                         }
                         u.emplace(std::move(*b).trained());
                         b.reset();
                     };
                     for (const std::uint8_t e : events) {
                         switch (e % 8) {
                         case 0:
                         case 1:
                             while (permit p = q->try_acquire()) {
                                 RC_ASSERT(!u);
                                 RC_ASSERT(p.version() == q->version());
                                 held.push_back(std::move(p));
                                 if (e % 8 == 1) break;
                             }
                             break;
                         case 2:
                         case 3: {
                             if (held.empty()) break;
                             permit& p = e % 8 == 2 ? held[e / 8u % held.size()] : held.back();
                             int x = next;
                             const push_result r = q->push(p, std::move(x));
                             const bool stale =
                                 (policy == staleness_policy::drop || policy == staleness_policy::retry) &&
                                 p.version() < q->version() - tau;
                             RC_ASSERT(r == (stale ? push_result::stale : push_result::queued));
                             if (stale && policy == staleness_policy::retry && !u) RC_ASSERT(p.restart());
                             if (!stale) inside.insert(next++);
                             if (!stale || policy == staleness_policy::drop)
                                 held.erase(held.begin() + (&p - held.data()));
                             break;
                         }
                         case 4:
                             if (!held.empty() && e > 128) held.pop_back();
                             break;
                         case 5:
                             if (b && e > 128) {
                                 b.reset();
                             } else if (!b && !u) {
                                 b = q->try_pop();
                                 if (b) RC_ASSERT(b->size() == std::size_t(batch));
                             }
                             break;
                         case 6:
                             if (u)
                                 synchronise();
                             else if (b)
                                 train();
                             break;
                         default: { // a copy without what is with producers, taken at any moment, and its copy
                             const auto copy = loaded(o, saved(*q));
                             RC_ASSERT(saved(*copy) == saved(*q));
                             RC_ASSERT(copy->counts().ready == copy->counts().outstanding);
                             const auto list = [](queue& x) {
                                 std::vector<int> all;
                                 x.close();
                                 while (auto y = x.try_pop()) {
                                     all.insert(all.end(), y->begin(), y->end());
                                     for (const auto& s : consume(*std::move(y))) all.push_back(-1 - s.item);
                                 }
                                 return all;
                             };
                             if (e > 128 && !u) { // the rest of the world fails; the original goes on as its copy does
                                 held.clear();
                                 b.reset();
                                 const auto rest = list(*copy);
                                 RC_ASSERT(rest == list(*q));
                                 std::multiset<int> seen;
                                 for (const int x : rest) seen.insert(x < 0 ? -1 - x : x);
                                 RC_ASSERT(seen == inside);
                                 return;
                             }
                             break;
                         }
                         }
                         const queue_counts n = q->counts();
                         RC_ASSERT(n.acquired == n.consumed + n.returned + n.dropped + n.discarded + n.outstanding);
                         RC_ASSERT(n.outstanding == n.ready + n.training + index_t(held.size()));
                         RC_ASSERT(index_t(inside.size()) == n.ready + (u ? 0 : n.training));
                         RC_ASSERT(n.outstanding <= (tau + 1) * batch);
                     }
                     if (b) train();
                     if (u) synchronise();
                     q->close();
                     held.clear();
                     while ((b = q->try_pop())) {
                         train();
                         synchronise();
                         held.clear();
                     }
                     RC_ASSERT(inside.empty());
                     RC_ASSERT(q->counts().outstanding == 0);
                 },
                 {.cases = 200});
}
