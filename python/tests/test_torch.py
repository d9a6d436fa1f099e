# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""opd.torch: the numbers and bits of opd.evaluate, autograd, fake tensors, torch.compile, autocast; opd.losses on
tensors."""

import os
import unittest

import numpy as np

import opd
from opd import teacher

from . import formulas

try:
    import torch
except ImportError:
    raise unittest.SkipTest("torch is not installed") from None

import torch.nn.functional as F

import opd.torch as ot
from opd import losses


def trl(student, other, labels=None, beta=0.5, temperature=1.0):
    """TRL's generalised JSD in torch, as its formula says it."""
    s, t = F.log_softmax(student / temperature, -1), F.log_softmax(other / temperature, -1)
    if beta == 0:
        terms = t.exp() * (t - s)
    elif beta == 1:
        terms = s.exp() * (s - t)
    else:
        m = torch.logsumexp(torch.stack([s + np.log1p(-beta), t + np.log(beta)]), 0)
        terms = beta * t.exp() * (t - m) + (1 - beta) * s.exp() * (s - m)
    if labels is None:
        return terms.sum() / terms.size(0)
    mask = labels != -100
    return terms[mask].sum() / mask.sum()


class Operators(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(5)
        self.z, self.y = torch.randn(2, 3, 19), torch.randn(2, 3, 19)
        self.mask = torch.tensor([[True, True, False], [True, False, True]])
        self.ids = self.y.topk(4, -1).indices
        self.log_q = torch.gather(self.y.log_softmax(-1), -1, self.ids)

    def leaf(self, x=None, dtype=None):
        return (self.z if x is None else x).detach().clone().to(dtype).requires_grad_()

    def test_bits_are_those_of_evaluate(self):
        for of in ("reverse_kl", "forward_kl", ("jsd", 0.3, 0.3), "total_variation"):
            for dtype in (torch.float32, torch.float64, torch.bfloat16):
                z, y = self.leaf(dtype=dtype), self.y.to(dtype)
                loss = ot.divergence(z, y, of, mask=self.mask)
                loss.backward()
                r = opd.evaluate(z.detach(), y, of, mask=self.mask)
                self.assertTrue(torch.equal(z.grad, r.gradient), (of, dtype))
                self.assertEqual(loss.item(), torch.tensor(r.loss, dtype=loss.dtype).item())
                self.assertEqual(z.grad.dtype, dtype)

    def test_gradcheck(self):
        z, y = self.leaf(dtype=torch.float64), self.y.double()
        for of in ("reverse_kl", "forward_kl", ("jsd", 0.5, 0.5), ("alpha_divergence", 0.4)):
            self.assertTrue(
                torch.autograd.gradcheck(lambda a: 2.5 * ot.divergence(a, y, of, mask=self.mask, temperature=1.3), z)
            )
        cache = {"ids": self.ids, "log_q": self.log_q.double()}
        for estimator in (opd.renormalised(), opd.tail_bucket("forward_kl")):
            self.assertTrue(torch.autograd.gradcheck(lambda a: ot.support(a, estimator=estimator, **cache), z))
        tokens = self.ids[..., 0]
        self.assertTrue(torch.autograd.gradcheck(lambda a: ot.token_logp(a, tokens, temperature=0.7), z))

    def test_one_loss_a_token(self):
        z, w = self.leaf(), torch.rand(2, 3)
        out = ot.divergence(z, self.y, reduction="none", mask=self.mask, full=True, lse=True)
        self.assertEqual(out.loss.shape, (2, 3))
        self.assertFalse(out.losses.requires_grad or out.lse.requires_grad)
        (out.loss * w).sum().backward()
        r = opd.evaluate(z.detach(), self.y, weights=w, reduction="sum", mask=self.mask)
        torch.testing.assert_close(z.grad, r.gradient, rtol=1e-6, atol=1e-8)
        self.assertFalse(out.loss[~self.mask].any())
        torch.testing.assert_close(out.lse, torch.logsumexp(self.z.double(), -1) * self.mask, rtol=0, atol=1e-6)
        self.assertEqual(out.diagnostics.kept, 4)

    def test_factors_from_above(self):
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            for reduction in ("token_mean", "none"):
                z, y = self.leaf(dtype=dtype), self.y.to(dtype)
                ot.divergence(z, y, reduction=reduction).sum().backward()
                plain, z.grad = z.grad, None
                (ot.divergence(z, y, reduction=reduction) * 4).sum().backward()
                self.assertTrue(torch.equal(z.grad, 4 * plain), (dtype, reduction))

    def test_a_scaled_loss_in_half_keeps_small_gradients(self):
        z, y = self.leaf(1e-3 * self.z, torch.float16), (1e-3 * self.y).half()
        (ot.divergence(z, y, reduction="constant", normaliser=4096.0) * 65536).backward()
        wide = z.detach().double().requires_grad_()
        (ot.divergence(wide, y.double(), reduction="constant", normaliser=4096.0) * 65536).backward()
        torch.testing.assert_close(z.grad.double(), wide.grad, rtol=1e-3, atol=1e-7)

    def test_backward_twice(self):
        z = self.leaf()
        loss = 3 * ot.divergence(z, self.y)
        loss.backward(retain_graph=True)
        first = z.grad.clone()
        z.grad.mul_(7)  # what was returned is the caller's
        z.grad = None
        loss.backward()
        self.assertTrue(torch.equal(z.grad, first))
        with self.assertRaises(RuntimeError):
            loss.backward()
        with self.assertRaisesRegex(opd.Unsupported, "second derivative"):
            torch.autograd.grad(ot.divergence(z, self.y), z, create_graph=True)

    def test_without_a_gradient(self):
        with torch.no_grad():
            loss = ot.divergence(self.leaf(), self.y)
        self.assertFalse(loss.requires_grad)
        self.assertFalse(ot.divergence(self.z, self.y.clone().requires_grad_()).requires_grad, "the teacher has none")

    def test_views_whose_rows_are_not_evenly_apart(self):
        z = self.leaf()
        ot.divergence(z[:, :-1], self.y[:, 1:], mask=self.mask[:, 1:]).backward()
        same = self.leaf()
        ot.divergence(
            same[:, :-1].contiguous(), self.y[:, 1:].contiguous(), mask=self.mask[:, 1:].contiguous()
        ).backward()
        self.assertTrue(torch.equal(z.grad, same.grad))
        self.assertFalse(z.grad[:, -1].any())

    def test_sampled(self):
        log_mu = torch.gather(self.z.log_softmax(-1), -1, self.ids) + 0.1
        z = self.leaf()
        out = ot.sampled(z, self.ids, log_mu, self.log_q, surrogate="ppo_clip", low=0.05, full=True)
        out.loss.backward()
        r = opd.evaluate(self.z, teacher.samples(self.ids, log_mu, self.log_q), opd.mc(surrogate="ppo_clip", low=0.05))
        self.assertTrue(torch.equal(z.grad, r.gradient))
        self.assertEqual(out.diagnostics, r.diagnostics)
        one = ot.sampled(self.z, self.ids[..., 0], log_mu[..., 0], self.log_q[..., 0], baseline="none")
        same = ot.sampled(self.z, self.ids[..., :1], log_mu[..., :1], self.log_q[..., :1], baseline="none")
        self.assertEqual(one.item(), same.item())

    def test_frozen_and_given(self):
        log_mu = torch.gather(self.z.log_softmax(-1), -1, self.ids)
        keep = torch.ones(self.ids.shape, dtype=torch.bool)
        keep[0, 0, 1] = keep[1, 2, 3] = False
        frozen = opd.Frozen(keep=keep, weight=torch.full(self.ids.shape, 0.5, dtype=torch.float64))
        z = self.leaf()
        out = ot.sampled(z, self.ids, log_mu, self.log_q, frozen=frozen, full=True)
        out.loss.backward()
        r = opd.evaluate(self.z, teacher.samples(self.ids, log_mu, self.log_q), opd.mc(), frozen=frozen)
        self.assertTrue(torch.equal(z.grad, r.gradient))
        self.assertEqual(out.diagnostics.dropped, 2)
        cache = teacher.samples(self.ids, log_mu, self.log_q, baseline=torch.zeros(6), law="on_policy")
        given, none = (ot.estimate(self.leaf(), cache, opd.mc(baseline=b)) for b in ("given", "none"))
        self.assertEqual(given.item(), none.item())

    def test_token_logp(self):
        z, tokens = self.leaf(), self.ids[..., 1]
        logp = ot.token_logp(z, tokens, mask=self.mask)
        weight = torch.randn(2, 3)
        (logp * weight).sum().backward()
        other = self.leaf()
        expected = torch.where(self.mask, other.log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1), 0.0)
        (expected * weight).sum().backward()
        torch.testing.assert_close(logp, expected, rtol=0, atol=2e-6)
        torch.testing.assert_close(z.grad, other.grad, rtol=0, atol=2e-6)

    def test_hidden_states(self):
        x, w, b = torch.randn(2, 3, 8), torch.randn(19, 8), torch.randn(19)
        tx, tw = torch.randn(2, 3, 5), torch.randn(19, 5)
        for reduction in ("token_mean", "none"):
            mine = [self.leaf(t) for t in (x, w, b)]
            loss = ot.hidden_divergence(
                mine[0], mine[1], tx, tw, ("jsd", 0.5, 0.5), bias=mine[2], mask=self.mask, reduction=reduction
            )
            (2 * loss.sum()).backward()
            theirs = [self.leaf(t) for t in (x, w, b)]
            plain = ot.divergence(F.linear(*theirs), tx @ tw.T, ("jsd", 0.5, 0.5), mask=self.mask, reduction=reduction)
            (2 * plain.sum()).backward()
            torch.testing.assert_close(loss, plain, rtol=1e-5, atol=1e-6)
            for a, c in zip(mine, theirs):
                torch.testing.assert_close(a.grad, c.grad, rtol=1e-4, atol=1e-5)
        frozen = self.leaf(x)
        ot.hidden_divergence(frozen, w, teacher_logits=self.y).backward()
        self.assertIsNotNone(frozen.grad)
        with self.assertRaisesRegex(opd.InvalidInput, "given once"):
            ot.hidden_divergence(x, w)

    def test_autocast(self):
        x, w = self.leaf(torch.randn(2, 3, 8)), self.leaf(torch.randn(19, 8))
        with torch.autocast("cpu", torch.bfloat16):
            logits = F.linear(x, w)
            self.assertEqual(logits.dtype, torch.bfloat16)
            ot.divergence(logits, self.y.bfloat16()).backward()
            through_logits = w.grad
            w.grad = None
            loss = ot.hidden_divergence(x, w, teacher_logits=self.y)
        loss.backward()
        self.assertEqual((w.grad.dtype, x.grad.dtype), (torch.float32, torch.float32))
        torch.testing.assert_close(w.grad, through_logits, rtol=0.05, atol=0.02)

    def test_opcheck(self):
        student = {"temperature": 1.0, "per_token": False, "lse": True}
        others, spec = ot._pack(
            teacher.dense(self.y), "reverse_kl", dict(student), {"reduction": "sum", "mask": self.mask}
        )
        torch.library.opcheck(torch.ops.opd.loss.default, (self.leaf(), others, spec, True))
        student.update({"soft_cap": None, "budget_bytes": None})
        others, spec = ot._pack(teacher.dense(self.y), "reverse_kl", student, {"reduction": "sum"})
        args = (self.leaf(torch.randn(2, 3, 8)), self.leaf(torch.randn(19, 8)), None, others, spec, True, True, False)
        torch.library.opcheck(torch.ops.opd.hidden_loss.default, args)

    def test_compile_keeps_the_graph(self):
        for reduction in ("token_mean", "none"):

            def step(a, b):
                return ot.divergence(a * 1.5, b, ("jsd", 0.3, 0.3), reduction=reduction).sum() * 2

            z, same = self.leaf(), self.leaf()
            compiled = torch.compile(step, fullgraph=True, backend=os.environ.get("OPD_TEST_BACKEND", "aot_eager"))
            compiled(z, self.y).backward()
            step(same, self.y).backward()
            torch.testing.assert_close(z.grad, same.grad, rtol=1e-6, atol=1e-8)

    def test_errors_are_the_librarys(self):
        with self.assertRaises(opd.InvalidInput) as caught:
            ot.divergence(self.z, self.y[..., :7])
        self.assertEqual(caught.exception.argument, "teacher.y")
        with self.assertRaises(TypeError):
            ot.divergence(self.z, self.y, masks=self.mask)
        with self.assertRaisesRegex(opd.InvalidInput, "student.z: has the layout"):
            ot.divergence(self.z.to_sparse(), self.y)
        with self.assertRaises(opd.InvalidInput):
            ot.divergence(self.z, self.y, 'no"such')
        y = self.y.clone()
        y[0, 1, 3] = torch.nan
        with self.assertRaises(opd.BadContents) as bad:
            ot.divergence(self.leaf(), y, on_bad="raise")
        self.assertEqual(bad.exception.result.diagnostics.first_bad_row, 1)

    def test_bad_rows_above_a_share_raise_by_default(self):
        lost, log_mu = torch.full_like(self.z, torch.nan), torch.zeros(2, 3)
        states, head = torch.full((6, 4), torch.nan), torch.randn(19, 4)
        calls = {
            "divergence": lambda **more: ot.divergence(lost, self.y, **more),
            "per token": lambda **more: ot.divergence(lost, self.y, reduction="none", **more),
            "half": lambda **more: ot.divergence(lost.half().requires_grad_(), self.y.half(), **more),
            "estimate": lambda **more: ot.estimate(lost, self.y, **more),
            "support": lambda **more: ot.support(lost, self.ids, self.log_q, opd.renormalised("reverse_kl"), **more),
            "sampled": lambda **more: ot.sampled(
                lost, self.ids[..., 0], log_mu, self.log_q[..., 0], surrogate="ppo_clip", **more
            ),
            "token_logp": lambda **more: ot.token_logp(lost, self.ids[..., 0], **more),
            "hidden": lambda **more: ot.hidden_divergence(states, head, teacher_logits=self.y.view(6, 19), **more),
            "trl": lambda **more: losses.generalized_jsd_loss(lost, self.y, **more),
            "liger": lambda **more: losses.liger_fused_linear_jsd(states, head, torch.randn(6, 4), head, **more),
            "nvidia": lambda **more: losses.top_logits_kl_loss(lost, self.y, top_k=4, **more),
            "eagle": lambda **more: losses.speculators_kl(lost, self.y, **more),
            "verl": lambda **more: losses.kl_penalty(lost, self.y, "full", **more),
        }
        for name, call in calls.items():
            with self.subTest(call=name):
                with self.assertRaisesRegex(opd.BadContents, "6 of 6 kept rows.* row 0"):
                    call()
                self.assertEqual(float(call(on_bad="count").detach().abs().sum()), 0)
        with self.assertRaises(opd.BadContents):
            torch.compile(ot.divergence, fullgraph=True, backend="aot_eager")(lost, self.y)

    @unittest.skipUnless(torch.cuda.is_available(), "no CUDA device")
    def test_a_device_that_the_library_does_not_have(self):
        with self.assertRaises((opd.InvalidInput, opd.Unsupported)):
            ot.divergence(self.z.cuda(), self.y.cuda())

    def test_gradients_in_kept_memory(self):
        z, y = torch.randn(64, 8192), torch.randn(64, 8192)
        leaf = self.leaf(z)
        ot.divergence(leaf, y).backward()
        held, copy = leaf.grad, leaf.grad.clone()
        for _ in range(3):
            leaf.grad = None
            ot.divergence(leaf, y, "forward_kl").backward()
        self.assertTrue(torch.equal(held, copy))


class OthersLosses(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(6)
        self.z, self.y = torch.randn(2, 4, 31), torch.randn(2, 4, 31)
        self.labels = torch.tensor([[1, -100, 3, 4], [-100, 6, 7, 8]])

    def test_trl(self):
        for beta in (0.0, 0.3, 1.0):
            for labels in (None, self.labels):
                z, same = self.z.clone().requires_grad_(), self.z.double().requires_grad_()
                loss = losses.generalized_jsd_loss(z, self.y, labels, beta, 1.5)
                loss.backward()
                expected = trl(same, self.y.double(), labels, beta, 1.5)
                expected.backward()
                self.assertAlmostEqual(loss.item(), expected.item(), delta=1e-6 * max(1, expected.item()))
                torch.testing.assert_close(z.grad.double(), same.grad, rtol=0, atol=1e-6)

    def test_bfloat16_is_nearer_than_torch(self):
        z, y = self.z.bfloat16(), (self.z + 0.1 * self.y).bfloat16()
        exact = trl(z.double(), y.double()).item()
        mine = losses.generalized_jsd_loss(z, y).item()
        self.assertLess(abs(mine - exact), 1e-6)
        self.assertLess(abs(mine - exact), abs(trl(z, y).item() - exact))

    def test_nvidia(self):
        for ghost in (True, False):
            z = self.z.clone().requires_grad_()
            loss = losses.top_logits_kl_loss(z, self.y, 1.5, True, 6, ghost)
            loss.backward()
            expected = formulas.ghost_token_kl(self.z.numpy(), self.y.numpy(), 6, 1.5, True, ghost).mean()
            self.assertAlmostEqual(loss.item(), expected, delta=2e-6)
            self.assertTrue(z.grad.any())

    def test_speculators(self):
        mask = torch.tensor([[1, 0, 1, 1], [0, 1, 1, 0]], dtype=torch.bool)
        for given in (None, mask):
            for step in (0, 2):
                z, same = self.z.clone().requires_grad_(), self.z.double().requires_grad_()
                loss = losses.speculators_kl(z, self.y, given, step, 0.7)
                loss.backward()
                m = (torch.ones(2, 4) if given is None else given.double())[:, step:]
                log_p, q = same[:, : 4 - step].log_softmax(-1), self.y.double()[:, step:].softmax(-1)
                each = torch.nn.functional.kl_div(log_p, q, reduction="none").sum(-1) * m * 0.7**step
                expected = (each.sum(1) / (m.sum(1) + 1e-5)).mean()
                expected.backward()
                self.assertAlmostEqual(loss.item(), expected.item(), delta=1e-6)
                torch.testing.assert_close(z.grad.double(), same.grad, rtol=0, atol=1e-6)

    def test_liger(self):
        x, w, tx, tw = (torch.randn(s) for s in ((8, 6), (31, 6), (8, 5), (31, 5)))
        x.requires_grad_(), w.requires_grad_()
        loss = losses.liger_fused_linear_jsd(x, w, tx, tw, self.labels.reshape(-1), 0.5)
        loss.backward()
        a, b = x.detach().double().requires_grad_(), w.detach().double().requires_grad_()
        expected = trl((a @ b.T), (tx @ tw.T).double(), self.labels.reshape(-1), 0.5)
        expected.backward()
        self.assertAlmostEqual(loss.item(), expected.item(), delta=1e-5)
        torch.testing.assert_close(x.grad.double(), a.grad, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(w.grad.double(), b.grad, rtol=1e-4, atol=1e-5)

    def test_verl(self):
        p, q = -torch.rand(3, 5) * 4, -torch.rand(3, 5) * 4
        p.requires_grad_()
        for kind in ("kl", "abs", "mse", "low_var_kl"):
            np.testing.assert_allclose(
                losses.kl_penalty(p, q, kind).detach(),
                formulas.verl_kl_penalty(p.detach().numpy(), q.numpy(), kind),
                rtol=1e-6,
                atol=1e-6,
            )
        through = losses.kl_penalty(p, q, "k3+")
        through.sum().backward()
        torch.testing.assert_close(p.grad, (p - q).detach())
        z = self.z.clone().requires_grad_()
        full = losses.kl_penalty(z, self.y, "full")
        full.mean().backward()
        same = self.z.clone().requires_grad_()
        ot.divergence(same, self.y).backward()
        torch.testing.assert_close(z.grad, same.grad, rtol=1e-6, atol=1e-8)


class Peers(unittest.TestCase):
    """The packages themselves, where they are installed."""

    def test_trl(self):
        try:
            from trl.experimental.gkd import GKDTrainer
        except ImportError:
            try:
                from trl import GKDTrainer
            except ImportError as why:
                self.skipTest(f"trl: {why}")
        torch.manual_seed(1)
        z, y, labels = torch.randn(2, 4, 31), torch.randn(2, 4, 31), torch.tensor([[1, -100, 3, 4], [-100, 6, 7, 8]])
        for beta in (0.0, 0.3, 1.0):
            theirs = GKDTrainer.generalized_jsd_loss(z.double(), y.double(), labels, beta, 1.5).item()
            self.assertAlmostEqual(losses.generalized_jsd_loss(z, y, labels, beta, 1.5).item(), theirs, delta=1e-6)

    def test_liger(self):
        try:
            from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss
        except Exception as why:
            self.skipTest(f"liger_kernel: {why}")
        x, w, tx, tw = (torch.randn(s) for s in ((8, 6), (31, 6), (8, 5), (31, 5)))
        labels = torch.tensor([1, -100, 3, 4, -100, 6, 7, 8])
        loss = LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=0.3, compiled=False)
        theirs = loss(x, w.clone().requires_grad_(), tx, tw, labels, None, None)
        theirs = theirs[0] if isinstance(theirs, tuple) else theirs
        self.assertAlmostEqual(
            losses.liger_fused_linear_jsd(x, w, tx, tw, labels, 0.3).item(), theirs.item(), delta=1e-4
        )


if __name__ == "__main__":
    unittest.main()
