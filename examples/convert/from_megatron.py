# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""from_megatron.py SET VOCAB TARS DATA INDICES: top-k log-probs that Megatron-LM's LogitsSaverHooks kept (TARS: a
folder of dp0__….tar, format 1 or 2) as a data set of opd, with the tokens that its GPTDataset drew: DATA.bin, DATA.idx,
and what document_index.npy, sample_index.npy, shuffle_index.npy begin with (in the data cache: …-GPTDataset-train-).
One data set, no blend; batches of one size; sequences that no context parallelism cut. Needs the zstd command; no
torch.
"""
import glob
import json
import os
import re
import subprocess
import sys
import tarfile

import numpy as np
import opd_set
import torch_file


def payload(path, offset, size):  # ids and log-probs (T, samples, k), samples of a micro-batch; 2^17 - 1 may be padding
    with open(path, "rb") as f:
        f.seek(offset)
        raw = subprocess.run(["zstd", "-dc"], input=f.read(size), stdout=subprocess.PIPE, check=True).stdout
    d, parts = torch_file.load(raw), []
    for x in zip(*([d[n]] if d.get("format_version", 1) > 1 else d[n] for n in ("values", "indices_low", "bit_17"))):
        v, low, high = (np.pad(y, ((0, 0), (0, 0), (0, k - y.shape[2]))) for y in x)
        unused = (v <= -1e3) | (np.arange(k) >= x[0].shape[2])
        parts.append((np.where(unused, -1, low + (high.astype("i4") << 16)), v))
    return *(np.concatenate(y, 1) for y in zip(*parts)), saver.get("mbs_save", parts[0][0].shape[1])


def tokens(g):  # T + 1 of them; row i of the log-probs is of token i + 1
    (first, begin), (last, end) = samples[shuffle[g]].tolist(), samples[shuffle[g] + 1].tolist()
    docs = [text[pointers[d]:pointers[d] + lengths[d] * kind.itemsize].view(kind) for d in documents[first:last + 1]]
    docs[-1] = docs[-1][:end + 1]
    return np.concatenate([docs[0][begin:], *docs[1:]])


if len(sys.argv) != 6:
    sys.exit(__doc__)
documents, samples, shuffle = (np.load(f"{sys.argv[5]}{x}_index.npy", mmap_mode="r") for x in ("document", "sample", "shuffle"))
text, idx, ranks, saver = np.memmap(sys.argv[4] + ".bin", "u1", "r"), np.memmap(sys.argv[4] + ".idx", "u1", "r"), {}, {}
kind, n = np.dtype({4: "<i4", 5: "<i8", 8: "<u2"}[int(idx[17])]), int(idx[18:26].view("<u8")[0])
lengths, pointers = idx[34:34 + 4 * n].view("<i4"), idx[34 + 4 * n:34 + 12 * n].view("<i8")
for path in sorted(glob.glob(sys.argv[3] + "/*.tar")):
    rank = re.fullmatch(r"(?:cp0_)?dp(\d+)__[\d-]+\.tar", os.path.basename(path)) or sys.exit(f"{path}: cut sequences")
    with tarfile.open(path) as tar:
        for m in tar:
            saver = json.load(tar.extractfile(m))["saver"] if m.name == "_meta.json" else saver
            if found := re.fullmatch(r"(\d+)(-\d+)?\.pt\.zst", m.name):
                ranks.setdefault((int(found[1]), bool(found[2])), {})[int(rank[1])] = path, m.offset_data, m.size
k, all_ranks = saver["k"], range(max(map(max, ranks.values())) + 1)
with opd_set.Writer(sys.argv[1], int(sys.argv[2]), k, "F16" if saver["save_dtype"] == "fp16" else "F32") as out:
    for (start, is_sample), files in sorted(ranks.items()):
        batch = [payload(*files[d]) for d in all_ranks]  # sample s of the batch is of rank s // micro-batch % ranks
        micro, n = batch[0][2], sum(b[0].shape[1] for b in batch)
        for s in range(n):
            ids, log_q = (b[:, s // micro // len(batch) * micro + s % micro] for b in batch[s // micro % len(batch)][:2])
            out.add(tokens(s + (start if is_sample else start * n)), ids, log_q)
