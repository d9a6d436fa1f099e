# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Estimators: what of student and teacher is measured, and how drawn tokens stand for it.

A plain string, or a divergence such as jsd(.3, .3), takes the default of the teacher's cache: "dense" for logits and
hidden states, "renormalised" for supports, "mc" for drawn tokens. docs/estimators has the formulas;
names("divergence") and its likes list them.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional, Union

from . import _c
from .errors import refuse


class Divergence(NamedTuple):
    """A divergence, or an objective of drawn tokens, by its name and its parameters."""

    name: str
    a: float = 0.0
    b: float = 0.0


Of = Union[str, Divergence, tuple[Any, ...]]
Selector = Union[str, tuple[Any, ...]]


def jsd(w: float = 0.5, o: float = 0.5) -> Divergence:
    """Generalised Jensen-Shannon: o KL(q||m) + (1-o) KL(p||m), m = w q + (1-w) p. TRL's beta is both."""
    return Divergence("jsd", w, o)


def skew_forward_kl(a: float) -> Divergence:
    return Divergence("skew_forward_kl", a)


def skew_reverse_kl(a: float) -> Divergence:
    return Divergence("skew_reverse_kl", a)


def alpha_divergence(a: float) -> Divergence:
    return Divergence("alpha_divergence", a)


@dataclass(frozen=True)
class Estimator:
    """A choice of the table "estimator" with its parameters; made by the functions below. A member of None has the
    library's default."""

    estimator: Optional[str] = None
    of: Of = "reverse_kl"
    surrogate: Optional[str] = None
    low: Optional[float] = None
    high: Optional[float] = None
    dual: Optional[float] = None
    cap: Optional[float] = None
    mask_over_cap: bool = False
    self_normalised: bool = False
    estr: Optional[tuple[float, float]] = None
    baseline: Optional[str] = None
    accept_bias: bool = False
    selector: Selector = "all"

    def as_struct(self) -> _c.opd_estimator:
        of = _named("estimator.of", self.of)
        selector = _named("estimator.selector", self.selector)
        s = _c.opd_estimator()
        s.struct_size = ctypes.sizeof(s)
        s.estimator = None if self.estimator is None else self.estimator.encode()
        s.of, s.a, s.b = of.name.encode(), of.a, of.b
        s.selector, s.selector_a, s.selector_b = selector.name.encode(), selector.a, selector.b
        s.surrogate = None if self.surrogate is None else self.surrogate.encode()
        s.baseline = None if self.baseline is None else self.baseline.encode()
        if self.low is not None or self.high is not None:
            s.low = 0.2 if self.low is None else self.low
            s.high = 0.2 if self.high is None else self.high
            if s.low == 0 and s.high == 0:
                raise refuse("estimator.low", "is 0 as is high: every ratio but 1 would be cut")
        for name in ("dual", "cap"):
            if (value := getattr(self, name)) is not None:
                if value == 0:
                    raise refuse("estimator." + name, "is 0; leave it out, or None, for none")
                setattr(s, name, value)
        if self.estr is not None:
            s.estr_tau, s.estr_epsilon = self.estr
            if s.estr_tau == 0:
                raise refuse("estimator.estr", "has a tau of 0; leave it out, or None, for none")
        s.mask_over_cap, s.self_normalised, s.accept_bias = self.mask_over_cap, self.self_normalised, self.accept_bias
        return s


def _named(argument: str, of: Union[str, tuple[Any, ...]]) -> Divergence:
    if isinstance(of, str):
        return Divergence(of)
    if isinstance(of, tuple) and 1 <= len(of) <= 3 and isinstance(of[0], str):
        return Divergence(of[0], *(float(x) for x in of[1:]))
    raise refuse(argument, f'is {of!r}; it is a name, or a name and its parameters: ("jsd", 0.3, 0.3)')


def dense(of: Of = "reverse_kl", selector: Selector = "all") -> Estimator:
    """A divergence of whole rows: of dense logits and of hidden states."""
    return Estimator("dense", of, selector=selector)


def renormalised(of: Of = "reverse_kl", selector: Selector = "all") -> Estimator:
    """A divergence on a support, both sides renormalised there."""
    return Estimator("renormalised", of, selector=selector)


def tail_bucket(of: Of = "reverse_kl", selector: Selector = "all") -> Estimator:
    """A divergence over a support and one bucket for the rest (ghost token)."""
    return Estimator("tail_bucket", of, selector=selector)


def generalised(of: Of = "reverse_kl", selector: Selector = "all") -> Estimator:
    """The Bregman terms of a divergence on a support, without the rest."""
    return Estimator("generalised", of, selector=selector)


def truncated_biased(of: Of = "reverse_kl", selector: Selector = "all") -> Estimator:
    """The sum over a support as several trainers ship it: no divergence."""
    return Estimator("truncated_biased", of, selector=selector)


def reweighted(selector: Selector = "all") -> Estimator:
    """Reverse KL on a stale student's support, reweighted by p/mu: biased."""
    return Estimator("reweighted", selector=selector)


def sampled_forward_kl(selector: Selector = "all") -> Estimator:
    """Forward KL from the teacher's own draws."""
    return Estimator("sampled_forward_kl", selector=selector)


def mc(
    of: Of = "reverse_kl",
    surrogate: Optional[str] = None,
    *,
    low: Optional[float] = None,
    high: Optional[float] = None,
    dual: Optional[float] = None,
    cap: Optional[float] = None,
    mask_over_cap: bool = False,
    self_normalised: bool = False,
    estr: Optional[tuple[float, float]] = None,
    baseline: Optional[str] = None,
    accept_bias: bool = False,
    selector: Selector = "all",
) -> Estimator:
    """A divergence, or another objective, from drawn tokens. `estr`: tau and epsilon."""
    return Estimator(
        "mc", of, surrogate, low, high, dual, cap, mask_over_cap, self_normalised, estr, baseline, accept_bias, selector
    )


def as_estimator(x: Union[Estimator, Of]) -> Estimator:
    return x if isinstance(x, Estimator) else Estimator(None, _named("estimator", x))


def names(table: str) -> dict[str, str]:
    """The names of a table ("divergence", "objective", "surrogate", "baseline", "selector", "estimator") and what
    each is."""
    lib = _c.lib()
    found: dict[str, str] = {}
    i = 0
    while (name := lib.opd_name(table.encode(), i)) is not None:
        found[name.decode()] = lib.opd_says(table.encode(), i).decode()
        i += 1
    if not found:
        raise refuse("table", f"there is none called {table!r}")
    return found
