// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The cache that scripts/new.sh made, by the test that it made with it.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

#include "estimators/made_up_test.cpp"
