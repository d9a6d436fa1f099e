// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "app/app.hpp"

int main(int argc, char** argv) { return trainer::app_main(argc, argv); }
