#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# scripts/offline.sh [directory] [opd-train arguments]: sets up a fresh Debian 12, builds the reference trainer for this
# machine, and distils the quick task's student from a data set: trains the teacher and warms the student up, has the
# student answer and the teacher score once (both are kept in the directory, runs/offline-demo unless given), and learns
# with no teacher at hand. As docs/offline.md advises: SFT on the teacher's answers, and the teacher's 8 best ids.
# OPD_TRAIN: a program to use as it is. scripts/offline_study.sh compares with online.
set -euo pipefail
# shellcheck source=scripts/setup.sh
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

directory=$opd_root/runs/offline-demo
if [ $# -gt 0 ] && [ "${1#-}" = "$1" ]; then
    directory=$1
    shift
fi
train=${OPD_TRAIN-$opd_root/build/demo/examples/trainer/opd-train}
if [ -z "${OPD_TRAIN-}" ]; then opd_demo_program opd-train; fi
mkdir -p "$directory"

base=$directory/base
[ -f "$base/report.json" ] || "$train" --run-dir "$base" --overwrite --preset quick --warmup-data teacher --steps 0
"$train" --run-dir "$base" --write-offline "$directory/set" --estimator tail_bucket --k 8
"$train" --run-dir "$directory/run" --overwrite --preset quick --start-from "$base/checkpoints/student.ckpt" \
    --estimator tail_bucket --k 8 --offline "$directory/set" "$@"
