# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What a call reports beside its loss: counts and sums that merge, and the figures derived from them
(opd/diagnostics.hpp)."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass, fields
from typing import Any

from . import _c
from .errors import check

_BINS = _c.STALENESS_BINS


@dataclass
class Diagnostics:
    """Every figure is 0 where the estimator does not produce it."""

    rows: int = 0
    kept: int = 0
    bad_rows: int = 0
    first_bad_row: int = -1
    infinite_rows: int = 0
    first_infinite_row: int = -1
    clamped_rows: int = 0
    careful_rows: int = 0
    kept_loss: float = 0.0
    tokens: int = 0
    ratio_sum: float = 0.0
    ratio_square_sum: float = 0.0
    ratio_max: float = 0.0
    k1_sum: float = 0.0
    k2_sum: float = 0.0
    k3_sum: float = 0.0
    teacher_kl_sum: float = 0.0
    positive_advantage: int = 0
    negative_advantage: int = 0
    zero_advantage: int = 0
    clipped_positive: int = 0
    clipped_negative: int = 0
    truncated: int = 0
    masked: int = 0
    saturated: int = 0
    baseline_missing: int = 0
    outside_kept: int = 0
    dropped: int = 0
    certain_mu: int = 0
    missing_mu: int = 0
    variance_rows: int = 0
    loss_variance_sum: float = 0.0
    support_rows: int = 0
    student_mass_sum: float = 0.0
    teacher_mass_sum: float = 0.0
    student_mass_min: float = 1.0
    teacher_mass_min: float = 1.0
    tail_floored: int = 0
    student_entropy_rows: int = 0
    teacher_entropy_rows: int = 0
    overlap_rows: int = 0
    student_entropy_sum: float = 0.0
    teacher_entropy_sum: float = 0.0
    overlap_sum: float = 0.0
    selector_rows: int = 0
    selector_left_out: int = 0
    selector_weight_sum: float = 0.0
    staleness: tuple[int, ...] = (0,) * _BINS
    staleness_max: int = 0
    future_versions: int = 0

    @classmethod
    def of_struct(cls, c: _c.opd_diagnostics) -> Diagnostics:
        values: list[Any] = [tuple(c.staleness) if name == "staleness" else getattr(c, name) for name, *_ in c._fields_]
        return cls(*values)

    @classmethod
    def of(cls, numbers: Any) -> Diagnostics:
        """Of the (int64) tensor that the operators of opd.torch return."""
        raw = numbers.cpu().numpy().tobytes() if hasattr(numbers, "cpu") else bytes(numbers)
        return cls.of_struct(_c.opd_diagnostics.from_buffer_copy(raw))

    def as_struct(self) -> _c.opd_diagnostics:
        c = _c.opd_diagnostics()
        for f in fields(self):
            value = getattr(self, f.name)
            setattr(c, f.name, (ctypes.c_int64 * _BINS)(*value) if f.name == "staleness" else value)
        return c

    def merge(self, other: Diagnostics) -> Diagnostics:
        """What a call over both batches would have counted."""
        to, of = self.as_struct(), other.as_struct()
        check(_c.lib().opd_diagnostics_merge(ctypes.byref(to), ctypes.byref(of)))
        return Diagnostics.of_struct(to)

    def __str__(self) -> str:
        """One line: what was dropped, cut or mended."""
        c, lib = self.as_struct(), _c.lib()
        size = lib.opd_diagnostics_text(ctypes.byref(c), None, 0) + 1
        text = ctypes.create_string_buffer(size)
        lib.opd_diagnostics_text(ctypes.byref(c), text, size)
        return text.value.decode()

    # derived figures

    @property
    def ratio_mean(self) -> float:
        """Mean importance ratio, 1 in expectation under mu."""
        return _mean(self.ratio_sum, self.tokens)

    @property
    def effective_sample_size(self) -> float:
        return self.ratio_sum * self.ratio_sum / self.ratio_square_sum if self.ratio_square_sum > 0 else 0.0

    @property
    def suggested_scale(self) -> float:
        """Effective samples over samples: a factor for a learning rate. The library never applies it."""
        return self.effective_sample_size / self.tokens if self.tokens else 1.0

    @property
    def chi_squared(self) -> float:
        return self.ratio_square_sum / self.tokens - 1 if self.tokens else 0.0

    @property
    def k1(self) -> float:
        return _mean(self.k1_sum, self.tokens)

    @property
    def k2(self) -> float:
        return _mean(self.k2_sum, self.tokens)

    @property
    def k3(self) -> float:
        return _mean(self.k3_sum, self.tokens)

    @property
    def teacher_kl(self) -> float:
        return _mean(self.teacher_kl_sum, self.tokens)

    @property
    def loss_variance(self) -> float:
        return _mean(self.loss_variance_sum, self.variance_rows)

    @property
    def student_entropy(self) -> float:
        return _mean(self.student_entropy_sum, self.student_entropy_rows)

    @property
    def teacher_entropy(self) -> float:
        return _mean(self.teacher_entropy_sum, self.teacher_entropy_rows)

    @property
    def overlap(self) -> float:
        """Mean of the rows' sum of min(p, q)."""
        return _mean(self.overlap_sum, self.overlap_rows)

    @property
    def student_mass(self) -> float:
        return _mean(self.student_mass_sum, self.support_rows)

    @property
    def teacher_mass(self) -> float:
        return _mean(self.teacher_mass_sum, self.support_rows)

    @property
    def mean_selector_weight(self) -> float:
        return self.selector_weight_sum / self.selector_rows if self.selector_rows else 1.0

    @property
    def mean_kept_loss(self) -> float:
        return self.kept_loss / (self.kept - self.bad_rows) if self.kept > self.bad_rows else 0.0

    @property
    def mu_mismatch(self) -> bool:
        """The mean ratio lies more than 5 standard errors from 1: log mu is not the law that the tokens were drawn
        from."""
        if self.tokens < 2:
            return False
        n = float(self.tokens)
        mean = self.ratio_sum / n
        variance = (self.ratio_square_sum - n * mean * mean) / (n - 1)
        return abs(mean - 1) > 5 * math.sqrt(max(variance, 0.0) / n) + 1e-5


def _mean(total: float, count: int) -> float:
    return total / count if count else 0.0
