// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The V-sized phases of a row on the CPU (rows.hpp): lanes over leaves of 1,024 entries. The first pass over a row is
// sweep.hpp's; the passes here walk backwards, for the end of the row is still in L2.
#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "opd/config.hpp"
#include "opd/cpu/leaf.hpp"
#include "opd/cpu/leaf_lanes.hpp"
#include "opd/cpu/sweep.hpp"
#include "opd/element.hpp"
#include "opd/lanes.hpp"
#include "opd/row_program.hpp"
#include "opd/rows/row_numbers.hpp"
#include "opd/rows/rows.hpp"
#include "opd/rows/sparse_math.hpp"
#include "opd/rows/tiles.hpp"
#include "opd/rows/tuning.hpp"
#if defined(OPD_AVX512)
#include <immintrin.h>
#endif

namespace opd::detail {
inline namespace OPD_ISA {

/// A row's numbers from n entries at `from` on, stored at `to`: dz = beta·dz + g.
template <class G, class Value>
void store_converted(const Value* from, G* to, int count, float beta) {
    if (beta == 0)
        for (int i = 0; i < count; ++i) to[i] = element<G>::store(static_cast<arithmetic_t<G>>(from[i]));
    else
        for (int i = 0; i < count; ++i)
            to[i] = element<G>::store(
                static_cast<arithmetic_t<G>>(Value(beta) * static_cast<Value>(element<G>::load(to[i])) + from[i]));
}

/// The same of a whole leaf that F reads in place, as one rounding an entry.
template <class F, class G>
void add_to(const typename F::value_type* from, G* to, F beta) {
    for (int i = 0; i < leaf_size; i += F::width) fma(beta, F::load(to + i), F::load(from + i)).store(to + i);
}

/// Leaves of a tile from its end, staged where they cannot be read in place: visit(z, y, i, count, full), i counting
/// from the tile's begin. `out_of_range`: some leaf holds numbers beyond ±1e30, which are to be cut. Where both ways
/// give the same types, one call serves them: the compiler then has one loop, not two.
template <class F, bool NeedY, class Tile, class Visit>
OPD_INLINE void leaves_backwards(const Tile& t, bool out_of_range, Visit visit) {
    using value = typename F::value_type;
    using Z = std::remove_cvref_t<decltype(*t.z)>;
    using Y = std::remove_cvref_t<decltype(*t.y)>;
    constexpr bool direct = loads_directly<F, Z> && (!NeedY || loads_directly<F, Y>);
    constexpr bool alike = std::is_same_v<Z, value> && (!NeedY || std::is_same_v<Y, value>);
    staged_leaf<F> stage;
    for (index_t begin = (t.count - 1) / leaf_size * leaf_size; begin >= 0; begin -= leaf_size) {
        const int count = static_cast<int>(std::min<index_t>(leaf_size, t.count - begin));
        const bool in_place = direct && !out_of_range && count == leaf_size;
        if constexpr (direct && !alike)
            if (in_place) {
                visit(t.z + begin, NeedY ? t.y + begin : t.y, begin, count, count);
                continue;
            }
        const value *z = stage.z, *y = stage.y;
        int full = count;
        if (alike && in_place) {
            if constexpr (alike) z = t.z + begin;
            if constexpr (alike && NeedY) y = t.y + begin;
        } else {
            full = staged_leaf<F>::load(stage.z, t.z + begin, count);
            if constexpr (NeedY) staged_leaf<F>::load(stage.y, t.y + begin, count);
            if (out_of_range) stage.template cut<NeedY>(count);
        }
        visit(z, y, begin, count, full);
    }
}

/// Whether a gradient of n entries at dz is written past the caches.
template <class F, class G>
bool written_past_caches(const G* dz, index_t n, float beta) {
    return streams<F, G> && beta == 0 && n >= cpu_tuning::stream_from &&
           reinterpret_cast<std::uintptr_t>(dz) % F::alignment == 0;
}

struct lane_engine {
    using leaves = lane_leaves; ///< rows that are drawn from and searched
    template <class... T>
    using number = pack_for<T...>;
    template <class F>
    using anchors = anchor_lanes<F>;

    // --- dense rows --------------------------------------------------------------------------------------------------

    /// Rows whose sweep keeps what their terms or their gradient need: not those of a shard, whose scratch is other
    /// rows' meanwhile.
    template <class Rows>
    static constexpr bool keeps = (Rows::parks || Rows::parks_powers || Rows::parks_students) &&
                                  !in_shards<decltype(Rows::frame)>;
    template <class Value>
    struct two_arrays {
        Value *s, *t; ///< of an id: its exponentials, then p and c; or the student's, and its power or nothing
        two_arrays(carver& from, index_t n, bool both)
            : s(from.take<Value>(n + leaf_size)), t(both ? from.take<Value>(n + leaf_size) : nullptr) {}
    };
    /// How many ids of a row have such numbers: all, or those at its end.
    template <class Rows>
    static index_t with_numbers(index_t n) {
        return Rows::parks_students ? std::min(n, cpu_tuning::kept_students) : n;
    }
    /// The first id of these: that of a leaf.
    template <class Rows>
    static index_t first_with_numbers(const Rows& k) {
        const index_t without = k.vocab - with_numbers<Rows>(k.vocab);
        return first_id(k.frame) + (without + leaf_size - 1) / leaf_size * leaf_size;
    }
    template <class Rows>
    static std::size_t scratch_bytes(index_t n, bool gradient) {
        carver scratch;
        if (Rows::parks || (keeps<Rows> && gradient))
            (void)two_arrays<typename Rows::F::value_type>(scratch, with_numbers<Rows>(n), !Rows::parks_students);
        return scratch.used;
    }
    template <class Rows>
    static auto parked(const Rows& k, const typename Rows::state_type& st) {
        carver scratch{st.scratch};
        return two_arrays<typename Rows::F::value_type>(scratch, with_numbers<Rows>(k.vocab), !Rows::parks_students);
    }
    template <class Rows>
    static auto parked(const Rows& k, const typename Rows::state_type& st, index_t begin) {
        auto a = parked(k, st);
        const index_t at = begin - first_id(k.frame);
        a.s += at, a.t += at;
        return a;
    }

    /// Whether p and q look far apart, by the spread of log-ratios at the beginning of a row that is long enough for a
    /// look to cost nothing.
    static constexpr bool looks_first = true;
    template <class Tile>
    static bool looks_apart(const Tile& t, index_t vocab, double inv_s, double inv_t) {
        if (vocab < 4 * leaf_size) return false;
        double n = 0, sum = 0, squares = 0;
        for (index_t i = 0, most = std::min<index_t>(t.count, 128); i < most; ++i) {
            const double z = double(load_maskable(t.z[i])), y = double(load_maskable(t.y[i]));
            if (!(std::abs(z) < 1e30 && std::abs(y) < 1e30)) continue;
            const double d = z * inv_s - y * inv_t;
            n += 1, sum += d, squares += d * d;
        }
        return n >= 32 && n * squares - sum * sum > n * n / 16;
    }
    template <class F, bool Teacher, raw_sums_needed Need, class Tile>
    static void sweep(row_sweep& p, const Tile& t, alone) {
        sweep_tile<F, Teacher, Need>(p, t.z, t.y, t.begin, t.count);
    }
    template <class Rows>
    static void sweep_and_keep(const Rows& k, const typename Rows::state_type& st, row_sweep& p,
                               const typename Rows::tile_type& t, alone) {
        using F = typename Rows::F;
        using value = typename F::value_type;
        constexpr kept what = Rows::parks_students ? kept::student
                              : Rows::parks_powers ? kept::student_and_power
                                                   : kept::exponentials;
        alignas(64) value lost[Rows::parks_students ? leaf_size : 1];
        const auto a = parked(k, st);
        const bool none = Rows::parks_students && !k.student.has_gradient();
        const index_t from = none ? t.begin + t.count : first_with_numbers(k);
        const keep_numbers<value, what> to{a.s, a.t, from, lost};
        sweep_tile<F, true, Rows::need>(p, t.z, t.y, t.begin, t.count, {}, to);
    }
    /// From which id of a tile on what the sweep kept is relative to the row's anchor.
    static index_t kept_from(index_t anchor, index_t begin) { return anchor / leaf_size * leaf_size - begin; }
    /// A leaf's exponentials once more, as the sweep had them.
    template <class F, class Z>
    static void students(const anchor_lanes<F> a, const Z* z, int n, typename F::value_type* to) {
        for (int i = 0; i < n; i += F::width) a.student(F::load(z + i)).store(to + i);
    }
    template <class F, class Y>
    static void teachers(const anchor_lanes<F> a, const Y* y, int n, typename F::value_type* to) {
        for (int i = 0; i < n; i += F::width) a.teacher(F::load(y + i)).store(to + i);
    }

    template <class Rows, class Sums>
    static void terms(const Rows& k, const typename Rows::state_type& st, Sums& out, const typename Rows::tile_type& t,
                      alone) {
        const typename Rows::numbers n(st.swept.sums, k.program_of(st));
        n.anchor.near ? terms<true>(k, n, st, out, t) : terms<false>(k, n, st, out, t);
    }
    template <bool Near, class Rows, class Sums>
    static void terms(const Rows& rows, const typename Rows::numbers k, const typename Rows::state_type& st, Sums& out,
                      const typename Rows::tile_type& t) {
        using F = typename Rows::F;
        using value = typename F::value_type;
        const auto formula = rows.program_of(st); // a copy that no store can alias
        const bool writes = Rows::parks && rows.student.has_gradient();
        const index_t kept_s = kept_from(st.swept.sums.s, t.begin), kept_t = kept_from(st.swept.sums.t, t.begin);
        alignas(64) value exp_z[leaf_size], exp_y[leaf_size];
        value *row_s = nullptr, *row_t = nullptr;
        if constexpr (Rows::parks) {
            const auto a = parked(rows, st, t.begin);
            row_s = a.s, row_t = a.t;
        }
        leaves_backwards<F, true>(t, st.swept.out_of_range, [&](auto* zl, auto* yl, index_t begin, int, int full) {
            value *const es = Rows::parks ? row_s + begin : exp_z, *const et = Rows::parks ? row_t + begin : exp_y;
            if (!keeps<Rows> || begin < kept_s) students(k.anchor, zl, full, es);
            if (!keeps<Rows> || begin < kept_t) teachers(k.anchor, yl, full, et);
            F loss(0.), c(0.);
            for (int block = 0; block < full; block += sum_chain<F>) {
                F block_loss(0.), block_c(0.);
                for (int i = block, end = std::min(full, block + sum_chain<F>); i < end; i += F::width) {
                    const dense_entry<F> e =
                        k.template entry<Near>(F::load(zl + i), F::load(yl + i), F::load(es + i), F::load(et + i));
                    const term_and_c<F> of = both_of(formula, k.row, e);
                    block_loss += of.term;
                    block_c += of.c; // asked for or not: else a*b+c would contract differently in the value
                    if (writes) e.p.store(es + i), of.c.store(et + i);
                }
                loss += block_loss, c += block_c;
            }
            out.a += double(sum(loss));
            out.b += double(sum(c));
        });
    }

    template <class Rows>
    static void overlap(const Rows& rows, const typename Rows::state_type& st, overlap_sums& out,
                        const typename Rows::tile_type& t, alone) {
        using F = typename Rows::F;
        const typename Rows::numbers k(st.swept.sums, rows.program_of(st));
        leaves_backwards<F, true>(t, st.swept.out_of_range, [&](auto* zl, auto* yl, index_t, int, int full) {
            F both(0.), apart(0.);
            for (int block = 0; block < full; block += sum_chain<F>) {
                F block_both(0.), block_apart(0.);
                for (int i = block, end = std::min(full, block + sum_chain<F>); i < end; i += F::width) {
                    const dense_entry<F> e = k.template entry<false>(F::load(zl + i), F::load(yl + i));
                    block_both += min(e.p, e.q);
                    block_apart += distance_term(k.row, e);
                }
                both += block_both, apart += block_apart;
            }
            out.min_sum += double(sum(both));
            out.distance += double(sum(apart));
        });
    }

    /// Of a row whose normalisers are known.
    template <class F, bool Teacher, class Tile>
    static void entropies(const row_sweep& swept, entropy_sums& out, const Tile& t, alone) {
        const raw_sums& s = swept.sums;
        const anchor_lanes<F> a(s);
        const F inv_sum_s(1 / (1 + s.student_mass)), log_sum_s(std::log1p(s.student_mass));
        const F inv_sum_t(1 / (1 + s.teacher_mass)), log_sum_t(std::log1p(s.teacher_mass));
        leaves_backwards<F, Teacher>(t, swept.out_of_range, [&](auto* zl, auto* yl, index_t, int, int full) {
            F hp(0.), hq(0.), both(0.);
            for (int i = 0; i < full; i += F::width) {
                const F z = F::load(zl + i), p = a.student(z) * inv_sum_s;
                hp += p * max(pin(z - a.z_s) * a.inv_s - log_sum_s, F(-1e4)); // p is 0 long before
                if constexpr (Teacher) {
                    const F y = F::load(yl + i), q = a.teacher(y) * inv_sum_t;
                    hq += q * max(pin(y - a.y_t) * a.inv_t - log_sum_t, F(-1e4));
                    both += min(p, q);
                }
            }
            out.student += double(sum(hp)), out.teacher += double(sum(hq)), out.overlap += double(sum(both));
        });
    }

    template <class Rows>
    static void gradient(const Rows& k, const typename Rows::state_type& st, const typename Rows::tile_type& t, alone) {
        using F = typename Rows::F;
        if constexpr (Rows::parks) {
            const auto a = parked(k, st, t.begin);
            return gradient_of_parked(a.s, a.t, t.dz, t.count, F(st.factor * k.inv_s), F(st.sum_c), k.frame.env.beta);
        } else {
            const typename Rows::numbers n(st.swept.sums, k.program_of(st));
            if constexpr (Rows::looks_first)
                if (st.swept.apart)
                    return n.anchor.near ? gradient<true, true>(k, n, st, t) : gradient<false, true>(k, n, st, t);
            n.anchor.near ? gradient<true, false>(k, n, st, t) : gradient<false, false>(k, n, st, t);
        }
    }
    /// dz = beta dz + g (c - p total). Forwards: the terms, which went backwards, left the beginning in cache.
    template <class F, class G>
    static void gradient_of_parked(const typename F::value_type* p, const typename F::value_type* c, G* dz, index_t n,
                                   F g, F total, float beta) {
        const F b{double(beta)};
        const bool stream = written_past_caches<F>(dz, n, beta);
        alignas(64) typename F::value_type buffer[leaf_size];
        for (index_t begin = 0; begin < n; begin += leaf_size) {
            const int count = static_cast<int>(std::min<index_t>(leaf_size, n - begin));
            const auto at = [&](int i) OPD_INLINE_LAMBDA {
                return g * (F::load(c + begin + i) - F::load(p + begin + i) * total);
            };
            if constexpr (loads_directly<F, G>)
                if (count == leaf_size) {
                    G* out = dz + begin;
                    if (stream)
                        for (int i = 0; i < count; i += F::width) {
                            if constexpr (streams<F, G>) at(i).stream(out + i);
                        }
                    else if (beta == 0)
                        for (int i = 0; i < count; i += F::width) at(i).store(out + i);
                    else
                        for (int i = 0; i < count; i += F::width) fma(b, F::load(out + i), at(i)).store(out + i);
                    continue;
                }
            for (int i = 0; i < count; i += F::width) at(i).store(buffer + i);
            store_converted(buffer, dz + begin, count, beta);
        }
    }
    /// Plain: dz = g (p - q), of rows that are `far_apart`.
    template <bool Near, bool Plain, class Rows>
    static void gradient(const Rows& rows, const typename Rows::numbers k, const typename Rows::state_type& st,
                         const typename Rows::tile_type& t) {
        using F = typename Rows::F;
        using G = typename Rows::G;
        using Value = typename F::value_type;
        const auto formula = rows.program_of(st); // a copy that no store can alias
        const float beta = rows.frame.env.beta;
        const F total(st.sum_c), g(st.factor * rows.inv_s), b{double(beta)};
        const bool stream = written_past_caches<F>(t.dz, t.count, beta);
        const F largest{Plain ? largest_plain(st.swept.sums) : 0.};
        alignas(64) Value buffer[leaf_size];
        const Value *kept_p = nullptr, *kept_power = nullptr;
        index_t kept = t.count; // from which id on the sweep has left what c is made of
        [[maybe_unused]] index_t without = 0;
        if constexpr (Rows::parks_students && keeps<Rows>) {
            without = first_with_numbers(rows) - t.begin;
            kept_p = parked(rows, st).s, kept = std::max(without, kept_from(st.swept.sums.s, t.begin));
        }
        if constexpr (Rows::parks_powers && keeps<Rows>)
            if (formula.keeps_power() && !any(abs(k.row.from_anchor) > F(0)) &&
                (!Near || rows.inv_s == 1)) { // where c would form the very same power
                const auto a = parked(rows, st, t.begin);
                kept_p = a.s, kept_power = a.t, kept = kept_from(st.swept.sums.s, t.begin);
            }
        leaves_backwards<F, true>(
            t, st.swept.out_of_range, [&](auto* zl, auto* yl, index_t begin, int count, int full) OPD_INLINE_LAMBDA {
                const bool known = (Rows::parks_powers || Rows::parks_students) && begin >= kept;
                const Value* const exponentials = known ? kept_p + (begin - without) : nullptr;
                // in large units g++ would call it
                const auto at = [&](int i) OPD_INLINE_LAMBDA {
                    if constexpr (Plain) {
                        const F z = F::load(zl + i), y = F::load(yl + i);
                        const F p = pin(k.anchor.student(z) * k.inv_sum_s), q = pin(k.anchor.teacher(y) * k.inv_sum_t);
                        if (!any(p > largest)) return g * (p - q);
                        const F d = k.anchor.template delta<Near>(z, y) + k.row.d_star;
                        return g * select(abs(d) < F(1), p * -expm1_near(-d), p - q);
                    } else {
                        if constexpr (Rows::parks_powers)
                            if (known) {
                                const F p = F::load(exponentials + i) * k.inv_sum_s;
                                return g * (formula.c_of_power(k.row, p, F::load(kept_power + begin + i)) - p * total);
                            }
                        const F z = F::load(zl + i), y = F::load(yl + i);
                        const F exp_z = Rows::parks_students && known ? F::load(exponentials + i) : k.anchor.student(z);
                        const dense_entry<F> e = k.template entry<Near>(z, y, exp_z, k.anchor.teacher(y));
                        return g * (formula.c(k.row, e) - e.p * total);
                    }
                };
                const bool whole = count == leaf_size, in_place = whole && beta == 0;
                if constexpr (loads_directly<F, G> && !std::is_same_v<G, Value>)
                    if (in_place) {
                        G* out = t.dz + begin;
                        if (stream)
                            for (int i = 0; i < full; i += F::width) {
                                prefetch<F>(zl + i - cpu_tuning::prefetch_back);
                                prefetch<F>(yl + i - cpu_tuning::prefetch_back);
                                if constexpr (streams<F, G>) at(i).stream(out + i);
                            }
                        else
                            for (int i = 0; i < full; i += F::width) at(i).store(out + i);
                        return;
                    }
                Value* out = buffer;
                if constexpr (std::is_same_v<G, Value>)
                    if (in_place) out = t.dz + begin;
                for (int i = 0; i < full; i += F::width) // what is streamed is a whole row, but for its last leaf
                    if (stream && out != buffer) {
                        prefetch<F>(zl + i - cpu_tuning::prefetch_back);
                        prefetch<F>(yl + i - cpu_tuning::prefetch_back);
                        if constexpr (streams<F, G>) at(i).stream(out + i);
                    } else {
                        at(i).store(out + i);
                    }
                if (out != buffer) return;
                if constexpr (loads_directly<F, G>)
                    if (whole) return add_to(buffer, t.dz + begin, b);
                store_converted(buffer, t.dz + begin, count, beta);
            });
    }

    // With differences in double; -inf comes as it is.

    template <class F, class T>
    static OPD_INLINE F within(const T* p) {
        const F most(1e30);
        return min(max(F::load(p), -most), most);
    }
    template <class Rows, class Sums>
    static void entrywise_terms(const Rows& rows, const typename Rows::state_type& st, Sums& out,
                                const typename Rows::tile_type& t, alone) {
        using F = typename Rows::F;
        const auto k = rows.entrywise(st);
        const auto formula = rows.program_of(st); // a copy that no store can alias
        typename F::mask wide{};
        leaves_backwards<F, true>(t, false, [&](auto* zl, auto* yl, index_t, int, int full) {
            F loss(0.), c(0.);
            for (int block = 0; block < full; block += sum_chain<F>) {
                F block_loss(0.), block_c(0.);
                for (int i = block, end = std::min(full, block + sum_chain<F>); i < end; i += F::width) {
                    const dense_entry<F> e = k.entry(within<F>(zl + i), within<F>(yl + i));
                    block_loss += formula.term(k.row, k.for_value(e));
                    block_c += formula.c(k.row, e);
                    if constexpr (Rows::need.student_power && !Rows::need.k_is_one) wide = wide | k.wide(e);
                }
                loss += block_loss, c += block_c;
            }
            out.loss += double(sum(loss));
            out.c += double(sum(c));
        });
        out.wide |= any(wide);
    }
    template <class Rows>
    static void entrywise_gradient(const Rows& rows, const typename Rows::state_type& st,
                                   const typename Rows::tile_type& t, alone) {
        using F = typename Rows::F;
        const auto k = rows.entrywise(st);
        const auto formula = rows.program_of(st); // a copy that no store can alias
        const F total(st.sum_c), g(st.factor * rows.inv_s);
        const float beta = rows.frame.env.beta;
        alignas(64) typename F::value_type buffer[leaf_size];
        leaves_backwards<F, true>(t, false, [&](auto* zl, auto* yl, index_t begin, int count, int full) {
            for (int i = 0; i < full; i += F::width) {
                const dense_entry<F> e = k.entry(within<F>(zl + i), within<F>(yl + i));
                (g * (formula.c(k.row, e) - e.p * total)).store(buffer + i);
            }
            store_converted(buffer, t.dz + begin, count, beta);
        });
    }
    template <class Rows>
    static void refine(const Rows& rows, const typename Rows::state_type& st, double& total,
                       const typename Rows::tile_type& t, alone) {
        using F = typename Rows::F;
        const raw_sums& s = st.swept.sums;
        const typename Rows::numbers k(s, rows.program_of(st));
        const auto formula = rows.program_of(st); // a copy that no store can alias
        const double shift = s.shift() + s.d_star();
        leaves_backwards<F, true>(t, false, [&](auto* zl, auto* yl, index_t, int, int full) {
            F loss(0.);
            for (int i = 0; i < full; i += F::width)
                loss += formula.nonnegative_term(entry_in_double<F>(k, within<F>(zl + i), within<F>(yl + i), s, shift));
            total += double(sum(loss));
        });
    }

    // --- rows of entries ---------------------------------------------------------------------------------------------

    /// Ascending ids.
    struct id_set {
        id_range used = {};
        static index_t bytes(index_t k) { return static_cast<index_t>(sizeof(index_t)) * k; }
        /// Takes the used ids of k slots; whether one of them repeats.
        int take(const entry_c* c, index_t k, std::byte* memory, alone) {
            auto *sorted = reinterpret_cast<index_t*>(memory), *end = sorted;
            for (index_t j = 0; j < k; ++j)
                if (c[j].id != -1) *end++ = c[j].id;
            std::sort(sorted, end);
            used = {sorted, end};
            return std::adjacent_find(sorted, end) != end;
        }
    };
    template <class F, bool Teacher, raw_sums_needed Need, class Tile>
    static void sweep(row_sweep& p, const Tile& t, alone, const id_set& excluded) {
        const auto [begin, end] = excluded.used;
        sweep_tile<F, Teacher, Need>(
            p, t.z, t.y, t.begin, t.count,
            {std::lower_bound(begin, end, t.begin), std::lower_bound(begin, end, t.begin + t.count)});
    }

    /// Sorts entries by id and adds up repeated ids in their order.
    static void merge_repeats(entry_c* e, index_t& n, alone) {
        std::sort(e, e + n,
                  [](const entry_c& a, const entry_c& b) { return a.id != b.id ? a.id < b.id : a.slot < b.slot; });
        index_t k = 0;
        for (index_t j = 0; j < n; ++j)
            if (k > 0 && e[k - 1].id == e[j].id)
                e[k - 1].c += e[j].c;
            else
                e[k++] = e[j];
        n = k;
    }

    /// Asks for a value's cache line.
    template <class T>
    OPD_INLINE static void fetch(const T* p) {
        __builtin_prefetch(p);
    }

    /// Whether some id lies neither in [0, n) nor is -1, an unused slot, or repeats. An exact search only on a
    /// collision. 128 bits an id up to 8 kB: cleared for each row, so small where a row is.
    static index_t repeats_bytes(index_t k) {
        return static_cast<index_t>(std::bit_ceil(static_cast<std::uint64_t>(std::clamp<index_t>(16 * k, 64, 8192))));
    }
    template <class Id>
    static int repeats(const Id* ids, index_t k, index_t n, std::byte* memory, alone) {
        auto* seen = reinterpret_cast<std::uint64_t*>(memory);
        bool good = true;
        for (index_t j = 0; j < k; ++j)
            good &= static_cast<std::uint64_t>(static_cast<index_t>(ids[j])) + 1 < static_cast<std::uint64_t>(n) + 1;
        if (!good) return true;
        const auto bits = static_cast<std::uint64_t>(8 * repeats_bytes(k));
        std::fill_n(seen, bits / 64, std::uint64_t{0});
        for (index_t j = 0; j < k; ++j) {
            if (static_cast<index_t>(ids[j]) == -1) continue;
            const auto h = static_cast<std::uint64_t>(ids[j]) & (bits - 1);
            std::uint64_t& word = seen[h >> 6];
            const std::uint64_t bit = std::uint64_t{1} << (h & 63);
            if (word & bit)
                for (index_t i = 0; i < j; ++i)
                    if (ids[i] == ids[j]) return true;
            word |= bit;
        }
        return false;
    }

    /// dz = beta dz + share·e^((z - z*)/T) over a tile, z* the anchor of `s`. dz may be z.
    static void pull_back(const auto& t, const raw_sums& s, double share, float beta, alone) {
        using Z = std::remove_cvref_t<decltype(*t.z)>;
        using G = std::remove_cvref_t<decltype(*t.dz)>;
        using F = pack_for<Z, G>;
        using value = typename F::value_type;
        const anchor_lanes<F> a(s);
        const F factor(share), b{double(beta)};
        const bool stream = written_past_caches<F>(t.dz, t.count, beta);
        staged_leaf<F> stage;
        alignas(64) value buffer[leaf_size];
        for (index_t begin = (t.count - 1) / leaf_size * leaf_size; begin >= 0; begin -= leaf_size) {
            const int count = static_cast<int>(std::min<index_t>(leaf_size, t.count - begin));
            if constexpr (loads_directly<F, Z> && loads_directly<F, G>)
                if (count == leaf_size) { // -inf needs no staging: e^-inf is the one thing formed
                    const Z* in = t.z + begin;
                    G* out = t.dz + begin;
                    if (stream)
                        for (int i = 0; i < count; i += F::width) {
                            prefetch<F>(in + i - cpu_tuning::prefetch_back);
                            if constexpr (streams<F, G>) (factor * a.student(F::load(in + i))).stream(out + i);
                        }
                    else if (beta == 0)
                        for (int i = 0; i < count; i += F::width) (factor * a.student(F::load(in + i))).store(out + i);
                    else
                        for (int i = 0; i < count; i += F::width)
                            fma(b, F::load(out + i), factor * a.student(F::load(in + i))).store(out + i);
                    continue;
                }
            const int full = staged_leaf<F>::load(stage.z, t.z + begin, count);
            for (int i = 0; i < full; i += F::width) (factor * a.student(F::load(stage.z + i))).store(buffer + i);
            for (int i = 0; i < count; ++i) {
                G& to = t.dz[begin + i];
                const value old = beta == 0 ? value(0) : value(beta) * static_cast<value>(element<G>::load(to));
                to = element<G>::store(static_cast<arithmetic_t<G>>(old + buffer[i]));
            }
        }
#if defined(OPD_AVX512)
        if (stream) _mm_sfence(); // entries will be stored on streamed lines
#endif
    }
};

} // namespace OPD_ISA
} // namespace opd::detail
