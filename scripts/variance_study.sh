#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# scripts/variance_study.sh [directory] [opd-variance-study arguments]: sets up a fresh Debian 12, builds the study for
# this machine and runs it: variance and bias of the gradient that each sampled estimator makes of 64 teacher-scored ids
# a row, over entropies and ages of the rollout, and what m draws leave of one's variance. The tables, their numbers and
# the plots of docs/estimators/variance.md are in the directory, runs/variance_study unless given. On two cores under
# five minutes; --quick some seconds, --full an hour.
set -euo pipefail
# shellcheck source=scripts/setup.sh
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

directory=$opd_root/runs/variance_study
if [ $# -gt 0 ] && [ "${1#-}" = "$1" ]; then
    directory=$1
    shift
fi

opd_demo_program opd-variance-study
exec "$opd_root/build/demo/examples/variance_study/opd-variance-study" --out "$directory" --threads "$(nproc)" "$@"
