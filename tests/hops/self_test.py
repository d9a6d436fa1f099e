#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""self_test.py <repository> <work folder>: scripts/hops.py counts what a program of three headers calls."""
import pathlib
import shutil
import subprocess
import sys

FILES = {
    "include/opd/low.hpp": "#pragma once\ntemplate <class F> int low(F f) { return f.high(); }\ninline int leaf() { return 1; }\n",
    "include/opd/room/high.hpp": '#pragma once\n#include "opd/low.hpp"\n#include <algorithm>\n'
    "struct high_one { int high() const { int x[] = {2, 1}; std::sort(x, x + 2, [](int a, int b) { return a < b + leaf() - 1; });\n"
    "return x[0]; } };\ninline int enter() { return low(high_one()); }\n",
    "include/opd/unused.hpp": "#pragma once\ninline int unused() { return 0; }\n",
    "program.cpp": '#include "opd/room/high.hpp"\n#include "opd/unused.hpp"\n#include <thread>\n'
    "int main() { int r = 0; std::thread([&] { r = enter(); }).join(); return r - 1; }\n",
}


def main():
    repository, root = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
    shutil.rmtree(root, ignore_errors=True)
    for name, text in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    shown = subprocess.run([sys.executable, repository / "scripts/hops.py", "--root", root, "--climbs", "program.cpp"],
                           check=True, capture_output=True, text=True).stdout  # fmt: skip
    print(shown)
    # enter -> low -> high, which calls leaf through std::sort; low.hpp names nothing of room/high.hpp
    assert shown.splitlines()[1].split() == ["program.cpp", "2", "2", "2", "1"], "2 files, 2 rooms, 2 hops, 1 climb"
    assert shown.splitlines()[2:] == ["    low.hpp -> room/high.hpp"], "the climb"


if __name__ == "__main__":
    main()
