// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// build: whole-compiler
//
// The second half of cpu_agreement_test.cpp, a unit of its own for the compiler's sake: mixes of element types.
#include "support/compiled/dense.hpp" // what is included below includes them, too: see opd_link_compiled
#include "support/compiled/dense_double.hpp"

#define OPD_TEST_MIXED_STORAGE
#include "backends/cpu_agreement_test.cpp"
