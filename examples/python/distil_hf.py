#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Distils a Hugging Face student from a teacher of the same vocabulary: rollout, scoring and learning overlap in
threads of one process, and no response is learnt from more than --tau updates after it was begun.

    distil_hf.py --student Qwen/Qwen3-0.6B --teacher Qwen/Qwen3-4B --prompts prompts.txt --out distilled
    distil_hf.py                                 # two small random models: what it prints, in a minute on a CPU

The loss is the exact reverse KL over the vocabulary at every token of a response, from hidden states and heads: neither
model's logits are in memory as a whole. prompts.txt has a prompt a line. from_pretrained() reads --out."""

import argparse
import asyncio
import copy
import pathlib
import random

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

import opd.torch
from opd import sched


@torch.no_grad()
def generate(model, prompts, args):
    """(prompt + response, length of the prompt) of each: sampled, up to an end-of-text token or --new-tokens."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[args.pad] * (longest - len(p)) + p for p in prompts], device=args.device)
    seen = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts], device=args.device)
    how = {"do_sample": True, "temperature": args.temperature, "top_k": 0, "top_p": 1.0, "pad_token_id": args.pad}
    made = model.generate(ids, attention_mask=seen, max_new_tokens=args.new_tokens, **how)[:, longest:].tolist()
    ends = [next((i + 1 for i, token in enumerate(r) if token in args.eos), len(r)) for r in made]
    return [(p + r[:end], len(p)) for p, r, end in zip(prompts, made, ends)]


def states(model, sequences, args):
    """Of each sequence, the hidden states (tokens of the response, D) that its tokens are predicted from."""
    longest = max(len(tokens) for tokens, _ in sequences)
    ids = torch.tensor([t + [args.pad] * (longest - len(t)) for t, _ in sequences], device=args.device)
    seen = torch.tensor([[1] * len(t) + [0] * (longest - len(t)) for t, _ in sequences], device=args.device)
    x = model.base_model(input_ids=ids, attention_mask=seen).last_hidden_state
    return [x[i, start - 1 : len(tokens) - 1] for i, (tokens, start) in enumerate(sequences)]


@torch.no_grad()
def score(teacher, sequences, args):
    return list(zip(sequences, states(teacher, sequences, args)))


def loss_of(student, teacher, scored, args, normaliser=None):
    x, y = torch.cat(states(student, [sequence for sequence, _ in scored], args)), torch.cat([y for _, y in scored])
    w, v = student.get_output_embeddings(), teacher.get_output_embeddings()
    more = {"bias": w.bias, "teacher_bias": v.bias, "temperature": args.temperature, "normaliser": normaliser}
    return opd.torch.hidden_divergence(x, w.weight, y, v.weight, args.divergence, **more)


@torch.no_grad()
def held_out(student, teacher, prompts, args):
    return float(loss_of(student, teacher, score(teacher, generate(student, prompts, args), args), args))


async def distil(student, teacher, prompts, args):
    optimizer = torch.optim.AdamW(student.parameters(), lr=args.lr, weight_decay=0.0)
    rollout, waiting, turn, losses = [copy.deepcopy(student).eval()], [], asyncio.Lock(), {}

    def learn(items, version):
        optimizer.zero_grad()
        rows, losses[version] = sum(len(y) for _, y in items), 0.0
        for i in range(0, len(items), args.micro):  # one normaliser: micro-batches add up to the batch's mean
            loss = loss_of(student, teacher, items[i : i + args.micro], args, rows)
            loss.backward()
            losses[version] += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()

    async def respond(ticket, version):
        mine = asyncio.get_running_loop().create_future()
        waiting.append((prompts[ticket.sample % len(prompts)], mine))
        async with turn:  # what is asked for while a batch is generated is the next batch
            await asyncio.sleep(0)
            now, waiting[:] = ([], waiting) if mine.done() else (waiting[:], [])
            try:
                made = await asyncio.to_thread(generate, rollout[0], [p for p, _ in now], args) if now else []
            except BaseException:
                waiting.extend(each for each in now if each[1] is not mine)
                raise
            for (_, answer), sequence in zip(now, made):
                answer.done() or answer.set_result(sequence)
        tokens, start = await mine
        return (tokens, start), len(tokens) - start

    async def publish(version):  # a batch that is being generated keeps the model that it began with
        rollout[0] = await asyncio.to_thread(lambda: copy.deepcopy(student).eval())

    settings = sched.Settings(batch=args.batch, tau=args.tau, policy="edf", sequences=args.batch * args.steps)
    stages = {"rollout": respond, "score": lambda items: asyncio.to_thread(score, teacher, items, args)}
    stages |= {"train": lambda items, version: asyncio.to_thread(learn, items, version), "sync": publish}
    async for step in sched.run(settings, **stages, lanes=2 * args.batch):
        lag = max(step.version - 1 - c.start for c in step.consumed)
        print(f"update {step.version}: {losses.pop(step.version):.4f} nats a token, oldest {lag} versions", flush=True)


def small(layers, width, seed):
    torch.manual_seed(seed)
    shape = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": layers, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.15, "eos_token_id": 0}
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=400, **shape, **heads))


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("student", "teacher", "prompts", "out"):
        a.add_argument("--" + name)
    defaults = {"steps": 40, "batch": 16, "micro": 8, "tau": 2, "new-tokens": 24, "lr": 3e-3, "temperature": 1.0}
    for name, value in (defaults | {"divergence": "reverse_kl", "device": "cpu"}).items():
        a.add_argument("--" + name, type=type(value), default=value)
    args = a.parse_args()
    if len({args.student is None, args.teacher is None, args.prompts is None}) > 1:
        a.error("--student, --teacher and --prompts go together; without them there are two small random models")
    torch.manual_seed(1)
    if args.student:
        tokenizer = AutoTokenizer.from_pretrained(args.student)
        student, teacher = (AutoModelForCausalLM.from_pretrained(m, dtype="auto") for m in (args.student, args.teacher))
        lines = pathlib.Path(args.prompts).read_text(encoding="utf-8").splitlines()
        prompts = [tokenizer(line).input_ids for line in lines if line.strip()]
    else:
        tokenizer, student, teacher, choose = None, small(2, 32, 1), small(3, 64, 2), random.Random(1)
        prompts = [[choose.randrange(1, 400) for _ in range(choose.randrange(4, 10))] for _ in range(256)]
    if len(prompts) < 2 * args.batch:
        a.error(f"--prompts: {len(prompts)} of at least {2 * args.batch}; the last {args.batch} are held out")
    if (ids := student.config.vocab_size) != (of_teacher := teacher.config.vocab_size):
        a.error(f"--teacher has a vocabulary of {of_teacher} ids, the student of {ids}")
    student, teacher = student.to(args.device), teacher.to(args.device).eval().requires_grad_(False)
    eos = student.generation_config.eos_token_id
    args.eos = set(eos if isinstance(eos, list) else [] if eos is None else [eos])
    args.pad = min(args.eos, default=0)
    before = held_out(student, teacher, prompts[-args.batch :], args)
    asyncio.run(distil(student, teacher, prompts[: -args.batch], args))
    after = held_out(student, teacher, prompts[-args.batch :], args)
    print(f"{args.divergence} to the teacher on held-out prompts: {before:.4f} before, {after:.4f} after")
    if args.out:
        for each in filter(None, (student, tokenizer)):
            each.save_pretrained(args.out + ".partial")
        pathlib.Path(args.out + ".partial").rename(args.out)


if __name__ == "__main__":
    main()
