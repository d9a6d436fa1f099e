#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# scripts/fuzz.sh [seconds] [fuzzer...]: builds the fuzzers of tests/fuzz with clang's sanitizers and runs each of them,
# or those that are named, for so many seconds (600), as many at once as there are cores. What they learn is kept in
# build/asan-ubsan/corpus; OPD_FUZZ_SEED sets another seed.
set -euo pipefail
# shellcheck source=scripts/setup.sh
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

seconds=${1-600}
shift || true
opd_setup ci
library=OFF # all of libopd, minutes of compiling: where a fuzzer of the C interface is named
case " $* " in *" c_"*) library=ON ;; esac
opd_configure asan-ubsan --preset asan-ubsan "-DOPD_FUZZ_LIBRARY=$library"
folder=$opd_root/build/asan-ubsan
if [ $# -eq 0 ]; then
    opd_build asan-ubsan --target fuzzers
    for program in "$folder"/tests/fuzz/fuzz_*; do
        if [ -x "$program" ] && [ -f "$program" ]; then set -- "$@" "${program##*/fuzz_}"; fi
    done
else
    opd_build asan-ubsan --target "${@/#/fuzz_}"
fi
for name in "$@"; do mkdir -p "$folder/corpus/$name"; done
export opd_root folder seconds
printf '%s\n' "$@" | xargs -P "$(nproc)" -I{} bash -c '
    "$opd_root/tests/fuzz/run.sh" "$folder/tests/fuzz/fuzz_{}" "$seconds" "$folder/corpus/{}" >"$folder/corpus/{}.log" 2>&1
    status=$?
    echo "== {}: exit status $status"
    cat "$folder/corpus/{}.log"
    exit "$status"'
