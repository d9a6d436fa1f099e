// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// optimise: always
//
// Every interleaving of small configurations. A state is the scheduler together with what the world owes it: attempts
// that run, calls that were made, weights that are under way. From each state every answer is tried, and as long as the
// budget lasts every fault: a stage throws, hangs past its deadline, answers in part, twice, late, from a life that is
// over or at the moment when another is due, a worker dies or reconnects unnoticed, published weights are lost, the
// process is killed and resumed, the run is paused, closed or stopped. States that were seen are not explored again.
//
// Checked after every event: what stepwise_world.hpp lists. Checked of every state: unless the run is finished some
// event that is no fault is possible (no deadlock), and no path without faults comes back to where it was (no
// livelock). So from every state every path without further faults ends, and ends in `finished`.
#include <cstdio>
#include <doctest/doctest.h>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "stepwise_world.hpp"

namespace {

using namespace opd::test;
using opd::index_t;

struct explorer {
    const stepwise_options& o;
    std::size_t most = 3'000'000;
    std::unordered_map<std::uint64_t, bool> seen = {}; // false: on the path that led here
    std::size_t events = 0, ends = 0;
    std::vector<choice> path = {};

    std::string described() const {
        std::string text;
        for (const choice& c : path) text += std::string(" ") + name_of(c.what) + "/" + std::to_string(c.which);
        return text;
    }
    void visit(stepwise_world&& w) {
        const auto [at, fresh] = seen.try_emplace(w.hash(o), false);
        if (!fresh) {
            require(at->second || path.back().what >= choice::first_fault, "livelock: back where it was");
            return;
        }
        require(seen.size() <= most, "too many states");
        const std::uint64_t key = at->first;
        if (w.s.finished()) {
            ++ends;
        } else {
            const std::vector<choice> all = w.choices(o);
            require(!all.empty() && all.front().what < choice::first_fault, "deadlock: nothing can happen");
            for (const choice& c : all) {
                path.push_back(c);
                stepwise_world next = &c == &all.back() ? std::move(w) : w;
                next.take(o, c);
                ++events;
                visit(std::move(next));
                path.pop_back();
            }
        }
        seen[key] = true;
    }
    /// What was found, with the path to it; empty: nothing.
    std::string run() {
        try {
            visit(stepwise_world(o));
        } catch (const std::exception& e) {
            return std::string(e.what()) + " after" + described();
        }
        return {};
    }
};

/// `first`: which of the five deadlines is the shortest; the others follow, each of its own length.
settings base(schedule how, index_t batch, index_t sequences, int first = 0) {
    settings s;
    s.batch = batch;
    s.schedule = how;
    s.sequences = sequences;
    s.teacher_batch = 2;
    s.teacher_flush = std::holds_alternative<async>(how) ? 1.0 / 1024 : 0; // exact in binary, as all times are
    s.rollout_attempts = s.teacher_attempts = s.learner_attempts = s.payload_attempts = 2;
    double* const deadlines[] = {&s.rollout_deadline, &s.abort_deadline, &s.teacher_deadline, &s.learner_deadline,
                                 &s.sync_deadline};
    for (int i = 0; i < 5; ++i) *deadlines[(first + i) % 5] = 1 + i;
    return s;
}

constexpr policy every_policy[] = {policy::capacity, policy::cohort_fifo, policy::edf,  policy::drop,
                                   policy::retry,    policy::in_order,    policy::areal};

constexpr const char* deadline_names[] = {"rollout", "abort", "teacher", "learner", "sync"};

void explore(const std::string& name, const stepwise_options& o) {
    explorer e{o};
    const std::string found = e.run();
    CHECK_MESSAGE(found.empty(), name, ": ", found);
    std::printf("  %-64s %8zu states %9zu events %6zu ends\n", name.c_str(), e.seen.size(), e.events, e.ends);
}

} // namespace

TEST_CASE("whole batches, every interleaving") {
    for (int first = 0; first < 5; ++first) {
        const std::string name = std::string(", ") + deadline_names[first] + " first";
        explore("sync, B=2, 3 sequences, 1 fault" + name, {.s = base(opd::sched::sync{}, 2, 3, first)});
        explore("step_off{1}, B=1, 3 sequences, 1 fault" + name, {.s = base(step_off{1}, 1, 3, first)});
    }
    explore("sync, B=1, 2 sequences, 2 faults",
            {.s = base(opd::sched::sync{}, 1, 2), .faults = 2, .several_at_once = true});
    explore("step_off{1}, B=1, 2 sequences, 2 faults", {.s = base(step_off{1}, 1, 2), .slots = {1}, .faults = 2});
    explore("step_off{2}, B=1, 3 sequences, 1 fault", {.s = base(step_off{2}, 1, 3, 1), .slots = {1, 1}});
    explore("controlled{2}, B=1, 3 sequences, 1 fault", {.s = base(controlled{2}, 1, 3, 2)});
    explore("controlled{1}, B=1, 2 sequences, 2 faults",
            {.s = base(controlled{1}, 1, 2, 3), .slots = {1}, .faults = 2});
}

TEST_CASE("async, every policy and weight update, every interleaving") {
    int first = 0;
    for (const policy p : every_policy)
        for (const weight_update u : {weight_update::keep, weight_update::abort, weight_update::finish_first})
            explore(std::string(name_of(p)) + ", " + name_of(u) + ", B=1, M=2, 3 sequences, 1 fault",
                    {.s = base(async{.tau = 1, .policy = p, .update = u}, 1, 3, first++ % 5)});
}

TEST_CASE("async, two faults") {
    int first = 0;
    for (const policy p : every_policy)
        explore(std::string(name_of(p)) + ", keep, B=1, M=2, 2 sequences, 2 faults",
                {.s = base(async{.tau = 1, .policy = p}, 1, 2, first++ % 5), .faults = 2, .keep_prefixes = true});
    explore("edf, keep, B=1, M=2, 3 sequences, 2 faults",
            {.s = base(async{.tau = 1, .policy = policy::edf}, 1, 3), .faults = 2, .keep_prefixes = true});
    explore("capacity, keep, B=1, M=2, 3 sequences, 1 fault, any deadlines at once",
            {.s = base(async{.tau = 1, .policy = policy::capacity}, 1, 3), .several_at_once = true});
}

TEST_CASE("async, three permits, two workers, groups") {
    int first = 0;
    for (const policy p : every_policy) {
        const std::string name = name_of(p);
        const bool gives_up = p == policy::drop || p == policy::retry;
        const auto with = [&](const async& a, index_t batch, index_t sequences) {
            return base(a, batch, sequences, first++ % 5);
        };
        explore(
            name + ", B=1, M=3, 3 sequences, no fault",
            {.s = with(async{.tau = gives_up ? 0 : 2, .outstanding = p == policy::areal ? 0 : 3, .policy = p}, 1, 3),
             .slots = {3},
             .faults = 0});
        if (p == policy::areal) continue;
        explore(name + ", B=2, M=3, 3 sequences, 1 fault",
                {.s = with(async{.tau = 1, .outstanding = 3, .policy = p}, 2, 3), .keep_prefixes = true});
        explore(name + ", B=1, M=2, two workers, 2 sequences, 1 fault",
                {.s = with(async{.tau = 1, .policy = p}, 1, 2), .slots = {1, 1}});
        settings s = with(async{.tau = 0, .policy = p}, 2, 2);
        s.group = 2;
        explore(name + ", B=2, M=2, groups of 2, 2 sequences, 2 faults", {.s = s, .slots = {1}, .faults = 2});
    }
}

TEST_CASE("parking, every policy and weight update") {
    int first = 0;
    for (const policy p : every_policy)
        for (const weight_update u : {weight_update::keep, weight_update::abort, weight_update::finish_first})
            explore(std::string(name_of(p)) + ", " + name_of(u) + ", B=1, M=2, 2 sequences, 2 faults, parking",
                    {.s = base(async{.tau = 1, .policy = p, .update = u}, 1, 2, first++ % 5),
                     .slots = {1},
                     .faults = 2,
                     .keep_prefixes = true,
                     .parks = true});
    explore("edf, keep, B=1, M=2, two workers, 2 sequences, 1 fault, parking",
            {.s = base(async{.tau = 1, .policy = policy::edf}, 1, 2), .slots = {1, 1}, .parks = true});
    explore("sync, B=2, 2 sequences, 2 faults, parking",
            {.s = base(opd::sched::sync{}, 2, 2), .slots = {1}, .faults = 2, .parks = true});
    explore("step_off{1}, B=1, 2 sequences, 2 faults, parking",
            {.s = base(step_off{1}, 1, 2, 1), .slots = {1}, .faults = 2, .parks = true});
}

TEST_CASE("payloads that are lost, every policy and kind of batch") {
    int first = 0;
    for (const policy p : every_policy)
        explore(std::string(name_of(p)) + ", keep, B=2, M=3, 3 sequences, 1 fault, payloads",
                {.s = base(async{.tau = 1, .outstanding = p == policy::areal ? 0 : 3, .policy = p}, 2, 3, first++ % 5),
                 .slots = {1},
                 .payloads = true});
    for (const policy p : {policy::in_order, policy::edf})
        explore(std::string(name_of(p)) + ", finish_first, B=1, M=2, 2 sequences, 2 faults, payloads",
                {.s = base(async{.tau = 1, .policy = p, .update = weight_update::finish_first}, 1, 2),
                 .slots = {1},
                 .faults = 2,
                 .parks = true,
                 .payloads = true});
    explore("sync, B=2, 3 sequences, 2 faults, payloads",
            {.s = base(opd::sched::sync{}, 2, 3), .slots = {1}, .faults = 2, .payloads = true});
    explore("step_off{1}, B=1, 2 sequences, 2 faults, payloads",
            {.s = base(step_off{1}, 1, 2, 1), .slots = {1}, .faults = 2, .payloads = true});
    explore("controlled{1}, B=1, 2 sequences, 2 faults, payloads",
            {.s = base(controlled{1}, 1, 2, 3), .slots = {1}, .faults = 2, .payloads = true});
}

TEST_CASE("naive_wait deadlocks without any fault; the smallest case is B=1, tau=2, M=3, 4 sequences") {
    struct {
        index_t batch, tau, permits, sequences;
    } smallest{};
    for (const index_t sequences : {1, 2, 3, 4})
        for (const index_t tau : {0, 1, 2})
            for (const index_t batch : {1, 2})
                for (index_t permits = batch; permits <= (tau + 1) * batch && permits <= 3; ++permits) {
                    const async a{.tau = tau,
                                  .outstanding = permits,
                                  .policy = policy::naive_wait,
                                  .update = weight_update::keep,
                                  .negative_control = true};
                    const stepwise_options o{.s = base(a, batch, sequences), .slots = {3}, .faults = 0};
                    explorer e{o};
                    const std::string found = e.run();
                    if (found.empty() || smallest.batch > 0) continue;
                    CHECK_MESSAGE(found.find("deadlock") == 0, found);
                    smallest = {batch, tau, permits, sequences};
                    std::printf("  naive_wait: %s\n", found.c_str());
                }
    CHECK(smallest.batch == 1);
    CHECK(smallest.tau == 2);
    CHECK(smallest.permits == 3);
    CHECK(smallest.sequences == 4);
}

TEST_CASE("the explorer finds what is wrong") {
    const settings s = base(async{.tau = 1, .policy = policy::edf}, 1, 3);
    const auto finds = [](const stepwise_options& o, const std::string& words) {
        explorer e{o};
        const std::string found = e.run();
        CHECK_MESSAGE(found.find(words) != std::string::npos, found);
    };
    settings endless = s;
    endless.rollout_deadline = 0;
    finds({.s = endless, .loses_replies = true}, "deadlock: nothing can happen"); // a permit that never returns
    finds({.s = s, .lies_about_weights = true}, "a start without the weights");
    finds({.s = s, .promised = 0}, "the lag exceeds what was promised");
    finds({.s = base(step_off{1}, 1, 2), .promised = 0}, "the lag exceeds what was promised");
    // what lives, jobs that name weights, and word of their loss are for
    finds({.s = s, .slots = {1}, .faults = 2, .forgets_lives = event::kind::synced}, "deadlock: nothing can happen");
    finds({.s = s, .slots = {1}, .faults = 2, .forgets_lives = event::kind::worker_down},
          "deadlock: nothing can happen");
    finds({.s = s, .slots = {1}, .faults = 2, .installs_by_version = true}, "a start without the weights");
    finds({.s = s, .hides_lost_weights = true}, "deadlock: nothing can happen");
    CHECK(explorer{{.s = s}, 10}.run().find("too many states") == 0);
}
