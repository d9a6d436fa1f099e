// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "app/programs.hpp"

int main(int argc, char** argv) { return trainer::distil_main(argc, argv); }
