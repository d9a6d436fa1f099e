# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""evaluate: loss and gradient of any estimator over arrays of any package, on the CPU or a CUDA device."""

from __future__ import annotations

import ctypes
import os
import threading
from ctypes import byref, c_void_p, sizeof
from dataclasses import dataclass
from typing import Any, Optional, Union

import numpy as np

from . import _c
from . import student as _student
from . import teacher as _teacher
from ._c import (
    DLDeviceType,
    opd_determinism,
    opd_infinite,
    opd_overflow,
    opd_reduction,
    opd_student_kind,
    opd_teacher_kind,
)
from ._tensors import Borrowed, borrow, empty_like, matrix, rows
from .diagnostics import Diagnostics
from .errors import BadContents, check, last_error, refuse
from .estimators import Estimator, Of, as_estimator
from .student import Output, Student
from .teacher import CHOSEN_BY, LAWS, Teacher

REDUCTIONS = {
    "token_mean": opd_reduction.OPD_TOKEN_MEAN,
    "sum": opd_reduction.OPD_SUM,
    "sequence_mean": opd_reduction.OPD_SEQUENCE_MEAN,
    "sequence_sum_mean": opd_reduction.OPD_SEQUENCE_SUM_MEAN,
    "constant": opd_reduction.OPD_CONSTANT,
}
INFINITE = {"floor": opd_infinite.OPD_FLOOR, "skip": opd_infinite.OPD_SKIP, "raise": opd_infinite.OPD_RAISE}
OVERFLOW = {"skip_row": opd_overflow.OPD_SKIP_ROW, "saturate": opd_overflow.OPD_SATURATE}
DETERMINISM = {
    "run_to_run": opd_determinism.OPD_RUN_TO_RUN,
    "not_guaranteed": opd_determinism.OPD_NOT_GUARANTEED,
    "tiling_invariant": opd_determinism.OPD_TILING_INVARIANT,
}

#: The largest share of bad rows that passes by default: a model that has gone to NaN must not train on with gradient 0.
ON_BAD = 0.01

#: Numbers in `totals`: the loss, and what Diagnostics are made of.
TOTALS = 1 + sizeof(_c.opd_diagnostics) // 8


@dataclass
class Result:
    """What was asked for; None is what was not."""

    loss: float
    gradient: Any = None  #: of the logits, in their shape and type; of student.on_support of the teacher's support
    losses: Any = None  #: float32, one a row, in the shape of the rows: w_r L_r
    lse: Any = None  #: float64, one a row: the student's log-sum-exp at its temperature
    diagnostics: Optional[Diagnostics] = None
    dx: Any = None  #: of student.hidden, as dw and db: float32
    dw: Any = None
    db: Any = None


@dataclass(frozen=True)
class Frozen:
    """What an earlier pass over the whole batch decided about its drawn tokens; constants of the call
    (docs/concepts/frozen.md)."""

    keep: Any = None  #: (N,m) 0: the token adds neither loss nor gradient
    weight: Any = None  #: (N,m) float64
    sequence_log_ratio: Any = None  #: (N) float64
    advantage: Any = None  #: (N,m) float64


class Engine:
    """Threads and memory, kept between calls. Calls that share one wait for each other.

    device  of CUDA: calls run there, on `stream` (a cudaStream_t as a number; 0: the default stream)
    cublas  a cublasHandle_t for losses from hidden states; 0: one of the engine's own
    """

    def __init__(self, threads: int = 1, *, device: Optional[int] = None, stream: int = 0, cublas: int = 0):
        if threads < 1:
            raise refuse("threads", f"is {threads}; it must be at least 1")
        if device is None:
            options = _c.opd_engine_options(threads=threads)
        elif threads != 1:
            raise refuse("threads", f"is {threads}, and the engine is of a device")
        else:
            options = _c.opd_engine_options(device_type=int(DLDeviceType.kDLCUDA), device_id=device)
        options.stream, options.cublas = stream or None, cublas or None
        options.struct_size = sizeof(options)
        self.device = device
        handle = c_void_p()
        self._handle: Optional[c_void_p] = None
        check(_c.lib().opd_engine_create(byref(options), byref(handle)))
        self._handle, self.threads = handle, threads

    @property
    def handle(self) -> c_void_p:
        if self._handle is None:
            raise refuse("engine", "was closed")
        return self._handle

    def close(self) -> None:
        if self._handle is not None:
            _c.lib().opd_engine_destroy(self._handle)
            self._handle = None

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_handle", None) is not None and _c is not None:  # None: the interpreter ends
            self.close()


_engines: dict[int, Engine] = {}
_engines_lock = threading.Lock()


def _after_fork() -> None:
    """A child has none of the threads. The engines stay as they are: to end them would wait for their threads."""
    global _engines
    _of_parents.append(_engines)
    _engines = {}


_of_parents: list[dict[int, Engine]] = []
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def engine_of(threads: int) -> Engine:
    """The engine of so many threads that the process shares."""
    with _engines_lock:
        if threads not in _engines:
            _engines[threads] = Engine(threads)
        return _engines[threads]


_cuda_engines: dict[tuple[int, int], Engine] = {}


def cuda_engine_of(device: int, stream: int) -> Engine:
    """The engine of a device's stream that the process shares."""
    with _engines_lock:
        if (device, stream) not in _cuda_engines:
            _cuda_engines[device, stream] = Engine(device=device, stream=stream)
        return _cuda_engines[device, stream]


def choice(argument: str, table: dict[str, Any], value: Any) -> int:
    if value not in table:
        raise refuse(argument, f"is {value!r}; it is one of {', '.join(table)}")
    return int(table[value])


def not_zero(argument: str, value: Optional[float], default: float = 0.0) -> float:
    """0 stands for a default in the C interface: who says 0 here would be given something else."""
    if value is None:
        return default
    if value == 0:
        raise refuse(argument, "is 0; leave it out for the default")
    return value


class Call:
    """The structs of one call and the arrays that they point to."""

    def __init__(self) -> None:
        self.keep: list[Any] = []
        self.ids_shape: Optional[tuple[int, ...]] = None
        self.student, self.teacher, self.env = _c.opd_student(), _c.opd_teacher(), _c.opd_env()
        for s in (self.student, self.teacher, self.env):
            s.struct_size = sizeof(s)
        self.estimator: Optional[_c.opd_estimator] = None
        self.engine: Optional[Engine] = None
        self.waits = True

    def put(self, struct: Any, member: str, b: Borrowed) -> Borrowed:
        self.keep.append(b)
        if member == "ids":
            self.ids_shape = b.shape
        setattr(struct, member, b.pointer)
        return b

    def run(self, result: _c.opd_result) -> int:
        call = _c.opd_call()
        call.struct_size = sizeof(call)
        call.engine = None if self.engine is None else self.engine.handle
        call.student, call.teacher = ctypes.pointer(self.student), ctypes.pointer(self.teacher)
        call.env = ctypes.pointer(self.env)
        if self.estimator is not None:
            call.estimator = ctypes.pointer(self.estimator)
        result.struct_size = sizeof(result)
        return int(_c.lib().opd_evaluate(byref(call), byref(result) if self.waits else None))


def fill_teacher(call: Call, t: Teacher) -> None:
    s = call.teacher
    s.kind, s.law = int(t.kind), choice("teacher.law", LAWS, t.law)
    s.chosen_by = choice("teacher.chosen_by", CHOSEN_BY, t.chosen_by)
    s.temperature = not_zero("teacher.temperature", t.temperature)
    s.soft_cap = not_zero("teacher.soft_cap", t.soft_cap)
    s.budget_bytes = int(not_zero("teacher.budget_bytes", t.budget_bytes))
    s.lumped, s.missing_mu = t.lumped, t.missing_mu
    widest = t.widest if t.widest is not None or t.kept is None else t.kept.widest
    s.widest = int(not_zero("teacher.widest", widest))
    if t.common is not None:
        if not t.lumped:
            raise refuse("teacher.common", "is for a teacher that is lumped")
        s.common = int(not_zero("teacher.common", t.common))
    ragged = t.kind == opd_teacher_kind.OPD_RAGGED_SUPPORT
    for name in ("y", "x", "w", "log_prox", "log_ref", "advantage", "weight", "exact"):
        if (given := getattr(t, name)) is not None:
            call.put(s, name, matrix("teacher." + name, given, None if name == "exact" else np.float32))
    for name, dtype in (("ids", np.int64), ("log_q", np.float32), ("log_mu", np.float32)):
        if (given := getattr(t, name)) is not None:
            call.put(s, name, (rows if ragged else matrix)("teacher." + name, given, dtype))
    for name, dtype in (
        ("bias", np.float32),
        ("log_tail", np.float32),
        ("offsets", np.int64),
        ("baseline", np.float32),
        ("mu_entropy", np.float32),
        ("log_tail_mu", np.float64),
    ):
        if (given := getattr(t, name)) is not None:
            call.put(s, name, rows("teacher." + name, given, dtype))
    if t.rollout is not None:
        s.raw_logprobs = 1
        call.put(s, "log_norm", rows("teacher.log_norm", t.rollout.log_norm, np.float32))
        s.drawn_temperature = not_zero("teacher.drawn_temperature", t.rollout.temperature)
        s.drawn_top_k = int(not_zero("teacher.drawn_top_k", t.rollout.top_k))
        s.drawn_top_p = not_zero("teacher.drawn_top_p", t.rollout.top_p)
        s.drawn_min_p = 0.0 if t.rollout.min_p is None else t.rollout.min_p
    if t.kept is not None:
        call.put(s, "kept_ids", rows("teacher.kept_ids", t.kept.ids, np.int64))
        call.put(s, "kept_offsets", rows("teacher.kept_offsets", t.kept.offsets, np.int64))
        if t.kept.log_q is not None:
            call.put(s, "log_kept_q", rows("teacher.log_kept_q", t.kept.log_q, np.float32))


def evaluate(
    student: Union[Student, Any],
    teacher: Union[Teacher, Any],
    estimator: Union[Estimator, Of] = "reverse_kl",
    *,
    gradient: Output = True,
    losses: Output = False,
    lse: Output = False,
    engine: Optional[Engine] = None,
    threads: Optional[int] = None,
    reduction: str = "token_mean",
    mask: Any = None,
    ignore: Optional[int] = None,
    weights: Any = None,
    offsets: Any = None,
    versions: Any = None,
    version: int = 0,
    on_infinite: str = "floor",
    floor_at: Optional[float] = None,
    normaliser: Optional[float] = None,
    beta: float = 0.0,
    beta_loss: float = 0.0,
    given_lse: Any = None,
    frozen: Optional[Frozen] = None,
    on_bad: Union[str, float, None] = None,
    on_overflow: str = "skip_row",
    loss_clamp: Optional[float] = None,
    check_contents: bool = False,
    determinism: str = "run_to_run",
    drop_and_renormalise: bool = False,
    measure_entropy: bool = False,
    ratios: Any = None,
    totals: Any = None,
) -> Result:
    """Loss, gradient and diagnostics of an estimator over a batch of rows.

    student     logits (N,V) or (B,T,V), or what opd.student makes
    teacher     logits, or what opd.teacher makes: a support, drawn tokens, hidden states
    estimator   a divergence by name, or what opd.estimators makes
    gradient    True: returned; False: value only; an array: written there, z itself too
    losses, lse True: returned; an array: written there
    threads     of an engine that the process shares; or give an `engine` of your own

    reduction   "token_mean", "sum", "sequence_mean", "sequence_sum_mean", "constant"
    mask        (N) rows that count; with `ignore` the targets, of which this value is left out
    weights     (N); offsets (S+1): first row of each sequence
    versions    (N) and version: the policy that drew a row, and the student's now
    normaliser  the count to divide by, for micro-batches
    beta        gradient = beta gradient + ...; beta_loss: losses = beta_loss losses + ...
    on_infinite "floor" (at floor_at nats), "skip", "raise"
    on_bad      "count", "raise", or the largest share of the kept rows that passes; None: ON_BAD, which is 1 %, or
                "count" where nobody waits for the result
    on_overflow "skip_row", "saturate"
    loss_clamp, check_contents, determinism, drop_and_renormalise, measure_entropy: as in opd/batch.hpp
    given_lse   (N) float64; frozen: opd.Frozen; ratios: the (int64) bins of a sketch of importance ratios
    totals      (opd.TOTALS) int64: the loss as a double and what Diagnostics are made of are written there. On a device
                nobody waits then: the result's loss is NaN, and it has no diagnostics

    Raises InvalidInput (argument, row), InfiniteValue, BadContents (result), Unsupported.
    """
    s = student if isinstance(student, Student) else _student.logits(student)
    t = teacher if isinstance(teacher, Teacher) else _teacher.dense(teacher)
    call = Call()
    call.estimator = as_estimator(estimator).as_struct()
    if engine is not None and threads is not None:
        raise refuse("engine", "is given beside threads; one of them will do")
    call.engine = engine if engine is not None else (engine_of(threads) if threads is not None else None)
    fill_teacher(call, t)
    e = call.env
    e.reduction = choice("env.reduction", REDUCTIONS, reduction)
    e.on_infinite = choice("env.on_infinite", INFINITE, on_infinite)
    e.on_overflow = choice("env.on_overflow", OVERFLOW, on_overflow)
    e.determinism = choice("env.determinism", DETERMINISM, determinism)
    if ignore is not None:
        if mask is None:
            raise refuse("env.mask", "is needed beside ignore: the targets")
        e.has_ignore, e.ignore = 1, ignore
    if mask is not None:
        call.put(e, "mask", rows("env.mask", mask, bool if ignore is None else np.int64))
    if weights is not None:
        call.put(e, "weights", rows("env.weights", weights, np.float64))
    if offsets is not None:
        call.put(e, "offsets", rows("env.offsets", offsets, np.int64))
    if versions is not None:
        call.put(e, "versions", rows("env.versions", versions, np.int32))
    if given_lse is not None:
        call.put(e, "given_lse", rows("env.given_lse", given_lse, np.float64))
    if totals is not None:
        call.put(e, "totals", rows("env.totals", totals, written=True))
        call.waits = call.engine is None or call.engine.device is None
    if ratios is not None:
        call.put(e, "ratios", rows("env.ratios", ratios, written=True))
    if frozen is not None:
        if frozen.keep is not None:
            call.put(e, "frozen_keep", matrix("env.frozen_keep", frozen.keep, bool))
        if frozen.weight is not None:
            call.put(e, "frozen_weight", matrix("env.frozen_weight", frozen.weight, np.float64))
        if frozen.sequence_log_ratio is not None:
            call.put(
                e,
                "frozen_sequence_log_ratio",
                rows("env.frozen_sequence_log_ratio", frozen.sequence_log_ratio, np.float64),
            )
        if frozen.advantage is not None:
            call.put(e, "frozen_advantage", matrix("env.frozen_advantage", frozen.advantage, np.float64))
    e.version, e.beta, e.beta_loss = version, beta, beta_loss
    e.floor_at = not_zero("env.floor_at", floor_at)
    e.normaliser = not_zero("env.normaliser", normaliser)
    e.loss_clamp = not_zero("env.loss_clamp", loss_clamp)
    if on_bad is None:
        on_bad = ON_BAD if call.waits else "count"
    if isinstance(on_bad, str):
        e.raise_bad = choice("env.on_bad", {"count": 0, "raise": 1}, on_bad)
    else:
        if not 0 < on_bad < 1:
            raise refuse("env.on_bad", f"is {on_bad!r}; it is count, raise or a share between 0 and 1, both excluded")
        e.raise_bad, e.bad_share = 1, on_bad
    e.check_contents, e.drop_and_renormalise = check_contents, drop_and_renormalise
    e.measure_entropy = measure_entropy
    return answer(call, s, gradient, losses, lse, beta, beta_loss)


def answer(
    call: Call, s: Student, gradient: Output, losses: Output, lse: Output, beta: float, beta_loss: float
) -> Result:
    """Gives the call its student and the outputs that are wanted, and runs it."""
    c = call.student
    c.kind, c.keep_padding, c.padding = int(s.kind), s.keep_padding, s.padding
    c.temperature = not_zero("student.temperature", s.temperature)
    c.soft_cap = not_zero("student.soft_cap", s.soft_cap)
    c.beta_head = s.beta_head
    c.budget_bytes = int(not_zero("student.budget_bytes", s.budget_bytes))
    out = Result(0.0)
    if s.kind == opd_student_kind.OPD_HIDDEN:
        like = s.x
        x, w = call.put(c, "x", borrow("student.x", s.x)), call.put(c, "w", borrow("student.w", s.w))
        leading = x.shape[:-1]
        if s.bias is not None:
            call.put(c, "bias", rows("student.bias", s.bias, np.float32))
        if gradient is not True and gradient is not False:
            raise refuse("gradient", "of hidden states is given by student.hidden(..., dx=, dw=, db=)")
        wanted = (
            ("dx", x.shape, beta),
            ("dw", w.shape, s.beta_head),
            ("db", w.shape[:1] if s.bias is not None else None, s.beta_head),
        )
        for name, shape, kept_factor in wanted:
            if not gradient or shape is None:
                continue
            given = getattr(s, name)
            array = output(f"student.{name}", given, like, "float32", shape, kept_factor != 0)
            if array is not None:
                call.put(c, name, borrow(f"student.{name}", array, written=True))
                setattr(out, name, array)
    else:
        like = s.z
        z = call.put(c, "z", borrow("student.z", s.z))
        if z.float_name is None:
            raise refuse("student.z", "is of no float type; logits are float32, float64, float16 or bfloat16")
        leading = z.shape[:-1]
        if gradient is True and s.padding != 0:
            raise refuse("student.padding", "belongs to a gradient of yours: gradient=array")
        shape = z.shape
        if s.kind == opd_student_kind.OPD_ON_SUPPORT and call.ids_shape is not None:
            shape = call.ids_shape if len(call.ids_shape) > 1 else (1, *call.ids_shape)  # of ragged supports: one line
        array = output("student.dz", gradient, like, z.float_name, shape, beta != 0)
        if array is not None:
            call.put(c, "dz", borrow("student.dz", array, written=True))
            out.gradient = array
    for name, given, kind, kept_factor in (("losses", losses, "float32", beta_loss), ("lse", lse, "float64", 0.0)):
        array = output("env." + name, given, like, kind, leading, kept_factor != 0)
        if array is not None:
            if given is True:
                array[...] = 0  # what the mask leaves out is not written
            call.put(call.env, name, rows("env." + name, array, written=True))
            setattr(out, name, array)

    result = _c.opd_result()
    code = call.run(result)
    if code == _c.opd_status.OPD_OK and not call.waits:
        out.loss = float("nan")
        return out
    if code == _c.opd_status.OPD_OK:
        out.loss, out.diagnostics = result.loss, Diagnostics.of_struct(result.diagnostics)
        return out
    why = last_error(code)
    if isinstance(why, BadContents):
        out.loss, out.diagnostics = result.loss, Diagnostics.of_struct(result.diagnostics)
        why.result = out
    raise why


def output(argument: str, given: Output, like: Any, kind: Optional[str], shape: tuple[int, ...], is_read: bool) -> Any:
    """The caller's array, one of the package's, or None."""
    if given is False or given is None:
        return None
    if given is not True:
        return given
    if is_read:
        raise refuse(argument, "is added to by beta: give the array that holds what was there")
    return empty_like(like, kind, shape)
