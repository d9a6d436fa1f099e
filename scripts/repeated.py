#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Paragraphs that stand twice in the headers: runs of more than 8 lines that two places share, blank lines, comments
and indentation aside. Prints each, and exits with 1 if there is one.

    scripts/repeated.py [--more-than 8] [folder, by default include/opd]
"""
import argparse
import collections
import pathlib
import re
import sys


def code_lines(path):
    """(line number, text without comment and indentation) of every line that says something."""
    lines = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        text = re.sub(r"\s+", " ", re.sub(r"//.*", "", line)).strip()
        if text and text not in "{}();" and not text.startswith(("#include", "#pragma")):
            lines.append((number, text))
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", default="include/opd")
    parser.add_argument("--more-than", type=int, default=8)
    options = parser.parse_args()
    size = options.more_than + 1
    files = {p: code_lines(p) for p in sorted(pathlib.Path(options.folder).rglob("*")) if p.suffix in (".hpp", ".cuh")}
    places = collections.defaultdict(list)
    for path, lines in files.items():
        for i in range(len(lines) - size + 1):
            places[tuple(text for _, text in lines[i:i + size])].append((path, i))
    found, seen = 0, set()
    for where in places.values():
        for (a, i), (b, j) in zip(where, where[1:]):
            if (a, i - 1, b, j - 1) in seen:  # the same run goes on
                seen.add((a, i, b, j))
                continue
            seen.add((a, i, b, j))
            n = size
            while i + n < len(files[a]) and j + n < len(files[b]) and files[a][i + n][1] == files[b][j + n][1]:
                n += 1
            print(f"{a}:{files[a][i][0]} and {b}:{files[b][j][0]}: {n} lines")
            found += 1
    print(f"{found} runs of more than {options.more_than} lines stand twice in {len(files)} files")
    return found > 0


if __name__ == "__main__":
    sys.exit(main())
