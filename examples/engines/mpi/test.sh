#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# test.sh MPIEXEC OPD-MPI: the losses of both ways over 1, 2, 3 and 4 ranks are those of one, to 1e-14, and fall; the
# first is that of its formula.
set -euo pipefail
start=$1 program=$2
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMP_NUM_THREADS=1
export OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_MCA_mpi_yield_when_idle=1
export PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe
if ! "$start" -n 1 true >"$folder/why" 2>&1; then
    echo "SKIPPED: $start does not start: $(head -n 3 "$folder/why")"
    exit 0
fi
for ranks in 1 2 3 4; do
    "$start" -n "$ranks" "$program" | sed "s/^/$ranks /" >>"$folder/losses"
done
awk '
    function off(a, b) { d = a < b ? b - a : a - b; return d / (a > 1 ? a : 1) }
    function wrong(why) { printf "%d ranks, over the %s, step %d: %.17g %s\n", $1, $2, $3, $4, why; bad = 1 }
    $2 == "naive" { naive[$1] = $4; next }
    !($3 in first) { first[$3] = $4 }
    off($4, first[$3]) > 1e-14 { wrong("is not that of one rank, " first[$3]) }
    $3 == 0 && off($4, naive[$1]) > 1e-13 { wrong("is not that of its formula, " naive[$1]) }
    $3 > 0 && !($4 < last[$1, $2]) { wrong("has not fallen from " last[$1, $2]) }
    { last[$1, $2] = $4; lines++ }
    END {
        if (lines != 48) { printf "%d losses of 48\n", lines; bad = 1 }
        printf "losses fall from %.6f to %.6f\n", first[0], first[5]
        exit bad
    }' "$folder/losses"
