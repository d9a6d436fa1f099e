// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// expect: OPD_VERSION is an integer
// control: FIXED
//
// The smallest case: the harness reads a static_assert sentence of a file that includes an opd header.
#include <opd/version.hpp>
#include <type_traits>
#ifdef FIXED
using expected = int;
#else
using expected = const char*;
#endif
static_assert(std::is_same_v<decltype(OPD_VERSION), expected>, "OPD_VERSION is an integer");
int main() { return 0; }
