// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// In steady state neither the scheduler nor its executor in virtual time allocates, but for lists that reach a new size.
#include <cstdlib>
#include <doctest/doctest.h>
#include <new>

#include "opd/sched/simulated_cluster.hpp"
#include "opd/sched/virtual_driver.hpp"

namespace {
std::size_t allocations = 0;
}
void* operator new(std::size_t n) {
    ++allocations;
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
