// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// RapidCheck properties inside doctest cases:
//
//     TEST_CASE("addition") {
//         property("commutes", [](int a, int b) { RC_ASSERT(a + b == b + a); });
//     }
//
// A property that fails, gives up or breaks fails the case with RapidCheck's message: the shrunk counterexample, the seed
// and the string that reproduces it. RC_PRE, RC_ASSERT, RC_CLASSIFY, RC_TAG and `*gen` work as in RapidCheck's manual;
// inside a property use RC_ASSERT, not CHECK, since doctest would count every step of the shrinking as a failure.
//
// The seed is random unless the environment says RC_PARAMS="seed=…"; RC_PARAMS="max_success=1000" runs ten times the
// usual number of cases, whatever number a property asks for.
#pragma once

#include <cstdint>
#include <doctest/doctest.h>
#include <rapidcheck.h>
#include <sstream>
#include <string>
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

template <class Testable>
[[nodiscard]] property_result check_property(const std::string& name, Testable&& testable,
                                             const property_options& options = {}) {
    const auto& configuration = rc::detail::configuration();
    auto params = configuration.testParams;
    params.maxSuccess = static_cast<int>(std::int64_t{options.cases} * params.maxSuccess / 100);
    if (params.maxSuccess < 1) params.maxSuccess = 1;
    if (options.max_size > 0) params.maxSize = options.max_size;
    params.disableShrinking = params.disableShrinking || options.disable_shrink;

    const rc::detail::TestMetadata metadata{name, name}; // the id is what a reproduce string refers to
    const auto result = rc::detail::checkTestable(std::forward<Testable>(testable), metadata, params);
    std::ostringstream out;
    out << "property \"" << name << "\": ";
    rc::detail::printResultMessage(result, out);
    out << "\nRC_PARAMS=\"seed=" << params.seed << "\"";
    return {result.template is<rc::detail::SuccessResult>(), out.str()};
}

template <class Testable>
void property(const std::string& name, Testable&& testable, const property_options& options = {}) {
    const property_result result = check_property(name, std::forward<Testable>(testable), options);
    if (result.holds) {
        CHECK(result.holds); // so that doctest's own summary counts it
    } else {
        FAIL_CHECK(result.message);
    }
}

} // namespace opd::test

using opd::test::property;
