# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""A run over actors of Ray, on one machine or many.

    run = opd.ray.Run(sched.Settings(batch=16, tau=2, policy="edf", sequences=1600),
                      rollout=opd.ray.Workers(Rollout, ("student",), count=4, slots=32, options={"num_gpus": 1}),
                      teacher=opd.ray.Workers(Teacher, ("teacher",), count=2),
                      learner=opd.ray.Workers(Learner, ("student",)))
    for step in run:
        print(step.version, step.lag)
    run.state()                                                        # the learner's, at the end

Three classes of yours are the stages:

    Rollout   install(weights, version), start(ticket), step() -> [(ticket, payload, tokens)], abort(ticket) optional
    Teacher   score(payloads) -> [score]
    Learner   train(items, version), weights(), load(state), state() optional

Every actor runs with max_restarts=0 and max_task_retries=0. What Ray reports of one becomes an event of the
scheduler's, and the next actor of a worker is another life of it. docs/engines/ray.md has what is guaranteed.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any, Optional

import ray

from ._actors import STAGES, RESULTS, Call, Item, Loop, Lost, Machine, Outcome, Step, Workers, kind_of
from .errors import refuse
from .sched import Settings

__all__ = ["Item", "Run", "Step", "Workers"]

_OURS = {"max_restarts": 0, "max_task_retries": 0, "max_concurrency": 1}


def _options(argument: str, given: dict[str, Any]) -> dict[str, Any]:
    for name in _OURS:
        if name in given:
            raise refuse(f"{argument}.options", f"has {name}, which is opd's to set")
    return {**given, **_OURS}


def _fetch(name: Any) -> Any:
    try:
        return ray.get(name)
    except ray.exceptions.RayError as why:
        if kind_of(why) == "lost":
            raise Lost(str(why)) from why
        raise


class _Engine:
    def __init__(self, machine_options: dict[str, Any]):
        self._machine_options = machine_options
        self._machine: Any = None
        self._actors: dict[Any, Any] = {}
        self._pending: dict[Any, list[Any]] = {}  # what a call returns beside its answer

    def _token(self, ref: Any, *names: Any) -> Any:
        self._pending[ref] = list(names)
        return ref

    def begin(self, worker: Any, life: int, crew: Workers) -> Any:
        options = _options(worker[0], crew.options)
        actor = ray.remote(STAGES[worker[0]]).options(**options).remote(crew, _fetch)
        self._actors[worker] = actor
        return self._token(actor.begin.remote())

    def ask(self, call: Call) -> tuple[Any, list[Any]]:
        method = self._actors[call.worker].call.options(num_returns=RESULTS[call.method])
        refs = method.remote(call.method, call.args)
        return self._token(*refs), refs[1:]

    def end(self, worker: Any) -> None:
        if (actor := self._actors.pop(worker, None)) is not None:
            ray.kill(actor, no_restart=True)

    def open_machine(self, *args: Any) -> None:
        self._machine = ray.remote(Machine).options(**_options("scheduler", self._machine_options)).remote(*args)

    def tell(self, method: str, args: tuple[Any, ...]) -> Any:
        return self._token(self._machine.call.remote(method, args))

    def end_machine(self) -> None:
        if self._machine is not None:
            ray.kill(self._machine, no_restart=True)
            self._machine = None

    def wait(self, seconds: float) -> list[Outcome]:
        if not self._pending:
            time.sleep(min(seconds, 0.01))
            return []
        ready, _ = ray.wait(list(self._pending), num_returns=1, timeout=seconds, fetch_local=False)
        if ready:
            every = list(self._pending)
            ready, _ = ray.wait(every, num_returns=len(every), timeout=0, fetch_local=False)
        return [self._outcome(ref) for ref in ready]

    def _outcome(self, ref: Any) -> Outcome:
        names = self._pending.pop(ref)
        try:
            return Outcome(ref, ray.get(ref))
        except ray.exceptions.RayError as why:
            for name in names:  # else Ray prints that nobody has heard of their error, which is the same
                with contextlib.suppress(ray.exceptions.RayError):
                    ray.get(name, timeout=0)
            return Outcome(ref, None, kind_of(why), why)

    def put(self, value: Any) -> Any:
        return ray.put(value)

    def get(self, name: Any) -> Any:
        return _fetch(name)

    def close(self) -> None:
        for worker in list(self._actors):
            self.end(worker)
        self.end_machine()
        self._pending.clear()


class Run(Loop):
    """Iterate it: it runs, and gives each Step; the process that does so owns the run. It ends by itself, after
    settings.sequences or close(). Actors are made when it begins and killed when it ends.

    `scheduler`: options of the scheduler's actor. `checkpoint`: a file, written after every `checkpoint_every` steps,
    from which a run of the same settings goes on (pickle: read nobody else's).
    """

    def __init__(
        self,
        settings: Settings,
        *,
        rollout: Workers,
        teacher: Workers,
        learner: Workers,
        scheduler: Optional[dict[str, Any]] = None,
        checkpoint: Optional[str] = None,
        checkpoint_every: int = 1,
    ):
        crews = {"rollout": rollout, "teacher": teacher, "learner": learner}
        for stage, crew in crews.items():
            _options(stage, crew.options)
        engine = _Engine(scheduler or {})
        _options("scheduler", scheduler or {})
        super().__init__(settings, engine, crews, checkpoint, checkpoint_every)
