// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A row as far as it has been swept: normalisers and raw sums (row_program.hpp), what its logits hold, and whether
// float carried them. Lanes, threads, tiles and shards of a vocabulary all add to one such struct, or merge two of
// them: both move to the better anchor, exactly, and add; of equal tops the lower id is the anchor.
//
// Two things can go wrong with a raw sum in float, and both are seen here, for every backend alike:
//
//   reach          the largest -k delta of an entry that counts, relative to the anchor of the end: float carries e^80
//   lost digits    an anchor moved so far that the sums from before mean nothing: by 200 nats of log-ratio, where float's delta has
//                  no digits left, or so that terms that were too small to be felt grew e^10 times
#pragma once

#include "opd/config.hpp"
#include "opd/row_program.hpp"

namespace opd::detail {
inline namespace OPD_ISA {

/// What a row's logits hold, by their bits.
struct row_contents {
    bool bad = false;          ///< NaN or +inf
    bool teacher_zero = false; ///< somewhere student > -inf = teacher: p > 0 = q
    bool student_zero = false; ///< somewhere teacher > -inf = student: q > 0 = p

    OPD_HD void merge(row_contents o) { bad |= o.bad, teacher_zero |= o.teacher_zero, student_zero |= o.student_zero; }
};

/// What env.measure.entropy asks of a row: Σ p log p of either side, Σ min(p, q).
struct entropy_sums {
    double student = 0, teacher = 0, overlap = 0;
    OPD_HD static entropy_sums merge(entropy_sums a, entropy_sums b) {
        return {a.student + b.student, a.teacher + b.teacher, a.overlap + b.overlap};
    }
};

/// Sums exclude their anchors; an anchor -1 means that side had no entry yet.
struct row_sweep {
    raw_sums sums = {};
    row_contents contents = {};
    double reach = -1e300;    ///< the largest `reach_of`: float carries up to `steepest`
    double risen = 0;         ///< nats that the student's anchor rose by, up to anchor_slack
    double grown = 0;         ///< log of the factor by which student_power's terms have grown since they were smallest
    bool lost_s = false;      ///< digits of student_delta and student_power
    bool lost_x = false;      ///< digits of teacher_delta
    bool lost_digits = false; ///< by `close`: digits of a sum that the program reads
    bool out_of_range = false, ends_out_of_range = false; ///< lanes: some leaf, the last one, held numbers beyond ±1e30

    OPD_HD static row_sweep begin(double inv_s, double inv_t, double k, bool phi_power) {
        row_sweep out;
        out.sums.inv_s = inv_s, out.sums.inv_t = inv_t, out.sums.k = k;
        if (phi_power) out.sums.phi_power = raw_sums::power_for(k);
        return out;
    }
    /// After the last tile, of the sums of all. A row whose every logit is -inf has no distribution; a tail may be
    /// empty.
    template <bool Teacher, raw_sums_needed Need>
    OPD_HD void close(bool may_be_empty = false) {
        contents.bad |=
            (!may_be_empty && (sums.s < 0 || sums.z_s <= -1e30)) || (Teacher && (sums.t < 0 || sums.y_t <= -1e30));
        lost_digits = (Need.teacher_delta && lost_x) || ((Need.student_delta || Need.student_power) && lost_s) ||
                      (Need.student_power && !Need.k_is_one && grown > 10); // terms not felt grew
    }

    /// The student's anchor moves to token id, which is in none of these sums.
    OPD_HD void student_to(index_t id, double z, double y) {
        if (sums.s < 0 || sums.z_s <= -1e30) { // nothing had mass so far
            if (sums.s >= 0) sums.begin_student(z, y);
            sums.student_mass = sums.student_delta = sums.student_power = sums.student_fall = 0;
            sums.s = id, sums.z_s = z, sums.y_s = y;
            grown = 0, reach = -1e300;
            return;
        }
        const double a = (sums.z_s - z) * sums.inv_s, g = a - (sums.y_s - y) * sums.inv_t;
        lost_x |= g > 200 || g < -200;
        lost_s |= (g > 200 || g < -200) && a > -100; // else nothing of this side is left
        reach -= sums.k * g;
        risen -= a;
        if (risen > anchor_slack) risen = 0, reach += anchor_slack;
        grown = grown + a - sums.k * g > 0 ? grown + a - sums.k * g : 0;
        sums.rebase_student(id, z, y);
    }
    OPD_HD void teacher_to(index_t id, double z, double y) {
        if (sums.t < 0 || sums.y_t <= -1e30) { // nothing had mass so far
            sums.teacher_mass = sums.teacher_delta = 0;
            sums.t = id, sums.z_t = z, sums.y_t = y;
        } else
            sums.rebase_teacher(id, z, y);
    }
    /// Sums of a number type over entries between two moves of the anchors, and the largest reach among them.
    OPD_HD OPD_INLINE void felt(double largest_reach) {
        reach = reach < largest_reach ? largest_reach : reach;
        lost_s |= largest_reach > steepest; // student_power was cut: no later anchor brings it back
    }

    /// Sums over two disjoint sets of entries.
    OPD_HD static row_sweep merge(row_sweep a, row_sweep b) {
        const auto better = [](double x, index_t i, double y, index_t j) { return x > y || (x == y && i < j); };
        if (b.sums.s >= 0 && (a.sums.s < 0 || better(b.sums.z_s, b.sums.s, a.sums.z_s, a.sums.s)))
            a.student_to(b.sums.s, b.sums.z_s, b.sums.y_s);
        else if (a.sums.s >= 0)
            b.student_to(a.sums.s, a.sums.z_s, a.sums.y_s);
        if (b.sums.t >= 0 && (a.sums.t < 0 || better(b.sums.y_t, b.sums.t, a.sums.y_t, a.sums.t)))
            a.teacher_to(b.sums.t, b.sums.z_t, b.sums.y_t);
        else if (a.sums.t >= 0)
            b.teacher_to(a.sums.t, a.sums.z_t, a.sums.y_t);
        a.sums.student_mass += b.sums.student_mass, a.sums.teacher_mass += b.sums.teacher_mass,
            a.sums.student_delta += b.sums.student_delta, a.sums.student_power += b.sums.student_power,
            a.sums.teacher_delta += b.sums.teacher_delta, a.sums.student_fall += b.sums.student_fall;
        a.reach = a.reach < b.reach ? b.reach : a.reach;
        a.grown = a.grown < b.grown ? b.grown : a.grown;
        a.risen = a.risen < b.risen ? b.risen : a.risen;
        a.lost_s |= b.lost_s, a.lost_x |= b.lost_x;
        a.out_of_range |= b.out_of_range;
        a.contents.merge(b.contents);
        return a;
    }
};

} // namespace OPD_ISA
} // namespace opd::detail
