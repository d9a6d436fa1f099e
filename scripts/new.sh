#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
#
# scripts/new.sh KIND NAME: a new divergence, surrogate, sparse_cache (of a teacher), staleness_policy or drafter (of the trainer), in
# every file that knows of one. It compiles and passes the tests as it is: something known under the new name. What is printed at the end is what to write in its
# place.
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


def sparse_cache(n):
    header = f"include/opd/{n}.hpp"
    create(header, f"""
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// teacher::{n}: WHAT IS KNOWN OF A ROW.
//
// Until it is written: the same k ids in every row, as of a task's answers, said once. Whatever takes a teacher::support takes
// it, with the bits of a support whose rows repeat the ids. What else a cache of its own storage may have: caches.hpp.
#pragma once

#include <string>
#include <type_traits>

#include "opd/caches.hpp"
#include "opd/checks/shapes.hpp"
#include "opd/config.hpp"
#include "opd/error.hpp"
#include "opd/teacher.hpp"
#include "opd/view.hpp"

namespace opd::teacher {{

template <class Id, class L = float, space Space = space::host>
struct {n} {{
    static constexpr cache_kind kind = cache_kind::support;
    using id_type = Id;
    using log_type = L;
    static constexpr space memory_space = Space;
    vector_view<const Id, Space> ids;          ///< (k) distinct; -1: unused slot
    matrix_view<const L, Space> log_q;         ///< (N,k)
    vector_view<const L, Space> log_tail = {{}}; ///< (N) log of the teacher's mass outside the ids; empty: from log_q
    matrix_view<const L, Space> log_mu = {{}};   ///< (N,k) behaviour policy, for `reweighted`
    teacher::chosen_by chosen_by = teacher::chosen_by::teacher;

    OPD_HD OPD_INLINE detail::row_slots<Id, L> slots(index_t row) const {{
        return {{ids.data, log_q.row(row), log_mu.empty() ? nullptr : log_mu.row(row), ids.size}};
    }}
    OPD_HD index_t most_slots() const {{ return ids.size; }}
    void validate(index_t rows, index_t vocab) const {{
        detail::check_vector("teacher.ids", ids, -1);
        if (ids.size < 1 && rows > 0) throw invalid_input("teacher.ids", "is empty");
        if (ids.size > vocab)
            throw invalid_input("teacher.ids",
                                std::to_string(ids.size) + " ids for a vocabulary of " + std::to_string(vocab));
        detail::check_matrix("teacher.log_q", log_q, rows, ids.size);
        if (!detail::left_out(log_mu)) detail::check_matrix("teacher.log_mu", log_mu, rows, ids.size);
        detail::check_vector("teacher.log_tail", log_tail, rows);
    }}
}};
template <class Id, class L, space S>
{n}(vector_view<Id, S>, matrix_view<L, S>) -> {n}<std::remove_const_t<Id>, std::remove_const_t<L>, S>;

}} // namespace opd::teacher
""")
    umbrella = "include/opd/opd.hpp"
    include(umbrella, f"opd/{n}.hpp", first="opd/batch.hpp")
    insert("include/opd/teacher.hpp", f"//   teacher::{n}   IN ITS OWN HEADER\n", before="//   teacher::samples ")
    insert("docs/concepts/teacher-cache.md", f"| `teacher::{n}` | WHAT IS KNOWN OF A ROW | those of `teacher::support` |\n",
           before="| `teacher::samples`")
    create(f"tests/estimators/{n}_test.cpp", f"""
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// teacher::{n}: the bits of a teacher::support with the same entries; what it refuses.
#include <cstdint>
#include <doctest/doctest.h>
#include <vector>

#include <opd/opd.hpp>

using namespace opd;

TEST_CASE("{n}: the bits of the support with the same entries") {{
    constexpr index_t n = 2, vocab = 5, k = 3;
    const std::vector<double> z{{.1, .7, -1, .2, 0, 1, -.3, .4, .5, -2}}, log_q{{-1, -2, -1.5, -.7, -3, -2}};
    const std::vector<std::int32_t> ids{{4, 1, 2}}, repeated{{4, 1, 2, 4, 1, 2}};
    const auto logits = view(z.data(), n, vocab), of_ids = view(log_q.data(), n, k);
    const teacher::{n} cache{{view(ids.data(), k), of_ids}};
    const teacher::support same{{view(repeated.data(), n, k), of_ids}};
    cpu_backend be;
    const auto check = [&](const auto& estimator) {{
        std::vector<double> got(n * vocab, 9), want(n * vocab, 7);
        const auto a = evaluate(be, student::logits{{logits, view(got.data(), n, vocab)}}, cache, estimator);
        const auto b = evaluate(be, student::logits{{logits, view(want.data(), n, vocab)}}, same, estimator);
        CHECK(a.loss == b.loss);
        CHECK(got == want);
        CHECK(a.diagnostics.bad_rows == 0);
    }};
    check(renormalised{{reverse_kl{{}}}});
    check(tail_bucket{{reverse_kl{{}}}});
    const auto narrow = view(z.data(), n, 2);
    CHECK_THROWS_AS(evaluate(be, student::logits{{narrow}}, cache, tail_bucket{{reverse_kl{{}}}}), invalid_input);
}}
""")
    return f"estimators.{n}", [
        (header, "WHAT IS KNOWN OF A ROW, the columns, where a row's slots are"),
        (umbrella, "nothing: it includes the header"),
        ("include/opd/teacher.hpp", "a line of the list of caches"),
        ("docs/concepts/teacher-cache.md", "a line of the table"),
        (f"tests/estimators/{n}_test.cpp", "the bits of the teacher::support with the same entries; what validate refuses")]


def staleness_policy(n):
    header, policies, ledger = f"include/opd/sched/policies/{n}.hpp", "include/opd/sched/policies.hpp", "tests/sched/ledger_test.cpp"
    create(header, f"""
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// {n}: WHICH SCORED SEQUENCES MAKE A BATCH.
//
// Theorem: BOUND AND PROOF. Until they are written: edf's batches, so start lag <= tau, and no deadlock.
#pragma once

#include <vector>

#include "opd/sched/policies/edf.hpp"

namespace opd::sched::policies {{

class {n} : public edf {{
public:
    static constexpr policy_traits traits{{.name = "{n}", .automatic = true, .table_by_version = true}};
    using order = {n};
    using edf::edf;

    bool pick(index_t n, version_t now, std::vector<slot_t>& out) {{ return edf::pick(n, now, out); }}
}};

}} // namespace opd::sched::policies
""")
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
    header, drafters = f"examples/trainer/{n}_drafter.hpp", "examples/trainer/drafters.hpp"
    create(header, f"""
// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// WHAT IT GUESSES FROM.
//
// Until it is written: what came after the last place in the text where its last token stood before. It remembers nothing. One that
// does keeps it by lane, from begin to end, hears what was drawn, and writes it for a checkpoint by state (retrieval_drafter).
#pragma once

#include <algorithm>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>

#include "drafter.hpp"

namespace trainer {{

class {n}_drafter final : public drafter {{
public:
    void begin(index_t, const trajectory&) override {{}}
    void hear(std::span<const lane_news>, const policy&) override {{}}
    void end(index_t, const trajectory&, bool) override {{}}
    draft_work propose(std::span<const draft_wish> wishes) override {{
        for (const draft_wish& w : wishes) {{
            const std::span<const token> all(w.sequence->tokens);
            if (all.empty()) continue;
            const auto before = all.first(all.size() - 1);
            const auto found = std::find(before.rbegin(), before.rend(), all.back());
            const auto rest = all.subspan(static_cast<std::size_t>(found.base() - before.begin())); // after it
            const auto depth = std::min(rest.size(), static_cast<std::size_t>(w.depth));
            if (found != before.rend()) w.tree->graft(rest.first(depth), 1);
        }}
        return {{}};
    }}
    std::string state() const override {{ return {{}}; }}
    void restore(std::string_view state) override {{
        if (!state.empty()) throw std::invalid_argument("drafter: its state is too long");
    }}
}};

}} // namespace trainer
""")
    include(drafters, f"{n}_drafter.hpp", first="drafter.hpp")
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
for path in [*pathlib.Path("include").rglob("*.hpp"), pathlib.Path("examples/trainer/drafters.hpp")]:
    if re.search(rf"\b(struct|class|enum|namespace) {name}\b|\bX\({name},", path.read_text()):
        fail(f"{path} has a {name} already")
tests, todo = kinds[kind](name)
for path, text in texts.items():
    pathlib.Path(path).write_text(text)
print("Touched, and what to write there:")
for path, what in todo:
    print(f"  {path}: {what}")
print(f"Then: scripts/test.sh -R '{tests}', a line of CHANGELOG.md.")
PY
