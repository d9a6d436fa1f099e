# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""opd.sched: a run by hand, snapshots, the asyncio driver, the staleness queue, the virtual cluster, and what is
refused."""

import asyncio
import gc
import logging
import math
import threading
import unittest

import numpy as np

import opd
from opd import sched

try:
    sched.c.lib()
except opd.Unsupported as why:
    raise unittest.SkipTest(str(why)) from None


class World:
    """Answers every action at once; counts what comes."""

    def __init__(self, scheduler):
        self.scheduler = scheduler
        self.events = [sched.worker_up("rollout", 0, slots=4), sched.worker_up("teacher"), sched.worker_up("learner")]
        self.now, self.seen = 0.0, {}

    def reply(self, a):
        if a.kind == "start":
            return sched.rolled_out(a.ticket, sched.Versions.of(a.version, 10))
        if a.kind == "score":
            return sched.scored(a.job, a.worker, a.incarnation)
        if a.kind == "train":
            return sched.learned(a.job, a.incarnation)
        if a.kind == "sync":
            return sched.synced(a.job, max(a.worker, 0))
        return None

    def run(self, until=lambda world: False):
        while not until(self) and "finished" not in self.seen:
            if self.events:
                event = self.events.pop(0)
            else:
                self.now = max(self.now, self.scheduler.next_deadline())
                assert math.isfinite(self.now), "nothing is due"
                event = sched.TICK
            self.now += 0.001
            for a in self.scheduler.on(event, self.now):
                self.seen.setdefault(a.kind, []).append(a)
                if (answer := self.reply(a)) is not None:
                    self.events.append(answer)
        return self.seen


SETTINGS = sched.Settings(batch=4, tau=1, sequences=12, measure=True)


class Schedulers(unittest.TestCase):
    def test_a_run_by_hand(self):
        with sched.Scheduler(SETTINGS) as s:
            world = World(s)
            seen = world.run()
            self.assertEqual([a.version for a in seen["step"]], [1, 2, 3])
            self.assertEqual([len(a.consumed) for a in seen["step"]], [4, 4, 4])
            first = seen["step"][0].consumed[0]
            self.assertEqual((first.ticket.sample, first.versions), (0, sched.Versions(0, 0, 0.0, 10)))
            self.assertEqual(sorted(t.sample for a in seen["train"] for t in a.tickets), list(range(12)))
            totals = s.totals()
            self.assertEqual((totals["consumed"], totals["consumed_tokens"], totals["updates"]), (12, 120, 3))
            self.assertEqual(totals["failed_by"]["stale"], 0)
            self.assertEqual(s.state()["finished"], 1)
            self.assertEqual(s.outstanding(), [])
            self.assertEqual(s.worker("rollout"), (1, True))
            s.check()
            self.assertTrue(s.metrics(world.now))
        with self.assertRaisesRegex(opd.InvalidInput, "closed"):
            s.state()

    def test_more_actions_than_fit_at_once(self):
        with sched.Scheduler(sched.Settings(batch=100, outstanding=200, tau=1)) as s:
            (sync,) = s.on(sched.worker_up("rollout", 0, slots=200), 0.0)
            started = s.on(sched.synced(sync.job), 0.0)
            self.assertEqual(sum(a.kind == "start" for a in started), 200)
            self.assertEqual(len({a.ticket for a in started}), len(started))
            self.assertEqual(s.outstanding()[0].where, "rollout")

    def test_a_snapshot_goes_on_as_it_was(self):
        s = sched.Scheduler(SETTINGS)
        world = World(s)
        world.run(until=lambda w: "step" in w.seen)
        bytes_ = s.snapshot()
        again = sched.Scheduler.restore(SETTINGS, bytes_)
        self.assertEqual(again.snapshot(), bytes_)
        other = World(again)
        other.events, other.now = list(world.events), world.now
        world.seen, other.seen = {}, {}
        self.assertEqual(world.run(), other.run())
        with self.assertRaises((opd.InvalidInput, opd.Error)):
            sched.Scheduler.restore(SETTINGS, bytes_[:-3])
        fresh = sched.Scheduler.restore(SETTINGS, bytes_)
        fresh.abandon_workers()
        self.assertFalse(fresh.worker("rollout")[1])

    def test_what_is_refused(self):
        def refused(text, make):
            with self.assertRaisesRegex(opd.InvalidInput, text):
                make()

        refused("batch", lambda: sched.Scheduler(sched.Settings(batch=0)))
        refused("batch", lambda: sched.Scheduler(sched.Settings(batch=-4)))
        refused("outstanding", lambda: sched.Scheduler(sched.Settings(outstanding="many")))
        refused("no_such", lambda: sched.Scheduler(sched.Settings(policy="no_such")))
        s = sched.Scheduler(SETTINGS)
        refused("stage", lambda: s.on(sched.worker_up("critic"), 0.0))
        refused("kind", lambda: s.on(sched.Event("nap"), 0.0))
        s.on(sched.TICK, 5.0)
        refused("now", lambda: s.on(sched.TICK, 4.0))
        refused("change", lambda: s.observe("sleeps", "rollout", 0, 6.0))
        self.assertEqual(sched.Settings(tau=0).as_struct().tau, sched.c.ZERO)
        self.assertIn("edf", sched.names("staleness_policy"))


class Asyncio(unittest.IsolatedAsyncioTestCase):
    async def test_a_driver_has_the_actions_and_ticks(self):
        s = sched.Scheduler(sched.Settings(batch=2, sequences=4, teacher_batch=64, teacher_flush=0.01))
        driver, world, kinds = sched.Driver(s), World(s), []
        for event in world.events:
            driver.tell(event)
        async for action in driver:
            kinds.append(action.kind)
            if (answer := world.reply(action)) is not None:
                asyncio.get_running_loop().call_soon(driver.tell, answer)
        self.assertEqual((kinds.count("step"), kinds[-1]), (2, "finished"))

    async def test_run(self):
        failures, versions = {3}, []

        async def rollout(ticket, version):
            await asyncio.sleep(0)
            if ticket.sample in failures:
                failures.remove(ticket.sample)
                raise RuntimeError("the engine died")
            return {"sample": ticket.sample, "version": version}, 7

        async def score(items):
            await asyncio.sleep(0)
            return [{**item, "score": item["sample"] ** 2} for item in items]

        async def train(items, version):
            self.assertTrue(all(item["score"] == item["sample"] ** 2 for item in items))
            versions.append(version)

        async def sync(version):
            versions.append(-version)

        logging.getLogger("opd.sched").setLevel(logging.ERROR)
        steps = [
            step async for step in sched.run(SETTINGS, rollout=rollout, score=score, train=train, sync=sync, workers=2)
        ]
        self.assertEqual([s.version for s in steps], [1, 2, 3])
        self.assertEqual(sorted(i["sample"] for s in steps for i in s.items), list(range(12)))
        for step in steps:
            for consumed, item in zip(step.consumed, step.items):
                self.assertEqual((consumed.ticket.sample, consumed.start), (item["sample"], item["version"]))
        self.assertEqual([v for v in versions if v > 0], [1, 2, 3])
        self.assertIn(-1, versions)
        self.assertFalse(failures)

    async def test_a_stage_that_always_fails_ends_the_run(self):
        async def rollout(ticket, version):
            raise RuntimeError("never")

        async def train(items, version):
            pass

        logging.getLogger("opd.sched").setLevel(logging.CRITICAL)
        with self.assertRaisesRegex(opd.Error, "rollout failed too often"):
            async for _ in sched.run(sched.Settings(batch=2), rollout=rollout, train=train):
                pass

    async def test_a_sync_that_fails_raises(self):
        async def rollout(ticket, version):
            return None, 1

        async def train(items, version):
            pass

        async def sync(version):
            raise ValueError("no such weights")

        with self.assertRaisesRegex(ValueError, "no such weights"):
            async for _ in sched.run(SETTINGS, rollout=rollout, train=train, sync=sync):
                pass


class Queue(unittest.TestCase):
    def balances(self, q):
        n = q.state()
        parts = ("consumed", "returned", "dropped", "discarded", "outstanding")
        self.assertEqual(n["acquired"], sum(n[name] for name in parts), n)
        return n

    def pushed(self, q, items):
        permits = [q.acquire(timeout=0)[0] for _ in items]
        for permit, item in zip(permits, items):
            self.assertEqual(q.push(permit, item), "pushed")

    def test_what_goes_in_comes_out_in_batches(self):
        with sched.StalenessQueue(sched.QueueSettings(batch=2, tau=1, group=2)) as q:
            permits = q.acquire(2)
            self.assertEqual([(p.version, p.slot) for p in permits], [(0, 0), (0, 1)])
            self.assertIsNone(q.pop(timeout=0))
            self.assertEqual(q.push(permits, [-5, 2**62]), "pushed")
            self.pushed(q, [7])
            batch = q.pop()
            self.assertEqual((batch.version, batch.items.tolist(), batch.versions.tolist()), (0, [-5, 2**62], [0, 0]))
            self.assertEqual((batch.items.dtype, batch.versions.dtype), (np.int64, np.int64))
            q.trained(batch)
            self.assertEqual(q.acquire(timeout=0), [])  # nothing starts on old weights
            self.assertEqual(q.synchronised(batch), [])
            self.assertEqual(q.acquire(timeout=0)[0].version, 1)
            n = self.balances(q)
            self.assertEqual((n["version"], n["consumed"], n["ready"], n["outstanding"]), (1, 2, 1, 2))

    def test_a_hard_bound_of_the_lag_over_a_run(self):
        rng = np.random.default_rng(3)
        for policy in ("edf", "in_order", "cohort_fifo", "drop", "retry"):
            lags, item = [], 0
            with sched.StalenessQueue(sched.QueueSettings(batch=3, tau=2, policy=policy)) as q:
                out = []
                while len(lags) < 60:
                    while got := q.acquire(timeout=0):
                        out += got
                    if out:
                        at = rng.integers(len(out))
                        if (what := q.push(out[at], item)) == "pushed":
                            out.pop(at)
                        elif what == "stale":
                            self.assertIn(policy, ("drop", "retry"))
                            q.release(out.pop(at))
                        item += 1
                    if (batch := q.pop(timeout=0)) is not None:
                        lags += (batch.version - batch.versions).tolist()
                        q.trained(batch)
                        out += [s.permit for s in q.synchronised(batch) if s.permit is not None]
                self.balances(q)
            self.assertLessEqual(max(lags), 2, policy)
            self.assertGreater(max(lags), 0, policy)

    def test_what_becomes_too_old(self):
        for policy in ("drop", "retry"):
            q = sched.StalenessQueue(sched.QueueSettings(batch=2, tau=0, outstanding=80, policy=policy))
            late = q.acquire(timeout=0)[0]
            self.pushed(q, range(79))
            batch = q.pop(timeout=0)
            q.trained(batch)
            self.assertIsNone(q.restart(late, timeout=0))  # the gate is closed
            stale = q.synchronised(batch)
            self.assertEqual([s.item for s in stale], list(range(2, 79)))  # more than one call's room
            self.assertEqual({s.version for s in stale}, {0})
            self.assertEqual(q.push(late, 99), "stale")
            again = q.restart(late)
            self.assertEqual((again.permit, again.version), (late.permit, 1))
            if policy == "drop":
                self.assertEqual({s.permit for s in stale}, {None})
            else:
                self.assertEqual({s.permit.version for s in stale}, {1})
                self.assertEqual(q.push([s.permit for s in stale[:1]], [5]), "pushed")
            self.assertEqual(q.push(again, 99), "pushed")
            self.balances(q)

    def test_give_up_shut_down_abort(self):
        q = sched.StalenessQueue(sched.QueueSettings(batch=2))
        self.pushed(q, [1, 2, 3])
        first = q.pop()
        q.give_up(first)  # before it was trained on: its items are next again
        second = q.pop()
        self.assertEqual(second.items.tolist(), [1, 2])
        with self.assertRaisesRegex(opd.InvalidInput, "is 1, which is not out"):
            q.trained(first)
        q.trained(second)
        q.synchronised(second)
        q.shutdown()
        self.assertEqual(q.acquire(), [])
        last = q.pop()
        self.assertEqual(last.items.tolist(), [3])
        q.trained(last)
        q.synchronised(last)
        self.assertIsNone(q.pop())
        self.assertEqual(self.balances(q)["closed"], 1)

        q = sched.StalenessQueue(sched.QueueSettings(batch=400, tau=1))
        permit = q.acquire()[0]
        self.pushed(q, range(300))
        left = q.abort()
        self.assertEqual((left.tolist(), left.dtype), (list(range(300)), np.int64))
        self.assertEqual(q.push(permit, 1), "aborted")
        self.assertIsNone(q.pop())
        self.assertEqual(q.abort().tolist(), [])

    def test_threads_wait_for_each_other(self):
        with sched.StalenessQueue(sched.QueueSettings(batch=4, tau=1)) as q:
            seen, items = [], iter(range(40))

            def produce():
                while got := q.acquire(timeout=30):
                    try:
                        item = next(items)
                    except StopIteration:
                        q.release(got[0])
                        return q.shutdown()
                    self.assertEqual(q.push(got[0], item), "pushed")

            thread = threading.Thread(target=produce)
            thread.start()
            while (batch := q.pop(timeout=30)) is not None:
                seen += batch.items.tolist()
                q.trained(batch)
                q.synchronised(batch)
            thread.join()
            self.assertEqual(seen, list(range(40)))
            self.assertEqual(self.balances(q)["returned"], 1)

    def test_a_wait_ends_with_its_time_or_with_the_queue(self):
        q = sched.StalenessQueue(sched.QueueSettings(batch=2))
        self.assertIsNone(q.pop(timeout=0.01))
        found = []
        thread = threading.Thread(target=lambda: found.append(q.pop()))
        thread.start()
        while not q.state()["waiting_learners"]:
            pass
        q.close()
        thread.join(30)
        self.assertEqual((thread.is_alive(), found), (False, [None]))

    def test_a_snapshot_goes_on_as_it_was(self):
        settings = sched.QueueSettings(batch=2, tau=1, policy="edf")
        q = sched.StalenessQueue(settings)
        self.pushed(q, [10, 11, 12])
        batch = q.pop()
        bytes_ = q.snapshot()
        again = sched.StalenessQueue.restore(settings, bytes_)
        self.assertEqual(again.pop(timeout=0).items.tolist(), batch.items.tolist())  # it was not trained on
        self.balances(again)
        with self.assertRaises(opd.InvalidInput):
            sched.StalenessQueue.restore(settings, bytes_[:-1])
        with self.assertRaises(opd.InvalidInput):
            sched.StalenessQueue.restore(settings, bytes([bytes_[0] ^ 1]) + bytes_[1:])
        with self.assertRaises(opd.InvalidInput) as caught:
            sched.StalenessQueue.restore(sched.QueueSettings(batch=3), bytes_)
        self.assertEqual(caught.exception.argument, "snapshot")

    def test_what_is_refused(self):
        def refused(argument, make):
            with self.assertRaises(opd.InvalidInput) as caught:
                make()
            self.assertEqual(caught.exception.argument, argument)

        make = sched.QueueSettings
        for name, value in (
            ("batch", 0), ("batch", -1), ("batch", 1.5), ("tau", -1), ("outstanding", "automatic"), ("group", 2**70)
        ):  # fmt: skip
            refused("settings." + name, lambda: sched.StalenessQueue(make(**{name: value})))
        refused("settings.policy", lambda: sched.StalenessQueue(make(policy="no_such")))
        self.assertEqual(make(tau=0).as_struct().tau, sched.c.ZERO)
        q = sched.StalenessQueue(make(batch=2))
        permit = q.acquire()[0]
        before = q.state()
        refused("n", lambda: q.acquire(2))
        refused("n", lambda: q.acquire(0))
        refused("timeout", lambda: q.acquire(timeout=-1))
        refused("timeout", lambda: q.pop(timeout=math.nan))
        refused("timeout", lambda: q.pop(timeout="soon"))
        refused("items", lambda: q.push(permit, 1.5))
        refused("items", lambda: q.push(permit, [1, 2]))
        refused("items", lambda: q.push(permit, None))
        refused("items", lambda: q.push(permit, np.array([2**64 - 1], np.uint64)))
        refused("permits", lambda: q.push([], []))
        refused("permits", lambda: q.push([permit, permit._replace(permit=9)], [1, 2]))
        refused("permits", lambda: q.push([3], [1]))
        refused("permit", lambda: q.release(permit._replace(permit=9)))
        refused("snapshot", lambda: q.restore(make(batch=2), None))
        self.assertEqual(q.state(), before)
        self.assertEqual(q.push(permit, 1), "pushed")
        refused("permits", lambda: q.push(permit, 1))
        handle = q.handle
        q.close()
        q.close()
        refused("queue", q.state)
        q._handle = handle  # as who kept the handle: the library knows that it was freed
        refused("queue", q.state)
        q._handle = None

    def test_who_lets_go_frees(self):
        q = sched.StalenessQueue(sched.QueueSettings(batch=2))
        handle = q.handle
        del q
        gc.collect()
        other = sched.StalenessQueue.__new__(sched.StalenessQueue)
        other._handle = handle
        with self.assertRaisesRegex(opd.InvalidInput, "queue"):
            other.state()
        other._handle = None


class Simulation(unittest.TestCase):
    CLUSTER = sched.Cluster(
        rollout_workers=3,
        lanes=8,
        steps=30,
        response=sched.lognormal(300, 1.0, at_most=4000),
        teacher=sched.Job(fixed=0.1, per_token=1e-6),
        learner=sched.Job(per_token=1e-4, noise=sched.uniform(0.9, 1.1)),
        sync=sched.Job(fixed=0.2),
    )

    def test_the_ledger_balances(self):
        for policy in ("capacity", "drop", "edf"):
            report = sched.simulate(self.CLUSTER, sched.Settings(batch=16, tau=1, policy=policy))
            ledger = report.ledger
            self.assertEqual(ledger.steps, 30)
            parts = ledger.consumed_tokens + ledger.discarded_tokens + ledger.lost_tokens + ledger.outstanding_tokens
            self.assertAlmostEqual(ledger.generated_tokens, parts, delta=1e-6 * parts)
            self.assertFalse(ledger.stuck)
            self.assertLessEqual((ledger.lag_mean if policy == "capacity" else ledger.lag_max)[0], 1)
            self.assertEqual(set(ledger.idle), set(sched.STAGES))
            self.assertTrue(report.metrics)
            self.assertEqual(
                ledger, sched.simulate(self.CLUSTER, sched.Settings(batch=16, tau=1, policy=policy)).ledger
            )
        self.assertIsNone(ledger.failed_stage)

    def test_workers_that_go_lose_tokens(self):
        events = ((5.0, sched.worker_down("rollout", 1, 0)), (9.0, sched.worker_up("rollout", 1, 0, 8)))
        calm = sched.simulate(self.CLUSTER, sched.Settings(batch=16)).ledger
        faulty = sched.Cluster(**{**self.CLUSTER.__dict__, "events": events})
        lossy = sched.simulate(faulty, sched.Settings(batch=16)).ledger
        self.assertEqual(calm.lost_tokens, 0)
        self.assertGreater(lossy.lost_tokens, 0)

    def test_laws(self):
        law = sched.mixture([sched.empirical([10, 20, 30]), sched.constant(500)], [0.9, 0.1])
        ledger = sched.simulate(sched.Cluster(response=law, steps=5), sched.Settings(batch=4)).ledger
        self.assertGreater(ledger.consumed_tokens, 0)
        with self.assertRaisesRegex(opd.InvalidInput, "no end"):
            sched.simulate()
        with self.assertRaises(opd.InvalidInput):
            sched.simulate(sched.Cluster(response=sched.pareto(-1, 5), steps=5), sched.Settings(batch=4))


if __name__ == "__main__":
    unittest.main()
