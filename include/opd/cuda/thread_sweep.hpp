// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// One thread's numbers: how it reads logits, and its share of the sweep over a row: normalisers and raw sums.
//
// A thread takes 8 entries of a row at a time, a block's threads apart, and asks for the next 8 before it works on
// them, for what a thread waits for is memory. What is rare (masks, numbers beyond ±1e30, a better anchor) costs one
// test for the 8.
//
// Moving an anchor takes exponentials in double, and a thread that began with its first entry would move some ten
// times, one of each 32 at almost every step. So a team first looks for the best entries of a row's first sixteenth
// (`scout`): about sixteen of a row's entries are better than those.
#pragma once

#include <cstdint>
#include <type_traits>

#include "opd/config.hpp"
#include "opd/element.hpp"
#include "opd/lanes.hpp"
#include "opd/row_program.hpp"
#include "opd/rows/row_numbers.hpp"
#include "opd/rows/row_sweep.hpp"
#include "opd/rows/rows.hpp"
#include "opd/rows/tiles.hpp"
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
/// Whether x is a number within ±1e30.
template <class T>
OPD_HD OPD_INLINE bool is_plain(const T& x) {
#if defined(__CUDA_ARCH__)
    return ::fabs(x) < T(1e30); // one instruction, and false for a NaN
#else
    using bits = float_bits<T>;
    return (bit_cast<typename bits::word>(x) & bits::magnitude) < bit_cast<typename bits::word>(T(1e30));
#endif
}
/// Entry *p within ±1e30 of a row that has been swept: no NaN comes here.
template <class F, class T>
OPD_HD OPD_INLINE F load_number(const T* p) {
    return min(max(F::raw(static_cast<typename F::value_type>(load_maskable(*p))), F(-1e30)), F(1e30));
}

/// Entries of one row that a thread has in hand, `step` apart.
template <class F, int Size = gpu_tuning::entries_at_a_time>
struct batch {
    static constexpr int size = Size;
    F x[unsigned(Size)];

    /// As they are stored.
    template <class T>
    OPD_HD OPD_INLINE void fetch(const T* from, index_t step) {
#if defined(__CUDA_ARCH__)
        __builtin_assume(__isGlobal(from));
#endif
        OPD_UNROLL
        for (int i = 0; i < Size; ++i)
            x[i] = F::raw(static_cast<typename F::value_type>(load_maskable(from[i * step])));
    }
    /// Within ±1e30, of a row that has been swept: no NaN comes here.
    OPD_HD OPD_INLINE void bound() {
        OPD_UNROLL
        for (int i = 0; i < Size; ++i) x[i] = min(max(x[i], F(-1e30)), F(1e30));
    }
    /// Whether each is a number within ±1e30.
    OPD_HD OPD_INLINE bool plain() const {
        bool all = true;
        OPD_UNROLL
        for (int i = 0; i < Size; ++i) all &= is_plain(x[i].v);
        return all;
    }
    OPD_HD OPD_INLINE F largest() const {
        F top = x[0];
        OPD_UNROLL
        for (int i = 1; i < Size; ++i) top = max(top, x[i]);
        return top;
    }
};

/// How a team's threads share a row: each block takes a batch of its threads, then its next.
template <int Size>
struct batches_of {
    index_t step, of_batch, whole; ///< entries between two of a thread's, of a batch; batches that lie in the row
    index_t first, blocks;         ///< the first batch of this block; from one of its batches to its next
    int thread;
    OPD_HD batches_of(index_t count, one_of at)
        : step(at.step), of_batch(step * Size), whole(count / of_batch), first(at.id / at.step),
          blocks(at.count / at.step), thread(at.id % at.step) {}
    /// Of batch b, this thread's first entry.
    OPD_HD OPD_INLINE index_t entry(index_t b) const { return b * of_batch + thread; }
};

struct nothing_excluded {
    OPD_HD OPD_INLINE bool operator()(index_t) const { return false; }
};

/// Logits of both sides, or of one.
template <class F, bool Teacher, int Size = gpu_tuning::entries_at_a_time>
struct batch_of_two {
    static constexpr int size = Size;
    batch<F, Size> z, y;

    template <class Tile>
    OPD_HD OPD_INLINE void fetch(const Tile& t, index_t first, index_t step) {
        z.fetch(t.z + first, step);
        if constexpr (Teacher) y.fetch(t.y + first, step);
    }
    OPD_HD OPD_INLINE void bound() {
        z.bound();
        if constexpr (Teacher) y.bound();
    }
    OPD_HD OPD_INLINE bool plain() const { return z.plain() && (!Teacher || y.plain()); }

    /// One by one: entries beyond the row, masks and excluded ids are `lowest`, what is unusual goes into `contents`.
    template <class Tile, class Excluded>
    OPD_HD OPD_INLINE void look(const Tile& t, index_t first, index_t step, row_contents& contents,
                                const Excluded& excluded) {
        const F lowest(lowest_logit);
        OPD_UNROLL
        for (int i = 0; i < Size; ++i) {
            const index_t here = first + i * step;
            z.x[i] = y.x[i] = lowest;
            if (here >= t.count) continue;
            const loaded<F> zi = load_logit<F>(t.z + here, contents.bad);
            z.x[i] = excluded(t.begin + here) ? lowest : zi.x;
            if constexpr (Teacher) {
                const loaded<F> yi = load_logit<F>(t.y + here, contents.bad);
                y.x[i] = yi.x;
                contents.teacher_zero |= yi.zero && !zi.zero;
                contents.student_zero |= zi.zero && !yi.zero;
            }
        }
    }
    /// Whether there are entries above the anchors' logits.
    OPD_HD OPD_INLINE bool rises(F over_z, F over_y) const {
        return z.largest() > over_z || (Teacher && y.largest() > over_y);
    }
    /// move_student(id, z, y), move_teacher(id, z, y) for the best entries of such; ids ascend, so the first of equals
    /// is the one. `id`: of the first entry.
    template <class MoveStudent, class MoveTeacher>
    OPD_HD OPD_INLINE void move(F over_z, F over_y, index_t id, index_t step, MoveStudent move_student,
                                MoveTeacher move_teacher) const {
        const F top_z = z.largest(), top_y = Teacher ? y.largest() : over_y;
        index_t at_z = id, at_y = id;
        F y_there(0.), z_there(0.);
        OPD_UNROLL
        for (int i = Size - 1; i >= 0; --i) {
            if (!(z.x[i] < top_z)) at_z = id + i * step, y_there = Teacher ? y.x[i] : F(0.);
            if (Teacher && !(y.x[i] < top_y)) at_y = id + i * step, z_there = z.x[i];
        }
        if (top_z > over_z) move_student(at_z, top_z, y_there);
        if (Teacher && top_y > over_y) move_teacher(at_y, z_there, top_y);
    }
};

/// A thread's share of a swept tile, from its first entry or from its last: whole(batch_of_two, first entry) for
/// batches, one(entry) for the few that fill none. A batch is asked for before the one before it is worked on.
template <class F, bool Teacher, int Size, bool Backwards, class Tile, class Whole, class One>
OPD_HD OPD_INLINE void each_batch(const Tile& t, one_of at, Whole whole, One one) {
    const batches_of<Size> share(t.count, at);
    const auto rest = [&] {
        for (index_t i = share.whole * share.of_batch + at.id; i < t.count; i += at.count) one(i);
    };
    if (Backwards) rest();
    if (share.first < share.whole) {
        const index_t last = share.first + (share.whole - 1 - share.first) / share.blocks * share.blocks;
        const index_t end = Backwards ? share.first : last, by = Backwards ? -share.blocks : share.blocks;
        index_t b = Backwards ? last : share.first;
        batch_of_two<F, Teacher, Size> next;
        next.fetch(t, share.entry(b), share.step);
        for (;; b += by) {
            batch_of_two<F, Teacher, Size> now = next;
            if (b != end) next.fetch(t, share.entry(b + by), share.step);
            now.bound();
            whole(now, share.entry(b));
            if (b == end) break;
        }
    }
    if (!Backwards) rest();
}

/// Raw sums of a thread between two moves of its anchors.
template <class F, bool Teacher, raw_sums_needed Need>
struct thread_sums {
    double s = 0, t = 0, u = 0, w = 0, x = 0, v = 0; // as raw_sums, in its order
    F reach = F(-1e30);
    F k, phi, inv_phi; // exponent, a of φ

    OPD_HD explicit thread_sums(const raw_sums& of)
        : k(of.k), phi(of.phi_power), inv_phi(of.phi_power != 0 ? 1 / of.phi_power : 0) {}

    /// Plain: no entry is `lowest`, and none is an anchor. skip_s, skip_t: which entry is, else -1.
    template <bool Plain, bool Near>
    OPD_HD OPD_INLINE void add(const batch_of_two<F, Teacher>& b, const thread_anchors<F>& a, int skip_s, int skip_t) {
        const F lowest(lowest_logit);
        F S(0.), T(0.), U(0.), W(0.), X(0.), V(0.);
        OPD_UNROLL
        for (int i = 0; i < b.size; ++i) {
            const F z = b.z.x[i];
            const bool has_z = Plain || z > lowest;
            const F e = Plain || (has_z && i != skip_s) ? a.student(z) : F(0.);
            S += e;
            if constexpr (Need.entropy) V += e > F(0.) ? e * (z - a.z_s) * a.inv_s : F(0.);
            if constexpr (Teacher) {
                const F y = b.y.x[i];
                const bool has_y = Plain || y > lowest;
                const F f = Plain || (has_y && i != skip_t) ? a.teacher(y) : F(0.);
                T += f;
                if constexpr (Need.student_delta || Need.student_power || Need.teacher_delta) {
                    const F delta = a.template delta<Near>(z, y); // within ±1e30, so 0 times it is 0
                    if constexpr (Need.student_delta) U = fma(e, delta, U);
                    if constexpr (Need.student_power) {
                        const F by = -k * delta, edge(80);
                        W += e > F(0.) ? e * expm1(min(max(by, -edge), edge)) : F(0.);
                        if (has_z && has_y) reach = max(reach, reach_of(by, (a.z_s - z) * a.inv_s));
                    }
                    if constexpr (Need.teacher_delta) {
                        F bent = delta;
                        if constexpr (Need.phi_power)
                            if (phi < F(0.) || phi > F(0.)) bent = expm1(min(phi * delta, F(80))) * inv_phi;
                        X = fma(f, bent, X);
                    }
                }
            }
        }
        s += double(S.v);
        if constexpr (Teacher) t += double(T.v);
        if constexpr (Need.student_delta) u += double(U.v);
        if constexpr (Need.student_power) w += double(W.v);
        if constexpr (Need.teacher_delta) x += double(X.v);
        if constexpr (Need.entropy) v += double(V.v);
    }
    /// Into `out`, of which the anchors are about to move.
    OPD_HD OPD_INLINE void settle(row_sweep& out) {
        raw_sums& to = out.sums;
        to.student_mass += s, to.teacher_mass += t, to.student_delta += u, to.student_power += w, to.teacher_delta += x;
        if constexpr (Need.entropy) to.student_fall += v;
        if constexpr (Need.student_power) out.felt(double(reach.v));
        s = t = u = w = x = v = 0, reach = F(-1e30);
    }
};

/// Which of a batch's entries is at `distance` from its first; -1: none.
OPD_HD OPD_INLINE int place_in_batch(index_t distance, index_t step) {
    if (static_cast<std::uint64_t>(distance) >= static_cast<std::uint64_t>(step * gpu_tuning::entries_at_a_time))
        return -1;
    return distance % step == 0 ? int(distance / step) : -1;
}

/// One thread's share of a tile. `Teacher` false: y is not read. Excluded ids are looked at, but neither summed nor
/// made an anchor.
template <class F, bool Teacher, raw_sums_needed Need, class Tile, class Excluded = nothing_excluded>
OPD_HD void sweep_thread(row_sweep& out, const Tile& t, one_of at, const Excluded& excluded = {}) {
    constexpr bool by_delta = Need.student_delta || Need.student_power || Need.teacher_delta;
    const F lowest(lowest_logit);
    const index_t step = at.step;
    thread_anchors<F> a(out.sums);
    thread_sums<F, Teacher, Need> sums(out.sums);
    index_t s = out.sums.s, anchor_t = out.sums.t;
    F top_z = s < 0 ? lowest : a.z_s, top_y = anchor_t < 0 ? lowest : a.y_t;
    const batches_of<batch<F>::size> share(t.count, at);
    batch_of_two<F, Teacher> b, next;
    const auto fetch = [&](index_t n) { // past the row `look` sees to it
        if (n < share.whole) next.fetch(t, share.entry(n), step);
    };
    fetch(share.first);
    for (index_t n = share.first; n * share.of_batch < t.count; n += share.blocks) {
        b = next;
        fetch(n + share.blocks);
        const index_t first = share.entry(n), id = t.begin + first;
        bool plain = std::is_same_v<Excluded, nothing_excluded> && n < share.whole && b.plain();
        if (!plain) b.look(t, first, step, out.contents, excluded);
        if (b.rises(top_z, top_y)) {
            sums.settle(out);
            b.move(
                top_z, top_y, id, step, [&](index_t i, F z, F y) { out.student_to(i, double(z.v), double(y.v)); },
                [&](index_t i, F z, F y) { out.teacher_to(i, double(z.v), double(y.v)); });
            a = thread_anchors<F>(out.sums);
            s = out.sums.s, anchor_t = out.sums.t;
            top_z = s < 0 ? lowest : a.z_s, top_y = anchor_t < 0 ? lowest : a.y_t;
        }
        const int skip_s = place_in_batch(s - id, step), skip_t = Teacher ? place_in_batch(anchor_t - id, step) : -1;
        plain &= skip_s < 0 && skip_t < 0;
        if (!plain) {
            if (skip_s >= 0) out.sums.own_s = 1;
            if (skip_t >= 0) out.sums.own_t = 1;
            sums.template add<false, false>(b, a, skip_s, skip_t);
        } else if (by_delta && a.near) {
            sums.template add<true, true>(b, a, -1, -1);
        } else {
            sums.template add<true, false>(b, a, -1, -1);
        }
    }
    sums.settle(out);
}

/// Who looks for anchors alone: a sweep's `tile` is told so by its `at`.
struct scout : one_of {};

/// Anchors of a thread's share of a tile; no sum.
template <class F, bool Teacher, class Tile, class Excluded = nothing_excluded>
OPD_HD void scout_thread(row_sweep& out, const Tile& t, one_of at, const Excluded& excluded = {}) {
    const F lowest(lowest_logit);
    row_contents contents; // the sweep sees to them
    F top_z = lowest, top_y = lowest, y_s(0.), z_t(0.);
    index_t s = -1, anchor_t = -1;
    const batches_of<batch<F>::size> share(t.count, at);
    for (index_t n = share.first; n * share.of_batch < t.count; n += share.blocks) {
        batch_of_two<F, Teacher> b;
        const index_t first = share.entry(n);
        bool plain = std::is_same_v<Excluded, nothing_excluded> && n < share.whole;
        if (plain) {
            b.fetch(t, first, share.step);
            plain = b.plain();
        }
        if (!plain) b.look(t, first, share.step, contents, excluded);
        b.move(
            top_z, top_y, t.begin + first, share.step, [&](index_t i, F z, F y) { s = i, top_z = z, y_s = y; },
            [&](index_t i, F z, F y) { anchor_t = i, z_t = z, top_y = y; });
    }
    // no anchor lies at 0: beside it what has no mass is infinitely far, beside a mask it would be near
    out.begin_at({s, anchor_t, s < 0 ? 0 : double(top_z.v), double(y_s.v), double(z_t.v), double(top_y.v)});
}

/// The phase before a sweep: anchors from the first entries of the row, of a row that is long enough to gain by it.
template <class Sweep>
struct scout_before {
    OPD_HD static bool due(const auto& k, const auto& st) { return is_due<Sweep>(k, st); }
    template <class Rows>
    OPD_HD static row_anchors part(const Rows& k, const typename Rows::state_type& st, one_of at) {
        row_sweep p;
        if constexpr (!requires {
                          k.student.gradient_from;
                      }) { // not among a support's entries: unused slots change no bit
            auto t = tile_of(k, st, 0, k.vocab);
            const index_t of_team = index_t{at.count} * gpu_tuning::entries_at_a_time;
            t.count = t.count < 2 * of_team ? 0 : (t.count / (16 * of_team) + 1) * of_team;
            if (t.count > 0) Sweep::tile(k, st, p, t, scout{at});
        }
        return p.proposed();
    }
    OPD_HD static row_anchors merge(const row_anchors& a, const row_anchors& b) { return row_anchors::merge(a, b); }
    OPD_HD static void finish(const auto&, auto& st, const row_anchors& all) { st.swept.begin_at(all); }
};

/// What an engine of threads does around a sweep.
struct scouts_first {
    template <class Sweep>
    OPD_HD OPD_INLINE static void before(const auto& k, auto& team) {
        team.template fold<scout_before<Sweep>>(k);
    }
    OPD_HD OPD_INLINE static void begin_sweep(row_sweep& p, const row_sweep& scouted) {
        p.begin_at(scouted.proposed());
    }
};

} // namespace OPD_ISA
} // namespace opd::detail
