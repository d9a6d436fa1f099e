// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Ranks that run a GPU's kernels of a vocabulary in shards on the host (host_run.hpp), each in a thread of its own. It
// takes calls on materialised logits apart by columns, as sharded_backend does (support/shards.hpp).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "backends/host_run.hpp"
#include "opd/shards/shard_rounds.hpp"
#include "support/meeting.hpp"
#include "support/shards.hpp"

namespace opd::test {

/// An all-gather among threads.
struct gathering_threads {
    meeting all;
    std::vector<const std::byte*> from;
    exchanged said = {}; ///< of rank 0

    explicit gathering_threads(std::size_t ranks) : all(ranks), from(ranks) {}
    void operator()(std::size_t rank, const std::byte* own, std::byte* to, std::size_t bytes) {
        if (rank == 0) ++said.rounds, said.bytes += bytes;
        from[rank] = own;
        all.arrive_and_wait();
        for (std::size_t i = 0; i < from.size(); ++i) std::memcpy(to + i * bytes, from[i], bytes);
        all.arrive_and_wait();
    }
};

/// What a rank's kernels leave.
struct of_rank {
    result got = {};
    index_t cut_off = 0;
};
/// One rank of a call, by `threads` threads a block.
template <class Job>
of_rank run_rank(const Job& job, const vocab_shard& shard, std::size_t rank, gathering_threads& team, int threads,
                 bool tree) {
    detail::refuse_options(job.env);
    const std::size_t bytes = detail::shard_bytes(job, shard, int(team.from.size()));
    std::vector<std::byte> arena(bytes + 256, std::byte{0xa5}); // nothing may rest on what the memory held
    void* p = arena.data();
    std::size_t room = arena.size();
    auto* const memory = static_cast<std::byte*>(std::align(256, bytes, p, room));
    of_rank out;
    const index_t* const cut_off = detail::run_shard(
        job, shard, int(team.from.size()), memory, &out.got,
        [&](const auto& kernel, index_t blocks) {
            if (blocks < 1) throw std::logic_error("a launch of no blocks, which a device refuses");
            for (index_t b = 0; b < blocks; ++b) {
                host_team<typename std::remove_cvref_t<decltype(kernel)>::state_type> block{threads, tree};
                kernel.run(b, block);
            }
        },
        [&](const std::byte* own, std::byte* all, std::size_t bytes) { team(rank, own, all, bytes); });
    out.cut_off = *cut_off;
    return out;
}

struct host_run_shards {
    static constexpr space memory_space = space::host;
    std::vector<index_t> cuts = {}; ///< empty: drawn from `seed`, anew each call
    std::uint64_t seed = 1;
    int threads = 32;
    bool tree = true;
    exchanged said = {};
    std::vector<index_t> cut_off = {}; ///< of each rank: rows whose gradient was

    // as sharded_backend has them
    static host_run_shards at(std::vector<index_t> cuts) { return {.cuts = std::move(cuts)}; }
    static host_run_shards of_seed(std::uint64_t seed) {
        return {.seed = seed, .threads = int(1 + seed % 40), .tree = seed % 2 == 0};
    }
    static bool takes(int rounds, int most) { return rounds == most; } // each is enqueued, whatever rows need

    template <class Z, class G, class Teacher, class Estimator>
    result for_rows(const row_job<student::logits<Z, G>, Teacher, Estimator, space::host>& job) {
        const std::vector<index_t> at = cuts.empty() ? random_cuts(job.vocab, seed++) : cuts;
        const std::size_t ranks = at.size() - 1;
        std::vector<std::vector<float>> losses(ranks);
        std::vector<std::vector<double>> lse(ranks);
        std::vector<of_rank> out(ranks);
        gathering_threads team(ranks);
        {
            std::vector<std::jthread> running;
            for (std::size_t i = 0; i < ranks; ++i) {
                env e = job.env;
                if (!e.losses.empty())
                    losses[i].assign(e.losses.data, e.losses.data + e.losses.size), e.losses = losses[i];
                if (!e.lse.empty()) lse[i].assign(e.lse.data, e.lse.data + e.lse.size), e.lse = lse[i];
                const vocab_shard shard{.first = at[i], .total = job.vocab};
                const auto mine = detail::checked_shard_job(shard, student_of(job.student, at, i),
                                                            teacher_of(job.teacher, at, i), job.estimator, e);
                running.emplace_back([&, i, mine, shard] { out[i] = run_rank(mine, shard, i, team, threads, tree); });
            }
        }
        said = team.said;
        cut_off.clear();
        std::vector<result> results;
        for (const of_rank& o : out) results.push_back(o.got), cut_off.push_back(o.cut_off);
        check_equal(results, losses, lse);
        std::copy(losses[0].begin(), losses[0].end(), job.env.losses.data);
        std::copy(lse[0].begin(), lse[0].end(), job.env.lse.data);
        return results[0];
    }
};

} // namespace opd::test
