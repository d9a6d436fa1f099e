#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# scripts/test.sh [ctest arguments]: sets up a fresh Debian 12, builds every test and example with g++, runs them.
# With arguments it builds only what the tests that they choose need: `scripts/test.sh -R estimators.support`. The seed of the property tests is fixed; RC_PARAMS="seed=…" sets another.
set -euo pipefail
# shellcheck source=scripts/setup.sh
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

opd_setup test
# What is tested says how it is optimised (tests/CMakeLists.txt); for all else -O1 will do, and for CUDA programs -O0 and plain PTX
# (-G halves their time), from which a driver makes machine code where there is one; scripts/gpu.sh optimises. OPD_CI_RESULTS is set by
# .ci/run, which also wants the benchmarks.
opd_configure test -DCMAKE_BUILD_TYPE=Release "-DCMAKE_CXX_FLAGS_RELEASE=-O1 -DNDEBUG$(opd_collects_late)" "-DCMAKE_CUDA_FLAGS_RELEASE=-O0 -DNDEBUG -G" \
    -DOPD_CUDA_ARCHITECTURES=80-virtual "-DOPD_CI_RESULTS=${OPD_CI_RESULTS-}" \
    "-DOPD_BUILD_BENCHMARKS=$([ -n "${OPD_CI_RESULTS-}" ] && echo ON || echo OFF)"
if [ $# = 0 ]; then
    opd_build test
else
    opd_programs "$opd_root/build/test" "$@" | xargs -r -d '\n' cmake --build "$opd_root/build/test" -j "$(opd_jobs)" --target
fi
export RC_PARAMS=${RC_PARAMS-seed=20250601}
opd_say "RC_PARAMS=\"$RC_PARAMS\""
ctest --test-dir "$opd_root/build/test" --no-tests=error --output-on-failure -j "$(nproc)" "$@"
