#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""check.py <c++> <repository> <work folder> [programs]: what scripts/single_header.py makes.

Every line of every header stands in it once, where its #line says; it is the same wherever it is made; the compiler
takes it without a warning, and example 01 runs with it in place of the headers. What cannot stand in one file is
refused by name.
`programs`: also the examples for Compiler Explorer, each as one source file.
"""
import pathlib
import re
import shutil
import subprocess
import sys

compiler, root, work = sys.argv[1], pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[3])
FLAGS = ["-std=c++20", "-O0", "-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Werror", "-pthread"]
INCLUDE = re.compile(r'\s*#\s*include\s*[<"]([^>"]+)')


def make(output, *arguments):
    command = [sys.executable, root / "scripts/single_header.py", "-o", output, *arguments]
    return subprocess.run(command, text=True, capture_output=True)


def lines_of(header):
    """What of a header must be found again: not its licence, its includes, empty lines."""
    return {n: line for n, line in enumerate((root / "include" / header).read_text().splitlines(), 1)
            if line and line != "#pragma once" and not line.startswith("// SPDX") and not INCLUDE.match(line)}


def compare(made, bare=False):
    """Holds each header's lines to the file's, by the numbers that a compiler would give them."""
    found, name, number = {}, None, 0
    for line in made.read_text().splitlines():
        marker = re.fullmatch(r'#line (\d+) "(.*)"', line)
        if marker:
            number, name = int(marker[1]), marker[2]
            continue
        if name and line and not INCLUDE.match(line):
            assert number not in found.setdefault(name, {}), f"{name}:{number} stands twice"
            found[name][number] = line
        number += 1
    for header in found:
        if header.startswith("opd/"):
            wanted = {n: line for n, line in lines_of(header).items() if not (bare and line.lstrip().startswith("//"))}
            assert found[header] == wanted, f"{header}: {sorted(found[header].items() ^ wanted.items())[:4]}"
    return found


def everything():
    made = work / "opd_single.hpp"
    assert make(made).returncode == 0
    (work / "elsewhere").mkdir()
    assert make(work / "elsewhere/opd_single.hpp").returncode == 0
    assert made.read_bytes() == (work / "elsewhere/opd_single.hpp").read_bytes()
    headers = root / "include/opd"
    paths = [*headers.glob("*.hpp")]
    for room in ("estimators", "sched", "spec"):
        paths += (headers / room).rglob("*.hpp")
    wanted = {path.relative_to(headers.parent).as_posix() for path in paths}
    wanted -= {"opd/compressed.hpp", "opd/product.hpp", "opd/ranges.hpp"}
    missing = wanted - compare(made).keys()
    assert not missing, f"not in the single header: {sorted(missing)}"

    source = (root / "examples/01_dense_kl.cpp").read_text()
    program = re.sub(r'#include "opd/.*\n', "", source).replace("#include <cmath>\n", '#include "opd_single.hpp"\n')
    assert '"opd_single.hpp"' in program
    (work / "01.cpp").write_text(program)
    run([work / "01.cpp", "-I", work, "-Wsign-conversion"])


def run(arguments):
    subprocess.run([compiler, *FLAGS, *arguments, "-o", work / "program"], check=True)
    subprocess.run([work / "program"], check=True)


def programs():
    """What docs/install.md says can be pasted into Compiler Explorer, which takes a megabyte of JSON."""
    for example in ("01_dense_kl", "03_your_own_divergence", "05_staleness_queue"):
        made = work / f"{example}.cpp"
        assert make(made, "--program", root / f"examples/{example}.cpp").returncode == 0
        size = sum(2 if c in '\n"\\' else 1 for c in made.read_text())
        assert size < 1_000_000, f"{example} has {size} bytes"
        found = compare(made, bare=True)
        assert any(line.startswith("int main") for line in found[f"{example}.cpp"].values())
        if not example.startswith("01"):  # its headers were compiled above
            run([made])


def refusals():
    tree = work / "tree"
    for instead, words in (
            ("", "opd/view.hpp has no #pragma once"),
            ('#pragma once\n#if X\n#include "opd/error.hpp"\n#endif', "opd/view.hpp:.* under a condition: #if X"),
            ("#pragma once\n#include <Eigen/Core>", "opd/view.hpp:.*Eigen/Core is neither"),
            ("#pragma once\n#include OPD_WHAT", "not a plain name"),
            ('#pragma once\n#include "opd/gone.hpp"', "there is no opd/gone.hpp")):
        shutil.rmtree(tree, ignore_errors=True)
        shutil.copytree(root / "include", tree)
        text = (tree / "opd/view.hpp").read_text()
        assert "\n#pragma once\n" in text
        (tree / "opd/view.hpp").write_text(text.replace("\n#pragma once\n", f"\n{instead}\n"))
        answer = make(work / "refused.hpp", "--include", tree)
        assert answer.returncode != 0 and re.search(words, answer.stderr), answer
        assert not (work / "refused.hpp").exists()
    raw = tree / "opd/raw.hpp"
    raw.write_text('#pragma once\n'.join(["// a head\n", 'inline const char* raw = R"(\n// no comment\n)";\n']))
    answer = make(work / "refused.hpp", "--include", tree, "--bare", "opd/raw.hpp")
    assert answer.returncode != 0 and "raw string" in answer.stderr, answer
    answer = make(work / "refused.hpp", "--program", root / "examples/09_m2po_two_pass.cpp")
    assert answer.returncode != 0 and "Eigen/Core is neither" in answer.stderr, answer


shutil.rmtree(work, ignore_errors=True)
work.mkdir(parents=True)
refusals()
everything()
if sys.argv[4:] == ["programs"]:
    programs()
print("every header's lines stand where they are said to; it compiles and runs")
