// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
static_assert(sizeof(char) == 2, "nobody reads this");
int main() { return 0; }
