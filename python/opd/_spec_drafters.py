# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Drafters without a model (opd/spec/ngram_table.hpp, suffix_automaton.hpp, prompt_groups.hpp)."""

from __future__ import annotations

from ctypes import byref, c_int32, c_int64, c_uint64
from typing import Any, NamedTuple, Optional

import numpy as np

from . import _c_spec as c
from ._handles import Saved, default, sized
from ._numbers import INT32, INT64, UINT64, integer, integers
from ._tensors import rows
from .errors import refuse


class Drafted(NamedTuple):
    """What a table drafts."""

    tokens: np.ndarray  #: (n) int64
    matched: int  #: tokens that were found, after which these came


class Match(NamedTuple):
    """Where a text's end occurred before: `length` tokens, which in text `text` end before `position`; length 0:
    nowhere."""

    length: int
    text: int
    position: int


def _least(least: Any) -> int:
    return integer("least", least, 1, INT32)


def _memory(most_tokens: Optional[int]) -> Any:
    o = sized(c.opd_memory_options())
    default(o, "most_tokens", "options.most_tokens", most_tokens, INT64)
    return byref(o)


class NgramTable(Saved):
    """A drafter: after which words which token came most often of late, for keys of shortest to longest tokens, in
    fixed memory. One for all prompts (docs/spec/drafters.md)."""

    _kind, _argument = "ngram_table", "table"

    def __init__(
        self,
        memory: Optional[int] = None,
        shortest: Optional[int] = None,
        longest: Optional[int] = None,
    ):
        """memory: bytes, never more; 1 MiB. Tokens of a key: shortest 2, longest 5, which is at most 16."""
        o = sized(c.opd_ngram_options())
        default(o, "bytes", "options.bytes", memory, UINT64)
        default(o, "shortest", "options.shortest", shortest, INT32)
        default(o, "longest", "options.longest", longest, INT32)
        self._make(byref(o))

    def learn(self, text: Any, first: int = 0) -> None:
        """The tokens of a text (n) from number `first` on; first = n - 1: the last one, after those before."""
        tokens = integers("text", text)
        self._call("learn", tokens.pointer, integer("first", first, 0, INT64))

    def draft(self, before: Any, most: int, least: int = 1) -> Drafted:
        """At most `most` tokens that came after `before` (n), by keys of at least `least` tokens."""
        tokens = integers("before", before)
        out = np.empty(integer("most", most, 0, INT32), np.int64)
        count, matched = c_int64(), c_int32()
        room = rows("out", out, written=True)
        self._call("draft", tokens.pointer, _least(least), room.pointer, byref(count), byref(matched))
        return Drafted(out[: count.value].copy(), matched.value)

    def clear(self) -> None:
        """Nothing is learnt any more."""
        self._call("clear")

    def capacity(self) -> tuple[int, int]:
        """Keys that it has room for, bytes that it holds."""
        keys, size = c_int64(), c_uint64()
        self._call("capacity", byref(keys), byref(size))
        return keys.value, size.value


class SuffixAutomaton(Saved):
    """A drafter: texts that grow token by token, of a prompt group. It knows the longest end of a text that occurred
    before, in it or in another, and drafts what followed there. Amortised O(1) a token (docs/spec/drafters.md)."""

    _kind, _argument = "suffix_automaton", "automaton"

    def __init__(self, most_tokens: Optional[int] = None):
        """most_tokens: what is beyond is not learnt; 2^20, at most 2^29."""
        self._make(_memory(most_tokens))

    def begin(self) -> int:
        """A new text, empty; its number from 0."""
        text = c_int32()
        self._call("begin", byref(text))
        return text.value

    def append(self, text: int, tokens: Any) -> bool:
        """Tokens (n) at the text's end. False: there was no room for all, or the text was ended."""
        more, learnt = integers("tokens", tokens), c_int32()
        self._call("append", _text(text), more.pointer, byref(learnt))
        return bool(learnt.value)

    def end(self, text: int) -> None:
        """Nothing of this text is learnt any more."""
        self._call("end", _text(text))

    def longest(self, text: int) -> Match:
        """Where the text's end occurred before."""
        m = c.opd_match()
        self._call("longest", _text(text), byref(m))
        return Match(m.length, m.text, m.position)

    def draft(self, text: int, most: int, least: int = 1) -> np.ndarray:
        """At most `most` tokens that followed where at least `least` tokens of the text's end occurred: (n) int64."""
        count = c_int64()
        out: np.ndarray = np.empty(integer("most", most, 0, INT32), np.int64)
        room = rows("out", out, written=True)
        self._call("draft", _text(text), _least(least), room.pointer, byref(count))
        return np.array(out[: count.value])

    def forget(self, count: int) -> None:
        """The first `count` texts; the number of every other is less by that."""
        self._call("forget", integer("count", count, 0, INT32))

    def holds(self) -> dict[str, int]:
        """tokens, texts, bytes."""
        tokens, texts, size = c_int64(), c_int32(), c_uint64()
        self._call("holds", byref(tokens), byref(texts), byref(size))
        return {"tokens": tokens.value, "texts": texts.value, "bytes": size.value}


def _text(text: Any) -> int:
    return integer("text", text, -INT32, INT32)


class TextId(NamedTuple):
    """An answer."""

    prompt: int
    number: int  #: -1: there was no room, nothing of it is learnt or drafted


class PromptGroups(Saved):
    """A drafter: an automaton a prompt, of this epoch's answers and the last one's (docs/spec/drafters.md)."""

    _kind, _argument = "prompt_groups", "groups"

    def __init__(self, most_tokens: Optional[int] = None):
        """most_tokens: of all prompts; 2^22, at most 2^29. Where there is no room, the group that was begun longest
        ago and that nothing is written to is forgotten."""
        self._make(_memory(most_tokens))

    def begin(self, prompt: int, epoch: int, tokens: Any = None) -> TextId:
        """An answer to a prompt, in this epoch; tokens (n): of the prompt and of the answer so far; None: none."""
        so_far = None if tokens is None else integers("tokens", tokens)
        text = c.opd_text_id()
        at = None if so_far is None else so_far.pointer
        of, now = integer("prompt", prompt, 0, UINT64), integer("epoch", epoch, -INT64, INT64)
        self._call("begin", of, now, at, byref(text))
        return TextId(text.prompt, text.number)

    def append(self, text: TextId, tokens: Any) -> bool:
        """What the target wrote, (n). False: there was no room for the last, or there is no such text."""
        more, learnt = integers("tokens", tokens), c_int32()
        self._call("append", byref(_text_id(text)), more.pointer, byref(learnt))
        return bool(learnt.value)

    def end(self, text: TextId) -> None:
        """Nothing more will be written to it."""
        self._call("end", byref(_text_id(text)))

    def longest(self, text: TextId) -> Match:
        """Where the text's end occurred before."""
        m = c.opd_match()
        self._call("longest", byref(_text_id(text)), byref(m))
        return Match(m.length, m.text, m.position)

    def draft(self, text: TextId, most: int, least: int = 1) -> np.ndarray:
        """At most `most` tokens that followed where at least `least` tokens of the text's end occurred: (n) int64."""
        count = c_int64()
        out: np.ndarray = np.empty(integer("most", most, 0, INT32), np.int64)
        room = rows("out", out, written=True)
        self._call("draft", byref(_text_id(text)), _least(least), room.pointer, byref(count))
        return np.array(out[: count.value])

    def holds(self) -> dict[str, int]:
        """groups, tokens, bytes."""
        groups, tokens, size = c_int64(), c_int64(), c_uint64()
        self._call("holds", byref(groups), byref(tokens), byref(size))
        return {"groups": groups.value, "tokens": tokens.value, "bytes": size.value}


def _text_id(text: Any) -> c.opd_text_id:
    if not isinstance(text, TextId):
        raise refuse("text", f"is a {type(text).__name__}; it is what begin() returned")
    return c.opd_text_id(integer("text", text.prompt, 0, UINT64), integer("text", text.number, -1, INT64))
