#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# scripts/demo.sh [run directory] [opd-train arguments]: sets up a fresh Debian 12, builds the reference trainer for this
# machine and distils the embedded task's teacher into its student. Unless given, the run directory is the first of
# runs/demo, runs/demo-2, … that is free; with --resume or --overwrite it is runs/demo.
set -euo pipefail
# shellcheck source=scripts/setup.sh
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

run_directory=$opd_root/runs/demo
if [ $# -gt 0 ] && [ "${1#-}" = "$1" ]; then
    run_directory=$1
    shift
elif [[ " $* " != *" --resume "* && " $* " != *" --overwrite "* ]]; then
    number=1
    while [ -e "$run_directory" ]; do
        number=$((number + 1))
        run_directory=$opd_root/runs/demo-$number
    done
fi

opd_setup demo
opd_configure demo -DCMAKE_BUILD_TYPE=Release -DOPD_NATIVE=ON -DOPD_WITH_CUDA=OFF -DOPD_BUILD_TESTS=OFF \
    -DOPD_BUILD_BENCHMARKS=OFF
opd_build demo --target opd-train
exec "$opd_root/build/demo/examples/trainer/opd-train" --run-dir "$run_directory" "$@"
