# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Where the student's logits are, and where their gradient goes. A plain array is student.logits(array)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Optional, Union

from ._c import opd_student_kind

# True: memory of the package's. False: not wanted. An array: written there.
Output = Union[bool, Any]


@dataclass(frozen=True)
class Student:
    """Made by the functions below."""

    kind: opd_student_kind
    z: Any = None
    temperature: float = 1.0
    padding: int = 0
    keep_padding: bool = False
    x: Any = None
    w: Any = None
    bias: Any = None
    dx: Output = True
    dw: Output = True
    db: Output = True
    soft_cap: Optional[float] = None
    beta_head: float = 0.0
    budget_bytes: Optional[int] = None


def logits(z: Any, temperature: float = 1.0, *, padding: int = 0, keep_padding: bool = False) -> Student:
    """z (N,V) or (B,T,V): p = softmax(z/temperature). `padding`: columns after each row of the gradient that belong
    to it."""
    return Student(opd_student_kind.OPD_LOGITS, z, temperature, padding, keep_padding)


def on_support(z: Any, temperature: float = 1.0, *, padding: int = 0, keep_padding: bool = False) -> Student:
    """The same, with a gradient on the teacher's support alone: (N,k), column j for ids[r,j]. For "renormalised"."""
    return Student(opd_student_kind.OPD_ON_SUPPORT, z, temperature, padding, keep_padding)


def hidden(
    x: Any,
    w: Any,
    bias: Any = None,
    temperature: float = 1.0,
    *,
    dx: Output = True,
    dw: Output = True,
    db: Output = True,
    soft_cap: Optional[float] = None,
    beta_head: float = 0.0,
    budget_bytes: Optional[int] = None,
) -> Student:
    """z = x W^T + b, never in memory as a whole: hidden states x (N,D), head w (V,D). Gradients are float32; db only
    with a bias."""
    return Student(
        opd_student_kind.OPD_HIDDEN,
        None,
        temperature,
        x=x,
        w=w,
        bias=bias,
        dx=dx,
        dw=dw,
        db=db,
        soft_cap=soft_cap,
        beta_head=beta_head,
        budget_bytes=budget_bytes,
    )
