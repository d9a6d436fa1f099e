# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Rows without a loss: what a rollout draws and a teacher's server scores (opd/draw.hpp, opd/score.hpp).

d = opd.draw(z, "threshold", m=16, seed=1, sample=sequence_ids, position=positions, temperature=0.7)
r = opd.evaluate(z, d.cache(opd.score(y, d.ids).log_p))
s = opd.score(y, top_k=20)                               # s.top_ids, s.top_log_p, s.top_log_tail
"""

from __future__ import annotations

from ctypes import byref, c_int64, sizeof
from dataclasses import dataclass
from typing import Any, Optional

import numpy as np

from . import _c, _c_rows
from . import teacher as _teacher
from ._evaluate import Engine, engine_of, not_zero
from ._tensors import Borrowed, borrow, empty_like, matrix, rows
from .diagnostics import Diagnostics
from .errors import check, refuse

RATIO_BINS = _c_rows.RATIO_BINS
DESIGNS = ("greedy", "gumbel", "iid", "threshold", "head_tail", "gumbel_top")


@dataclass
class Drawn:
    """Of masked rows ids are -1 and numbers 0."""

    ids: Any  #: (N,columns) int64; -1: an unused slot
    log_mu: Any  #: (N,columns) float32, of the law that they were drawn from: temperature and filter applied
    weight: Any  #: (N,columns) float32
    exact: Any  #: (N,columns) uint8: the id was taken for certain
    lse: Any  #: (N) float64: log-sum-exp of z/T over all ids
    log_kept: Any  #: (N) float64: log of the mass that the filter keeps
    log_tail: Any  #: (N) float64, of threshold and head_tail: log of the mass outside the certain ids; else None
    kept: Optional[_teacher.Kept]  #: what the filter kept of each row, where it was asked for
    design: str
    diagnostics: Diagnostics

    def cache(self, log_q: Any, **columns: Any) -> _teacher.Teacher:
        """The cache of these tokens with the teacher's log-probs, as opd.evaluate takes it."""
        if self.kept is not None:
            columns.setdefault("kept", self.kept)
        if self.design in ("greedy", "gumbel", "iid"):
            return _teacher.samples(self.ids, self.log_mu, log_q, **columns)
        if self.log_tail is not None:
            columns.setdefault("log_tail_mu", self.log_tail)
        return _teacher.weighted(self.ids, self.weight, self.log_mu, log_q, exact=self.exact, **columns)


@dataclass
class Scores:
    """None is what was not asked for. Log-probs are float32, of float64 logits float64."""

    log_p: Any = None  #: as ids
    log_tail: Any = None  #: (N) log of the mass outside a row's ids
    top_ids: Any = None  #: (N,k) int64, best first; -1: no more have mass
    top_log_p: Any = None
    top_log_tail: Any = None
    lse: Any = None  #: (N) float64
    entropy: Any = None  #: (N) float64, nats
    diagnostics: Optional[Diagnostics] = None


class _Call:
    """A struct with what it points to."""

    def __init__(self, struct: Any, z: Any, engine: Optional[Engine], threads: Optional[int]):
        self.struct, self.like = struct, z
        self.keep: list[Any] = []
        struct.struct_size = sizeof(struct)
        if engine is not None and threads is not None:
            raise refuse("engine", "is given beside threads; one of them will do")
        if threads is not None:
            engine = engine_of(threads)
        if engine is not None:
            struct.engine = engine.handle
            self.keep.append(engine)
        self.z = self.put("z", borrow("z", z))
        self.rows = self.z.shape[:-1]

    def put(self, member: str, b: Borrowed) -> Borrowed:
        self.keep.append(b)
        setattr(self.struct, member, b.pointer)
        return b

    def out(self, member: str, kind: str, shape: tuple[int, ...], unwritten: int = 0) -> Any:
        array = empty_like(self.like, kind, shape)
        array[...] = unwritten
        one_a_row = shape == self.rows
        self.put(member, rows(member, array, written=True) if one_a_row else borrow(member, array, written=True))
        return array

    def masked(self, mask: Any, ignore: Optional[int]) -> None:
        if mask is not None:
            self.put("mask", rows("mask", mask, bool if ignore is None else np.int64))
        if ignore is not None:
            if mask is None:
                raise refuse("mask", "is needed beside ignore: the targets")
            self.struct.has_ignore, self.struct.ignore = 1, ignore

    def filtered(self, temperature: float, top_k: Optional[int], top_p: Optional[float], min_p: float) -> None:
        s = self.struct
        s.temperature, s.min_p = not_zero("temperature", temperature), min_p
        s.top_k, s.top_p = int(not_zero("top_k", top_k)), not_zero("top_p", top_p)


def _result() -> _c.opd_result:
    r = _c.opd_result()
    r.struct_size = sizeof(r)
    return r


def draw(
    z: Any,
    design: str = "gumbel",
    *,
    m: int = 1,
    h: int = 0,
    seed: int = 0,
    sample: Any = None,
    position: Any = None,
    uniforms: Any = None,
    first: int = 0,
    temperature: float = 1.0,
    top_k: Optional[int] = None,
    top_p: Optional[float] = None,
    min_p: float = 0.0,
    kept_sets: bool = False,
    mask: Any = None,
    ignore: Optional[int] = None,
    engine: Optional[Engine] = None,
    threads: Optional[int] = None,
) -> Drawn:
    """Draws ids of each row of z (N,V): "greedy", "gumbel", "iid" (m), "threshold" (budget m), "head_tail" (h for
    certain, m of the rest), "gumbel_top" (m).

    The noise of a row is a function of seed, sample (N), unique in a run, and position (N) alone, or of `uniforms`.
    kept_sets=True returns what top_k, top_p and min_p kept, for losses on the filtered law.
    """
    if design not in DESIGNS:
        raise refuse("design", f"is {design!r}; it is one of {', '.join(DESIGNS)}")
    s = _c_rows.opd_draw_call()
    call = _Call(s, z, engine, threads)
    s.design, s.seed, s.first = design.encode(), seed, first
    columns = 1 if design in ("greedy", "gumbel") else m
    if design == "head_tail":
        s.h, columns = h, h + m
    elif h != 0:
        raise refuse("h", "is of the design head_tail")
    if design not in ("greedy", "gumbel"):
        s.m = int(not_zero("m", m))
    elif m != 1:
        raise refuse("m", f"is {m}: the design {design} draws one id a row")
    if sample is not None:
        call.put("sample", rows("sample", sample, np.int64))
    if position is not None:
        call.put("position", rows("position", position, np.int32))
    if uniforms is not None:
        call.put("uniforms", matrix("uniforms", uniforms, np.float64))
    call.masked(mask, ignore)
    call.filtered(temperature, top_k, top_p, min_p)
    shape = (*call.rows, columns)
    ids = call.out("ids", "int64", shape, -1)
    log_mu, weight = call.out("log_mu", "float32", shape), call.out("weight", "float32", shape)
    exact = call.out("exact", "uint8", shape)
    lse, log_kept = call.out("lse", "float64", call.rows), call.out("log_kept", "float64", call.rows)
    log_tail = call.out("log_tail", "float64", call.rows) if design in ("threshold", "head_tail") else None
    if kept_sets:
        cut = [
            call.out(name, kind, call.rows)
            for name, kind in (("cut_logit", "float64"), ("cut_id", "int64"), ("kept", "int64"))
        ]
    result = _result()
    check(_c_rows.lib().opd_draw(byref(s), byref(result)))
    kept = None
    if kept_sets:
        kept = _kept(z, cut, mask, ignore, engine, threads)
    return Drawn(
        ids, log_mu, weight, exact, lse, log_kept, log_tail, kept, design, Diagnostics.of_struct(result.diagnostics)
    )


def _kept(
    z: Any,
    cut: list[Any],
    mask: Any,
    ignore: Optional[int],
    engine: Optional[Engine],
    threads: Optional[int],
) -> _teacher.Kept:
    s = _c_rows.opd_kept_ids_call()
    call = _Call(s, z, engine, threads)
    call.masked(mask, ignore)
    for name, array in zip(("cut_logit", "cut_id", "kept"), cut):
        call.put(name, rows(name, array, written=True))
    count = 1
    for n in call.rows:
        count *= n
    offsets = call.out("offsets", "int64", (count + 1,))
    total = c_int64()
    check(_c_rows.lib().opd_kept_ids(byref(s), byref(total), None))
    ids = empty_like(z, "int64", (total.value,))
    call.put("ids", borrow("ids", ids, written=True))
    check(_c_rows.lib().opd_kept_ids(byref(s), None, None))
    return _teacher.Kept(ids, offsets)


def score(
    z: Any,
    ids: Any = None,
    *,
    top_k: Optional[int] = None,
    tail: bool = False,
    lse: bool = False,
    entropy: bool = False,
    temperature: float = 1.0,
    offsets: Any = None,
    kept: Optional[_teacher.Kept] = None,
    mask: Any = None,
    ignore: Optional[int] = None,
    engine: Optional[Engine] = None,
    threads: Optional[int] = None,
) -> Scores:
    """Log-probs of ids (N,m), or (total) with offsets (N+1), under softmax(z/temperature); the top_k ids of each row;
    with `tail` the mass outside either; log-sum-exps and entropies. `kept`: of tokens drawn under a filter."""
    s = _c_rows.opd_score_call()
    call = _Call(s, z, engine, threads)
    s.temperature = not_zero("temperature", temperature)
    call.masked(mask, ignore)
    kind = "float64" if call.z.float_name == "float64" else "float32"
    found = Scores()
    if ids is not None:
        of = call.put("ids", (matrix if offsets is None else rows)("ids", ids, np.int64))
        found.log_p = call.out("log_p", kind, of.shape)
        if tail:
            found.log_tail = call.out("log_tail", kind, call.rows)
    if offsets is not None:
        call.put("offsets", rows("offsets", offsets, np.int64))
    if kept is not None:
        call.put("kept_ids", rows("kept_ids", kept.ids, np.int64))
        call.put("kept_offsets", rows("kept_offsets", kept.offsets, np.int64))
    if top_k is not None:
        shape = (*call.rows, int(not_zero("top_k", top_k)))
        found.top_ids, found.top_log_p = call.out("top_ids", "int64", shape, -1), call.out("top_log_p", kind, shape)
        found.top_log_tail = call.out("top_log_tail", kind, call.rows)
    if lse:
        found.lse = call.out("lse", "float64", call.rows)
    if entropy:
        found.entropy = call.out("entropy", "float64", call.rows)
    result = _result()
    check(_c_rows.lib().opd_score(byref(s), byref(result)))
    found.diagnostics = Diagnostics.of_struct(result.diagnostics)
    return found
