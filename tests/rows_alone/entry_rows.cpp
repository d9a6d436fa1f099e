// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What rows of few ids have in common: the sweep, the pullback, the scratch.
#include <opd/rows/entry_rows.hpp>

#include "fake.hpp"

using namespace opd::detail;

namespace fake {
struct arrays {
    entry_c* c;
    arrays(carver& scratch, index_t n) : c(scratch.take<entry_c>(n)) {}
};
template <class Frame, class Student, bool Excludes>
struct rows_of : rows_of_entries<engine, Frame, Student, support, of_entries, arrays> {
    using rows_of_entries<engine, Frame, Student, support, of_entries, arrays>::rows_of_entries;
    struct state_type : entry_state {
        engine::id_set excluded;
    };
    bool sweeps(const state_type&) const;
    template <class Team>
    void row(Team& t) const {
        t.template fold<student_sweep<engine, rows_of, Excludes>>(*this);
        pullback<engine, rows_of>::run(*this, t);
    }
};
void all(const support& cache) {
    walk(rows_of<frame, logits, false>({}, {}, cache, {}, 1));
    walk(rows_of<frame, made_in_tiles, true>({}, {}, cache, {}, 1));
    walk(rows_of<frame_of_shard, logits, true>({}, {}, cache, {}, 1));
}
} // namespace fake
