// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#define OPD_TEST_COMPILED
#include "support/compiled/sparse.hpp"
