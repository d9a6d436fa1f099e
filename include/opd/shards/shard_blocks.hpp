// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The rounds of shard_rounds.hpp where logits are made from hidden states, a block of rows at a time (cuda/blocks.hpp):
// the block's logits of this shard's ids are made once, its rows go round, and its gradient goes back.
//
// Ranks gather what the rows of one block say, so blocks are the same on every rank whatever its shard: as many rows
// as the budgets hold of total/ranks ids. A rank that holds more ids than that takes so much more than its budget.
#pragma once

#include <cstddef>
#include <utility>

#include "opd/config.hpp"
#include "opd/cuda/blocks.hpp"
#include "opd/cuda/jobs.hpp"
#include "opd/diagnostics.hpp"
#include "opd/rows/rows.hpp"
#include "opd/shards/shard_rounds.hpp"
#include "opd/vocab_parallel.hpp"

namespace opd::detail {
inline namespace OPD_ISA {

/// How a call is cut into blocks, and what its rows need beside them.
template <class Job>
struct shard_block_plan {
    using block_job = decltype(job_of_block(std::declval<const Job&>(), 0, 0, nullptr));
    block_plan blocks;
    shard_plan<block_job> shard;

    shard_block_plan(const Job& job, const vocab_shard& of, int ranks)
        : blocks(block_plan_of(job, (of.total + ranks - 1) / ranks)),
          shard(job_of_block(job, blocks.batch.rows, 0, nullptr), of, ranks, blocks.batch.rows) {}
};

template <class Job>
    requires(has_block_kernel<Job>)
std::size_t shard_bytes(const Job& job, const vocab_shard& shard, int ranks) {
    const shard_block_plan<Job> plan(job, shard, ranks);
    return plan.blocks.bytes + plan.shard.bytes;
}
/// As run_shard, with products (cuda/products.hpp).
template <class Job, class Launch, class Products, class Gather>
const index_t* run_shard_in_blocks(const Job& job, const vocab_shard& shard, int ranks, std::byte* memory, result* out,
                                   Launch&& launch, Products&& products, Gather&& gather) {
    const shard_block_plan<Job> plan(job, shard, ranks);
    std::byte* const of_shard = memory + plan.blocks.bytes;
    each_block_of(job, plan.blocks, memory, launch, products,
                  [&](const auto& block, const auto& frame, index_t begin, index_t end) {
                      launch_rounds(block, shard, ranks, plan.blocks.batch, frame, plan.shard, begin, end, of_shard,
                                    out, begin > 0, launch, gather);
                  });
    return reinterpret_cast<const index_t*>(of_shard);
}

} // namespace OPD_ISA
} // namespace opd::detail
