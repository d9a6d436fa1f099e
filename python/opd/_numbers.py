# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Integers on their way to C, where ctypes would cut them to their type without a word."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from ._tensors import Borrowed, bfloat16, rows
from .errors import refuse

INT32 = (1 << 31) - 1
UINT32 = (1 << 32) - 1
INT64 = (1 << 63) - 1
UINT64 = (1 << 64) - 1


def integer(argument: str, x: Any, least: int, most: int) -> int:
    """`x` as an int; InvalidInput names `argument` where it is none, or does not lie in [least, most]."""
    try:
        value = operator.index(x)
    except TypeError:
        raise refuse(argument, f"is {'None' if x is None else 'a ' + type(x).__name__}; it is an integer") from None
    if not least <= value <= most:
        raise refuse(argument, f"is {value}; it must lie in [{least}, {most}]")
    return value


def number(argument: str, x: Any) -> float:
    """`x` as a float; InvalidInput names `argument` where it is none."""
    try:
        return float(x)
    except (TypeError, ValueError):
        raise refuse(argument, f"is {'None' if x is None else 'a ' + type(x).__name__}; it is a number") from None


def array_of(argument: str, x: Any, dtype: Any = np.int64) -> Any:
    """A list's numbers as an array of `dtype`, without rounding any; whatever has a type already as it is."""
    if x is None:
        raise refuse(argument, "is None; it is an array or a list of numbers")
    if hasattr(x, "__dlpack__") or isinstance(x, bfloat16):
        return x
    try:
        found = np.asarray(x)
    except ValueError:
        raise refuse(argument, "has lists of different lengths") from None
    if found.size == 0:
        return np.zeros(found.shape, dtype)
    if found.dtype.kind not in ("iu" if np.dtype(dtype).kind in "iu" else "iuf"):
        raise refuse(argument, f"has entries of {found.dtype}, which {np.dtype(dtype)} does not hold")
    if found.dtype == np.uint64 and dtype == np.int64 and int(found.max()) > INT64:
        raise refuse(argument, f"has the entry {found.max()}, which int64 does not hold")
    return found.astype(dtype)


def integers(argument: str, x: Any) -> Borrowed:
    """Tokens: (n) int32 or int64, which the library tells apart. Lists become int64."""
    return line(argument, array_of(argument, x))


def line(argument: str, x: Any) -> Borrowed:
    """Of one dimension, whatever its type."""
    if len(x.shape) != 1:
        raise refuse(argument, f"is of shape {tuple(x.shape)}; it has one dimension")
    return rows(argument, x)


def float64s(argument: str, x: Any) -> np.ndarray:
    """(n) float64 of a list or an array of numbers."""
    found = np.asarray(array_of(argument, x, np.float64))
    if found.dtype.kind not in "iuf" or found.ndim != 1:
        raise refuse(argument, f"is of {found.dtype} and shape {found.shape}; it is a line of numbers")
    return np.ascontiguousarray(found, np.float64)


def int64s(argument: str, x: Any, scalar: bool = False) -> np.ndarray:
    """(n) int64 of a list or an array of any integer type; with `scalar` of one integer, too."""
    found = array_of(argument, x)
    found = np.from_dlpack(found) if not hasattr(found, "__array__") else np.asarray(found)
    if scalar and found.ndim == 0:
        found = found.reshape(1)
    if found.dtype.kind not in "iu" or found.ndim != 1:
        raise refuse(argument, f"is of {found.dtype} and shape {found.shape}; it is a line of integers")
    if found.dtype == np.uint64 and found.size and int(found.max()) > INT64:
        raise refuse(argument, f"has the entry {found.max()}, which int64 does not hold")
    return np.ascontiguousarray(found, np.int64)
