// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The CPU backend's rows of every divergence over logits of float, which many test programs run: compiled once, in
// dense.cpp.
#pragma once

#include "support/compiled/dense_rows.hpp"

namespace opd {

OPD_TEST_DENSE_ROWS(extern, float)

} // namespace opd
