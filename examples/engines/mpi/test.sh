#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# test.sh MPIEXEC OPD-MPI [DEATHS]: the losses of both ways over 1, 2, 3 and 4 ranks are those of one, to 1e-14, and
# fall; the first is that of its formula. So are they in DEATHS runs (0) in which a rank kills itself, which wants ULFM.
set -euo pipefail
start=$1 program=$2 deaths=${3-0}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 PRTE_ALLOW_RUN_AS_ROOT=1
export PRTE_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMP_NUM_THREADS=1
export OMPI_MCA_rmaps_base_oversubscribe=1 OMPI_MCA_mpi_yield_when_idle=1
export PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe
if ! "$start" -n 1 true >"$folder/why" 2>&1; then
    echo "SKIPPED: $start does not start: $(head -n 3 "$folder/why")"
    exit 0
fi
for ranks in 1 2 3 4; do
    "$start" -n "$ranks" "$program" | sed "s/^/$ranks /" >>"$folder/losses"
done
RANDOM=${SEED:=17}
for ((i = 0; i < deaths; ++i)); do
    ranks=$((2 + RANDOM % 3)) way=$((RANDOM % 2 ? 1 : 0)) step=$((RANDOM % 6))
    dead=$((RANDOM % ranks)) ways=(vocabulary data)
    timeout 120 "$start" --with-ft ulfm -n "$ranks" "$program" "${ways[way]}" $step $dead |
        sed "s/^/$ranks-without-$dead-from-${ways[way]}-$step-run-$i /" >>"$folder/losses"
done
awk -v deaths="$deaths" -v seed="$SEED" '
    function off(a, b) { d = a < b ? b - a : a - b; return d / (a > 1 ? a : 1) }
    function wrong(why) { printf "%s ranks, over the %s, step %d: %.17g %s\n", $1, $2, $3, $4, why; bad = 1 }
    $2 == "naive" { naive[$1] = $4; next }
    $2 == "left" { if ($3 == $1 - 1) left++; next }
    !($3 in first) { first[$3] = $4 }
    off($4, first[$3]) > 1e-14 { wrong("is not that of one rank, " first[$3]) }
    $3 == 0 && off($4, naive[$1]) > 1e-13 { wrong("is not that of its formula, " naive[$1]) }
    $3 > 0 && !($4 < last[$1, $2]) { wrong("has not fallen from " last[$1, $2]) }
    { last[$1, $2] = $4; lines++ }
    END {
        if (lines != 48 + 12 * deaths) { printf "%d losses of %d\n", lines, 48 + 12 * deaths; bad = 1 }
        if (left != deaths) { printf "%d runs of %d went on without their dead rank\n", left, deaths; bad = 1 }
        printf "losses fall from %.6f to %.6f", first[0], first[5]
        if (deaths) printf ", in %d runs that lost a rank too (SEED=%d)", deaths, seed
        print ""
        exit bad
    }' "$folder/losses"
