#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# scripts/mca.sh [CPU...]: what llvm-mca predicts for log-sum-exp's inner loop, the unit that bench_dense counts in:
# cycles and operations a register of floats, with everything in the first-level cache. CPU: as -mcpu names them. Needs
# clang++ and llvm-mca of one version (Debian: clang-19 and llvm-19; CLANG and MCA name others); says SKIPPED where they
# are not installed.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
clang=${CLANG-clang++-19} mca=${MCA-llvm-mca-19}
for tool in "$clang" "$mca"; do
    command -v "$tool" >/dev/null || { echo "SKIPPED: $tool is not installed"; exit 0; }
done
[ $# -gt 0 ] || set -- znver4 znver5 skylake-avx512 sapphirerapids haswell
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cat >"$work/loop.cpp" <<'CODE'
#include "opd/cpu/leaf.hpp"
using namespace opd::detail;
int width() { return opd::pack::width; }
void sum_of_leaf(const float* z, int n, const anchor_lanes<opd::pack>& a, leaf_sums<opd::pack>& to) {
    to = fold_leaf<opd::pack, false, opd::raw_sums_needed{}, true>(z, static_cast<const float*>(nullptr), n, a);
}
CODE
for cpu in "$@"; do
    if ! "$clang" -std=c++20 -O3 -march="$cpu" -I "$root/include" -S -o "$work/loop.s" "$work/loop.cpp" 2>"$work/errors"; then
        echo "$cpu: SKIPPED: $(head -1 "$work/errors")"
        continue
    fi
    # the innermost loop with the most multiply-adds: from a label to the jump back to it, no other label jumped to
    # between
    awk '
        /^\.L[A-Za-z0-9_]+:/ { name = $1; sub(":.*", "", name); at[name] = n + 1 }
        /^\t[a-z]/ { line[++n] = $0
            if ($1 ~ /^j/ && ($2 in at)) {
                fused = 0
                for (i = at[$2]; i <= n; ++i) if (line[i] ~ /vfn?m(add|sub)/) ++fused
                size = n - at[$2] + 1
                if (fused > most || (fused == most && fused > 0 && size < least)) { most = fused; least = size; from = at[$2]; to = n }
            } }
        END { if (!most) exit 1; for (i = from; i <= to; ++i) print line[i] }' "$work/loop.s" >"$work/body.s" ||
        { echo "$cpu: no loop was found" >&2; exit 1; }
    registers=$(grep -cE 'vfn?m(add|sub)' "$work/body.s") # 8 a register: two that reduce, six of the polynomial
    if ! "$mca" -mcpu="$cpu" -iterations=200 "$work/body.s" >"$work/report" 2>"$work/errors"; then
        echo "$cpu: SKIPPED: $(head -1 "$work/errors")"
        continue
    fi
    awk -v cpu="$cpu" -v registers="$((registers / 8))" '
        /^Block RThroughput/ { bound = $3 } /^Total Cycles/ { cycles = $3 / 200 } /^Total uOps/ { uops = $3 / 200 }
        END { printf "%-16s %2d registers a turn; a register: %5.2f cycles, %5.2f by throughput alone, %5.1f operations\n",
                     cpu, registers, cycles / registers, bound / registers, uops / registers }' "$work/report"
done
