// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Entries from a cache, and the answer of a support.
#include <opd/rows/sparse_math.hpp>

#include "fake.hpp"

using namespace opd::detail;

namespace fake {
template <class Student, class Cache>
void gather_from(const Student& student, const Cache& cache) {
    const opd::env e;
    opd::entry_facts facts = facts_of(e, 0);
    take_columns(facts, cache);
    (void)gathered(student, opd::row_place{0}, cache, e.frozen, 0, 1, 1, 0);
}
void all(const opd::raw_sums& s, opd::diagnostics& d) {
    gather_from(logits{}, samples{});
    gather_from(made_in_tiles{}, weighted{});
    gather_from(logits{}, opd::teacher::missing_mu<samples>{});
    (void)answer_support(of_entries{}, s, nullptr, nullptr, nullptr, nullptr, 0, 0, 1, nullptr,
                         static_cast<const float*>(nullptr), {}, d);
}
} // namespace fake
