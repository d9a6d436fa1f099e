#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""distil_hf.py over actors of Ray, on one machine or many: rollout workers, teachers and the learner are processes that
may die, and no response is learnt from more than --tau updates after it was begun.

    distil_ray.py --student Qwen/Qwen3-0.6B --teacher Qwen/Qwen3-4B --prompts prompts.txt --out distilled
    distil_ray.py                                # two small random models: what it prints, in a minute on a CPU
    distil_ray.py --address auto --rollouts 8 --teachers 2 --gpus 1 --checkpoint /shared/run.state …

Kill any actor while it runs: nothing is lost. Kill the program, and the same command goes on from --checkpoint. Model
names, and --prompts, are read on every machine. The loss is distil_hf.py's, and so are its options."""

import argparse
import functools
import os
import pathlib
import random

import distil_hf as hf
import ray
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import opd.ray
from opd import sched


def model(args, role):
    """The student or the teacher, in the process that asks."""
    name = getattr(args, role)
    if name:
        return AutoModelForCausalLM.from_pretrained(name, dtype="auto").to(args.device)
    return (hf.small(2, 32, 1) if role == "student" else hf.small(3, 64, 2)).to(args.device)


def prompts_of(args):
    if args.prompts:
        tokenizer = AutoTokenizer.from_pretrained(args.student)
        lines = pathlib.Path(args.prompts).read_text(encoding="utf-8").splitlines()
        return [tokenizer(line).input_ids for line in lines if line.strip()]
    choose = random.Random(1)
    return [[choose.randrange(1, 400) for _ in range(choose.randrange(4, 10))] for _ in range(256)]


def on_cpu(state):
    """A copy, of any nesting of dicts and lists: what goes into the object store is not written any more."""
    if isinstance(state, torch.Tensor):
        return state.detach().cpu().clone()
    if isinstance(state, dict):
        return {k: on_cpu(v) for k, v in state.items()}
    return [on_cpu(v) for v in state] if isinstance(state, list) else state


def load(module, state):
    module.load_state_dict({k: v.clone() for k, v in state.items()})  # of the store: read only


class Rollout:
    def __init__(self, args):
        self.args, self.model, self.prompts = args, model(args, "student").eval(), prompts_of(args)[: -args.batch]
        self.waiting = []

    def install(self, weights, version):
        load(self.model, weights)

    def start(self, ticket):
        self.waiting.append(ticket)

    def abort(self, ticket):
        self.waiting.remove(ticket)

    def step(self):
        """All that were asked for, as one batch."""
        tickets, self.waiting = self.waiting, []
        torch.manual_seed(hash(tuple(tickets)))  # workers begin with the same seed; another attempt draws anew
        asked = [self.prompts[t.sample % len(self.prompts)] for t in tickets]
        made = hf.generate(self.model, asked, self.args)
        return [(ticket, (tokens, start), len(tokens) - start) for ticket, (tokens, start) in zip(tickets, made)]


class Teacher:
    def __init__(self, args):
        self.args, self.model = args, model(args, "teacher").eval()

    def score(self, sequences):
        """Hidden states (tokens, D): of half the bytes of logits, or a hundredth."""
        return [y.cpu() for _, y in hf.score(self.model, sequences, self.args)]


class Learner:
    def __init__(self, args):
        self.args, self.student = args, model(args, "student")
        self.teacher = model(args, "teacher").eval().requires_grad_(False)  # for its head
        self.optimizer = torch.optim.AdamW(self.student.parameters(), lr=args.lr, weight_decay=0.0)
        self.losses = {}

    def train(self, items, version):
        scored = [(item.payload, item.score.to(self.args.device)) for item in items]
        self.optimizer.zero_grad()
        rows, loss_of_batch = sum(len(y) for _, y in scored), 0.0
        for i in range(0, len(scored), self.args.micro):
            loss = hf.loss_of(self.student, self.teacher, scored[i : i + self.args.micro], self.args, rows)
            loss.backward()
            loss_of_batch += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(self.student.parameters(), 1.0)
        self.optimizer.step()
        print(f"update {version}: {loss_of_batch:.4f} nats a token", flush=True)

    def weights(self):
        return on_cpu(self.student.state_dict())

    def state(self):
        return {"student": self.weights(), "optimizer": on_cpu(self.optimizer.state_dict())}

    def load(self, state):
        load(self.student, state["student"])
        self.optimizer.load_state_dict(on_cpu(state["optimizer"]))


def main():
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("student", "teacher", "prompts", "out", "address", "checkpoint"):
        a.add_argument("--" + name)
    defaults = {"steps": 40, "batch": 16, "micro": 8, "tau": 2, "new-tokens": 24, "lr": 3e-3, "temperature": 1.0}
    defaults |= {"rollouts": 2, "teachers": 1, "gpus": 0.0, "divergence": "reverse_kl"}
    for name, value in defaults.items():
        a.add_argument("--" + name, type=type(value), default=value)
    args = a.parse_args()
    if len({args.student is None, args.teacher is None, args.prompts is None}) > 1:
        a.error("--student, --teacher and --prompts go together; without them there are two small random models")
    args.device = "cpu"
    student, teacher, prompts = model(args, "student").eval(), model(args, "teacher").eval(), prompts_of(args)
    if len(prompts) < 2 * args.batch:
        a.error(f"--prompts: {len(prompts)} of at least {2 * args.batch}; the last {args.batch} are held out")
    if (ids := student.config.vocab_size) != (of_teacher := teacher.config.vocab_size):
        a.error(f"--teacher has a vocabulary of {of_teacher} ids, the student of {ids}")
    eos = student.generation_config.eos_token_id
    args.eos = set(eos if isinstance(eos, list) else [] if eos is None else [eos])
    args.pad = min(args.eos, default=0)

    def held_out():
        torch.manual_seed(1)
        return hf.held_out(student, teacher, prompts[-args.batch :], args)

    path = [str(pathlib.Path(__file__).parent), os.environ.get("PYTHONPATH")]  # actors import distil_hf
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, path))}
    ray.init(address=args.address, runtime_env={"env_vars": environment})
    before = held_out()
    there = argparse.Namespace(**vars(args) | {"device": "cuda" if args.gpus else "cpu"})
    workers = functools.partial(opd.ray.Workers, args=(there,), options={"num_gpus": args.gpus} if args.gpus else {})
    run = opd.ray.Run(
        sched.Settings(batch=args.batch, tau=args.tau, policy="edf", sequences=args.batch * args.steps),
        rollout=workers(Rollout, count=args.rollouts, slots=2 * args.batch // args.rollouts),
        teacher=workers(Teacher, count=args.teachers),
        learner=workers(Learner),
        checkpoint=args.checkpoint,
    )
    for step in run:
        print(f"version {step.version}, oldest {step.lag} versions", flush=True)
    load(student, run.weights())
    after = held_out()
    print(f"{args.divergence} to the teacher on held-out prompts: {before:.4f} before, {after:.4f} after")
    if args.out:
        for each in [student] + ([AutoTokenizer.from_pretrained(args.student)] if args.student else []):
            each.save_pretrained(args.out + ".partial")
        pathlib.Path(args.out + ".partial").rename(args.out)


if __name__ == "__main__":
    main()
