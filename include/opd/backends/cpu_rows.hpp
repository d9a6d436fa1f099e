// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// The frame of every CPU call: rows in blocks over the thread team, one factor a row, one partial result a block, merged
// in block order. A block depends on the number of rows alone, so bits do not depend on threads.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <span>

#include "opd/backends/workspace.hpp"
#include "opd/batch.hpp"
#include "opd/detail/dense_row.hpp"
#include "opd/detail/sparse_math.hpp"
#include "opd/detail/sparse_row.hpp"
#include "opd/diagnostics.hpp"
#include "opd/evaluate.hpp"
#include "opd/reduction.hpp"
#include "opd/threads.hpp"

namespace opd::detail {
inline namespace OPD_ISA {

struct block_partial {
    double loss = 0;
    opd::diagnostics diagnostics = {};
};

constexpr std::size_t aligned64(std::size_t bytes) { return (bytes + 63) / 64 * 64; }

/// How a batch of rows is cut and what it needs.
struct batch_plan {
    index_t rows, block, blocks;
    std::size_t factors, partials, scratch; ///< bytes; scratch is per worker

    batch_plan(index_t rows_, std::size_t scratch_)
        : rows(rows_), block(std::max<index_t>(1, (rows_ + 255) / 256)), blocks((rows_ + block - 1) / block),
          factors(aligned64(sizeof(double) * std::size_t(rows_))),
          partials(aligned64(sizeof(block_partial) * std::size_t(blocks))), scratch(aligned64(scratch_)) {}
    std::size_t bytes(int workers) const { return factors + partials + scratch * std::size_t(workers); }
};

/// Row(r, factor, scratch, diagnostics&) -> row_outcome; Masked(r) writes a masked row's gradient.
template <class Row, class Masked>
result run_batch(thread_team& team, std::span<std::byte> memory, const batch_plan& plan, const env& e, const Row& row,
                 const Masked& masked) {
    auto* factor = reinterpret_cast<double*>(memory.data());
    auto* partial = reinterpret_cast<block_partial*>(memory.data() + plan.factors);
    std::byte* scratch = memory.data() + plan.factors + plan.partials;
    row_factors(e, plan.rows, factor);

    team.run(plan.blocks, [&](index_t b, int worker) {
        block_partial out;
        diagnostics& d = out.diagnostics;
        for (index_t r = b * plan.block, end = std::min(r + plan.block, plan.rows); r < end; ++r) {
            ++d.rows;
            if (!e.mask.kept(r)) {
                masked(r);
                if (!e.losses.empty()) e.losses[r] = e.beta_loss == 0 ? 0 : e.beta_loss * e.losses[r];
                continue;
            }
            ++d.kept;
            const row_outcome o = row(r, factor[r], scratch + std::size_t(worker) * plan.scratch, d);
            const double loss = o.clamped ? std::copysign(e.loss_clamp, o.loss) : o.loss;
            if (o.bad) {
                ++d.bad_rows;
                d.first_bad_row = d.first_bad_row < 0 ? r : d.first_bad_row;
            } else {
                count_staleness(d, e, r);
                d.kept_loss += o.loss;
            }
            if (o.infinite) {
                ++d.infinite_rows;
                d.first_infinite_row = d.first_infinite_row < 0 ? r : d.first_infinite_row;
            }
            d.careful_rows += o.careful;
            d.clamped_rows += o.clamped;
            out.loss += factor[r] * loss;
            if (!e.losses.empty()) {
                const float w = e.weights.empty() ? 1 : e.weights[r];
                e.losses[r] = (e.beta_loss == 0 ? 0 : e.beta_loss * e.losses[r]) + float(w * loss);
            }
            if (!e.lse.empty()) e.lse[r] = float(o.lse);
        }
        partial[b] = out;
    });
    result all;
    for (index_t b = 0; b < plan.blocks; ++b) {
        all.loss += partial[b].loss;
        all.diagnostics.merge(partial[b].diagnostics);
    }
    return all;
}

/// dz = beta·dz over columns [begin, end), then the padding by policy.
template <class G>
void zero_columns(G* dz, index_t begin, index_t end, index_t stride, float beta, padding pad) {
    using value = arithmetic_t<G>;
    for (index_t i = begin; i < end; ++i)
        dz[i] = beta == 0 ? element<G>::store(0) : element<G>::store(value(beta) * element<G>::load(dz[i]));
    if (pad == padding::zero) std::fill(dz + end, dz + stride, element<G>::store(0));
}

/// A dense divergence over all rows.
template <class Z, class G, class Y, class Program>
struct dense_batch {
    using job_type = row_job<student::logits<Z, G>, teacher::dense<Y>, Program, space::host>;
    using row_type = dense_row<Program, Z, Y, G>;
    const job_type& job;

    batch_plan plan() const {
        const bool parks = !row_type::single_sweep && !job.student.dz.empty();
        return {job.rows, parks ? sizeof(typename row_type::value) * std::size_t((job.vocab + leaf_size)) : 0};
    }
    result run(thread_team& team, std::span<std::byte> memory) const {
        const auto& s = job.student;
        const row_type kernel{
            job.estimator, job.vocab,           1 / double(s.temperature), 1 / double(job.teacher.temperature),
            job.env.beta,  job.env.on_infinite, job.env.loss_clamp};
        const bool gradient = !s.dz.empty();
        const auto rest = [&](index_t r, index_t from) {
            if (gradient) zero_columns(s.dz.row(r), from, s.dz.cols, s.dz.stride, job.env.beta, s.pad);
        };
        const bool parks = !row_type::single_sweep && gradient;
        return run_batch(
            team, memory, plan(), job.env,
            [&](index_t r, double factor, std::byte* scratch, diagnostics&) {
                const float* given = job.env.given_lse.empty() ? nullptr : &job.env.given_lse[r];
                const row_outcome o =
                    kernel.run(s.z.row(r), job.teacher.y.row(r), gradient ? s.dz.row(r) : nullptr, factor,
                               parks ? reinterpret_cast<typename row_type::value*>(scratch) : nullptr, given);
                rest(r, job.vocab);
                return o;
            },
            [&](index_t r) { rest(r, 0); });
    }
};

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
            zero_columns(dz, 0, s.dz.cols, s.dz.stride, beta, s.pad);
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
        if (!student.dz.empty())
            zero_columns(student.dz.row(r), 0, student.dz.cols, student.dz.stride, e.beta, student.pad);
    }
    void finish(index_t r, const student_row<Z>& row, sparse_c* c, int m, double factor, double* values) const {
        if (student.dz.empty()) return;
        const int k = merge_repeats(c, m);
        double sum = 0;
        for (int j = 0; j < k; ++j) sum += c[j].c;
        pull_back(student.z.row(r), student.dz.row(r), vocab, row, c, k, sum, factor / double(student.temperature),
                  e.beta, values);
        zero_columns(student.dz.row(r), vocab, student.dz.cols, student.dz.stride, e.beta, student.pad);
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
                    const double lse = double(job.env.given_lse[r]);
                    if (!is_finite(lse)) return reject();
                    s.S = std::expm1(lse - s.z_s * s.inv_s);
                }
                o.lse = row.lse();
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
                const float* given = job.env.given_lse.empty() ? nullptr : &job.env.given_lse[r];
                const auto row = student_row<Z>::make(z, job.vocab, 1 / double(job.student.temperature), given);
                if (row.sw.found.bad) return reject();
                o.lse = row.lse();
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

/// log p of given ids and the log-sum-exp, row by row.
template <class Z, class Id, class L>
struct logp_batch {
    const token_logp_job<Z, Id, L>& job;
    batch_plan plan() const { return {job.z.rows, 0}; }
    result run(thread_team& team, std::span<std::byte> memory) const {
        env e;
        e.mask = job.mask;
        e.lse = job.lse;
        return run_batch(
            team, memory, plan(), e,
            [&](index_t r, double, std::byte*, diagnostics&) {
                const Z* z = job.z.row(r);
                row_outcome o;
                const auto row = student_row<Z>::make(z, job.z.cols, 1 / double(job.temperature), nullptr);
                o.lse = row.lse();
                o.bad = row.sw.found.bad;
                for (index_t j = 0; j < job.ids.cols; ++j) {
                    const auto id = static_cast<index_t>(job.ids(r, j));
                    const bool good = !o.bad && id >= 0 && id < job.z.cols;
                    o.bad |= !good;
                    job.out(r, j) =
                        element<L>::store(static_cast<arithmetic_t<L>>(good ? row.log_p(z, id) : neg_inf<double>()));
                }
                return o;
            },
            [](index_t) {});
    }
};

/// Which batch runs a job.
template <class Z, class G, class Y, class Program>
auto batch_of(const row_job<student::logits<Z, G>, teacher::dense<Y>, Program, space::host>& job) {
    return dense_batch<Z, G, Y, Program>{job};
}
template <class Student, class Id, class L, class Estimator>
    requires requires(Estimator e) { e.on_support; }
auto batch_of(const row_job<Student, teacher::support<Id, L>, Estimator, space::host>& job) {
    return renormalised_batch<Student, Id, L, Estimator>{job};
}
template <class Z, class G, class Id, class L, class Estimator>
    requires requires(Estimator e) { e.on_buckets; }
auto batch_of(const row_job<student::logits<Z, G>, teacher::support<Id, L>, Estimator, space::host>& job) {
    return bucket_batch<Z, G, Id, L, Estimator>{job};
}
template <class Z, class G, class Teacher, class Estimator>
    requires(Teacher::kind == cache_kind::samples || Teacher::kind == cache_kind::weighted)
auto batch_of(const row_job<student::logits<Z, G>, Teacher, Estimator, space::host>& job) {
    return sampled_batch<Z, G, Teacher, Estimator>{job};
}
template <class Z, class Id, class L>
auto batch_of(const token_logp_job<Z, Id, L>& job) {
    return logp_batch<Z, Id, L>{job};
}

} // namespace OPD_ISA
} // namespace opd::detail
