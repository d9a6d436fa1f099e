// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "app/programs.hpp"

int main(int argc, char** argv) { return trainer::score_main(argc, argv); }
