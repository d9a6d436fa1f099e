// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The tiles of plain_tiles.hpp for every pair of parts: compiled once, in plain_tiles.cpp, and optimised: their loops
// are most of what a test on them does.
#pragma once

#include "support/plain_tiles.hpp"

/// `kind`: extern (declared), or nothing (compiled here).
#define OPD_TEST_PLAIN_TILES(kind)                                                                                     \
    kind template void plain_tiles::run<1, 1>(const opd::detail::tile_block&) const;                                   \
    kind template void plain_tiles::run<1, 3>(const opd::detail::tile_block&) const;                                   \
    kind template void plain_tiles::run<3, 1>(const opd::detail::tile_block&) const;                                   \
    kind template void plain_tiles::run<3, 3>(const opd::detail::tile_block&) const;

namespace opd::test {

OPD_TEST_PLAIN_TILES(extern)

} // namespace opd::test
