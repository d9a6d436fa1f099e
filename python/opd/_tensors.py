# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""From arrays of any package to DLTensor, without a copy: numpy's, torch's, and whatever has __dlpack__."""

from __future__ import annotations

import ctypes
import sys
from ctypes import POINTER, c_char_p, c_int64, c_void_p, cast, pointer, py_object
from typing import Any, Optional

import numpy as np

from ._c import DLDataType, DLDataTypeCode, DLDevice, DLDeviceType, DLTensor
from ._memory import empty
from .errors import refuse

_CODES = {
    "i": DLDataTypeCode.kDLInt,
    "u": DLDataTypeCode.kDLUInt,
    "f": DLDataTypeCode.kDLFloat,
    "b": DLDataTypeCode.kDLBool,
    "c": DLDataTypeCode.kDLComplex,
}
_FLOAT_NAMES: dict[tuple[int, int], str] = {
    (DLDataTypeCode.kDLFloat, 16): "float16",
    (DLDataTypeCode.kDLFloat, 32): "float32",
    (DLDataTypeCode.kDLFloat, 64): "float64",
    (DLDataTypeCode.kDLBfloat, 16): "bfloat16",
}


class bfloat16:
    """An array of uint16 whose numbers are bfloat16, for a numpy that has no such type. `bits` is the array."""

    __slots__ = ("bits",)

    def __init__(self, bits: np.ndarray):
        bits = np.asarray(bits)
        if bits.dtype != np.uint16:
            raise refuse("bfloat16", f"is of {bits.dtype}, not uint16: bfloat16.rounded(x) makes one of floats")
        self.bits = bits

    @classmethod
    def rounded(cls, x: Any) -> bfloat16:
        """Of floats, to the nearest, ties to even."""
        wide = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
        nearest = ((wide + (np.uint32(0x7FFF) + ((wide >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)).astype(
            np.uint16
        )
        quiet = ((wide >> np.uint32(16)) | np.uint32(0x40)).astype(np.uint16)
        return cls(np.where(wide & np.uint32(0x7FFFFFFF) > np.uint32(0x7F800000), quiet, nearest))

    def float(self) -> np.ndarray:
        wide: np.ndarray = self.bits.astype(np.uint32) << np.uint32(16)
        return wide.view(np.float32)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.bits.shape

    def __repr__(self) -> str:
        return f"opd.bfloat16({self.float()!r})"


class Borrowed:
    """A DLTensor and what keeps its memory alive."""

    __slots__ = ("dl", "shape", "dtype", "_keep")

    def __init__(
        self,
        data: int,
        shape: tuple[int, ...],
        strides: Optional[tuple[int, ...]],
        dtype: tuple[int, int],
        device: tuple[int, int],
        keep: Any,
        byte_offset: int = 0,
        lanes: int = 1,
    ):
        n = len(shape)
        numbers = (c_int64 * (2 * n))(*shape, *(strides if strides is not None else ()))
        first = cast(numbers, POINTER(c_int64))
        second = None
        if strides is not None:
            second = cast(ctypes.addressof(numbers) + 8 * n, POINTER(c_int64))
        self.dl = DLTensor(
            data, DLDevice(*device), n, DLDataType(dtype[0], dtype[1], lanes), first, second, byte_offset
        )
        self.shape = shape
        self.dtype = dtype
        self._keep = (keep, numbers)

    @property
    def pointer(self) -> Any:
        return pointer(self.dl)

    @property
    def float_name(self) -> Optional[str]:
        """The type's name, "float32" for one; None if these are no floats."""
        return _FLOAT_NAMES.get(self.dtype)


# DLPack's capsules: an unversioned one begins with the DLTensor itself.
_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype, _capsule_pointer.argtypes = c_void_p, [py_object, c_char_p]


def _is_torch(x: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


_torch_types: dict[Any, tuple[int, int]] = {}


def _of_torch(name: str, x: Any) -> Borrowed:
    torch = sys.modules["torch"]
    if not _torch_types:
        for each, code, bits in (
            ("float16", 2, 16),
            ("float32", 2, 32),
            ("float64", 2, 64),
            ("bfloat16", 4, 16),
            ("int8", 0, 8),
            ("int16", 0, 16),
            ("int32", 0, 32),
            ("int64", 0, 64),
            ("uint8", 1, 8),
            ("bool", 6, 8),
        ):
            _torch_types[getattr(torch, each)] = (code, bits)
    if x.dtype not in _torch_types:
        raise refuse(name, f"is of {x.dtype}, which the library does not have")
    if x.layout != torch.strided:
        raise refuse(name, f"has the layout {x.layout}; it must be strided")
    kind = x.device.type
    if kind == "cpu":
        device = (DLDeviceType.kDLCPU, 0)
    elif kind == "cuda":
        device = (DLDeviceType.kDLCUDA, x.device.index or 0)
    else:
        raise refuse(name, f"lies on {x.device}; the library reads memory of the CPU and of CUDA devices")
    if x.is_conj() or x.is_neg():
        x = x.resolve_conj().resolve_neg()
    return Borrowed(x.data_ptr(), tuple(x.shape), x.stride(), _torch_types[x.dtype], device, x)


def _of_numpy(name: str, x: np.ndarray, written: bool) -> Borrowed:
    kind, bytes_ = x.dtype.kind, x.dtype.itemsize
    if x.dtype.name == "bfloat16":  # of the package ml_dtypes
        code = int(DLDataTypeCode.kDLBfloat)
    elif kind in _CODES and x.dtype.isnative:
        code = int(_CODES[kind])
    else:
        raise refuse(name, f"is of {x.dtype}, which the library does not have")
    if written and not x.flags.writeable:
        raise refuse(name, "is written, and the array is read-only")
    if any(s % bytes_ for s in x.strides):
        raise refuse(name, "has strides that are no multiples of its element type")
    return Borrowed(
        x.__array_interface__["data"][0],
        x.shape,
        tuple(s // bytes_ for s in x.strides),
        (code, 8 * bytes_),
        (DLDeviceType.kDLCPU, 0),
        x,
    )


def borrow(name: str, x: Any, written: bool = False) -> Borrowed:
    """The array's memory as it lies; `name` is what an error calls it."""
    if isinstance(x, np.ndarray):
        return _of_numpy(name, x, written)
    if isinstance(x, bfloat16):
        b = _of_numpy(name, x.bits, written)
        b.dl.dtype.code = DLDataTypeCode.kDLBfloat
        b.dtype = (int(DLDataTypeCode.kDLBfloat), 16)
        return b
    if _is_torch(x):
        return _of_torch(name, x)
    if hasattr(x, "__dlpack__"):
        if written and isinstance(x, np.generic):
            raise refuse(name, "is written, and a number is no array")
        capsule = x.__dlpack__()
        dl = cast(_capsule_pointer(capsule, b"dltensor"), POINTER(DLTensor)).contents
        n = dl.ndim
        shape = tuple(dl.shape[i] for i in range(n))
        strides = tuple(dl.strides[i] for i in range(n)) if dl.strides else None
        return Borrowed(
            dl.data or 0,
            shape,
            strides,
            (dl.dtype.code, dl.dtype.bits),
            (dl.device.device_type, dl.device.device_id),
            (x, capsule),
            dl.byte_offset,
            dl.dtype.lanes,
        )
    raise TypeError(f"opd: {name}: is a {type(x).__name__}; it must be a numpy array or have __dlpack__")


def rows(name: str, x: Any, dtype: Any = None, written: bool = False) -> Borrowed:
    """One number a row: (N), or (B,T) whose rows follow one another. Lists and scalars become arrays of `dtype`."""
    if not written and not hasattr(x, "__dlpack__") and not isinstance(x, bfloat16):
        x = np.ascontiguousarray(x, dtype=dtype)
    if not written and (isinstance(x, np.ndarray) or _is_torch(x)):  # a few numbers: a slice may be copied
        x = np.ascontiguousarray(x) if isinstance(x, np.ndarray) else x.contiguous()
    b = borrow(name, x, written)
    if len(b.shape) == 1:
        return b
    size = 1
    for n in b.shape:
        size *= n
    expected = 1
    for i in range(len(b.shape) - 1, -1, -1):
        if b.shape[i] > 1 and b.dl.strides and b.dl.strides[i] != expected:
            raise refuse(name, f"of shape {b.shape} is not contiguous")
        expected *= b.shape[i]
    return Borrowed(
        b.dl.data or 0,
        (size,),
        (1,),
        b.dtype,
        (b.dl.device.device_type, b.dl.device.device_id),
        b,
        b.dl.byte_offset,
        b.dl.dtype.lanes,
    )


def matrix(name: str, x: Any, dtype: Any = None) -> Borrowed:
    """A matrix that is read. Nested lists become an array of `dtype`."""
    if not hasattr(x, "__dlpack__") and not isinstance(x, bfloat16) and isinstance(x, (list, tuple)):
        x = np.asarray(x, dtype=dtype)
    return borrow(name, x)


def empty_like(x: Any, float_name: Optional[str], shape: tuple[int, ...]) -> Any:
    """Memory for an output beside `x`: of torch for a tensor of torch, else of numpy."""
    if _is_torch(x):
        torch = sys.modules["torch"]
        kind = getattr(torch, float_name or "float32")
        if x.device.type != "cpu":
            return torch.empty(shape, dtype=kind, device=x.device)
        if float_name == "bfloat16":
            return torch.from_numpy(empty(shape, np.int16)).view(kind)
        return torch.from_numpy(empty(shape, float_name or "float32"))
    if float_name == "bfloat16":
        if isinstance(x, np.ndarray):
            return empty(shape, x.dtype)  # ml_dtypes
        return bfloat16(empty(shape, np.uint16))
    return empty(shape, float_name or "float32")
