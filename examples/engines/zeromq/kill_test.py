#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Kills processes of a run at random, and checks what was learnt.

kill_test.py --programs FOLDER             about ten kills, a few seconds
kill_test.py --programs FOLDER --full      a thousand
kill_test.py --programs FOLDER --keys      no kills: who has no key is not let in; without keys, loopback alone
kill_test.py --programs FOLDER --ledger    none: tokens that rules discard and faults lose are in the run's ledger

The scheduler, three rollout workers, two teachers and the learner run under a supervisor that starts again what dies,
as systemd or Slurm would. All of them are killed with -9, stopped for a while (SIGSTOP), a fourth rollout worker
joins and leaves, and files of responses and scores are removed. Then the run is closed, and must end by itself. What
is checked, from the files alone: along the line of weights that ends in the last, each hash follows from the one
before and from what the batch was, every sequence was learnt from exactly once, none was given up, and none was staler
than tau. The ledger has each token in one figure, and one process decides on the recorded events what the scheduler's
processes decided.
"""
import argparse
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

MASK = (1 << 64) - 1
TAU, BATCH = 2, 8


def mix(a, b):
    x = (a * 0x9E3779B97F4A7C15 + b + 0x632BE59BD9B4E019) & MASK
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & MASK
    return x ^ x >> 31


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Process:
    """A program that is started again when it ends, unless it ended well."""

    def __init__(self, name, words, log):
        self.name, self.words, self.log = name, words, log
        self.child, self.again, self.stopped_until, self.over = None, 0.0, 0.0, False
        self.start()

    def start(self):
        self.child = subprocess.Popen(self.words, stdout=self.log, stderr=self.log)

    def watch(self, now):
        if self.stopped_until and now >= self.stopped_until:
            self.stopped_until = 0.0
            self.send(signal.SIGCONT)
        if self.over:
            return
        code = self.child.poll()
        if code is None:
            return
        if code == 3:
            raise AssertionError(f"{self.name} found a broken promise")
        if code == 0:
            self.over = True
        elif not self.again:
            self.again = now + 0.05
        elif now >= self.again:
            self.again = 0.0
            self.start()

    def send(self, what):
        if self.child.poll() is None:
            self.child.send_signal(what)


class Run:
    def __init__(self, programs, folder, extra=(), sequences=0, schedule=None):
        self.programs, self.folder, self.extra = programs, folder, list(extra)
        self.schedule = schedule
        if schedule is None:
            self.schedule = ["--sequences", str(sequences), "--batch", str(BATCH), "--tau", str(TAU)]
            self.schedule += ["--teacher-batch", "4"]
        self.endpoint = f"tcp://127.0.0.1:{free_port()}"
        self.log = open(os.path.join(folder, "log"), "w")
        self.all = {}

    def add(self, name, extra=None):
        role, _, number = name.partition(" ")
        words = [os.path.join(self.programs, "opd-" + role), "--endpoint", self.endpoint, "--folder", self.folder]
        words += ["--silence", "1"] + (self.extra if extra is None else list(extra))
        if role == "schedule":
            words += self.schedule + ["--record"]
        if number:
            words += ["--number", number]
        self.all[name] = Process(name, words, self.log)

    def watch(self, until):
        """Until a time, or until everything has ended."""
        while time.monotonic() < until:
            now = time.monotonic()
            for p in self.all.values():
                p.watch(now)
            if all(p.over for p in self.all.values()):
                return True
            time.sleep(0.01)
        return False

    def replay(self):
        """Decides in one process what the scheduler's processes decided on the same events, and compares."""
        words = [os.path.join(self.programs, "opd-schedule"), "--folder", self.folder, "--replay"]
        done = subprocess.run(words + self.extra + self.schedule, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def ledger(self):
        """Where the tokens went: each in one figure."""
        with open(os.path.join(self.folder, "ledger.json")) as f:
            t = json.load(f)
        ends = t["learnt"] + t["discarded"] + t["lost"] + t["outstanding"]
        assert t["brought"] + t["generated"] == ends, f"a token is in no figure, or in two: {t}"
        return t

    def end(self):
        for p in self.all.values():
            if p.child.poll() is None:
                p.child.kill()
                p.child.wait()
        self.log.close()


def check_line(folder, tau=TAU, hashes=True):
    """`hashes`: the weights are those of the task that proves what was learnt."""
    with open(os.path.join(folder, "finished")) as f:
        job, consumed, failed = (int(x) for x in f.read().split())
    assert failed == 0, f"{failed} sequences were given up"
    batches = []
    while job != 0:
        batch = {"sequences": []}
        with open(os.path.join(folder, "line", str(job))) as f:
            for line in f:
                word, *numbers = line.split()
                if word == "sequence":
                    batch["sequences"].append(tuple(int(x) for x in numbers))
                else:
                    batch[word] = int(numbers[0])
        assert batch["from"] < job, "a line that does not end"
        batches.append(batch)
        job = batch["from"]
    batches.reverse()
    value, samples, largest = 1, [], 0
    for version, batch in enumerate(batches, 1):
        assert batch["version"] == version, f"version {batch['version']} where {version} should be"
        for sample, start, scored in batch["sequences"]:
            value = mix(mix(value, sample), scored)
            samples.append(sample)
            largest = max(largest, version - 1 - start)
        assert not hashes or value == batch["hash"], f"the weights of version {version} do not follow from those before"
    assert len(samples) == consumed, f"{consumed} consumed, {len(samples)} learnt from"
    assert sorted(samples) == list(range(consumed)), "a sequence was learnt from twice, or never"
    assert largest <= tau, f"a sequence was {largest} versions old"
    return len(batches), consumed, largest


def lose(folder, dice):
    """Removes a response or a score, as a store that evicts it. Returns how many: 0 where there was none."""
    try:
        of = os.path.join(folder, "payload", dice.choice(sorted(os.listdir(os.path.join(folder, "payload")))))
        os.unlink(os.path.join(of, dice.choice(sorted(os.listdir(of)))))
        return 1
    except (IndexError, FileNotFoundError):  # the learner was quicker
        return 0


def kills(programs, folder, count, seed):
    dice = random.Random(seed)
    run = Run(programs, folder, ["--message-mib", "4"])
    names = ["schedule", "rollout 0", "rollout 1", "rollout 2", "teacher 0", "teacher 1", "learn"]
    killed, stopped, joined, lost = dict.fromkeys(names, 0), 0, 0, 0
    try:
        for name in names:
            run.add(name)
        run.watch(time.monotonic() + 0.5)
        for n in range(count):
            victim = run.all[dice.choice(names)]
            victim.send(signal.SIGKILL)
            killed[victim.name] += 1
            lost += sum(lose(folder, dice) for _ in range(3))
            if dice.random() < 0.15:
                other = run.all[dice.choice(names)]
                if not other.stopped_until and other.child.poll() is None:
                    other.send(signal.SIGSTOP)
                    other.stopped_until = time.monotonic() + dice.uniform(0.1, 2.5)
                    stopped += 1
            if n % 8 == 3:
                if "rollout 3" in run.all and not run.all["rollout 3"].over:
                    run.all["rollout 3"].send(signal.SIGTERM)
                else:
                    run.add("rollout 3")
                    joined += 1
            run.watch(time.monotonic() + dice.expovariate(4 if count < 100 else 8))
        # nothing goes wrong any more: the run is closed, and ends by itself
        if "rollout 3" in run.all:
            run.all["rollout 3"].send(signal.SIGTERM)
        run.watch(time.monotonic() + 3)
        run.all["schedule"].send(signal.SIGUSR1)
        assert run.watch(time.monotonic() + 60), "the run does not end: " + ", ".join(
            p.name for p in run.all.values() if not p.over
        )
    finally:
        run.end()
    steps, consumed, largest = check_line(folder)
    tokens = run.ledger()
    assert tokens["learnt"] == sum(1 + s % 7 for s in range(consumed)), tokens
    assert tokens["lost"] > 0 or count < 100, tokens
    print(run.replay())
    print(f"{count} kills ({', '.join(f'{v} {k}' for k, v in killed.items())}), {stopped} stops, {joined} joins,")
    print(f"{lost} payloads removed:")
    print(f"{steps} steps, {consumed} sequences, each learnt from once along the line, lag at most {largest}")
    assert steps >= max(5, count // 20), "too little was learnt for the kills to have met anything"


def ledger(programs, folder):
    """What a slow worker draws gets too old, and begins anew; responses and scores are removed."""
    dice = random.Random(1)
    schedule = ["--sequences", "800", "--batch", str(BATCH), "--tau", "1", "--policy", "retry"]
    run = Run(programs, folder, schedule=schedule)
    try:
        for name in ("schedule", "rollout 0", "teacher 0", "learn"):
            run.add(name)
        run.add("rollout 1", ["--quantum", "0.1"])
        removed = 0
        while removed < 40:
            assert not run.watch(time.monotonic() + 0.02), "the run was over too soon for the test"
            removed += lose(folder, dice)
        assert run.watch(time.monotonic() + 120), "the run does not end"
    finally:
        run.end()
    steps, consumed, _ = check_line(folder, tau=1)
    tokens = run.ledger()
    assert consumed == 800 and tokens["outstanding"] == 0, tokens
    assert tokens["learnt"] == sum(1 + s % 7 for s in range(consumed)), tokens
    for end in ("discarded", "lost", "regenerated", "idle_seconds", "busy_seconds"):
        assert tokens[end] > 0, f"{end}: {tokens}"
    with open(os.path.join(folder, "ledger")) as f:
        print(f.read() + run.replay())


def keys(programs, folder):
    schedule = os.path.join(programs, "opd-schedule")
    words = [schedule, "--endpoint", "tcp://0.0.0.0:1", "--folder", folder]
    refused = subprocess.run(words, capture_output=True, text=True)
    assert refused.returncode == 1 and "keys are needed" in refused.stderr, refused.stderr
    ours, theirs = os.path.join(folder, "keys"), os.path.join(folder, "other")
    for made in (ours, theirs):
        subprocess.run([schedule, "--make-keys", made], check=True)
    assert os.stat(os.path.join(ours, "worker.key")).st_mode & 0o077 == 0, "a secret that others can read"
    shutil.copy(os.path.join(ours, "scheduler.pub"), theirs)  # they know whom they speak to, and are not known
    run = Run(programs, folder, ["--keys", ours], sequences=64)
    try:
        run.add("schedule")
        run.add("teacher 0")
        run.add("learn")
        run.add("rollout 0", ["--keys", theirs])
        run.add("rollout 1", [])
        run.watch(time.monotonic() + 2)
        assert not os.listdir(os.path.join(folder, "payload")), "who has no key was given work"
        for name in ("rollout 0", "rollout 1"):
            run.all.pop(name).child.kill()
        run.add("rollout 0")
        assert run.watch(time.monotonic() + 60), "the run does not end"
    finally:
        run.end()
    steps, consumed, _ = check_line(folder)
    assert consumed >= 64
    print(f"{steps} steps by those who have keys; who has none was not let in")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", required=True, help="folder of the built programs")
    parser.add_argument("--full", action="store_true", help="a thousand kills")
    parser.add_argument("--kills", type=int, help="that many")
    parser.add_argument("--keys", action="store_true", help="only what concerns keys")
    parser.add_argument("--ledger", action="store_true", help="only what concerns the ledger")
    parser.add_argument("--seed", type=int, default=1)
    how = parser.parse_args()
    folder = tempfile.mkdtemp(prefix="opd-zeromq-")
    try:
        if how.keys:
            keys(how.programs, folder)
        elif how.ledger:
            ledger(how.programs, folder)
        else:
            kills(how.programs, folder, how.kills or (1000 if how.full else 10), how.seed)
    except BaseException:
        with open(os.path.join(folder, "log")) as f:
            sys.stdout.write("".join(f.readlines()[-60:]))
        print(f"seed {how.seed}; the run's files are kept in {folder}")
        raise
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
