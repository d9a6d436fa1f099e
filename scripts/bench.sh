#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# scripts/bench.sh [program...] [-- benchmark arguments]: sets up a fresh Debian 12, builds the benchmarks for this
# machine, runs all of them or those named, and leaves build/bench/<program>.json. For example
#     scripts/bench.sh bench_dense -- --benchmark_filter=reverse
set -euo pipefail
# shellcheck source=scripts/setup.sh
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

programs=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do
    programs+=("$1")
    shift
done
[ $# -gt 0 ] && shift

if [ ${#programs[@]} = 0 ]; then
    for source in "$opd_root"/bench/*.cpp; do
        [ -e "$source" ] || opd_die "there is no benchmark in bench/"
        programs+=("$(basename "$source" .cpp)")
    done
fi

opd_setup bench
opd_configure bench -DCMAKE_BUILD_TYPE=Release -DOPD_NATIVE=ON -DOPD_WITH_CUDA=OFF -DOPD_BUILD_TESTS=OFF \
    -DOPD_BUILD_EXAMPLES=OFF -DOPD_BUILD_BENCHMARKS=ON
opd_build bench --target "${programs[@]}"
# At real-time priority, where that is allowed, other programs take no processor time from a sample.
undisturbed=()
if chrt -f 10 true 2>/dev/null; then undisturbed=(chrt -f 10); fi
for program in "${programs[@]}"; do
    opd_say "$program"
    ${undisturbed[@]+"${undisturbed[@]}"} "$opd_root/build/bench/bench/$program" --benchmark_out="$opd_root/build/bench/$program.json" \
        --benchmark_out_format=json "$@"
done
