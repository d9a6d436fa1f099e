// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// build: tsan, sanitize
#include <doctest/doctest.h>

#include <atomic>
#include <stdexcept>
#include <string>
#include <vector>

#include "opd/error.hpp"
#include "opd/threads.hpp"
#include "support/address_space.hpp"

TEST_CASE("every block runs once, whatever the number of threads") {
    for (const int threads : {1, 2, 3, 8}) {
        opd::thread_team team(threads);
        CHECK(team.size() == threads);
        for (opd::index_t count = 0; count < 40; ++count) {
            std::vector<int> runs(static_cast<std::size_t>(count)); // a block's entry is touched by that block alone
            std::atomic<bool> stranger{false};
            team.run(count, [&](opd::index_t block, int worker) {
                ++runs[static_cast<std::size_t>(block)];
                if (worker < 0 || worker >= threads) stranger = true;
            });
            CHECK_FALSE(stranger);
            for (const int r : runs) CHECK(r == 1);
        }
    }
}

TEST_CASE("what a run wrote is seen by the next one") {
    opd::thread_team team(4);
    std::vector<long> values(64, 1);
    for (int round = 0; round < 200; ++round)
        team.run(64, [&](opd::index_t block, int) {
            // the block's value of the last round was written by another worker
            values[static_cast<std::size_t>(block)] += round;
        });
    for (const long v : values) CHECK(v == 1 + 199 * 200 / 2);
}

TEST_CASE("the first exception of a block is rethrown, and the team can be used again") {
    opd::thread_team team(4);
    for (int round = 0; round < 50; ++round) {
        CHECK_THROWS_WITH_AS(team.run(32,
                                      [&](opd::index_t block, int) {
                                          if (block == 7) throw std::runtime_error("block 7");
                                      }),
                             "block 7", std::runtime_error);
        std::atomic<int> blocks{0};
        team.run(32, [&](opd::index_t, int) { ++blocks; });
        CHECK(blocks == 32);
    }
}

#if !OPD_TEST_SANITIZED
TEST_CASE("a system that refuses a thread is an error, and nothing hangs") {
    const auto refused = [] { // of address space: some hundred stacks
        try {
            opd::thread_team team(100'000);
        } catch (const opd::unsupported& e) {
            const std::string said = e.what();
            opd::thread_team team(4); // what had been taken is free again
            return said.find(" of 100000: ") != std::string::npos && team.size() == 4 ? 0 : 1;
        }
        return 2;
    };
    CHECK(opd::test::within_address_space(std::size_t{1} << 30, 20, refused) == 0);
}
#endif
