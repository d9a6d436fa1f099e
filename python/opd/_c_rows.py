# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The structs of include/opd/c/rows.h, member by member, as _c.py has the others."""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, Structure, c_char_p, c_double, c_int, c_int32, c_int64, c_size_t, c_uint64, c_void_p

from . import _c
from ._c import DLTensor, opd_result, opd_teacher
from .errors import Unsupported

HEADERS = ("rows.h",)

RATIO_BINS = 225


class opd_draw_call(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("engine", c_void_p),
        ("z", POINTER(DLTensor)),
        ("design", c_char_p),
        ("m", c_int64),
        ("h", c_int64),
        ("first", c_int64),
        ("seed", c_uint64),
        ("sample", POINTER(DLTensor)),
        ("position", POINTER(DLTensor)),
        ("uniforms", POINTER(DLTensor)),
        ("mask", POINTER(DLTensor)),
        ("has_ignore", c_int32),
        ("reserved", c_int32),
        ("ignore", c_int64),
        ("temperature", c_double),
        ("top_k", c_int64),
        ("top_p", c_double),
        ("min_p", c_double),
        ("ids", POINTER(DLTensor)),
        ("log_mu", POINTER(DLTensor)),
        ("weight", POINTER(DLTensor)),
        ("exact", POINTER(DLTensor)),
        ("lse", POINTER(DLTensor)),
        ("log_kept", POINTER(DLTensor)),
        ("cut_logit", POINTER(DLTensor)),
        ("cut_id", POINTER(DLTensor)),
        ("kept", POINTER(DLTensor)),
        ("log_tail", POINTER(DLTensor)),
        ("kappa", POINTER(DLTensor)),
    ]


class opd_kept_ids_call(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("engine", c_void_p),
        ("z", POINTER(DLTensor)),
        ("mask", POINTER(DLTensor)),
        ("has_ignore", c_int32),
        ("reserved", c_int32),
        ("ignore", c_int64),
        ("cut_logit", POINTER(DLTensor)),
        ("cut_id", POINTER(DLTensor)),
        ("kept", POINTER(DLTensor)),
        ("temperature", c_double),
        ("top_k", c_int64),
        ("top_p", c_double),
        ("min_p", c_double),
        ("offsets", POINTER(DLTensor)),
        ("ids", POINTER(DLTensor)),
    ]


class opd_score_call(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("engine", c_void_p),
        ("z", POINTER(DLTensor)),
        ("temperature", c_double),
        ("mask", POINTER(DLTensor)),
        ("has_ignore", c_int32),
        ("reserved", c_int32),
        ("ignore", c_int64),
        ("ids", POINTER(DLTensor)),
        ("offsets", POINTER(DLTensor)),
        ("kept_ids", POINTER(DLTensor)),
        ("kept_offsets", POINTER(DLTensor)),
        ("log_p", POINTER(DLTensor)),
        ("log_tail", POINTER(DLTensor)),
        ("top_ids", POINTER(DLTensor)),
        ("top_log_p", POINTER(DLTensor)),
        ("top_log_tail", POINTER(DLTensor)),
        ("lse", POINTER(DLTensor)),
        ("entropy", POINTER(DLTensor)),
    ]


class opd_penalise_call(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("z", POINTER(DLTensor)),
        ("mask", POINTER(DLTensor)),
        ("has_ignore", c_int32),
        ("reserved", c_int32),
        ("ignore", c_int64),
        ("prompt_ids", POINTER(DLTensor)),
        ("prompt_offsets", POINTER(DLTensor)),
        ("answer_ids", POINTER(DLTensor)),
        ("answer_offsets", POINTER(DLTensor)),
        ("repetition", c_double),
        ("presence", c_double),
        ("frequency", c_double),
        ("out", POINTER(DLTensor)),
        ("dz", POINTER(DLTensor)),
    ]


class opd_tokens(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("cache", POINTER(opd_teacher)),
        ("log_p", POINTER(DLTensor)),
        ("mask", POINTER(DLTensor)),
        ("has_ignore", c_int32),
        ("reserved", c_int32),
        ("ignore", c_int64),
        ("of", c_char_p),
        ("a", c_double),
        ("b", c_double),
    ]


class opd_m2po(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("form", c_char_p),
        ("tau", c_double),
        ("level", c_double),
        ("second_moment", c_double),
        ("low", c_double),
        ("high", c_double),
    ]


class opd_whitening(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("epsilon", c_double),
        ("count", c_double),
        ("mean", c_double),
        ("squares", c_double),
    ]


class opd_prefix_staleness(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("rows", c_double),
        ("sum", c_double),
        ("least", c_double),
        ("most", c_double),
        ("ratios", c_double),
        ("squares", c_double),
        ("log_ratio", c_double),
        ("effective_share", c_double),
    ]


class opd_overlap(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("rows", c_int64),
        ("bad_rows", c_int64),
        ("first_bad_row", c_int64),
        ("sum", c_double),
        ("mean", c_double),
    ]


FUNCTIONS = {
    "opd_draw": (c_int, [POINTER(opd_draw_call), POINTER(opd_result)]),
    "opd_draw_workspace_bytes": (c_int, [POINTER(opd_draw_call), POINTER(c_uint64)]),
    "opd_kept_ids": (c_int, [POINTER(opd_kept_ids_call), POINTER(c_int64), POINTER(opd_result)]),
    "opd_kept_ids_workspace_bytes": (c_int, [POINTER(opd_kept_ids_call), POINTER(c_uint64)]),
    "opd_score": (c_int, [POINTER(opd_score_call), POINTER(opd_result)]),
    "opd_score_workspace_bytes": (c_int, [POINTER(opd_score_call), POINTER(c_uint64)]),
    "opd_token_logp": (
        c_int,
        [
            c_void_p,
            POINTER(DLTensor),
            c_double,
            POINTER(DLTensor),
            POINTER(DLTensor),
            POINTER(DLTensor),
            POINTER(DLTensor),
        ],
    ),
    "opd_top_k": (c_int, [c_void_p, POINTER(DLTensor), c_double, POINTER(DLTensor), POINTER(DLTensor)]),
    "opd_log_sum_exp": (c_int, [c_void_p, POINTER(DLTensor), c_double, POINTER(DLTensor)]),
    "opd_penalise": (c_int, [POINTER(opd_penalise_call)]),
    "opd_advantages": (c_int, [POINTER(opd_tokens), POINTER(DLTensor)]),
    "opd_m2po_squares": (c_int, [POINTER(opd_m2po), POINTER(opd_tokens), POINTER(DLTensor), POINTER(c_int64)]),
    "opd_m2po_freeze": (c_int, [POINTER(opd_m2po), POINTER(DLTensor)]),
    "opd_m2po_keep": (c_int, [POINTER(opd_m2po), POINTER(opd_tokens), POINTER(DLTensor), POINTER(c_int64)]),
    "opd_gspo_add": (c_int, [POINTER(opd_tokens), POINTER(DLTensor), POINTER(DLTensor)]),
    "opd_gspo_fill": (c_int, [POINTER(DLTensor), POINTER(DLTensor), POINTER(DLTensor), POINTER(DLTensor)]),
    "opd_credit": (c_int, [POINTER(DLTensor), POINTER(DLTensor), c_double, POINTER(DLTensor)]),
    "opd_group_relative": (c_int, [POINTER(DLTensor), c_int64, c_double]),
    "opd_whitening_add": (c_int, [POINTER(opd_whitening), POINTER(DLTensor), POINTER(DLTensor)]),
    "opd_whitening_merge": (c_int, [POINTER(opd_whitening), POINTER(opd_whitening)]),
    "opd_whitening_apply": (c_int, [POINTER(opd_whitening), POINTER(DLTensor), POINTER(DLTensor)]),
    "opd_prefix_staleness_add": (
        c_int,
        [POINTER(opd_prefix_staleness), POINTER(DLTensor), POINTER(DLTensor), POINTER(DLTensor), POINTER(DLTensor)],
    ),
    "opd_prefix_staleness_merge": (c_int, [POINTER(opd_prefix_staleness), POINTER(opd_prefix_staleness)]),
    "opd_draft_weights": (c_int, [c_char_p, c_double, POINTER(DLTensor), POINTER(DLTensor), POINTER(DLTensor)]),
    "opd_ratio_quantile": (c_int, [POINTER(DLTensor), c_double, POINTER(c_double)]),
    "opd_id_overlap": (
        c_int,
        [
            POINTER(DLTensor),
            POINTER(DLTensor),
            POINTER(DLTensor),
            POINTER(DLTensor),
            POINTER(DLTensor),
            POINTER(DLTensor),
            POINTER(opd_overlap),
        ],
    ),
    "opd_drop_repeats": (c_int, [POINTER(DLTensor), POINTER(DLTensor), POINTER(c_int64)]),
}


@functools.lru_cache(maxsize=None)
def lib() -> ctypes.CDLL:
    """libopd with its rows."""
    loaded = _c.lib()
    _c.bind(loaded, FUNCTIONS, lambda name: Unsupported(f"opd: {_c.library_path()} has no {name}"))
    return loaded
