// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A backend whose vocabulary lies in shards on several ranks: threads that meet between the rounds, or one loop
// over all ranks. It takes calls on materialised logits apart by columns, has every rank check that it is told what the
// others are told, and stands where any backend does: a test written for one backend judges a split.
#pragma once

#include <algorithm>
#include <cstring>
#include <doctest/doctest.h>
#include <memory>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "support/generators.hpp"
#include "support/meeting.hpp"
#include "support/shard_parts.hpp"

#include <opd/backends/cpu.hpp>
#include <opd/backends/vocab_parallel.hpp>

namespace opd::test {

/// First ids of 1 to `most` shards and the end: any sizes, some 0. (R+1)
inline std::vector<index_t> random_cuts(index_t vocab, std::uint64_t seed, index_t most = 7) {
    numbers u(seed);
    std::vector<index_t> cuts{0, vocab};
    for (index_t i = u.below(most); i > 0; --i) cuts.push_back(u.uniform() < 0.1 ? cuts.back() : u.below(vocab + 1));
    std::sort(cuts.begin(), cuts.end());
    return cuts;
}

/// What ranks exchange: one all-gather, whose parts every rank adds up in the same order.
struct exchanged {
    int rounds = 0;
    std::size_t bytes = 0; ///< of one rank, all rounds
};

/// Runs every rank's stages; finish(rank) and backward are the caller's.
template <class Call>
exchanged run_rounds(std::vector<std::unique_ptr<Call>>& ranks, bool threads) {
    exchanged said;
    std::vector<std::vector<std::byte>> sent(ranks.size());
    const auto send = [&](std::size_t i) {
        const bool more = ranks[i]->local();
        const std::span<const std::byte> mine = ranks[i]->partials();
        sent[i].assign(mine.begin(), mine.end());
        return more;
    };
    const auto add = [&](std::size_t i) {
        const std::span<std::byte> mine = ranks[i]->partials();
        std::copy(sent[0].begin(), sent[0].end(), mine.begin());
        for (std::size_t j = 1; j < sent.size(); ++j) merge_partials(mine, sent[j]);
    };
    if (!threads) {
        for (;; ++said.rounds) {
            std::vector<int> more;
            for (std::size_t i = 0; i < ranks.size(); ++i) more.push_back(send(i));
            for (const int m : more) CHECK(m == more[0]); // rounds agree
            if (!more[0]) return said;
            said.bytes += sent[0].size();
            for (std::size_t i = 0; i < ranks.size(); ++i) add(i);
        }
    }
    meeting all(ranks.size());
    std::vector<int> more(ranks.size());
    std::vector<std::thread> team;
    for (std::size_t i = 0; i < ranks.size(); ++i)
        team.emplace_back([&, i] {
            for (;;) {
                more[i] = send(i);
                all.arrive_and_wait();
                CHECK(more[i] == more[0]);
                if (!more[0]) return;
                if (i == 0) ++said.rounds, said.bytes += sent[0].size();
                add(i);
                all.arrive_and_wait();
            }
        });
    for (std::thread& t : team) t.join();
    return said;
}

struct sharded_backend {
    static constexpr space memory_space = space::host;
    std::vector<index_t> cuts = {}; ///< empty: drawn from `seed`, anew each call
    bool threads = false;
    std::uint64_t seed = 1;
    exchanged said = {};

    // as cases that are written once for several backends make it
    static sharded_backend at(std::vector<index_t> cuts) { return {.cuts = std::move(cuts)}; }
    static sharded_backend of_seed(std::uint64_t seed) { return {.threads = seed % 2 == 0, .seed = seed}; }
    /// Whether so many rounds fit a call that takes `most`: one that no row needs is left out.
    static bool takes(int rounds, int most) { return rounds <= most; }

    template <class Z, class G, class Teacher, class Estimator>
    result for_rows(const row_job<student::logits<Z, G>, Teacher, Estimator, space::host>& job) {
        const std::vector<index_t> at = cuts.empty() ? random_cuts(job.vocab, seed++) : cuts;
        const std::size_t ranks = at.size() - 1;
        const auto make = [&](cpu_backend& be, std::size_t i, env e) {
            return vocab_parallel(be, {.first = at[i], .total = job.vocab}, student_of(job.student, at, i),
                                  teacher_of(job.teacher, at, i), job.estimator, e);
        };
        using call = decltype(make(std::declval<cpu_backend&>(), 0, job.env));
        std::vector<cpu_backend> backends(ranks);
        std::vector<std::vector<float>> losses(ranks);
        std::vector<std::vector<double>> lse(ranks);
        std::vector<std::unique_ptr<call>> calls;
        for (std::size_t i = 0; i < ranks; ++i) {
            env e = job.env;
            backends[i].threads = i == 1 ? 2 : 1;
            if (!e.losses.empty()) losses[i].assign(e.losses.data, e.losses.data + e.losses.size), e.losses = losses[i];
            if (!e.lse.empty()) lse[i].assign(e.lse.data, e.lse.data + e.lse.size), e.lse = lse[i];
            calls.push_back(std::make_unique<call>(make(backends[i], i, e)));
        }
        said = run_rounds(calls, threads);
        std::vector<result> results;
        for (auto& c : calls) results.push_back(c->finish());
        for (auto& c : calls) c->backward();
        check_equal(results, losses, lse);
        std::copy(losses[0].begin(), losses[0].end(), job.env.losses.data);
        std::copy(lse[0].begin(), lse[0].end(), job.env.lse.data);
        return results[0];
    }
};

} // namespace opd::test
