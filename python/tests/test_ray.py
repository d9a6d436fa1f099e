# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""opd.ray on a Ray of its own: what the engine promises the loop (tests/test_actors.py has the loop)."""

import dataclasses
import importlib.util
import logging
import os
import tempfile
import time
import unittest

import opd
from opd import sched

from . import toy_actors as toy

if importlib.util.find_spec("ray") is None:
    raise unittest.SkipTest("ray is not installed")
import ray

import opd.ray


class OnceEach:
    """Does something the first time that a file of this name is made."""

    def __init__(self, folder):
        self.folder = folder

    def first(self, name):
        try:
            os.close(os.open(os.path.join(self.folder, "once " + name), os.O_CREAT | os.O_EXCL))
            return True
        except FileExistsError:
            return False


class Rollout(toy.Rollout):
    def __init__(self, once):
        super().__init__()
        self.once = once

    def install(self, weights, version):
        if version == 2 and self.once.first("install"):
            raise RuntimeError("an install that throws")
        super().install(weights, version)

    def step(self):
        if self.version == 3 and self.once.first("step"):
            raise RuntimeError("a step that throws")
        if self.version == 4 and self.once.first("exit"):
            os._exit(1)
        return super().step()


class Teacher(toy.Teacher):
    def __init__(self, once):
        super().__init__()
        self.once = once

    def score(self, payloads):
        if self.once.first("score"):
            raise RuntimeError("a score that throws")
        return super().score(payloads)


class Learner(toy.Learner):
    def __init__(self, folder, once):
        super().__init__(folder)
        self.once = once

    def train(self, items, version):
        super().train(items, version)
        if version == 5 and self.once.first("train"):
            raise RuntimeError("an update that throws at its end")
        if version == 7 and self.once.first("exit of the learner"):
            os._exit(1)


class Heavy(toy.Rollout):
    """Its payloads stay in the store of its node."""

    def step(self):
        return [(ticket, (tokens, bytes(200_000)), versions) for ticket, tokens, versions in super().step()]


class TeacherOfHeavy(toy.Teacher):
    def score(self, payloads):
        return super().score([tokens for tokens, _ in payloads])


class LearnerOfHeavy(toy.Learner):
    def train(self, items, version):
        super().train([i._replace(payload=i.payload[0]) for i in items], version)


class Owner:
    def make(self):
        return [ray.put([5])]


SETTINGS = sched.Settings(batch=4, tau=2, policy="edf", sequences=60, teacher_batch=3, learner_attempts=3)


class OnRay(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        toy.start_ray(ray)

    @classmethod
    def tearDownClass(cls):
        ray.shutdown()

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def run_of(self, settings=SETTINGS, **more):
        stages = {
            "rollout": opd.ray.Workers(toy.Rollout, count=2, slots=3),
            "teacher": opd.ray.Workers(toy.Teacher),
            "learner": opd.ray.Workers(toy.Learner, (self.folder,)),
        }
        return opd.ray.Run(settings, **(stages | more))

    def checked(self, run, consumed, sequences=60):
        _, seen, _ = toy.check_line(self.folder, run.state(), 4, 2)
        self.assertEqual((seen, sorted(consumed)), (set(range(sequences)), list(range(sequences))))
        self.assertEqual(run.weights(), run.state())

    def test_what_throws_and_what_dies(self):
        """Each stage throws once, a rollout worker and the learner die once, in a call."""
        once = OnceEach(self.folder)
        run = self.run_of(
            rollout=opd.ray.Workers(Rollout, (once,), count=2, slots=3),
            teacher=opd.ray.Workers(Teacher, (once,)),
            learner=opd.ray.Workers(Learner, (self.folder, once)),
        )
        self.checked(run, [c.ticket.sample for s in run for c in s.consumed])
        for name in ("install", "step", "exit", "score", "train", "exit of the learner"):
            self.assertFalse(once.first(name), name)
        self.assertEqual(dict(run.desk.deaths), {"rollout": 2, "learner": 1})
        lives = {w: r.life for w, r in run.desk.workers.items()}
        self.assertEqual(sum(n for (stage, _), n in lives.items() if stage == "rollout"), 4)
        self.assertEqual((lives[("teacher", 0)], lives[("learner", 0)]), (1, 2))

    def test_the_actors_are_gone_and_the_weights_are_not(self):
        run = self.run_of(dataclasses.replace(SETTINGS, sequences=8))
        pids = {}
        for _ in run:
            pids |= run.processes()
        self.assertEqual(sorted(w[0] for w in pids), ["learner", "rollout", "rollout", "scheduler", "teacher"])
        self.assertEqual(len({p for p, _ in pids.values()}), 5)
        self.assertNotIn(os.getpid(), [p for p, _ in pids.values()])
        self.checked(run, range(8), 8)

    def test_a_lost_object_is_lost(self):
        owner = ray.remote(Owner).remote()
        (name,) = ray.get(owner.make.remote())
        self.assertEqual(opd.ray._fetch(name), [5])
        (other,) = ray.get(owner.make.remote())
        ray.kill(owner)
        with self.assertRaises(opd._actors.Lost):
            while True:  # until the store has heard of it
                opd.ray._fetch(other)
                time.sleep(0.1)

    def test_a_checkpoint(self):
        path, consumed = os.path.join(self.folder, "checkpoint"), []
        for step in self.run_of(checkpoint=path):
            consumed += [c.ticket.sample for c in step.consumed]
            if step.version == 6:
                break
        run = self.run_of(checkpoint=path)
        for step in run:
            consumed = consumed[: 4 * (step.version - 1)] + [c.ticket.sample for c in step.consumed]
        self.checked(run, consumed)

    def test_what_is_refused(self):
        for name in ("max_restarts", "max_task_retries", "max_concurrency"):
            with self.assertRaisesRegex(opd.InvalidInput, f"teacher.options.*{name}"):
                self.run_of(teacher=opd.ray.Workers(toy.Teacher, options={name: 3}))
            with self.assertRaisesRegex(opd.InvalidInput, f"scheduler.options.*{name}"):
                self.run_of(scheduler={name: 3})


class OnNodes(unittest.TestCase):
    """A cluster of Ray on this machine: its head has the learner and the teacher, each node one rollout worker."""

    def test_a_node_is_killed_and_another_joins(self):
        from ray.cluster_utils import Cluster

        toy.prepare_ray()
        quick = {f"health_check_{k}": v for k, v in (("initial_delay_ms", 0), ("period_ms", 500), ("timeout_ms", 2000))}
        head = {"num_cpus": 4, "resources": {"head": 2, "rollout": 1}, "_system_config": quick}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        self.addCleanup(cluster.shutdown)
        other = cluster.add_node(num_cpus=1, resources={"rollout": 1})
        ray.init(address=cluster.address, logging_level=logging.ERROR, log_to_driver=False)
        self.addCleanup(ray.shutdown)
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        at_head = {"resources": {"head": 1}, "num_cpus": 0}
        run = opd.ray.Run(
            dataclasses.replace(SETTINGS, sequences=160, rollout_attempts=1, teacher_attempts=1, learner_attempts=1),
            rollout=opd.ray.Workers(
                Heavy, (3, 0.01), count=2, slots=6, options={"resources": {"rollout": 1}, "num_cpus": 0}
            ),
            teacher=opd.ray.Workers(TeacherOfHeavy, (0.15,), options=at_head),  # responses wait for it
            learner=opd.ray.Workers(LearnerOfHeavy, (folder.name,), options=at_head),
        )
        consumed, nodes, killed = [], 2, None
        for step in run:
            consumed += [c.ticket.sample for c in step.consumed]
            both = all(run.desk.workers[("rollout", n)].up for n in (0, 1))
            if killed is None and step.version >= 5 and both:
                cluster.remove_node(other, allow_graceful=False)
                killed = step.version
            elif nodes == 2 and killed is not None and run.desk.deaths["rollout"] > 0 and step.version > killed + 5:
                cluster.add_node(num_cpus=1, resources={"rollout": 1})
                nodes = 3
        self.assertEqual((nodes, sorted(consumed)), (3, list(range(160))))
        _, seen, _ = toy.check_line(folder.name, run.state(), 4, 2)
        self.assertEqual(seen, set(range(160)))
        self.assertGreater(run.desk.lost_payloads, 0)
        self.assertEqual((dict(run.desk.deaths), dict(run.desk.given_up)), ({"rollout": 1}, {}))


if __name__ == "__main__":
    unittest.main()
