#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# scripts/demo.sh [--quick] [run directory] [opd-train arguments]: sets up a fresh Debian 12, builds the reference trainer for
# this machine and distils the embedded task's teacher into its student; --quick: on a smaller task (--preset quick). Unless
# given, the run directory is the first of runs/demo, runs/demo-2, … (runs/quick, …) that is free; with --resume or
# --overwrite it is the first of all.
set -euo pipefail
# shellcheck source=scripts/setup.sh
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

name=demo
arguments=()
for argument; do
    if [ "$argument" = --quick ]; then name=quick; else arguments+=("$argument"); fi
done
set -- "${arguments[@]}"
run_directory=$opd_root/runs/$name
if [ $# -gt 0 ] && [ "${1#-}" = "$1" ]; then
    run_directory=$1
    shift
elif [[ " $* " != *" --resume "* && " $* " != *" --overwrite "* ]]; then
    number=1
    while [ -e "$run_directory" ]; do
        number=$((number + 1))
        run_directory=$opd_root/runs/$name-$number
    done
fi

opd_setup demo
opd_configure demo -DCMAKE_BUILD_TYPE=Release "-DCMAKE_CXX_FLAGS_RELEASE=-O2 -DNDEBUG" -DOPD_NATIVE=ON -DOPD_WITH_CUDA=OFF -DOPD_BUILD_TESTS=OFF \
    -DOPD_BUILD_BENCHMARKS=OFF

# The first file of the build tells how fast this machine is now. How many times as long, in seconds of one core, the rest of
# the build takes and then the run, as measured on an AMD EPYC (Zen 5); opd-train measures and says it again.
build_of_first=84
declare -A run_of_first=([demo]=60 [quick]=8)
TIMEFORMAT=%R
seconds=$({ time opd_build demo --target examples/trainer/CMakeFiles/opd_trainer_lib.dir/cmake_pch.hxx.gch >/dev/null; } 2>&1 | tail -1)
awk -v first="$seconds" -v jobs="$(opd_jobs)" -v cores="$(nproc)" -v build="$build_of_first" -v run="${run_of_first[$name]}" \
    'BEGIN {
        if (first < 1) exit # it was there already, or in a cache
        built = first * build / jobs
        all = built + first * run / (cores < 2 ? 1 : 2)
        printf "== about %.0f seconds to build and %.0f to run\n", built, all - built
    }'
opd_build demo --target opd-train
if [ $name = quick ]; then set -- --preset quick "$@"; fi
exec "$opd_root/build/demo/examples/trainer/opd-train" --run-dir "$run_directory" "$@"
