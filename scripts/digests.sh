#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# scripts/digests.sh <commit> [compiler flags]: whether the working tree's CPU results are that commit's, bit for bit.
# bench/digests/digests.cpp is compiled with the headers of both; lines that differ are printed. Flags: -march=native
# for example.
#     scripts/digests.sh HEAD~1 -march=x86-64-v3
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
commit=${1?which commit}
shift
work=build/digests
rm -rf "$work"
mkdir -p "$work/old"
git archive "$commit" include | tar -x -C "$work/old"
for side in old new; do
    include=include
    [ "$side" = new ] || include=$work/old/include
    "${CXX:-g++}" -std=c++20 -O2 -DNDEBUG "$@" -I "$include" bench/digests/digests.cpp -lpthread -o "$work/$side.run" &
done
wait
for side in old new; do "$work/$side.run" >"$work/$side.txt"; done
lines=$(wc -l <"$work/new.txt")
if diff "$work/old.txt" "$work/new.txt"; then
    echo "$lines digests, all equal"
else
    echo "of $lines digests, $(diff "$work/old.txt" "$work/new.txt" | grep -c '^>') differ"
    exit 1
fi
