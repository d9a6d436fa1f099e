// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A directory that lives as long as a test.
#pragma once

#include <cstdlib>
#include <doctest/doctest.h>
#include <filesystem>
#include <string>

namespace opd::test {

struct scratch {
    std::filesystem::path path;
    scratch() {
        std::string name = (std::filesystem::temp_directory_path() / "opd-train-test-XXXXXX").string();
        REQUIRE(::mkdtemp(name.data()) != nullptr);
        path = name;
    }
    ~scratch() { std::filesystem::remove_all(path); }
    scratch(const scratch&) = delete;
    scratch& operator=(const scratch&) = delete;
    std::string operator/(const std::string& name) const { return (path / name).string(); }
};

} // namespace opd::test
