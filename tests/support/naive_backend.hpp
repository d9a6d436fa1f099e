// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// A small backend: the oracle of the tests and the example of how to write one. Float64, one row after
// another, plain loops, no shortcut: log p = z/T - log Σ e^(z/T), then the row program over every entry, then the
// pullback
//
//   dL/dz[v] = (c[v] - p[v] Σ_u c[u]) / T
//
// A backend is a struct with `memory_space` and `for_rows(row_job) -> result`. evaluate has checked every shape before
// it calls; what remains is env: mask, weights, reduction, beta, policies, outputs. A program is run unanchored by
// telling it that d* = 0 and q*/p* = 1: then delta is log p - log q itself. In float64 nothing more is needed.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include <opd/evaluate.hpp>
#include <opd/lanes.hpp>

namespace opd::test {

struct naive_backend {
    static constexpr space memory_space = space::host;

    template <class Z, class G, class Y, class Divergence>
        requires(!detail::has_selector<Divergence>)
    result for_rows(const row_job<student::logits<Z, G>, teacher::dense<Y>, Divergence, space::host>& job) {
        const env& e = job.env;
        result out;
        out.diagnostics.rows = job.rows;
        for (index_t r = 0; r < job.rows; ++r) {
            const double weight = e.weights.empty() ? 1 : e.weights[r];
            std::vector<double> gradient(std::size_t(job.student.z.cols), 0.0); // (V)
            double loss = 0;
            if (e.mask.kept(r)) {
                ++out.diagnostics.kept;
                loss = row(job, r, gradient, out.diagnostics);
                out.loss += weight * factor(e, r, job.rows) * loss;
            }
            const double scale = weight * factor(e, r, job.rows);
            if (!e.losses.empty())
                e.losses[r] = float((e.beta_loss == 0 ? 0 : e.beta_loss * e.losses[r]) + weight * loss);
            if (job.student.dz.empty()) continue;
            G* dz = job.student.dz.row(r);
            for (index_t v = 0; v < job.student.z.cols; ++v) {
                const double old = e.beta == 0 ? 0 : double(e.beta) * double(element<G>::load(dz[v]));
                dz[v] = element<G>::store(static_cast<arithmetic_t<G>>(old + scale * gradient[std::size_t(v)]));
            }
            if (job.student.pad == padding::zero)
                std::fill_n(dz + job.student.dz.cols, job.student.dz.padding, element<G>::store(0));
        }
        return out;
    }

    /// What the reduction multiplies row r's loss with.
    static double factor(const env& e, index_t r, index_t rows) {
        if (e.reduction == reduce::sum) return 1;
        if (e.reduction == reduce::constant) return 1 / e.normaliser;
        if (e.reduction == reduce::token_mean) {
            const double kept = e.normaliser > 0 ? e.normaliser : double(kept_in(e, 0, rows));
            return kept > 0 ? 1 / kept : 1;
        }
        double sequences = 0, own = 0;
        for (index_t s = 0; s + 1 < e.offsets.size; ++s) {
            const index_t kept = kept_in(e, e.offsets[s], e.offsets[s + 1]);
            sequences += kept > 0;
            if (e.offsets[s] <= r && r < e.offsets[s + 1]) own = double(kept);
        }
        if (e.normaliser > 0) sequences = e.normaliser;
        return 1 / std::max(sequences, 1.0) / (e.reduction == reduce::sequence_mean ? std::max(own, 1.0) : 1.0);
    }
    static index_t kept_in(const env& e, index_t begin, index_t end) {
        index_t n = 0;
        for (index_t r = begin; r < end; ++r) n += e.mask.kept(r);
        return n;
    }

    /// log softmax(x/T) of n entries, of which the least numbers are masks; false if one is NaN or +inf, or none has
    /// mass.
    template <class T>
    static bool log_softmax(const T* x, index_t n, double temperature, const double* given, double* lse,
                            std::vector<double>& out) {
        double top = detail::neg_inf<double>(), sum = 0;
        for (index_t v = 0; v < n; ++v) {
            const double s = double(element<T>::load(x[v]));
            if (detail::is_nan(s) || (detail::is_inf(s) && !detail::is_neg_inf(s))) return false;
            out.push_back(s <= -1e30 || (std::is_same_v<stored_as<T>, half> && s == -65504) ? detail::neg_inf<double>()
                                                                                            : s / temperature);
            if (!detail::is_neg_inf(out.back()) && (detail::is_neg_inf(top) || out.back() > top)) top = out.back();
        }
        if (detail::is_neg_inf(top)) return false;
        for (const double s : out) sum += detail::is_neg_inf(s) ? 0 : std::exp(s - top);
        *lse = given ? *given : top + std::log(sum);
        for (double& s : out) s = detail::is_neg_inf(s) ? -1e30 : s - *lse; // log 0, as programs see it
        return true;
    }

    /// L_r, its gradient (V) and what it adds to the diagnostics.
    template <class Z, class G, class Y, class Divergence>
    double row(const row_job<student::logits<Z, G>, teacher::dense<Y>, Divergence, space::host>& job, index_t r,
               std::vector<double>& gradient, diagnostics& d) {
        using number = scalar<double>;
        const env& e = job.env;
        const auto count = [r](index_t& n, index_t& first) { first = n++ == 0 ? r : first; };
        std::vector<double> lp, lq; // (V)
        double lse = 0, lse_q = 0;
        const double* given = e.given_lse.empty() ? nullptr : &e.given_lse[r];
        if (!log_softmax(job.student.z.row(r), job.vocab, job.student.temperature, given, &lse, lp) ||
            !log_softmax(job.teacher.y.row(r), job.vocab, job.teacher.temperature, nullptr, &lse_q, lq) ||
            (given && !detail::is_finite(*given))) {
            count(d.bad_rows, d.first_bad_row);
            return 0;
        }
        if (!e.lse.empty()) e.lse[r] = lse;
        bool floor_q = false, floor_p = false; // does the value hold p log 0, or q log 0?
        for (std::size_t v = 0; v < lp.size(); ++v) {
            floor_q |= lq[v] == -1e30 && lp[v] != -1e30 && detail::infinite_where_teacher_zero(job.estimator);
            floor_p |= lp[v] == -1e30 && lq[v] != -1e30 && detail::infinite_where_student_zero(job.estimator);
        }
        if (floor_q || floor_p) count(d.infinite_rows, d.first_infinite_row);
        if ((floor_q || floor_p) && e.on_infinite.act != infinite::action::floor) return 0;

        row_constants<number> row{number(1), number(1), number(0), number(1)};
        if constexpr (reads_overlap<Divergence>) {
            double top = -1e30, overlap = 0; // of logarithms, whatever their size
            for (std::size_t v = 0; v < lp.size(); ++v) top = std::max(top, std::min(lp[v], lq[v]));
            for (std::size_t v = 0; v < lp.size(); ++v) overlap += std::exp(std::min(lp[v], lq[v]) - top);
            const bool none = top == -1e30, disjoint = none && detail::infinite_where_disjoint(job.estimator);
            if (disjoint) count(d.infinite_rows, d.first_infinite_row);
            if (disjoint && e.on_infinite.act != infinite::action::floor) return 0;
            row.log_overlap = number(none ? e.on_infinite.floor_at : std::min(0.0, top + std::log(overlap)));
            row.overlap_top = number(none ? e.on_infinite.floor_at : top);
            row.inv_overlap = number(none ? 1 : 1 / overlap);
            row.far_apart = true;
        }
        const auto entry = [&](std::size_t v, bool raise_p) {
            const double log_p = raise_p ? std::max(lp[v], e.on_infinite.floor_at) : lp[v];
            const double log_q = floor_q ? std::max(lq[v], e.on_infinite.floor_at) : lq[v];
            const double p =
                raise_p && lq[v] != -1e30 ? log_p : lp[v]; // p itself, too: not every program has a logarithm
            return dense_entry<number>{number(std::exp(p)), number(std::exp(lq[v])), number(log_p - log_q),
                                       number(log_p), number(log_q)};
        };
        double loss = 0, sum_c = 0;
        for (std::size_t v = 0; v < lp.size(); ++v) {
            loss += job.estimator.term(row, entry(v, floor_p)).v;
            sum_c += job.estimator.c(row, entry(v, false)).v;
        }
        d.kept_loss += loss;
        if (e.loss_clamp > 0 && std::abs(loss) > e.loss_clamp) {
            ++d.clamped_rows;
            return std::copysign(e.loss_clamp, loss);
        }
        for (std::size_t v = 0; v < lp.size(); ++v)
            gradient[v] = (job.estimator.c(row, entry(v, false)).v - std::exp(lp[v]) * sum_c) / job.student.temperature;
        return loss;
    }
};

} // namespace opd::test
