#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# self_test.sh <c++> <include> <work folder>: check.sh passes on a copy of the headers, and fails on the same with a
# call of a phase to a helper that a header of another floor has, on a header without a case, on a case without a
# header, on a case that includes more.
set -euo pipefail
compiler=$1 include=$2 work=$3
here=$(cd "$(dirname "$0")" && pwd)
rm -rf "$work"
mkdir -p "$work"
cp -r "$include" "$work/include"
cp -r "$here" "$work/cases"
header=$work/include/opd/rows/kept_rows.hpp
check() { bash "$here/check.sh" "$compiler" "$work/include" kept_rows "$work/cases"; }
fails() { # <what must be said>: the check fails and says it
    if check >"$work/said" 2>&1; then
        echo "the check passed, instead of saying '$1'"
        exit 1
    fi
    grep -q "$1" "$work/said" || { cat "$work/said"; exit 1; }
}
check
sed -i 's/team.template each<take_cut>(\*this);/planted_helper(*this, team); &/' "$header"
grep -q planted_helper "$header"
fails planted_helper
printf '#pragma once\nnamespace opd::detail {\ntemplate <class Rows, class State>\nvoid planted_helper(const Rows&, const State&) {}\n}\n' \
    >"$work/include/opd/cpu/planted.hpp"
fails planted_helper
sed -i 's,^#include "opd/rows/leaf_rows.hpp",#include "opd/cpu/planted.hpp"\n&,' "$header"
check # with the include the call is no hidden one
echo '#include <opd/evaluate.hpp>' >>"$work/cases/kept_rows.cpp"
fails "includes #include"
rm "$work/cases/kept_rows.cpp"
fails "has no case"
cp "$here/kept_rows.cpp" "$work/cases"
rm "$header"
fails "is of no header"
