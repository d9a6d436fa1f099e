// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Calls whose teacher knows few ids a row: renormalised supports, tail buckets, samples. A renormalised support is the dense
// row program over k gathered logits; the others are a normaliser, a handful of scalars and one pullback.
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
                    z[j] = static_cast<value>(element<Z>::load(row[static_cast<index_t>(ids[j])]));
                    y[j] = static_cast<value>(element<L>::load(log_q[j]));
                }
                o = kernel.run(z, y, gradient ? g : nullptr, factor, parked, nullptr);
                scatter(r, gradient && !o.bad ? g : nullptr);
                if (!o.bad) ++d.support_rows;
                return o;
            },
            [&](index_t r) { scatter(r, nullptr); });
    }
};

/// What tail buckets and samples share: student row, entries with c, pullback over the vocabulary.
template <class Z, class G>
struct sparse_frame {
    const student::logits<Z, G>& student;
    const env& e;
    index_t vocab;

    void zero(index_t r) const {
        if (!student.dz.empty()) zero_columns(student, r, 0, e.beta);
    }
    void finish(index_t r, const student_row<Z>& row, sparse_c* c, int m, double factor, double* values) const {
        if (student.dz.empty()) return;
        const int k = merge_repeats(c, m);
        double sum = 0;
        for (int j = 0; j < k; ++j) sum += c[j].c;
        pull_back(student.z.row(r), student.dz.row(r), vocab, row, c, k, sum, factor / double(student.temperature),
                  e.beta, values);
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
struct bucket_batch {
    using job_type = row_job<student::logits<Z, G>, teacher::support<Id, L>, Estimator, space::host>;
    const job_type& job;

    index_t k() const { return job.teacher.ids.cols; }
    std::size_t slot() const { return aligned64(sizeof(double) * std::size_t(k() + 1)); }
    batch_plan plan() const { return {job.rows, 8192 + 5 * slot() + aligned64(sizeof(sparse_c) * std::size_t(k()))}; }

    result run(thread_team& team, std::span<std::byte> memory) const {
        const sparse_frame<Z, G> frame{job.student, job.env, job.vocab};
        const auto& t = job.teacher;
        return run_batch(
            team, memory, plan(), job.env,
            [&](index_t r, double factor, std::byte* scratch, diagnostics& d) {
                auto* seen = reinterpret_cast<std::uint64_t*>(scratch);
                const auto array = [&](int i) {
                    return reinterpret_cast<double*>(scratch + 8192 + std::size_t(i) * slot());
                };
                double *log_p = array(0), *log_q = array(1), *c = array(2), *values = array(3);
                auto* sorted = reinterpret_cast<index_t*>(array(4));
                auto* entries = reinterpret_cast<sparse_c*>(scratch + 8192 + 5 * slot());
                const Id* ids = t.ids.row(r);
                const int n = static_cast<int>(k());
                row_outcome o;
                const auto reject = [&] {
                    o.bad = true;
                    frame.zero(r);
                    return o;
                };
                if (!distinct_in_range(ids, k(), job.vocab, seen)) return reject();
                for (int j = 0; j < n; ++j) sorted[j] = static_cast<index_t>(ids[j]);
                std::sort(sorted, sorted + n);
                const Z* z = job.student.z.row(r);
                // the student's tail is summed over v not in S: log1p(-Z_p) would be noise on peaked rows
                auto row = student_row<Z>::make(z, job.vocab, 1 / double(job.student.temperature), nullptr,
                                                {sorted, sorted + n});
                if (row.sw.found.bad) return reject();
                raw_sums& s = row.sw.sums;
                double tail = s.S + !std::binary_search(sorted, sorted + n, s.s), head = 0;
                for (int j = 0; j < n; ++j) {
                    const double zj = double(element<Z>::load(z[sorted[j]]));
                    head += is_neg_inf(zj) || sorted[j] == s.s ? 0 : std::exp((zj - s.z_s) * s.inv_s);
                }
                s.S += head; // now over all v but s*
                if (!job.env.given_lse.empty()) {
                    row.lse = job.env.given_lse[r];
                    if (!is_finite(row.lse)) return reject();
                    s.S = std::expm1(row.lse - s.z_s * s.inv_s);
                } else {
                    row.lse = s.lse();
                }
                o.lse = row.lse;
                double z_q = 0;
                for (int j = 0; j < n; ++j) {
                    log_p[j] = row.log_p(z, static_cast<index_t>(ids[j]));
                    log_q[j] = double(element<L>::load(t.log_q.row(r)[j]));
                    if (is_nan(log_q[j]) || log_q[j] > 1e-3) return reject();
                    z_q += is_neg_inf(log_q[j]) ? 0 : std::exp(log_q[j]);
                }
                double log_q_rest;
                if (!t.log_tail.empty()) {
                    log_q_rest = double(element<L>::load(t.log_tail[r]));
                    if (is_nan(log_q_rest) || log_q_rest > 1e-3) return reject();
                } else {
                    const double eps =
                        std::is_same_v<arithmetic_t<L>, double> ? 0x1p-52 : (sizeof(L) == 4 ? 0x1p-23 : 0x1p-7);
                    const double least = double(n) * eps;
                    d.tail_floored += !(1 - z_q >= least);
                    log_q_rest = std::log(1 - z_q >= least ? 1 - z_q : least);
                }
                const double log_p_rest = tail > 0 ? std::log(tail) - std::log1p(s.S) : neg_inf<double>();
                const auto b = bucket_row(log_p, log_q, c, n, log_p_rest, log_q_rest, job.estimator.on_buckets,
                                          job.env.on_infinite);
                o.loss = b.loss, o.infinite = b.infinite;
                ++d.support_rows;
                const double z_p = (1 + s.S - tail) / (1 + s.S);
                d.student_mass_sum += z_p, d.teacher_mass_sum += z_q;
                d.student_mass_min = std::min(d.student_mass_min, z_p);
                d.teacher_mass_min = std::min(d.teacher_mass_min, z_q);
                if (frame.clamp(o, r)) return o;
                for (int j = 0; j < n; ++j) entries[j] = {static_cast<index_t>(ids[j]), j, c[j]};
                frame.finish(r, row, entries, n, factor, values);
                return o;
            },
            [&](index_t r) { frame.zero(r); });
    }
};

/// Sampled reverse KL from i.i.d. samples or weighted entries.
template <class Z, class G, class Teacher, class Estimator>
struct sampled_batch {
    using job_type = row_job<student::logits<Z, G>, Teacher, Estimator, space::host>;
    using L = typename Teacher::log_type;
    static constexpr bool weighted = Teacher::kind == cache_kind::weighted;
    const job_type& job;

    std::size_t m() const { return std::size_t(job.teacher.ids.cols); }
    batch_plan plan() const {
        return {job.rows, aligned64(sizeof(sampled_entry) * m()) + aligned64(sizeof(sparse_c) * m()) +
                              aligned64(sizeof(double) * m())};
    }

    result run(thread_team& team, std::span<std::byte> memory) const {
        const sparse_frame<Z, G> frame{job.student, job.env, job.vocab};
        const auto& t = job.teacher;
        const auto& est = job.estimator;
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
                    const auto id = static_cast<index_t>(t.ids(r, j));
                    if (weighted && id < 0) continue; // unused slot
                    if (id < 0 || id >= job.vocab) return reject();
                    const auto get = [&](const auto& view, double otherwise) {
                        return view.empty() ? otherwise : double(element<L>::load(view(r, j)));
                    };
                    sampled_entry& x = e[n++];
                    x.id = id;
                    x.log_p = rounded<L>(row.log_p(z, id));
                    x.log_mu = get(t.log_mu, 0);
                    x.log_q = get(t.log_q, 0);
                    x.log_prox = get(t.log_prox, x.log_mu);
                    x.log_ref = get(t.log_ref, x.log_mu);
                    x.exact = false;
                    x.c = 0;
                    if constexpr (weighted) {
                        x.weight = double(t.weight(r, j));
                        x.exact = !t.exact.empty() && t.exact(r, j) != 0;
                    } else {
                        x.weight = 1 / double(t.ids.cols);
                    }
                }
                if (n == 0) return reject();
                const double age = job.env.versions.empty() ? 0 : double(job.env.version) - job.env.versions[r];
                const auto s = sampled_row(e, n, est.surrogate, est.baseline, est.advantage, est.advantage_clip,
                                           job.env.on_infinite, age, d);
                if (s.bad) return reject();
                o.loss = s.loss, o.infinite = s.infinite;
                if (frame.clamp(o, r)) return o;
                for (int j = 0; j < n; ++j) c[j] = {e[j].id, j, e[j].c};
                frame.finish(r, row, c, n, factor, values);
                return o;
            },
            [&](index_t r) { frame.zero(r); });
    }

private:
    template <class T> // log p as the cache would have stored it
    static double rounded(double x) {
        if (is_neg_inf(x)) return x;
        return double(element<T>::load(element<T>::store(static_cast<arithmetic_t<T>>(x))));
    }
};

} // namespace OPD_ISA
} // namespace opd::detail
