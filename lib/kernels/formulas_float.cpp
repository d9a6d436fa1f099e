// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#define OPD_C_FORMULAS_HERE
#include "formulas.hpp"

OPD_C_FORMULAS(OPD_C_FORMULA, float)
