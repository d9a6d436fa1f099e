# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Trees of drafts, and how many drafts each sequence gets (opd/spec/draft_tree.hpp, opd/spec/draft_budget.hpp)."""

from __future__ import annotations

from ctypes import POINTER, byref, c_double, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional, Sequence

import numpy as np

from . import _c_spec as c
from ._handles import Handle, Saved, default, default_number, put, sized
from ._numbers import INT32, INT64, UINT32, UINT64, array_of, float64s, integer, integers, line, number
from ._spec_verify import Drafts, Verdict
from ._tensors import rows
from .errors import check, refuse


class FollowRates(Saved):
    """How often nodes of a kind (a cell) are followed, one a drafter: rate = (followed + w pool) / (tried + w), w =
    prior_weight, over the last `memory` trials of a cell (docs/spec/trees.md)."""

    _kind, _argument = "follow_rates", "rates"

    def __init__(self, memory: Optional[float] = None, prior_weight: Optional[float] = None):
        """memory: trials of a cell that count, 200; prior_weight: trials that the prior is worth, 4."""
        o = sized(c.opd_follow_rates_options())
        default_number(o, "memory", "options.memory", memory)
        default_number(o, "prior_weight", "options.prior_weight", prior_weight)
        self._make(byref(o))

    @staticmethod
    def by_rank(depth: int, rank: int, gap: float) -> int:
        """The cell of a child by score: depth from 1, rank from 0, gap to the best other score."""
        cell = c_int32()
        check(c.lib().opd_follow_rates_by_rank(_depth(depth), _rank(rank), number("gap", gap), byref(cell)))
        return cell.value

    @staticmethod
    def by_match(depth: int, matched: int) -> int:
        """The cell of a retrieved chain's token, of which `matched` tokens were found."""
        cell = c_int32()
        of = integer("matched", matched, 1, INT32)
        check(c.lib().opd_follow_rates_by_match(_depth(depth), of, byref(cell)))
        return cell.value

    @staticmethod
    def any_gap(depth: int, rank: int) -> int:
        """The cell of all children of a rank."""
        cell = c_int32()
        check(c.lib().opd_follow_rates_any_gap(_depth(depth), _rank(rank), byref(cell)))
        return cell.value

    def rate(self, cell: int) -> float:
        """The estimated probability that such a node is followed, if its parent is."""
        return self._of(cell)[0]

    def tried(self, cell: int) -> float:
        """Trials that count."""
        return self._of(cell)[1]

    def _of(self, cell: int) -> tuple[float, float]:
        rate, tried = c_double(), c_double()
        self._call("of", integer("cell", cell, -INT32, INT32), byref(rate), byref(tried))
        return rate.value, tried.value

    def learn(self, cell: int, followed: bool) -> None:
        """A verified node of this cell, whose parent was followed, was followed or not."""
        self._call("learn", integer("cell", cell, -INT32, INT32), bool(followed))


def _depth(depth: Any) -> int:
    return integer("depth", depth, 1, INT32)


def _rank(rank: Any) -> int:
    return integer("rank", rank, 0, INT32)


@dataclass(frozen=True)
class DraftLaw:
    """How the target takes the token after the prefix: by keyed noise under temperature and filter, or greedily
    (GREEDY). Children of a node are drafted by the same noise, so where drafter and target agree the first is the
    target's token. position: the prefix's length. Of None the filter leaves all."""

    position: int = 0
    seed: int = 0
    sample: int = 0
    temperature: Optional[float] = None
    top_k: Optional[int] = None
    top_p: Optional[float] = None
    min_p: float = 0.0
    greedy: bool = False

    def as_struct(self) -> c.opd_draft_law:
        s = sized(c.opd_draft_law())
        s.greedy = self.greedy
        s.position = integer("law.position", self.position, 0, UINT32)
        s.seed = integer("law.seed", self.seed, 0, UINT64)
        s.sample = integer("law.sample", self.sample, 0, UINT64)
        default(s, "top_k", "law.top_k", self.top_k, INT64)
        default_number(s, "temperature", "law.temperature", self.temperature)
        default_number(s, "top_p", "law.top_p", self.top_p)
        s.min_p = number("law.min_p", self.min_p)
        return s


#: The most probable token; neither filter nor noise.
GREEDY = DraftLaw(greedy=True)


class Node(NamedTuple):
    """Of a draft tree."""

    parent: int  #: -1: the prefix
    token: int
    depth: int  #: from 1
    reach: float  #: the probability that the node is followed


class Selected(NamedTuple):
    """Nodes to verify."""

    drafts: Drafts
    nodes: np.ndarray  #: (n) int64: their numbers in the tree


class DraftTree(Handle):
    """A tree that grows: begin, grow and graft, select, and after verification learn. Nodes are numbered as they
    come, -1 is the prefix. One a sequence, used again and again. For `follow`, or as "one_hot" (docs/spec/trees.md).
    """

    _kind, _argument = "draft_tree", "tree"

    def __init__(self, rates: Optional[FollowRates] = None):
        """With `rates` the tree has begun."""
        self._make()
        if rates is not None:
            self.begin(rates)

    def begin(self, rates: FollowRates) -> None:
        """An empty tree. It keeps `rates` alive until its next begin."""
        self._call("begin", _rates(rates))

    def grow(self, parent: int, z: Any, law: DraftLaw, top_k: int) -> int:
        """At most top_k children of `parent`: those of largest log q - log E, q the drafter's law of its logits z (V)
        under the law's temperature and filter, E the target's noise at that place; of GREEDY of largest log q.
        float32, float64, float16 or bfloat16. Returns how many."""
        count = c_int64()
        logits = line("z", array_of("z", z, np.float64))
        if not isinstance(law, DraftLaw):
            raise refuse("law", f"is a {type(law).__name__}; it is a DraftLaw")
        of = law.as_struct()
        place, most = integer("parent", parent, -1, INT64), integer("top_k", top_k, 1, INT64)
        self._call("grow", place, logits.pointer, byref(of), most, byref(count))
        return count.value

    def graft(self, chain: Any, matched: int) -> int:
        """A retrieved chain (n) below the prefix, of which the last `matched` tokens were found. Nodes that the tree
        has already are not there twice. Returns how many are new."""
        added = c_int64()
        tokens = integers("chain", chain)
        self._call("graft", tokens.pointer, integer("matched", matched, 0, INT32), byref(added))
        return added.value

    def imagine(self, depth: int, top_k: int) -> None:
        """Nodes without tokens, as a drafter's tree of that shape usually is, for `gains`; begin anew before anything
        is drafted."""
        self._call("imagine", integer("depth", depth, 0, INT32), integer("top_k", top_k, 1, INT64))

    def __len__(self) -> int:
        size = c_int64()
        self._call("size", byref(size))
        return size.value

    def node(self, node: int) -> Node:
        """What the tree has of a node."""
        found = c.opd_draft_node()
        self._call("node", integer("node", node, 0, INT64), byref(found))
        return Node(found.parent, found.token, found.depth, found.reach)

    def best_of_depth(self, depth: int, most: int) -> np.ndarray:
        """Numbers of the nodes of a depth, by falling reach: (n) int64, n at most `most`."""
        most = min(integer("most", most, 1, INT64), max(1, len(self)))
        count = c_int64()
        found: np.ndarray = np.empty(most, np.int64)
        at = found.ctypes.data_as(POINTER(c_int64))
        self._call("best_of_depth", integer("depth", depth, 1, INT32), at, most, byref(count))
        return np.array(found[: count.value])

    def gains(self) -> np.ndarray:
        """Reaches of all nodes, falling: (size) float64, what `draft_budget` takes."""
        found = np.empty(len(self), np.float64)
        self._call("gains", found.ctypes.data_as(POINTER(c_double)), found.size)
        return found

    def select(self, verify: int) -> Selected:
        """The `verify` nodes of largest reach, in the order of their numbers: no other tree of as many nodes promises
        more."""
        verify = integer("verify", verify, 0, INT64)
        tokens, parents, nodes = (np.empty(min(verify, len(self)), np.int64) for _ in range(3))
        count = c_int64()
        room = [rows(n, x, written=True) for n, x in (("tokens", tokens), ("parents", parents), ("nodes", nodes))]
        self._call("select", verify, *(b.pointer for b in room), byref(count))
        n = count.value
        return Selected(Drafts(tokens[:n], parents[:n]), nodes[:n])

    def learn(self, rates: FollowRates, verdict: Verdict) -> None:
        """What became of the nodes that were selected last."""
        if not isinstance(verdict, Verdict):
            raise refuse("verdict", f"is a {type(verdict).__name__}; it is what verify or follow returned for one tree")
        v = c.opd_verdict(*(integer("verdict", x, -INT32, INT32) for x in verdict[:3]), 0)
        self._call("learn", _rates(rates), byref(v))


def _rates(rates: Any) -> c_void_p:
    if not isinstance(rates, FollowRates):
        raise refuse("rates", f"is a {type(rates).__name__}; it is a FollowRates")
    return rates.handle


def points_of(argument: str, points: Any) -> Any:
    try:
        found = [(integer(argument, r, 0, INT64), number(argument, s)) for r, s in points]
    except (TypeError, ValueError) as why:
        if getattr(why, "argument", None):
            raise
        raise refuse(argument, "is no list of (rows, seconds)") from None
    return (c.opd_cost_point * len(found))(*(c.opd_cost_point(*x) for x in found)) if found else None


def step_seconds(points: Sequence[tuple[int, float]], rows: int) -> float:
    """Seconds of a step of so many rows by a cost that was measured: points (rows, seconds), rows rising, straight
    lines between them, before the first its seconds, beyond the last its line, unless that falls."""
    at, seconds = points_of("points", points), c_double()
    check(c.lib().opd_step_seconds(at, 0 if at is None else len(at), integer("rows", rows, 0, 1 << 40), byref(seconds)))
    return seconds.value


class Shares(NamedTuple):
    """What draft_budget comes to."""

    drafted: np.ndarray  #: (R) int64: drafted tokens that each sequence verifies
    value: float  #: tokens, weighted, a second


def draft_budget(
    gains: Sequence[Any],
    cost: Sequence[tuple[int, float]],
    *,
    remaining: Any = None,
    most_rows: Optional[int] = None,
    tail: float = 1.0,
    draft_seconds: float = 0.0,
    seconds_per_node: float = 0.0,
) -> Shares:
    """How many drafted tokens each of R sequences verifies: the K that maximise

        sum_s w_s (1 + sum_{k <= K_s} g_sk) / (seconds(R + sum K) + drafting)

    gains       of each sequence the reaches g of its nodes, falling, in [0, 1]: DraftTree.gains()
    cost        of the target: points (rows, seconds), as step_seconds takes them
    remaining   (R) tokens that a sequence is expected to write yet, r; None: 1 each
    tail        w = r^tail over its mean; 0: all sequences are alike
    most_rows   of the target in a step, sequences and drafts; None: no limit
    draft_seconds, seconds_per_node   what drafting costs a step, where anything is drafted, and for each node

    docs/spec/trees.md. Raises InvalidInput, whose row is the sequence's number.
    """
    each = [float64s("budget.gains", g) for g in gains]
    lengths = np.cumsum([0, *(g.size for g in each)]).astype(np.int64)
    together = np.concatenate([*each, np.zeros(0)])
    keep: list[Any] = []
    b = sized(c.opd_draft_budget())
    b.gains = put(keep, rows("budget.gains", together))
    b.offsets = put(keep, rows("budget.offsets", lengths))
    if remaining is not None:
        b.remaining = put(keep, rows("budget.remaining", float64s("budget.remaining", remaining)))
    points = points_of("budget.cost", cost)
    b.cost, b.cost_count = points, 0 if points is None else len(points)
    default(b, "most_rows", "budget.most_rows", most_rows, INT64)
    b.tail = number("budget.tail", tail)
    b.all_alike = b.tail == 0
    b.draft_seconds = number("budget.draft_seconds", draft_seconds)
    b.seconds_per_node = number("budget.seconds_per_node", seconds_per_node)
    found, value = np.empty(len(each), np.int64), c_double()
    check(c.lib().opd_draft_budget_share(byref(b), rows("shares", found, written=True).pointer, byref(value)))
    return Shares(found, value.value)
