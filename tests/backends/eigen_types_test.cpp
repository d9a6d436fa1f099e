// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The second half of eigen_agreement_test.cpp, a unit of its own for the compiler's sake: mixes of element types.
#define OPD_TEST_MIXED_STORAGE
#include "backends/eigen_agreement_test.cpp"
