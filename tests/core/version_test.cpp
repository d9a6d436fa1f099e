// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// build: ofast
#include <doctest/doctest.h>
#include <opd/version.hpp>
#include <string>

TEST_CASE("the build system read the version from version.hpp") {
    const std::string header = std::to_string(OPD_VERSION_MAJOR) + "." + std::to_string(OPD_VERSION_MINOR) + "." +
                               std::to_string(OPD_VERSION_PATCH);
    CHECK(header == OPD_TEST_PROJECT_VERSION);
    CHECK(OPD_VERSION == 10000 * OPD_VERSION_MAJOR + 100 * OPD_VERSION_MINOR + OPD_VERSION_PATCH);
}
