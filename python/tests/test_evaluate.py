# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""opd.evaluate against formulas in float64: every divergence, cache, reduction and error that the package passes on."""

import os
import subprocess
import sys
import threading
import unittest

import numpy as np

import opd
from opd import _memory, teacher

from . import formulas

try:
    import ml_dtypes
except ImportError:
    ml_dtypes = None

PARAMETERS = {"jsd": (0.3, 0.7), "skew_forward_kl": (0.2,), "skew_reverse_kl": (0.2,), "alpha_divergence": (0.4,)}


def named(name):
    return (name, *PARAMETERS.get(name, ()))


def formula(name, z, y):
    a, b = (*PARAMETERS.get(name, ()), 0, 0)[:2]
    return formulas.DIVERGENCES[name](formulas.log_softmax(z), formulas.log_softmax(y), a, b)


class Rows(unittest.TestCase):
    def setUp(self):
        rng = np.random.default_rng(7)
        self.rng = rng
        self.n, self.v, self.k, self.m = 6, 23, 5, 4
        self.z = rng.normal(size=(self.n, self.v)).astype(np.float32)
        self.y = rng.normal(size=(self.n, self.v)).astype(np.float32)
        self.log_p, self.log_q = formulas.log_softmax(self.z), formulas.log_softmax(self.y)

    def cache(self):
        """A support and draws from a law near the student's."""
        ids = np.argsort(-self.y, axis=-1)[:, : self.k].astype(np.int64)
        log_mu = formulas.log_softmax(self.z + 0.3 * self.rng.normal(size=self.z.shape))
        drawn = np.stack([self.rng.choice(self.v, size=self.m, p=np.exp(row)) for row in log_mu]).astype(np.int32)
        return ids, drawn, np.take_along_axis(log_mu, drawn, -1).astype(np.float32)

    def at(self, x, ids):
        return np.take_along_axis(x, ids, -1).astype(np.float32)


class Dense(Rows):
    def test_every_divergence_and_its_gradient(self):
        self.assertEqual(set(opd.names("divergence")), set(formulas.DIVERGENCES))
        for name in opd.names("divergence"):
            for kind, near in ((np.float32, 3e-6), (np.float64, 1e-7)):
                with self.subTest(divergence=name, kind=kind.__name__):
                    z, y = self.z.astype(kind), self.y.astype(kind)
                    r = opd.evaluate(z, y, named(name), losses=True, lse=True)
                    rows = formula(name, self.z, self.y)
                    np.testing.assert_allclose(r.losses, rows, atol=1e-6)
                    self.assertAlmostEqual(r.loss, rows.mean(), delta=near)
                    np.testing.assert_allclose(r.lse, formulas.lse(self.z), atol=1e-6)
                    self.assertEqual((r.gradient.dtype, r.gradient.shape), (z.dtype, z.shape))
                    slope = formulas.gradient(lambda x: formula(name, x, self.y).mean(), self.z)
                    np.testing.assert_allclose(r.gradient, slope, atol=near)

    def test_half_and_bfloat16(self):
        half = opd.evaluate(self.z.astype(np.float16), self.y.astype(np.float16))
        self.assertEqual(half.gradient.dtype, np.float16)
        self.assertAlmostEqual(
            half.loss, formula("reverse_kl", self.z.astype(np.float16), self.y.astype(np.float16)).mean(), delta=1e-6
        )
        z, y = opd.bfloat16.rounded(self.z), opd.bfloat16.rounded(self.y)
        r = opd.evaluate(z, y)
        self.assertIsInstance(r.gradient, opd.bfloat16)
        self.assertAlmostEqual(r.loss, formula("reverse_kl", z.float(), y.float()).mean(), delta=1e-6)
        slope = formulas.gradient(lambda x: formula("reverse_kl", x, y.float()).mean(), z.float())
        np.testing.assert_allclose(r.gradient.float(), slope, atol=3e-4)
        if ml_dtypes is not None:
            same = opd.evaluate(self.z.astype(ml_dtypes.bfloat16), self.y.astype(ml_dtypes.bfloat16))
            self.assertEqual(same.gradient.dtype, ml_dtypes.bfloat16)
            np.testing.assert_array_equal(same.gradient.view(np.uint16), r.gradient.bits)
            np.testing.assert_array_equal(self.z.astype(ml_dtypes.bfloat16).view(np.uint16), z.bits)

    def test_bfloat16_rounds_to_even_and_keeps_nan(self):
        x = np.array([1.0, 1.00390625, 1.01171875, -0.0, np.inf, -np.inf, np.nan, 3.4028235e38], np.float32)
        np.testing.assert_array_equal(
            opd.bfloat16.rounded(x).float(), np.array([1, 1, 1.015625, -0.0, np.inf, -np.inf, np.nan, np.inf])
        )
        with self.assertRaises(opd.InvalidInput):
            opd.bfloat16(x)

    def test_temperatures(self):
        r = opd.evaluate(opd.student.logits(self.z, 2.0), teacher.dense(self.y, 0.5), "forward_kl", lse=True)
        rows = formulas.kl(formulas.log_softmax(self.y / 0.5), formulas.log_softmax(self.z / 2.0))
        self.assertAlmostEqual(r.loss, rows.mean(), delta=1e-5)
        np.testing.assert_allclose(r.lse, formulas.lse(self.z / 2.0), atol=1e-6)

    def test_more_dimensions_are_rows(self):
        z, y = self.z.reshape(2, 3, -1), self.y.reshape(2, 3, -1)
        r, flat = opd.evaluate(z, y, losses=True, lse=True), opd.evaluate(self.z, self.y, losses=True, lse=True)
        self.assertEqual((r.gradient.shape, r.losses.shape, r.lse.shape), (z.shape, (2, 3), (2, 3)))
        np.testing.assert_array_equal(r.gradient.reshape(self.z.shape), flat.gradient)
        np.testing.assert_array_equal(r.losses.reshape(-1), flat.losses)
        mask = np.array([[1, 0, 1], [1, 1, 0]], bool)
        masked = opd.evaluate(z, y, mask=mask)
        self.assertEqual(masked.diagnostics.kept, 4)
        self.assertAlmostEqual(masked.loss, flat.losses.reshape(2, 3)[mask].mean(), delta=1e-6)

    def test_reductions(self):
        rows = formula("reverse_kl", self.z, self.y)
        mask = np.array([1, 1, 0, 1, 1, 1], np.int32)
        w = self.rng.uniform(0.5, 2, self.n)
        kept = rows * w * mask
        offsets = [0, 2, 6]
        each = {
            "token_mean": kept.sum() / mask.sum(),
            "sum": kept.sum(),
            "sequence_mean": (kept[:2].sum() / 2 + kept[2:].sum() / 3) / 2,
            "sequence_sum_mean": kept.sum() / 2,
        }
        for reduction, expected in each.items():
            r = opd.evaluate(self.z, self.y, reduction=reduction, mask=mask, weights=w, offsets=offsets)
            self.assertAlmostEqual(r.loss, expected, delta=1e-5, msg=reduction)
        r = opd.evaluate(self.z, self.y, reduction="constant", normaliser=50, mask=mask, weights=w.astype(np.float32))
        self.assertAlmostEqual(r.loss, kept.sum() / 50, delta=1e-6)
        targets = np.where(mask > 0, 3, -100)
        r = opd.evaluate(self.z, self.y, mask=targets, ignore=-100)
        self.assertAlmostEqual(r.loss, (rows * mask).sum() / mask.sum(), delta=1e-6)
        self.assertFalse(r.gradient[2].any())

    def test_outputs_of_the_callers(self):
        whole = opd.evaluate(self.z, self.y, opd.jsd())
        dz = np.full_like(self.z, 2)
        losses = np.ones(self.n, np.float32)
        r = opd.evaluate(self.z, self.y, opd.jsd(), gradient=dz, losses=losses, beta=0.5, beta_loss=2)
        self.assertIs(r.gradient, dz)
        np.testing.assert_allclose(dz, 1 + whole.gradient, rtol=1e-6)
        np.testing.assert_allclose(losses, 2 + formulas.DIVERGENCES["jsd"](self.log_p, self.log_q, 0.5, 0.5), rtol=1e-5)
        z = self.z.copy()
        opd.evaluate(z, self.y, opd.jsd(), gradient=z)
        np.testing.assert_array_equal(z, whole.gradient)
        self.assertIsNone(opd.evaluate(self.z, self.y, gradient=False).gradient)
        with self.assertRaisesRegex(opd.InvalidInput, "added to by beta"):
            opd.evaluate(self.z, self.y, beta=1)

    def test_rows_further_apart_than_long(self):
        wide = np.zeros((self.n, 40), np.float32)
        wide[:, : self.v] = self.z
        r = opd.evaluate(wide[:, : self.v], self.y)
        np.testing.assert_array_equal(r.gradient, opd.evaluate(self.z, self.y).gradient)

    def test_given_lse_gives_the_same(self):
        first = opd.evaluate(self.z, self.y, lse=True)
        np.testing.assert_allclose(
            opd.evaluate(self.z, self.y, given_lse=first.lse).gradient, first.gradient, atol=1e-7
        )

    def test_vocabularies_of_different_size(self):
        y = self.y[:, :19].copy()
        with self.assertRaises(opd.InvalidInput) as caught:
            opd.evaluate(self.z, y)
        self.assertEqual(caught.exception.argument, "teacher.y")
        r = opd.evaluate(self.z, y, drop_and_renormalise=True)
        self.assertAlmostEqual(r.loss, formula("reverse_kl", self.z[:, :19], y).mean(), delta=1e-6)
        lumped = opd.evaluate(self.z, teacher.dense(y, lumped=True))
        p, q = np.exp(self.log_p), np.exp(formulas.log_softmax(y))
        rows = (p[:, :19] * np.log(p[:, :19] / q)).sum(-1)
        self.assertGreater(
            lumped.loss, rows.mean() - 30
        )  # the student's rest is infinite against the teacher's nothing: floored
        self.assertEqual(lumped.diagnostics.infinite_rows, self.n)

    def test_measure_entropy(self):
        r = opd.evaluate(self.z, self.y, measure_entropy=True)
        p, q = np.exp(self.log_p), np.exp(self.log_q)
        self.assertAlmostEqual(r.diagnostics.student_entropy, -(p * self.log_p).sum(-1).mean(), delta=1e-5)
        self.assertAlmostEqual(r.diagnostics.teacher_entropy, -(q * self.log_q).sum(-1).mean(), delta=1e-5)
        self.assertAlmostEqual(r.diagnostics.overlap, np.minimum(p, q).sum(-1).mean(), delta=1e-5)

    def test_a_selector(self):
        r = opd.evaluate(
            self.z, self.y, opd.dense("reverse_kl", selector=("prefix", 1)), offsets=[0, 2, 6], reduction="sum"
        )
        rows = formula("reverse_kl", self.z, self.y)
        self.assertAlmostEqual(r.loss, rows[0] + rows[2], delta=1e-5)
        self.assertEqual(r.diagnostics.selector_left_out, 4)


class Caches(Rows):
    def test_supports(self):
        ids, _, _ = self.cache()
        log_q = self.at(self.log_q, ids)
        p, q = np.exp(self.at(self.log_p, ids).astype(np.float64)), np.exp(log_q.astype(np.float64))
        cache = teacher.support(ids, log_q)
        p1, q1 = p / p.sum(-1, keepdims=True), q / q.sum(-1, keepdims=True)
        r = opd.evaluate(self.z, cache)
        self.assertAlmostEqual(r.loss, (p1 * np.log(p1 / q1)).sum(-1).mean(), delta=1e-6)
        with_tail = opd.evaluate(self.z, cache, opd.tail_bucket()).diagnostics
        self.assertAlmostEqual(with_tail.student_mass, p.sum(-1).mean(), delta=1e-5)
        self.assertAlmostEqual(with_tail.teacher_mass, q.sum(-1).mean(), delta=1e-5)
        sparse = opd.evaluate(opd.student.on_support(self.z), cache, opd.renormalised())
        self.assertEqual(sparse.gradient.shape, ids.shape)
        np.testing.assert_allclose(sparse.gradient, self.at(r.gradient, ids), atol=1e-7)
        p2, q2 = (np.concatenate([x, 1 - x.sum(-1, keepdims=True)], -1) for x in (p, q))
        for of in ("reverse_kl", "forward_kl"):
            expected = (p2 * np.log(p2 / q2)).sum(-1) if of == "reverse_kl" else (q2 * np.log(q2 / p2)).sum(-1)
            self.assertAlmostEqual(opd.evaluate(self.z, cache, opd.tail_bucket(of)).loss, expected.mean(), delta=2e-6)
        self.assertAlmostEqual(
            opd.evaluate(self.z, cache, opd.truncated_biased("forward_kl")).loss,
            (q * np.log(q / p)).sum(-1).mean(),
            delta=2e-6,
        )
        self.assertAlmostEqual(
            opd.evaluate(self.z, cache, opd.generalised("forward_kl")).loss,
            (q * np.log(q / p) + p - q).sum(-1).mean(),
            delta=2e-6,
        )

    def test_ragged_supports_are_supports_without_their_unused_slots(self):
        ids, _, _ = self.cache()
        ids[0, 3:], ids[4, 1:] = -1, -1
        log_q = self.at(self.log_q, np.where(ids < 0, 0, ids))
        used = ids >= 0
        offsets = np.concatenate([[0], np.cumsum(used.sum(-1))])
        padded = opd.evaluate(self.z, teacher.support(ids, log_q), opd.tail_bucket())
        ragged = opd.evaluate(self.z, teacher.ragged_support(ids[used], log_q[used], offsets), opd.tail_bucket())
        self.assertEqual(padded.loss, ragged.loss)
        np.testing.assert_array_equal(padded.gradient, ragged.gradient)
        sparse = opd.evaluate(opd.student.on_support(self.z), teacher.ragged_support(ids[used], log_q[used], offsets))
        self.assertEqual(sparse.gradient.shape, (1, used.sum()))

    def test_reweighted(self):
        ids, _, _ = self.cache()
        log_mu = self.at(formulas.log_softmax(self.z + 0.1), ids)
        cache = teacher.support(ids, self.at(self.log_q, ids), log_mu=log_mu, chosen_by="stale_student")
        self.assertTrue(np.isfinite(opd.evaluate(self.z, cache, opd.reweighted()).loss))

    def test_samples(self):
        _, drawn, log_mu = self.cache()
        log_q = self.at(self.log_q, drawn)
        r = opd.evaluate(self.z, teacher.samples(drawn, log_mu, log_q), opd.mc("reverse_kl", baseline="none"))
        log_p = self.at(self.log_p, drawn).astype(np.float64)
        ratio = np.exp(log_p - log_mu)
        self.assertAlmostEqual(r.loss, (ratio * (log_p - log_q)).mean(), delta=1e-5)
        d = r.diagnostics
        self.assertEqual(d.tokens, self.n * self.m)
        self.assertAlmostEqual(d.ratio_mean, ratio.mean(), delta=1e-5)
        self.assertAlmostEqual(d.effective_sample_size, ratio.sum() ** 2 / (ratio**2).sum(), delta=1e-4)
        self.assertAlmostEqual(d.suggested_scale, d.effective_sample_size / d.tokens)
        self.assertAlmostEqual(d.chi_squared, (ratio**2).mean() - 1, delta=1e-5)
        self.assertAlmostEqual(d.k1, -(log_p - log_mu).mean(), delta=1e-5)
        self.assertAlmostEqual(d.k3, (ratio - 1 - (log_p - log_mu)).mean(), delta=1e-5)
        self.assertAlmostEqual(d.teacher_kl, (log_mu - log_q).mean(), delta=1e-5)
        slope = np.zeros_like(self.log_p)  # sum over tokens of -rho A (1[a] - p) / m, A = log q - log p
        c = ratio * (log_p - log_q) / self.m
        for row in range(self.n):
            for j in range(self.m):
                slope[row, drawn[row, j]] += c[row, j]
                slope[row] -= c[row, j] * np.exp(self.log_p[row])
        np.testing.assert_allclose(r.gradient, slope / self.n, atol=1e-6)

    def test_surrogates_and_lists(self):
        _, drawn, log_mu = self.cache()
        log_q = self.at(self.log_q, drawn)
        clip = opd.mc("reverse_kl", surrogate="ppo_clip", low=0.05, high=0.1)
        r = opd.evaluate(self.z, teacher.samples(drawn, log_mu, log_q), clip)
        log_p = self.at(self.log_p, drawn).astype(np.float64)
        ratio, a = np.exp(log_p - log_mu), log_q - log_p
        self.assertAlmostEqual(r.loss, -np.minimum(ratio * a, np.clip(ratio, 0.95, 1.1) * a).mean(), delta=1e-5)
        self.assertGreater(r.diagnostics.clipped_positive + r.diagnostics.clipped_negative, 0)
        as_lists = teacher.samples(drawn.tolist(), log_mu.tolist(), log_q.tolist())
        np.testing.assert_allclose(opd.evaluate(self.z, as_lists, clip).gradient, r.gradient)
        refused = set()
        full = teacher.samples(drawn, log_mu, log_q, law="on_policy", log_prox=log_mu, log_ref=log_mu)
        for name in opd.names("surrogate"):
            try:
                r = opd.evaluate(
                    self.z,
                    full,
                    opd.mc(surrogate=name, cap=2, accept_bias=True, baseline="none"),
                    versions=np.zeros(self.n, np.int32),
                    frozen=opd.Frozen(sequence_log_ratio=np.zeros(self.n)),
                )
                self.assertTrue(np.isfinite(r.loss), name)
            except opd.InvalidInput:
                refused.add(name)
        self.assertEqual(refused, {"k1", "k1_ratio"}, "they have no signal")

    def test_weights_of_one_over_m_are_samples(self):
        _, drawn, log_mu = self.cache()
        log_q = self.at(self.log_q, drawn)
        plain = opd.evaluate(self.z, teacher.samples(drawn, log_mu, log_q), opd.mc(baseline="none"))
        weight = np.full(drawn.shape, 1 / self.m, np.float32)
        same = opd.evaluate(self.z, teacher.weighted(drawn, weight, log_mu, log_q), opd.mc(baseline="none"))
        self.assertAlmostEqual(plain.loss, same.loss, delta=1e-6)
        np.testing.assert_allclose(plain.gradient, same.gradient, atol=1e-6)

    def test_kept_sets_of_everything_change_nothing(self):
        _, drawn, log_mu = self.cache()
        log_q = self.at(self.log_q, drawn)
        kept = opd.Kept(np.tile(np.arange(self.v), self.n), np.arange(self.n + 1) * self.v)
        plain = opd.evaluate(self.z, teacher.samples(drawn, log_mu, log_q))
        same = opd.evaluate(self.z, teacher.samples(drawn, log_mu, log_q, kept=kept))
        np.testing.assert_allclose(plain.gradient, same.gradient, atol=1e-6)
        few = opd.Kept(np.tile(np.arange(3), self.n), np.arange(self.n + 1) * 3)
        outside = opd.evaluate(self.z, teacher.samples(drawn, log_mu, log_q, kept=few), on_bad="count").diagnostics
        self.assertEqual(outside.outside_kept > 0, bool((drawn > 2).any()))

    def test_frozen(self):
        _, drawn, log_mu = self.cache()
        log_q = self.at(self.log_q, drawn)
        keep = np.ones(drawn.shape, bool)
        keep[:, 0] = False
        r = opd.evaluate(self.z, teacher.samples(drawn, log_mu, log_q), frozen=opd.Frozen(keep=keep))
        self.assertEqual(r.diagnostics.dropped, self.n)

    def test_forward_kl_from_the_teachers_draws(self):
        ids = np.argmax(self.y, axis=-1)[:, None]
        zero = np.zeros(ids.shape, np.float32)
        r = opd.evaluate(self.z, teacher.samples(ids, zero, zero, law="of_teacher"), opd.sampled_forward_kl())
        self.assertAlmostEqual(r.loss, -self.at(self.log_p, ids).mean(), delta=1e-6)

    def test_hidden_states_are_their_logits(self):
        d = 8
        x, w = (
            self.rng.normal(size=(self.n, d)).astype(np.float32),
            self.rng.normal(size=(self.v, d)).astype(np.float32),
        )
        bias = self.rng.normal(size=self.v).astype(np.float32)
        tx, tw = (
            self.rng.normal(size=(self.n, 5)).astype(np.float32),
            self.rng.normal(size=(self.v, 5)).astype(np.float32),
        )
        z, y = x.astype(np.float64) @ w.T + bias, tx.astype(np.float64) @ tw.T
        r = opd.evaluate(opd.student.hidden(x, w, bias), teacher.hidden(tx, tw), "forward_kl", losses=True)
        rows = formula("forward_kl", z, y)
        np.testing.assert_allclose(r.losses, rows, rtol=1e-4, atol=1e-4)
        dz = (np.exp(formulas.log_softmax(z)) - np.exp(formulas.log_softmax(y))) / self.n
        np.testing.assert_allclose(r.dx, dz @ w, atol=1e-5)
        np.testing.assert_allclose(r.dw, dz.T @ x, atol=1e-5)
        np.testing.assert_allclose(r.db, dz.sum(0), atol=1e-5)
        self.assertIsNone(r.gradient)
        head = opd.evaluate(opd.student.hidden(x, w, dw=False), teacher.dense(y.astype(np.float32)))
        self.assertIsNone(head.dw)
        dw = np.ones_like(w)
        opd.evaluate(
            opd.student.hidden(x, w, bias, dx=False, db=False, dw=dw, beta_head=1.0),
            teacher.hidden(tx, tw),
            "forward_kl",
        )
        np.testing.assert_allclose(dw, 1 + r.dw, atol=1e-6)


class Interchange(Rows):
    class Foreign:
        """An array of another package, that has __dlpack__ and nothing else."""

        def __init__(self, array):
            self.array = array

        def __dlpack__(self, **arguments):
            return self.array.__dlpack__()

        def __dlpack_device__(self):
            return self.array.__dlpack_device__()

    def test_dlpack(self):
        r = opd.evaluate(
            self.Foreign(self.z), self.Foreign(self.y), mask=self.Foreign(np.ones(self.n, np.int8)), losses=True
        )
        same = opd.evaluate(self.z, self.y, losses=True)
        np.testing.assert_array_equal(r.gradient, same.gradient)
        np.testing.assert_array_equal(r.losses, same.losses)
        dz = np.empty_like(self.z)
        opd.evaluate(self.z, self.y, gradient=self.Foreign(dz))
        np.testing.assert_array_equal(dz, same.gradient)

    def test_memory_is_not_another_results_while_it_is_held(self):
        z = np.tile(self.z, (40, 600))  # more than a mebibyte
        y = np.tile(self.y, (40, 600))
        first = opd.evaluate(z, y)
        copy, part = first.gradient.copy(), first.gradient[3:5]
        address = first.gradient.__array_interface__["data"][0]
        self.assertEqual(address % 64, 0)
        second = opd.evaluate(z, y, "forward_kl")
        np.testing.assert_array_equal(first.gradient, copy)
        self.assertFalse(np.array_equal(second.gradient, copy))
        del first, second
        third = opd.evaluate(z, y, "forward_kl")
        np.testing.assert_array_equal(part, copy[3:5])  # what is left of the first still holds its memory
        del part, third
        fourth, fifth = opd.evaluate(z, y), opd.evaluate(z, y)
        self.assertIn(address, [r.gradient.__array_interface__["data"][0] for r in (fourth, fifth)])
        del fourth, fifth
        _memory.keep_memory(0)
        self.assertEqual(len(_memory._kept), 0)
        _memory.keep_memory(2)


class Engines(Rows):
    def test_threads_change_no_bit(self):
        one = opd.evaluate(self.z, self.y)
        with opd.Engine(3) as engine:
            three = opd.evaluate(self.z, self.y, engine=engine)
        np.testing.assert_array_equal(one.gradient, three.gradient)
        np.testing.assert_array_equal(one.gradient, opd.evaluate(self.z, self.y, threads=2).gradient)
        with self.assertRaisesRegex(opd.InvalidInput, "closed"):
            opd.evaluate(self.z, self.y, engine=engine)

    @unittest.skipUnless(hasattr(os, "fork"), "no fork")
    def test_a_forked_child_has_engines_of_its_own(self):
        expected = opd.evaluate(self.z, self.y, threads=2).gradient
        child = os.fork()
        if child == 0:
            os._exit(0 if np.array_equal(opd.evaluate(self.z, self.y, threads=2).gradient, expected) else 1)
        self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), 0)

    def test_many_threads_of_the_callers(self):
        expected, wrong = opd.evaluate(self.z, self.y).gradient, []

        def work():
            for i in range(50):
                got = opd.evaluate(self.z, self.y, threads=2 if i % 2 else None).gradient
                if not np.array_equal(got, expected):
                    wrong.append(i)
                try:
                    opd.evaluate(self.z, self.y[:, :5])
                    wrong.append("not refused")
                except opd.InvalidInput as why:
                    if why.argument != "teacher.y":
                        wrong.append(str(why))

        threads = [threading.Thread(target=work) for _ in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        self.assertEqual(wrong, [])


class Errors(Rows):
    def refused(self, text, *arguments, **options):
        with self.assertRaises(opd.InvalidInput) as caught:
            opd.evaluate(*arguments, **options)
        self.assertIn(text, str(caught.exception))
        self.assertIsInstance(caught.exception, ValueError)
        return caught.exception

    def test_argument_and_row(self):
        y = self.y.copy()
        y[3, 2] = np.nan
        dz = np.full_like(self.z, 9)
        why = self.refused("", self.z, y, gradient=dz, check_contents=True)
        self.assertEqual((why.argument, why.row), ("teacher.y", 3))
        self.assertTrue((dz == 9).all(), "nothing was written")
        self.assertEqual(self.refused("", self.z, self.y, mask=np.ones(4, bool)).argument, "env.mask")
        self.assertEqual(self.refused("", self.z, self.y[:4]).argument, "teacher.y")
        self.assertEqual(self.refused("", self.z.astype(np.int32), self.y).argument, "student.z")
        self.assertEqual(self.refused("", self.z.T.copy().T, self.y).argument, "student.z")
        why = self.refused("", self.z, self.y, "no_such_divergence")
        self.assertIn("no_such_divergence", str(why))

    def test_bad_contents(self):
        y = self.y.copy()
        y[3, 2] = np.nan
        counted = opd.evaluate(self.z, y, on_bad="count")
        self.assertEqual((counted.diagnostics.bad_rows, counted.diagnostics.first_bad_row), (1, 3))
        for named in ({}, {"on_bad": None}, {"on_bad": "raise"}):
            with self.assertRaisesRegex(opd.BadContents, "1 of 6 kept rows.* row 3") as caught:
                opd.evaluate(self.z, y, **named)
            self.assertEqual(caught.exception.row, 3)
            self.assertEqual(caught.exception.result.diagnostics.bad_rows, 1)
            np.testing.assert_array_equal(caught.exception.result.gradient, counted.gradient)
        self.assertEqual(opd.evaluate(self.z, y, on_bad=0.5).loss, counted.loss)

    def test_bad_rows_above_a_share_raise_by_default(self):
        lost = np.full_like(self.z, np.nan)
        with self.assertRaisesRegex(opd.BadContents, "6 of 6 kept rows.* row 0"):
            opd.evaluate(lost, self.y)
        self.assertEqual(opd.evaluate(lost, self.y, on_bad="count").loss, 0)
        self.assertEqual(opd.evaluate(lost, self.y, mask=np.zeros(6, bool)).diagnostics.bad_rows, 0)
        self.assertEqual(opd.ON_BAD, 0.01)
        z = np.zeros((300, 5), np.float32)  # three of them are 1 %
        for bad in (1, 3, 4):
            z[:bad, 1] = np.nan
            if bad == 4:
                with self.assertRaisesRegex(opd.BadContents, "4 of 300 kept rows"):
                    opd.evaluate(z, np.zeros_like(z))
            else:
                self.assertEqual(opd.evaluate(z, np.zeros_like(z)).diagnostics.bad_rows, bad)

    def test_infinite(self):
        y = self.y.copy()
        y[2, 5] = -np.inf
        with self.assertRaises(opd.InfiniteValue) as caught:
            opd.evaluate(self.z, y, on_infinite="raise")
        self.assertEqual(caught.exception.row, 2)
        self.assertEqual(opd.evaluate(self.z, y, on_infinite="skip").diagnostics.infinite_rows, 1)
        low, high = (opd.evaluate(self.z, y, floor_at=nats).loss for nats in (-10, -20))
        self.assertLess(low, high)

    def test_zeros_that_would_stand_for_a_default(self):
        self.refused("student.temperature", opd.student.logits(self.z, 0), self.y)
        self.refused("teacher.temperature", self.z, teacher.dense(self.y, 0))
        self.refused("floor_at", self.z, self.y, floor_at=0)
        self.refused("normaliser", self.z, self.y, normaliser=0)
        self.refused("low", self.z, self.y, opd.mc(low=0, high=0))

    def test_choices(self):
        self.refused("env.reduction: is 'mean'", self.z, self.y, reduction="mean")
        self.refused("on_bad", self.z, self.y, on_bad=2)
        self.refused("ignore", self.z, self.y, ignore=-100)
        with self.assertRaises(TypeError):
            opd.evaluate(self.z.tolist(), self.y)
        with self.assertRaises(TypeError):
            opd.evaluate(self.z, self.y, masks=None)
        self.refused("read-only", self.z, self.y, gradient=np.broadcast_to(self.z, self.z.shape))


class Diagnostics(Rows):
    def test_they_merge_and_speak(self):
        whole = opd.evaluate(self.z, self.y, reduction="sum").diagnostics
        a, b = (opd.evaluate(self.z[s], self.y[s], reduction="sum").diagnostics for s in (slice(0, 2), slice(2, None)))
        both = a.merge(b)
        self.assertAlmostEqual(both.kept_loss, whole.kept_loss, delta=1e-9)
        both.kept_loss = whole.kept_loss
        self.assertEqual(both, whole)
        self.assertEqual(str(whole), "6 rows, 6 kept")
        self.assertEqual(opd.Diagnostics.of_struct(whole.as_struct()), whole)

    def test_staleness(self):
        d = opd.evaluate(self.z, self.y, versions=np.array([1, 2, 3, 3, 3, 9], np.int32), version=5).diagnostics
        self.assertEqual(d.staleness[2:5], (3, 1, 1))
        self.assertEqual((d.staleness_max, d.future_versions), (4, 1))

    def test_derived_figures_by_hand(self):
        d = opd.Diagnostics(
            tokens=4,
            ratio_sum=6.0,
            ratio_square_sum=12.0,
            k2_sum=2.0,
            variance_rows=2,
            loss_variance_sum=3.0,
            kept=5,
            bad_rows=1,
            kept_loss=8.0,
            selector_rows=4,
            selector_weight_sum=1.0,
        )
        self.assertEqual(
            (d.ratio_mean, d.effective_sample_size, d.suggested_scale, d.chi_squared), (1.5, 3.0, 0.75, 2.0)
        )
        self.assertEqual((d.k2, d.loss_variance, d.mean_kept_loss, d.mean_selector_weight), (0.5, 1.5, 2.0, 0.25))
        self.assertFalse(d.mu_mismatch)
        n = 10000
        self.assertTrue(opd.Diagnostics(tokens=n, ratio_sum=1.1 * n, ratio_square_sum=1.3 * n).mu_mismatch)
        self.assertEqual(opd.Diagnostics().suggested_scale, 1.0)


class Config(unittest.TestCase):
    def test_the_interpreter_ends_in_silence(self):
        code = (
            "import numpy as np, opd\nfrom opd import _evaluate, _memory\n"
            "z = np.ones((600, 1000), np.float32)\n"
            "r, engine = opd.evaluate(z, z), opd.Engine(2)\n"
            "_evaluate._c = _memory._kept = _memory._most = None\n"  # as the interpreter leaves modules in the end
            "del r, engine\n"
        )
        ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        self.assertEqual(ended.stderr, "")

    def test_what_a_bug_report_needs(self):
        c = opd.config()
        self.assertEqual(c["library"]["abi"], 1)
        self.assertEqual(c["numpy"], np.__version__)
        with self.assertRaises(opd.InvalidInput):
            opd.names("no such table")
        self.assertIn("ppo_clip", opd.names("surrogate"))


if __name__ == "__main__":
    unittest.main()
