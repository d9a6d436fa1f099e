// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A translation unit of a user without Eigen: the core headers compile with the caller's default flags.
#include <opd/version.hpp>

static_assert(__cplusplus >= 202002L, "opd::opd asks for C++20");

int main() { return OPD_VERSION > 0 ? 0 : 1; }
