#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# check.sh <c++> <repository> <work folder> <kind> <most files> [compiler's flags]: what scripts/new.sh makes of that
# kind, in a copy of the tree. It touches at most so many files outside tests and docs, and every file that it prints;
# the program tests/scaffold/<kind>.cpp uses the new thing, called made_up, as a caller would. A name that is taken
# leaves the tree as it was.
set -euo pipefail
compiler=$1 root=$2 work=$3 kind=$4 most=$5
shift 5
rm -rf "$work"
mkdir -p "$work/tree"
for folder in docs examples/trainer include scripts tests/support tests/estimators tests/sched; do
    mkdir -p "$work/tree/$folder"
    cp -r "$root/$folder/." "$work/tree/$folder"
done
cp -r "$work/tree" "$work/before"
cd "$work/tree"

said=$(scripts/new.sh "$kind" made_up)
echo "$said"
touched=$({ diff -rq "$work/before" . || true; } | sed -E "s#^Files .* and \./(.*) differ\$#\1#; s#^Only in \./?(.*): (.*)#\1/\2#")
printed=$(sed -nE 's/^  ([^:]*): .*/\1/p' <<<"$said")
if [ "$(sort <<<"$touched")" != "$(sort <<<"$printed")" ]; then
    echo "it printed other files than it touched:"
    echo "$touched"
    exit 1
fi
outside=$(awk '!/^(tests|docs)\/|\.md$/ { ++n } END { print n + 0 }' <<<"$touched")
if [ "$outside" -gt "$most" ]; then
    echo "$outside files outside tests and docs, and $most are the limit"
    exit 1
fi

"$compiler" -std=c++20 -O0 -Wall -Wextra -Werror -Iinclude -Itests -Iexamples/trainer "$root/tests/scaffold/$kind.cpp" "$@" -o "$work/program"
"$work/program"

cp -r . "$work/after"
if scripts/new.sh "$kind" made_up 2>"$work/refusal"; then
    echo "a name that is taken was taken again"
    exit 1
fi
grep -q "nothing was written" "$work/refusal"
diff -r "$work/after" .
echo "$kind: $outside of at most $most files outside tests and docs"
