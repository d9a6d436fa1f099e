#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# scripts/demo.sh [--quick] [run directory] [opd-train arguments]: sets up a fresh Debian 12, builds the reference
# trainer for this machine and distils the embedded task's teacher into its student; --quick: on a smaller task
# (--preset quick). Unless given, the run directory is the first of runs/demo, runs/demo-2, … (runs/quick, …) that is
# free; with --resume or --overwrite it is the first of all.
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
# -O1 (the trainer's model has -O2 all the same), and of g++ less analysis of what pointers may point to: a run is no
# slower for it, and the build is a fifth and then 7 % shorter.
release="-O1 -DNDEBUG"
if opd_is_gcc; then release+=" -fno-tree-pta -fno-ipa-modref --param=ipa-max-aa-steps=200"; fi
opd_configure_demo "-DCMAKE_CXX_FLAGS_RELEASE=$release"

# Reading the library's headers once tells how fast this machine is now: the build takes about 150 times as long on one
# core, the run 370 or 47 times. opd-train measures its own work and says it again.
TIMEFORMAT=%R
once() {
    echo '#include "opd/opd.hpp"' |
        "${CXX:-c++}" -std=c++20 -O2 -fsyntax-only -I"$opd_root/include" -x c++ -
}
seconds=$({ time once; } 2>&1 | tail -1)
program=$opd_root/build/demo/examples/trainer/opd-train
awk -v once="$seconds" -v jobs="$(opd_jobs)" -v cores="$(nproc)" -v name=$name \
    -v built="$([ -x "$program" ] && echo 1 || echo 0)" \
    'BEGIN {
        run = once * (name == "quick" ? 47 : 370) / (cores < 2 ? 1 : 2) # more cores help little: the models are small
        build = built ? 0 : once * 150 / jobs
        all = (build + run) / 60
        printf "== this will take about %.1f minutes here: %.1f to build, %.1f to run\n", all, build / 60, run / 60
    }'
opd_build demo --target opd-train
if [ $name = quick ]; then set -- --preset quick "$@"; fi
exec "$program" --run-dir "$run_directory" "$@"
