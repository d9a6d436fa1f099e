// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Rows that are scored: log p of given ids, the best ids, the mass outside either.
//
//   sweep · masses of leaves · [best ids] · for a tail: of each leaf, what it holds without the listed ids · gather
//
// The logits are read once.
#pragma once

#include <cmath>
#include <cstddef>

#include "opd/config.hpp"
#include "opd/element.hpp"
#include "opd/rows/leaf_rows.hpp"
#include "opd/rows/sparse_math.hpp"
#include "opd/score.hpp"

namespace opd::detail {
inline namespace OPD_ISA {

template <class Leaves, class Frame, class Job>
struct score_rows : leaf_rows_base<Frame, Job> {
    using base = leaf_rows_base<Frame, Job>;
    using typename base::state_type;
    using typename base::Z;
    using Id = typename Job::id_type;
    using L = typename Job::log_type;
    using base::frame, base::job, base::vocab, base::inv_s;
    static constexpr bool may_want_entropy = true;

    score_rows(const Frame& frame_, const Job& job_) : base(frame_, job_, job_.temperature) {}

    struct arrays : leaf_arrays {
        index_t* listed; ///< ids to leave out of a tail, ascending
        index_t* best;   ///< the best ids, best first
        index_t* raw;    ///< ids before they are put in order
        carver rest;     ///< where the engine's own scratch begins
        OPD_HD arrays(carver c, const score_rows& k)
            : leaf_arrays(c, leaves_of(k.vocab)), listed(c.take<index_t>(k.most_listed())),
              best(c.take<index_t>(k.tops())), raw(c.take<index_t>(k.most_listed())), rest(c) {}
    };
    OPD_HD index_t tops() const { return job.what.top_ids.cols; }
    OPD_HD index_t most_listed() const {
        const index_t given = job.what.log_tail.empty() ? 0 : job.what.ids.cols;
        const index_t ids = given < vocab || job.what.offsets.empty() ? given : vocab;
        return ids > tops() ? ids : tops();
    }
    std::size_t scratch_bytes() const {
        carver c = arrays(carver{}, *this).rest;
        Leaves::scratch(c, vocab, tops(), false);
        return c.used;
    }
    OPD_HD arrays at(const leaf_state& st) const { return {carver{st.scratch}, *this}; }
    OPD_HD static constexpr bool cuts() { return false; }
    OPD_HD bool wants_entropy() const { return !job.what.entropy.empty(); }
    OPD_HD bool wants_masses() const { return !job.what.log_tail.empty() || !job.what.top_log_tail.empty(); }

    OPD_HD OPD_OF_KERNEL void row(auto& team) const {
        fold_sweep<Leaves, leaf_sweep<Leaves, score_rows>>(*this, team);
        team.template each<leaf_masses<Leaves, score_rows>>(*this);
        if (wants_entropy()) team.template each<store_entropy>(*this);
        team.template fold<store_listed>(*this);
        if (!job.what.log_tail.empty()) {
            team.template each<begin_list<false>>(*this);
            tail<false>(team);
        }
        if (tops() > 0) {
            Leaves::best(*this, team);
            team.template each<store_best>(*this);
            if (!job.what.top_log_tail.empty()) {
                team.template each<begin_list<true>>(*this);
                tail<true>(team);
            }
        }
        team.template each<count_bad_ids>(*this);
    }

    OPD_HD index_t first(const leaf_state& st) const {
        return job.what.offsets.empty() ? 0 : within(job.what.offsets[st.row]);
    }
    OPD_HD index_t last(const leaf_state& st) const {
        return job.what.offsets.empty() ? job.what.ids.cols : within(job.what.offsets[st.row + 1]);
    }
    OPD_HD index_t within(index_t i) const { return i < 0 ? 0 : (i > job.what.ids.cols ? job.what.ids.cols : i); }
    OPD_HD index_t list_row(const leaf_state& st) const { return job.what.offsets.empty() ? st.row : 0; }

    OPD_HD L log_p(const leaf_state& st, index_t id) const {
        const double lp = st.report.bad ? neg_inf<double>() : log_p_of(job.z(st.row, id), inv_s, st.report.lse);
        return element<L>::store(static_cast<arithmetic_t<L>>(lp));
    }
    OPD_HD static L none() { return element<L>::store(static_cast<arithmetic_t<L>>(neg_inf<double>())); }

    struct store_entropy : if_kept, by_one<store_entropy> {
        OPD_HD static void once(const score_rows& k, const leaf_state& st) {
            k.job.what.entropy[st.row] = st.report.bad ? 0 : st.swept.sums.entropy();
        }
    };
    /// Writes its share and says whether an id was out of range; a bad id says nothing of its neighbours.
    struct store_listed : if_kept {
        OPD_HD static int part(const score_rows& k, const leaf_state& st, auto at) {
            int bad = 0;
            const index_t r = k.list_row(st);
            for (index_t j = k.first(st) + at.id; j < k.last(st); j += at.count) {
                const auto id = static_cast<index_t>(k.job.what.ids(r, j));
                const bool in = id >= 0 && id < k.vocab;
                bad |= !in && id != -1;
                if (!k.job.what.log_p.empty()) k.job.what.log_p(r, j) = in ? k.log_p(st, id) : none();
            }
            return bad;
        }
        OPD_HD static int merge(int a, int b) { return a | b; }
        OPD_HD static void finish(const score_rows&, leaf_state& st, int bad) { st.bad_ids = bad != 0; }
    };
    struct store_best : if_kept {
        OPD_HD static void run(const score_rows& k, const leaf_state& st, auto at) {
            const arrays a = k.at(st);
            for (index_t j = at.id; j < k.tops(); j += at.count) {
                const index_t id = st.report.bad || j >= st.found ? -1 : a.best[j];
                k.job.what.top_ids(st.row, j) = static_cast<Id>(id);
                if (!k.job.what.top_log_p.empty()) k.job.what.top_log_p(st.row, j) = id < 0 ? none() : k.log_p(st, id);
            }
        }
    };

    struct count_bad_ids : if_kept, by_one<count_bad_ids> {
        OPD_HD static void once(const score_rows&, leaf_state& st) { st.report.bad |= st.bad_ids; }
    };

    // --- a tail: the mass of each leaf without the listed ids --------------------------------------------------------

    template <bool Best>
    struct begin_list : if_kept, by_one<begin_list<Best>> {
        OPD_HD static void once(const score_rows& k, leaf_state& st) {
            const arrays a = k.at(st);
            st.listed = 0;
            if (!st.good()) return;
            if constexpr (Best) {
                for (index_t j = 0; j < st.found; ++j) a.raw[st.listed++] = a.best[j];
            } else {
                for (index_t j = k.first(st); j < k.last(st); ++j) {
                    const auto id = static_cast<index_t>(k.job.what.ids(k.list_row(st), j));
                    if (id < 0 || id >= k.vocab) continue;
                    if (st.listed == k.most_listed()) { // more ids than there are: some repeat
                        st.bad_ids = true;
                        break;
                    }
                    a.raw[st.listed++] = id;
                }
            }
        }
    };
    struct order : if_good {
        OPD_HD static void run(const score_rows& k, const leaf_state& st, auto at) {
            const arrays a = k.at(st);
            Leaves::ascending(a.raw, a.listed, st.listed, at);
        }
    };
    template <bool Best>
    struct add_tail : if_kept {
        OPD_HD static double part(const score_rows& k, const leaf_state& st, auto at) {
            if (st.report.bad) return 0;
            const arrays a = k.at(st);
            typename Leaves::template reader<Z> leaf(k.z_row(st), k.vocab, st.swept);
            const raw_sums& s = st.swept.sums;
            double all = 0;
            const index_t *from = a.listed, *const end = a.listed + st.listed;
            for (index_t l = at.id; l < leaves_of(k.vocab); l += at.count) {
                from = first_from(from, end, l * ids_of_leaf);
                const index_t* const to = first_from(from, end, (l + 1) * ids_of_leaf);
                if (from == to) {
                    all += a.mass[l];
                    continue;
                }
                double listed = 0;
                for (const index_t* id = from; id != to; ++id)
                    if (id == a.listed || id[-1] != *id) listed += p_of(k.job.z(st.row, *id), s) * (1 + s.student_mass);
                if (listed <= 0.75 * a.mass[l]) { // the rest keeps its digits
                    all += a.mass[l] - listed;
                } else {
                    leaf.load(l, {{}, 2, from, to});
                    all += leaf.mass();
                }
            }
            return all;
        }
        OPD_HD static double merge(double a, double b) { return a + b; }
        OPD_HD static void finish(const score_rows& k, leaf_state& st, double all) {
            double log_tail = neg_inf<double>();
            if (!st.report.bad && all > 0) log_tail = pin(st.swept.sums.z_s * k.inv_s) + ::log(all) - st.report.lse;
            const auto& to = Best ? k.job.what.top_log_tail : k.job.what.log_tail;
            to[st.row] = element<L>::store(static_cast<arithmetic_t<L>>(log_tail > 0 ? 0 : log_tail));
        }
    };
    template <bool Best, class Team>
    OPD_HD void tail(Team& team) const {
        team.template each<order>(*this);
        team.template fold<add_tail<Best>>(*this);
    }
};

} // namespace OPD_ISA
} // namespace opd::detail
