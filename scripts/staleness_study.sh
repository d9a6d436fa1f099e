#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# scripts/staleness_study.sh [directory] [opd-staleness-study arguments]: sets up a fresh Debian 12, builds the study
# for this machine and runs it: one warm student distilled with every estimator from responses that are k versions old,
# over seeds; the gap closed, its slope against log2(k + 1), and what staleness does to ratios and prefixes. The tables,
# their numbers and the plot of docs/estimators/staleness.md are in the directory, runs/staleness_study unless given;
# cells that it holds are not made again. On two cores under fifteen minutes; --tiny some seconds, --full hours.
set -euo pipefail
# shellcheck source=scripts/setup.sh
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

directory=$opd_root/runs/staleness_study
if [ $# -gt 0 ] && [ "${1#-}" = "$1" ]; then
    directory=$1
    shift
fi

opd_demo_program opd-staleness-study
exec "$opd_root/build/demo/examples/staleness_study/opd-staleness-study" --out "$directory" --threads "$(nproc)" "$@"
