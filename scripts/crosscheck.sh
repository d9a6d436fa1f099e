#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# scripts/crosscheck.sh [compiler flags]: the numbers of tests/conformance/equivalence_test.cpp against those of the
# Python packages trl and liger_kernel, where they and torch are installed; a package that is not is named as SKIPPED.
# Exit status 1 on a mismatch. An optional tool: no build and no test needs it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
if ! "$python" scripts/crosscheck.py --anything; then
    exit 0 # nothing to compare with
fi
work=build/crosscheck
mkdir -p "$work"
"${CXX:-g++}" -std=c++20 -O0 "$@" -Iinclude -Itests "-DOPD_TEST_SOURCE_DIR=\"$PWD\"" tests/conformance/equivalence_test.cpp \
    tests/support/main.cpp tests/support/property.cpp tests/support/generators.cpp -lrapidcheck -lpthread -o "$work/test"
OPD_EQUIVALENCE_OUT=$work/numbers.json "$work/test" --test-case="numbers for the cross-check"
"$python" scripts/crosscheck.py "$work/numbers.json"
