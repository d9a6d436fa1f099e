# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A scheduler over workers that are actors of some engine: all of opd.ray but Ray.

    Machine     the scheduler, in an actor: batches of events in, actions and snapshots out
    Log         what it was told since its last snapshot, so that another one goes on where it died
    Desk        actions to calls of workers; their answers, failures and deaths to events
    …Stage      around the user's object, in the actor of a worker
    Loop        moves all that: the one process that owns the payloads

An engine (opd/ray.py; the tests have one without processes) has

    begin(worker, life, crew) -> token            makes the actor of this life; answers with what its begin() returned
    ask(call) -> (token, names)                   call.method(*call.args), and names of its further results
    end(worker)                                   kills the actor
    open_machine(settings, workers, snapshot, abandon), tell(method, args) -> token, end_machine()
    wait(seconds) -> [Outcome]                    what came; waits for the first
    put(value) -> name, get(name) -> value        of the object store
    close()

A payload's name is (name of an object, entry): one object has all that came with one answer.
"""

from __future__ import annotations

import collections
import logging
import math
import os
import pickle
import socket
import time
from dataclasses import dataclass, field
from typing import Any, Callable, Iterator, NamedTuple, Optional

from . import sched
from ._ledger import Ledger, Tokens
from .errors import Error, InternalError, InvalidInput, refuse
from .sched import Action, Consumed, Event, Scheduler, Settings, Ticket, Versions

_log = logging.getLogger("opd.ray")

Worker = tuple[str, int]  # stage, number


@dataclass(frozen=True)
class Workers:
    """A stage's workers: `count` actors, each with its own cls(*args, **kwargs). `slots`: sequences that a rollout
    worker runs at once, calls that a teacher is given ahead. `options`: of the engine, for the actor."""

    cls: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    count: int = 1
    slots: int = 1
    options: dict[str, Any] = field(default_factory=dict)


class Item(NamedTuple):
    """A sequence of a batch, as the learner gets it."""

    ticket: Ticket
    start: int  #: version of its start
    versions: Versions
    payload: Any  #: the rollout worker's
    score: Any  #: the teacher's


class Step(NamedTuple):
    """An update: the version that it made, and what it consumed."""

    version: int
    consumed: tuple[Consumed, ...]

    @property
    def lag(self) -> int:
        """The largest of the batch, in versions."""
        return max((self.version - 1 - c.start for c in self.consumed), default=0)


def _process() -> tuple[int, str]:
    return os.getpid(), socket.gethostname()


# --- the scheduler's side of the wire


class Said(NamedTuple):
    """The scheduler's answer to a batch of events."""

    actions: list[Action]
    deadline: float
    needed_from: int
    weights_job: int
    finished: bool
    failed_stage: int
    refused: list[str]
    process: tuple[int, str]
    snapshot: Optional[bytes]
    outstanding: list[tuple[Ticket, str]]  # with the snapshot
    lives: dict[Worker, int]  # likewise


class Machine:
    """The scheduler. Equal batches at equal times give equal answers, whatever process it is in."""

    def __init__(
        self, settings: Settings, workers: list[Worker], snapshot: Optional[bytes] = None, abandon: bool = False
    ):
        self._workers = workers
        self._scheduler = Scheduler(settings) if snapshot is None else Scheduler.restore(settings, snapshot)
        if abandon:
            self._scheduler.abandon_workers()

    def call(self, method: str, args: tuple[Any, ...]) -> Any:
        return getattr(self, method)(*args)

    def on(self, events: list[Event], now: float, save: bool) -> Said:
        """All of the events, at `now`. What the scheduler refuses of a rollout is a failed attempt. With a snapshot if
        `save`, and after every step."""
        s = self._scheduler
        actions: list[Action] = []
        refused: list[str] = []
        for event in events or [sched.TICK]:
            try:
                actions += s.on(event, now)
            except InvalidInput as why:
                if event.kind != "rolled_out" or event.ticket is None:
                    raise
                refused.append(str(why))
                actions += s.on(sched.rollout_failed(event.ticket), now)
        saves = save or any(a.kind in ("step", "finished") for a in actions)
        look = s.state()
        return Said(
            actions,
            s.next_deadline(),
            look["needed_from"],
            look["weights_job"],
            bool(look["finished"]),
            look["failed_stage"],
            refused,
            _process(),
            s.snapshot() if saves else None,
            [(q.ticket, q.where) for q in s.outstanding()] if saves else [],
            {w: s.worker(*w)[0] for w in self._workers} if saves else {},
        )

    def again(self, batches: list[tuple[list[Event], float, bool]]) -> list[Said]:
        return [self.on(*batch) for batch in batches]


class Log:
    """The last snapshot, and every batch since: of which all but the last were answered."""

    def __init__(self, snapshot: Optional[bytes] = None, abandon: bool = False):
        self.snapshot, self.abandon = snapshot, abandon
        self.batches: list[tuple[list[Event], float, bool]] = []
        self._acted: list[int] = []  # actions in the answers

    def __len__(self) -> int:
        return len(self.batches)

    def told(self, events: list[Event], now: float, save: bool) -> None:
        self.batches.append((events, now, save))

    def heard(self, said: Said) -> None:
        if said.snapshot is None:
            self._acted.append(len(said.actions))
        else:
            self.snapshot, self.abandon = said.snapshot, False
            self.batches, self._acted = [], []

    def heard_again(self, all_said: list[Said]) -> Said:
        """The answer to the last batch. Those before were carried out, and must be what they were."""
        if [len(s.actions) for s in all_said[:-1]] != self._acted:
            raise InternalError("opd: ray: the restored scheduler decides otherwise than the one before")
        self.heard(all_said[-1])
        return all_said[-1]


# --- the workers' side


class Lost(Exception):
    """What was named can't be had any more."""


def kind_of(error: BaseException) -> str:
    """What an error of Ray's says of the call or the object: "failed", the user's code threw; "lost", an object can't
    be had; else "died": nobody knows how far the call came. By names: releases of Ray differ in which there are."""
    names = {c.__name__ for c in type(error).__mro__}
    if "RayTaskError" in names:
        return "failed"
    return "lost" if "ObjectLostError" in names else "died"


class _Stage:
    """`fetch(name)` gives an object of the store, or raises Lost."""

    def __init__(self, crew: Workers, fetch: Callable[[Any], Any]):
        self._crew, self._fetch = crew, fetch
        self._stage = self._make()

    def _make(self) -> Any:
        return self._crew.cls(*self._crew.args, **self._crew.kwargs)

    def begin(self) -> tuple[int, str]:
        return _process()

    def call(self, method: str, args: tuple[Any, ...]) -> Any:
        """`args` are one argument, so that the engine does not look into them."""
        return getattr(self, method)(*args)

    def _entries(self, names: list[Any]) -> list[Any]:
        """Of each name what it names; _Nothing where it is lost."""
        objects: dict[Any, Any] = {}
        found = []
        for name in names:
            if name is None:
                found.append(_NOTHING)
                continue
            where, entry = name
            if where not in objects:
                try:
                    objects[where] = self._fetch(where)
                except Lost:
                    objects[where] = None
            found.append(_NOTHING if objects[where] is None else objects[where][entry])
        return found


_NOTHING = object()


class RolloutStage(_Stage):
    """The user's object has

    install(weights, version)   what the learner published; before the first update nothing is installed
    start(ticket)               begins sequence ticket.sample
    step()                      one quantum of all that run; returns [(ticket, payload, tokens)] of those that finished.
                                `tokens`: how many, all of the weights that it began with; else a sched.Versions
    abort(ticket)               optional: let go of it
    drawn(ticket)               optional: how many tokens it has; asked before it is let go of
    """

    PATIENCE = 0.1  # seconds for which a call goes on while nothing finishes
    GATHER = 0.002  # and while something has

    def __init__(self, crew: Workers, fetch: Callable[[Any], Any]):
        super().__init__(crew, fetch)
        self._running: dict[Ticket, int] = {}

    def roll(self, orders: list[tuple[Any, ...]]) -> tuple[list[tuple[Any, ...]], list[Any]]:
        """Takes orders, then steps. Returns replies, and the payloads that they name by their place."""
        replies: list[tuple[Any, ...]] = []
        payloads: list[Any] = []
        for what, *rest in orders:
            getattr(self, "_" + what)(replies, *rest)
        began = time.monotonic()
        while self._running:
            try:
                for ticket, payload, tokens in self._stage.step():
                    if (version := self._running.pop(ticket, None)) is None:
                        _log.warning("step() finished %s, which does not run here", ticket)
                        continue
                    versions = tokens if isinstance(tokens, tuple) else Versions.of(version, int(tokens))
                    replies.append(("rolled_out", ticket, versions, len(payloads)))
                    payloads.append(payload)
            except Exception as why:
                _log.warning("step() failed, and with it %d sequences", len(self._running), exc_info=True)
                for ticket in list(self._running):
                    replies.append(("failed", ticket, repr(why), self._let_go(ticket)))
            took = time.monotonic() - began
            if took >= self.PATIENCE or (payloads and took >= self.GATHER):
                break
        return replies, payloads

    def _install(self, replies: list[tuple[Any, ...]], job: int, version: int, name: Any) -> None:
        if job != 0:
            try:
                weights = self._fetch(name)
            except Lost:
                replies.append(("weights_lost", job))
                return
            self._stage.install(weights, version)
        replies.append(("synced", job))

    def _start(self, replies: list[tuple[Any, ...]], ticket: Ticket, version: int) -> None:
        try:
            self._stage.start(ticket)
            self._running[ticket] = version
        except Exception as why:
            _log.warning("start() of sequence %d failed", ticket.sample, exc_info=True)
            replies.append(("failed", ticket, repr(why), 0))

    def _abort(self, replies: list[tuple[Any, ...]], ticket: Ticket) -> None:
        if ticket in self._running:
            replies.append(("aborted", ticket, self._let_go(ticket)))

    def _let_go(self, ticket: Ticket) -> Optional[int]:
        """How many tokens it had; None: the object does not say."""
        del self._running[ticket]
        drawn = getattr(self._stage, "drawn", None)
        tokens = None if drawn is None else int(drawn(ticket))
        if (abort := getattr(self._stage, "abort", None)) is not None:
            abort(ticket)
        return tokens


class TeacherStage(_Stage):
    """The user's object has score(payloads), which returns a score of each; None: not scored, it is asked again."""

    def score(self, names: list[Any]) -> tuple[tuple[list[int], list[int]], list[Any]]:
        """The places of `names` that were scored, and of those that are lost; and all scores."""
        payloads = self._entries(names)
        lost = [i for i, p in enumerate(payloads) if p is _NOTHING]
        there = [i for i, p in enumerate(payloads) if p is not _NOTHING]
        if not there:
            return ([], lost), []
        answers = list(self._stage.score([payloads[i] for i in there]))
        if len(answers) != len(there):
            raise ValueError(f"score() returned {len(answers)} scores of {len(there)} sequences")
        scores: list[Any] = [None] * len(names)
        for i, answer in zip(there, answers):
            scores[i] = answer
        return ([i for i in there if scores[i] is not None], lost), scores


class LearnerStage(_Stage):
    """The user's object has

    train(items, version)   learns from a batch of Item; what it has then is `version`
    weights()               what rollout workers install
    state()                 optional: all that load() needs to go on from here (optimizer); weights() without it
    load(state)
    """

    def __init__(self, crew: Workers, fetch: Callable[[Any], Any]):
        super().__init__(crew, fetch)
        self._at: Optional[int] = 0  # the job whose weights the object has; None: none in particular

    def train(self, job: int, version: int, from_job: int, state: Any, items: list[tuple[Any, ...]]) -> tuple[Any, ...]:
        """(places of items whose payload or score is lost, weights, state). If there are any, nothing is learnt."""
        values = self._entries([name for item in items for name in item[3:]])
        lost = [i for i in range(len(items)) if any(v is _NOTHING for v in values[2 * i : 2 * i + 2])]
        if lost:
            return lost, None, None
        if self._at != from_job:
            self._go_to(from_job, state)
        self._at = None
        if items:
            batch = [Item(*item[:3], *values[2 * i : 2 * i + 2]) for i, item in enumerate(items)]
            self._stage.train(batch, version + 1)
        weights = self._stage.weights()
        keeps = getattr(self._stage, "state", None)
        made = [], weights, weights if keeps is None else keeps()
        self._at = job
        return made

    def _go_to(self, job: int, state: Any) -> None:
        self._at = None
        if job == 0:
            self._stage = self._make()
        elif state is None:
            raise Lost(f"the state of job {job}")
        else:
            self._stage.load(self._fetch(state))


STAGES = {"rollout": RolloutStage, "teacher": TeacherStage, "learner": LearnerStage}
RESULTS = {"roll": 2, "score": 2, "train": 3}  # of each call: the answer, and objects that stay in the store


# --- what lies between


class Call(NamedTuple):
    """For a worker."""

    worker: Worker
    life: int
    method: str
    args: tuple[Any, ...]
    job: int = 0
    tickets: tuple[Ticket, ...] = ()


class Outcome(NamedTuple):
    """Of a token: a value, or what went wrong: "failed" (it threw), "died" (nobody knows how far it came), "lost"."""

    token: Any
    value: Any = None
    wrong: str = ""
    why: Optional[BaseException] = None


@dataclass
class _Record:
    """A worker, as the desk sees it."""

    slots: int
    life: int = 0
    up: bool = False
    beginning: bool = False
    away: bool = False  # for good
    again: float = -math.inf  # when its next life may begin
    late: float = math.inf  # beginning: when somebody is to hear that it takes long
    in_vain: int = 0  # lives in a row that answered no call
    bad_installs: int = 0  # in a row
    busy: bool = False
    orders: list[tuple[Any, ...]] = field(default_factory=list)
    running: dict[Ticket, int] = field(default_factory=dict)
    process: tuple[int, str] = (0, "")


@dataclass
class _Payload:
    attempt: int
    start: int
    versions: Versions
    rolled: Any
    scored: Any = None


class Desk:
    """Turns actions into calls, and what became of calls into events. A worker's death ends its life: its next actor
    is another one. Nothing is asked twice."""

    MOST_IN_VAIN = 10
    MOST_BAD_INSTALLS = 3
    LONGEST_WAIT = 10.0
    LONG = 60.0

    def __init__(self, crews: dict[str, Workers], ledger: Ledger):
        self.ledger = ledger
        self.workers = {(s, n): _Record(c.slots) for s, c in crews.items() for n in range(c.count)}
        self.events: list[Event] = []
        self.ended: list[Worker] = []  # whose actors are to be killed
        self.payloads: dict[int, _Payload] = {}  # by sample
        self.publications: dict[int, tuple[Any, Any]] = {}  # by job: names of weights and state
        self.given_up: collections.Counter[str] = collections.Counter()
        self.deaths: collections.Counter[str] = collections.Counter()
        self.lost_payloads = 0
        self._calls: list[Call] = []

    def go_on(self, said: Said) -> None:
        """After the scheduler's first answer, which is that of a run that goes on, maybe."""
        for worker, life in said.lives.items():
            self.workers[worker].life = life
        drawn = {t.sample: t.attempt for t, where in said.outstanding if where not in ("waiting", "rollout")}
        self.payloads = {sample: p for sample, p in self.payloads.items() if sample in drawn}
        for sample, p in self.payloads.items():
            p.attempt = drawn[sample]

    def due(self, now: float) -> list[tuple[Worker, int]]:
        """Who is to begin which life."""
        found = []
        for w, r in self.workers.items():
            if not (r.up or r.beginning or r.away) and r.again <= now:
                r.beginning, r.life, r.late = True, r.life + 1, now + self.LONG
                found.append((w, r.life))
            elif r.beginning and r.late <= now:
                r.late = math.inf
                _log.warning("%s %d does not come up for %.0f s: has Ray the resources for it?", *w, self.LONG)
        return found

    def next_due(self) -> float:
        waiting = (r.again for r in self.workers.values() if not (r.up or r.beginning or r.away))
        return min(waiting, default=math.inf)

    def began(self, worker: Worker, life: int, process: tuple[int, str] = (0, "")) -> None:
        r = self.workers[worker]
        if life != r.life or r.up:
            return
        r.up, r.beginning, r.process = True, False, process
        self.events.append(sched.worker_up(*worker, life, r.slots))

    # --- what the scheduler wants

    def carry_out(self, a: Action) -> None:
        if a.kind == "start":
            if r := self._living("rollout", a.worker, a.incarnation):
                r.running[a.ticket] = a.version
                r.orders.append(("start", a.ticket, a.version))
        elif a.kind in ("abort", "park"):  # nothing is parked here: what it has drawn is lost
            if (r := self._living("rollout", a.worker, a.incarnation)) and a.ticket in r.running:
                r.orders.append(("abort", a.ticket))
        elif a.kind == "sync":
            if a.job and a.job not in self.publications:  # a checkpoint that could not have them
                self.events.append(sched.weights_lost(a.job))
                return
            weights = self.publications[a.job][0] if a.job else None
            for (stage, number), r in self.workers.items():
                if stage == "rollout" and r.up and a.worker in (-1, number):
                    r.orders.append(("install", a.job, a.version, weights))
        elif a.kind == "score":
            if self._living("teacher", a.worker, a.incarnation):
                names = [self._of(t).rolled for t in a.tickets]
                call = Call(("teacher", a.worker), a.incarnation, "score", (names,), a.job, a.tickets)
                self._calls.append(call)
        elif a.kind == "train":
            if self._living("learner", 0, a.incarnation):
                items = [(t, p.start, p.versions, p.rolled, p.scored) for t in a.tickets for p in (self._of(t),)]
                state = self.publications.get(a.from_job, (None, None))[1]
                args = (a.job, a.version, a.from_job, state, items)
                self._calls.append(Call(("learner", 0), a.incarnation, "train", args, a.job, a.tickets))
        elif a.kind == "lost":
            if self._living(a.stage, a.worker, a.incarnation):
                _log.warning("%s %d missed a deadline", a.stage, a.worker)
                self._end((a.stage, a.worker), 0.0)
        elif a.kind == "step":
            for c in a.consumed:
                self.payloads.pop(c.ticket.sample, None)
        elif a.kind == "fail":
            self.given_up[a.why] += 1
            _log.warning("sequence %d was given up: %s", a.ticket.sample, a.why)
            self.payloads.pop(a.ticket.sample, None)

    def calls(self) -> list[Call]:
        """What is to be asked now. A rollout worker has one call at a time, with all its orders."""
        made, self._calls = self._calls, []
        for (stage, number), r in self.workers.items():
            if stage == "rollout" and r.up and not r.busy and (r.orders or r.running):
                made.append(Call((stage, number), r.life, "roll", (r.orders,)))
                r.orders, r.busy = [], True
        return [c for c in made if self._living(*c.worker, c.life)]

    def keep_from(self, needed: int, weights: int) -> None:
        for job in [j for j in self.publications if j < needed and j != weights]:
            del self.publications[job]

    # --- what became of it

    def answered(self, call: Call, value: Any, names: list[Any]) -> None:
        """`names`: of the results beside the answer."""
        r = self._living(*call.worker, call.life)
        if not r:
            return
        r.in_vain = 0
        stage, number = call.worker
        if call.method == "roll":
            r.busy = False
            for reply in value:
                self._replied(r, number, names[0], *reply)
        elif call.method == "score":
            there, lost = value
            for place in there:
                self._of(call.tickets[place]).scored = (names[0], place)
            self._lost(call, lost)
            if not there:
                self.events.append(sched.score_failed(call.job, number, call.life))
            else:
                some = () if len(there) == len(call.tickets) else tuple(call.tickets[i] for i in there)
                self.events.append(sched.scored(call.job, number, call.life, some))
        elif value:
            self._lost(call, value)
        else:
            self.publications[call.job] = (names[0], names[1])
            self.events.append(sched.learned(call.job, call.life, 1 if call.tickets else 0))

    def _lost(self, call: Call, places: list[int]) -> None:
        if not places:
            return
        _log.warning("%s of %s %d: the payloads of %d sequences are lost", call.method, *call.worker, len(places))
        self.lost_payloads += len(places)
        self.events.append(sched.payload_lost([call.tickets[i] for i in places], call.job))

    def _replied(self, r: _Record, number: int, where: Any, what: str, of: Any, *rest: Any) -> None:
        if what == "synced":
            r.bad_installs = 0
            self.events.append(sched.synced(of, number, r.life))
        elif what == "weights_lost":
            self.events.append(sched.weights_lost(of))
        elif (start := r.running.pop(of, None)) is None:
            return
        elif what == "rolled_out":
            versions, entry = rest
            known = self.payloads.get(of.sample)
            if known is None or known.attempt < of.attempt:
                self.payloads[of.sample] = _Payload(of.attempt, start, versions, (where, entry))
            self.events.append(sched.rolled_out(of, versions))
        elif what == "failed":
            _log.warning("rollout of sequence %d failed: %s", of.sample, rest[0])
            self.ledger.drawn(of, rest[1])
            self.events.append(sched.rollout_failed(of))
        else:
            self.ledger.drawn(of, rest[0])
            self.events.append(sched.aborted(of))

    def went_wrong(self, call: Call, how: str, why: Optional[BaseException], now: float) -> None:
        """The call has no answer. Unless it threw, nobody knows how far it came: its worker's life is over."""
        r = self._living(*call.worker, call.life)
        if not r:
            return
        if how == "failed" and call.method != "roll":
            _log.warning("%s() of %s %d failed: %s", call.method, *call.worker, why)
            failed = (
                sched.score_failed(call.job, call.worker[1], call.life)
                if call.method == "score"
                else sched.learn_failed(call.job, call.life)
            )
            self.events.append(failed)
            return
        if how == "failed":  # an install, mostly: its sequences are not to blame
            _log.warning("rollout %d failed: %s", call.worker[1], why)
            r.bad_installs += 1
        self.died(call.worker, call.life, why, now)

    def died(self, worker: Worker, life: int, why: Optional[BaseException], now: float) -> None:
        r = self.workers[worker]
        if life != r.life or not (r.up or r.beginning):
            return
        _log.warning("%s %d died in life %d: %s", *worker, life, str(why).partition("\n")[0])
        self.deaths[worker[0]] += 1
        r.in_vain += 1
        if r.up:
            self.events.append(sched.worker_down(*worker, life))
        elif r.in_vain >= self.MOST_IN_VAIN:
            raise Error(f"opd: ray: {worker[0]} {worker[1]} does not come up: {why}") from why
        self._end(worker, now)
        if r.bad_installs >= self.MOST_BAD_INSTALLS:
            r.away = True
            if all(x.away for (stage, _), x in self.workers.items() if stage == "rollout"):
                raise Error(f"opd: ray: no rollout worker can install weights: {why}") from why

    def _end(self, worker: Worker, now: float) -> None:
        r = self.workers[worker]
        r.up = r.beginning = r.busy = False
        r.orders, r.running = [], {}
        r.again = now + min(self.LONGEST_WAIT, 0.025 * 2**r.in_vain) if r.in_vain else now
        self.ended.append(worker)

    def _living(self, stage: str, number: int, life: int) -> Optional[_Record]:
        r = self.workers.get((stage, number))
        return r if r and r.up and r.life == life else None

    def _of(self, t: Ticket) -> _Payload:
        p = self.payloads.get(t.sample)
        return p if p and p.attempt == t.attempt else _Payload(t.attempt, 0, Versions.of(0, 0), None)


class Loop:
    """A run: iterating it runs it, and gives every Step. It ends by itself, after settings.sequences or close().

    It owns all payloads, weights and states; the scheduler's actor, which has none, may die: another one goes on from
    the last snapshot and what the first was told since. With `checkpoint`, a file, the run itself may: one that is made
    of the same file goes on from the last step that was written (pickle: read nobody else's).
    """

    SNAPSHOT_EVERY = 64  # batches
    MOST_IN_VAIN = 10

    def __init__(
        self,
        settings: Settings,
        engine: Any,
        crews: dict[str, Workers],
        checkpoint: Optional[str] = None,
        checkpoint_every: int = 1,
        clock: Callable[[], float] = time.monotonic,
    ):
        for stage, crew in crews.items():
            if crew.count < 1 or crew.slots < 1:
                raise refuse(stage, f"has {crew.count} workers of {crew.slots} slots; both are at least 1")
        if crews["learner"].count != 1 or crews["learner"].slots != 1:
            raise refuse("learner", "is one worker with one slot")
        if checkpoint_every < 1:
            raise refuse("checkpoint_every", f"is {checkpoint_every}; it is at least 1")
        Scheduler(settings).close()  # refuses what is wrong with them, here
        self.settings, self.engine, self.crews = settings, engine, crews
        self._ledger = Ledger(settings)
        self.desk = Desk(crews, self._ledger)
        self.scheduler_deaths = 0
        self.scheduler_process: tuple[int, str] = (0, "")
        self.version = settings.first_version
        self._checkpoint, self._every, self._clock = checkpoint, checkpoint_every, clock
        self._base, self._began = 0.0, 0.0
        self._told: Any = None  # the token of what the scheduler is asked
        self._deadline = -math.inf
        self._in_vain = 0
        self._unsaved = 0
        self._known = False  # whether it has answered
        self._finished, self._failed_stage = False, -1
        self._weights_job = 0
        self._steps: collections.deque[Step] = collections.deque()
        self._tokens: dict[Any, Any] = {}
        self.on_told: Optional[Callable[[list[Event], float, Said], None]] = None  #: hears what was decided
        self._log = Log()

    # --- for the user

    def tell(self, event: Event) -> None:
        """Hands in what the user wants: sched.PAUSE, RESUME, CLOSE, STOP, resize(permits)."""
        self.desk.events.append(event)

    def close(self) -> None:
        """Nothing new is admitted; what is under way is finished, then the run ends."""
        self.tell(sched.CLOSE)

    def processes(self) -> dict[Worker, tuple[int, str]]:
        """Process id and host of all that are up; ("scheduler", 0) among them."""
        found = {w: r.process for w, r in self.desk.workers.items() if r.up}
        return found | {("scheduler", 0): self.scheduler_process}

    def weights(self) -> Any:
        """What the learner published last; None: the run has made no update."""
        return self._published(0)

    def state(self) -> Any:
        """Its state then."""
        return self._published(1)

    def tokens(self) -> Tokens:
        """Where the tokens went so far."""
        return self._ledger.tokens()

    def _published(self, which: int) -> Any:
        found = self.desk.publications.get(self._weights_job)
        return None if found is None else self.engine.get(found[which])

    def __iter__(self) -> Iterator[Step]:
        if self._told is not None or self._known:
            raise Error("opd: ray: a run runs once; make another, of its checkpoint if it is to go on")
        try:
            self._open()
            while not self._finished:
                self._act()
                for outcome in self.engine.wait(self._patience()):
                    self._hear(outcome)
                while self._steps:
                    yield self._steps.popleft()
            if self._failed_stage >= 0:
                stage = sched.STAGE_NAMES[self._failed_stage]
                raise Error(f"opd: ray: the run ended, since the {stage} failed too often")
        finally:
            self.engine.close()

    # --- the loop

    def _now(self) -> float:
        return self._base + self._clock() - self._began

    def _patience(self) -> float:
        due = self.desk.next_due() if self._known else math.inf
        if self._told is None:
            due = min(due, self._deadline)
            if self.desk.events:
                return 0.0
        return min(max(0.0, due - self._now()), 0.5)

    def _open(self) -> None:
        if self._checkpoint is not None and os.path.exists(self._checkpoint):
            with open(self._checkpoint, "rb") as file:
                self._resume(pickle.load(file))
            Scheduler.restore(self.settings, self._log.snapshot or b"").close()
        self._began = self._clock()
        self._open_machine()
        self._tell([], True)

    def _act(self) -> None:
        if self._known:
            for worker, life in self.desk.due(self._now()):
                token = self.engine.begin(worker, life, self.crews[worker[0]])
                self._tokens[token] = (worker, life)
        for call in self.desk.calls():
            token, names = self.engine.ask(call)
            self._tokens[token] = (call, names)
        if self._told is None and (self.desk.events or self._now() >= self._deadline):
            events, self.desk.events = self.desk.events, []
            self._tell(events, len(self._log) >= self.SNAPSHOT_EVERY)

    def _hear(self, o: Outcome) -> None:
        if o.token == self._told:
            return self._scheduler_says(o)
        of, more = self._tokens.pop(o.token)
        now = self._now()
        if isinstance(of, Call):
            if o.wrong:
                self.desk.went_wrong(of, o.wrong, o.why, now)
            else:
                self.desk.answered(of, o.value, more)
        elif o.wrong:
            self.desk.died(of, more, o.why, now)
        else:
            self.desk.began(of, more, o.value)
        self._end_lives()

    def _end_lives(self) -> None:
        while self.desk.ended:
            self.engine.end(self.desk.ended.pop())

    def _open_machine(self) -> None:
        self.engine.open_machine(self.settings, list(self.desk.workers), self._log.snapshot, self._log.abandon)

    def _tell(self, events: list[Event], save: bool) -> None:
        now = self._now()
        self._log.told(events, now, save)
        self._told = self.engine.tell("on", (events, now, save))

    def _scheduler_says(self, o: Outcome) -> None:
        if o.wrong == "failed":
            raise o.why if isinstance(o.why, Exception) else InternalError(f"opd: ray: the scheduler failed: {o.why}")
        if o.wrong:
            self.scheduler_deaths += 1
            self._in_vain += 1
            if self._in_vain >= self.MOST_IN_VAIN:
                raise Error(f"opd: ray: the scheduler's actor does not come up: {o.why}") from o.why
            _log.warning("the scheduler's actor died: %s", str(o.why).partition("\n")[0])
            self.engine.end_machine()
            self._open_machine()
            self._told = self.engine.tell("again", (self._log.batches,))
            return
        self._told, self._in_vain = None, 0
        events, now, _ = self._log.batches[-1]
        if isinstance(o.value, list):
            said = self._log.heard_again(o.value)
        else:
            said = o.value
            self._log.heard(said)
        self.scheduler_process = said.process
        self._ledger.told(events, now, said.actions)
        if self.on_told is not None:
            self.on_told(events, now, said)
        for text in said.refused:
            _log.warning("%s", text)
        self._weights_job = said.weights_job
        steps = [Step(a.version, a.consumed) for a in said.actions if a.kind == "step"]
        if steps:
            self.version, self._unsaved = steps[-1].version, self._unsaved + len(steps)
        if not self._known:
            self.desk.go_on(said)
        if self._checkpoint is not None and said.snapshot is not None:
            if not self._known or said.finished or self._unsaved >= self._every:
                self._save(said, now)
        self._known = True
        self._deadline = said.deadline
        for a in said.actions:
            self.desk.carry_out(a)
        self._end_lives()
        self.desk.keep_from(said.needed_from, said.weights_job)
        self._steps += steps
        self._finished, self._failed_stage = said.finished, said.failed_stage

    # --- checkpoints

    def _save(self, said: Said, now: float) -> None:
        """All that a run needs to go on from this snapshot, in one file."""
        assert self._checkpoint is not None
        held: dict[Any, Any] = {}

        def value(name: Any) -> Any:
            if name is None:
                return None
            if name[0] not in held:
                held[name[0]] = self._get(name[0])
            entries = held[name[0]]
            return None if entries is None else (entries[name[1]],)

        sequences = []
        for ticket, where in said.outstanding:
            p = self.desk.payloads.get(ticket.sample)
            if p is None or where in ("waiting", "rollout") or p.attempt != ticket.attempt:
                continue
            sequences.append((ticket.sample, p.attempt, p.start, p.versions, value(p.rolled), value(p.scored)))
        kept = {j: n for j, n in self.desk.publications.items() if j >= said.needed_from or j == said.weights_job}
        read = {j: tuple(map(self._get, names)) for j, names in kept.items()}
        published = {j: values for j, values in read.items() if not any(v is None for v in values)}
        content = {
            "opd.ray": 1,
            "now": now,
            "version": self.version,
            "snapshot": said.snapshot,
            "sequences": sequences,
            "publications": published,
            "weights_job": said.weights_job,
            "ledger": self._ledger,
        }
        half = self._checkpoint + ".new"
        with open(half, "wb") as file:
            pickle.dump(content, file, pickle.HIGHEST_PROTOCOL)
            file.flush()
            os.fsync(file.fileno())
        os.replace(half, self._checkpoint)
        self._unsaved = 0

    def _get(self, name: Any) -> Any:
        try:
            return self.engine.get(name)
        except Lost:
            return None

    def _resume(self, content: Any) -> None:
        if not isinstance(content, dict) or content.get("opd.ray") != 1:
            raise refuse("checkpoint", f"{self._checkpoint} is none of opd.ray")
        self._log = Log(content["snapshot"], abandon=True)
        self._base, self.version = content["now"], content["version"]
        self._weights_job = content["weights_job"]
        self._ledger = self.desk.ledger = content.get("ledger", self._ledger)
        self._ledger.go_on([s[0] for s in content["sequences"] if s[4]])
        rolled = [s[4][0] if s[4] else None for s in content["sequences"]]
        scored = [s[5][0] if s[5] else None for s in content["sequences"]]
        if content["sequences"]:
            of_rolled, of_scored = self.engine.put(rolled), self.engine.put(scored)
            for i, (sample, attempt, start, versions, has, has_score) in enumerate(content["sequences"]):
                name, score = (of_rolled, i) if has else None, (of_scored, i) if has_score else None
                self.desk.payloads[sample] = _Payload(attempt, start, versions, name, score)
        for job, (weights, state) in content["publications"].items():
            self.desk.publications[job] = (self.engine.put(weights), self.engine.put(state))
