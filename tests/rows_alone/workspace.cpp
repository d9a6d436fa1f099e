// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Scratch memory, of its own or a caller's.
#include <opd/rows/workspace.hpp>

#include "fake.hpp"

namespace fake {
auto all(opd::workspace& w, std::span<std::byte> arena) { return w.get(64, arena); }
} // namespace fake
