// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What rows that are searched by chunks have in common.
#include <opd/rows/leaf_rows.hpp>

#include "fake.hpp"

using namespace opd::detail;

namespace fake {
struct of_leaf {
    using limits = leaf_limits;
    using type = edge_split;
    using best = scored;
};
using leaves = leaves_with<of_leaf>;

struct job {
    using logit_type = float;
    opd::matrix_view<const float> z;
};
struct rows_of : leaf_rows_base<fake::frame, fake::job> {
    using base = leaf_rows_base<fake::frame, fake::job>;
    using base::base;
    bool wants_masses() const;
    bool cuts() const;
    leaf_arrays at(const leaf_state&) const;
    std::size_t scratch_bytes() const;
    template <class Team>
    void row(Team& t) const {
        t.template fold<leaf_sweep<leaves, rows_of>>(*this);
        t.template each<leaf_masses<leaves, rows_of>>(*this);
        t.template each<kept_masses<leaves, rows_of>>(*this);
        t.template each<add_up<rows_of>>(*this);
    }
};
void all() { walk(rows_of({}, {}, 1)); }
} // namespace fake
