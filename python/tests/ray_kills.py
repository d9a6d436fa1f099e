# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Kills actors of a run on Ray at random, and checks what was learnt. From python/, with ray:

python3 -m tests.ray_kills                 thirty kills -9
python3 -m tests.ray_kills --full          two hundred
python3 -m tests.ray_kills --throughput    no kills: how many sequences a second go through; at least a thousand must

Rollout workers, teachers, the learner and the scheduler's actor are killed; now and then it is the run's own process,
and another goes on from its checkpoint. Then the run is closed, and must end by itself. Along the line of weights that
ends in the last, each follows from the one before, every sequence was learnt from exactly once, none was given up, and
none was staler than tau. All that the scheduler's actors decided is what one decides that nothing happens to.
"""

import argparse
import collections
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time

import ray

import opd.ray
from opd import sched

from . import toy_actors as toy

TAU, BATCH = 2, 8


class Decisions:
    """The scheduler that nothing happens to. A run that goes on from a checkpoint begins it anew."""

    def __init__(self, settings):
        self.settings, self.scheduler, self.events = settings, None, 0

    def __call__(self, events, now, said):
        if self.scheduler is None:
            if said.snapshot and events == [] and said.lives and max(said.lives.values()) > 0:
                self.scheduler = sched.Scheduler.restore(self.settings, said.snapshot)  # it has this batch behind it
                return
            self.scheduler = sched.Scheduler(self.settings)
        actions = []
        for event in events or [sched.TICK]:
            actions += self.scheduler.on(event, now)
            self.events += 1
        assert actions == said.actions, "the scheduler's actor decided otherwise"


def life(folder, address, kills, ends, seed):
    """One process of the run: until so many kills are done; then to its end, or its own."""
    dice = random.Random(seed)
    settings = sched.Settings(batch=BATCH, tau=TAU, policy="edf", teacher_batch=4)
    toy.start_ray(ray, address)
    run = opd.ray.Run(
        settings,
        rollout=opd.ray.Workers(toy.Rollout, (7, 0.002), count=3, slots=4),
        teacher=opd.ray.Workers(toy.Teacher, (0.002,), count=2),
        learner=opd.ray.Workers(toy.Learner, (folder, 0.002)),
        checkpoint=os.path.join(folder, "checkpoint"),
        checkpoint_every=2,
    )
    run.on_told = decisions = Decisions(settings)
    names = [("rollout", 0), ("rollout", 1), ("rollout", 2), ("teacher", 0), ("teacher", 1), ("learner", 0)]
    names.append(("scheduler", 0))
    consumed, at, killed, over = [], time.monotonic() + 0.5, 0, False
    with open(os.path.join(folder, "kills"), "a", buffering=1) as log:
        for step in run:
            consumed += [c.ticket.sample for c in step.consumed]
            if over or time.monotonic() < at:
                continue
            if killed < kills:
                victim = dice.choice(names)
                try:
                    os.kill(run.processes()[victim][0], signal.SIGKILL)
                    killed += 1
                    log.write(victim[0] + "\n")
                except (KeyError, ProcessLookupError):  # it is dead
                    pass
                at = time.monotonic() + dice.expovariate(5)
                continue
            over = True
            if ends:
                run.close()
            else:
                log.write("run\n")
                threading.Timer(dice.uniform(0, 0.5), os.kill, (os.getpid(), signal.SIGKILL)).start()
    assert len(consumed) == len(set(consumed)), "a step consumed what another had"
    assert not run.desk.given_up, run.desk.given_up
    found = {"events": decisions.events, "last": run.state()}
    print("RESULT " + json.dumps(found), flush=True)


def kills(count, seed):
    dice, done, lives, began = random.Random(seed), 0, 0, time.monotonic()
    toy.start_ray(ray)
    address = ray.get_runtime_context().gcs_address
    with tempfile.TemporaryDirectory(prefix="opd-ray-") as folder:
        while True:
            lives += 1
            some = dice.randint(8, 40) if lives > 1 else dice.randint(2, 8)
            ends = done + some + 8 >= count
            some = count - done if ends else some
            words = ["--life", folder, "--address", address, "--kills", str(some), "--seed", str(seed + lives)]
            words = [sys.executable, "-m", "tests.ray_kills", *words, *["--ends"][: int(ends)]]
            child = subprocess.run(words, stdout=subprocess.PIPE, text=True, timeout=1200)
            if ends:
                assert child.returncode == 0, child.returncode
                break
            assert child.returncode == -signal.SIGKILL, child.returncode
            done += some
        found = json.loads(next(line for line in child.stdout.splitlines() if line.startswith("RESULT "))[7:])
        with open(os.path.join(folder, "kills")) as file:
            killed = collections.Counter(file.read().split())
        steps, seen, largest = toy.check_line(folder, found["last"], BATCH, TAU)
        assert seen == set(range(len(seen))), "a sequence was left out"
    assert sum(killed.values()) == count + lives - 1
    print(f"{sum(killed.values())} kills: {dict(killed)}; the last of {lives} lives of the run decided")
    print(f"{found['events']} events as without any;")
    print(f"{steps} steps, {len(seen)} sequences, each learnt from once along the line, lag at most {largest}")
    print(f"{time.monotonic() - began:.0f} s")
    assert steps >= max(5, count // 10), "too little was learnt for the kills to have met anything"
    ray.shutdown()


def cpu_of(pid):
    """Seconds that a process has had."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def throughput(sequences, batch, workers):
    toy.start_ray(ray)
    run = opd.ray.Run(
        sched.Settings(batch=batch, tau=4, sequences=sequences, teacher_batch=64),
        rollout=opd.ray.Workers(toy.Rollout, (1,), count=workers, slots=2 * batch // workers),
        teacher=opd.ray.Workers(toy.Teacher, slots=4),
        learner=opd.ray.Workers(toy.Learner),
    )
    told = [0, 0]

    def count(events, now, said):
        told[0], told[1] = told[0] + 1, told[1] + len(events)

    run.on_told = count
    began, last = (0.0, {}), sequences // batch - 1
    for step in run:
        if step.version in (4, last):  # all actors are up; they are up still
            before, began = began, (time.monotonic(), {w: cpu_of(p) for w, (p, _) in run.processes().items()})
            began[1][("run", 0)] = time.process_time()
    took, n = began[0] - before[0], (last - 4) * batch
    cpu = {w: 1e6 * (c - before[1][w]) / n for w, c in began[1].items()}
    print(
        f"{workers} rollout workers, batches of {batch}: {n / took:,.0f} sequences a second. CPU time of each: "
        f"{cpu[('run', 0)]:.0f} µs in the run's process, {cpu[('scheduler', 0)]:.0f} in the scheduler's actor, "
        f"{sum(cpu.values()):.0f} in all. {told[1] / told[0]:.1f} events a call of the scheduler"
    )
    ray.shutdown()
    return n / took


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="two hundred kills")
    parser.add_argument("--kills", type=int, help="that many")
    parser.add_argument("--throughput", action="store_true", help="only that")
    for name in ("--life", "--address"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--ends", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=1)
    how = parser.parse_args()
    if how.life:
        life(how.life, how.address, how.kills, how.ends, how.seed)
    elif how.throughput:
        assert throughput(16384, 256, 4) >= 1000, "less than a thousand sequences a second"
    else:
        kills(how.kills or (200 if how.full else 30), how.seed)


if __name__ == "__main__":
    main()
