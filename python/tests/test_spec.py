# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""opd.spec: laws of what verification writes by exact enumeration, trees, drafters and tuners against a few lines of
numpy, snapshots, freed handles, and what is refused."""

import gc
import itertools
import math
import unittest

import numpy as np

import opd
from opd import spec

try:
    from opd import _c_spec

    _c_spec.lib()
except opd.Unsupported as why:
    raise unittest.SkipTest(str(why)) from None


class Refusals(unittest.TestCase):
    def refused(self, argument, make, row=None):
        with self.assertRaises(opd.InvalidInput) as caught:
            make()
        self.assertEqual(caught.exception.argument, argument, caught.exception)
        self.assertIn(argument.split(".")[-1], str(caught.exception))
        if row is not None:
            self.assertEqual(caught.exception.row, row)


class Outcomes:
    """Coins whose every outcome comes in turn: `weight` is the probability of this one."""

    def __init__(self):
        self.taken, self.at, self.weight = [], 0, 1.0

    def decide(self, law):
        if self.at == len(self.taken):
            self.taken.append(0)
        while law[self.taken[self.at]] == 0:
            self.taken[self.at] += 1
        self.left = getattr(self, "left", {})
        self.left[self.at] = any(x > 0 for x in law[self.taken[self.at] + 1 :])
        i = self.taken[self.at]
        self.weight *= law[i]
        self.at += 1
        return i

    def accept(self, p):
        return self.decide([1 - p, p]) == 1

    def draw(self, weights):
        return self.decide((weights / weights.sum()).tolist())

    def next(self):
        """Whether there is another outcome; if so, it comes next."""
        while self.taken and not self.left[len(self.taken) - 1]:
            self.taken.pop()
        if not self.taken:
            return False
        self.taken[-1] += 1
        self.at, self.weight = 0, 1.0
        return True


def each_outcome(judge):
    """(probability, verdict) of each outcome of the coins."""
    coins = Outcomes()
    while True:
        verdict = judge(coins)
        yield coins.weight, verdict
        if not coins.next():
            return


class World:
    """Laws of target and drafter after every text up to `depth` tokens, of V tokens."""

    def __init__(self, v, depth, seed=0):
        rng = np.random.default_rng(seed)
        self.v, self.depth = v, depth
        texts = [t for n in range(depth + 1) for t in itertools.product(range(v), repeat=n)]
        self.p = {t: rng.dirichlet(np.ones(v)) for t in texts}
        self.q = {t: rng.dirichlet(np.ones(v)) for t in texts}

    def laws(self, of, parents, tokens):
        texts = [()]
        for parent, token in zip(parents, tokens):
            texts.append((*texts[parent + 1], token))
        return np.array([of[t] for t in texts])

    def of_target(self, text, after=()):
        """The probability that the target writes `text` after `after`."""
        r = 1.0
        for i, token in enumerate(text):
            r *= self.p[(*after, *text[:i])][token]
        return r

    def written(self, found):
        """The law of the first depth + 1 tokens, where the target goes on after what was written."""
        n = self.depth + 1
        law = {t: 0.0 for t in itertools.product(range(self.v), repeat=n)}
        for weight, text in found:
            text = tuple(text)
            for rest in itertools.product(range(self.v), repeat=n - len(text)):
                law[(*text, *rest)] += weight * self.of_target(rest, text)
        return law

    def assert_exact(self, test, found):
        for text, mass in self.written(found).items():
            test.assertAlmostEqual(mass, self.of_target(text), delta=1e-12)


class Verification(unittest.TestCase):
    def run_all(self, world, parents, ways, drawn, **options):
        """[(probability, verdict)] over how drafts are drawn, `ways` [(probability, tokens)], and over all coins."""
        found = []
        for weight, tokens in ways:
            p = world.laws(world.p, parents, tokens)
            q = None if drawn == "one_hot" else world.laws(world.q, parents, tokens)
            drafts = spec.Drafts(list(tokens), list(parents))
            found += [
                (weight * w, v)
                for w, v in each_outcome(lambda coins: spec.verify(drafts, p, q, drawn=drawn, coins=coins, **options))
            ]
        self.assertAlmostEqual(sum(w for w, _ in found), 1, delta=1e-12)
        return found

    def chains(self, world, length):
        for tokens in itertools.product(range(world.v), repeat=length):
            weight = 1.0
            for i, token in enumerate(tokens):
                weight *= world.q[tokens[:i]][token]
            yield weight, tokens

    def test_chains_write_the_targets_law_and_follow_as_many_as_laws_overlap(self):
        for v, depth in ((3, 1), (3, 2), (2, 3)):
            world, parents = World(v, depth, seed=v), range(-1, depth - 1)
            kept = {}
            for block in (False, True):
                found = self.run_all(world, parents, self.chains(world, depth), "dense", block=block)
                world.assert_exact(self, [(w, x.written) for w, x in found])
                kept[block] = sum(w * x.accepted for w, x in found)
            expected = 0.0  # a token is followed with sum min(p, q), and its prefix before it
            for n in range(1, depth + 1):
                for text in itertools.product(range(v), repeat=n):
                    expected += math.prod(min(world.p[text[:i]][t], world.q[text[:i]][t]) for i, t in enumerate(text))
            self.assertAlmostEqual(kept[False], expected, delta=1e-12)
            if depth == 1:
                self.assertAlmostEqual(kept[True], kept[False], delta=1e-12)
            else:
                self.assertGreater(kept[True], kept[False] + 1e-6)

    def test_drafts_that_were_not_drawn(self):
        world = World(3, 2, seed=5)
        for parents, tokens in (((-1, 0), (1, 1)), ((-1, -1, 0, 0, 1), (2, 0, 1, 2, 1)), ((-1, -1), (1, 1)), ((), ())):
            found = self.run_all(world, parents, [(1.0, tokens)], "one_hot")
            world.assert_exact(self, [(w, x.written) for w, x in found])
            for _, x in found:
                self.assertEqual(x.accepted, len(x.written) - 1)
                self.assertEqual(x.next, x.written[-1])

    def test_siblings(self):
        world = World(3, 2, seed=6)
        parents = (-1, -1, 0, 0)  # two below the prefix, two below the first of them
        with_, without = [], []
        for a, b, c, d in itertools.product(range(3), repeat=4):
            first, below = world.q[()], world.q[(a,)]
            with_.append((first[a] * first[b] * below[c] * below[d], (a, b, c, d)))
            if a != b and c != d:
                again = first[b] / (1 - first[a]) * below[d] / (1 - below[c])
                without.append((first[a] * below[c] * again, (a, b, c, d)))
        for drawn, ways in (("iid_siblings", with_), ("without_replacement", without)):
            found = self.run_all(world, parents, ways, drawn)
            world.assert_exact(self, [(w, x.written) for w, x in found])

    def test_who_judges_a_favourite_as_drawn_is_biased(self):
        p, q = np.array([[0.5, 0.3, 0.2]] * 2), np.array([[0.2, 0.3, 0.5]] * 2)
        law = np.zeros(3)
        for w, x in each_outcome(lambda coins: spec.verify([2], p, q, drawn="dense", coins=coins)):
            law[x.written[0]] += w
        self.assertAlmostEqual(np.abs(law - p[0]).sum() / 2, 0.30, delta=1e-12)  # docs/spec/verification.md

    def test_keyed_coins_and_batches(self):
        rng = np.random.default_rng(8)
        tokens, parents = [2, 1, 0, 3, 3], [-1, 0, -1, 0, 1]
        drafts = spec.Drafts(tokens, parents, [0, 2, 2, 5])
        p, q = rng.dirichlet(np.ones(4), (2, 8))
        sample, position = np.array([7, -1, 9], np.int64), np.array([5, 0, 2**32 - 1], np.uint64)
        seen = set()
        for seed in range(40):
            batch = spec.verify(drafts, p, q, drawn="iid_siblings", seed=seed, sample=sample, position=position)
            for s, (first, last) in enumerate(((0, 2), (2, 2), (2, 5))):
                one = spec.verify(
                    spec.Drafts(np.array(tokens[first:last], np.int32), parents[first:last]),
                    p[first + s : last + s + 1],
                    q[first + s : last + s + 1],
                    drawn="iid_siblings",
                    seed=seed,
                    sample=int(sample[s]) % 2**64,
                    position=int(position[s]),
                )
                self.assertEqual((one.accepted, one.node, one.next), (batch.accepted[s], batch.node[s], batch.next[s]))
                self.assertEqual(one.written.tolist(), batch.written[s].tolist())
                self.assertEqual(one.written.tolist(), [*drafts.path(one.node, s), one.next])
                seen.add((s, one.accepted))
        self.assertTrue({(0, 0), (0, 2), (1, 0), (2, 0), (2, 3)} <= seen, seen)

    def test_types_of_laws(self):
        p, q = np.array([[0.5, 0.25, 0.25]] * 3), np.array([[0.25, 0.5, 0.25]] * 3)
        key = {"drawn": "dense", "seed": 3, "position": 4}
        for i in range(20):
            expected = spec.verify([1, 0], p, q, sample=i, **key)
            for of_p, of_q in (
                (np.float32, np.float16),
                (np.float16, np.float64),
                (lambda x: opd.bfloat16.rounded(x), np.float32),
                (lambda x: 8 * x, lambda x: x / 4),  # rows need not add up to 1
                (np.ndarray.tolist, np.ndarray.tolist),
            ):
                found = spec.verify([1, 0], of_p(p), of_q(q), sample=i, **key)
                self.assertEqual(found[:3], expected[:3])

    def test_follow_is_plain_decoding(self):
        rng = np.random.default_rng(9)
        for _ in range(50):
            lengths = rng.integers(0, 7, 3)
            offsets = np.cumsum([0, *lengths])
            tokens = rng.integers(0, 2, offsets[-1])
            parents = np.concatenate([[rng.integers(-1, i) for i in range(n)] for n in lengths]).astype(np.int64)
            drafts = spec.Drafts(tokens, parents, offsets)
            self.assertEqual(drafts.rows, offsets[-1] + 3)
            own = rng.integers(0, 2, drafts.rows)
            rounds = []

            def draw(sequences, rows):
                rounds.append(len(rows))
                return own[offsets[sequences] + sequences + rows]

            by_array, by_call = spec.follow(drafts, own), spec.follow(drafts, draw=draw)
            for s, n in enumerate(lengths):
                node, text = -1, []
                while True:
                    token = own[offsets[s] + s + node + 1]
                    text.append(token)
                    below = [i for i in range(n) if parents[offsets[s] + i] == node and tokens[offsets[s] + i] == token]
                    if not below:
                        break
                    node = below[0]
                for found in (by_array, by_call):
                    self.assertEqual(found.written[s].tolist(), text)
                    self.assertEqual((found.node[s], found.accepted[s]), (node, len(text) - 1))
            self.assertEqual(len(rounds), by_call.accepted.max() + 1)
            self.assertEqual(sum(rounds), by_call.accepted.sum() + 3)

    def test_callbacks_that_raise(self):
        class Broken:
            def accept(self, p):
                raise KeyError("accept")

            def draw(self, weights):
                raise KeyError("draw")

        class Asks(Broken):  # other handles may be used
            def accept(self, p):
                return table.draft([1], 1).tokens.tolist() == [2]

        table = spec.NgramTable(shortest=1)
        table.learn([1, 2])
        p = np.full((2, 3), 1 / 3)
        with self.assertRaisesRegex(KeyError, "draw"):  # of the row after the token, which was followed
            spec.verify([1], p, drawn="one_hot", coins=Asks())
        with self.assertRaisesRegex(KeyError, "accept"):
            spec.verify([1], p, drawn="one_hot", coins=Broken())
        with self.assertRaisesRegex(KeyError, "draw"):
            spec.verify([], p[:1], drawn="one_hot", coins=Broken())
        with self.assertRaises(ZeroDivisionError):
            spec.follow([1], draw=lambda sequences, rows: 1 / 0)


class VerificationRefuses(Refusals):
    def test_what_is_refused(self):
        p, q = np.random.default_rng(1).dirichlet(np.ones(4), (2, 3))
        key = {"seed": 1, "sample": 2, "position": 3}

        def verify(tokens=(1, 2), p=p, q=q, drawn="dense", parents=None, offsets=None, **more):
            return spec.verify(spec.Drafts(list(tokens), parents, offsets), p, q, drawn=drawn, **{**key, **more})

        self.assertEqual(verify().accepted, spec.verify([1, 2], p, q, drawn="dense", **key).accepted)
        for argument, change in (
            ("drafts.tokens", {"tokens": [1.0, 2.0]}),
            ("drafts.tokens", {"tokens": [1, 2**31]}),
            ("drafts.tokens", {"tokens": [[1, 2]]}),
            ("drafts.tokens", {"tokens": [[1], [1, 2]]}),
            ("drafts", {"tokens": [1, 4]}),
            ("drafts.parents", {"parents": [-1, 1]}),
            ("drafts.parents", {"parents": [-1]}),
            ("drafts.parents", {"parents": [-1.0, 0.0]}),
            ("drafts", {"parents": [-1, -1]}),  # dense drafts are one a node
            ("drafts.offsets", {"offsets": [0, 1], "sample": [1], "position": [1]}),
            ("p", {"p": None}),
            ("p", {"p": p[:2]}),
            ("p", {"p": p[0]}),
            ("p", {"p": p.astype(np.int64)}),
            ("p", {"p": np.asfortranarray(p)}),
            ("p", {"p": p * np.nan}),
            ("p", {"p": [["a"]]}),
            ("q", {"q": None}),
            ("q", {"q": q[:, :3]}),
            ("q", {"q": -q}),
            ("q", {"drawn": "one_hot"}),
            ("drawn", {"drawn": "drawn"}),
            ("drawn", {"drawn": None}),
            ("block", {"drawn": "iid_siblings", "block": True}),
            ("seed", {"seed": -1}),
            ("seed", {"seed": 2**64}),
            ("sample", {"sample": None}),
            ("sample", {"sample": 0.5}),
            ("sample", {"sample": [1]}),
            ("position", {"position": None}),
            ("position", {"position": 2**32}),
            ("sample", {"coins": Outcomes(), "seed": 0}),
            ("sample", {"offsets": [0, 1, 2], "p": np.ones((4, 4)), "q": np.ones((4, 4))}),
        ):
            with self.subTest(argument=argument, change=change):
                self.refused(argument, lambda: verify(**change))
        with self.assertRaisesRegex(opd.InvalidInput, "drafts, row 1: token 4"):
            verify(tokens=[1, 4])
        batch = {"offsets": [0, 1, 2], "p": np.ones((4, 4)), "q": np.ones((4, 4)), "sample": [0, 1]}
        self.refused("position", lambda: verify(**batch, position=[1]))
        self.refused("position", lambda: verify(**batch, position=[1, -1]))
        self.refused("own", lambda: spec.follow([1]))
        self.refused("own", lambda: spec.follow([1], [1, 2], draw=lambda s, r: [1]))
        self.refused("own", lambda: spec.follow([1], [1]))
        self.refused("own", lambda: spec.follow([1], np.array([1.0, 2.0])))
        self.refused("draw", lambda: spec.follow([1], draw=lambda s, r: [1, 2]))
        self.refused("draw", lambda: spec.follow([1], draw=lambda s, r: [2**31]))
        self.refused("draw", lambda: spec.follow([1], draw=lambda s, r: None))
        self.refused("drafts.parents", lambda: spec.Drafts([1, 2], [1, 0]).path(1))
        self.refused("node", lambda: spec.Drafts([1, 2]).path(2))


class Trees(Refusals):
    def test_rates(self):
        rates = spec.FollowRates(memory=10, prior_weight=3)
        cell, pool, tried, followed = rates.by_match(2, 4), 0.6, 0.0, 0.0  # 0.6: of chains that match 3 or 4 tokens
        self.assertAlmostEqual(rates.rate(cell), 0.6, delta=1e-15)
        for yes in (True, False, False, True, True):
            rates.learn(cell, yes)
            tried, followed = tried * 0.9 + 1, followed * 0.9 + yes
        shrunk = (followed + 3 * pool) / (tried + 3)  # of all depths together, which here is this one
        self.assertAlmostEqual(rates.rate(cell), (followed + 3 * shrunk) / (tried + 3), delta=1e-14)
        self.assertAlmostEqual(rates.rate(rates.by_match(5, 4)), shrunk, delta=1e-14)
        self.assertAlmostEqual(rates.tried(cell), tried, delta=1e-14)
        self.assertEqual(rates.by_rank(1, 0, 0.3), rates.by_rank(1, 0, 0.4))
        self.assertEqual(len({rates.by_rank(1, 0, 0.3), rates.by_rank(1, 0, 3.0), rates.any_gap(1, 0)}), 3)

    def test_the_greedy_children_are_the_best(self):
        rng = np.random.default_rng(2)
        z = rng.normal(size=11)
        rates = spec.FollowRates()
        for kind in (np.float64, np.float32, np.ndarray.tolist):
            with spec.DraftTree(rates) as tree:
                self.assertEqual(tree.grow(-1, kind(z), spec.GREEDY, 4), 4)
                nodes = [tree.node(i) for i in range(len(tree))]
                self.assertEqual([n.token for n in nodes], np.argsort(-z)[:4].tolist())
                self.assertEqual({(n.parent, n.depth) for n in nodes}, {(-1, 1)})
                self.assertEqual(tree.grow(1, kind(-z), spec.GREEDY, 2), 2)
                self.assertEqual((tree.node(4).parent, tree.node(4).depth), (1, 2))
                self.assertEqual(tree.node(4).token, z.argmin())
                reach = np.array([tree.node(i).reach for i in range(6)])
                np.testing.assert_array_equal(tree.gains(), np.sort(reach)[::-1])
                best = tree.best_of_depth(1, 3)
                self.assertEqual(best.tolist(), np.argsort(-reach[:4], kind="stable")[:3].tolist())

    def test_children_know_the_noise_by_which_opd_draws(self):
        z = np.random.default_rng(4).normal(size=(50, 9)).astype(np.float32)
        rates, tree = spec.FollowRates(), spec.DraftTree()
        own = opd.draw(z, "gumbel", seed=5, sample=np.arange(50), position=[*range(50)], temperature=0.7, top_k=6)
        for i in range(50):
            tree.begin(rates)
            tree.grow(-1, z[i], spec.DraftLaw(i, 5, i, temperature=0.7, top_k=6), 3)
            self.assertEqual(tree.node(0).token, own.ids[i, 0])

    def test_select_takes_the_best_tree_and_learn_counts_its_nodes(self):
        rng = np.random.default_rng(7)
        rates = spec.FollowRates()
        tree = spec.DraftTree(rates)
        self.assertEqual(tree.graft([3, 1, 4], matched=2), 3)
        self.assertEqual(tree.graft([3, 1, 5], matched=2), 1)  # the beginning is there already
        for parent in (-1, 0):
            tree.grow(parent, rng.normal(size=6), spec.GREEDY, 3)
        size = len(tree)
        reach = np.array([tree.node(i).reach for i in range(size)])
        parent = np.array([tree.node(i).parent for i in range(size)])
        for verify in range(size + 3):
            chosen = tree.select(verify)
            most = max(
                reach[list(s)].sum()
                for s in itertools.combinations(range(size), min(verify, size))
                if all(parent[i] < 0 or parent[i] in s for i in s)
            )
            self.assertAlmostEqual(reach[chosen.nodes].sum(), most, delta=1e-12)
            self.assertEqual(chosen.drafts.tokens.tolist(), [tree.node(i).token for i in chosen.nodes])
            below = [-1 if parent[i] < 0 else chosen.nodes.tolist().index(parent[i]) for i in chosen.nodes]
            self.assertEqual(chosen.drafts.parents.tolist(), below)
        cell = rates.by_match(1, 2)
        self.assertEqual(rates.tried(cell), 0)
        chosen = tree.select(size)
        verdict = spec.follow(chosen.drafts, [3] + [9] * size)
        self.assertEqual(verdict.accepted, 1)
        before = rates.rate(cell)
        tree.learn(rates, verdict)
        self.assertEqual(rates.tried(cell), 1)
        self.assertGreater(rates.rate(cell), before)

    def test_imagined_gains(self):
        rates = spec.FollowRates()
        tree = spec.DraftTree(rates)
        tree.imagine(2, 2)
        first = [rates.rate(rates.any_gap(1, r)) for r in range(2)]
        second = [rates.rate(rates.any_gap(2, r)) for r in range(2)]
        expected = sorted(first + [a * b for a in first for b in second], reverse=True)
        np.testing.assert_allclose(tree.gains(), expected, rtol=1e-12)

    def test_what_is_refused(self):
        rates, z = spec.FollowRates(), np.zeros(5)
        self.refused("tree", lambda: len(spec.DraftTree()))
        tree = spec.DraftTree(rates)
        tree.grow(-1, z, spec.GREEDY, 2)
        before = [tree.node(i) for i in range(2)]
        for argument, call in (
            ("parent", lambda: tree.grow(2, z, spec.GREEDY, 1)),
            ("parent", lambda: tree.grow(-2, z, spec.GREEDY, 1)),
            ("top_k", lambda: tree.grow(-1, z, spec.GREEDY, 0)),
            ("z", lambda: tree.grow(-1, None, spec.GREEDY, 1)),
            ("z", lambda: tree.grow(-1, np.zeros((2, 5)), spec.GREEDY, 1)),
            ("z", lambda: tree.grow(-1, np.zeros(5, np.int32), spec.GREEDY, 1)),
            ("law", lambda: tree.grow(-1, z, None, 1)),
            ("law.temperature", lambda: tree.grow(-1, z, spec.DraftLaw(temperature=0.0), 1)),
            ("law.temperature", lambda: tree.grow(-1, z, spec.DraftLaw(temperature=-1.0), 1)),
            ("law.temperature", lambda: tree.grow(-1, z, spec.DraftLaw(temperature=1e-60), 1)),
            ("law.top_p", lambda: tree.grow(-1, z, spec.DraftLaw(top_p="most"), 1)),
            ("law.seed", lambda: tree.grow(-1, z, spec.DraftLaw(seed=1, greedy=True), 1)),
            ("law.position", lambda: tree.grow(-1, z, spec.DraftLaw(position=2**32), 1)),
            ("chain", lambda: tree.graft([1.5], 1)),
            ("matched", lambda: tree.graft([1], -1)),
            ("node", lambda: tree.node(2)),
            ("verify", lambda: tree.select(-1)),
            ("rates", lambda: tree.begin(None)),
            ("rates", lambda: tree.learn(tree, spec.follow([1], [1, 2]))),
            ("verdict", lambda: tree.learn(rates, None)),
            ("depth", lambda: rates.by_match(0, 1)),
            ("gap", lambda: rates.by_rank(1, 0, math.nan)),
            ("cell", lambda: rates.rate(-1)),
            ("cell", lambda: rates.learn(2**33, True)),
            ("options.memory", lambda: spec.FollowRates(memory=0.5)),
            ("options.memory", lambda: spec.FollowRates(memory=0)),
            ("options.memory", lambda: spec.FollowRates(memory="long")),
        ):
            with self.subTest(argument=argument):
                self.refused(argument, call)
        self.assertEqual([tree.node(i) for i in range(len(tree))], before)

    def test_seconds_of_a_step(self):
        points = [(1, 0.010), (8, 0.011), (64, 0.030)]
        rows = np.arange(1, 65)
        expected = np.interp(rows, *zip(*points))
        np.testing.assert_allclose([spec.step_seconds(points, int(r)) for r in rows], expected, rtol=1e-12)
        self.assertAlmostEqual(spec.step_seconds(points, 120), 0.030 + 0.019, delta=1e-12)
        self.refused("points", lambda: spec.step_seconds([], 3))
        self.refused("points", lambda: spec.step_seconds([(2, 1.0), (1, 2.0)], 3), row=1)
        self.refused("points", lambda: spec.step_seconds([1, 2], 3))
        self.refused("rows", lambda: spec.step_seconds(points, -1))

    def test_a_budget_is_the_best_of_all(self):
        rng = np.random.default_rng(11)
        for case in range(20):
            gains = [np.sort(rng.random(n))[::-1] for n in rng.integers(0, 4, 3)]
            cost = [(1, 1.0), (3, 1.1), (4, 1.1 + rng.random()), (9, 2.5)]
            left, tail = rng.integers(1, 100, 3), (0.0, 1.0, 0.5)[case % 3]
            most_rows = (None, 6)[case % 2]
            w = left**tail / np.mean(left**tail)

            def value(k):
                tokens = sum(w[s] * (1 + gains[s][: k[s]].sum()) for s in range(3))
                return tokens / (spec.step_seconds(cost, 3 + sum(k)) + (0.2 + 0.01 * sum(k) if sum(k) else 0))

            all_ = [
                k for k in itertools.product(*(range(g.size + 1) for g in gains)) if 3 + sum(k) <= (most_rows or 99)
            ]
            found = spec.draft_budget(
                gains,
                cost,
                remaining=left,
                most_rows=most_rows,
                tail=tail,
                draft_seconds=0.2,
                seconds_per_node=0.01,
            )
            self.assertAlmostEqual(found.value, max(map(value, all_)), delta=1e-12)
            self.assertAlmostEqual(found.value, value(found.drafted), delta=1e-12)
        self.refused("budget.gains", lambda: spec.draft_budget([[0.5], [0.2, 0.3]], cost), row=1)
        self.refused("budget.gains", lambda: spec.draft_budget([["a"]], cost))
        self.refused("budget.gains", lambda: spec.draft_budget([[[0.5]]], cost))
        self.refused("budget.gains", lambda: spec.draft_budget([np.array(["a"])], cost))
        self.refused("budget.remaining", lambda: spec.draft_budget([[0.5]], cost, remaining=[1, 2]))
        self.refused("budget.cost", lambda: spec.draft_budget([[0.5]], []))
        self.refused("budget.most_rows", lambda: spec.draft_budget([[0.5]], cost, most_rows=0))


def longest_match(texts, which):
    """The longest end of texts[which] that occurs elsewhere, by trying all: (length, what followed each time)."""
    text = texts[which]
    for n in range(len(text), 0, -1):
        end, after = text[-n:], []
        for i, other in enumerate(texts):
            for at in range(n, len(other) + (i != which)):
                if other[at - n : at] == end:
                    after.append(other[at:])
        if after:
            return n, after
    return 0, []


class Drafters(Refusals):
    def test_a_table_drafts_what_came_last_and_most(self):
        table = spec.NgramTable(shortest=2, longest=3)
        table.learn([1, 2, 3, 4, 5, 6])
        found = table.draft([9, 2, 3], 3)
        self.assertEqual((found.tokens.tolist(), found.matched), ([4, 5, 6], 2))
        self.assertEqual(table.draft([1, 2, 3], 1).matched, 3)
        self.assertEqual(table.draft([2, 3], 3, least=3).tokens.size, 0)
        self.assertEqual(table.draft([7, 7], 3).tokens.size, 0)
        for _ in range(3):
            table.learn(np.array([0, 2, 3, 8, 8], np.int32), first=3)  # only what came after (0,) 2, 3
        self.assertEqual(table.draft([5, 2, 3], 1).tokens.tolist(), [8])
        keys, size = spec.NgramTable(memory=4096).capacity()
        self.assertGreater(keys, 0)
        self.assertLessEqual(size, 4096)
        table.clear()
        self.assertEqual(table.draft([9, 2, 3], 3).tokens.size, 0)

    def test_an_automaton_finds_the_longest_end(self):
        rng = np.random.default_rng(13)
        with spec.SuffixAutomaton() as automaton:
            texts, drafted = [[] for _ in range(3)], 0
            self.assertEqual([automaton.begin() for _ in texts], [0, 1, 2])
            for _ in range(120):
                which = int(rng.integers(3))
                more = rng.integers(0, 3, rng.integers(1, 4)).tolist()
                texts[which] += more
                self.assertTrue(automaton.append(which, more))
                n, after = longest_match(texts, which)
                match = automaton.longest(which)
                self.assertEqual(match.length, n)
                if n:
                    self.assertEqual(texts[match.text][match.position - n : match.position], texts[which][-n:])
                    self.assertIn(texts[match.text][match.position :], after)
                    followed = texts[match.text][match.position : match.position + 4]
                    self.assertEqual(automaton.draft(which, 4).tolist(), followed)
                    drafted += len(followed)
                self.assertEqual(automaton.draft(which, 4, least=n + 1).size, 0)
            self.assertGreater(drafted, 200)
            self.assertEqual(automaton.holds()["tokens"], sum(map(len, texts)))
            automaton.forget(2)
            self.assertEqual(automaton.holds()["texts"], 1)
            self.assertEqual(automaton.longest(0).length, longest_match(texts[2:], 0)[0])
            automaton.end(0)
            self.assertFalse(automaton.append(0, [1]))

    def test_an_automaton_has_its_limit(self):
        automaton = spec.SuffixAutomaton(most_tokens=5)
        text = automaton.begin()
        self.assertTrue(automaton.append(text, [1, 2, 3, 1, 2]))
        self.assertFalse(automaton.append(text, [3]))
        self.assertEqual(automaton.holds()["tokens"], 5)

    def test_groups_know_the_last_epoch_and_no_other_prompt(self):
        groups = spec.PromptGroups()
        answer = groups.begin(5, 0, [1, 2])
        self.assertTrue(groups.append(answer, [3, 4, 5]))
        groups.end(answer)
        other = groups.begin(6, 0, [1, 2])
        self.assertEqual(groups.draft(other, 3).size, 0)
        again = groups.begin(5, 1, [1, 2])
        self.assertEqual(groups.draft(again, 2).tolist(), [3, 4])
        self.assertEqual(groups.longest(again).length, 2)
        self.assertEqual(groups.holds()["groups"], 2)
        self.assertFalse(groups.append(other._replace(number=9), [1]))
        groups.end(again)
        self.assertEqual(groups.draft(groups.begin(5, 2, [1, 2, 3]), 1).size, 0)  # of epoch 1, which wrote nothing
        self.assertEqual(groups.begin(2**64 - 1, 0).prompt, 2**64 - 1)

    def test_what_is_refused(self):
        table, automaton, groups = spec.NgramTable(), spec.SuffixAutomaton(), spec.PromptGroups()
        text = automaton.begin()
        automaton.append(text, [1, 2, 1])
        answer = groups.begin(1, 0, [1, 2, 1])
        table.learn([1, 2, 1])
        all_ = (table, automaton, groups)
        before = [x.snapshot() for x in all_]
        for argument, call in (
            ("options.longest", lambda: spec.NgramTable(longest=17)),
            ("options.shortest", lambda: spec.NgramTable(shortest=0)),
            ("options.bytes", lambda: spec.NgramTable(memory=-1)),
            ("options.most_tokens", lambda: spec.SuffixAutomaton(2**30)),
            ("options.most_tokens", lambda: spec.PromptGroups("many")),
            ("text", lambda: table.learn(None)),
            ("text", lambda: table.learn([1.0])),
            ("text", lambda: table.learn([2**31])),
            ("text", lambda: table.learn(np.zeros((2, 2), np.int64))),
            ("first", lambda: table.learn([1], 2)),
            ("before", lambda: table.draft(np.zeros(3), 1)),
            ("most", lambda: table.draft([1], -1)),
            ("least", lambda: table.draft([1], 1, 0)),
            ("text", lambda: automaton.append(1, [1])),
            ("text", lambda: automaton.longest(-1)),
            ("tokens", lambda: automaton.append(text, np.zeros(2, np.float32))),
            ("text", lambda: automaton.draft(None, 1)),
            ("count", lambda: automaton.forget(2)),
            ("text", lambda: groups.append(answer._replace(number=-2), [1])),
            ("text", lambda: groups.append(3, [1])),
            ("tokens", lambda: groups.append(answer, None)),
            ("prompt", lambda: groups.begin(-1, 0)),
            ("epoch", lambda: groups.begin(1, None)),
        ):
            with self.subTest(argument=argument):
                self.refused(argument, call)
        self.assertEqual([x.snapshot() for x in all_], before)


ARMS = [(5, 2, 8), (3, 2, 8), (2, 1, 8), (2, 2, 4), (1, 1, 4)]
THRESHOLDS = [1, 6]


def bucket(batch):
    return [a for a in ARMS if a[2] == (8 if batch < 6 else 4)]


class Tuners(Refusals):
    def steps(self, n, seed=17):
        """batch, accepted by arm, seconds."""
        rng = np.random.default_rng(seed)
        for _ in range(n):
            batch = int(rng.integers(1, 10))
            yield batch, {a: float(rng.random() * a[0]) for a in ARMS}, float(rng.uniform(0.5, 1.5))

    def test_beg_mab(self):
        numbers = np.random.default_rng(1).random(2000).tolist()
        for reward in spec.REWARDS:
            for tries in (1, 2):
                given, mine = iter(numbers), iter(numbers)
                tuner = spec.beg_mab(ARMS, THRESHOLDS, epsilon=0.3, window=5, tries=tries, reward=reward)
                rewards, explored = {a: [] for a in ARMS}, 0
                for batch, accepted, seconds in self.steps(400):
                    uniforms = spec.Uniforms(draw=lambda: next(given))
                    chosen = tuner.choose(batch, uniforms)
                    arms = bucket(batch)
                    if next(mine) < 0.3:
                        expected, explored = arms[int(next(mine) * len(arms))], explored + 1
                    elif few := [a for a in arms if len(rewards[a]) < tries]:
                        expected = min(few, key=lambda a: len(rewards[a]))
                    else:
                        expected = max(arms, key=lambda a: np.median(rewards[a]))
                    self.assertEqual(chosen, expected)
                    tuner.heard(chosen, batch, accepted[chosen], seconds)
                    got = (accepted[chosen] + 1) / seconds * (batch if reward == "tokens_per_second" else 1)
                    rewards[chosen] = [*rewards[chosen], got][-5:]
                self.assertGreater(explored, 80)

    def test_ucb1(self):
        for bonus in (0, 0.7):
            tuner = spec.ucb1(ARMS, THRESHOLDS, bonus=bonus, window=40)
            rewards, used = {a: [] for a in ARMS}, set()
            for batch, accepted, seconds in self.steps(300):
                chosen, arms = tuner.choose(batch), bucket(batch)
                if few := [a for a in arms if not rewards[a]]:
                    expected = few[0]
                else:
                    n, most = sum(len(rewards[a]) for a in arms), max(np.mean(rewards[a]) for a in arms)
                    expected = max(
                        arms,
                        key=lambda a: np.mean(rewards[a]) + bonus * most * np.sqrt(2 * np.log(n) / len(rewards[a])),
                    )
                self.assertEqual(chosen, expected)
                used.add(chosen)
                tuner.heard(chosen, batch, accepted[chosen], seconds)
                rewards[chosen] = [*rewards[chosen], (accepted[chosen] + 1) / seconds][-40:]
            self.assertEqual(used, set(ARMS))

    def test_no_exploration_draws_once_and_takes_the_best(self):
        tuner = spec.beg_mab(ARMS, THRESHOLDS, epsilon=0)
        for i, arm in enumerate(bucket(1)):
            tuner.heard(arm, 1, i, 1.0)
        for step in range(100):
            uniforms = spec.Uniforms(3, step)
            self.assertEqual(tuner.choose(1, uniforms), bucket(1)[-1])
            self.assertEqual(uniforms.asked, 1)

    def test_keyed_numbers_make_ranks_choose_alike(self):
        ranks = [spec.published_beg_mab(), spec.published_beg_mab()]
        seen = set()
        for step, (batch, accepted, seconds) in enumerate(self.steps(200)):
            numbers = [spec.Uniforms(9, step) for _ in ranks]
            chosen = [t.choose(batch, u) for t, u in zip(ranks, numbers)]
            self.assertEqual(chosen[0], chosen[1])
            for t, s, u in zip(ranks, chosen, numbers):
                t.heard(s, batch, accepted[ARMS[0]], seconds, u)
            self.assertEqual(numbers[0].asked, numbers[1].asked)
            seen.add(chosen[0])
        self.assertGreater(len(seen), 4)

    def test_a_limit_of_tokens_and_a_table(self):
        tuner = spec.ucb1(ARMS, THRESHOLDS, most_tokens=24)
        self.assertEqual([tuner.choose(b).verify for b in (1, 3, 4, 6, 7)], [8, 8, 0, 4, 0])
        self.assertTrue(tuner.choose(4).none)
        table = spec.fixed_table([(2, spec.Strategy(3, 2, 6)), (8, (0, 0, 0)), (20, (1, 1, 1))])
        self.assertEqual(
            [table.choose(b) for b in (1, 2, 7, 8, 30)], [(0, 0, 0), (3, 2, 6), (3, 2, 6), (0,) * 3, (1,) * 3]
        )

    def test_cost_profile(self):
        tuner = spec.cost_profile([(2, 1, 2), (4, 2, 8)], target=[(1, 1.0), (101, 2.0)], drafter=[(1, 0.1)])
        arms, memory, doubt = [(2, 1, 2), (4, 2, 8)], 100, 0.05
        seen = {a: np.zeros(4) for a in [*arms, (0, 0, 0)]}  # steps, accepted, timed, ratios

        def profiled(a, batch):
            return 1 + (batch * (1 + a[2]) - 1) / 100 + a[0] * 0.1

        def accepted(a):
            steps, kept, *_ = seen[a]
            return (kept + doubt * min(a[0], a[2])) / (steps + doubt) if a[2] else 0.0

        for batch, _, seconds in self.steps(80):
            for a in seen:
                found = tuner.predict(a, batch)
                ratio = seen[a][3] / seen[a][2] if seen[a][2] else 1
                expected = accepted(a), ratio * profiled(a, batch)
                np.testing.assert_allclose(found[1:], expected, rtol=1e-12)
                self.assertAlmostEqual(found.tokens_per_second, (expected[0] + 1) / expected[1], delta=1e-9)
            chosen = tuner.choose(batch)
            self.assertEqual(chosen, max([(0, 0, 0), *arms], key=lambda a: tuner.predict(a, batch).tokens_per_second))
            tuner.heard(chosen, batch, 0.4 * chosen.depth, seconds)
            kept = 1 - 1 / memory
            for a in seen:
                seen[a][:2] *= kept
            seen[chosen][:2] += 1, 0.4 * chosen.depth
            seen[chosen][2:] = seen[chosen][2:] * kept + (1, seconds / profiled(chosen, batch))
        with self.assertRaises(opd.Unsupported):
            spec.ucb1().predict((2, 1, 2), 3)

    def test_merged(self):
        ranks = [
            spec.StepObservation(3, 1.0, 0.2),
            spec.StepObservation(0, 9.0, 0.3),
            spec.StepObservation(5, 2.0, 0.1),
        ]
        self.assertEqual(spec.merged(ranks), (5, (3 * 1.0 + 5 * 2.0) / 8, 0.3))
        self.refused("ranks", lambda: spec.merged([]))
        self.refused("ranks", lambda: spec.merged([None]))
        self.refused("ranks.batch", lambda: spec.merged([ranks[0], (-1, 0.0, 1.0)]), row=1)

    def test_the_switch_has_hysteresis(self):
        switch = spec.ElasticSwitch(on_at=4, off_at=6, checks=3)
        running = [4, 4, 5, 4, 4, 4, 5, 6, 7, 3, 3, 3, 9]
        self.assertEqual([int(switch.check(n)) for n in running], [0, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 0])
        self.assertEqual([spec.ElasticSwitch().check(40) for _ in range(3)], [False] * 3)

    def test_the_selector_takes_the_faster(self):
        selector = spec.DrafterSelector(drafters=2, tries=1, again=5)
        self.assertEqual((selector.exists(0), selector.exists(1), selector.choose(4)), (True, False, 0))
        selector.set_exists(1)
        speed, chosen = {0: (1.0, 0.5), 1: (3.0, 0.5)}, []
        for _ in range(2 + 2 * 21):
            chosen.append(selector.choose(4))
            selector.heard(chosen[-1], 4, *speed[chosen[-1]])
        self.assertAlmostEqual(selector.predicted(1, 4), 8.0, delta=1e-9)
        self.assertAlmostEqual(selector.predicted(0, 4), 4.0, delta=1e-9)
        self.assertEqual(selector.predicted(0, 400), 0)
        self.assertEqual(set(chosen[:2]), {0, 1})
        self.assertEqual(chosen[2:].count(0), 2)  # each time passed over 5 · (8 / 4)² times
        selector.set_exists(1, False)
        self.assertEqual(selector.choose(4), 0)

    def test_what_is_refused(self):
        tuner, numbers = spec.beg_mab(), spec.Uniforms(1, 1)
        arm = tuner.choose(2, numbers)
        tuner.heard(arm, 2, 1.0, 1.0)
        before = tuner.snapshot()
        for argument, call in (
            ("options.arms", lambda: spec.beg_mab([])),
            ("options.arms", lambda: spec.beg_mab([(1, 2)])),
            ("options.arms", lambda: spec.beg_mab([(1, 2, 0)], [1])),
            ("options.arms", lambda: spec.beg_mab([(1, 2, 2.5)], [1])),
            ("options.thresholds", lambda: spec.beg_mab(ARMS, [1])),
            ("options.thresholds", lambda: spec.ucb1(ARMS, [1.5, 2.5])),
            ("options.epsilon", lambda: spec.beg_mab(epsilon=1.5)),
            ("options.epsilon", lambda: spec.beg_mab(epsilon="much")),
            ("options.bonus", lambda: spec.ucb1(bonus=-1)),
            ("options.window", lambda: spec.ucb1(window=0)),
            ("options.tries", lambda: spec.ucb1(window=2, tries=3)),
            ("options.reward", lambda: spec.ucb1(reward="speed")),
            ("options.most_tokens", lambda: spec.ucb1(most_tokens=-1)),
            ("options.lines", lambda: spec.fixed_table([(1, 2)])),
            ("options.target", lambda: spec.cost_profile(target=[])),
            ("options.drafter", lambda: spec.cost_profile(drafter=[(1, -1.0)])),
            ("options.doubt", lambda: spec.cost_profile(doubt=-1.0)),
            ("batch", lambda: tuner.choose(0, numbers)),
            ("batch", lambda: tuner.choose(None, numbers)),
            ("uniforms", lambda: tuner.choose(2)),
            ("uniforms", lambda: tuner.choose(2, 0.5)),
            ("uniforms.draw", lambda: tuner.choose(2, spec.Uniforms(draw=lambda: 1.0))),
            ("draw", lambda: spec.Uniforms(1, 2, draw=lambda: 0.5)),
            ("seed", lambda: spec.Uniforms(-1, 2)),
            ("strategy", lambda: tuner.heard(None, 2, 1.0, 1.0)),
            ("accepted", lambda: tuner.heard(arm, 2, -1.0, 1.0)),
            ("accepted", lambda: tuner.heard(arm, 2, None, 1.0)),
            ("seconds", lambda: tuner.heard(arm, 2, 1.0, math.inf)),
            ("running", lambda: spec.ElasticSwitch().check(-1)),
            ("options.checks", lambda: spec.ElasticSwitch(checks=0)),
            ("options.off_at", lambda: spec.ElasticSwitch(on_at=5, off_at=4)),
            ("options.drafters", lambda: spec.DrafterSelector(2**21)),
            ("drafter", lambda: spec.DrafterSelector().exists(2)),
            ("batch", lambda: spec.DrafterSelector().choose(0)),
        ):
            with self.subTest(argument=argument):
                self.refused(argument, call)
        with self.assertRaises(ZeroDivisionError):
            tuner.choose(2, spec.Uniforms(draw=lambda: 1 / 0))
        self.assertEqual(tuner.snapshot(), before)
        self.assertEqual(
            set(spec.names("tuner")), {"beg_mab", "published_beg_mab", "ucb1", "fixed_table", "cost_profile"}
        )
        self.assertEqual(set(spec.names("proposal")), set(spec.PROPOSALS))


def rates_that_know():
    rates = spec.FollowRates()
    rates.learn(rates.by_match(1, 2), True)
    return rates


def table_that_knows():
    table = spec.NgramTable(memory=4096)
    table.learn([1, 2, 3, 1, 2])
    return table


def automaton_that_knows():
    automaton = spec.SuffixAutomaton()
    automaton.append(automaton.begin(), [1, 2, 3, 1, 2])
    return automaton


def groups_that_know():
    groups = spec.PromptGroups()
    groups.append(groups.begin(1, 0), [1, 2, 3, 1, 2])
    return groups


def tuner_that_knows():
    tuner = spec.ucb1()
    tuner.heard(tuner.choose(3), 3, 1.0, 0.5)
    return tuner


def switch_that_knows():
    switch = spec.ElasticSwitch(checks=1)
    switch.check(1)
    return switch


def selector_that_knows():
    selector = spec.DrafterSelector()
    selector.heard(0, 3, 1.0, 0.5)
    return selector


SAVED = {
    rates_that_know: (spec.FollowRates, lambda x: x.rate(x.by_match(1, 2))),
    table_that_knows: (lambda: spec.NgramTable(memory=4096), lambda x: x.draft([1, 2], 4).tokens.tolist()),
    automaton_that_knows: (spec.SuffixAutomaton, lambda x: x.holds()["tokens"]),
    groups_that_know: (spec.PromptGroups, lambda x: x.holds()["tokens"]),
    tuner_that_knows: (spec.ucb1, lambda x: x.choose(3)),
    switch_that_knows: (lambda: spec.ElasticSwitch(checks=1), lambda x: x.check(35)),
    selector_that_knows: (spec.DrafterSelector, lambda x: x.predicted(0, 3)),
}


class Handles(Refusals):
    def test_snapshots(self):
        snapshots = []
        for make, (anew, look) in SAVED.items():
            with self.subTest(make=make.__name__):
                knows, fresh = make(), anew()
                bytes_ = knows.snapshot()
                expected = look(make())
                self.assertNotEqual(look(anew()), expected)  # else this shows nothing
                before = fresh.snapshot()
                damaged = bytearray(bytes_)
                damaged[len(damaged) // 2] ^= 1
                for bad in (bytes_[:-1], b"", bytes(damaged), *snapshots):
                    with self.assertRaises(opd.InvalidInput) as caught:
                        fresh.restore(bad)
                    self.assertIn(caught.exception.argument, ("snapshot", "bytes"))
                self.refused("snapshot", lambda: fresh.restore(None))
                self.assertEqual(fresh.snapshot(), before)
                fresh.restore(bytes_)
                self.assertEqual(fresh.snapshot(), bytes_)
                self.assertEqual(look(fresh), expected)
                snapshots.append(bytes_)
        self.refused("snapshot", lambda: spec.ucb1(ARMS, THRESHOLDS).restore(spec.ucb1().snapshot()))

    def test_freed_handles(self):
        makers = [*SAVED, lambda: spec.DraftTree(spec.FollowRates())]
        for make in makers:
            made = make()
            kind, argument, handle = type(made), made._argument, made.handle
            calls = (len if isinstance(made, spec.DraftTree) else kind.snapshot,)
            with made as same:
                self.assertIs(same, made)
            for call in calls:
                self.refused(argument, lambda: call(made))
            made._handle = handle  # as who kept the handle: the library knows that it was freed
            for call in calls:
                self.refused(argument, lambda: call(made))
            made._handle = None
            other = make()
            handle = other.handle
            del other
            gc.collect()
            made._handle = handle
            for call in calls:
                self.refused(argument, lambda: call(made))
            made._handle = None
            made.close()

    def test_a_handle_of_another_kind(self):
        table, switch = spec.NgramTable(), spec.ElasticSwitch()
        mine, table._handle = table._handle, switch._handle
        self.refused("table", table.capacity)
        table._handle = mine
        self.assertGreater(table.capacity()[0], 0)

    def test_a_tree_keeps_its_rates(self):
        rates = spec.FollowRates()
        tree = spec.DraftTree(rates)
        rates.close()
        self.assertEqual(tree.graft([1, 2], 1), 2)
        self.refused("rates", lambda: tree.begin(rates))


if __name__ == "__main__":
    unittest.main()
