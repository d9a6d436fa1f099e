#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# scripts/new.sh KIND NAME: a new divergence, surrogate, sparse_cache (of a teacher), staleness_policy or drafter (of
# the trainer), in every file that knows of one, from the templates in scripts/new. It compiles and passes the tests as
# it is: something known under the new name. What is printed at the end is what to write in its place.
#     scripts/new.sh divergence hellinger
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec python3 - "$@" <<'PY'
import pathlib
import re
import sys

texts = {}  # path: what will stand there, once every place has been found


def fail(why):
    sys.exit(f"scripts/new.sh: {why}; nothing was written")


def text_of(path):
    if path not in texts:
        texts[path] = pathlib.Path(path).read_text()
    return texts[path]


def template(name, new):
    return pathlib.Path("scripts/new", name).read_text().replace("NAME", new)


def create(path, text):
    if pathlib.Path(path).exists():
        fail(f"{path} is there already")
    texts[path] = text.lstrip("\n")


def insert(path, text, before=None, after=None):
    """Whole lines, but for a template's licence, before, or after, the only line that begins so."""
    text = re.sub(r"^// SPDX.*\n", "", text)
    lines = text_of(path).splitlines(keepends=True)
    at = [i for i, line in enumerate(lines) if line.startswith(before or after)]
    if len(at) != 1:
        fail(f"{path} has {len(at)} lines that begin with {before or after!r}")
    lines.insert(at[0] + (before is None), text.lstrip("\n"))
    texts[path] = "".join(lines)


def include(path, header, first):
    """A line of the includes in alphabetic order that begin with `first`."""
    line = f'#include "{header}"\n'
    lines = text_of(path).splitlines()
    lines = lines[lines.index(f'#include "{first}"'):]
    lines = [x for x in lines if x.startswith('#include "')]
    insert(path, line, before=next((x for x in lines if x > line), None), after=lines[-1])


def append_choice(path, macro, line):
    """A last line X(...) in the list that a macro is."""
    found = re.search(rf"^#define {macro}\(X\)(.*\\\n)*.*\n", text_of(path), re.M)
    if not found:
        fail(f"{path} has no list {macro}")
    texts[path] = texts[path].replace(found[0], found[0].rstrip("\n") + f" \\\n    {line}\n")


def divergence(n):
    header = "include/opd/estimators/divergences.hpp"
    insert(header, f"//   {n:<17} Σ q (log q - log p)                 slope -q/p                    SOURCE\n//\n",
           before="// Shapes: logits (N,V)")
    texts[header] = re.sub(rf"//\n(//   {n} )", r"\1", texts[header])  # a line more of the same table
    insert(header, template("divergence.in", n), before="} // namespace opd")
    append_choice("include/opd/estimators/any.hpp", "OPD_DIVERGENCES", f'X({n}, ({n}{{}}), "FORMULA")')
    insert("tests/support/textbook.hpp", f"inline real value(const {n}&, const row& r) {{ return kl(r.log_q, r.log_p); }}\n",
           before="inline real value(const acceptance&")
    traits = "tests/support/traits.hpp"
    texts[traits] = text_of(traits).replace('    f("chi_squared", chi_squared{});\n',
                                            f'    f("chi_squared", chi_squared{{}});\n    f("{n}", {n}{{}});\n')
    insert("docs/estimators/divergences.md", f"| `{n}{{}}` | Σ q (log q - log p) | -q |\n", after="| `acceptance{}`")
    return "estimators.divergences|estimators.any", [
        (header, "FORMULA and SOURCE at the head; term and c; what is exact"),
        ("include/opd/estimators/any.hpp", "what a user reads of it; its parameters a, b"),
        ("tests/support/textbook.hpp", "the formula from p and q alone, as a textbook has it"),
        (traits, "the parameters that the suites walk over"),
        ("docs/estimators/divergences.md", "the table's line, and a section on when to use it")]


def surrogate(n):
    header = "include/opd/estimators/surrogates.hpp"
    insert(header, f"//   {n:<16} -rho A                                        -rho A                        SOURCE\n",
           before="//   estr{τ, ε, S}")
    insert(header, template("surrogate.in", n), before="/// A surrogate on the tokens with (log p")
    append_choice("include/opd/estimators/any.hpp", "OPD_SURROGATES", f'X({n}, ({n}{{}}), "FORMULA")')
    insert("tests/estimators/surrogates_test.cpp", f"""
    check_surrogate(
        "{n}", {n}{{}}, [](at_step t) {{ return -t.rho() * t.x.advantage; }}, nowhere);
""", before="    const auto log_r = [](at_step t)")
    insert("docs/estimators/surrogates.md", f"| `{n}` | -rho A | -rho A | |\n", before="| `estr{τ, ε, S}`")
    return "estimators.surrogates|estimators.any", [
        (header, "FORMULA and SOURCE at the head; loss and c; traits"),
        ("include/opd/estimators/any.hpp", "what a user reads of it; its parameters low, high, dual, cap, over"),
        ("tests/estimators/surrogates_test.cpp", "the loss as a function of log p, and its kinks"),
        ("docs/estimators/surrogates.md", "the table's line, and what it descends")]


def sparse_cache(n):
    header = f"include/opd/{n}.hpp"
    create(header, template("sparse_cache.in", n))
    umbrella = "include/opd/opd.hpp"
    include(umbrella, f"opd/{n}.hpp", first="opd/batch.hpp")
    insert("include/opd/teacher.hpp", f"//   teacher::{n}   IN ITS OWN HEADER\n", before="//   teacher::samples ")
    insert("docs/concepts/teacher-cache.md", f"| `teacher::{n}` | WHAT IS KNOWN OF A ROW | those of `teacher::support` |\n",
           before="| `teacher::samples`")
    create(f"tests/estimators/{n}_test.cpp", template("sparse_cache_test.in", n))
    return f"estimators.{n}", [
        (header, "WHAT IS KNOWN OF A ROW, the columns, where a row's slots are"),
        (umbrella, "nothing: it includes the header"),
        ("include/opd/teacher.hpp", "a line of the list of caches"),
        ("docs/concepts/teacher-cache.md", "a line of the table"),
        (f"tests/estimators/{n}_test.cpp", "the bits of the teacher::support with the same entries; what validate refuses")]


def staleness_policy(n):
    header, policies, ledger = f"include/opd/sched/policies/{n}.hpp", "include/opd/sched/policies.hpp", "tests/sched/ledger_test.cpp"
    create(header, template("staleness_policy.in", n))
    include(policies, f"opd/sched/policies/{n}.hpp", first="opd/sched/policies/areal.hpp")
    text = text_of(policies)
    listed = re.search(r"^using all = list<[^>]*>;", text, re.M)[0]
    last = re.search(r"(    \w+ = policies::number<policies::\w+>)\n};", text)[1]
    text = text.replace(listed, listed[:-2] + f", {n}>;")
    texts[policies] = text.replace(last, f"{last},\n    /// BOUND, AND WHAT IT PAYS WITH\n    {n} = policies::number<policies::{n}>")
    insert("docs/sched/policies.md", f"| `{n}` | WHICH SCORED SEQUENCES MAKE A BATCH | lag <= tau | |\n", before="| `drop` | what was")
    text = text_of(ledger).replace("        case staleness_policy::edf:", f"        case staleness_policy::{n}:\n        case staleness_policy::edf:")
    texts[ledger] = re.sub(r"(constexpr staleness_policy kept\[\] = {[^}]*)}", rf"\1, staleness_policy::{n}}}", text)
    return "sched.ledger|sched.settings|sched.worlds", [
        (header, "WHICH SCORED SEQUENCES MAKE A BATCH, BOUND AND PROOF; the order, if edf's or completion_order is not"),
        (policies, "its line: BOUND, AND WHAT IT PAYS WITH"),
        (ledger, "its rule and its bound, apart from edf's; support/witness.hpp wants a bound other than tau"),
        ("docs/sched/policies.md", "the table's line, and a section")]


def drafter(n):
    header, drafters = f"examples/trainer/speculation/{n}_drafter.hpp", "examples/trainer/speculation/drafters.hpp"
    create(header, template("drafter.in", n))
    include(drafters, f"speculation/{n}_drafter.hpp", first="speculation/drafter.hpp")
    append_choice(drafters, "TRAINER_DRAFTERS", f'X({n}, "WHAT IT GUESSES FROM", {n}_drafter, )')
    insert("examples/trainer/README.md", f"| `{n}` | WHAT IT GUESSES FROM |\n", before="| `auto` | those of")
    return "trainer.drafters|trainer.speculation", [
        (header, "WHAT IT GUESSES FROM, and how"),
        (drafters, "what a user reads of it; what it is made of"),
        ("examples/trainer/README.md", "the table's line")]


kinds = {"divergence": divergence, "surrogate": surrogate, "sparse_cache": sparse_cache, "staleness_policy": staleness_policy, "drafter": drafter}
if len(sys.argv) != 3 or sys.argv[1] not in kinds:
    fail(f"KIND NAME, where KIND is one of {', '.join(kinds)}")
kind, name = sys.argv[1:]
if not re.fullmatch(r"[a-z]+(_[a-z0-9]+)*", name):
    fail(f"a name is in snake_case, not {name!r}")
for path in [*pathlib.Path("include").rglob("*.hpp"), pathlib.Path("examples/trainer/speculation/drafters.hpp")]:
    if re.search(rf"\b(struct|class|enum|namespace) {name}\b|\bX\({name},", path.read_text()):
        fail(f"{path} has a {name} already")
tests, steps = kinds[kind](name)
for path, text in texts.items():
    pathlib.Path(path).write_text(text)
print("Touched, and what to write there:")
for path, what in steps:
    print(f"  {path}: {what}")
print(f"Then: scripts/test.sh -R '{tests}', a line of CHANGELOG.md.")
PY
