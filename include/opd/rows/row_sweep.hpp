// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A row as far as it has been swept: normalisers and raw sums (row_program.hpp), what its logits hold, and whether
// float carried them. Lanes, threads, tiles and shards of a vocabulary all add to one such struct, or merge two of
// them: both move to the better anchor, exactly, and add; of equal tops the lower id is the anchor.
//
// Two things can go wrong with a raw sum in float, and both are seen here, for every backend alike:
//
//   reach          the largest -k delta of an entry that counts, relative to the anchor of the end: float carries e^80
//   lost digits    an anchor moved so far that the sums from before mean nothing: by 200 nats of log-ratio, where
//                  float's delta has no digits left, or so that terms that were too small to be felt grew e^10 times
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

/// The anchors of a sweep; id -1: that side has none yet.
struct row_anchors {
    index_t s = -1, t = -1;
    double z_s = 0, y_s = 0, z_t = 0, y_t = 0; ///< as in raw_sums
    OPD_HD static row_anchors merge(row_anchors a, row_anchors b) {
        if (b.s >= 0 && (a.s < 0 || b.z_s > a.z_s || (b.z_s == a.z_s && b.s < a.s)))
            a.s = b.s, a.z_s = b.z_s, a.y_s = b.y_s;
        if (b.t >= 0 && (a.t < 0 || b.y_t > a.y_t || (b.y_t == a.y_t && b.t < a.t)))
            a.t = b.t, a.z_t = b.z_t, a.y_t = b.y_t;
        return a;
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
    bool apart = false;       ///< p and q look far apart at the row's beginning
    bool for_value = false;   ///< so the sums are those of the value
    bool out_of_range = false, ends_out_of_range = false; ///< lanes: some leaf, the last one, held numbers beyond ±1e30

    OPD_HD static row_sweep begin(double inv_s, double inv_t, double k, bool phi_power) {
        row_sweep out;
        out.sums.inv_s = inv_s, out.sums.inv_t = inv_t, out.sums.k = k;
        if (phi_power) out.sums.phi_power = raw_sums::power_for(k);
        return out;
    }
    /// Begins with anchors that were looked for before (cuda/thread_sweep.hpp: scout), wherever in the row they lie.
    OPD_HD void begin_at(const row_anchors& found) {
        sums.s = found.s, sums.z_s = found.z_s, sums.y_s = found.y_s;
        sums.t = found.t, sums.z_t = found.z_t, sums.y_t = found.y_t;
        sums.own_s = sums.own_t = 0;
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

    /// The student's anchor moves to token id, which is in none of these sums; own: 0 if it is another part's.
    OPD_HD OPD_RARELY_CALLED void student_to(index_t id, double z, double y, double own = 1) {
        if (sums.s < 0 || sums.z_s <= -1e30) { // nothing had mass so far
            if (sums.s >= 0) sums.begin_student(z, y);
            sums.student_mass = sums.student_delta = sums.student_power = sums.student_fall = 0;
            sums.s = id, sums.z_s = z, sums.y_s = y, sums.own_s = own;
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
        sums.own_s = own;
    }
    OPD_HD OPD_RARELY_CALLED void teacher_to(index_t id, double z, double y, double own = 1) {
        if (sums.t < 0 || sums.y_t <= -1e30) { // nothing had mass so far
            sums.teacher_mass = sums.teacher_delta = 0;
            sums.t = id, sums.z_t = z, sums.y_t = y;
        } else
            sums.rebase_teacher(id, z, y);
        sums.own_t = own;
    }
    /// Sums of a number type over entries between two moves of the anchors, and the largest reach among them.
    OPD_HD OPD_INLINE void felt(double largest_reach) {
        reach = reach < largest_reach ? largest_reach : reach;
        lost_s |= largest_reach > steepest; // student_power was cut: no later anchor brings it back
    }

    // Threads of a team merge in two steps, each of few numbers: they agree on anchors, move to them, and add.
    using agreed_type = row_anchors;
    OPD_HD row_anchors proposed() const { return {sums.s, sums.t, sums.z_s, sums.y_s, sums.z_t, sums.y_t}; }
    OPD_HD void agree(const row_anchors& all) {
        if (sums.s != all.s) student_to(all.s, all.z_s, all.y_s, 0);
        if (sums.t != all.t) teacher_to(all.t, all.z_t, all.y_t, 0);
    }
    /// What is added up of sweeps with the same anchors.
    struct addends {
        double mass_s, mass_t, delta_s, power_s, delta_t, fall_s, own_s, own_t, reach, grown, risen;
        row_contents contents;
        bool lost_s, lost_x, out_of_range;
        OPD_HD static addends merge(addends a, const addends& b) {
            a.mass_s += b.mass_s, a.mass_t += b.mass_t, a.delta_s += b.delta_s, a.power_s += b.power_s;
            a.delta_t += b.delta_t, a.fall_s += b.fall_s;
            a.own_s = a.own_s + b.own_s > 0, a.own_t = a.own_t + b.own_t > 0;
            a.reach = a.reach < b.reach ? b.reach : a.reach;
            a.grown = a.grown < b.grown ? b.grown : a.grown;
            a.risen = a.risen < b.risen ? b.risen : a.risen;
            a.contents.merge(b.contents);
            a.lost_s |= b.lost_s, a.lost_x |= b.lost_x, a.out_of_range |= b.out_of_range;
            return a;
        }
    };
    OPD_HD addends summed() const {
        return {sums.student_mass,
                sums.teacher_mass,
                sums.student_delta,
                sums.student_power,
                sums.teacher_delta,
                sums.student_fall,
                sums.own_s,
                sums.own_t,
                reach,
                grown,
                risen,
                contents,
                lost_s,
                lost_x,
                out_of_range};
    }
    OPD_HD void take(const addends& all) {
        sums.student_mass = all.mass_s, sums.teacher_mass = all.mass_t, sums.student_delta = all.delta_s;
        sums.student_power = all.power_s, sums.teacher_delta = all.delta_t, sums.student_fall = all.fall_s;
        sums.own_s = all.own_s, sums.own_t = all.own_t;
        reach = all.reach, grown = all.grown, risen = all.risen, contents = all.contents;
        lost_s = all.lost_s, lost_x = all.lost_x, out_of_range = all.out_of_range;
    }

    /// Sums over two disjoint sets of entries; an anchor may be that of both.
    OPD_HD static row_sweep merge(row_sweep a, row_sweep b) {
        const row_anchors best = row_anchors::merge(a.proposed(), b.proposed());
        const double own_s = owner_of(best.s, a.sums.s, a.sums.own_s, b.sums.s, b.sums.own_s);
        const double own_t = owner_of(best.t, a.sums.t, a.sums.own_t, b.sums.t, b.sums.own_t);
        if (best.s >= 0) {
            if (a.sums.s != best.s) a.student_to(best.s, best.z_s, best.y_s);
            if (b.sums.s != best.s) b.student_to(best.s, best.z_s, best.y_s);
        }
        if (best.t >= 0) {
            if (a.sums.t != best.t) a.teacher_to(best.t, best.z_t, best.y_t);
            if (b.sums.t != best.t) b.teacher_to(best.t, best.z_t, best.y_t);
        }
        a.take(addends::merge(a.summed(), b.summed()));
        a.sums.own_s = own_s, a.sums.own_t = own_t;
        return a;
    }

private:
    OPD_HD static double owner_of(index_t best, index_t a, double own_a, index_t b, double own_b) {
        return (a == best && own_a > 0) || (b == best && own_b > 0) ? 1 : 0;
    }
};

} // namespace OPD_ISA
} // namespace opd::detail
