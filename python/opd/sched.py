# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Schedulers of rollout, teacher and learner: events in, actions out; an asyncio driver; the staleness queue; the
virtual cluster.

    with sched.Scheduler(sched.Settings(batch=16, policy="edf", tau=2)) as s:
        for action in s.on(sched.worker_up("rollout", 0, slots=8), now=0.0): ...

    async for step in sched.run(settings, rollout=..., score=..., train=..., sync=...): ...

    with sched.StalenessQueue(sched.QueueSettings(batch=16, tau=2, policy="edf")) as q:
        (permit,) = q.acquire()                                      # in a producer
        q.push(permit, item)
        batch = q.pop()                                              # in the learner
        q.trained(batch), q.synchronised(batch)

    report = sched.simulate(sched.Cluster(rollout_workers=4, steps=50), settings)
    report.ledger.consumed_tokens, report.ledger.lost_tokens, report.ledger.idle

docs/sched has what settings, events and actions are and what a driver owes the scheduler.
"""

from __future__ import annotations

import asyncio
import collections
import ctypes
import json
import logging
import math
import time
from ctypes import byref, c_double, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p, sizeof
from dataclasses import asdict, dataclass, fields
from typing import Any, AsyncIterator, Awaitable, Callable, NamedTuple, Optional, Sequence, Union

import numpy as np

from . import _c_sched as c
from ._handles import Handle
from ._numbers import INT64, UINT64, int64s, integer, number
from .errors import Error, check, refuse

_log = logging.getLogger("opd.sched")

STAGES = {"rollout": 0, "teacher": 1, "learner": 2}
STAGE_NAMES = tuple(STAGES)
PLACES = ("none", "waiting", "rollout", "queued", "scoring", "ready", "training")
FAILURES = ("rollout", "teacher", "learner", "stale", "stopped")
EVENTS = {e.name.removeprefix("OPD_EVENT_").lower(): int(e) for e in c.opd_event_kind}
ACTIONS = tuple(e.name.removeprefix("OPD_ACTION_").lower() for e in c.opd_action_kind)
CHANGES = {"up": 0, "down": 1, "begins": 2, "ends": 3, "spare_begins": 4, "spare_ends": 5}
OUTSTANDING = {"policy": c.BY_POLICY, "automatic": c.AUTOMATIC, "widest": c.WIDEST}


class Ticket(NamedTuple):
    """One attempt at rolling one sequence out. A reply carries the ticket that it answers."""

    sample: int  #: number of the sequence; of answer sample % group to prompt sample // group
    slot: int
    attempt: int
    worker: int
    incarnation: int
    lane: int


class Versions(NamedTuple):
    """Which versions of the weights drew the tokens of a response."""

    oldest: int
    newest: int
    mean: float  #: weighted by tokens
    tokens: int

    @classmethod
    def of(cls, version: int, tokens: int) -> Versions:
        """All by one."""
        return cls(version, version, float(version), tokens)


class Consumed(NamedTuple):
    ticket: Ticket
    start: int  #: version of its start
    versions: Versions


def _ticket(t: Any) -> Ticket:
    return Ticket(t.sample, t.slot, t.attempt, t.worker, t.incarnation, t.lane)


def _versions(v: Any) -> Versions:
    return Versions(v.oldest, v.newest, v.mean, v.tokens)


@dataclass(frozen=True)
class Settings:
    """None: the library's default. `outstanding`: permits, or "policy", "automatic", "widest"."""

    batch: Optional[int] = None  #: sequences a train batch
    schedule: Optional[str] = None  #: "async", and others of names("schedule")
    k: Optional[int] = None
    tau: Optional[int] = None  #: in train batches
    outstanding: Union[int, str, None] = None
    policy: Optional[str] = None
    update: Optional[str] = None
    concurrency: Optional[int] = None
    negative_control: bool = False
    rollout_attempts: Optional[int] = None
    teacher_attempts: Optional[int] = None
    learner_attempts: Optional[int] = None
    group: Optional[int] = None
    sequences: Optional[int] = None
    available: Optional[int] = None
    first_version: int = 0
    first_sample: int = 0
    teacher_batch: Optional[int] = None
    teacher_flush: Optional[float] = None
    fruitless_steps: Optional[int] = None
    most_workers: Optional[int] = None
    most_slots: Optional[int] = None
    measure: bool = False
    rollout_deadline: Optional[float] = None
    abort_deadline: Optional[float] = None
    teacher_deadline: Optional[float] = None
    learner_deadline: Optional[float] = None
    sync_deadline: Optional[float] = None
    warmup: Optional[int] = None
    lag_bound: Optional[int] = None
    earlier_updates: Optional[int] = None
    payload_attempts: Optional[int] = None

    # whose 0 is a value of its own, and not the default
    _ZEROS = frozenset({"k", "tau", "teacher_flush", "fruitless_steps", "earlier_updates"})

    def as_struct(self) -> c.opd_scheduler_settings:
        s = c.opd_scheduler_settings()
        s.struct_size = sizeof(s)
        for f in fields(self):
            value = getattr(self, f.name)
            if value is None:
                continue
            if f.name == "outstanding" and isinstance(value, str):
                if value not in OUTSTANDING:
                    raise refuse(
                        "settings.outstanding", f"is {value!r}; it is a number or one of {', '.join(OUTSTANDING)}"
                    )
                value = OUTSTANDING[value]
            elif isinstance(value, str):
                value = value.encode()
            elif f.name not in ("first_version", "first_sample", "negative_control", "measure"):
                if value < 0:
                    raise refuse("settings." + f.name, f"is {value}; it must not be negative")
                if value == 0 and f.name in self._ZEROS:
                    value = c.ZERO
                elif value == 0:
                    raise refuse("settings." + f.name, "is 0; leave it out, or None, for the default")
            setattr(s, f.name, value)
        return s


# --- events and actions


@dataclass(frozen=True)
class Event:
    """Made by the functions below."""

    kind: str
    stage: str = "rollout"
    worker: int = 0
    incarnation: int = 0
    slots: int = 0
    elasticity: Optional[float] = None
    ticket: Optional[Ticket] = None
    versions: Optional[Versions] = None
    job: int = 0
    count: int = 0
    tickets: tuple[Ticket, ...] = ()

    def as_struct(self) -> c.opd_event:
        e = c.opd_event()
        e.struct_size = sizeof(e)
        if self.kind not in EVENTS:
            raise refuse("event.kind", f"is {self.kind!r}; it is one of {', '.join(EVENTS)}")
        e.kind, e.stage = EVENTS[self.kind], _stage("event.stage", self.stage)
        e.worker, e.incarnation, e.slots = self.worker, self.incarnation, self.slots
        e.job, e.count = self.job, self.count
        if self.elasticity is not None:
            e.has_elasticity, e.elasticity = 1, self.elasticity
        if self.ticket is not None:
            e.ticket = c.opd_ticket(*self.ticket)
        if self.versions is not None:
            e.versions = c.opd_token_versions(*self.versions)
        if self.tickets:
            e.tickets = (c.opd_ticket * len(self.tickets))(*(c.opd_ticket(*t) for t in self.tickets))
            e.ticket_count = len(self.tickets)
        return e


def _stage(argument: str, stage: str) -> int:
    if stage not in STAGES:
        raise refuse(argument, f"is {stage!r}; it is one of {', '.join(STAGES)}")
    return STAGES[stage]


def worker_up(stage: str, worker: int = 0, incarnation: int = 1, slots: int = 1) -> Event:
    """A new life, or of the present one another number of slots; 0: it drains."""
    return Event("worker_up", stage, worker, incarnation, slots)


def worker_down(stage: str, worker: int = 0, incarnation: int = 1) -> Event:
    return Event("worker_down", stage, worker, incarnation)


def rolled_out(ticket: Ticket, versions: Versions) -> Event:
    return Event("rolled_out", ticket=ticket, versions=versions)


def rollout_failed(ticket: Ticket) -> Event:
    return Event("rollout_failed", ticket=ticket)


def aborted(ticket: Ticket) -> Event:
    return Event("aborted", ticket=ticket)


def parked(ticket: Ticket, versions: Versions) -> Event:
    return Event("parked", ticket=ticket, versions=versions)


def scored(job: int, worker: int = 0, incarnation: int = 1, tickets: Sequence[Ticket] = ()) -> Event:
    """`tickets`: which; none: all."""
    return Event("scored", "teacher", worker, incarnation, job=job, tickets=tuple(tickets))


def score_failed(job: int, worker: int = 0, incarnation: int = 1) -> Event:
    return Event("score_failed", "teacher", worker, incarnation, job=job)


def learned(job: int, incarnation: int = 1, updates: int = 1) -> Event:
    return Event("learned", "learner", 0, incarnation, job=job, count=updates)


def learn_failed(job: int, incarnation: int = 1) -> Event:
    return Event("learn_failed", "learner", 0, incarnation, job=job)


def synced(job: int, worker: int = 0, incarnation: int = 1, elasticity: Optional[float] = None) -> Event:
    return Event("synced", "rollout", worker, incarnation, job=job, elasticity=elasticity)


def weights_lost(job: int) -> Event:
    return Event("weights_lost", job=job)


def payload_lost(tickets: Sequence[Ticket], job: int = 0) -> Event:
    """What these attempts drew, or its score, can't be had any more. `job`: of the call that found so."""
    if not tickets:
        raise refuse("tickets", "are none")
    return Event("payload_lost", job=job, tickets=tuple(tickets))


def park(ticket: Ticket) -> Event:
    return Event("park", ticket=ticket)


def resize(permits: int) -> Event:
    return Event("resize", count=permits)


TICK, PAUSE, RESUME, CLOSE, STOP = (Event(kind) for kind in ("tick", "pause", "resume", "close", "stop"))


@dataclass(frozen=True)
class Action:
    """What the scheduler asks for: `kind` is start, abort, park, score, train, sync, lost, step, fail or finished."""

    kind: str
    stage: str
    worker: int
    incarnation: int
    ticket: Ticket
    version: int
    job: int
    from_job: int  #: the job that published the weights to go on from; 0: those that the run began with
    tickets: tuple[Ticket, ...]
    consumed: tuple[Consumed, ...]
    why: str
    where: str

    @classmethod
    def of_struct(cls, a: Any) -> Action:
        kind = ACTIONS[a.kind]
        tickets = tuple(_ticket(a.tickets[i]) for i in range(a.count)) if a.tickets and kind != "step" else ()
        consumed: tuple[Consumed, ...] = ()
        if kind == "step" and a.consumed:
            each = (a.consumed[i] for i in range(a.count))
            consumed = tuple(Consumed(_ticket(x.ticket), x.start, _versions(x.versions)) for x in each)
        return cls(
            kind,
            STAGE_NAMES[a.stage],
            a.worker,
            a.incarnation,
            _ticket(a.ticket),
            a.version,
            a.job,
            getattr(a, "from"),
            tickets,
            consumed,
            FAILURES[a.why],
            PLACES[a.where],
        )


@dataclass(frozen=True)
class Outstanding:
    ticket: Ticket
    start: int
    versions: Versions
    where: str


class Scheduler(Handle):
    """A state machine without a clock: `on` takes an event and the time, and returns what is to be done, in order."""

    _kind = _argument = "scheduler"
    _library = staticmethod(c.lib)

    def __init__(self, settings: Settings = Settings()):
        self._make(byref(settings.as_struct()))
        self._begin()

    def _begin(self) -> None:
        self._room = (c.opd_action * 64)()
        self._room[0].struct_size = sizeof(c.opd_action)

    @classmethod
    def restore(cls, settings: Settings, snapshot: bytes) -> Scheduler:
        """As it was. In a new process, where no worker is yet, abandon_workers() comes next."""
        handle = c_void_p()
        check(c.lib().opd_scheduler_restore(byref(settings.as_struct()), snapshot, len(snapshot), byref(handle)))
        made = cls.__new__(cls)
        made._handle = handle
        made._begin()
        return made

    def on(self, event: Event, now: float) -> list[Action]:
        """Takes an event at `now`, in seconds on a clock that never runs backwards, then what is due by then."""
        got, e = c_size_t(), event.as_struct()
        check(c.lib().opd_scheduler_on(self.handle, byref(e), now, self._room, len(self._room), byref(got)))
        found = []
        while True:  # an action's tickets lie in the scheduler's memory until its next call
            found += [Action.of_struct(self._room[i]) for i in range(got.value)]
            if got.value < len(self._room):
                return found
            check(c.lib().opd_scheduler_actions(self.handle, self._room, len(self._room), byref(got)))

    def next_deadline(self) -> float:
        """When an event must be handed in at the latest, TICK if nothing else happens; infinity: no need."""
        at = c_double()
        check(c.lib().opd_scheduler_next_deadline(self.handle, byref(at)))
        return at.value

    def totals(self) -> dict[str, Any]:
        """Running totals: opd/sched/scheduler.hpp says what each is."""
        s = c.opd_scheduler_counters()
        s.struct_size = sizeof(s)
        check(c.lib().opd_scheduler_totals(self.handle, byref(s)))
        return _counters(s)

    def state(self) -> dict[str, Any]:
        s = c.opd_scheduler_state()
        s.struct_size = sizeof(s)
        check(c.lib().opd_scheduler_look(self.handle, byref(s)))
        return {name: getattr(s, name) for name, *_ in s._fields_ if name != "struct_size"}

    def outstanding(self) -> list[Outstanding]:
        """Every sequence that holds a permit, by slot."""
        count = c_size_t()
        check(c.lib().opd_scheduler_outstanding(self.handle, None, 0, byref(count)))
        room = (c.opd_outstanding * max(1, count.value))()
        check(c.lib().opd_scheduler_outstanding(self.handle, room, count.value, byref(count)))
        return [
            Outstanding(_ticket(x.ticket), x.start, _versions(x.versions), PLACES[x.where]) for x in room[: count.value]
        ]

    def worker(self, stage: str, worker: int = 0) -> tuple[int, bool]:
        """The latest life of a worker that was heard of (0: none), and whether it is up."""
        incarnation, up = c_uint32(), c_int32()
        check(c.lib().opd_scheduler_worker(self.handle, _stage("stage", stage), worker, byref(incarnation), byref(up)))
        return incarnation.value, bool(up.value)

    def snapshot(self) -> bytes:
        """All of the state, equal bytes for equal states. Refused while actions are unread."""
        return self._snapshot("")

    def abandon_workers(self, keep_prefixes: bool = False, reopen: bool = False) -> None:
        check(c.lib().opd_scheduler_abandon_workers(self.handle, keep_prefixes, reopen))

    def observe(self, change: str, stage: str, worker: int, now: float) -> None:
        """For the metrics' busy times: a worker's "up", "down", "begins", "ends", "spare_begins", "spare_ends"."""
        if change not in CHANGES:
            raise refuse("change", f"is {change!r}; it is one of {', '.join(CHANGES)}")
        check(c.lib().opd_scheduler_observe(self.handle, CHANGES[change], _stage("stage", stage), worker, now))

    def metrics(self, now: float) -> dict[str, Any]:
        """The run up to `now`, under Settings(measure=True): docs/sched/metrics.md has the names."""
        length = c_size_t()
        check(c.lib().opd_scheduler_metrics(self.handle, now, None, 0, byref(length)))
        room = ctypes.create_string_buffer(length.value + 1)
        check(c.lib().opd_scheduler_metrics(self.handle, now, room, len(room), byref(length)))
        found: dict[str, Any] = json.loads(room.value.decode())
        return found

    def check(self) -> None:
        """Recounts everything; raises InternalError with the broken invariant."""
        check(c.lib().opd_scheduler_check(self.handle))


def _counters(s: Any) -> dict[str, Any]:
    found = {name: getattr(s, name) for name, *_ in s._fields_ if name not in ("struct_size", "failed_by")}
    found["failed_by"] = dict(zip(FAILURES, s.failed_by))
    return found


# --- asyncio


class Driver:
    """A scheduler on the event loop's clock: `async for` has its actions, `tell` hands events in.

    The loop ends after the action `finished`. All of it belongs to one loop; from other threads,
    loop.call_soon_threadsafe(driver.tell, e).
    """

    def __init__(self, scheduler: Scheduler, clock: Callable[[], float] = time.monotonic):
        self.scheduler = scheduler
        self.clock = clock
        self._events: collections.deque[Event] = collections.deque()
        self._actions: collections.deque[Action] = collections.deque()
        self._came = asyncio.Event()
        self._finished = False
        self._broken: Optional[BaseException] = None

    def fail(self, why: BaseException) -> None:
        """Has the loop raise `why`: what happened is none of the scheduler's events."""
        self._broken = why
        self._came.set()

    def tell(self, event: Event) -> None:
        self._events.append(event)
        self._came.set()

    def __aiter__(self) -> Driver:
        return self

    async def __anext__(self) -> Action:
        while not self._actions:
            if self._broken is not None:
                raise self._broken
            if self._finished:
                raise StopAsyncIteration
            if self._events:
                self._actions.extend(self.scheduler.on(self._events.popleft(), self.clock()))
                continue
            self._came.clear()
            due = self.scheduler.next_deadline() - self.clock()
            if due <= 0:
                self._actions.extend(self.scheduler.on(TICK, self.clock()))
                continue
            try:
                await asyncio.wait_for(self._came.wait(), None if math.isinf(due) else due)
            except (asyncio.TimeoutError, TimeoutError):
                self._actions.extend(self.scheduler.on(TICK, self.clock()))
        action = self._actions.popleft()
        self._finished = self._finished or action.kind == "finished"
        return action


@dataclass(frozen=True)
class Step:
    """An update: what it consumed, the payloads in the same order, and the version that it made."""

    version: int
    consumed: tuple[Consumed, ...]
    items: tuple[Any, ...]


async def run(
    settings: Settings,
    *,
    rollout: Callable[[Ticket, int], Awaitable[tuple[Any, int]]],
    score: Optional[Callable[[list[Any]], Awaitable[list[Any]]]] = None,
    train: Callable[[list[Any], int], Awaitable[Any]],
    sync: Optional[Callable[[int], Awaitable[Any]]] = None,
    workers: int = 1,
    lanes: int = 8,
    teachers: int = 1,
    scheduler: Optional[Scheduler] = None,
) -> AsyncIterator[Step]:
    """Runs three stages of coroutines, and yields each update: `async for step in run(...)`.

    rollout(ticket, version)   one sequence from the weights of `version`: (payload, number of its tokens)
    score(payloads)            the teacher's answer to each; None: payloads are trained on as they are
    train(payloads, version)   an update that makes `version` and keeps it
    sync(version)              rollout has these weights from here on; None: there is nothing to install

    A coroutine that raises has failed that attempt: it is logged, and the scheduler tries again, as its settings say;
    sync's ends the run. Sequences keep the version that they began with: what a rollout notes of newer weights that
    came on its way is its own.
    """
    own = scheduler is None
    s = Scheduler(settings) if scheduler is None else scheduler
    driver = Driver(s)
    payloads: dict[int, Any] = {}
    running: dict[Ticket, asyncio.Task[None]] = {}
    tasks: set[asyncio.Task[None]] = set()

    def spawn(work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.ensure_future(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        return task

    async def start(ticket: Ticket, version: int) -> None:
        try:
            payload, tokens = await rollout(ticket, version)
        except asyncio.CancelledError:
            driver.tell(aborted(ticket))
        except Exception:
            _log.warning("rollout of sequence %d failed", ticket.sample, exc_info=True)
            driver.tell(rollout_failed(ticket))
        else:
            payloads[ticket.sample] = payload
            driver.tell(rolled_out(ticket, Versions.of(version, tokens)))
        finally:
            running.pop(ticket, None)

    async def call_teacher(action: Action) -> None:
        given = [payloads[t.sample] for t in action.tickets]
        try:
            answers = given if score is None else await score(given)
            if len(answers) != len(given):
                raise ValueError(f"score returned {len(answers)} answers to {len(given)}")
        except Exception:
            _log.warning("scoring of %d sequences failed", len(given), exc_info=True)
            driver.tell(score_failed(action.job, action.worker, action.incarnation))
        else:
            for ticket, answer in zip(action.tickets, answers):
                payloads[ticket.sample] = answer
            driver.tell(scored(action.job, action.worker, action.incarnation))

    async def call_learner(action: Action) -> None:
        try:
            if action.tickets:
                await train([payloads[t.sample] for t in action.tickets], action.version + 1)
        except Exception:
            _log.warning("update to version %d failed", action.version + 1, exc_info=True)
            driver.tell(learn_failed(action.job, action.incarnation))
        else:
            driver.tell(learned(action.job, action.incarnation, 1 if action.tickets else 0))

    async def call_sync(action: Action) -> None:
        if sync is not None:
            try:
                await sync(action.version)
            except Exception as why:
                driver.fail(why)
                return
        for worker in range(workers) if action.worker < 0 else (action.worker,):
            driver.tell(synced(action.job, worker))

    try:
        for event in (
            *(worker_up("rollout", i, slots=lanes) for i in range(workers)),
            *(worker_up("teacher", i) for i in range(teachers)),
            worker_up("learner"),
        ):
            driver.tell(event)
        async for action in driver:
            if action.kind == "start":
                running[action.ticket] = spawn(start(action.ticket, action.version))
            elif action.kind in ("abort", "park"):
                task = running.get(action.ticket)
                if task is not None:
                    task.cancel()
                else:
                    driver.tell(aborted(action.ticket))
            elif action.kind == "score":
                spawn(call_teacher(action))
            elif action.kind == "train":
                spawn(call_learner(action))
            elif action.kind == "sync":
                spawn(call_sync(action))
            elif action.kind == "step":
                items = tuple(payloads.pop(x.ticket.sample) for x in action.consumed)
                yield Step(action.version, action.consumed, items)
            elif action.kind == "fail":
                payloads.pop(action.ticket.sample, None)
        if (stage := s.state()["failed_stage"]) >= 0:
            raise Error(f"opd: the run ended, since the {STAGE_NAMES[stage]} failed too often")
    finally:
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if own:
            s.close()


# --- the staleness queue


@dataclass(frozen=True)
class QueueSettings:
    """None: the library's default. docs/sched/queue.md and docs/sched/policies.md have what each is."""

    batch: Optional[int] = None  #: B, sequences a train batch; 256
    tau: Optional[int] = None  #: in train batches; 4
    outstanding: Union[int, str, None] = None  #: M, permits; or "policy", "widest", which here are the same
    policy: Optional[str] = None  #: "capacity", and others of names("staleness_policy")
    concurrency: Optional[int] = None  #: of the policy "areal"
    group: Optional[int] = None  #: most permits taken at once; 1
    negative_control: bool = False

    BATCH = 256  # of opd_queue_settings, where `batch` is 0

    def as_struct(self) -> c.opd_queue_settings:
        s = c.opd_queue_settings()
        s.struct_size = sizeof(s)
        for name in ("batch", "tau", "concurrency", "group", "outstanding"):
            value = getattr(self, name)
            if value is None:
                continue
            if name == "outstanding" and isinstance(value, str):
                if value not in ("policy", "widest"):
                    raise refuse("settings.outstanding", f"is {value!r}; it is a number, policy or widest")
                s.outstanding = OUTSTANDING[value]
                continue
            value = integer("settings." + name, value, 0, INT64)
            if value == 0 and name != "tau":
                raise refuse("settings." + name, "is 0; leave it out, or None, for the default")
            setattr(s, name, c.ZERO if value == 0 else value)
        if self.policy is not None:
            s.policy = self.policy.encode()
        s.negative_control = self.negative_control
        return s


class Permit(NamedTuple):
    """Leave to generate one sequence. It is out until it was pushed and trained on, or released."""

    permit: int  #: its number; 0: none
    version: int  #: of the weights that its sequence starts with
    slot: int  #: in [0, M), unique among outstanding sequences


class Batch(NamedTuple):
    """What the learner trains on next."""

    batch: int  #: its number
    version: int  #: of the weights before its update
    items: np.ndarray  #: (n) int64; n is B, or less in the last batch of a queue that was shut down
    versions: np.ndarray  #: (n) int64: of the weights that each was started with


class Stale(NamedTuple):
    """An item that became too old in the queue."""

    item: int
    version: int  #: of its start
    permit: Optional[Permit]  #: of the policy "retry", restarted under the new version; of "drop" None


PUSHES = ("pushed", "stale", "aborted")


class StalenessQueue(Handle):
    """A bounded queue between threads that generate and a learner: it bounds how many versions of the weights lie
    between a sample's start and the update that consumes it (docs/sched/queue.md). Items are numbers of the caller's,
    int64: keys of a dict, mostly. Any thread may call.

    A `timeout` is in seconds: None for ever, 0 not at all. A wait lies in the library, where no signal interrupts it:
    `shutdown` or `abort` of another thread does.
    """

    _kind = _argument = "queue"
    _library = staticmethod(c.lib)

    def __init__(self, settings: QueueSettings = QueueSettings()):
        self._make(byref(settings.as_struct()))
        self._begin(settings)

    def _begin(self, settings: QueueSettings) -> None:
        self._most, self._group = settings.batch or settings.BATCH, settings.group or 1

    @classmethod
    def restore(cls, settings: QueueSettings, snapshot: bytes) -> StalenessQueue:
        """As it was, without the sequences whose permits were out: submit them again. Of other settings, and of bytes
        that are damaged, InvalidInput."""
        handle = c_void_p()
        raw = _bytes(snapshot)
        check(c.lib().opd_queue_restore(byref(settings.as_struct()), raw, len(raw), byref(handle)))
        made = cls.__new__(cls)
        made._handle = handle
        made._begin(settings)
        return made

    def acquire(self, n: int = 1, timeout: Optional[float] = None) -> list[Permit]:
        """`n` permits under the present version, all or none, first come first served. []: the time was over, or the
        queue was shut down or aborted."""
        n = integer("n", n, 1, self._group)
        permits, got = (c.opd_permit * n)(), c_int32()
        check(c.lib().opd_queue_acquire(self.handle, n, _seconds(timeout), permits, byref(got)))
        return [_permit(p) for p in permits] if got.value else []

    def push(self, permits: Union[Permit, Sequence[Permit]], items: Any) -> str:
        """Items (n) under their permits, or one under one; all or none, without a wait. "pushed"; "stale": too old
        under "drop" and "retry"; "aborted". Unless "pushed", permits stay with the caller."""
        given = [permits] if isinstance(permits, Permit) else list(permits)
        values = int64s("items", items, scalar=True)
        if values.size != len(given):
            raise refuse("items", f"has {values.size} entries for {len(given)} permits")
        if not given:
            raise refuse("permits", "has no entry; at least one item is pushed")
        numbers = (c_uint64 * len(given))(*(_number("permits", p) for p in given))
        pushed = c_int32()
        at = values.ctypes.data_as(ctypes.POINTER(c_int64))
        check(c.lib().opd_queue_push(self.handle, numbers, at, len(given), byref(pushed)))
        return PUSHES[pushed.value]

    def release(self, permit: Permit) -> None:
        """Gives a permit back: its sequence failed."""
        check(c.lib().opd_queue_release(self.handle, _number("permit", permit)))

    def restart(self, permit: Permit, timeout: Optional[float] = None) -> Optional[Permit]:
        """Its sequence starts again under the present version, once new weights are out. None: not in time, or the
        queue was aborted; the permit is out as before."""
        version = c_int64()
        number_ = _number("permit", permit)
        check(c.lib().opd_queue_restart(self.handle, number_, _seconds(timeout), byref(version)))
        return None if version.value < 0 else Permit(permit.permit, version.value, permit.slot)

    def pop(self, timeout: Optional[float] = None) -> Optional[Batch]:
        """The next batch, as the policy chooses it. None: the time was over, or the queue was aborted, or shut down
        and is empty. One batch is out at a time."""
        items, versions = np.empty(self._most, np.int64), np.empty(self._most, np.int64)
        out = c.opd_queue_batch()
        out.struct_size = sizeof(out)
        places = (x.ctypes.data_as(ctypes.POINTER(c_int64)) for x in (items, versions))
        check(c.lib().opd_queue_pop(self.handle, _seconds(timeout), *places, self._most, byref(out)))
        if out.batch == 0:
            return None
        return Batch(out.batch, out.version, items[: out.count].copy(), versions[: out.count].copy())

    def trained(self, batch: Batch) -> None:
        """It was trained on: until `synchronised` nothing starts on old weights."""
        check(c.lib().opd_queue_trained(self.handle, batch.batch))

    def synchronised(self, batch: Batch) -> list[Stale]:
        """The new weights are out: the version moves, permits return. Returns what became too old by that, of the
        policies "drop" and "retry"."""
        check(c.lib().opd_queue_synchronised(self.handle, batch.batch))
        room, count, found = (c.opd_stale * 64)(), c_size_t(1), []
        while count.value:
            check(c.lib().opd_queue_stale(self.handle, room, len(room), byref(count)))
            for s in room[: count.value]:
                found.append(Stale(s.item, s.version, _permit(s.permit) if s.permit.permit else None))
        return found

    def give_up(self, batch: Batch) -> None:
        """Instead of `trained`: its items go back in front. Instead of `synchronised`: the queue aborts, since
        weights that were trained are not out."""
        check(c.lib().opd_queue_give_up(self.handle, batch.batch))

    def shutdown(self) -> None:
        """No more permits; what is out is still pushed and consumed, the last batch may be short."""
        check(c.lib().opd_queue_close(self.handle))

    def abort(self) -> np.ndarray:
        """Ends every wait. Returns the items (n) int64 that lay in the queue."""
        check(c.lib().opd_queue_abort(self.handle))
        room, count, found = (c_int64 * 256)(), c_size_t(1), []
        while count.value:
            check(c.lib().opd_queue_aborted_items(self.handle, room, len(room), byref(count)))
            found += room[: count.value]
        return np.array(found, np.int64)

    def state(self) -> dict[str, int]:
        """Version and counts. At any moment acquired = consumed + returned + dropped + discarded + outstanding."""
        s = c.opd_queue_state()
        s.struct_size = sizeof(s)
        check(c.lib().opd_queue_look(self.handle, byref(s)))
        return {name: getattr(s, name) for name, *_ in s._fields_ if name != "struct_size"}

    def snapshot(self) -> bytes:
        """Version, counts and the items that lie in the queue. A batch that is out counts as put back until
        `trained`."""
        return self._snapshot("capacity")

    def close(self) -> None:
        """Frees the queue and ends every wait in it."""
        super().close()


def _permit(p: Any) -> Permit:
    return Permit(p.permit, p.version, p.slot)


def _number(argument: str, permit: Any) -> int:
    if not isinstance(permit, Permit):
        raise refuse(argument, f"is a {type(permit).__name__}; it is what acquire() returned")
    return integer(argument, permit.permit, 0, UINT64)


def _seconds(timeout: Optional[float]) -> float:
    seconds = math.inf if timeout is None else number("timeout", timeout)
    if not seconds >= 0:
        raise refuse("timeout", f"is {seconds}; a wait is 0 or longer, or None: for ever")
    return seconds


def _bytes(snapshot: Any) -> bytes:
    if not isinstance(snapshot, (bytes, bytearray, memoryview)):
        raise refuse("snapshot", f"is a {type(snapshot).__name__}; it is what snapshot() returned")
    return bytes(snapshot)


# --- the virtual cluster


@dataclass(frozen=True)
class Law:
    """A law of lengths, or of factors on durations; made by the functions below."""

    law: str
    a: float = 0.0
    b: float = 0.0
    cap: float = 0.0
    at_least: float = 0.0
    at_most: float = 0.0
    x: tuple[float, ...] = ()
    u: tuple[float, ...] = ()
    weights: tuple[float, ...] = ()
    parts: tuple[Law, ...] = ()

    def as_struct(self, keep: list[Any]) -> c.opd_distribution:
        d = c.opd_distribution()
        d.struct_size = sizeof(d)
        d.law, d.a, d.b, d.c = self.law.encode(), self.a, self.b, self.cap
        d.at_least, d.at_most = self.at_least, self.at_most
        for name in ("x", "u", "weights"):
            if values := getattr(self, name):
                array = (c_double * len(values))(*values)
                setattr(d, name, array)
                d.n = len(values)
        if self.parts:
            d.parts = (c.opd_distribution * len(self.parts))(*(p.as_struct(keep) for p in self.parts))
            d.n = len(self.parts)
        keep.append(d)
        return d


def constant(value: float) -> Law:
    return Law("constant", value)


def uniform(low: float, high: float) -> Law:
    return Law("uniform", low, high)


def exponential(mean: float) -> Law:
    return Law("exponential", mean)


def lognormal(median: float, sigma: float, *, at_least: float = 0.0, at_most: float = 0.0) -> Law:
    return Law("lognormal", median, sigma, at_least=at_least, at_most=at_most)


def pareto(alpha: float, minimum: float, cap: float = 0.0) -> Law:
    return Law("pareto", alpha, minimum, cap)


def empirical(values: Sequence[float]) -> Law:
    """Measured values, in any order."""
    return Law("empirical", x=tuple(float(v) for v in np.asarray(values).reshape(-1)))


def mixture(parts: Sequence[Law], weights: Sequence[float]) -> Law:
    if len(parts) != len(weights):
        raise refuse("mixture.weights", f"has {len(weights)} entries for {len(parts)} parts")
    return Law("mixture", parts=tuple(parts), weights=tuple(weights))


@dataclass(frozen=True)
class Job:
    """seconds = noise (fixed + per_item items + per_token tokens)"""

    fixed: float = 0.0
    per_item: float = 0.0
    per_token: float = 0.0
    noise: Optional[Law] = None

    def as_struct(self, keep: list[Any]) -> c.opd_job:
        j = c.opd_job()
        j.struct_size = sizeof(j)
        j.fixed, j.per_item, j.per_token = self.fixed, self.per_item, self.per_token
        if self.noise is not None:
            j.noise = ctypes.pointer(self.noise.as_struct(keep))
        keep.append(j)
        return j


@dataclass(frozen=True)
class Cluster:
    """Rollout workers of one kind, teachers, one learner: opd/sched/simulated.hpp has the formulas. None: the
    library's default."""

    seed: Optional[int] = None
    rollout_workers: Optional[int] = None
    lanes: Optional[int] = None
    teachers: Optional[int] = None
    teacher_slots: Optional[int] = None
    response: Optional[Law] = None
    prompt: Optional[Law] = None
    redraw: bool = False
    park_after: Optional[int] = None
    step: Optional[float] = None
    step_per_sequence: float = 0.0
    prefill: float = 0.0
    rebuild: float = 0.0
    speed_factor: Optional[float] = None
    worker_factor: Optional[Law] = None
    teacher: Optional[Job] = None
    learner: Optional[Job] = None
    sync: Optional[Job] = None
    events: tuple[
        tuple[float, Event], ...
    ] = ()  #: seconds from the start, and what happens: workers come and go, pause, close
    steps: Optional[int] = None
    seconds: Optional[float] = None
    most_events: Optional[int] = None

    def as_struct(self, keep: list[Any]) -> c.opd_cluster:
        s = c.opd_cluster()
        s.struct_size = sizeof(s)
        for f in fields(self):
            value = getattr(self, f.name)
            if value is None or f.name == "events":
                continue
            if isinstance(value, (Law, Job)):
                setattr(s, f.name, ctypes.pointer(value.as_struct(keep)))
                continue
            if value == 0 and f.name == "step":
                value = c.ZERO
            elif value == 0 and f.default is None:
                raise refuse("cluster." + f.name, "is 0; leave it out, or None, for the default")
            setattr(s, f.name, value)
        if self.events:
            s.events = (c.opd_event * len(self.events))(*(e.as_struct() for _, e in self.events))
            s.times = (c_double * len(self.events))(*(at for at, _ in self.events))
            s.event_count = len(self.events)
        keep.append(s)
        return s


@dataclass(frozen=True)
class Ledger:
    """Tokens: generated = consumed + discarded + lost + outstanding. Lags in versions, of start, oldest, mean and
    newest token."""

    steps: int
    sequences: int
    version: int
    permits: int
    seconds: float
    generated_tokens: float
    consumed_tokens: float
    discarded_tokens: float
    lost_tokens: float
    outstanding_tokens: float
    lag_mean: tuple[float, ...]
    lag_max: tuple[float, ...]
    busy_seconds: dict[str, float]
    idle: dict[str, float]  #: share of the time that the stage was not busy
    overlap: float
    throughput: float  #: consumed tokens a second after the warm-up
    held_seconds: float
    counters: dict[str, Any]
    events: int
    finished: bool
    stuck: bool  #: nothing was left to happen, and it had not finished: a deadlock
    failed_stage: Optional[str]

    @classmethod
    def of_struct(cls, s: Any) -> Ledger:
        found: dict[str, Any] = {f.name: getattr(s, f.name) for f in fields(cls)}
        for name in ("lag_mean", "lag_max"):
            found[name] = tuple(found[name])
        for name in ("busy_seconds", "idle"):
            found[name] = dict(zip(STAGES, found[name]))
        found["counters"] = _counters(s.counters)
        found["finished"], found["stuck"] = bool(s.finished), bool(s.stuck)
        found["failed_stage"] = None if s.failed_stage < 0 else STAGE_NAMES[s.failed_stage]
        return cls(**found)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Report:
    ledger: Ledger
    metrics: dict[str, Any]  #: docs/sched/metrics.md has the names


def simulate(cluster: Cluster = Cluster(), settings: Settings = Settings()) -> Report:
    """Runs the schedule on the cluster in virtual time. Draws depend on the seed alone: every schedule meets the same
    lengths."""
    if cluster.steps is None and cluster.seconds is None and settings.sequences is None and settings.available is None:
        raise refuse("cluster.steps", "is left out, as are seconds and settings.sequences: the run would have no end")
    keep: list[Any] = []
    ledger, report = c.opd_ledger(), c_void_p()
    ledger.struct_size = sizeof(ledger)
    lib = c.lib()
    check(lib.opd_simulate(byref(cluster.as_struct(keep)), byref(settings.as_struct()), byref(ledger), byref(report)))
    try:
        text = lib.opd_report_json(report)
        return Report(Ledger.of_struct(ledger), json.loads(text.decode())["metrics"])
    finally:
        lib.opd_report_destroy(report)


def names(table: str) -> dict[str, str]:
    """The names of "schedule", "staleness_policy", "weight_update" and "law", and what each is."""
    from .estimators import names as of_table

    return of_table(table)
