// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// No gnuplot for a test's runs, each of which it would outlast; `with_plots` is a moment with it.
#pragma once

#include <cstdlib>
#include <string>

namespace opd::test {

inline const std::string programs = [] {
    const char* path = std::getenv("PATH");
    std::string found = path == nullptr ? "" : path;
    ::setenv("PATH", "/nowhere", 1);
    return found;
}();

struct with_plots {
    with_plots() { ::setenv("PATH", programs.c_str(), 1); }
    ~with_plots() { ::setenv("PATH", "/nowhere", 1); }
    with_plots(const with_plots&) = delete;
    with_plots& operator=(const with_plots&) = delete;
};

} // namespace opd::test
