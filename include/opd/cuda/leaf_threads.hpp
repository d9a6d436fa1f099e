// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// What rows that are drawn from (leaf_rows.hpp) ask of a GPU's block: a thread reads a leaf's weights one by one;
// searches halve the ordered bits of a logit, each step one pass of the team. No CUDA header: a host loop over thread
// indices runs it in tests.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "opd/config.hpp"
#include "opd/cuda/thread_sweep.hpp"
#include "opd/element.hpp"
#include "opd/filter.hpp"
#include "opd/rng.hpp"
#include "opd/rows/leaf_rows.hpp"
#include "opd/rows/sparse_math.hpp"

namespace opd::detail {
inline namespace OPD_ISA {

/// Bits of a number, in its order.
template <class T>
OPD_HD OPD_INLINE std::uint64_t ordered(T x) {
    using word = typename float_bits<T>::word;
    constexpr word sign = static_cast<word>(~float_bits<T>::magnitude);
    const word w = bit_cast<word>(x);
    return (w & sign) ? static_cast<word>(~w) : static_cast<word>(w | sign);
}
template <class T>
OPD_HD OPD_INLINE T of_ordered(std::uint64_t k) {
    using word = typename float_bits<T>::word;
    constexpr word sign = static_cast<word>(~float_bits<T>::magnitude);
    const auto w = static_cast<word>(k);
    return bit_cast<T>((w & sign) ? static_cast<word>(w & float_bits<T>::magnitude) : static_cast<word>(~w));
}

/// One step of a search for the last of the best entries that hold `target` ids, or that much mass.
template <class Rows>
struct search_step {
    using F = thread_number<typename Rows::Z>;
    using value = typename F::value_type;

    OPD_HD static bool due(const Rows&, const leaf_state& st) { return st.search.now != cut_search::step::none; }
    OPD_HD static double part(const Rows& k, const leaf_state& st, auto at) {
        const cut_search& s = st.search;
        const thread_anchors<F> a(st.swept.sums);
        const std::uint64_t middle = s.low + (s.high - s.low) / 2;
        const double level = s.now == cut_search::step::values ? double(of_ordered<value>(middle)) : s.z;
        const typename Rows::Z* z = k.z_row(st);
        double sum = 0;
        for (index_t i = at.id; i < k.vocab; i += at.count) {
            const F x = load_number<F>(z + i);
            const double xi = double(x.v);
            if (!st.cut.keeps(xi, i)) continue;
            if (s.now == cut_search::step::values) {
                if (xi > level) sum += s.by_mass ? double(a.student(x).v) : 1;
            } else if (xi == level && (s.now == cut_search::step::ties || static_cast<std::uint64_t>(i) <= middle)) {
                sum += 1;
            }
        }
        return sum;
    }
    OPD_HD static double merge(double a, double b) { return a + b; }
    OPD_HD static void finish(const Rows& k, leaf_state& st, double sum) {
        cut_search& s = st.search;
        const std::uint64_t middle = s.low + (s.high - s.low) / 2;
        if (s.now == cut_search::step::values) { // the least logit above which lies less than the target
            if (sum < s.target)
                s.high = middle, s.above = sum;
            else
                s.low = middle + 1;
            if (s.low < s.high) return;
            s.z = double(of_ordered<value>(s.high));
            if (s.z <= -1e30) { // all there is does not reach it
                s.now = cut_search::step::none;
                return;
            }
            const thread_anchors<F> a(st.swept.sums);
            const double each = s.by_mass ? double(a.student(F(s.z)).v) : 1;
            s.needed = each > 0 ? ::ceil((s.target - s.above) / each) : 1e300;
            s.now = cut_search::step::ties;
        } else if (s.now == cut_search::step::ties) {
            if (s.needed >= sum) return found(st, k.vocab - 1);
            s.low = 0, s.high = static_cast<std::uint64_t>(k.vocab - 1);
            s.now = cut_search::step::ids;
        } else { // the least id up to which enough of them lie
            if (sum >= s.needed)
                s.high = middle;
            else
                s.low = middle + 1;
            if (s.low >= s.high) found(st, static_cast<index_t>(s.high));
        }
    }
    OPD_HD static void found(leaf_state& st, index_t id) {
        st.cut = filter_cut::tighter(st.cut, {st.search.z, id});
        st.search.now = cut_search::step::none;
    }
    /// Begins one: from the row's largest logit down to what is kept so far.
    OPD_HD static void begin(leaf_state& st, bool by_mass, double target) {
        cut_search& s = st.search;
        s = {};
        s.now = cut_search::step::values;
        s.by_mass = by_mass, s.target = target;
        s.low = ordered(static_cast<value>(st.cut.z)), s.high = ordered(static_cast<value>(st.swept.sums.z_s));
    }
};

struct thread_leaves : scouts_first {
    static constexpr bool lists_best = false; ///< a team finds where they end, and then collects them
    template <class Z>
    using number = thread_number<Z>;

    template <class Z>
    class reader {
        using F = number<Z>;

    public:
        OPD_HD reader(const Z* z, index_t n, const row_sweep& s) : z_(z), n_(n), anchor_(s.sums) {}
        OPD_HD void load(index_t leaf, const leaf_limits& limits) {
            limits_ = limits;
            begin_ = leaf * ids_of_leaf;
            count_ = static_cast<int>(n_ - begin_ < ids_of_leaf ? n_ - begin_ : ids_of_leaf);
        }
        OPD_HD index_t begin() const { return begin_; }
        OPD_HD int count() const { return count_; }
        OPD_HD double weight(int i) const {
            const F x = load_number<F>(z_ + begin_ + i);
            if (!limits_.cut.keeps(double(x.v), begin_ + i)) return 0;
            if (is_left_out(begin_ + i)) return 0;
            const double e = double(anchor_.student(x).v);
            return e < limits_.below ? e : 0;
        }
        /// A thread's share of the leaf's mass.
        OPD_HD double mass(one_of at = {0, 1}) const {
            double all = 0;
            for (int i = at.id; i < count_; i += at.count) all += weight(i);
            return all;
        }
        OPD_HD edge_split split(double edge) const {
            edge_split s;
            for (int i = 0; i < count_; ++i) {
                const double e = weight(i);
                if (e >= edge)
                    ++s.above;
                else
                    s.below += e;
            }
            return s;
        }
        OPD_HD index_t find(double at) const {
            double c = 0;
            index_t last = -1;
            for (int i = 0; i < count_; ++i) {
                const double e = weight(i);
                if (!(e > 0)) continue;
                c += e;
                last = begin_ + i;
                if (c > at) break;
            }
            return last;
        }

    private:
        const Z* z_;
        index_t n_, begin_ = 0;
        int count_ = 0;
        leaf_limits limits_ = {};
        thread_anchors<F> anchor_;

        OPD_HD bool is_left_out(index_t id) const {
            const index_t* const at = first_from(limits_.from, limits_.to, id);
            return at < limits_.to && *at == id;
        }
    };

    static void scratch(carver&, index_t, index_t, bool) {}

    // --- the last id that a filter keeps, the best ids ---------------------------------------------------------------

    template <class Rows>
    OPD_HD static void top_cut(const Rows&, leaf_state& st, index_t count, one_of at) {
        if (at.id == 0) search_step<Rows>::begin(st, false, double(count));
    }
    template <class Rows>
    OPD_HD static void share_cut(const Rows&, leaf_state& st, double target, one_of at) {
        if (at.id == 0) search_step<Rows>::begin(st, true, target);
    }
    template <class Rows, class Team>
    OPD_HD static void search(const Rows& k, Team& team) {
        team.template repeat<search_step<Rows>>(k);
    }
    OPD_HD static index_t count_kept(const auto& k, const leaf_state& st, one_of at) {
        index_t n = 0;
        for (index_t i = at.id; i < k.vocab; i += at.count) n += st.cut.keeps(logit_within(k.z_row(st)[i]), i);
        return n;
    }

    template <class Rows>
    struct begin_best {
        OPD_HD static bool due(const Rows&, const leaf_state& st) { return st.good(); }
        OPD_HD static void run(const Rows& k, leaf_state& st, one_of at) { top_cut(k, st, k.tops(), at); }
    };
    template <class Rows>
    struct count_best {
        OPD_HD static bool due(const Rows&, const leaf_state& st) { return st.good(); }
        OPD_HD static void run(const Rows& k, const leaf_state& st, one_of at) {
            auto a = k.at(st);
            for (index_t l = at.id; l < leaves_of(k.vocab); l += at.count) {
                index_t n = 0;
                for (index_t i = l * ids_of_leaf; i < k.vocab && i < (l + 1) * ids_of_leaf; ++i)
                    n += st.cut.keeps(logit_within(k.z_row(st)[i]), i);
                a.count[l] = n;
            }
        }
    };
    template <class Rows>
    struct place_best {
        OPD_HD static bool due(const Rows&, const leaf_state& st) { return st.good(); }
        OPD_HD static void run(const Rows& k, leaf_state& st, one_of at) {
            if (at.id != 0) return;
            const index_t all = counts_to_places(k.at(st).count, leaves_of(k.vocab));
            st.found = all < k.tops() ? all : k.tops();
        }
    };
    template <class Rows>
    struct collect_best {
        OPD_HD static bool due(const Rows&, const leaf_state& st) { return st.good(); }
        OPD_HD static void run(const Rows& k, const leaf_state& st, one_of at) {
            auto a = k.at(st);
            for (index_t l = at.id; l < leaves_of(k.vocab); l += at.count) {
                index_t to = a.count[l];
                for (index_t i = l * ids_of_leaf; i < k.vocab && i < (l + 1) * ids_of_leaf && to < st.found; ++i)
                    if (st.cut.keeps(logit_within(k.z_row(st)[i]), i)) a.raw[to++] = i;
            }
        }
    };
    template <class Rows>
    struct rank_best {
        OPD_HD static bool due(const Rows&, const leaf_state& st) { return st.good(); }
        OPD_HD static void run(const Rows& k, leaf_state& st, one_of at) {
            auto a = k.at(st);
            const auto* z = k.z_row(st);
            for (index_t j = at.id; j < st.found; j += at.count) {
                const double zj = logit_within(z[a.raw[j]]);
                index_t better = 0;
                for (index_t i = 0; i < st.found; ++i) {
                    const double zi = logit_within(z[a.raw[i]]);
                    better += zi > zj || (zi == zj && i < j); // ids ascend
                }
                a.best[better] = a.raw[j];
            }
        }
    };
    template <class Rows, class Team>
    OPD_HD static void best(const Rows& k, Team& team) {
        team.template each<begin_best<Rows>>(k);
        search(k, team);
        team.template each<count_best<Rows>>(k);
        team.template each<place_best<Rows>>(k);
        team.template each<collect_best<Rows>>(k);
        team.template each<rank_best<Rows>>(k);
    }
    OPD_HD static void ascending(const index_t* from, index_t* to, index_t n, one_of at) {
        for (index_t j = at.id; j < n; j += at.count) {
            index_t before = 0;
            for (index_t i = 0; i < n; ++i) before += from[i] < from[j] || (from[i] == from[j] && i < j);
            to[before] = from[j];
        }
    }

    template <class Rows, class Tile>
    OPD_HD static void sweep(const Rows&, const leaf_state&, row_sweep& p, const Tile& t, scout at) {
        scout_thread<number<typename Rows::Z>, false>(p, t, at);
    }
    template <class Rows, class Tile>
    OPD_HD static void sweep(const Rows& k, const leaf_state&, row_sweep& p, const Tile& t, one_of at) {
        if constexpr (Rows::may_want_entropy)
            if (k.wants_entropy())
                return sweep_thread<number<typename Rows::Z>, false, raw_sums_needed{.entropy = true}>(p, t, at);
        sweep_thread<number<typename Rows::Z>, false, raw_sums_needed{}>(p, t, at);
    }
    template <class Rows>
    OPD_HD static void masses(const Rows& k, const leaf_state& st, one_of at) {
        reader<typename Rows::Z> leaf(k.z_row(st), k.vocab, st.swept);
        const leaf_arrays a = k.at(st);
        for (index_t l = at.id; l < leaves_of(k.vocab); l += at.count) {
            leaf.load(l, {});
            a.mass[l] = leaf.mass();
        }
    }

    /// A thread's best of the tokens in its groups of four.
    template <class Rows>
    OPD_HD static scored gumbel(const Rows& k, const leaf_state& st, one_of at) {
        using F = number<typename Rows::Z>;
        const noise_row noise = k.noise(st.row);
        const typename Rows::Z* z = k.z_row(st);
        scored best;
        for (index_t first = index_t{4} * at.id; first < k.vocab; first += index_t{4} * at.count) {
            philox_block four{};
            bool drawn = false;
            for (index_t i = first; i < first + 4 && i < k.vocab; ++i) {
                const double x = double(load_number<F>(z + i).v);
                if (!st.cut.keeps(x, i)) continue;
                const double log_p = times(x, k.inv_s);
                if (best.id >= 0 && log_p + gumbel_maximum < best.score) continue;
                if (!drawn) four = noise.block(0, static_cast<std::uint32_t>(first / 4)), drawn = true;
                best = scored::better(best, {gumbel_score(log_p, four.word[i - first]), i});
            }
        }
        return best;
    }
};

} // namespace OPD_ISA
} // namespace opd::detail
