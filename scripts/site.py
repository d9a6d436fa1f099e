#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The two ends of scripts/site.sh; the standard library alone.

    site.py stage FOLDER   the pages as mkdocs wants them: docs/, and below repository/ what they link to outside of it
                           (a source file becomes a page that shows it), and below api/ the public headers
                           (api_pages.py). Pages that mkdocs.yml does not name stand under `More`.
    site.py check FOLDER   that every link of the built site leads to a file and an anchor of it, that a page asks no
                           other host for anything, that no Markdown is left in a page, and that the search knows
                           every page
"""
import html.parser
import pathlib
import re
import shutil
import sys
import urllib.parse

import api_pages

ROOT = pathlib.Path(__file__).resolve().parent.parent
# a link or image, and its target; not in code
LINK = re.compile(r"(```.*?^```|`[^`\n]*`)|(!?)\[((?:[^\]\[]|\[[^\]]*\])*)\]\(([^)\s]+)\)", re.S | re.M)
LANGUAGES = {".cpp": "cpp", ".hpp": "cpp", ".cu": "cpp", ".cuh": "cpp", ".c": "c", ".h": "c", ".rs": "rust",
             ".py": "python", ".sh": "bash", ".cmake": "cmake", ".yml": "yaml"}


def citations(page, text):
    """The BibTeX of the sources that a page below docs/ names, from docs/references.md, as the page's last section."""
    references = ROOT / "docs/references.md"
    if page == references or not page.is_relative_to(ROOT / "docs"):
        return ""
    named = []
    for entry, surname, short in re.findall(r"^(@\w+\{([a-z]+)\d{4}(\w+),.*?^\})", references.read_text(), re.M | re.S):
        eprint = re.search(r"eprint = \{([^}]*)\}", entry)
        words = [surname.title(), short.upper()] + re.findall(r"title = \{\{([^}]*)\}:", entry)
        words = [word for word in words if word != "OPD"]  # of lu2025opd; it is every page's word
        words = [re.escape(word).replace("A3PO", "A-?3PO") for word in words]
        if eprint and eprint[1] in text or re.search(rf"\b({'|'.join(words)})\b", text):
            named.append(entry)
    return "\n## To cite\n\n```bibtex\n" + "\n".join(named) + "\n```\n" if named else ""


class Stage:
    def __init__(self, out):
        self.out, self.todo, self.done = out, [], {}

    def place(self, path):
        """Where a file of the repository stands in the site, as mkdocs names its source."""
        if path.is_relative_to(ROOT / "docs"):
            place = path.relative_to(ROOT / "docs")
        else:
            place = "repository" / path.relative_to(ROOT)
            if path.suffix not in (".md", ".svg"):
                place = place.with_name(place.name + ".md")
        if path not in self.done:
            self.done[path] = place
            self.todo.append(path)
        return place

    def target(self, page, link):
        """The file that a page's link means; nothing for another host, or a place on the page itself."""
        parts = urllib.parse.urlsplit(link)
        if parts.scheme or parts.netloc or not parts.path:
            return None
        path = (page.parent / urllib.parse.unquote(parts.path)).resolve()
        if path.is_dir() and (path / "README.md").is_file():
            path = path / "README.md"
        if not path.is_relative_to(ROOT) or not path.exists():
            sys.exit(f"site.py: {page.relative_to(ROOT)}: there is no {link}")
        return path

    def links(self, page, text):
        here = self.place(page).parent

        def one(match):
            code, image, words, link = match.groups()
            if code:
                return code
            words = words if image else LINK.sub(one, words)
            path = self.target(page, link)
            if path is None:
                return f"{image}[{words}]({link})"
            if path.is_dir():  # a folder of no page: its name will do
                return f"{words} (`{path.relative_to(ROOT)}/`)"
            anchor = "#" + link.split("#", 1)[1] if "#" in link else ""
            up = pathlib.PurePosixPath(*[".."] * len(here.parts))
            return f"{image}[{words}]({up / self.place(path)}{anchor})"

        return LINK.sub(one, text)

    def write(self, path):
        place = self.out / self.done[path]
        place.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".md":
            text = re.sub(r"\A<!-- SPDX.*?-->\n", "", path.read_text())
            # a list that interrupts a paragraph is a list on the usual hosts; Python's Markdown wants an empty line
            text = re.sub(r"^(?!\s*[-*>#]|\s*\d+\. )(.*\S.*\n)(?=([-*]|\d+\.) \S)", r"\1\n", text, flags=re.M)
            place.write_text(self.links(path, text) + citations(path, text))
        elif place.suffix == ".md":
            name = path.relative_to(ROOT).as_posix()
            body = path.read_text().rstrip("\n")
            place.write_text(f"# {path.name}\n\n`{name}`\n\n````{LANGUAGES.get(path.suffix, 'text')}\n{body}\n````\n")
        else:
            shutil.copyfile(path, place)

    def everything(self):
        for path in sorted((ROOT / "docs").rglob("*")):
            if path.is_file() and not path.name.startswith("."):
                self.place(path)
        for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"):
            self.place(ROOT / name)
        while self.todo:
            self.write(self.todo.pop())
        pages = {place.as_posix(): path for path, place in self.done.items() if place.suffix == ".md"}
        config = (ROOT / "mkdocs.yml").read_text()
        named = set(re.findall(r"[\w/.-]+\.md\b", config[config.index("\nnav:"):]))
        if named - pages.keys():
            sys.exit(f"site.py: mkdocs.yml names {sorted(named - pages.keys())}, which are not there")
        config += "\n".join(api_pages.write(self.out)) + "\n"
        more = sorted(page for page, path in pages.items() if page not in named and path.suffix == ".md")
        if more:
            config += "  - More:\n" + "".join(f"      - {page}\n" for page in more)
        (self.out.parent / "mkdocs.yml").write_text(config)
        print(f"{len(pages)} pages, {len(more)} of them under More")


class Page(html.parser.HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.anchors, self.links, self.loaded = set(), [], []
        self.within, self.prose = [], ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        a = dict(attributes)
        if tag in ("article", "pre", "code"):
            self.within.append(tag)
        self.anchors |= {a["id"]} if a.get("id") else set()
        self.anchors |= {a["name"]} if tag == "a" and a.get("name") else set()
        loads = tag in ("script", "img", "source", "iframe")
        loads = loads or tag == "link" and a.get("rel") not in ("canonical", "prev", "next")
        for key in ("href", "src", "data-src"):
            if a.get(key):
                (self.loaded if loads else self.links).append(a[key])

    def handle_endtag(self, tag):
        if self.within and tag == self.within[-1]:
            self.within.pop()

    def handle_data(self, data):
        if self.within == ["article"]:
            self.prose += data


def check(site):
    pages = {path.resolve(): Page(path.read_text()) for path in site.rglob("*.html")}
    wrong, links, source = [], 0, site.resolve()
    for path, page in pages.items():
        if path.name == "404.html":  # its links begin at the host's root
            continue
        left = re.findall(r"^\|.*|^[-*] .*|.*(?:\*\*|\]\(|`).*", page.prose, re.M)
        wrong += [(path, line, "Markdown that is left") for line in left]
        for link in page.links + page.loaded:
            parts = urllib.parse.urlsplit(link)
            if parts.scheme in ("http", "https") or parts.netloc:
                if link in page.loaded:
                    wrong.append((path, link, "another host"))
                continue
            if parts.scheme:
                continue
            links += 1
            to = (path.parent / urllib.parse.unquote(parts.path)).resolve() if parts.path else path
            if to.is_dir():
                to /= "index.html"
            if not to.is_relative_to(source) or not to.is_file():
                wrong.append((path, link, "no such file"))
            elif parts.fragment and to in pages and urllib.parse.unquote(parts.fragment) not in pages[to].anchors:
                wrong.append((path, link, "no such anchor"))
    for path, link, why in wrong:
        print(f"{path.relative_to(source)}: {link}: {why}")
    if len(pages) < 2 or links == 0:
        sys.exit("site.py: there is no site")
    index = (site / "search/search_index.json").read_text()
    for path in pages:
        where = path.relative_to(source).parent.as_posix()
        if path.name == "index.html" and where != "." and f'"location":"{where}/"' not in index:
            wrong.append((path, "", "not in the search"))
            print(f"{where}: not in the search")
    if wrong:
        sys.exit(f"site.py: {len(wrong)} faults")
    print(f"{len(pages)} pages, {links} links: none is broken")


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in ("stage", "check"):
        sys.exit("site.py stage|check FOLDER")
    folder = pathlib.Path(sys.argv[2])
    if sys.argv[1] == "check":
        check(folder)
    else:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        Stage(folder).everything()
