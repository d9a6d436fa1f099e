#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# scripts/test.sh [ctest arguments]: sets up a fresh Debian 12, builds every test and example with clang 19, runs them.
# With arguments it builds only what the tests that they choose need: `scripts/test.sh -R estimators.support`. CXX names
# another compiler (in a build folder of its own). The seed of the property tests is fixed; RC_PARAMS="seed=…" sets
# another.
set -euo pipefail
# shellcheck source=scripts/setup.sh
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

opd_setup test
# At -O0 clang needs a fifth of the time that optimised rows take to compile; a test that computes for long says `//
# optimise: always`. CUDA programs are plain PTX, not optimised, from which a driver makes machine code where there is
# one; scripts/gpu.sh optimises. libopd has the base's kernels and the best that this machine runs. .ci/run sets
# OPD_CI_RESULTS, and OPD_TEST_FLAGS where all is optimised and libopd has every instruction set.
folder=test${CXX+-$(basename "$CXX")}
export CXX=${CXX-clang++-19}
isas='base;v3'
if grep -q '^flags.* avx512dq .* avx512bw .*avx512vl' /proc/cpuinfo; then isas='base;v4'; fi
optimise=(-DOPD_TEST_OPTIMIZE=-O0 "-DCMAKE_CXX_FLAGS_RELEASE=-O0 -DNDEBUG$(opd_collects_late)" -DOPD_LIBRARY_OPTIMIZE=-O0)
if [ -n "${OPD_TEST_FLAGS-}" ]; then
    optimise=(-DOPD_TEST_OPTIMIZE= "-DCMAKE_CXX_FLAGS_RELEASE=$OPD_TEST_FLAGS -DNDEBUG$(opd_collects_late)"
        "-DOPD_LIBRARY_OPTIMIZE=$OPD_TEST_FLAGS" -DOPD_TEST_WHOLE=ON)
    isas='base;v3;v4'
fi
opd_configure "$folder" -DCMAKE_BUILD_TYPE=Release "${optimise[@]}" "-DCMAKE_CUDA_FLAGS_RELEASE=-O0 -DNDEBUG -Xcicc -O0" \
    -DOPD_CUDA_ARCHITECTURES=80-virtual "-DOPD_CI_RESULTS=${OPD_CI_RESULTS-}" -DOPD_BUILD_LIBRARY=ON "-DOPD_LIBRARY_ISAS=$isas" \
    -DOPD_BUILD_BENCHMARKS=OFF
if [ $# = 0 ]; then
    opd_build "$folder"
else
    mapfile -t programs < <(opd_programs "$opd_root/build/$folder" "$@")
    if [ ${#programs[@]} != 0 ]; then opd_build "$folder" --target "${programs[@]}"; fi
fi
export RC_PARAMS=${RC_PARAMS-seed=20250601}
opd_say "RC_PARAMS=\"$RC_PARAMS\""
# one more than there are cores: what reads clocks or starts threads waits for most of its time
ctest --test-dir "$opd_root/build/$folder" --no-tests=error --output-on-failure -j "$(($(nproc) + 1))" "$@"
