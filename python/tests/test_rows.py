# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""opd.draw and opd.score against numpy, and what they make as caches of opd.evaluate."""

import unittest

import numpy as np

import opd
from opd import rows

from . import formulas

try:
    rows._c_rows.lib()
except opd.Unsupported as why:
    raise unittest.SkipTest(str(why)) from None


class Rows(unittest.TestCase):
    def setUp(self):
        self.rng = np.random.default_rng(11)
        self.n, self.v = 400, 17
        self.z = np.tile(self.rng.normal(size=(1, self.v)).astype(np.float32), (self.n, 1))
        self.y = self.rng.normal(size=(self.n, self.v)).astype(np.float32)
        self.log_p = formulas.log_softmax(self.z)
        self.noise = {"seed": 5, "sample": np.arange(self.n), "position": np.zeros(self.n, np.int32)}

    def test_scores(self):
        y, log_q = self.y[:6], formulas.log_softmax(self.y[:6])
        ids = self.rng.integers(0, self.v, (6, 3))
        ids[2, 1] = -1
        s = opd.score(y, ids, top_k=4, tail=True, lse=True, entropy=True)
        expected = np.where(ids < 0, -np.inf, np.take_along_axis(log_q, np.maximum(ids, 0), -1))
        np.testing.assert_allclose(s.log_p, expected, atol=1e-6)
        order = np.argsort(-y, axis=-1, kind="stable")
        np.testing.assert_array_equal(s.top_ids, order[:, :4])
        np.testing.assert_allclose(s.top_log_p, np.take_along_axis(log_q, order[:, :4], -1), atol=1e-6)
        rest = np.log(np.exp(np.take_along_axis(log_q, order[:, 4:], -1)).sum(-1))
        np.testing.assert_allclose(s.top_log_tail, rest, atol=1e-5)
        np.testing.assert_allclose(s.lse, formulas.lse(y), atol=1e-6)
        np.testing.assert_allclose(s.entropy, -(np.exp(log_q) * log_q).sum(-1), atol=1e-6)
        self.assertIsNone(opd.score(y, lse=True).log_p)
        ragged = opd.score(y.reshape(2, 3, -1), [1, 2, 3, 4], offsets=[0, 1, 1, 3, 3, 3, 4], temperature=2.0)
        cold = formulas.log_softmax(y / 2)
        np.testing.assert_allclose(ragged.log_p, [cold[0, 1], cold[2, 2], cold[2, 3], cold[5, 4]], atol=1e-6)
        wide = opd.score(y.astype(np.float64), ids)
        self.assertEqual(wide.log_p.dtype, np.float64)

    def test_greedy_and_masks(self):
        mask = np.arange(self.n) % 2 == 0
        d = opd.draw(self.y, "greedy", mask=mask)
        np.testing.assert_array_equal(d.ids[:, 0], np.where(mask, self.y.argmax(-1), -1))
        self.assertEqual(d.ids.shape, (self.n, 1))

    def test_draws_have_their_law(self):
        for design, columns in (("gumbel", {}), ("iid", {"m": 8})):
            d = opd.draw(self.z, design, temperature=0.8, **self.noise, **columns)
            law = formulas.log_softmax(self.z / 0.8)
            np.testing.assert_allclose(d.log_mu, np.take_along_axis(law, d.ids, -1), atol=1e-6)
            share = np.bincount(d.ids.reshape(-1), minlength=self.v) / d.ids.size
            self.assertLess(np.abs(share - np.exp(law[0])).max(), 4 * 0.5 / np.sqrt(d.ids.size))
            again = opd.draw(self.z[7:8], design, temperature=0.8, seed=5, sample=[7], position=[0], **columns)
            np.testing.assert_array_equal(again.ids[0], d.ids[7])

    def test_designs_are_unbiased_caches(self):
        exact = opd.evaluate(self.z[:1], self.y[:1], reduction="sum").gradient[0]
        y = np.tile(self.y[:1], (self.n, 1))
        for design, columns in (
            ("iid", {"m": 4}),
            ("threshold", {"m": 6}),
            ("head_tail", {"h": 3, "m": 2}),
            ("gumbel_top", {"m": 4}),
        ):
            d = opd.draw(self.z, design, **self.noise, **columns)
            r = opd.evaluate(self.z, d.cache(opd.score(y, d.ids).log_p), opd.mc(baseline="none"))
            spread = opd.evaluate(
                self.z, d.cache(opd.score(y, d.ids).log_p), opd.mc(baseline="none"), reduction="sum"
            ).gradient
            error = spread.std(axis=0) / np.sqrt(self.n)
            self.assertTrue((np.abs(r.gradient.sum(0) - exact) < 5 * error + 1e-5).all(), design)
            self.assertEqual(r.diagnostics.bad_rows, 0, design)

    def test_filters_and_kept_sets(self):
        d = opd.draw(self.z, "iid", m=3, top_k=5, kept_sets=True, **self.noise)
        best = np.sort(np.argsort(-self.z[0])[:5])
        np.testing.assert_array_equal(d.kept.offsets, 5 * np.arange(self.n + 1))
        np.testing.assert_array_equal(d.kept.ids.reshape(self.n, 5), np.tile(best, (self.n, 1)))
        self.assertTrue(np.isin(d.ids, best).all())
        np.testing.assert_allclose(d.log_kept, np.log(np.exp(self.log_p[:, best]).sum(-1)), atol=1e-6)
        on_kept = opd.score(self.z, d.ids, kept=d.kept).log_p
        np.testing.assert_allclose(on_kept, d.log_mu, atol=1e-6)
        r = opd.evaluate(self.z, d.cache(opd.score(self.y, d.ids).log_p))
        self.assertAlmostEqual(r.diagnostics.ratio_mean, 1.0, delta=1e-6)

    def test_what_is_refused(self):
        for text, make in (
            ("design", lambda: opd.draw(self.z, "beam")),
            ("m: is 2", lambda: opd.draw(self.z, "gumbel", m=2, **self.noise)),
            ("h", lambda: opd.draw(self.z, "iid", h=2, **self.noise)),
            ("sample", lambda: opd.draw(self.z, "gumbel")),
            ("temperature", lambda: opd.score(self.z, lse=True, temperature=0)),
            ("top_k", lambda: opd.score(self.z, top_k=0)),
        ):
            with self.assertRaises(opd.InvalidInput) as caught:
                make()
            self.assertIn(text, str(caught.exception))

    def test_a_sketch_of_ratios(self):
        bins = np.zeros(rows.RATIO_BINS, np.int64)
        d = opd.draw(self.z, "iid", m=2, **self.noise)
        opd.evaluate(self.z, d.cache(opd.score(self.y, d.ids).log_p), ratios=bins)
        self.assertEqual(bins.sum(), d.ids.size)


if __name__ == "__main__":
    unittest.main()
