# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""opd/_c*.py against the headers of include/opd/c: members, their order and size, enumerators, functions."""

import ctypes
import enum
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
import unittest

from opd import _c, _c_rows, _c_sched, _c_spec

INCLUDE = pathlib.Path(__file__).resolve().parents[2] / "include"
TYPES = {
    "size_t": ctypes.c_size_t,
    "int": ctypes.c_int,
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "uint8_t": ctypes.c_uint8,
    "uint16_t": ctypes.c_uint16,
    "uint32_t": ctypes.c_uint32,
    "uint64_t": ctypes.c_uint64,
    "double": ctypes.c_double,
    "float": ctypes.c_float,
    "void*": ctypes.c_void_p,
    "char*": ctypes.c_char_p,
}


MIRRORS = (_c, _c_rows, _c_sched, _c_spec)


def mirror_of(name):
    return next(getattr(m, name) for m in MIRRORS if hasattr(m, name))


def has_mirror(name):
    return any(hasattr(m, name) for m in MIRRORS)


HEADERS = [h for m in MIRRORS for h in m.HEADERS]
FUNCTIONS = {name: f for m in MIRRORS for name, f in m.FUNCTIONS.items()}


def parse(text):
    """({struct: [(member, type, count)]}, {enum: {enumerator: value}}, {constant: value}) of a header."""
    text = re.sub(r"/\*.*?\*/", " ", text, flags=re.S)
    constants = {m[1]: int(m[2]) for m in re.finditer(r"^#define (\w+) \(?(-?\d+)\)?\s*$", text, re.M)}
    structs, enums = {}, {}
    for m in re.finditer(r"typedef struct(?:\s+\w+)?\s*\{(.*?)\}\s*(\w+)\s*;", text, re.S):
        members = []
        for line in filter(None, (x.strip() for x in m[1].split(";"))):
            line = re.sub(r"\b(const|struct)\b", "", line).strip()
            if (callback := re.match(r"([\w*\s]+?)\s*\(\*(\w+)\)\((.*)\)$", line, re.S)) is not None:
                members.append((callback[2], (callback[1], *callback[3].split(",")), 1))
                continue
            kind, names = re.match(r"(\w+)\s*(.*)", line, re.S).groups()
            for name in names.split(","):
                stars, name, count = re.match(r"\s*(\**)\s*(\w+)\s*(?:\[(\w+)\])?\s*$", name).groups()
                count = 1 if count is None else int(constants.get(count, count))
                members.append((name, kind + stars, count))
        structs[m[2]] = members
    for m in re.finditer(r"typedef enum(?:\s+\w+)?\s*\{(.*?)\}\s*(\w+)\s*;", text, re.S):
        value, values = -1, {}
        for item in filter(None, (x.strip() for x in m[1].split(","))):
            name, _, given = (x.strip() for x in item.partition("="))
            value = int(given.rstrip("U"), 0) if given else value + 1
            values[name] = value
        enums[m[2]] = values
    return structs, enums, constants


def types_of(callback):
    """Of a pointer to a function: its result's and its arguments', whose names are left out."""
    result, *arguments = callback
    return [type_of(result), *(type_of(re.sub(r"\b\w+\s*$", "", a)) for a in arguments)]


def type_of(text):
    """What ctypes must have for a type of the header."""
    text = re.sub(r"\b(const|struct)\b", "", text).replace(" ", "").replace("\n", "")
    if text in TYPES:
        return TYPES[text]
    if text.endswith("*"):
        inner = text[:-1]
        mirror = inner in TYPES or has_mirror(inner) or inner.endswith("*")
        return ctypes.POINTER(type_of(inner)) if mirror else ctypes.c_void_p  # a handle
    mirror = mirror_of(text)
    return ctypes.c_int if issubclass(mirror, enum.IntEnum) else mirror


class Headers(unittest.TestCase):
    def each_header(self):
        for name in HEADERS:
            yield name, parse((INCLUDE / "opd/c" / name).read_text())

    def test_every_struct_and_its_members(self):
        seen = callbacks = 0
        for header, (structs, _, _) in self.each_header():
            for struct, members in structs.items():
                with self.subTest(header=header, struct=struct):
                    mirror = mirror_of(struct)
                    self.assertEqual([m[0] for m in members], [f[0] for f in mirror._fields_])
                    for (name, kind, count), (_, of_mirror) in zip(members, mirror._fields_):
                        if isinstance(kind, tuple):
                            self.assertEqual(types_of(kind), [of_mirror._restype_, *of_mirror._argtypes_], name)
                            callbacks += 1
                            continue
                        expected = type_of(kind)
                        if count == 1:
                            self.assertIs(expected, of_mirror, name)
                        else:
                            self.assertEqual((expected, count), (of_mirror._type_, of_mirror._length_), name)
                    seen += 1
        self.assertGreaterEqual(seen, 10)
        self.assertEqual(callbacks, 4)  # of spec.h: accept, draw, draw, draw

    def test_every_enumerator(self):
        seen = 0
        for header, (_, enums, _) in self.each_header():
            for name, values in enums.items():
                with self.subTest(header=header, enum=name):
                    self.assertEqual(values, {e.name: int(e) for e in mirror_of(name)})
                    seen += 1
        self.assertGreaterEqual(seen, 11)

    def test_nothing_is_mirrored_that_no_header_has(self):
        known = set()
        for _, (structs, enums, _) in self.each_header():
            known |= set(structs) | set(enums)
        mirrors = {
            name
            for name, x in [x for m in MIRRORS for x in vars(m).items()]
            if isinstance(x, type)
            and name.startswith(("opd_", "DL"))
            and issubclass(x, (ctypes.Structure, enum.IntEnum))
        }
        self.assertEqual(mirrors, known)

    def test_constants(self):
        constants = {}
        for _, (_, _, found) in self.each_header():
            constants.update(found)
        self.assertEqual(_c.ABI_VERSION, constants["OPD_ABI_VERSION"])
        self.assertEqual(_c.STALENESS_BINS, constants["OPD_STALENESS_BINS"])
        for name in ("ZERO", "BY_POLICY", "AUTOMATIC", "WIDEST", "FAILURES"):
            self.assertEqual(getattr(_c_sched, name), constants["OPD_" + name])
        self.assertEqual(_c_rows.RATIO_BINS, constants["OPD_RATIO_BINS"])

    def test_functions_are_declared_with_as_many_arguments(self):
        text = "".join((INCLUDE / "opd/c" / h).read_text() for h in HEADERS)
        text = re.sub(r"/\*.*?\*/", " ", text, flags=re.S)
        declared = {
            m[2]: (m[1].strip(), [] if m[3].strip() == "void" else m[3].split(","))
            for m in re.finditer(r"OPD_C_API ([\w\s*]+?)\b(opd_\w+)\(([^)]*)\);", text)
        }
        for name, (result, arguments) in FUNCTIONS.items():
            with self.subTest(function=name):
                self.assertIn(name, declared)
                self.assertEqual(len(arguments), len(declared[name][1]))
                for mine, theirs in zip(arguments, declared[name][1]):
                    self.assertIs(type_of(re.sub(r"\b\w+\s*$", "", theirs)), mine, theirs)
                self.assertIs(None if declared[name][0] == "void" else type_of(declared[name][0]), result)

    def test_every_function_of_speculation_and_of_the_queue_is_called(self):
        for header, prefix in (("spec.h", "opd_"), ("sched.h", "opd_queue_")):
            text = re.sub(r"/\*.*?\*/", " ", (INCLUDE / "opd/c" / header).read_text(), flags=re.S)
            declared = {m[1] for m in re.finditer(r"OPD_C_API [\w\s*]+?\b(opd_\w+)\(", text) if m[1].startswith(prefix)}
            self.assertGreaterEqual(len(declared), 17)
            self.assertEqual(declared - set(FUNCTIONS), set())

    def test_a_compiler_agrees_about_sizes_and_offsets(self):
        compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
        if compiler is None:
            self.skipTest("no C compiler")
        lines, expected = [], []
        for _, (structs, _, _) in self.each_header():
            for struct in structs:
                mirror = mirror_of(struct)
                lines.append(f'printf("{struct} %zu\\n", sizeof({struct}));')
                expected.append(f"{struct} {ctypes.sizeof(mirror)}")
                for field, *_ in mirror._fields_:
                    lines.append(f'printf("{struct}.{field} %zu\\n", offsetof({struct}, {field}));')
                    expected.append(f"{struct}.{field} {getattr(mirror, field).offset}")
        with tempfile.TemporaryDirectory() as folder:
            source, program = pathlib.Path(folder, "sizes.c"), pathlib.Path(folder, "sizes")
            source.write_text(
                '#include <stdio.h>\n#include "opd/c/opd.h"\nint main(void) {\n' + "\n".join(lines) + "\nreturn 0; }\n"
            )
            subprocess.run([compiler, "-std=c99", f"-I{INCLUDE}", str(source), "-o", str(program)], check=True)
            printed = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout.split("\n")
        self.assertEqual(expected, printed[:-1])


if __name__ == "__main__":
    unittest.main()
