#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# scripts/compression_study.sh [directory] [opd-compression-study arguments]: sets up a fresh Debian 12, builds the
# study for this machine and runs it: what compressed teacher states lose, beside top k and threshold at the same
# numbers a row, on rollouts of the trainer's models and on a synthetic head of 151,936 tokens. The table, its numbers
# and the plots of docs/estimators/compressed.md are in the directory, runs/compression_study unless given. On two cores
# under fifteen minutes and 8 GB.
set -euo pipefail
# shellcheck source=scripts/setup.sh
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

directory=$opd_root/runs/compression_study
if [ $# -gt 0 ] && [ "${1#-}" = "$1" ]; then
    directory=$1
    shift
fi

opd_demo_program opd-compression-study
exec "$opd_root/build/demo/examples/compression_study/opd-compression-study" --out "$directory" --threads "$(nproc)" "$@"
