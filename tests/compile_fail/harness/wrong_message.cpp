// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// expect: a sentence that is not printed
static_assert(sizeof(char) == 2, "another sentence");
int main() { return 0; }
