# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""self_test.py <repository> <work folder>: scripts/bench_pairs.py and scripts/checkperf.sh call a slower program
slower, and no other.

The programs are fakes: each row's time is the number of operations that the program did, so no load of this machine
changes it, times a noise that the test chooses."""
import os
import pathlib
import shutil
import subprocess
import sys

root, work = pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(sys.argv[2]).resolve()
shutil.rmtree(work, ignore_errors=True)
work.mkdir(parents=True)

FAKE = r"""#!/usr/bin/env bash
# a fake benchmark: rows=(name:operations...), noise in thousandths by turns
rows=(@ROWS@) noise=(@NOISE@)
for a in "$@"; do case $a in --benchmark_out=*) out=${a#*=} ;; esac; done
read -r turn 2>/dev/null <"$0.turn" || turn=0
echo $((turn + 1)) >"$0.turn"
json=
for row in "${rows[@]}"; do
    done=0
    for ((i = 0; i < ${row#*:}; ++i)); do ((++done)); done
    aggregate=
    case $row in *_*) aggregate="\"aggregate_name\":\"${row##*_}" aggregate="${aggregate%:*}\"," ;; esac
    json+="${json:+,}{\"name\":\"${row%:*}\",$aggregate\"@TIME@\":$((done * (1000 + ${noise[turn % ${#noise[@]}]})))}"
done
echo "{\"benchmarks\":[$json]}" >"$out"
"""


def fake(name, rows, noise="0", time="real_time"):
    path = work / name
    path.write_text(FAKE.replace("@ROWS@", rows).replace("@NOISE@", noise).replace("@TIME@", time))
    path.chmod(0o755)
    path.with_suffix(".turn").unlink(missing_ok=True)
    return path


def expect(status, command, words, but=(), **more):
    answer = subprocess.run([str(c) for c in command], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **more)
    text = answer.stdout
    assert answer.returncode == status and all(w in text for w in words) and not any(w in text for w in but), \
        f"{command}: wanted {status}, {words}, none of {but}; got {answer.returncode}:\n{text}"


def pairs(status, old, new, words, *options, but=()):
    expect(status, [sys.executable, root / "scripts/bench_pairs.py", old, new, "--rounds", "3", *options], words, but)


old = fake("old", "a:100 b:50")
pairs(0, old, old, ["a  new/old  1.000 (1.000 to 1.000)  noise 0.000\n", "0 of 2 rows slower"])
slow_b = fake("slow_b", "a:100 b:54")
pairs(1, old, slow_b, ["b  new/old  1.080 (1.080 to 1.080)  noise 0.000  SLOWER", "1 of 2 rows slower by more than 5 %"])
pairs(0, old, slow_b, ["b  new/old  1.080", "0 of 2"], "--slower", "9", but=["SLOWER"])
pairs(0, slow_b, old, ["b  new/old  0.926", "0 of 2"], but=["SLOWER"])
pairs(0, old, fake("by_4", "a:104 b:50"), ["a  new/old  1.040", "0 of 2"], but=["SLOWER"])

# a machine whose same program differs by 6 % hides 10 %, but not 20 %; one run that was disturbed hides nothing
noisy = "0 60"
pairs(0, fake("noisy", "a:100 b:50", noisy), fake("by_10", "a:100 b:55"), ["b  new/old  1.068", "noise 0.06", "0 of 2"],
      but=["SLOWER"])
pairs(1, fake("noisy", "a:100 b:50", noisy), fake("by_20", "a:100 b:60"), ["SLOWER", "1 of 2"])
pairs(1, fake("once", "a:100 b:50", "0 900 0 0 0 0"), slow_b, ["SLOWER", "1 of 2"])
# a clock that slows down from run to run
pairs(0, fake("noisy", "a:100 b:50", noisy), fake("between", "a:100 b:50", "30"), ["a  new/old  1.000", "b  new/old  1.000"])
# what looks slow in the first rounds alone is not
pairs(0, old, fake("at_first", "a:100 b:50", "80 80 80 0 0 0"), ["2 rows look slower", "0 of 2"], but=["SLOWER"])

pairs(0, old, fake("more", "a:100 c:10"), ["b  of old alone", "c  of new alone", "0 of 1"])
pairs(0, fake("repeated", "a_median:100 a_cv:10"), fake("steady", "a_median:100 a_cv:20"), ["a_median", "0 of 1"], but=["a_cv"])
pairs(2, old, fake("other", "c:10"), ["no row in common"])
pairs(2, old, fake("unknown", "a:100", time="seconds"), ["no row in common"])
pairs(2, old, work / "nowhere", ["error:", "nowhere"])
broken = fake("broken", "a:100")
broken.write_text("#!/bin/sh\nexit 3\n")
pairs(2, old, broken, ["error:", "exit status 3"])
pairs(1, fake("l2", "a:100", time="l2_ns"), fake("l2_slow", "a:108", time="l2_ns"), ["a, in L2", "SLOWER"], "--in-l2")
pairs(2, old, slow_b, ["no row in common"], "--in-l2")
pairs(2, old, old, ["--rounds must be 3 or more"], "--rounds", "2")

# The script, in a repository whose benchmarks are these fakes.
if shutil.which("git"):
    here = work / "repository"
    (here / "scripts").mkdir(parents=True)
    (here / "bench").mkdir()
    for name in ("checkperf.sh", "bench_pairs.py", "setup.sh"):
        shutil.copy(root / "scripts" / name, here / "scripts")
    with open(here / "scripts/setup.sh", "a") as f:
        f.write("\nopd_setup() { :; }\n")  # installs nothing
    (here / "CMakeLists.txt").write_text("""cmake_minimum_required(VERSION 3.20)
project(fake NONE)
add_custom_target(bench_spec COMMAND ${CMAKE_COMMAND} -E copy ${CMAKE_SOURCE_DIR}/bench/bench_spec.cpp bench/bench_spec)
""")
    (here / ".gitignore").write_text("/build/\n")
    environment = dict(os.environ, HOME=str(work), GIT_CONFIG_NOSYSTEM="1", GIT_CEILING_DIRECTORIES=str(work))

    def git(*arguments):
        identity = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "init.defaultBranch=main"]
        subprocess.run(["git", *identity, *arguments], cwd=here, env=environment, check=True, stdout=subprocess.DEVNULL)

    def check(status, words, *options):
        command = ["bash", here / "scripts/checkperf.sh", "--rounds", "3", *options]
        expect(status, command, words, cwd=here, env=environment)

    def commit(rows, subject):
        shutil.copy(fake("bench_spec", rows), here / "bench/bench_spec.cpp")
        if subject:
            git("add", "-A")
            git("commit", "-qm", subject)

    git("init", "-q")
    commit("a:100 b:50", "First")
    commit("a:100 b:54", "Second")
    check(1, ["bench_spec: the working tree over", "(First)", "b  new/old  1.080", "slower: a row of bench_spec"])
    commit("a:100 b:60", None)  # a file that differs from HEAD
    check(1, ["(Second)", "b  new/old  1.111"])
    git("checkout", "-qb", "branch")
    commit("a:100 b:53", "Third")
    commit("a:100 b:55", "Fourth")
    check(0, ["(Second)", "b  new/old  1.019", "no row is slower"], "bench_spec")
    check(1, ["(First)", "b  new/old  1.100"], "--base", "main~1")
    check(0, ["(First)"], "--base", "main~1", "--slower", "11")
    check(1, ["there is no commit main~7"], "--base", "main~7")
    check(1, ["knows no option --bas"], "--bas", "main")
else:
    print("no git: scripts/checkperf.sh is not run")
print("slower programs are found, and no other")
