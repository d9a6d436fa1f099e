# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""opd.torch beside opd.evaluate into memory that is there (the C call) and beside TRL's formula in eager torch.

    python bench/speed.py [--threads 1] [--rows 64] [--vocab 151936] [--hidden]

Loss and gradient together, the median of several calls in turn, in milliseconds; errors of the loss against float64.
"""

import argparse
import statistics
import time

import numpy as np
import torch
import torch.nn.functional as F

import opd
import opd.torch


def trl(student, teacher, beta):
    s, t = F.log_softmax(student, -1), F.log_softmax(teacher, -1)
    if beta == 1:
        return F.kl_div(t, s, reduction="none", log_target=True).sum() / s.size(0)
    beta = torch.tensor(beta, dtype=s.dtype)
    m = torch.logsumexp(torch.stack([s + torch.log1p(-beta), t + torch.log(beta)]), dim=0)
    of_teacher, of_student = (F.kl_div(m, x, reduction="none", log_target=True) for x in (t, s))
    return (beta * of_teacher + (1 - beta) * of_student).sum() / s.size(0)


def chunked(x, w, y, rows):
    """The loss of hidden states in chunks of rows, each with its own backward, as trainers write it."""
    total = 0.0
    for i in range(0, x.size(0), rows):
        loss = trl(F.linear(x[i : i + rows], w), y(i, rows), 1) * rows / x.size(0)
        loss.backward()
        total += loss.item()
    return total


def medians(calls, repeats):
    for call in calls.values():
        call()
    times = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            times[name].append(1e3 * (time.perf_counter() - begin))
    return {name: statistics.median(t) for name, t in times.items()}


def logits(options):
    columns = ("C call", "opd.torch", "TRL eager", "C/torch", "TRL/torch", "error", "of TRL")
    print(f"{'type':9}{'loss':12}" + "".join(f"{c:>11}" for c in columns))
    for kind in (torch.float32, torch.bfloat16):
        z = torch.randn(options.rows, options.vocab).to(kind)
        y = (0.7 * z.float() + 0.7 * torch.randn(options.rows, options.vocab)).to(kind)
        dz, leaf = torch.empty_like(z), z.clone().requires_grad_()
        for name, of, beta in (("reverse_kl", "reverse_kl", 1), ("jsd", opd.jsd(0.5, 0.5), 0.5)):

            def of_opd():
                leaf.grad = None
                loss = opd.torch.divergence(leaf, y, of)
                loss.backward()
                return loss.item()

            def of_trl():
                leaf.grad = None
                loss = trl(leaf, y, beta)
                loss.backward()
                return loss.item()

            took = medians(
                {
                    "c": lambda: opd.evaluate(z, y, of, gradient=dz, threads=options.threads),
                    "torch": of_opd,
                    "trl": of_trl,
                },
                options.repeats,
            )
            with torch.no_grad():
                parts = [trl(z[i : i + 8].double(), y[i : i + 8].double(), beta) for i in range(0, len(z), 8)]
                exact = sum(part.item() * min(8, len(z) - 8 * i) for i, part in enumerate(parts)) / len(z)
            apart = [abs(loss / exact - 1) for loss in (of_opd(), of_trl())]
            figures = [f"{took[name]:11.2f}" for name in ("c", "torch", "trl")]
            figures += [f"{took[name] / took['torch']:11.2f}" for name in ("c", "trl")] + [f"{x:11.1e}" for x in apart]
            print(f"{str(kind)[6:]:9}{name:12}" + "".join(figures))


def hidden(options):
    d = options.width
    x, w = torch.randn(options.rows, d), torch.randn(options.vocab, d) / d**0.5
    tx, tw = torch.randn(options.rows, d), torch.randn(options.vocab, d) / d**0.5
    x.requires_grad_(), w.requires_grad_()

    def of_opd():
        x.grad = w.grad = None
        opd.torch.hidden_divergence(x, w, tx, tw).backward()

    def of_torch():
        x.grad = w.grad = None
        chunked(x, w, lambda i, n: F.linear(tx[i : i + n], tw), options.chunk)

    took = medians({"opd": of_opd, "torch": of_torch}, max(1, options.repeats // 3))
    print(
        f"hidden states ({options.rows} x {d}) to {options.vocab}: opd.torch {took['opd']:.0f} ms, "
        f"chunks of {options.chunk} rows in eager torch {took['torch']:.0f} ms"
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--chunk", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--hidden", action="store_true", help="of hidden states as well")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    np.random.seed(0)
    print(
        f"torch {torch.__version__}, {options.threads} threads, ({options.rows}, {options.vocab})",
        opd.config()["library"]["chosen"],
    )
    logits(options)
    if options.hidden:
        hidden(options)


if __name__ == "__main__":
    main()
