// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// expect: the stated reason
// control: FIXED
#ifndef FIXED
static_assert(sizeof(char) == 2, "the stated reason");
#endif
static_assert(sizeof(char) == 3, "another reason");
int main() { return 0; }
