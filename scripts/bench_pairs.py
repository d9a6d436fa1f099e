#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Two builds of bench_dense in paired, interleaved rounds: is the new one slower?

    scripts/bench_pairs.py old/bench_dense new/bench_dense [--rounds 7] [--in-l2] [-- --quick --threads=1 --benchmark_filter=KL]

Each round runs old, new and old again. Printed for each row: new/old and old/old, from the smallest times over the rounds. What
old/old differs from 1 by is what this machine cannot tell apart; a row that is slower by more than that and 3 % is marked, and
the exit status is 1. --in-l2 compares rows that stay in the L2 cache, which say most of the code and least of the machine: on a
shared one the time from memory is also its neighbours'. An optional tool: no build and no test needs it.
"""
import argparse
import json
import pathlib
import subprocess
import sys
import tempfile


def run(program, arguments, to, figure):
    subprocess.run([program, *arguments, f"--benchmark_out={to}"], check=True, stdout=subprocess.DEVNULL)
    return {tuple(b[k] for k in ("name", "type", "teacher", "threads", "rows")): b[figure]
            for b in json.loads(to.read_text())["benchmarks"]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--in-l2", action="store_const", const="l2_ns", default="ns_per_element", dest="figure")
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options, for_both = parser.parse_args(sys.argv[1:end]), sys.argv[end + 1:]
    if options.rounds < 1:
        parser.error("--rounds must be 1 or more")
    least = {}  # row: [old, new, old again]
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(options.rounds):
            for which, program in enumerate((options.old, options.new, options.old)):
                for row, ns in run(program, for_both, pathlib.Path(folder) / "out.json", options.figure).items():
                    best = least.setdefault(row, [float("inf")] * 3)
                    if ns > 0:
                        best[which] = min(best[which], ns)
    slower = 0
    for (name, kind, teacher, threads, rows), (old, new, again) in least.items():
        if float("inf") in (old, new, again):  # of one build alone
            continue
        spread = abs(again / old - 1)
        mark = "SLOWER" if new / old > 1.03 + spread else ""
        slower += bool(mark)
        print(f"{name:26} {kind:5} {teacher:5} {threads} threads, {rows:5} rows  new/old {new / old:6.3f}  "
              f"old/old {again / old:6.3f}  {mark}")
    print(f"{slower} of {len(least)} rows slower by more than 3 % and the spread")
    sys.exit(slower > 0)


if __name__ == "__main__":
    main()
