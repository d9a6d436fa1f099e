// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The CPU's sweep over one row of student logits z and teacher logits y: normalisers and raw sums (row_program.hpp) in one
// pass over memory, in leaves of 1,024 entries at absolute indices.
//
// Per leaf the sums run in the lanes, relative to the anchors found so far, on the speculation that no new maximum comes;
// where one did, the sums move to the new anchor in double and the leaf is done again from L1. A leaf is staged through an
// L1 buffer, else read in place, when it
//   - holds an anchor (excluded from the sums) or an id that the caller excludes,
//   - is shorter than 1,024 entries or not of a lane type (converted, padded with lowest),
//   - holds something of magnitude 1e30 or more: -inf becomes -1e30, NaN and +inf make the row bad.
// All classification is by the bits of the logits, so it holds under -Ofast.
#pragma once

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "opd/config.hpp"
#include "opd/detail/leaf.hpp"
#include "opd/element.hpp"
#include "opd/lanes.hpp"
#include "opd/row_program.hpp"

namespace opd::detail {
inline namespace OPD_ISA {

/// Ascending, distinct ids that are looked at, but neither summed nor made an anchor (tails); `end - begin` may be 0.
struct id_range {
    const index_t* begin = nullptr;
    const index_t* end = nullptr;
};

/// A row as far as it has been swept.
struct swept {
    raw_sums sums = {};
    leaf_contents contents = {};
    bool wild = false;     ///< some leaf had to be tamed: later passes stage every leaf
    double reach = -1e300; ///< the largest `reach_of`: float carries up to `steepest`
    /// The student's anchor moved by 200 nats of log-ratio or more, or made W's terms e^10 times larger, and so those that
    /// were not felt: U, W, X and `reach` mean nothing.
    bool lost_digits = false;
    double grown = 0;       ///< log of the factor by which W's terms have grown since they were smallest
    double risen = 0;       ///< nats that the student's anchor rose by, up to anchor_slack
    bool last_wild = false; ///< holes come in runs: no speculation after a leaf that had some

    static swept begin(double inv_s, double inv_t, double k, bool x_power) {
        swept out;
        out.sums.inv_s = inv_s, out.sums.inv_t = inv_t, out.sums.k = k;
        if (x_power) out.sums.x_power = raw_sums::power_for(k);
        return out;
    }

    /// After the last tile.
    template <bool Teacher, raw_sums_needed Need>
    void close(bool may_be_empty = false) {
        const raw_sums& s = sums;
        if (contents.bad) return;
        // the leaves do not see the teacher's mass at its own anchor
        if constexpr (Teacher && Need.w)
            if (s.t != s.s) reach = std::max(reach, -s.k * s.delta_t());
        if constexpr (Teacher && Need.w && !Need.k_is_one) lost_digits |= grown > 10;
        // a row whose every logit is -inf has no distribution; a tail may be empty
        contents.bad |= (!may_be_empty && (s.s < 0 || s.z_s <= -1e30)) || (Teacher && s.y_t <= -1e30);
    }

    /// The student's anchor moves to id, which lies in no sum.
    template <bool Teacher>
    void student_to(index_t id, double z, double y) {
        raw_sums& s = sums;
        if (s.s < 0) {
            s.s = id;
            s.z_s = z;
            if constexpr (Teacher) s.y_s = y;
            return;
        }
        if constexpr (Teacher) {
            const double g = (s.z_s - z) * s.inv_s - (s.y_s - y) * s.inv_t;
            lost_digits |= s.z_s > -1e30 && (g > 200 || g < -200); // below: nothing had mass so far
            if (s.z_s > -1e30) {
                const double a = (s.z_s - z) * s.inv_s;
                grown = std::max(grown + a - s.k * g, 0.0);
                reach -= s.k * g;
                risen -= a;
                if (risen > anchor_slack) risen = 0, reach += anchor_slack;
            } else {
                grown = 0, reach = -1e300;
            }
        }
        s.rebase_student(id, z, Teacher ? y : 0);
    }
    void teacher_to(index_t id, double z, double y) {
        raw_sums& s = sums;
        if (s.t < 0)
            s.t = id, s.z_t = z, s.y_t = y;
        else
            s.rebase_teacher(id, z, y);
    }
};

/// Sweeps n more entries of z (and of y), which are those of the ids from `first` on, a multiple of 1,024. `excluded`: of these ids.
template <class F, bool Teacher, raw_sums_needed Need, class Z, class Y>
void sweep_tile(swept& out, const Z* z, const Y* y, index_t first, index_t n, id_range excluded = {}) {
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
            if (s.s >= 0 && !excludes && count == leaf_size && !out.last_wild) {
                const auto l = a.near ? fold_leaf<F, Teacher, Need, true>(leaf_z, leaf_y, count, a)
                                      : fold_leaf<F, Teacher, Need, false>(leaf_z, leaf_y, count, a);
                if (!l.fall_z.beyond(a.limit_s) && !(Teacher && l.fall_y.beyond(a.limit_t))) {
                    add_leaf<Teacher, Need>(s, out.reach, out.lost_digits, l);
                    continue;
                }
            }
        const int full = staged_leaf<F>::load(stage.z, leaf_z, count);
        if constexpr (Teacher) staged_leaf<F>::load(stage.y, leaf_y, count);
        // after a wild leaf, taming at once is cheaper than asking first; it leaves a leaf without wild numbers as it is
        if (out.last_wild || stage.template looks_wild<Teacher>(count)) {
            const leaf_contents c = stage.template tame<Teacher>(count);
            out.contents.bad |= c.bad;
            out.contents.teacher_zero |= c.teacher_zero;
            out.contents.student_zero |= c.student_zero;
            out.wild |= out.last_wild = c.wild;
        }
        if (out.contents.bad) return;
        for (const index_t* i = first_excluded; i != next_excluded; ++i) stage.z[*i - begin] = staged_leaf<F>::lowest;

        // new anchors, if this leaf holds a larger entry
        const int top_z = top_of_leaf<F>(stage.z, full, s.s < 0 ? -2e30 : s.z_s);
        if (top_z >= 0)
            out.student_to<Teacher>(begin + top_z, double(stage.z[top_z]), Teacher ? double(stage.y[top_z]) : 0);
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
        add_leaf<Teacher, Need>(s, out.reach, out.lost_digits,
                                fold_staged<F, Teacher, Need>(stage, mass_z, mass_y, full, a));
    }
}

/// Sweeps a row of n entries.
template <class F, bool Teacher, raw_sums_needed Need, class Z, class Y>
swept sweep_row(const Z* z, const Y* y, index_t n, double inv_s, double inv_t, double k) {
    swept out = swept::begin(inv_s, inv_t, k, Need.x_power);
    sweep_tile<F, Teacher, Need>(out, z, y, 0, n);
    out.close<Teacher, Need>();
    return out;
}

} // namespace OPD_ISA

} // namespace opd::detail
