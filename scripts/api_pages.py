#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The public headers as pages: a header's head comment, then each public declaration with its comment, without bodies.
scripts/site.py writes them below api/. The standard library alone.

    api_pages.py --check   that every public header can be read so and has a comment at its head, that every public
                           declaration has one of its own (`uncommented` says what is excused), and that the table of
                           maturity in docs/versioning.md names what is there
    api_pages.py --uncommented   the declarations that lack one: file:line name
    api_pages.py HEADER    the page of one header, as Markdown
"""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
INCLUDE = ROOT / "include"
ROOMS = [("opd", "Calls"), ("opd/estimators", "Estimators"), ("opd/backends", "Backends"), ("opd/sched", "Schedulers"),
         ("opd/spec", "Speculation"), ("opd/data", "Data"), ("opd/serve", "Serving"), ("opd/c", "C interface")]
PRIVATE = re.compile(r"^(detail|\w*_detail)$")
SKIPPED = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'', re.S)
WORD = re.compile(r"[A-Za-z_]\w*")


def headers(room):
    return sorted(path for path in (INCLUDE / room).iterdir() if path.suffix in (".hpp", ".cuh", ".h"))


def head_comment(text):
    """The comment that a header begins with, without the licence."""
    if text.startswith("/*"):
        blocks = re.match(r"(?:/\*.*?\*/\s*)+", text, re.S)[0]
        lines = [line.strip().removeprefix("/*").removesuffix("*/").strip().removeprefix("* ").removeprefix("*")
                 for line in blocks.splitlines()]
    else:
        lines = []
        for line in text.splitlines():
            if not line.startswith("//"):
                break
            lines.append(line[2:].removeprefix(" "))
    while lines and (not lines[0].strip() or "SPDX" in lines[0]):
        lines.pop(0)
    return "\n".join(lines).rstrip()


def skip(text, at):
    """Past a comment, a string or a character that begins here; else the same place."""
    match = SKIPPED.match(text, at) if text[at] in "/\"'" else None
    if match and text[at] == "'" and at and text[at - 1].isdigit():  # 1'000
        return at
    return match.end() if match else at


def closing(text, at):
    """Past the bracket that closes the one at this place."""
    depth = 0
    while at < len(text):
        past = skip(text, at)
        if past > at:
            at = past
            continue
        depth += (text[at] in "([{") - (text[at] in ")]}")
        at += 1
        if depth == 0:
            return at
    raise ValueError("a bracket that nothing closes")


def past_angles(text, at):
    """Past the > that closes the < at this place."""
    depth = 0
    while at < len(text):
        if text[at] in "([{":
            at = closing(text, at)
            continue
        depth += (text[at] == "<") - (text[at] == ">" and text[at - 1] not in "-=")
        at += 1
        if depth == 0:
            return at
    raise ValueError("a template's parameters without an end")


KIND = re.compile(r"(?:extern\s+\"C\"\s+|typedef\s+)?(?:template\s*<.*>\s*(?:requires\b.*?)?)?"
                  r"(?:\[\[.*?\]\]\s*)*(struct|class|union|enum)\b", re.S)


def declaration(text, at):
    """(end, body): where the declaration that begins here ends, and where the body of its function stands (or None)."""
    begin, assigned, initialised, group = at, False, None, 0
    while template := re.compile(r"template\s*(?=<)").match(text, at):
        at = past_angles(text, template.end())
        at = re.compile(r"\s*").match(text, at).end()
    while at < len(text):
        past = skip(text, at)
        if past > at:
            at = past
        elif text[at] == ";":
            return at + 1, None
        elif text[at] in "([":
            group, at = at, closing(text, at)
        elif text[at] == "{":
            end = closing(text, at)
            before = text[begin:at].rstrip()
            rest = re.compile(r"\s*").match(text, end).end()
            asks = before if not before.endswith(")") else text[begin:group].rstrip()  # `requires (T t) {`
            if initialised is not None and re.search(r"[\w>]$", before) or re.search(r"\brequires$", asks):
                at = end  # a member that a constructor initialises; what a constraint asks for
            elif assigned or text[rest:rest + 1] == ";" and not before.endswith(")"):
                at = end
            elif KIND.match(before) and not before.endswith(")"):
                at = end
            else:
                return end, (initialised if initialised is not None else at, end)
        elif text[at] == "=" and not re.search(r"operator\s*\S{0,2}$|[=!<>]$", text[begin:at]) and text[at + 1] != "=":
            assigned, at = True, at + 1
        elif text[at] == ":" and ":" not in text[at - 1] + text[at + 1] and not assigned \
                and re.search(r"\)\s*(noexcept)?\s*$", text[begin:at]):
            initialised, at = at, at + 1
        else:
            at += 1
    raise ValueError(f"a declaration without an end: {text[begin:begin + 80]!r}")


def members(text):
    """The inside of a struct without bodies and without what is private."""
    out, at, private = [], 0, False
    while at < len(text):
        label = re.compile(r"\s*(public|private|protected)\s*:(?!:)").match(text, at)
        if label:
            private, at = label[1] != "public", label.end()
            continue
        space = re.compile(r"(\s|//[^\n]*\n|/\*.*?\*/|#[^\n]*\n)*", re.S).match(text, at)
        if space.end() >= len(text):
            if not private:
                out.append(text[at:])
            break
        if space.end() > at and not re.compile(r"\s*(public|private|protected)\s*:(?!:)").match(text, space.end()):
            end, shown = one(text, space.end())
        else:
            end, shown = space.end(), ""
            if end == at:
                end, shown = one(text, at)
        if not private:
            out.append(text[at:space.end()] + shown)
        at = end
    return "".join(out).rstrip()


def one(text, at):
    """(end, shown): the declaration that begins here, its bodies taken out."""
    end, body = declaration(text, at)
    if body:
        return end, text[at:body[0]].rstrip() + ";"
    shown = text[at:end]
    kind = KIND.match(shown)
    brace = shown.find("{")
    if kind and kind[1] in ("struct", "class", "union") and brace >= 0:
        inside = shown[brace + 1:closing(shown, brace) - 1]
        shown = shown[:brace + 1] + members(inside) + "\n" + shown[closing(shown, brace) - 1:]
    return end, shown


def name_of(shown):
    """What a declaration declares."""
    text = re.sub(r"//[^\n]*", "", shown)
    if define := re.match(r"#\s*define\s+(\w+)", text):
        return define[1]
    while re.match(r"\s*template\s*<", text):  # past the parameters
        text = text[past_angles(text, text.index("<")):]
        text = re.sub(r"\A\s*requires\s*\((?:[^()]|\([^()]*\))*\)(\s*(&&|\|\|)\s*\((?:[^()]|\([^()]*\))*\))*", "", text)
        text = re.sub(r"\A\s*requires\s+!?[\w:]+(<[^\n]*>)?(::value)?(\s*(&&|\|\|)\s*!?[\w:]+(<[^\n]*>)?)*\s*\n",
                      "\n", text)
    text = re.sub(r"\[\[.*?\]\]|__attribute__\(\(.*?\)\)|\balignas\(\w+\)", "", text, flags=re.S)
    kind = r"\s*(?:typedef\s+)?(?:struct|class|union|enum(?:\s+class)?|concept|using)"
    if match := re.match(kind + r"\s*\{\s*(?:/\*.*?\*/\s*)*(\w+)", text, re.S):  # the name stands behind, or nowhere
        behind = re.search(r"\}\s*(\w+)\s*;$", text)
        return behind[1] if behind else match[1]
    if match := re.match(kind + r"\s+([A-Za-z_][\w:]*)", text):
        return match[1]
    if match := re.search(r"\boperator\s*([^\s(]+|\(\))\s*\(", text):
        return "operator" + match[1]
    if match := re.search(r"\(\*(\w+)\)", text):
        return match[1]
    plain = re.sub(r"\b(OPD_\w+|noexcept|explicit|decltype|requires)\s*\(", r"\1[", text)
    call = re.search(r"([A-Za-z_~]\w*)\s*\(", plain)
    value = re.search(r"([A-Za-z_]\w*)\s*(<[^=;]*>)?(\[[^\]]*\])?\s*[={;]", text)
    if call and not (value and value.start() < call.start() and "=" in text[value.start():call.start()]):
        return call[1]
    return value[1] if value else call[1] if call else text.strip().split("\n")[0]


def declarations(text):
    """(comment, shown, name) of every public declaration at the level of a namespace, in order."""
    for _, comment, shown, name in placed(text):
        yield comment, shown, name


def placed(text):
    """(where it begins, comment, shown, name) of every public declaration at the level of a namespace, in order."""
    at, rooms, comment = 0, [], []
    while at < len(text):
        line = re.compile(r"[^\n]*").match(text, at)
        if text[at].isspace():
            if re.compile(r"[ \t]*\n[ \t]*\n").match(text, at):
                comment = []
            at += 1
        elif text.startswith("//", at):
            if text.startswith("///", at):
                comment.append(line[0])
            elif not re.match(r"// (clang-format|NOLINT)", line[0]):
                comment = []
            at = line.end()
        elif text.startswith("/*", at):
            said = SKIPPED.match(text, at)
            comment, at = [said[0]], said.end()
        elif text[at] == "#":
            whole = re.compile(r"(?:[^\n\\]|\\.|\\\n)*").match(text, at)
            if comment and re.match(r"#\s*define\b", whole[0]):
                shown = re.match(r"#\s*define\s+\w+(\([^)]*\))?", whole[0])[0]
                yield at, "\n".join(comment), shown, name_of(shown)
            comment, at = [], whole.end()
        elif text[at] == "}":
            rooms.pop()
            comment, at = [], at + 1
        elif opened := re.compile(r"(?:inline\s+)?namespace(\s+[\w:]+)?\s*\{|extern\s+\"C\"\s*\{").match(text, at):
            rooms += [(opened[1] or "").strip()]
            comment, at = [], opened.end()
        else:
            end, shown = one(text, at)
            parts = [part for room in rooms for part in room.split("::") if part and part not in ("opd", "OPD_ISA")]
            if not any(PRIVATE.match(part) for part in parts):
                yield at, "\n".join(comment), shown, "::".join(parts + [name_of(shown)])
            comment, at = [], end


def own(shown):
    """Whether a declaration says something of its own: it is no forward declaration, definition of a member, deduction
    guide, specialisation, assertion, nor what only archives and enumerations' names need."""
    text = re.sub(r"\s+", " ", re.sub(r"/\*.*?\*/|//[^\n]*", "", shown, flags=re.S)).strip()
    text = re.sub(r"^template ?(?=<)", "", text)
    text = text[past_angles(text, 0):].strip() if text.startswith("<") else text
    return not (re.match(r"(struct|class|enum|union)( class)? [\w:]+( : [\w:]+)?;$", text)
                or re.match(r"(extern )?template\b|static_assert|using namespace|OPD_MISFIT", text)
                or re.match(r"typedef struct (\w+) \1;", text)
                or re.match(r"(?:requires\b.*? )?(\w+)\([^()]*\) ?-> ?\1\b", text)
                or re.search(r"\b\w+(<[^()]*>)?::~?(\w+|operator\W+)\(.*\)[^()]*;$", text)
                and "=" not in text.split("(")[0]
                or re.match(r"(struct|inline constexpr \w+|constexpr \w+|class) [\w:]+<", text)
                or re.search(r"\b(last_of|fields)\(", text.split("{")[0]) and not text.startswith("concept"))


def uncommented(text, c_header):
    """(line, name) of the declarations that nothing is said of. One comment will do for overloads; in a header of the C
    interface, for declarations that follow each other without an empty line. A comment behind the declaration counts. A
    function that gives an enumeration's name needs none."""
    said, last, last_said = set(), None, False
    for at, comment, shown, name in placed(text):
        end = at + len(shown) if text[at] == "#" else one(text, at)[0]
        behind = re.compile(r"[^\n]*").match(text, end)[0]
        between = "" if last is None else text[last:at]
        together = c_header and last_said and not re.search(r"\n\s*\n|\n#", between)
        has = bool(comment) or "//" in behind or "/*" in behind or together
        if has:
            said.add(name)
        elif own(shown) and name not in said and name.split("::")[-1] not in ("name_of", "to_string"):
            yield text.count("\n", 0, at) + 1, name
        last, last_said = end, has


def mentions():
    """Header to the pages below docs/ that name it, as (page, its title)."""
    found = {}
    for path in sorted((ROOT / "docs").rglob("*.md")):
        text = path.read_text()
        title = re.search(r"^# (.*)$", text, re.M)
        for name in set(re.findall(r"\bopd/[\w/]+\.(?:hpp|cuh|h)\b", text)):
            found.setdefault(name, []).append((path, title[1] if title else path.stem))
    return found


def marks():
    """The table of maturity in docs/versioning.md: what begins a header's path, or names the header, to its mark."""
    text = (ROOT / "docs/versioning.md").read_text()
    table = text[text.index("\n## Maturity"):]
    table = table[:table.index("\n## ", 4)]
    return {name: mark for mark, cell in re.findall(r"^\| \*\*(\w+)\*\* \|[^|]*\|([^|]*)\|$", table, re.M)
            for name in re.findall(r"`([^`]+)`", cell)}


def mark_of(name, table):
    """The mark of the longest entry that begins a header's name; `the rest` has no name of its own."""
    found = [entry for entry in table if name.removeprefix("opd/").startswith(entry)]
    return table[max(found, key=len)] if found else "tested"


def page(path, table, pages):
    """One header as Markdown, for a page in the folder of the header below api/."""
    text, name = path.read_text(), path.relative_to(INCLUDE).as_posix()
    up = "../" * (len(pathlib.PurePosixPath(name).parts))
    mark = f"{mark_of(name, table)} ([what that means]({up}versioning.md#maturity))"
    out = [f"# {name}", "", f"`#include <{name}>`, {mark}."]
    if pages:
        links = [f"[{title}]({up}{said.relative_to(ROOT / 'docs').as_posix()})" for said, title in pages]
        out += ["", "Explained in: " + ", ".join(links) + "."]
    out += ["", "````text", head_comment(text), "````", ""]
    seen = None
    for comment, shown, title in declarations(text):
        if own(shown):
            out += [f"## {title}", ""] if title != seen else []
            out += ["````cpp", (comment + "\n" if comment else "") + shown, "````", ""]
            seen = title
    return "\n".join(out)


def write(folder):
    """All pages, below folder/api; returns the lines of mkdocs' navigation."""
    table, said, nav = marks(), mentions(), ["  - API:", "      - api/index.md"]
    index = ["# Headers", "", "What each public header declares, without bodies. The marks are "
             "[explained](../versioning.md#maturity).", ""]
    for room, title in ROOMS:
        index += [f"## {title}", "", "| header | what it holds | |", "|---|---|---|"]
        nav.append(f"      - {title}:")
        for path in headers(room):
            name = path.relative_to(INCLUDE).as_posix()
            place = folder / "api" / (name + ".md")
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(page(path, table, said.get(name, [])))
            first = re.split(r"(?<=[.:;])\s|\n\n", head_comment(path.read_text()))[0]
            first = " ".join(first.split()).rstrip(":;.").replace("|", "\\|")
            first = "`".join(part if odd % 2 else re.sub(r"[*_\[\]]", r"\\\g<0>", part).replace("<", "&lt;")
                             for odd, part in enumerate(first.split("`")))
            index.append(f"| [{name.removeprefix('opd/')}]({name}.md) | {first} | {mark_of(name, table)} |")
            nav.append(f"          - {path.name}: api/{name}.md")
        index.append("")
    (folder / "api/index.md").write_text("\n".join(index))
    return nav


def check():
    table, count, documented, wrong = marks(), 0, 0, []
    names = [path.relative_to(INCLUDE).as_posix() for room, _ in ROOMS for path in headers(room)]
    wrong += [f"docs/versioning.md: no header begins with opd/{entry}" for entry in table
              if not any(name.startswith("opd/" + entry) for name in names)]
    for name in names:
        text = (INCLUDE / name).read_text()
        wrong += [] if head_comment(text) else [f"{name}: no comment at its head"]
        found = [(comment, title) for comment, shown, title in declarations(text) if own(shown)]
        count += len(found)
        documented += sum(bool(comment) for comment, _ in found)
    wrong += [line + " has no comment" for line in all_uncommented()]
    for line in wrong:
        print(line)
    print(f"{len(names)} headers, {count} public declarations, {documented} with a comment of their own")
    return 1 if wrong else 0


def all_uncommented():
    """As "file:line name", of every header with a page, and of those that make up the scheduler."""
    rooms = [room for room, _ in ROOMS] + [f"opd/sched/{part}" for part in ("meters", "policies", "scheduler")]
    return [f"{path.relative_to(ROOT).as_posix()}:{line} {name}" for room in rooms for path in headers(room)
            for line, name in uncommented(path.read_text(), path.suffix == ".h")]


def report():
    found = all_uncommented()
    print("\n".join(found + [f"{len(found)} public declarations without a comment"]))
    return 0


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    modes = {"--check": check, "--uncommented": report}
    sys.exit(modes[sys.argv[1]]() if sys.argv[1] in modes
             else print(page(pathlib.Path(sys.argv[1]).resolve(), marks(), [])))
