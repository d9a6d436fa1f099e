// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "pipeline/rollout.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <stdexcept>

#include <fmt/format.h>

#include "pipeline/rollout_engine.hpp"

namespace trainer {

namespace {

// Weights that no cache holds: threads then read them once a step together, not once each.
constexpr index_t large_model = index_t{1} << 24;

} // namespace

std::vector<trajectory> roll_out(const transformer<float>& model, opd::thread_team& threads,
                                 std::span<const request> requests, const sampling& options, std::int32_t version) {
    std::vector<trajectory> out(requests.size());
    std::size_t longest = 0;
    for (const request& r : requests) {
        if (r.prompt.empty())
            throw std::invalid_argument(fmt::format("rollout: the prompt of sample {} is empty", r.sample));
        longest = std::max(longest, r.prompt.size());
    }
    const index_t length = static_cast<index_t>(longest) + options.max_response;
    const bool together = model.layout.size >= large_model;
    const int engines = together ? 1 : threads.size();
    const index_t lanes = // no engine takes more than all of them
        std::clamp<index_t>(options.slots / engines, 1, std::max<index_t>(1, std::ssize(requests)));
    const policy weights{{std::shared_ptr<void>(), &model}, version}; // the caller keeps the model
    std::atomic<std::size_t> next{0};
    threads.run(engines, [&](index_t, int) { // of one the caller is the thread, and the team is free
        if (next >= requests.size()) return;
        rollout_engine engine(weights, options, lanes, length);
        if (together) engine.share_products(&threads);
        std::vector<std::size_t> place(static_cast<std::size_t>(lanes)); // of the lane's sequence in `out`
        std::vector<lane_trajectory> finished;
        for (;;) {
            for (index_t lane = 0; lane < lanes; ++lane) {
                if (engine.busy(lane)) continue;
                const std::size_t i = next.fetch_add(1);
                if (i >= requests.size()) break;
                engine.start(lane, requests[i]);
                place[static_cast<std::size_t>(lane)] = i;
            }
            if (engine.running() == 0) return;
            finished.clear();
            const auto begin = std::chrono::steady_clock::now();
            engine.step(finished);
            if (options.speculate.on())
                engine.took(std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
            for (lane_trajectory& f : finished) out[place[static_cast<std::size_t>(f.lane)]] = std::move(f.sequence);
        }
    });
    return out;
}

} // namespace trainer
