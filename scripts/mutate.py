#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Do the tests notice a wrong line?

scripts/mutants.txt lists single changes to the headers, and to the trainer's model. All of them are compiled into
copies of these files at once, each behind a test of the environment variable OPD_MUTANT; so every test program is
built once, and then run once a mutant. A mutant is killed if one of the tests of its file fails, crashes or does not
end. An optional tool: no build and no test needs it.

    scripts/mutate.py                     build, run all, print a table; fails if fewer than 95 % die
    scripts/mutate.py --only 3,17 --least 0
    scripts/mutate.py --build build/mutants --jobs 4 --list

The list: `[file]` of include/opd, or `[examples/…]`, and the names of its tests (area.name), then a mutant a line,
`old ==> new`. `old` occurs once in the file (`2@old`: the second time of all); spaces in it stand for any white space,
line breaks too. Text that has moved to another file is found where include/opd has it once, so that moving code and
formatting it leave the list as it is. A mutant whose text is gone is called lost, and counts as one that survives.
What ends in a semicolon is taken as a statement, all else as an expression. A line that begins with `~` is a mutant
that no test can tell from the original; the reason follows after ` // `.
"""
import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
# of examples/trainer: what its tests run, and in which numbers
TRAINER = {"trainer.model": {"model/model.cpp": ("float", "double"), "model/optimizer.cpp": ("float",)}}


class Mutant:
    def __init__(self, number, file, old, new, nth, tests, equivalent):
        self.number, self.file, self.old, self.new, self.nth = number, file, old, new, nth
        self.tests, self.equivalent = tests, equivalent


def read_list(path):
    mutants, file, tests = [], None, []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        heading = re.fullmatch(r"\[(.+)\]\s*(.*)", line)
        if heading and " ==> " not in line:
            file, tests = heading[1], heading[2].split()
            continue
        equivalent = None
        if line.startswith("~"):
            line, _, equivalent = line[1:].strip().rpartition(" // ")
        old, arrow, new = line.partition(" ==> ")
        if not arrow or not file:
            sys.exit(f"{path}:{number}: not `old ==> new` under a [file]")
        nth = re.match(r"(\d+)@", old)
        mutants.append(Mutant(len(mutants) + 1, file, old[nth.end():] if nth else old, new, int(nth[1]) if nth else 0,
                              tests, equivalent))
    return mutants


def find(mutants):
    """Where each mutant's text stands: {file: [(begin, end, mutant)]}, and the mutants that are lost."""
    texts = {str(p.relative_to(ROOT / "include/opd")): p.read_text() for p in sorted((ROOT / "include/opd").rglob("*.*"))}
    texts |= {m.file: (ROOT / m.file).read_text() for m in mutants if m.file.startswith("examples/")}
    found, lost = {}, []
    for m in mutants:
        pattern = re.compile(r"\s+".join(re.escape(word) for word in m.old.split()))
        hits = {file: list(pattern.finditer(text)) for file, text in texts.items() if file == m.file or m.nth == 0}
        here = hits.get(m.file, [])
        if len(here) >= max(m.nth, 1) and (m.nth or len(here) == 1):
            file, hit = m.file, here[max(m.nth, 1) - 1]
        elif not here and sum(map(len, hits.values())) == 1:
            file, hit = next((file, at[0]) for file, at in hits.items() if at)
        else:
            lost.append(m)
            continue
        found.setdefault(file, []).append((hit.start(), hit.end(), m))
    return found, lost


def plant(found, to):
    """A copy of include/ with every mutant in it."""
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(ROOT / "include", to)
    shutil.rmtree(to.parent / "examples", ignore_errors=True)
    for file, places in found.items():
        path = to / "opd" / file
        if file.startswith("examples/"):
            path = to.parent / file
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / file, path)
        text = path.read_text()
        for begin, end, m in sorted(places, key=lambda x: -x[0]):  # from the end, so that places stay
            old = text[begin:end]
            if old.endswith(";"):
                new = f"if (OPD_MUTANT({m.number})) {{ {m.new} }} else {{ {old} }}"
            else:
                new = f"(OPD_MUTANT({m.number}) ? ({m.new}) : ({old}))"
            text = text[:begin] + new + text[end:]
        path.write_text(text)
    (to / "opd_mutant.hpp").write_text(
        "#pragma once\n#include <cstdlib>\n"
        "inline const int opd_mutant = std::getenv(\"OPD_MUTANT\") ? std::atoi(std::getenv(\"OPD_MUTANT\")) : 0;\n"
        "#define OPD_MUTANT(n) (!__builtin_is_constant_evaluated() && opd_mutant == (n))\n")


def flags_of(package, what, otherwise):
    try:
        return subprocess.check_output(["pkg-config", what, package], text=True).split()
    except (OSError, subprocess.CalledProcessError):
        return otherwise


def eigen():
    return flags_of("eigen3", "--cflags", ["-I/usr/include/eigen3"])


def trainer_folders(folder):
    return [f"-I{folder / 'examples/trainer'}", f"-I{ROOT / 'examples/trainer'}"]


def build_model(name, cxx, flags, folder):
    objects = []
    for file, numbers in TRAINER[name].items():
        planted = folder / "examples/trainer" / file
        source = planted if planted.exists() else ROOT / "examples/trainer" / file
        for number in numbers:
            objects.append(folder / f"{source.stem}_{number}.o")
            double = ["-DTRAINER_NUMBERS=double"] if number == "double" else []
            subprocess.run([cxx, *flags, *trainer_folders(folder), *double, "-ffp-contract=off", "-fno-math-errno",
                            "-c", source, "-o", objects[-1]], check=True)
    return objects


def build(tests, folder, headers, jobs):
    cxx = os.environ.get("CXX", "g++")
    flags = ["-std=c++20", "-O1", "-w", f"-I{headers}", f"-I{ROOT}/tests", f"-I{ROOT}/examples", *eigen(),
             f'-DOPD_TEST_SOURCE_DIR="{ROOT}"', '-DOPD_TEST_PROJECT_VERSION="0"']
    shutil.copy(ROOT / "tests/support/precompiled.hpp", folder)
    subprocess.run([cxx, *flags, "-x", "c++-header", folder / "precompiled.hpp", "-o", folder / "precompiled.hpp.gch"],
                   check=True)
    support = []
    for source in sorted((ROOT / "tests/support").rglob("*.cpp")):
        if source.stem == "precompiled":
            continue
        support.append(folder / f"{source.stem}.o")
        subprocess.run([cxx, *flags, "-include", "opd_mutant.hpp", "-c", source, "-o", support[-1]], check=True)
    plain = [*flags, "-include", "opd_mutant.hpp"]  # the trainer's flags are not those of the precompiled header
    flags = [*flags, "-include", folder / "precompiled.hpp", "-include", "opd_mutant.hpp"]
    running, waiting = [], list(tests)
    while running or waiting:
        while waiting and len(running) < jobs:
            name = waiting.pop(0)
            area, _, stem = name.partition(".")
            source = ROOT / "tests" / area / f"{stem}_test.cpp"
            sources = [source, *support]
            if area == "trainer":
                sources += build_model(name, cxx, plain, folder)
            httplib = [flags_of("cpp-httplib", what, []) if area == "serve" else [] for what in ("--cflags", "--libs")]
            running.append((name, subprocess.Popen(
                [cxx, *flags, *trainer_folders(folder), *httplib[0], *sources, "-o", folder / name, "-lrapidcheck",
                 "-lpthread", *httplib[1]])))
            print("building", name, flush=True)
        name, process = running.pop(0)
        if process.wait() != 0:
            sys.exit(f"{name} does not build")


def passes(program, number, limit):
    """Whether the test passes with this mutant."""
    env = dict(os.environ, OPD_MUTANT=str(number))
    env.setdefault("RC_PARAMS", "seed=20250601 noshrink=1")
    try:
        return subprocess.run([program, "--abort-after=1"], env=env, timeout=limit, stdout=subprocess.DEVNULL,
                              stderr=subprocess.DEVNULL).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutants", type=pathlib.Path, default=ROOT / "scripts/mutants.txt")
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build/mutants")
    parser.add_argument("--jobs", type=int, default=1, help="compilers at once")
    parser.add_argument("--only", help="numbers, with commas")
    parser.add_argument("--least", type=int, help="how many must die; default: 95 of 100, of those not marked ~")
    parser.add_argument("--list", action="store_true", help="print the mutants with their numbers, and stop")
    parser.add_argument("--keep", action="store_true", help="use the programs that are there")
    options = parser.parse_args()
    everything = read_list(options.mutants)
    chosen = [m for m in everything if not options.only or str(m.number) in options.only.split(",")]
    found, lost = find(everything)
    if options.list:
        for m in chosen:
            print(f"{m.number:3} {m.file}: {'(lost) ' if m in lost else ''}{m.old}  ==>  {m.new}")
        return
    options.build.mkdir(parents=True, exist_ok=True)
    folder = options.build.resolve()
    tests = list(dict.fromkeys(t for m in chosen for t in m.tests))
    if not options.keep:
        plant(found, folder / "include")
        build(tests, folder, folder / "include", options.jobs)
    limits = {}
    for t in tests:
        begin = time.monotonic()
        if not passes(folder / t, 0, 900):
            sys.exit(f"{t} fails without any mutant")
        limits[t] = 10 + 10 * (time.monotonic() - begin)
    survivors = 0
    for m in chosen:
        if m in lost:
            survivors += not m.equivalent
            print(f"{m.number:3} {m.file:28} {'LOST':32} {m.old}", flush=True)
            continue
        by = next((t for t in m.tests if not passes(folder / t, m.number, limits[t])), None)
        told = by or ("SURVIVES" if not m.equivalent else f"survives: {m.equivalent}")
        survivors += by is None and not m.equivalent
        print(f"{m.number:3} {m.file:28} {told:32} {m.old}  ==>  {m.new}", flush=True)
    judged = sum(not m.equivalent for m in chosen)
    least = options.least if options.least is not None else -(-95 * judged // 100)
    print(f"{judged - survivors} of {judged} killed")
    sys.exit(judged - survivors < least)


if __name__ == "__main__":
    main()
