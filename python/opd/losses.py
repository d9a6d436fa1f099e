# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Losses of other libraries under their names and arguments, computed by opd.

Of tensors of torch a call returns what theirs returns, with autograd; of numpy arrays an opd.Result with loss,
gradient and per-row losses. Per-row losses and gradients are those of opd's estimators: docs/equivalence says which,
and what differs. `on_bad` is opd.evaluate's: by default a call raises above 1 % of bad rows.
"""

from __future__ import annotations

import sys
from typing import Any, Union

import numpy as np

from . import student as _student
from . import teacher as _teacher
from ._evaluate import evaluate
from ._numbers import integer
from ._tensors import _is_torch, bfloat16
from .errors import Unsupported, refuse
from .estimators import Estimator, Of, renormalised, tail_bucket

__all__ = ["generalized_jsd_loss", "kl_penalty", "liger_fused_linear_jsd", "speculators_kl", "top_logits_kl_loss"]


def _by_beta(beta: float) -> Of:
    """TRL's and Liger's beta: the ends are special cases, no limits of what lies between."""
    if beta == 0:
        return "forward_kl"
    return "reverse_kl" if beta == 1 else ("jsd", beta, beta)


OnBad = Union[str, float, None]


def _run(logits: Any, teacher: Any, estimator: Estimator, temperature: float, **env: Any) -> Any:
    if _is_torch(logits):
        from . import torch as operators

        return operators.estimate(logits, teacher, estimator, temperature=temperature, **env)
    return evaluate(_student.logits(logits, temperature), teacher, estimator, losses=True, **env)


def _kept(labels: Any, ignored: int) -> int:
    return int((labels != ignored).sum())


def generalized_jsd_loss(
    student_logits: Any,
    teacher_logits: Any,
    labels: Any = None,
    beta: float = 0.5,
    temperature: float = 1.0,
    reduction: str = "batchmean",
    *,
    on_bad: OnBad = None,
) -> Any:
    """TRL's GKDTrainer.generalized_jsd_loss: logits (B,T,V), labels (B,T) with -100 where nothing counts.

    "batchmean" is the mean over labelled tokens, and without labels the sum over B; "mean" is over tokens times V, as
    theirs. Theirs of "none" is a number for each token and id, which opd does not make: opd.torch.divergence(...,
    reduction="none") has one a token.
    """
    env: dict[str, Any] = {"on_bad": on_bad}
    if labels is not None:
        env.update(mask=labels, ignore=-100)
    shape = tuple(student_logits.shape)
    if reduction == "batchmean":
        env.update(
            {"reduction": "constant", "normaliser": float(max(shape[0], 1))}
            if labels is None
            else {"reduction": "token_mean"}
        )
    elif reduction == "sum":
        env["reduction"] = "sum"
    elif reduction == "mean":
        tokens = int(np.prod(shape[:-1])) if labels is None else _kept(labels, -100)
        env.update({"reduction": "constant", "normaliser": float(max(tokens, 1) * shape[-1])})
    elif reduction == "none":
        raise Unsupported(
            'opd: generalized_jsd_loss has no reduction "none"; opd.torch.divergence has one loss a token'
        )
    else:
        raise refuse("reduction", f"is {reduction!r}; it is batchmean, sum or mean")
    return _run(
        student_logits,
        _teacher.dense(teacher_logits, temperature),
        Estimator("dense", _by_beta(beta)),
        temperature,
        **env,
    )


def liger_fused_linear_jsd(
    student_input: Any,
    student_weight: Any,
    teacher_input: Any,
    teacher_weight: Any,
    shift_labels: Any = None,
    jsd_beta: float = 0.5,
    ignore_index: int = -100,
    temperature: float = 1.0,
    *,
    on_bad: OnBad = None,
) -> Any:
    """Liger's fused linear JSD: states (N,D) and heads (V,D) of both, the mean over the rows whose label is not
    ignore_index."""
    env: dict[str, Any] = {"on_bad": on_bad}
    if shift_labels is not None:
        env.update(mask=shift_labels, ignore=ignore_index)
    estimator = Estimator("dense", _by_beta(jsd_beta))
    if _is_torch(student_input):
        from . import torch as operators

        return operators.hidden_divergence(
            student_input,
            student_weight,
            teacher_input,
            teacher_weight,
            estimator=estimator,
            temperature=temperature,
            **env,
        )
    side = _student.hidden(student_input, student_weight, None, temperature)
    return evaluate(
        side, _teacher.hidden(teacher_input, teacher_weight, None, temperature), estimator, losses=True, **env
    )


def top_logits_kl_loss(
    student_logits: Any,
    teacher_logits: Any,
    temperature: float = 1.0,
    reverse: bool = False,
    top_k: int = 100,
    ghost_token: bool = True,
    mask: Any = None,
    reduction: str = "token_mean",
    *,
    on_bad: OnBad = None,
) -> Any:
    """NVIDIA Model-Optimizer's KL on the teacher's top_k ids. With the ghost token all other ids are one more, on
    either side; without it both sides are renormalised on the top_k. KL(teacher||student), or KL(student||teacher)
    with `reverse`."""
    vocabulary = teacher_logits.shape[-1]
    if not 0 < top_k <= vocabulary:
        raise refuse("top_k", f"is {top_k}; the teacher has {vocabulary} ids")
    ids, log_q, log_tail = _top(teacher_logits, top_k, temperature)
    of = "reverse_kl" if reverse else "forward_kl"
    env = {} if mask is None else {"mask": mask}
    teacher = _teacher.support(ids, log_q, log_tail=log_tail if ghost_token else None)
    return _run(
        student_logits,
        teacher,
        tail_bucket(of) if ghost_token else renormalised(of),
        temperature,
        reduction=reduction,
        on_bad=on_bad,
        **env,
    )


def _top(logits: Any, k: int, temperature: float) -> tuple[Any, Any, Any]:
    """The k best ids of each row, their log-probs, and the log of what the others have."""
    if _is_torch(logits):
        torch = sys.modules["torch"]
        with torch.no_grad():
            y = logits.double() if logits.dtype == torch.float64 else logits.float()
            y = y / temperature
            best, ids = torch.topk(y, k, dim=-1)
            rest = torch.logsumexp(y.scatter(-1, ids, -torch.inf), dim=-1)
            whole = torch.logaddexp(torch.logsumexp(best, dim=-1), rest)
            return ids, best - whole.unsqueeze(-1), rest - whole
    array = np.asarray(logits)
    y = array.astype(np.float64) / temperature
    ids = np.argpartition(-y, k - 1, axis=-1)[..., :k]
    best = np.take_along_axis(y, ids, axis=-1)
    others = y.copy()
    np.put_along_axis(others, ids, -np.inf, axis=-1)
    top = y.max(axis=-1)
    with np.errstate(divide="ignore"):
        rest = top + np.log(np.exp(others - top[..., None]).sum(axis=-1))
        whole = np.logaddexp(top + np.log(np.exp(best - top[..., None]).sum(axis=-1)), rest)
    kind = np.float64 if array.dtype == np.float64 else np.float32
    return ids.astype(np.int64), (best - whole[..., None]).astype(kind), (rest - whole).astype(kind)


def speculators_kl(
    logits: Any,
    targets: Any,
    loss_mask: Any = None,
    ttt_step: int = 0,
    ttt_step_loss_decay: float = 1.0,
    *,
    on_bad: OnBad = None,
) -> Any:
    """speculators' loss of an EAGLE-3 drafter at one step k of its training-time test, by forward KL:

        gamma^k / B sum_b 1/(n_b + 1e-5) sum_{t < T-k} m[b,t+k] KL(softmax(targets[b,t+k]) || softmax(logits[b,t]))

    logits     (B,T,V) the drafter's, of step k: float32, float64, float16 or bfloat16
    targets    (B,T,V) the verifier's; no gradient
    loss_mask  (B,T) m, of the targets' positions: True or a weight where a token counts; None: all do.
               n_b: its sum from position k on
    ttt_step, ttt_step_loss_decay   k, in [0, T); gamma, at least 0

    A drafter's loss is the sum over its steps. Without a tensor of torch the gradient is that of logits[:, :T-k]. The
    mean over B is theirs, too, where B is 1: sequences are packed.
    Source: vllm-project/speculators, kl_div_loss, exp_loss_decay and loss_function of models/metrics.py, align_for_step
    of models/eagle3/metrics.py. Smooth L1 of hidden states (HASS) is not here.
    """
    if len(logits.shape) != 3 or tuple(targets.shape) != tuple(logits.shape):
        raise refuse("targets", f"is {tuple(targets.shape)}, logits {tuple(logits.shape)}; both are (B,T,V)")
    batch, length = (int(n) for n in logits.shape[:2])
    k = integer("ttt_step", ttt_step, 0, max(length - 1, 0))
    if not ttt_step_loss_decay >= 0:
        raise refuse("ttt_step_loss_decay", f"is {ttt_step_loss_decay}; it is at least 0")
    if loss_mask is not None and tuple(loss_mask.shape) != (batch, length):
        raise refuse("loss_mask", f"is {tuple(loss_mask.shape)}, not {(batch, length)}")
    if _is_torch(logits):
        torch = sys.modules["torch"]
        shape = (batch, length)
        m = (
            torch.ones(shape, dtype=torch.float64, device=logits.device)
            if loss_mask is None
            else loss_mask.detach().double()
        )
    else:
        m = np.ones((batch, length)) if loss_mask is None else np.asarray(loss_mask, np.float64)
    m = m[:, k:]
    weights = m * (ttt_step_loss_decay**k / batch) / (m.sum(1) + 1e-5)[:, None]
    env = {"reduction": "sum", "weights": weights, "mask": weights != 0, "on_bad": on_bad}
    return _run(_cut(logits, 0, length - k), _teacher.dense(_cut(targets, k, length)), _FORWARD_KL, 1.0, **env)


_FORWARD_KL = Estimator("dense", "forward_kl")


def _cut(x: Any, first: int, last: int) -> Any:
    """x[:, first:last], whose rows follow one another."""
    if isinstance(x, bfloat16):
        return bfloat16(np.ascontiguousarray(x.bits[:, first:last]))
    return x[:, first:last].contiguous() if _is_torch(x) else np.ascontiguousarray(x[:, first:last])


def kl_penalty(logprob: Any, ref_logprob: Any, kl_penalty: str, *, on_bad: OnBad = None) -> Any:
    """verl's kl_penalty. "kl" ("k1"), "abs", "mse" ("k2"), "low_var_kl" ("k3") of the log-probs of one token each, by
    their formulas; a "+" behind the name gives its value the gradient of "mse", as theirs. "full", which verl leaves
    open, takes logits (..., V) of both and is KL(p||q) a token, by opd. opd.torch.token_logp makes log-probs of
    logits.
    """
    if kl_penalty == "full":
        if _is_torch(logprob):
            from . import torch as operators

            return operators.divergence(logprob, ref_logprob, "reverse_kl", reduction="none", on_bad=on_bad)
        return evaluate(logprob, ref_logprob, "reverse_kl", losses=True, reduction="sum", on_bad=on_bad)
    if on_bad is not None:
        raise refuse("on_bad", 'is of kl_penalty="full" alone')
    through = kl_penalty.endswith("+")
    value = _penalty(logprob, ref_logprob, kl_penalty[:-1] if through else kl_penalty)
    if not through or not _is_torch(logprob):
        return value
    square = 0.5 * (logprob - ref_logprob) ** 2
    return square - square.detach() + value.detach()


def _penalty(logprob: Any, ref_logprob: Any, kind: str) -> Any:
    difference = logprob - ref_logprob
    if kind in ("kl", "k1"):
        return difference
    if kind == "abs":
        return abs(difference)
    if kind in ("mse", "k2"):
        return 0.5 * difference**2
    if kind in ("low_var_kl", "k3"):
        log_ratio = (-difference).clip(-20, 20)
        exp = log_ratio.exp() if _is_torch(log_ratio) else np.exp(log_ratio)
        return (exp - log_ratio - 1).clip(-10, 10)
    raise refuse("kl_penalty", f"is {kind!r}; it is kl, abs, mse, low_var_kl or full")
