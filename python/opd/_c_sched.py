# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The structs of include/opd/c/sched.h, member by member, as _c.py has the others."""

from __future__ import annotations

import ctypes
import functools
from ctypes import (
    POINTER,
    Structure,
    c_char_p,
    c_double,
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
from .errors import Unsupported

HEADERS = ("sched.h",)

ZERO = -1  # OPD_ZERO
BY_POLICY = 0
AUTOMATIC = -1
WIDEST = -2
FAILURES = 5


class opd_stage(IntEnum):
    OPD_ROLLOUT = 0
    OPD_TEACHER = 1
    OPD_LEARNER = 2


class opd_place(IntEnum):
    OPD_PLACE_NONE = 0
    OPD_WAITING = 1
    OPD_IN_ROLLOUT = 2
    OPD_QUEUED = 3
    OPD_SCORING = 4
    OPD_READY = 5
    OPD_TRAINING = 6


class opd_failure(IntEnum):
    OPD_FAILED_ROLLOUT = 0
    OPD_FAILED_TEACHER = 1
    OPD_FAILED_LEARNER = 2
    OPD_FAILED_STALE = 3
    OPD_FAILED_STOPPED = 4


class opd_ticket(Structure):
    _fields_ = [
        ("sample", c_uint64),
        ("slot", c_uint32),
        ("attempt", c_uint32),
        ("worker", c_int32),
        ("incarnation", c_uint32),
        ("lane", c_int32),
    ]


class opd_token_versions(Structure):
    _fields_ = [
        ("oldest", c_int64),
        ("newest", c_int64),
        ("mean", c_double),
        ("tokens", c_int64),
    ]


class opd_scheduler_settings(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("batch", c_int64),
        ("schedule", c_char_p),
        ("k", c_int64),
        ("tau", c_int64),
        ("outstanding", c_int64),
        ("policy", c_char_p),
        ("update", c_char_p),
        ("concurrency", c_int64),
        ("negative_control", c_int32),
        ("rollout_attempts", c_int32),
        ("teacher_attempts", c_int32),
        ("learner_attempts", c_int32),
        ("group", c_int64),
        ("sequences", c_int64),
        ("available", c_int64),
        ("first_version", c_int64),
        ("first_sample", c_uint64),
        ("teacher_batch", c_int64),
        ("teacher_flush", c_double),
        ("fruitless_steps", c_int32),
        ("most_workers", c_int32),
        ("most_slots", c_int32),
        ("measure", c_int32),
        ("rollout_deadline", c_double),
        ("abort_deadline", c_double),
        ("teacher_deadline", c_double),
        ("learner_deadline", c_double),
        ("sync_deadline", c_double),
        ("warmup", c_int64),
        ("lag_bound", c_int64),
        ("earlier_updates", c_int64),
        ("payload_attempts", c_int32),
        ("reserved", c_int32),
    ]


class opd_event_kind(IntEnum):
    OPD_EVENT_WORKER_UP = 0
    OPD_EVENT_WORKER_DOWN = 1
    OPD_EVENT_ROLLED_OUT = 2
    OPD_EVENT_ROLLOUT_FAILED = 3
    OPD_EVENT_ABORTED = 4
    OPD_EVENT_PARKED = 5
    OPD_EVENT_SCORED = 6
    OPD_EVENT_SCORE_FAILED = 7
    OPD_EVENT_LEARNED = 8
    OPD_EVENT_LEARN_FAILED = 9
    OPD_EVENT_SYNCED = 10
    OPD_EVENT_WEIGHTS_LOST = 11
    OPD_EVENT_TICK = 12
    OPD_EVENT_PAUSE = 13
    OPD_EVENT_RESUME = 14
    OPD_EVENT_PARK = 15
    OPD_EVENT_RESIZE = 16
    OPD_EVENT_CLOSE = 17
    OPD_EVENT_STOP = 18
    OPD_EVENT_PAYLOAD_LOST = 19


class opd_event(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("kind", c_int32),
        ("stage", c_int32),
        ("worker", c_int32),
        ("incarnation", c_uint32),
        ("slots", c_int32),
        ("has_elasticity", c_int32),
        ("ticket", opd_ticket),
        ("versions", opd_token_versions),
        ("job", c_uint64),
        ("count", c_int64),
        ("elasticity", c_double),
        ("tickets", POINTER(opd_ticket)),
        ("ticket_count", c_size_t),
    ]


class opd_action_kind(IntEnum):
    OPD_ACTION_START = 0
    OPD_ACTION_ABORT = 1
    OPD_ACTION_PARK = 2
    OPD_ACTION_SCORE = 3
    OPD_ACTION_TRAIN = 4
    OPD_ACTION_SYNC = 5
    OPD_ACTION_LOST = 6
    OPD_ACTION_STEP = 7
    OPD_ACTION_FAIL = 8
    OPD_ACTION_FINISHED = 9


class opd_consumed(Structure):
    _fields_ = [
        ("ticket", opd_ticket),
        ("start", c_int64),
        ("versions", opd_token_versions),
    ]


class opd_action(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("kind", c_int32),
        ("stage", c_int32),
        ("why", c_int32),
        ("where", c_int32),
        ("worker", c_int32),
        ("incarnation", c_uint32),
        ("ticket", opd_ticket),
        ("version", c_int64),
        ("job", c_uint64),
        ("from", c_uint64),
        ("tickets", POINTER(opd_ticket)),
        ("consumed", POINTER(opd_consumed)),
        ("count", c_size_t),
    ]


class opd_scheduler_counters(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("admitted", c_int64),
        ("consumed", c_int64),
        ("consumed_tokens", c_int64),
        ("failed", c_int64),
        ("failed_by", c_int64 * 5),
        ("retries", c_int64),
        ("preempted", c_int64),
        ("restarts", c_int64),
        ("parked", c_int64),
        ("late", c_int64),
        ("duplicates", c_int64),
        ("lost_workers", c_int64),
        ("lost_weights", c_int64),
        ("updates", c_int64),
        ("short_batches", c_int64),
        ("empty_batches", c_int64),
        ("lost_payloads", c_int64),
    ]


class opd_scheduler_state(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("version", c_int64),
        ("weights_job", c_uint64),
        ("needed_from", c_uint64),
        ("cursor", c_uint64),
        ("permits", c_int64),
        ("slack", c_int64),
        ("waiting", c_int64),
        ("rollout", c_int64),
        ("queued", c_int64),
        ("scoring", c_int64),
        ("ready", c_int64),
        ("training", c_int64),
        ("pending", c_uint64),
        ("gate_open", c_int32),
        ("finished", c_int32),
        ("held_back", c_int32),
        ("failed_stage", c_int32),
    ]


class opd_outstanding(Structure):
    _fields_ = [
        ("ticket", opd_ticket),
        ("start", c_int64),
        ("versions", opd_token_versions),
        ("where", c_int32),
        ("reserved", c_int32),
    ]


class opd_worker_change(IntEnum):
    OPD_WORKER_UP = 0
    OPD_WORKER_DOWN = 1
    OPD_WORK_BEGINS = 2
    OPD_WORK_ENDS = 3
    OPD_SPARE_BEGINS = 4
    OPD_SPARE_ENDS = 5


class opd_queue_settings(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("batch", c_int64),
        ("tau", c_int64),
        ("outstanding", c_int64),
        ("policy", c_char_p),
        ("concurrency", c_int64),
        ("group", c_int64),
        ("negative_control", c_int32),
        ("reserved", c_int32),
    ]


class opd_permit(Structure):
    _fields_ = [
        ("permit", c_uint64),
        ("version", c_int64),
        ("slot", c_uint32),
        ("reserved", c_uint32),
    ]


class opd_push(IntEnum):
    OPD_PUSHED = 0
    OPD_PUSH_STALE = 1
    OPD_PUSH_ABORTED = 2


class opd_queue_batch(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("batch", c_uint64),
        ("version", c_int64),
        ("count", c_size_t),
    ]


class opd_stale(Structure):
    _fields_ = [
        ("item", c_int64),
        ("version", c_int64),
        ("permit", opd_permit),
    ]


class opd_queue_state(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("version", c_int64),
        ("acquired", c_int64),
        ("consumed", c_int64),
        ("returned", c_int64),
        ("dropped", c_int64),
        ("discarded", c_int64),
        ("retried", c_int64),
        ("put_back", c_int64),
        ("batches", c_int64),
        ("outstanding", c_int64),
        ("ready", c_int64),
        ("training", c_int64),
        ("waiting_producers", c_int64),
        ("waiting_learners", c_int64),
        ("closed", c_int32),
        ("aborted", c_int32),
    ]


class opd_distribution(Structure):
    pass


opd_distribution._fields_ = [
    ("struct_size", c_size_t),
    ("law", c_char_p),
    ("a", c_double),
    ("b", c_double),
    ("c", c_double),
    ("at_least", c_double),
    ("at_most", c_double),
    ("x", POINTER(c_double)),
    ("u", POINTER(c_double)),
    ("weights", POINTER(c_double)),
    ("parts", POINTER(opd_distribution)),
    ("n", c_size_t),
]


class opd_job(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("fixed", c_double),
        ("per_item", c_double),
        ("per_token", c_double),
        ("noise", POINTER(opd_distribution)),
    ]


class opd_cluster(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("seed", c_uint64),
        ("rollout_workers", c_int32),
        ("lanes", c_int32),
        ("teachers", c_int32),
        ("teacher_slots", c_int32),
        ("response", POINTER(opd_distribution)),
        ("prompt", POINTER(opd_distribution)),
        ("redraw", c_int32),
        ("reserved", c_int32),
        ("park_after", c_int64),
        ("step", c_double),
        ("step_per_sequence", c_double),
        ("prefill", c_double),
        ("rebuild", c_double),
        ("speed_factor", c_double),
        ("worker_factor", POINTER(opd_distribution)),
        ("teacher", POINTER(opd_job)),
        ("learner", POINTER(opd_job)),
        ("sync", POINTER(opd_job)),
        ("events", POINTER(opd_event)),
        ("times", POINTER(c_double)),
        ("event_count", c_size_t),
        ("steps", c_int64),
        ("seconds", c_double),
        ("most_events", c_uint64),
    ]


class opd_ledger(Structure):
    _fields_ = [
        ("struct_size", c_size_t),
        ("steps", c_int64),
        ("sequences", c_int64),
        ("version", c_int64),
        ("permits", c_int64),
        ("seconds", c_double),
        ("generated_tokens", c_double),
        ("consumed_tokens", c_double),
        ("discarded_tokens", c_double),
        ("lost_tokens", c_double),
        ("outstanding_tokens", c_double),
        ("lag_mean", c_double * 4),
        ("lag_max", c_double * 4),
        ("busy_seconds", c_double * 3),
        ("idle", c_double * 3),
        ("overlap", c_double),
        ("throughput", c_double),
        ("held_seconds", c_double),
        ("counters", opd_scheduler_counters),
        ("events", c_uint64),
        ("finished", c_int32),
        ("stuck", c_int32),
        ("failed_stage", c_int32),
        ("reserved", c_int32),
    ]


FUNCTIONS = {
    "opd_scheduler_create": (c_int, [POINTER(opd_scheduler_settings), POINTER(c_void_p)]),
    "opd_scheduler_destroy": (None, [c_void_p]),
    "opd_scheduler_on": (
        c_int,
        [c_void_p, POINTER(opd_event), c_double, POINTER(opd_action), c_size_t, POINTER(c_size_t)],
    ),
    "opd_scheduler_on_many": (
        c_int,
        [
            c_void_p,
            POINTER(opd_event),
            c_size_t,
            c_double,
            POINTER(opd_action),
            c_size_t,
            POINTER(c_size_t),
            POINTER(c_size_t),
        ],
    ),
    "opd_scheduler_actions": (c_int, [c_void_p, POINTER(opd_action), c_size_t, POINTER(c_size_t)]),
    "opd_scheduler_next_deadline": (c_int, [c_void_p, POINTER(c_double)]),
    "opd_scheduler_totals": (c_int, [c_void_p, POINTER(opd_scheduler_counters)]),
    "opd_scheduler_look": (c_int, [c_void_p, POINTER(opd_scheduler_state)]),
    "opd_scheduler_outstanding": (c_int, [c_void_p, POINTER(opd_outstanding), c_size_t, POINTER(c_size_t)]),
    "opd_scheduler_worker": (c_int, [c_void_p, c_int32, c_int32, POINTER(c_uint32), POINTER(c_int32)]),
    "opd_scheduler_check": (c_int, [c_void_p]),
    "opd_scheduler_snapshot": (c_int, [c_void_p, c_void_p, c_size_t, POINTER(c_size_t)]),
    "opd_scheduler_restore": (c_int, [POINTER(opd_scheduler_settings), c_void_p, c_size_t, POINTER(c_void_p)]),
    "opd_scheduler_abandon_workers": (c_int, [c_void_p, c_int32, c_int32]),
    "opd_scheduler_observe": (c_int, [c_void_p, c_int32, c_int32, c_int32, c_double]),
    "opd_scheduler_metrics": (c_int, [c_void_p, c_double, c_char_p, c_size_t, POINTER(c_size_t)]),
    "opd_queue_create": (c_int, [POINTER(opd_queue_settings), POINTER(c_void_p)]),
    "opd_queue_destroy": (None, [c_void_p]),
    "opd_queue_acquire": (c_int, [c_void_p, c_size_t, c_double, POINTER(opd_permit), POINTER(c_int32)]),
    "opd_queue_push": (c_int, [c_void_p, POINTER(c_uint64), POINTER(c_int64), c_size_t, POINTER(c_int32)]),
    "opd_queue_release": (c_int, [c_void_p, c_uint64]),
    "opd_queue_restart": (c_int, [c_void_p, c_uint64, c_double, POINTER(c_int64)]),
    "opd_queue_pop": (
        c_int,
        [c_void_p, c_double, POINTER(c_int64), POINTER(c_int64), c_size_t, POINTER(opd_queue_batch)],
    ),
    "opd_queue_trained": (c_int, [c_void_p, c_uint64]),
    "opd_queue_synchronised": (c_int, [c_void_p, c_uint64]),
    "opd_queue_stale": (c_int, [c_void_p, POINTER(opd_stale), c_size_t, POINTER(c_size_t)]),
    "opd_queue_give_up": (c_int, [c_void_p, c_uint64]),
    "opd_queue_close": (c_int, [c_void_p]),
    "opd_queue_abort": (c_int, [c_void_p]),
    "opd_queue_aborted_items": (c_int, [c_void_p, POINTER(c_int64), c_size_t, POINTER(c_size_t)]),
    "opd_queue_look": (c_int, [c_void_p, POINTER(opd_queue_state)]),
    "opd_queue_snapshot": (c_int, [c_void_p, c_void_p, c_size_t, POINTER(c_size_t)]),
    "opd_queue_restore": (c_int, [POINTER(opd_queue_settings), c_void_p, c_size_t, POINTER(c_void_p)]),
    "opd_simulate": (
        c_int,
        [POINTER(opd_cluster), POINTER(opd_scheduler_settings), POINTER(opd_ledger), POINTER(c_void_p)],
    ),
    "opd_report_json": (c_char_p, [c_void_p]),
    "opd_report_destroy": (None, [c_void_p]),
}


@functools.lru_cache(maxsize=None)
def lib() -> ctypes.CDLL:
    """libopd with its schedulers."""
    loaded = _c.lib()
    _c.bind(
        loaded, FUNCTIONS, lambda name: Unsupported(f"opd: {_c.library_path()} has no schedulers: {name} is missing")
    )
    return loaded
