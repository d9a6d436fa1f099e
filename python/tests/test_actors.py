# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""opd._actors: what opd.ray does, over an engine that has no processes, in virtual time, and kills at random."""

import dataclasses
import itertools
import logging
import math
import os
import pickle
import random
import tempfile
import unittest

import opd
from opd import _actors, sched
from opd._actors import Desk, Loop, Lost, Machine, Outcome, Workers, kind_of
from opd._ledger import Ledger

from . import toy_actors as toy

try:
    sched.c.lib()
except opd.Unsupported as why:
    raise unittest.SkipTest(str(why)) from None


class Killed(Exception):
    pass


def crossed(value):
    """As it comes out of another process."""
    return pickle.loads(pickle.dumps(value))


class Engine:
    """Calls run when they are waited for, those of one actor in order, else in any. `rate`: of calls that kill their
    actor, half of them after they were carried out. `losses`: of objects that can't be had any more."""

    def __init__(self, seed=0, rate=0.0, losses=0.0, errors=0.0):
        self.dice, self.rate, self.losses, self.errors = random.Random(seed), rate, losses, errors
        self.now, self.store, self.actors, self.queues = 0.0, {}, {}, {}
        self.tokens, self.kills, self.closed = itertools.count(), 0, False

    def clock(self):
        return self.now

    def fetch(self, name):
        if name not in self.store:
            raise Lost(name)
        return crossed(self.store[name])

    def put(self, value):
        name = f"object {next(self.tokens)}"
        self.store[name] = crossed(value)
        return name

    get = fetch

    def _enqueue(self, actor, work, names=()):
        token = next(self.tokens)
        self.queues.setdefault(actor, []).append((token, work, names))
        return token

    def _make(self, stage, crew):
        made = type("Quick", (_actors.STAGES[stage],), {"PATIENCE": 0.0, "GATHER": 0.0})
        return made(crossed(crew), self.fetch)

    def begin(self, worker, life, crew):
        actor = self.actors[worker] = (worker, life)
        box = self.queues[actor] = []
        box.append((token := next(self.tokens), lambda: self._made(actor, self._make(worker[0], crew)), ()))
        return token

    def _made(self, actor, stage):
        self.stages = getattr(self, "stages", {})
        self.stages[actor] = stage
        return (1, "here"),

    def ask(self, call):
        actor = self.actors[call.worker]
        names = [f"object {next(self.tokens)}" for _ in range(_actors.RESULTS[call.method] - 1)]
        args = crossed(call.args)
        return self._enqueue(actor, lambda: self.stages[actor].call(call.method, args), names), names

    def end(self, worker):
        if worker in self.actors:
            self._dies(self.actors.pop(worker))

    def open_machine(self, *args):
        self.machine = ("machine", next(self.tokens))
        self.scheduler = None
        self._args = crossed(args)

    def tell(self, method, args):
        args = crossed(args)

        def work():
            if self.scheduler is None:
                self.scheduler = Machine(*self._args)
            return (self.scheduler.call(method, args),)

        return self._enqueue(self.machine, work)

    def end_machine(self):
        self._dies(self.machine)

    def _dies(self, actor):
        self.queues[actor] = [(token, None, ()) for token, *_ in self.queues.get(actor, [])]

    def wait(self, seconds):
        waiting = [a for a, q in self.queues.items() if q]
        if not waiting:
            assert math.isfinite(seconds)
            self.now += max(seconds, 0.001)
            return []
        self.now += self.dice.expovariate(1000)
        came = []
        for actor in self.dice.sample(waiting, self.dice.randint(1, len(waiting))):
            token, work, names = self.queues[actor].pop(0)
            came.append(self._run(actor, token, work, names))
        return came

    def _run(self, actor, token, work, names):
        if work is None:
            return Outcome(token, None, "died", Killed("before"))
        dies = self.dice.random() < self.rate
        if dies:
            self.kills += 1
            self._dies(actor)
        if dies and self.dice.random() < 0.5:
            return Outcome(token, None, "died", Killed("before it began"))
        if actor[0] != "machine" and self.dice.random() < self.errors:
            return Outcome(token, None, "failed", Killed("thrown"))
        try:
            answer, *rest = crossed(work())
        except Exception as why:
            if actor in getattr(self, "stages", {}) or actor[0] == "machine":
                return Outcome(token, None, "failed", why)
            self._dies(actor)
            return Outcome(token, None, "died", why)
        if dies:
            return Outcome(token, None, "died", Killed("before it answered"))
        for name, value in zip(names, rest):
            if self.dice.random() >= self.losses:
                self.store[name] = value
        return Outcome(token, answer)

    def close(self):
        self.closed = True


SETTINGS = sched.Settings(batch=4, tau=2, policy="edf", sequences=200, teacher_batch=3, teacher_attempts=5)


class Decisions:
    """The scheduler that nothing happens to: it is told what the actors' was told, and must decide the same."""

    def __init__(self, settings):
        self.scheduler, self.batches, self.consumed = sched.Scheduler(settings), 0, []

    def __call__(self, events, now, said):
        actions = []
        for event in events or [sched.TICK]:
            actions += self.scheduler.on(event, now)
        assert actions == said.actions, "it decides otherwise"
        self.batches += 1


class Runs(unittest.TestCase):
    def setUp(self):
        logging.getLogger("opd.ray").setLevel(logging.CRITICAL)
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def loop(self, engine, settings=SETTINGS, rollouts=3, teachers=2, **more):
        crews = {
            "rollout": Workers(toy.Rollout, count=rollouts, slots=3),
            "teacher": Workers(toy.Teacher, count=teachers, slots=2),
            "learner": Workers(toy.Learner, (self.folder,)),
        }
        crews |= more.pop("crews", {})
        return Loop(settings, engine, crews, clock=engine.clock, **more)

    def checked(self, loop, consumed, sequences=200, tau=2, first=0):
        steps, seen, lag = toy.check_line(self.folder, loop.state(), 4, tau)
        self.assertEqual(seen, set(range(sequences)))
        self.assertEqual((steps, loop.version), (sequences // 4, sequences // 4))
        self.assertEqual(sorted(consumed), list(range(first, sequences)))
        self.assertEqual(loop.weights(), loop.state())
        self.assertEqual((loop.desk.payloads, dict(loop.desk.given_up)), ({}, {}))
        tokens = self.accounts(loop)
        self.assertEqual((tokens.learnt, tokens.brought), (sum(1 + s % 7 for s in range(sequences)), 0))
        return lag

    def accounts(self, loop):
        """Every token is in one figure."""
        t = loop.tokens()
        self.assertEqual(t.brought + t.generated, t.learnt + t.discarded + t.lost + t.outstanding, t)
        self.assertEqual(t.outstanding, 0)
        self.assertLessEqual(t.regenerated, t.discarded + t.lost)
        self.assertGreater(t.busy_seconds, 0)
        return t

    def test_a_run(self):
        engine = Engine()
        loop = self.loop(engine)
        loop.on_told = Decisions(SETTINGS)
        steps = list(loop)
        self.assertTrue(engine.closed)
        self.assertEqual([s.version for s in steps], list(range(1, 51)))
        self.assertGreater(self.checked(loop, [c.ticket.sample for s in steps for c in s.consumed]), 0)
        self.assertEqual(max(s.lag for s in steps), self.checked(loop, range(200)))
        self.assertLess(loop.on_told.batches, 200 * 4)  # events come together
        tokens = loop.tokens()
        self.assertEqual((tokens.generated, tokens.lost, tokens.unreported), (tokens.learnt, 0, 0))
        self.assertGreater(tokens.idle, 0)
        self.assertRegex(tokens.table(), r"^tokens +generated.*\nrun +794 +100.0% +0.0% +0.0%")
        self.assertEqual(len(loop.desk.publications), 1)  # what nobody needs is gone
        self.assertEqual(loop.processes()[("scheduler", 0)][0], os.getpid())
        with self.assertRaisesRegex(opd.Error, "runs once"):
            list(loop)

    def test_kills(self):
        deaths, scheduler, kills, unreported = {"rollout": 0, "teacher": 0, "learner": 0}, 0, 0, 0
        for seed in range(8):
            with self.subTest(seed=seed):
                engine = Engine(seed, rate=0.03)
                loop = self.loop(engine)
                loop.on_told = Decisions(SETTINGS)
                self.checked(loop, [c.ticket.sample for s in loop for c in s.consumed])
                scheduler, kills = scheduler + loop.scheduler_deaths, kills + engine.kills
                unreported += loop.tokens().unreported
                for stage in deaths:
                    deaths[stage] += loop.desk.deaths[stage]
        self.assertGreater(min(scheduler, *deaths.values()), 5, deaths)
        self.assertGreater(kills, 100)
        self.assertGreater(unreported, 10)

    def test_calls_that_throw(self):
        settings = dataclasses.replace(SETTINGS, learner_attempts=10, teacher_attempts=10)
        loop = self.loop(engine := Engine(5, rate=0.01, errors=0.04), settings)
        loop.on_told = Decisions(settings)
        Desk.MOST_BAD_INSTALLS, before = 50, Desk.MOST_BAD_INSTALLS
        try:
            self.checked(loop, [c.ticket.sample for s in loop for c in s.consumed])
        finally:
            Desk.MOST_BAD_INSTALLS = before
        self.assertGreater(engine.kills, 3)

    def test_lost_objects(self):
        """A sequence whose payload or score is lost is drawn again, uncharged; lost weights are made again."""
        settings = dataclasses.replace(SETTINGS, teacher_attempts=1, rollout_attempts=1)
        discarded = 0
        for policy in ("edf", "in_order", "capacity", "drop", "retry"):
            with self.subTest(policy=policy):
                loop = self.loop(Engine(7, losses=0.03), dataclasses.replace(settings, policy=policy))
                consumed = [c.ticket.sample for s in loop for c in s.consumed]
                self.assertEqual(len(consumed), len(set(consumed)))
                self.assertGreater(loop.desk.lost_payloads, 5)
                self.assertEqual(set(loop.desk.given_up) - {"stale"}, set())
                tokens = self.accounts(loop)
                self.assertGreater(tokens.lost, 0)
                self.assertEqual(tokens.learnt, sum(1 + s % 7 for s in consumed))
                discarded += tokens.discarded
                if policy not in ("drop", "retry"):
                    self.assertEqual((tokens.discarded, tokens.regenerated), (0, tokens.lost))
                if policy != "capacity":  # which promises a mean lag alone
                    self.assertEqual(toy.check_line(self.folder, loop.state(), 4, 2)[1], set(consumed))
        self.assertGreater(discarded, 0)

    def test_checkpoints(self):
        """Whatever step the run's process dies after, another goes on."""
        path = os.path.join(self.folder, "checkpoint")
        consumed, runs, dice = [], 0, random.Random(3)
        while True:
            runs += 1
            loop = self.loop(Engine(runs, rate=0.01), checkpoint=path, checkpoint_every=2, rollouts=2 + runs % 2)
            begun, left = loop.version, dice.randint(1, 12)
            for step in loop:
                consumed = consumed[: 4 * (step.version - 1)] + [c.ticket.sample for c in step.consumed]
                if (left := left - 1) == 0 and step.version < 50:
                    break
            else:
                break
            self.assertLess(begun, step.version)
        self.assertGreater(runs, 4)
        self.checked(loop, consumed)
        self.assertEqual([f for f in os.listdir(self.folder) if f.endswith(".new")], [])
        again = self.loop(Engine(), checkpoint=path)
        self.assertEqual((list(again), again.state()), ([], loop.state()))
        with open(path, "wb") as file:
            pickle.dump([1], file)
        with self.assertRaisesRegex(opd.InvalidInput, "none of opd.ray"):
            list(self.loop(Engine(), checkpoint=path))

    def test_of_another_batch_is_refused_at_once(self):
        path = os.path.join(self.folder, "checkpoint")
        next(iter(self.loop(Engine(), checkpoint=path)))
        with self.assertRaisesRegex(opd.InvalidInput, "batch"):
            list(self.loop(Engine(), dataclasses.replace(SETTINGS, batch=5), checkpoint=path))

    def test_close(self):
        endless = dataclasses.replace(SETTINGS, sequences=None)
        loop, consumed = self.loop(Engine(1, rate=0.01), endless), []
        for step in loop:
            consumed += [c.ticket.sample for c in step.consumed]
            if step.version == 20:
                loop.close()
        self.assertEqual(sorted(consumed), list(range(len(consumed))))
        self.assertGreaterEqual(len(consumed), 80)

    def test_a_worker_that_hangs_begins_another_life(self):
        class Hanging(Engine):
            hung = False

            def _run(self, actor, token, work, names):
                if actor == (("rollout", 1), 1) and names and work is not None:
                    self.queues[actor].insert(0, (token, work, names))
                    return None
                return super()._run(actor, token, work, names)

            def wait(self, seconds):
                before = self.now
                came = [o for o in super().wait(seconds) if o is not None]
                self.now = self.now if came else before + max(seconds, 0.001)
                return came

        engine = Hanging()
        settings = dataclasses.replace(SETTINGS, rollout_deadline=5.0, abort_deadline=5.0, sync_deadline=5.0)
        loop = self.loop(engine, settings)
        self.checked(loop, [c.ticket.sample for s in loop for c in s.consumed])
        self.assertEqual(loop.desk.workers[("rollout", 1)].life, 2)

    def test_what_never_works_ends_the_run(self):
        for crews, text in (
            ({"rollout": Workers(NoStart, count=2, slots=3)}, "the rollout failed too often"),
            ({"rollout": Workers(NoInstall, count=2, slots=3)}, "no rollout worker can install weights: no memory"),
            ({"learner": Workers(NoTrain)}, "the learner failed too often"),
            ({"teacher": Workers(Unmade)}, "teacher 0 does not come up: no such model"),
        ):
            with self.subTest(text), self.assertRaisesRegex(opd.Error, text):
                for _ in self.loop(Engine(), crews=crews):
                    pass

    def test_what_is_refused(self):
        for crews, text in (
            ({"rollout": Workers(toy.Rollout, count=0)}, "rollout: has 0 workers"),
            ({"teacher": Workers(toy.Teacher, slots=0)}, "teacher: has 1 workers of 0 slots"),
            ({"learner": Workers(toy.Learner, count=2)}, "learner: is one worker"),
        ):
            with self.subTest(text), self.assertRaisesRegex(opd.InvalidInput, text):
                self.loop(Engine(), crews=crews)
        with self.assertRaisesRegex(opd.InvalidInput, "checkpoint_every"):
            self.loop(Engine(), checkpoint_every=0)
        with self.assertRaisesRegex(opd.InvalidInput, "no_such"):
            self.loop(Engine(), sched.Settings(policy="no_such"))


class NoStart(toy.Rollout):
    def start(self, ticket):
        raise RuntimeError("no tokenizer")


class NoInstall(toy.Rollout):
    def install(self, weights, version):
        raise RuntimeError("no memory")


class NoTrain(toy.Learner):
    def train(self, items, version):
        raise RuntimeError("a nan")


class Unmade:
    def __init__(self):
        raise RuntimeError("no such model")


class Parts(unittest.TestCase):
    def setUp(self):
        logging.getLogger("opd.ray").setLevel(logging.CRITICAL)

    def test_errors_by_their_names(self):
        names = ("RayError", "RayTaskError", "RayActorError", "ObjectLostError", "NodeDiedError")
        base = type("RayError", (Exception,), {})
        of = {n: type(n, (base,), {}) for n in names}
        died = type("ActorDiedError", (of["RayActorError"],), {})
        owner = type("OwnerDiedError", (of["ObjectLostError"],), {})
        dual = type("RayTaskError(OwnerDiedError)", (of["RayTaskError"], owner), {})
        for cls, kind in (
            (of["RayTaskError"], "failed"),
            (dual, "failed"),  # the user's code met it
            (died, "died"),
            (of["NodeDiedError"], "died"),
            (owner, "lost"),
        ):
            self.assertEqual(kind_of(cls()), kind, cls)

    def stage(self, name, cls, *args):
        self.store = {}

        def fetch(where):
            if where not in self.store:
                raise Lost(where)
            return self.store[where]

        made = _actors.STAGES[name](Workers(cls, args), fetch)
        made.PATIENCE = made.GATHER = 60.0  # of a call that goes on until all is done
        return made

    def test_a_rollout_worker(self):
        class Engine(toy.Rollout):
            def start(self, ticket):
                if ticket.sample == 13:
                    raise RuntimeError("unlucky")
                super().start(ticket)

            def step(self):
                if any(t.sample == 20 for t in self.running):
                    raise RuntimeError("all is lost")
                return super().step() + [(ticket(99), [], 1)]

        def ticket(sample):
            return sched.Ticket(sample, 0, 1, 0, 1, sample)

        worker = self.stage("rollout", Engine)
        self.store["w"] = 55
        replies, payloads = worker.roll(
            [("install", 0, 0, None), ("install", 3, 1, "w"), ("install", 4, 2, "gone"), ("abort", ticket(5))]
            + [("start", ticket(s), 1) for s in (0, 13, 2)]
        )
        self.assertEqual(replies[:3], [("synced", 0), ("synced", 3), ("weights_lost", 4)])
        self.assertEqual(replies[3][:2], ("failed", ticket(13)))
        self.assertEqual([(r[0], r[1].sample, r[3]) for r in replies[4:]], [("rolled_out", 0, 0), ("rolled_out", 2, 1)])
        self.assertEqual(payloads[0], [toy.mix(toy.mix(55, 0), 0)])
        self.assertEqual(replies[4][2], (1, 1, 1.0, 1))
        worker.PATIENCE = 0.0
        self.assertEqual(worker.roll([("start", ticket(6), 1)]), ([], []))
        self.assertEqual(worker.roll([("abort", ticket(6)), ("abort", ticket(6))]), ([("aborted", ticket(6), 1)], []))
        replies, _ = worker.roll([("start", ticket(20), 1), ("start", ticket(6), 1)])
        self.assertEqual([r[:2] for r in replies], [("failed", ticket(20)), ("failed", ticket(6))])
        self.assertEqual((worker._running, worker._stage.running), ({}, {}))

    def test_a_number_of_tokens_is_of_the_weights_it_began_with(self):
        class Counts(toy.Rollout):
            def step(self):
                return [(t, p, len(p)) for t, p, _ in super().step()]

        worker = self.stage("rollout", Counts)
        replies, _ = worker.roll([("start", t := sched.Ticket(2, 0, 1, 0, 1, 0), 4)])
        self.assertEqual(replies, [("rolled_out", t, sched.Versions(4, 4, 4.0, 3), 0)])

    def test_a_teacher(self):
        class Some(toy.Teacher):
            def score(self, payloads):
                return [None if p == [9] else s for p, s in zip(payloads, super().score(payloads))]

        teacher = self.stage("teacher", Some)
        self.store["a"] = [[1, 2], [9], [3]]
        (there, lost), scores = teacher.score([("a", 0), ("b", 0), ("a", 1), None, ("a", 2)])
        self.assertEqual((there, lost, scores), ([0, 4], [1, 3], [toy.score_of([1, 2]), None, None, None, toy.score_of([3])]))
        self.assertEqual(teacher.score([("b", 0)]), (([], [0]), []))
        teacher._stage.score = lambda payloads: []
        with self.assertRaisesRegex(ValueError, "0 scores of 1"):
            teacher.score([("a", 0)])

    def test_a_learner_goes_on_from_what_it_is_told(self):
        learner = self.stage("learner", toy.Learner)
        self.store |= {"r": [[1], [2]], "s": [toy.score_of([1]), toy.score_of([2])], "bad": [0], "at 7": 77}

        def items(*places):
            return [(sched.Ticket(p, 0, 1, 0, 1, 0), 0, None, ("r", p), ("s", p)) for p in places]

        def after(hash_, *places):
            for p in places:
                hash_ = toy.mix(toy.mix(hash_, p), self.store["s"][p])
            return ([], hash_, hash_)

        self.assertEqual(learner.train(1, 0, 0, None, items(0)), after(toy.FIRST, 0))
        self.assertEqual(learner.train(2, 1, 1, "not needed", items(1)), after(toy.FIRST, 0, 1))
        self.assertEqual(learner.train(3, 0, 0, None, items(1)), after(toy.FIRST, 1))  # the line begins again
        self.assertEqual(learner.train(8, 4, 7, "at 7", items(0, 1)), after(77, 0, 1))
        self.assertEqual(learner.train(9, 5, 8, "not needed", []), after(77, 0, 1))
        self.assertEqual(learner.train(10, 6, 9, None, items(1) + [(*items(0)[0][:4], ("gone", 0))]), ([1], None, None))
        with self.assertRaisesRegex(ValueError, "another response"):
            learner.train(11, 6, 9, None, items(0) + [(*items(1)[0][:4], ("bad", 0))])
        self.assertEqual(learner.train(12, 6, 7, "at 7", items(0)), after(77, 0))  # half a batch is not kept
        for state in ("gone", None):
            with self.assertRaises(Lost):
                learner.train(13, 7, 5, state, items(0))

    def test_what_is_late_counts_for_nothing(self):
        desk = Desk({"rollout": Workers(toy.Rollout, slots=2), "teacher": Workers(toy.Teacher)}, Ledger(SETTINGS))
        self.assertEqual(desk.due(0.0), [(("rollout", 0), 1), (("teacher", 0), 1)])
        self.assertEqual(desk.due(0.0), [])
        with self.assertLogs("opd.ray", "WARNING") as said:
            self.assertEqual(desk.due(60.0), [])
            self.assertEqual(desk.due(90.0), [])
        self.assertEqual(len(said.records), 2)  # one for each, once
        desk.began(("rollout", 0), 1)
        self.assertEqual(desk.events, [sched.worker_up("rollout", 0, 1, 2)])
        none = sched.Ticket(0, 0, 0, 0, 0, 0)
        desk.carry_out(sched.Action("sync", "rollout", -1, 0, none, 3, 7, 0, (), (), "rollout", "none"))
        self.assertEqual((desk.events.pop(), desk.calls()), (sched.weights_lost(7), []))
        ticket = sched.Ticket(0, 0, 1, 0, 1, 0)
        start = sched.Action("start", "rollout", 0, 1, ticket, 0, 0, 0, (), (), "rollout", "none")
        desk.carry_out(start)
        (call,) = desk.calls()
        self.assertEqual((call.method, call.args), ("roll", ([("start", ticket, 0)],)))
        desk.went_wrong(call, "died", Killed("x"), 5.0)
        self.assertEqual(desk.events[1:], [sched.worker_down("rollout", 0, 1)])
        self.assertEqual(desk.ended, [("rollout", 0)])
        self.assertEqual((desk.due(5.0), desk.next_due()), ([], 5.05))
        desk.answered(call, [("rolled_out", ticket, sched.Versions.of(0, 1), 0)], ["o"])
        desk.carry_out(start)  # of the former life
        self.assertEqual((desk.calls(), desk.payloads, len(desk.events)), ([], {}, 2))
        self.assertEqual(desk.due(5.05), [(("rollout", 0), 2)])
        desk.began(("rollout", 0), 1)
        self.assertEqual(len(desk.events), 2)
        desk.began(("rollout", 0), 2)
        self.assertEqual(desk.events[2:], [sched.worker_up("rollout", 0, 2, 2)])

    def test_versions_that_cannot_be_are_a_failed_attempt(self):
        machine = Machine(sched.Settings(batch=2, rollout_attempts=2), [("rollout", 0)])
        (sync,) = machine.on([sched.worker_up("rollout", 0, slots=1)], 0.0, False).actions
        said = machine.on([sched.synced(sync.job)], 1.0, True)
        (start,) = said.actions
        self.assertEqual((said.outstanding[0][1], said.lives), ("rollout", {("rollout", 0): 1}))
        said = machine.on([sched.rolled_out(start.ticket, sched.Versions.of(3, 5))], 2.0, False)
        self.assertIn("versions 3 to 3", said.refused[0])
        (again,) = said.actions
        self.assertEqual((again.ticket.sample, said.snapshot), (0, None))
        self.assertGreater(again.ticket.attempt, start.ticket.attempt)

    def test_a_log_is_what_another_machine_needs(self):
        settings, workers = sched.Settings(batch=2), [("rollout", 0)]
        machine, log = Machine(settings, workers), _actors.Log()

        def tell(events, now, save):
            log.told(events, now, save)
            log.heard(said := machine.on(events, now, save))
            return said

        (sync,) = tell([sched.worker_up("rollout", 0, slots=1)], 0.0, True).actions
        self.assertEqual(len(log), 0)
        (start,) = tell([sched.synced(sync.job)], 1.0, False).actions
        log.told([sched.rolled_out(start.ticket, sched.Versions.of(0, 3))], 2.0, False)
        again = Machine(settings, workers, log.snapshot).again(log.batches)
        self.assertEqual(again[0].actions, [start])
        expected = machine.on(*log.batches[-1])
        self.assertEqual(again[-1], expected)
        self.assertEqual(log.heard_again(again), expected)
        log._acted[0] = 7
        with self.assertRaisesRegex(opd.InternalError, "decides otherwise"):
            log.heard_again(again)


if __name__ == "__main__":
    unittest.main()
