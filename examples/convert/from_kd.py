# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""from_kd.py SET SHARD.bin…: surogate's token shards and their .kd sidecars (versions 3 and 1) as a data set of opd.

Row i of a sidecar is the teacher's law after token i, so of token i + 1. A sequence begins where the position is 0.
Rows that were not captured are zeros; a row whose log-probs are all 0 ends the shard's part that is taken.
"""
import sys

import numpy as np
import opd_set


def shard(path):
    tok, kd = np.memmap(path, "u1", "r"), np.memmap(path + ".kd", "u1", "r")
    t, h = tok[:1024].view("<i4"), kd[:1024].view("<i4")
    if bytes(tok[:8]) != b"BIN.TOK\n" or t[2] != 3 or t[3] != 4:
        sys.exit(f"{path}: no token shard of version 3 with 4 bytes a token")
    if bytes(kd[:8]) != b"KD.LOGP\n" or h[2] != 1 or h[6] != 0 or h[4] != t[4]:
        sys.exit(f"{path}.kd: no sidecar of version 1 in half, of as many tokens as {path}")
    k, n = int(h[3]), int(h[4])
    if len(kd) != 1024 + 6 * k * n or len(tok) < 1024 + 8 * n:
        sys.exit(f"{path}: it or its sidecar is cut")
    ids = kd[1024:1024 + 4 * k * n].view("<u4").reshape(n, k)
    log_q = kd[1024 + 4 * k * n:].view("<f2").reshape(n, k)
    return k, int(h[5]), tok[1024:1024 + 4 * n].view("<i4"), tok[1024 + 4 * n:1024 + 8 * n].view("<i4"), ids, log_q


if len(sys.argv) < 3:
    sys.exit(__doc__)
k, vocab = shard(sys.argv[2])[:2]
with opd_set.Writer(sys.argv[1], vocab, k) as out:
    for path in sys.argv[2:]:
        k_here, vocab_here, tokens, positions, ids, log_q = shard(path)
        if (k_here, vocab_here) != (k, vocab):
            sys.exit(f"{path}: k or vocabulary is not that of {sys.argv[2]}")
        empty = np.flatnonzero((log_q == 0).all(axis=1))
        n = int(empty[0]) if len(empty) else len(tokens)
        begins = [*np.flatnonzero(positions[:n] == 0), n]
        for begin, end in zip(begins, begins[1:]):
            if end - begin > 1:  # the last row is of a token that is not there
                out.add(tokens[begin:end], ids[begin:end - 1], log_q[begin:end - 1])
