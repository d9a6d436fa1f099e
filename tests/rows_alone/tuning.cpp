// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What is measured per machine: numbers alone.
#include <opd/rows/tuning.hpp>

#include "fake.hpp"

namespace fake {
constexpr auto all() { return opd::detail::gpu_tuning::entries_at_a_time; }
static_assert(all() > 0);
} // namespace fake
