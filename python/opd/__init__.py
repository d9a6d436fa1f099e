# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""On-policy distillation: losses and gradients of any estimator, by libopd.

    import opd
    r = opd.evaluate(z, y)                                   # reverse KL of student logits z and teacher logits y
    r = opd.evaluate(z, opd.teacher.samples(ids, log_mu, log_q), opd.mc("reverse_kl", surrogate="ppo_clip"), mask=mask)
    r.loss, r.gradient, r.diagnostics.effective_sample_size

`opd.torch` has the same as operators of PyTorch with autograd, `opd.losses` other libraries' losses under their names,
`opd.sched` schedulers, `opd.ray` a scheduler over actors of Ray, `opd.spec` speculation.
"""

from __future__ import annotations

from . import student, teacher
from ._config import config, show_config
from ._memory import keep_memory
from ._evaluate import ON_BAD, TOTALS, Engine, Frozen, Result, evaluate
from ._tensors import bfloat16
from .diagnostics import Diagnostics
from .errors import BadContents, DeviceError, Error, InfiniteValue, InternalError, InvalidInput, Unsupported
from .estimators import (
    Divergence,
    Estimator,
    alpha_divergence,
    dense,
    generalised,
    jsd,
    mc,
    names,
    renormalised,
    reweighted,
    sampled_forward_kl,
    skew_forward_kl,
    skew_reverse_kl,
    tail_bucket,
    truncated_biased,
)
from .rows import Drawn, Scores, draw, score
from .teacher import Kept, Rollout

__all__ = [
    "BadContents",
    "DeviceError",
    "Diagnostics",
    "Divergence",
    "Drawn",
    "Engine",
    "Error",
    "Estimator",
    "Frozen",
    "InfiniteValue",
    "InternalError",
    "InvalidInput",
    "Kept",
    "ON_BAD",
    "Result",
    "Rollout",
    "Scores",
    "TOTALS",
    "Unsupported",
    "alpha_divergence",
    "bfloat16",
    "config",
    "dense",
    "draw",
    "evaluate",
    "generalised",
    "jsd",
    "keep_memory",
    "mc",
    "names",
    "renormalised",
    "reweighted",
    "sampled_forward_kl",
    "score",
    "show_config",
    "skew_forward_kl",
    "skew_reverse_kl",
    "student",
    "tail_bucket",
    "teacher",
    "truncated_biased",
]
