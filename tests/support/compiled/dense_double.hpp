// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The same over logits of double: compiled once, in dense_double.cpp.
#pragma once

#include "support/compiled/dense_rows.hpp"

namespace opd {

OPD_TEST_DENSE_ROWS(extern, double)

} // namespace opd
