// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Rows of tokens drawn under a filter, with the ids that it kept:
//
//   gather K · normaliser over K · entries · the estimator · scatter over K      k reads, V writes
//
// p is softmax(z[K]/T), c - p Σc is written on K, all else is 0. Everything is in double; K is as long as the filter left it.
#pragma once

#include <cmath>
#include <cstddef>

#include "opd/config.hpp"
#include "opd/detail/rows.hpp"
#include "opd/detail/sampled_rows.hpp"
#include "opd/detail/sparse_math.hpp"
#include "opd/element.hpp"
#include "opd/entries.hpp"
#include "opd/teacher.hpp"

namespace opd::detail {
inline namespace OPD_ISA {

struct kept_set_state : row_state {
    double lse = 0;   ///< over K
    double sum_c = 0; ///< of the entries
};

template <class Frame, class Student, class Teacher, class Estimator>
struct kept_set_rows {
    using Z = typename Student::logit_type;
    using G = typename Student::gradient_type;
    using L = typename Teacher::log_type;
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
        if constexpr (Student::memory_space == space::host)
            for (index_t r = 0; r < rows; ++r) {
                const index_t k = teacher.kept_offsets[r + 1] - teacher.kept_offsets[r];
                widest = widest < k ? k : widest;
            }
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
    OPD_HD index_t first(const state_type& st) const { return teacher.kept_offsets[st.row]; }
    OPD_HD index_t count(const state_type& st) const { return teacher.kept_offsets[st.row + 1] - first(st); }
    OPD_HD index_t id(const state_type& st, index_t j) const {
        return static_cast<index_t>(teacher.kept_ids[first(st) + j]);
    }
    /// Where in K an id stands; -1: it does not.
    OPD_HD index_t place_of(const state_type& st, index_t wanted) const {
        index_t low = 0, high = count(st);
        while (low < high) {
            const index_t middle = low + (high - low) / 2;
            if (id(st, middle) < wanted)
                low = middle + 1;
            else
                high = middle;
        }
        return low < count(st) && id(st, low) == wanted ? low : -1;
    }

    template <class Team>
    OPD_HD void row(Team& team) const {
        team.template fold<gather>(*this);
        team.template fold<normalise>(*this);
        team.template each<take_tokens>(*this);
        team.template each<decide>(*this);
        team.template fold<measure>(*this);
        team.template each<clear>(*this);
        team.template each<scatter>(*this);
    }

    /// The set's logits; whether its ids ascend and are ids.
    struct gather : finds_bad {
        OPD_HD static bool due(const kept_set_rows&, const state_type& st) { return st.good(); }
        template <class At>
        OPD_HD static int part(const kept_set_rows& k, const state_type& st, At at) {
            const arrays a = k.at(st);
            const index_t n = k.count(st);
            if (n < 1 || n > k.widest) return 1;
            int bad = 0;
            for (index_t j = at.id; j < n; j += at.count) {
                const index_t id = k.id(st, j);
                const bool in = id >= 0 && id < k.vocab;
                bad |= !in || (j > 0 && k.id(st, j - 1) >= id);
                const double z = in ? double(element<Z>::load(k.student.logit({st.row}, id))) : 0;
                bad |= is_nan(z) || (is_inf(z) && !is_neg_inf(z));
                a.z[j] = z, a.c[j] = 0;
            }
            return bad;
        }
    };
    /// The largest logit, and Σ e^((z - largest)/T) with it.
    struct normalise {
        struct sums {
            double top = -1e300, mass = 0;
        };
        OPD_HD static bool due(const kept_set_rows&, const state_type& st) { return st.good(); }
        template <class At>
        OPD_HD static sums part(const kept_set_rows& k, const state_type& st, At at) {
            const arrays a = k.at(st);
            sums out;
            for (index_t j = at.id; j < k.count(st); j += at.count)
                if (!is_neg_inf(a.z[j]) && a.z[j] > out.top) out.top = a.z[j];
            for (index_t j = at.id; j < k.count(st); j += at.count)
                if (!is_neg_inf(a.z[j])) out.mass += ::exp((a.z[j] - out.top) * k.inv_s);
            out.top *= k.inv_s;
            return out;
        }
        OPD_HD static sums merge(const sums& a, const sums& b) {
            if (!(a.mass > 0)) return b;
            if (!(b.mass > 0)) return a;
            const double top = a.top > b.top ? a.top : b.top;
            return {top, a.mass * ::exp(a.top - top) + b.mass * ::exp(b.top - top)};
        }
        OPD_HD static void finish(const kept_set_rows&, state_type& st, const sums& all) {
            st.report.bad |= !(all.mass > 0);
            if (!st.report.bad) st.report.lse = st.lse = all.top + ::log(all.mass);
        }
    };
    /// The cache's slots as entries; id -1: unused, below: out of range or outside the set.
    struct take_tokens {
        OPD_HD static bool due(const kept_set_rows&, const state_type& st) { return st.good(); }
        template <class At>
        OPD_HD static void run(const kept_set_rows& k, const state_type& st, At at) {
            const arrays a = k.at(st);
            for (index_t j = at.id; j < k.slots(); j += at.count) {
                sampled_entry x =
                    gathered(k.student, {st.row}, k.teacher, k.frame.env.frozen, j, k.vocab, k.inv_s, st.lse);
                if (x.id >= 0 && k.place_of(st, x.id) < 0) x.id = outside;
                if (x.id >= 0 && !k.teacher.log_kept_q.empty())
                    x.log_q -= double(element<L>::load(k.teacher.log_kept_q[st.row]));
                a.entries[j] = x;
            }
        }
        static constexpr index_t outside = -3;
    };
    struct decide {
        OPD_HD static bool due(const kept_set_rows&, const state_type& st) { return st.good(); }
        template <class At>
        OPD_HD static void run(const kept_set_rows& k, state_type& st, At at) {
            if (at.id != 0) return;
            const arrays a = k.at(st);
            for (index_t j = 0; j < k.slots(); ++j)
                st.partial.diagnostics.outside_kept += a.entries[j].id == take_tokens::outside;
            const index_t n = decide_drawn(k, st, a.entries);
            st.sum_c = 0;
            for (index_t j = 0; j < n; ++j) {
                a.c[k.place_of(st, a.entries[j].id)] += a.entries[j].c;
                st.sum_c += a.entries[j].c;
            }
        }
    };
    /// The student's entropy on the set, where env.measure asks.
    struct measure {
        OPD_HD static bool due(const kept_set_rows& k, const state_type& st) {
            return k.frame.env.measure.entropy && st.good();
        }
        template <class At>
        OPD_HD static double part(const kept_set_rows& k, const state_type& st, At at) {
            const arrays a = k.at(st);
            double sum = 0;
            for (index_t j = at.id; j < k.count(st); j += at.count) {
                const double log_p = is_neg_inf(a.z[j]) ? 0 : a.z[j] * k.inv_s - st.lse;
                sum -= is_neg_inf(a.z[j]) ? 0 : ::exp(log_p) * log_p;
            }
            return sum;
        }
        OPD_HD static double merge(double a, double b) { return a + b; }
        OPD_HD static void finish(const kept_set_rows&, state_type& st, double all) {
            ++st.partial.diagnostics.student_entropy_rows;
            st.partial.diagnostics.student_entropy_sum += all;
        }
    };
    struct clear {
        template <class At>
        OPD_HD static void run(const kept_set_rows& k, const state_type& st, At at) {
            clear_columns(k.student, st.row, 0, k.frame.env.beta, at);
        }
    };
    struct scatter {
        OPD_HD static bool due(const kept_set_rows& k, const state_type& st) {
            return st.live && k.student.has_gradient();
        }
        template <class At>
        OPD_HD static void run(const kept_set_rows& k, const state_type& st, At at) {
            const arrays a = k.at(st);
            const double g = st.factor * k.inv_s;
            for (index_t j = at.id; j < k.count(st); j += at.count) {
                const double p = is_neg_inf(a.z[j]) ? 0 : ::exp(a.z[j] * k.inv_s - st.lse);
                G& to = k.student.gradient_at({st.row}, k.id(st, j));
                const double old =
                    k.frame.env.beta == 0 ? 0 : double(element<G>::load(to)); // cleared: beta times what was there
                to = element<G>::store(static_cast<arithmetic_t<G>>(old + g * (a.c[j] - p * st.sum_c)));
            }
        }
    };
};

} // namespace OPD_ISA
} // namespace opd::detail
