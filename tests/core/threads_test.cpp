// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// build: tsan, sanitize
#include <doctest/doctest.h>

#include <atomic>
#include <stdexcept>
#include <string>
#include <vector>

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "opd/error.hpp"
#include "opd/threads.hpp"

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

// The sanitizers reserve address space of their own, so it cannot be limited.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define OPD_TEST_SANITIZED 1
#elif defined(__has_feature)
#define OPD_TEST_SANITIZED (__has_feature(address_sanitizer) || __has_feature(thread_sanitizer))
#else
#define OPD_TEST_SANITIZED 0
#endif
#if !OPD_TEST_SANITIZED
TEST_CASE("a system that refuses a thread is an error, and nothing hangs") {
    const pid_t child = fork(); // limits cannot be raised again
    if (child == 0) {
        alarm(20);
        const rlimit little{rlim_t{1} << 30, rlim_t{1} << 30}; // of address space: some hundred stacks
        if (setrlimit(RLIMIT_AS, &little) != 0) _exit(3);
        try {
            opd::thread_team team(100'000);
        } catch (const opd::unsupported& e) {
            const std::string said = e.what();
            opd::thread_team team(4); // what had been taken is free again
            _exit(said.find(" of 100000: ") != std::string::npos && team.size() == 4 ? 0 : 1);
        }
        _exit(2);
    }
    int status = 0;
    REQUIRE(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status));
    CHECK(WEXITSTATUS(status) == 0);
}
#endif
