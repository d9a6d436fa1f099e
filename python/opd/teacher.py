# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What is known of the teacher: whole rows, a support, drawn tokens, hidden states. A plain array is
teacher.dense(array)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Optional

from ._c import opd_chosen_by, opd_law, opd_teacher_kind

LAWS = {"stale": opd_law.OPD_STALE, "on_policy": opd_law.OPD_ON_POLICY, "of_teacher": opd_law.OPD_OF_TEACHER}
CHOSEN_BY = {
    "teacher": opd_chosen_by.OPD_BY_TEACHER,
    "stale_student": opd_chosen_by.OPD_BY_STALE_STUDENT,
    "student": opd_chosen_by.OPD_BY_STUDENT,
}


@dataclass(frozen=True)
class Rollout:
    """How the tokens of a cache were drawn, where log_mu is raw: of the model's own logits, before temperature and
    filter."""

    log_norm: Any  #: (N) log of the sum of mu^(1/T) over what the filter kept
    temperature: float = 1.0
    top_k: Optional[int] = None
    top_p: Optional[float] = None
    min_p: Optional[float] = None


@dataclass(frozen=True)
class Kept:
    """What the filter of the rollout kept of each row: row r's ids are ids[offsets[r]] to ids[offsets[r+1]],
    ascending."""

    ids: Any  #: (total)
    offsets: Any  #: (N+1)
    log_q: Any = None  #: (N) log of the teacher's mass on the set; None: log_q is over the vocabulary
    widest: Optional[int] = None  #: most ids of a row, which sets the memory of a call on a device


@dataclass(frozen=True)
class Teacher:
    """Made by the functions below."""

    kind: opd_teacher_kind
    y: Any = None
    temperature: float = 1.0
    x: Any = None
    w: Any = None
    bias: Any = None
    soft_cap: Optional[float] = None
    budget_bytes: Optional[int] = None
    lumped: bool = False
    common: Optional[int] = None
    law: str = "stale"
    chosen_by: str = "teacher"
    ids: Any = None
    log_q: Any = None
    log_mu: Any = None
    log_tail: Any = None
    offsets: Any = None
    weight: Any = None
    exact: Any = None
    log_prox: Any = None
    log_ref: Any = None
    advantage: Any = None
    baseline: Any = None
    mu_entropy: Any = None
    log_tail_mu: Any = None
    missing_mu: bool = False
    rollout: Optional[Rollout] = None
    kept: Optional[Kept] = None
    widest: Optional[int] = None


def dense(y: Any, temperature: float = 1.0, *, lumped: bool = False, common: Optional[int] = None) -> Teacher:
    """y (N,V'): q = softmax(y/temperature). `lumped`: the vocabularies differ, and what lies beyond the ids [0,
    common) is one bucket."""
    return Teacher(opd_teacher_kind.OPD_DENSE, y, temperature, lumped=lumped, common=common)


def hidden(
    x: Any,
    w: Any,
    bias: Any = None,
    temperature: float = 1.0,
    *,
    soft_cap: Optional[float] = None,
    lumped: bool = False,
    common: Optional[int] = None,
    budget_bytes: Optional[int] = None,
) -> Teacher:
    """y = x W^T + b: hidden states x (N,D), head w (V,D)."""
    return Teacher(
        opd_teacher_kind.OPD_TEACHER_HIDDEN, None, temperature, x, w, bias, soft_cap, budget_bytes, lumped, common
    )


def support(ids: Any, log_q: Any, *, log_tail: Any = None, log_mu: Any = None, chosen_by: str = "teacher") -> Teacher:
    """ids, log_q (N,k), an id of -1 for an unused slot; log_tail (N) log of the teacher's mass outside."""
    return Teacher(
        opd_teacher_kind.OPD_SUPPORT, ids=ids, log_q=log_q, log_tail=log_tail, log_mu=log_mu, chosen_by=chosen_by
    )


def ragged_support(
    ids: Any,
    log_q: Any,
    offsets: Any,
    *,
    log_tail: Any = None,
    log_mu: Any = None,
    chosen_by: str = "teacher",
    widest: Optional[int] = None,
) -> Teacher:
    """The same with as many ids in each row as there are: row r's are ids[offsets[r]] to ids[offsets[r+1]]. `widest`:
    most of a row, which sets the memory of a call on a device; None: the vocabulary there."""
    return Teacher(
        opd_teacher_kind.OPD_RAGGED_SUPPORT,
        ids=ids,
        log_q=log_q,
        offsets=offsets,
        log_tail=log_tail,
        log_mu=log_mu,
        chosen_by=chosen_by,
        widest=widest,
    )


def samples(
    ids: Any,
    log_mu: Any,
    log_q: Any,
    *,
    law: str = "stale",
    log_prox: Any = None,
    log_ref: Any = None,
    advantage: Any = None,
    baseline: Any = None,
    mu_entropy: Any = None,
    missing_mu: bool = False,
    rollout: Optional[Rollout] = None,
    kept: Optional[Kept] = None,
) -> Teacher:
    """ids, log_mu, log_q (N,m), drawn i.i.d. from mu. `law`: "stale", "on_policy" or "of_teacher"."""
    return Teacher(
        opd_teacher_kind.OPD_SAMPLES,
        ids=ids,
        log_mu=log_mu,
        log_q=log_q,
        law=law,
        log_prox=log_prox,
        log_ref=log_ref,
        advantage=advantage,
        baseline=baseline,
        mu_entropy=mu_entropy,
        missing_mu=missing_mu,
        rollout=rollout,
        kept=kept,
    )


def weighted(
    ids: Any,
    weight: Any,
    log_mu: Any,
    log_q: Any,
    *,
    exact: Any = None,
    law: str = "stale",
    log_prox: Any = None,
    log_ref: Any = None,
    advantage: Any = None,
    baseline: Any = None,
    mu_entropy: Any = None,
    log_tail_mu: Any = None,
    missing_mu: bool = False,
    rollout: Optional[Rollout] = None,
    kept: Optional[Kept] = None,
) -> Teacher:
    """ids with entry weights, log_mu, log_q (N,B); exact (N,B): the inclusion is certain."""
    return Teacher(
        opd_teacher_kind.OPD_WEIGHTED,
        ids=ids,
        weight=weight,
        log_mu=log_mu,
        log_q=log_q,
        exact=exact,
        law=law,
        log_prox=log_prox,
        log_ref=log_ref,
        advantage=advantage,
        baseline=baseline,
        mu_entropy=mu_entropy,
        log_tail_mu=log_tail_mu,
        missing_mu=missing_mu,
        rollout=rollout,
        kept=kept,
    )
