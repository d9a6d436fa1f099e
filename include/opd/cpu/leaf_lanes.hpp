// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What rows that are drawn from (leaf_rows.hpp) ask of the CPU: a leaf's weights in lanes, Gumbel-max over a row, its
// best ids and the last id that a filter keeps.
//
// The k best ids come from blocks of 64: of the k blocks whose largest entries are largest, each holds an entry at
// least as large as the least of these maxima, so the k best lie at or above it, most often in few blocks. A filter's
// share of mass is found between two of eight levels whose masses one pass tells; between them the entries are halved
// by `nth_element`.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "opd/config.hpp"
#include "opd/cpu/leaf.hpp"
#include "opd/cpu/noise_lanes.hpp"
#include "opd/cpu/sweep.hpp"
#include "opd/element.hpp"
#include "opd/filter.hpp"
#include "opd/lanes.hpp"
#include "opd/rng.hpp"
#include "opd/rows/leaf_rows.hpp"

namespace opd::detail {
inline namespace OPD_ISA {

/// An id and its logit; `<` is better: larger, of equals the lower id.
struct ranked {
    double z;
    index_t id;
    friend bool operator<(const ranked& a, const ranked& b) { return a.z > b.z || (a.z == b.z && a.id < b.id); }
};

/// A leaf's logits, cut to ±1e30 where the row holds something beyond.
template <class F, class Z>
struct staged_row {
    using value = typename F::value_type;
    const Z* z;
    index_t n;
    bool out_of_range;
    staged_leaf<F> stage;
    index_t begin = 0;
    int count = 0, full = 0;

    staged_row(const Z* z_, index_t n_, bool out_of_range_) : z(z_), n(n_), out_of_range(out_of_range_) {}
    /// Leaf l's logits, padded with lowest to whole registers.
    const value* read(index_t l) {
        begin = l * leaf_size;
        count = static_cast<int>(std::min<index_t>(leaf_size, n - begin));
        if constexpr (std::is_same_v<Z, value>)
            if (!out_of_range && count == leaf_size) {
                full = count;
                return z + begin;
            }
        full = staged_leaf<F>::load(stage.z, z + begin, count);
        if (out_of_range) stage.template cut<false>(count);
        return stage.z;
    }
};

struct lane_leaves {
    template <class Z>
    using number = pack_for<Z>;
    static constexpr index_t block = 64; ///< of ids, whose largest entry tells whether they are looked at
    static constexpr bool lists_best = true;

    /// One leaf's weights.
    template <class Z>
    class reader {
        using F = number<Z>;
        using value = typename F::value_type;

    public:
        reader(const Z* z, index_t n, const row_sweep& s) : row_(z, n, s.out_of_range), anchor_(s.sums) {}
        void load(index_t leaf, const leaf_limits& limits) {
            const value* const z = row_.read(leaf);
            const value least = static_cast<value>(limits.cut.z), edge = at_least<value>(limits.below);
            if (limits.cut.z <= -1e30 && limits.below > 1) {
                for (int i = 0; i < row_.full; i += F::width) anchor_.student(F::load(z + i)).store(e() + i);
            } else {
                const F z_least{double(least)}, e_edge{double(edge)};
                for (int i = 0; i < row_.full; i += F::width) {
                    const F zi = F::load(z + i), ei = anchor_.student(zi);
                    const typename F::mask kept = zi >= z_least, below = ei < e_edge, in = kept & below;
                    select(in, ei, F(0.)).store(e() + i);
                }
                if (row_.begin + row_.count - 1 > limits.cut.id)
                    for (int i = 0; i < row_.count; ++i)
                        if (z[i] == least && row_.begin + i > limits.cut.id) e()[i] = 0;
            }
            for (int i = row_.count; i < (row_.count + int(block) - 1) / int(block) * int(block); ++i) e()[i] = 0;
            for (const index_t* id = limits.from; id != limits.to; ++id) e()[*id - row_.begin] = 0;
        }
        index_t begin() const { return row_.begin; }
        int count() const { return row_.count; }
        double weight(int i) const { return double(e()[i]); }
        double mass(alone = {}) const {
            double all = 0;
            for (int i = 0; i < row_.count; i += int(block)) all += of_block(i);
            return all;
        }
        edge_split split(double edge) const {
            edge_split s;
            const F least{double(at_least<value>(edge))};
            F below(0.);
            for (int i = 0; i < row_.full; i += F::width) {
                const F ei = F::load(e() + i);
                const typename F::mask in = ei < least;
                below += select(in, ei, F(0.));
                if (any(ei >= least))
                    for (int j = i; j < i + F::width; ++j) s.above += weight(j) >= edge;
            }
            s.below = double(sum(below));
            return s;
        }
        /// The first id whose weight and those before it exceed `at`, else the last with weight; -1 if none has any.
        index_t find(double at) const {
            double before = 0;
            index_t last = -1;
            for (int b = 0; b < row_.count; b += int(block)) {
                const double in = of_block(b);
                if (!(in > 0)) continue;
                if (before + in <= at) {
                    before += in;
                    last = b;
                    continue;
                }
                double c = before;
                for (int i = b; i < b + int(block); ++i)
                    if (weight(i) > 0) {
                        c += weight(i);
                        if (c > at) return row_.begin + i;
                    }
                before += in; // rounding at the block's end
                last = b;
            }
            if (last < 0) return -1;
            int i = static_cast<int>(last) + int(block) - 1;
            while (!(weight(i) > 0)) --i;
            return row_.begin + i;
        }

    private:
        staged_row<F, Z> row_;
        anchor_lanes<F> anchor_;
        value* e() { return row_.stage.y; }
        const value* e() const { return row_.stage.y; }
        double of_block(int b) const {
            F s(0.);
            for (int i = b; i < b + int(block); i += F::width) s += F::load(e() + i);
            return double(sum(s));
        }
    };

    /// What rows of n ids need beside leaf_arrays to find the k best ids (0: none) or a share of mass.
    struct lists {
        ranked* entries = nullptr;
        double* maxima = nullptr;
        lists(carver& c, index_t n, index_t k, bool shares) {
            const index_t of_best = k > 0 ? std::min(n, block * k) + k : 0, of_shares = shares ? n : 0;
            entries = c.take<ranked>(std::max(of_best, of_shares));
            if (k > 0) maxima = c.take<double>(2 * ((n + block - 1) / block));
        }
    };
    static void scratch(carver& c, index_t n, index_t k, bool shares) { (void)lists(c, n, k, shares); }

    // --- the sweep, which tells each leaf's mass as it goes ----------------------------------------------------------

    struct note_masses : no_note {
        leaf_arrays a;
        explicit note_masses(const leaf_arrays& a_) : a(a_) {}
        OPD_INLINE void leaf(index_t begin, double mass, const raw_sums& s) const {
            a.mass[begin / leaf_size] = mass + double(s.s >= begin && s.s < begin + leaf_size);
            a.upto[begin / leaf_size] = s.z_s;
        }
    };
    template <class Rows, class Tile>
    static void sweep(const Rows& k, const leaf_state& st, row_sweep& p, const Tile& t, alone) {
        if constexpr (Rows::may_want_entropy)
            if (k.wants_entropy()) return sweep_for<raw_sums_needed{.entropy = true}>(k, st, p, t);
        sweep_for<raw_sums_needed{}>(k, st, p, t);
    }
    template <raw_sums_needed Need, class Rows, class Tile>
    static void sweep_for(const Rows& k, const leaf_state& st, row_sweep& p, const Tile& t) {
        using F = number<typename Rows::Z>;
        if (k.wants_masses())
            sweep_tile<F, false, Need>(p, t.z, t.y, t.begin, t.count, {}, note_masses{k.at(st)});
        else
            sweep_tile<F, false, Need>(p, t.z, t.y, t.begin, t.count);
    }
    /// From the anchor of their time to the last one.
    static void masses(const auto& k, const leaf_state& st, alone) {
        const leaf_arrays a = k.at(st);
        const raw_sums& s = st.swept.sums;
        for (index_t l = 0; l < leaves_of(k.vocab); ++l)
            if (a.upto[l] != s.z_s) a.mass[l] *= std::exp((a.upto[l] - s.z_s) * s.inv_s);
    }

    // --- Gumbel-max --------------------------------------------------------------------------------------------------

    template <class Rows>
    static scored gumbel(const Rows& k, const leaf_state& st, alone) {
        using Z = typename Rows::Z;
        const noise_row noise = k.noise(st.row);
        const raw_sums& s = st.swept.sums;
        scored best{gumbel_score(times(s.z_s, k.inv_s), noise.bits(0, static_cast<std::uint32_t>(s.s))), s.s};
        const auto look = [&](double z, index_t id, std::uint32_t bits) {
            if (st.cut.keeps(z, id)) best = scored::better(best, {gumbel_score(times(z, k.inv_s), bits), id});
        };
        if (st.found > 0) {
            carver c = k.at(st).rest;
            const ranked* const entries = lists(c, k.vocab, 0, true).entries;
            for (index_t j = 0; j < st.found; ++j)
                if (entries[j].z * k.inv_s + gumbel_maximum >= best.score)
                    look(entries[j].z, entries[j].id, noise.bits(0, static_cast<std::uint32_t>(entries[j].id)));
            return best;
        }
        const leaf_arrays a = k.at(st);
        if constexpr (std::is_same_v<number<Z>, scalar<double>>) {
            staged_row<scalar<double>, Z> row(k.z_row(st), k.vocab, st.swept.out_of_range);
            for (index_t l = 0; l < leaves_of(k.vocab); ++l) {
                if (k.cuts() && !(a.mass[l] > 0)) continue;
                const double* z = row.read(l);
                for (int i = 0; i < row.count; i += 4) {
                    const philox_block four = noise.block(0, static_cast<std::uint32_t>((row.begin + i) / 4));
                    for (int j = i; j < std::min(i + 4, row.count); ++j)
                        if (z[j] * k.inv_s + gumbel_maximum >= best.score) look(z[j], row.begin + j, four.word[j - i]);
                }
            }
        } else {
            staged_row<lanes, Z> row(k.z_row(st), k.vocab, st.swept.out_of_range);
            const noise_lanes lanes_of(noise, 0);
            const lanes top(s.z_s), inv(k.inv_s);
            // rounding of what is compared is far below 1e-3 where a token may win: within 23 nats of the top one
            const auto limit_of = [&] { return lanes(best.score - s.z_s * k.inv_s - 1e-3); };
            lanes limit = limit_of();
            for (index_t l = 0; l < leaves_of(k.vocab); ++l) {
                if (k.cuts() && !(a.mass[l] > 0)) continue;
                const float* z = row.read(l);
                if (row.count < leaf_size) // whole blocks are looked at
                    std::fill(row.stage.z + row.count, row.stage.z + leaf_size, staged_leaf<lanes>::lowest);
                for (int i = 0; i < row.count; i += noise_lanes::tokens) {
                    noise_lanes::uvec bits[4];
                    lanes_of.block(static_cast<std::uint32_t>((row.begin + i) / 4), bits);
                    typename lanes::mask hit{};
                    for (int j = 0; j < 4; ++j)
                        hit = hit | (pin(lanes::load(z + i + j * lanes::width) - top) * inv +
                                         noise_lanes::largest_gumbel(bits[j]) >
                                     limit);
                    if (!any(hit)) continue;
                    std::uint32_t one[noise_lanes::tokens];
                    std::memcpy(one, bits, sizeof one);
                    for (int j = i; j < std::min(i + noise_lanes::tokens, row.count); ++j)
                        if (double(z[j]) * k.inv_s + gumbel_maximum >= best.score)
                            look(double(z[j]), row.begin + j, one[j - i]);
                    limit = limit_of();
                }
            }
        }
        return best;
    }

    // --- the best ids ------------------------------------------------------------------------------------------------

    /// The k best ids of a row, best first, into `best`, which has room for `scratch`; returns how many have mass.
    template <class Z>
    static index_t best_ids(const Z* z, index_t n, bool out_of_range, index_t k, double* maxima, ranked* best) {
        using F = number<Z>;
        using value = typename F::value_type;
        staged_row<F, Z> row(z, n, out_of_range);
        const index_t blocks = (n + block - 1) / block;
        double* const sorted = maxima + blocks;
        value least = staged_leaf<F>::lowest;
        if (k < blocks) {
            for (index_t l = 0; l < leaves_of(n); ++l) {
                const value* x = row.read(l);
                for (int b = 0; b < row.count; b += int(block)) {
                    F m(-1e30);
                    const int end = std::min(b + int(block), row.full);
                    for (int i = b; i < end; i += F::width) m = max(m, F::load(x + i));
                    maxima[(row.begin + b) / block] = double(largest(m));
                }
            }
            std::copy_n(maxima, blocks, sorted);
            std::nth_element(sorted, sorted + (k - 1), sorted + blocks, std::greater<>{});
            least = static_cast<value>(sorted[k - 1]);
        }
        index_t found = 0, ties = 0; // ties lie at the end of their room
        ranked* const tied = best + std::min(n, block * k);
        for (index_t l = 0; l < leaves_of(n); ++l) {
            if (k < blocks) {
                const index_t first = l * (leaf_size / block), last = std::min(first + leaf_size / block, blocks);
                if (*std::max_element(maxima + first, maxima + last) < double(least)) continue;
            }
            const value* x = row.read(l);
            for (int b = 0; b < row.count; b += int(block)) {
                if (k < blocks && maxima[(row.begin + b) / block] < double(least)) continue;
                const int end = std::min(b + int(block), row.count);
                for (int i = b; i < end; ++i)
                    if (x[i] > least)
                        best[found++] = {double(x[i]), row.begin + i};
                    else if (x[i] == least && ties < k && x[i] > staged_leaf<F>::lowest)
                        tied[ties++] = {double(x[i]), row.begin + i};
            }
        }
        if (found > k) {
            std::nth_element(best, best + k, best + found);
            found = k;
        }
        for (index_t t = 0; t < ties && found < k; ++t) best[found++] = tied[t];
        std::sort(best, best + found);
        return found;
    }

    template <class Rows>
    struct take_best_ids {
        static bool due(const Rows&, const leaf_state& st) { return st.good(); }
        static void run(const Rows& k, leaf_state& st, alone) {
            carver c = k.at(st).rest;
            const lists of(c, k.vocab, k.tops(), false);
            st.found = best_ids(k.z_row(st), k.vocab, st.swept.out_of_range, k.tops(), of.maxima, of.entries);
            auto a = k.at(st);
            for (index_t j = 0; j < st.found; ++j) a.best[j] = of.entries[j].id;
        }
    };
    template <class Rows, class Team>
    static void best(const Rows& k, Team& team) {
        team.template each<take_best_ids<Rows>>(k);
    }
    static void ascending(const index_t* from, index_t* to, index_t n, alone) {
        std::copy_n(from, n, to);
        std::sort(to, to + n);
    }

    // --- the last id that a filter keeps -----------------------------------------------------------------------------

    // After top_k all that is kept stands in a list, best first (st.found ids): top_p walks down it, masses are those
    // of its ids, and a token is looked for there alone.

    static void top_cut(const auto& k, leaf_state& st, index_t count, alone) {
        carver c = k.at(st).rest;
        const lists of(c, k.vocab, count, k.filter_of().top_p < 1);
        st.found = best_ids(k.z_row(st), k.vocab, st.swept.out_of_range, count, of.maxima, of.entries);
        keep_listed(k, st, of.entries, st.found);
    }
    /// The best `count` ids of what is kept and has mass, ascending; how many they are. Masses stay as they are.
    template <class Rows>
    static index_t head_ids(const Rows& k, const leaf_state& st, index_t count, index_t* ids) {
        carver c = k.at(st).rest;
        const lists of(c, k.vocab, count, k.filter_of().top_p < 1);
        index_t n = best_ids(k.z_row(st), k.vocab, st.swept.out_of_range, count, of.maxima, of.entries);
        while (n > 0 && !(st.cut.keeps(of.entries[n - 1].z, of.entries[n - 1].id) &&
                          listed_weight<Rows>(st, of.entries[n - 1]) > 0))
            --n;
        for (index_t j = 0; j < n; ++j) ids[j] = of.entries[j].id;
        std::sort(ids, ids + n);
        return n;
    }
    template <class Rows>
    static void share_cut(const Rows& k, leaf_state& st, double target, alone) {
        carver c = k.at(st).rest;
        ranked* const entries = lists(c, k.vocab, 0, true).entries; // at the same place
        if (st.found == 0) {
            st.cut = filter_cut::tighter(st.cut, share_cut(k.z_row(st), k.vocab, st.swept, st.cut, target, entries));
            return;
        }
        double mass = 0;
        index_t n = 0;
        while (n < st.found && mass < target) mass += listed_weight<Rows>(st, entries[n++]);
        keep_listed(k, st, entries, n);
    }
    /// Of the first n listed ids those that an earlier cut keeps, and their masses.
    template <class Rows>
    static void keep_listed(const Rows& k, leaf_state& st, const ranked* entries, index_t n) {
        while (n > 1 && !st.cut.keeps(entries[n - 1].z, entries[n - 1].id)) --n;
        st.found = n;
        st.cut = filter_cut::tighter(st.cut, {entries[n - 1].z, entries[n - 1].id});
        const leaf_arrays a = k.at(st);
        std::fill_n(a.mass, leaves_of(k.vocab), 0.0);
        for (index_t j = 0; j < n; ++j) a.mass[entries[j].id / leaf_size] += listed_weight<Rows>(st, entries[j]);
    }
    /// As the lanes have it: none below the least normal number.
    template <class Rows>
    static double listed_weight(const leaf_state& st, const ranked& e) {
        using value = typename number<typename Rows::Z>::value_type;
        const double w = std::exp((e.z - st.swept.sums.z_s) * st.swept.sums.inv_s);
        return w < double(std::numeric_limits<value>::min()) ? 0 : w;
    }
    template <class Rows, class Team>
    static void search(const Rows&, Team&) {} // both have found it at once
    template <class Rows>
    static index_t count_kept(const Rows& k, const leaf_state& st, alone) {
        using Z = typename Rows::Z;
        staged_row<number<Z>, Z> row(k.z_row(st), k.vocab, st.swept.out_of_range);
        index_t n = 0;
        for (index_t l = 0; l < leaves_of(k.vocab); ++l) {
            const auto* z = row.read(l);
            int here = 0;
            for (int i = 0; i < row.count; ++i) here += st.cut.keeps(double(z[i]), row.begin + i);
            n += here;
        }
        return n;
    }

    /// Of what `so_far` keeps, the fewest best ids whose mass is at least `target`.
    template <class Z>
    static filter_cut share_cut(const Z* z, index_t n, const row_sweep& s, filter_cut so_far, double target,
                                ranked* entries) {
        using F = number<Z>;
        using value = typename F::value_type;
        constexpr int levels = 8;
        constexpr double few = 4096;
        constexpr double falls[levels] = {1, 2, 3.5, 5, 7, 9, 12, 16}; // nats below the largest
        staged_row<F, Z> row(z, n, s.out_of_range);
        const anchor_lanes<F> anchor(s.sums);
        const auto weight_of = [&](double x) { return std::exp((x - s.sums.z_s) * s.sums.inv_s); };
        // the last id lies in (bottom, top], above which there is `before`; the levels narrow it until it holds few ids
        double top = s.sums.z_s, bottom = -1e30, before = 0;
        for (int round = 0; round < 4; ++round) {
            value level[levels];
            double above[levels] = {};
            for (int i = 0; i < levels; ++i) {
                const double even = top + (bottom - top) * (i + 1) / (levels + 1);
                level[i] = static_cast<value>(
                    std::max(bottom <= -1e30 ? s.sums.z_s - falls[i] / s.sums.inv_s : even, so_far.z));
            }
            for (index_t l = 0; l < leaves_of(n); ++l) {
                const value* x = row.read(l);
                F sums[levels] = {F(0.), F(0.), F(0.), F(0.), F(0.), F(0.), F(0.), F(0.)};
                for (int i = 0; i < row.full; i += F::width) {
                    const F xi = F::load(x + i), e = anchor.student(xi);
                    for (int j = 0; j < levels; ++j) sums[j] += select(xi > F(double(level[j])), e, F(0.));
                }
                for (int j = 0; j < levels; ++j) above[j] += double(sum(sums[j]));
            }
            int at = 0;
            while (at < levels && above[at] < target) ++at;
            if (at > 0) top = double(level[at - 1]), before = above[at - 1];
            if (at == levels) break;
            bottom = double(level[at]);
            if (above[at] - before < few * weight_of(bottom)) break;
        }
        index_t count = 0;
        const F low_edge(bottom), high_edge(top); // both are numbers of this type
        for (index_t l = 0; l < leaves_of(n); ++l) {
            const value* x = row.read(l);
            for (int i = 0; i < row.full; i += F::width) {
                const F xi = F::load(x + i);
                const typename F::mask above = xi > low_edge, within = xi <= high_edge, in = above & within;
                if (!any(in)) continue;
                for (int j = i; j < std::min(i + F::width, row.count); ++j) {
                    const double xj = double(x[j]);
                    if (xj > bottom && xj <= top && so_far.keeps(xj, row.begin + j))
                        entries[count++] = {xj, row.begin + j};
                }
            }
        }
        const auto weight = [&](const ranked& e) { return weight_of(e.z); };
        index_t low = 0, high = count;
        while (high - low > 64) {
            const index_t middle = low + (high - low) / 2;
            std::nth_element(entries + low, entries + middle, entries + high);
            double mass = 0;
            for (index_t i = low; i < middle; ++i) mass += weight(entries[i]);
            if (before + mass >= target)
                high = middle;
            else
                before += mass, low = middle;
        }
        std::sort(entries + low, entries + high);
        for (index_t i = low; i < high; ++i) {
            before += weight(entries[i]);
            if (before >= target) return {entries[i].z, entries[i].id};
        }
        const index_t last = std::min(high, count - 1); // rounding: the halves were added up in another order
        return count > 0 ? filter_cut{entries[last].z, entries[last].id} : so_far;
    }
};

} // namespace OPD_ISA
} // namespace opd::detail
