// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Calls whose rows read every logit and no sparse teacher: dense divergences, and log p of given ids.
#pragma once

#include <cstddef>
#include <span>

#include "opd/backends/cpu_batch.hpp"
#include "opd/detail/dense_row.hpp"
#include "opd/detail/sparse_row.hpp"
#include "opd/evaluate.hpp"

namespace opd::detail {
inline namespace OPD_ISA {

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
            if (gradient) zero_columns(s, r, from, job.env.beta);
        };
        const bool parks = !row_type::single_sweep && gradient;
        return run_batch(
            team, memory, plan(), job.env,
            [&](index_t r, double factor, std::byte* scratch, diagnostics&) {
                const double* given = job.env.given_lse.empty() ? nullptr : &job.env.given_lse[r];
                const row_outcome o =
                    kernel.run(s.z.row(r), job.teacher.y.row(r), gradient ? s.dz.row(r) : nullptr, factor,
                               parks ? reinterpret_cast<typename row_type::value*>(scratch) : nullptr, given);
                rest(r, job.vocab);
                return o;
            },
            [&](index_t r) { rest(r, 0); });
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
                o.lse = row.lse;
                o.bad = row.sw.found.bad;
                const bool readable = !o.bad; // a bad id says nothing of its neighbours
                for (index_t j = 0; j < job.ids.cols; ++j) {
                    const auto id = static_cast<index_t>(job.ids(r, j));
                    const bool good = readable && id >= 0 && id < job.z.cols;
                    o.bad |= !good;
                    job.out(r, j) =
                        element<L>::store(static_cast<arithmetic_t<L>>(good ? row.log_p(z, id) : neg_inf<double>()));
                }
                return o;
            },
            [](index_t) {});
    }
};

} // namespace OPD_ISA
} // namespace opd::detail
