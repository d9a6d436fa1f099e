// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// build: whole-compiler
// optimise: no
//
// Supports and drawn tokens over a vocabulary in shards by a GPU's kernels, run on the host, a thread for each rank:
// beside one rank of the CPU's.
#include "backends/host_run_shards.hpp"
#include "support/compiled/sampled.hpp"
#include "support/compiled/support.hpp"
#include "support/entry_cases.hpp"

#include <doctest/doctest.h>

#include <opd/estimators/divergences.hpp>
#include <opd/estimators/support.hpp>

using namespace opd;
using namespace opd::test;

TEST_CASE("supports: a row's ids lie in any shard, the tail in all of them") {
    entry_cases::supports<host_run_shards>("reverse KL", tail_bucket{reverse_kl{}}, 60);
}

TEST_CASE("supports: unused slots, ids out of range, ids that repeat, and rows of different length") {
    entry_cases::odd_supports<host_run_shards>();
}

TEST_CASE("drawn tokens: their logit comes from the shard that has it") {
    entry_cases::drawn_tokens<host_run_shards>(80);
    entry_cases::weighted_tokens<host_run_shards>(40);
}

TEST_CASE("drawn tokens: a shard without them has the softmax's share alone; what is bad is bad on every rank") {
    entry_cases::lonely_and_bad_tokens<host_run_shards>();
}
