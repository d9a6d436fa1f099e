# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Where the tokens of a run of actors ended: what opd/sched/meters/token_ledger.hpp counts, from batches of events and
the actions that they led to. In the run's own process, since the scheduler's actor may die."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any, Optional, Sequence

from .sched import Action, Event, Settings, Ticket, Versions


@dataclass(frozen=True)
class Tokens:
    """brought + generated = learnt + discarded + lost + outstanding"""

    generated: int = 0  #: response tokens that attempts have drawn, counted when an attempt ends
    brought: int = 0  #: what a resumed run began with
    learnt: int = 0  #: of sequences that an update has consumed
    discarded: int = 0  #: by the rules: too stale, or begun anew because the weights changed
    lost: int = 0  #: by faults: of attempts that failed, of payloads that are gone, of what was given up
    outstanding: int = 0  #: drawn, and no update has consumed them yet
    regenerated: int = 0  #: of discarded and lost: those whose sequence was started again
    unreported: int = 0  #: attempts that ended without a word of what they had drawn: in no other figure
    busy_seconds: float = 0.0  #: of rollout workers that run a sequence
    idle_seconds: float = 0.0  #: of those that are up and run none

    @property
    def idle(self) -> Optional[float]:
        """Tokens that idle workers would have drawn; None: nobody was busy."""
        return self.idle_seconds * self.generated / self.busy_seconds if self.busy_seconds > 0 else None

    def table(self, name: str = "run") -> str:
        """As opd-train's and cluster_sim's: shares of all that was generated or brought."""
        every = self.generated + self.brought
        shown = (self.learnt, self.discarded, self.lost, self.outstanding, self.regenerated, self.idle)
        shares = ["-" if n is None or every == 0 else f"{100 * n / every:.1f}%" for n in shown]
        heads = ("learnt", "discarded", "lost", "outstanding", "regenerated", "idle")
        width, widths = max(8, len(name)), (7, 9, 7, 11, 11, 7)
        head = f"{'tokens':<{width}}  {'generated':>13}" + "".join(f"  {h:>{w}}" for h, w in zip(heads, widths))
        row = f"{name:<{width}}  {every:>13}" + "".join(f"  {s:>{w}}" for s, w in zip(shares, widths))
        return head + "\n" + row + "\n"


@dataclass
class _Attempt:
    worker: int
    life: int
    since: float
    end: str = "lost"  # what its tokens are, unless it is rolled out and wanted
    wanted: bool = True
    again: bool = False  # its sequence was started again


class Ledger:
    def __init__(self, settings: Settings):
        self._deadline = settings.rollout_deadline or math.inf
        self._sums: dict[str, Any] = {f.name: 0 for f in fields(Tokens)}
        self._held: dict[int, int] = {}  # by sample: tokens of a whole response
        self._thrown: dict[int, int] = {}  # by sample, since its latest start
        self._attempts: dict[tuple[int, int], _Attempt] = {}  # by sample and number
        self._up: dict[int, int] = {}  # rollout workers, and how many sequences each runs
        self._now: Optional[float] = None

    def tokens(self) -> Tokens:
        outstanding = self._sums["outstanding"] + sum(self._held.values())
        return replace(Tokens(**self._sums), outstanding=outstanding)

    def go_on(self, samples: Sequence[int]) -> None:
        """In another process of the run, where of what was drawn these are there."""
        for sample in set(self._held) - set(samples):
            self._throw(sample, "lost", self._held.pop(sample))
        self._sums["unreported"] += len(self._attempts)
        self._attempts, self._up, self._now = {}, {}, None

    def drawn(self, ticket: Ticket, tokens: Optional[int]) -> None:
        """An attempt is let go of, having drawn so many; None: nobody knows."""
        if (a := self._answered(ticket)) is None:
            return
        if tokens is None:
            self._sums["unreported"] += 1
            return
        self._sums["generated"] += tokens
        self._throw(ticket.sample, a.end, tokens, a.again)

    def told(self, events: Sequence[Event], now: float, actions: Sequence[Action]) -> None:
        """The scheduler has taken these, which led to those."""
        if self._now is not None:
            busy = sum(running > 0 for running in self._up.values())
            self._sums["busy_seconds"] += busy * (now - self._now)
            self._sums["idle_seconds"] += (len(self._up) - busy) * (now - self._now)
        self._now = now
        for e in events:
            self._event(e)
        for a in actions:
            self._action(a, now)

    def _event(self, e: Event) -> None:
        if e.kind == "rolled_out" and e.ticket is not None and e.versions is not None:
            if (a := self._answered(e.ticket)) is None:
                return
            tokens = Versions(*e.versions).tokens  # a rollout class may return a plain tuple
            self._sums["generated"] += tokens
            if a.wanted:
                self._held[e.ticket.sample] = tokens
            else:
                self._throw(e.ticket.sample, a.end, tokens, a.again)
        elif e.kind in ("rollout_failed", "aborted") and e.ticket is not None:
            self.drawn(e.ticket, None)
        elif e.kind == "payload_lost":
            for t in e.tickets:
                self._throw(t.sample, "lost", self._held.pop(t.sample, 0))
        elif e.kind == "worker_up" and e.stage == "rollout":
            self._up[e.worker] = 0
        elif e.kind == "worker_down" and e.stage == "rollout":
            self._gone(e.worker, e.incarnation)

    def _action(self, a: Action, now: float) -> None:
        if a.kind == "start":
            t = a.ticket
            self._throw(t.sample, "discarded", self._held.pop(t.sample, 0))
            self._sums["regenerated"] += self._thrown.pop(t.sample, 0)
            for (sample, _), other in self._attempts.items():
                other.again = other.again or sample == t.sample
            self._attempts[t.sample, t.attempt] = _Attempt(t.worker, t.incarnation, now)
            if t.worker in self._up:
                self._up[t.worker] += 1
        elif a.kind == "abort":
            if (attempt := self._attempts.get((a.ticket.sample, a.ticket.attempt))) is not None:
                attempt.wanted = False
                attempt.end = "lost" if now >= attempt.since + self._deadline else "discarded"
        elif a.kind == "lost" and a.stage == "rollout":
            self._gone(a.worker, a.incarnation)
        elif a.kind == "fail":
            end = {"stale": "discarded", "stopped": "outstanding"}.get(a.why, "lost")
            if (attempt := self._attempts.get((a.ticket.sample, a.ticket.attempt))) is not None:
                attempt.wanted, attempt.end = False, end
            self._throw(a.ticket.sample, end, self._held.pop(a.ticket.sample, 0))
            self._thrown.pop(a.ticket.sample, None)
        elif a.kind == "step":
            for s in a.consumed:
                self._sums["brought"] += s.versions.tokens - self._held.pop(s.ticket.sample, 0)
                self._sums["learnt"] += s.versions.tokens
                self._thrown.pop(s.ticket.sample, None)

    def _answered(self, t: Ticket) -> Optional[_Attempt]:
        a = self._attempts.pop((t.sample, t.attempt), None)
        if a is not None and self._up.get(a.worker, 0) > 0:
            self._up[a.worker] -= 1
        return a

    def _gone(self, worker: int, life: int) -> None:
        """What ran there is never heard of."""
        self._up.pop(worker, None)
        over = [key for key, a in self._attempts.items() if a.worker == worker and a.life <= life]
        for key in over:
            del self._attempts[key]
        self._sums["unreported"] += len(over)

    def _throw(self, sample: int, end: str, tokens: int, again: bool = False) -> None:
        self._sums[end] += tokens
        if again:
            self._sums["regenerated"] += tokens
        elif tokens:
            self._thrown[sample] = self._thrown.get(sample, 0) + tokens
