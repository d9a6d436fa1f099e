// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Calls whose teacher knows few ids a row, by the estimator's concept (entries.hpp). Renormalised on the support: the dense row
// program over k gathered logits. The others: a normaliser over the vocabulary, the estimator's own row, one pullback.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include "opd/backends/cpu_batch.hpp"
#include "opd/detail/dense_row.hpp"
#include "opd/detail/sparse_math.hpp"
#include "opd/detail/sparse_row.hpp"
#include "opd/evaluate.hpp"

namespace opd::detail {
inline namespace OPD_ISA {

/// A divergence on a renormalised support: the dense row program over k gathered logits.
template <class Student, class Id, class L, class Estimator>
struct renormalised_batch {
    using job_type = row_job<Student, teacher::support<Id, L>, Estimator, space::host>;
    using Program = std::remove_const_t<decltype(Estimator::on_support)>;
    using Z = typename Student::logit_type;
    using G = typename Student::gradient_type;
    using value = typename pack_for<Z, L, G>::value_type;
    using row_type = dense_row<Program, value, value, value>;
    const job_type& job;

    index_t k() const { return job.teacher.ids.cols; }
    std::size_t row_bytes() const { return aligned64(sizeof(value) * std::size_t(k() + leaf_size)); }
    batch_plan plan() const { return {job.rows, 8192 + 4 * row_bytes()}; }

    result run(thread_team& team, std::span<std::byte> memory) const {
        const auto& s = job.student;
        const auto& t = job.teacher;
        const row_type kernel{job.estimator.on_support, k(), 1 / double(s.temperature), 1, 0, job.env.on_infinite,
                              job.env.loss_clamp};
        const bool gradient = !s.dz.empty();
        const float beta = job.env.beta;
        const auto scatter = [&](index_t r, const value* g) { // g null: the row's gradient is zero
            if (!gradient) return;
            G* dz = s.dz.row(r);
            const Id* ids = t.ids.row(r);
            zero_columns(s, r, 0, beta);
            if (g)
                for (index_t j = 0; j < k(); ++j) {
                    if (static_cast<index_t>(ids[j]) == -1) continue; // unused slot
                    G& to = dz[Student::sparse_gradient ? j : static_cast<index_t>(ids[j])];
                    const value old = beta == 0 ? value(0) : static_cast<value>(element<G>::load(to));
                    to = element<G>::store(static_cast<arithmetic_t<G>>(old + g[j]));
                }
        };
        return run_batch(
            team, memory, plan(), job.env,
            [&](index_t r, double factor, std::byte* scratch, diagnostics& d) {
                auto* seen = reinterpret_cast<std::uint64_t*>(scratch);
                auto* z = reinterpret_cast<value*>(scratch + 8192);
                auto* y = reinterpret_cast<value*>(scratch + 8192 + row_bytes());
                auto* g = reinterpret_cast<value*>(scratch + 8192 + 2 * row_bytes());
                auto* parked = reinterpret_cast<value*>(scratch + 8192 + 3 * row_bytes());
                const Id* ids = t.ids.row(r);
                row_outcome o;
                if (!distinct_in_range(ids, k(), job.vocab, seen)) {
                    o.bad = true;
                    scatter(r, nullptr);
                    return o;
                }
                const Z* row = s.z.row(r);
                const L* log_q = t.log_q.row(r);
                for (index_t j = 0; j < k(); ++j) {
                    const auto id = static_cast<index_t>(ids[j]);
                    if (id == -1) { // an unused slot is a token that neither side gives mass
                        z[j] = y[j] = neg_inf<value>();
                        continue;
                    }
                    z[j] = static_cast<value>(element<Z>::load(row[id]));
                    y[j] = static_cast<value>(element<L>::load(log_q[j]));
                    o.bad |= y[j] > value(1e-3);
                }
                if (o.bad) {
                    scatter(r, nullptr);
                    return o;
                }
                o = kernel.run(z, y, gradient ? g : nullptr, factor, parked, nullptr);
                scatter(r, gradient && !o.bad ? g : nullptr);
                if (!o.bad) ++d.support_rows;
                return o;
            },
            [&](index_t r) { scatter(r, nullptr); });
    }
};

/// What supports and samples share: student row, entries with c, pullback over the vocabulary.
template <class Z, class G>
struct sparse_frame {
    const student::logits<Z, G>& student;
    const env& e;
    index_t vocab;

    void zero(index_t r) const {
        if (!student.dz.empty()) zero_columns(student, r, 0, e.beta);
    }
    /// dz from the entries' c - p Σc, which replace their c, and `share` of e^((z - z*)/T) for every other id.
    void finish(index_t r, const raw_sums& anchor, double share, const sparse_c* h, int k, double factor,
                double* values) const {
        if (student.dz.empty()) return;
        const double g = factor / double(student.temperature);
        G* dz = student.dz.row(r);
        for (int j = 0; j < k; ++j) { // before dz overwrites z
            const double old = e.beta == 0 ? 0 : double(e.beta) * double(element<G>::load(dz[h[j].id]));
            values[j] = old + g * h[j].c;
        }
        pull_back(student.z.row(r), dz, vocab, anchor, g * share, h, k, e.beta, values);
        zero_columns(student, r, vocab, e.beta);
    }
    bool clamp(row_outcome& o, index_t r) const {
        if (!(e.loss_clamp > 0 && std::abs(o.loss) > e.loss_clamp)) return false;
        o.clamped = true;
        zero(r);
        return true;
    }
};

template <class Z, class G, class Id, class L, class Estimator>
struct support_batch {
    using job_type = row_job<student::logits<Z, G>, teacher::support<Id, L>, Estimator, space::host>;
    const job_type& job;

    index_t k() const { return job.teacher.ids.cols; }
    std::size_t slot() const { return aligned64(sizeof(double) * std::size_t(k() + 1)); }
    batch_plan plan() const { return {job.rows, 5 * slot() + aligned64(sizeof(sparse_c) * std::size_t(k()))}; }

    result run(thread_team& team, std::span<std::byte> memory) const {
        const sparse_frame<Z, G> frame{job.student, job.env, job.vocab};
        const auto& t = job.teacher;
        return run_batch(
            team, memory, plan(), job.env,
            [&](index_t r, double factor, std::byte* scratch, diagnostics& d) {
                const auto array = [&](int i) { return reinterpret_cast<double*>(scratch + std::size_t(i) * slot()); };
                double *log_p = array(0), *log_q = array(1), *h = array(2), *values = array(3);
                auto* sorted = reinterpret_cast<index_t*>(array(4));
                auto* entries = reinterpret_cast<sparse_c*>(scratch + 5 * slot());
                row_outcome o;
                const auto reject = [&] {
                    o.bad = true;
                    frame.zero(r);
                    return o;
                };
                const Z* z = job.student.z.row(r);
                int n = 0; // used slots
                for (index_t j = 0; j < k(); ++j) {
                    const auto id = static_cast<index_t>(t.ids(r, j));
                    if (id == -1) continue;
                    if (id < 0 || id >= job.vocab) return reject();
                    log_q[n] = double(element<L>::load(t.log_q(r, j)));
                    if (is_nan(log_q[n]) || log_q[n] > 1e-3) return reject();
                    log_p[n] = double(element<Z>::load(z[id]));
                    sorted[n] = entries[n].id = id;
                    ++n;
                }
                std::sort(sorted, sorted + n);
                if (n == 0 || std::adjacent_find(sorted, sorted + n) != sorted + n) return reject();
                // the student's tail is summed over v not in S: log1p(-Z_p) would be noise on peaked rows
                const double inv_t = 1 / double(job.student.temperature);
                const auto row = student_row<Z>::make(z, job.vocab, inv_t, nullptr, {sorted, sorted + n});
                if (row.sw.found.bad) return reject();
                const raw_sums& tail = row.sw.sums;
                const double* given = job.env.given_lse.empty() ? nullptr : &job.env.given_lse[r];
                const L* stated = t.log_tail.empty() ? nullptr : &t.log_tail[r];
                const support_answer all = answer_support(job.estimator, tail, log_p, log_q, h, n, job.vocab - n, inv_t,
                                                          given, stated, facts_of(job.env, r), d);
                o.lse = all.student.lse;
                if (!all.good) return reject();
                const bool none = is_neg_inf(all.student.log_tail);
                o.loss = all.row.loss, o.infinite = all.row.infinite;
                if (frame.clamp(o, r)) return o;
                for (int j = 0; j < n; ++j) entries[j].c = h[j];
                frame.finish(r, none ? all.student.sums : tail, none ? 0 : all.h_rest / (1 + tail.S), entries, n,
                             factor, values);
                return o;
            },
            [&](index_t r) { frame.zero(r); });
    }
};

/// A loss of drawn tokens.
template <class Z, class G, class Teacher, class Estimator>
struct sampled_batch {
    using job_type = row_job<student::logits<Z, G>, Teacher, Estimator, space::host>;
    const job_type& job;

    std::size_t m() const { return std::size_t(job.teacher.ids.cols); }
    batch_plan plan() const {
        return {job.rows, aligned64(sizeof(sampled_entry) * m()) + aligned64(sizeof(sparse_c) * m()) +
                              aligned64(sizeof(double) * m())};
    }

    result run(thread_team& team, std::span<std::byte> memory) const {
        const sparse_frame<Z, G> frame{job.student, job.env, job.vocab};
        const auto& t = job.teacher;
        return run_batch(
            team, memory, plan(), job.env,
            [&](index_t r, double factor, std::byte* scratch, diagnostics& d) {
                auto* e = reinterpret_cast<sampled_entry*>(scratch);
                auto* c = reinterpret_cast<sparse_c*>(scratch + aligned64(sizeof(sampled_entry) * m()));
                auto* values = reinterpret_cast<double*>(scratch + aligned64(sizeof(sampled_entry) * m()) +
                                                         aligned64(sizeof(sparse_c) * m()));
                const Z* z = job.student.z.row(r);
                row_outcome o;
                const auto reject = [&] {
                    o.bad = true;
                    frame.zero(r);
                    return o;
                };
                const double* given = job.env.given_lse.empty() ? nullptr : &job.env.given_lse[r];
                const auto row = student_row<Z>::make(z, job.vocab, 1 / double(job.student.temperature), given);
                if (row.sw.found.bad) return reject();
                o.lse = row.lse;
                int n = 0;
                for (index_t j = 0; j < t.ids.cols; ++j) {
                    e[n] = gathered(z, t, r, j, job.vocab, row.sw.sums.inv_s, row.lse);
                    if (e[n].id == -1) continue; // unused slot
                    if (e[n].id < 0) return reject();
                    ++n;
                }
                if (n == 0) return reject();
                const entry_row s = job.estimator.row(e, n, facts_of(job.env, r), d);
                if (s.bad) return reject();
                o.loss = s.loss, o.infinite = s.infinite;
                if (frame.clamp(o, r)) return o;
                for (int j = 0; j < n; ++j) c[j] = {e[j].id, j, e[j].c};
                const int k = merge_repeats(c, n);
                double sum = 0;
                for (int j = 0; j < k; ++j) sum += c[j].c;
                for (int j = 0; j < k; ++j) c[j].c -= row.p(z, c[j].id) * sum;
                frame.finish(r, row.sw.sums, -sum / (1 + row.sw.sums.S), c, k, factor, values);
                return o;
            },
            [&](index_t r) { frame.zero(r); });
    }
};

} // namespace OPD_ISA
} // namespace opd::detail
