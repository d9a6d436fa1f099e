// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Passes over sequences: what a token's surrogate or advantage takes from the others of its answer.
//
//   gspo_fit          s = exp(mean_t log rho_t) of each sequence, and its mean advantage, over any cut into
//                     micro-batches and ranks: add, merge, then log_ratios and mean_advantages fill env.frozen for the
//                     surrogate `gspo` (GSPO, Zheng et al. 2025)
//   credit            A_t ← Σ_l (γλ)^l A_{t+l} within a sequence: return-to-go of the token advantages
//   group_relative    (R - mean of its group) / (std + ε): GRPO's advantage of an answer, for the cache's column
//                     `advantage`
//   prefix_staleness  log Π p/mu of the tokens before each row: how far the visited prefixes are from the student's
//                     own, which no estimator of a row corrects, dense ones included; with the effective sample size of
//                     that ratio
//   whitening_fit     (A - mean) / (std + ε) over the whole batch, of an advantage from outside; the teacher's term is
//                     whitened only if it is handed over
//
// Numbers are double and on the host. Cutting a batch changes their results by rounding only.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "opd/batch.hpp"
#include "opd/checks/shapes.hpp"
#include "opd/config.hpp"
#include "opd/error.hpp"
#include "opd/estimators/token_table.hpp"
#include "opd/view.hpp"

namespace opd {

/// Sums of log rho and of A by sequence: for the surrogate `gspo`, whose ratio is s = exp(mean_t log rho_t) (Zheng et
/// al. 2025).
struct gspo_fit {
    struct sums {
        double log_ratio = 0, advantage = 0, tokens = 0;
    };
    std::vector<sums> of = {}; ///< by sequence: add those of other ranks with merge

    /// A micro-batch: log p (N,m) by token_logp of its cache, that cache, its mask; `sequence` (N): each row's,
    /// counted over the whole batch.
    template <class Cache, class Advantage = advantage::theta>
    void add(matrix_view<const double> log_p, const Cache& cache, std::span<const index_t> sequence,
             row_mask<> mask = {}, const Advantage& advantage = {}) {
        check(sequence, log_p.rows);
        for_each_token(log_p, cache, mask, [&](index_t r, index_t, const sampled_entry& x) {
            const auto s = static_cast<std::size_t>(sequence[static_cast<std::size_t>(r)]);
            if (s >= of.size()) of.resize(s + 1);
            of[s].log_ratio += detail::within_80(x.log_p - x.log_mu), of[s].advantage += advantage(x),
                of[s].tokens += 1;
        });
    }
    void merge(const gspo_fit& other) {
        if (of.size() < other.of.size()) of.resize(other.of.size());
        for (std::size_t s = 0; s < other.of.size(); ++s) {
            of[s].log_ratio += other.of[s].log_ratio, of[s].advantage += other.of[s].advantage;
            of[s].tokens += other.of[s].tokens;
        }
    }
    /// env.frozen.sequence_log_ratio (N) of a micro-batch: log s; 0 where the sequence has no token.
    void log_ratios(std::span<const index_t> sequence, vector_view<double> out) const {
        check(sequence, out.size);
        for (index_t r = 0; r < out.size; ++r) out[r] = mean(sequence, r, &sums::log_ratio);
    }
    /// env.frozen.advantage (N,m): the sequence's mean advantage. Left out, the surrogate is the token form.
    void mean_advantages(std::span<const index_t> sequence, matrix_view<double> out) const {
        check(sequence, out.rows);
        for (index_t r = 0; r < out.rows; ++r)
            for (index_t j = 0; j < out.cols; ++j) out(r, j) = mean(sequence, r, &sums::advantage);
    }

private:
    static void check(std::span<const index_t> sequence, index_t rows) {
        if (static_cast<index_t>(sequence.size()) != rows)
            throw invalid_input("sequence",
                                "has " + std::to_string(sequence.size()) + " rows, not " + std::to_string(rows));
        for (std::size_t r = 0; r < sequence.size(); ++r)
            if (sequence[r] < 0) throw invalid_input("sequence", "is negative", static_cast<index_t>(r));
    }
    double mean(std::span<const index_t> sequence, index_t r, double sums::*which) const {
        const auto s = static_cast<std::size_t>(sequence[static_cast<std::size_t>(r)]);
        return s < of.size() && of[s].tokens > 0 ? of[s].*which / of[s].tokens : 0;
    }
};

namespace detail {
inline void check_sequences(const row_offsets<>& offsets, index_t rows) {
    for (index_t s = 0; s + 1 < offsets.size; ++s)
        if (offsets[s] < 0 || offsets[s + 1] < offsets[s] || offsets[s + 1] > rows)
            throw invalid_input("offsets", "sequence " + std::to_string(s) + ": rows " + std::to_string(offsets[s]) +
                                               " to " + std::to_string(offsets[s + 1]) + " of " + std::to_string(rows));
}
} // namespace detail

/// In place: A (N,m) of the rows of each sequence, offsets (S+1). Column by column; γλ in [0, 1]. Rows that the mask
/// (N) leaves out, a prompt's or a tool's tokens, are no step of the policy: l counts the kept rows alone, and what
/// the others hold is neither read nor written.
inline void credit(matrix_view<double> advantage, row_offsets<> offsets, double gamma_lambda, row_mask<> mask = {}) {
    if (!detail::is_finite(gamma_lambda) || !(gamma_lambda >= 0 && gamma_lambda <= 1))
        throw invalid_input("gamma_lambda", "must lie in [0, 1]");
    detail::check_vector("mask", mask, advantage.rows);
    detail::check_sequences(offsets, advantage.rows);
    for (index_t s = 0; s + 1 < offsets.size; ++s) {
        index_t next = -1; // the kept row behind r
        for (index_t r = offsets[s + 1] - 1; r >= offsets[s]; --r) {
            if (!mask.kept(r)) continue;
            for (index_t j = 0; next >= 0 && j < advantage.cols; ++j)
                advantage(r, j) += gamma_lambda * advantage(next, j);
            next = r;
        }
    }
}

/// In place: rewards (S) of answers, `group` answers to each prompt, one after the other. `epsilon` beside the
/// standard deviation (over group - 1); 0: the mean alone is subtracted (Dr. GRPO).
inline void group_relative(std::span<double> reward, index_t group, double epsilon = 1e-6) {
    if (group < 1 || static_cast<index_t>(reward.size()) % group != 0)
        throw invalid_input("group",
                            std::to_string(reward.size()) + " rewards are no groups of " + std::to_string(group));
    if (!detail::is_finite(epsilon) || !(epsilon >= 0)) throw invalid_input("epsilon", "must be finite and at least 0");
    for (std::size_t i = 0; i < reward.size(); ++i)
        if (!detail::is_finite(reward[i])) throw invalid_input("reward", "is not finite", static_cast<index_t>(i));
    for (std::size_t begin = 0; begin < reward.size(); begin += static_cast<std::size_t>(group)) {
        const std::span<double> one = reward.subspan(begin, static_cast<std::size_t>(group));
        double mean = 0, squares = 0, rounded = 0;
        for (const double r : one) mean += r / double(group);
        for (const double r : one)
            rounded += (r - mean) / double(group); // else equal rewards were none apart by an ulp
        mean = std::ranges::all_of(one, [&](double r) { return r == one[0]; }) ? one[0] : mean + rounded;
        for (double& r : one) r -= mean, squares += r * r;
        if (epsilon == 0) continue;
        const double scale = 1 / (std::sqrt(group > 1 ? squares / double(group - 1) : 0) + epsilon);
        for (double& r : one) r *= scale;
    }
}

/// How far visited prefixes are from the student's own: Σ log p/mu over the tokens before each row, in nats.
struct prefix_staleness {
    double rows = 0;                     ///< kept rows that were added
    double sum = 0, least = 0, most = 0; ///< of the rows' prefix log-ratios, nats
    double ratios = 0, squares = 0;      ///< Σ w, Σ w² with w = exp of it, cut at e^±80

    /// A batch, one drawn token a row: log p of it under the student now and log mu as drawn (N), offsets (S+1), mask
    /// (N). Of a row that the mask leaves out neither counts, as of a prompt. After a token with log p = -inf the
    /// ratio is e^-80; one with log mu = -inf too says nothing. Throws invalid_input for sizes that differ and
    /// offsets that lead out of the rows.
    template <class P, class M>
    void add(vector_view<P> log_p, vector_view<M> log_mu, row_offsets<> offsets, row_mask<> mask = {}) {
        detail::check_vector("log_p", log_p, -1);
        detail::check_vector("log_mu", log_mu, log_p.size);
        detail::check_vector("mask", mask, log_p.size);
        detail::check_sequences(offsets, log_p.size);
        for (index_t s = 0; s + 1 < offsets.size; ++s) {
            double before = 0;
            for (index_t r = offsets[s]; r < offsets[s + 1]; ++r) {
                if (!mask.kept(r)) continue;
                const double x = detail::within_80(before), w = std::exp(x);
                ++rows, sum += x, ratios += w, squares += w * w;
                least = x < least ? x : least, most = x > most ? x : most;
                const double ratio = double(log_p[r]) - double(log_mu[r]);
                before += detail::is_nan(ratio) ? 0 : detail::within_80(ratio);
            }
        }
    }
    void merge(const prefix_staleness& o) {
        rows += o.rows, sum += o.sum, ratios += o.ratios, squares += o.squares;
        least = o.least < least ? o.least : least, most = o.most > most ? o.most : most;
    }
    /// Mean prefix log-ratio; 0 of no rows.
    double log_ratio() const { return rows > 0 ? sum / rows : 0; }
    /// (Σ w)² / Σ w² over the rows, in (0, 1]: 1 where the prefixes are the student's own; 0 of no rows.
    double effective_share() const { return rows > 0 ? ratios * ratios / squares / rows : 0; }
};

/// (A - mean) / (std + ε) over all that was added, ranks and micro-batches alike; std has count - 1. Of one number or
/// none: std is 0.
struct whitening_fit {
    double epsilon = 1e-8;                   ///< added to the standard deviation
    double count = 0, mean = 0, squares = 0; ///< of what was added; squares about the mean

    /// A micro-batch of advantages (N,m) or (N,1); rows that the mask leaves out do not count.
    template <class T>
    void add(matrix_view<T> advantage, row_mask<> mask = {}) {
        if (!detail::is_finite(epsilon) || !(epsilon > 0))
            throw invalid_input("whitening_fit.epsilon", "must be positive and finite");
        detail::check_vector("mask", mask, advantage.rows);
        for (index_t r = 0; r < advantage.rows; ++r)
            for (index_t j = 0; mask.kept(r) && j < advantage.cols; ++j)
                if (!detail::is_finite(double(advantage(r, j))))
                    throw invalid_input("advantage", "is not finite in column " + std::to_string(j), r);
        for (index_t r = 0; r < advantage.rows; ++r) {
            if (!mask.kept(r)) continue;
            for (index_t j = 0; j < advantage.cols; ++j) {
                const double x = double(advantage(r, j)), off = x - mean;
                mean += off / ++count, squares += off * (x - mean);
            }
        }
    }
    void merge(const whitening_fit& other) { // Chan et al. 1979
        if (other.count == 0) return;
        const double all = count + other.count, off = other.mean - mean;
        squares += other.squares + off * off * count * other.count / all;
        mean += off * other.count / all, count = all;
    }
    /// (A - mean) / (std + ε) of one number, std over count - 1.
    double operator()(double a) const {
        return (a - mean) / (std::sqrt(count > 1 ? squares / (count - 1) : 0) + epsilon);
    }
    template <class T, class U>
    void apply(matrix_view<T> advantage, matrix_view<U> out) const {
        detail::check_matrix("out", out, advantage.rows, advantage.cols);
        for (index_t r = 0; r < out.rows; ++r)
            for (index_t j = 0; j < out.cols; ++j) out(r, j) = static_cast<U>((*this)(double(advantage(r, j))));
    }
};

} // namespace opd
