# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Reads a data set with numpy alone; prints what data.first_set expects."""
import json
import sys

import numpy as np

# [read]
folder, shards = sys.argv[1], []
types = {"U8": "u1", "I32": "<i4", "I64": "<i8", "F16": "<f2", "F32": "<f4", "F64": "<f8", "BF16": "<u2"}
for line in map(json.loads, open(folder + "/index.jsonl")):
    if "file" in line:  # the last line has none: it says that the set is whole
        raw = np.memmap(folder + "/" + line["file"], "u1", "r")
        data = 8 + int(raw[:8].view("<u8")[0])
        tensors = json.loads(bytes(raw[8:data]))
        tensors.pop("__metadata__")
        shards.append({name: raw[data + t["data_offsets"][0]:data + t["data_offsets"][1]].view(types[t["dtype"]])
                       .reshape(t["shape"]) for name, t in tensors.items()})
# [/read]


def ids(packed, n, bits):
    # [unpack]
    return np.unpackbits(packed, bitorder="little")[:n * bits].reshape(n, bits) @ (1 << np.arange(bits))
    # [/unpack]


for s in shards:
    rows, tokens = int(s["row_offsets"][-1]), int(s["token_offsets"][-1])
    log_q = s["support.log_q"]
    print(len(s["sample"]), rows, ids(s["tokens"], tokens, 17).sum(), ids(s["support.ids"], log_q.size, 17).sum(),
          float(log_q.astype("f8").sum()), float(s["support.log_tail"].astype("f8").sum()))
