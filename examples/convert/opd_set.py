# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Writes data sets of supports (docs/data.md) with numpy alone, for converters: what rollout_writer.hpp writes, but
that a set is written at once and not added to.

    with opd_set.Writer("set", vocab=V, k=K) as out:
        out.add(tokens, ids, log_q)  # (T), (N,K), (N,K): rows of the last N tokens; an id of -1 is no entry
"""
import json
import os

import numpy as np

TABLE = np.arange(256, dtype="<u4")
for _ in range(8):
    TABLE = (TABLE >> 1) ^ np.where(TABLE & 1, np.uint32(0x82F63B78), np.uint32(0))
BLOCK, TYPES = 65536, {"I64": "<i8", "I32": "<i4", "F32": "<f4", "F16": "<f2"}


def crc32c(data, before=0):
    state = before ^ 0xFFFFFFFF
    table = TABLE.tolist()
    for byte in bytes(data):
        state = table[(state ^ byte) & 255] ^ state >> 8
    return state ^ 0xFFFFFFFF


def block_sums(data):
    """Of each block of 64 KiB: all of them at once, a byte of each at a time."""
    n = len(data) // BLOCK
    state = np.full(n, 0xFFFFFFFF, "<u4")
    for byte in np.frombuffer(data, "u1", n * BLOCK).reshape(n, BLOCK).T if n else ():
        state = TABLE[(state ^ byte) & 255] ^ state >> 8
    rest = data[n * BLOCK:]
    return [f"{~x & 0xFFFFFFFF:08x}" for x in state.tolist()] + ([f"{crc32c(rest):08x}"] if rest else [])


class Writer:
    def __init__(self, folder, vocab, k, log_q="F16", shard_bytes=1 << 26, fingerprints={}, notes={}):
        os.makedirs(folder)  # a set is not added to
        self.folder, self.k, self.log_q, self.shard_bytes = folder, k, log_q, shard_bytes
        self.rows, self.shards, self.total = [], 0, np.zeros(3, int)
        columns = [("tokens", "I32", "token", 0), ("sample", "I64", "sequence", 0), ("reward", "F32", "sequence", 0),
                   ("support.ids", "I32", "row", k), ("support.log_q", log_q, "row", k)]
        self.types, prints = {c[0]: c[1] for c in columns}, ("sft_teacher", "scoring_teacher", "tokenizer", "reference_policy")
        self.sum = 0
        self.line("set.json", {
            "format": "opd.rollouts", "version": 1, "vocab": vocab, "facts": {"support.chosen_by": 0}, "notes": notes,
            "columns": [{"name": n, "dtype": t, "per": p, **({"width": w} if w else {})} for n, t, p, w in columns],
            "fingerprints": {p: fingerprints.get(p, "") for p in prints}})

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if kind is None:  # the last line says that the set is whole
            self.flush()
            self.line("index.jsonl", dict(zip(("sequences", "tokens", "rows"), self.total.tolist()), end=True, shards=self.shards))

    def line(self, name, content):
        text = json.dumps(content, separators=(",", ":"))[:-1]
        self.sum = crc32c(text.encode(), self.sum)
        with open(os.path.join(self.folder, name), "a") as f:
            f.write(f'{text},"crc32c":"{self.sum:08x}"}}\n')

    def add(self, tokens, ids, log_q):
        if not (ids.shape == log_q.shape == (len(ids), self.k) and len(ids) <= len(tokens)):
            raise ValueError(f"sequence {self.total[0] + len(self.rows)}: ids {ids.shape} and log_q {log_q.shape} are not both "
                             f"(N, {self.k}) with N at most its {len(tokens)} tokens")
        self.rows.append((np.asarray(tokens), ids, log_q))
        if sum(len(i) for _, i, _ in self.rows) * self.k * 6 >= self.shard_bytes:
            self.flush()

    def flush(self):
        if not self.rows:
            return
        tokens, ids, log_q = zip(*self.rows)
        n, offsets = len(self.rows), lambda parts: np.cumsum([0] + [len(p) for p in parts])
        first = int(self.total[0])
        of = {"token_offsets": offsets(tokens), "row_offsets": offsets(ids), "sample": np.arange(first, first + n),
              "tokens": np.concatenate(tokens), "reward": np.zeros(n), "support.ids": np.concatenate(ids),
              "support.log_q": np.concatenate(log_q)}
        header, data = {}, b""
        for name, x in of.items():  # the widest types first
            kind = self.types.get(name, "I64")
            part = np.ascontiguousarray(x, TYPES[kind]).tobytes()
            header[name] = {"dtype": kind, "shape": list(x.shape), "data_offsets": [len(data), len(data) + len(part)]}
            data += part
        header["__metadata__"] = {"format": "opd.rollouts.shard", "crc32c_block": str(BLOCK), "crc32c": "".join(block_sums(data))}
        text = json.dumps(header).encode()
        text += b" " * (-(8 + len(text)) % 64)
        front, name = len(text).to_bytes(8, "little") + text, f"shard-{self.shards:06}.safetensors"
        with open(os.path.join(self.folder, name), "wb") as f:
            f.write(front + data)
        counts = (n, len(of["tokens"]), len(of["support.ids"]))
        self.line("index.jsonl", {"file": name, "bytes": len(front) + len(data), "header": len(front),
                                  "header_crc32c": f"{crc32c(front):08x}", **dict(zip(("sequences", "tokens", "rows"), counts))})
        self.shards, self.total, self.rows = self.shards + 1, self.total + counts, []
