# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What the library refuses, with its own sentence."""

from __future__ import annotations

from typing import TYPE_CHECKING, Optional

from . import _c
from ._c import opd_status

if TYPE_CHECKING:
    from ._evaluate import Result


class Error(Exception):
    """Base of all that opd raises."""


class InvalidInput(Error, ValueError):
    """An argument that no call could accept. Nothing was written."""

    def __init__(self, text: str, argument: str = "", row: int = -1):
        super().__init__(text)
        self.argument = argument  #: "student.dz"; "" if none is at fault
        self.row = row  #: -1: none


class InfiniteValue(Error, ArithmeticError):
    """A row whose loss is infinite, under on_infinite="raise"."""

    def __init__(self, text: str, row: int = -1):
        super().__init__(text)
        self.row = row


class BadContents(Error, ValueError):
    """More bad rows than `on_bad` allows: NaN, no mass, ids out of range. Everything is written, with 0 in these rows:
    `result` has it."""

    result: Optional[Result] = None

    def __init__(self, text: str, row: int = -1):
        super().__init__(text)
        self.row = row  #: the first; -1: unknown


class Unsupported(Error, NotImplementedError):
    """A combination or a guarantee that this library does not have."""


class DeviceError(Error, RuntimeError):
    """A call of CUDA or cuBLAS failed."""


class InternalError(Error, RuntimeError):
    """A fault of the library's."""


def refuse(argument: str, text: str) -> InvalidInput:
    """What the package finds before it calls the library, said as the library says it."""
    return InvalidInput(f"opd: {argument}: {text}", argument)


def last_error(code: int) -> Exception:
    """The calling thread's last failure as an exception."""
    lib = _c.lib()
    text = lib.opd_last_error().decode()
    if code == opd_status.OPD_INVALID_INPUT:
        return InvalidInput(text, lib.opd_last_error_argument().decode(), lib.opd_last_error_row())
    if code == opd_status.OPD_INFINITE_VALUE:
        return InfiniteValue(text, lib.opd_last_error_row())
    if code == opd_status.OPD_BAD_CONTENTS:
        return BadContents(text, lib.opd_last_error_row())
    if code == opd_status.OPD_UNSUPPORTED:
        return Unsupported(text)
    if code == opd_status.OPD_OUT_OF_MEMORY:
        return MemoryError(text)
    if code == opd_status.OPD_DEVICE_ERROR:
        return DeviceError(text)
    return InternalError(text)


def check(code: int) -> None:
    if code != opd_status.OPD_OK:
        raise last_error(code)
