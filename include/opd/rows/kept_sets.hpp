// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The ids that a filter kept of a row, and what follows from them for p and for the tokens drawn from them.
#pragma once

#include <cmath>

#include "opd/config.hpp"
#include "opd/element.hpp"
#include "opd/entries.hpp"
#include "opd/rows/select_rows.hpp"
#include "opd/rows/sparse_math.hpp"
#include "opd/teacher.hpp"

namespace opd::detail {
inline namespace OPD_ISA {

/// Of one row, ascending.
template <class Id>
struct kept_set {
    const Id* ids = nullptr;
    index_t count = 0;
    OPD_HD index_t operator[](index_t j) const { return static_cast<index_t>(ids[j]); }
    /// Whether the j-th is an id of the vocabulary, above the one before it.
    OPD_HD bool sound(index_t j, index_t vocab) const {
        return (*this)[j] >= 0 && (*this)[j] < vocab && (j == 0 || (*this)[j - 1] < (*this)[j]);
    }
    /// Where an id stands; -1: it does not.
    OPD_HD index_t place_of(index_t wanted) const {
        const index_t at = first_from(ids, ids + count, wanted) - ids;
        return at < count && (*this)[at] == wanted ? at : -1;
    }
};
/// A row's set; empty where the offsets, which a host cannot read on a device, lead out of the ids.
OPD_HD auto kept_set_of(const auto& t, index_t row) {
    using set = kept_set<std::remove_cvref_t<decltype(t.kept_ids[0])>>;
    const index_t first = t.kept_offsets[row], last = t.kept_offsets[row + 1];
    return first < 0 || last > t.kept_ids.size || last <= first ? set{} : set{t.kept_ids.data + first, last - first};
}

/// The most ids that a set of these rows holds; on the host.
index_t widest_set(const auto& t, index_t rows) {
    index_t widest = t.widest;
    for (index_t r = 0; r < rows; ++r) {
        const index_t k = t.kept_offsets[r + 1] - t.kept_offsets[r];
        widest = widest < k ? k : widest;
    }
    return widest;
}

/// The id of a drawn token that its row's set does not hold.
inline constexpr index_t outside_kept_set = -3;

/// A drawn token on its row's set.
template <class Cache>
OPD_HD void put_on_set(sampled_entry& x, const Cache& t, index_t row) {
    if (x.id < 0) return;
    if (kept_set_of(t, row).place_of(x.id) < 0) x.id = outside_kept_set;
    if (!t.log_kept_q.empty()) x.log_q -= double(element<typename Cache::log_type>::load(t.log_kept_q[row]));
}

struct kept_set_state : selecting_state {
    double lse = 0;   ///< over K
    double sum_c = 0; ///< of the entries
};

/// The largest of the set's logits, k.set_logit(st, j), and Σ e^((z - largest)/T) with it.
struct normalise_kept_set : if_good {
    struct sums {
        double top = -1e300, mass = 0;
    };
    OPD_HD static sums part(const auto& k, const kept_set_state& st, auto at) {
        const index_t n = k.set(st).count;
        sums out;
        for (index_t j = at.id; j < n; j += at.count) {
            const double z = k.set_logit(st, j);
            if (!is_neg_inf(z) && z > out.top) out.top = z;
        }
        for (index_t j = at.id; j < n; j += at.count) {
            const double z = k.set_logit(st, j);
            if (!is_neg_inf(z)) out.mass += ::exp((z - out.top) * k.inv_s);
        }
        out.top *= k.inv_s;
        return out;
    }
    OPD_HD static sums merge(const sums& a, const sums& b) {
        if (!(a.mass > 0)) return b;
        if (!(b.mass > 0)) return a;
        const double top = a.top > b.top ? a.top : b.top;
        return {top, a.mass * ::exp(a.top - top) + b.mass * ::exp(b.top - top)};
    }
    OPD_HD static void finish(const auto&, kept_set_state& st, const sums& all) {
        st.report.bad |= !(all.mass > 0);
        if (!st.report.bad) st.report.lse = st.lse = all.top + ::log(all.mass);
    }
};

} // namespace OPD_ISA
} // namespace opd::detail
