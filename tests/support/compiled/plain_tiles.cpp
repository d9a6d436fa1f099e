// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#include "support/compiled/plain_tiles.hpp"

namespace opd::test {

OPD_TEST_PLAIN_TILES()

} // namespace opd::test
