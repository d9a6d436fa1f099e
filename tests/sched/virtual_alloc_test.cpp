// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// In steady state neither the scheduler nor its executor in virtual time allocates, but for lists that grow.
// What a remote peer sends takes memory by what came, not by what it claims to be.
#include <cstdlib>
#include <doctest/doctest.h>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "opd/sched/remote_driver.hpp"
#include "opd/sched/simulated_cluster.hpp"
#include "opd/sched/virtual_driver.hpp"

namespace {
std::size_t allocations = 0, bytes_asked = 0;
}
void* operator new(std::size_t n) {
    ++allocations;
    bytes_asked += n;
    if (void* p = std::malloc(n)) return p;
    throw std::bad_alloc();
}
void operator delete(void* p) noexcept { std::free(p); }
void operator delete(void* p, std::size_t) noexcept { std::free(p); }

TEST_CASE("the steady state of a streaming schedule allocates nothing") {
    using namespace opd::sched;
    for (const staleness_policy policy : {staleness_policy::capacity, staleness_policy::in_order}) {
        INFO(std::string(name_of(policy)));
        settings s;
        s.batch = 64;
        async a;
        a.policy = policy;
        s.schedule = a;
        simulated_cluster c;
        c.lengths.response = {lognormal{500, 1}, 1, 4000};
        c.lanes = 16;
        c.teacher_time.fixed = 0.01;
        c.learner_time.fixed = 2;
        c.sync_time.fixed = 0.5;
        virtual_driver<simulated_cluster> d(s, c);
        d.bring_up(stage::rollout, 8, 16);
        d.bring_up(stage::teacher, 2, 4);
        d.bring_up(stage::learner, 1);
        d.run_until(20000);
        const std::size_t before = allocations;
        const std::uint64_t events = d.events();
        const version_t version = d.scheduler().version();
        d.run_until(40000);
        CHECK(d.scheduler().version() > version + 1000);
        CHECK(d.events() - events > 50000);
        CHECK(allocations - before < 20);
    }
}

TEST_CASE("what a peer claims to send takes no memory") {
    using namespace opd::sched;
    struct sink {
        std::vector<std::pair<std::string, std::string>> sent;
        void send(const std::string& peer, std::string f) { sent.emplace_back(peer, std::move(f)); }
    };
    struct none {};
    const settings s{.most_workers = 4, .most_slots = 4};
    remote_options o;
    o.frame = 1 << 16, o.message = 1 << 18, o.peers = 4;
    const std::string all_ones(8, '\xff'), zeros(60000, '\0');
    const auto count = [](std::uint64_t n) { return std::string(reinterpret_cast<const char*>(&n), sizeof n); };
    archive_writer event_bytes;
    event_bytes(event::up(stage::rollout, 0).of_life(1));
    const std::string start = std::string(1, '\0') + event_bytes.bytes; // what stands before the lists of a reply
    std::size_t largest = 0;
    for (const std::string& message : {start + all_ones + zeros, start + count(60000) + zeros,
                                       start + count(2000) + zeros, start + count(0) + all_ones + zeros,
                                       start + count(0) + count(0) + std::string(2, '\0') + count(50000) + zeros,
                                       std::string(60000, '\xff'), std::string(60000, '\1')}) {
        sink wire;
        none hooks;
        remote_driver<payload_ref, payload_ref, sink, none> d(s, o, 1, wire, hooks);
        const std::int32_t slots = 1;
        d.hear("w",
               frame_bytes({.what = remote_kind::hello, .worker = 0, .number = 1},
                           {reinterpret_cast<const char*>(&slots), sizeof slots}),
               0);
        const auto size = static_cast<std::uint32_t>(message.size() << 1 | 1);
        const std::string frame = frame_bytes({.worker = 0, .life = 1, .epoch = 1, .number = 1},
                                              std::string(reinterpret_cast<const char*>(&size), sizeof size) + message);
        const std::size_t before = bytes_asked;
        d.hear("w", frame, 0);
        CHECK(d.counts().refused == 1);
        largest = std::max(largest, bytes_asked - before);
        // parts of a message that does not end, and strangers
        const std::size_t then = bytes_asked;
        d.hear("w", std::string(1 << 20, 'x'), 0);
        for (int i = 0; i < 1000; ++i)
            d.hear("stranger" + std::to_string(i), frame_bytes({.worker = i, .life = 1, .epoch = 1, .number = 1}), 0);
        wire.sent.clear();
        CHECK(bytes_asked - then < 1000 * 4000); // answers, which are forgotten
    }
    MESSAGE(largest << " bytes at most for a frame of " << o.frame);
    CHECK(largest < 16 * std::size_t{o.frame});
}
