// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A child process that the system refuses memory and threads, or room for its files. Not where OPD_TEST_SANITIZED: the
// sanitizers reserve address space of their own, so it cannot be limited.
#pragma once

#include <csignal>
#include <cstddef>

#include <doctest/doctest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "support/sanitized.hpp"

namespace opd::test {

/// What body() returns in a child (limits cannot be raised again) of so much of a resource; -1 if it ended otherwise.
template <class Body>
int within_limit(decltype(RLIMIT_AS) resource, std::size_t bytes, unsigned seconds, Body&& body) {
    const pid_t child = fork();
    REQUIRE(child >= 0);
    if (child == 0) {
        alarm(seconds);           // what hangs is killed
        signal(SIGXFSZ, SIG_IGN); // a file that grows too large is an error of write()
        const rlimit little{bytes, bytes};
        _exit(setrlimit(resource, &little) == 0 ? body() : 99);
    }
    int status = 0;
    REQUIRE(waitpid(child, &status, 0) == child);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}
template <class Body>
int within_address_space(std::size_t bytes, unsigned seconds, Body&& body) {
    return within_limit(RLIMIT_AS, bytes, seconds, body);
}

} // namespace opd::test
