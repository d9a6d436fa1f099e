# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Verification of drafts (opd/spec/verify.hpp)."""

from __future__ import annotations

from ctypes import byref, pointer
from typing import Any, Callable, NamedTuple, Optional, Protocol, Union

import numpy as np

from . import _c_spec as c
from ._handles import Caught, put, sized
from ._numbers import INT32, UINT32, UINT64, array_of, int64s, integer, integers
from ._tensors import Borrowed, matrix, rows
from .errors import refuse

PROPOSALS = ("one_hot", "dense", "iid_siblings", "without_replacement")


class Drafts:
    """Drafted tokens below a prefix, as `verify` and `follow` take them.

    tokens   (n) int32 or int64
    parents  (n): of each node an earlier one of its sequence, or -1: the prefix; None: chains. Children of a node are
             in the order in which they were drafted
    offsets  (S+1), of a batch of S sequences one after the other: first node of each, from 0 to n; None: one sequence

    Laws of the target and of the drafter, p and q, have n + S rows: with those before it, sequence s has rows
    offsets[s] + s on, the first after its prefix, row i + 1 of them after its node i.
    """

    def __init__(self, tokens: Any, parents: Any = None, offsets: Any = None):
        self.tokens = int64s("drafts.tokens", tokens)
        self.parents = None if parents is None else int64s("drafts.parents", parents)
        self.offsets = None if offsets is None else int64s("drafts.offsets", offsets)

    @property
    def sequences(self) -> int:
        """S."""
        return 1 if self.offsets is None else self.offsets.size - 1

    @property
    def rows(self) -> int:
        """Rows of the laws: n + S."""
        return self.tokens.size + self.sequences

    def as_struct(self, keep: list[Any]) -> c.opd_drafts:
        s = sized(c.opd_drafts())
        for name in ("tokens", "parents", "offsets"):
            if (given := getattr(self, name)) is not None:
                setattr(s, name, put(keep, rows("drafts." + name, given)))
        return s

    def path(self, node: int, sequence: int = 0) -> np.ndarray:
        """Tokens from the prefix to a node of a sequence, as they are written: (depth) int64; of node -1 none."""
        sequence = integer("sequence", sequence, 0, self.sequences - 1)
        first, last = 0, self.tokens.size
        if self.offsets is not None:
            first, last = (int(x) for x in self.offsets[sequence : sequence + 2])
        node = integer("node", node, -1, last - first - 1)
        found = []
        while node >= 0:
            found.append(self.tokens[first + node])
            parent = node - 1 if self.parents is None else int(self.parents[first + node])
            if not -1 <= parent < node:
                raise refuse("drafts.parents", f"is {parent} of node {node}; a parent is an earlier node, or -1")
            node = parent
        return np.array(found[::-1], np.int64)


class Verdict(NamedTuple):
    """What is written to one sequence: `written`, the drafted tokens that are followed and the one after them."""

    accepted: int  #: drafted tokens that are followed
    node: int  #: the last of them, of its sequence; -1: none
    next: int  #: the token after it
    written: np.ndarray  #: (accepted + 1) int64


class Verdicts(NamedTuple):
    """Of a batch of S sequences."""

    accepted: np.ndarray  #: (S) int64
    node: np.ndarray  #: (S) int64
    next: np.ndarray  #: (S) int64
    written: tuple[np.ndarray, ...]  #: of each sequence


class Coins(Protocol):
    """Where chance comes from, instead of keyed coins. Its exceptions are those of `verify`, which returns nothing."""

    def accept(self, p: float) -> bool:
        """True with probability p."""

    def draw(self, weights: np.ndarray) -> int:
        """i with probability weights[i] over their sum. (V) float64, good during the call alone."""


def _verdicts(drafts: Drafts, found: Any) -> Any:
    if drafts.offsets is None:
        v = found[0]
        return Verdict(v.accepted, v.node, v.next, np.append(drafts.path(v.node), np.int64(v.next)))
    each = [found[s] for s in range(drafts.sequences)]
    return Verdicts(
        np.array([v.accepted for v in each], np.int64),
        np.array([v.node for v in each], np.int64),
        np.array([v.next for v in each], np.int64),
        tuple(np.append(drafts.path(v.node, s), np.int64(v.next)) for s, v in enumerate(each)),
    )


def _room(drafts: Drafts) -> Any:
    return (c.opd_verdict * max(1, drafts.sequences))()


def _keys(argument: str, x: Any, drafts: Drafts, most: int) -> Borrowed:
    """(S) of a batch: numbers of sequences, or positions."""
    found = np.asarray(array_of(argument, x))
    if found.dtype.kind not in "iu" or found.shape != (drafts.sequences,):
        is_ = f"is of {found.dtype} and shape {found.shape}"
        raise refuse(argument, f"{is_}; it is an integer for each of {drafts.sequences} sequences")
    if most == UINT32 and found.size and not (int(found.min()) >= 0 and int(found.max()) <= most):
        raise refuse(argument, f"must lie in [0, {most}]")
    return rows(argument, np.ascontiguousarray(found, np.uint64 if found.dtype == np.uint64 else np.int64))


def verify(
    drafts: Union[Drafts, Any],
    p: Any,
    q: Any = None,
    *,
    drawn: str,
    block: bool = False,
    seed: int = 0,
    sample: Any = None,
    position: Any = None,
    coins: Optional[Coins] = None,
) -> Any:
    """Which drafts stay, and the token after them: so that what is written has the target's law.

    A drafted token x is followed with probability min(1, p(x)/q(x)) (of "one_hot" drafts p(x)); where it is refused,
    the next sibling is asked, and at last a token drawn, under (p - q)+ / sum (p - q)+ (p without x). With p and q
    any laws, the tokens written are distributed as the target alone would have drawn them.

    drafts    what was drafted, or the tokens of a chain
    p         (n + S, V) the target's probabilities, rows as Drafts says: after temperature, filter and penalties;
              float32, float64, float16 or bfloat16. Rows need not add up to 1
    q         (n + S, V) of what a row's children were drawn from, likewise; None with "one_hot"
    drawn     how drafts were drawn: "one_hot" (not by chance: retrieval, a favourite), "dense" (one a place, from q),
              "iid_siblings" (each from q), "without_replacement". Without default: who judges drafts as what they
              are not is biased, and nothing shows
    block     chains of "dense" as a whole: the same law, as many tokens or more
    seed, sample, position   what the keyed coins are a function of; sample: the sequence's number, unique in a run;
              position: the token's after the prefix, so the prefix's length. Of a batch (S) each
    coins     instead: an object with accept(p) and draw(weights)

    Returns a Verdict; Verdicts for drafts with offsets. Raises InvalidInput (argument, row).
    Leviathan et al. 2023 and Chen et al. 2023 (dense); Li et al. 2024, EAGLE (one_hot); Miao et al. 2024, SpecInfer
    (iid_siblings); Chen et al. 2024, Sequoia (without_replacement); Sun et al. 2024 (block).
    """
    if not isinstance(drafts, Drafts):
        drafts = Drafts(drafts)
    if drawn not in PROPOSALS:
        raise refuse("drawn", f"is {drawn!r}; it is one of {', '.join(PROPOSALS)}")
    keep: list[Any] = []
    call = sized(c.opd_verify_call())
    call.drawn, call.block = drawn.encode(), block
    given = drafts.as_struct(keep)
    call.drafts = pointer(given)
    call.p = put(keep, matrix("p", array_of("p", p, np.float64)))
    if q is not None:
        call.q = put(keep, matrix("q", array_of("q", q, np.float64)))
    elif drawn != "one_hot":
        raise refuse("q", f"is None; {drawn} drafts have the law that they were drawn from")
    caught = Caught()
    if coins is not None:
        for name, value in (("seed", seed or None), ("sample", sample), ("position", position)):
            if value is not None:
                raise refuse(name, "is given beside coins, which have no key")
        theirs = sized(c.opd_coins())
        theirs.accept = c.accept_function(caught.guard(lambda _, x: int(bool(coins.accept(x))), -1))
        theirs.draw = c.draw_function(caught.guard(lambda _, w, n: int(coins.draw(np.ctypeslib.as_array(w, (n,)))), -1))
        call.coins = pointer(theirs)
    else:
        call.seed = integer("seed", seed, 0, UINT64)
        for name, value in (("sample", sample), ("position", position)):
            if value is None:
                raise refuse(name, "is None; keyed coins are a function of seed, sample and position")
        if drafts.offsets is None:
            call.sample = integer("sample", sample, 0, UINT64)
            call.position = integer("position", position, 0, UINT32)
        else:
            call.samples = put(keep, _keys("sample", sample, drafts, UINT64))
            call.positions = put(keep, _keys("position", position, drafts, UINT32))
    found = _room(drafts)
    caught.check(c.lib().opd_verify(byref(call), found))
    return _verdicts(drafts, found)


def follow(
    drafts: Union[Drafts, Any],
    own: Any = None,
    *,
    draw: Optional[Callable[[np.ndarray, np.ndarray], Any]] = None,
) -> Any:
    """The target's own tokens decide: the text is that of plain decoding, whatever was drafted (docs/spec/
    verification.md has the proof). From the prefix on, a child that is the target's token is followed; the first
    token that was not drafted is written last.

    own    (n + S) int32 or int64: the token that the target draws after each row; read where it matters
    draw   instead: draw(sequences, rows) returns the token that the target draws from each of these rows (of its
           sequence's laws), int64 both, ascending by sequence: one call a round for all sequences that go on

    Returns a Verdict; Verdicts for drafts with offsets. Raises InvalidInput (argument, row), and what `draw` raises.
    """
    if not isinstance(drafts, Drafts):
        drafts = Drafts(drafts)
    if (own is None) == (draw is None):
        raise refuse("own", "and draw: the call needs one of them, and no more")
    keep: list[Any] = []
    call = sized(c.opd_follow_call())
    given = drafts.as_struct(keep)
    call.drafts = pointer(given)
    caught = Caught()
    if own is not None:
        call.own = put(keep, integers("own", own))
    else:

        def ask(_: Any, due: Any, n: int, tokens: Any) -> int:
            assert draw is not None
            asked = np.array([(due[i].sequence, due[i].row) for i in range(n)], np.int64).reshape(n, 2)
            drawn = int64s("draw", draw(asked[:, 0].copy(), asked[:, 1].copy()))
            if drawn.shape != (n,):
                raise refuse("draw", f"returned {drawn.size} tokens for {n} rows")
            if n and not (drawn.min() >= -INT32 - 1 and drawn.max() <= INT32):
                raise refuse("draw", "returned a token that does not fit in 32 bits")
            for i in range(n):
                tokens[i] = int(drawn[i])
            return 0

        call.draw = c.follow_function(caught.guard(ask, 1))
    found = _room(drafts)
    caught.check(c.lib().opd_follow(byref(call), found))
    return _verdicts(drafts, found)
