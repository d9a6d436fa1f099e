# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""megatron_files.py FOLDER VERSION: cached logits as Megatron-LM's savers lay them out, of two data-parallel ranks,
without torch; an indexed data set and the indices of a GPTDataset; and truth.bin: for each sample its T + 1 tokens and
T·K ids as int32, and T·K log-probs as float32.
"""
import io
import json
import os
import pickle
import struct
import subprocess
import sys
import tarfile
import types
import zipfile

import numpy as np

folder, version = sys.argv[1], int(sys.argv[2])
RANKS, MICRO, STEPS, BATCHES, T, K = 2, 2, 3, 2, 5, 3  # micro-batches of MICRO, STEPS of them a rank and batch
BATCH = RANKS * MICRO * STEPS
rng = np.random.default_rng(version)


class Torch:  # what torch.save makes of an array: a call of torch._utils, with a storage kept apart
    def __init__(self, x):
        self.x = x

    def __reduce__(self):
        strides = tuple(s // self.x.itemsize for s in self.x.strides)
        rest = (0, self.x.shape, strides, False, {})
        if self.x.dtype == np.uint16:
            return fake.rebuild_3, (Storage(self.x, "UntypedStorage"), *rest, fake.uint16)
        return fake.rebuild_2, (Storage(self.x, {"f2": "HalfStorage", "b1": "BoolStorage"}[self.x.dtype.str[1:]]), *rest)


class Storage:
    def __init__(self, x, kind):
        self.x, self.kind = x, kind


class Fake:  # globals of torch's names
    def __init__(self):
        for module, name in (("torch._utils", "_rebuild_tensor_v2"), ("torch._utils", "_rebuild_tensor_v3"), ("torch", "uint16"),
                             ("torch", "HalfStorage"), ("torch", "BoolStorage"), ("torch.storage", "UntypedStorage")):
            at = sys.modules.setdefault(module, types.ModuleType(module))
            setattr(at, name, type(name, (), {"__module__": module}))
        self.rebuild_2, self.rebuild_3 = (getattr(sys.modules["torch._utils"], f"_rebuild_tensor_v{i}") for i in (2, 3))
        self.uint16 = sys.modules["torch"].uint16


fake = Fake()


def save(x):
    data, storages = io.BytesIO(), []

    class Pickler(pickle.Pickler):
        def persistent_id(self, s):
            if not isinstance(s, Storage):
                return None
            storages.append(s.x)
            kind = getattr(sys.modules["torch.storage" if s.kind == "UntypedStorage" else "torch"], s.kind)
            return "storage", kind, str(len(storages) - 1), "cpu", s.x.size
    Pickler(data, 2).dump(x)
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as z:
        z.writestr("archive/data.pkl", data.getvalue())
        for i, s in enumerate(storages):
            z.writestr(f"archive/data/{i}", s.tobytes())
    return subprocess.run(["zstd", "-q", "-c"], input=out.getvalue(), stdout=subprocess.PIPE, check=True).stdout


lengths = rng.integers(1, 9, 60)
documents = [rng.integers(0, 60000, n).astype("<u2") for n in lengths]
with open(folder + "/text.bin", "wb") as f:
    f.write(b"".join(d.tobytes() for d in documents))
pointers = np.cumsum(np.append(0, lengths[:-1] * 2)).astype("<i8")
with open(folder + "/text.idx", "wb") as f:
    f.write(b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 60, 61) + lengths.astype("<i4").tobytes() + pointers.tobytes() +
            np.arange(61).astype("<i8").tobytes())
order = rng.permutation(60).astype("<i4")
text = np.concatenate([documents[d] for d in order])
# of each token: document in that order, place in it
places = [(d, i) for d in range(60) for i in range(lengths[order[d]])]
count = (len(text) - 1) // T
shuffle = rng.permutation(count).astype("<u4")
for name, x in (("document", order), ("sample", np.array(places[:count * T + 1:T], "<i4")), ("shuffle", shuffle)):
    np.save(f"{folder}/x-GPTDataset-train-{name}_index.npy", x)

n = BATCH * BATCHES
ids, log_q = rng.integers(0, 131000, (n, T, K)), -rng.integers(1, 64, (n, T, K)).astype("<f2") / 8
ids[3, 2, 1:], log_q[3, 2, 1:] = -1, -1e4  # cut by top-p
os.mkdir(folder + "/tars")
for rank in range(RANKS):
    saver = {"k": K, "p": 0.9, "min_k": 1, "save_dtype": "fp16"}
    if version > 1:
        saver |= {"format_version": version, "mbs_save": MICRO, "dp_size_save": RANKS, "gbs_save": BATCH}
    members = {"_meta.json": json.dumps({"hash": "0", "saver": saver}).encode()}
    for batch in range(BATCHES):
        steps = [[((batch * STEPS + m) * RANKS + rank) * MICRO + j for j in range(MICRO)] for m in range(STEPS)]
        parts = [tuple(np.ascontiguousarray(x[s].transpose(1, 0, 2)) for x in (log_q, ids)) for s in steps]
        if version > 1:
            parts = [tuple(np.concatenate(x, 1) for x in zip(*parts))]
        lists = ([Torch(v) for v, _ in parts], [Torch((i & 0xFFFF).astype("<u2")) for _, i in parts],
                 [Torch((i >> 16).astype("?")) for _, i in parts])
        d = dict(zip(("values", "indices_low", "bit_17"), lists if version == 1 else (x[0] for x in lists)))
        name = str(batch) if version == 1 else f"{batch * BATCH}-{(batch + 1) * BATCH}"
        members[name + ".pt.zst"] = save(d if version == 1 else {"format_version": version, **d})
    name = f"cp0_dp{rank}__{BATCHES - 1}.tar" if version == 1 else f"dp{rank}__0-{n}.tar"
    with tarfile.open(f"{folder}/tars/{name}", "w") as tar:
        for member, data in members.items():
            info = tarfile.TarInfo(member)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
with open(folder + "/truth.bin", "wb") as f:
    for g in range(n):
        begin = int(shuffle[g]) * T
        f.write(text[begin:begin + T + 1].astype("<i4").tobytes() + ids[g].astype("<i4").tobytes() +
                log_q[g].astype("<f4").tobytes())
