# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""opd.torch on a CUDA device against the same call on the CPU; and, without a device, what asking for one answers."""

from __future__ import annotations

import unittest

import opd

try:
    import torch

    import opd.torch
except ImportError:
    torch = None  # type: ignore[assignment]


class TestWithoutADevice(unittest.TestCase):
    def test_an_engine_says_what_is_missing(self) -> None:
        try:
            engine = opd.Engine(device=0)
        except opd.Unsupported as e:
            self.assertIn("libopd_cuda", str(e))
        except (opd.DeviceError, opd.InvalidInput) as e:
            self.assertTrue(str(e))
        else:
            self.assertTrue(torch is None or torch.cuda.is_available())  # else it would be the CPU's
            engine.close()
        for wrong in ({"device": 0, "threads": 2}, {"stream": 8}):
            with self.assertRaises(opd.InvalidInput):
                opd.Engine(**wrong)

    def test_totals_are_the_result(self) -> None:
        import numpy as np

        totals = np.zeros(opd.TOTALS, np.int64)
        z, y = np.random.default_rng(3).normal(size=(2, 4, 9)).astype(np.float32)
        r = opd.evaluate(z, y, totals=totals)
        self.assertEqual(r.loss, float(totals[:1].view(np.float64)[0]))
        self.assertEqual(r.diagnostics, opd.Diagnostics.of(totals[1:]))
        with self.assertRaises(opd.InvalidInput):
            opd.evaluate(z, y, totals=np.zeros(3, np.int64))


@unittest.skipIf(torch is None or not torch.cuda.is_available(), "no CUDA device")
class TestOnADevice(unittest.TestCase):
    def compare(self, call, *tensors, tolerance: float = 1e-5) -> None:
        """call(tensors on a device) as on the CPU: losses, gradients, counts."""
        found = []
        for device in ("cpu", "cuda"):
            of = [t.detach().to(device) for t in tensors]
            for t, original in zip(of, tensors):
                t.requires_grad_(original.requires_grad)
            out = call(*of)
            (
                out.loss * torch.linspace(0.5, 1.5, out.loss.numel(), device=device).reshape(out.loss.shape)
            ).sum().backward()
            found.append((out, [t.grad for t in of if t.requires_grad]))
        (cpu, cpu_gradients), (cuda, cuda_gradients) = found
        torch.testing.assert_close(cuda.loss.cpu(), cpu.loss, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(cuda.losses.cpu(), cpu.losses, rtol=tolerance, atol=tolerance)
        for a, b in zip(cuda_gradients, cpu_gradients):
            torch.testing.assert_close(
                a.cpu(), b, rtol=max(tolerance, 1e-2 if b.dtype != torch.float32 else 0), atol=tolerance
            )
        self.assertEqual(cuda.diagnostics.kept, cpu.diagnostics.kept)
        self.assertEqual(cuda.diagnostics.selector_rows, cpu.diagnostics.selector_rows)

    def logits(self, *shape: int, kind=None, gradient: bool = False):
        return torch.randn(*shape).to(kind or torch.float32).requires_grad_(gradient)

    def test_divergences(self) -> None:
        torch.manual_seed(1)
        mask = torch.rand(2, 8) > 0.2
        for kind in (torch.float32, torch.bfloat16, torch.float16):
            for of in ("reverse_kl", "forward_kl", ("jsd", 0.5, 0.5), "total_variation", ("alpha_divergence", 0.5)):
                for reduction in ("token_mean", "none"):
                    with self.subTest(kind=kind, of=of, reduction=reduction):
                        self.compare(
                            lambda z, y, m: opd.torch.divergence(z, y, of, mask=m, reduction=reduction, full=True),
                            self.logits(2, 8, 1500, kind=kind, gradient=True),
                            self.logits(2, 8, 1500, kind=kind),
                            mask,
                        )

    def test_supports_and_samples(self) -> None:
        torch.manual_seed(2)
        y = self.logits(16, 1000)
        log_q, ids = torch.log_softmax(y, -1).topk(8)
        for estimator in ("reverse_kl", opd.tail_bucket("forward_kl")):
            self.compare(
                lambda z, i, q: opd.torch.support(z, i, q, estimator, full=True),
                self.logits(16, 1000, gradient=True),
                ids,
                log_q,
            )
        for surrogate in ("unclipped_is", "ppo_clip"):
            self.compare(
                lambda z, i, q: opd.torch.sampled(z, i.int(), q - 0.1, q, surrogate=surrogate, full=True),
                self.logits(16, 1000, gradient=True),
                ids,
                log_q,
            )

    def test_hidden_states(self) -> None:
        torch.manual_seed(3)
        for kind in (torch.float32, torch.bfloat16):
            self.compare(
                lambda x, w, h, v: opd.torch.hidden_divergence(x, w, h, v, full=True),
                self.logits(24, 32, kind=kind, gradient=True),
                self.logits(700, 32, kind=kind, gradient=True),
                self.logits(24, 48, kind=kind),
                self.logits(700, 48, kind=kind),
                tolerance=1e-4 if kind == torch.float32 else 3e-2,
            )

    def test_streams_and_refusals(self) -> None:
        z, y = self.logits(4, 100).cuda(), self.logits(4, 100).cuda()
        want = opd.torch.divergence(z, y)
        other = torch.cuda.Stream()
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            got = opd.torch.divergence(z, y)
        other.synchronize()
        self.assertEqual(want.item(), got.item())
        with self.assertRaises(opd.Unsupported):
            opd.torch.divergence(z.double(), y.double())
        with self.assertRaises(opd.InvalidInput):
            opd.evaluate(z, y.cpu(), engine=opd.Engine(device=0), gradient=False)


if __name__ == "__main__":
    unittest.main()
