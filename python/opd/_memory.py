# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Memory of large outputs, kept for the next call.

Fresh pages of a gradient over a vocabulary cost as much as the gradient. So what a call returns lies in memory that
goes back to a short list when the last array or tensor over it is gone.
"""

from __future__ import annotations

import collections
from typing import Any

import numpy as np

_LARGE = 1 << 20  # bytes; malloc itself keeps what is smaller
_kept: collections.deque[np.ndarray] = collections.deque()  # its methods are atomic: a finaliser may run anywhere
_most = 2


class _Lent:
    """Who refers to it uses the block."""

    __slots__ = ("block", "__array_interface__")

    def __init__(self, block: np.ndarray, size: int):
        self.block = block
        at = block.__array_interface__["data"][0]
        self.__array_interface__ = {"data": (at + -at % 64, False), "shape": (size,), "typestr": "|u1", "version": 3}

    def __del__(self) -> None:
        if _kept is None or not _most:  # the interpreter ends, or nothing is kept
            return
        _kept.append(self.block)
        while len(_kept) > _most:
            try:
                _kept.popleft()
            except IndexError:
                return


def empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """np.empty, in memory that may have been used before."""
    dtype = np.dtype(dtype)
    size = dtype.itemsize
    for n in shape:
        size *= n
    if size < _LARGE:
        return np.empty(shape, dtype)
    block = None
    for _ in range(len(_kept)):
        try:
            found = _kept.popleft()
        except IndexError:
            break
        if size + 64 <= found.size <= 2 * size + 64:
            block = found
            break
        _kept.append(found)
    if block is None:
        block = np.empty(size + 64, np.uint8)
    lent: np.ndarray = np.asarray(_Lent(block, size))
    made: np.ndarray = lent.view(dtype).reshape(shape)
    return made


def keep_memory(blocks: int = 2) -> None:
    """How many outputs' memory is kept when nobody uses it any more; 0: none, and what is kept now is given back."""
    global _most
    _most = max(0, blocks)
    while len(_kept) > _most:
        _kept.popleft()
