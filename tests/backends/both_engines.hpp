// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A test on both engines: the CPU's lanes, and the GPU's rows run by a host loop.
#pragma once

#include "backends/host_run.hpp"

#include <opd/backends/cpu.hpp>

namespace opd::test {

/// visit(backend, name) with each engine.
template <class Visit>
void on_both(Visit visit) {
    cpu_backend lanes{.threads = 2};
    visit(lanes, "lanes");
    host_run_backend threads{.threads = 32};
    visit(threads, "threads");
}

} // namespace opd::test
