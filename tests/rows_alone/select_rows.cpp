// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What a selector asks of a row, and a row's entropies.
#include <opd/rows/select_rows.hpp>

#include "fake.hpp"

using namespace opd::detail;

namespace fake {
struct rows_of {
    struct state_type : selecting_state {
        row_sweep swept;
    };
    static constexpr bool one_tile = true;
    fake::frame frame;
    logits student;
    selected_entries estimator;
    index_t vocab = 1;
    row_tile<float, float, float> tile(const state_type&, index_t, index_t) const;
    opd::row_place of_student(const state_type&) const;
    std::size_t scratch_bytes() const;
    template <class Team>
    void row(Team& t) const {
        t.template fold<measure_entropies<engine, number, true>>(*this);
        t.template fold<measure_entropies<engine, number, false>>(*this);
        select_row(*this, t);
    }
};
void all(const rows_of& k) { walk(k); }
} // namespace fake
