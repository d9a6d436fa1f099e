// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Supports and samples on the GPU, as functions of (thread index, thread count): see cuda_rows.hpp. The V-sized parts
// (normaliser, pullback) are the block's; the few entries' scalars (sparse_math.hpp) are one thread's, in double.
//
//   renormalised   gather k entries · the dense phases over them · scatter          k reads, k writes (dense dz: V writes)
//   tail bucket    gather · sweep of v not in S · one thread: buckets · pullback     2 reads, 1 write
//   sampled        sweep (or the given log-sum-exp) · gather · one thread · pullback 2 reads (1), 1 write
//
// The pullback goes over the row in proportion to p (samples: of -g p Σc; a tail bucket: of what falls to the tail); an entry's
// c meets its softmax term in double before the single store. Repeated ids are summed in sample order. Id -1 in a support or a
// weighted cache is an unused slot.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "opd/backends/cuda_rows.hpp"
#include "opd/batch.hpp"
#include "opd/config.hpp"
#include "opd/detail/sparse_math.hpp"
#include "opd/diagnostics.hpp"
#include "opd/element.hpp"
#include "opd/entries.hpp"
#include "opd/evaluate.hpp"
#include "opd/row_program.hpp"
#include "opd/student.hpp"
#include "opd/teacher.hpp"

namespace opd::detail {
inline namespace OPD_ISA {

/// A set of ids, one bit for ids that share their last bits; what it lets through must be looked up.
struct id_filter {
    static constexpr int words = 512;
    std::uint32_t bits[words];
    OPD_HD OPD_INLINE static unsigned slot(index_t id) { return static_cast<unsigned>(id) & (32 * words - 1); }
    OPD_HD OPD_INLINE bool may_hold(index_t id) const { return (bits[slot(id) >> 5] >> (slot(id) & 31)) & 1; }
};

struct sparse_state : group_state {
    raw_sums sums = {};
    index_t entries = 0; ///< filled slots
    double sum_c = 0;
    double share = 0; ///< of e^((z - z*)/T), z* the anchor of `sums`, in dz of an id that is no entry
    id_filter filter = {};
};

/// dz = beta dz + g(c - p Σc), in three phases. The kernel has frame, student, vocab, inv_s; entry_id(st, j); entry_h(st, j),
/// an entry's c - p Σc with its repeats; values(st): a double of scratch an entry.
template <class Kernel>
struct pullback {
    using state_type = typename Kernel::state_type;
    /// Whether slot j is the first of its id.
    OPD_HD static bool leads(const Kernel& k, const state_type& st, index_t j) {
        if constexpr (!Kernel::ids_are_distinct)
            for (index_t i = 0; i < j; ++i)
                if (k.entry_id(st, i) == k.entry_id(st, j)) return false;
        return true;
    }
    /// The entries' gradients, before dz overwrites z.
    struct prepare {
        OPD_HD static void run(const Kernel& k, const state_type& st, int tid, int threads) {
            using G = typename Kernel::gradient_type;
            if (!st.live || k.student.dz.empty()) return;
            for (index_t j = tid; j < st.entries; j += threads) {
                if (!leads(k, st, j)) continue;
                const index_t id = k.entry_id(st, j);
                const float beta = k.frame.env.beta;
                const double old = beta == 0 ? 0 : double(beta) * double(element<G>::load(k.student.dz(st.row, id)));
                k.values(st)[j] = old + st.factor * k.inv_s * k.entry_h(st, j);
            }
        }
    };
    struct dense {
        OPD_HD static void run(const Kernel& k, const state_type& st, int tid, int threads) {
            using Z = typename Kernel::logit_type;
            using G = typename Kernel::gradient_type;
            using F = thread_number<Z, G>;
            if (k.student.dz.empty()) return;
            const float beta = k.frame.env.beta;
            if (st.live) {
                const Z* z = k.student.z.row(st.row);
                G* dz = k.student.dz.row(st.row);
                const thread_anchors<F> a(st.sums);
                const F factor(st.factor * k.inv_s * st.share);
                for (index_t i = tid; i < k.vocab; i += threads) {
                    bool bad = false;
                    store_gradient(dz + i, (factor * a.student(load_logit<F>(z + i, bad).x)).v, beta);
                }
            }
            clear_columns(k.student, st.row, st.live ? k.vocab : 0, beta, tid, threads);
        }
    };
    struct scatter {
        OPD_HD static void run(const Kernel& k, const state_type& st, int tid, int threads) {
            using G = typename Kernel::gradient_type;
            if (!st.live || k.student.dz.empty()) return;
            for (index_t j = tid; j < st.entries; j += threads)
                if (leads(k, st, j))
                    k.student.dz(st.row, k.entry_id(st, j)) =
                        element<G>::store(static_cast<arithmetic_t<G>>(k.values(st)[j]));
        }
    };
    template <class Team>
    OPD_HD static void run(const Kernel& k, Team& team) {
        team.template each<prepare>(k);
        team.template each<dense>(k);
        team.template each<scatter>(k);
    }
};

/// The clamp of a row's loss.
template <class Kernel>
OPD_HD bool clamps(const Kernel& k, row_report& out) {
    const double clamp = k.frame.env.loss_clamp;
    out.clamped = clamp > 0 && (out.loss > clamp || out.loss < -clamp);
    return out.clamped;
}

/// Whether the ids of a support are in range and distinct. The kernel has ids(st): index_t[k()].
template <class Kernel>
struct check_ids {
    using state_type = typename Kernel::state_type;
    OPD_HD static int part(const Kernel& k, const state_type& st, int tid, int threads) {
        const index_t* ids = k.ids(st);
        int bad = 0;
        for (index_t j = tid; j < k.k(); j += threads) {
            if (ids[j] == -1) continue; // unused slot
            bad |= ids[j] < 0 || ids[j] >= k.vocab;
            for (index_t i = 0; i < j; ++i) bad |= ids[i] == ids[j];
        }
        return bad;
    }
    OPD_HD static int merge(int a, int b) { return a | b; }
    OPD_HD static void finish(const Kernel&, state_type& st, int bad) { st.report.bad |= bad != 0; }
};

// --- drawn tokens -------------------------------------------------------------------------------------------------------

template <class Z, class G, class Teacher, class Estimator, space S>
struct sampled_kernel {
    using logit_type = Z;
    using gradient_type = G;
    using F = thread_number<Z>;
    using state_type = sparse_state;
    static constexpr bool ids_are_distinct = false;

    row_frame<S> frame;
    student::logits<Z, G, S> student;
    Teacher teacher;
    Estimator estimator;
    index_t vocab;
    double inv_s;

    sampled_kernel(const row_job<student::logits<Z, G, S>, Teacher, Estimator, S>& job, const row_frame<S>& frame_)
        : frame(frame_), student(job.student), teacher(job.teacher), estimator(job.estimator), vocab(job.vocab),
          inv_s(1 / double(job.student.temperature)) {}

    OPD_HD sampled_entry* entries(const sparse_state& st) const {
        return reinterpret_cast<sampled_entry*>(frame.scratch_at(st.row));
    }
    OPD_HD double* values(const sparse_state& st) const {
        return reinterpret_cast<double*>(entries(st) + teacher.ids.cols);
    }
    OPD_HD index_t entry_id(const sparse_state& st, index_t j) const { return entries(st)[j].id; }
    OPD_HD double entry_h(const sparse_state& st, index_t j) const {
        const sampled_entry* e = entries(st);
        double c = e[j].c;
        for (index_t i = j + 1; i < st.entries; ++i) c += e[i].id == e[j].id ? e[i].c : 0;
        return c - p_of(student.z.row(st.row), e[j].id, st.sums) * st.sum_c;
    }

    template <class Team>
    OPD_HD void run(index_t group, Team& team) const {
        run_rows(*this, group, team);
    }
    template <class Team>
    OPD_HD void row(Team& team) const {
        team.template fold<sweep>(*this);
        team.template each<gather>(*this);
        team.template each<decide>(*this);
        pullback<sampled_kernel>::run(*this, team);
    }
    OPD_HD const double* given(const sparse_state& st) const {
        return frame.env.given_lse.empty() ? nullptr : &frame.env.given_lse[st.row];
    }

    struct sweep {
        OPD_HD static row_sweep part(const sampled_kernel& k, const sparse_state& st, int tid, int threads) {
            if (!st.kept || st.report.bad || k.given(st)) return row_sweep{};
            return sweep_thread<F, false, raw_sums_needed{}>(k.student.z.row(st.row), static_cast<const Z*>(nullptr),
                                                             k.vocab, k.inv_s, 1, 1, tid, threads);
        }
        OPD_HD static row_sweep merge(const row_sweep& a, const row_sweep& b) { return row_sweep::merge(a, b); }
        OPD_HD static void finish(const sampled_kernel& k, sparse_state& st, const row_sweep& all) {
            if (!st.kept || st.report.bad) return;
            st.sums = all.sums;
            if (const double* lse = k.given(st)) { // a finite one vouches for the row
                st.report.bad = !is_finite(*lse);
                if (st.report.bad) return;
                anchor_at<typename F::value_type>(st.sums, *lse, k.inv_s);
                st.report.lse = *lse;
            } else {
                st.report.bad = all.found.bad || all.sums.s < 0;
                if (st.report.bad) return;
                st.report.lse = st.sums.lse();
            }
            st.live = true;
        }
    };

    /// Slots of the cache into entries; id -1: unused, -2: out of range.
    struct gather {
        OPD_HD static void run(const sampled_kernel& k, const sparse_state& st, int tid, int threads) {
            if (!st.live) return;
            const Teacher& t = k.teacher;
            for (index_t j = tid; j < t.ids.cols; j += threads)
                k.entries(st)[j] = gathered(k.student.z.row(st.row), t, st.row, j, k.vocab, k.inv_s, st.report.lse);
        }
    };

    struct decide {
        OPD_HD static void run(const sampled_kernel& k, sparse_state& st, int tid, int) {
            if (tid != 0 || !st.live) return;
            sampled_entry* e = k.entries(st);
            st.live = false;
            index_t n = 0;
            for (index_t j = 0; j < k.teacher.ids.cols; ++j) {
                if (e[j].id == -1) continue;
                if (e[j].id < 0) {
                    st.report.bad = true;
                    return;
                }
                if (n != j) e[n] = e[j];
                ++n;
            }
            st.report.bad = n == 0;
            if (st.report.bad) return;
            const entry_row o =
                k.estimator.row(e, static_cast<int>(n), facts_of(k.frame.env, st.row), st.partial.diagnostics);
            st.report.bad = o.bad;
            st.report.loss = o.loss, st.report.infinite = o.infinite;
            if (o.bad || clamps(k, st.report)) return;
            st.entries = n;
            st.sum_c = 0;
            for (index_t j = 0; j < n; ++j) st.sum_c += e[j].c;
            st.share = -st.sum_c / (1 + st.sums.S);
            st.live = true;
        }
    };
};

// --- supports -----------------------------------------------------------------------------------------------------------

template <class Z, class G, class Id, class L, class Estimator, space S>
struct support_kernel {
    using logit_type = Z;
    using gradient_type = G;
    using F = thread_number<Z>;
    using state_type = sparse_state;
    static constexpr bool ids_are_distinct = true;

    row_frame<S> frame;
    student::logits<Z, G, S> student;
    teacher::support<Id, L, S> teacher;
    Estimator estimator;
    index_t vocab;
    double inv_s;

    support_kernel(const row_job<student::logits<Z, G, S>, teacher::support<Id, L, S>, Estimator, S>& job,
                   const row_frame<S>& frame_)
        : frame(frame_), student(job.student), teacher(job.teacher), estimator(job.estimator), vocab(job.vocab),
          inv_s(1 / double(job.student.temperature)) {}

    OPD_HD index_t k() const { return teacher.ids.cols; }
    OPD_HD index_t* ids(const sparse_state& st) const { return reinterpret_cast<index_t*>(frame.scratch_at(st.row)); }
    OPD_HD double* array(const sparse_state& st, int i) const {
        return reinterpret_cast<double*>(frame.scratch_at(st.row)) + (i + 1) * k();
    }
    OPD_HD double* log_p(const sparse_state& st) const { return array(st, 0); } // at first: logits
    OPD_HD double* log_q(const sparse_state& st) const { return array(st, 1); }
    OPD_HD double* h(const sparse_state& st) const { return array(st, 2); }
    OPD_HD double* values(const sparse_state& st) const { return array(st, 3); }
    static constexpr int arrays = 5;
    OPD_HD index_t entry_id(const sparse_state& st, index_t j) const { return ids(st)[j]; }
    OPD_HD double entry_h(const sparse_state& st, index_t j) const { return h(st)[j]; }

    template <class Team>
    OPD_HD void run(index_t group, Team& team) const {
        run_rows(*this, group, team);
    }
    template <class Team>
    OPD_HD void row(Team& team) const {
        if (team.state().kept && !team.state().report.bad) {
            team.template each<gather>(*this);
            team.template fold<check_ids<support_kernel>>(*this);
            team.template fold<sweep>(*this);
            team.template each<decide>(*this);
        }
        pullback<support_kernel>::run(*this, team);
    }

    struct gather {
        OPD_HD static void run(const support_kernel& k, sparse_state& st, int tid, int threads) {
            for (index_t j = tid; j < k.k(); j += threads) {
                const auto id = static_cast<index_t>(k.teacher.ids(st.row, j));
                const bool in = id >= 0 && id < k.vocab;
                k.ids(st)[j] = id;
                k.log_p(st)[j] = in ? double(element<Z>::load(k.student.z(st.row, id))) : 0;
                k.log_q(st)[j] = double(element<L>::load(k.teacher.log_q(st.row, j)));
            }
            // each thread owns every threads-th word of the filter
            for (int w = tid; w < id_filter::words; w += threads) st.filter.bits[w] = 0;
            for (index_t j = 0; j < k.k(); ++j) {
                const auto id = static_cast<index_t>(k.teacher.ids(st.row, j));
                const unsigned at = id_filter::slot(id);
                if (static_cast<int>(at >> 5) % threads == tid)
                    st.filter.bits[at >> 5] |= std::uint32_t{1} << (at & 31);
            }
        }
    };
    struct in_support {
        const id_filter& filter;
        const index_t* ids;
        index_t k;
        OPD_HD OPD_INLINE bool operator()(index_t id) const {
            if (filter.may_hold(id))
                for (index_t j = 0; j < k; ++j)
                    if (ids[j] == id) return true;
            return false;
        }
    };
    /// The student's tail, summed over v not in S relative to its own top: log1p(-Z_p) would be noise on peaked rows.
    struct sweep {
        OPD_HD static row_sweep part(const support_kernel& k, const sparse_state& st, int tid, int threads) {
            if (st.report.bad) return row_sweep{};
            return sweep_thread<F, false, raw_sums_needed{}>(k.student.z.row(st.row), static_cast<const Z*>(nullptr),
                                                             k.vocab, k.inv_s, 1, 1, tid, threads,
                                                             in_support{st.filter, k.ids(st), k.k()});
        }
        OPD_HD static row_sweep merge(const row_sweep& a, const row_sweep& b) { return row_sweep::merge(a, b); }
        OPD_HD static void finish(const support_kernel& k, sparse_state& st, const row_sweep& all) {
            st.sums = all.sums;
            st.sums.inv_s = k.inv_s;
            st.report.bad |= all.found.bad;
        }
    };

    struct decide {
        OPD_HD static void run(const support_kernel& k, sparse_state& st, int tid, int) {
            if (tid != 0 || st.report.bad) return;
            st.report.bad = true; // until the end
            double *log_p = k.log_p(st), *log_q = k.log_q(st);
            index_t* ids = k.ids(st);
            int n = 0; // used slots
            for (index_t j = 0; j < k.k(); ++j) {
                if (ids[j] == -1) continue;
                if (is_nan(log_q[j]) || log_q[j] > 1e-3) return;
                ids[n] = ids[j], log_p[n] = log_p[j], log_q[n] = log_q[j];
                ++n;
            }
            if (n == 0) return;
            const auto& e = k.frame.env;
            const double* given = e.given_lse.empty() ? nullptr : &e.given_lse[st.row];
            const L* stated = k.teacher.log_tail.empty() ? nullptr : &k.teacher.log_tail[st.row];
            const support_answer all =
                answer_support(k.estimator, st.sums, log_p, log_q, k.h(st), n, k.vocab - n, k.inv_s, given, stated,
                               facts_of(e, st.row), st.partial.diagnostics);
            st.report.lse = all.student.lse;
            if (!all.good) return;
            const bool none = is_neg_inf(all.student.log_tail);
            st.report.bad = false;
            st.report.loss = all.row.loss, st.report.infinite = all.row.infinite;
            if (clamps(k, st.report)) return;
            st.entries = n;
            st.share = none ? 0 : all.h_rest / (1 + st.sums.S);
            if (none) st.sums = all.student.sums; // an anchor with mass
            st.live = true;
        }
    };
};

// --- renormalised support -----------------------------------------------------------------------------------------------

template <class Student, class Id, class L, class Estimator, space S>
struct renormalised_kernel {
    using Z = typename Student::logit_type;
    using G = typename Student::gradient_type;
    using value = typename thread_number<Z, L, G>::value_type;
    using Program = decltype(Estimator::on_support);
    using dense = dense_kernel<value, value, value, Program, S>;
    using state_type = dense_state;

    row_frame<S> frame;
    Student student;
    teacher::support<Id, L, S> teacher;
    index_t vocab;
    dense inner; // over the block's gathered entries

    renormalised_kernel(const row_job<Student, teacher::support<Id, L, S>, Estimator, S>& job,
                        const row_frame<S>& frame_)
        : frame(frame_), student(job.student), teacher(job.teacher), vocab(job.vocab), inner(gathered(job), frame_) {
        inner.frame.env.beta = 0;
    }

    OPD_HD index_t k() const { return teacher.ids.cols; }
    OPD_HD index_t* ids(const dense_state& st) const { return reinterpret_cast<index_t*>(frame.scratch_at(st.row)); }
    OPD_HD value* array(const dense_state& st, int i) const {
        return reinterpret_cast<value*>(ids(st) + k()) + i * k();
    }
    static constexpr int arrays = 3; // of values: z, log q, gradient

    template <class Team>
    OPD_HD void run(index_t group, Team& team) const {
        run_rows(*this, group, team);
    }
    template <class Team>
    OPD_HD void row(Team& team) const {
        if (team.state().kept && !team.state().report.bad) {
            team.template each<gather>(*this);
            team.template fold<check_ids<renormalised_kernel>>(*this);
            team.template fold<check_log_q>(*this);
            if (!team.state().report.bad) {
                dense on_block = inner;
                on_block.student.z.data = array(team.state(), 0);
                on_block.teacher.y.data = array(team.state(), 1);
                if (!student.dz.empty()) on_block.student.dz.data = array(team.state(), 2);
                on_block.row(team);
            }
        }
        team.template each<clear>(*this);
        team.template each<scatter>(*this);
    }

    struct gather {
        OPD_HD static void run(const renormalised_kernel& k, const dense_state& st, int tid, int threads) {
            for (index_t j = tid; j < k.k(); j += threads) {
                const auto id = static_cast<index_t>(k.teacher.ids(st.row, j));
                const bool in = id >= 0 && id < k.vocab;
                k.ids(st)[j] = id;
                // an unused slot is a token that neither side gives mass
                k.array(st, 0)[j] =
                    in ? static_cast<value>(element<Z>::load(k.student.z(st.row, id))) : neg_inf<value>();
                k.array(st, 1)[j] =
                    in ? static_cast<value>(element<L>::load(k.teacher.log_q(st.row, j))) : neg_inf<value>();
            }
        }
    };
    /// Log-probs above 0 are none.
    struct check_log_q {
        OPD_HD static int part(const renormalised_kernel& k, const dense_state& st, int tid, int threads) {
            int bad = 0;
            for (index_t j = tid; j < k.k(); j += threads) bad |= k.array(st, 1)[j] > value(1e-3);
            return bad;
        }
        OPD_HD static int merge(int a, int b) { return a | b; }
        OPD_HD static void finish(const renormalised_kernel&, dense_state& st, int bad) { st.report.bad |= bad != 0; }
    };
    struct clear {
        OPD_HD static void run(const renormalised_kernel& k, const dense_state& st, int tid, int threads) {
            clear_columns(k.student, st.row, 0, k.frame.env.beta, tid, threads);
        }
    };
    struct scatter {
        OPD_HD static void run(const renormalised_kernel& k, dense_state& st, int tid, int threads) {
            if (!st.kept || st.report.bad) return;
            if (tid == 0) ++st.partial.diagnostics.support_rows;
            if (k.student.dz.empty()) return;
            for (index_t j = tid; j < k.k(); j += threads) {
                if (k.ids(st)[j] == -1) continue;
                G& to = k.student.dz(st.row, Student::sparse_gradient ? j : k.ids(st)[j]);
                const value old = k.frame.env.beta == 0 ? value(0) : static_cast<value>(element<G>::load(to));
                to = element<G>::store(static_cast<arithmetic_t<G>>(old + k.array(st, 2)[j]));
            }
        }
    };

private:
    /// A dense job over k entries; every row lies in the block's scratch, hence stride 0.
    static row_job<student::logits<value, value, S>, teacher::dense<value, S>, Program, S>
    gathered(const row_job<Student, teacher::support<Id, L, S>, Estimator, S>& job) {
        const index_t n = job.rows, k = job.teacher.ids.cols;
        row_job<student::logits<value, value, S>, teacher::dense<value, S>, Program, S> inner_job{
            {matrix_view<const value, S>(nullptr, n, k, 0), matrix_view<value, S>(nullptr, n, k, 0),
             job.student.temperature},
            {matrix_view<const value, S>(nullptr, n, k, 0), 1},
            job.estimator.on_support,
            job.env,
            n,
            k};
        return inner_job;
    }
};

// --- log p of tokens ----------------------------------------------------------------------------------------------------

template <class Z, class Id, class L, space S>
struct logp_kernel {
    using F = thread_number<Z>;
    using state_type = sparse_state;
    row_frame<S> frame;
    token_logp_job<Z, Id, L, S> job;

    template <class Team>
    OPD_HD void run(index_t group, Team& team) const {
        run_rows(*this, group, team);
    }
    template <class Team>
    OPD_HD void row(Team& team) const {
        if (!team.state().kept) return;
        team.template fold<sweep>(*this);
        team.template fold<store>(*this);
    }
    struct sweep {
        OPD_HD static row_sweep part(const logp_kernel& k, const sparse_state& st, int tid, int threads) {
            return sweep_thread<F, false, raw_sums_needed{}>(k.job.z.row(st.row), static_cast<const Z*>(nullptr),
                                                             k.job.z.cols, 1 / double(k.job.temperature), 1, 1, tid,
                                                             threads);
        }
        OPD_HD static row_sweep merge(const row_sweep& a, const row_sweep& b) { return row_sweep::merge(a, b); }
        OPD_HD static void finish(const logp_kernel&, sparse_state& st, const row_sweep& all) {
            st.sums = all.sums;
            st.report.bad = all.found.bad || all.sums.s < 0;
            if (!st.report.bad) st.report.lse = st.sums.lse();
        }
    };
    /// Writes its share and says whether an id was out of range.
    struct store {
        OPD_HD static int part(const logp_kernel& k, const sparse_state& st, int tid, int threads) {
            int bad = 0;
            for (index_t j = tid; j < k.job.ids.cols; j += threads) {
                const auto id = static_cast<index_t>(k.job.ids(st.row, j));
                const bool in = id >= 0 && id < k.job.z.cols;
                bad |= !in;
                const double lp = in && !st.report.bad ? log_p_of(k.job.z.row(st.row), id, st.sums.inv_s, st.report.lse)
                                                       : neg_inf<double>();
                k.job.out(st.row, j) = element<L>::store(static_cast<arithmetic_t<L>>(lp));
            }
            return bad;
        }
        OPD_HD static int merge(int a, int b) { return a | b; }
        OPD_HD static void finish(const logp_kernel&, sparse_state& st, int bad) { st.report.bad |= bad != 0; }
    };
};

// --- which kernel does a job, and the scratch that a block of it needs ------------------------------------------------------

template <class Z, class G, class Teacher, class Estimator, space S>
    requires(sampled_estimator<Estimator>&& Estimator::takes == Teacher::kind)
auto kernel_of(const row_job<student::logits<Z, G, S>, Teacher, Estimator, S>& job, const row_frame<S>& frame) {
    return sampled_kernel<Z, G, Teacher, Estimator, S>(job, frame);
}
template <class Z, class G, class Teacher, class Estimator, space S>
    requires(sampled_estimator<Estimator>&& Estimator::takes == Teacher::kind)
std::size_t scratch_of(const row_job<student::logits<Z, G, S>, Teacher, Estimator, S>& job) {
    return (sizeof(sampled_entry) + sizeof(double)) * std::size_t(job.teacher.ids.cols);
}
template <class Z, class G, class Id, class L, class Estimator, space S>
    requires support_estimator<Estimator>
auto kernel_of(const row_job<student::logits<Z, G, S>, teacher::support<Id, L, S>, Estimator, S>& job,
               const row_frame<S>& frame) {
    return support_kernel<Z, G, Id, L, Estimator, S>(job, frame);
}
template <class Z, class G, class Id, class L, class Estimator, space S>
    requires support_estimator<Estimator> std::size_t
    scratch_of(const row_job<student::logits<Z, G, S>, teacher::support<Id, L, S>, Estimator, S>& job) {
        return sizeof(double) * support_kernel<Z, G, Id, L, Estimator, S>::arrays * std::size_t(job.teacher.ids.cols);
    }
template <class Student, class Id, class L, class Estimator, space S>
    requires renormalised_estimator<Estimator>
auto kernel_of(const row_job<Student, teacher::support<Id, L, S>, Estimator, S>& job, const row_frame<S>& frame) {
    return renormalised_kernel<Student, Id, L, Estimator, S>(job, frame);
}
template <class Student, class Id, class L, class Estimator, space S>
    requires renormalised_estimator<Estimator> std::size_t
    scratch_of(const row_job<Student, teacher::support<Id, L, S>, Estimator, S>& job) {
        using kernel = renormalised_kernel<Student, Id, L, Estimator, S>;
        return (sizeof(index_t) + sizeof(typename kernel::value) * kernel::arrays) * std::size_t(job.teacher.ids.cols);
    }

} // namespace OPD_ISA
} // namespace opd::detail
