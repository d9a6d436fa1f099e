#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# check.sh <c++> <include> <header's name> [folder of cases]: include/opd/rows/<name>.hpp is compiled by its case,
# <name>.cpp, which includes that header and fake.hpp alone and has its rows walk through all their phases on a fake
# engine. A call to something that the header does not include is found only so: in a template the compiler looks it up
# where the rows are used, and there everything is included. A header without a case fails.
set -euo pipefail
compiler=$1 include=$2 name=$3 cases=${4-$(cd "$(dirname "$0")" && pwd)}
case=$cases/$name.cpp
[ -f "$case" ] || { echo "opd/rows/$name.hpp has no case $case"; exit 1; }
[ -f "$include/opd/rows/$name.hpp" ] || { echo "$case is of no header"; exit 1; }
included=$(grep -oE '^ *# *include.*' "$case" | tr '\n' ' ')
[ "$included" = "#include <opd/rows/$name.hpp> #include \"fake.hpp\" " ] || { echo "$case includes $included"; exit 1; }
# compiled, since without machine code not every compiler instantiates what is used
"$compiler" -std=c++20 -O0 -Wall -Wextra -Werror -I "$include" -c "$case" -o /dev/null
echo "opd/rows/$name.hpp includes what its rows call"
