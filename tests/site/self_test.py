# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""self_test.py <repository> <work folder>: scripts/site.py check refuses each fault of a site, and no sound one."""
import pathlib
import shutil
import subprocess
import sys

root, site = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
GOOD = """<html><body><article><h1 id="top">A page</h1><p>It says <code>**x**</code>.</p>
<a href="a/#in">a</a></article></body></html>"""
OTHER = """<article><h1 id="in">In</h1><a href="../#top">home</a><a href="https://elsewhere.org">out</a></article>"""


def check(words, home=GOOD, known='"location":"a/"'):
    shutil.rmtree(site, ignore_errors=True)
    (site / "a").mkdir(parents=True)
    (site / "search").mkdir()
    (site / "index.html").write_text(home)
    (site / "a/index.html").write_text(OTHER)
    (site / "search/search_index.json").write_text("{" + known + "}")
    command = [sys.executable, root / "scripts/site.py", "check", site]
    answer = subprocess.run(command, text=True, capture_output=True)
    assert (answer.returncode == 0) == (words == "none is broken"), answer
    assert words in answer.stdout, answer


check("none is broken")
check("b/: no such file", GOOD.replace("a/#in", "b/"))
check("a/#out: no such anchor", GOOD.replace("a/#in", "a/#out"))
check("../../etc/passwd: no such file", GOOD.replace("a/#in", "../../etc/passwd"))
check("https://cdn.org/x.js: another host", GOOD.replace("<p>", '<script src="https://cdn.org/x.js"></script><p>'))
check("| a | b |: Markdown that is left", GOOD.replace("It says", "\n| a | b |\n"))
check("Markdown that is left", GOOD.replace("It says", "see [that](there)"))
check("a: not in the search", known='"location":"b/"')
print("every fault is found")
