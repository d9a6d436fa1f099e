// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The ids at or above a cut, ascending: counted leaf by leaf, placed, written.                              1 or 2
// reads
#pragma once

#include <cstddef>
#include <type_traits>

#include "opd/config.hpp"
#include "opd/draw.hpp"
#include "opd/rows/leaf_rows.hpp"

namespace opd::detail {
inline namespace OPD_ISA {

template <class Leaves, class Frame, class Job>
struct kept_rows : leaf_rows_base<Frame, Job> {
    using base = leaf_rows_base<Frame, Job>;
    using base::frame, base::job, base::vocab;
    using typename base::state_type;

    kept_rows(const Frame& frame_, const Job& job_) : base(frame_, job_, 1) {}
    std::size_t scratch_bytes() const {
        carver c;
        (void)leaf_arrays(c, leaves_of(vocab));
        return c.used;
    }
    OPD_HD leaf_arrays at(const leaf_state& st) const {
        carver c{st.scratch};
        return {c, leaves_of(vocab)};
    }
    OPD_HD OPD_OF_KERNEL void row(auto& team) const {
        team.template each<take_cut>(*this);
        team.template each<count>(*this);
        team.template each<place>(*this);
        team.template each<write>(*this);
    }

    struct take_cut : if_kept, by_one<take_cut> {
        OPD_HD static void once(const kept_rows& k, leaf_state& st) { st.cut = k.job.cut[st.row]; }
    };
    /// visit(id) for what is kept of a leaf.
    OPD_HD OPD_INLINE void of_leaf(const leaf_state& st, index_t l, auto visit) const {
        const index_t first = l * ids_of_leaf, last = first + ids_of_leaf < vocab ? first + ids_of_leaf : vocab;
        for (index_t i = first; i < last; ++i)
            if (st.cut.keeps(logit_within(job.z(st.row, i)), i)) visit(i);
    }
    struct count : if_kept {
        OPD_HD static void run(const kept_rows& k, const leaf_state& st, auto at) {
            leaf_arrays a = k.at(st);
            for (index_t l = at.id; l < leaves_of(k.vocab); l += at.count) {
                index_t n = 0;
                k.of_leaf(st, l, [&](index_t) { ++n; });
                a.count[l] = n;
            }
        }
    };
    struct place : if_kept, by_one<place> {
        OPD_HD static void once(const kept_rows& k, leaf_state& st) {
            const index_t all = counts_to_places(k.at(st).count, leaves_of(k.vocab));
            const index_t first = k.first(st), last = k.last(st);
            st.report.bad |= all != last - first || all == 0;
        }
    };
    struct write : if_kept {
        OPD_HD static void run(const kept_rows& k, const leaf_state& st, auto at) {
            using Id = std::remove_cvref_t<decltype(k.job.ids[0])>;
            const leaf_arrays a = k.at(st);
            if (st.report.bad)
                for (index_t i = k.first(st) + at.id; i < k.last(st); i += at.count) k.job.ids[i] = static_cast<Id>(-1);
            else
                for (index_t l = at.id; l < leaves_of(k.vocab); l += at.count) {
                    index_t to = k.first(st) + a.count[l];
                    k.of_leaf(st, l, [&](index_t i) { k.job.ids[to++] = static_cast<Id>(i); });
                }
        }
    };
    /// The row's room, within what there is.
    OPD_HD index_t within(index_t i) const { return i < 0 ? 0 : (i > job.ids.size ? job.ids.size : i); }
    OPD_HD index_t first(const leaf_state& st) const { return within(job.offsets[st.row]); }
    OPD_HD index_t last(const leaf_state& st) const { return within(job.offsets[st.row + 1]); }
};

} // namespace OPD_ISA
} // namespace opd::detail
