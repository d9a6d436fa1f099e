#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# scripts/checkperf.sh [--base COMMIT] [--rounds 7] [--slower 5] [program...] [-- benchmark arguments]: does the working
# tree slow a row of the benchmarks by more than 5 % and this machine's noise? Builds the programs of both for this
# machine, runs them in interleaved rounds (scripts/bench_pairs.py says how it judges), and exits with 1 if a row is
# SLOWER. The base: where this branch left main; on main itself HEAD if files differ from it, else HEAD~1. Programs:
# those below that both have, with their quick arguments; given arguments replace these.
#     scripts/checkperf.sh bench_dense -- --quick --threads=1 --benchmark_filter=KL
set -euo pipefail
# shellcheck source=scripts/setup.sh
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
cd "$opd_root"

base=
judge=()
programs=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
    case $1 in
    --base) base=${2?which commit} && shift ;;
    --rounds | --slower) judge+=("$1" "${2?how many}") && shift ;;
    -*) opd_die "checkperf.sh knows no option $1" ;;
    *) programs+=("$1") ;;
    esac
    shift
done
given=$#
[ $# -gt 0 ] && shift

if [ -z "$base" ]; then
    base=$(git merge-base HEAD main 2>/dev/null || git merge-base HEAD origin/main 2>/dev/null || git rev-parse HEAD)
    if [ "$base" = "$(git rev-parse HEAD)" ] && [ -z "$(git status --porcelain)" ]; then base=HEAD~1; fi
fi
commit=$(git rev-parse --verify -q "$base^{commit}") || opd_die "there is no commit $base"

before=$opd_root/build/checkperf/base
if [ "$(cat "$before/commit" 2>/dev/null)" != "$commit" ]; then
    rm -rf "$before"
    mkdir -p "$before"
    git archive "$commit" | tar -x -C "$before"
    echo "$commit" >"$before/commit"
fi
if [ ${#programs[@]} = 0 ]; then
    for program in bench_{dense,draw,hidden,product,sched,spec,teachers,weight_delta}; do
        if [ -e "bench/$program.cpp" ] && [ -e "$before/bench/$program.cpp" ]; then programs+=("$program"); fi
    done
fi
[ ${#programs[@]} -gt 0 ] || opd_die "the working tree and $commit have no benchmark in common"

opd_setup bench
for root in "$before" "$opd_root"; do
    opd_say "building ${programs[*]} of $root"
    (
        opd_root=$root
        opd_configure checkperf/build -DCMAKE_BUILD_TYPE=Release -DOPD_NATIVE=ON -DOPD_WITH_CUDA=OFF -DOPD_BUILD_TESTS=OFF \
            -DOPD_BUILD_EXAMPLES=OFF -DOPD_BUILD_BENCHMARKS=ON &&
            opd_build checkperf/build --target "${programs[@]}"
    ) >"$opd_root/build/checkperf/build.log" 2>&1 || {
        cat "$opd_root/build/checkperf/build.log"
        opd_die "$root does not build"
    }
done

# At real-time priority, where that is allowed, other programs take no processor time from a run.
undisturbed=()
if chrt -f 10 true 2>/dev/null; then undisturbed=(chrt -f 10); fi
slower=()
for program in "${programs[@]}"; do
    opd_say "$program: the working tree over $(git log -1 --format='%h (%s)' "$commit")"
    quick=()
    case $program in
    bench_dense) quick=(--quick --threads=1) ;;
    bench_draw) quick=(--quick) ;;
    bench_hidden) quick=(--rows=64) ;;
    bench_teachers) quick=(16 151936 9) ;; # rows, ids, rounds
    bench_weight_delta) quick=(60 5) ;;    # million elements, turns
    bench_sched) quick=(--benchmark_min_time=.1 --benchmark_filter=-simulator) ;;
    *) quick=(--benchmark_min_time=.1) ;;
    esac
    [ "$given" = 0 ] || quick=("$@")
    status=0
    ${undisturbed[@]+"${undisturbed[@]}"} python3 scripts/bench_pairs.py "$before/build/checkperf/build/bench/$program" \
        "$opd_root/build/checkperf/build/bench/$program" ${judge[@]+"${judge[@]}"} -- ${quick[@]+"${quick[@]}"} || status=$?
    [ $status -le 1 ] || opd_die "$program could not be compared"
    [ $status = 0 ] || slower+=("$program")
done
[ ${#slower[@]} = 0 ] || opd_die "slower: a row of ${slower[*]}"
opd_say "no row is slower"
