// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The GPU's row kernels as free host-and-device functions, and dense divergences on them. No CUDA header: the same text
// runs under a host loop over thread indices (tests) and in a block of GPU threads (cuda.cuh).
//
// A kernel is a struct of plain members whose `row` walks through phases. A phase is three static functions,
//
//   part(kernel, state, tid, threads) -> partial     one thread's share
//   merge(a, b)                                      associative up to rounding, in thread order
//   finish(kernel, state, all)                       once; writes the block's state
//
// or one, run(kernel, state, tid, threads), which every thread calls. A *team* runs them: team.fold<Phase>(kernel),
// team.each<Phase>(kernel). Between two phases every thread sees the same state.
//
// Dense rows: sweep (normalisers, raw sums; thread-strided) · terms (programs with two normalisers) · gradient:
//
//   single-sweep programs   2 reads of both rows, 1 write          others   3 reads, 1 write
//   careful                 float64, three plain passes: rows that float cannot carry, infinite rows under `floor`
//
// A thread sums 8 entries at a time in its number type, relative to the anchors it has met, and folds them into double
// (row_program.hpp: raw_sums); threads merge by moving both to the better anchor, exactly; ties go to the lower id. So values
// and gradients keep the anchored accuracy of the CPU, though not its bits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "opd/batch.hpp"
#include "opd/config.hpp"
#include "opd/diagnostics.hpp"
#include "opd/element.hpp"
#include "opd/evaluate.hpp"
#include "opd/lanes.hpp"
#include "opd/reduction.hpp"
#include "opd/row_program.hpp"

namespace opd::detail {
inline namespace OPD_ISA {

// --- the frame ----------------------------------------------------------------------------------------------------------

/// What counting the batch gives; written once on the device, never read back.
struct batch_totals {
    index_t kept = 0, sequences = 0;
};

/// How a batch lies in the workspace. It depends on sizes alone, so bits do not depend on the device.
struct device_plan {
    static constexpr index_t most_groups = 2048;
    index_t rows, sequences;
    index_t group, groups; ///< rows a block works through, one after the other; blocks
    std::size_t totals, counts, partials, scratch, bytes;

    /// `scratch_of_block`: what one block needs beside shared memory.
    constexpr device_plan(index_t rows_, index_t sequences_, std::size_t scratch_of_block)
        : rows(rows_), sequences(sequences_), group(rows_ < most_groups ? 1 : (rows_ + most_groups - 1) / most_groups),
          groups((rows_ + group - 1) / group), totals(aligned(sizeof(result))),
          counts(totals + aligned(sizeof(batch_totals))),
          partials(counts + aligned(sizeof(index_t) * std::size_t(sequences_))),
          scratch(partials + aligned(sizeof(result) * std::size_t(groups))),
          bytes(scratch + aligned(scratch_of_block) * std::size_t(groups)) {}
    static constexpr std::size_t aligned(std::size_t n) { return (n + 255) / 256 * 256; }
};

template <space S>
bool reduces_sequences(const basic_env<S>& e) {
    return e.reduction == reduce::sequence_mean || e.reduction == reduce::sequence_sum_mean;
}
template <space S>
index_t sequences_of(const basic_env<S>& e) {
    return reduces_sequences(e) && e.offsets.size > 0 ? e.offsets.size - 1 : 0;
}

/// What a row reports.
struct row_report {
    double loss = 0; ///< before weight and clamp
    double lse = 0;
    bool bad = false, infinite = false, careful = false, clamped = false;
};

/// State of a block: the row in hand, and what its rows add up to.
struct group_state {
    index_t row = 0;
    bool kept = false;
    bool live = false; ///< sparse rows: there is a gradient
    double factor = 0; ///< w_r f_r
    row_report report = {};
    result partial = {};
};

/// What every kernel over rows knows.
template <space S>
struct row_frame {
    basic_env<S> env;
    index_t rows = 0;
    index_t group = 1;
    batch_totals* totals = nullptr;
    index_t* counts = nullptr; ///< (sequences) kept rows
    result* partials = nullptr;
    std::byte* scratch = nullptr;
    std::size_t scratch_of_block = 0;

    /// The block's scratch, by the row it works on.
    OPD_HD std::byte* scratch_at(index_t row) const {
        return scratch + scratch_of_block * static_cast<std::size_t>(row / group);
    }
    /// offsets[s] as a row of the batch, whatever the caller's memory holds.
    OPD_HD index_t offset(index_t s) const {
        const index_t o = env.offsets[s];
        return o < 0 ? 0 : (o > rows ? rows : o);
    }
    /// The last sequence that begins at or before row r.
    OPD_HD index_t sequence_of(index_t r) const {
        index_t low = 0, high = env.offsets.size - 1;
        while (high - low > 1) {
            const index_t mid = low + (high - low) / 2;
            (offset(mid) <= r ? low : high) = mid;
        }
        return low;
    }
    /// w_r f_r of a kept row; NaN if it has none (weights or offsets that make no sense).
    OPD_HD double factor(index_t r) const {
        const double nan = bit_cast<double>(0x7ff8000000000000ull);
        const double w = env.weights.empty() ? 1 : env.weights[r];
        double count = 1, in_sequence = 1;
        if (env.reduction == reduce::sequence_mean || env.reduction == reduce::sequence_sum_mean) {
            if (env.offsets.size < 2) return nan;
            const index_t s = sequence_of(r);
            if (r < offset(s) || r >= offset(s + 1)) return nan;
            if (env.reduction == reduce::sequence_mean) in_sequence = double(counts[s]);
            count = env.normalizer > 0 ? env.normalizer : double(totals->sequences);
        } else if (env.reduction == reduce::token_mean) {
            count = env.normalizer > 0 ? env.normalizer : double(totals->kept);
        } else if (env.reduction == reduce::constant) {
            count = env.normalizer;
        }
        const double f = w / in_sequence / (count > 0 ? count : 1);
        return is_finite(f) && f <= largest_factor && f >= -largest_factor ? f : nan;
    }
};

/// Kept rows of one sequence a block.
template <space S>
struct count_sequences {
    using state_type = group_state;
    row_frame<S> frame;

    struct phase {
        OPD_HD static index_t part(const count_sequences& k, const group_state& st, int tid, int threads) {
            index_t n = 0;
            for (index_t r = k.frame.offset(st.row) + tid; r < k.frame.offset(st.row + 1); r += threads)
                n += k.frame.env.mask.kept(r);
            return n;
        }
        OPD_HD static index_t merge(index_t a, index_t b) { return a + b; }
        OPD_HD static void finish(const count_sequences& k, group_state& st, index_t n) { k.frame.counts[st.row] = n; }
    };
    template <class Team>
    OPD_HD void run(index_t sequence, Team& team) const {
        team.begin(sequence);
        team.template fold<phase>(*this);
    }
};

/// Kept rows and sequences of the batch, in one block. Counts are whole numbers: no order changes them.
template <space S>
struct count_batch {
    using state_type = group_state;
    row_frame<S> frame;
    index_t sequences = 0;

    struct phase {
        OPD_HD static batch_totals part(const count_batch& k, const group_state&, int tid, int threads) {
            batch_totals t;
            for (index_t s = tid; s < k.sequences; s += threads)
                t.sequences += k.frame.counts[s] > 0, t.kept += k.frame.counts[s];
            if (k.sequences == 0)
                for (index_t r = tid; r < k.frame.rows; r += threads) t.kept += k.frame.env.mask.kept(r);
            return t;
        }
        OPD_HD static batch_totals merge(batch_totals a, batch_totals b) {
            return {a.kept + b.kept, a.sequences + b.sequences};
        }
        OPD_HD static void finish(const count_batch& k, group_state&, batch_totals t) { *k.frame.totals = t; }
    };
    template <class Team>
    OPD_HD void run(index_t, Team& team) const {
        team.begin(0);
        team.template fold<phase>(*this);
    }
};

/// Partial results into one, in a tree of fixed shape: eight neighbours at a time. One block.
struct merge_results {
    using state_type = group_state;
    result* partials = nullptr;
    index_t count = 0;
    result* out = nullptr;

    struct level { // state.row holds the distance between partials that are still apart
        OPD_HD static void run(const merge_results& k, const group_state& st, int tid, int threads) {
            const index_t d = st.row;
            for (index_t i = tid * d * 8; i < k.count; i += threads * d * 8)
                for (index_t j = i + d; j < i + 8 * d && j < k.count; j += d) {
                    k.partials[i].loss += k.partials[j].loss;
                    k.partials[i].diagnostics.merge(k.partials[j].diagnostics);
                }
        }
    };
    struct store {
        OPD_HD static void run(const merge_results& k, const group_state&, int tid, int) {
            if (tid == 0) *k.out = k.count > 0 ? k.partials[0] : result{};
        }
    };
    template <class Team>
    OPD_HD void run(index_t, Team& team) const {
        for (index_t d = 1; d < count; d *= 8) {
            team.begin(d);
            team.template each<level>(*this);
        }
        team.begin(0);
        team.template each<store>(*this);
    }
};

/// Row r is taken up: is it kept, and with what factor?
template <class Kernel>
struct begin_row {
    OPD_HD static void run(const Kernel& k, typename Kernel::state_type& st, int tid, int) {
        if (tid != 0) return;
        st.report = {};
        st.live = false;
        st.kept = k.frame.env.mask.kept(st.row);
        diagnostics& d = st.partial.diagnostics;
        ++d.rows;
        if (!st.kept) return;
        ++d.kept;
        st.factor = k.frame.factor(st.row);
        st.report.bad = is_nan(st.factor);
    }
};

/// Row r is done: its part of the loss, per-row outputs and counts.
template <class Kernel>
struct end_row {
    OPD_HD static void run(const Kernel& k, typename Kernel::state_type& st, int tid, int) {
        if (tid != 0) return;
        const auto& e = k.frame.env;
        const index_t r = st.row;
        const double old = e.losses.empty() || e.beta_loss == 0 ? 0 : double(e.beta_loss * e.losses[r]);
        if (!st.kept) {
            if (!e.losses.empty()) e.losses[r] = float(old);
            return;
        }
        diagnostics& d = st.partial.diagnostics;
        const row_report& o = st.report;
        const double loss = o.bad ? 0 : (o.clamped ? (o.loss < 0 ? -e.loss_clamp : e.loss_clamp) : o.loss);
        if (o.bad) {
            ++d.bad_rows;
            d.first_bad_row = d.first_bad_row < 0 ? r : d.first_bad_row;
        } else {
            count_staleness(d, e, r);
            d.kept_loss += o.loss;
            st.partial.loss += st.factor * loss;
        }
        if (o.infinite) {
            ++d.infinite_rows;
            d.first_infinite_row = d.first_infinite_row < 0 ? r : d.first_infinite_row;
        }
        d.careful_rows += o.careful;
        d.clamped_rows += o.clamped;
        if (!e.losses.empty()) {
            const double w = e.weights.empty() || o.bad ? 1 : e.weights[r];
            e.losses[r] = float(old) + float(w * loss);
        }
        if (!e.lse.empty()) e.lse[r] = o.lse;
    }
};

template <class Kernel>
struct end_group {
    OPD_HD static void run(const Kernel& k, const typename Kernel::state_type& st, int tid, int, index_t group) {
        if (tid == 0) k.frame.partials[group] = st.partial;
    }
};

/// A block's work: group g of the rows.
template <class Kernel, class Team>
OPD_HD void run_rows(const Kernel& k, index_t g, Team& team) {
    const index_t first = g * k.frame.group;
    team.begin(first);
    for (index_t r = first; r < first + k.frame.group && r < k.frame.rows; ++r) {
        team.move_to(r);
        team.template each<begin_row<Kernel>>(k);
        k.row(team);
        team.template each<end_row<Kernel>>(k);
    }
    team.template each<end_group<Kernel>>(k, g);
}

// --- one thread's arithmetic --------------------------------------------------------------------------------------------

/// The number type that a thread computes rows of these storage types in.
template <class... T>
using thread_number =
    std::conditional_t<(std::is_same_v<arithmetic_t<T>, double> || ...), scalar<double>, scalar<float>>;

inline constexpr int entries_at_a_time = 8;   // summed in the thread's number type before they are folded into double
inline constexpr double lowest_logit = -1e30; // stands for -inf

/// What a thread saw by the bits of the logits.
struct row_contents {
    bool bad = false;          ///< NaN or +inf
    bool teacher_zero = false; ///< somewhere student > -inf = teacher
    bool student_zero = false; ///< somewhere teacher > -inf = student
};

template <class F>
struct loaded {
    F x;
    bool zero; ///< -inf
};
/// Entry *p as the thread's number within ±1e30.
template <class F, class T>
OPD_HD OPD_INLINE loaded<F> load_logit(const T* p, bool& bad) {
    using value = typename F::value_type;
    using bits = float_bits<value>;
    using word = typename bits::word;
    const value x = static_cast<value>(element<std::remove_const_t<T>>::load(*p));
    const word w = bit_cast<word>(x);
    if ((w & bits::magnitude) < bit_cast<word>(value(1e30))) return {F::raw(x), false};
    const bool zero = is_neg_inf(x);
    bad |= !zero && (w & bits::magnitude) >= bits::infinity;
    return {F::raw(w > bits::magnitude ? value(-1e30) : value(1e30)), zero};
}

/// e^(x·(hi + lo)) for x <= 0, the product's rounding made good: its error does not grow with |x|.
template <class F>
OPD_HD OPD_INLINE F exp_scaled(F x, F hi, F lo) {
    const F t = x * hi;
    const F lost = fma(x, hi, -t) + x * lo;
    const F e = exp(t);
    return select(t < F(-800), F(0), fma(e, lost, e)); // 0 also where t or lost is beyond the number type
}

/// Anchors (row_program.hpp) as one thread's numbers.
template <class F>
struct thread_anchors {
    using value = typename F::value_type;
    F z_s, y_s, y_t, d0;
    F inv_s, low_s, inv_t, low_t; // 1/T in two parts
    bool near;                    // how delta is grouped: each form alone loses digits on some rows

    OPD_HD explicit thread_anchors(const raw_sums& s)
        : z_s(s.z_s), y_s(s.y_s), y_t(s.y_t), d0(s.z_s - s.y_s), inv_s(s.inv_s),
          low_s(s.inv_s - double(value(s.inv_s))), inv_t(s.inv_t), low_t(s.inv_t - double(value(s.inv_t))),
          near(s.inv_s == s.inv_t && s.z_s - s.y_s <= 16 && s.z_s - s.y_s >= -16) {}

    OPD_HD OPD_INLINE F student(F z) const { return exp_scaled(pin(z - z_s), inv_s, low_s); }
    OPD_HD OPD_INLINE F teacher(F y) const { return exp_scaled(pin(y - y_t), inv_t, low_t); }
    OPD_HD OPD_INLINE F delta(F z, F y) const {
        if (near) return within(pin(pin(z - y) - d0) * inv_s);
        return within(within(pin(z - z_s) * inv_s) - within(pin(y - y_s) * inv_t));
    }
    OPD_HD OPD_INLINE static F within(F x) { return min(max(x, F(-1e30)), F(1e30)); }
};

/// A row as one thread, or several, have swept it. Sums exclude their anchors; an anchor -1 means that side had no mass yet.
struct row_sweep {
    raw_sums sums = {};
    double reach = -1e300; ///< the largest `reach_of`: float carries up to `steepest`
    double risen = 0;      ///< nats that the student's anchor rose by, up to anchor_slack
    double grown = 0;      ///< log of the factor by which W's terms have grown since they were smallest
    bool rough_s = false,
         rough_x = false; ///< an anchor moved by so many nats of log-ratio that float's delta lost digits, or W was cut
    row_contents found = {};

    /// The student's anchor moves to token id, which is in none of these sums.
    OPD_HD void student_to(index_t id, double z, double y) {
        if (sums.s < 0) {
            sums.s = id, sums.z_s = z, sums.y_s = y;
            return;
        }
        const double a = (sums.z_s - z) * sums.inv_s, g = a - (sums.y_s - y) * sums.inv_t;
        rough_x |= g > 200 || g < -200;
        rough_s |= (g > 200 || g < -200) && a > -100; // else nothing of this side is left
        reach -= sums.k * g;
        risen -= a;
        if (risen > anchor_slack) risen = 0, reach += anchor_slack;
        grown = grown + a - sums.k * g > 0 ? grown + a - sums.k * g : 0;
        sums.rebase_student(id, z, y);
    }
    OPD_HD void teacher_to(index_t id, double z, double y) {
        if (sums.t < 0)
            sums.t = id, sums.z_t = z, sums.y_t = y;
        else
            sums.rebase_teacher(id, z, y);
    }
    OPD_HD static bool better(double x, index_t i, double y, index_t j) { return x > y || (x == y && i < j); }

    /// Sums over two disjoint sets of entries: both move to the better anchors, then add.
    OPD_HD static row_sweep merge(row_sweep a, row_sweep b) {
        if (b.sums.s >= 0 && (a.sums.s < 0 || better(b.sums.z_s, b.sums.s, a.sums.z_s, a.sums.s)))
            a.student_to(b.sums.s, b.sums.z_s, b.sums.y_s);
        else if (a.sums.s >= 0)
            b.student_to(a.sums.s, a.sums.z_s, a.sums.y_s);
        if (b.sums.t >= 0 && (a.sums.t < 0 || better(b.sums.y_t, b.sums.t, a.sums.y_t, a.sums.t)))
            a.teacher_to(b.sums.t, b.sums.z_t, b.sums.y_t);
        else if (a.sums.t >= 0)
            b.teacher_to(a.sums.t, a.sums.z_t, a.sums.y_t);
        a.sums.S += b.sums.S, a.sums.T += b.sums.T, a.sums.U += b.sums.U, a.sums.W += b.sums.W, a.sums.X += b.sums.X;
        a.reach = a.reach < b.reach ? b.reach : a.reach;
        a.grown = a.grown < b.grown ? b.grown : a.grown;
        a.rough_s |= b.rough_s, a.rough_x |= b.rough_x;
        a.found.bad |= b.found.bad;
        a.found.teacher_zero |= b.found.teacher_zero;
        a.found.student_zero |= b.found.student_zero;
        return a;
    }
};

/// One thread's share of a row of n entries: tid, tid + threads, …. `Teacher` false: y is not read. Excluded ids are looked
/// at, but neither summed nor made an anchor.
struct nothing_excluded {
    OPD_HD OPD_INLINE bool operator()(index_t) const { return false; }
};
template <class F, bool Teacher, raw_sums_needed Need, class Z, class Y, class Excluded = nothing_excluded>
OPD_HD row_sweep sweep_thread(const Z* z, const Y* y, index_t n, double inv_s, double inv_t, double k, int tid,
                              int threads, const Excluded& excluded = {}) {
    row_sweep out;
    raw_sums& s = out.sums;
    s.inv_s = inv_s, s.inv_t = inv_t, s.k = k;
    if constexpr (Need.x_power) s.x_power = raw_sums::power_for(k);
    thread_anchors<F> a(s);
    const F lowest(lowest_logit);
    for (index_t first = tid; first < n; first += index_t{threads} * entries_at_a_time) {
        F zs[entries_at_a_time], ys[entries_at_a_time];
        // load, and look for better anchors; ids ascend, so the first of equals stays
        F top_z = s.s < 0 ? lowest : a.z_s, top_y = s.t < 0 ? lowest : a.y_t;
        F y_at_top(0.), z_at_top(0.);
        index_t new_s = -1, new_t = -1;
        for (int i = 0; i < entries_at_a_time; ++i) {
            const index_t id = first + index_t{i} * threads;
            zs[i] = ys[i] = lowest;
            if (id >= n) continue;
            const loaded<F> zi = load_logit<F>(z + id, out.found.bad);
            zs[i] = excluded(id) ? lowest : zi.x;
            if constexpr (Teacher) {
                const loaded<F> yi = load_logit<F>(y + id, out.found.bad);
                ys[i] = yi.x;
                out.found.teacher_zero |= yi.zero && !zi.zero;
                out.found.student_zero |= zi.zero && !yi.zero;
                if (ys[i] > top_y) top_y = ys[i], z_at_top = zs[i], new_t = id;
            }
            if (zs[i] > top_z) top_z = zs[i], y_at_top = ys[i], new_s = id;
        }
        if (new_s >= 0) out.student_to(new_s, double(top_z.v), double(y_at_top.v));
        if (new_t >= 0) out.teacher_to(new_t, double(z_at_top.v), double(top_y.v));
        if (new_s >= 0 || new_t >= 0) a = thread_anchors<F>(s);

        F S(0.), T(0.), U(0.), W(0.), X(0.), reach(-1e30);
        for (int i = 0; i < entries_at_a_time; ++i) {
            const index_t id = first + index_t{i} * threads;
            const bool has_z = zs[i] > lowest, has_y = Teacher && ys[i] > lowest;
            const F e = has_z && id != s.s ? a.student(zs[i]) : F(0.);
            S += e;
            if constexpr (Teacher) {
                const F f = has_y && id != s.t ? a.teacher(ys[i]) : F(0.);
                T += f;
                if constexpr (Need.u || Need.w || Need.x) {
                    const bool in_s = e > F(0.), in_t = f > F(0.);
                    const F delta = a.delta(zs[i], ys[i]);
                    if constexpr (Need.u) U = in_s ? fma(e, delta, U) : U;
                    if constexpr (Need.w) {
                        const F x = -F(k) * delta, edge(80);
                        W += in_s ? e * expm1(min(max(x, -edge), edge)) : F(0.);
                        if (has_z && has_y) reach = max(reach, reach_of(x, (a.z_s - zs[i]) * a.inv_s));
                    }
                    if constexpr (Need.x) {
                        F x = delta;
                        if constexpr (Need.x_power)
                            if (s.x_power != 0) x = expm1(min(F(s.x_power) * delta, F(80))) * F(1 / s.x_power);
                        X = in_t ? fma(f, x, X) : X;
                    }
                }
            }
        }
        s.S += double(S.v), s.T += double(T.v), s.U += double(U.v), s.W += double(W.v), s.X += double(X.v);
        out.reach = out.reach < double(reach.v) ? double(reach.v) : out.reach;
        out.rough_s |= reach > F(steepest); // W was cut: no later anchor brings it back
    }
    return out;
}

/// dz = beta·dz + g
template <class G>
OPD_HD OPD_INLINE void store_gradient(G* dz, double g, float beta) {
    using value = arithmetic_t<G>;
    const value old = beta == 0 ? value(0) : value(beta) * element<G>::load(*dz);
    *dz = element<G>::store(old + static_cast<value>(g));
}

/// One thread's share of: dz = beta·dz over columns [from, cols), then the view's padding by policy.
template <class Student>
OPD_HD void clear_columns(const Student& s, index_t row, index_t from, float beta, int tid, int threads) {
    using G = typename Student::gradient_type;
    if (s.dz.empty()) return;
    G* dz = s.dz.row(row);
    for (index_t i = from + tid; i < s.dz.cols; i += threads) store_gradient(dz + i, 0., beta);
    if (s.pad == padding::zero)
        for (index_t i = tid; i < s.dz.padding; i += threads) dz[s.dz.cols + i] = element<G>::store(0);
}

// --- dense divergences --------------------------------------------------------------------------------------------------

enum class row_step { clear, gradient, terms, refine, entry_terms, entry_gradient, careful, careful_gradient };

struct dense_state : group_state {
    row_step next = row_step::clear;
    raw_sums sums = {};
    double sum_c = 0;
    double log_z = 0, log_y = 0;           ///< careful: log normalisers relative to the anchors
    bool by_entry = false;                 ///< the gradient, too, is taken entry by entry
    bool floor_q = false, floor_p = false; ///< an infinite row's log-probs of teacher or student are raised
    row_contents found = {};
};

struct two_sums {
    double a = 0, b = 0;
    OPD_HD static two_sums merge(two_sums x, two_sums y) { return {x.a + y.a, x.b + y.b}; }
};

template <class Z, class G, class Y, class Program, space S>
struct dense_kernel {
    using F = thread_number<Z, Y, G>;
    using D = scalar<double>;
    using state_type = dense_state;
    static constexpr bool single_sweep = single_sweep_divergence<Program>;
    static constexpr raw_sums_needed need = [] {
        if constexpr (single_sweep)
            return raw_sums_needed(Program::raw);
        else
            return raw_sums_needed{};
    }();

    static constexpr raw_sums_needed need_for_value = [] {
        if constexpr (requires { Program::raw_for_value; })
            return raw_sums_needed(Program::raw_for_value);
        else
            return need;
    }();

    row_frame<S> frame;
    student::logits<Z, G, S> student;
    teacher::dense<Y, S> teacher;
    Program program;
    index_t vocab = 0;
    double inv_s = 1, inv_t = 1;
    bool infinite_teacher_zero = false, infinite_student_zero = false; // where the program's value is infinite

    dense_kernel(const row_job<student::logits<Z, G, S>, teacher::dense<Y, S>, Program, S>& job,
                 const row_frame<S>& frame_)
        : frame(frame_), student(job.student), teacher(job.teacher), program(job.estimator), vocab(job.vocab),
          inv_s(1 / double(job.student.temperature)), inv_t(1 / double(job.teacher.temperature)),
          infinite_teacher_zero(detail::infinite_where_teacher_zero(job.estimator)),
          infinite_student_zero(detail::infinite_where_student_zero(job.estimator)) {}

    template <class Team>
    OPD_HD void run(index_t group, Team& team) const {
        run_rows(*this, group, team);
    }
    template <class Team>
    OPD_HD void row(Team& team) const {
        if (team.state().kept && !team.state().report.bad) {
            team.template fold<sweep>(*this);
            if constexpr (!single_sweep)
                if (team.state().next == row_step::terms) team.template fold<terms>(*this);
            if (team.state().next == row_step::entry_terms) team.template fold<entry_terms>(*this);
            if constexpr (refinable_divergence<Program>)
                if (team.state().next == row_step::refine) team.template fold<refine>(*this);
            if (team.state().next == row_step::careful) {
                team.template fold<careful_normalisers>(*this);
                team.template fold<careful_terms>(*this);
            }
        }
        team.template each<write>(*this);
    }

    /// Normalisers and raw sums; decides how the row goes on.
    struct sweep {
        OPD_HD static row_sweep part(const dense_kernel& k, const dense_state& st, int tid, int threads) {
            double exponent = 1;
            if constexpr (single_sweep) exponent = k.program.exponent();
            const Z* z = k.student.z.row(st.row);
            const Y* y = k.teacher.y.row(st.row);
            if (k.student.dz.empty())
                return sweep_thread<F, true, need_for_value>(z, y, k.vocab, k.inv_s, k.inv_t, exponent, tid, threads);
            return sweep_thread<F, true, need>(z, y, k.vocab, k.inv_s, k.inv_t, exponent, tid, threads);
        }
        OPD_HD static row_sweep merge(const row_sweep& a, const row_sweep& b) { return row_sweep::merge(a, b); }
        OPD_HD static void finish(const dense_kernel& k, dense_state& st, const row_sweep& all) {
            st.sums = all.sums;
            st.found = all.found;
            st.sum_c = 0;
            raw_sums& s = st.sums;
            row_report& out = st.report;
            const auto& e = k.frame.env;
            const double* given = e.given_lse.empty() ? nullptr : &e.given_lse[st.row];
            st.next = row_step::clear;
            out.bad = all.found.bad || s.s < 0 || s.t < 0 || (given && !is_finite(*given));
            if (out.bad) return;
            if (given) s.S = ::expm1(*given - s.z_s * s.inv_s);
            out.lse = given ? *given : s.lse();
            out.infinite = (all.found.teacher_zero && k.infinite_teacher_zero) ||
                           (all.found.student_zero && k.infinite_student_zero);
            if (out.infinite && e.on_infinite.act != infinite::action::floor) return;
            st.floor_q = out.infinite && all.found.teacher_zero && k.infinite_teacher_zero;
            st.floor_p = out.infinite && all.found.student_zero && k.infinite_student_zero;
            const double lowest = s.y_t + (e.on_infinite.floor_at + ::log1p(s.T)) / s.inv_t;
            if (st.floor_q && s.y_s < lowest) s.y_s = lowest; // d* and delta follow
            const double gap = (s.y_t - s.y_s) * s.inv_t;     // how little the teacher gives the student's top token
            constexpr bool tolerant = need.u && !need.w && !need.x; // never forms e^-delta
            const bool rough = (need.x && all.rough_x) || ((need.u || need.w) && all.rough_s) ||
                               (need.w && !need.k_is_one && all.grown > 10); // terms not felt grew
            st.by_entry = out.infinite || (single_sweep && rough);
            if ((all.reach > steepest && !st.by_entry) || gap > (tolerant ? 1e29 : 40)) {
                st.next = row_step::careful;
            } else if (st.by_entry) {
                st.next = row_step::entry_terms;
            } else if constexpr (single_sweep) {
                out.loss = k.program.value(s);
                st.sum_c = k.program.sum_c(s);
                k.refine_or_settle(st);
            } else {
                st.next = row_step::terms;
            }
        }
    };

    /// Whether there is no finite number to report or to store.
    OPD_HD static bool beyond_float(const double& x) { return !is_finite(x) || x > 1e30 || x < -1e30; }
    /// A value that lost its digits is summed again; else `settle`.
    OPD_HD void refine_or_settle(dense_state& st) const {
        if constexpr (refinable_divergence<Program>)
            if (!st.report.infinite && is_finite(st.report.loss) && is_finite(st.sum_c) &&
                loses_digits<F>(program, st.report.loss, st.sums)) {
                st.next = row_step::refine;
                return;
            }
        settle(st);
    }
    /// Float could carry the row, or not; and the clamp.
    OPD_HD void settle(dense_state& st) const {
        const double clamp = frame.env.loss_clamp, loss = st.report.loss;
        if (beyond_float(loss) || beyond_float(st.sum_c)) {
            st.next = row_step::careful;
        } else if (clamp > 0 && (loss > clamp || loss < -clamp)) {
            st.report.clamped = true;
            st.next = row_step::clear;
        } else {
            st.next = st.by_entry ? row_step::entry_gradient : row_step::gradient;
        }
    }

    /// A row's constants as a thread's numbers.
    struct constants {
        thread_anchors<F> anchor;
        row_constants<F> row;
        F inv_sum_s, inv_sum_t, log_sum_s, log_sum_t;

        OPD_HD constants(const raw_sums& s, const Program& program)
            : anchor(s), row{F(1 / (1 + s.S)), F(::exp(-s.d_star()) / (1 + s.S)), F(s.d_star()), F(s.ratio())},
              inv_sum_s(1 / (1 + s.S)), inv_sum_t(1 / (1 + s.T)), log_sum_s(::log1p(s.S)), log_sum_t(::log1p(s.T)) {
            row.anchored = s.ratio() > 0;
            if constexpr (requires { program.slope_star(row); }) row.slope_star = program.slope_star(row);
        }

        OPD_HD OPD_INLINE dense_entry<F> entry(F z, F y) const {
            dense_entry<F> e;
            e.p = anchor.student(z) * inv_sum_s;
            e.q = anchor.teacher(y) * inv_sum_t;
            e.delta = anchor.delta(z, y);
            e.log_p = pin(z - anchor.z_s) * anchor.inv_s - log_sum_s;
            e.log_q = pin(y - anchor.y_t) * anchor.inv_t - log_sum_t;
            return e;
        }
    };

    OPD_HD OPD_INLINE dense_entry<F> entry_at(const constants& c, index_t r, index_t i) const {
        bool bad = false; // such rows do not come here
        return c.entry(load_logit<F>(student.z.row(r) + i, bad).x, load_logit<F>(teacher.y.row(r) + i, bad).x);
    }

    /// Σ term and Σ c of programs that need both normalisers first.
    struct terms {
        OPD_HD static two_sums part(const dense_kernel& k, const dense_state& st, int tid, int threads) {
            const constants c(st.sums, k.program);
            two_sums out;
            for (index_t first = tid; first < k.vocab; first += index_t{threads} * entries_at_a_time) {
                F loss(0.), sum_c(0.);
                for (int i = 0; i < entries_at_a_time; ++i) {
                    const index_t id = first + index_t{i} * threads;
                    if (id >= k.vocab) break;
                    const dense_entry<F> e = k.entry_at(c, st.row, id);
                    loss += k.program.term(c.row, e);
                    sum_c += k.program.c(c.row, e);
                }
                out.a += double(loss.v), out.b += double(sum_c.v);
            }
            return out;
        }
        OPD_HD static two_sums merge(two_sums a, two_sums b) { return two_sums::merge(a, b); }
        OPD_HD static void finish(const dense_kernel& k, dense_state& st, two_sums all) {
            st.report.loss = all.a, st.sum_c = all.b;
            k.refine_or_settle(st);
        }
    };

    /// The value as a sum of terms of which none is negative, log p - log q in double but for the normalisers.
    struct refine {
        OPD_HD static two_sums part(const dense_kernel& k, const dense_state& st, int tid, int threads) {
            const raw_sums& s = st.sums;
            const constants c(s, k.program);
            const double shift = s.shift() + s.d_star();
            two_sums out;
            for (index_t first = tid; first < k.vocab; first += index_t{threads} * entries_at_a_time) {
                F loss(0.);
                for (int i = 0; i < entries_at_a_time; ++i) {
                    const index_t id = first + index_t{i} * threads;
                    if (id >= k.vocab) break;
                    bool bad = false; // such rows do not come here
                    const F z = load_logit<F>(k.student.z.row(st.row) + id, bad).x;
                    const F y = load_logit<F>(k.teacher.y.row(st.row) + id, bad).x;
                    dense_entry<F> e = c.entry(z, y);
                    e.delta = in_double(z, s.inv_s, y, s.inv_t, shift);
                    loss += k.program.nonnegative_term(e);
                }
                out.a += double(loss.v);
            }
            return out;
        }
        OPD_HD static two_sums merge(two_sums a, two_sums b) { return two_sums::merge(a, b); }
        OPD_HD static void finish(const dense_kernel& k, dense_state& st, two_sums all) {
            st.report.loss = all.a;
            k.settle(st);
        }
    };

    /// Constants of a row that is looked at entry by entry: infinite rows under `floor`, rows whose raw sums lost their
    /// digits on the way to their anchor. Differences are taken in double.
    struct entry_constants : constants {
        static constexpr double none = 3e38; // beyond every log-prob
        double inv_s, inv_t, shift;
        F floor_p, raised_p, floor_q, above_floor, k, d_star;

        OPD_HD entry_constants(const dense_kernel& kernel, const dense_state& st)
            : constants(st.sums, kernel.program), inv_s(st.sums.inv_s), inv_t(st.sums.inv_t), shift(st.sums.shift()),
              floor_p(st.floor_p ? kernel.frame.env.on_infinite.floor_at : -none),
              raised_p(st.floor_p ? ::exp(kernel.frame.env.on_infinite.floor_at) : 0),
              floor_q(st.floor_q ? kernel.frame.env.on_infinite.floor_at : -none),
              above_floor(st.floor_q ? kernel.frame.env.on_infinite.floor_at + st.sums.d_star() : -none), k(st.sums.k),
              d_star(st.sums.d_star()) {}

        /// As c sees it: with the teacher's floor, without the student's (the gradient of forward KL is p - q).
        OPD_HD OPD_INLINE dense_entry<F> entry(F z, F y) const {
            dense_entry<F> e = constants::entry(z, y);
            e.log_q = max(e.log_q, floor_q);
            e.delta = min(in_double(z, inv_s, y, inv_t, shift), e.log_p - above_floor);
            return e;
        }
        /// As the value sees it: p itself raised too, where q > 0, for not every program has a logarithm.
        OPD_HD OPD_INLINE dense_entry<F> for_value(dense_entry<F> e) const {
            const auto low = e.log_p < floor_p;
            const typename F::mask lifted = low & (e.q > F(0));
            e.p = select(lifted, raised_p, e.p);
            e.log_p = max(e.log_p, floor_p);
            e.delta = max(e.delta, floor_p - e.log_q - d_star);
            return e;
        }
        /// Whether float cannot carry e^(-k delta), if the program forms it, at this entry.
        OPD_HD OPD_INLINE bool wide(const dense_entry<F>& e) const {
            const F x = max(-k * e.delta, -k * (e.delta + d_star));
            return (reach_of(x, -e.log_p) > F(steepest) && e.log_p > F(-1e20)) ||
                   (x > F(steepest) && e.p + e.q > F(0.));
        }
    };
    struct terms_and_width {
        two_sums sums = {};
        bool wide = false;
    };
    OPD_HD OPD_INLINE dense_entry<F> entry_at(const entry_constants& c, index_t r, index_t i) const {
        bool bad = false; // such rows do not come here
        return c.entry(load_logit<F>(student.z.row(r) + i, bad).x, load_logit<F>(teacher.y.row(r) + i, bad).x);
    }

    struct entry_terms {
        OPD_HD static terms_and_width part(const dense_kernel& k, const dense_state& st, int tid, int threads) {
            const entry_constants c(k, st);
            terms_and_width out;
            for (index_t first = tid; first < k.vocab; first += index_t{threads} * entries_at_a_time) {
                F loss(0.), sum_c(0.);
                for (int i = 0; i < entries_at_a_time; ++i) {
                    const index_t id = first + index_t{i} * threads;
                    if (id >= k.vocab) break;
                    const dense_entry<F> e = k.entry_at(c, st.row, id);
                    loss += k.program.term(c.row, c.for_value(e));
                    sum_c += k.program.c(c.row, e);
                    if constexpr (need.w && !need.k_is_one) out.wide |= c.wide(e);
                }
                out.sums.a += double(loss.v), out.sums.b += double(sum_c.v);
            }
            return out;
        }
        OPD_HD static terms_and_width merge(terms_and_width a, terms_and_width b) {
            return {two_sums::merge(a.sums, b.sums), a.wide || b.wide};
        }
        OPD_HD static void finish(const dense_kernel& k, dense_state& st, terms_and_width all) {
            st.report.loss = all.sums.a, st.sum_c = all.sums.b;
            k.refine_or_settle(st);
            if (all.wide) st.next = row_step::careful;
        }
    };

    /// The row in float64, entry by entry, unanchored: d* = 0 and ratio 1 make delta the full log-ratio.
    struct careful_normalisers {
        OPD_HD static two_sums part(const dense_kernel& k, const dense_state& st, int tid, int threads) {
            two_sums out;
            for (index_t i = tid; i < k.vocab; i += threads) {
                const double z = k.student_at(st.row, i), y = k.teacher_at(st.row, i);
                out.a += is_neg_inf(z) ? 0 : ::exp((z - st.sums.z_s) * k.inv_s);
                out.b += is_neg_inf(y) ? 0 : ::exp((y - st.sums.y_t) * k.inv_t);
            }
            return out;
        }
        OPD_HD static two_sums merge(two_sums a, two_sums b) { return two_sums::merge(a, b); }
        OPD_HD static void finish(const dense_kernel& k, dense_state& st, two_sums all) {
            st.log_z = k.frame.env.given_lse.empty() ? ::log(all.a) : ::log1p(st.sums.S);
            st.log_y = ::log(all.b);
        }
    };

    struct careful_terms {
        OPD_HD static two_sums part(const dense_kernel& k, const dense_state& st, int tid, int threads) {
            const row_constants<D> row = k.careful_row(st);
            two_sums out;
            for (index_t i = tid; i < k.vocab; i += threads) {
                out.a += k.program.term(row, k.careful_entry(st, i, true, row.d_star.v)).v;
                out.b += k.program.c(row, k.careful_entry(st, i, false, row.d_star.v)).v;
            }
            return out;
        }
        OPD_HD static two_sums merge(two_sums a, two_sums b) { return two_sums::merge(a, b); }
        OPD_HD static void finish(const dense_kernel& k, dense_state& st, two_sums all) {
            st.report.careful = true;
            st.report.loss = all.a, st.sum_c = all.b;
            if (beyond_float(all.a) || beyond_float(all.b)) {
                st.report.infinite = true;
                st.report.loss = 0;
                st.next = row_step::clear;
                return;
            }
            st.by_entry = false;
            k.settle(st);
            if (st.next == row_step::gradient) st.next = row_step::careful_gradient;
        }
    };

    /// Within ±1e30, as the sweep saw it; -inf stays.
    template <class T>
    OPD_HD static double within(const T& stored) {
        const double x = element<T>::load(stored);
        const double most = double(typename F::value_type(1e30));
        return is_neg_inf(x) ? x : (x < -most ? -most : (x > most ? most : x));
    }
    OPD_HD double student_at(index_t r, index_t i) const { return within<Z>(student.z.row(r)[i]); }
    OPD_HD double teacher_at(index_t r, index_t i) const { return within<Y>(teacher.y.row(r)[i]); }
    OPD_HD row_constants<D> careful_row(const dense_state& st) const {
        double k = 1;
        if constexpr (single_sweep) k = program.exponent();
        return careful_constants(program, careful_entry(st, st.sums.s, false, 0), k);
    }
    /// The gradient of forward KL is p - q whatever the value: only a floor on the teacher's side reaches c.
    OPD_HD dense_entry<D> careful_entry(const dense_state& st, index_t i, bool for_value, double d_star) const {
        const double z = student_at(st.row, i), y = teacher_at(st.row, i), floor = frame.env.on_infinite.floor_at;
        double lp = is_neg_inf(z) ? lowest_logit : (z - st.sums.z_s) * inv_s - st.log_z;
        double lq = is_neg_inf(y) ? lowest_logit : (y - st.sums.y_t) * inv_t - st.log_y;
        dense_entry<D> e;
        e.p = D(lp < -745 ? 0 : ::exp(lp));
        e.q = D(lq < -745 ? 0 : ::exp(lq));
        if (st.floor_q && lq < floor) lq = floor;
        if (for_value && st.floor_p && lp < floor) { // p, too: not every program has a logarithm
            lp = floor;
            if (e.q.v > 0) e.p = D(::exp(lp));
        }
        e.log_p = D(lp), e.log_q = D(lq);
        e.delta = D(lp - lq - d_star);
        return e;
    }

    struct write {
        OPD_HD static void run(const dense_kernel& k, const dense_state& st, int tid, int threads) {
            if (k.student.dz.empty()) return;
            const bool live = st.kept && !st.report.bad;
            const row_step step = live ? st.next : row_step::clear;
            const float beta = k.frame.env.beta;
            G* dz = k.student.dz.row(st.row);
            index_t written = k.vocab;
            if (step == row_step::gradient) {
                const constants c(st.sums, k.program);
                const F total(st.sum_c), g(st.factor * k.inv_s);
                for (index_t i = tid; i < k.vocab; i += threads) {
                    const dense_entry<F> e = k.entry_at(c, st.row, i);
                    store_gradient(dz + i, (g * (k.program.c(c.row, e) - e.p * total)).v, beta);
                }
            } else if (step == row_step::entry_gradient) {
                const entry_constants c(k, st);
                const F total(st.sum_c), g(st.factor * k.inv_s);
                for (index_t i = tid; i < k.vocab; i += threads) {
                    const dense_entry<F> e = k.entry_at(c, st.row, i);
                    store_gradient(dz + i, (g * (k.program.c(c.row, e) - e.p * total)).v, beta);
                }
            } else if (step == row_step::careful_gradient) {
                const row_constants<D> row = k.careful_row(st);
                for (index_t i = tid; i < k.vocab; i += threads) {
                    const dense_entry<D> e = k.careful_entry(st, i, false, row.d_star.v);
                    const double c = k.program.c(row, e).v;
                    store_gradient(dz + i, st.factor * k.inv_s * (c - e.p.v * st.sum_c), beta);
                }
            } else {
                written = 0;
            }
            clear_columns(k.student, st.row, written, beta, tid, threads);
        }
    };
};

/// Which kernel does a job, and the scratch that a block of it needs.
template <class Z, class G, class Y, class Program, space S>
dense_kernel<Z, G, Y, Program, S>
kernel_of(const row_job<student::logits<Z, G, S>, teacher::dense<Y, S>, Program, S>& job, const row_frame<S>& frame) {
    return {job, frame};
}
template <class Z, class G, class Y, class Program, space S>
std::size_t scratch_of(const row_job<student::logits<Z, G, S>, teacher::dense<Y, S>, Program, S>&) {
    return 0;
}

/// What no kernel can do: throw for what the rows hold.
template <space S>
void refuse_content_checks(const basic_env<S>& e) {
    if (e.checks == check::contents)
        throw unsupported(
            "opd: env.checks = check::contents throws for what rows hold, which a device call would have to "
            "wait for; use check::count and read bad_rows of fetch()");
    if (e.on_infinite.act == infinite::action::raise)
        throw unsupported(
            "opd: env.on_infinite = infinite::raise() throws for what rows hold, which a device call would "
            "have to wait for; use floor or skip and read infinite_rows of fetch()");
}

} // namespace OPD_ISA
} // namespace opd::detail
