# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""examples/convert/from_parquet.py writes what opd_set.Writer writes of the same arrays (tests/data/first_set_test.cpp
reads that with the library's reader)."""

import filecmp
import importlib.util
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

import numpy as np

CONVERT = pathlib.Path(__file__).resolve().parents[2] / "examples/convert"


@unittest.skipUnless(importlib.util.find_spec("pyarrow"), "no pyarrow")
class Parquet(unittest.TestCase):
    def setUp(self):
        self.rng = np.random.default_rng(7)
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def sequences(self, count, k, vocab=500):
        for _ in range(count):
            t = int(self.rng.integers(2, 30))
            n = int(self.rng.integers(1, t + 1))
            ids = self.rng.integers(-1, vocab, (n, k))  # -1: no entry
            yield self.rng.integers(0, vocab, t), ids, np.float32(-self.rng.gamma(2, 2, (n, k)))

    def parquet(self, name, sequences, flat=False):
        import pyarrow
        import pyarrow.parquet

        shown = (lambda x: x.ravel().tolist()) if flat else (lambda x: x.tolist())
        rows = [{"text": t.tolist(), "best": shown(i), "scores": shown(q), "more": 1} for t, i, q in sequences]
        path = os.path.join(self.folder, name)
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        return path

    def convert(self, *arguments):
        command = [sys.executable, CONVERT / "from_parquet.py", *map(str, arguments)]
        return subprocess.run(command, text=True, capture_output=True)

    def same(self, sequences, k, *arguments):
        sys.path.insert(0, str(CONVERT))
        self.addCleanup(sys.path.remove, str(CONVERT))
        import opd_set

        want, got = os.path.join(self.folder, "want"), os.path.join(self.folder, "got")
        with opd_set.Writer(want, 500, k) as out:
            for sequence in sequences:
                out.add(*sequence)
        names = ["--tokens=text", "--ids=best", "--log-q=scores"]
        answer = self.convert(got, 500, *arguments, *names)
        self.assertEqual(answer.returncode, 0, answer.stderr)
        files = sorted(os.listdir(want))
        self.assertEqual(sorted(os.listdir(got)), files)
        self.assertGreater(len(files), 2)
        self.assertEqual(filecmp.cmpfiles(want, got, files, shallow=False)[0], files)

    def test_lists_of_lists_in_several_files_and_batches(self):
        parts = [list(self.sequences(count, 5)) for count in (70, 3)]
        paths = [self.parquet(f"{i}.parquet", part) for i, part in enumerate(parts)]
        self.same(parts[0] + parts[1], 5, *paths)

    def test_flat_lists(self):
        part = list(self.sequences(9, 3))
        self.same(part, 3, self.parquet("flat.parquet", part, flat=True), "--k=3")

    def test_another_number_of_ids_is_refused_by_its_sequence(self):
        path = self.parquet("two.parquet", [*self.sequences(2, 4), *self.sequences(1, 3)])
        got = os.path.join(self.folder, "got")
        answer = self.convert(got, 500, path, "--tokens=text", "--ids=best", "--log-q=scores")
        self.assertNotEqual(answer.returncode, 0)
        self.assertRegex(answer.stderr, r"ValueError: sequence 2: ids \(\d+, 3\)")
        index = pathlib.Path(got, "index.jsonl")
        self.assertFalse(index.exists() and '"end":true' in index.read_text())  # not a whole set
