// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// first: the second
// control: FIXED
#ifndef FIXED
static_assert(sizeof(int) == 0, "the first");
static_assert(sizeof(int) == 0, "the second");
#endif
