// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// first: opd needs C\+\+20
// flags: -std=c++17
// control: FIXED
#include <opd/opd.hpp>

int main() {}
