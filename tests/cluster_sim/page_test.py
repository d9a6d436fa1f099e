#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""page_test.py OPD_CLUSTER_SIM README.md: the tables of the node and of what async pays for are what the program prints
today. A row of the page leaves out some of the program's columns and changes none."""
import pathlib
import re
import subprocess
import sys
import tempfile

program, page = sys.argv[1], pathlib.Path(sys.argv[2]).read_text(encoding="utf-8")


def printed(*arguments):
    with tempfile.TemporaryDirectory() as out:
        return subprocess.run([program, *arguments, "--no-plots", "--quiet", "--out", out], check=True,
                              capture_output=True, text=True).stdout.splitlines()


def table(head):
    """Rows of the page's table whose first line begins so."""
    rows = page[page.index(head):].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def is_within(cells, of):
    """Whether they are among these, in this order."""
    rest = iter(of)
    return all(cell in rest for cell in cells)


wrong = []
node = [re.split(r" {2,}", line.strip()) for line in printed()]
for name, *cells in table("| schedule | tokens/s | speed-up | over best sync | overlap | start lag | max | token lag"):
    rows = [row[1:] for row in node if row[0] == name and len(row) > 15]
    if not any(is_within(cells, row) for row in rows):
        wrong.append(f"{name}: the page has {cells}, the program {rows}")

costs = [re.split(r" {2,}", line.strip())[2:] for line in printed("--costs") if re.search(r"\d{3,}  ", line)]
rows = table("| | async | edf | in_order |")
assert len(costs) >= len(rows) >= 8, "a table without rows"
for row, (name, *cells) in zip(costs, rows):
    row = [cell.split(" [")[0] if "stuck" in cell else cell for cell in row]
    if [cell.replace(" %", "%") for cell in cells] != row:
        wrong.append(f"{name}: the page has {cells}, the program {row}")

print("\n".join(wrong) or f"{page.count(chr(10))} lines, all figures as printed")
sys.exit(bool(wrong))
