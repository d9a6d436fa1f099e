#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# scripts/mismatch_study.sh [directory] [opd-mismatch-study arguments]: sets up a fresh Debian 12, builds the study for
# this machine and runs it: one warm student distilled on-policy while rollout computes otherwise than the learner
# (bfloat16, split products, another temperature, noise, an unreported filter), with each correction, over seeds;
# figures 2 to 6 of VeXact. The tables, their numbers and the plots of docs/estimators/mismatch-study.md are in the
# directory, runs/mismatch_study unless given; cells that it holds are not made again. On two cores under fifteen
# minutes; --tiny some seconds, --full hours.
set -euo pipefail
# shellcheck source=scripts/setup.sh
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

directory=$opd_root/runs/mismatch_study
if [ $# -gt 0 ] && [ "${1#-}" = "$1" ]; then
    directory=$1
    shift
fi

opd_demo_program opd-mismatch-study
exec "$opd_root/build/demo/examples/mismatch_study/opd-mismatch-study" --out "$directory" --threads "$(nproc)" "$@"
