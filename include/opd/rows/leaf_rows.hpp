// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Rows that are searched and drawn from: what drawing (draw_rows.hpp), scoring (score_rows.hpp) and kept sets
// (kept_rows.hpp) have in common. All of it works on leaves of 1,024 ids whose masses are known:
//
//   sweep · masses of leaves (lanes: from the sweep itself) · only the leaves that matter, once more
//
// `Leaves` are the engine's: `reader` gives one leaf's weights e^((z - z*)/T), z* the row's largest logit, and the
// V-sized searches (best score, filter cut, best ids) are its own. A team's threads take every at.count-th leaf.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

#include "opd/config.hpp"
#include "opd/element.hpp"
#include "opd/filter.hpp"
#include "opd/row_program.hpp"
#include "opd/rows/entry_rows.hpp"
#include "opd/rows/row_sweep.hpp"
#include "opd/rows/rows.hpp"
#include "opd/rows/tiles.hpp"

namespace opd::detail {

inline constexpr index_t ids_of_leaf = 1024;
OPD_HD constexpr index_t leaves_of(index_t n) { return (n + ids_of_leaf - 1) / ids_of_leaf; }

inline namespace OPD_ISA {

/// Which of a leaf's ids count.
struct leaf_limits {
    filter_cut cut = {};
    double below = 2;              ///< only weights below this; none is above 1
    const index_t* from = nullptr; ///< ascending: ids that do not count
    const index_t* to = nullptr;
};

/// Weights on two sides of an edge: how many lie at or above it, and the mass below, summed by itself: beside a
/// certain token it may be less than that one's rounding.
struct edge_split {
    index_t above = 0;
    double below = 0;
    OPD_HD static edge_split sum(edge_split a, edge_split b) { return {a.above + b.above, a.below + b.below}; }
};

/// A token and what it scored.
struct scored {
    double score = 0;
    index_t id = -1;
    OPD_HD static scored better(scored a, scored b) {
        if (a.id < 0 || b.id < 0) return a.id < 0 ? b : a;
        return b.score > a.score || (b.score == a.score && b.id < a.id) ? b : a;
    }
};

/// A search for the last id that a filter keeps, by halving; of engines that search in a team.
struct cut_search {
    enum class step { none, values, ties, ids } now = step::none;
    bool by_mass = false;
    double target = 0;               ///< ids, or mass, to keep
    std::uint64_t low = 0, high = 0; ///< of the logit, as ordered bits; then of the id
    double above = 0;                ///< ids, or mass, above the logit at `high`
    double z = 0;                    ///< the logit found
    double needed = 0;               ///< ids to keep of those that tie
};

struct leaf_state : entry_state {
    filter_cut cut = {};
    double total = 0;    ///< mass kept, in units of e^(z*/T)
    double lse_kept = 0; ///< log-sum-exp over what is kept
    cut_search search = {};
    double edge = 2; ///< threshold: weights from here on are certain
    bool settles = false;
    filter_cut head = {}; ///< head_tail: the last id of the head
    index_t certain = 0;  ///< ids taken for certain
    double tail = 0;      ///< mass that is not certain
    index_t taken = 0;    ///< gumbel_top: ids drawn so far
    index_t touched = -1; ///< gumbel_top: the leaf of the last one
    double waited = 0;    ///< gumbel_top: Σ of waiting times, in units of 1/e^(z*/T)
    index_t found = 0;    ///< best ids that the engine has listed, best first; of a draw: all that is kept
    index_t listed = 0;   ///< score: ids left out of a tail
    bool bad_ids = false;
};

/// The least number of this type that is at least x: then "at least x" is what a comparison in the type says.
template <class T>
OPD_HD T at_least(double x) {
    const T t = static_cast<T>(x);
    if (double(t) >= x) return t;
    auto word = bit_cast<typename float_bits<T>::word>(t); // the next number above
    if (t == 0)
        word = 1;
    else
        t > 0 ? ++word : --word;
    return bit_cast<T>(word);
}

/// A logit as rows see it: a mask is -1e30, what is above 1e30 that.
OPD_HD OPD_INLINE double logit_within(const auto& z) {
    const double x = load_log(z);
    return is_neg_inf(x) ? -1e30 : (x > 1e30 ? 1e30 : x);
}

/// Per leaf: its mass, and up to it.
struct leaf_arrays {
    index_t leaves;
    double* mass;
    double* upto;
    index_t* count;
    OPD_HD leaf_arrays(carver& c, index_t leaves_)
        : leaves(leaves_), mass(c.take<double>(leaves)), upto(c.take<double>(leaves)),
          count(c.take<index_t>(leaves + 1)) {}

    /// Masses up to each leaf, from its mass; returns all.
    OPD_HD double add_up() const {
        double all = 0;
        for (index_t l = 0; l < leaves; ++l) upto[l] = all += mass[l];
        return all;
    }
    OPD_HD double before(index_t l) const { return l > 0 ? upto[l - 1] : 0; }
    /// The leaf that the mass `at` falls into: the first one whose upto exceeds it, or the last one that has mass.
    OPD_HD index_t leaf_at(double at) const {
        index_t low = 0, high = leaves;
        while (low < high) {
            const index_t mid = low + (high - low) / 2;
            if (upto[mid] > at)
                high = mid;
            else
                low = mid + 1;
        }
        if (low == leaves)
            for (--low; low > 0 && !(upto[low] > upto[low - 1]);) --low;
        return low;
    }
};

template <class Leaves, class Rows>
struct leaf_sweep : if_kept, over_tiles<leaf_sweep<Leaves, Rows>, false> {
    using state_type = leaf_state;
    OPD_HD static row_sweep start(const Rows& k, const state_type& st) {
        return begun_sweep<Leaves>(row_sweep::begin(k.inv_s, 1, 1, false), st);
    }
    OPD_HD OPD_INLINE static void tile(const Rows& k, const state_type& st, row_sweep& p, const auto& t, auto at) {
        Leaves::sweep(k, st, p, t, at);
    }
    OPD_HD static row_sweep merge(const row_sweep& a, const row_sweep& b) { return row_sweep::merge(a, b); }
    OPD_HD static void finish(const Rows&, state_type& st, const row_sweep& all) {
        st.swept = all;
        st.swept.template close<false, raw_sums_needed{}>();
        st.report.bad |= st.swept.contents.bad;
        if (!st.report.bad) st.report.lse = st.lse_kept = st.swept.sums.lse();
        st.cut = {};
        st.found = 0;
    }
};

/// Every leaf's mass.
template <class Leaves, class Rows>
struct leaf_masses {
    OPD_HD static bool due(const Rows& k, const leaf_state& st) { return st.good() && k.wants_masses(); }
    OPD_HD static void run(const Rows& k, const leaf_state& st, auto at) { Leaves::masses(k, st, at); }
};

/// Of what the cut keeps alone, unless the engine has listed it and knows. A leaf whose mass is below the last kept
/// id's weight holds nothing that is kept.
template <class Leaves, class Rows>
struct kept_masses {
    OPD_HD static bool due(const Rows& k, const leaf_state& st) {
        return st.good() && k.wants_masses() && st.cut.z > -1e30 && st.found == 0;
    }
    OPD_HD static void run(const Rows& k, const leaf_state& st, auto at) {
        typename Leaves::template reader<typename Rows::Z> leaf(k.z_row(st), k.vocab, st.swept);
        leaf_arrays a = k.at(st);
        const double least = 0.999 * ::exp((st.cut.z - st.swept.sums.z_s) * k.inv_s);
        for (index_t l = at.id; l < leaves_of(k.vocab); l += at.count) {
            if (!(a.mass[l] >= least)) {
                a.mass[l] = 0;
                continue;
            }
            leaf.load(l, {st.cut});
            a.mass[l] = leaf.mass();
        }
    }
};

/// Masses up to each leaf, and the row's.
template <class Rows>
struct add_up : by_one<add_up<Rows>> {
    OPD_HD static bool due(const Rows& k, const leaf_state& st) { return st.good() && k.wants_masses(); }
    OPD_HD static void once(const Rows& k, leaf_state& st) {
        const leaf_arrays a = k.at(st);
        st.total = a.add_up();
        if (k.cuts())
            st.lse_kept = st.cut.z <= -1e30 ? st.report.lse : pin(st.swept.sums.z_s * k.inv_s) + ::log(st.total);
    }
};

/// Counts of leaves into places, how many lie before each; returns all.
OPD_HD inline index_t counts_to_places(index_t* count, index_t leaves) {
    index_t all = 0;
    for (index_t l = 0; l < leaves; ++l) {
        const index_t here = count[l];
        count[l] = all;
        all += here;
    }
    return all;
}

/// What drawing, scoring and kept sets share of a row.
template <class Frame, class Job>
struct leaf_rows_base {
    using Z = typename Job::logit_type;
    using G = Z;
    using state_type = leaf_state;
    static constexpr bool one_tile = true, may_want_entropy = false;

    Frame frame;
    Job job;
    index_t vocab;
    double inv_s;

    leaf_rows_base(const Frame& frame_, const Job& job_, float temperature)
        : frame(frame_), job(job_), vocab(job_.z.cols), inv_s(1 / double(temperature)) {}
    OPD_HD const Z* z_row(const leaf_state& st) const { return job.z.row(st.row); }
    OPD_HD row_tile<Z, Z, G> tile(const leaf_state& st, index_t begin, index_t count) const {
        return {job.z.row(st.row) + begin, nullptr, nullptr, begin, count};
    }
};

} // namespace OPD_ISA
} // namespace opd::detail
