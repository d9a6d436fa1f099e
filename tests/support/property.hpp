// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// RapidCheck properties inside doctest cases:
//
//     TEST_CASE("addition") {
//         property("commutes", [](int a, int b) { RC_ASSERT(a + b == b + a); });
//     }
//
// A property that fails, gives up or breaks fails the case with RapidCheck's message: the shrunk counterexample, the
// seed and the string that reproduces it. RC_PRE, RC_ASSERT, RC_CLASSIFY, RC_TAG and `*gen` work as in RapidCheck's
// manual; inside a property use RC_ASSERT, not CHECK, since doctest would count every step of the shrinking as a
// failure.
//
// The seed is random unless the environment says RC_PARAMS="seed=…"; RC_PARAMS="max_success=1000" runs ten times the
// usual number of cases, whatever number a property asks for.
//
// A property without arguments is handed to RapidCheck as a std::function by property.cpp, which is compiled once:
// RapidCheck's machinery around each lambda of its own was two fifths of what a test of the estimators cost to compile.
#pragma once

#include <cstdint>
#include <doctest/doctest.h>
#include <functional>
#include <rapidcheck.h>
#include <sstream>
#include <string>
#include <type_traits>
#include <utility>

namespace opd::test {

struct property_options {
    int cases = 100;             // successes wanted; scaled by RC_PARAMS max_success / 100
    int max_size = 0;            // RapidCheck's largest size; 0: its own default of 100
    bool disable_shrink = false; // for properties whose single case is slow
};

struct property_result {
    bool holds = false;
    std::string message; // RapidCheck's words, after the property's name and before the seed
};

/// What `options` and RC_PARAMS make of RapidCheck's parameters.
[[nodiscard]] rc::detail::TestParams test_params(const property_options& options);
[[nodiscard]] property_result described(const std::string& name, const rc::detail::TestParams& params,
                                        const rc::detail::TestResult& result);
[[nodiscard]] property_result check_erased(const std::string& name, const std::function<void()>& testable,
                                           const property_options& options);
/// Into doctest's books.
void report(const property_result& result);

template <class Testable>
[[nodiscard]] property_result check_property(const std::string& name, Testable&& testable,
                                             const property_options& options = {}) {
    if constexpr (std::is_invocable_v<Testable&>) {
        static_assert(std::is_void_v<std::invoke_result_t<Testable&>>,
                      "a property without arguments returns nothing: use RC_ASSERT");
        return check_erased(name, std::ref(testable), options);
    } else {
        const auto params = test_params(options);
        const rc::detail::TestMetadata metadata{name, name}; // the id is what a reproduce string refers to
        return described(name, params, rc::detail::checkTestable(std::forward<Testable>(testable), metadata, params));
    }
}

template <class Testable>
void property(const std::string& name, Testable&& testable, const property_options& options = {}) {
    report(check_property(name, std::forward<Testable>(testable), options));
}

} // namespace opd::test

using opd::test::property;
