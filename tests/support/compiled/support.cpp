// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "support/compiled/support.hpp"

namespace opd {

OPD_TEST_SUPPORT_ROWS()

} // namespace opd
