# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The snippets of docs/bindings run, one page after another, each block with what those above it left."""

import contextlib
import importlib.util
import io
import pathlib
import re
import unittest

import opd
from opd import _c_sched, _c_spec

PAGES = pathlib.Path(__file__).resolve().parents[2] / "docs/bindings"


class Pages(unittest.TestCase):
    def run_page(self, name):
        text = (PAGES / name).read_text()
        blocks = [
            (text.count("\n", 0, m.start(1)), m[1]) for m in re.finditer(r"^```python\n(.*?)^```", text, re.S | re.M)
        ]
        self.assertGreaterEqual(len(blocks), 2)
        names, printed = {"__name__": "page"}, io.StringIO()
        with contextlib.redirect_stdout(printed):
            for line, block in blocks:
                exec(compile("\n" * line + block, name, "exec"), names)
        return printed.getvalue()

    def test_python(self):
        printed = self.run_page("python.md")
        self.assertIn("64 rows, 60 kept", printed)
        self.assertIn("has 900 columns, the student 1000", printed)

    def test_schedulers(self):
        try:
            _c_sched.lib()
        except opd.Unsupported as why:
            self.skipTest(str(why))
        printed = self.run_page("python-sched.md")
        self.assertIn("start 7 0", printed)
        self.assertEqual(printed.count(" 16 ", printed.index("start 7 0")), 4)
        self.assertIn("pops [0 1] [0 0]\n1 ", printed)
        self.assertIn("edf ", printed)

    def test_speculation(self):
        try:
            _c_spec.lib()
        except opd.Unsupported as why:
            self.skipTest(str(why))
        printed = self.run_page("python-spec.md")
        for said in (
            "follow [1 2] [[9, 5], [4, 7, 1]]",
            "drafted [8 9]",
            "[3 1] Match(length=2,",
            "chooses (",
            "drafts, row 1: token 99 of a vocabulary of 50 drafts 1",
        ):
            self.assertIn(said, printed)

    @unittest.skipUnless(importlib.util.find_spec("torch"), "torch is not installed")
    def test_torch(self):
        self.assertIn("torch.Size([1000, 32])", self.run_page("torch.md"))


if __name__ == "__main__":
    unittest.main()
