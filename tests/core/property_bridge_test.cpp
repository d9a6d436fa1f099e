// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The bridge between RapidCheck and doctest, on which every property test rests: what is false must fail.
#include "support/property.hpp"

#include <stdexcept>
#include <vector>

using opd::test::check_property;

TEST_CASE("a true property passes and counts its cases") {
    int runs = 0;
    const auto result = check_property("sum commutes", [&runs](int a, int b) {
        ++runs;
        RC_ASSERT(std::int64_t{a} + b == std::int64_t{b} + a);
    });
    CHECK(result.holds);
    CHECK(runs >= 1);
    CHECK(result.message.find("sum commutes") != std::string::npos);
}

TEST_CASE("the number of cases can be asked for") {
    int few = 0;
    int many = 0;
    property("few", [&few](int) { ++few; }, {.cases = 100});
    property("many", [&many](int) { ++many; }, {.cases = 300});
    CHECK(many == 3 * few);
}

TEST_CASE("a false property is shrunk, named and gives its seed") {
    const auto result =
        check_property("vectors are short", [](const std::vector<int>& v) { RC_ASSERT(v.size() < 3U); });
    CHECK_FALSE(result.holds);
    CHECK(result.message.find("vectors are short") != std::string::npos);
    CHECK(result.message.find("[0, 0, 0]") != std::string::npos);
    CHECK(result.message.find("RC_PARAMS=\"seed=") != std::string::npos);
    CHECK(result.message.find("RC_ASSERT(v.size() < 3U)") != std::string::npos);
}

TEST_CASE("an exception in a property falsifies it") {
    const auto result = check_property("throws", [](int) { throw std::runtime_error("the row is empty"); });
    CHECK_FALSE(result.holds);
    CHECK(result.message.find("the row is empty") != std::string::npos);
}

TEST_CASE("a property without admissible input does not hold") {
    const auto result = check_property("no input", [](int) { RC_PRE(false); });
    CHECK_FALSE(result.holds);
}

TEST_CASE("property() fails the case it runs in" * doctest::should_fail()) {
    property("false", [](int a) { RC_ASSERT(a < 10); });
}

TEST_CASE("RC_ASSERT outside a property fails the case" * doctest::should_fail()) { RC_ASSERT(1 + 1 == 3); }
