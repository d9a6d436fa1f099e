// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Asynchronous training in threads that you already have. Three producers roll sequences of very different lengths out,
// some of which fail; one learner trains on batches of 16. The queue decides who may start and what makes a batch, and
// so how stale the samples are: once by order of completion, where a long sequence may be overtaken for ever, once by
// edf, under which nothing is more than tau = 2 versions old.
#include <atomic>
#include <cmath>
#include <cstdio>
#include <random>
#include <thread>
#include <vector>

#include "opd/sched/staleness_queue.hpp"

namespace sched = opd::sched;

struct sample {
    int prompt;
    double reward;
};

/// Most rollouts take 1 unit of work, one in thirty 300.
double roll_out(double weights, std::mt19937& random) {
    double x = weights;
    for (long i = 0, n = random() % 30 == 0 ? 300'000 : 1'000; i < n; ++i) x += 1e-9 * std::sin(x);
    if (random() % 50 == 0) throw std::runtime_error("the environment failed");
    return x;
}

int main() {
    bool good = true;
    std::printf("tau = 2: capacity bounds the mean lag, edf the lag of every sample\n");
    std::printf("%-12s %9s %7s %9s %9s %9s\n", "policy", "versions", "items", "failures", "mean lag", "most");
    for (const auto policy : {sched::staleness_policy::capacity, sched::staleness_policy::edf}) {
        constexpr int prompts = 2'000, tau = 2;
        std::atomic<double> weights{0};
        std::atomic<int> next{0}, failures{0};

        // [queue]
        sched::staleness_queue<sample> queue({.batch = 16, .schedule = {.tau = tau, .policy = policy}});

        const auto produce = [&](std::stop_token stop, unsigned seed) {
            std::mt19937 random(seed);
            for (int prompt = next++; prompt < prompts;) {
                sched::permit permit = queue.acquire(stop); // waits, also while new weights are on their way
                if (!permit) return;                        // stopped or closed
                try {
                    sample s{prompt, roll_out(weights, random)};
                    if (queue.push(permit, std::move(s)) == sched::push_result::queued) prompt = next++;
                } catch (const std::exception&) {
                    ++failures; // the permit returns itself; the prompt is tried again
                }
            }
        };
        // [/queue]

        long items = 0, lags = 0;
        sched::version_t most = 0;
        // [learn]
        const auto learn = [&] {
            while (auto batch = queue.pop()) { // nothing once the queue is closed and empty
                double sum = 0;
                for (std::size_t i = 0; i < batch->size(); ++i) {
                    const auto lag = batch->version() - batch->version_of(i);
                    sum += (*batch)[i].reward, lags += lag, most = std::max(most, lag), ++items;
                }
                auto update = std::move(*batch).trained(); // closes the gate: nothing starts on old weights
                weights = weights + 0.01 * (1 - sum / 16); // publishes the new ones
                std::move(update).synchronised();          // version + 1, permits return, the gate opens
            }
        };
        // [/learn]

        std::jthread learner(learn);
        {
            std::vector<std::jthread> producers;
            for (unsigned seed = 1; seed <= 3; ++seed) producers.emplace_back(produce, seed);
            for (auto& p : producers) p.join();
        }
        queue.close();
        learner.join();

        std::printf("%-12s %9lld %7ld %9d %9.2f %9lld\n", name_of(policy), static_cast<long long>(queue.version()),
                    items, failures.load(), double(lags) / double(items), static_cast<long long>(most));
        good = good && items == prompts && queue.counts().outstanding == 0;
        if (policy == sched::staleness_policy::edf) good = good && most <= tau;
    }
    return good ? 0 : 1;
}
