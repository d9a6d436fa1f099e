// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "support/compiled/device_text.hpp"

namespace opd::test {

OPD_TEST_DEVICE_TEXT_ROWS()

} // namespace opd::test
