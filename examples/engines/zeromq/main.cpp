// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "engine.hpp"

int main(int count, char** words) { return engine::OPD_ENGINE_ROLE(count, words); }
