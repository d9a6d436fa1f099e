// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "support/compiled/dense_double.hpp"

namespace opd {

OPD_TEST_DENSE_ROWS(, double)

} // namespace opd
