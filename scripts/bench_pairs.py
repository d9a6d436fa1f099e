#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Two builds of a benchmark in paired, interleaved rounds: is the new one slower?

    scripts/bench_pairs.py old/bench_dense new/bench_dense [--rounds 7] [--slower 5] [--in-l2] [-- --quick --threads=1]

Each round runs old, new and old again. Printed for each row, and each time that a row has (bench_dense: from memory and
in L2):

    new/old   the median over the rounds of new / sqrt(old · old again), and the middle half of the rounds' ratios
    noise     the median of |old again / old - 1|: what this machine does not tell apart

A row is slower if new/old is above 1 + --slower % + noise, and above it once more in as many rounds after these; then
the exit status is 1. It is 2 if a program fails, or both have no row in common. --in-l2 compares only rows that stay in
the L2 cache, which say most of the code: on a shared machine the time from memory is also its neighbours'. It reads the
JSON of Google Benchmark, and of the programs of bench/ that print tables. An optional tool: no build needs it.
"""
import argparse
import json
import math
import pathlib
import statistics
import subprocess
import sys
import tempfile

TIMES = {"ns_per_element": "", "l2_ns": "in L2", "us_a_row": "", "real_time": ""}
UNITS = {"ns": 1, "us": 1e3, "ms": 1e6, "s": 1e9}


def fail(why):
    print(f"error: {why}", file=sys.stderr)
    sys.exit(2)


def run(program, arguments, to):
    """The times of one run, by row."""
    try:
        subprocess.run([program, *arguments, f"--benchmark_out={to}"], check=True, stdout=subprocess.DEVNULL)
        rows = json.loads(to.read_text())["benchmarks"]
    except (OSError, subprocess.CalledProcessError, json.JSONDecodeError, KeyError) as e:
        fail(f"{program}: {e}")
    times = {}
    for b in rows:
        if b.get("aggregate_name", "median") != "median":
            continue
        what = [b["name"], *(str(b[k]) for k in ("type", "teacher") if b.get(k))]
        what += [f"{b[k]} {k}" for k in ("threads", "rows") if k in b]
        for key, where in TIMES.items():
            if b.get(key, 0) > 0:  # 0: not measured
                times[", ".join(what + [where] * bool(where))] = b[key] * UNITS[b.get("time_unit", "ns")]
    return times


def judge(rounds):
    """(new/old, quarter, three quarters, noise) of [(old, new, old again)]."""
    ratios = sorted(new / math.sqrt(old * again) for old, new, again in rounds)
    noise = statistics.median(abs(again / old - 1) for old, _, again in rounds)
    return statistics.median(ratios), ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4], noise


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--slower", type=float, default=5, metavar="PERCENT")
    parser.add_argument("--in-l2", action="store_true")
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options, for_both = parser.parse_args(sys.argv[1:end]), sys.argv[end + 1:]
    if options.rounds < 3:
        parser.error("--rounds must be 3 or more")
    if not options.slower >= 0:
        parser.error("--slower must be 0 or more")

    def measured(folder):
        rounds, alone = {}, {}
        for _ in range(options.rounds):
            of = [run(p, for_both, pathlib.Path(folder) / "out.json") for p in (options.old, options.new, options.old)]
            for row in dict.fromkeys(row for times in of for row in times):
                if options.in_l2 and not row.endswith("in L2"):
                    continue
                if all(row in times for times in of):
                    rounds.setdefault(row, []).append(tuple(times[row] for times in of))
                else:
                    alone[row] = "new" if row in of[1] else "old"
        return rounds, {row: which for row, which in alone.items() if row not in rounds}

    def is_slower(rounds):
        ratio, _, _, noise = judge(rounds)
        return ratio > 1 + options.slower / 100 + noise

    with tempfile.TemporaryDirectory() as folder:
        rounds, alone = measured(folder)
        if not rounds:
            fail(f"{options.old} and {options.new} have no row in common")
        slower = [row for row in rounds if is_slower(rounds[row])]
        if slower:
            print(f"measured again, {len(slower)} rows look slower", flush=True)
            again, _ = measured(folder)
            slower = [row for row in slower if row in again and is_slower(again[row])]
            for row in again:
                rounds[row] = rounds.get(row, []) + again[row]
    width = max(map(len, rounds))
    for row in rounds:
        ratio, low, high, noise = judge(rounds[row])
        print(f"{row:{width}}  new/old {ratio:6.3f} ({low:.3f} to {high:.3f})  noise {noise:.3f}  "
              f"{'SLOWER' if row in slower else ''}".rstrip())
    for row, which in alone.items():
        print(f"{row:{width}}  of {which} alone")
    print(f"{len(slower)} of {len(rounds)} rows slower by more than {options.slower:g} % and the noise")
    sys.exit(len(slower) > 0)


if __name__ == "__main__":
    main()
