# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Losses in numpy float64, as books and other libraries write them, and gradients by differences."""

import numpy as np


def log_softmax(x):
    x = np.asarray(x, np.float64)
    x = x - x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def lse(x):
    x = np.asarray(x, np.float64)
    top = x.max(axis=-1)
    return top + np.log(np.exp(x - top[..., None]).sum(axis=-1))


def kl(log_p, log_q):
    """KL(p||q) a row."""
    p = np.exp(log_p)
    return np.where(p > 0, p * (log_p - log_q), 0).sum(axis=-1)


def _jsd(log_p, log_q, w, o):
    log_m = np.logaddexp(np.log(w) + log_q, np.log1p(-w) + log_p)
    return o * kl(log_q, log_m) + (1 - o) * kl(log_p, log_m)


def _alpha(log_p, log_q, a):
    return (np.exp(a * log_p + (1 - a) * log_q).sum(axis=-1) - 1) / (a * (a - 1))


# of log p and log q, with the parameters a, b
DIVERGENCES = {
    "reverse_kl": lambda p, q, a, b: kl(p, q),
    "forward_kl": lambda p, q, a, b: kl(q, p),
    "jsd": _jsd,
    "skew_forward_kl": lambda p, q, a, b: kl(q, np.logaddexp(np.log(a) + q, np.log1p(-a) + p)),
    "skew_reverse_kl": lambda p, q, a, b: kl(p, np.logaddexp(np.log1p(-a) + q, np.log(a) + p)),
    "total_variation": lambda p, q, a, b: 0.5 * np.abs(np.exp(p) - np.exp(q)).sum(axis=-1),
    "alpha_divergence": lambda p, q, a, b: _alpha(p, q, a),
    "chi_squared": lambda p, q, a, b: (np.exp(2 * p - q)).sum(axis=-1) - 1,
    "acceptance": lambda p, q, a, b: -np.log(np.minimum(np.exp(p), np.exp(q)).sum(axis=-1)),
}


def gradient(f, x, step=1e-5):
    """df/dx of a number by central differences, of fourth order."""
    x = np.array(x, np.float64)
    g = np.zeros_like(x)
    flat, out = x.reshape(-1), g.reshape(-1)
    for i in range(flat.size):
        was, at = flat[i], []
        for k in (-2, -1, 1, 2):
            flat[i] = was + k * step
            at.append(f(x))
        flat[i] = was
        out[i] = (at[0] - 8 * at[1] + 8 * at[2] - at[3]) / (12 * step)
    return g


def trl_generalized_jsd(student, teacher, labels=None, beta=0.5, temperature=1.0, reduction="batchmean"):
    """What TRL's GKDTrainer computes, with its mixture beta q + (1 - beta) p."""
    s, t = (
        log_softmax(np.asarray(student, np.float64) / temperature),
        log_softmax(np.asarray(teacher, np.float64) / temperature),
    )
    if beta == 0:
        terms = np.exp(t) * (t - s)
    elif beta == 1:
        terms = np.exp(s) * (s - t)
    else:
        m = np.logaddexp(np.log1p(-beta) + s, np.log(beta) + t)
        terms = beta * np.exp(t) * (t - m) + (1 - beta) * np.exp(s) * (s - m)
    mask = None if labels is None else labels != -100
    if mask is not None:
        terms = terms[mask]
    if reduction == "batchmean":
        return terms.sum() / (mask.sum() if mask is not None else terms.shape[0])
    return terms.sum() if reduction == "sum" else terms.mean()


def verl_kl_penalty(logprob, ref, kind):
    if kind in ("kl", "k1"):
        return logprob - ref
    if kind == "abs":
        return np.abs(logprob - ref)
    if kind in ("mse", "k2"):
        return 0.5 * np.square(logprob - ref)
    if kind in ("low_var_kl", "k3"):
        log_ratio = np.clip(ref - logprob, -20, 20)
        return np.clip(np.exp(log_ratio) - log_ratio - 1, -10, 10)
    p, q = log_softmax(logprob), log_softmax(ref)  # "full"
    return kl(p, q)


def ghost_token_kl(student, teacher, k, temperature=1.0, reverse=False, ghost=True):
    """KL on the teacher's k best ids and one token for all others, a row."""
    s, t = (
        log_softmax(np.asarray(student, np.float64) / temperature),
        log_softmax(np.asarray(teacher, np.float64) / temperature),
    )
    ids = np.argsort(-t, axis=-1, kind="stable")[..., :k]
    p, q = np.take_along_axis(np.exp(s), ids, -1), np.take_along_axis(np.exp(t), ids, -1)
    if ghost:
        p = np.concatenate([p, 1 - p.sum(-1, keepdims=True)], -1)
        q = np.concatenate([q, 1 - q.sum(-1, keepdims=True)], -1)
    else:
        p, q = p / p.sum(-1, keepdims=True), q / q.sum(-1, keepdims=True)
    return (p * np.log(p / q)).sum(-1) if reverse else (q * np.log(q / p)).sum(-1)


def speculators_kl(logits, targets, loss_mask, step, decay):
    """What speculators computes at a step of EAGLE-3's training-time test."""
    end = logits.shape[1] - step
    mask = (np.ones(logits.shape[:2]) if loss_mask is None else loss_mask.astype(np.float64))[:, step:]
    each = kl(log_softmax(targets[:, step:]), log_softmax(logits[:, :end])) * mask * decay**step
    return (each.sum(1) / (mask.sum(1) + 1e-5)).mean()
