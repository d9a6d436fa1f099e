# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""self_test.py <repository> <work folder>: scripts/site.py check refuses each fault of a site, and no sound one;
scripts/api_pages.py shows what a header declares, and nothing that is private."""
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

sys.path.insert(0, str(root / "scripts"))
import api_pages  # noqa: E402

HEADER = """// SPDX
//
// What it holds.
#pragma once
namespace opd {
namespace detail { struct secret {}; }
/// How wide.
template <class T, class U = std::vector<T>>
    requires(sizeof(T) > 4 && requires(T t) { t.size(); })
constexpr int width(const T& a, char open = '{') { return a.size(); }

// a heading, which belongs to nothing
struct later;
/// A pair.
struct pair {
    int first = 1'000; ///< of two
    explicit pair(int a) : first(a), second_{a} { count(); }
    /// Its sum.
    int sum() const { return first + second_; }

private:
    int second_;
    void count() {}
};
inline int pair_sum(pair p) { return p.sum(); }
template <>
struct traits<pair> {};
inline namespace OPD_ISA {
namespace design {
/// One.
struct greedy { int id{}; };
}
}
/// Whether x adds.
template <class X>
concept adds = requires(X x) { { x + x } -> same<X>; };
#define OPD_PRIVATE 1
/// Said.
#define OPD_SAID(x) (x)
}
"""
found = {title: (comment, shown) for comment, shown, title in api_pages.declarations(HEADER) if api_pages.own(shown)}
assert list(found) == ["width", "pair", "pair_sum", "design::greedy", "adds", "OPD_SAID"], list(found)
assert found["width"][0] == "/// How wide." and found["width"][1].endswith("char open = '{');"), found["width"]
assert found["pair_sum"] == ("", "inline int pair_sum(pair p);"), found["pair_sum"]
pair = found["pair"][1]
assert "explicit pair(int a);" in pair and "/// Its sum.\n    int sum() const;" in pair, pair
assert "first = 1'000; ///< of two" in pair and "second_" not in pair and "count" not in pair, pair
assert found["adds"][1].endswith("-> same<X>; };") and found["OPD_SAID"][1] == "#define OPD_SAID(x)", found
assert api_pages.head_comment(HEADER) == "What it holds."
assert api_pages.mark_of("opd/c/rows.h", {"c/": "stable", "c/r": "new"}) == "new"
print("a header is shown as it is")

SILENT = """namespace opd {
/// One of each.
void each(int);
void each(double);
void silent(int);
int behind = 1; ///< said there
const char* name_of(kind k) { return ""; }

/* Both. */
void first(void);
void second(void);

void apart(void);
}
"""
assert [name for _, name in api_pages.uncommented(SILENT, True)] == ["apart"], list(api_pages.uncommented(SILENT, True))
assert list(api_pages.uncommented(SILENT, False)) == [(5, "silent"), (11, "second"), (13, "apart")]
print("what nothing is said of is named")
