#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Reverse KL from hidden states on the CPU as one writes it in PyTorch: vocabulary in chunks, sums in one streaming
pass, the backward pass by recomputation, with explicit gradients (no autograd, products with out=). The sizes of
bench_hidden.cpp. Prints the median seconds of forward and of forward + backward (dX, dW), and peak memory beside the
inputs. Run by scripts/bench_peers.sh."""
import argparse
import resource
import time

import torch

VOCAB, D_S, D_T = 151936, 1024, 4096


class HiddenKL:
    def __init__(self, n, chunk):
        self.chunk = chunk
        self.z, self.y, self.e = (torch.empty(n, chunk) for _ in range(3))

    def tiles(self, xs, xt, ws, wt):
        for v in range(0, VOCAB, self.chunk):
            k = min(self.chunk, VOCAB - v)
            z, y = self.z[:, :k], self.y[:, :k]
            torch.mm(xs, ws[v : v + k].T, out=z)
            torch.mm(xt, wt[v : v + k].T, out=y)
            yield v, k, z, y

    def forward(self, xs, xt, ws, wt):
        n = xs.shape[0]
        ms, mt = torch.full((n,), -torch.inf), torch.full((n,), -torch.inf)
        ss, st, ts = torch.zeros(n), torch.zeros(n), torch.zeros(n)  # sums of e^z, e^y, e^z (z - y)
        for _, k, z, y in self.tiles(xs, xt, ws, wt):
            e = self.e[:, :k]
            top = torch.maximum(ms, z.amax(1))
            scale = (ms - top).exp_()
            torch.sub(z, top[:, None], out=e).exp_()
            ss.mul_(scale).add_(e.sum(1))
            ts.mul_(scale).add_(torch.einsum("nk,nk->n", e, z) - torch.einsum("nk,nk->n", e, y))
            ms = top
            top = torch.maximum(mt, y.amax(1))
            st.mul_((mt - top).exp_())
            torch.sub(y, top[:, None], out=e).exp_()
            st.add_(e.sum(1))
            mt = top
        log_z, log_y = ms + ss.log(), mt + st.log()
        return ts / ss - log_z + log_y, log_z, log_y

    def backward(self, xs, xt, ws, wt, kl, log_z, log_y, dx, dw):
        dx.zero_()
        shift = (log_y - log_z - kl)[:, None]
        for v, k, z, y in self.tiles(xs, xt, ws, wt):
            p = torch.sub(z, log_z[:, None], out=self.e[:, :k]).exp_()
            g = z.sub_(y).add_(shift).mul_(p).div_(xs.shape[0])  # p (log p/q - KL) / N
            dx.addmm_(g, ws[v : v + k])
            torch.mm(g.T, xs, out=dw[v : v + k])


def median(f, samples):
    f()
    times = []
    for _ in range(samples):
        begin = time.perf_counter()
        f()
        times.append(time.perf_counter() - begin)
    return sorted(times)[samples // 2]


def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


parser = argparse.ArgumentParser()
parser.add_argument("--threads", type=int, default=1)
parser.add_argument("--rows", default="64,256,1024")
parser.add_argument("--samples", type=int, default=3)
parser.add_argument("--chunk", type=int, default=4096)
options = parser.parse_args()
torch.set_num_threads(options.threads)
torch.set_grad_enabled(False)
print(f"torch {torch.__version__}, {options.threads} threads, chunks of {options.chunk}")
ws, wt, dw = torch.randn(VOCAB, D_S).mul_(0.06), torch.randn(VOCAB, D_T).mul_(0.03), torch.zeros(VOCAB, D_S)
for n in map(int, options.rows.split(",")):
    xs, xt, dx = torch.randn(n, D_S), torch.randn(n, D_T), torch.zeros(n, D_S)
    before = peak()
    loss = HiddenKL(n, options.chunk)
    forward = median(lambda: loss.forward(xs, xt, ws, wt), options.samples)
    both = median(lambda: loss.backward(xs, xt, ws, wt, *loss.forward(xs, xt, ws, wt), dx, dw), options.samples)
    print(f"rows {n:5}  forward {forward:7.3f} s  forward, dx, dw {both:7.3f} s  memory {peak() - before:7.0f} MB", flush=True)
