# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""What the calls of spec.h and sched.h share: structs, handles and how they are freed, snapshots, callbacks."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_size_t, c_void_p, sizeof
from typing import Any, Callable, Optional, TypeVar

from . import _c_spec as c
from ._c import opd_status
from ._evaluate import not_zero
from ._numbers import integer, number
from ._tensors import Borrowed
from .errors import check, last_error, refuse

Struct = TypeVar("Struct", bound=ctypes.Structure)


def sized(struct: Struct) -> Struct:
    struct.struct_size = sizeof(struct)
    return struct


def put(keep: list[Any], b: Borrowed) -> Any:
    keep.append(b)
    return b.pointer


def default(struct: Any, member: str, argument: str, value: Any, most: int) -> None:
    """An integer whose 0 in the C interface is the default."""
    if value is not None:
        setattr(struct, member, int(not_zero(argument, integer(argument, value, 0, most))))


def default_number(struct: Any, member: str, argument: str, value: Any) -> None:
    """A number whose 0 in the C interface is the default, which a small one must not become in float32."""
    if value is not None:
        setattr(struct, member, not_zero(argument, number(argument, value)))
        if getattr(struct, member) == 0:
            raise refuse(argument, f"is {value}, which is 0 in float32")


Self = TypeVar("Self", bound="Handle")


class Handle:
    """What C made, and how it is freed: opd_KIND_create, opd_KIND_destroy."""

    _kind = ""
    _argument = ""  # what errors call it, as the library does
    _library = staticmethod(c.lib)
    _handle: Optional[c_void_p] = None

    def _make(self, *arguments: Any) -> None:
        handle = c_void_p()
        check(self._function("create")(*arguments, byref(handle)))
        self._handle = handle

    def _function(self, name: str) -> Any:
        return getattr(self._library(), f"opd_{self._kind}_{name}")

    @property
    def handle(self) -> c_void_p:
        if self._handle is None:
            raise refuse(self._argument, "was closed")
        return self._handle

    def _call(self, name: str, *arguments: Any) -> None:
        check(self._function(name)(self.handle, *arguments))

    def _snapshot(self, room_argument: str) -> bytes:
        """All of the state; asked for again where another thread has made it grow, of which errors name the room."""
        size = c_size_t()
        while True:
            self._call("snapshot", None, 0, byref(size))
            room = ctypes.create_string_buffer(max(1, size.value))
            code = self._function("snapshot")(self.handle, room, len(room), byref(size))
            if code == opd_status.OPD_OK:
                return room.raw[: size.value]
            why = last_error(code)
            if getattr(why, "argument", "") != room_argument:
                raise why

    def close(self) -> None:
        if self._handle is not None:
            self._function("destroy")(self._handle)
            self._handle = None

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()

    def __del__(self) -> None:
        if self._handle is not None and c is not None:  # None: the interpreter ends
            self.close()


class Saved(Handle):
    """State as bytes, for checkpoints."""

    def snapshot(self) -> bytes:
        """All of the state."""
        return self._snapshot("size")

    def restore(self, snapshot: bytes) -> None:
        """The state that `snapshot` returned, of one that was made with the same options. InvalidInput (`snapshot`)
        where it is damaged or of another kind: the state is then as it was."""
        if not isinstance(snapshot, (bytes, bytearray, memoryview)):
            raise refuse("snapshot", f"is a {type(snapshot).__name__}; it is what snapshot() returned")
        raw = bytes(snapshot)
        self._call("restore", raw, len(raw))


class Caught:
    """A callback's exception, which must not leave it: C lies between."""

    def __init__(self) -> None:
        self.why: Optional[BaseException] = None

    def guard(self, body: Callable[..., Any], otherwise: Any) -> Callable[..., Any]:
        def guarded(*arguments: Any) -> Any:
            try:
                return body(*arguments)
            except BaseException as why:
                self.why = why
                return otherwise

        return guarded

    def check(self, code: int) -> None:
        if self.why is not None:
            raise self.why
        check(code)
