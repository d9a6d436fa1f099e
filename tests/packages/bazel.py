# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""bazel.py MODULE.bazel BUILD.bazel: where there is no Bazel of modules, its files are read as the calls that they are
(its language is a part of Python's grammar), and every pattern of a glob finds headers, and one finds each."""
import ast
import pathlib
import sys

module, build = (ast.parse(pathlib.Path(path).read_text(), path) for path in sys.argv[1:3])


def calls(tree):
    for line in tree.body:
        assert isinstance(line, ast.Expr) and isinstance(line.value, ast.Call), f"line {line.lineno} is no call"
        yield line.value.func.id, line.value


def value(call, name):
    return next(k.value for k in call.keywords if k.arg == name)


known = {"module", "bazel_dep", "load", "licenses", "exports_files", "cc_library"}
names = [name for tree in (module, build) for name, _ in calls(tree)]
assert set(names) <= known, set(names) - known
deps = {ast.literal_eval(value(call, "name")) for name, call in calls(module) if name == "bazel_dep"}
loads = [ast.literal_eval(call.args[0]) for name, call in calls(build) if name == "load"]
selects = [ast.literal_eval(key) for name, call in calls(build) if name == "cc_library"
           for node in ast.walk(call) if isinstance(node, ast.Dict) for key in node.keys]
for label in loads + selects:
    known_here = not label.startswith("@") or label[1:].split("//")[0] in deps
    assert known_here, f"{label}: {sys.argv[1]} has no such bazel_dep"
library = next(call for name, call in calls(build) if name == "cc_library")
assert ast.literal_eval(value(library, "includes")) == ["include"]
found = set()
for pattern in ast.literal_eval(value(library, "hdrs").args[0]):
    here = set(pathlib.Path().glob(pattern))
    assert here, f"{pattern} finds nothing"
    found |= here
missing = {path for path in pathlib.Path("include").rglob("*") if path.is_file()} - found
assert not missing, f"no glob finds {missing}"
print(f"no Bazel 7 or later: read, not built; {len(found)} headers")
