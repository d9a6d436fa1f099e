// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// queue/       What bounded staleness costs an item: permit, push, pop in batches of B = 256, training,
//              synchronisation, permit returned (tau = 4, 1,280 permits, items of 16 bytes), in one thread, between one
//              producer and one learner, and between two and two. Beside it, in the same run, queues that bound a
//              number and no staleness: oneTBB's bounded queue, alone and with a second one that hands out the right to
//              push (which is what a permit is); a deque under a mutex with two condition variables. `paced`: a
//              producer that works a microsecond an item, and what the queue adds to its and the learner's processor
//              time.
// scheduler/   What a sequence costs the scheduler, all of its events together, when every action is answered at once:
//              same B and tau, 4 and 1,000 rollout workers, scoring calls of 8.
// simulator/   A day of a cluster of 1,000 rollout workers in virtual time: seconds, and events a second.
//
//   bench_sched [--benchmark_filter=regex] [--benchmark_out=file.json]
//
// ns: wall time an item. cpu_ns: processor time of all threads an item; share: of one core at 10^6 items a second. The
// figures are medians over repetitions; --benchmark_enable_random_interleaving=true lets contenders take turns.
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include <benchmark/benchmark.h>
#include <tbb/concurrent_queue.h>

#include "harness.hpp"
#include "opd/sched/scheduler.hpp"
#include "opd/sched/simulated_cluster.hpp"
#include "opd/sched/staleness_queue.hpp"
#include "opd/sched/virtual_driver.hpp"

namespace {

using namespace opd::sched;
using opd::index_t;

constexpr index_t batch_size = 256, tau = 4, permits = (tau + 1) * batch_size;

struct item {
    std::uint64_t sample;
    const void* payload;
};

/// The staleness queue, with permits taken `Group` at a time, each time an item is pushed (exchange()) or by
/// themselves.
template <staleness_policy Policy, int Group, bool Exchange>
struct ours {
    staleness_queue<item> queue{{.batch = batch_size, .schedule = {.tau = tau, .policy = Policy}, .group = Group}};
    template <class Work>
    void produce(index_t from, index_t n, Work&& work) {
        permit p[Group];
        item x[Group];
        (void)queue.acquire(p);
        for (index_t i = from; i < from + n; i += Group) {
            for (int k = 0; k < Group; ++k) {
                work();
                x[k] = {static_cast<std::uint64_t>(i + k), this};
            }
            if constexpr (Exchange) {
                if (i + Group < from + n)
                    (void)queue.exchange(p, x);
                else
                    (void)queue.push(p, x);
            } else {
                (void)queue.push(p, x);
                if (i + Group < from + n) (void)queue.acquire(p);
            }
        }
    }
    std::uint64_t consume(index_t n) {
        std::uint64_t sum = 0;
        for (index_t got = 0; got < n; got += batch_size) {
            auto batch = queue.pop();
            for (const item& x : *batch) sum += x.sample;
            std::move(*batch).trained().synchronised();
        }
        return sum;
    }
};

struct tbb_bounded {
    tbb::concurrent_bounded_queue<item> queue;
    tbb_bounded() { queue.set_capacity(permits); }
    template <class Work>
    void produce(index_t from, index_t n, Work&& work) {
        for (index_t i = from; i < from + n; ++i) {
            work();
            queue.push({static_cast<std::uint64_t>(i), this});
        }
    }
    std::uint64_t consume(index_t n) {
        std::uint64_t sum = 0;
        item x{};
        for (index_t i = 0; i < n; ++i) {
            queue.pop(x);
            sum += x.sample;
        }
        return sum;
    }
};

/// Permits are tokens in a queue of their own, which return when the batch is done.
struct tbb_permits : tbb_bounded {
    tbb::concurrent_bounded_queue<int> tokens;
    tbb_permits() {
        for (int i = 0; i < permits; ++i) tokens.push(i);
    }
    template <class Work>
    void produce(index_t from, index_t n, Work&& work) {
        int token = 0;
        for (index_t i = from; i < from + n; ++i) {
            tokens.pop(token);
            work();
            queue.push({static_cast<std::uint64_t>(i), this});
        }
    }
    std::uint64_t consume(index_t n) {
        std::uint64_t sum = 0;
        for (index_t got = 0; got < n; got += batch_size) {
            sum += tbb_bounded::consume(batch_size);
            for (int i = 0; i < batch_size; ++i) tokens.push(i);
        }
        return sum;
    }
};

struct mutex_deque {
    std::mutex mutex;
    std::condition_variable room, filled;
    std::deque<item> queue;
    template <class Work>
    void produce(index_t from, index_t n, Work&& work) {
        for (index_t i = from; i < from + n; ++i) {
            work();
            std::unique_lock lock(mutex);
            room.wait(lock, [&] { return queue.size() < std::size_t(permits); });
            queue.push_back({static_cast<std::uint64_t>(i), this});
            filled.notify_one();
        }
    }
    std::uint64_t consume(index_t n) {
        std::uint64_t sum = 0;
        for (index_t i = 0; i < n; ++i) {
            std::unique_lock lock(mutex);
            filled.wait(lock, [&] { return !queue.empty(); });
            sum += queue.front().sample;
            queue.pop_front();
            room.notify_one();
        }
        return sum;
    }
};

/// `pairs` producers and as many learners; 0: one thread, a batch in and out at a time.
template <class Queue>
void round_trip(benchmark::State& state, int pairs) {
    constexpr index_t n = index_t{1} << 19;
    double wall = 0, processor = 0, items = 0;
    for (auto _ : state) {
        const auto queue = std::make_unique<Queue>();
        std::atomic<std::uint64_t> sum{0};
        const double used = bench::processor_time(), start = bench::now();
        if (pairs == 0) {
            for (index_t i = 0; i < n; i += batch_size) {
                queue->produce(i, batch_size, [] {});
                sum += queue->consume(batch_size);
            }
        } else {
            std::vector<std::thread> threads;
            for (int k = 0; k < pairs; ++k) {
                threads.emplace_back([&, k] { queue->produce(k * (n / pairs), n / pairs, [] {}); });
                threads.emplace_back([&] { sum += queue->consume(n / pairs); });
            }
            for (auto& t : threads) t.join();
        }
        const double took = bench::now() - start;
        state.SetIterationTime(took);
        wall += took;
        processor += bench::processor_time() - used;
        items += double(n);
        if (sum != std::uint64_t(n) * std::uint64_t(n - 1) / 2) state.SkipWithError("items were lost");
    }
    state.counters["ns"] = wall / items * 1e9;
    state.counters["cpu_ns"] = processor / items * 1e9;
    state.counters["share"] = processor / items * 1e6;
    state.SetItemsProcessed(static_cast<std::int64_t>(items));
}

/// A microsecond of arithmetic.
void microsecond(int steps) {
    double x = 1;
    for (int i = 0; i < steps; ++i) {
        x = x * 0.999 + 0.001;
        benchmark::DoNotOptimize(x);
    }
}

/// 10^6 items a second: one producer works a microsecond an item, one learner waits. What the queue adds to that work,
/// in processor time.
template <class Queue>
void paced(benchmark::State& state) {
    constexpr index_t n = index_t{1} << 17;
    static const int steps = [] {
        double best = 1e9;
        for (int i = 0; i < 200; ++i) {
            const double start = bench::now();
            microsecond(100'000);
            best = std::min(best, bench::now() - start);
        }
        return int(100'000 * 1e-6 / best);
    }();
    double bare = 0, whole = 0, wall = 0, items = 0;
    for (auto _ : state) {
        const double used = bench::processor_time();
        for (index_t i = 0; i < n; ++i) microsecond(steps);
        const double worked = bench::processor_time(), start = bench::now();
        const auto queue = std::make_unique<Queue>();
        std::thread learner([&] { benchmark::DoNotOptimize(queue->consume(n)); });
        queue->produce(0, n, [] { microsecond(steps); });
        learner.join();
        const double took = bench::now() - start;
        state.SetIterationTime(took);
        bare += worked - used;
        whole += bench::processor_time() - worked;
        wall += took;
        items += double(n);
    }
    state.counters["ns"] = wall / items * 1e9;
    state.counters["cpu_ns"] = (whole - bare) / items * 1e9;
    state.counters["share"] = (whole - bare) / items * 1e6;
    state.SetItemsProcessed(static_cast<std::int64_t>(items));
}

template <class Queue>
void add(const char* name) {
    benchmark::RegisterBenchmark(("queue/" + std::string(name) + "/paced").c_str(), paced<Queue>)
        ->UseManualTime()
        ->Iterations(1)
        ->Repetitions(15)
        ->ReportAggregatesOnly();
    for (const int pairs : {0, 1, 2}) {
        const std::string threads = pairs == 0 ? "one thread" : pairs == 1 ? "1 + 1" : "2 + 2";
        benchmark::RegisterBenchmark(("queue/" + std::string(name) + "/" + threads).c_str(), round_trip<Queue>, pairs)
            ->UseManualTime()
            ->Iterations(1)
            ->Repetitions(15)
            ->ReportAggregatesOnly();
    }
}

/// Answers every action of the scheduler in the order of asking.
void scheduling(benchmark::State& state, staleness_policy policy, std::int32_t workers) {
    settings how{.batch = batch_size, .schedule = async{.tau = tau, .outstanding = permits, .policy = policy}};
    how.teacher_flush = 0;
    scheduler s(how);
    actions out;
    std::vector<event> answers, round; // those of a round are given before their answers
    const auto lanes = static_cast<std::int32_t>(std::max<index_t>(1, permits / workers));
    for (std::int32_t w = 0; w < workers; ++w) answers.push_back(event::up(stage::rollout, w, lanes).of_life(1));
    answers.push_back(event::up(stage::teacher, 0).of_life(1));
    answers.push_back(event::up(stage::learner, 0).of_life(1));
    index_t consumed = 0, events = 0;
    double seconds = 0;
    for (auto _ : state) {
        const double start = bench::now();
        for (const version_t end = s.version() + 1000; s.version() < end;) {
            if (answers.empty()) return state.SkipWithError("the scheduler waits for nobody");
            std::swap(answers, round);
            answers.clear();
            events += static_cast<index_t>(round.size());
            for (const event& e : round) {
                out.clear();
                s.on(e, 0, out);
                for (const action& a : out.items) {
                    switch (a.what) {
                    case action::kind::start:
                        answers.push_back(event::rolled_out(a.ticket, {a.version, a.version, double(a.version), 100}));
                        break;
                    case action::kind::score:
                        answers.push_back(event::scored(a.job, a.worker).of_life(1));
                        break;
                    case action::kind::train:
                        answers.push_back(event::learned(a.job).of_life(1));
                        break;
                    case action::kind::sync:
                        for (std::int32_t w = 0; w < workers; ++w) // all of them
                            if (a.worker < 0 || a.worker == w) answers.push_back(event::synced(w, a.job).of_life(1));
                        break;
                    case action::kind::step:
                        consumed += a.count;
                        break;
                    default:
                        break;
                    }
                }
            }
        }
        const double took = bench::now() - start;
        state.SetIterationTime(took);
        seconds += took;
    }
    state.counters["ns"] = seconds / double(consumed) * 1e9;
    state.counters["share"] = seconds / double(consumed) * 1e6;
    state.counters["events"] = double(events) / double(consumed);
    state.SetItemsProcessed(consumed);
}

/// 8 lanes a worker, long answers of lognormal length, workers of unequal speed; no faults.
void simulation(benchmark::State& state, staleness_policy policy, int workers, double days) {
    constexpr index_t big = 8192;
    double seconds = 0, events = 0, steps = 0;
    for (auto _ : state) {
        simulated_cluster c;
        c.lengths.response = {lognormal{6000, 1}, 1, 32768};
        c.speed = {.step = 0.012, .step_per_sequence = 1e-4, .prefill = 2e-5, .rebuild = 2e-5};
        c.lanes = 8;
        c.factor = {uniform{0.9, 1.1}};
        c.teacher_time = {.fixed = 0.1, .per_token = 5e-6};
        c.learner_time = {.fixed = 2, .per_token = 1e-6};
        c.sync_time = {.fixed = 3};
        virtual_driver<simulated_cluster> driver(
            {.batch = big, .schedule = async{.tau = tau, .outstanding = widest, .policy = policy}, .teacher_batch = 64},
            c);
        const double start = bench::now();
        driver.bring_up(stage::rollout, workers, 8);
        driver.bring_up(stage::teacher, 48);
        driver.bring_up(stage::learner, 1);
        driver.run_until(days * 86'400);
        const double took = bench::now() - start;
        state.SetIterationTime(took);
        seconds += took;
        events += double(driver.events());
        steps += double(driver.scheduler().version());
    }
    state.counters["events"] = events / double(state.iterations());
    state.counters["events_per_second"] = events / seconds;
    state.counters["updates"] = steps / double(state.iterations());
}

} // namespace

int main(int argc, char** argv) {
    std::thread([] {}).join(); // a process of one thread has cheaper mutexes, and that is nobody's case
    add<ours<staleness_policy::capacity, 1, true>>("capacity");
    add<ours<staleness_policy::capacity, 1, false>>("capacity, acquire and push");
    add<ours<staleness_policy::capacity, 8, true>>("capacity, groups of 8");
    add<ours<staleness_policy::edf, 1, true>>("edf");
    add<ours<staleness_policy::in_order, 1, true>>("in_order");
    add<tbb_bounded>("tbb");
    add<tbb_permits>("tbb, two queues");
    add<mutex_deque>("mutex and deque");
    for (const auto policy : {staleness_policy::capacity, staleness_policy::edf, staleness_policy::in_order}) {
        for (const std::int32_t workers : {4, 1000})
            benchmark::RegisterBenchmark(
                (std::string("scheduler/") + name_of(policy) + "/" + std::to_string(workers) + " workers").c_str(),
                scheduling, policy, workers)
                ->UseManualTime()
                ->Iterations(1)
                ->Repetitions(9)
                ->ReportAggregatesOnly();
        benchmark::RegisterBenchmark((std::string("simulator/a day of 1,000 workers/") + name_of(policy)).c_str(),
                                     simulation, policy, 1000, 1.0)
            ->UseManualTime()
            ->Iterations(1)
            ->Repetitions(3)
            ->ReportAggregatesOnly()
            ->Unit(benchmark::kSecond);
    }
    benchmark::Initialize(&argc, argv);
    benchmark::RunSpecifiedBenchmarks();
}
