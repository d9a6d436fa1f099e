// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// One thread's numbers: how it reads a logit, and its share of the sweep over a row: normalisers and raw sums, 8
// entries at a time.
#pragma once

#include <type_traits>

#include "opd/config.hpp"
#include "opd/element.hpp"
#include "opd/lanes.hpp"
#include "opd/row_program.hpp"
#include "opd/rows/row_numbers.hpp"
#include "opd/rows/row_sweep.hpp"
#include "opd/rows/rows.hpp"
#include "opd/rows/tuning.hpp"

namespace opd::detail {
inline namespace OPD_ISA {

/// The number type that a thread computes rows of these storage types in.
template <class... T>
using thread_number =
    std::conditional_t<(std::is_same_v<arithmetic_t<T>, double> || ...), scalar<double>, scalar<float>>;

template <class F>
struct loaded {
    F x;
    bool zero; ///< a mask
};
/// Entry *p as the thread's number within ±1e30.
template <class F, class T>
OPD_HD OPD_INLINE loaded<F> load_logit(const T* p, bool& bad) {
    using value = typename F::value_type;
    using bits = float_bits<value>;
    using word = typename bits::word;
    const value x = static_cast<value>(load_maskable(*p));
    const word w = bit_cast<word>(x);
    if ((w & bits::magnitude) < bit_cast<word>(value(1e30))) return {F::raw(x), false};
    const bool zero = is_mask(x);
    bad |= !zero && (w & bits::magnitude) >= bits::infinity;
    return {F::raw(w > bits::magnitude ? value(-1e30) : value(1e30)), zero};
}

struct nothing_excluded {
    OPD_HD OPD_INLINE bool operator()(index_t) const { return false; }
};
/// One thread's share of a tile. `Teacher` false: y is not read. Excluded ids are looked at, but neither summed nor
/// made an anchor.
template <class F, bool Teacher, raw_sums_needed Need, class Tile, class Excluded = nothing_excluded>
OPD_HD void sweep_thread(row_sweep& out, const Tile& t, one_of at, const Excluded& excluded = {}) {
    raw_sums& s = out.sums;
    thread_anchors<F> a(s);
    const F lowest(lowest_logit);
    for (index_t first = at.id; first < t.count; first += index_t{at.count} * gpu_tuning::entries_at_a_time) {
        F zs[gpu_tuning::entries_at_a_time], ys[gpu_tuning::entries_at_a_time];
        // load, and look for better anchors; ids ascend, so the first of equals stays
        F top_z = s.s < 0 ? lowest : a.z_s, top_y = s.t < 0 ? lowest : a.y_t;
        F y_at_top(0.), z_at_top(0.);
        index_t new_s = -1, new_t = -1;
        for (int i = 0; i < gpu_tuning::entries_at_a_time; ++i) {
            const index_t here = first + index_t{i} * at.count, id = t.begin + here;
            zs[i] = ys[i] = lowest;
            if (here >= t.count) continue;
            const loaded<F> zi = load_logit<F>(t.z + here, out.contents.bad);
            zs[i] = excluded(id) ? lowest : zi.x;
            if constexpr (Teacher) {
                const loaded<F> yi = load_logit<F>(t.y + here, out.contents.bad);
                ys[i] = yi.x;
                out.contents.teacher_zero |= yi.zero && !zi.zero;
                out.contents.student_zero |= zi.zero && !yi.zero;
                if (ys[i] > top_y) top_y = ys[i], z_at_top = zs[i], new_t = id;
            }
            if (zs[i] > top_z) top_z = zs[i], y_at_top = ys[i], new_s = id;
        }
        if (new_s >= 0) out.student_to(new_s, double(top_z.v), double(y_at_top.v));
        if (new_t >= 0) out.teacher_to(new_t, double(z_at_top.v), double(top_y.v));
        if (new_s >= 0 || new_t >= 0) a = thread_anchors<F>(s);

        F S(0.), T(0.), U(0.), W(0.), X(0.), V(0.), reach(-1e30);
        for (int i = 0; i < gpu_tuning::entries_at_a_time; ++i) {
            const index_t id = t.begin + first + index_t{i} * at.count;
            const bool has_z = zs[i] > lowest, has_y = Teacher && ys[i] > lowest;
            const F e = has_z && id != s.s ? a.student(zs[i]) : F(0.);
            S += e;
            if constexpr (Need.entropy) V += e > F(0.) ? e * (zs[i] - a.z_s) * a.inv_s : F(0.);
            if constexpr (Teacher) {
                const F f = has_y && id != s.t ? a.teacher(ys[i]) : F(0.);
                T += f;
                if constexpr (Need.student_delta || Need.student_power || Need.teacher_delta) {
                    const bool in_s = e > F(0.), in_t = f > F(0.);
                    const F delta = a.template delta<false>(zs[i], ys[i]);
                    if constexpr (Need.student_delta) U = in_s ? fma(e, delta, U) : U;
                    if constexpr (Need.student_power) {
                        const F x = -F(s.k) * delta, edge(80);
                        W += in_s ? e * expm1(min(max(x, -edge), edge)) : F(0.);
                        if (has_z && has_y) reach = max(reach, reach_of(x, (a.z_s - zs[i]) * a.inv_s));
                    }
                    if constexpr (Need.teacher_delta) {
                        const bool curved = Need.phi_power && s.phi_power != 0;
                        const F x = curved ? expm1(min(F(s.phi_power) * delta, F(80))) * F(1 / s.phi_power) : delta;
                        X = in_t ? fma(f, x, X) : X;
                    }
                }
            }
        }
        s.student_mass += double(S.v), s.teacher_mass += double(T.v), s.student_delta += double(U.v),
            s.student_power += double(W.v), s.teacher_delta += double(X.v);
        if constexpr (Need.entropy) s.student_fall += double(V.v);
        if constexpr (Need.student_power) out.felt(double(reach.v));
    }
}

} // namespace OPD_ISA
} // namespace opd::detail
