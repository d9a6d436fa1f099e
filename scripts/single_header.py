#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""One header of all that needs the standard library alone, or one source file of a program and its headers.

    scripts/single_header.py -o opd_single.hpp                     losses, schedulers, speculation, the CPU backend
    scripts/single_header.py -o few.hpp opd/opd.hpp                these headers, and what they include
    scripts/single_header.py -o one.cpp --program examples/03_your_own_divergence.cpp      for Compiler Explorer

Each header stands once, where it is first included, behind a #line, so that an error names the header and its line. The
standard headers are gathered at the head; what is included under a condition stays where it is. --bare leaves out lines
that are comments; --program does so too. The output depends on include/opd (and the program) alone.

A header that cannot be treated so is refused by name: one that may be included twice, one under a condition, one that
needs more than the standard library.
"""
import argparse
import os
import pathlib
import re
import sys

# What a caller includes; what these include comes by itself.
UMBRELLAS = ["opd/opd.hpp", "opd/sched.hpp", "opd/spec.hpp"]
ROOMS = ["opd/*.hpp", "opd/estimators/*.hpp", "opd/sched/**/*.hpp", "opd/spec/*.hpp", "opd/backends/cpu.hpp",
         "opd/backends/vocab_parallel.hpp"]
LEFT_OUT = {
    "opd/compressed.hpp": "it needs Eigen",
    "opd/product.hpp": "it refuses -ffast-math, which the rest allows",
    "opd/ranges.hpp": "it needs range-v3",
}
# Under these conditions a header of opd's may be included: what they say holds wherever the single header is used.
TRUE_HERE = {"#if !defined(__CUDACC__)"}
# Not of the standard library, and at hand wherever their conditions hold.
CONDITIONAL = re.compile(r"(([iex]mm|x86)intrin|arm_neon|cpuid|unistd)\.h|sys/(mman|syscall)\.h")


def fail(why):
    sys.exit(f"single_header.py: {why}; nothing was written")


class Single:
    def __init__(self, include, bare):
        self.include, self.bare = include, bare
        self.done, self.standard, self.lines = set(), set(), []
        self.at = (None, 0)  # the file and line that the compiler believes the next line to be

    def header(self, name):
        """A header and what it includes, where it does not stand yet."""
        if name in self.done:
            return
        self.done.add(name)
        path = self.include / name
        if not path.is_file():
            fail(f"there is no {name} in {self.include}")
        text = path.read_text()
        if text.count("\n#pragma once\n") != 1:
            fail(f"{name} has no #pragma once: a header that may be included twice cannot stand in one file")
        if self.bare and 'R"' in text:
            fail(f"{name} has a raw string, whose lines may look like comments: it cannot be made bare")
        self.file(name, text, self.bare)

    def file(self, name, text, bare):
        """The lines of a file; in place of an include, what it includes."""
        conditions = []
        for number, line in enumerate(text.splitlines(), 1):
            directive = re.match(r"\s*#\s*(\w+)\s*(.*)", line)
            word, rest = (directive[1], directive[2]) if directive else ("", "")
            if word.startswith("if"):
                conditions.append(line.strip())
            elif word in ("else", "elif"):
                conditions[-1] += " " + line.strip()
            elif word == "endif":
                conditions.pop()
            elif word == "include" and self.included(f"{name}:{number}", rest, conditions):
                continue
            dropped = word == "pragma" and rest == "once" or line.startswith("// SPDX-License-Identifier:")
            if not dropped and line and not (bare and line.lstrip().startswith("//")):
                self.line(name, number, line)

    def included(self, where, what, conditions):
        """Whether an include has been seen to; false: the line stays where it is."""
        found = re.match(r'([<"])([^">]+)[">]', what)
        if not found:
            fail(f"{where}: an include that is not a plain name")
        header = found[2]
        if header.startswith("opd/"):
            if not set(conditions) <= TRUE_HERE:
                fail(f"{where}: {header} is included under a condition: {conditions[-1]}")
            self.header(header)
        elif conditions and CONDITIONAL.fullmatch(header):
            return False
        elif conditions or found[1] == '"' or not re.fullmatch("[a-z_]+", header):
            fail(f"{where}: {header} is neither opd's nor a standard header without a condition")
        else:
            self.standard.add(header)
        return True

    def line(self, name, number, line):
        """A line, behind as many empty ones or a #line as tell the compiler its number."""
        file, expected = self.at
        if file == name and expected <= number < expected + 30:
            self.lines += [""] * (number - expected)
        else:
            self.lines.append(f'#line {number} "{name}"')
        self.lines.append(line)
        self.at = (name, number + 1)

    def text(self, head):
        return "\n".join([*head, "", *(f"#include <{name}>" for name in sorted(self.standard)), "", *self.lines, ""])


def version(include):
    text = (include / "opd/version.hpp").read_text()
    parts = ("MAJOR", "MINOR", "PATCH")
    return ".".join(re.search(rf"#define OPD_VERSION_{part} (\d+)", text)[1] for part in parts)


def everything(include):
    found = {path.relative_to(include).as_posix() for room in ROOMS for path in include.glob(room)}
    for name in LEFT_OUT.keys() - found:
        fail(f"{name} is to be left out, and is not there")
    return UMBRELLAS + sorted(found - LEFT_OUT.keys())


def main():
    root = pathlib.Path(__file__).resolve().parent.parent
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("headers", nargs="*", help="opd/opd.hpp, … (default: all that is said above)")
    options.add_argument("-o", "--output", required=True, type=pathlib.Path)
    options.add_argument("--program", type=pathlib.Path, help="a source file, which says itself what it needs")
    options.add_argument("--bare", action="store_true", help="without the headers' lines of comment")
    options.add_argument("--include", type=pathlib.Path, default=root / "include", help="where opd/ is")
    chosen = options.parse_args()
    if chosen.program and chosen.headers:
        fail("a program says itself what headers it needs")

    single = Single(chosen.include, chosen.bare or chosen.program is not None)
    name = chosen.output.name
    head = [
        "// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception",
        "//",
        f"// {name}: opd {version(chosen.include)} in one file, made by scripts/single_header.py.",
    ]
    if chosen.program:
        try:
            single.file(chosen.program.name, chosen.program.read_text(), bare=False)
        except OSError as why:
            fail(f"--program: {why}")
    else:
        headers = chosen.headers or everything(chosen.include)
        for header in headers:
            single.header(header)
        if not chosen.headers:
            head += ["// In place of opd/….hpp, not beside it: either has all that the other has. Left out:"]
            head += [f"//     {left}: {why}" for left, why in sorted(LEFT_OUT.items())]
            head += ["//     data/, serve/, backends/{amx,bf16,eigen}.hpp, CUDA: for they need more libraries"]
        head += ["#pragma once", "", "#if defined(__CUDACC__)",
                 f'#error "{name} is for the processor; under nvcc include opd/backends/cuda.cuh"', "#endif"]
    made = chosen.output.with_name(f".{name}.{os.getpid()}")
    made.write_text(single.text(head))
    made.replace(chosen.output)


if __name__ == "__main__":
    main()
