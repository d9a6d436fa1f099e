#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The measurements of opd-compare-model by transformers and PyTorch on the CPU, same directory and sizes. --make writes
a directory of random weights first. Run by scripts/bench_model.sh."""
import argparse
import resource
import time

import torch
from transformers import AutoModelForCausalLM, Qwen3Config


def make(directory, width, layers, vocabulary):
    torch.manual_seed(1)
    config = Qwen3Config(vocab_size=vocabulary, hidden_size=width, intermediate_size=width * 8 // 3, num_hidden_layers=layers,
                         num_attention_heads=width // 64, num_key_value_heads=width // 192, head_dim=64,
                         tie_word_embeddings=True, max_position_embeddings=1024)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(directory)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} million weights")


def least(repeats, call):
    call()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return min(times)


def train(model, o):
    ids = torch.randint(0, model.config.vocab_size, (o.sequences, o.length))
    n = o.sequences * o.length
    teacher = torch.randn(n, model.config.hidden_size)
    head = model.lm_head.weight

    def step():
        model.zero_grad(set_to_none=True)
        z = model(ids, use_cache=False).logits.reshape(n, -1).log_softmax(-1)
        with torch.no_grad():
            y = (teacher @ head.T).log_softmax(-1)
        loss = (z.exp() * (z - y)).sum(-1).mean()
        loss.backward()

    def forward():
        with torch.no_grad():
            model.model(ids, use_cache=False)

    f = least(o.repeats, forward)
    t = least(o.repeats, step)
    print(f"torch train {o.sequences} x {o.length} tokens: {n / t:.1f} tokens/s, forward without head {n / f:.1f}", flush=True)


@torch.inference_mode()
def decode(model, o, batch):
    ids = torch.randint(0, model.config.vocab_size, (batch, o.prompt))
    out = model(ids, use_cache=True)
    cache, ids = out.past_key_values, out.logits[:, -1:].argmax(-1)
    best = 1e300
    for _ in range(o.tokens - 1):
        begin = time.perf_counter()
        out = model(ids, past_key_values=cache, use_cache=True)
        cache, ids = out.past_key_values, out.logits[:, -1:].argmax(-1)
        best = min(best, time.perf_counter() - begin)
    print(f"torch decode batch {batch}: {batch / best:.1f} tokens/s in the best step", flush=True)


if __name__ == "__main__":
    a = argparse.ArgumentParser()
    a.add_argument("directory")
    a.add_argument("--make", metavar="WIDTH,LAYERS,VOCABULARY")
    a.add_argument("--threads", type=int, default=2)
    a.add_argument("--repeats", type=int, default=3)
    a.add_argument("--sequences", type=int, default=4)
    a.add_argument("--length", type=int, default=128)
    a.add_argument("--batches", default="1,16")
    a.add_argument("--prompt", type=int, default=32)
    a.add_argument("--tokens", type=int, default=32)
    o = a.parse_args()
    torch.set_num_threads(o.threads)
    if o.make:
        make(o.directory, *map(int, o.make.split(",")))
    else:
        model = AutoModelForCausalLM.from_pretrained(o.directory, dtype=torch.float32)
        for batch in map(int, o.batches.split(",")):
            decode(model, o, batch)
        if o.sequences:
            train(model, o)
        print(f"torch peak memory: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024e-9:.2f} GB")
