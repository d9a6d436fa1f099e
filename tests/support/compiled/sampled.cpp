// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "support/compiled/sampled.hpp"

namespace opd {

OPD_TEST_SAMPLED_ROWS()

} // namespace opd
