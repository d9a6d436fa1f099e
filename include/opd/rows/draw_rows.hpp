// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Rows that are drawn from:
//
//   sweep · masses of leaves · [what the filter keeps · masses of that] · the design's draws · their log mu
//
// An i.i.d. draw looks for its leaf among the leaves' masses, then for its id in that leaf. Threshold looks for
// certain ids only where a leaf's mass is at least the least certain weight; head_tail draws from leaves that have
// lost theirs. gumbel_top takes an id from the leaves, weighs its leaf anew without it (a difference would lose what
// a peaked row has left) and goes on. Gumbel-max needs no masses, and greedy nothing but the sweep.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "opd/config.hpp"
#include "opd/draw.hpp"
#include "opd/element.hpp"
#include "opd/filter.hpp"
#include "opd/rng.hpp"
#include "opd/rows/leaf_rows.hpp"
#include "opd/rows/sparse_math.hpp"

namespace opd::detail {
inline namespace OPD_ISA {

/// A share of mass is reached where it is within rounding of it: ties in probability are no matter of the last bit.
template <class Z>
inline constexpr double share_slack = sizeof(arithmetic_t<Z>) == 8 ? 1e-12 : 1e-6;

/// The last id that a filter keeps: of rows with job.options.filter or the like, as `filter_of()`.
template <class Leaves, class Rows>
struct filtering {
    using Z = typename Rows::Z;

    struct cut_min_p : by_one<cut_min_p> {
        OPD_HD static bool due(const Rows& k, const leaf_state& st) { return st.good() && k.filter_of().min_p > 0; }
        OPD_HD static void once(const Rows& k, leaf_state& st) {
            using value = typename Leaves::template number<Z>::value_type;
            const double z = st.swept.sums.z_s + ::log(double(k.filter_of().min_p)) / k.inv_s;
            st.cut = filter_cut::tighter(st.cut, {double(at_least<value>(z)), k.vocab - 1});
        }
    };
    struct cut_top_k {
        OPD_HD static bool due(const Rows& k, const leaf_state& st) {
            return st.good() && k.filter_of().top_k > 0 && k.filter_of().top_k < k.vocab;
        }
        OPD_HD static void run(const Rows& k, leaf_state& st, auto at) {
            Leaves::top_cut(k, st, k.filter_of().top_k, at);
        }
    };
    struct cut_top_p {
        OPD_HD static bool due(const Rows& k, const leaf_state& st) { return st.good() && k.filter_of().top_p < 1; }
        OPD_HD static void run(const Rows& k, leaf_state& st, auto at) {
            Leaves::share_cut(k, st, st.total * double(k.filter_of().top_p) * (1 - share_slack<Z>), at);
        }
    };
    OPD_HD static void run(const Rows& k, auto& team) {
        team.template each<cut_min_p>(k);
        team.template each<cut_top_k>(k);
        Leaves::template search<Rows>(k, team);
        if (k.filter_of().top_p < 1) {
            team.template each<kept_masses<Leaves, Rows>>(k);
            team.template each<add_up<Rows>>(k);
            team.template each<cut_top_p>(k);
            Leaves::template search<Rows>(k, team);
        }
        team.template each<kept_masses<Leaves, Rows>>(k);
        team.template each<add_up<Rows>>(k);
    }
};

/// mu/incl of Gumbel top-m, incl = 1 - exp(-mu t), t = e^-kappa: 1/t for a mu far below it.
OPD_HD inline double gumbel_top_weight(double mu, double t) {
    const double x = mu * t;
    return x < 1e-8 ? (1 + x / 2) / t : mu / -::expm1(-x);
}

template <class Leaves, class Frame, class Job>
struct draw_rows : leaf_rows_base<Frame, Job> {
    using base = leaf_rows_base<Frame, Job>;
    using base::frame, base::job, base::vocab, base::inv_s;
    using typename base::state_type;
    using typename base::Z;
    using design_type = typename Job::design_type;
    using out_type = typename Job::drawn_type;
    static constexpr bool is_greedy = std::is_same_v<design_type, design::greedy>;
    static constexpr bool is_gumbel = std::is_same_v<design_type, design::gumbel>;
    static constexpr bool is_iid = std::is_same_v<design_type, design::iid>;
    static constexpr bool is_threshold = std::is_same_v<design_type, design::threshold>;
    static constexpr bool is_head_tail = std::is_same_v<design_type, design::head_tail>;
    static constexpr bool is_gumbel_top = std::is_same_v<design_type, design::gumbel_top>;
    static constexpr bool has_certain = is_threshold || is_head_tail;

    draw_rows(const Frame& frame_, const Job& job_) : base(frame_, job_, job_.options.filter.temperature) {}

    struct arrays : leaf_arrays {
        index_t* slots; ///< ids drawn
        carver rest;    ///< where the engine's own scratch begins
        OPD_HD arrays(carver c, const draw_rows& k)
            : leaf_arrays(c, leaves_of(k.vocab)), slots(c.take<index_t>(k.job.design.columns())), rest(c) {}
    };
    std::size_t scratch_bytes() const {
        carver c = arrays(carver{}, *this).rest;
        const index_t best = filter_of().top_k < vocab ? filter_of().top_k : 0;
        Leaves::scratch(c, vocab, best < head() ? head() : best, filter_of().top_p < 1);
        return c.used;
    }
    OPD_HD arrays at(const leaf_state& st) const { return {carver{st.scratch}, *this}; }
    OPD_HD const filter& filter_of() const { return job.options.filter; }
    OPD_HD bool cuts() const { return filter_of().cuts(); }
    OPD_HD bool wants_masses() const { return is_iid || has_certain || is_gumbel_top || cuts(); }
    /// head_tail: ids of the head, at most.
    OPD_HD index_t head() const {
        if constexpr (is_head_tail)
            return job.design.h < vocab ? job.design.h : vocab;
        else
            return 0;
    }
    OPD_HD noise_row noise(index_t r) const {
        return {job.keys.seed, design_type::stream, job.keys.sample[r], job.keys.position[r]};
    }
    /// A row's uniforms: the caller's, else keyed ones.
    struct uniforms {
        decltype(Job::keys.uniforms) given;
        index_t row;
        noise_row keyed;
        OPD_HD double operator()(index_t j, index_t draw) const {
            return given.empty() ? keyed_uniform(keyed, static_cast<std::uint32_t>(draw)) : given(row, j);
        }
        /// A standard exponential: of token 1 of the draw.
        OPD_HD double waiting(index_t j, index_t draw) const {
            if (given.empty()) return exponential_of_bits(keyed.bits(static_cast<std::uint32_t>(draw), 1));
            return -::log1p(-given(row, j));
        }
    };
    OPD_HD uniforms uniforms_of(index_t r) const {
        return {job.keys.uniforms, r, has_uniforms() ? noise_row(0, noise_stream::mc, 0, 0) : noise(r)};
    }
    OPD_HD bool has_uniforms() const { return !job.keys.uniforms.empty(); }
    /// How many draws share the mass that is not certain.
    OPD_HD index_t drawn_of(const leaf_state& st) const {
        if constexpr (is_head_tail)
            return job.design.m;
        else
            return job.design.columns() - st.certain;
    }

    OPD_HD OPD_OF_KERNEL void row(auto& team) const {
        fold_sweep<Leaves, leaf_sweep<Leaves, draw_rows>>(*this, team);
        if (has_uniforms()) team.template fold<check_uniforms>(*this);
        team.template each<leaf_masses<Leaves, draw_rows>>(*this);
        team.template each<add_up<draw_rows>>(*this);
        if (cuts()) filtering<Leaves, draw_rows>::run(*this, team);
        team.template each<clear>(*this);
        if constexpr (is_greedy) team.template each<take_top>(*this);
        if constexpr (is_gumbel) team.template fold<take_best>(*this);
        if constexpr (is_iid) team.template each<take_iid>(*this);
        if constexpr (is_threshold) {
            team.template fold<count_mass>(*this);
            team.template repeat<settle>(*this);
            team.template each<count_certain>(*this);
            team.template each<place_certain>(*this);
            team.template each<take_certain>(*this);
            team.template each<take_systematic>(*this);
        }
        if constexpr (is_head_tail) {
            if (Leaves::lists_best || head() == 0) {
                team.template each<list_head>(*this);
            } else {
                team.template each<begin_head>(*this);
                Leaves::template search<draw_rows>(*this, team);
                team.template each<end_head>(*this);
                team.template each<count_certain>(*this);
                team.template each<place_certain>(*this);
                team.template each<take_certain>(*this);
            }
            team.template each<weigh_rest>(*this);
            team.template each<add_rest>(*this);
            team.template each<take_iid>(*this);
        }
        if constexpr (is_gumbel_top)
            for (index_t j = 0; j < job.design.m; ++j) {
                team.template each<take_next>(*this);
                team.template fold<weigh_again>(*this);
            }
        team.template each<store>(*this);
        if (job.options.kept.data != nullptr) team.template fold<count_kept>(*this);
        team.template each<report>(*this);
    }

    // --- the designs -------------------------------------------------------------------------------------------------

    struct check_uniforms : finds_bad {
        OPD_HD static int part(const draw_rows& k, const leaf_state& st, auto at) {
            int bad = 0;
            for (index_t j = at.id; j < k.job.keys.uniforms.cols; j += at.count) {
                const double u = k.job.keys.uniforms(st.row, j);
                bad |= !is_finite(u) || !(u > 0 && u < 1);
            }
            return bad;
        }
    };
    struct clear : if_kept {
        OPD_HD static void run(const draw_rows& k, leaf_state& st, auto at) {
            const arrays a = k.at(st);
            for (index_t j = at.id; j < k.job.design.columns(); j += at.count) a.slots[j] = -1;
            if constexpr (has_certain || is_gumbel_top)
                if (at.id == 0) st.certain = st.taken = 0, st.touched = -1, st.tail = st.waited = 0;
        }
    };
    struct take_top : if_good, by_one<take_top> {
        OPD_HD static void once(const draw_rows& k, const leaf_state& st) { k.at(st).slots[0] = st.swept.sums.s; }
    };
    struct take_best : if_good {
        OPD_HD static scored part(const draw_rows& k, const leaf_state& st, auto at) {
            return Leaves::gumbel(k, st, at);
        }
        OPD_HD static scored merge(scored a, scored b) { return scored::better(a, b); }
        OPD_HD static void finish(const draw_rows& k, leaf_state& st, scored all) { k.at(st).slots[0] = all.id; }
    };
    /// With replacement, from all that is kept or, of head_tail, from the rest.
    struct take_iid {
        OPD_HD static bool due(const draw_rows&, const leaf_state& st) {
            return st.good() && (!is_head_tail || st.tail > 0);
        }
        OPD_HD static void run(const draw_rows& k, const leaf_state& st, auto at) {
            typename Leaves::template reader<Z> leaf(k.z_row(st), k.vocab, st.swept);
            const arrays a = k.at(st);
            const uniforms u = k.uniforms_of(st.row);
            const double all = is_head_tail ? st.tail : st.total;
            index_t first = 0;
            if constexpr (is_iid) first = k.job.design.first;
            index_t loaded = -1;
            for (index_t j = at.id; j < k.job.design.m; j += at.count) {
                const double point = u(j, first + j) * all;
                const index_t l = a.leaf_at(point);
                if (l != loaded) leaf.load(loaded = l, is_head_tail ? rest_of(st, a, l) : leaf_limits{st.cut});
                a.slots[st.certain + j] = leaf.find(point - a.before(l));
            }
        }
    };

    static constexpr double least_weight =
        2.3e-308; ///< as an edge, just above the least normal number: every id with mass is certain

    // Threshold. An id is certain if its weight is at least edge = (mass not certain) / (B - certain). Certain ids
    // lower the edge, which may make more certain: from total/B down to the fixed point.

    /// Ids with mass, up to one more than the budget, a thread.
    struct count_mass : if_good {
        OPD_HD static index_t part(const draw_rows& k, const leaf_state& st, auto at) {
            index_t ids = 0;
            typename Leaves::template reader<Z> leaf(k.z_row(st), k.vocab, st.swept);
            const arrays a = k.at(st);
            const index_t budget = k.job.design.columns();
            for (index_t l = at.id; l < leaves_of(k.vocab) && ids <= budget; l += at.count) {
                if (!(a.mass[l] > 0)) continue;
                leaf.load(l, {st.cut});
                ids += leaf.split(least_weight).above;
            }
            return ids;
        }
        OPD_HD static index_t merge(index_t a, index_t b) { return a + b; }
        OPD_HD static void finish(const draw_rows& k, leaf_state& st, index_t ids) {
            const index_t budget = k.job.design.columns();
            st.certain = 0;
            st.settles = ids > budget;
            st.edge = st.settles ? st.total / double(budget) : least_weight;
        }
    };
    struct settle {
        OPD_HD static bool due(const draw_rows&, const leaf_state& st) { return st.good() && st.settles; }
        OPD_HD static edge_split part(const draw_rows& k, const leaf_state& st, auto at) {
            edge_split s;
            typename Leaves::template reader<Z> leaf(k.z_row(st), k.vocab, st.swept);
            const arrays a = k.at(st);
            for (index_t l = at.id; l < leaves_of(k.vocab); l += at.count) {
                if (!(a.mass[l] >= 0.999 * st.edge)) {
                    s.below += a.mass[l];
                    continue;
                }
                leaf.load(l, {st.cut});
                s = edge_split::sum(s, leaf.split(st.edge));
            }
            return s;
        }
        OPD_HD static edge_split merge(edge_split a, edge_split b) { return edge_split::sum(a, b); }
        OPD_HD static void finish(const draw_rows& k, leaf_state& st, edge_split s) {
            const index_t budget = k.job.design.columns();
            const double next = s.above < budget ? s.below / double(budget - s.above) : st.edge;
            st.settles = next < st.edge && next > least_weight;
            if (st.settles) st.edge = next;
        }
    };

    /// Of each leaf: how many ids are certain, and its mass without them.
    struct count_certain : if_good {
        OPD_HD static void run(const draw_rows& k, const leaf_state& st, auto at) {
            typename Leaves::template reader<Z> leaf(k.z_row(st), k.vocab, st.swept);
            arrays a = k.at(st);
            double least = st.edge; // a leaf that weighs less holds none
            if (is_head_tail) least = ::exp((st.head.z - st.swept.sums.z_s) * k.inv_s);
            for (index_t l = at.id; l < leaves_of(k.vocab); l += at.count) {
                a.count[l] = 0;
                if (!(a.mass[l] >= 0.999 * least) || !(a.mass[l] > 0)) continue;
                leaf.load(l, {is_head_tail ? st.head : st.cut});
                a.count[l] = leaf.split(st.edge).above;
                if (is_head_tail || a.count[l] == 0) continue;
                leaf.load(l, {st.cut, st.edge});
                a.mass[l] = leaf.mass();
            }
        }
    };
    struct place_certain : if_good, by_one<place_certain> {
        OPD_HD static void once(const draw_rows& k, leaf_state& st) {
            const arrays a = k.at(st);
            const index_t ids = counts_to_places(a.count, a.leaves);
            a.count[a.leaves] = ids;
            const double mass = a.add_up();
            const index_t budget = k.job.design.columns();
            st.certain = ids < budget ? ids : budget;
            st.tail = st.edge > least_weight ? mass : 0;
        }
    };
    struct take_certain : if_good {
        OPD_HD static void run(const draw_rows& k, const leaf_state& st, auto at) {
            typename Leaves::template reader<Z> leaf(k.z_row(st), k.vocab, st.swept);
            const arrays a = k.at(st);
            for (index_t l = at.id; l < leaves_of(k.vocab); l += at.count) {
                if (a.count[l] == a.count[l + 1]) continue;
                leaf.load(l, {is_head_tail ? st.head : st.cut});
                index_t slot = a.count[l];
                for (int i = 0; i < leaf.count() && slot < st.certain; ++i)
                    if (leaf.weight(i) >= st.edge) a.slots[slot++] = leaf.begin() + i;
            }
        }
    };
    struct take_systematic {
        OPD_HD static bool due(const draw_rows&, const leaf_state& st) { return st.good() && st.tail > 0; }
        OPD_HD static void run(const draw_rows& k, const leaf_state& st, auto at) {
            typename Leaves::template reader<Z> leaf(k.z_row(st), k.vocab, st.swept);
            const arrays a = k.at(st);
            const double u = k.uniforms_of(st.row)(0, 0);
            const index_t left = k.job.design.columns() - st.certain;
            const double step = st.tail / double(left); // 1/κ in units of the weights
            index_t loaded = -1;
            for (index_t j = at.id; j < left; j += at.count) {
                const double point = (u + double(j)) * step;
                const index_t l = a.leaf_at(point);
                if (l != loaded) leaf.load(loaded = l, {st.cut, st.edge});
                a.slots[st.certain + j] = leaf.find(point - a.before(l));
            }
        }
    };

    // Head and tail.

    struct begin_head : if_good {
        OPD_HD static void run(const draw_rows& k, leaf_state& st, auto at) {
            if (at.id != 0) return;
            st.head = st.cut; // of the filter, until end_head
            Leaves::top_cut(k, st, k.head(), at);
        }
    };
    struct end_head : if_good, by_one<end_head> {
        OPD_HD static void once(const draw_rows&, leaf_state& st) {
            const filter_cut kept = st.head;
            st.head = st.cut, st.cut = kept;
            st.edge = least_weight; // every id of the head that has mass
        }
    };
    /// By an engine that lists the best ids, or of no head.
    struct list_head : if_good, by_one<list_head> {
        OPD_HD static void once(const draw_rows& k, leaf_state& st) {
            const arrays a = k.at(st);
            st.certain = 0;
            if constexpr (Leaves::lists_best)
                if (k.head() > 0) st.certain = Leaves::head_ids(k, st, k.head(), a.slots);
            index_t slot = 0;
            for (index_t l = 0; l <= leaves_of(k.vocab); ++l) {
                while (slot < st.certain && a.slots[slot] < l * ids_of_leaf) ++slot;
                a.count[l] = slot;
            }
        }
    };
    /// What counts of a leaf once its part of the head, slots a.count[l] to a.count[l+1], is left out.
    OPD_HD static leaf_limits rest_of(const leaf_state& st, const arrays& a, index_t l) {
        return {st.cut, 2, a.slots + a.count[l], a.slots + a.count[l + 1]};
    }
    struct weigh_rest : if_good {
        OPD_HD static void run(const draw_rows& k, const leaf_state& st, auto at) {
            typename Leaves::template reader<Z> leaf(k.z_row(st), k.vocab, st.swept);
            const arrays a = k.at(st);
            for (index_t l = at.id; l < leaves_of(k.vocab); l += at.count) {
                if (a.count[l] == a.count[l + 1]) continue;
                leaf.load(l, rest_of(st, a, l));
                a.mass[l] = leaf.mass();
            }
        }
    };
    struct add_rest : if_good, by_one<add_rest> {
        OPD_HD static void once(const draw_rows& k, leaf_state& st) { st.tail = k.at(st).add_up(); }
    };

    // Gumbel top-m: slots[0 .. taken) are the ids drawn so far, ascending.

    /// What counts of a leaf once the ids drawn are left out.
    OPD_HD static leaf_limits undrawn(const leaf_state& st, const arrays& a, index_t l) {
        const index_t* const end = a.slots + st.taken;
        const index_t* const first = first_from(a.slots, end, l * ids_of_leaf);
        return {st.cut, 2, first, first_from(first, end, (l + 1) * ids_of_leaf)};
    }
    struct take_next {
        OPD_HD static bool due(const draw_rows&, const leaf_state& st) { return st.good() && st.total > 0; }
        OPD_HD static void run(const draw_rows& k, leaf_state& st, auto at) {
            if constexpr (is_gumbel_top) {
                if (at.id != 0) return;
                const arrays a = k.at(st);
                const index_t j = st.taken;
                const double left = a.upto[a.leaves - 1];
                st.touched = -1;
                if (!(left > 0)) return;
                const uniforms u = k.uniforms_of(st.row);
                typename Leaves::template reader<Z> leaf(k.z_row(st), k.vocab, st.swept);
                st.waited += u.waiting(k.job.design.m + j, j) / left;
                const double point = u(j, j) * left;
                const index_t l = a.leaf_at(point);
                leaf.load(l, undrawn(st, a, l));
                const index_t id = leaf.find(point - a.before(l));
                index_t slot = st.taken++;
                for (; slot > 0 && a.slots[slot - 1] > id; --slot) a.slots[slot] = a.slots[slot - 1];
                a.slots[slot] = id;
                st.touched = l;
            }
        }
    };
    /// The mass of the leaf that has lost an id; and once the last one is drawn, e^-kappa.
    struct weigh_again {
        OPD_HD static bool due(const draw_rows&, const leaf_state& st) { return st.good() && st.touched >= 0; }
        OPD_HD static double part(const draw_rows& k, const leaf_state& st, auto at) {
            typename Leaves::template reader<Z> leaf(k.z_row(st), k.vocab, st.swept);
            leaf.load(st.touched, undrawn(st, k.at(st), st.touched));
            return leaf.mass(at);
        }
        OPD_HD static double merge(double a, double b) { return a + b; }
        OPD_HD static void finish(const draw_rows& k, leaf_state& st, double mass) {
            if constexpr (is_gumbel_top) {
                const arrays a = k.at(st);
                a.mass[st.touched] = mass;
                st.touched = -1;
                st.tail = a.add_up();
                const index_t m = k.job.design.m;
                if (st.taken == m && st.tail > 0) st.waited += k.uniforms_of(st.row).waiting(2 * m, m) / st.tail;
            }
        }
    };

    // --- what is written ---------------------------------------------------------------------------------------------

    struct store : if_kept {
        OPD_HD static void run(const draw_rows& k, const leaf_state& st, auto at) {
            using Id = typename out_type::id_type;
            using L = typename out_type::log_type;
            using W = typename out_type::weight_type;
            const out_type& out = k.job.out;
            const arrays a = k.at(st);
            const index_t slots = k.job.design.columns();
            for (index_t j = at.id; j < slots; j += at.count) {
                const index_t id = a.slots[j];
                const double log_mu = id < 0 ? 0 : log_p_of(k.job.z(st.row, id), k.inv_s, st.lse_kept);
                double weight = id < 0 ? 0 : 1 / double(slots);
                bool exact = false;
                if constexpr (has_certain) {
                    exact = id >= 0 && j < st.certain;
                    if (id >= 0) weight = exact ? ::exp(log_mu) : st.tail / double(k.drawn_of(st)) / st.total;
                }
                if constexpr (is_gumbel_top) {
                    exact = id >= 0 && !(st.tail > 0); // nothing is left: all were certain
                    if (id >= 0)
                        weight = exact ? ::exp(log_mu) : gumbel_top_weight(::exp(log_mu), st.waited * st.total);
                }
                out.ids(st.row, j) = static_cast<Id>(id);
                out.log_mu(st.row, j) = element<L>::store(static_cast<arithmetic_t<L>>(log_mu));
                if (!out.weight.empty()) out.weight(st.row, j) = static_cast<W>(weight);
                if (!out.exact.empty()) out.exact(st.row, j) = exact;
            }
        }
    };
    struct count_kept : if_kept {
        OPD_HD static index_t part(const draw_rows& k, const leaf_state& st, auto at) {
            return st.report.bad ? 0 : Leaves::count_kept(k, st, at);
        }
        OPD_HD static index_t merge(index_t a, index_t b) { return a + b; }
        OPD_HD static void finish(const draw_rows& k, leaf_state& st, index_t n) { k.job.options.kept[st.row] = n; }
    };
    struct report : if_kept, by_one<report> {
        OPD_HD static void once(const draw_rows& k, const leaf_state& st) {
            const auto& o = k.job.options;
            if (!o.log_kept.empty()) o.log_kept[st.row] = st.report.bad || !k.cuts() ? 0 : st.lse_kept - st.report.lse;
            const double none = neg_inf<double>();
            const bool rest = !st.report.bad && st.tail > 0;
            if (!o.log_tail.empty()) o.log_tail[st.row] = rest ? ::log(st.tail / st.total) : none;
            if (!o.kappa.empty()) o.kappa[st.row] = rest ? -::log(st.waited * st.total) : none;
            if (!o.cut.empty()) o.cut[st.row] = st.report.bad ? filter_cut{1e300, -1} : st.cut;
        }
    };
};

} // namespace OPD_ISA
} // namespace opd::detail
