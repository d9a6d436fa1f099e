#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The reference trainer's stages as processes, beside the trainer in one process.

trainer_test.py --programs FOLDER --trainer opd-train

1. Under sync, with one worker of each kind, student and optimizer end with the bits of opd-train's; also where learner,
   rollout worker and teacher are killed on the way.
2. Under async, with two rollout workers, each process is killed with -9 while the run goes on. The run ends by itself,
   every sequence was learnt from once along the line of weights, none staler than tau, and the student's KL to the
   teacher on held-out prompts is lower than before.
"""
import argparse
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time

from kill_test import Run, check_line

COMMON = ["--preset=quick", "--quiet", "--threads=1", "--eval-every=0", "--eval-prompts=24", "--prompts=6"]
COMMON += ["--answers=2"]
TAU = 2


def trainer(how, words):
    done = subprocess.run([how.trainer] + words, capture_output=True, text=True)
    assert done.returncode == 0, f"opd-train {' '.join(words)}: {done.stderr}"
    return done.stdout


def sections(path):
    """Of a checkpoint: name to bytes."""
    with open(path, "rb") as f:
        data = f.read()
    at, found = 12, {}
    while at < len(data) - 32:
        (size,) = struct.unpack_from("<I", data, at)
        name = data[at + 4 : at + 4 + size].decode()
        (length,) = struct.unpack_from("<Q", data, at + 4 + size)
        at += 12 + size + length
        found[name] = data[at - length : at]
    return found


def settings(how, folder, name, words):
    path = os.path.join(folder, name + ".json")
    start = os.path.join(folder, "start", "checkpoints", "student.ckpt")
    with open(path, "w") as f:
        f.write(trainer(how, COMMON + ["--start-from=" + start, "--print-config"] + words))
    return path


def engine(how, folder, name, config, rollouts, kill=()):
    """A run as processes; of `kill`, one is killed every few steps. Returns its folder, and its student's as opd-train
    has one."""
    of = os.path.join(folder, name)
    os.makedirs(of)
    run = Run(how.programs, of, ["--config", config], schedule=[])
    try:
        for worker in ["schedule", "teacher 0", "learn"] + [f"rollout {n}" for n in range(rollouts)]:
            run.add(worker)
        for n, victim in enumerate(kill):
            until = time.monotonic() + 60
            while not os.path.isdir(os.path.join(of, "line")) or len(os.listdir(os.path.join(of, "line"))) < 3 * n + 3:
                assert time.monotonic() < until, f"no step for a minute, before {victim} was to be killed"
                assert not run.watch(time.monotonic() + 0.02), "the run ended before all were killed"
            run.all[victim].send(signal.SIGKILL)
        assert run.watch(time.monotonic() + 120), "the run does not end: " + ", ".join(
            p.name for p in run.all.values() if not p.over
        )
    finally:
        run.end()
    run.ledger()
    print(run.replay())
    student = os.path.join(folder, name + "-student")
    words = [os.path.join(how.programs, "opd-learn"), "--config", config, "--folder", of]
    subprocess.run(words + ["--write-student", os.path.join(student, "checkpoints", "latest.ckpt")], check=True)
    return of, student


def same_as_one_process(how, folder):
    config = settings(how, folder, "sync", ["--schedule=sync", "--steps=12", "--seed=3"])
    alone = os.path.join(folder, "alone")
    trainer(how, ["--config=" + config, "--run-dir=" + alone])
    one = sections(os.path.join(alone, "checkpoints", "distill.ckpt"))
    start = sections(os.path.join(folder, "start", "checkpoints", "student.ckpt"))
    compared = [name for name in one if name.startswith("student")]
    assert len(compared) == 4 and one["student.weights"] != start["student.weights"], "nothing was learnt"
    for name, kill in (("sync", []), ("sync-killed", ["learn", "rollout 0", "teacher 0"])):
        _, student = engine(how, folder, name, config, 1, kill)
        two = sections(os.path.join(student, "checkpoints", "latest.ckpt"))
        for section in compared:
            assert one[section] == two[section], f"{name}: {section} differs from that of one process"
        print(f"sync, killed {', '.join(kill) or 'nobody'}: {', '.join(compared)} have the bits of opd-train's")


def killed(how, folder):
    words = ["--schedule=async", f"--tau={TAU}", "--steps=24", "--rate=2e-3"]
    config = settings(how, folder, "async", words)
    kill = ["rollout 0", "teacher 0", "learn", "schedule", "rollout 1", "teacher 0"]
    of, student = engine(how, folder, "async", config, 2, kill)
    steps, consumed, largest = check_line(of, TAU, hashes=False)
    assert steps == 24, f"{steps} steps"
    trainer(how, ["--config=" + config, "--run-dir=" + student, "--resume"])
    with open(os.path.join(student, "report.json")) as f:
        report = json.load(f)
    before, after = (report["kl_to_teacher"][who] for who in ("before", "after"))
    assert after < before, f"KL to the teacher {before} before, {after} after"
    print(f"async, killed {', '.join(kill)}: {steps} steps, {consumed} sequences, each learnt from once, lag at most")
    print(f"{largest}; held-out KL to the teacher {before:.4f} before, {after:.4f} after")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", required=True, help="folder of the built programs")
    parser.add_argument("--trainer", required=True, help="the program opd-train")
    how = parser.parse_args()
    folder = tempfile.mkdtemp(prefix="opd-zeromq-")
    try:
        start = ["--run-dir=" + os.path.join(folder, "start"), "--teacher-steps=150", "--student-max-steps=20"]
        trainer(how, COMMON + start + ["--steps=0"])
        same_as_one_process(how, folder)
        killed(how, folder)
    except BaseException:
        for name in ("sync", "sync-killed", "async"):
            path = os.path.join(folder, name, "log")
            if os.path.exists(path):
                with open(path) as f:
                    sys.stdout.write("".join(f.readlines()[-40:]))
        print(f"the run's files are kept in {folder}")
        raise
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
