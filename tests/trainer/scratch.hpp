// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A directory that lives as long as a test, in memory where there is room: runs sync what they write, and a disk that
// others write to takes longer for it than such a run lasts.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <doctest/doctest.h>
#include <filesystem>
#include <string>
#include <system_error>

#include <unistd.h>

namespace opd::test {

struct scratch {
    std::filesystem::path path;
    scratch() {
        const std::filesystem::path memory = "/dev/shm", usual = std::filesystem::temp_directory_path();
        std::error_code none;
        const std::uintmax_t room = std::filesystem::space(memory, none).available;
        const bool roomy = !none && room > std::uintmax_t{1} << 30 && ::access(memory.c_str(), W_OK) == 0 &&
                           std::getenv("TMPDIR") == nullptr;
        std::string name = ((roomy ? memory : usual) / "opd-train-test-XXXXXX").string();
        REQUIRE(::mkdtemp(name.data()) != nullptr);
        path = name;
    }
    ~scratch() { std::filesystem::remove_all(path); }
    scratch(const scratch&) = delete;
    scratch& operator=(const scratch&) = delete;
    std::string operator/(const std::string& name) const { return (path / name).string(); }
};

} // namespace opd::test
