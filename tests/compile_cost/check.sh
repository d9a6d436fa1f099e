#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# check.sh <clang++> <include> <work folder> [--print]: what a compiler is asked to do for two callers, counted, beside
# what limits.txt allows. Counts do not depend on the machine's load: lines after the preprocessor, functions and
# classes instantiated, functions that the optimiser is handed, and bytes of code. More than 15 % above a line of
# limits.txt fails; --print writes today's figures instead.
set -euo pipefail
compiler=$1 include=$2 work=$3 print=${4-}
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$work"
failed=0
for unit in first_call ten_estimators; do
    flags=(-std=c++20 -O1 -DNDEBUG -I "$include")
    "$compiler" "${flags[@]}" -E -P "$here/$unit.cpp" >"$work/$unit.ii"
    "$compiler" "${flags[@]}" -ftime-trace -ftime-trace-granularity=0 -c "$here/$unit.cpp" -o "$work/$unit.o"
    count() { grep -oE "\"name\":\"($1)\"" "$work/$unit.json" | wc -l; }
    while read -r what now; do
        if [ "$print" = --print ]; then
            echo "$unit $what $now"
            continue
        fi
        was=$(awk -v u="$unit" -v w="$what" '$1 == u && $2 == w { print $3 }' "$here/limits.txt")
        [ -n "$was" ] || { echo "limits.txt has no line '$unit $what'"; failed=1; continue; }
        verdict=ok
        if [ "$now" = 0 ] || [ $((100 * now)) -gt $((115 * was)) ]; then verdict=TOO_MUCH failed=1; fi
        echo "$unit: $what $now, $was when limits.txt was written: $verdict"
    done <<EOF
lines $(wc -l <"$work/$unit.ii")
instantiations $(count 'InstantiateFunction|InstantiateClass')
optimised $(count 'OptFunction')
code $(size "$work/$unit.o" | awk 'NR == 2 { print $1 }')
EOF
done
exit "$failed"
