#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# scripts/load_test.sh [ctest arguments]: runs each test that has threads or a clock (ctest's label `timing`, of a build
# that is there) 200 times while three busy processes a core take its time, and prints a table. A test that takes longer
# gets ten minutes, but no fewer than 20 runs. OPD_LOAD_REPEATS, OPD_LOAD_LEAST, OPD_LOAD_SECONDS, OPD_LOAD_BUSY and
# OPD_LOAD_BUILD (build/test) set others.
set -euo pipefail
# shellcheck source=scripts/setup.sh
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

folder=${OPD_LOAD_BUILD-$opd_root/build/test}
repeats=${OPD_LOAD_REPEATS-200}
least=${OPD_LOAD_LEAST-20}
limit=${OPD_LOAD_SECONDS-600}
busy=${OPD_LOAD_BUSY-$((3 * $(nproc)))}
export RC_PARAMS=${RC_PARAMS-seed=20250601}
[ -e "$folder/CTestTestfile.cmake" ] || opd_die "no tests in $folder: scripts/test.sh builds them"

mapfile -t tests < <(ctest --test-dir "$folder" -N -L '^timing$' "$@" | sed -n 's/^ *Test *#[0-9]*: //p')
[ ${#tests[@]} != 0 ] || opd_die "no test of the label timing is chosen"

logs=$(mktemp -d)
loops=()
# shellcheck disable=SC2317 # by the trap
ends() {
    [ ${#loops[@]} = 0 ] || kill "${loops[@]}" 2>/dev/null || true
    rm -rf "$logs"
}
trap ends EXIT
trap 'exit 1' INT TERM HUP
for ((i = 0; i < busy; ++i)); do
    # until this script is no more, however it ends
    sh -c 'while kill -0 "$0" 2>/dev/null; do i=0; while [ $i -lt 100000 ]; do i=$((i + 1)); done; done' $$ &
    loops+=($!)
done

seconds() { awk "BEGIN { printf \"%.1f\", $(date +%s.%N) - $1 }"; }
# times <test> <n>: whether n runs in a row passed; what they printed is in the log
times() {
    ctest --test-dir "$folder" -R "^${1//./\\.}\$" --repeat "until-fail:$2" --output-on-failure >"$logs/$1" 2>&1
}
failed=0
printf '%-40s %7s %9s  %s\n' "test, $busy busy processes, $(nproc) cores" runs 's a run' outcome
for test in "${tests[@]}"; do
    start=$(date +%s.%N)
    n=1
    outcome=passed
    if times "$test" 1; then
        first=$(seconds "$start")
        n=$(awk "BEGIN { n = int($limit / $first); n = n < $least ? $least : n; print (n > $repeats ? $repeats : n) }")
        start=$(date +%s.%N)
        times "$test" "$n" || outcome=FAILED
    else
        outcome=FAILED
    fi
    ran=$(grep -cE '^ *(1/1 )?Test +#[0-9]+: ' "$logs/$test") || true
    printf '%-40s %7d %9s  %s\n' "$test" "$ran" "$(awk "BEGIN { printf \"%.2f\", $(seconds "$start") / ($ran > 0 ? $ran : 1) }")" \
        "$outcome"
    if [ "$outcome" = FAILED ]; then
        failed=1
        cat "$logs/$test"
    fi
done
exit "$failed"
