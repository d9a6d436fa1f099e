#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The generalised JSD of TRL and of Liger on the inputs that opd's test wrote: loss and gradient in the student's
logits.

    scripts/crosscheck.py numbers.json    exit status 1 if a number differs
    scripts/crosscheck.py --anything      exit status 1 if there is no package to compare with

Liger's chunked loss runs on the CPU and computes in float32; TRL's in the type of its inputs, here float64.
"""
import importlib
import json
import sys


def trl_loss(torch, student, teacher, case):
    try:
        from trl.experimental.gkd import GKDTrainer
    except ImportError:
        from trl import GKDTrainer
    return GKDTrainer.generalized_jsd_loss(  # (N,1,V): "batchmean" is the mean over rows
        student.unsqueeze(1), teacher.unsqueeze(1), beta=case["beta"], temperature=case["temperature"])


def liger_loss(torch, student, teacher, case):
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss
    loss = LigerFusedLinearJSDLoss(
        weight_hard_loss=0.0, weight_soft_loss=1.0, beta=case["beta"], temperature=case["temperature"], compiled=False)
    head = torch.eye(student.shape[1], dtype=student.dtype)  # logits are the hidden states
    labels = torch.zeros(student.shape[0], dtype=torch.long)
    return loss(student, head.clone().requires_grad_(), teacher, head, labels, None, None)


SYSTEMS = {"trl": (trl_loss, "float64", 1e-9), "liger_kernel": (liger_loss, "float32", 1e-4)}


def present():
    found = []
    for name in ("torch", *SYSTEMS):
        try:
            importlib.import_module(name)
            found.append(name)
        except ModuleNotFoundError as error:
            why = "not installed" if error.name == name else f"needs {error.name}"
            print(f"SKIPPED {name}: {why}")
        except Exception as error:  # installed, but not for this machine
            print(f"SKIPPED {name}: cannot be imported: {error}")
    return [name for name in SYSTEMS if name in found and "torch" in found]


def compare(name, numbers):
    import torch
    loss_of, dtype, tolerance = SYSTEMS[name]
    worst = 0.0
    for case in numbers["cases"]:
        student = torch.tensor(numbers["student"], dtype=getattr(torch, dtype), requires_grad=True)
        teacher = torch.tensor(numbers["teacher"], dtype=getattr(torch, dtype))
        loss = loss_of(torch, student, teacher, case)
        loss.backward()
        apart = (student.grad.double() - torch.tensor(case["gradient"], dtype=torch.float64)).abs().max().item()
        apart = max(apart, abs(loss.item() - case["loss"]))
        if not apart <= tolerance:
            print(f"MISMATCH {name}: beta {case['beta']}, temperature {case['temperature']}: {apart:.3g} apart")
        worst = max(worst, apart) if apart == apart else float("inf")
    print(f"{name}: {len(numbers['cases'])} cases, at most {worst:.3g} apart")
    return worst <= tolerance


def main():
    systems = present()
    if sys.argv[1:] == ["--anything"]:
        return 0 if systems else 1
    with open(sys.argv[1], encoding="utf-8") as file:
        numbers = json.load(file)
    return 0 if all([compare(name, numbers) for name in systems]) else 1


if __name__ == "__main__":
    sys.exit(main())
