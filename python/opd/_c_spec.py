# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The structs of include/opd/c/spec.h, member by member, as _c.py has the others."""

from __future__ import annotations

import ctypes
import functools
from ctypes import (
    CFUNCTYPE,
    POINTER,
    Structure,
    c_char_p,
    c_double,
    c_float,
    c_int,
    c_int32,
    c_int64,
    c_size_t,
    c_uint32,
    c_uint64,
    c_void_p,
)
from enum import IntEnum

from . import _c
from ._c import DLTensor
from .errors import Unsupported

HEADERS = ("spec.h",)

_tensor = POINTER(DLTensor)


class opd_drafts(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("tokens", _tensor),
        ("parents", _tensor),
        ("offsets", _tensor),
    ]


class opd_verdict(Structure):
    _fields_ = [
        ("accepted", c_int64),
        ("node", c_int64),
        ("next", c_int32),
        ("reserved", c_int32),
    ]


accept_function = CFUNCTYPE(c_int, c_void_p, c_double)
draw_function = CFUNCTYPE(c_int64, c_void_p, POINTER(c_double), c_int64)


class opd_coins(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("context", c_void_p),
        ("accept", accept_function),
        ("draw", draw_function),
    ]


class opd_verify_call(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("drawn", c_char_p),
        ("block", c_int32),
        ("position", c_uint32),
        ("seed", c_uint64),
        ("sample", c_uint64),
        ("drafts", POINTER(opd_drafts)),
        ("p", _tensor),
        ("q", _tensor),
        ("samples", _tensor),
        ("positions", _tensor),
        ("coins", POINTER(opd_coins)),
    ]


class opd_due(Structure):
    _fields_ = [("sequence", c_int64), ("row", c_int64)]


follow_function = CFUNCTYPE(c_int, c_void_p, POINTER(opd_due), c_int64, POINTER(c_int32))


class opd_follow_call(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("drafts", POINTER(opd_drafts)),
        ("own", _tensor),
        ("draw", follow_function),
        ("context", c_void_p),
    ]


class opd_follow_rates_options(Structure):
    _fields_ = [("struct_size", c_size_t), ("memory", c_double), ("prior_weight", c_double)]


class opd_draft_law(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("greedy", c_int32),
        ("position", c_uint32),
        ("seed", c_uint64),
        ("sample", c_uint64),
        ("top_k", c_int64),
        ("temperature", c_float),
        ("top_p", c_float),
        ("min_p", c_float),
        ("reserved", c_int32),
    ]


class opd_draft_node(Structure):
    _fields_ = [("parent", c_int64), ("reach", c_double), ("token", c_int32), ("depth", c_int32)]


class opd_cost_point(Structure):
    _fields_ = [("rows", c_int64), ("seconds", c_double)]


class opd_draft_budget(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("gains", _tensor),
        ("offsets", _tensor),
        ("remaining", _tensor),
        ("cost", POINTER(opd_cost_point)),
        ("cost_count", c_int64),
        ("most_rows", c_int64),
        ("tail", c_double),
        ("draft_seconds", c_double),
        ("seconds_per_node", c_double),
        ("all_alike", c_int32),
        ("reserved", c_int32),
    ]


class opd_ngram_options(Structure):
    _fields_ = [("struct_size", c_size_t), ("bytes", c_uint64), ("shortest", c_int32), ("longest", c_int32)]


class opd_match(Structure):
    _fields_ = [("length", c_int32), ("text", c_int32), ("position", c_int32)]


class opd_memory_options(Structure):
    _fields_ = [("struct_size", c_size_t), ("most_tokens", c_int64)]


class opd_text_id(Structure):
    _fields_ = [("prompt", c_uint64), ("number", c_int64)]


class opd_strategy(Structure):
    _fields_ = [("depth", c_int32), ("top_k", c_int32), ("verify", c_int32)]


class opd_table_line(Structure):
    _fields_ = [("batch", c_int64), ("strategy", opd_strategy)]


class opd_reward(IntEnum):
    OPD_PER_SEQUENCE = 0
    OPD_TOKENS_PER_SECOND = 1


class opd_tuner_options(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("tuner", c_char_p),
        ("arms", POINTER(opd_strategy)),
        ("arm_count", c_int64),
        ("thresholds", POINTER(c_int64)),
        ("threshold_count", c_int64),
        ("epsilon", c_double),
        ("bonus", c_double),
        ("no_exploration", c_int32),
        ("window", c_int32),
        ("tries", c_int32),
        ("reward", c_int32),
        ("most_tokens", c_int64),
        ("lines", POINTER(opd_table_line)),
        ("line_count", c_int64),
        ("target", POINTER(opd_cost_point)),
        ("target_count", c_int64),
        ("drafter", POINTER(opd_cost_point)),
        ("drafter_count", c_int64),
        ("memory", c_double),
        ("doubt", c_double),
    ]


uniform_function = CFUNCTYPE(c_double, c_void_p)


class opd_uniforms(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("seed", c_uint64),
        ("step", c_uint64),
        ("asked", c_uint32),
        ("reserved", c_int32),
        ("draw", uniform_function),
        ("context", c_void_p),
    ]


class opd_step_observation(Structure):
    _fields_ = [("batch", c_int64), ("accepted", c_double), ("seconds", c_double)]


class opd_elastic_options(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("on_at", c_int64),
        ("off_at", c_int64),
        ("checks", c_int32),
        ("reserved", c_int32),
    ]


class opd_drafter_selector_options(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("drafters", c_int64),
        ("memory", c_double),
        ("tries", c_int32),
        ("again", c_int32),
    ]


_handle = c_void_p
_made = POINTER(c_void_p)

FUNCTIONS = {
    "opd_verify": (c_int, [POINTER(opd_verify_call), POINTER(opd_verdict)]),
    "opd_follow": (c_int, [POINTER(opd_follow_call), POINTER(opd_verdict)]),
    "opd_follow_rates_create": (c_int, [POINTER(opd_follow_rates_options), _made]),
    "opd_follow_rates_destroy": (None, [_handle]),
    "opd_follow_rates_by_rank": (c_int, [c_int32, c_int32, c_double, POINTER(c_int32)]),
    "opd_follow_rates_by_match": (c_int, [c_int32, c_int32, POINTER(c_int32)]),
    "opd_follow_rates_any_gap": (c_int, [c_int32, c_int32, POINTER(c_int32)]),
    "opd_follow_rates_of": (c_int, [_handle, c_int32, POINTER(c_double), POINTER(c_double)]),
    "opd_follow_rates_learn": (c_int, [_handle, c_int32, c_int]),
    "opd_draft_tree_create": (c_int, [_made]),
    "opd_draft_tree_destroy": (None, [_handle]),
    "opd_draft_tree_begin": (c_int, [_handle, _handle]),
    "opd_draft_tree_grow": (c_int, [_handle, c_int64, _tensor, POINTER(opd_draft_law), c_int64, POINTER(c_int64)]),
    "opd_draft_tree_graft": (c_int, [_handle, _tensor, c_int32, POINTER(c_int64)]),
    "opd_draft_tree_imagine": (c_int, [_handle, c_int32, c_int64]),
    "opd_draft_tree_size": (c_int, [_handle, POINTER(c_int64)]),
    "opd_draft_tree_node": (c_int, [_handle, c_int64, POINTER(opd_draft_node)]),
    "opd_draft_tree_best_of_depth": (c_int, [_handle, c_int32, POINTER(c_int64), c_int64, POINTER(c_int64)]),
    "opd_draft_tree_gains": (c_int, [_handle, POINTER(c_double), c_int64]),
    "opd_draft_tree_select": (c_int, [_handle, c_int64, _tensor, _tensor, _tensor, POINTER(c_int64)]),
    "opd_draft_tree_learn": (c_int, [_handle, _handle, POINTER(opd_verdict)]),
    "opd_step_seconds": (c_int, [POINTER(opd_cost_point), c_int64, c_int64, POINTER(c_double)]),
    "opd_draft_budget_share": (c_int, [POINTER(opd_draft_budget), _tensor, POINTER(c_double)]),
    "opd_ngram_table_create": (c_int, [POINTER(opd_ngram_options), _made]),
    "opd_ngram_table_destroy": (None, [_handle]),
    "opd_ngram_table_learn": (c_int, [_handle, _tensor, c_int64]),
    "opd_ngram_table_draft": (c_int, [_handle, _tensor, c_int32, _tensor, POINTER(c_int64), POINTER(c_int32)]),
    "opd_ngram_table_clear": (c_int, [_handle]),
    "opd_ngram_table_capacity": (c_int, [_handle, POINTER(c_int64), POINTER(c_uint64)]),
    "opd_suffix_automaton_create": (c_int, [POINTER(opd_memory_options), _made]),
    "opd_suffix_automaton_destroy": (None, [_handle]),
    "opd_suffix_automaton_begin": (c_int, [_handle, POINTER(c_int32)]),
    "opd_suffix_automaton_append": (c_int, [_handle, c_int32, _tensor, POINTER(c_int32)]),
    "opd_suffix_automaton_end": (c_int, [_handle, c_int32]),
    "opd_suffix_automaton_longest": (c_int, [_handle, c_int32, POINTER(opd_match)]),
    "opd_suffix_automaton_draft": (c_int, [_handle, c_int32, c_int32, _tensor, POINTER(c_int64)]),
    "opd_suffix_automaton_forget": (c_int, [_handle, c_int32]),
    "opd_suffix_automaton_holds": (c_int, [_handle, POINTER(c_int64), POINTER(c_int32), POINTER(c_uint64)]),
    "opd_prompt_groups_create": (c_int, [POINTER(opd_memory_options), _made]),
    "opd_prompt_groups_destroy": (None, [_handle]),
    "opd_prompt_groups_begin": (c_int, [_handle, c_uint64, c_int64, _tensor, POINTER(opd_text_id)]),
    "opd_prompt_groups_append": (c_int, [_handle, POINTER(opd_text_id), _tensor, POINTER(c_int32)]),
    "opd_prompt_groups_end": (c_int, [_handle, POINTER(opd_text_id)]),
    "opd_prompt_groups_longest": (c_int, [_handle, POINTER(opd_text_id), POINTER(opd_match)]),
    "opd_prompt_groups_draft": (c_int, [_handle, POINTER(opd_text_id), c_int32, _tensor, POINTER(c_int64)]),
    "opd_prompt_groups_holds": (c_int, [_handle, POINTER(c_int64), POINTER(c_int64), POINTER(c_uint64)]),
    "opd_tuner_create": (c_int, [POINTER(opd_tuner_options), _made]),
    "opd_tuner_destroy": (None, [_handle]),
    "opd_tuner_choose": (c_int, [_handle, c_int64, POINTER(opd_uniforms), POINTER(opd_strategy)]),
    "opd_tuner_heard": (
        c_int,
        [_handle, POINTER(opd_strategy), c_int64, c_double, c_double, POINTER(opd_uniforms)],
    ),
    "opd_tuner_predict": (
        c_int,
        [_handle, POINTER(opd_strategy), c_int64, POINTER(c_double), POINTER(c_double), POINTER(c_double)],
    ),
    "opd_step_merged": (c_int, [POINTER(opd_step_observation), c_int64, POINTER(opd_step_observation)]),
    "opd_elastic_switch_create": (c_int, [POINTER(opd_elastic_options), _made]),
    "opd_elastic_switch_destroy": (None, [_handle]),
    "opd_elastic_switch_check": (c_int, [_handle, c_int64, POINTER(c_int32)]),
    "opd_drafter_selector_create": (c_int, [POINTER(opd_drafter_selector_options), _made]),
    "opd_drafter_selector_destroy": (None, [_handle]),
    "opd_drafter_selector_set_exists": (c_int, [_handle, c_int64, c_int]),
    "opd_drafter_selector_exists": (c_int, [_handle, c_int64, POINTER(c_int32)]),
    "opd_drafter_selector_choose": (c_int, [_handle, c_int64, POINTER(c_int64)]),
    "opd_drafter_selector_heard": (c_int, [_handle, c_int64, c_int64, c_double, c_double]),
    "opd_drafter_selector_predicted": (c_int, [_handle, c_int64, c_int64, POINTER(c_double)]),
}
for _kind in (
    "tuner",
    "elastic_switch",
    "drafter_selector",
    "follow_rates",
    "ngram_table",
    "suffix_automaton",
    "prompt_groups",
):
    FUNCTIONS[f"opd_{_kind}_snapshot"] = (c_int, [_handle, c_void_p, c_size_t, POINTER(c_size_t)])
    FUNCTIONS[f"opd_{_kind}_restore"] = (c_int, [_handle, c_void_p, c_size_t])


@functools.lru_cache(maxsize=None)
def lib() -> ctypes.CDLL:
    """libopd with its speculation."""
    loaded = _c.lib()
    _c.bind(
        loaded, FUNCTIONS, lambda name: Unsupported(f"opd: {_c.library_path()} has no speculation: {name} is missing")
    )
    return loaded
