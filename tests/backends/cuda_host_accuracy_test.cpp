// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
// build: whole-compiler
// optimise: always
//
// The rows on which float loses digits (support/accuracy.hpp) on the GPU's dense kernels, run on the host in a loop
// over thread indices: diffuse students, sure teachers, far temperatures, every divergence.
#include "backends/host_run.hpp"
#include "support/accuracy.hpp"
#include "support/compiled/device_text.hpp"

#include <cstdlib>

TEST_CASE("diffuse, peaked and disagreeing rows, T from 0.01 to 100, every divergence") {
    opd::test::host_run_backend backend{128};
    std::vector<opd::test::accuracy::errors> table;
    for (const auto& r : opd::test::accuracy::rows(2500, 20250601)) opd::test::accuracy::judge_dense(backend, r, table);
    if (std::getenv("OPD_ACCURACY_TABLE")) opd::test::accuracy::print(table, "device text, V = 2,500");
}
