#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# scripts/new.sh KIND NAME: a new divergence or surrogate, in every file that knows of one. It compiles and passes the tests as it is:
# a known formula under the new name. What is printed at the end is what to write in its place.
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


def create(path, text):
    if pathlib.Path(path).exists():
        fail(f"{path} is there already")
    texts[path] = text.lstrip("\n")


def insert(path, text, before=None, after=None):
    """Whole lines before, or after, the only line that begins so."""
    lines = text_of(path).splitlines(keepends=True)
    at = [i for i, line in enumerate(lines) if line.startswith(before or after)]
    if len(at) != 1:
        fail(f"{path} has {len(at)} lines that begin with {before or after!r}")
    lines.insert(at[0] + (before is None), text.lstrip("\n"))
    texts[path] = "".join(lines)


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
    insert(header, f"""
/// FORMULA
/// Until it is written: forward KL, Σ q (log q - log p). `term` and `c` are what a divergence must have. forward_kl above has what
/// may come beside them: sums over raw logits in one sweep, the claim that it is an f-divergence, which drawn tokens ask for.
struct {n} {{
    static constexpr bool f_divergence = true;
    template <class F>
    OPD_HD OPD_INLINE F term(const row_constants<F>& r, const dense_entry<F>& e) const {{
        return forward_kl{{}}.term(r, e);
    }}
    template <class F>
    OPD_HD OPD_INLINE F c(const row_constants<F>& r, const dense_entry<F>& e) const {{
        return forward_kl{{}}.c(r, e);
    }}
    template <class F>
    OPD_HD OPD_INLINE F nonnegative_term(const dense_entry<F>& e) const {{
        return forward_kl{{}}.nonnegative_term(e);
    }}
    OPD_HD static constexpr bool infinite_where_student_zero() {{ return true; }}
}};

""", before="} // namespace opd")
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
    insert(header, f"""
/// FORMULA
/// Until it is written: -rho A. A bound comes as a member with a default, checked by validate(), as in truncated_is; a column of the
/// cache by reads_columns(), as in decoupled_ppo. traits(): whose gradient it descends.
struct {n} {{
    static constexpr estimator_traits traits(law) {{ return {{}}; }}
    OPD_HD OPD_INLINE token_out operator()(const token_in& x) const {{
        const double rho = ::exp(x.log_ratio);
        return {{-rho * x.advantage, -rho * x.advantage}};
    }}
}};

""", before="/// A surrogate on the tokens with (log p")
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


kinds = {"divergence": divergence, "surrogate": surrogate}
if len(sys.argv) != 3 or sys.argv[1] not in kinds:
    fail(f"KIND NAME, where KIND is one of {', '.join(kinds)}")
kind, name = sys.argv[1:]
if not re.fullmatch(r"[a-z]+(_[a-z0-9]+)*", name):
    fail(f"a name is in snake_case, not {name!r}")
for path in pathlib.Path("include").rglob("*.hpp"):
    if re.search(rf"\b(struct|class|enum|namespace) {name}\b", path.read_text()):
        fail(f"{path} has a {name} already")
tests, todo = kinds[kind](name)
for path, text in texts.items():
    pathlib.Path(path).write_text(text)
print("Touched, and what to write there:")
for path, what in todo:
    print(f"  {path}: {what}")
print(f"Then: scripts/test.sh -R '{tests}', a line of CHANGELOG.md.")
PY
