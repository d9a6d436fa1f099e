// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Rows of tokens drawn under a filter, with the ids that it kept:
//
//   gather K · normaliser over K · entries · the estimator · scatter over K      k reads, V writes
//
// p is softmax(z[K]/T), c - p Σc is written on K, all else is 0. Everything is in double; K is as long as the filter
// left it. And rows that only tell log p of such tokens (token_logp of a cache). Of hidden states the logits of K
// alone are made, and the gradient stays one of K numbers (logits/gathered_logits.hpp).
#pragma once

#include <cmath>
#include <cstddef>
#include <type_traits>
#include <utility>

#include "opd/config.hpp"
#include "opd/element.hpp"
#include "opd/entries.hpp"
#include "opd/rows/kept_sets.hpp"
#include "opd/rows/rows.hpp"
#include "opd/rows/sampled_rows.hpp"
#include "opd/rows/sparse_math.hpp"
#include "opd/score.hpp"
#include "opd/source.hpp"
#include "opd/teacher.hpp"

namespace opd::detail {
inline namespace OPD_ISA {

template <class Frame, class Student, class Teacher, class Estimator>
struct kept_set_rows {
    using Z = typename Student::logit_type;
    using G = typename Student::gradient_type;
    using state_type = kept_set_state;

    Frame frame;
    Student student;
    Teacher teacher;
    Estimator estimator;
    index_t vocab;
    double inv_s;
    index_t widest = 0;

    kept_set_rows(const Frame& frame_, const Student& student_, const Teacher& teacher_, const Estimator& estimator_,
                  index_t vocab_, index_t rows)
        : frame(frame_), student(student_), teacher(teacher_), estimator(estimator_), vocab(vocab_),
          inv_s(1 / double(student_.temperature)), widest(teacher_.widest) {
        if constexpr (Student::memory_space == space::host) widest = widest_set(teacher, rows);
    }

    struct arrays {
        sampled_entry* entries;
        double *z, *c; // of K
        OPD_HD arrays(carver scratch, index_t m, index_t k)
            : entries(scratch.take<sampled_entry>(m)), z(scratch.take<double>(k)), c(scratch.take<double>(k)),
              used(scratch.used) {}
        std::size_t used;
    };
    std::size_t scratch_bytes() const { return arrays({}, slots(), widest).used; }
    OPD_HD arrays at(const state_type& st) const { return {carver{st.scratch}, slots(), widest}; }
    OPD_HD index_t slots() const { return teacher.ids.cols; }
    OPD_HD auto set(const state_type& st) const { return kept_set_of(teacher, st.row); }
    OPD_HD double set_logit(const state_type& st, index_t j) const { return at(st).z[j]; }
    /// The ids of a row whose logits are read, and the most that one has.
    OPD_HD auto slots_at(index_t row) const { return own_slots(frame, kept_set_of(teacher, row), vocab); }
    OPD_HD index_t width() const { return widest; }

    OPD_HD OPD_OF_KERNEL void row(auto& team) const {
        team.template fold<gather>(*this);
        team.template fold<inspect>(*this);
        team.template fold<normalise_kept_set>(*this);
        team.template each<take_tokens>(*this);
        team.template each<decide>(*this);
        team.template fold<measure>(*this);
        select_row(*this, team);
        team.template each<clear>(*this);
        team.template each<scatter>(*this);
    }

    /// The set's logits; whether its ids ascend and are ids.
    struct gather : finds_bad {
        OPD_HD static int part(const kept_set_rows& k, const state_type& st, auto at) {
            const arrays a = k.at(st);
            const auto set = k.set(st);
            if (set.count < 1 || set.count > k.widest) return 1;
            int bad = 0;
            for (index_t j = at.id; j < set.count; j += at.count) bad |= !set.sound(j, whole_vocab(k.frame, k.vocab));
            if (bad) return 1;
            const auto own = k.slots_at(st.row);
            if constexpr (makes_ids<Student>) k.student.make(st.row, own, a.z);
            for (index_t j = at.id; j < set.count; j += at.count) {
                const auto id = static_cast<index_t>(own.ids[j]);
                if constexpr (!makes_ids<Student>)
                    a.z[j] = id < 0 ? neg_inf<double>() : load_log(k.student.logit({st.row}, id));
                a.c[j] = 0;
            }
            return 0;
        }
    };
    /// Whether a logit is no number.
    struct inspect : finds_bad {
        static constexpr bool reads_slots = true;
        OPD_HD static int part(const kept_set_rows& k, const state_type& st, auto at) {
            const double* z = k.at(st).z;
            const index_t n = k.set(st).count;
            int bad = 0;
            for (index_t j = at.id; j < n; j += at.count) bad |= is_nan(z[j]) || (is_inf(z[j]) && !is_neg_inf(z[j]));
            return bad;
        }
    };
    /// Logits of a row by id, as a source has them. What the set does not hold is no token's.
    struct logits_of_set {
        const kept_set_rows& k;
        const state_type& st;
        OPD_HD auto logit(row_place place, index_t id) const {
            if constexpr (makes_ids<Student> || in_shards<Frame>) {
                const index_t at = k.set(st).place_of(id);
                return at < 0 ? 0.0 : k.at(st).z[at];
            } else {
                return k.student.logit(place, id);
            }
        }
    };
    /// The cache's slots as entries; id -1: unused, below: out of range or outside the set.
    struct take_tokens : if_good {
        OPD_HD static void run(const kept_set_rows& k, const state_type& st, auto at) {
            const arrays a = k.at(st);
            for (index_t j = at.id; j < k.slots(); j += at.count) {
                sampled_entry x = gathered(logits_of_set{k, st}, {st.row}, k.teacher, k.frame.env.frozen, j,
                                           whole_vocab(k.frame, k.vocab), k.inv_s, st.lse);
                put_on_set(x, k.teacher, st.row);
                a.entries[j] = x;
            }
        }
    };
    struct decide : if_good, by_one<decide> {
        OPD_HD static void once(const kept_set_rows& k, state_type& st) {
            const arrays a = k.at(st);
            for (index_t j = 0; j < k.slots(); ++j)
                st.partial.diagnostics.outside_kept += a.entries[j].id == outside_kept_set;
            const index_t n = decide_drawn(k, st, a.entries);
            const auto set = k.set(st);
            st.sum_c = 0;
            for (index_t j = 0; j < n; ++j) {
                a.c[set.place_of(a.entries[j].id)] += a.entries[j].c;
                st.sum_c += a.entries[j].c;
            }
        }
    };
    /// The student's entropy on the set, where env.measure asks.
    struct measure : measure_entropies<void, double, false> {
        static constexpr bool reads_slots = true;
        OPD_HD static entropy_sums part(const kept_set_rows& k, const state_type& st, auto at) {
            const arrays a = k.at(st);
            const index_t n = k.set(st).count;
            entropy_sums sum;
            for (index_t j = at.id; j < n; j += at.count) {
                const double log_p = is_neg_inf(a.z[j]) ? 0 : a.z[j] * k.inv_s - st.lse;
                sum.student += is_neg_inf(a.z[j]) ? 0 : ::exp(log_p) * log_p;
            }
            return sum;
        }
    };
    struct clear {
        static constexpr bool writes_gradient = true;
        OPD_HD static void run(const kept_set_rows& k, const state_type& st, auto at) {
            if constexpr (makes_ids<Student>)
                k.student.clear(st.row, k.slots_at(st.row));
            else
                clear_columns(k.student, st.row, 0, k.frame.env.beta, at);
        }
    };
    struct scatter {
        static constexpr bool writes_gradient = true;
        OPD_HD static bool due(const kept_set_rows& k, const state_type& st) {
            return st.live && k.student.has_gradient();
        }
        OPD_HD static void run(const kept_set_rows& k, const state_type& st, auto at) {
            const arrays a = k.at(st);
            const auto set = k.slots_at(st.row);
            const double g = st.factor * k.inv_s;
            for (index_t j = at.id; j < set.count; j += at.count) {
                const double p = is_neg_inf(a.z[j]) ? 0 : ::exp(a.z[j] * k.inv_s - st.lse);
                const double dz = g * (a.c[j] - p * st.sum_c);
                if constexpr (makes_ids<Student>) {
                    a.c[j] = dz;
                } else {
                    const auto id = static_cast<index_t>(set.ids[j]);
                    if (id < 0) continue; // another shard's
                    G& to = k.student.gradient_at({st.row}, id);
                    const double old =
                        k.frame.env.beta == 0 ? 0 : double(element<G>::load(to)); // cleared: beta times what was there
                    to = element<G>::store(static_cast<arithmetic_t<G>>(old + dz));
                }
            }
            if constexpr (makes_ids<Student>) k.student.take_back(st.row, set, a.c, a.z);
        }
    };
};

/// log p of the cache's tokens on their sets: the lse, and so the bits, of the rows above.
template <class Frame, class Job>
struct kept_logp_rows {
    using Z = typename Job::logit_type;
    using L = typename Job::log_type;
    using set_id = std::remove_cvref_t<decltype(std::declval<const Job&>().cache.kept_ids[0])>;
    using state_type = kept_set_state;

    /// Whether the logits of the set are made, into the team's scratch.
    static constexpr bool makes = [] {
        if constexpr (requires { typename decltype(Job::z)::source_type; })
            return makes_ids<typename decltype(Job::z)::source_type>;
        else
            return false;
    }();

    Frame frame;
    Job job;
    double inv_s;
    index_t widest = 0; ///< ids of a set whose logits are made

    kept_logp_rows(const Frame& frame_, const Job& job_)
        : frame(frame_), job(job_), inv_s(1 / double(job_.temperature)) {
        if constexpr (makes) widest = widest_set(job.cache, job.z.rows);
    }
    std::size_t scratch_bytes() const { return sizeof(Z) * static_cast<std::size_t>(widest); }
    OPD_HD auto set(const state_type& st) const { return kept_set_of(job.cache, st.row); }
    OPD_HD Z logit_at(const state_type& st, const kept_set<set_id>& of, index_t j) const {
        if constexpr (makes)
            return reinterpret_cast<const Z*>(st.scratch)[j];
        else
            return job.z(st.row, of[j]);
    }
    OPD_HD double set_logit(const state_type& st, index_t j) const { return load_log(logit_at(st, set(st), j)); }
    OPD_HD OPD_OF_KERNEL void row(auto& team) const {
        team.template fold<check>(*this);
        team.template fold<normalise_kept_set>(*this);
        team.template fold<store>(*this);
    }

    struct check : finds_bad {
        OPD_HD static int part(const kept_logp_rows& k, const state_type& st, auto at) {
            const auto set = k.set(st);
            int bad = set.count < 1;
            if constexpr (makes) {
                for (index_t j = at.id; j < set.count; j += at.count) bad |= !set.sound(j, k.job.z.cols);
                if (bad) return 1;
                k.job.z.source.make(st.row, set, reinterpret_cast<Z*>(st.scratch));
            }
            for (index_t j = at.id; j < set.count; j += at.count) {
                const double z = set.sound(j, k.job.z.cols) ? k.set_logit(st, j) : neg_inf<double>();
                bad |= !set.sound(j, k.job.z.cols) || is_nan(z) || (is_inf(z) && !is_neg_inf(z));
            }
            return bad;
        }
    };
    /// Counts tokens outside the set; what is no id makes the row bad without being one.
    struct store : if_kept {
        struct counts {
            index_t outside = 0;
            int bad = 0;
        };
        OPD_HD static counts part(const kept_logp_rows& k, const state_type& st, auto at) {
            const auto set = k.set(st);
            counts out;
            for (index_t j = at.id; j < k.job.cache.ids.cols; j += at.count) {
                const auto id = static_cast<index_t>(k.job.cache.ids(st.row, j));
                const index_t place = st.good() && id >= 0 ? set.place_of(id) : -1;
                const bool in = place >= 0;
                const double lp = in ? log_p_of(k.logit_at(st, set, place), k.inv_s, st.lse) : quiet_nan<double>();
                k.job.log_p(st.row, j) = element<L>::store(static_cast<arithmetic_t<L>>(lp));
                out.bad |= !in && id != -1;
                out.outside += st.good() && !in && id >= 0 && id < k.job.z.cols;
            }
            return out;
        }
        OPD_HD static counts merge(const counts& a, const counts& b) { return {a.outside + b.outside, a.bad | b.bad}; }
        OPD_HD static void finish(const kept_logp_rows&, state_type& st, const counts& all) {
            st.partial.diagnostics.outside_kept += all.outside;
            st.report.bad |= all.bad != 0;
        }
    };
};

} // namespace OPD_ISA
} // namespace opd::detail
