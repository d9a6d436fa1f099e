#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Runs tests that have threads or a clock (ctest's label `timing`) many times on a busy machine.

    scripts/load_test.py [--delays] [-R REGEX] [--runs 200]

Of a build that is there, it runs each test in so many copies at once that each has three others a core beside it, and
prints a table. A test that takes longer gets --seconds, but no fewer than --least runs. With --delays every thread
sleeps now and then at a mutex, mostly below 3 ms, seldom up to 200 ms (tests/support/delays.c): orders of events that
load alone does not bring about. Of a run that does not end, gdb writes down where its threads wait, if it is there.
"""
import argparse
import concurrent.futures
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time

root = pathlib.Path(__file__).resolve().parent.parent
cores = len(os.sched_getaffinity(0))
running = set()  # processes, each the head of a session of its own


def tests_of(build, regex):
    listed = subprocess.run(
        ["ctest", "--test-dir", build, "-L", "^timing$", "-R", regex, "--show-only=json-v1"],
        check=True, capture_output=True, text=True).stdout
    for test in json.loads(listed)["tests"]:
        more = {p["name"]: p["value"] for p in test["properties"]}
        yield test["name"], test["command"], more["WORKING_DIRECTORY"], dict(
            v.split("=", 1) for v in more.get("ENVIRONMENT", []))


def run(command, folder, environment, limit, log):
    """None where it passed, else how it failed."""
    with open(log, "wb") as out:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=out, stderr=subprocess.STDOUT,
                                   start_new_session=True)
        running.add(process)
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            if shutil.which("gdb"):
                subprocess.run(["gdb", "-p", str(process.pid), "-batch", "-ex", "thread apply all bt"], stdout=out,
                               stderr=subprocess.DEVNULL, check=False)
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return f"not over after {limit:.0f} s"
        finally:
            running.discard(process)
    return None if status == 0 else f"exit status {status}"


def main():
    say = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    say.add_argument("--build", default=str(root / "build" / "test"))
    say.add_argument("-R", metavar="REGEX", default=".", help="tests, as ctest's -R")
    say.add_argument("--runs", type=int, default=200, help="of each test")
    say.add_argument("--least", type=int, default=20, help="runs, however long they take")
    say.add_argument("--seconds", type=float, default=600, help="for a test, beyond which it has --least runs")
    say.add_argument("--limit", type=float, default=900, help="seconds of one run")
    say.add_argument("--at-once", type=int, default=3 * cores + 1, help="copies of a test")
    say.add_argument("--delays", action="store_true", help="threads sleep now and then at a mutex")
    how = say.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    tests = list(tests_of(how.build, how.R))
    if not tests:
        sys.exit(f"{how.build} has no such test of the label timing: scripts/test.sh builds them")
    failed = False
    logs = tempfile.mkdtemp(prefix="opd-load-")
    base = {"RC_PARAMS": "seed=20250601", **os.environ}
    if how.delays:
        base["LD_PRELOAD"] = f"{logs}/delays.so"
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", base["LD_PRELOAD"],
                        root / "tests" / "support" / "delays.c"], check=True)
    print(f"{how.at_once} copies at once, {cores} cores{', with delays' if how.delays else ''}")
    print(f"{'test':<40}{'runs':>6}{'s a run':>9}  outcome")
    for name, command, folder, environment in tests:
        begun = time.monotonic()

        def one(i):
            if i >= how.least and time.monotonic() - begun > how.seconds:
                return None
            start = time.monotonic()
            log = f"{logs}/{name}.{i}"
            bad = run(command, folder, {**base, **environment, "OPD_DELAYS": str(i + 1)}, how.limit, log)
            if not bad:
                os.remove(log)
            return time.monotonic() - start, bad and f"{bad}: {log}"

        pool = concurrent.futures.ThreadPoolExecutor(how.at_once)
        try:
            ran = [r for r in pool.map(one, range(how.runs)) if r]
        except BaseException:  # it is told to stop: so are they
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(running):
                os.killpg(process.pid, signal.SIGKILL)
            raise
        finally:
            pool.shutdown()
        bad = [why for _, why in ran if why]
        failed = failed or bool(bad)
        print(f"{name:<40}{len(ran):>6}{sum(s for s, _ in ran) / len(ran):>9.2f}  "
              f"{'passed' if not bad else f'{len(bad)} FAILED'}", *bad, sep="\n    ", flush=True)
    if not failed:
        shutil.rmtree(logs)
    sys.exit(failed)


if __name__ == "__main__":
    main()
