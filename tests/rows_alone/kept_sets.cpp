// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The ids that a filter kept.
#include <opd/rows/kept_sets.hpp>

#include "fake.hpp"

using namespace opd::detail;

namespace fake {
using cache = opd::teacher::on_kept_sets<samples, int>;
struct rows_of {
    using state_type = kept_set_state;
    fake::frame frame;
    double inv_s = 1;
    auto set(const state_type&) const { return kept_set_of(cache{}, 0); }
    double set_logit(const state_type&, index_t) const;
    std::size_t scratch_bytes() const;
    template <class Team>
    void row(Team& t) const {
        t.template fold<normalise_kept_set>(*this);
    }
};
void all(const rows_of& k, opd::sampled_entry& x) {
    walk(k);
    put_on_set(x, cache{}, 0);
}
} // namespace fake
