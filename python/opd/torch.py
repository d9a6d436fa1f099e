# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The estimators as operators of PyTorch, with autograd and fake tensors.

    loss = opd.torch.divergence(logits, teacher_logits, "jsd", mask=mask)      # reverse KL if nothing is named
    loss = opd.torch.hidden_divergence(states, head, teacher_states, teacher_head)
    loss = opd.torch.support(logits, ids, log_q, log_tail=log_tail)
    loss = opd.torch.sampled(logits, ids, log_mu, log_q, surrogate="ppo_clip")
    logp = opd.torch.token_logp(logits, tokens)

The gradient is made with the loss. Backward hands it on, and scales it in place where the factor from above is not 1,
so let the library reduce: `reduction`, `weights`, `normaliser`. A gradient in half is made by backward instead, with
the factor inside: a scaled loss keeps what half would lose. reduction="none" returns one loss a token; full=True an
Output with losses, log-sum-exps, diagnostics.
"""

from __future__ import annotations

import ctypes
import functools
import json
from dataclasses import fields
from typing import Any, NamedTuple, Optional, Sequence, Union

import torch
from torch import Tensor

from . import _c
from . import student as _student
from . import teacher as _teacher
from ._c import opd_teacher_kind
from ._evaluate import TOTALS, Engine, Frozen, cuda_engine_of, engine_of, evaluate as _evaluate
from .diagnostics import Diagnostics
from .errors import Unsupported, refuse
from .estimators import Estimator, Of, as_estimator
from .estimators import mc as _mc
from .estimators import sampled_forward_kl as _sampled_forward_kl
from .teacher import Kept, Rollout, Teacher

__all__ = ["Output", "divergence", "estimate", "hidden_divergence", "sampled", "support", "token_logp"]

_DIAGNOSTICS = ctypes.sizeof(_c.opd_diagnostics) // 8


class Output(NamedTuple):
    """`loss` alone has a gradient."""

    loss: Tensor  #: reduced; one a token under reduction="none"
    losses: Tensor  #: one a token, float32: w_r L_r
    lse: Tensor  #: one a token, float64; empty where there is none
    counts: Tensor  #: what Diagnostics are made of

    @property
    def diagnostics(self) -> Diagnostics:
        return Diagnostics.of(self.counts)


# --- from the caller's objects to what an operator takes: tensors beside a string, and back

_TEACHER_TENSORS = (
    "y",
    "x",
    "w",
    "bias",
    "ids",
    "log_q",
    "log_mu",
    "log_tail",
    "offsets",
    "weight",
    "exact",
    "log_prox",
    "log_ref",
    "advantage",
    "baseline",
    "mu_entropy",
    "log_tail_mu",
)
_TEACHER_REST = tuple(
    (f.name, f.default)
    for f in fields(Teacher)
    if f.name not in ("kind", "rollout", "kept") and f.name not in _TEACHER_TENSORS
)
_ESTIMATOR = tuple((f.name, f.default) for f in fields(Estimator))
_ENV_TENSORS = ("mask", "weights", "offsets", "versions", "given_lse")
_FROZEN = ("keep", "weight", "sequence_log_ratio", "advantage")
_ENV_REST = (
    "reduction",
    "ignore",
    "version",
    "on_infinite",
    "floor_at",
    "normaliser",
    "on_bad",
    "on_overflow",
    "loss_clamp",
    "check_contents",
    "determinism",
    "drop_and_renormalise",
    "measure_entropy",
)


def _tensor(name: str, x: Any) -> Tensor:
    if isinstance(x, Tensor):
        return x.detach()
    try:
        return torch.as_tensor(x)
    except (TypeError, ValueError, RuntimeError):
        raise refuse(name, f"is a {type(x).__name__}, no tensor") from None


def _text(x: Any) -> str:
    """JSON, by means that torch.compile can follow."""
    if x is None:
        return "null"
    if isinstance(x, bool):
        return "true" if x else "false"
    if isinstance(x, int):
        return str(int(x))
    if isinstance(x, float):
        if x != x or x in (float("inf"), float("-inf")):
            return "NaN" if x != x else "Infinity" if x > 0 else "-Infinity"
        return repr(float(x))
    if isinstance(x, str):
        if '"' in x or "\\" in x:
            raise refuse("name", f"{x!r} is none that the library has")
        return '"' + x + '"'
    if isinstance(x, (list, tuple)):
        return "[" + ", ".join([_text(each) for each in x]) + "]"
    if isinstance(x, dict):
        return "{" + ", ".join([_text(name) + ": " + _text(each) for name, each in x.items()]) + "}"
    raise TypeError(f"opd: a {type(x).__name__} is no parameter of an operator")


def _set(x: Any, members: Any) -> dict[str, Any]:
    """What differs from its default."""
    found: dict[str, Any] = {}
    for name, default in members:
        value = getattr(x, name)
        if value != default:
            found[name] = value
    return found


def _pack(
    teacher: Teacher, estimator: Union[Estimator, Of], student: dict[str, Any], env: dict[str, Any]
) -> tuple[list[Tensor], str]:
    names: list[str] = []
    tensors: list[Tensor] = []

    def put(name: str, x: Any) -> None:
        if x is not None:
            names.append(name)
            tensors.append(_tensor(name, x))

    for each in _TEACHER_TENSORS:
        put("teacher." + each, getattr(teacher, each))
    rest = _set(teacher, _TEACHER_REST)
    rest["kind"] = int(teacher.kind)
    if (rollout := teacher.rollout) is not None:
        put("rollout.log_norm", rollout.log_norm)
        rest["rollout"] = [rollout.temperature, rollout.top_k, rollout.top_p, rollout.min_p]
    if teacher.kept is not None:
        put("kept.ids", teacher.kept.ids)
        put("kept.offsets", teacher.kept.offsets)
        put("kept.log_q", teacher.kept.log_q)
        if teacher.kept.widest is not None:
            rest["widest"] = teacher.kept.widest
    for each in _ENV_TENSORS:
        put("env." + each, env.pop(each, None))
    if (frozen := env.pop("frozen", None)) is not None:
        for each in _FROZEN:
            put("frozen." + each, getattr(frozen, each))
    for each in env:
        if each not in _ENV_REST:
            raise TypeError(f"opd: there is no argument {each!r}")
    e = as_estimator(estimator)
    of_estimator = _set(e, _ESTIMATOR)
    return tensors, _text({"names": names, "teacher": rest, "student": student, "env": env, "estimator": of_estimator})


@functools.lru_cache(maxsize=256)
def _parsed(spec: str) -> dict[str, Any]:
    s: dict[str, Any] = json.loads(spec)
    e = dict(s["estimator"])
    members: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in e.items()}
    s["estimator"] = Estimator(**members)
    return s


def _unpack(tensors: Sequence[Tensor], spec: str) -> tuple[Teacher, Estimator, dict[str, Any], dict[str, Any]]:
    s = _parsed(spec)
    given = dict(zip(s["names"], tensors))
    rest = dict(s["teacher"])
    rest["kind"] = opd_teacher_kind(rest["kind"])
    if (rollout := rest.pop("rollout", None)) is not None:
        rest["rollout"] = Rollout(given["rollout.log_norm"], *rollout)
    if "kept.ids" in given:
        rest["kept"] = Kept(given["kept.ids"], given["kept.offsets"], given.get("kept.log_q"))
    env = dict(s["env"])
    for name, tensor in given.items():
        side, _, member = name.partition(".")
        if side == "teacher":
            rest[member] = tensor
        elif side == "env":
            env[member] = tensor
    if frozen := {each: given["frozen." + each] for each in _FROZEN if "frozen." + each in given}:
        env["frozen"] = Frozen(**frozen)
    return Teacher(**rest), s["estimator"], s["student"], env


def _rows_follow(x: Tensor) -> Tensor:
    """A matrix whose rows are evenly apart; a copy of one whose rows are not, logits[:, :-1] for one."""
    if x.layout != torch.strided:
        return x  # refused by name, where it is read
    if x.dim() >= 2 and x.stride(-1) == 1:
        for i in range(x.dim() - 2):
            if x.shape[i] > 1 and x.stride(i) != x.stride(i + 1) * x.shape[i + 1]:
                return x.contiguous()
        return x
    return x.contiguous()


def _loss_type(student: Tensor) -> torch.dtype:
    return torch.float64 if student.dtype == torch.float64 else torch.float32


def _counts(d: Diagnostics) -> Tensor:
    return torch.frombuffer(bytearray(d.as_struct()), dtype=torch.int64)


def _engine(x: Tensor) -> Engine:
    """Of the CPU's threads, or of the current stream of the tensor's device."""
    if x.device.type != "cuda":
        return engine_of(torch.get_num_threads())
    device = torch.cuda.current_device() if x.device.index is None else x.device.index
    return cuda_engine_of(device, torch.cuda.current_stream(device).cuda_stream)


def _beside(x: Tensor, others: Sequence[Tensor]) -> list[Tensor]:
    """The call's other tensors as it reads them: in rows, where the student is, ids of a device as int64."""
    found = [_rows_follow(t) if t.dim() > 1 else t for t in others]
    if x.device.type != "cuda":
        return found
    moved = [t if t.device == x.device else t.to(x.device) for t in found]
    return [t.long() if t.dtype == torch.int32 else t for t in moved]


def _totals(x: Tensor) -> Optional[Tensor]:
    """Where a call on a device leaves its loss and counts, for which nobody waits."""
    return torch.empty(TOTALS, dtype=torch.int64, device=x.device) if x.device.type == "cuda" else None


def _loss_and_counts(r: Any, totals: Optional[Tensor], kind: torch.dtype) -> tuple[Tensor, Tensor]:
    if totals is None:
        return torch.tensor(r.loss, dtype=kind), _counts(r.diagnostics)
    return totals[:1].view(torch.float64)[0].to(kind, copy=True), totals[1:]


def _lse_wanted(spec: str) -> bool:
    return bool(_parsed(spec)["student"]["lse"])


# --- the operators


@torch.library.custom_op("opd::loss", mutates_args=(), device_types=None)
def _loss(
    z: Tensor, others: Sequence[Tensor], spec: str, gradient: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Of logits: loss, losses, lse, counts, dz."""
    teacher, estimator, student, env = _unpack(_beside(z, others), spec)
    totals = _totals(z)
    r = _evaluate(
        _student.logits(_rows_follow(z), student["temperature"]),
        teacher,
        estimator,
        gradient=gradient,
        losses=True,
        lse=student["lse"],
        engine=_engine(z),
        totals=totals,
        **env,
    )
    loss, counts = _loss_and_counts(r, totals, _loss_type(z))
    return (
        loss,
        r.losses,
        r.lse if student["lse"] else torch.empty(0, dtype=torch.float64, device=z.device),
        counts,
        r.gradient if gradient else z.new_empty(0),
    )


@_loss.register_fake
def _(z: Tensor, others: Sequence[Tensor], spec: str, gradient: bool) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return (
        z.new_empty((), dtype=_loss_type(z)),
        z.new_empty(z.shape[:-1], dtype=torch.float32),
        z.new_empty(z.shape[:-1] if _lse_wanted(spec) else (0,), dtype=torch.float64),
        z.new_empty((_DIAGNOSTICS,), dtype=torch.int64),
        torch.empty(z.shape if gradient else (0,), dtype=z.dtype, device=z.device),
    )


@torch.library.custom_op("opd::hidden_loss", mutates_args=(), device_types=None)
def _hidden_loss(
    x: Tensor, w: Tensor, bias: Optional[Tensor], others: Sequence[Tensor], spec: str, dx: bool, dw: bool, db: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Of hidden states and a head: loss, losses, lse, counts, dx, dw, db."""
    teacher, estimator, student, env = _unpack(_beside(x, others), spec)
    totals = _totals(x)
    side = _student.hidden(
        _rows_follow(x),
        _rows_follow(w),
        bias,
        student["temperature"],
        dx=dx,
        dw=dw,
        db=db,
        soft_cap=student["soft_cap"],
        budget_bytes=student["budget_bytes"],
    )
    r = _evaluate(
        side,
        teacher,
        estimator,
        gradient=dx or dw or db,
        losses=True,
        lse=student["lse"],
        engine=_engine(x),
        totals=totals,
        **env,
    )
    loss, counts = _loss_and_counts(r, totals, torch.float32)
    absent = functools.partial(torch.empty, 0, dtype=torch.float32, device=x.device)
    return (
        loss,
        r.losses,
        r.lse if student["lse"] else torch.empty(0, dtype=torch.float64, device=x.device),
        counts,
        r.dx if dx else absent(),
        r.dw if dw else absent(),
        r.db if db else absent(),
    )


@_hidden_loss.register_fake
def _(
    x: Tensor, w: Tensor, bias: Optional[Tensor], others: Sequence[Tensor], spec: str, dx: bool, dw: bool, db: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    def new(shape: Any, wanted: bool = True, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape if wanted else (0,), dtype=dtype, device=x.device)

    return (
        new(()),
        new(x.shape[:-1]),
        new(x.shape[:-1], _lse_wanted(spec), torch.float64),
        new((_DIAGNOSTICS,), dtype=torch.int64),
        new(x.shape, dx),
        new(w.shape, dw),
        new(w.shape[:1], db),
    )


# --- backward


def _traced(x: Tensor) -> bool:
    return torch.compiler.is_compiling() or type(x) is not Tensor


def _no_second_derivative(factor: Tensor) -> None:
    if torch.is_grad_enabled() and not _traced(factor):
        raise Unsupported("opd: an operator of opd.torch has no second derivative; create_graph is not for it")


def _times(gradient: Tensor, factor: Tensor) -> Tensor:
    """gradient times the factor from above: in place where this is the graph's only use, untouched where the factor
    is 1."""
    if _traced(gradient):
        return (gradient * factor).to(gradient.dtype)
    if factor.device.type == "cpu" and bool((factor == 1).all()):  # of a device's factor nobody knows yet
        return gradient if not _graph_is_kept() else gradient.clone()
    if _graph_is_kept():
        return (gradient * factor).to(gradient.dtype)
    return gradient.mul_(factor)


def _graph_is_kept() -> bool:
    """Whether backward may come again (retain_graph), and a caller may write to what the first one returned."""
    of_torch = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return True if of_torch is None else bool(of_torch())


def _factor(g_loss: Optional[Tensor], g_losses: Optional[Tensor], per_token: bool) -> Optional[Tensor]:
    return g_losses if per_token else g_loss


def _per_token(spec: str) -> bool:
    return bool(_parsed(spec)["student"]["per_token"])


def _in_backward(z: Tensor) -> bool:
    return z.dtype == torch.float16


def _setup(ctx: Any, inputs: Any, output: Any) -> None:
    z, others, spec, gradient = inputs
    loss, losses, lse, counts, dz = output
    per_token = _per_token(spec)
    ctx.mark_non_differentiable(loss if per_token else losses, lse, counts, dz)
    ctx.set_materialize_grads(False)
    ctx.opd = (per_token, spec, len(others))
    if gradient:
        ctx.save_for_backward(dz)
    else:
        ctx.save_for_backward(z, *others)


def _backward(ctx: Any, g_loss: Optional[Tensor], g_losses: Optional[Tensor], *_: Any) -> Any:
    per_token, spec, count = ctx.opd
    nothing = [None] * count
    g = _factor(g_loss, g_losses, per_token)
    if g is None:
        return None, nothing, None, None
    _no_second_derivative(g)
    saved = ctx.saved_tensors
    if len(saved) == 1:
        return _times(saved[0], g.unsqueeze(-1) if per_token else g), nothing, None, None
    z, *others = saved
    others, spec = _weighted(z, others, spec, g)
    return _loss(z, others, spec, True)[4], nothing, None, None


def _weighted(z: Tensor, others: list[Tensor], spec: str, g: Tensor) -> tuple[list[Tensor], str]:
    """The same call with the factor in its rows' weights."""
    s = json.loads(spec)
    factor = g.to(torch.float64).expand(z.shape[:-1]).reshape(-1)
    if "env.weights" in s["names"]:
        at = s["names"].index("env.weights")
        others[at] = others[at].to(torch.float64).reshape(-1) * factor
    else:
        s["names"].append("env.weights")
        others.append(factor.contiguous())
    s["student"]["lse"] = False
    return others, _text(s)


_loss.register_autograd(_backward, setup_context=_setup)


def _hidden_setup(ctx: Any, inputs: Any, output: Any) -> None:
    x, w, bias, others, spec, *wanted = inputs
    loss, losses, lse, counts, *gradients = output
    per_token = _per_token(spec)
    ctx.mark_non_differentiable(loss if per_token else losses, lse, counts, *gradients)
    ctx.set_materialize_grads(False)
    ctx.opd = (per_token, wanted, len(others), (x.dtype, w.dtype, None if bias is None else bias.dtype))
    if per_token:
        ctx.save_for_backward(x, w, *((bias,) if bias is not None else ()), *others)
        ctx.opd_spec = spec
    else:
        ctx.save_for_backward(*(g for g, want in zip(gradients, wanted) if want))


def _hidden_backward(ctx: Any, g_loss: Optional[Tensor], g_losses: Optional[Tensor], *_: Any) -> Any:
    per_token, wanted, count, types = ctx.opd
    g = _factor(g_loss, g_losses, per_token)
    if g is None:
        return None, None, None, [None] * count, None, None, None, None
    _no_second_derivative(g)
    found: list[Optional[Tensor]]
    if per_token:  # what a token's factor does to dw is known before the sum over tokens alone
        x, w, *rest = ctx.saved_tensors
        bias = rest.pop(0) if types[2] is not None else None
        others, spec = _weighted(x, rest, ctx.opd_spec, g)
        needs = ctx.needs_input_grad[:3]
        made = _hidden_loss(x, w, bias, others, spec, bool(needs[0]), bool(needs[1]), bool(needs[2]))[4:]
        found = [m if need else None for m, need in zip(made, needs)]
    else:
        saved = iter(ctx.saved_tensors)
        found = [_times(next(saved), g) if want else None for want in wanted]
    dx, dw, db = (None if f is None else f.to(t) for f, t in zip(found, types))
    return dx, dw, db, [None] * count, None, None, None, None


_hidden_loss.register_autograd(_hidden_backward, setup_context=_hidden_setup)


# --- what callers call


def estimate(
    logits: Tensor,
    teacher: Union[Teacher, Tensor],
    estimator: Union[Estimator, Of] = "reverse_kl",
    *,
    temperature: float = 1.0,
    reduction: str = "token_mean",
    lse: bool = False,
    full: bool = False,
    **env: Any,
) -> Union[Tensor, Output]:
    """Any estimator of logits (..., V): what opd.evaluate does, as an operator. `env`: mask, ignore, weights,
    offsets, normaliser and the others of opd.evaluate but for outputs, beta and ratios. reduction="none": one loss a
    token."""
    t = teacher if isinstance(teacher, Teacher) else _teacher.dense(teacher)
    per_token = reduction == "none"
    student = {"temperature": temperature, "per_token": per_token, "lse": lse}
    others, spec = _pack(t, estimator, student, {**env, "reduction": "sum" if per_token else reduction})
    gradient = logits.requires_grad and torch.is_grad_enabled() and not _in_backward(logits)
    loss, losses, found, counts, _ = torch.ops.opd.loss(logits, others, spec, gradient)
    return _answer(loss, losses, found, counts, per_token, full)


def _answer(
    loss: Tensor, losses: Tensor, lse: Tensor, counts: Tensor, per_token: bool, full: bool
) -> Union[Tensor, Output]:
    chosen = losses if per_token else loss
    return Output(chosen, losses.detach() if per_token else losses, lse, counts) if full else chosen


def divergence(
    logits: Tensor,
    teacher_logits: Tensor,
    of: Of = "reverse_kl",
    *,
    temperature: float = 1.0,
    teacher_temperature: Optional[float] = None,
    lumped: bool = False,
    common: Optional[int] = None,
    selector: Any = "all",
    **options: Any,
) -> Union[Tensor, Output]:
    """A divergence of the rows of two logits (..., V). `temperature` is of both, unless the teacher has its own."""
    teacher = _teacher.dense(
        teacher_logits,
        temperature if teacher_temperature is None else teacher_temperature,
        lumped=lumped,
        common=common,
    )
    return estimate(logits, teacher, Estimator("dense", of, selector=selector), temperature=temperature, **options)


def support(
    logits: Tensor,
    ids: Tensor,
    log_q: Tensor,
    estimator: Union[Estimator, Of] = "reverse_kl",
    *,
    log_tail: Optional[Tensor] = None,
    log_mu: Optional[Tensor] = None,
    offsets: Optional[Tensor] = None,
    chosen_by: str = "teacher",
    sequences: Optional[Tensor] = None,
    **options: Any,
) -> Union[Tensor, Output]:
    """On the teacher's ids (..., k) with their log-probs; ragged with `offsets` (rows + 1). `sequences`: the
    reduction's offsets."""
    if offsets is None:
        teacher = _teacher.support(ids, log_q, log_tail=log_tail, log_mu=log_mu, chosen_by=chosen_by)
    else:
        teacher = _teacher.ragged_support(ids, log_q, offsets, log_tail=log_tail, log_mu=log_mu, chosen_by=chosen_by)
    return estimate(logits, teacher, estimator, offsets=sequences, **options)


def sampled(
    logits: Tensor,
    ids: Tensor,
    log_mu: Tensor,
    log_q: Tensor,
    of: Of = "reverse_kl",
    *,
    surrogate: Optional[str] = None,
    low: Optional[float] = None,
    high: Optional[float] = None,
    dual: Optional[float] = None,
    cap: Optional[float] = None,
    mask_over_cap: bool = False,
    self_normalised: bool = False,
    estr: Optional[tuple[float, float]] = None,
    baseline: Optional[str] = None,
    accept_bias: bool = False,
    selector: Any = "all",
    law: str = "stale",
    weight: Optional[Tensor] = None,
    exact: Optional[Tensor] = None,
    log_prox: Optional[Tensor] = None,
    log_ref: Optional[Tensor] = None,
    advantage: Optional[Tensor] = None,
    mu_entropy: Optional[Tensor] = None,
    missing_mu: bool = False,
    kept: Optional[Kept] = None,
    rollout: Optional[Rollout] = None,
    **options: Any,
) -> Union[Tensor, Output]:
    """From drawn tokens: ids, log_mu, log_q (..., m), or (...) for one a row; with `weight` those of a weighted
    design."""
    if ids.dim() == logits.dim() - 1:  # one token a row

        def column(x: Optional[Tensor]) -> Optional[Tensor]:
            return None if x is None else x.unsqueeze(-1)

        ids, log_mu, log_q = ids.unsqueeze(-1), log_mu.unsqueeze(-1), log_q.unsqueeze(-1)
        weight, exact, log_prox, log_ref, advantage = (column(x) for x in (weight, exact, log_prox, log_ref, advantage))
    common: dict[str, Any] = {
        "law": law,
        "log_prox": log_prox,
        "log_ref": log_ref,
        "advantage": advantage,
        "mu_entropy": mu_entropy,
        "missing_mu": missing_mu,
        "kept": kept,
        "rollout": rollout,
    }
    teacher = (
        _teacher.samples(ids, log_mu, log_q, **common)
        if weight is None
        else _teacher.weighted(ids, weight, log_mu, log_q, exact=exact, **common)
    )
    estimator = _mc(
        of,
        surrogate,
        low=low,
        high=high,
        dual=dual,
        cap=cap,
        mask_over_cap=mask_over_cap,
        self_normalised=self_normalised,
        estr=estr,
        baseline=baseline,
        accept_bias=accept_bias,
        selector=selector,
    )
    return estimate(logits, teacher, estimator, **options)


def token_logp(
    logits: Tensor,
    tokens: Tensor,
    *,
    temperature: float = 1.0,
    mask: Optional[Tensor] = None,
    on_bad: Union[str, float, None] = None,
) -> Tensor:
    """log p of one token a row, (...), with its gradient: logits are read twice and no log-softmax is kept. Masked
    rows have 0."""
    ids = tokens.unsqueeze(-1)
    zero = torch.zeros(ids.shape, dtype=_loss_type(logits), device=logits.device)
    teacher = _teacher.samples(ids, zero, zero, law="of_teacher")
    out = estimate(
        logits,
        teacher,
        _sampled_forward_kl(),
        temperature=temperature,
        reduction="none",
        mask=mask,
        on_bad=on_bad,
        lse=logits.dtype == torch.float64,
        full=True,
    )
    assert isinstance(out, Output)
    logp = -out.loss
    if logits.dtype != torch.float64:
        return logp
    with torch.no_grad():  # the library's losses are float
        exact = logits.gather(-1, ids).squeeze(-1) / temperature - out.lse
        exact = exact if mask is None else torch.where(mask.reshape(exact.shape).bool(), exact, torch.zeros_like(exact))
        rest = exact - logp.double()
    return logp.double() + rest


def hidden_divergence(
    states: Tensor,
    head: Tensor,
    teacher_states: Optional[Tensor] = None,
    teacher_head: Optional[Tensor] = None,
    of: Of = "reverse_kl",
    *,
    teacher: Optional[Teacher] = None,
    teacher_logits: Optional[Tensor] = None,
    bias: Optional[Tensor] = None,
    teacher_bias: Optional[Tensor] = None,
    temperature: float = 1.0,
    teacher_temperature: Optional[float] = None,
    soft_cap: Optional[float] = None,
    teacher_soft_cap: Optional[float] = None,
    budget_bytes: Optional[int] = None,
    reduction: str = "token_mean",
    selector: Any = "all",
    estimator: Optional[Estimator] = None,
    lse: bool = False,
    full: bool = False,
    **env: Any,
) -> Union[Tensor, Output]:
    """The same from hidden states (..., D) and a head (V, D): logits are never in memory as a whole. The teacher is
    hidden states and a head, logits, or any cache of opd.teacher with its `estimator`. Gradients: of states, head,
    bias. reduction="none" makes them in backward, by a second call."""
    of_teacher = temperature if teacher_temperature is None else teacher_temperature
    given = [teacher is not None, teacher_logits is not None, teacher_states is not None or teacher_head is not None]
    if sum(given) != 1:
        raise refuse("teacher", "is given once: teacher_states with teacher_head, teacher_logits, or a cache")
    if teacher_logits is not None:
        teacher = _teacher.dense(teacher_logits, of_teacher)
    elif teacher is None:
        teacher = _teacher.hidden(
            teacher_states, teacher_head, teacher_bias, of_teacher, soft_cap=teacher_soft_cap, budget_bytes=budget_bytes
        )
    if torch.is_autocast_enabled(states.device.type):  # as F.linear would have it
        kind = torch.get_autocast_dtype(states.device.type)
        states, head, bias = states.to(kind), head.to(kind), None if bias is None else bias.to(kind)
    per_token = reduction == "none"
    student = {
        "temperature": temperature,
        "per_token": per_token,
        "lse": lse,
        "soft_cap": soft_cap,
        "budget_bytes": budget_bytes,
    }
    others, spec = _pack(
        teacher,
        Estimator("dense", of, selector=selector) if estimator is None else estimator,
        student,
        {**env, "reduction": "sum" if per_token else reduction},
    )
    now = torch.is_grad_enabled() and not per_token
    wanted = [now and t is not None and t.requires_grad for t in (states, head, bias)]
    loss, losses, found, counts, *_ = torch.ops.opd.hidden_loss(states, head, bias, others, spec, *wanted)
    return _answer(loss, losses, found, counts, per_token, full)
