#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# scripts/demo.sh [run directory] [opd-train arguments]: sets up a fresh Debian 12, builds the reference trainer for this
# machine and distils the embedded task's teacher into its student. The run directory is runs/demo unless given.
set -euo pipefail
# shellcheck source=scripts/setup.sh
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

run_directory=$opd_root/runs/demo
if [ $# -gt 0 ] && [ "${1#-}" = "$1" ]; then
    run_directory=$1
    shift
fi

opd_setup demo
opd_configure demo -DCMAKE_BUILD_TYPE=Release -DOPD_NATIVE=ON -DOPD_WITH_CUDA=OFF -DOPD_BUILD_TESTS=OFF \
    -DOPD_BUILD_BENCHMARKS=OFF
opd_build demo --target opd-train
trainer=$(find "$opd_root/build/demo" -type f -name opd-train -perm -u+x | head -n 1)
exec "$trainer" --run-dir "$run_directory" "$@"
