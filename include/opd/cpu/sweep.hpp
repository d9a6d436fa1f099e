// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The CPU's sweep over one row of student logits z and teacher logits y: normalisers and raw sums (row_program.hpp)
// in one pass over memory, in leaves of 1,024 entries at absolute indices.
//
// Per leaf the sums run in the lanes, relative to the anchors found so far, on the speculation that no new maximum
// comes; where one did, the sums move to the new anchor in double and the leaf is done again from L1. A leaf is
// staged through an L1 buffer, else read in place, when it
//   - holds an anchor (excluded from the sums) or an id that the caller excludes,
//   - is shorter than 1,024 entries or not of a lane type (converted, padded with lowest),
//   - holds something of magnitude 1e30 or more: -inf becomes -1e30, NaN and +inf make the row bad.
// All classification is by the bits of the logits, so it holds under -Ofast.
#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "opd/config.hpp"
#include "opd/cpu/leaf.hpp"
#include "opd/element.hpp"
#include "opd/lanes.hpp"
#include "opd/row_program.hpp"
#include "opd/rows/row_sweep.hpp"

namespace opd::detail {
inline namespace OPD_ISA {

/// Ascending, distinct ids that are looked at, but neither summed nor made an anchor (tails); `end - begin` may be 0.
struct id_range {
    const index_t* begin = nullptr;
    const index_t* end = nullptr;
};

/// Who does not want to know what each leaf holds, nor its exponentials.
struct no_note {
    static constexpr bool of_some = false; ///< whether it keeps some leaves and not others
    OPD_INLINE void leaf(index_t, double, const raw_sums&) const {}
    OPD_INLINE nowhere place(index_t) const { return {}; }
};
/// Keeps numbers of each id from `first` on, an anchor's 1 too: its exponentials, the student's alone, or the student's
/// and expm1(-k delta). They are relative to the anchors of their time: the last ones from the leaf on that holds
/// these.
template <class Value, kept What>
struct keep_numbers {
    static constexpr bool of_some = What == kept::student;
    Value *s, *t;
    index_t first;
    Value* lost; ///< `of_some`: where a leaf before `first` goes
    OPD_INLINE bool keeps(index_t begin) const { return !of_some || begin >= first; }
    OPD_INLINE void leaf(index_t begin, double, const raw_sums& at) const {
        if (!keeps(begin)) return;
        if (at.s >= begin && at.s < begin + leaf_size) s[at.s - first] = Value(1);
        if (What == kept::exponentials && at.t >= begin && at.t < begin + leaf_size) t[at.t - first] = Value(1);
    }
    OPD_INLINE kept_leaf<Value, What> place(index_t begin) const {
        if (!keeps(begin)) return {lost, lost};
        return {s + (begin - first), of_some ? nullptr : t + (begin - first)};
    }
};

/// Sweeps n more entries of z (and of y), which are those of the ids from `first` on, a multiple of 1,024.
/// `excluded`: of these ids. note.leaf(begin, mass, sums): the student's mass of a leaf, its anchor's term left out
/// if the leaf holds it, in units of the anchor that `sums` then has.
template <class F, bool Teacher, raw_sums_needed Need, class Z, class Y, class Note = no_note>
void sweep_tile(row_sweep& out, const Z* z, const Y* y, index_t first, index_t n, id_range excluded = {},
                const Note& note = {}) {
    constexpr bool direct = loads_directly<F, Z> && (!Teacher || loads_directly<F, Y>);
    if (out.contents.bad) return;
    raw_sums& s = out.sums;
    staged_leaf<F> stage;
    const index_t* next_excluded = excluded.begin;
    anchor_lanes<F> a(s);
    const index_t last = first + n;
    for (index_t begin = first; begin < last; begin += leaf_size) {
        const int count = static_cast<int>(std::min<index_t>(leaf_size, last - begin));
        const index_t end = begin + count;
        const Z* const leaf_z = z + (begin - first);
        const Y* const leaf_y = Teacher ? y + (begin - first) : nullptr; // a student's sweep has none
        const index_t* first_excluded = next_excluded;
        while (next_excluded != excluded.end && *next_excluded < end) ++next_excluded;
        const bool excludes = first_excluded != next_excluded;

        if constexpr (direct)
            if (s.s >= 0 && !excludes && count == leaf_size && !out.ends_out_of_range) {
                const auto l = [&] {
                    if constexpr (Note::of_some)
                        if (!note.keeps(begin))
                            return fold_in_place<F, Teacher, Need>(leaf_z, leaf_y, count, a, nowhere{});
                    return fold_in_place<F, Teacher, Need>(leaf_z, leaf_y, count, a, note.place(begin));
                }();
                if (!l.fall_z.beyond(a.limit_s) && !(Teacher && l.fall_y.beyond(a.limit_t))) {
                    note.leaf(begin, add_leaf<Teacher, Need>(out, l), s);
                    continue;
                }
            }
        const int full = staged_leaf<F>::load(stage.z, leaf_z, count);
        if constexpr (Teacher) staged_leaf<F>::load(stage.y, leaf_y, count);
        // holes come in runs: after a leaf that had some, cutting at once is cheaper than asking first, and changes
        // no other leaf
        if (out.ends_out_of_range || stage.template holds_out_of_range<Teacher>(count)) {
            const leaf_contents c = stage.template cut<Teacher>(count);
            out.contents.merge(c.row);
            out.out_of_range |= out.ends_out_of_range = c.out_of_range;
        }
        if (out.contents.bad) return;
        for (const index_t* i = first_excluded; i != next_excluded; ++i) stage.z[*i - begin] = staged_leaf<F>::lowest;

        // new anchors, if this leaf holds a larger entry
        const int top_z = top_of_leaf<F>(stage.z, full, s.s < 0 ? -2e30 : s.z_s);
        if (top_z >= 0) out.student_to(begin + top_z, double(stage.z[top_z]), Teacher ? double(stage.y[top_z]) : 0);
        if constexpr (Teacher) {
            const int top_y = top_of_leaf<F>(stage.y, full, s.t < 0 ? -2e30 : s.y_t);
            if (top_y >= 0) out.teacher_to(begin + top_y, double(stage.z[top_y]), double(stage.y[top_y]));
        }
        // the leaf's sums, without anchors and excluded ids
        const typename F::value_type *mass_z = stage.z, *mass_y = stage.y;
        if (s.s >= begin && s.s < end) {
            mass_z = std::copy_n(stage.z, full, stage.z_masked) - full;
            stage.z_masked[s.s - begin] = staged_leaf<F>::lowest;
        }
        if (Teacher && s.t >= begin && s.t < end) {
            mass_y = std::copy_n(stage.y, full, stage.y_masked) - full;
            stage.y_masked[s.t - begin] = staged_leaf<F>::lowest;
        }
        a = anchor_lanes<F>(s);
        const auto l = fold_staged<F, Teacher, Need>(stage, mass_z, mass_y, full, a, note.place(begin));
        note.leaf(begin, add_leaf<Teacher, Need>(out, l), s);
    }
}

/// Sweeps a row of n entries.
template <class F, bool Teacher, raw_sums_needed Need, class Z, class Y>
row_sweep sweep_row(const Z* z, const Y* y, index_t n, double inv_s, double inv_t, double k) {
    row_sweep out = row_sweep::begin(inv_s, inv_t, k, Need.phi_power);
    sweep_tile<F, Teacher, Need>(out, z, y, 0, n);
    out.close<Teacher, Need>();
    return out;
}

} // namespace OPD_ISA

} // namespace opd::detail
