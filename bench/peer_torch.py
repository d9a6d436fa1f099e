#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Reverse KL and JSD of the logits, loss and gradient, as PyTorch users write them, on the GPU: the same rows and sizes
as bench_cuda.cu. Run by scripts/gpu.sh where torch is installed; prints the median time of a call, eager and
compiled."""
import torch

VOCAB, ROUNDS = 151936, 21


def reverse_kl(z, y):
    log_p, log_q = torch.log_softmax(z.float(), -1), torch.log_softmax(y.float(), -1)
    return (log_p.exp() * (log_p - log_q)).sum(-1).mean()


def jsd(z, y):
    log_p, log_q = torch.log_softmax(z.float(), -1), torch.log_softmax(y.float(), -1)
    log_m = torch.logaddexp(log_p, log_q) - 0.6931471805599453
    return 0.5 * (log_p.exp() * (log_p - log_m) + log_q.exp() * (log_q - log_m)).sum(-1).mean()


def milliseconds(loss, z, y):
    times = []
    for i in range(ROUNDS + 3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        z.grad = None
        begin.record()
        loss(z, y).backward()
        end.record()
        end.synchronize()
        if i >= 3:
            times.append(begin.elapsed_time(end))
    return sorted(times)[ROUNDS // 2]


for rows in (64, 4096):
    for dtype in (torch.float32, torch.bfloat16):
        try:
            z = (3 * torch.randn(rows, VOCAB, device="cuda")).to(dtype).requires_grad_()
            y = (3 * torch.randn(rows, VOCAB, device="cuda")).to(dtype)
            for name, loss in (("reverse KL", reverse_kl), ("JSD", jsd)):
                eager, compiled = milliseconds(loss, z, y), milliseconds(torch.compile(loss), z, y)
                print(f"torch {name:10}  {str(dtype):15} N {rows:5}  eager {eager:9.4f} ms  compiled {compiled:9.4f} ms",
                      flush=True)
        except torch.OutOfMemoryError:
            print(f"torch {str(dtype):15} N {rows:5}  out of memory", flush=True)
        finally:
            z = y = None
