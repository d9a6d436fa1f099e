# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""from_parquet.py SET VOCAB FILE.parquet… [--tokens NAME] [--ids NAME] [--log-q NAME]: rows of parquet, a sequence
each, as a data set of opd: a list of T tokens, and for its last N tokens N lists of K ids and N of their log-probs (or
both flat, K after K, with --k K). Needs pyarrow.
"""
import argparse

import numpy as np
import opd_set
import pyarrow.parquet

a = argparse.ArgumentParser(description=__doc__)
a.add_argument("set")
a.add_argument("vocab", type=int)
a.add_argument("files", nargs="+")
a.add_argument("--tokens", default="tokens")
a.add_argument("--ids", default="ids")
a.add_argument("--log-q", default="log_q")
a.add_argument("--k", type=int, default=0)
args = a.parse_intermixed_args()


def sequences():
    for path in args.files:
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(64, columns=[args.tokens, args.ids, args.log_q]):
            for row in batch.to_pylist():
                shape = (-1, args.k) if args.k else (len(row[args.ids]), -1)
                yield (np.array(row[args.tokens], "i8"), np.array(row[args.ids], "i8").reshape(shape),
                       np.array(row[args.log_q], "f4").reshape(shape))


rows = sequences()
first = next(rows)
with opd_set.Writer(args.set, args.vocab, first[1].shape[1]) as out:
    out.add(*first)
    for sequence in rows:
        out.add(*sequence)
