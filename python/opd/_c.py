# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""libopd and the structs of include/opd/c, member by member: tests/test_headers.py compares them with the headers."""

from __future__ import annotations

import ctypes
import functools
import os
import pathlib
from ctypes import (
    POINTER,
    Structure,
    c_char_p,
    c_double,
    c_int,
    c_int32,
    c_int64,
    c_size_t,
    c_uint8,
    c_uint16,
    c_uint64,
    c_void_p,
)
from enum import IntEnum
from typing import Any, Callable

ABI_VERSION = 1
STALENESS_BINS = 33

# The headers whose structs and enums are here.
HEADERS = ("dlpack.h", "base.h", "evaluate.h")


class DLDeviceType(IntEnum):
    kDLCPU = 1
    kDLCUDA = 2
    kDLCUDAHost = 3
    kDLCUDAManaged = 13


class DLDataTypeCode(IntEnum):
    kDLInt = 0
    kDLUInt = 1
    kDLFloat = 2
    kDLOpaqueHandle = 3
    kDLBfloat = 4
    kDLComplex = 5
    kDLBool = 6


class DLDevice(Structure):
    _fields_ = [("device_type", c_int), ("device_id", c_int32)]


class DLDataType(Structure):
    _fields_ = [("code", c_uint8), ("bits", c_uint8), ("lanes", c_uint16)]


class DLTensor(Structure):
    _fields_ = [
        ("data", c_void_p),
        ("device", DLDevice),
        ("ndim", c_int32),
        ("dtype", DLDataType),
        ("shape", POINTER(c_int64)),
        ("strides", POINTER(c_int64)),
        ("byte_offset", c_uint64),
    ]


_tensor = POINTER(DLTensor)


class opd_status(IntEnum):
    OPD_OK = 0
    OPD_INVALID_INPUT = 1
    OPD_INFINITE_VALUE = 2
    OPD_BAD_CONTENTS = 3
    OPD_UNSUPPORTED = 4
    OPD_OUT_OF_MEMORY = 5
    OPD_INTERNAL = 6
    OPD_DEVICE_ERROR = 7


class opd_engine_options(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("threads", c_int32),
        ("reserved", c_int32),
        ("arena", c_void_p),
        ("arena_bytes", c_uint64),
        ("device_type", c_int32),
        ("device_id", c_int32),
        ("stream", c_void_p),
        ("cublas", c_void_p),
    ]


class opd_student_kind(IntEnum):
    OPD_LOGITS = 0
    OPD_ON_SUPPORT = 1
    OPD_HIDDEN = 2


class opd_student(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("kind", c_int32),
        ("keep_padding", c_int32),
        ("z", _tensor),
        ("dz", _tensor),
        ("padding", c_int64),
        ("temperature", c_double),
        ("x", _tensor),
        ("w", _tensor),
        ("bias", _tensor),
        ("dx", _tensor),
        ("dw", _tensor),
        ("db", _tensor),
        ("soft_cap", c_double),
        ("beta_head", c_double),
        ("budget_bytes", c_uint64),
    ]


class opd_teacher_kind(IntEnum):
    OPD_DENSE = 0
    OPD_SUPPORT = 1
    OPD_RAGGED_SUPPORT = 2
    OPD_SAMPLES = 3
    OPD_WEIGHTED = 4
    OPD_TEACHER_HIDDEN = 5


class opd_law(IntEnum):
    OPD_STALE = 0
    OPD_ON_POLICY = 1
    OPD_OF_TEACHER = 2


class opd_chosen_by(IntEnum):
    OPD_BY_TEACHER = 0
    OPD_BY_STALE_STUDENT = 1
    OPD_BY_STUDENT = 2


class opd_teacher(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("kind", c_int32),
        ("law", c_int32),
        ("y", _tensor),
        ("temperature", c_double),
        ("x", _tensor),
        ("w", _tensor),
        ("bias", _tensor),
        ("soft_cap", c_double),
        ("budget_bytes", c_uint64),
        ("lumped", c_int32),
        ("chosen_by", c_int32),
        ("common", c_int64),
        ("ids", _tensor),
        ("log_q", _tensor),
        ("log_mu", _tensor),
        ("log_tail", _tensor),
        ("offsets", _tensor),
        ("weight", _tensor),
        ("exact", _tensor),
        ("log_prox", _tensor),
        ("log_ref", _tensor),
        ("advantage", _tensor),
        ("baseline", _tensor),
        ("mu_entropy", _tensor),
        ("log_tail_mu", _tensor),
        ("missing_mu", c_int32),
        ("raw_logprobs", c_int32),
        ("drawn_temperature", c_double),
        ("drawn_top_k", c_int64),
        ("drawn_top_p", c_double),
        ("drawn_min_p", c_double),
        ("log_norm", _tensor),
        ("kept_ids", _tensor),
        ("kept_offsets", _tensor),
        ("log_kept_q", _tensor),
        ("widest", c_int64),
    ]


class opd_estimator(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("estimator", c_char_p),
        ("of", c_char_p),
        ("a", c_double),
        ("b", c_double),
        ("surrogate", c_char_p),
        ("low", c_double),
        ("high", c_double),
        ("dual", c_double),
        ("cap", c_double),
        ("mask_over_cap", c_int32),
        ("self_normalised", c_int32),
        ("estr_tau", c_double),
        ("estr_epsilon", c_double),
        ("baseline", c_char_p),
        ("accept_bias", c_int32),
        ("reserved", c_int32),
        ("selector", c_char_p),
        ("selector_a", c_double),
        ("selector_b", c_double),
    ]


class opd_reduction(IntEnum):
    OPD_TOKEN_MEAN = 0
    OPD_SUM = 1
    OPD_SEQUENCE_MEAN = 2
    OPD_SEQUENCE_SUM_MEAN = 3
    OPD_CONSTANT = 4


class opd_infinite(IntEnum):
    OPD_FLOOR = 0
    OPD_SKIP = 1
    OPD_RAISE = 2


class opd_overflow(IntEnum):
    OPD_SKIP_ROW = 0
    OPD_SATURATE = 1


class opd_determinism(IntEnum):
    OPD_RUN_TO_RUN = 0
    OPD_NOT_GUARANTEED = 1
    OPD_TILING_INVARIANT = 2


class opd_env(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("reduction", c_int32),
        ("has_ignore", c_int32),
        ("ignore", c_int64),
        ("mask", _tensor),
        ("weights", _tensor),
        ("offsets", _tensor),
        ("versions", _tensor),
        ("version", c_int32),
        ("on_infinite", c_int32),
        ("floor_at", c_double),
        ("normaliser", c_double),
        ("beta", c_double),
        ("beta_loss", c_double),
        ("losses", _tensor),
        ("lse", _tensor),
        ("given_lse", _tensor),
        ("frozen_keep", _tensor),
        ("frozen_weight", _tensor),
        ("frozen_sequence_log_ratio", _tensor),
        ("frozen_advantage", _tensor),
        ("raise_bad", c_int32),
        ("on_overflow", c_int32),
        ("bad_share", c_double),
        ("loss_clamp", c_double),
        ("check_contents", c_int32),
        ("determinism", c_int32),
        ("drop_and_renormalise", c_int32),
        ("measure_entropy", c_int32),
        ("ratios", _tensor),
        ("totals", _tensor),
    ]


class opd_diagnostics(Structure):
    _fields_ = [
        ("rows", c_int64),
        ("kept", c_int64),
        ("bad_rows", c_int64),
        ("first_bad_row", c_int64),
        ("infinite_rows", c_int64),
        ("first_infinite_row", c_int64),
        ("clamped_rows", c_int64),
        ("careful_rows", c_int64),
        ("kept_loss", c_double),
        ("tokens", c_int64),
        ("ratio_sum", c_double),
        ("ratio_square_sum", c_double),
        ("ratio_max", c_double),
        ("k1_sum", c_double),
        ("k2_sum", c_double),
        ("k3_sum", c_double),
        ("teacher_kl_sum", c_double),
        ("positive_advantage", c_int64),
        ("negative_advantage", c_int64),
        ("zero_advantage", c_int64),
        ("clipped_positive", c_int64),
        ("clipped_negative", c_int64),
        ("truncated", c_int64),
        ("masked", c_int64),
        ("saturated", c_int64),
        ("baseline_missing", c_int64),
        ("outside_kept", c_int64),
        ("dropped", c_int64),
        ("certain_mu", c_int64),
        ("missing_mu", c_int64),
        ("variance_rows", c_int64),
        ("loss_variance_sum", c_double),
        ("support_rows", c_int64),
        ("student_mass_sum", c_double),
        ("teacher_mass_sum", c_double),
        ("student_mass_min", c_double),
        ("teacher_mass_min", c_double),
        ("tail_floored", c_int64),
        ("student_entropy_rows", c_int64),
        ("teacher_entropy_rows", c_int64),
        ("overlap_rows", c_int64),
        ("student_entropy_sum", c_double),
        ("teacher_entropy_sum", c_double),
        ("overlap_sum", c_double),
        ("selector_rows", c_int64),
        ("selector_left_out", c_int64),
        ("selector_weight_sum", c_double),
        ("staleness", c_int64 * STALENESS_BINS),
        ("staleness_max", c_int64),
        ("future_versions", c_int64),
    ]


class opd_result(Structure):
    _fields_ = [("struct_size", c_size_t), ("loss", c_double), ("diagnostics", opd_diagnostics)]


class opd_call(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("engine", c_void_p),
        ("student", POINTER(opd_student)),
        ("teacher", POINTER(opd_teacher)),
        ("estimator", POINTER(opd_estimator)),
        ("env", POINTER(opd_env)),
    ]


# Result and arguments of every function that the package calls.
FUNCTIONS = {
    "opd_abi_version": (c_int, []),
    "opd_version": (c_char_p, []),
    "opd_last_error": (c_char_p, []),
    "opd_last_error_argument": (c_char_p, []),
    "opd_last_error_row": (c_int64, []),
    "opd_last_error_code": (c_int, []),
    "opd_name": (c_char_p, [c_char_p, c_int]),
    "opd_says": (c_char_p, [c_char_p, c_int]),
    "opd_config": (c_char_p, []),
    "opd_engine_create": (c_int, [POINTER(opd_engine_options), POINTER(c_void_p)]),
    "opd_engine_destroy": (None, [c_void_p]),
    "opd_evaluate": (c_int, [POINTER(opd_call), POINTER(opd_result)]),
    "opd_workspace_bytes": (c_int, [POINTER(opd_call), POINTER(c_uint64)]),
    "opd_diagnostics_merge": (c_int, [POINTER(opd_diagnostics), POINTER(opd_diagnostics)]),
    "opd_diagnostics_text": (c_size_t, [POINTER(opd_diagnostics), c_char_p, c_size_t]),
}


def library_path() -> str:
    """What OPD_LIBRARY names, or the libopd that lies in the package."""
    if named := os.environ.get("OPD_LIBRARY"):
        return named
    here = pathlib.Path(__file__).parent
    for name in ("libopd.so", "libopd.dylib", "opd.dll"):
        if (here / name).exists():
            return str(here / name)
    raise ImportError(
        f"opd: there is no libopd in {here}; install the package by pip, or set OPD_LIBRARY to a libopd.so"
    )


def bind(loaded: ctypes.CDLL, functions: dict[str, Any], missing: Callable[[str], Exception]) -> None:
    """Gives each function its types; raises missing(name) for one that the library does not have."""
    for name, (result, arguments) in functions.items():
        try:
            function = getattr(loaded, name)
        except AttributeError:
            raise missing(name) from None
        function.restype, function.argtypes = result, arguments


@functools.lru_cache(maxsize=None)
def lib() -> ctypes.CDLL:
    """libopd, loaded by the first call."""
    path = library_path()
    try:
        loaded = ctypes.CDLL(path)
    except OSError as why:
        raise ImportError(f"opd: {path} cannot be loaded: {why}") from None
    bind(
        loaded,
        FUNCTIONS,
        lambda name: ImportError(f"opd: {path} has no {name}: it is no libopd, or another version's"),
    )
    if (found := loaded.opd_abi_version()) != ABI_VERSION:
        raise ImportError(f"opd: {path} has version {found} of the interface, this package needs {ABI_VERSION}")
    return loaded
