# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""opd.losses against the formulas of the libraries whose names they have, in float64."""

import unittest

import numpy as np

import opd
from opd import losses

from . import formulas


class Losses(unittest.TestCase):
    def setUp(self):
        rng = np.random.default_rng(3)
        self.rng = rng
        self.z, self.y = (rng.normal(size=(2, 4, 31)).astype(np.float32) for _ in range(2))
        self.labels = np.where(rng.random((2, 4)) < 0.4, -100, 5)
        self.labels[0, 0] = 3

    def test_bad_rows_above_a_share_raise_by_default(self):
        lost, rows = np.full_like(self.z, np.nan), np.full((8, 4), np.nan, np.float32)
        x, head = self.rng.normal(size=(8, 4)).astype(np.float32), self.rng.normal(size=(31, 4)).astype(np.float32)
        calls = {
            "trl": lambda **more: losses.generalized_jsd_loss(lost, self.y, **more),
            "liger": lambda **more: losses.liger_fused_linear_jsd(rows, head, x, head, **more),
            "nvidia": lambda **more: losses.top_logits_kl_loss(lost, self.y, top_k=4, **more),
            "eagle": lambda **more: losses.speculators_kl(lost, self.y, **more),
            "verl": lambda **more: losses.kl_penalty(lost, self.y, "full", **more),
        }
        for name, call in calls.items():
            with self.subTest(call=name):
                with self.assertRaisesRegex(opd.BadContents, "8 of 8 kept rows.* row 0"):
                    call()
                counted = call(on_bad="count")
                self.assertEqual((counted.loss, counted.diagnostics.bad_rows), (0, 8))

    def test_trl(self):
        for beta in (0.0, 0.25, 0.5, 1.0):
            for labels in (None, self.labels):
                for reduction in ("batchmean", "sum", "mean"):
                    for temperature in (1.0, 1.7):
                        with self.subTest(
                            beta=beta, labels=labels is not None, reduction=reduction, temperature=temperature
                        ):

                            def theirs(z):
                                return formulas.trl_generalized_jsd(z, self.y, labels, beta, temperature, reduction)

                            r = losses.generalized_jsd_loss(self.z, self.y, labels, beta, temperature, reduction)
                            self.assertAlmostEqual(r.loss, theirs(self.z), delta=2e-6 * max(1, abs(r.loss)))
                            if temperature != 1.0:
                                slope = formulas.gradient(theirs, self.z)
                                np.testing.assert_allclose(r.gradient, slope, atol=2e-6)
        with self.assertRaises(opd.Unsupported):
            losses.generalized_jsd_loss(self.z, self.y, reduction="none")
        with self.assertRaises(opd.InvalidInput):
            losses.generalized_jsd_loss(self.z, self.y, reduction="average")

    def test_liger(self):
        x, w, tx, tw = (self.rng.normal(size=s).astype(np.float32) for s in ((6, 8), (31, 8), (6, 5), (31, 5)))
        labels = np.array([1, -100, 3, 4, -100, 6])
        for beta in (0.0, 0.5, 0.9, 1.0):

            def theirs(states, head):
                return formulas.trl_generalized_jsd(states @ head.T, tx.astype(np.float64) @ tw.T, labels, beta, 2.0)

            r = losses.liger_fused_linear_jsd(x, w, tx, tw, labels, beta, temperature=2.0)
            x8, w8 = x.astype(np.float64), w.astype(np.float64)
            self.assertAlmostEqual(r.loss, theirs(x8, w8), delta=1e-5)
            np.testing.assert_allclose(r.dx, formulas.gradient(lambda s: theirs(s, w8), x8), atol=1e-5)
            np.testing.assert_allclose(r.dw, formulas.gradient(lambda h: theirs(x8, h), w8), atol=1e-5)

    def test_nvidia(self):
        for reverse in (False, True):
            for ghost in (False, True):
                for temperature in (1.0, 2.0):
                    with self.subTest(reverse=reverse, ghost=ghost, temperature=temperature):

                        def theirs(z):
                            return formulas.ghost_token_kl(z, self.y, 7, temperature, reverse, ghost).mean()

                        r = losses.top_logits_kl_loss(self.z, self.y, temperature, reverse, 7, ghost)
                        self.assertAlmostEqual(r.loss, theirs(self.z), delta=3e-6)
                        np.testing.assert_allclose(r.gradient, formulas.gradient(theirs, self.z), atol=2e-6)
        with self.assertRaisesRegex(opd.InvalidInput, "top_k"):
            losses.top_logits_kl_loss(self.z, self.y, top_k=32)

    def test_speculators(self):
        for kind in (np.bool_, np.float64):
            mask = (self.rng.random((2, 4)) * (self.rng.random((2, 4)) < 0.7)).astype(kind)
            mask[:, 3] = 1
            for given in (None, mask):
                for step in (0, 1, 3):

                    def theirs(z):
                        return formulas.speculators_kl(z, self.y.astype(np.float64), given, step, 0.8)

                    r = losses.speculators_kl(self.z, self.y, given, step, 0.8)
                    self.assertAlmostEqual(r.loss, theirs(self.z), delta=2e-6)
                    slope = formulas.gradient(theirs, self.z)
                    np.testing.assert_allclose(r.gradient, slope[:, : 4 - step], atol=2e-6)
                    np.testing.assert_allclose(slope[:, 4 - step :], 0, atol=1e-10)
        half = losses.speculators_kl(opd.bfloat16.rounded(self.z), opd.bfloat16.rounded(self.y), mask, 1)
        z, y = (opd.bfloat16.rounded(x).float() for x in (self.z, self.y))
        self.assertAlmostEqual(half.loss, formulas.speculators_kl(z, y, mask, 1, 1.0), delta=1e-5)
        none = losses.speculators_kl(self.z, self.y, np.zeros((2, 4), bool), 1)
        self.assertEqual((none.loss, np.abs(none.gradient).max()), (0, 0))
        for argument, call in (
            ("targets", lambda: losses.speculators_kl(self.z, self.y[:, :3])),
            ("targets", lambda: losses.speculators_kl(self.z[0], self.y[0])),
            ("loss_mask", lambda: losses.speculators_kl(self.z, self.y, mask[0])),
            ("ttt_step", lambda: losses.speculators_kl(self.z, self.y, mask, 4)),
            ("ttt_step_loss_decay", lambda: losses.speculators_kl(self.z, self.y, mask, 1, -0.5)),
        ):
            with self.assertRaises(opd.InvalidInput) as caught:
                call()
            self.assertEqual(caught.exception.argument, argument)

    def test_verl(self):
        p, q = -self.rng.exponential(2, (3, 5)), -self.rng.exponential(2, (3, 5))
        p[0, 0], q[0, 0] = -60, -1  # beyond both clamps
        for kind in ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3"):
            np.testing.assert_array_equal(losses.kl_penalty(p, q, kind), formulas.verl_kl_penalty(p, q, kind), kind)
            np.testing.assert_array_equal(
                losses.kl_penalty(p, q, kind + "+"), formulas.verl_kl_penalty(p, q, kind), kind
            )
        r = losses.kl_penalty(self.z, self.y, "full")
        np.testing.assert_allclose(r.losses, formulas.verl_kl_penalty(self.z, self.y, "full"), atol=2e-6)
        np.testing.assert_allclose(
            r.gradient,
            formulas.gradient(lambda z: formulas.verl_kl_penalty(z, self.y, "full").sum(), self.z),
            atol=2e-6,
        )
        with self.assertRaises(opd.InvalidInput):
            losses.kl_penalty(p, q, "k4")


if __name__ == "__main__":
    unittest.main()
