// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// expect: anything
int main() { return 0; }
