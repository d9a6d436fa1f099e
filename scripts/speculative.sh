#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# scripts/speculative.sh [directory] [opd-compare-speculation arguments]: sets up a fresh Debian 12, builds the
# reference trainer for this machine, trains a student of 6 layers and a drafter for it, and distils the student with
# drafts and without: the same final weights (their digest is printed), and the time of both. What is trained is kept in
# the directory, runs/speculative unless given.
set -euo pipefail
# shellcheck source=scripts/setup.sh
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

directory=$opd_root/runs/speculative
if [ $# -gt 0 ] && [ "${1#-}" = "$1" ]; then
    directory=$1
    shift
fi
[ $# -gt 0 ] || set -- --worlds=preset --rounds=1

opd_demo_program opd-compare-speculation
mkdir -p "$directory"
exec "$opd_root/build/demo/examples/trainer/opd-compare-speculation" "$directory" "$@"
