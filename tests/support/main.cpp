// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The main function of every test program; compiled once.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>
#include <rapidcheck.h>

// RC_ASSERT outside a property throws this; without a translator doctest would say "unknown exception".
REGISTER_EXCEPTION_TRANSLATOR(const rc::detail::CaseResult& result) {
    return doctest::String(result.description.c_str());
}
