// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Shapes whose extent in bytes does not fit into 64 bits are refused before anybody computes it.
#include <doctest/doctest.h>

#include <limits>
#include <opd/detail/checks.hpp>

using opd::index_t;

TEST_CASE("a view larger than any memory is refused") {
    float x = 0;
    const auto check = [&](index_t rows, index_t stride) {
        opd::detail::check_matrix("x", opd::view(&x, rows, 1, stride), rows, 1);
    };
    constexpr index_t most = std::numeric_limits<index_t>::max();
    CHECK_NOTHROW(check(1, most)); // of one row, the stride is never taken
    CHECK_NOTHROW(check(2, most / 8));
    for (const index_t stride : {most / 8 + 1, most / 4, most / 2, index_t{1} << 62, most})
        CHECK_THROWS_WITH_AS(check(2, stride), doctest::Contains("x: is larger than any memory"), opd::invalid_input);
    CHECK_THROWS_AS(check(index_t{1} << 40, index_t{1} << 30), opd::invalid_input);
}
