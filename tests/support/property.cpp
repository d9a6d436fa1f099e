// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What properties share, compiled once for all test programs.
#include "support/property.hpp"

namespace opd::test {

rc::detail::TestParams test_params(const property_options& options) {
    auto params = rc::detail::configuration().testParams;
    params.maxSuccess = static_cast<int>(std::int64_t{options.cases} * params.maxSuccess / 100);
    if (params.maxSuccess < 1) params.maxSuccess = 1;
    if (options.max_size > 0) params.maxSize = options.max_size;
    params.disableShrinking = params.disableShrinking || options.disable_shrink;
    return params;
}

property_result described(const std::string& name, const rc::detail::TestParams& params,
                          const rc::detail::TestResult& result) {
    std::ostringstream out;
    out << "property \"" << name << "\": ";
    rc::detail::printResultMessage(result, out);
    out << "\nRC_PARAMS=\"seed=" << params.seed << "\"";
    return {result.template is<rc::detail::SuccessResult>(), out.str()};
}

property_result check_erased(const std::string& name, const std::function<void()>& testable,
                             const property_options& options) {
    const auto params = test_params(options);
    const rc::detail::TestMetadata metadata{name, name}; // the id is what a reproduce string refers to
    return described(name, params, rc::detail::checkTestable(testable, metadata, params));
}

void report(const property_result& result) {
    if (result.holds) {
        CHECK(result.holds); // so that doctest's own summary counts it
    } else {
        FAIL_CHECK(result.message);
    }
}

} // namespace opd::test
