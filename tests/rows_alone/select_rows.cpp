// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What a selector asks of a row of entries.
#include <opd/rows/select_rows.hpp>

#include "fake.hpp"

using namespace opd::detail;

namespace fake {
struct rows_of {
    using state_type = selecting_state;
    fake::frame frame;
    selected_entries estimator;
    std::size_t scratch_bytes() const;
    template <class Team>
    void row(Team& t) const {
        select_row(*this, t);
    }
};
void all(const rows_of& k) { walk(k); }
} // namespace fake
