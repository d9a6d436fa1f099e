#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Losses of logits in memory, value and gradient, as TRL writes them in PyTorch, on the CPU: the rows that bench_dense
has (V = 151,936; student N(0,3), teacher = student + N(0,0.5)). Run by scripts/bench_peers.sh; prints the median time
of a call, eager and by torch.compile, in ns an element, and how far the loss of four rows is from float64.

    peer_torch_dense.py [--threads 1] [--rows 64] [--types float32,bfloat16] [--rounds 9]
"""
import argparse
import math
import time

import torch

VOCAB, DRAWN = 151936, 64


def reverse_kl(z, y, ids, log_mu):
    log_p, log_q = torch.log_softmax(z, -1), torch.log_softmax(y, -1)
    return torch.nn.functional.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1).mean()


def forward_kl(z, y, ids, log_mu):
    log_p, log_q = torch.log_softmax(z, -1), torch.log_softmax(y, -1)
    return torch.nn.functional.kl_div(log_p, log_q, reduction="none", log_target=True).sum(-1).mean()


def jsd(z, y, ids, log_mu):  # TRL's generalized_jsd_loss at beta = 0.5
    log_p, log_q = torch.log_softmax(z, -1), torch.log_softmax(y, -1)
    log_m = torch.logsumexp(torch.stack([log_p, log_q]) - math.log(2), dim=0)
    kl = torch.nn.functional.kl_div
    return (0.5 * kl(log_m, log_p, reduction="none", log_target=True) +
            0.5 * kl(log_m, log_q, reduction="none", log_target=True)).sum(-1).mean()


def mc(z, y, ids, log_mu):  # y: log q of the ids. The ratio is p/mu, the advantage the teacher's
    log_p = torch.log_softmax(z, -1).gather(-1, ids)
    ratio = torch.exp(log_p - log_mu)
    return -(ratio * (y - log_p).detach()).mean(-1).mean()


def milliseconds(loss, z, rounds, *rest):
    times = []
    for i in range(rounds + 2):
        z.grad = None
        begin = time.perf_counter()
        loss(z, *rest).backward()
        if i >= 2:
            times.append(1e3 * (time.perf_counter() - begin))
    return sorted(times)[rounds // 2]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=VOCAB)
    parser.add_argument("--types", default="float32,bfloat16")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(1)
    rows, vocab = options.rows, options.vocab
    for name in options.types.split(","):
        student = 3 * torch.randn(rows, vocab)
        teacher = (student + 0.5 * torch.randn(rows, vocab)).to(getattr(torch, name))
        student = student.to(getattr(torch, name))
        log_p = torch.log_softmax(student.double(), -1)
        ids = torch.multinomial(log_p.exp(), DRAWN, replacement=True)
        log_mu = log_p.gather(-1, ids).float()
        log_q = torch.log_softmax(teacher.double(), -1).gather(-1, ids).float()
        for what, loss, y in (("reverse KL", reverse_kl, teacher), ("forward KL", forward_kl, teacher),
                              ("JSD(0.5)", jsd, teacher), ("MC-64", mc, log_q)):
            z = student.clone().requires_grad_()
            torch._dynamo.reset()
            with torch.no_grad():
                got = float(loss(z[:4], y[:4], ids[:4], log_mu[:4]))
                exact = float(loss(z[:4].double(), y[:4].double(), ids[:4], log_mu[:4].double()))
            eager = milliseconds(loss, z, options.rounds, y, ids, log_mu)
            compiled = milliseconds(torch.compile(loss), z, options.rounds, y, ids, log_mu)
            each = 1e6 / (rows * vocab)
            print(f"torch {torch.__version__:12} {what:10} {name:9} threads {options.threads}  N {rows:5}  eager {eager:9.2f} ms "
                  f"{eager * each:7.3f} ns  compiled {compiled:9.2f} ms {compiled * each:7.3f} ns  "
                  f"loss off by {abs(got - exact) / max(abs(exact), 1e-300):.1e}", flush=True)


if __name__ == "__main__":
    main()
