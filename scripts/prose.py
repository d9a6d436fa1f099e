#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Counts, for each page and in all, what makes pages hard to read.

  words     without code. A word has a letter in it: figures, signs and a table's bars are none. A `code span` is one
            word, whatever it holds; of a link, its text counts. Blocks of code and comments do not count
  long      sentences of more than 30 words. A paragraph, a list's item and a heading end a sentence, and so does . ! or
            ? before white space. A table's cell is no sentence, unless it is a long one
  wide      lines of more than 120 columns, code included; of tables, which Markdown cannot wrap, those outside
  private   words of ours where the field has one (PRIVATE below). Code spans may hold them: they are names in the
            library. docs/glossary.md, which explains them, may use them

prose.py [PAGE...]          prints the counts (without PAGE: of all pages but CHANGELOG.md)
prose.py --list KIND        prints where each long sentence, wide line or private word stands
prose.py --check            fails where more than 5 % of all sentences are long, a line is wide, a private word stands
                            outside the glossary, or a comment in a source file has a line of more than 120 columns
prose.py --links            fails where a link within the repository leads nowhere, or a #heading is none of its page
prose.py --self-test        fails where this script counts wrongly
"""

import argparse
import ast
import functools
import io
import pathlib
import re
import sys
import tokenize

LONGEST = 30
WIDEST = 120
SHARE = 0.05
GLOSSARY = "docs/glossary.md"

# What stands for what. Everyday words that were once ours as well (given, entries, share, due, walk) cannot be told
# from everyday use by a script, and are not here.
PRIVATE = {
    r"leaf|(?:the|of|few|all|these|their|redone|\w+'s) leaves|leaves of 1,024": "a chunk of 1,024 entries",
    r"lumped(?! dense\b)|lumps?": "a bucket for the rest of the vocabulary",
    r"floored": "clamped",
    r"careful rows?": "a row computed again in float64",
    r"sweeps?|swept": "a pass over the row; online softmax",
    r"made logits|logits (?:that are|are) made": "logits computed on the fly",
    r"drains?|drained": "a backward product",
    r"anchor(?:s|ed)?": "a reference token, or a reference number",
    r"conveyors?": "the store of payloads",
    r"rosters?": "the table of workers",
    r"ledgers?": "the accounting of staleness",
    r"park(?:s|ed|ing)?": "preempt",
    r"spare (?:work|piece|pieces)": "idle work",
    r"incarnations?": "an epoch",
    r"laws?": "a distribution",
}
ANY_PRIVATE = re.compile(r"\b(?:" + "|".join(f"({p})" for p in PRIVATE) + r")\b", re.IGNORECASE)


def pages(root):
    """README.md and its like, docs/, and the READMEs of folders."""
    found = {root / "README.md", root / "CONTRIBUTING.md", root / "SECURITY.md"}
    found |= set((root / "docs").rglob("*.md"))
    for folder in ("examples", "tests", "python"):
        found |= set((root / folder).rglob("README.md"))
    return sorted(p for p in found if p.exists())


def plain(text):
    """Without marks: a code span is the word `code`, a link its text, a comment nothing."""
    text = re.sub(r"<!--.*?-->", " ", text)
    text = re.sub(r"``.+?``|`[^`]+`", " code ", text)
    text = re.sub(r"!\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"<[a-zA-Z/][^>]*>", " ", text)
    return text.replace("**", "").replace("*", "")


def words(text):
    return [w for w in text.split() if re.search(r"[^\W\d_]", w)]


def sentences(text):
    text = re.sub(r"\b(e\.g|i\.e|cf|vs|al|resp|approx)\.", r"\1", text)
    return [s for s in re.split(r"(?<=[.!?])[)\"]?\s+", text) if words(s)]


def blocks(lines):
    """(kind, first line's number, text) of each paragraph, heading, list item, table cell; kind: text, head or cell."""
    fenced, paragraph, start = False, [], 0

    def flush():
        nonlocal paragraph
        if paragraph:
            yield "text", start, " ".join(paragraph)
        paragraph = []

    for number, line in enumerate(lines, 1):
        stripped = line.strip()
        if not fenced and not paragraph and re.match(r"    (?![-*+] |\d+[.)] )", line):
            continue  # a block of code by its indentation
        if stripped.startswith("```"):
            fenced = not fenced
            yield from flush()
            continue
        if fenced:
            continue
        if not stripped or stripped.startswith("<!--") and stripped.endswith("-->"):
            yield from flush()
        elif stripped.startswith("#"):
            yield from flush()
            yield "head", number, stripped.lstrip("# ")
        elif stripped.startswith("|"):
            yield from flush()
            for cell in re.split(r"(?<!\\)\|", stripped):
                if words(plain(cell)):
                    yield "cell", number, cell
        else:
            item = re.match(r"(?:[-*+]|\d+[.)])\s+(.*)", stripped)
            if item:
                yield from flush()
                stripped = item.group(1)
            if not paragraph:
                start = number
            paragraph.append(stripped)
    yield from flush()


class page_counts:
    def __init__(self, name, lines):
        self.words = self.sentences = 0
        self.long, self.wide, self.private = [], [], []
        for kind, number, text in blocks(lines):
            text = plain(text)
            self.words += len(words(text))
            for sentence in sentences(text):
                length = len(words(sentence))
                if kind != "text" and length <= LONGEST:
                    continue
                self.sentences += 1
                if length > LONGEST:
                    self.long.append((number, f"{length} words: {sentence}"))
            if name != GLOSSARY:
                for match in ANY_PRIVATE.finditer(text):
                    self.private.append((number, f"{match.group()}: {list(PRIVATE.values())[match.lastindex - 1]}"))
        for number, line in enumerate(lines, 1):
            if len(line) > WIDEST and not line.lstrip().startswith("|"):
                self.wide.append((number, f"{len(line)} columns"))


def sources(root):
    """C, C++, CUDA, Rust, Python, shell and CMake."""
    endings = {".hpp", ".cuh", ".h", ".cpp", ".cu", ".c", ".rs", ".py", ".sh", ".cmake"}
    rooms = ("include", "lib", "examples", "tests", "bench", "scripts", "cmake", "python", "packaging", ".ci")
    found = [root / "CMakeLists.txt", root / ".ci/run"]
    found += [p for room in rooms for p in (root / room).rglob("*")
              if p.suffix in endings or p.name == "CMakeLists.txt"]
    return sorted(p for p in found if p.is_file())


def wide_comments(name, text):
    """Numbers of the lines of more than 120 columns that are a comment or a docstring, or end in a comment of a shell
    script's kind. Code is clang-format's matter, and who has a link in a line may need it."""
    lines = text.splitlines()
    wide = [n for n, line in enumerate(lines, 1) if len(line) > WIDEST and "://" not in line]
    if not wide:
        return []
    if name.endswith(".py"):
        said = {token.start[0] for token in tokenize.generate_tokens(io.StringIO(text).readline)
                if token.type == tokenize.COMMENT}
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node):
                said |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
        return [n for n in wide if n in said]
    hashes = name.endswith((".sh", ".cmake", ".txt", "run"))
    comment = re.compile(r"\s*#|.*\s#\s[^\"']*$" if hashes else r"\s*(//|/\*|\*\s)")
    return [n for n in wide if comment.match(lines[n - 1])]


def slug(heading):
    heading = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "").strip().lower()
    return re.sub(r"[^\w\- ]", "", heading).replace(" ", "-")


def slugs(lines):
    found, fenced = {}, False
    for line in lines:
        if line.startswith("```"):
            fenced = not fenced
        if not fenced and line.startswith("#"):
            name = slug(line.lstrip("#"))
            found[name] = found.get(name, -1) + 1
            if found[name]:
                found[f"{name}-{found[name]}"] = 0
    return set(found)


@functools.lru_cache(maxsize=None)
def read(path):
    return path.read_text(encoding="utf-8").splitlines()


@functools.lru_cache(maxsize=None)
def headings(path):
    return slugs(read(path))


def broken_links(path, lines):
    for number, line in enumerate(lines, 1):
        for target in re.findall(r"\]\(([^)\s]+)\)", line):
            if "://" in target or target.startswith("mailto:"):
                continue
            file, _, heading = target.partition("#")
            to = (path.parent / file) if file else path
            if not to.exists():
                yield number, f"no file {target}"
            elif heading and to.suffix == ".md" and heading not in headings(to.resolve()):
                yield number, f"no heading {target}"


def self_test():
    counts = page_counts("page.md", ["# A heading", "", "One two `three four` 5, six [seven](eight.md).",
                                     "The leaf, e.g. here. And", "", "- a list's item", "", "| a cell | 3 |", "```",
                                     "sweep " + "x" * 120, "```", "`sweep`", "",
                                     "    sweep by indentation"])
    assert counts.words == 2 + 5 + 5 + 3 + 2 + 1, counts.words
    assert counts.sentences == 5, counts.sentences
    assert not counts.long and [w for _, w in counts.private] == ["leaf: a chunk of 1,024 entries"], counts.private
    assert [n for n, _ in counts.wide] == [10], counts.wide
    assert page_counts("page.md", ["| " + "cell " * 100 + "|"]).wide == []
    for text in (["word " * 31], ["word " * 15, "word " * 16], ["| " + "word " * 31 + " |"], ["- " + "word " * 31]):
        assert len(page_counts("page.md", text).long) == 1, text
    for text in (["word " * 30], ["word " * 15 + ".", "Word " * 16], ["- " + "word " * 20, "- " + "word " * 20]):
        assert not page_counts("page.md", text).long, text
    assert not page_counts(GLOSSARY, ["a leaf"]).private
    long = "word " * 30
    for name, wide, fine in (("a.hpp", "    // " + long, "f(" + long + ");"), ("a.h", " * " + long, "a // " + long),
                             ("a.sh", "a  # " + long, "a '# " + long + "'"), ("CMakeLists.txt", "# " + long, long),
                             ("a.py", '"""One.\n' + long + '"""', 'a = "' + long + '"'),
                             ("b.py", "a = 1  # " + long, "f(a,\n" + " " * 130 + "b)")):
        assert wide_comments(name, "a = 1\n" * (name != "a.py") + wide + "\n") == [2], name
        assert not wide_comments(name, fine + "\n") and not wide_comments(name, wide.replace("word", "http://w")), name
    assert slugs(["# On a `GPU`, now", "# Twice", "# Twice"]) == {"on-a-gpu-now", "twice", "twice-1"}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", type=pathlib.Path)
    parser.add_argument("--list", choices=("long", "wide", "private"))
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--links", action="store_true")
    parser.add_argument("--self-test", action="store_true")
    arguments = parser.parse_args()
    if arguments.self_test:
        return self_test()
    root = pathlib.Path(__file__).resolve().parent.parent
    chosen = [p.resolve() for p in arguments.pages] or pages(root)
    failed = False
    if arguments.links:
        for path in chosen + ([root / "CHANGELOG.md"] if not arguments.pages else []):
            for number, what in broken_links(path, read(path)):
                print(f"{path.relative_to(root)}:{number}: {what}")
                failed = True
        return 1 if failed else None
    counts = {str(p.relative_to(root)): page_counts(str(p.relative_to(root)), read(p)) for p in chosen}
    if arguments.list:
        for name, c in counts.items():
            for number, what in getattr(c, arguments.list):
                print(f"{name}:{number}: {what}")
        return None
    total = {k: sum(len(getattr(c, k)) for c in counts.values()) for k in ("long", "wide", "private")}
    count = sum(c.sentences for c in counts.values())
    if not arguments.check:
        print(f"{'page':42}{'words':>8}{'sentences':>11}{'long':>6}{'share':>7}{'wide':>6}{'private':>9}")
        for name, c in counts.items():
            print(f"{name:42}{c.words:8}{c.sentences:11}{len(c.long):6}{len(c.long) / max(c.sentences, 1):7.1%}"
                  f"{len(c.wide):6}{len(c.private):9}")
    print(f"{'all':42}{sum(c.words for c in counts.values()):8}{count:11}{total['long']:6}"
          f"{total['long'] / max(count, 1):7.1%}{total['wide']:6}{total['private']:9}")
    if arguments.check:
        for path in [] if arguments.pages else sources(root):
            for number in wide_comments(path.name, path.read_text(encoding="utf-8")):
                print(f"{path.relative_to(root)}:{number}: a comment of more than {WIDEST} columns")
                failed = True
        if total["long"] > SHARE * count:
            print(f"{total['long']} of {count} sentences have more than {LONGEST} words; at most {SHARE:.0%} may. "
                  "prose.py --list long")
            failed = True
        if total["wide"]:
            print(f"{total['wide']} lines have more than {WIDEST} columns. prose.py --list wide")
            failed = True
        if total["private"]:
            print(f"{total['private']} private words outside {GLOSSARY}. prose.py --list private")
            failed = True
    return 1 if failed else None


if __name__ == "__main__":
    sys.exit(main())
