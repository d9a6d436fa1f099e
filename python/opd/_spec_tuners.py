# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Tuners, the elastic switch and the drafter selector (opd/spec/any_tuner.hpp, drafter_selector.hpp)."""

from __future__ import annotations

from ctypes import byref, c_double, c_int32, c_int64
from typing import Any, Callable, NamedTuple, Optional, Sequence, Union

from . import _c_spec as c
from ._handles import Caught, Saved, default, default_number, sized
from ._numbers import INT32, INT64, UINT64, int64s, integer, number
from ._spec_trees import points_of
from .errors import check, refuse

REWARDS = {
    "per_sequence": int(c.opd_reward.OPD_PER_SEQUENCE),
    "tokens_per_second": int(c.opd_reward.OPD_TOKENS_PER_SECOND),
}


class Strategy(NamedTuple):
    """How deep to draft, how many children a node has, how many drafted tokens to verify. All 0: no speculation."""

    depth: int = 0
    top_k: int = 0
    verify: int = 0

    @property
    def none(self) -> bool:
        """No speculation."""
        return self.verify == 0


class Uniforms:
    """Numbers from (0, 1) of one step: a function of (seed, step) and of how many were asked for, the same on every
    rank; or those of draw(). One object for a step's choose and heard. `draw` must not use the tuner that asks."""

    def __init__(self, seed: int = 0, step: int = 0, *, draw: Optional[Callable[[], float]] = None):
        self._caught = Caught()
        self._struct = sized(c.opd_uniforms())
        if draw is None:
            self._struct.seed, self._struct.step = integer("seed", seed, 0, UINT64), integer("step", step, 0, UINT64)
        else:
            if seed or step:
                raise refuse("draw", "is given beside a seed or a step; its numbers have no key")
            own = draw
            self._struct.draw = c.uniform_function(self._caught.guard(lambda _: float(own()), 0.0))

    @property
    def asked(self) -> int:
        """How many were asked for."""
        return int(self._struct.asked)


def _numbers_of(uniforms: Any) -> tuple[Any, Caught]:
    """What a call takes, and who has what its callback raised."""
    if uniforms is None:
        return None, Caught()
    if not isinstance(uniforms, Uniforms):
        raise refuse("uniforms", f"is a {type(uniforms).__name__}; it is a Uniforms")
    uniforms._caught.why = None
    return byref(uniforms._struct), uniforms._caught


def _strategy(strategy: Any, argument: str = "strategy") -> c.opd_strategy:
    try:
        depth, top_k, verify_ = strategy
    except (TypeError, ValueError):
        raise refuse(argument, f"is {strategy!r}; it is a Strategy: depth, top_k, verify") from None
    return c.opd_strategy(*(integer(argument, x, -INT32, INT32) for x in (depth, top_k, verify_)))


class Tuner(Saved):
    """Which speculation pays now. Made by beg_mab, published_beg_mab, ucb1, fixed_table and cost_profile.

    It reads no clock and draws nothing by itself: equal numbers give equal choices, so ranks that are asked for the
    same batches, hear the same steps and have the same Uniforms choose alike (docs/spec/tuner.md)."""

    _kind, _argument = "tuner", "tuner"

    def __init__(self, options: c.opd_tuner_options):
        self._make(byref(options))

    def choose(self, batch: int, uniforms: Optional[Uniforms] = None) -> Strategy:
        """For a step of `batch` sequences. beg_mab and published_beg_mab need numbers."""
        chosen = c.opd_strategy()
        size = integer("batch", batch, 1, INT32)
        with_, caught = _numbers_of(uniforms)
        caught.check(c.lib().opd_tuner_choose(self.handle, size, with_, byref(chosen)))
        return Strategy(chosen.depth, chosen.top_k, chosen.verify)

    def heard(
        self,
        strategy: Strategy,
        batch: int,
        accepted: float,
        seconds: float,
        uniforms: Optional[Uniforms] = None,
    ) -> None:
        """What the step came to: drafted tokens that a sequence kept in the mean, seconds. Of a strategy that is no
        arm nothing is learnt. published_beg_mab needs numbers."""
        of, size = _strategy(strategy), integer("batch", batch, 1, INT32)
        kept, took = number("accepted", accepted), number("seconds", seconds)
        with_, caught = _numbers_of(uniforms)
        caught.check(c.lib().opd_tuner_heard(self.handle, byref(of), size, kept, took, with_))

    def predict(self, strategy: Strategy, batch: int) -> Prediction:
        """What cost_profile expects of a strategy; Unsupported of other tuners."""
        of, speed, accepted, seconds = _strategy(strategy), c_double(), c_double(), c_double()
        self._call(
            "predict", byref(of), integer("batch", batch, 1, INT32), byref(speed), byref(accepted), byref(seconds)
        )
        return Prediction(speed.value, accepted.value, seconds.value)


class Prediction(NamedTuple):
    """What cost_profile expects of a strategy."""

    tokens_per_second: float
    accepted: float  #: drafted tokens that a sequence keeps
    seconds: float  #: of a step


def _options(tuner: str, arms: Any = None, thresholds: Any = None) -> Any:
    o = sized(c.opd_tuner_options())
    o.tuner = tuner.encode()
    if arms is not None:
        found = [_strategy(a, "options.arms") for a in arms]
        if not found:
            raise refuse("options.arms", "is empty; leave it out for TLT's eight")
        o.arms, o.arm_count = (c.opd_strategy * len(found))(*found), len(found)
    if thresholds is not None:
        batches = int64s("options.thresholds", thresholds)
        if not batches.size:
            raise refuse("options.thresholds", "is empty; leave it out for 1, 2, 5, 21")
        o.thresholds, o.threshold_count = (c_int64 * batches.size)(*batches.tolist()), batches.size
    return o


def _windows(o: Any, window: Optional[int], tries: Optional[int]) -> None:
    default(o, "window", "options.window", window, INT32)
    default(o, "tries", "options.tries", tries, INT32)


def _explores(o: Any, member: str, value: Optional[float]) -> None:
    if value is None:
        return
    setattr(o, member, number("options." + member, value))
    o.no_exploration = value == 0


def _reward(o: Any, reward: str, most_tokens: Optional[int]) -> None:
    if reward not in REWARDS:
        raise refuse("options.reward", f"is {reward!r}; it is one of {', '.join(REWARDS)}")
    o.reward = REWARDS[reward]
    default(o, "most_tokens", "options.most_tokens", most_tokens, INT64)


Arms = Sequence[Union[Strategy, tuple[int, int, int]]]
Points = Sequence[tuple[int, float]]


def beg_mab(
    arms: Optional[Arms] = None,
    thresholds: Optional[Sequence[int]] = None,
    *,
    epsilon: Optional[float] = None,
    window: Optional[int] = None,
    tries: Optional[int] = None,
    reward: str = "per_sequence",
    most_tokens: Optional[int] = None,
) -> Tuner:
    """Bucketed epsilon-greedy (TLT, Taming the Long Tail, algorithm 1): among the arms of the batch's bucket the one
    with the largest median reward over its last `window` steps, with probability epsilon any of them. An arm with
    fewer than `tries` steps comes first.

    arms         None: TLT's eight. Those that verify equally many tokens are a group; the groups in descending order
                 belong to batches from thresholds[0], thresholds[1], ... on; None: 1, 2, 5, 21
    epsilon      0.1; 0: none
    window, tries  300 and 1 steps
    reward       "per_sequence": (accepted + 1)/seconds; "tokens_per_second": that times the batch, as TLT's
    most_tokens  verify * batch; None: no limit
    """
    o = _options("beg_mab", arms, thresholds)
    _explores(o, "epsilon", epsilon)
    _windows(o, window, tries)
    _reward(o, reward, most_tokens)
    return Tuner(o)


def published_beg_mab(
    arms: Optional[Arms] = None,
    thresholds: Optional[Sequence[int]] = None,
    *,
    epsilon: Optional[float] = None,
    window: Optional[int] = None,
    tries: Optional[int] = None,
) -> Tuner:
    """beg_mab as the code that accompanies TLT has it (docs/spec/tuner.md says what differs)."""
    o = _options("published_beg_mab", arms, thresholds)
    _explores(o, "epsilon", epsilon)
    _windows(o, window, tries)
    return Tuner(o)


def ucb1(
    arms: Optional[Arms] = None,
    thresholds: Optional[Sequence[int]] = None,
    *,
    bonus: Optional[float] = None,
    window: Optional[int] = None,
    tries: Optional[int] = None,
    reward: str = "per_sequence",
    most_tokens: Optional[int] = None,
) -> Tuner:
    """The same buckets; the largest mean reward + bonus * largest mean * sqrt(2 ln n / n_arm), n steps of the bucket's
    arms (Auer et al. 2002). Without chance. bonus: 1; 0: none."""
    o = _options("ucb1", arms, thresholds)
    _explores(o, "bonus", bonus)
    _windows(o, window, tries)
    _reward(o, reward, most_tokens)
    return Tuner(o)


def fixed_table(lines: Sequence[tuple[int, Union[Strategy, tuple[int, int, int]]]]) -> Tuner:
    """(batch, strategy): the strategy from this batch on."""
    o = _options("fixed_table")
    found = []
    for line in lines:
        try:
            batch, strategy = line
        except (TypeError, ValueError):
            raise refuse("options.lines", f"has the line {line!r}; it is (batch, strategy)") from None
        found.append(
            c.opd_table_line(integer("options.lines", batch, -INT64, INT64), _strategy(strategy, "options.lines"))
        )
    if found:
        o.lines, o.line_count = (c.opd_table_line * len(found))(*found), len(found)
    return Tuner(o)


def cost_profile(
    arms: Optional[Arms] = None,
    *,
    target: Optional[Points] = None,
    drafter: Optional[Points] = None,
    most_tokens: Optional[int] = None,
    memory: Optional[float] = None,
    doubt: Optional[float] = None,
) -> Tuner:
    """Among all arms and none, at any batch, what has the largest (E + 1)/seconds: E the mean of what the arm's
    sequences kept, seconds by a profile that was measured beforehand and is corrected by what steps take.

    target   points (rows, seconds) of the target; None: 1 + 0.01 rows
    drafter  of a pass of the drafter; None: it costs nothing
    memory   steps that count, 100; doubt 0.05 (docs/spec/tuner.md)
    """
    o = _options("cost_profile", arms)
    for name, points in (("target", target), ("drafter", drafter)):
        if points is not None:
            found = points_of("options." + name, points)
            if found is None:
                raise refuse("options." + name, "is empty; leave it out for the default")
            setattr(o, name, found)
            setattr(o, name + "_count", len(found))
    default(o, "most_tokens", "options.most_tokens", most_tokens, INT64)
    default_number(o, "memory", "options.memory", memory)
    default_number(o, "doubt", "options.doubt", doubt)
    return Tuner(o)


class StepObservation(NamedTuple):
    """What one rank saw of a step."""

    batch: int  #: sequences
    accepted: float  #: drafted tokens that a sequence kept in the mean
    seconds: float


def merged(ranks: Sequence[StepObservation]) -> StepObservation:
    """What all ranks saw: the largest batch, accepted a sequence, the time of the slowest."""
    found = []
    for rank in ranks:
        try:
            batch, accepted, seconds = rank
        except (TypeError, ValueError):
            raise refuse("ranks", f"has {rank!r}; it is a StepObservation") from None
        batch = integer("ranks.batch", batch, -INT64, INT64)
        found.append((batch, number("ranks.accepted", accepted), number("ranks.seconds", seconds)))
    all_ = c.opd_step_observation()
    given = (c.opd_step_observation * len(found))(*(c.opd_step_observation(*x) for x in found)) if found else None
    check(c.lib().opd_step_merged(given, len(found), byref(all_)))
    return StepObservation(all_.batch, all_.accepted, all_.seconds)


class ElasticSwitch(Saved):
    """Whether to speculate at all: on after `checks` checks in a row with at most on_at sequences running, off above
    off_at."""

    _kind, _argument = "elastic_switch", "elastic"

    def __init__(self, on_at: Optional[int] = None, off_at: Optional[int] = None, checks: Optional[int] = None):
        """32, 40, 10."""
        o = sized(c.opd_elastic_options())
        default(o, "on_at", "options.on_at", on_at, INT64)
        default(o, "off_at", "options.off_at", off_at, INT64)
        default(o, "checks", "options.checks", checks, INT32)
        self._make(byref(o))

    def check(self, running: int) -> bool:
        """Once a step."""
        on = c_int32()
        self._call("check", integer("running", running, 0, INT64), byref(on))
        return bool(on.value)


class DrafterSelector(Saved):
    """Which drafter drafts: the one of most predicted tokens a second, (accepted + 1)/seconds at batches of this size.
    Number 0 exists from the beginning; one that was passed over `again` times in a row drafts once."""

    _kind, _argument = "drafter_selector", "selector"

    def __init__(
        self,
        drafters: Optional[int] = None,
        memory: Optional[float] = None,
        tries: Optional[int] = None,
        again: Optional[int] = None,
    ):
        """2 drafters; memory: steps that count, 100; tries: steps before one is compared, 3; again: 200."""
        o = sized(c.opd_drafter_selector_options())
        default(o, "drafters", "options.drafters", drafters, INT64)
        default(o, "tries", "options.tries", tries, INT32)
        default(o, "again", "options.again", again, INT32)
        default_number(o, "memory", "options.memory", memory)
        self._make(byref(o))

    def set_exists(self, drafter: int, now: bool = True) -> None:
        """Of one that comes anew, nothing is known."""
        self._call("set_exists", _drafter(drafter), bool(now))

    def exists(self, drafter: int) -> bool:
        """Whether it may be chosen."""
        now = c_int32()
        self._call("exists", _drafter(drafter), byref(now))
        return bool(now.value)

    def choose(self, batch: int) -> int:
        """The number of the drafter for a step of `batch` sequences."""
        drafter = c_int64()
        self._call("choose", integer("batch", batch, -INT64, INT64), byref(drafter))
        return drafter.value

    def heard(self, drafter: int, batch: int, accepted: float, seconds: float) -> None:
        """What a step came to: drafted tokens that a sequence kept in the mean, seconds."""
        size = integer("batch", batch, -INT64, INT64)
        self._call("heard", _drafter(drafter), size, number("accepted", accepted), number("seconds", seconds))

    def predicted(self, drafter: int, batch: int) -> float:
        """Tokens a second that a sequence gets; 0: nothing is known."""
        speed = c_double()
        self._call("predicted", _drafter(drafter), integer("batch", batch, -INT64, INT64), byref(speed))
        return speed.value


def _drafter(drafter: Any) -> int:
    return integer("drafter", drafter, -INT64, INT64)
