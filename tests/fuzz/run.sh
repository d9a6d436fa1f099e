#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# tests/fuzz/run.sh <fuzzer> <seconds> [corpus folder]: runs a fuzzer with a fixed seed, over OPD_FUZZ_RUNS inputs at
# most. Where it finds something, the input that shows it is printed, with the command that runs it again.
set -uo pipefail
fuzzer=$1 seconds=$2
shift 2
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$fuzzer" -runs="${OPD_FUZZ_RUNS--1}" -max_total_time="$seconds" -seed="${OPD_FUZZ_SEED-20250601}" -max_len=160 -len_control=0 -timeout=120 -rss_limit_mb=3000 \
    -verbosity=0 -print_final_stats=1 -artifact_prefix="$work/" "$@" >"$work/log" 2>&1
status=$?
if [ "$status" = 0 ]; then
    grep '^stat::' "$work/log"
else
    grep -v -e NEW_FUNC -e '# Uses' "$work/log" | tail -60
fi
for input in "$work"/crash-* "$work"/leak-* "$work"/oom-* "$work"/timeout-*; do
    [ -e "$input" ] || continue
    printf '\nto run this input again:\n  echo %s | base64 -d >input; %s input\n' "$(base64 -w0 "$input")" "$fuzzer"
done
exit "$status"
